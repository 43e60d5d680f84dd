"""What all figures share: colours, series, gaps, panels, legends, and words on where the rows come from."""

from __future__ import annotations

import math
import textwrap
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, NullLocator

from analysis import load, paper

#: rcParams of every figure. The font ships with matplotlib, so that a redrawn file is the same on every machine.
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "pdf.fonttype": 42,
    "svg.hashsalt": "sonic",
}


@dataclass(frozen=True)
class Look:
    """Colour and marker of an implementation, the same in every figure."""

    colour: str
    marker: str


#: In the order of legends. Twins of a strategy (`*_style`) carry a paler shade of the package's colour.
LOOKS = {
    "sonic": Look("#c8102e", "o"),
    "sonicmoe_official": Look("#f28e2b", "D"),
    "scattermoe": Look("#1f77b4", "s"),
    "scattermoe_style": Look("#9cc4e4", "s"),
    "megablocks": Look("#2ca02c", "^"),
    "megablocks_style": Look("#a3d99b", "^"),
    "momoe": Look("#8a56c2", "v"),
    "momoe_save_all": Look("#5b2d91", "v"),
    "momoe_style": Look("#c9b3e6", "v"),
    "megatron": Look("#8c564b", "P"),
    "deepgemm_pt": Look("#17becf", "X"),
    "deepgemm_pp": Look("#0b6e7f", "X"),
    "triton_kernels": Look("#4b4bd6", "<"),
    "moe_ops": Look("#5b7f2b", ">"),
    "liger": Look("#d9a400", "h"),
    "torch_grouped_mm": Look("#e377c2", "p"),
    "torch_grouped_mm_compiled": Look("#a8328f", "p"),
    "torch_topk": Look("#2f7fc1", "p"),
    "torch_loop": Look("#a0a023", "d"),
    "transformers": Look("#6e7781", "*"),
    "transformers_grouped": Look("#3d444d", "*"),
    "standard_style": Look("#b8bec5", "*"),
    "cublas_bmm": Look("#000000", "_"),
}

#: Colours of implementations that the table above does not know yet.
_SPARE = ("#7f3b08", "#35978f", "#c51b7d", "#4d9221", "#5e4fa2", "#d53e4f")
_DASHES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
_VARIANT_MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">")
_FAMILIES = ("hopper", "triton", "torch")

GREY = "#57606a"

#: The two routers of the paper's Figs 11, 16 and 17, and their words in legends.
TOPK, ROUNDING = "topk", "tr_nearest_freq"
ROUTERS = {TOPK: "top-K", ROUNDING: "token rounding"}

#: Of an axis with `rho_ticks`.
RHO_LABEL = "experts E  (activation ratio \N{GREEK SMALL LETTER RHO} = K/E below)"

#: The card whose rows and figures are committed: its figures lie in `figures/` itself, those of any other in a folder
#: of that card's name, so that drawing elsewhere never replaces what the README shows.
HOME_GPU = "nvidia-h200"

#: Bytes of an element.
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}

#: Busy time this far above the event time of the same call needs faster clocks in the event pass: no call ends before
#: its kernels do.
CLOCKS_DIFFER = 1.03


def look(impl: str) -> Look:
    """Colour and marker of an implementation; one without an entry gets a spare colour that follows from its name."""
    return LOOKS.get(impl) or Look(_SPARE[zlib.crc32(impl.encode()) % len(_SPARE)], "8")


def rank(impl: str) -> tuple[int, str]:
    """Sort key of an implementation: the order of the table, then the name."""
    return (list(LOOKS).index(impl) if impl in LOOKS else len(LOOKS), impl)


def size_panel(T: int, d: int, n: int, E: int, K: int) -> str:
    """What stays along granularity: the paper's model size where it has this one, T, d, nE and nK."""
    name = paper.size_name(T, d, n, E, K)
    sizes = f"T={T} d={d} nE={n * E} nK={n * K}"
    return f"{name}: {sizes}" if name else sizes


def size_panels(data: pd.DataFrame) -> list[str]:
    """The values of the column `panel` made by `size_panel`, the paper's sizes first."""
    order = list(paper.SIZES)
    return sorted(
        data.panel.unique(), key=lambda name: (order.index(name.split(":")[0]) if ":" in name else len(order), name)
    )


def shape_name(T: int, d: int, n: int, E: int, K: int) -> str:
    """`7B n=256` for a shape of the paper's sizes, else all five sizes."""
    name = paper.size_name(T, d, n, E, K)
    return f"{name} n={n}" if name else f"T={T} d={d} n={n} E={E} K={K}"


