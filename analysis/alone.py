"""What the figures of single kernels (Figs 19 to 22) share: a panel per op, a group of bars per shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import common, load, paper

_SIZES = list(load.SHAPE)
#: From the fourth variant of an implementation on, where `common.bar_styles` has one hatch for all.
_HATCHES = ("xxxx", "....", "\\\\\\\\", "||||", "++++")
_LABELS = {"tflops": "model TFLOP/s", "gbps": "GB/s"}


def select(rows: pd.DataFrame, ops: Sequence[str]) -> pd.DataFrame:
    """Rows of these ops, seeds pooled, labelled within each op; `place` names the shape under its bars."""
    rows = rows[rows.op.isin(ops)]
    if not rows.ms.notna().any():
        raise load.NothingLeft(f"none of {', '.join(ops)} was measured")
    pooled = load.pool_seeds(load.one_series(rows))
    parts = [common.label_series(pooled[pooled.op == op]) for op in ops if (pooled.op == op).any()]
    data = pd.concat(parts, ignore_index=True)
    return data.assign(place=[_place(*sizes) for sizes in data[_SIZES].itertuples(index=False)])


def _place(T: int, d: int, n: int, E: int, K: int) -> str:
    return f"{paper.size_name(T, d, n, E, K) or f'T={T} d={d}'}\nn={n}\n{E}/{K}"


def draw(
    figure: Figure, data: pd.DataFrame, title: str, quantity: str, ops: Mapping[str, str], said: Sequence[str],
    own: Sequence[str] = (), gains: Sequence[paper.KernelGain] = (),
) -> None:  # fmt: skip
    """A panel per op of `ops` (op -> words) with bars of `quantity`; below, what the paper says, `gains` of its text
    with ours, and what is `own`."""
    there = [op for op in ops if (data.op == op).any()]
    places = common.places(data)
    styles = _styles(data, quantity)
    width = max(4.4, 0.19 * len(places) * (len(styles) + 0.8))
    sheet = common.panels(figure, len(there), 1, size=(width, 1.9), share_x=False, gap=(0.3, 0.75))
    for ax, op in zip(sheet.axes[:, 0], there, strict=True):
        part = data[data.op == op]
        shown = common.styles_within(part, styles)
        form = ".2g" if common.on_cpu(data) else ".0f"
        common.draw_bars(ax, part, shown, "place", quantity, places, part[quantity].max(), form)
        ax.set_xticks(range(len(places)), places)
        ax.set_xlabel("model size, n and E/K" if op == there[-1] else "")
        ax.set_ylabel(f"{_LABELS[quantity]}{common.time_note(data)}")
        ax.set_title(ops[op])
    said = [*(f"The paper, H100: {text}" for text in said), *_beside(data, gains)]
    handles = [Patch(label=series, **style) for series, style in styles.items()]
    notes = [*said, *own] if not common.on_cpu(data) else []
    sheet.finish(title, common.provenance(data), handles, notes + common.notes(data))


def _styles(data: pd.DataFrame, quantity: str) -> dict[str, dict[str, object]]:
    """As `common.bar_styles`, with a hatch of its own for each of up to eight variants."""
    styles, seen = common.bar_styles(data, quantity), Counter()
    for style in styles.values():
        if style["hatch"] == _HATCHES[0]:
            seen[style["edgecolor"]] += 1
            style["hatch"] = _HATCHES[min(seen[style["edgecolor"]], len(_HATCHES)) - 1]
    return styles


def _beside(data: pd.DataFrame, gains: Sequence[paper.KernelGain]) -> list[str]:
    """The paper's averages and ours in one line."""
    words = []
    for gain in gains:
        here = float("nan") if gain.theirs is None else means(data, gain.op, gain.ours, gain.theirs)
        words.append(f"{gain.words} {gain.times:.2f}" + (f" (here {here:.2f})" if here == here else ""))
    return [f"The paper, H100: speed over others, on average: {', '.join(words)}."] if words else []


def table(data: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Per op, shape and series ms, the rate, and the time over that of the fastest series of `sonic` there."""
    out = data[data.groupby(["op", "series"])[quantity].transform("count") > 0].copy()
    keys = ["op", *_SIZES]
    ours = out[(out.impl == "sonic") & out.ms.notna()].sort_values("ms").drop_duplicates(keys)
    out["over_sonic"] = common.ratio(out.ms, common.lookup(out, ours, keys, "ms"))
    columns = ["op", *_SIZES, "series", "status", "ms", quantity, "over_sonic", "launches", "worst_error"]
    return out[columns].dropna(axis=1, how="all")


def means(data: pd.DataFrame, op: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> float:
    """Geometric mean over shapes of the time of one way over that of another, each given by its fields; NaN without
    both."""
    part = data[(data.op == op) & data.ms.notna()]
    part = part.sort_values("ms")  # of several series that fit, the fastest
    pick = lambda given: part[(part[list(given)] == pd.Series(given)).all(axis=1)].drop_duplicates(_SIZES)  # noqa: E731
    both = pick(theirs).merge(pick(ours), on=_SIZES, suffixes=("", "_ours"))
    return common.geometric_mean(both.ms / both.ms_ours) if len(both) else float("nan")
