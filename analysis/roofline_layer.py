"""How close every kernel of the layer comes to what the card can do: its bound over its time, kernel by kernel.

The bound of a kernel is the larger of FLOPs / peak and bytes / bandwidth. The peak is the best of the cuBLAS products
of the sweep `ceilings`, the bandwidth that of its large copy (read and write), both in device time as the kernels are.
A gathered row (of X or dO) counts as read from memory once, as in `Cost.bytes_once` of `sonic.kernels`; rows of a sweep
hold the bytes with every use of it, so the uses beyond the first are taken off here. The layer's share of the roofline
is the sum of the bounds over the sum of the times, without router and metadata, which have no bound here.

The paper draws no roofline; the aim and the floor are the project's own, for forward with backward at 7B n=256.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis import common, figures, load

SWEEP = "throughput"
BESIDE = ("ceilings",)
TITLE = "The layer's kernels against the roofline of the card"

#: Share of the roofline that the project asks for at `SHOWN`, forward with backward.
AIM, FLOOR = 0.80, 0.75
#: The shape whose kernels are drawn, where it was measured.
SHOWN = (24576, 1536, 256, 128, 8)

_MODES = {"fwd": "forward", "fwd_bwd": "forward + backward"}
_SIZES = list(load.SHAPE)
#: Function -> the layer's steps that launch it, in launch order. Both families use these names.
_STEPS = {
    "_up_proj_kernel": ("up_proj",),
    "_grouped_gemm_kernel": ("down_proj", "d_input"),
    "_aggregate_kernel": ("aggregate O", "aggregate dX"),
    "_d_act_kernel": ("d_act",),
    "_weight_grad_kernel": ("weight_grad_2", "weight_grad_1"),
}
#: Steps that read rows of a (T, d) tensor through the routing.
_GATHERING = frozenset({"up_proj", "d_act", "weight_grad_1", "weight_grad_2"})
METADATA = frozenset({"_histogram_kernel", "_prefix_kernel", "_scatter_kernel", "_restore_kernel", "_tile_map_kernel"})
ROUTER = frozenset({"_topk_kernel", "_topk_backward_kernel"})
_REST = "router, metadata"


@dataclass(frozen=True)
class Roofs:
    """Peak in TFLOP/s and the product that reached it, bandwidth in GB/s; NaN where nothing was measured."""

    peak: float
    product: str
    bandwidth: float

    def bound_us(self, flops: float, size: float) -> float:
        """Least microseconds for this work: FLOPs, and bytes from or to memory."""
        return max(flops / self.peak / 1e6, size / self.bandwidth / 1e3)


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """The newest ceilings, and whole layers of `sonic` in both modes, seeds pooled, all in device time."""
    layers = (rows.impl == "sonic") & (rows.op == "layer") & rows["mode"].isin(tuple(_MODES))
    rows = rows[(rows.impl == "ceilings") | layers]
    methods = rows.dropna(subset="method_version").groupby("impl").method_version.unique()
    if len(methods) == 2 and not set(methods.iloc[0]) & set(methods.iloc[1]):
        found = [f"{impl}: {', '.join(f'{value:g}' for value in sorted(values))}" for impl, values in methods.items()]
        raise load.NothingLeft(f"no method version in common ({'; '.join(found)}), measure both with one")
    rows = load.one_series(rows)
    # The profiler's times of single kernels are device times, so the roofs must be, whatever clock was asked for.
    rows = rows.assign(clock="device", ms=rows.device_ms)
    pooled = load.pool_seeds(rows)
    ceilings, layers = pooled[pooled.impl == "ceilings"], pooled[pooled.impl == "sonic"]
    for op in ("matmul", "copy"):
        tried = ceilings[ceilings.op == op]
        if not tried.ms.notna().any():
            raise load.NothingLeft(
                f"op {op} of sweep {BESIDE[0]} has no device time: {', '.join(tried.status) or 'no row'}"
            )
    if not layers[layers.ms.notna()].kernels.map(bool).any():
        raise load.NothingLeft("no row of a layer has times of its kernels")
    newest = ceilings.sort_values("time").drop_duplicates([*_SIZES, "op", "dtype"], keep="last")
    # Labelled apart, or the ceilings would have a say in what is usual among the layers.
    return pd.concat([common.label_series(newest), common.label_series(layers)], ignore_index=True)


def roofs(data: pd.DataFrame, dtype: str) -> Roofs:
    """The best product in this dtype, and the copy."""
    products = data[(data.op == "matmul") & (data.dtype == dtype) & data.ms.notna()]
    rates = products.flops / products.ms / 1e9
    copies = data[(data.op == "copy") & data.ms.notna()]
    bandwidth = (copies.bytes / copies.ms / 1e6).max()
    if products.empty:
        return Roofs(np.nan, "no product", bandwidth)
    best = products.loc[rates.idxmax()]
    return Roofs(rates.max(), _product(best), bandwidth)


def _product(line: pd.Series) -> str:
    return "\N{MULTIPLICATION SIGN}".join(str(line[size]) for size in ("T", "n", "d"))


def kernels(data: pd.DataFrame) -> pd.DataFrame:
    """Every kernel of every measured layer, one line each: its step, us, FLOPs, bytes, bound and their ratio.

    `part` is `experts`, `router` or `metadata`; `bytes` counts a gathered row once, `bytes_per_use` at every use.
    `limit` says which roof is the bound. A kernel of the experts without a cost model has time and no bound; a bound is
    NaN where bytes are unknown (an ablation).
    """
    lines = []
    for _, row in data[(data.impl == "sonic") & data.ms.notna()].iterrows():
        roof = roofs(data, row["dtype"])
        seen: dict[str, int] = {}
        for number, kernel in enumerate(row.kernels):
            name = kernel["name"]
            nth = seen[name] = seen.get(name, -1) + 1
            steps = _STEPS.get(name, ())
            step = steps[nth] if nth < len(steps) else name
            line = {size: row[size] for size in _SIZES} | {
                "series": row.series, "variant": row.variant, "mode": row["mode"], "order": number,
                "part": _part(name), "step": step, "us": kernel["us"], "flops": kernel["flops"],
                "bytes_per_use": kernel["bytes"], "bound_us": 0.0, "limit": None,
            }  # fmt: skip
            if line["part"] == "experts" and kernel["flops"] is not None:
                line |= _bound(roof, kernel["flops"], _read_once(row, step, kernel["bytes"]))
            lines.append(line)
    found = pd.DataFrame(lines)
    numbers = ["us", "flops", "bytes", "bytes_per_use", "bound_us"]
    return found.assign(**found[numbers].astype(float)).assign(of_bound=lambda t: t.bound_us / t.us)


def _part(name: str) -> str:
    """Our own kernels are named `_..._kernel`; what else runs in a layer is torch's, which has only the router."""
    if name in METADATA:
        return "metadata"
    own = name.startswith("_") and name.endswith("_kernel")
    return "experts" if own and name not in ROUTER else "router"


