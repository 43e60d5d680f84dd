"""Grouped GEMMs alone, rows in expert order and nothing fused: ours beside other packages'.

Mirrors Fig 19 of the paper (up- and down-projection of the forward, twelve shapes; beside DeepGEMM and cuBLAS).

The bound gets equal experts, all others the routing of a router.
"""

from __future__ import annotations

import sys
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from analysis import alone, figures, load, paper

SWEEP = "grouped_gemm"
TITLE = "Grouped GEMMs on contiguous rows"
OPS = {"up_proj": "up-projection, H alone", "down_proj": "down-projection"}
_QUANTITY = "tflops"
_30B = ", ".join(f"+{line.value:g}% at n={line.n}" for line in paper.fig19().itertuples())
_SAID = (f"30B, down over DeepGEMM {_30B}.",)

select = partial(alone.select, ops=tuple(OPS))
table = partial(alone.table, quantity=_QUANTITY)


def _own(data: pd.DataFrame) -> list[str]:
    """Our gains over DeepGEMM at the shapes of the paper's."""
    found = []
    for line in paper.fig19().itertuples():
        here = data[(data[list(load.SHAPE)] == [line.T, line.d, line.n, line.E, line.K]).all(axis=1)]
        gain = alone.means(here, "down_proj", {"impl": "sonic"}, {"impl": "deepgemm_pp"}) - 1
        found += [f"{gain:+.1%} at n={line.n}"] if gain == gain else []
    return [f"Here, down over DeepGEMM, 30B: {', '.join(found)}."] if found else []


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """Panels per op, a group of bars per shape, and our gains below the paper's."""
    alone.draw(figure, data, TITLE, _QUANTITY, OPS, _SAID, _own(data), paper.KERNEL_GAINS["fig19"])


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
