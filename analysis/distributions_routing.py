"""Six distributions of tokens over experts, from equal to very unequal, and the routers that even one of them out.

Model TFLOP/s of the experts alone (`op=experts`: ids and scores are given, the metadata is timed). Above, a group of
bars per distribution; below each stands the time of `sonic` over its own under `balanced` (under `uniform` where that
was not measured): work stays, since every token still has K experts, and only the experts' sizes part. Below, the
routers under zipf, where work does not stay: token dropping, expert choice and rounding keep other pairs than the T K
of top-K, and model FLOPs count the pairs that are kept. Below each stand its time over that of top-K and the share of T
K that it keeps. The paper times no such routing, so nothing of it stands beside.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import common, figures, load

SWEEP = "distributions"
TITLE = "Model TFLOP/s by the distribution of tokens over experts, and by the router"

_MODES = {"fwd": "forward", "fwd_bwd": "forward + backward"}
_SIZES = list(load.SHAPE)
#: From even to uneven; the first one that was measured is what the others' times are held against.
_DISTRIBUTIONS = ("balanced", "uniform", "learned", "lognormal", "zipf", "bursts", "hot")
_REFERENCES = _DISTRIBUTIONS[:2]
#: The distribution under which the routers are compared.
_SKEWED = "zipf"
#: Two lines each, so that the numbers below them align.
_ROUTERS = {
    "topk": "top-K\n", "tr_nearest_freq": "token\nrounding", "token_drop": "token\ndrop",
    "expert_choice": "expert\nchoice", "grouped": "grouped\n", "laser": "LASER\n",
}  # fmt: skip


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Given experts in both passes, seeds pooled, in two `part`s: `given` (top-K under every distribution) and
    `routers` (every router under zipf, of implementations that have more than top-K); a line may be in both.

    `group` names the bars' group: a distribution or a router. `over` is the time over that of the group `against`, in
    one series at one shape on one card; NaN where one of them is missing. `kept` is R over T K.
    """
    rows = load.one_series(rows[(rows.op == "experts") & rows["mode"].isin(tuple(_MODES))])
    pooled = load.pool_seeds(rows)
    topk = pooled.router == common.TOPK
    given = pooled[topk]
    given = given.assign(part="given", group=given.distribution + given.alpha.map(_number))
    others = pooled[~topk & (pooled.distribution == _SKEWED)]
    routers = pooled[(pooled.distribution == _SKEWED) & pooled.impl.isin(others.impl)]
    several = routers.groupby("router").router_tile.transform("nunique") > 1
    routers = routers.assign(part="routers", group=routers.router + routers.router_tile.where(several).map(_number))
    both = pd.concat([given, routers], ignore_index=True)
    if not both.ms.notna().any():
        raise load.NothingLeft("no experts were measured under top-K or zipf")
    # Labelled as if the routing were the same: it is an axis and no series.
    same = {"distribution": "uniform", "alpha": float("nan"), "router": common.TOPK, "router_tile": float("nan")}
    data = common.label_series(both.assign(**same)).assign(**{name: both[name] for name in same})
    data = data.assign(card=data.card.fillna("untold"), kept=common.ratio(data.R, data["T"] * data.K))
    data = data.assign(against=data.part.map({"given": _reference(data), "routers": common.TOPK}))
    own = data[(data.group == data.against) & data.ms.notna()]
    keys = ["part", "card", *_SIZES, "mode", "series"]
    return data.assign(over=common.ratio(data.ms, common.lookup(data, own, keys, "ms")))


def _number(value: float) -> str:
    return "" if pd.isna(value) else f" {value:g}"


def _reference(data: pd.DataFrame) -> str | None:
    measured = set(data[(data.part == "given") & data.ms.notna()].group)
    return next((name for name in _REFERENCES if name in measured), None)


def _groups(data: pd.DataFrame, part: str) -> list[str]:
    """The groups of a part in the order of its table, unknown ones behind the known."""
    order = list(_DISTRIBUTIONS if part == "given" else _ROUTERS)
    names = data[data.part == part].drop_duplicates("group").sort_values(["alpha", "router_tile", "group"]).group
    place = {name: order.index(first) if (first := name.split()[0]) in order else len(order) for name in names}
    return sorted(names, key=place.__getitem__)


