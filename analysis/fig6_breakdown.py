"""Where a layer's time goes: kernels of every implementation by what they do, forward and backward.

Mirrors Fig 6 of the paper (7B n=256). Every bar is the sum of kernel times, without gaps between them; kernels are
sorted into the paper's classes by their names (`analysis.classes`). The backward is what a call of both passes runs
beyond the forward: by name and in launch order, each kernel of the forward's row is taken off the row of both passes.
The paper's totals on an H100 stand as hollow diamonds; the times and rates of single kernels that its text gives stand
in the table. Where an implementation launches more kernels than a row lists one by one, kernels of one name are one
sum, which goes to one class: `GEMM` for products of several.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import classes, common, figures, load, paper
from sonic.shapes import Shape

SWEEP = "throughput"
TITLE = "Runtime of a layer by what its kernels do"

#: The paper's shape, drawn where it was measured; else the first one.
SHOWN = (24576, 1536, 256, 128, 8)
_SIZES = list(load.SHAPE)
_PASSES = {"fwd": "forward", "bwd": "backward"}
#: Class -> the paper's kernels that do no more and no less, as `paper.fig6` names them.
_NAMED = {
    "up proj": ("up_proj",), "SwiGLU": ("swiglu",), "down proj": ("down_proj",), "dH": ("d_act_gemm", "d_act"),
    "dS": ("ds",), "dSwiGLU": ("d_swiglu",), "dXt": ("d_input",),
}  # fmt: skip
#: Width of a bar's number as a share of the axis.
_LABEL = 0.08
#: Kernels of a series that are named where no class knows them.
_LARGEST = 2
#: In the order of the legend; what gathers, what multiplies and what activates in hues of their own.
_COLOURS = {
    "router": "#7f7f7f", "gather X": "#ffbb78", "gather dO": "#ff9a3c", "gather dO, X": "#d9730d",
    "up proj": "#d62728", "SwiGLU": "#98df8a", "down proj": "#1f77b4", "scatter Y": "#c5b0d5",
    "dH": "#e377c2", "dS": "#bcbd22", "dSwiGLU": "#2ca02c", "dW2": "#17becf", "dXt": "#aec7e8", "dW1": "#ff9896",
    "expert agg": "#9467bd", "GEMM": "#8c564b", "other": "#dcdcdc",
}  # fmt: skip


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Whole layers in both modes with times of their kernels, seeds pooled, of one shape."""
    rows = rows[(rows.op == "layer") & rows["mode"].isin(("fwd", "fwd_bwd"))]
    if not (rows.kernels.map(bool) & (rows["mode"] == "fwd")).any():
        raise load.NothingLeft("no row of a whole layer's forward has times of its kernels")
    data = common.label_series(load.pool_seeds(load.one_series(rows)))
    shapes = common.shapes_in_order(data[data.kernels.map(bool) & (data["mode"] == "fwd")])
    shape = SHOWN if SHOWN in shapes else shapes[0]
    return data[(data[_SIZES] == list(shape)).all(axis=1)].reset_index(drop=True)


def parts(data: pd.DataFrame) -> pd.DataFrame:
    """Per series, pass and class: ms of its kernels, how many, TFLOP/s of a product, TB/s by the paper's bytes."""
    lines = []
    for name, group in common.series_of(data):
        by_mode = {line["mode"]: line for _, line in group.iterrows() if line.kernels}
        if "fwd" not in by_mode:
            continue
        forward = by_mode["fwd"]
        found = {"fwd": classes.classify(forward.impl, forward.kernels, backward=False)}
        if "fwd_bwd" in by_mode:
            rest = classes.backward_of(by_mode["fwd_bwd"].kernels, forward.kernels)
            found["bwd"] = classes.classify(forward.impl, rest, backward=True)
        shape = Shape(*forward[_SIZES])
        for step, kernels in found.items():
            for kind in classes.FORWARD if step == "fwd" else classes.BACKWARD:
                mine = [kernel for kernel in kernels if kernel.kind == kind]
                if mine:
                    ms = sum(kernel.us for kernel in mine) / 1e3
                    flops = classes.FLOPS.get(kind, float("nan")) * shape.R * shape.n * shape.d
                    moved = classes.moved(kind, {kernel.kind for kernel in kernels})
                    size = float("nan") if moved is None else moved.bytes(shape, common.ITEMSIZE[forward["dtype"]])
                    lines.append({
                        "series": name, "impl": forward.impl, "pass": step, "class": kind, "ms": ms,
                        "kernels": len(mine), "tflops": flops / ms / 1e9, "tbps": size / ms / 1e9, "parts": mine,
                    })  # fmt: skip
    return pd.DataFrame(lines)


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """A stacked bar per series and pass, in ms, its parts in the paper's order."""
    found = parts(data)
    names = list(dict.fromkeys(found.series))
    height = max(1.6, 0.3 * len(names))
    sheet = common.panels(figure, 1, 2, size=(4.6, height), share_x=False, gap=(1.7, 0.4))
    beside = _paper(data)
    marked = False
    for ax, (step, words) in zip(sheet.axes[0], _PASSES.items(), strict=True):
        here = found[found["pass"] == step]
        _bars(ax, here, names)
        for at, name in enumerate(names):
            own = here[here.series == name]
            impl = data[data.series == name].impl.iloc[0]
            said = beside[(beside.impl == impl) & (beside.quantity == step)].value
            first = name == next(s for s in names if data[data.series == s].impl.iloc[0] == impl)
            total = reach = own.ms.sum()
            clear = 4
            if len(said) and first:
                ax.plot([said.iloc[0]], [at], marker="D", markersize=5, markerfacecolor="white",
                        markeredgecolor=common.look(impl).colour, linestyle="", zorder=5)  # fmt: skip
                marked = True
                # The number stands behind a diamond that would cover it.
                if 0 < said.iloc[0] - total < _LABEL * ax.get_xlim()[1]:
                    reach, clear = said.iloc[0], 7
            ax.annotate(f"{total:.3g}" if total else _missing(data, name, step), (reach, at), xytext=(clear, 0),
                        textcoords="offset points", va="center", fontsize=6.5)  # fmt: skip
        ax.set_title(f"{common.shape_name(*data[_SIZES].iloc[0])}, {words}")
        ax.set_xlabel("ms")
        ax.set_xlim(0, ax.get_xlim()[1] * 1.1)
    used = [kind for kind in _COLOURS if (found["class"] == kind).any()]
    handles = [Patch(facecolor=_COLOURS[kind], label=kind) for kind in used]
    if marked:
        handles.append(common.paper_handle("paper, H100 (Fig 6), total", line=False))
    clock = common.provenance(data, untimed="sums of kernels' median times")
    sheet.finish(TITLE, clock, handles, _unknown_notes(found) + common.notes(data))