def shapes_in_order(data: pd.DataFrame) -> list[tuple[int, int, int, int, int]]:
    """The shapes of a table: the paper's sizes from small to large, then n, then all others."""
    order = list(paper.SIZES)

    def place(sizes: tuple[int, int, int, int, int]) -> tuple[int, ...]:
        name = paper.size_name(*sizes)
        return (order.index(name) if name else len(order), sizes[2], *sizes)

    return sorted(data[list(load.SHAPE)].drop_duplicates().itertuples(index=False, name=None), key=place)


def places(data: pd.DataFrame) -> list[str]:
    """The values of the column `place`, which names the shape of a line, in the order of `shapes_in_order`."""
    named = data.drop_duplicates(list(load.SHAPE)).set_index(list(load.SHAPE)).place
    return list(dict.fromkeys(named[sizes] for sizes in shapes_in_order(data)))


def fixed_k_panel(T: int, d: int, n: int, K: int) -> str:
    """What stays where E alone grows."""
    return f"d={d} n={n} K={K} T={T}"


def fixed_k_panels(data: pd.DataFrame) -> list[str]:
    """The values of the column `panel` made by `fixed_k_panel`, in the order of the paper's Fig 16."""
    return list(data.sort_values(["d", "n", "T", "K"]).panel.unique())


def rho_ticks(data: pd.DataFrame) -> dict[int, str]:
    """E -> its tick: E, and the activation ratio below."""
    return {E: f"{E}\n1/{E / K:g}" for E, K in sorted(set(zip(data.E, data.K, strict=True)))}


_MODEL_NAMES = {sizes: name for name, sizes in paper.MODEL_SHAPES.items()}


def model_name(T: int, d: int, n: int, E: int, K: int) -> str:
    """The open model with these sizes, else all five sizes."""
    return _MODEL_NAMES.get((T, d, n, E, K)) or f"T={T} d={d} n={n} E={E} K={K}"


def models(data: pd.DataFrame) -> list[str]:
    """The values of the column `model` made by `model_name`, in the order of the paper's figures, others after them."""
    order = list(paper.MODEL_SHAPES)
    return sorted(data.model.unique(), key=lambda name: (order.index(name) if name in order else len(order), name))


def model_ticks(data: pd.DataFrame, narrow: bool = False) -> list[str]:
    """For each of `models` its name without the tail, and its sizes; `narrow` has one size a line."""
    lines = data.drop_duplicates("model").set_index("model")
    ticks = [_model_tick(name, lines.loc[name]) for name in models(data)]
    return [tick.replace(" ", "\n") for tick in ticks] if narrow else ticks


def _model_tick(name: str, line: pd.Series) -> str:
    if name not in paper.MODEL_SHAPES:
        return f"T={line['T']} d={line.d}\nn={line.n} {line.E}/{line.K}"
    parts = name.split("-")
    short = "-".join(parts[:2] if parts[0] in ("Kimi", "Qwen3", "DeepSeek") else parts[:3] if "gpt" in name else parts)
    return f"{short.removesuffix('-1B-7B-0125')}\nd={line.d} n={line.n}\n{line.E}/{line.K}"


