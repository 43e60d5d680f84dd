"""What each idea of the paper is worth: added one by one to plain PyTorch's way, and left out of the whole.

From below, every rung adds one idea to the one before, on our own kernels: gather and SwiGLU inside the GEMMs, dS from
dA (Y is not kept), nothing but H kept, rows summed where they are gathered, persistent programs, warp specialisation,
ping-pong where it pays. From above, one idea at a time is taken out of the whole. The two differ where ideas need each
other: that difference is the interaction. `torch_grouped_mm` is a library's layer beside the chain, and token rounding
changes the work itself; both stand apart. Persistent programs cannot be left out of the Hopper kernels alone: leaving
out warp specialisation falls back to the persistent Triton kernels.

Bytes are the model of `analysis.traffic` and, where a row has counters, what DRAM really moved.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import common, figures, load, traffic
from sonic import derive
from sonic.shapes import Shape

SWEEP = "ladder"
TITLE = "What each idea is worth, added one by one and left out of the whole"

_SIZES = list(load.SHAPE)
_KNOBS = ("family", "gather", "activation", "ds", "cache", "aggregate", "schedule")
_BYTES = ("gather", "activation", "ds", "cache")
_MODES = {"fwd": "forward", "fwd_bwd": "forward + backward"}
#: Plain PyTorch's way on our kernels.
STANDARD = {
    "family": "triton", "gather": "separate", "activation": "separate", "ds": "from_y", "cache": "h_a_y",
    "aggregate": "scatter_sum", "schedule": "static_map",
}  # fmt: skip
#: Idea -> the knobs that it changes, from below.
IDEAS: dict[str, dict[str, str | None]] = {
    "fused gather": {"gather": "fused"},
    "fused activation": {"activation": "fused"},
    "dS from dA": {"ds": "from_da", "cache": "h_a"},
    "H-only cache": {"cache": "h"},
    "gather-and-sum": {"aggregate": "gather_sum"},
    "persistent": {"schedule": "persistent"},
    "warp specialisation": {"family": "hopper", "schedule": "cooperative"},
    "ping-pong": {"schedule": None},
}
#: Idea -> what leaving it out of the whole sets.
OUT: dict[str, dict[str, str | None]] = {
    "fused gather": {"gather": "separate"},
    "fused activation": {"activation": "separate"},
    "dS from dA": {"ds": "from_y"},
    "H-only cache": {"cache": "h_a"},
    "gather-and-sum": {"aggregate": "scatter_sum"},
    "warp specialisation": {"family": "triton", "schedule": "persistent"},
    "ping-pong": {"schedule": "cooperative"},
}
_LIBRARY, _ROUNDING = "torch_grouped_mm", "token rounding"
_COLOURS = {"below": "#c8102e", "above": "#1f4e79", "apart": "#9a9a9a"}


def rungs() -> dict[str, dict[str, str | None]]:
    """Name of each rung -> its knobs, from below."""
    knobs, found = dict(STANDARD), {"standard": dict(STANDARD)}
    for idea, change in IDEAS.items():
        knobs |= change
        found[f"+ {idea}"] = dict(knobs)
    return found


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Given experts under uniform routing in both modes, every kernel's own tile, of the most frequent dtype, seeds
    pooled; `dram_gib` is what counters say."""
    rows = rows[(rows.op == "experts") & rows["mode"].isin(tuple(_MODES)) & (rows.distribution == "uniform")]
    rows = rows[rows[[f"tile_{name}" for name in ("m", "n", "k", "stages", "warps")]].isna().all(axis=1)]
    rows = load.one_series(rows)
    data = common.label_series(load.pool_seeds(rows[rows["dtype"] == rows["dtype"].mode().iloc[0]]))
    data = data.assign(dram_gib=data.dram_bytes / derive.GIB)
    if not _shapes(table(data), data):
        raise load.NothingLeft("no shape has two rungs of the ladder in a row")
    return data


def _shapes(found: pd.DataFrame, data: pd.DataFrame) -> list[tuple[int, ...]]:
    """Shapes of which a rung and the one before it were measured; the others only leave ideas out."""
    if "saved_ms" not in found:
        return []
    climbed = set(found.loc[found.saved_ms.notna(), _SIZES].itertuples(index=False, name=None))
    return [sizes for sizes in common.shapes_in_order(data) if sizes in climbed]


