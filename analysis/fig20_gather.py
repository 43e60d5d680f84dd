"""What a gather costs: inside the GEMM, as a kernel before it, and without one.

Mirrors Fig 20 of the paper: the up-projection gathers rows of X along M, dW1 along K. `given` rows lie in expert order
already; the FLOPs are the GEMM's in all three. A package has the ways that its kernels have.
"""

from __future__ import annotations

import sys
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from analysis import alone, figures, paper

SWEEP = "gather"
TITLE = "Grouped GEMMs with a fused, a separate and no gather"
OPS = {"up_proj": "up-projection: gather on M", "weight_grad_1": "dW1: gather on K"}
_QUANTITY = "tflops"
_SAID = ("the fused gather costs 6.3% on M and 8.5% on K, on average.",)

select = partial(alone.select, ops=tuple(OPS))
table = partial(alone.table, quantity=_QUANTITY)


def _own(data: pd.DataFrame) -> list[str]:
    """Ours beside the paper's averages."""
    notes = []
    for op, words in (("up_proj", "M"), ("weight_grad_1", "K")):
        given = {"impl": "sonic", "gather": "given"}
        fused, separate = (
            alone.means(data, op, given, {"impl": "sonic", "gather": way}) - 1 for way in ("fused", "separate")
        )
        if fused == fused:
            apart = f" and {separate:.1%} as a kernel" if separate == separate else ""
            notes.append(f"Here the gather on {words} costs {fused:.1%} fused{apart}.")
    return notes


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """A panel per op, a group of bars per shape, and our averages below the paper's."""
    alone.draw(figure, data, TITLE, _QUANTITY, OPS, _SAID, _own(data), paper.KERNEL_GAINS["fig20"], "gather")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
