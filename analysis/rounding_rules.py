"""Six ways to round an expert's tokens to a multiple of the tile (F.2), and what a router costs by itself.

Above, model TFLOP/s of the experts alone (`op=experts`) under top-K and under each rule. Below each bar stand its
padding (FLOPs that tiles of partly filled rows add; none where loads are multiples of the tile) and its rows R over T
K: a rule that rounds up adds pairs and one that rounds down drops them, and model FLOPs count the pairs that are kept,
so that equal rates at more rows mean more time. Below, the time of a router with the sort by expert (`op=routing`) in
us over E, and over that of top-K. The paper states no rate of the other rules, so nothing of it stands beside.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import common, figures, load, paper
from sonic.shapes import Shape

SWEEP = "token_rounding"
TITLE = "Rules of token rounding: rate of the experts, and what the router costs"

_MODES = {"fwd": "forward", "fwd_bwd": "forward + backward"}
_SIZES = list(load.SHAPE)
#: Every method has a colour of its own here: all are of one implementation.
_LOOKS = {
    common.TOPK: common.Look("#4d4d4d", "o"),
    common.ROUNDING: common.Look("#c8102e", "s"),
    "tr_stochastic_freq": common.Look("#f28e2b", "^"),
    "tr_nearest_score": common.Look("#1f77b4", "D"),
    "tr_balance": common.Look("#2ca02c", "v"),
    "tr_up": common.Look("#8a56c2", "P"),
    "tr_down": common.Look("#17becf", "X"),
}
_DASHES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)))


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Two ops, seeds pooled: `experts` at the shapes and of the implementations that have a rule beside top-K and
    rounding by frequency, both passes; `routing` with every method, forward.

    `way` is the method, with its tile where it has several; `us` is for `routing`. `over_topk` is the time over that of
    top-K in one series at one shape on one card, `gain` that of the rate in percent; `extra` is R over T K, less 1.
    """
    rows = rows[rows.router.isin(tuple(_LOOKS))]
    experts = rows[(rows.op == "experts") & rows["mode"].isin(tuple(_MODES))]
    rules = experts[~experts.router.isin(tuple(common.ROUTERS))]
    points = set(rules[["impl", *_SIZES]].itertuples(index=False, name=None))
    experts = experts[[point in points for point in experts[["impl", *_SIZES]].itertuples(index=False, name=None)]]
    routing = rows[(rows.op == "routing") & (rows["mode"] == "fwd")]
    if not rules.ms.notna().any() and not routing.ms.notna().any():
        raise load.NothingLeft(f"no rule beside {common.ROUNDING} was measured, and no router alone")
    load.one_series(pd.concat([experts, routing]))
    data = pd.concat([_labelled(load.pool_seeds(part)) for part in (experts, routing) if len(part)], ignore_index=True)
    data = data.assign(card=data.card.fillna("untold"), us=1e3 * data.ms.where(data.op == "routing"))
    panel = [common.fixed_k_panel(*sizes) for sizes in data[["T", "d", "n", "K"]].itertuples(index=False)]
    own = data[(data.router == common.TOPK) & data.ms.notna()]
    keys = ["op", "card", *_SIZES, "mode", "series"]
    over, rate = (common.ratio(data[name], common.lookup(data, own, keys, name)) for name in ("ms", "tflops"))
    return data.assign(
        panel=panel, over_topk=over, gain=(100 * (rate - 1)).where(data.op == "experts"),
        extra=common.ratio(data.R, data["T"] * data.K) - 1,
    )  # fmt: skip


def _labelled(pooled: pd.DataFrame) -> pd.DataFrame:
    """With `series`, whose name is without the router: that is an axis here."""
    several = pooled.groupby("router").router_tile.transform("nunique") > 1
    tile = pooled.router_tile.where(several).map(lambda tile: "" if pd.isna(tile) else f", tile {tile:g}")
    labelled = common.label_series(pooled.assign(router=common.TOPK, router_tile=float("nan")))
    return labelled.assign(router=pooled.router, router_tile=pooled.router_tile, way=pooled.router + tile)


def _ways(data: pd.DataFrame) -> list[str]:
    """The values of `way` of which there is any row, top-K first."""
    order = list(_LOOKS)
    named = data.drop_duplicates("way").sort_values("router_tile")
    return list(named.sort_values("router", key=lambda names: names.map(order.index), kind="stable").way)