def once_per_point(rows: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """Rows of several sweeps, each point, whatever its seeds, from one of them only: from `sweep` where that has it.

    For figures with `ALSO`; two rows of a point would else be two lines of one series.
    """
    point = [name for name in load.POINT if name not in ("sweep", *load.SEEDS)]
    rows = rows.sort_values("sweep", key=lambda name: name != sweep, kind="stable")
    first = rows.groupby(point, dropna=False, sort=False).sweep.transform("first")
    return rows[rows.sweep == first]


def label_series(table: pd.DataFrame) -> pd.DataFrame:
    """The table with `series` (its legend name), `variant` (its number within the implementation) and `thin`.

    `thin` runs from 0 to 1 in legend order: later lines are thinner, so that one under another of the same values still
    shows.

    A series is an implementation with whatever sets its rows apart from each other: the family of `sonic`, and every
    knob, tile, dtype, op or routing that takes more than one value. So crossing one more axis adds lines instead of
    mixing them.
    """
    table = _settle_family(table)
    usual = {name: table[name].mode().iloc[0] if len(table) else None for name in ("op", "distribution")}
    names = {}
    for impl, group in table.groupby("impl", sort=False):
        varying = [
            name
            for name in load.VARIANT
            # An implementation that has only the unusual routing (the bound) must say so as well.
            if name not in ("family", "op")
            and (
                group[name].nunique(dropna=False) > 1 or (name == "distribution" and (group[name] != usual[name]).any())
            )
        ]
        for index, line in group.iterrows():
            parts = [line.family] if impl == "sonic" else []
            parts += [line.op] if line.op != usual["op"] else []
            parts += [text for name in varying if (text := _part(name, line[name]))]
            names[index] = f"{impl} ({', '.join(parts)})" if parts else impl
    table = table.assign(series=pd.Series(names, dtype=object))
    order = {}
    for impl, group in table.groupby("impl", sort=False):
        # The series with the most rows is the one the sweep is about, so it gets the solid line.
        size = group.series.map(group.series.value_counts())
        found = group.assign(_family=group.family.map(_family_rank), _size=-size).drop_duplicates("series")
        found = found.sort_values(["_family", "_size", "tile_m", "series"])
        order |= {(impl, series): number for number, series in enumerate(found.series)}
    table = table.assign(variant=[order[impl, series] for impl, series in zip(table.impl, table.series, strict=True)])
    names = [name for name, group in series_of(table) if group.ms.notna().any()]
    thin = {name: number / max(1, len(names) - 1) for number, name in enumerate(names)}
    return table.assign(thin=table.series.map(thin).fillna(0.0))


def label_routers(table: pd.DataFrame) -> pd.DataFrame:
    """`label_series` for lines of the two `ROUTERS`, in words; `who` is the series' name without its router."""
    # The names of two routers of one implementation would else differ by the tile of the rounding as well.
    tiles = table[table.router == ROUNDING].router_tile
    table = label_series(table if tiles.nunique(dropna=False) > 1 else table.assign(router_tile=np.nan))
    series = who = table.series
    for router, words in ROUTERS.items():
        series = series.str.replace(f"router={router}", words, regex=False)
        who = who.str.replace(rf"(, )?router={router}(, router_tile=\d+)?", "", regex=True)
    return table.assign(series=series, who=who.str.replace(r" ?\(\)", "", regex=True))


def rounding_gains(data: pd.DataFrame, stated: pd.DataFrame, keep: Sequence[str]) -> pd.DataFrame:
    """One line per shape, mode and `who` of `label_routers`, with the columns of `keep`: what both routers have, and
    the gain of rounding over top-K in model TFLOP/s beside that of `stated` (a table of `paper`).

    Gains are percent. A point of which only one router was measured keeps its line and has no gain.
    """
    groups = data.groupby([*load.SHAPE, "who", "mode"], sort=False)
    out = pd.DataFrame([_gain(group, keep) for _, group in groups])
    stated = stated.assign(mode=stated.quantity.str.removesuffix(" gain"))
    paper_gain = lookup(out, stated, [*load.SHAPE, "mode"], "value")
    return out.assign(
        gain=100 * (ratio(out.rounding_tflops, out.topk_tflops) - 1), paper_gain=paper_gain.where(out.impl == "sonic")
    )


def _gain(group: pd.DataFrame, keep: Sequence[str]) -> dict[str, object]:
    parts = {router: group[group.router == router].iloc[-1] for router in ROUTERS if (group.router == router).any()}
    first = next(iter(parts.values()))
    line = {name: first[name] for name in (*load.SHAPE, "rho", "impl", "who", "mode", *keep)}
    line["status"] = ", ".join(dict.fromkeys(part.status for part in parts.values()))
    for router, name in ((TOPK, "topk"), (ROUNDING, "rounding")):
        for column in ("ms", "tflops", "padding"):
            line[f"{name}_{column}"] = parts[router][column] if router in parts else np.nan
    line["rounding_kernels"] = parts[ROUNDING].kernels if ROUNDING in parts else []
    line["worst_error"] = group.worst_error.max()
    return line


def gain_notes(found: pd.DataFrame, passes: dict[str, str]) -> list[str]:
    """Least and most gain of `rounding_gains` per `who` and pass; in whose absence the figure says so."""
    notes = []
    for who, group in found.groupby("who", sort=False):
        parts = []
        for mode, words in passes.items():
            part = group[(group["mode"] == mode) & group.gain.notna()]
            if len(part):
                parts.append(f"{words} {part.gain.min():+.1f}% to {part.gain.max():+.1f}% over {len(part)} points")
        if parts:
            notes.append(f"Gain of rounding, {who}: {'; '.join(parts)}.")
    return notes or ["No point has both top-K and token rounding measured, so there is no gain to draw."]


def share_gains(axes: Iterable[Axes]) -> None:
    """One scale for all gains, zero within it."""
    axes = list(axes)
    limits = [limit for ax in axes for limit in ax.get_ylim()]
    low, high = min(0.0, *limits), max(0.0, *limits)
    for ax in axes:
        ax.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))


def _family_rank(family: str) -> int:
    return _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES)


def _part(name: str, value: object) -> str:
    """A knob's part of a series' name; empty for what every point starts from (null, learned routing)."""
    if pd.isna(value) or value == "learned":
        return ""
    if name in ("dtype", "distribution"):
        return str(value)
    return f"{name.removeprefix('tile_')}={value:g}" if isinstance(value, float) else f"{name}={value}"


