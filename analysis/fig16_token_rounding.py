"""Token rounding against top-K: what expert loads that are multiples of a tile gain as the experts get sparser.

Mirrors Fig 16 of the paper (T = 16384, four panels of d, n, K; kernels without the router): model TFLOP/s over E, each
of its own pairs, and the gain of rounding (nearest by frequency) over top-K in percent. The paper's text states the
gain at two points, which stand as hollow diamonds; absolute values of its figure are not known. The dotted line is the
gain that padding alone predicts from the kernels of the rounded row: (GEMMs x (1 + padding) + rest) / (GEMMs + rest),
where the rest is aggregation and metadata and the padding is that of top-K over that of rounding. The rows of the sweep
`padding` (Fig 11; d = 4096, n = 1024, forward with backward alone) serve as well, where its own sweep lacks the point.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import common, figures, load, paper
from sonic.shapes import Shape

SWEEP = "token_rounding"
ALSO = ("padding",)
TITLE = "Token rounding against top-K by the number of experts at fixed K"

_PASSES = {"fwd": "forward", "fwd_bwd": "forward + backward"}
_SIZES = list(load.SHAPE)


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Given experts under top-K and rounding by frequency, both passes and the derived backward, seeds pooled.

    `panel` is T, d, n and K.
    """
    rows = rows[(rows.op == "experts") & rows["mode"].isin(tuple(_PASSES)) & rows.router.isin(tuple(common.ROUTERS))]
    rows = load.one_series(common.once_per_point(rows, SWEEP))
    data = common.label_routers(load.with_backward(load.pool_seeds(rows)))
    panel = [common.fixed_k_panel(*sizes) for sizes in data[["T", "d", "n", "K"]].itertuples(index=False)]
    return data.assign(panel=panel)


def gains(data: pd.DataFrame) -> pd.DataFrame:
    """`common.rounding_gains` with the gain that padding predicts, in percent."""
    out = common.rounding_gains(data, paper.fig16(), ["panel", "env_id"])
    parts = [_parts(kernels) for kernels in out.rounding_kernels]
    out = out.assign(gemm_ms=[gemms for gemms, _ in parts], rest_ms=[rest for _, rest in parts])
    gemms, rest = _backward(out, "gemm_ms"), _backward(out, "rest_ms")
    more = (1 + out.topk_padding) / (1 + out.rounding_padding) - 1
    return out.assign(gemm_ms=gemms, rest_ms=rest, predicted=100 * gemms * more / (gemms + rest))


def _parts(kernels: list[dict[str, object]]) -> tuple[float, float]:
    """Milliseconds of the kernels with FLOPs and of all others; NaN where no kernel has any."""
    gemms = sum(kernel["us"] for kernel in kernels if kernel["flops"])
    return (gemms / 1e3, sum(kernel["us"] for kernel in kernels) / 1e3 - gemms / 1e3) if gemms else (np.nan, np.nan)


