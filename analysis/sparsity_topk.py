"""At fixed K, more experts mean fewer tokens each: model TFLOP/s fall as E grows, by tile padding and by smaller GEMMs.

Mirrors the axes of Fig 16 of the paper (T = 16384, four panels of d, n, K): model TFLOP/s over E, forward and backward,
without the router. Under `balanced` routing every expert gets T K/E tokens, so no tile is padded there and only the
GEMMs shrink. The paper prints no absolute values of this figure, so none stand beside; the table has the padding that
it expects.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.figure import Figure

from analysis import common, figures, load, paper
from sonic.shapes import Shape

SWEEP = "sparsity"
TITLE = "Model throughput against the number of experts at fixed K"

_PASSES = {"fwd": "forward", "bwd": "backward (fwd_bwd \N{MINUS SIGN} fwd)"}


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Layers or experts, forward, both passes and the derived backward, seeds pooled; `panel` is T, d, n and K."""
    rows = rows[rows.op.isin(("layer", "experts")) & rows["mode"].isin(("fwd", "fwd_bwd"))]
    data = common.label_series(load.with_backward(load.pool_seeds(load.one_series(rows))))
    # The lines of both passes are not drawn, but what they say of themselves concerns the backward made from them.
    drawn = data[data["mode"].isin(tuple(_PASSES))]
    data = data if drawn.ms.notna().any() else drawn
    panel = [common.fixed_k_panel(*sizes) for sizes in data[["T", "d", "n", "K"]].itertuples(index=False)]
    return data.assign(panel=panel)


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One column per panel of Fig 16, one row per pass that was measured."""
    names = common.fixed_k_panels(data)
    passes = [mode for mode in _PASSES if data[data["mode"] == mode].tflops.notna().any()]
    sheet = common.panels(figure, len(passes), len(names))
    axes = sheet.axes
    for column, name in enumerate(names):
        axes[0, column].set_title(name)
        ratios = common.rho_ticks(data[data.panel == name])
        for row, mode in enumerate(passes):
            ax = axes[row, column]
            part = data[(data.panel == name) & (data["mode"] == mode)]
            common.draw_series(ax, part, "E", "tflops")
            label = f"{_PASSES[mode]},\nmodel TFLOP/s{common.time_note(data)}" if column == 0 else ""
            common.value_axis(ax, label, log=common.on_cpu(data))
            common.size_axis(ax, ratios, common.RHO_LABEL, ratios.get)
            ax.xaxis.label.set_visible(row == len(passes) - 1)
    notes = common.missing_notes(data[data["mode"] == "fwd"], "tflops") + common.row_notes(data)
    drawn = data[data["mode"].isin(tuple(_PASSES))]
    sheet.finish(TITLE, common.provenance(data), common.series_handles(drawn, "tflops"), notes)


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per panel, E and series: model TFLOP/s of both passes, the drop since the least E, padding."""
    forward = data[data["mode"] == "fwd"]
    out = forward[["panel", *load.SHAPE, "rho", "impl", "series", "status", "padding", "worst_error"]].copy()
    out["fwd_tflops"], out["fwd_ms"] = forward.tflops, forward.ms
    keys = [*load.SHAPE, "series"]
    out["bwd_tflops"] = common.lookup(out, data[data["mode"] == "bwd"], keys, "tflops")
    out["padding_expected"] = [
        paper.expected_padding(Shape(*sizes)) for sizes in out[list(load.SHAPE)].itertuples(index=False)
    ]
    least = out[out.fwd_tflops.notna()].sort_values("E").drop_duplicates(["panel", "series"])
    out["fwd_vs_least_E"] = common.ratio(out.fwd_tflops, common.lookup(out, least, ["panel", "series"], "fwd_tflops"))
    out = out[out.groupby("series").fwd_tflops.transform("count") > 0]
    out = out.assign(
        _panel=out.panel.map(common.fixed_k_panels(data).index), _rank=out.impl.map(common.rank)
    ).sort_values(["_panel", "_rank", "series", "E"])
    columns = [
        "d", "n", "K", "E", "rho", "series", "status", "fwd_ms", "fwd_tflops", "bwd_tflops", "fwd_vs_least_E",
        "padding", "padding_expected", "worst_error",
    ]  # fmt: skip
    return out[columns].dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