def _look(way: str) -> common.Look:
    return _LOOKS[way.split(",")[0]]


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """A column per shape with rules and a row per pass; below them a row per panel of fixed K with the routers' time,
    and the same over top-K's."""
    experts, routing = data[data.op == "experts"], data[data.op == "routing"]
    shapes = common.shapes_in_order(experts) if experts.ms.notna().any() else []
    modes = [mode for mode in _MODES if shapes and experts[experts["mode"] == mode].ms.notna().any()]
    costs = common.fixed_k_panels(routing) if routing.ms.notna().any() else []
    columns = max(len(shapes), 2 if costs else 1)
    width = max(3.5, 0.45 * len(_ways(data)))
    sheet = common.panels(figure, len(modes) + len(costs), columns, size=(width, 1.7), share_x=False, gap=(0.55, 0.85))
    rates = sheet.axes[: len(modes)]
    for row, mode in enumerate(modes):
        for column, sizes in enumerate(shapes):
            here = experts[(experts["mode"] == mode) & (experts[_SIZES] == list(sizes)).all(axis=1)]
            _draw_rates(rates[row, column], here, _ways(experts), experts.tflops.max())
            rates[row, column].set_title(f"{_shape_words(here, sizes)}, {_MODES[mode]}")
        rates[row, 0].set_ylabel(f"model TFLOP/s{common.time_note(data)}")
    highest = max((ax.get_ylim()[1] for ax in rates.flat if ax.patches), default=1)
    for ax in rates.flat:
        ax.set_ylim(0, 1.03 * highest)
    for row, name in enumerate(costs, start=len(modes)):
        _draw_costs(sheet.axes[row, 0], sheet.axes[row, 1], routing[routing.panel == name])
        sheet.axes[row, 0].set_title(f"router and sort by expert: {name}")
        sheet.axes[row, 1].set_title("the same over top-K")
    for ax in sheet.axes.flat:
        if not ax.has_data():
            ax.set_axis_off()
    notes = [*_gain_notes(experts), *_cost_notes(routing), *common.one_card_notes(data), *common.notes(data)]
    sheet.finish(TITLE, common.provenance(data), _handles(data, bool(costs)), notes)


def _shape_words(here: pd.DataFrame, sizes: tuple[int, ...]) -> str:
    T, d, n, E, K = sizes
    return f"d={d} n={n} E={E} (\N{GREEK SMALL LETTER RHO}=1/{E / K:g})"


def _draw_rates(ax: Axes, here: pd.DataFrame, ways: list[str], top: float) -> None:
    """A bar per method, one group per series; with one series alone its padding and rows below each bar."""
    styles = {
        way: {"facecolor": to_rgb(_look(way).colour), "edgecolor": _look(way).colour, "linewidth": 0.6, "hatch": ""}
        for way in ways
    }
    who = [name for name, group in common.series_of(here) if group.tflops.notna().any()]
    if not who:
        ax.annotate("\N{MULTIPLICATION SIGN} not measured", (0.5, 0.5), xycoords="axes fraction", ha="center")
        return
    lines = here.assign(who=here.series, series=here.way)
    places = common.draw_bars(ax, lines, styles, "who", "tflops", who, top)
    if len(who) > 1:
        ax.set_xticks(range(len(who)), who)
        return
    found = here.drop_duplicates("way", keep="last").set_index("way")
    ax.set_xticks(list(places.values()), [_tick(found.loc[way]) if way in found.index else "" for way, _ in places])
    ax.tick_params(axis="x", labelsize=6.5)
    ax.set_xlabel(f"{who[0]}; below: padding, and rows beyond T K", fontsize=6.5)


def _tick(line: pd.Series) -> str:
    values = [line.padding, line.extra] if pd.notna(line.ms) else []
    return "\n".join("\N{EN DASH}" if pd.isna(value) else f"{100 * value:+.1f}%" for value in values)


def _draw_costs(time: Axes, over: Axes, lines: pd.DataFrame) -> None:
    """us over E with its p20 to p80 band, and the time over top-K's; a point that is not `ok` breaks the line, and its
    status stands at the foot of the panel of times."""
    experts = sorted(lines.E.unique())
    stacked, dashes = dict.fromkeys(experts, 0), _dashes(lines[lines.us.notna()])
    for way in _ways(lines):
        look = _look(way)
        for name, group in common.series_of(lines[lines.way == way]):
            by_E = group.drop_duplicates("E", keep="last").set_index("E").reindex(experts)
            style = {"color": look.colour, "marker": look.marker, "linestyle": dashes.get(name, "-")}
            time.plot(experts, by_E.us, **style, zorder=3)
            time.vlines(experts, 1e3 * by_E.ms_p20, 1e3 * by_E.ms_p80, color=look.colour, linewidth=0.9, zorder=2)
            over.plot(experts, by_E.over_topk, **style, zorder=3)
            for E, line in by_E[by_E.us.isna()].iterrows():
                status = "no row" if pd.isna(line.status) else "no us" if line.status == "ok" else line.status
                side = "left" if E == experts[0] else "right" if E == experts[-1] else "center"
                time.annotate(
                    f"\N{MULTIPLICATION SIGN} {status.replace('_', ' ')}", (E, 0), xycoords=("data", "axes fraction"),
                    xytext=({"left": -8, "right": 8}.get(side, 0), 3 + 8 * stacked[E]), textcoords="offset points",
                    ha=side, va="bottom", fontsize=6, color=look.colour, zorder=5,
                )  # fmt: skip
                stacked[E] += 1
    for ax, label, values in ((time, f"us{common.time_note(lines)}", lines.us), (over, "", lines.over_topk)):
        ratios = common.rho_ticks(lines)
        common.size_axis(ax, ratios, common.RHO_LABEL, ratios.get)
        common.value_axis(ax, label, log=bool(values.max() > 10 * values.min()))


