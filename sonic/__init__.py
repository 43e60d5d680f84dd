"""sonic: how fast, how small and why a Mixture-of-Experts layer is.

`MoE`, `moe`, `experts` and `experts_plan` come from `sonic.layer` on first use, so that importing a shape needs no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonic.layer import MoE, experts, experts_plan, moe

__all__ = ["MoE", "__version__", "experts", "experts_plan", "moe"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in ("MoE", "experts", "experts_plan", "moe"):
        from sonic import layer

        return getattr(layer, name)
    raise AttributeError(f"module 'sonic' has no attribute {name!r}")
