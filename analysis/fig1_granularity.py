"""Finer experts (larger G = d/n, equal work) slow every implementation, the fused layer least; its memory stays flat.

Mirrors Fig 1 of the paper (30B: forward TFLOPS and memory over d/n) for every model size that was measured; the paper's
H100 values (Figs 1, 13 and 14) stand beside as hollow diamonds. Along n within a size nE and nK stay, so FLOPs and
parameters stay. The bound (`cublas_bmm`, without a router, equal experts) is to be compared with the `experts,
balanced` line of `sonic`.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import common, figures, load, paper
from sonic.shapes import Shape

SWEEP = "granularity"
TITLE = "Forward throughput and memory against granularity"

_KEYS = [*load.SHAPE, "impl"]


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Whole layers, forward and forward+backward, seeds pooled; `panel` is the model size, or its T, d, nE and nK."""
    rows = rows[rows.op.isin(("layer", "experts")) & rows["mode"].isin(("fwd", "fwd_bwd"))]
    data = common.label_series(load.pool_seeds(load.one_series(rows)))
    return data.assign(panel=[common.size_panel(*sizes) for sizes in data[list(load.SHAPE)].itertuples(index=False)])


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One column per model size; rows: forward TFLOP/s, what is held for the backward, and (on a GPU) the peak."""
    sizes = common.size_panels(data)
    forward, memory = data[data["mode"] == "fwd"], common.held_lines(data)
    unit_bytes, unit = common.byte_unit(memory.held_bytes.max())
    scale = paper.GIB / unit_bytes
    memory = memory.assign(held=memory.held_gib * scale, peak=memory.peak_gib * scale)
    labels = {
        "tflops": f"forward, model TFLOP/s{common.time_note(data)}",
        "held": f"held for the backward, {unit}",
        "peak": f"peak beyond weights, {unit}",
    }
    drawn = [name for name in labels if name == "tflops" or memory[name].notna().any()]
    beside = {
        "tflops": paper.forward_tflops().rename(columns={"value": "tflops"}),
        "held": paper.peak_memory().assign(held=lambda table: table.held_gib * scale),
    }
    sheet = common.panels(figure, len(drawn), len(sizes))
    any_paper = {"tflops": False, "held": False}
    any_formula = False
    for column, size in enumerate(sizes):
        here = data[data.panel == size]
        widths = dict(zip(here.G, here.n, strict=True))
        for row, name in enumerate(drawn):
            ax = sheet.axes[row, column]
            part = (forward if name == "tflops" else memory).query("panel == @size")
            common.draw_series(ax, part, "G", name, statuses=row == 0)
            if name == "held":
                any_formula |= _draw_formulas(ax, part, scale)
            if name in beside:
                values = _paper_beside(part, beside[name])
                common.draw_paper(ax, values, "G", name)
                any_paper[name] |= len(values) > 0
            common.value_axis(ax, labels[name] if column == 0 else "", log=name == "tflops" and common.on_cpu(data))
            common.size_axis(ax, widths, "granularity G = d/n  (n below)", lambda G, n=widths: f"{G:.3g}\n{n[G]}")
            ax.xaxis.label.set_visible(row == len(drawn) - 1)
        sheet.axes[0, column].set_title(size.replace(": ", "\n"))
    handles = common.series_handles(data, "ms")
    handles += [common.paper_handle("paper, H100 (Figs 1, 13, 14; digitised)")] if any(any_paper.values()) else []
    handles += [common.formula_handle("paper's formula")] if any_formula else []
    notes = common.missing_notes(forward) + common.row_notes(data)
    if any_paper["held"]:
        notes.append(
            "The paper's memory bars include the expert weights, and SonicMoE's its output too; "
            "the diamonds here are without them."
        )
    if any_formula and (memory.impl == "scattermoe").any():
        notes.append("ScatterMoE keeps silu(gate) beside A, which the paper's formula does not count.")
    sheet.finish(TITLE, common.provenance(data), handles, notes)


def _paper_beside(part: pd.DataFrame, values: pd.DataFrame) -> pd.DataFrame:
    """The paper's values at the shapes in the panel, of the implementations that were measured there."""
    shapes = part[list(load.SHAPE)].drop_duplicates()
    beside = values.merge(shapes, on=list(load.SHAPE))
    beside = beside[beside.impl.isin(part.impl[part.ms.notna()])]
    return beside.assign(G=beside.d / beside.n)