def _bars(ax: Axes, here: pd.DataFrame, names: list[str]) -> None:
    for at, name in enumerate(names):
        left = 0.0
        own = here[here.series == name]
        for kind, ms in zip(own["class"], own.ms, strict=True):
            ax.barh(at, ms, left=left, height=0.72, color=_COLOURS[kind], edgecolor="white", linewidth=0.4)
            left += ms
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")


def _missing(data: pd.DataFrame, name: str, step: str) -> str:
    mode = "fwd" if step == "fwd" else "fwd_bwd"
    status = data[(data.series == name) & (data["mode"] == mode)].status
    return f"\N{MULTIPLICATION SIGN} {status.iloc[0] if len(status) else 'no row'}"


def _paper(data: pd.DataFrame) -> pd.DataFrame:
    """The paper's totals and single kernels, which are of one shape."""
    values = paper.fig6()
    return values if tuple(data[_SIZES].iloc[0]) == SHOWN and not common.on_cpu(data) else values[:0]


def _unknown_notes(found: pd.DataFrame) -> list[str]:
    """How much of each series is in no one class of the paper, with the largest of it."""
    notes = []
    for name, group in found.groupby("series", sort=False):
        unknown = group[group["class"].isin(("other", "GEMM"))]
        share = unknown.ms.sum() / group.ms.sum()
        if share > 0.02:
            times: dict[str, float] = {}
            for part in unknown.parts.explode():
                times[part.name] = times.get(part.name, 0.0) + part.us
            largest = sorted(times, key=times.get, reverse=True)[:_LARGEST]
            named = ", ".join(f"{kernel[:60]} ({times[kernel] / 1e3:.3g} ms)" for kernel in largest)
            notes.append(f"{name}: {share:.0%} of the time in no one class of the paper, most of it {named}.")
    return notes


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per series, pass and class ms, share of the pass, TFLOP/s and TB/s, beside the paper's where it has the kernel.

    Lines of the class `sum` hold a pass, and its time over that of `sonic`'s fastest family, ours and the paper's.
    """
    found = parts(data)
    totals = found.groupby(["series", "impl", "pass"], sort=False).ms.sum().reset_index()
    beside = _paper(data)
    theirs = beside.set_index(["impl", "quantity", "unit"]).value.to_dict()
    totals["paper_ms"] = [theirs.get((*key, "ms")) for key in zip(totals.impl, totals["pass"], strict=True)]
    sonic = {step: group[group.impl == "sonic"].ms.min() for step, group in totals.groupby("pass")}
    named = {step: theirs.get(("sonic", step, "ms")) for step in _PASSES}
    totals["over_sonic"] = totals.ms / totals["pass"].map(sonic)
    totals["paper_over_sonic"] = common.ratio(totals.paper_ms, totals["pass"].map(named))
    found["share"] = found.ms / found.groupby(["series", "pass"]).ms.transform("sum")
    for column, unit in (("paper_ms", "ms"), ("paper_tflops", "TFLOPS"), ("paper_tbps", "TB/s")):
        found[column] = [
            next((theirs[key] for quantity in _NAMED.get(kind, ()) if (key := (impl, quantity, unit)) in theirs), None)
            for impl, kind in zip(found.impl, found["class"], strict=True)
        ]
    both = pd.concat([totals.assign(**{"class": "sum"}), found], ignore_index=True)
    columns = [
        "series", "pass", "class", "ms", "paper_ms", "share", "tflops", "paper_tflops", "tbps", "paper_tbps", "kernels",
        "over_sonic", "paper_over_sonic",
    ]  # fmt: skip
    return both[columns].dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