def _row(here: pd.DataFrame, knobs: Mapping[str, str | None]) -> pd.Series | None:
    """The row of top-K `sonic` with these knobs; of a triton row no schedule is the persistent one."""
    found = here[(here.impl == "sonic") & (here.router == "topk")]
    for name in _KNOBS:
        wanted = knobs[name]
        if name == "schedule" and wanted in (None, "persistent"):
            found = found[found.schedule.isna() | (found.schedule == "persistent")]
        else:
            found = found[found[name] == wanted]
    return found.iloc[0] if len(found) else None


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per shape and mode a line per rung, then the library and token rounding.

    ms, held_gib, model_gib (a gathered row at every use; `model_once_gib`: once) and dram_gib; `saved_*` what the
    rung's idea takes off each; `out_ms` without the idea, `out_saved` what it saves there (`out_status` says why not),
    `interaction` how much more that is than from below, all in ms.
    """
    lines = []
    for sizes in common.shapes_in_order(data):
        for mode in _MODES:
            here = data[(data[_SIZES] == list(sizes)).all(axis=1) & (data["mode"] == mode)]
            if here.empty:
                continue
            chain = _chain(here, sizes, mode)
            for name, knobs in (("library", _LIBRARY), (_ROUNDING, _ROUNDING)):
                found = here[here.impl == knobs] if name == "library" else here[here.router != "topk"]
                if len(found):
                    chain.append(_line(found.iloc[0], sizes, mode, name, None))
            lines += chain
    found = pd.DataFrame(lines)
    kept = ["ms", "held_gib", "status"]
    return found[[name for name in found if name in kept or found[name].notna().any()]]


def _chain(here: pd.DataFrame, sizes: tuple[int, ...], mode: str) -> list[dict[str, object]]:
    steps = rungs()
    top = _row(here, list(steps.values())[-1])
    lines, before = [], None
    for name, knobs in steps.items():
        line = _line(_row(here, knobs), sizes, mode, name, knobs)
        if before is not None:
            for what in ("ms", "held_gib", "model_gib", "model_once_gib", "dram_gib"):
                line[f"saved_{what}"] = before[what] - line[what]
            idea = name.removeprefix("+ ")
            if idea in OUT and top is not None:
                without = _row(here, list(steps.values())[-1] | OUT[idea])
                untimed = top if np.isnan(top.ms) else without  # what the difference lacks, if it lacks anything
                line["out_status"] = "no row" if untimed is None else untimed.status
                line["out_ms"] = np.nan if without is None else without.ms
                line["out_saved"] = line["out_ms"] - top.ms
                line["interaction"] = line["out_saved"] - line["saved_ms"]
        lines.append(line)
        before = line
    return lines


def _line(
    row: pd.Series | None, sizes: tuple[int, ...], mode: str, name: str, knobs: Mapping[str, str | None] | None
) -> dict[str, object]:
    line: dict[str, object] = dict(zip(_SIZES, sizes, strict=True)) | {"mode": mode, "rung": name}
    line["status"] = "no row" if row is None else row.status
    for what in ("ms", "held_gib", "dram_gib"):
        line[what] = np.nan if row is None else row[what]
    for what, once in (("model_gib", False), ("model_once_gib", True)):
        line[what] = np.nan
        if knobs is not None:
            size = common.ITEMSIZE["bf16" if row is None else row["dtype"]]
            told = {knob: knobs[knob] for knob in _BYTES}
            line[what] = traffic.total_of_knobs(mode, Shape(*sizes), size, once, **told) / derive.GIB
    return line


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """A column per shape with a whole ladder: time, worth of each idea, memory held, bytes; forward with backward."""
    found = table(data)
    both = found[found["mode"] == ("fwd_bwd" if _shapes(found[found["mode"] == "fwd_bwd"], data) else "fwd")]
    shapes = _shapes(both, data)
    note = common.time_note(data)
    gap = (1.75, 0.55 + 0.17 * note.count("\n"))
    sheet = common.panels(figure, 4, len(shapes), size=(3.9, 2.0), share_x=False, gap=gap)
    for column, sizes in enumerate(shapes):
        here = both[(both[_SIZES] == list(sizes)).all(axis=1)]
        for row, paint in enumerate((_time, _worth, _held, _moved)):
            paint(sheet.axes[row, column], here, note)
        sheet.axes[0, column].set_title(common.shape_name(*sizes))
    handles = [
        Patch(facecolor=_COLOURS["below"], label="added to the rung before"),
        Patch(facecolor=_COLOURS["above"], label="left out of the whole"),
        Patch(facecolor=_COLOURS["apart"], label="apart from the chain"),
    ]
    sheet.finish(TITLE, common.provenance(data), handles, _notes(data, found, shapes) + common.row_notes(data))


def _missing(status: str) -> str:
    """What stands in place of a bar; a row that is `ok` was not measured for it."""
    return f"\N{MULTIPLICATION SIGN} {'not measured' if status == 'ok' else status.replace('_', ' ')}"


def _bars(ax: Axes, here: pd.DataFrame, what: str, form: str, label: str, marks: str = "") -> None:
    """Horizontal bars of one quantity, what a rung saves in full colour beyond it, their values beyond both and beyond
    the column `marks`."""
    for at, line in enumerate(here.itertuples()):
        value = getattr(line, what)
        apart = line.rung in ("library", _ROUNDING)
        if np.isnan(value):
            ax.annotate(_missing(line.status), (0, at), xytext=(3, 0), textcoords="offset points", va="center",
                        fontsize=6.5)  # fmt: skip
            continue
        ax.barh(at, value, height=0.7, color=_COLOURS["apart"] if apart else "#e4b9bf")
        saved = getattr(line, f"saved_{what}", float("nan"))
        if not apart and saved > 0:
            ax.barh(at, saved, left=value, height=0.7, color=_COLOURS["below"])
        elif not apart and saved < 0:  # a rung that costs
            ax.barh(at, -saved, left=value + saved, height=0.7, facecolor="none", edgecolor=_COLOURS["below"])
        edge = value + (max(0.0, saved) if not apart and saved == saved else 0.0)
        mark = getattr(line, marks, float("nan"))
        edge = max(edge, mark) if mark == mark else edge
        ax.annotate(
            format(value, form), (edge, at), xytext=(5, 0), textcoords="offset points", va="center", fontsize=6.5
        )
    ax.set_yticks(range(len(here)), here.rung)
    ax.set_ylim(len(here) - 0.5, -0.5)
    ax.set_xlim(0, ax.get_xlim()[1] * 1.12)
    ax.set_xlabel(label)
    ax.grid(visible=False, axis="y")


def _time(ax: Axes, here: pd.DataFrame, note: str) -> None:
    _bars(ax, here, "ms", ".3g", f"{_MODES[here['mode'].iloc[0]]}, ms{note}")


def _in_unit(here: pd.DataFrame, first: str, *others: str) -> tuple[pd.DataFrame, str]:
    """The lines with these columns of GiB in the unit in which `first` reads well, and the unit's name."""
    size, unit = common.byte_unit(here[first].max() * derive.GIB)
    scale = derive.GIB / size
    return here.assign(**{name: here[name] * scale for name in (first, *others) if name in here}), unit