def _read_once(row: pd.Series, step: str, per_use: int | None) -> float:
    """Bytes of a step with every gathered row read once: R - T reads of d elements fewer (`Cost.bytes_once`)."""
    if per_use is None:
        return np.nan
    return per_use - (common.ITEMSIZE[row["dtype"]] * (row.R - row["T"]) * row.d if step in _GATHERING else 0)


def _bound(roof: Roofs, flops: float, size: float) -> dict[str, object]:
    bound = np.nan if np.isnan(size) else roof.bound_us(flops, size)
    compute = flops / roof.peak / 1e6 >= size / roof.bandwidth / 1e3
    return {"bytes": size, "bound_us": bound, "limit": "compute" if compute else "memory"}


def totals(found: pd.DataFrame) -> pd.DataFrame:
    """Per shape, series and mode: us and bound of the experts' kernels, their ratio, us of router and metadata."""
    keys = [*_SIZES, "series", "variant", "mode"]
    lines = []
    for names, group in found.groupby(keys, sort=False):
        experts = group[group.part == "experts"]
        us, bound = experts.us.sum(), experts.bound_us.sum(skipna=False)
        lines.append(
            dict(zip(keys, names, strict=True))
            | {"us": us, "bound_us": bound, "of_bound": bound / us, "rest_us": group.us.sum() - us}
        )
    return pd.DataFrame(lines)


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """Times of one shape's kernels beside their bounds, the same kernels under the roofs, and all shapes' shares."""
    found = kernels(data)
    every = totals(found)
    shape, mode = _shown(every)
    here = found[(found[_SIZES] == list(shape)).all(axis=1) & (found["mode"] == mode)]
    layers = data[data.impl == "sonic"]
    styles = common.styles_within(every, common.bar_styles(layers, "ms"))
    height = max(3.0, 0.2 * len(common.shapes_in_order(every)), 0.16 * (len(styles) + 1) * here.step.nunique() / 2)
    sheet = common.panels(figure, 1, 3, size=(3.3, height), share_x=False, gap=(1.12, 0.3))
    times, roof, shares = sheet.axes[0]
    name = common.shape_name(*shape)
    _draw_times(times, here, styles)
    times.set_title(f"{name}, {_MODES[mode]}")
    _draw_roofs(roof, here, styles, roofs(data, layers[(layers[_SIZES] == list(shape)).all(axis=1)].dtype.iloc[0]))
    roof.set_title(f"{name}: the kernels with FLOPs, numbered as left")
    _draw_shares(shares, layers, every, styles)
    shares.set_title(f"all shapes, {_MODES['fwd_bwd']}")
    handles = [Patch(label=series, **style) for series, style in styles.items()]
    handles += [Line2D([], [], label="bound", color="black", linewidth=1.4)]
    sheet.finish(TITLE, common.provenance(data), handles, _notes(data, every, shape, mode))


