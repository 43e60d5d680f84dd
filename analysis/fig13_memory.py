"""Memory of a training step, shape by shape: what every implementation holds for the backward, and its peak.

Mirrors Fig 13 of the paper (twelve shapes from 1.4B to 120B). Left, what the forward keeps for the backward, the
layer's input with it and the weights without; the paper's H100 values, from whose bars the weights are taken off, stand
on it as hollow diamonds, and a black tick says what the matrices that the implementation declares to keep add up to.
Right, the highest of both passes, weights and the incoming gradient left out; the paper has no such number, because its
bars are the weights and what is held.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import common, figures, load, paper
from sonic.shapes import Shape

SWEEP = "memory"
ALSO = ("throughput",)
QUANTITY = "held_gib"
ANY_METHOD = True
TITLE = "Memory of a training step by shape and implementation"

#: What the adapters declare in `properties` (`kept`, `padding`), repeated because they import torch and figures do not;
#: a test holds it against them. Implementations without an entry declare nothing.
KEPT: dict[str, tuple[tuple[str, ...], int]] = {
    "sonic": (("H",), 1),
    "sonicmoe_official": (("H",), 1),
    "scattermoe": (("H", "A", "A", "Y"), 1),
    "scattermoe_style": (("H", "A", "Y"), 1),
    "momoe": ((), 1),
    "momoe_save_all": (("H", "Y"), 1),
    "momoe_style": ((), 1),
    "megablocks": (("Xe", "H", "Y"), 1),
    "megablocks_style": (("Xe", "H", "Y"), 128),
    "megatron": (("Xe", "H", "A"), 1),
    "deepgemm_pt": (("Xe", "H"), 128),
    "deepgemm_pp": (("Xe", "H"), 128),
    "liger": (("H",), 1),
    "moe_ops": (("Xe", "H", "A", "A", "Y"), 1),
    "torch_grouped_mm": (("Xe", "H", "A", "A", "Y"), 1),
    "torch_loop": (("Xe", "H", "A", "A", "Y", "Y"), 1),
    "standard_style": (("Xe", "H", "A", "Y"), 1),
}

_SIZES = list(load.SHAPE)
_COLUMNS = {"held_gib": "held for the backward", "peak_gib": "peak"}
_TICK_STYLE = {"color": "black", "linewidth": 1.3}


def predicted_gib(impl: str, shape: Shape, R: int | None = None, dtype: str = "bf16") -> float:
    """GiB of X and of the matrices in `KEPT` for R rows (default T K), NaN where nothing is declared; where rows are
    padded to a multiple in memory, by half of it per expert."""
    if impl not in KEPT or dtype not in common.ITEMSIZE:
        return float("nan")
    kept, padding = KEPT[impl]
    rows = (shape.R if R is None else R) + (shape.E * padding / 2 if padding > 1 else 0)
    width = {"Xe": shape.d, "H": 2 * shape.n, "A": shape.n, "Y": shape.d}
    return common.ITEMSIZE[dtype] * (shape.T * shape.d + rows * sum(width[name] for name in kept)) / paper.GIB


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Whole layers, forward with backward, seeds pooled; `panel` is the model size, `predicted_gib` the formula's."""
    rows = rows[(rows.op == "layer") & (rows["mode"] == "fwd_bwd")]
    if not rows.held_gib.notna().any():
        raise load.NothingLeft("no held bytes of a whole layer were measured")
    data = common.label_series(load.pool_seeds(load.one_series(common.once_per_point(rows, SWEEP), any_method=True)))
    predicted = [
        predicted_gib(line.impl, Shape(*line[_SIZES]), None if pd.isna(line.R) else int(line.R), line["dtype"])
        for _, line in data.iterrows()
    ]
    panel = [common.size_panel(*sizes) for sizes in data[_SIZES].itertuples(index=False)]
    return data.assign(panel=panel, predicted_gib=predicted)


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One row per model size, a column for what is held and (on a GPU) one for the peak; fine experts first."""
    styles = common.bar_styles(data, "held_gib")
    columns = [name for name in _COLUMNS if data[name].notna().any()]
    sizes = common.size_panels(data)
    most = data.groupby("panel").n.nunique().max()
    width = max(3.1, 0.105 * most * (len(styles) + 1.2))
    sheet = common.panels(figure, len(sizes), len(columns), size=(width, 1.75), share_x=False, gap=(0.45, 0.62))
    marked = ticked = False
    for row, size in enumerate(sizes):
        part = data[data.panel == size]
        held = part.assign(paper=_paper_held(part))
        shapes = part.drop_duplicates(_SIZES).sort_values("n")
        positions = list(shapes.n)
        for column, name in enumerate(columns):
            ax = sheet.axes[row, column]
            lines = held if name == "held_gib" else part
            places = common.draw_bars(ax, lines, styles, "n", name, positions, part[name].max(), ".3g")
            if name == "held_gib":
                marked |= common.draw_paper_marks(ax, held, "n", places)
                ticked |= _draw_predicted(ax, part, places, 0.86 / len(styles))
            common.value_axis(ax, "GiB" if column == 0 else "")
            ax.set_xticks(range(len(positions)), [f"{line.n}\n{line.E}/{line.K}" for line in shapes.itertuples()])
            ax.set_xlabel("expert size n  (E/K below)" if row == len(sizes) - 1 else "")
            ax.set_title(f"{size.split(' nE')[0] if ':' in size else size}, {_COLUMNS[name]}")
    handles: list = common.bar_handles(data, "held_gib")
    if ticked:
        handles.append(
            Line2D([], [], label="declared to be kept", marker="_", markersize=8, linestyle="none", color="black")
        )
    if marked:
        handles.append(common.paper_handle("paper, H100 (Figs 1, 13; less weights and output)", line=False))
    notes = [*_saving_notes(data), *common.missing_notes(data, "held_gib")]
    sheet.finish(TITLE, _provenance(data), handles, notes)


def _provenance(data: pd.DataFrame) -> str:
    """`common.provenance` without the words on clocks: this figure has no times."""
    measured = data[data.held_gib.notna()]
    commits = ", ".join(sorted({str(commit)[:10] for commit in measured.commit}))
    words = [", ".join(load.gpus(data)), ", ".join(sorted(data.dtype.unique())), "op layer", "forward + backward"]
    return " \N{MIDDLE DOT} ".join([*words, "bytes requested, without weights", f"commit {commits}"])


def _paper_held(table: pd.DataFrame) -> pd.Series:
    """The paper's held GiB of the same method for every line of `table`, NaN where it has none."""
    named = table.assign(impl=table.impl.replace(paper.AUTHORS))
    return common.lookup(named, paper.peak_memory(), [*_SIZES, "impl"], "held_gib")


