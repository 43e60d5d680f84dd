"""Small and large model, coarse and fine experts: who is how fast and holds how much, in a few minutes.

The closing figure of `quick`, the default sweep of a machine with a GPU: four corners of the shapes of Figs 13 and 14
of the paper.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.figure import Figure

from analysis import figures, overview

SWEEP = "quick"
TITLE = "Quick sweep: time and held memory by implementation"


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