def _shown(every: pd.DataFrame) -> tuple[tuple[int, ...], str]:
    """The shape and mode whose kernels are drawn: `SHOWN` where it was measured, with the backward where it was."""
    shapes = common.shapes_in_order(every)
    shape = SHOWN if SHOWN in shapes else shapes[0]
    modes = set(every[(every[_SIZES] == list(shape)).all(axis=1)]["mode"])
    return shape, "fwd_bwd" if "fwd_bwd" in modes else "fwd"


def _numbered(here: pd.DataFrame) -> dict[str, int]:
    """The steps of the experts in launch order, numbered from 1."""
    steps = here[here.part == "experts"].sort_values(["variant", "order"]).step.drop_duplicates()
    return {step: number for number, step in enumerate(steps, start=1)}


def _draw_times(ax: Axes, here: pd.DataFrame, styles: dict[str, dict[str, object]]) -> None:
    """A bar per kernel and series, its bound as a black stroke, time and ratio behind it; router and metadata last."""
    steps = [*_numbered(here), _REST]
    height = 0.84 / len(styles)
    longest = 0.0
    for number, (series, style) in enumerate(styles.items()):
        group = here[here.series == series]
        experts = group[group.part == "experts"].groupby("step", sort=False)[["us", "bound_us"]].sum(min_count=1)
        for place, step in enumerate(steps):
            rest = step == _REST
            if not rest and step not in experts.index:
                continue
            us = group[group.part != "experts"].us.sum() if rest else experts.us[step]
            bound = 0.0 if rest else experts.bound_us[step]
            at = place + (number - (len(styles) - 1) / 2) * height
            ax.barh(at, us, height * 0.92, zorder=2, **style)
            if bound > 0:
                ax.vlines(bound, at - height / 2, at + height / 2, color="black", linewidth=1.4, zorder=3)
            text = f"{us:.0f}" + (f" ({bound / us:.2f})" if bound > 0 else "")
            ax.annotate(text, (max(us, bound), at), xytext=(3, 0), textcoords="offset points", va="center", fontsize=6)
            longest = max(longest, us, bound)
    ax.set_yticks(range(len(steps)), [*(f"{number} {step}" for step, number in _numbered(here).items()), _REST])
    ax.set_ylim(len(steps) - 0.45, -0.55)
    ax.set_xlim(0, longest * 1.3)
    ax.set_xlabel("\N{GREEK SMALL LETTER MU}s  (bound over time behind the bar)")
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)