def _parts(data: pd.DataFrame) -> list[tuple[str, str]]:
    """The rows of panels: (part, mode) of which anything was measured."""
    there = set(data[data.ms.notna()][["part", "mode"]].itertuples(index=False, name=None))
    return [(part, mode) for part in ("given", "routers") for mode in _MODES if (part, mode) in there]


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One column per shape; a row per pass with the distributions, below them a row per pass with the routers."""
    shapes, parts, styles = common.shapes_in_order(data), _parts(data), common.bar_styles(data, "ms")
    most = max(
        len(_groups(data, part)) * (len(common.styles_within(data[data.part == part], styles)) + 0.8)
        for part, _ in parts
    )
    width = max(3.7, 0.17 * most)
    sheet = common.panels(figure, len(parts), len(shapes), size=(width, 1.55), share_x=False, gap=(0.3, 1.08))
    for row, (part, mode) in enumerate(parts):
        groups = _groups(data, part)
        shown = common.styles_within(data[data.part == part], styles)
        for column, sizes in enumerate(shapes):
            ax = sheet.axes[row, column]
            here = data[data.part.eq(part) & data["mode"].eq(mode) & (data[_SIZES] == list(sizes)).all(axis=1)]
            form = ".2g" if common.on_cpu(data) else ".0f"
            common.draw_bars(ax, here, shown, "group", "tflops", groups, data.tflops.max(), form)
            _ticks(ax, here, groups, part)
            under = f"routers under {_SKEWED}, " if part == "routers" else ""
            ax.set_title(f"{common.shape_name(*sizes)}, {under}{_MODES[mode]}")
            ax.set_ylabel(f"model TFLOP/s{common.time_note(data)}" if column == 0 else "")
    common.share_scale(sheet)
    once = data.drop_duplicates(list(load.POINT))
    notes = [*_over_notes(data), *_router_notes(data), *common.one_card_notes(data), *common.notes(once)]
    sheet.finish(TITLE, common.provenance(data), common.bar_handles(data, "ms"), notes)


def _ticks(ax: Axes, here: pd.DataFrame, groups: list[str], part: str) -> None:
    """The groups' names, and below each what `sonic` needs over the reference, of the routers also what they keep."""
    found = _compared(here).set_index("group")
    ticks = []
    for name in groups:
        first, *rest = name.split()
        tick = " ".join([_ROUTERS.get(first, f"{first}\n") if part == "routers" else first, *rest])
        line = found.loc[name] if name in found.index else None
        numbers = [] if line is None or pd.isna(line.over) else [f"{line.over:.3f}"]
        if part == "routers" and line is not None and pd.notna(line.kept):
            numbers = [*(numbers or ["\N{EN DASH}"]), f"{line.kept:.1%}"]
        ticks.append("\n".join([tick, *numbers]))
    ax.set_xticks(range(len(groups)), ticks)
    against = here.against.dropna()
    if len(found) and len(against):
        words = "top-K" if part == "routers" else against.iloc[0]
        more = ", and pairs kept of T K" if part == "routers" else ""
        ax.set_xlabel(f"below: time of {found.series.iloc[0]} over that of {words}{more}", fontsize=6.5)


def _compared(lines: pd.DataFrame) -> pd.DataFrame:
    """One line of `sonic` per part, shape, pass and group: of the first of its series that was measured there."""
    ours = lines[(lines.impl == load.OURS) & lines.ms.notna()].sort_values("variant", kind="stable")
    return ours.drop_duplicates(["part", *_SIZES, "mode", "group"])


def _over_notes(data: pd.DataFrame) -> list[str]:
    """What each distribution adds to the reference, a line per series over all shapes and passes."""
    given = data[(data.part == "given") & data.ms.notna()]
    notes = []
    for name, lines in common.series_of(given[given.over.notna() & (given.group != given.against)]):
        found = lines.groupby("group").over
        words = ", ".join(f"{group} {_range(found.get_group(group))}" for group in _groups(lines, "given"))
        notes.append(f"Time over that of {lines.against.iloc[0]}, {name}: {words}.")
    without = given[given.over.isna()]
    if len(without):
        missing = _reference(data) or " or ".join(_REFERENCES)
        notes.append(f"No {missing} row to compare with: {', '.join(sorted(without.series.unique()))}.")
    return notes


def _router_notes(data: pd.DataFrame) -> list[str]:
    lines = data[(data.part == "routers") & data.over.notna() & (data.group != data.against)]
    if lines.empty:
        return []
    found = _compared(lines).groupby("group").over
    words = ", ".join(
        f"{name} {_range(found.get_group(name))}" for name in _groups(lines, "routers") if name in found.groups
    )
    return [f"Time over that of top-K under {_SKEWED}, {load.OURS}: {words}."] if words else []


def _range(values: pd.Series) -> str:
    low, high = f"{values.min():.3f}", f"{values.max():.3f}"
    return low if low == high else f"{low} to {high}"


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per shape, part, pass, group and series: ms, model TFLOP/s, the time over that of `against`, the share of T K
    that is kept, padding and the worst error."""
    out = data[data.groupby("series").ms.transform("count") > 0]
    shapes = common.shapes_in_order(data)
    groups = {part: _groups(data, part) for part in ("given", "routers")}
    out = out.assign(
        _shape=[shapes.index(sizes) for sizes in out[_SIZES].itertuples(index=False, name=None)],
        _mode=out["mode"].map(list(_MODES).index), _rank=out.impl.map(common.rank),
        _group=[groups[part].index(name) for part, name in zip(out.part, out.group, strict=True)],
    ).sort_values(["_shape", "part", "_mode", "_group", "_rank", "variant"])  # fmt: skip
    columns = [
        *_SIZES, "part", "mode", "group", "series", "status", "ms", "tflops", "against", "over", "kept", "padding",
        "worst_error",
    ]  # fmt: skip
    return out[columns].reset_index(drop=True).dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
