"""Token rounding against top-K in one layer of each of six open models, and what rounding itself costs.

Mirrors Fig 17 of the paper (kernels without the router, no shared experts): model TFLOP/s of the forward and of the
backward, which is the difference of the two passes, and the gain of rounding (nearest by frequency) in percent. The
paper's text states the gain at Qwen3-Next alone, which stands as hollow diamonds. The last panel has both routers by
themselves, from logits to rows sorted by expert; a black tick is what is left of a gain once the time that rounding
takes beyond top-K is added to the pass.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import common, figures, load, paper
from sonic.shapes import Shape

SWEEP = "token_rounding_models"
TITLE = "Token rounding against top-K in one layer of open models"

_PASSES = {
    "fwd": "forward",
    "bwd": "backward (fwd_bwd \N{MINUS SIGN} fwd)",
    "fwd_bwd": "forward + backward",
}
_SIZES = list(load.SHAPE)


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Given experts under both routers, both passes and the derived backward, and both routers alone; seeds pooled.

    `model` is the open model's name; a series has the same name with op `experts` and `routing`.
    """
    rows = rows[rows.router.isin(tuple(common.ROUTERS))]
    experts = rows[(rows.op == "experts") & rows["mode"].isin(("fwd", "fwd_bwd"))]
    routing = rows[(rows.op == "routing") & (rows["mode"] == "fwd")]
    if not experts.ms.notna().any():
        raise load.NothingLeft("no experts were measured")
    load.one_series(pd.concat([experts, routing]))
    parts = [load.with_backward(load.pool_seeds(part)) for part in (experts, routing) if len(part)]
    data = pd.concat([common.label_routers(part) for part in parts], ignore_index=True)
    return data.assign(model=[common.model_name(*sizes) for sizes in data[_SIZES].itertuples(index=False, name=None)])


def gains(data: pd.DataFrame) -> pd.DataFrame:
    """`common.rounding_gains` of the experts, with the routers' own times and `net_gain`, in percent.

    The experts' time has the sorting by expert in it, as the routers' has, so that only their difference is added.
    """
    experts, routing = data[data.op == "experts"], data[data.op == "routing"]
    out = common.rounding_gains(experts, paper.fig17(), ["model", "variant"])
    for router, name in ((common.TOPK, "topk"), (common.ROUNDING, "rounding")):
        out[f"{name}_routing_ms"] = common.lookup(out, routing[routing.router == router], [*_SIZES, "who"], "ms")
    longer = out.rounding_routing_ms - out.topk_routing_ms
    net = common.ratio(out.rounding_tflops * out.rounding_ms / (out.rounding_ms + longer), out.topk_tflops)
    # Only the routers' forward is timed, so that nothing can be added to a backward alone.
    return out.assign(net_gain=(100 * (net - 1)).where(out["mode"] != "bwd"))


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """Rates and gains of forward and backward, below them the gain of both passes and the routers alone."""
    styles, names, found = common.bar_styles(data, "ms"), common.models(data), gains(data)
    width = max(3.6, len(names) * max(0.84, 0.12 * (len(styles) + 1.2)))
    sheet = common.panels(figure, 3, 2, size=(width, 1.5), gap=(0.6, 0.34))
    experts, routing = data[data.op == "experts"], data[data.op == "routing"]
    form = ".2g" if common.on_cpu(data) else ".0f"
    for ax, mode in zip(sheet.axes[0], ("fwd", "bwd"), strict=True):
        part = experts[experts["mode"] == mode]
        common.draw_bars(ax, part, styles, "model", "tflops", names, part.tflops.max(), form)
        common.value_axis(ax, "")
        ax.set_title(_PASSES[mode])
    sheet.axes[0, 0].set_ylabel(f"model TFLOP/s{common.time_note(data)}")
    rounded = experts[experts.router == common.ROUNDING].drop_duplicates("who").set_index("who").series
    # The bars of a gain look like those of its rounded series.
    shown = {name: style for name, style in styles.items() if name in set(rounded)}
    gain_axes, drawn = [*sheet.axes[1], sheet.axes[2, 0]], []
    for ax, mode in zip(gain_axes, _PASSES, strict=True):
        part = found[found["mode"] == mode]
        drawn.append(_draw_gains(ax, part.assign(series=part.who.map(rounded)), shown, names))
        ax.set_title(f"gain, {_PASSES[mode]}")
    common.share_gains(gain_axes)
    for ax in sheet.axes[1:, 0]:
        ax.set_ylabel("gain of rounding, %")
    cost = sheet.axes[2, 1]
    common.draw_bars(cost, routing, styles, "model", "ms", names, routing.ms.max(), ".3g")
    common.value_axis(cost, "ms")
    cost.set_title("router alone, forward")
    for ax in sheet.axes[-1]:
        ax.set_xticks(range(len(names)), common.model_ticks(data, narrow=True))
    handles: list = common.bar_handles(data, "ms")
    if any(ticked for _, ticked in drawn):
        words = "gain with the router's extra time"
        handles.append(Line2D([], [], label=words, marker="_", markersize=8, linestyle="none", color="black"))
    handles += (
        [common.paper_handle("paper, H100 (Fig 17, stated in its text)", line=False)]
        if any(marked for marked, _ in drawn)
        else []
    )
    notes = [*common.gain_notes(found, _PASSES), *_cost_notes(found), *common.notes(data)]
    notes += [paper.MODEL_T] if any(marked for marked, _ in drawn) else []
    sheet.finish(TITLE, common.provenance(data), handles, notes)


