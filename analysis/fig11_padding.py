"""Padding wastes FLOPs in proportion to E under top-K, and none once expert loads are multiples of the tile.

Mirrors Fig 11 of the paper (T = 16384, d = 4096, n = 1024, K = 4, both passes): what the GEMMs multiply, every expert's
rows rounded up to the tile, less the model FLOPs of the same pairs. The bars of the paper's figure are not known to us;
the dotted line is its model of them, half a tile of 128 rows per expert under top-K. Ours count every GEMM's own tile
(of the weight gradients the k that runs along the rows), so that smaller tiles waste less. The table has what a third
party read off the paper's figure by eye (`paper.FIG11_WASTED`).
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import common, figures, load, paper
from sonic.shapes import Shape

SWEEP = "padding"
TITLE = "FLOPs that padding wastes by the number of experts at fixed K"

_SIZES = list(load.SHAPE)


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Given experts under both routers, both passes, seeds pooled: `wasted_tflop` (1e12 padded less model FLOPs)."""
    rows = rows[(rows.op == "experts") & (rows["mode"] == "fwd_bwd") & rows.router.isin(tuple(common.ROUTERS))]
    if not rows.padding.notna().any():
        raise load.NothingLeft("no row of both passes counts its padded FLOPs")
    data = common.label_routers(load.pool_seeds(load.one_series(rows)))
    return data.assign(
        panel=[common.fixed_k_panel(*sizes) for sizes in data[["T", "d", "n", "K"]].itertuples(index=False)],
        wasted_tflop=1e-12 * data.padding * data.flops,
    )


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One panel per T, d, n and K; the paper has one."""
    names = common.fixed_k_panels(data)
    sheet = common.panels(figure, 1, len(names), size=(2.7, 2.2))
    for number, (ax, name) in enumerate(zip(sheet.axes[0], names, strict=True)):
        here = data[data.panel == name]
        common.draw_series(ax, here, "E", "wasted_tflop")
        theirs = here.assign(paper=_modelled(here)).query("router == @common.TOPK").sort_values("E")
        ax.plot(theirs.E, theirs.paper, color=common.GREY, linewidth=0.9, linestyle=(0, (1, 1)), zorder=2.5)
        common.value_axis(ax, "wasted TFLOP,\nforward + backward" if number == 0 else "")
        # No waste is a value here, whose markers the frame would cut in half.
        ax.set_ylim(bottom=-0.04 * ax.get_ylim()[1])
        ticks = common.rho_ticks(here)
        common.size_axis(ax, ticks, common.RHO_LABEL, ticks.get)
        ax.set_title(name)
    handles = common.series_handles(data, "wasted_tflop")
    handles.append(common.formula_handle("expected of top-K: half a tile, 64 rows per expert"))
    notes = [*_waste_notes(data), *common.notes(data, "wasted_tflop")]
    sheet.finish(TITLE, common.provenance(data, "counted, not timed"), handles, notes)


def _modelled(data: pd.DataFrame) -> pd.Series:
    """TFLOP that the paper's model wastes at every line: none under token rounding."""
    wasted = [1e-12 * paper.wasted_flops(Shape(*sizes)) for sizes in data[_SIZES].itertuples(index=False)]
    return pd.Series(wasted, index=data.index).where(data.router == common.TOPK, 0.0)


def _waste_notes(data: pd.DataFrame) -> list[str]:
    """Least and most share per series."""
    return [
        f"Wasted by {name}: {group.padding.min():.1%} to {group.padding.max():.1%} of the model FLOPs."
        for name, group in common.series_of(data[data.padding.notna()])
    ]


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per panel, E and series: model and padded FLOPs, what is wasted in TFLOP, percent of the model FLOPs and rows per
    expert, beside the paper's model in TFLOP and percent; `paper_low` and `paper_high` are a third party's reading."""
    out = data[data.groupby("series").wasted_tflop.transform("count") > 0].copy()
    out["method"] = out.router
    out["flops_model"], out["flops_padded"] = out.flops, out.flops * (1 + out.padding)
    out["wasted_share"] = 100 * out.padding
    out["wasted_rows"] = out.R * out.padding / out.E
    out["paper_tflop"] = _modelled(out)
    whole = [Shape(*sizes).flops("fwd_bwd") for sizes in out[_SIZES].itertuples(index=False)]
    out["paper_share"] = 1e14 * out.paper_tflop / whole
    for number, edge in enumerate(("low", "high")):
        read = [
            paper.FIG11_WASTED.get(sizes, (np.nan, np.nan))[number] for sizes in out[_SIZES].itertuples(index=False)
        ]
        out[f"paper_{edge}"] = pd.Series(read, index=out.index).where(out.router == common.TOPK)
    out = out.assign(
        _panel=out.panel.map(common.fixed_k_panels(data).index), _rank=out.impl.map(common.rank)
    ).sort_values(["_panel", "E", "_rank", "variant"])
    columns = [
        "d", "n", "K", "E", "rho", "series", "method", "status", "flops_model", "flops_padded", "wasted_tflop",
        "wasted_share", "wasted_rows", "paper_tflop", "paper_share", "paper_low", "paper_high",
    ]  # fmt: skip
    return out[columns].dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
