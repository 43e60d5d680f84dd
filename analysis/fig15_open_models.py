"""One layer of each of six open models: model TFLOP/s of every implementation, forward and forward with backward.

Mirrors Fig 15 of the paper (without shared experts, router inside the timed region). Of its H100 bars only those of
SonicMoE at DeepSeek-V3.2 are printed, hollow diamonds here, and the gains at Qwen3-Next, which the table holds against
ours; beside them the table has the gains of its B300 twin.
"""

from __future__ import annotations

import sys

import pandas as pd
from matplotlib.figure import Figure

from analysis import common, figures, load, paper

SWEEP = "open_models"
TITLE = "Throughput of one layer of open models by implementation"

_PASSES = {"fwd": "forward", "fwd_bwd": "forward + backward"}
_SIZES = list(load.SHAPE)


def select(rows: pd.DataFrame) -> pd.DataFrame:
    """Whole layers in both modes, seeds pooled; `model` is the open model's name."""
    rows = rows[(rows.op == "layer") & rows["mode"].isin(tuple(_PASSES))]
    if not rows.ms.notna().any():
        raise load.NothingLeft("no whole layer was measured")
    data = common.label_series(load.pool_seeds(load.one_series(rows)))
    return data.assign(model=[common.model_name(*sizes) for sizes in data[_SIZES].itertuples(index=False, name=None)])


def draw(figure: Figure, data: pd.DataFrame) -> None:
    """One panel per mode, a group of bars per model."""
    styles, names = common.bar_styles(data, "ms"), common.models(data)
    width = max(4.4, len(names) * max(1.05, 0.105 * (len(styles) + 1.2)))
    sheet = common.panels(figure, len(_PASSES), 1, size=(width, 2.0), share_x=False, gap=(0.3, 0.75))
    marked = False
    for ax, (mode, words) in zip(sheet.axes[:, 0], _PASSES.items(), strict=True):
        part = data[data["mode"] == mode]
        form = ".2g" if common.on_cpu(data) else ".0f"
        named = part.assign(impl=part.impl.replace(paper.AUTHORS))
        part = part.assign(paper=common.lookup(named, _paper_tflops(mode), [*_SIZES, "impl"], "value"))
        places = common.draw_bars(ax, part, styles, "model", "tflops", names, data.tflops.max(), form)
        marked |= common.draw_paper_marks(ax, part, "model", places)
        ax.set_xticks(range(len(names)), common.model_ticks(data))
        ax.set_ylabel(f"model TFLOP/s{common.time_note(data)}")
        ax.set_title(words)
    common.share_scale(sheet)
    handles: list = common.bar_handles(data, "ms")
    handles += [common.paper_handle("paper, H100 (Fig 15; stated)", line=False)] if marked else []
    notes = [*([paper.MODEL_T] if marked else []), *common.card_notes(data), *common.notes(data)]
    sheet.finish(TITLE, common.provenance(data), handles, notes)


def _paper_tflops(mode: str) -> pd.DataFrame:
    """The H100 TFLOP/s that the paper prints, column `value`; those of both passes are made from its two."""
    printed = paper.fig15().query("device == 'H100' and unit == 'TFLOPS'")
    keys = [*_SIZES, "impl"]
    passes = {name: printed[printed.quantity == name] for name in ("fwd", "bwd")}
    if mode != "fwd_bwd":
        return passes[mode]
    both = passes["fwd"].merge(passes["bwd"], on=keys, suffixes=("_fwd", "_bwd"))
    # The backward has twice the FLOPs of the forward.
    return both[keys].assign(value=3 / (1 / both.value_fwd + 2 / both.value_bwd))


def _paper_speeds(mode: str, device: str) -> pd.DataFrame:
    """How many times as fast as each other method SonicMoE is in the paper, column `value`; `fwd` or `bwd`."""
    table = paper.fig15().query("device == @device")
    gains = table[table.quantity == f"{mode} gain of SonicMoE"]
    gains = gains.assign(value=1 + gains.value / 100)
    rates = table[(table.quantity == mode) & (table.unit == "TFLOPS")]
    ours = common.lookup(rates, rates[rates.impl == "sonic"], _SIZES, "value")
    return pd.concat([gains, rates.assign(value=common.ratio(ours, rates.value))], ignore_index=True)


