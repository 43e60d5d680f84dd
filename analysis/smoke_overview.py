"""Every implementation that runs here agrees and runs: time and held memory over granularity and sparsity, tiny shapes.

The closing figure of `smoke`, the default sweep of a machine without a GPU; its times are a CPU's and say nothing about
a GPU. It mirrors no figure of the paper, but crosses the axes of Figs 1 and 16 with the tile size.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.figure import Figure

from analysis import figures, overview

SWEEP = "smoke"
TITLE = "Smoke sweep: time and held memory by implementation"


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """See `analysis.overview.select`."""
    return overview.select(rows)


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """See `analysis.overview.draw`."""
    overview.draw(figure, data, TITLE)


def table(data: pd.DataFrame) -> pd.DataFrame:
    """See `analysis.overview.table`."""
    return overview.table(data)


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