def _backward(out: pd.DataFrame, column: str) -> pd.Series:
    """The column, of the derived backward as the difference of the two passes."""
    keys = [*_SIZES, "who", "env_id"]
    both, forward = (common.lookup(out, out[out["mode"] == mode], keys, column) for mode in ("fwd_bwd", "fwd"))
    return out[column].where(out["mode"] != "bwd", both - forward)


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One column per panel of Fig 16; per pass a row of rates and a row of gains."""
    names = common.fixed_k_panels(data)
    passes = [mode for mode in _PASSES if data[data["mode"] == mode].tflops.notna().any()]
    found = gains(data)
    sheet = common.panels(figure, 2 * len(passes), len(names), size=(2.5, 1.55), gap=(0.45, 0.2))
    paper_drawn = False
    for column, name in enumerate(names):
        sheet.axes[0, column].set_title(name)
        here, pairs = data[data.panel == name], found[found.panel == name]
        ratios = common.rho_ticks(here)
        for number, mode in enumerate(passes):
            rate, gain = sheet.axes[2 * number : 2 * number + 2, column]
            lines = here[here["mode"] == mode]
            common.draw_series(rate, lines, "E", "tflops")
            label = f"{_PASSES[mode]},\nmodel TFLOP/s{common.time_note(data)}" if column == 0 else ""
            if lines.empty:
                _say_no_row(rate, label)
            else:
                common.value_axis(rate, label, log=common.on_cpu(data))
            paper_drawn |= _draw_gains(gain, pairs[pairs["mode"] == mode])
            gain.set_ylabel(f"{_PASSES[mode]},\ngain of rounding, %" if column == 0 else "")
            for ax in (rate, gain):
                common.size_axis(ax, ratios, common.RHO_LABEL, ratios.get)
                ax.xaxis.label.set_visible(ax is sheet.axes[-1, column])
    common.share_gains(sheet.axes[1::2].flat)
    drawn = data[data["mode"].isin(passes)]
    handles = common.series_handles(drawn, "tflops")
    if found[found["mode"].isin(passes)].predicted.notna().any():
        handles.append(common.formula_handle("gain that padding predicts (GEMMs and the rest)"))
    handles += [common.paper_handle("paper, H100 (Fig 16, stated in its text)", line=False)] if paper_drawn else []
    sheet.finish(
        TITLE, common.provenance(data), handles, [*common.gain_notes(found, _PASSES), *common.notes(drawn, "tflops")]
    )


def _say_no_row(ax: Axes, label: str) -> None:
    """In the place of the rates of a pass of which the panel has no row."""
    ax.set(ylabel=label, yticks=[])
    ax.annotate(
        "\N{MULTIPLICATION SIGN} no row", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", fontsize=6,
        color=common.GREY,
    )  # fmt: skip


def _draw_gains(ax: Axes, pairs: pd.DataFrame) -> bool:
    """The measured gains, the predicted ones dotted, and the paper's; whether there were any of the paper."""
    ax.axhline(0, color=common.GREY, linewidth=0.7, zorder=1)
    for number, (_, group) in enumerate(pairs.groupby("who", sort=False)):
        if not group.gain.notna().any():
            continue
        impl, line = group.impl.iloc[0], group.sort_values("E")
        style = common.style_of(impl, 0) | {"linewidth": 1.6 - 0.5 * (number > 0)}
        ax.plot(line.E, line.gain, **style, zorder=3)
        ax.plot(line.E, line.predicted, color=style["color"], linewidth=0.9, linestyle=(0, (1, 1)), zorder=2)
    # The paper's gains stand where ours do, once a shape.
    shown = pairs[pairs.gain.notna() & pairs.paper_gain.notna()].drop_duplicates("E")
    for line in shown.itertuples():
        common.draw_paper_mark(ax, line.E, line.paper_gain, line.impl)
    return len(shown) > 0


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per panel, series, pass and E: both rates, gain, prediction and the paper's gain in percent, padding, errors."""
    out = gains(data)
    out = out[out.groupby("who")[["topk_tflops", "rounding_tflops"]].transform("count").sum(axis=1) > 0]
    out = out.assign(
        series=out.who,
        padding_expected=[paper.expected_padding(Shape(*sizes)) for sizes in out[_SIZES].itertuples(index=False)],
        _panel=out.panel.map(common.fixed_k_panels(data).index), _rank=out.impl.map(common.rank),
        _pass=out["mode"].map([*_PASSES, "bwd"].index),
    ).sort_values(["_panel", "_rank", "who", "_pass", "E"])  # fmt: skip
    columns = [
        "d", "n", "K", "E", "rho", "series", "mode", "status", "topk_ms", "rounding_ms", "topk_tflops",
        "rounding_tflops", "gain", "predicted", "paper_gain", "topk_padding", "rounding_padding", "padding_expected",
        "gemm_ms", "rest_ms", "worst_error",
    ]  # fmt: skip
    return out[columns].dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