def _settle_family(table: pd.DataFrame) -> pd.DataFrame:
    """A line that failed before its family was known joins the only family of its implementation, if it has one."""
    family = table.family.copy()
    for _, group in table.groupby("impl", sort=False):
        known = [name for name in group.family.unique() if name != "auto"]
        if len(known) == 1:
            family[group.index[group.family == "auto"]] = known[0]
    return table.assign(family=family)


def series_of(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(name, lines) of every series, in the order of legends."""
    groups = [(name, group) for name, group in table.groupby("series", sort=False)]
    return sorted(groups, key=lambda item: (rank(item[1].impl.iloc[0]), item[1].variant.iloc[0]))


def style_of(impl: str, variant: int) -> dict[str, object]:
    """Keywords of a line: colour by implementation, dashes and marker by variant."""
    base = look(impl)
    others = [marker for marker in _VARIANT_MARKERS if marker != base.marker]
    marker = base.marker if variant == 0 else others[(variant - 1) % len(others)]
    dashes = _DASHES[variant % len(_DASHES)]
    if impl == "cublas_bmm":
        return {"color": base.colour, "marker": "_", "markersize": 8, "linestyle": (0, (2, 1)), "linewidth": 1.1}
    return {"color": base.colour, "marker": marker, "linestyle": dashes}


def draw_series(
    ax: Axes, lines: pd.DataFrame, x: str, y: str, positions: Sequence[object] | None = None, statuses: bool = True
) -> None:
    """Draws every series of `lines`: the median `y` over `x`, its p20 to p80 band for times and rates, and its gaps.

    A point that is not `ok`, or that another series has and this one lacks, breaks the line; its status stands at the
    foot of the panel in the series' colour (without `statuses` it does not, where the panel above says it already).
    `positions`: evenly spaced categories for `x`; numbers as they are without it.
    """
    xs = sorted(lines[x].unique()) if positions is None else list(positions)
    place = dict(zip(xs, xs if positions is None else range(len(xs)), strict=True))
    stacked = dict.fromkeys(xs, 0)
    for _, group in series_of(lines):
        impl = group.impl.iloc[0]
        if not group[y].notna().any():
            continue  # never measured here: `missing_notes` says why
        by_x = group.drop_duplicates(x, keep="last").set_index(x).reindex(xs)
        style = style_of(impl, group.variant.iloc[0])
        at = [place[value] for value in xs]
        thin = group.thin.iloc[0]
        thickness = {"linewidth": 2.2 - 1.0 * thin, "markersize": 6.5 - 2.2 * thin} if impl != "cublas_bmm" else {}
        ax.plot(at, by_x[y].astype(float), **(style | thickness), zorder=3)
        low, high = band(by_x, y)
        ax.fill_between(at, low, high, color=style["color"], alpha=0.18, linewidth=0, zorder=2)
        ax.vlines(at, low, high, color=style["color"], linewidth=0.9, zorder=2)
        for value, line in by_x.iterrows():
            if pd.notna(line[y]) or not statuses:
                continue
            status = "no row" if pd.isna(line.status) else f"no {y}" if line.status == "ok" else line.status
            # At the edges the text turns inwards, so that it stays within its panel.
            side = "left" if value == xs[0] else "right" if value == xs[-1] else "center"
            ax.annotate(
                f"\N{MULTIPLICATION SIGN} {status.replace('_', ' ')}", (place[value], 0),
                xycoords=("data", "axes fraction"),
                xytext=({"left": -8, "right": 8}.get(side, 0), 3 + 8 * stacked[value]), textcoords="offset points",
                ha=side, va="bottom", fontsize=6, color=style["color"], zorder=5,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.4},
            )  # fmt: skip
            stacked[value] += 1


def band(lines: pd.DataFrame, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper edge of the p20 to p80 band of `ms`, `tflops` or `gbps`; of anything else the value itself."""
    middle = lines[y].to_numpy(float)
    if y == "ms":
        return lines.ms_p20.to_numpy(float), lines.ms_p80.to_numpy(float)
    if y not in ("tflops", "gbps"):
        return middle, middle
    # A rate is work over time, so the long times make its lower edge; a backward band may reach down to no time at all.
    fast = lines.ms_p20.to_numpy(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        high = np.where(fast > 0, middle * lines.ms.to_numpy(float) / fast, np.nan)
    return middle * lines.ms.to_numpy(float) / lines.ms_p80.to_numpy(float), high


def draw_paper(ax: Axes, values: pd.DataFrame, x: str, y: str) -> None:
    """The paper's values (columns impl, x, y) as hollow markers on a dotted line in the implementation's colour."""
    for impl, group in sorted(values.groupby("impl"), key=lambda item: rank(item[0])):
        line = group.sort_values(x)
        ax.plot(line[x], line[y], **_paper_style(look(impl).colour))


def _paper_style(colour: str) -> dict[str, object]:
    return {
        "color": colour, "marker": "D", "markersize": 5.5, "markerfacecolor": "white", "markeredgewidth": 1.0,
        "linestyle": (0, (1, 2.2)), "linewidth": 0.8, "zorder": 3.5,
    }  # fmt: skip


def paper_handle(text: str, line: bool = True) -> Line2D:
    """The legend entry of `draw_paper`, and without a `line` of `draw_paper_mark`."""
    return Line2D([], [], label=text, **(_paper_style(GREY) | ({} if line else {"linestyle": "none"})))


def formula_handle(text: str) -> Line2D:
    """The legend entry of a model's line."""
    return Line2D([], [], label=text, color=GREY, linewidth=0.9, linestyle=(0, (1, 1)))


def series_handles(table: pd.DataFrame, y: str) -> list[Line2D]:
    """Legend entries of the series that have at least one value of `y`."""
    return [
        Line2D([], [], label=name, **style_of(group.impl.iloc[0], group.variant.iloc[0]))
        for name, group in series_of(table)
        if group[y].notna().any()
    ]


def bar_styles(lines: pd.DataFrame, y: str) -> dict[str, dict[str, object]]:
    """Series with at least one `y`, in the order of legends, and how their bars look: full colour for the first of an
    implementation, paler and hatched for its variants."""
    found: dict[str, dict[str, object]] = {}
    seen: dict[str, int] = {}
    for name, group in series_of(lines):
        if not group[y].notna().any():
            continue
        impl = group.impl.iloc[0]
        variant = seen[impl] = seen.get(impl, -1) + 1
        colour = look(impl).colour
        red, green, blue = (1 - (1 - part) * (0.4 if variant else 1) for part in to_rgb(colour))
        found[name] = {
            "facecolor": (red, green, blue), "edgecolor": colour, "linewidth": 0.6,
            "hatch": ("", "", "////", "xxxx")[min(variant, 3)],
        }  # fmt: skip
    return found


def styles_within(lines: pd.DataFrame, styles: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Those of `styles`, as `bar_styles` gives them, whose series has a line in `lines`."""
    there = set(lines.series)
    return {name: style for name, style in styles.items() if name in there}


def bar_handles(lines: pd.DataFrame, y: str) -> list[Patch]:
    """Legend entries of `draw_bars`."""
    return [Patch(label=name, **style) for name, style in bar_styles(lines, y).items()]


def draw_bars(
    ax: Axes, lines: pd.DataFrame, styles: dict[str, dict[str, object]], x: str, y: str, positions: Sequence[object],
    top: float, form: str = ".0f",
) -> dict[tuple[str, object], float]:  # fmt: skip
    """A group of bars at every position, one bar per series of `styles`: the median `y` with its p20 to p80 band for
    times and rates, its value at the foot, and in the place of a missing bar the status.

    `top`: the highest bar on this scale; a bar too low for its value carries it on its head, beyond the paper's mark of
    a column `paper`, one below zero above itself. Returns where the bar of (series, position) stands.
    """
    width = 0.86 / max(1, len(styles))
    places = {}
    for number, (name, style) in enumerate(styles.items()):
        group = lines[lines.series == name].drop_duplicates(x, keep="last").set_index(x).reindex(positions)
        low, high = band(group, y)
        at = np.arange(len(positions)) + (number - (len(styles) - 1) / 2) * width
        ax.bar(at, group[y].astype(float), width * 0.94, zorder=2, **style)
        if y in ("ms", "tflops", "gbps"):
            ax.vlines(at, low, high, color="black", linewidth=0.7, zorder=3)
        halo = [withStroke(linewidth=2, foreground=style["facecolor"])] if style["hatch"] else []
        dark = np.dot(style["facecolor"], (0.3, 0.59, 0.11)) < 0.6
        for place, position, (_, line) in zip(at, positions, group.iterrows(), strict=True):
            places[name, position] = float(place)
            there, inside = pd.notna(line[y]), line[y] > 0.25 * top
            mark = line.get("paper")
            beyond = mark if there and not inside and pd.notna(mark) and mark < 0.4 * top else 0
            status = "no row" if pd.isna(line.status) else f"no {y}" if line.status == "ok" else line.status
            ax.annotate(
                format(line[y], form) if there else f"\N{MULTIPLICATION SIGN} {status.replace('_', ' ')}",
                (place, max(line[y], beyond, 0) if there and not inside else 0), xytext=(0, 5 if beyond else 3),
                textcoords="offset points", rotation=90, ha="center", va="bottom", fontsize=5.5, zorder=4,
                color=("white" if dark else "#1b1f24") if inside else style["edgecolor"],
                path_effects=halo if inside else [],
            )  # fmt: skip
    ax.set_xlim(-0.55, len(positions) - 0.45)
    ax.grid(False, axis="x")
    ax.tick_params(axis="x", length=0)
    return places


def draw_paper_mark(ax: Axes, at: float, value: float, impl: str) -> None:
    """One value of the paper as a hollow marker in the implementation's colour."""
    ax.plot([at], [value], **(_paper_style(look(impl).colour) | {"markersize": 4.5, "zorder": 5}))


def draw_paper_marks(ax: Axes, lines: pd.DataFrame, x: str, places: dict[tuple[str, object], float]) -> bool:
    """The column `paper` of `lines` as marks on the bars at `places` (as `draw_bars` gives them for `x`), of several
    series of an implementation on the first one; whether there was any."""
    shown = lines[lines.paper.notna() & lines.series.isin({name for name, _ in places})]
    shown = shown.sort_values("variant").drop_duplicates([*load.SHAPE, "impl"])
    for _, line in shown.iterrows():
        draw_paper_mark(ax, places[line.series, line[x]], line.paper, line.impl)
    return len(shown) > 0


def size_axis(ax: Axes, values: Iterable[float], label: str, ticks: Callable[[float], str] = "{:g}".format) -> None:
    """A base-2 logarithmic x axis with a tick at each of `values`."""
    values = sorted(set(values))
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [ticks(value) for value in values])
    ax.minorticks_off()
    low, high = values[0], values[-1]
    ax.set_xlim(low / 1.35, high * 1.35)
    ax.set_xlabel(label)


def value_axis(ax: Axes, label: str, log: bool = False) -> None:
    """A y axis from zero with room for gaps' statuses, or a logarithmic one."""
    ax.set_ylabel(label)
    if log:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        low /= 1.6
        ax.set_ylim(low, high)
        # Within few decades 1, 2 and 5 carry labels; plain numbers, as on the other axes.
        near = high / low < 300
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if near else (1,), numticks=20))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        ax.set_ylim(0, ax.get_ylim()[1] * 1.04)


