"""Grouped GEMMs alone, rows in expert order and nothing fused: ours beside torch's.

Mirrors Fig 19 of the paper (up- and down-projection of the forward, twelve shapes; beside DeepGEMM and cuBLAS).
"""

from __future__ import annotations

import sys
from functools import partial

from analysis import alone, figures

SWEEP = "grouped_gemm"
TITLE = "Grouped GEMMs on contiguous rows"
OPS = {"up_proj": "up-projection, H alone", "down_proj": "down-projection"}
_QUANTITY = "tflops"
_SAID = ("SonicMoE over DeepGEMM +2.7% up, +10.0% down on average.",)

select = partial(alone.select, ops=tuple(OPS))
table = partial(alone.table, quantity=_QUANTITY)
draw = partial(alone.draw, title=TITLE, quantity=_QUANTITY, ops=OPS, said=_SAID)


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