def _draw_roofs(ax: Axes, here: pd.DataFrame, styles: dict[str, dict[str, object]], roof: Roofs) -> None:
    """TFLOP/s over FLOP per byte, a gathered row read once; a whisker reaches to the bytes of every use."""
    points = here[(here.part == "experts") & (here.flops > 0) & here.bytes.notna()]
    once, per_use = points.flops / points.bytes, points.flops / points.bytes_per_use
    ridge = roof.peak * 1e3 / roof.bandwidth
    low, high = min([ridge, *per_use]) / 1.4, max([ridge, *once]) * 1.3
    xs = np.array([low, ridge, high])
    ax.plot(xs, np.minimum(roof.peak, xs * roof.bandwidth / 1e3), color="black", linewidth=1.4, zorder=2)
    numbers = _numbered(here)
    for series, style in styles.items():
        part = points[points.series == series]
        for index, line in part.iterrows():
            rate = line.flops / line.us / 1e6
            ax.hlines(rate, per_use[index], once[index], color=style["edgecolor"], linewidth=0.7, zorder=3)
            ax.plot(
                [once[index]], [rate], marker="o", markersize=8.5, zorder=4, markerfacecolor=style["facecolor"],
                markeredgecolor=style["edgecolor"], markeredgewidth=0.8,
            )  # fmt: skip
            dark = np.dot(style["facecolor"], (0.3, 0.59, 0.11)) < 0.6
            ax.annotate(
                str(numbers[line.step]), (once[index], rate), ha="center", va="center_baseline", fontsize=6, zorder=5,
                color="white" if dark else "#1b1f24",
            )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_xlim(low, high)
    slowest = (points.flops / points.us / 1e6).min()
    ax.set_ylim(0.75 * slowest if slowest > 0.3 * roof.peak else 0, roof.peak * 1.12)
    ticks = [tick for tick in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if low <= tick <= high]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    ax.annotate(
        f"{roof.peak:.0f} TFLOP/s, {roof.bandwidth / 1e3:.2f} TB/s: ridge {ridge:.0f}", (1, 1),
        xycoords="axes fraction", xytext=(-2, -2), textcoords="offset points", ha="right", va="top", fontsize=6.5,
    )  # fmt: skip
    ax.set_xlabel("model FLOP per byte  (whisker: gathered rows at every use)")
    ax.set_ylabel("model TFLOP/s")


def _draw_shares(
    ax: Axes, layers: pd.DataFrame, every: pd.DataFrame, styles: dict[str, dict[str, object]]
) -> None:  # fmt: skip
    """The share of the roofline at every shape; in the place of a missing one its status."""
    shapes = common.shapes_in_order(layers)
    both = every[every["mode"] == "fwd_bwd"]
    for number, (series, style) in enumerate(styles.items()):
        for place, shape in enumerate(shapes):
            found = both[(both.series == series) & (both[_SIZES] == list(shape)).all(axis=1)]
            value = found.of_bound.iloc[0] if len(found) else np.nan
            at = place + 0.3 * (number - (len(styles) - 1) / 2)
            if np.isfinite(value):
                ax.plot(
                    [value], [at], marker="o", markersize=5, zorder=4 - 0.1 * number,
                    markerfacecolor=style["facecolor"], markeredgecolor=style["edgecolor"],
                )  # fmt: skip
                continue
            rows = layers[
                (layers.series == series) & (layers["mode"] == "fwd_bwd")
                & (layers[_SIZES] == list(shape)).all(axis=1)
            ]  # fmt: skip
            status = "no row" if rows.empty else "no bound" if rows.status.iloc[0] == "ok" else rows.status.iloc[0]
            ax.annotate(
                f"\N{MULTIPLICATION SIGN} {status.replace('_', ' ')}", (0, at), xycoords=("axes fraction", "data"),
                xytext=(4 + 46 * number, 0), textcoords="offset points", va="center", fontsize=6,
                color=style["edgecolor"],
            )  # fmt: skip
    for value, word in ((AIM, "aim"), (FLOOR, "floor")):
        ax.axvline(value, color=common.GREY, linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=1)
        ax.annotate(
            f"{word} {value:.2f}", (value, 0), xycoords=("data", "axes fraction"),
            xytext=(2 if word == "aim" else -2, 2), textcoords="offset points",
            ha="left" if word == "aim" else "right", va="bottom", fontsize=6, color=common.GREY,
        )  # fmt: skip
    ax.set_yticks(range(len(shapes)), [common.shape_name(*shape) for shape in shapes])
    ax.set_ylim(len(shapes), -0.6)
    low = min([both.of_bound.min(), FLOOR])
    ax.set_xlim(np.floor(low * 10) / 10 - 0.1, 1.0)
    ax.set_xlabel("sum of bounds over sum of times")
    ax.tick_params(axis="y", length=0)


