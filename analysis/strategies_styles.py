"""What other implementations do between their GEMMs, run on our kernels: time and memory of each strategy.

The twins (`*_style`) gather, fuse, keep and pad as ScatterMoE, MoMoE, MegaBlocks and plain PyTorch do, but run the
GEMMs of `sonic`, all of one family: what a bar has beyond that of `sonic` is what the strategy costs, not the package.
Experts alone (`op=experts`); GiB are what the forward keeps for the backward, X with it and the weights without. Below
each bar stands its value over that of `sonic`. The paper compares packages and no such twins, so nothing of it stands
beside.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.figure import Figure

from analysis import common, figures, load

SWEEP = "strategies"
TITLE = "Time and held memory of other implementations' strategies on equal kernels"

_SIZES = list(load.SHAPE)
#: Panels of a shape: pass, column, words, unit. Memory is that of a training step.
_PANELS = {
    "fwd": ("fwd", "ms", "forward", "ms"),
    "fwd_bwd": ("fwd_bwd", "ms", "forward + backward", "ms"),
    "held": (None, "held_gib", "held for the backward", "GiB"),
}
_MODES = ("fwd", "fwd_bwd")
_OVER = {"ms": "over_sonic", "held_gib": "held_over_sonic"}


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Given experts in both passes, seeds pooled, of one family of kernels: the first that both `sonic` and a twin were
    measured with, else the first measured. `left_out` counts the measured rows of other families.

    `over_sonic` and `held_over_sonic` are ms and GiB over those of the first series of `sonic` at that shape and pass,
    the times on the same card; NaN where one of them is missing.
    """
    rows = load.one_series(rows[(rows.op == "experts") & rows["mode"].isin(_MODES)])
    kept = rows.family.isin((_family(rows), "auto"))
    data = common.label_series(load.pool_seeds(rows[kept]))
    data = data.assign(left_out=int(rows[~kept].ms.notna().sum()), card=data.card.fillna("untold"), place="")
    ours = data[data.impl == load.OURS].sort_values("variant", kind="stable")
    by = [*_SIZES, "mode"]
    time = common.lookup(data, ours[ours.ms.notna()], ["card", *by], "ms")
    held = common.lookup(data, ours[ours.held_gib.notna()], by, "held_gib")
    return data.assign(over_sonic=common.ratio(data.ms, time), held_over_sonic=common.ratio(data.held_gib, held))


def _family(rows: pd.DataFrame) -> str:
    measured = rows[rows.ms.notna()]
    if measured.empty:
        raise load.NothingLeft("no strategy was measured")
    ours, twins = (set(measured[mine].family) for mine in (measured.impl == load.OURS, measured.impl != load.OURS))
    wanted = (ours & twins) or ours or twins
    return min(wanted, key=lambda name: (load.FAMILIES.index(name) if name in load.FAMILIES else 9, name))


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One row per shape; a column per pass and one for memory."""
    shapes, styles = common.shapes_in_order(data), common.bar_styles(data, "ms")
    held = common.held_lines(data)
    lines = {name: held if mode is None else data[data["mode"] == mode] for name, (mode, *_) in _PANELS.items()}
    names = [name for name, (_, column, *_) in _PANELS.items() if lines[name][column].notna().any()]
    width = max(2.5, 0.4 * len(styles))
    sheet = common.panels(figure, len(shapes), len(names), size=(width, 1.8), share_x=False, gap=(0.6, 0.75))
    for row, sizes in enumerate(shapes):
        for number, name in enumerate(names):
            _, column, words, unit = _PANELS[name]
            ax = sheet.axes[row, number]
            here = lines[name][(lines[name][_SIZES] == list(sizes)).all(axis=1)]
            places = common.draw_bars(ax, here, styles, "place", column, [""], here[column].max(), ".3g")
            over = here.set_index("series")[_OVER[column]].to_dict()
            ticks = [over.get(series, float("nan")) for series, _ in places]
            ax.set_xticks(list(places.values()), ["" if pd.isna(value) else f"{value:.2f}" for value in ticks])
            common.value_axis(ax, unit + (common.time_note(data) if column == "ms" and number == 0 else ""))
            ax.set_title(f"{common.shape_name(*sizes)}, {words}")
            ax.set_xlabel(f"below: {unit} over that of {load.OURS}", fontsize=6.5)
    notes = [*_equal_notes(data), *_over_notes(data), *common.one_card_notes(data), *common.notes(data)]
    sheet.finish(TITLE, common.provenance(data), common.bar_handles(data, "ms"), notes)


def _equal_notes(data: pd.DataFrame) -> list[str]:
    families = sorted(data[data.ms.notna()].family.unique())
    words = f"All run the kernels of one family ({', '.join(families)}): the GEMMs are equal, the strategy differs."
    left = int(data.left_out.iloc[0])
    return [f"{words} {left} rows of other families are left out." if left else words]


def _over_notes(data: pd.DataFrame) -> list[str]:
    """Geometric means over the shapes, a line per twin."""
    notes = []
    held = common.held_lines(data)
    for series, group in common.series_of(data[data.impl != load.OURS]):
        parts = []
        for mode, _, words, _ in (_PANELS[mode] for mode in _MODES):
            found = group[group["mode"] == mode].over_sonic.dropna()
            parts += [f"{words} {common.geometric_mean(found):.2f}"] if len(found) else []
        memory = held[held.series == series].held_over_sonic.dropna()
        parts += [f"held GiB {common.geometric_mean(memory):.2f}"] if len(memory) else []
        if parts:
            shapes = len(group[group[["over_sonic", "held_over_sonic"]].notna().any(axis=1)].drop_duplicates(_SIZES))
            mean = f"geometric mean of {shapes} shapes" if shapes > 1 else "one shape"
            notes.append(f"{series} over {load.OURS}: {', '.join(parts)} ({mean}).")
    return notes or [f"No point has both {load.OURS} and a strategy measured, so there is no ratio."]


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per shape, pass and series: ms, GiB held, both over those of `sonic`, peak GiB, kernels launched, worst error."""
    out = data[data.groupby("series").ms.transform("count") > 0]
    shapes = common.shapes_in_order(data)
    out = out.assign(
        _shape=[shapes.index(sizes) for sizes in out[_SIZES].itertuples(index=False, name=None)],
        _mode=out["mode"].map(_MODES.index), _rank=out.impl.map(common.rank),
    ).sort_values(["_shape", "_mode", "_rank", "variant"])  # fmt: skip
    columns = [
        *_SIZES, "mode", "series", "status", "ms", "tflops", "over_sonic", "held_gib", "held_over_sonic", "peak_gib",
        "launches", "padding", "worst_error",
    ]  # fmt: skip
    return out[columns].reset_index(drop=True).dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
