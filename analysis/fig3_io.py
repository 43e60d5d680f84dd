"""Bytes to and from memory against granularity: finer experts move more at equal work, the fused layer least.

Mirrors Fig 3 of the paper, whose values were not published as numbers. Lines are the model (`analysis.traffic`) at the
shapes that have rows, of `sonic` a band between every gathered row counted once and at every use. Filled marks are
DRAM bytes read and written by the card's counters (Nsight Compute, caches emptied before each kernel), where a row has
them; they are never filled in from the model.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import common, figures, load, traffic
from sonic import derive
from sonic.shapes import Shape

SWEEP = "io"
ALSO = ("granularity",)
ANY_METHOD = True
TITLE = "Bytes to and from memory against granularity"

_MODES = {"fwd": "forward", "fwd_bwd": "forward + backward"}
_SIZES = list(load.SHAPE)
#: Implementation -> the method of the model that it is.
METHOD = {
    "sonic": "sonic", "sonicmoe_official": "sonic", "scattermoe": "scattermoe", "momoe_save_all": "momoe",
    "torch_grouped_mm": "standard", "torch_loop": "standard",
}  # fmt: skip
_NAMES = {"sonic": "sonic", "scattermoe": "scattermoe", "momoe": "momoe_save_all", "standard": "torch_grouped_mm"}


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Whole layers in both modes, seeds pooled; `panel` is the model size, `dram_gib` what the counters say."""
    rows = rows[(rows.op == "layer") & rows["mode"].isin(tuple(_MODES))]
    if rows.empty:
        raise load.NothingLeft("no whole layer was measured")
    # `SWEEP` has the counters
    data = common.label_series(load.pool_seeds(load.one_series(common.once_per_point(rows, SWEEP), any_method=True)))
    panel = [common.size_panel(*sizes) for sizes in data[_SIZES].itertuples(index=False)]
    return data.assign(panel=panel, dram_gib=data.dram_bytes / derive.GIB)


def modelled(data: pd.DataFrame) -> pd.DataFrame:
    """The model at every shape of the rows: a line per shape, mode and method, GiB at every use and once."""
    width = common.ITEMSIZE[data["dtype"].iloc[0]]
    lines = []
    for sizes in common.shapes_in_order(data):
        shape = Shape(*sizes)
        for mode in _MODES:
            for method in traffic.MODEL:
                every, once = (traffic.total(method, mode, shape, width, once) / derive.GIB for once in (False, True))
                given = dict(zip(_SIZES, sizes, strict=True)) | {"G": shape.G, "panel": common.size_panel(*sizes)}
                lines.append(given | {"mode": mode, "method": method, "gib": every, "gib_once": once})
    return pd.DataFrame(lines)


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One column per model size, forward above both passes."""
    model, sizes = modelled(data), common.size_panels(data)
    unit_bytes, unit = common.byte_unit(model.gib.max() * derive.GIB)
    scale = derive.GIB / unit_bytes
    model = model.assign(gib=model.gib * scale, gib_once=model.gib_once * scale)
    sheet = common.panels(figure, len(_MODES), len(sizes))
    for column, size in enumerate(sizes):
        for row, (mode, words) in enumerate(_MODES.items()):
            ax = sheet.axes[row, column]
            _draw_model(ax, model[(model.panel == size) & (model["mode"] == mode)])
            here = data[(data.panel == size) & (data["mode"] == mode)]
            _draw_counted(ax, here.assign(dram_gib=here.dram_gib * scale))
            common.size_axis(ax, set(model[model.panel == size].G), "G = d/n" if row else "")
            common.value_axis(ax, f"{words}, {unit}" if column == 0 else "")
            ax.set_title(size if row == 0 else "")
    counted = data[data.dram_gib.notna()]
    handles = [
        Line2D([], [], color=common.look(_NAMES[method]).colour, linestyle="--", label=f"model, {_told(method)}")
        for method in traffic.MODEL
    ]
    handles += [
        Line2D([], [], linestyle="", label=name, **_mark(line.iloc[0])) for name, line in common.series_of(counted)
    ]
    notes = ["Band of sonic: a gathered row read from memory once, or at every use."]
    if counted.empty:
        notes.append("Model alone: no row has hardware counters (measure.counters=true, which needs a GPU and ncu).")
    else:
        notes += _distances(table(data))
    subtitle = common.provenance(data, untimed="modelled bytes" if counted.empty else "bytes by ncu and by model")
    sheet.finish(TITLE, subtitle, handles, notes)


def _told(method: str) -> str:
    return "standard PyTorch" if method == "standard" else method


def _draw_model(ax: Axes, here: pd.DataFrame) -> None:
    for method, line in here.sort_values("G").groupby("method", sort=False):
        colour = common.look(_NAMES[method]).colour
        alone = "." if len(line) == 1 else ""
        ax.plot(line.G, line.gib, color=colour, linestyle="--", linewidth=1.1, marker=alone)
        if method == "sonic":
            ax.fill_between(line.G, line.gib_once, line.gib, color=colour, alpha=0.2, linewidth=0)


def _draw_counted(ax: Axes, here: pd.DataFrame) -> None:
    # The first series lies on top and is the smallest, so that marks of one value all show.
    for number, (_, line) in enumerate(common.series_of(here[here.dram_gib.notna()])):
        ax.plot(line.G, line.dram_gib, linestyle="", markersize=4 + 1.5 * number, zorder=4 - 0.1 * number,
                **_mark(line.iloc[0]))  # fmt: skip


def _mark(line: pd.Series) -> dict[str, object]:
    style = common.style_of(line.impl, line.variant)
    return {"color": style["color"], "marker": style["marker"]}


def _distances(found: pd.DataFrame) -> list[str]:
    """How far the counters are from the model, by series."""
    notes = []
    for name, group in found[found.dram_over_model.notna()].groupby("series", sort=False):
        once, every = group.dram_over_once, group.dram_over_model
        notes.append(f"{name}: counted over modelled bytes {once.min():.2f} to {once.max():.2f} with gathered rows "
                     f"once, {every.min():.2f} to {every.max():.2f} at every use.")  # fmt: skip
    return notes


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per shape, mode and implementation: GiB by the model (every use, once) and by the counters, and their ratios.

    An implementation that is no method of the model has a line where it was counted.
    """
    model = modelled(data)
    out = data.assign(method=data.impl.map(METHOD))
    out = out[out.method.notna() | out.dram_gib.notna()]
    keys = [*_SIZES, "mode", "method"]
    out["model_gib"] = common.lookup(out, model, keys, "gib")
    out["model_once_gib"] = common.lookup(out, model, keys, "gib_once")
    out["dram_over_model"] = common.ratio(out.dram_gib, out.model_gib)
    out["dram_over_once"] = common.ratio(out.dram_gib, out.model_once_gib)
    columns = [
        *_SIZES, "G", "mode", "impl", "series", "model_gib", "model_once_gib", "dram_gib", "dram_over_model",
        "dram_over_once",
    ]  # fmt: skip
    shapes = common.shapes_in_order(out)
    out = out.assign(
        _mode=out["mode"].map(list(_MODES).index), _rank=out.impl.map(common.rank),
        _place=[shapes.index(sizes) for sizes in out[_SIZES].itertuples(index=False, name=None)],
    ).sort_values(["_place", "_mode", "_rank", "variant"])  # fmt: skip
    return out[columns].reset_index(drop=True)


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