def _notes(data: pd.DataFrame, every: pd.DataFrame, shape: tuple[int, ...], mode: str) -> list[str]:
    layers, ceilings = data[data.impl == "sonic"], data[data.impl == "ceilings"]
    found = []
    for dtype in sorted(layers[layers.ms.notna()].dtype.unique()):
        roof = roofs(data, dtype)
        count = int((ceilings.op.eq("matmul") & ceilings.dtype.eq(dtype) & ceilings.ms.notna()).sum())
        found.append(
            f"Roofs, {dtype}: {roof.peak:.0f} TFLOP/s, the best of {count} cuBLAS products "
            f"({roof.product}, M\N{MULTIPLICATION SIGN}N\N{MULTIPLICATION SIGN}K), and {roof.bandwidth / 1e3:.2f} TB/s "
            "of a copy within the card."
        )
    found.append(
        "Bytes: a gathered row counts as read from memory once (Cost.bytes_once), worked out here from the rows' "
        "bytes, which count every use."
    )
    at = every[(every[_SIZES] == list(shape)).all(axis=1) & (every["mode"] == mode)]
    for line in at.itertuples():
        found.append(
            f"{common.shape_name(*shape)}, {_MODES[mode]}, {line.series}: {line.bound_us:.0f} of {line.us:.0f} "
            f"\N{GREEK SMALL LETTER MU}s = {line.of_bound:.3f} (aim {AIM:.2f}, floor {FLOOR:.2f}); left out: "
            f"{line.rest_us:.0f} \N{GREEK SMALL LETTER MU}s of router and metadata."
        )
    found.append(_runs_note(layers[layers.ms.notna()], ceilings[ceilings.ms.notna()]))
    for _, line in ceilings[ceilings.ms.isna()].iterrows():
        sizes = _product(line) if line.op == "matmul" else f"{line['T']}\N{MULTIPLICATION SIGN}{line.d}"
        found.append(f"No roof from {line.op} {sizes} in {line['dtype']}: {line.status.replace('_', ' ')}.")
    bare = layers[layers.ms.notna() & ~layers.kernels.map(bool)]
    if len(bare):
        found.append(f"{len(bare)} measured rows have no times of kernels and are left out.")
    return found + common.missing_notes(layers) + common.row_notes(data)


def _runs_note(layers: pd.DataFrame, ceilings: pd.DataFrame) -> str:
    """Whether roofs and layers are of one run and of one card, and how far apart in time."""
    runs = [sorted(part.run_id.unique()) for part in (ceilings, layers)]
    cards = {card if isinstance(card, str) else None for part in (ceilings, layers) for card in part.card}
    same = "which card is not recorded" if None in cards else "one card" if len(cards) == 1 else "different cards"
    if runs[0] == runs[1] and len(runs[0]) == 1:
        return f"Roofs and layers are of one run ({runs[0][0]}), {same}."
    times = [pd.to_datetime(part.time, utc=True, format="ISO8601") for part in (ceilings, layers)]
    ends = [abs((times[0].max() - moment).total_seconds()) for moment in (times[1].min(), times[1].max())]
    return (
        f"Roofs and layers are of different runs (roofs: {', '.join(runs[0])}; layers: {', '.join(runs[1])}), "
        f"up to {max(ends) / 3600:.1f} h apart, {same}."
    )


def table(data: pd.DataFrame) -> pd.DataFrame:
    """The kernels of the drawn shape, then the sums at every shape, series and mode; `kernels` gives all of them.

    TB/s are of bytes with every gathered row read once.
    """
    found = kernels(data)
    every = totals(found)
    shape, mode = _shown(every)
    single = found[(found[_SIZES] == list(shape)).all(axis=1) & (found["mode"] == mode) & (found.part == "experts")]
    single = single.sort_values(["variant", "order"]).assign(
        tflops=lambda t: t.flops / t.us / 1e6, tb_s=lambda t: t.bytes / t.us / 1e6,
        flop_per_byte=lambda t: t.flops / t.bytes,
    )  # fmt: skip
    order = {sizes: number for number, sizes in enumerate(common.shapes_in_order(every))}
    sums = every.assign(
        step="sum", _shape=[order[sizes] for sizes in every[_SIZES].itertuples(index=False, name=None)]
    ).sort_values(["_shape", "variant", "mode"])
    out = pd.concat([single, sums], ignore_index=True)
    out["shape"] = [common.shape_name(*sizes) for sizes in out[_SIZES].itertuples(index=False)]
    columns = [
        "shape", "series", "mode", "step", "us", "bound_us", "of_bound", "limit", "tflops", "tb_s", "flop_per_byte",
        "rest_us",
    ]  # fmt: skip
    return out[columns].dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