def _draw_formulas(ax: object, part: pd.DataFrame, scale: float) -> bool:
    drawn = False
    for impl in sorted(part.impl.unique(), key=common.rank):
        shapes = part.drop_duplicates("G").sort_values("G")
        held = [paper.held_bytes(impl, Shape(*sizes)) for sizes in shapes[list(load.SHAPE)].itertuples(index=False)]
        if held and held[0] is not None:
            values = np.array(held) / paper.GIB * scale
            ax.plot(shapes.G, values, color=common.look(impl).colour, linewidth=0.9, linestyle=(0, (1, 1)), zorder=2)
            drawn = True
    return drawn


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per size, shape and measured series: forward TFLOP/s, held and peak GiB, beside the paper's and the formula's.

    `of_bound` is the forward over that of `cublas_bmm` at the same shape; `sonic_speed` the forward+backward time over
    that of `sonic` in the same routing. The paper's layer has the router in it, so only whole layers (and the bound)
    stand beside it.
    """
    keys = ["panel", "G", *load.SHAPE, "impl", "op", "series"]
    forward = data[data["mode"] == "fwd"].set_index(keys)
    both = data[data["mode"] == "fwd_bwd"].set_index(keys)
    memory = common.held_lines(data).set_index(keys)
    out = pd.DataFrame(index=forward.index.union(both.index, sort=False))
    out["status"] = forward.status.reindex(out.index).fillna(both.status)
    out["fwd_tflops"], out["fwd_bwd_ms"] = forward.tflops, both.ms
    out["held_gib"], out["peak_gib"], out["worst_error"] = memory.held_gib, memory.peak_gib, both.worst_error
    out = out.reset_index()
    measured = out.groupby("series").fwd_tflops.transform("count") + out.groupby("series").fwd_bwd_ms.transform("count")
    out = out[measured > 0].reset_index(drop=True)

    sizes = list(load.SHAPE)
    out["formula_gib"] = [
        (paper.held_bytes(line.impl, Shape(*line[sizes])) or np.nan) / paper.GIB for _, line in out.iterrows()
    ]
    beside = (out.op == "layer") | (out.impl == "cublas_bmm")
    for name, values, column in (
        ("paper_fwd_tflops", paper.forward_tflops(), "value"),
        ("paper_fwd_bwd_ms", paper.layer_ms(), "fwd_bwd_ms"),
        ("paper_held_gib", paper.peak_memory(), "held_gib"),
    ):
        out[name] = common.lookup(out, values, _KEYS, column).where(beside)
    out["fwd_vs_paper"] = common.ratio(out.fwd_tflops, out.paper_fwd_tflops)
    out["held_vs_formula"] = common.ratio(out.held_gib, out.formula_gib)
    out["of_bound"] = common.ratio(
        out.fwd_tflops, common.lookup(out, out[out.impl == "cublas_bmm"], sizes, "fwd_tflops")
    )
    for name, ms in (("sonic_speed", "fwd_bwd_ms"), ("paper_sonic_speed", "paper_fwd_bwd_ms")):
        out[name] = common.ratio(
            out[ms], common.lookup(out, out[(out.impl == "sonic") & out[ms].notna()], [*sizes, "op"], ms)
        )

    out = out.assign(
        _panel=out.panel.map(common.size_panels(data).index),
        _rank=out.impl.map(common.rank),
        size=out.panel.str.split(":").str[0],
    )
    out = out.sort_values(["_panel", "G", "_rank", "series"])
    columns = [
        "size", "G", "n", "E", "K", "series", "status", "fwd_tflops", "paper_fwd_tflops", "fwd_vs_paper", "of_bound",
        "fwd_bwd_ms", "sonic_speed", "paper_sonic_speed", "held_gib", "formula_gib", "held_vs_formula",
        "paper_held_gib", "peak_gib", "worst_error",
    ]  # fmt: skip
    return out[columns].dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