def _held(ax: Axes, here: pd.DataFrame, _note: str) -> None:
    here, unit = _in_unit(here, "held_gib", "saved_held_gib")
    _bars(ax, here, "held_gib", ".3g", f"held for the backward, {unit}")


def _moved(ax: Axes, here: pd.DataFrame, _note: str) -> None:
    """The model with gathered rows once, and what counters say as marks."""
    names = ("model_once_gib", "saved_model_once_gib", "dram_gib")
    chain, unit = _in_unit(here[here.rung.isin(rungs())], *names)
    _bars(ax, chain, "model_once_gib", ".3g", f"to and from memory, {unit}: model (bars), counters (marks)", "dram_gib")
    if "dram_gib" in chain:
        ax.plot(chain.dram_gib, range(len(chain)), linestyle="", marker="o", color="black", markersize=4, zorder=5)


def _worth(ax: Axes, here: pd.DataFrame, note: str) -> None:
    """What every idea saves, from below and from above, in ms."""
    lines = here[here.rung.str.startswith("+ ")]
    for at, line in enumerate(lines.itertuples()):
        for offset, what, colour in ((-0.2, "saved_ms", "below"), (0.2, "out_saved", "above")):
            value = getattr(line, what, float("nan"))
            if value == value:
                ax.barh(at + offset, value, height=0.36, color=_COLOURS[colour])
                ax.annotate(f"{value:.3g}", (max(value, 0.0), at + offset), xytext=(3, 0), textcoords="offset points",
                            va="center", fontsize=6)  # fmt: skip
            elif what == "out_saved" and isinstance(getattr(line, "out_status", None), str):
                ax.annotate(_missing(line.out_status), (0, at + offset), xytext=(3, 0), textcoords="offset points",
                            va="center", fontsize=6)  # fmt: skip
    ax.set_yticks(range(len(lines)), [rung.removeprefix("+ ") for rung in lines.rung])
    ax.set_ylim(len(lines) - 0.5, -0.5)
    ax.axvline(0, color="black", linewidth=0.7)
    low, high = ax.get_xlim()
    ax.set_xlim(low, high + 0.12 * (high - low))
    ax.set_xlabel(f"worth, ms{note}")
    ax.grid(visible=False, axis="y")


