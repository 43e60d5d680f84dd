"""The best tile differs from kernel to kernel and from shape to shape, and some tiles do not fit the card at all.

One heat map per kernel and shape: model TFLOP/s over m x n (rows) and k x stages (columns); the best is framed, a tile
that was not measured shows its status. Section 3 and Fig 12 of the paper argue about tiles; it prints no such sweep, so
nothing stands beside.
"""

from __future__ import annotations

import sys

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis import common, figures, load
from sonic.record import OPS

SWEEP = "tile"
TITLE = "Model TFLOP/s by tile size"

_TILE = ["tile_m", "tile_n", "tile_k", "tile_stages", "tile_warps"]


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Every row that asked for a tile, seeds pooled; `panel` is the op, with mode and dtype where unusual."""
    rows = rows[rows[_TILE].notna().any(axis=1)]
    data = common.label_series(load.pool_seeds(load.one_series(rows)))
    usual = data.dtype.mode().iloc[0]
    panel = [
        " ".join(
            filter(None, (line.op, line.mode if line.mode != "fwd" else "", line.dtype if line.dtype != usual else ""))
        )
        for line in data.itertuples()
    ]
    sizes = [common.shape_name(*shape) for shape in data[list(load.SHAPE)].itertuples(index=False)]
    return data.assign(panel=panel, size=sizes)


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """A row of panels per shape, a column per kernel; the colour runs from the panel's slowest to its fastest tile."""
    kernels = sorted(data.panel.unique(), key=lambda name: (OPS.index(name.split()[0]), name))
    sizes = list(data.sort_values(["d", "n"])["size"].unique())
    rows, columns = _labels(data, ["tile_m", "tile_n"]), _labels(data, ["tile_k", "tile_stages", "tile_warps"])
    size = (max(1.6, 0.44 * len(columns)), max(1.0, 0.3 * len(rows)))
    sheet = common.panels(figure, len(sizes), len(kernels), size=size, share_x=False, gap=(0.72, 0.8))
    for row, shape in enumerate(sizes):
        for column, kernel in enumerate(kernels):
            part = data[(data["size"] == shape) & (data.panel == kernel)]
            ax = sheet.axes[row, column]
            _heat_map(ax, part, rows, columns)
            ax.set_title(f"{kernel}\n{shape}")
            ax.set_ylabel("tile m \N{MULTIPLICATION SIGN} n" if column == 0 else "")
            ax.set_xlabel(_column_label(data) if row == len(sizes) - 1 else "")
    notes = [
        "Framed: the fastest tile of the panel. Colours run from a panel's slowest tile (pale) to its fastest (dark)."
    ]
    if (data.status == "out_of_resources").any():
        reason = next((text for text in data.reason[data.status == "out_of_resources"] if text), "")
        notes.append(f"no fit: the tile needs more than the card has{f' (first: {reason})' if reason else ''}.")
    sheet.finish(
        TITLE + common.time_note(data).replace("\n", " "),
        common.provenance(data),
        notes=notes + common.row_notes(data),
    )


def _labels(data: pd.DataFrame, names: list[str]) -> list[tuple[float, ...]]:
    return sorted(data[names].fillna(-1).drop_duplicates().itertuples(index=False, name=None))


def _column_label(data: pd.DataFrame) -> str:
    return "tile k / stages" + (" / warps" if data.tile_warps.notna().any() else "")


def _heat_map(ax: matplotlib.axes.Axes, part: pd.DataFrame, rows: list[tuple], columns: list[tuple]) -> None:
    cells = {}
    for line in part.itertuples():
        filled = [-1 if pd.isna(value) else value for value in (getattr(line, name) for name in _TILE)]
        cells[tuple(filled[:2]), tuple(filled[2:])] = line
    rates = np.array([[_rate(cells.get((row, column))) for column in columns] for row in rows])
    low, high = (np.nanmin(rates), np.nanmax(rates)) if np.isfinite(rates).any() else (0, 1)
    ax.imshow(
        rates, cmap="Blues", vmin=low - 0.35 * (high - low + 1e-9), vmax=high + 0.1 * (high - low + 1e-9), aspect="auto"
    )
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.set_xticks(
        range(len(columns)),
        ["/".join(_word(value) for value in column if value != -1) or "own" for column in columns],
    )
    ax.set_yticks(range(len(rows)), [" \N{MULTIPLICATION SIGN} ".join(_word(value) for value in row) for row in rows])
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            line, rate = cells.get((row, column)), rates[i, j]
            if np.isfinite(rate):
                dark = rate > low + 0.6 * (high - low)
                ax.text(
                    j, i, f"{rate:.3g}", ha="center", va="center", fontsize=6.5, color="white" if dark else "#1b1f24"
                )
            else:
                ax.add_patch(
                    Rectangle(
                        (j - 0.5, i - 0.5), 1, 1, facecolor="#f3f3f3", edgecolor="#c9c9c9", hatch="////", linewidth=0
                    )
                )
                status = (
                    "no row"
                    if line is None
                    else "no time"
                    if line.status == "ok"
                    else _SHORT.get(line.status, line.status)
                )
                ax.text(j, i, status, ha="center", va="center", fontsize=5.5, color=common.GREY,
                        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.3})  # fmt: skip
    if np.isfinite(rates).any():
        i, j = np.unravel_index(np.nanargmax(rates), rates.shape)
        ax.add_patch(
            Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor=common.look("sonic").colour, linewidth=1.8)
        )


_SHORT = {
    "out_of_resources": "no\nfit",
    "skipped_oom": "oom",
    "unsupported": "unsup-\nported",
    "unavailable": "unavail-\nable",
}


def _rate(line: object) -> float:
    return np.nan if line is None else line.tflops


def _word(value: float) -> str:
    return "own" if value == -1 else f"{value:g}"


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per kernel and shape: the fastest tile, its ms and TFLOP/s, the median and slowest tile, the statuses."""
    out = []
    for (size, kernel), part in data.groupby(["size", "panel"], sort=False):
        measured = part[part.tflops.notna()].sort_values("tflops", ascending=False)
        counts = ", ".join(f"{count} {status}" for status, count in part.status.value_counts().items())
        line = {"shape": size, "kernel": kernel, "statuses": counts}
        if len(measured):
            best = measured.iloc[0]
            line |= {"best": "x".join(_word(-1 if pd.isna(best[name]) else best[name]) for name in _TILE[:4])}
            line |= {"ms": best.ms, "ms_p20": best.ms_p20, "ms_p80": best.ms_p80, "tflops": best.tflops}
            line |= {"median_tflops": measured.tflops.median(), "slowest_tflops": measured.tflops.iloc[-1]}
            line |= {"best_vs_median": best.tflops / measured.tflops.median(), "worst_error": part.worst_error.max()}
        out.append(line)
    columns = [
        "shape", "kernel", "best", "ms", "ms_p20", "ms_p80", "tflops", "median_tflops", "best_vs_median",
        "slowest_tflops", "worst_error", "statuses",
    ]  # fmt: skip
    return pd.DataFrame(out).reindex(columns=columns).rename(columns={"best": "best m x n x k x stages"})


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
