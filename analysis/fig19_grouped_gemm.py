"""Grouped GEMMs alone, rows in expert order and nothing fused: ours beside torch's.

Mirrors Fig 19 of the paper (up- and down-projection of the forward, twelve shapes; beside DeepGEMM and cuBLAS).
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.figure import Figure

from analysis import alone, figures

SWEEP = "grouped_gemm"
TITLE = "Grouped GEMMs on contiguous rows"
OPS = {"up_proj": "up-projection, H alone", "down_proj": "down-projection"}
_QUANTITY = "tflops"
_SAID = ("SonicMoE over DeepGEMM +2.7% up, +10.0% down on average.",)


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
