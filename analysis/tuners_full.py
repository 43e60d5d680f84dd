"""What cutting a package's autotuner costs it: its time with the cut list of configurations and with its full list.

`throughput` gives the tuners of other packages a few configurations each, picked from their own lists; `tuners`
measures the same layers with every configuration. Only two rows of one card are held against each other, by the same
method. Below a pair stands the full list's time over the cut list's: under 1 the cut took speed from the package. The
table has the seconds of first calls as well, most of which are tuning; what a process compiled for an earlier point is
not in them. The paper has nothing of this.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.figure import Figure

from analysis import common, figures, load

SWEEP = "tuners"
BESIDE = ("throughput",)
TITLE = "Time with the cut and with the full list of a package's autotuner"

_MODES = {"fwd": "forward", "fwd_infer": "forward, inference", "fwd_bwd": "forward + backward"}
_SIZES = list(load.SHAPE)
#: Sweep -> which list of configurations its rows had.
_LISTS = {"throughput": "cut", "tuners": "full"}


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `tuners`, and of `throughput` those of the same work and card, seeds pooled.

    `configs` is `cut` or `full`, `who` the series' name without it; `paired` is False for what has no partner.
    """
    full = rows[rows.sweep == SWEEP]
    if full.empty:
        raise load.NothingLeft(f"no row of sweep {SWEEP}")
    # Other points of `throughput` would set series apart by what differs only among them.
    rows = rows.merge(full[[*_SIZES, "mode", "impl"]].drop_duplicates())
    data = common.label_series(load.one_series(rows))
    keys = [*_SIZES, "mode", "series", "card", *load.SEEDS]
    places = data[keys].apply(tuple, axis=1)
    both = set(places[data.sweep == SWEEP]) & set(places[data.sweep != SWEEP])
    data = data.assign(paired=places.isin(both) & data.card.notna(), configs=data.sweep.map(_LISTS), who=data.series)
    if not (data.paired & data.ms.notna()).any():
        raise load.NothingLeft(f"no row of {SWEEP} has one of {BESIDE[0]} on the same card")
    data = load.pool_seeds(data[data.paired | (data.sweep == SWEEP)])
    is_full = data.configs == "full"
    return data.assign(series=data.who + ", " + data.configs + " list", variant=2 * data.variant + is_full)


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One row per mode, one column per shape, each panel with its own scale; two bars per implementation."""
    pairs = data[data.paired]
    shapes = common.shapes_in_order(pairs)
    modes = [mode for mode in _MODES if pairs[pairs["mode"] == mode].ms.notna().any()]
    styles = common.bar_styles(pairs, "ms")
    lines = _lines(data)
    sheet = common.panels(
        figure, len(modes), len(shapes), size=(max(2.2, 0.26 * len(styles)), 1.75), share_x=False, gap=(0.5, 0.85)
    )
    for row, mode in enumerate(modes):
        for column, sizes in enumerate(shapes):
            ax = sheet.axes[row, column]
            part = pairs[_here(pairs, mode, sizes)].assign(shape="")
            places = common.draw_bars(ax, part, styles, "shape", "ms", [""], part.ms.max(), form=".3f")
            ratios = lines[_here(lines, mode, sizes)].dropna(subset="full_over_cut")
            middles = [sum(places[f"{who}, {name} list", ""] for name in _LISTS.values()) / 2 for who in ratios.series]
            ax.set_xticks(middles, [f"{ratio:.3f}" for ratio in ratios.full_over_cut])
            ax.set_xlim(-0.5, 0.5)
            ax.set_xlabel("full list over cut list")
            ax.set_title(f"{common.shape_name(*sizes)}, {_MODES[mode]}")
            common.value_axis(ax, f"ms{common.time_note(pairs)}" if column == 0 else "")
    notes = [*_lone_notes(data), *_first_call_notes(lines)]
    notes += common.notes(pairs.assign(note=pairs.impl.map(_tuner_notes(pairs))))
    sheet.finish(TITLE, common.provenance(pairs), common.bar_handles(pairs, "ms"), notes)


def _here(lines: pd.DataFrame, mode: str, sizes: tuple[int, ...]) -> pd.Series:
    return lines["mode"].eq(mode) & (lines[_SIZES] == list(sizes)).all(axis=1)


def _lone_notes(data: pd.DataFrame) -> list[str]:
    """The rows of `tuners` that are not drawn, since nothing of their card stands beside them."""
    found = [
        f"{who}: "
        + ", ".join(
            f"{common.shape_name(*sizes)} {_MODES[mode]}"
            for mode, *sizes in group[["mode", *_SIZES]].itertuples(index=False, name=None)
        )
        for who, group in data[~data.paired].groupby("who")
    ]
    return [f"Not drawn, without a row of {BESIDE[0]} on the same card: {'; '.join(found)}."] if found else []


def _first_call_notes(lines: pd.DataFrame) -> list[str]:
    """Seconds of first calls by either list, the range over shapes and modes."""
    found = []
    for who, group in lines.groupby("series", sort=False):
        seconds = {name: group[f"{name}_first_calls_s"].dropna() for name in _LISTS.values()}
        spans = [f"{some.min():.1f} to {some.max():.1f} {name}" for name, some in seconds.items() if len(some)]
        found += [f"{who} {', '.join(spans)}"] if spans else []
    return [f"Seconds of first calls by list: {'; '.join(found)}."] if found else []


def _tuner_notes(pairs: pd.DataFrame) -> dict[str, str]:
    """Implementation -> what its rows say of either list, without what they say of both."""
    notes = {}
    for impl, group in pairs[pairs.ms.notna() & pairs.note.notna()].groupby("impl"):
        said = {
            name: list(dict.fromkeys(part for note in lines.note for part in note.split("; ")))
            for name, lines in group.groupby("configs")
        }
        alike = set.intersection(*map(set, said.values()))
        notes[impl] = "; ".join(
            f"{name} list: {', '.join([part for part in parts if part not in alike] or parts)}"
            for name, parts in said.items()
        )
    return notes


def _lines(data: pd.DataFrame) -> pd.DataFrame:
    """One line per shape, mode and series with a pair: the columns of `table`, and `first_calls_s` of either list."""
    keys = [*_SIZES, "mode", "who"]
    # Only packages that tell their tuning apart have `tune_s`; it is not in their `compile_s`.
    pairs = data[data.paired].assign(first_calls_s=data.compile_s + data.tune_s.fillna(0))
    columns = ["status", "ms", "compile_s", "tune_s", "note", "first_calls_s"]
    parts = {name: pairs[pairs.configs == name].set_index(keys) for name in _LISTS.values()}
    first = pairs.sort_values("variant").drop_duplicates(keys).set_index(keys)
    out = first[["impl", "variant"]].join([part[columns].add_prefix(f"{name}_") for name, part in parts.items()])
    out = out.assign(full_over_cut=common.ratio(out.full_ms, out.cut_ms)).reset_index()
    order = {sizes: number for number, sizes in enumerate(common.shapes_in_order(pairs))}
    return out.rename(columns={"who": "series"}).assign(
        _shape=[order[sizes] for sizes in out[_SIZES].itertuples(index=False, name=None)],
        _mode=out["mode"].map(list(_MODES).index), _rank=out.impl.map(common.rank),
    ).sort_values(["_shape", "_mode", "_rank", "variant"])  # fmt: skip


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per shape, mode and series ms with the cut list and with the full one, their ratio, and what tuning costs.

    `compile_s`, `tune_s` and `note` are those of the rows. A point without a partner has no line.
    """
    columns = [*_SIZES, "mode", "series", "cut_status", "full_status", "cut_ms", "full_ms", "full_over_cut"]
    columns += [f"{name}_{column}" for column in ("compile_s", "tune_s", "note") for name in _LISTS.values()]
    return _lines(data)[columns].dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