def _dashes(lines: pd.DataFrame) -> dict[str, object]:
    return {name: _DASHES[number % len(_DASHES)] for number, (name, _) in enumerate(common.series_of(lines))}


def _handles(data: pd.DataFrame, lines: bool) -> list[Line2D]:
    """Legend entries: the methods, and where the routers' lines are of several series, their dashes."""
    measured = data[data.ms.notna()]
    style = {} if lines else {"marker": "s", "linestyle": "none", "markersize": 7}
    handles = []
    for way in _ways(measured):
        label = common.ROUTERS[way] if way == common.TOPK else way
        look = {"color": _look(way).colour, "marker": _look(way).marker} | style
        handles.append(Line2D([], [], label=label, **look))
    dashes = _dashes(measured[measured.op == "routing"])
    if len(dashes) > 1:
        handles += [Line2D([], [], label=name, color=common.GREY, linestyle=dash) for name, dash in dashes.items()]
    return handles


def _gain_notes(experts: pd.DataFrame) -> list[str]:
    """What each rule gains over top-K in rate, and its time over top-K's, a line per pass and series."""
    found = experts[experts.gain.notna() & (experts.router != common.TOPK)]
    notes = []
    for mode, words in _MODES.items():
        for name, group in common.series_of(found[found["mode"] == mode]):
            parts = [
                f"{way} {_range(lines.gain, '+.1f')}% (time {_range(lines.over_topk, '.3f')})"
                for way in _ways(group)
                for lines in (group[group.way == way],)
            ]
            notes.append(f"Gain over top-K, {words}, {name}: {', '.join(parts)}.")
    if experts.ms.notna().any() and not notes:
        notes.append("No point has both top-K and a rule measured on one card, so there is no gain.")
    return notes if len(experts) else []


def _cost_notes(routing: pd.DataFrame) -> list[str]:
    found = routing[routing.over_topk.notna() & (routing.router != common.TOPK)]
    parts = [f"{way} {_range(found[found.way == way].over_topk, '.2f')}" for way in _ways(found)]
    return [f"Time of a router with the sort over top-K's: {', '.join(parts)}."] if parts else []


def _range(values: pd.Series, form: str) -> str:
    low, high = format(values.min(), form), format(values.max(), form)
    return low if low == high else f"{low} to {high}"


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per op, shape, pass, series and method: ms (of a router us), model TFLOP/s, gain over top-K in percent, time over
    top-K's, padding (of top-K with what random routing makes expect), R over T K less 1, worst error."""
    out = data[data.groupby(["op", "series"]).ms.transform("count") > 0]
    shapes = common.shapes_in_order(data)
    expected = [paper.expected_padding(Shape(*sizes)) for sizes in out[_SIZES].itertuples(index=False)]
    out = out.assign(
        ms=out.ms.where(out.op == "experts"),
        tflops=out.tflops.where(out.op == "experts"),
        padding_expected=pd.Series(expected, out.index).where((out.router == common.TOPK) & (out.op == "experts")),
        _shape=[shapes.index(sizes) for sizes in out[_SIZES].itertuples(index=False, name=None)],
        _mode=out["mode"].map(list(_MODES).index), _rank=out.impl.map(common.rank),
        _way=out.way.map(_ways(data).index),
    ).sort_values(["op", "_shape", "_mode", "_rank", "variant", "_way"])  # fmt: skip
    columns = [
        "op", *_SIZES, "rho", "mode", "series", "way", "status", "ms", "us", "tflops", "gain", "over_topk", "padding",
        "padding_expected", "extra", "worst_error",
    ]  # fmt: skip
    return out[columns].reset_index(drop=True).dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
