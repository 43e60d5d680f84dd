"""Whole layers, shape by shape: model TFLOP/s of every implementation, forward and forward with backward.

Mirrors Fig 14 of the paper (twelve shapes from 1.4B to 120B, router inside the timed region; 30B n=2048 is Fig 1's),
whose H100 values stand on the bars as hollow diamonds; those of forward and backward are made from its two passes. The
bound (`cublas_bmm`, without a router, equal experts) is a dashed line over the shapes where it ran. `sonic` is compared
through its `hopper` family where that ran, else through the next one; every other family has a bar and lines of its
own.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import common, figures, load, paper

SWEEP = "throughput"
TITLE = "Throughput of whole layers by shape and implementation"

_PASSES = {"fwd": "forward", "fwd_bwd": "forward + backward"}
_SIZES = list(load.SHAPE)
#: The package that our kernels are held against, shape by shape.
_OFFICIAL = "sonicmoe_official"
_BOUND = "cublas_bmm"
_BOUND_STYLE = {"color": "black", "linestyle": (0, (2, 1)), "linewidth": 1.0}


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Layers, and given experts for the bound, in both modes, seeds pooled; `panel` is the model size."""
    rows = rows[rows.op.isin(("layer", "experts")) & rows["mode"].isin(tuple(_PASSES))]
    if not (rows.ms.notna() & (rows.op == "layer")).any():
        raise load.NothingLeft("no whole layer was measured")
    data = common.label_series(load.pool_seeds(load.one_series(rows)))
    return data.assign(panel=[common.size_panel(*sizes) for sizes in data[_SIZES].itertuples(index=False)])


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One row per model size, one column per mode; a group of bars per shape, fine experts first."""
    layers, bound = data[data.op == "layer"], data[(data.impl == _BOUND) & (data["mode"] == "fwd")]
    styles = common.bar_styles(layers, "ms")
    sizes = [name for name in common.size_panels(data) if name in set(layers.panel)]
    most = layers.groupby("panel").n.nunique().max()
    width = max(3.1, 0.105 * most * (len(styles) + 1.2))
    sheet = common.panels(figure, len(sizes), len(_PASSES), size=(width, 1.75), share_x=False, gap=(0.3, 0.62))
    beside = {mode: _paper_values(mode) for mode in _PASSES}
    any_paper = False
    for row, size in enumerate(sizes):
        for column, mode in enumerate(_PASSES):
            ax = sheet.axes[row, column]
            part = layers[(layers.panel == size) & (layers["mode"] == mode)]
            shapes = layers[layers.panel == size].drop_duplicates(_SIZES).sort_values("n")
            positions = list(shapes.n)
            form = ".2g" if common.on_cpu(data) else ".0f"
            named = part.assign(impl=part.impl.replace(paper.AUTHORS))
            part = part.assign(paper=common.lookup(named, beside[mode], [*_SIZES, "impl"], "value"))
            places = common.draw_bars(ax, part, styles, "n", "tflops", positions, layers.tflops.max(), form)
            any_paper |= common.draw_paper_marks(ax, part, "n", places)
            if mode == "fwd":
                _draw_bound(ax, bound[bound.panel == size], positions)
            ticks = [f"{line.n}\n{line.E}/{line.K}" for line in shapes.itertuples()]
            ax.set_xticks(range(len(positions)), ticks)
            ax.set_xlabel("expert size n  (E/K below)" if row == len(sizes) - 1 else "")
            ax.set_ylabel(f"model TFLOP/s{common.time_note(data)}" if column == 0 else "")
            ax.set_title(f"{size.split(' nE')[0] if ':' in size else size}, {_PASSES[mode]}")
    # One scale, so that sizes and passes can be held against each other.
    common.share_scale(sheet)
    handles = common.bar_handles(layers, "ms")
    if bound.ms.notna().any():
        handles.append(Line2D([], [], label=bound.series.iloc[0], **_BOUND_STYLE))
    handles += [common.paper_handle("paper, H100 (Figs 1, 14; digitised)", line=False)] if any_paper else []
    notes = [*_official_notes(data), *_bound_notes(bound), *common.card_notes(layers), *common.notes(data)]
    sheet.finish(TITLE, common.provenance(data), handles, notes)


def _paper_values(mode: str) -> pd.DataFrame:
    """The paper's H100 model TFLOP/s by shape and implementation, column `value`."""
    if mode == "fwd":
        return paper.forward_tflops()
    layer = paper.layer_ms()
    return layer.assign(value=18e-9 * layer["T"] * layer.K * layer.n * layer.d / layer.fwd_bwd_ms)


def _draw_bound(ax: object, bound: pd.DataFrame, positions: list[int]) -> None:
    for line in bound[bound.tflops.notna()].itertuples():
        if line.n in positions:
            at = positions.index(line.n)
            ax.hlines(line.tflops, at - 0.47, at + 0.47, zorder=4, **_BOUND_STYLE)


def _bound_notes(bound: pd.DataFrame) -> list[str]:
    """Shapes at which the bound ended otherwise than measured, where it was measured at others."""
    missing = bound[bound.tflops.isna()] if bound.tflops.notna().any() else bound[:0]
    found = [f"{common.shape_name(*line[_SIZES])} ({line.status.replace('_', ' ')})" for _, line in missing.iterrows()]
    return [f"No line of {_BOUND} at {', '.join(found)}."] if found else []