def _draw_predicted(ax: Axes, part: pd.DataFrame, places: dict[tuple[str, object], float], width: float) -> bool:
    shown = part[part.predicted_gib.notna() & part.held_gib.notna()]
    for line in shown.itertuples():
        at = places[line.series, line.n]
        ax.hlines(line.predicted_gib, at - 0.42 * width, at + 0.42 * width, zorder=4.5, **_TICK_STYLE)
    return len(shown) > 0


def _saving_notes(data: pd.DataFrame) -> list[str]:
    """How far measured bytes are from the declared ones at most, and where."""
    found = data[data.held_gib.notna() & data.predicted_gib.notna()]
    if found.empty:
        return []
    off = common.ratio(found.held_gib, found.predicted_gib) - 1
    worst = found.loc[off.abs().idxmax()]
    return [
        f"Held over declared is furthest from 1 for {worst.series} at {common.shape_name(*worst[_SIZES])}: "
        f"{off[worst.name] + 1:.2f} (indices and scores are not declared)."
    ]


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per shape and series GiB held, predicted from what is declared, and the paper's, with their ratios; the peaks.

    `sonic_held` and `sonic_peak` are the bytes of `sonic` (its first series at the shape) over those of this series,
    `paper_sonic_held` the paper's for the same two methods.
    """
    ran = data.groupby("series").held_gib.transform("count") > 0
    out = data[ran].copy()
    out["paper_held_gib"] = _paper_held(out)
    out["held_vs_predicted"] = common.ratio(out.held_gib, out.predicted_gib)
    out["held_vs_paper"] = common.ratio(out.held_gib, out.paper_held_gib)
    for name in ("held", "peak"):
        ours = out[(out.impl == "sonic") & out[f"{name}_gib"].notna()].sort_values("variant")
        out[f"sonic_{name}"] = common.ratio(common.lookup(out, ours, _SIZES, f"{name}_gib"), out[f"{name}_gib"])
    theirs = paper.peak_memory().query("impl == 'sonic'")
    out["paper_sonic_held"] = common.ratio(common.lookup(out, theirs, _SIZES, "held_gib"), out.paper_held_gib)
    out = out.assign(
        _panel=out.panel.map(common.size_panels(data).index), _rank=out.impl.map(common.rank),
        size=out.panel.str.split(":").str[0],
    ).sort_values(["_panel", "n", "_rank", "variant"])  # fmt: skip
    columns = [
        "size", "n", "E", "K", "series", "status", "held_gib", "predicted_gib", "held_vs_predicted", "paper_held_gib",
        "held_vs_paper", "sonic_held", "paper_sonic_held", "peak_fwd_gib", "peak_bwd_gib", "peak_gib", "sonic_peak",
    ]  # fmt: skip
    out = out[columns].reset_index(drop=True)
    return out.replace([np.inf, -np.inf], np.nan).dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