def byte_unit(largest: float) -> tuple[int, str]:
    """Bytes of the unit in which a panel's largest value reads well, and its name."""
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if largest >= size / 4:
            return size, name
    return 1 << 10, "KiB"


def held_lines(data: pd.DataFrame) -> pd.DataFrame:
    """The lines whose memory is drawn: of series that ran, and of forward with backward where there is such."""
    ran = data[data.series.isin(data.series[data.ms.notna()])]
    both = ran[ran["mode"] == "fwd_bwd"]
    return both if both.held_bytes.notna().any() else ran


@dataclass(frozen=True)
class Sheet:
    """Panels of a fixed size in inches; `finish` puts the words around them, so that nothing overlaps."""

    figure: Figure
    axes: np.ndarray  # (rows, columns) of Axes
    size: tuple[float, float]
    gap: tuple[float, float]

    def finish(self, title: str, subtitle: str, handles: Sequence[Artist] = (), notes: Iterable[str] = ()) -> None:
        """Title and provenance above, legend and notes below; sets the figure's size. Call it last."""
        rows, columns = self.axes.shape
        panels = list(self.axes.flat)
        left = 0.74 + 0.14 * max(ax.get_ylabel().count("\n") for ax in self.axes[:, 0])
        left += max(0.0, 0.055 * (max(_tick_width(ax) for ax in self.axes[:, 0]) - 5))
        grid_w = columns * self.size[0] + (columns - 1) * self.gap[0]
        grid_h = rows * self.size[1] + (rows - 1) * self.gap[1]
        width = left + grid_w + 0.2

        title_lines = textwrap.wrap(title, int(width * 12.5))
        sub_lines = textwrap.wrap(subtitle, int(width * 17.5))
        note_lines = [
            line for note in notes for line in textwrap.wrap(note, int(width * 18.5), subsequent_indent="   ")
        ]
        longest = max((len(handle.get_label()) for handle in handles), default=1)
        legend_columns = max(1, min(len(handles), int((width - 0.2) / (0.6 + 0.062 * longest))))
        legend_rows = math.ceil(len(handles) / legend_columns)

        heading = max(ax.get_title().count("\n") + 1 if ax.get_title() else 0 for ax in panels)
        top = 0.28 + 0.17 * len(title_lines) + 0.135 * len(sub_lines) + 0.15 * heading
        below_axes = 0.06 + max(0.36, 0.13 * max(_tick_lines(ax) for ax in panels) + 0.25)
        bottom = below_axes + 0.18 * legend_rows + 0.12 + 0.125 * len(note_lines)
        height = top + grid_h + bottom
        self.figure.set_size_inches(width, height)
        self.figure.subplots_adjust(
            left=left / width, right=(left + grid_w) / width, top=1 - top / height, bottom=bottom / height,
            wspace=self.gap[0] / self.size[0], hspace=self.gap[1] / self.size[1],
        )  # fmt: skip
        self.figure.align_ylabels(self.axes)

        def write(at: float, text: str, **style: object) -> None:
            self.figure.text(0.1 / width, at / height, text, va="top", **style)

        at = height - 0.13
        for line in title_lines:
            write(at, line, fontsize=9.5, weight="bold")
            at -= 0.17
        for line in sub_lines:
            write(at - 0.02, line, fontsize=7, color=GREY)
            at -= 0.135
        if handles:
            self.figure.legend(
                handles=list(handles), loc="upper center", ncols=legend_columns,
                bbox_to_anchor=(0.5, (bottom - below_axes) / height), borderaxespad=0, handlelength=2.6,
                columnspacing=1.3, labelspacing=0.45,
            )  # fmt: skip
        for number, line in enumerate(reversed(note_lines)):
            write(0.17 + 0.125 * number, line, fontsize=6.5, color=GREY)


