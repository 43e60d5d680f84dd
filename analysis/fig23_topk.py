"""The router's top-K: bandwidth of our kernel and of torch's at the shapes of Fig 14, in bf16 and fp32.

Mirrors Fig 23 of the paper. The bytes are the same for both: logits read once, K ids (int32) and scores (fp32) written
per token, whatever else an implementation moves; torch's own ids are twice as wide and it takes several kernels. No
number of the paper's figure is known to us: the pale bands are what a third party read off it by eye for an H100
(`paper.FIG23_TBPS`), so they tell an order of magnitude at most.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import common, figures, load, paper

SWEEP = "topk"
TITLE = "Bandwidth of the router's top-K by shape and dtype"

_SIZES = list(load.SHAPE)
_TORCH = "torch_topk"
#: The paper's range, behind everything.
_BAND = {"alpha": 0.12, "linewidth": 0, "zorder": 0}


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """The router's top-K alone, seeds pooled; `place` names the shape. Series are labelled dtype by dtype."""
    rows = rows[rows.op == "router_topk"]
    data = load.pool_seeds(load.one_series(rows))
    data = pd.concat([common.label_series(group) for _, group in data.groupby("dtype")], ignore_index=True)
    return data.assign(place=[_place(*sizes) for sizes in data[_SIZES].itertuples(index=False)])


def _place(T: int, d: int, n: int, E: int, K: int) -> str:
    return f"{paper.size_name(T, d, n, E, K) or f'T={T}'}\n{E}/{K}\nn={n}"


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One panel per dtype, a group of bars per shape."""
    dtypes = _dtypes(data)
    places = common.places(data)
    styles = common.bar_styles(data, "gbps")
    width = max(4.4, 0.17 * len(places) * (len(styles) + 0.8))
    sheet = common.panels(figure, len(dtypes), 1, size=(width, 1.9), share_x=False, gap=(0.3, 0.75))
    # A band of the paper's card says nothing about a CPU.
    beside = [impl for impl in paper.FIG23_TBPS if (data.impl == impl).any() and not common.on_cpu(data)]
    for ax, dtype in zip(sheet.axes[:, 0], dtypes, strict=True):
        form = ".2g" if common.on_cpu(data) else ".0f"
        part = data[data.dtype == dtype]
        # a family runs one dtype: the other's panel has no place for it
        own = common.styles_within(part, styles)
        common.draw_bars(ax, part, own, "place", "gbps", places, data.gbps.max(), form)
        for impl in beside:
            low, high = (1e3 * edge for edge in paper.FIG23_TBPS[impl])
            at = ax.get_yaxis_transform()
            ax.fill_between((0, 1), low, high, color=common.look(impl).colour, transform=at, **_BAND)
        ax.set_xticks(range(len(places)), places)
        ax.set_xlabel("model size, E/K and n" if dtype == dtypes[-1] else "")
        ax.set_ylabel(f"GB/s{common.time_note(data)}")
        ax.set_title(f"{dtype} logits")
    common.share_scale(sheet)
    handles = common.bar_handles(data, "gbps")
    handles += [
        Patch(label=f"paper, H100 (Fig 23): {impl}, a third party's eye", color=common.look(impl).colour, **_BAND)
        for impl in beside
    ]
    sheet.finish(TITLE, common.provenance(data), handles, [*_speed_notes(data), *common.notes(data, "gbps")])


def _dtypes(data: pd.DataFrame) -> list[str]:
    return sorted(data.dtype.unique())


def _speed_notes(data: pd.DataFrame) -> list[str]:
    """Geometric mean and least of our speed over each other implementation's, dtype by dtype."""
    ours = data[(data.impl == "sonic") & data.ms.notna()]
    notes = []
    for other in sorted(set(data.impl) - {"sonic"}, key=common.rank):
        theirs = data[(data.impl == other) & data.ms.notna()].sort_values("variant")
        speeds = ours.assign(speed=common.ratio(common.lookup(ours, theirs, [*_SIZES, "dtype"], "ms"), ours.ms))
        for (dtype, series), group in speeds[speeds.speed.notna()].groupby(["dtype", "series"]):
            least = group.loc[group.speed.idxmin()]
            notes.append(
                f"Speed of {series} over {other}, {dtype}: {common.geometric_mean(group.speed):.2f} (geometric mean of "
                f"{len(group)} shapes), least {least.speed:.2f} at T={least['T']} E={least.E} K={least.K}."
            )
    return notes


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per dtype, shape and series: us, bytes, GB/s, `speed` (torch's time over it), the paper's range in GB/s."""
    out = data[data.groupby(["dtype", "series"]).gbps.transform("count") > 0].copy()
    theirs = out[(out.impl == _TORCH) & out.ms.notna()].sort_values("variant")
    out["us"], out["mbytes"] = 1e3 * out.ms, out.bytes / 1e6
    out["speed"] = common.ratio(common.lookup(out, theirs, [*_SIZES, "dtype"], "ms"), out.ms)
    for number, edge in enumerate(("low", "high")):
        out[f"paper_{edge}"] = [1e3 * paper.FIG23_TBPS.get(impl, (np.nan, np.nan))[number] for impl in out.impl]
    out["size"] = [paper.size_name(*sizes) or "-" for sizes in out[_SIZES].itertuples(index=False)]
    order = {sizes: number for number, sizes in enumerate(common.shapes_in_order(out))}
    out = out.assign(
        _place=[order[sizes] for sizes in out[_SIZES].itertuples(index=False, name=None)],
        _rank=out.impl.map(common.rank),
    ).sort_values(["dtype", "_place", "_rank", "variant"])
    columns = [
        "dtype", "size", "T", "E", "K", "n", "series", "status", "mbytes", "us", "gbps", "speed", "launches",
        "paper_low", "paper_high", "worst_error",
    ]  # fmt: skip
    return out[columns].dropna(axis=1, how="all")


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