def _notes(data: pd.DataFrame, found: pd.DataFrame, shapes: list[tuple[int, ...]]) -> list[str]:
    notes = []
    both = found[found["mode"] == "fwd_bwd"]
    for sizes in shapes:
        here = both[(both[_SIZES] == list(sizes)).all(axis=1)]
        if "interaction" in here:
            told = here[here.interaction.abs() > 0.02 * here.ms.min()]
            parts = [f"{line.rung.removeprefix('+ ')} {line.interaction:+.2f}" for line in told.itertuples()]
            if parts:
                notes.append(f"{common.shape_name(*sizes)}, interaction (left out less added), ms: {', '.join(parts)}.")
    notes += _agreement(both) + _by_granularity(data)
    notes.append(
        "Left out: persistent programs have no bar, the Hopper kernels have no other; without warp specialisation run "
        "the persistent Triton kernels, which takes ping-pong along; scatter_sum takes warp specialisation off the two "
        "products that scatter."
    )
    if "dram_gib" not in found or found.dram_gib.isna().all():
        notes.append("Bytes are the model alone: no row has hardware counters (measure.counters=true).")
    return notes


def _agreement(both: pd.DataFrame) -> list[str]:
    """Rungs whose counted saving of bytes lies more than 10% outside of what the model saves with gathered rows counted
    once and at every use."""
    if "saved_dram_gib" not in both:
        return []
    told = both[both.saved_dram_gib.notna() & (both.saved_model_gib.abs() + both.saved_model_once_gib.abs() > 0)]
    bounds = told[["saved_model_gib", "saved_model_once_gib"]]
    slack = 0.1 * bounds.abs().max(axis=1)
    apart = told[
        (told.saved_dram_gib < bounds.min(axis=1) - slack) | (told.saved_dram_gib > bounds.max(axis=1) + slack)
    ]
    words = [
        f"{line.rung.removeprefix('+ ')} {line.saved_dram_gib:.2f} for {line.saved_model_once_gib:.2f} (once) and "
        f"{line.saved_model_gib:.2f} GiB (every use)"
        for line in apart.itertuples()
    ]
    if not words:
        return ["Bytes saved by every rung agree with the model within 10%."] if len(told) else []
    return [f"Counted savings more than 10% outside the model's: {', '.join(words)}."]


def _by_granularity(data: pd.DataFrame) -> list[str]:
    """Which three ideas pay most, left out of the whole, at each granularity."""
    top = list(rungs().values())[-1]
    words = []
    for sizes in common.shapes_in_order(data):
        here = data[(data[_SIZES] == list(sizes)).all(axis=1) & (data["mode"] == "fwd_bwd")]
        whole = _row(here, top)
        if whole is None or not whole.ms > 0:
            continue
        found = {idea: _row(here, top | change) for idea, change in OUT.items()}
        worth = {idea: row.ms / whole.ms - 1 for idea, row in found.items() if row is not None and row.ms > 0}
        if len(worth) > 1:
            dearest = sorted(worth, key=worth.get, reverse=True)[:3]
            told = ", ".join(f"{idea} {worth[idea]:+.0%}" for idea in dearest)
            words.append(f"{common.shape_name(*sizes)} {told}")
    return [f"Dearest to leave out: {'; '.join(words)}."] if words else []


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
