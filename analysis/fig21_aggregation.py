"""The sum over each token's rows, weighted by the scores: bandwidth, ours beside eager torch.

Mirrors Fig 21 of the paper. Bytes are those of the model, every row read once and every token written.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.figure import Figure

from analysis import alone, figures

SWEEP = "aggregation"
TITLE = "Bandwidth of the aggregation"
OPS = {"aggregate": "O = sum of a token's rows"}
_QUANTITY = "gbps"
_SAID = ("2.92 times ScatterMoE's torch.bmm, 1.05 times MoMoE's torch.sum, 0.98 of a sum over contiguous rows.",)


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """As `alone.select`."""
    return alone.select(rows, tuple(OPS))


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """A panel per op, a group of bars per shape."""
    alone.draw(figure, data, TITLE, _QUANTITY, OPS, _SAID)


def table(data: pd.DataFrame) -> pd.DataFrame:
    """As `alone.table`."""
    return alone.table(data, _QUANTITY)


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
