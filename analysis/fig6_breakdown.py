"""Where a layer's time goes: kernels of every implementation by what they do, forward and backward.

Mirrors Fig 6 of the paper (7B n=256). Every bar is the sum of kernel times, without gaps between them; kernels are
sorted into the paper's classes by their names (`analysis.classes`). The backward is what a call of both passes runs
beyond the forward. The paper's totals on an H100 stand as hollow diamonds. Where an implementation launches more
kernels than a row lists one by one, kernels of one name are one sum, which goes to the class of the first of them.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import classes, common, figures, load, paper

SWEEP = "throughput"
TITLE = "Runtime of a layer by what its kernels do"

#: The paper's shape, drawn where it was measured; else the first one.
SHOWN = (24576, 1536, 256, 128, 8)
_SIZES = list(load.SHAPE)
_PASSES = {"fwd": "forward", "bwd": "backward"}
_COLOURS = dict(
    zip(
        dict.fromkeys((*classes.FORWARD, *classes.BACKWARD)),
        (
            "#7f7f7f", "#ffbb78", "#d62728", "#98df8a", "#1f77b4", "#c5b0d5", "#9467bd", "#c7c7c7", "#e7e7e7",
            "#ff7f0e", "#e377c2", "#8c564b", "#2ca02c", "#17becf", "#aec7e8", "#ff9896",
        ),
        strict=False,
    )
)  # fmt: skip


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
    """Per series, pass and class: ms of its kernels, how many, and the TFLOP/s of a product."""
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
        rnd = (forward["T"] * forward.K if pd.isna(forward.R) else forward.R) * forward.n * forward.d
        for step, kernels in found.items():
            for kind in classes.FORWARD if step == "fwd" else classes.BACKWARD:
                mine = [kernel for kernel in kernels if kernel.kind == kind]
                if mine:
                    ms = sum(kernel.us for kernel in mine) / 1e3
                    rate = classes.FLOPS.get(kind, float("nan")) * rnd / ms / 1e9
                    lines.append({
                        "series": name, "impl": forward.impl, "pass": step, "class": kind, "ms": ms,
                        "kernels": len(mine), "tflops": rate,
                        "largest": max(mine, key=lambda kernel: kernel.us).name[:60],
                    })  # fmt: skip
    return pd.DataFrame(lines)


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """A stacked bar per series and pass, in ms, its parts in the paper's order."""
    found = parts(data)
    names = [name for name in dict.fromkeys(data.series) if (found.series == name).any()]
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
            if len(said) and first:
                ax.plot([said.iloc[0]], [at], marker="D", markersize=5, markerfacecolor="white",
                        markeredgecolor=common.look(impl).colour, linestyle="", zorder=5)  # fmt: skip
                marked = True
            total = own.ms.sum()
            ax.annotate(f"{total:.3g}" if total else _missing(data, name, step), (total, at), xytext=(4, 0),
                        textcoords="offset points", va="center", fontsize=6.5)  # fmt: skip
        ax.set_title(f"{common.shape_name(*data[_SIZES].iloc[0])}, {words}")
        ax.set_xlabel("ms")
        ax.set_xlim(0, ax.get_xlim()[1] * 1.1)
    used = [kind for kind in _COLOURS if (found["class"] == kind).any()]
    handles = [Patch(facecolor=_COLOURS[kind], label=kind) for kind in used]
    if marked:
        handles.append(common.paper_handle("paper, H100 (Fig 6), total", line=False))
    sheet.finish(TITLE, common.provenance(data), handles, _unknown_notes(found) + common.notes(data))


def _bars(ax: Axes, here: pd.DataFrame, names: list[str]) -> None:
    for at, name in enumerate(names):
        left = 0.0
        for line in here[here.series == name].itertuples():
            kind = line[4]
            ax.barh(at, line.ms, left=left, height=0.72, color=_COLOURS[kind], edgecolor="white", linewidth=0.4)
            left += line.ms
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")


def _missing(data: pd.DataFrame, name: str, step: str) -> str:
    mode = "fwd" if step == "fwd" else "fwd_bwd"
    status = data[(data.series == name) & (data["mode"] == mode)].status
    return f"\N{MULTIPLICATION SIGN} {status.iloc[0] if len(status) else 'no row'}"


def _paper(data: pd.DataFrame) -> pd.DataFrame:
    """The paper's totals, which are of one shape."""
    values = paper.fig6()
    values = values[values.quantity.isin(_PASSES)]
    return values if tuple(data[_SIZES].iloc[0]) == SHOWN and not common.on_cpu(data) else values[:0]


def _unknown_notes(found: pd.DataFrame) -> list[str]:
    """How much of each series no rule knows, with the largest of it."""
    notes = []
    for name, group in found.groupby("series", sort=False):
        unknown = group[group["class"].isin(("other", "GEMM"))]
        share = unknown.ms.sum() / group.ms.sum()
        if share > 0.02:
            largest = unknown.loc[unknown.ms.idxmax()]
            notes.append(f"{name}: {share:.0%} of the time in no class of the paper, most of it {largest.largest}.")
    return notes


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per series, pass and class: ms, share of the pass, TFLOP/s of products; and the pass beside the paper's."""
    found = parts(data)
    totals = found.groupby(["series", "impl", "pass"], sort=False).ms.sum().reset_index()
    beside = _paper(data).rename(columns={"quantity": "pass", "value": "paper_ms"})
    totals["paper_ms"] = common.lookup(totals, beside, ["impl", "pass"], "paper_ms")
    sonic = {step: group[group.impl == "sonic"].ms.min() for step, group in totals.groupby("pass")}
    named = beside[beside.impl == "sonic"].set_index("pass").paper_ms
    totals["over_sonic"] = totals.ms / totals["pass"].map(sonic)
    totals["paper_over_sonic"] = totals.paper_ms / totals["pass"].map(named) if len(named) else float("nan")
    found["share"] = found.ms / found.groupby(["series", "pass"]).ms.transform("sum")
    both = pd.concat([totals.assign(**{"class": "sum"}), found], ignore_index=True)
    columns = [
        "series", "pass", "class", "ms", "share", "tflops", "kernels", "paper_ms", "over_sonic", "paper_over_sonic",
    ]  # fmt: skip
    return both[columns].dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