def _draw_gains(
    ax: Axes, part: pd.DataFrame, styles: dict[str, dict[str, object]], names: list[str]
) -> tuple[bool, bool]:
    """The gains of one pass, the paper's, and what is left of ours; whether there were any of these two."""
    # In the place of a missing bar stands what failed.
    lines = part.assign(status=part.status.str.removeprefix("ok, ").str.removesuffix(", ok"), paper=part.paper_gain)
    ax.axhline(0, color=common.GREY, linewidth=0.7, zorder=1)
    places = common.draw_bars(ax, lines, styles, "model", "gain", names, max(0.0, part.gain.max()), "+.1f")
    width = 0.86 / max(1, len(styles))
    # The value of a bar stands in its middle, so what is left of it goes to the right and the paper's to the left.
    left = part[part.net_gain.notna()]
    for line in left.itertuples():
        at = places[line.series, line.model]
        ax.hlines(line.net_gain, at + 0.15 * width, at + 0.47 * width, color="black", linewidth=1.3, zorder=4.5)
    beside = {where: at - 0.3 * width for where, at in places.items()}
    return common.draw_paper_marks(ax, lines, "model", beside), len(left) > 0


def _cost_notes(found: pd.DataFrame) -> list[str]:
    """How long rounding's router takes beside top-K's, and what is left of the gains."""
    notes = []
    for who, group in found[found.net_gain.notna()].groupby("who", sort=False):
        times = common.ratio(group.rounding_routing_ms, group.topk_routing_ms)
        left = "; ".join(
            f"{_PASSES[mode]} {part.net_gain.min():+.1f}% to {part.net_gain.max():+.1f}%"
            for mode, part in group.groupby("mode", sort=False)
        )
        notes.append(
            f"The router of rounding takes {times.min():.2g} to {times.max():.2g} times as long as top-K's, {who}; "
            f"what is left of the gains: {left}."
        )
    return notes or ["No point has both routers timed alone, so what rounding costs is not known here."]


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per model, series and pass: both rates, the gain beside the paper's in percent, padding, the routers' own times.

    `gain_vs_paper` is our gain over the paper's; `net_gain` counts what rounding's router takes beyond top-K's.
    """
    out = gains(data)
    out = out[out.groupby("who")[["topk_tflops", "rounding_tflops"]].transform("count").sum(axis=1) > 0]
    out = out.assign(
        series=out.who,
        gain_vs_paper=common.ratio(out.gain, out.paper_gain),
        padding_expected=[paper.expected_padding(Shape(*sizes)) for sizes in out[_SIZES].itertuples(index=False)],
        _model=out.model.map(common.models(data).index), _rank=out.impl.map(common.rank),
        _pass=out["mode"].map(list(_PASSES).index),
    ).sort_values(["_model", "_rank", "who", "_pass"])  # fmt: skip
    columns = [
        "model", "E", "K", "rho", "series", "mode", "status", "topk_ms", "rounding_ms", "topk_tflops",
        "rounding_tflops", "gain", "paper_gain", "gain_vs_paper", "topk_routing_ms", "rounding_routing_ms", "net_gain",
        "topk_padding", "rounding_padding", "padding_expected", "worst_error",
    ]  # fmt: skip
    return out[columns].dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