def panels(figure: Figure, rows: int, columns: int, size: tuple[float, float] = (2.7, 2.1), share_x: bool = True,
           gap: tuple[float, float] = (0.5, 0.3)) -> Sheet:  # fmt: skip
    """A sheet of (rows, columns) panels of `size` inches, `gap` inches apart; a single column is made wider."""
    axes = figure.subplots(rows, columns, squeeze=False, sharex="col" if share_x else False)
    return Sheet(figure, axes, size if columns > 1 else (max(size[0], 4.4), size[1]), gap)


def share_scale(sheet: Sheet) -> None:
    """One y axis from zero for all panels, labelled in the first column."""
    top = max(ax.get_ylim()[1] for ax in sheet.axes.flat) * 1.03
    for ax in sheet.axes.flat:
        ax.set_ylim(0, top)
    for ax in sheet.axes[:, 1:].flat:
        ax.tick_params(labelleft=False)


def _tick_width(ax: Axes) -> int:
    texts = [label.get_text() for label in ax.get_yticklabels()]
    return max(
        (4 if "$" in text else len(text) for text in texts), default=0
    )  # powers of ten are TeX: longer than they look


def _tick_lines(ax: Axes) -> int:
    return max((label.get_text().count("\n") + 1 for label in ax.get_xticklabels()), default=1)