def _official_notes(data: pd.DataFrame) -> list[str]:
    """Geometric mean and least of our speed over the official package's, and where the least is."""
    speeds = table(data).query("series == @_OFFICIAL")
    parts = []
    for mode, words in _PASSES.items():
        found = speeds[speeds.n.notna() & speeds[f"{mode}_speed"].notna()] if f"{mode}_speed" in speeds else speeds[:0]
        if len(found):
            least = found.loc[found[f"{mode}_speed"].idxmin()]
            parts.append(
                f"{words} {common.geometric_mean(found[f'{mode}_speed']):.3f} (geometric mean of {len(found)} shapes), "
                f"least {least[f'{mode}_speed']:.3f} at {least['size']} n={least.n}"
            )
    return [f"Speed of sonic over {_OFFICIAL}: {'; '.join(parts)}."] if parts else []


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per shape and series TFLOP/s beside the paper's, and how many times as fast `sonic` is, ours and the paper's.

    `fwd_speed` and `fwd_bwd_speed` are the series' time over that of `sonic` (its first family that was measured at the
    shape) on the same card, or on another where it did not run there, for whole layers; `of_bound` is the forward over
    that of `cublas_bmm`. Below, per series, the geometric mean and the least over its shapes; the paper's are over
    those of these shapes that the paper has.
    """
    keys = ["panel", *_SIZES, "impl", "op", "series", "variant"]
    modes = {mode: data[data["mode"] == mode].set_index(keys) for mode in _PASSES}
    out = pd.DataFrame(index=modes["fwd"].index.union(modes["fwd_bwd"].index, sort=False))
    statuses = pd.concat([part.status.reindex(out.index) for part in modes.values()], axis=1)
    out["status"] = [", ".join(pd.unique(line.dropna())) for _, line in statuses.iterrows()]
    for mode, part in modes.items():
        out[f"{mode}_tflops"] = part.tflops
        out[f"_{mode}_one_card"] = common.one_card_speed(part)
    out["fwd_bwd_ms"] = modes["fwd_bwd"].ms
    out["worst_error"] = pd.concat([part.worst_error.reindex(out.index) for part in modes.values()], axis=1).max(axis=1)
    out = out.reset_index()
    rates = [f"{mode}_tflops" for mode in _PASSES]
    out = out[out.groupby("series")[rates].transform("count").sum(axis=1) > 0].reset_index(drop=True)

    beside = (out.op == "layer") | (out.impl == _BOUND)
    whole = out.op == "layer"
    for mode in _PASSES:
        ours = out[whole & (out.impl == "sonic") & out[f"{mode}_tflops"].notna()].sort_values("variant")
        values = _paper_values(mode)
        out[f"paper_{mode}_tflops"] = common.lookup(out, values, [*_SIZES, "impl"], "value").where(beside)
        any_card = common.ratio(common.lookup(out, ours, _SIZES, f"{mode}_tflops"), out[f"{mode}_tflops"])
        out[f"{mode}_speed"] = out[f"_{mode}_one_card"].fillna(any_card).where(whole)
        theirs = common.lookup(out, values[values.impl == "sonic"], _SIZES, "value")
        out[f"paper_{mode}_speed"] = common.ratio(theirs, out[f"paper_{mode}_tflops"]).where(whole)
    bound = out[(out.impl == _BOUND) & out.fwd_tflops.notna()]
    out["of_bound"] = common.ratio(out.fwd_tflops, common.lookup(out, bound, _SIZES, "fwd_tflops"))
    paper_bound = paper.forward_tflops().query("impl == @_BOUND")
    out["paper_of_bound"] = common.ratio(out.paper_fwd_tflops, common.lookup(out, paper_bound, _SIZES, "value"))

    out = out.assign(
        _panel=out.panel.map(common.size_panels(data).index), _rank=out.impl.map(common.rank),
        size=out.panel.str.split(":").str[0],
    ).sort_values(["_panel", "n", "_rank", "variant"])  # fmt: skip
    out = pd.concat([out, _summary(out[out.op == "layer"])], ignore_index=True)
    out[["n", "E", "K"]] = out[["n", "E", "K"]].astype("Int64")
    columns = [
        "size", "n", "E", "K", "series", "status", "fwd_tflops", "paper_fwd_tflops", "fwd_bwd_tflops",
        "paper_fwd_bwd_tflops", "fwd_bwd_ms", "fwd_speed", "paper_fwd_speed", "fwd_bwd_speed", "paper_fwd_bwd_speed",
        "of_bound", "paper_of_bound", "worst_error",
    ]  # fmt: skip
    return out[columns].dropna(axis=1, how="all")


def _summary(layers: pd.DataFrame) -> pd.DataFrame:
    """Two lines per series that is not what it is compared with: geometric mean and least of each speed."""
    lines = []
    for name, group in layers.groupby("series", sort=False):
        own = group[[f"{mode}_speed" for mode in _PASSES]]
        if not (own.fillna(1.0) != 1.0).any(axis=None):
            continue
        theirs = group[[f"paper_{column}" for column in own]].where(own.notna().to_numpy())
        speeds = pd.concat([own, theirs], axis=1)
        for word, reduce in (("geometric mean", common.geometric_mean), ("least", pd.Series.min)):
            values = {column: reduce(found) for column in speeds if len(found := speeds[column].dropna())}
            lines.append({"size": f"{word} of {own.notna().any(axis=1).sum()}", "series": name, **values})
    return pd.DataFrame(lines, columns=layers.columns)


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
