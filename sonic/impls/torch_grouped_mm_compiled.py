"""PyTorch's grouped matrix multiplication under `torch.compile(fullgraph=True)`, static shapes, default mode.

The functions of `torch_grouped_mm`, router included; Inductor fuses the gather, the activation and the weighted sum, and
chooses what to keep for the backward. On a CPU it is left out: compiling takes longer than the points that run there.
"""

from __future__ import annotations

import torch
import torch._dynamo.config

from sonic.impls import torch_grouped_mm
from sonic.record import Point

#: A worker meets many shapes, each a recompilation of the same function; past the limit torch would fall back to eager.
RECOMPILES = 1 << 16

_experts = torch.compile(torch_grouped_mm.experts, fullgraph=True, dynamic=False)
_layer = torch.compile(torch_grouped_mm.layer, fullgraph=True, dynamic=False)


class Impl(torch_grouped_mm.Impl):
    _experts = staticmethod(_experts)
    _layer = staticmethod(_layer)

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"device is {device.type!r}; compiled only for cuda, since compiling outlasts what runs on a CPU"
        return torch_grouped_mm.Impl.supports(point, device)

    def forward(self) -> torch.Tensor:
        limits = {"recompile_limit": RECOMPILES, "accumulated_recompile_limit": RECOMPILES}
        with torch._dynamo.config.patch(**limits):
            return super().forward()
