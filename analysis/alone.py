"""What the figures of single kernels (Figs 19 to 22) share: panels per op, a group of bars per shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import common, load, paper

_SIZES = list(load.SHAPE)
#: From the fourth variant of an implementation on, where `common.bar_styles` has one hatch for all.
_HATCHES = ("xxxx", "....", "\\\\\\\\", "||||", "++++")
#: Share of an implementation's colour, and hatch, for values of a field that several implementations have.
_LOOKS = {"fused": (1.0, ""), "given": (0.4, ""), "separate": (0.4, "////")}
#: Inches that a panel may be wide: beyond, its shapes are dealt out to panels below each other.
_WIDEST = 15.0
_LABELS = {"tflops": "model TFLOP/s", "gbps": "GB/s"}


def select(rows: pd.DataFrame, ops: Sequence[str], across: bool = False) -> pd.DataFrame:
    """Rows of these ops, seeds pooled, labelled within each op, or `across` them; `place` names the shape under its
    bars."""
    rows = rows[rows.op.isin(ops)]
    if not rows.ms.notna().any():
        raise load.NothingLeft(f"none of {', '.join(ops)} was measured")
    pooled = load.pool_seeds(load.one_series(rows))
    if across:
        data = common.label_series(pooled.assign(op=ops[0])).assign(op=pooled.op)
    else:
        parts = [common.label_series(pooled[pooled.op == op]) for op in ops if (pooled.op == op).any()]
        data = pd.concat(parts, ignore_index=True)
    place = [_place(*sizes) for sizes in data[_SIZES].itertuples(index=False)]
    return data.assign(place=place, card=data.card.fillna("untold"))


def _place(T: int, d: int, n: int, E: int, K: int) -> str:
    return f"{paper.size_name(T, d, n, E, K) or f'T={T} d={d}'}\nn={n}\n{E}/{K}"


def draw(
    figure: Figure, data: pd.DataFrame, title: str, quantity: str, ops: Mapping[str, str], said: Sequence[str],
    own: Sequence[str] = (), gains: Sequence[paper.KernelGain] = (), look_of: str | None = None,
) -> None:  # fmt: skip
    """Panels of bars of `quantity` for each op of `ops` (op -> words); below, what the paper says, `gains` of its text
    with ours, and what is `own`. `look_of`: a field whose values look the same for all (`_LOOKS`)."""
    there = [op for op in ops if (data.op == op).any()]
    styles = _styles(data, quantity) if look_of is None else _looks(data, quantity, look_of)
    inches = 0.19 * (len(styles) + 0.8)
    parts = _dealt(common.places(data), max(1, int(_WIDEST / inches)))
    size = (max(4.4, inches * len(parts[0])), 1.9)
    sheet = common.panels(figure, len(there) * len(parts), 1, size=size, share_x=False, gap=(0.3, 0.75))
    form = ".2g" if common.on_cpu(data) else ".0f"
    for op, axes in zip(there, sheet.axes[:, 0].reshape(len(there), len(parts)), strict=True):
        lines = data[data.op == op]
        shown, top = common.styles_within(lines, styles), lines[quantity].max()
        for ax, places in zip(axes, parts, strict=True):
            common.draw_bars(ax, lines, shown, "place", quantity, places, top, form)
            ax.set_xticks(range(len(places)), places)
            ax.set_ylabel(f"{_LABELS[quantity]}{common.time_note(data)}")
        highest = max(ax.get_ylim()[1] for ax in axes)
        for ax in axes:
            ax.set_ylim(0, highest)
        axes[0].set_title(ops[op])
    sheet.axes[-1, 0].set_xlabel("model size, n and E/K")
    said = [*(f"The paper, H100: {text}" for text in said), *_beside(data, gains)]
    handles = [Patch(label=series, **style) for series, style in styles.items()]
    notes = [*said, *own, *common.one_card_notes(data)] if not common.on_cpu(data) else []
    sheet.finish(title, common.provenance(data), handles, notes + common.notes(data))


def _dealt(places: Sequence[str], most: int) -> list[list[str]]:
    """The places in parts of `most` at most, as equal as can be."""
    count = -(-len(places) // most)
    each = -(-len(places) // count)
    return [list(places[at : at + each]) for at in range(0, len(places), each)]


def _styles(data: pd.DataFrame, quantity: str) -> dict[str, dict[str, object]]:
    """As `common.bar_styles`, with a hatch of its own for each of up to eight variants."""
    styles, seen = common.bar_styles(data, quantity), Counter()
    for style in styles.values():
        if style["hatch"] == _HATCHES[0]:
            seen[style["edgecolor"]] += 1
            style["hatch"] = _HATCHES[min(seen[style["edgecolor"]], len(_HATCHES)) - 1]
    return styles


def _looks(data: pd.DataFrame, quantity: str, field: str) -> dict[str, dict[str, object]]:
    """As `common.bar_styles`, full, pale and hatched by the value of a field."""
    styles = common.bar_styles(data, quantity)
    for name, style in styles.items():
        line = data[data.series == name].iloc[0]
        share, style["hatch"] = _LOOKS[line[field]]
        style["facecolor"] = tuple(1 - (1 - part) * share for part in to_rgb(common.look(line.impl).colour))
    return styles


def _beside(data: pd.DataFrame, gains: Sequence[paper.KernelGain]) -> list[str]:
    """The paper's averages and ours in one line."""
    words = []
    for gain in gains:
        here = float("nan") if gain.theirs is None else means(data, gain.op, gain.ours, gain.theirs)
        words.append(f"{gain.words} {gain.times:.2f}" + (f" (here {here:.2f})" if here == here else ""))
    return [f"The paper, H100: speed over others, on average: {', '.join(words)}."] if words else []


def table(data: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Per op, shape and series ms, the rate, and the time over that of the fastest series of `sonic` on that card."""
    out = data[data.groupby(["op", "series"])[quantity].transform("count") > 0].copy()
    keys = ["op", "card", *_SIZES]
    ours = out[(out.impl == "sonic") & out.ms.notna()].sort_values("ms").drop_duplicates(keys)
    out["over_sonic"] = common.ratio(out.ms, common.lookup(out, ours, keys, "ms"))
    shapes = common.shapes_in_order(out)
    out = out.assign(
        _op=out.op.map(list(out.op.unique()).index), _rank=out.impl.map(common.rank),
        _place=[shapes.index(sizes) for sizes in out[_SIZES].itertuples(index=False, name=None)],
    ).sort_values(["_op", "_place", "_rank", "variant"])  # fmt: skip
    columns = ["op", *_SIZES, "series", "status", "ms", quantity, "over_sonic", "launches", "worst_error"]
    return out[columns].reset_index(drop=True).dropna(axis=1, how="all")


def means(data: pd.DataFrame, op: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> float:
    """Geometric mean over shapes of the time of one way over that of another, each given by its fields and both
    measured on one card; NaN without both."""
    part = data[(data.op == op) & data.ms.notna()]
    by = ["card", *_SIZES]
    part = part.sort_values("ms")  # of several series that fit, the fastest
    pick = lambda given: part[(part[list(given)] == pd.Series(given)).all(axis=1)].drop_duplicates(by)  # noqa: E731
    both = pick(theirs).merge(pick(ours), on=by, suffixes=("", "_ours"))
    return common.geometric_mean(both.ms / both.ms_ours) if len(both) else float("nan")
