"""How the rows of the down-projection meet again: gathered by the sum, scattered by the GEMM, or added atomically.

Mirrors Fig 22 of the paper: the down-projection with the aggregation behind it, and the GEMM alone. Scattered and
atomic results are written by the Triton kernels, whatever the family.
"""

from __future__ import annotations

import sys
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from analysis import alone, figures

SWEEP = "combine"
TITLE = "Down-projection and aggregation, three ways"
OPS = {"combine": "down-projection and aggregation", "down_proj": "down-projection alone"}
_QUANTITY = "tflops"
_SAID = ("gather-and-sum over scatter-and-sum: GEMM alone +20.1%, with the aggregation +17% on average.",)

select = partial(alone.select, ops=tuple(OPS), across=True)  # a GEMM looks like the way that it is part of
table = partial(alone.table, quantity=_QUANTITY)


def _own(data: pd.DataFrame) -> list[str]:
    """Ours beside the paper's average, of the family whose two ways run the same kernels."""
    ways = ({"impl": "sonic", "family": "triton", "aggregate": way} for way in ("gather_sum", "scatter_sum"))
    gain = alone.means(data, "combine", *ways) - 1
    return [f"Here, Triton kernels: {gain:+.1%} with the aggregation."] if gain == gain else []


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """A panel per op, a group of bars per shape, and our averages below the paper's."""
    alone.draw(figure, data, TITLE, _QUANTITY, OPS, _SAID, _own(data))


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
