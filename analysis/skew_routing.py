"""Unequal experts cost time: what skewed routing adds to uniform routing, for every implementation.

Time under each skewed distribution over time under `uniform` at the same shape, experts alone (`op=experts`: ids and
scores are given, the metadata is timed). 1 is no loss: work stays, since every token still has K experts, and only
the experts' sizes part. Below a distribution stands what `sonic` needs over uniform, over what the official package
needs over its own: under 1 our kernels bear skew better. `sonic` is compared through its `hopper` family where that
ran. The paper times no skewed routing, so nothing of it stands beside.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.figure import Figure

from analysis import common, figures, load

SWEEP = "skew"
TITLE = "Time under skewed routing over time under uniform routing"

_MODES = {"fwd": "forward", "fwd_infer": "forward, inference", "fwd_bwd": "forward + backward"}
_SIZES = list(load.SHAPE)
_UNIFORM = "uniform"
_OFFICIAL = "sonicmoe_official"


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Given experts in every mode, seeds pooled; `routing` names the distribution, which is an axis and no series.

    `slowdown` is the time over that of uniform routing, in one series at one shape; NaN where one of them is missing.
    """
    rows = load.one_series(rows[rows.op == "experts"])
    routing = rows.distribution + rows.alpha.map(lambda alpha: "" if pd.isna(alpha) else f" {alpha:g}")
    pooled = load.pool_seeds(rows.assign(routing=routing))
    if not (pooled.ms.notna() & (pooled.routing != _UNIFORM)).any():
        raise load.NothingLeft("no skewed routing was measured")
    # Labelled as if the routing were the same, so that it makes no series of its own.
    data = common.label_series(pooled.assign(distribution=_UNIFORM, alpha=float("nan")))
    data = data.assign(distribution=pooled.distribution, alpha=pooled.alpha)
    uniform = data[(data.routing == _UNIFORM) & data.ms.notna()]
    keys = [*_SIZES, "mode", "series"]
    data = data.assign(uniform_ms=common.lookup(data, uniform, keys, "ms"))
    return data.assign(slowdown=common.ratio(data.ms, data.uniform_ms))


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One row per mode, one column per shape; a group of bars per skewed distribution."""
    shapes = common.shapes_in_order(data)
    modes = [mode for mode in _MODES if data[data["mode"] == mode].ms.notna().any()]
    styles = common.bar_styles(data, "ms")
    skews = _skews(data)
    width = max(2.7, 0.16 * len(skews) * (len(styles) + 1))
    sheet = common.panels(figure, len(modes), len(shapes), size=(width, 1.75), share_x=False, gap=(0.3, 0.85))
    ours = table(data)
    for row, mode in enumerate(modes):
        for column, sizes in enumerate(shapes):
            ax = sheet.axes[row, column]
            here = data["mode"].eq(mode) & (data[_SIZES] == list(sizes)).all(axis=1)
            common.draw_bars(ax, data[here], styles, "routing", "slowdown", skews, data.slowdown.max(), form=".3f")
            ax.axhline(1, color="black", linewidth=0.8, zorder=3)
            ax.set_xticks(range(len(skews)), [_tick(skew, ours, mode, sizes) for skew in skews])
            ax.set_title(f"{common.shape_name(*sizes)}, {_MODES[mode]}")
            ax.set_ylabel(f"time over that of uniform{common.time_note(data)}" if column == 0 else "")
    common.share_scale(sheet)
    notes = []
    without = data[data.uniform_ms.isna() & data.ms.notna()]
    if len(without):
        notes.append(f"No uniform row to compare with: {', '.join(sorted(without.series.unique()))}.")
    sheet.finish(TITLE, common.provenance(data), common.bar_handles(data, "ms"), notes + common.notes(data))


def _skews(data: pd.DataFrame) -> list[str]:
    """The distributions beside the uniform one, from even to uneven, those of unknown evenness behind."""
    order = ["balanced", "learned", "zipf", "hot"]
    names = data[data.routing != _UNIFORM].drop_duplicates("routing").sort_values(["distribution", "alpha"])
    place = {name: number for number, name in enumerate(order)}
    return sorted(names.routing, key=lambda name: place.get(name.split()[0], len(order)))


def _tick(skew: str, ours: pd.DataFrame, mode: str, sizes: tuple[int, ...]) -> str:
    """The distribution's name, and our loss over the official package's where both are known."""
    if "vs_official" not in ours:
        return skew
    found = ours[(ours.routing == skew) & (ours["mode"] == mode) & (ours[_SIZES] == list(sizes)).all(axis=1)]
    found = found[found.compared].vs_official.dropna()
    return f"{skew}\nsonic : official {found.iloc[0]:.3f}" if len(found) else skew


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per shape, mode, distribution and series: ms, over uniform, the official package's own, ours over theirs.

    `compared` marks the series of `sonic` that stands for it: the first family that was measured there.
    """
    out = data[data.routing != _UNIFORM].copy()
    keys = [*_SIZES, "mode", "routing"]
    out["official_slowdown"] = common.lookup(out, out[(out.impl == _OFFICIAL) & out.slowdown.notna()], keys, "slowdown")
    mine = out.impl == "sonic"
    out["vs_official"] = common.ratio(out.slowdown, out.official_slowdown).where(mine)
    first = out[mine & out.slowdown.notna()].sort_values("variant").drop_duplicates(keys)
    out["compared"] = out.index.isin(first.index)
    measured = out.groupby("series").ms.transform("count") > 0
    order = {sizes: number for number, sizes in enumerate(common.shapes_in_order(data))}
    out = out[measured].assign(
        _shape=[order[sizes] for sizes in out[measured][_SIZES].itertuples(index=False, name=None)],
        _mode=out["mode"].map(list(_MODES).index), _skew=out.routing.map(_skews(data).index),
        _rank=out.impl.map(common.rank),
    ).sort_values(["_shape", "_mode", "_skew", "_rank", "variant"])  # fmt: skip
    columns = [
        *_SIZES, "mode", "routing", "series", "status", "uniform_ms", "ms", "slowdown", "official_slowdown",
        "vs_official", "compared", "padding", "worst_error",
    ]  # fmt: skip
    return out[columns].dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
