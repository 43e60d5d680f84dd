"""Grouped GEMMs alone, rows in expert order and nothing fused: ours beside other packages'.

Mirrors Fig 19 of the paper (up- and down-projection of the forward, twelve shapes; beside DeepGEMM and cuBLAS).

The bound gets equal experts, all others the routing of a router.
"""

from __future__ import annotations

import sys
from functools import partial

from analysis import alone, figures, paper

SWEEP = "grouped_gemm"
TITLE = "Grouped GEMMs on contiguous rows"
OPS = {"up_proj": "up-projection, H alone", "down_proj": "down-projection"}
_QUANTITY = "tflops"
_30B = ", ".join(f"+{line.value:g}% at n={line.n}" for line in paper.fig19().itertuples())
_SAID = (f"30B, down over DeepGEMM {_30B}.",)

select = partial(alone.select, ops=tuple(OPS))
table = partial(alone.table, quantity=_QUANTITY)
draw = partial(alone.draw, title=TITLE, quantity=_QUANTITY, ops=OPS, said=_SAID, gains=paper.KERNEL_GAINS["fig19"])


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