_CLOCK_WORDS = {
    "device": "device time (union of kernel intervals)",
    "event": "CUDA-event time of the eager call",
    "span": "span from first kernel start to last kernel end",
    "graph": "CUDA-graph replay",
}


def on_cpu(data: pd.DataFrame) -> bool:
    """Whether the rows were taken on a CPU, whose times say nothing about a GPU."""
    return bool((data.gpu == load.CPU).all())


def time_note(data: pd.DataFrame) -> str:
    """A line under a time or rate label: what the clock was, and on a CPU that it is not a GPU's speed."""
    if not on_cpu(data):
        return ""
    return (
        "\nCPU wall time, Triton interpreted;\nnot GPU speed"
        if data.interpreter.any()
        else "\nCPU wall time; not GPU speed"
    )


def provenance(data: pd.DataFrame, untimed: str | None = None) -> str:
    """One line on where the numbers come from: card, dtype, op, clock, L2, method version, commits.

    A figure without times gives in `untimed` what stands in place of the clock.
    """
    measured = data[data.ms.notna() & ~data.derived]
    if on_cpu(data):
        clock = "CPU wall time" + (" (Triton kernels in the interpreter)" if data.interpreter.any() else "")
    else:
        clock = _CLOCK_WORDS[data.clock.iloc[0]]
    methods = ", ".join(f"{version:g}" for version in sorted(data.method_version.dropna().unique()))
    commits = ", ".join(sorted({str(commit)[:10] for commit in measured.commit}))
    words = [
        ", ".join(load.gpus(data)), ", ".join(sorted(data.dtype.unique())), "op " + ", ".join(sorted(data.op.unique())),
        untimed or f"{clock}, median and p20\N{EN DASH}p80", f"method {methods or 'none'}",
        f"commit {commits or 'none'}",
    ]  # fmt: skip
    return " \N{MIDDLE DOT} ".join(words)


def notes(data: pd.DataFrame, y: str = "ms") -> list[str]:
    """What a reader must know beside the picture: series without a `y` and why, the rows' own notes, throttling."""
    return missing_notes(data, y) + row_notes(data)