def table(data: pd.DataFrame) -> pd.DataFrame:
    """Per model and series TFLOP/s (the backward's from the difference of the times) beside the paper's, and speeds.

    `fwd_speed`, `bwd_speed` and `fwd_bwd_speed` are the series' time over that of `sonic` (its first family that was
    measured at the model) on the same card, or on another where it did not run there; `paper_` has the H100's where the
    paper prints them, `b300_` those of its B300 figure.
    """
    keys = ["model", *_SIZES, "impl", "series", "variant"]
    both = load.with_backward(data)
    modes = {mode: both[both["mode"] == mode].set_index(keys) for mode in ("fwd", "bwd", "fwd_bwd")}
    out = pd.DataFrame(index=modes["fwd"].index.union(modes["fwd_bwd"].index, sort=False))
    measured = [modes[mode].reindex(out.index) for mode in _PASSES]
    statuses = pd.concat([part.status for part in measured], axis=1)
    out["status"] = [", ".join(pd.unique(line.dropna())) for _, line in statuses.iterrows()]
    for mode, part in modes.items():
        out[f"{mode}_tflops"] = part.tflops
        out[f"_{mode}_one_card"] = common.one_card_speed(part)
    out["fwd_bwd_ms"] = modes["fwd_bwd"].ms
    out["worst_error"] = pd.concat([part.worst_error for part in measured], axis=1).max(axis=1)
    out = out.reset_index()
    rates = [f"{mode}_tflops" for mode in _PASSES]
    out = out[out.groupby("series")[rates].transform("count").sum(axis=1) > 0].reset_index(drop=True)
    for mode in modes:
        ours = out[(out.impl == "sonic") & out[f"{mode}_tflops"].notna()].sort_values("variant")
        any_card = common.ratio(common.lookup(out, ours, _SIZES, f"{mode}_tflops"), out[f"{mode}_tflops"])
        out[f"{mode}_speed"] = out[f"_{mode}_one_card"].fillna(any_card)
        out[f"paper_{mode}_tflops"] = common.lookup(out, _paper_tflops(mode), [*_SIZES, "impl"], "value")
        for prefix, device in (("paper", "H100"), ("b300", "B300")):
            speeds = _paper_speeds(mode, device)
            out[f"{prefix}_{mode}_speed"] = common.lookup(out, speeds, [*_SIZES, "impl"], "value")
    out = out.assign(_model=out.model.map(common.models(data).index), _rank=out.impl.map(common.rank))
    out = pd.concat([out.sort_values(["_model", "_rank", "variant"]), _summary(out)], ignore_index=True)
    columns = ["model", "series", "status"]
    columns += [f"{prefix}{mode}_tflops" for mode in modes for prefix in ("", "paper_")] + ["fwd_bwd_ms"]
    columns += [f"{prefix}{mode}_speed" for mode in modes for prefix in ("", "paper_", "b300_")] + ["worst_error"]
    return out[columns].dropna(axis=1, how="all")


def _summary(lines: pd.DataFrame) -> pd.DataFrame:
    """The geometric mean of each speed of every series that is not what it is compared with."""
    found = []
    for name, group in lines.sort_values(["_rank", "variant"]).groupby("series", sort=False):
        speeds = group[[column for column in group if column in ("fwd_speed", "bwd_speed", "fwd_bwd_speed")]]
        if (speeds.fillna(1.0) != 1.0).any(axis=None):
            count = int(speeds.notna().any(axis=1).sum())
            found.append({"model": f"geometric mean of {count}", "series": name, **speeds.apply(common.geometric_mean)})
    return pd.DataFrame(found, columns=["model", "series", "fwd_speed", "bwd_speed", "fwd_bwd_speed"])


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
