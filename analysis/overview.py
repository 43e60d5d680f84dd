"""The closing figure of the two default sweeps: time and held memory over G, a panel per (T, d, rho)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis import common, load, paper

_MODES = {"fwd_bwd": "forward + backward", "fwd": "forward", "fwd_infer": "forward, inference"}


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Layers and experts in every mode, seeds pooled; `panel` is T, d and rho, `config` the place along its axis."""
    rows = rows[rows.op.isin(("layer", "experts"))]
    data = common.label_series(load.pool_seeds(load.one_series(rows)))
    panel = [_panel(*sizes) for sizes in data[list(load.SHAPE)].itertuples(index=False)]
    config = [f"{d / n:.3g}\n{n}/{E}/{K}" for d, n, E, K in data[["d", "n", "E", "K"]].itertuples(index=False)]
    return data.assign(panel=panel, config=config)


def _panel(T: int, d: int, n: int, E: int, K: int) -> str:
    name = paper.size_name(T, d, n, E, K)
    return f"{f'{name}: ' if name else ''}T={T} d={d} \N{GREEK SMALL LETTER RHO}={_ratio(K, E)}"


def _ratio(K: int, E: int) -> str:
    return f"1/{E // K}" if E % K == 0 else f"{K}/{E}"


def draw(figure: Figure, data: pd.DataFrame, title: str) -> None:
    """One column per panel; rows: ms of each mode measured, then what is held for the backward."""
    names = list(data.sort_values(["d", "T", "rho"], ascending=[True, True, False]).panel.unique())
    modes = [mode for mode in _MODES if data[data["mode"] == mode].ms.notna().any()]
    held = common.held_lines(data)
    unit, unit_name = common.byte_unit(held.held_bytes.max())
    parts = [("ms", data[data["mode"] == mode], f"{_MODES[mode]}, ms{common.time_note(data)}") for mode in modes]
    if held.held_bytes.notna().any():
        parts.append(("held", held.assign(held=held.held_bytes / unit), f"held for backward, {unit_name}"))
    sheet = common.panels(figure, len(parts), len(names), size=(2.9, 2.0))
    axes = sheet.axes
    for column, name in enumerate(names):
        configs = list(data[data.panel == name].sort_values(["G", "n"]).config.unique())
        axes[0, column].set_title(name)
        for row, (y, part, label) in enumerate(parts):
            ax, part = axes[row, column], part[part.panel == name]
            if not part[y].notna().any():
                ax.set_yticks([])
                ax.grid(False)
                ax.spines[:].set_visible(False)
                ax.tick_params(length=0)
                ax.text(
                    0.5,
                    0.5,
                    "no rows of this mode here",
                    transform=ax.transAxes,
                    ha="center",
                    va="center",
                    color=common.GREY,
                    fontsize=7,
                )
            else:
                common.draw_series(ax, part, "config", y, positions=configs, statuses=y == "ms")
                common.value_axis(ax, "", log=y == "ms" and common.on_cpu(data))
            ax.set_ylabel(label if column == 0 else "")
            ax.set_xticks(range(len(configs)), configs)
            ax.set_xlim(-0.5, len(configs) - 0.5)
        axes[-1, column].set_xlabel("granularity G = d/n  (n/E/K below)")
    notes = common.notes(data)
    sheet.finish(title, common.provenance(data), common.series_handles(data, "ms"), notes)


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per shape, mode and series: status, ms, TFLOP/s, held GiB, worst error ratio, time over that of `sonic`."""
    out = data[
        [
            "d",
            "n",
            "E",
            "K",
            "G",
            "rho",
            "mode",
            "op",
            "impl",
            "series",
            "status",
            "ms",
            "tflops",
            "held_gib",
            "worst_error",
            "T",
        ]
    ].copy()
    # The fastest `sonic` line of a point is what a user gets from it.
    ours = out[(out.impl == "sonic") & out.ms.notna()].sort_values("ms")
    out["time_vs_sonic"] = common.ratio(out.ms, common.lookup(out, ours, [*load.SHAPE, "mode", "op"], "ms"))
    out = out[out.groupby("series").ms.transform("count") > 0]
    out = out.assign(_rank=out.impl.map(common.rank)).sort_values(["mode", "op", "d", "rho", "G", "_rank", "series"])
    return out.drop(columns=["T", "impl", "op", "_rank"]).dropna(axis=1, how="all")