def card_notes(data: pd.DataFrame) -> list[str]:
    """Where rows are of several cards: what the speeds compare, and how many of them had to take two cards."""
    measured = data[data.ms.notna() & ~data.derived]
    cards = measured.card.nunique() if "card" in measured else 1
    if cards < 2:
        return []
    lone = int(measured.sonic_ms.isna().sum())
    note = f"Rows of {cards} cards; a speed holds two rows of one card against each other"
    return [f"{note}, save {lone} of {len(measured)}." if lone else f"{note}."]


def one_card_notes(data: pd.DataFrame) -> list[str]:
    """Where rows are of several cards and ratios are of one alone."""
    cards = data[data.ms.notna()].card.nunique()
    return [f"Rows of {cards} cards; ratios hold two rows of one card against each other."] if cards > 1 else []


def row_notes(data: pd.DataFrame) -> list[str]:
    """What the measured rows say of themselves: the adapters' notes, throttling, clocks that changed between passes.

    `data` must hold every row behind the figure and its table, not only the mode that is drawn largest.
    """
    measured = data[data.ms.notna() & ~data.derived]
    older = data.attrs.get("older_method", 0)
    left_out = [f"{older} rows of an older timing method are left out (--method draws them)."] if older else []
    return _adapter_notes(measured) + _throttle_notes(measured) + _clock_notes(measured) + left_out


def missing_notes(data: pd.DataFrame, y: str = "ms") -> list[str]:
    """One note per series without a single value: its statuses and the first reason."""
    found = []
    for name, group in series_of(data):
        if group[y].notna().any():
            continue
        statuses = ", ".join(status.replace("_", " ") for status in group.status.unique())
        reason = next(
            (str(text).strip().splitlines()[-1] for text in group.reason if pd.notna(text) and str(text).strip()), ""
        )
        if not reason and (group.status == "ok").any():
            reason = f"measured, without {y if group.ms.notna().any() else f'the {group.clock.iloc[0]} time'}"
        found.append(f"Not drawn: {name}: {statuses}{f' ({textwrap.shorten(reason, 110)})' if reason else ''}")
    return found


def _adapter_notes(data: pd.DataFrame, most: int = 12) -> list[str]:
    """The notes that adapters left in measured rows (a tuner cut short), each once, with all that left it."""
    noted = data[data.note.notna()].drop_duplicates(["impl", "note"])
    noted = noted.assign(_rank=noted.impl.map(rank)).sort_values("_rank", kind="stable")
    lines = [
        f"{', '.join(group.impl)}: {textwrap.shorten(note, 160)}" for note, group in noted.groupby("note", sort=False)
    ]
    return lines[:most] + ([f"and {len(lines) - most} more notes in the rows"] if len(lines) > most else [])


def _throttle_notes(data: pd.DataFrame) -> list[str]:
    count = int(data.throttled.eq(True).sum())
    return [f"{count} of {len(data)} rows were taken while the card throttled."] if count else []


def clocks_differ(data: pd.DataFrame) -> pd.Series:
    """For every line whether its busy time is clearly above its event time."""
    return data.device_ms > CLOCKS_DIFFER * data.event_ms


def _clock_notes(data: pd.DataFrame) -> list[str]:
    found = data[clocks_differ(data)]
    if found.empty:
        return []
    most = (found.device_ms / found.event_ms - 1).max()
    return [
        f"Busy time above event time in {len(found)} of {len(data)} rows, by up to {most:.0%}: "
        "the clocks differed between the passes."
    ]


def ratio(ours: pd.Series, theirs: pd.Series) -> pd.Series:
    """Ours over theirs, NaN where either is missing."""
    return ours.astype(float) / theirs.astype(float)


def one_card_speed(data: pd.DataFrame) -> pd.Series:
    """How many times as fast as each line `sonic` is by its row of the same card; NaN without one (`load.rows`)."""
    if "sonic_ms" not in data:
        return pd.Series(np.nan, index=data.index, dtype=float)
    return ratio(data.ms, data.sonic_ms)


def geometric_mean(values: pd.Series) -> float:
    """Of positive values, those that are missing left out."""
    return float(np.exp(np.log(values).mean()))


def lookup(table: pd.DataFrame, values: pd.DataFrame, keys: Sequence[str], column: str) -> pd.Series:
    """For every line of `table` the `column` of the first line of `values` with the same `keys`, else NaN."""
    keys = list(keys)
    found = values.drop_duplicates(keys).set_index(keys)[column].to_dict()
    return pd.Series(
        [found.get(key, np.nan) for key in table[keys].itertuples(index=False, name=None)],
        index=table.index,
        dtype=float,
    )
