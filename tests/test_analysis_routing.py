"""Token rounding and the router's top-K: gains, predictions and ratios from made-up rows that follow simple rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import common, figures, paper
from sonic.record import KernelTime, Knobs, Routing, Row
from sonic.shapes import Shape
from tests.analysis_rows import check_sheet, measured, unmeasured, write
from tests.test_analysis_figures import SHAPE, bars_of, lines_of, texts_of

GAIN = 1.2
PADDING = {"topk": 0.25, "tr_nearest_freq": 0.0}


def rounding(**changes: object) -> Iterator[Row]:
    """Two panels of Fig 16: rounding is 20% faster, three quarters of its time are GEMMs, top-K pads 25% of its FLOPs;
    a rule of rounding that is not drawn, and the official package, which crashes under rounding at the last point."""
    for d, n, K, experts in paper.FIG16_PANELS[1::2]:
        for E in experts:
            shape = Shape(paper.FIG16_T, d, n, E, K)
            for mode in ("fwd", "fwd_bwd"):
                flops = shape.flops(mode)
                for router, padding in PADDING.items():
                    us = flops / 500e6 * (1 if router == "topk" else 1 / GAIN)
                    tile = None if router == "topk" else 128
                    given = {
                        "op": "experts", "mode": mode, "sweep": "token_rounding", "bytes_model": None,
                        "routing": Routing(method=router, distribution="uniform", tile=tile),
                    }  # fmt: skip
                    kernels = [
                        KernelTime(name="_up_proj_kernel", us=0.75 * us, flops=flops),
                        KernelTime(name="_aggregate_kernel", us=0.2 * us, flops=0),
                        KernelTime(name="_scatter_kernel", us=0.05 * us),
                    ]
                    ours = {"kernels": kernels, "flops_padded": int(flops * (1 + padding))} | changes
                    yield measured(shape, us=us, **given, **ours)
                    if router != "topk" and E == 256:
                        yield unmeasured(shape, "crashed", impl="sonicmoe_official", **given)
                    else:
                        yield measured(shape, "sonicmoe_official", us=1.1 * us, flops_padded=None, **given)
                other = Routing(method="tr_up", distribution="uniform", tile=128)
                yield measured(shape, us=1.0, op="experts", mode=mode, sweep="token_rounding", routing=other, **changes)


def topk() -> Iterator[Row]:
    """bf16 and fp32 at all twelve shapes: ours 2000 GB/s, torch's 800; torch out of memory at the largest K of 30B."""
    for size, cells in paper.CONFIGS.items():
        for n, E, K in cells:
            shape = paper.shape(size, n)
            for dtype, width in (("bf16", 2), ("fp32", 4)):
                moved = shape.T * (width * E + 8 * K)
                for impl, rate, family in (("sonic", 2000, "triton"), ("torch_topk", 800, "auto")):
                    given = {
                        "impl": impl, "op": "router_topk", "dtype": dtype, "sweep": "topk", "flops_padded": None,
                        "knobs": Knobs(family=family),
                    }  # fmt: skip
                    if (impl, size, n) == ("torch_topk", "30B", 256):
                        yield unmeasured(shape, "oom", **given)
                    else:
                        given |= {"bytes_model": moved, "flops_model": 0, "held_bytes": None}
                        yield measured(shape, us=moved / rate / 1e3, **given)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("routing"), [*rounding(), *topk()])


@pytest.mark.parametrize("figure_id", ["fig16", "fig23"])
def test_figures_stay_on_their_sheet(results: Path, figure_id: str) -> None:
    check_sheet(figures.build(figure_id, results))


def test_fig16_draws_both_routers_the_gain_and_the_papers(results: Path) -> None:
    drawn = figures.build("fig16", results)
    axes = np.array(drawn.figure.axes).reshape(4, 2)
    assert [ax.get_title() for ax in axes[0]] == ["d=1536 n=1024 K=2 T=16384", "d=4096 n=1024 K=4 T=16384"]
    ours = sorted(line[0] for line in lines_of(axes[0, 0], common.look("sonic").colour))
    assert ours == pytest.approx([500, 600])
    measured_gain, predicted = lines_of(axes[1, 1], common.look("sonic").colour)
    assert measured_gain == pytest.approx([20.0] * 4) and predicted == pytest.approx([18.75] * 4)
    theirs, _ = lines_of(axes[1, 1], common.look("sonicmoe_official").colour)
    assert theirs[:3] == pytest.approx([20.0] * 3) and np.isnan(theirs[3])
    assert "\N{MULTIPLICATION SIGN} crashed" in [text.get_text() for text in axes[0, 1].texts]

    def marks(row: int) -> list[float]:
        return [
            float(line.get_ydata()[0]) for ax in axes[row] for line in ax.lines if line.get_markerfacecolor() == "white"
        ]

    assert marks(1) == [16.5, 25.7] and marks(3) == [9.4, 15.9]
    assert [handle.get_text() for handle in drawn.figure.legends[0].get_texts()] == [
        "sonic (triton, top-K)", "sonic (triton, token rounding)", "sonicmoe_official (top-K)",
        "sonicmoe_official (token rounding)", "gain that padding predicts (GEMMs and the rest)",
        "paper, H100 (Fig 16, stated in its text)",
    ]  # fmt: skip
    text = " ".join(texts_of(drawn.figure).split())
    assert "Gain of rounding, sonic (triton): forward +20.0% to +20.0% over 8 points" in text
    assert "sonicmoe_official: forward +20.0% to +20.0% over 7 points" in text


def test_fig16_table_holds_three_passes(results: Path) -> None:
    table = figures.build("fig16", results).table
    assert len(table) == 2 * 4 * 3 * 2 and set(table.series) == {"sonic (triton)", "sonicmoe_official"}
    line = table[(table.series == "sonic (triton)") & (table.d == 4096) & (table.E == 256)].set_index("mode")
    assert list(line.index) == ["fwd", "fwd_bwd", "bwd"]
    assert line.gain.to_numpy() == pytest.approx([20.0] * 3)
    assert line.predicted.to_numpy() == pytest.approx([18.75] * 3)
    assert list(line.paper_gain) == [25.7, 15.9, 11.8]
    assert line.topk_padding.to_numpy() == pytest.approx(0.25) and line.rounding_padding.to_numpy() == pytest.approx(0)
    assert line.padding_expected.to_numpy() == pytest.approx(0.25)
    assert (line.rounding_ms / line.topk_ms).to_numpy() == pytest.approx(1 / GAIN)
    official = table[table.series == "sonicmoe_official"]
    assert official.predicted.isna().all() and official.paper_gain.isna().all()
    last = official[official.E == 256]
    assert last.gain.isna().all() and last[last["mode"] == "fwd"].status.item() == "ok, crashed"


def test_fig16_without_kernels_predicts_nothing(tmp_path: Path) -> None:
    drawn = figures.build("fig16", write(tmp_path, rounding(kernels=None)))
    assert "predicted" not in drawn.table and drawn.table.gain.notna().any()
    assert not any("predicts" in handle.get_text() for handle in drawn.figure.legends[0].get_texts())


def test_fig16_keeps_families_apart(tmp_path: Path) -> None:
    rows = [*rounding(), *rounding(knobs=Knobs(family="hopper"), kernels=None)]
    table = figures.build("fig16", write(tmp_path, rows)).table
    assert {"sonic (hopper)", "sonic (triton)"} < set(table.series)
    assert table[table.series == "sonic (hopper)"].predicted.isna().all()
    assert table[table.series == "sonic (triton)"].predicted.to_numpy() == pytest.approx(18.75)


def of_padding(rows: Iterable[Row]) -> list[Row]:
    """What the sweep `padding` has of the rows: `sonic`, both passes, d = 4096; measured at twice the time."""
    return [
        row.model_copy(update={"sweep": "padding", "device_us": [2 * us for us in row.device_us]})
        for row in rows
        if (row.impl, row.mode, row.shape.d) == ("sonic", "fwd_bwd", 4096)
    ]


def test_fig16_draws_rows_of_the_padding_sweep_as_well(tmp_path: Path) -> None:
    """A panel that its own sweep lacks is drawn from `padding`, which has no forward; that sweep is enough alone."""
    own = [row for row in rounding() if row.shape.d == 1536]
    drawn = figures.build("fig16", write(tmp_path / "both", [*own, *of_padding(rounding())]))
    axes = np.array(drawn.figure.axes).reshape(4, 2)
    assert [ax.get_title() for ax in axes[0]] == ["d=1536 n=1024 K=2 T=16384", "d=4096 n=1024 K=4 T=16384"]
    red = common.look("sonic").colour
    assert lines_of(axes[0, 0], red) and not lines_of(axes[0, 1], red)
    assert [text.get_text() for text in axes[0, 1].texts] == ["\N{MULTIPLICATION SIGN} no row"]
    assert sorted(line[0] for line in lines_of(axes[2, 1], red)) == pytest.approx([250, 300])
    assert lines_of(axes[3, 1], red)[0] == pytest.approx([20.0] * 4)
    assert set(drawn.table[drawn.table.d == 4096]["mode"]) == {"fwd_bwd"}
    check_sheet(drawn)

    alone = figures.build("fig16", write(tmp_path / "alone", of_padding(rounding())))
    assert len(alone.figure.axes) == 2 and list(alone.table.E) == [32, 64, 128, 256]


@pytest.mark.parametrize("seeds", [(0,), (0, 1)], ids=str)
def test_fig16_draws_a_point_of_both_sweeps_once(tmp_path: Path, results: Path, seeds: tuple[int, ...]) -> None:
    """As its own sweep measured it, though `padding` may have more seeds."""
    more = [row.model_copy(update={"seed": seed}) for row in of_padding(rounding()) for seed in seeds]
    drawn = figures.build("fig16", write(tmp_path, [*rounding(), *more]))
    pd.testing.assert_frame_equal(drawn.table, figures.build("fig16", results).table)
    assert set(drawn.data.sweep) == {"token_rounding"}


def test_fig16_of_one_router_says_that_there_is_no_gain(tmp_path: Path) -> None:
    rows = [row for row in rounding() if row.routing.method == "topk"]
    drawn = figures.build("fig16", write(tmp_path, rows))
    assert "No point has both top-K and token rounding measured" in texts_of(drawn.figure)
    assert "gain" not in drawn.table
    other = [row for row in rounding() if row.routing.method == "tr_up"]
    with pytest.raises(figures.NotDrawn, match="belongs in it"):
        figures.build("fig16", write(tmp_path / "other", other))


def test_fig23_draws_bandwidth_by_dtype(results: Path) -> None:
    drawn = figures.build("fig23", results)
    assert [ax.get_title() for ax in drawn.figure.axes] == ["bf16 logits", "fp32 logits"]
    for ax in drawn.figure.axes:
        assert bars_of(ax, common.look("sonic").colour) == pytest.approx([2000.0] * 13)
        heights = bars_of(ax, common.look("torch_topk").colour)
        assert len(heights) == 13 and sum(np.isnan(heights)) == 1
        assert [text.get_text() for text in ax.texts].count("\N{MULTIPLICATION SIGN} oom") == 1
        assert ax.get_xticklabels()[0].get_text() == "1.4B\n128/8\nn=256"
    text = " ".join(texts_of(drawn.figure).split())
    assert "Speed of sonic (triton) over torch_topk, bf16: 2.50 (geometric mean of 12 shapes), least 2.50" in text


def test_fig23_table_holds_the_ratio_and_the_papers_range(results: Path) -> None:
    table = figures.build("fig23", results).table
    line = table[(table.dtype == "fp32") & (table["size"] == "7B") & (table.n == 512)].set_index("series")
    ours, theirs = line.loc["sonic (triton)"], line.loc["torch_topk"]
    assert (ours.gbps, theirs.gbps) == pytest.approx((2000, 800))
    assert (ours.speed, theirs.speed) == pytest.approx((2.5, 1.0))
    assert ours.mbytes == pytest.approx(24576 * (4 * 64 + 8 * 4) / 1e6)
    assert (ours.paper_low, ours.paper_high, theirs.paper_low, theirs.paper_high) == (1500, 2000, 500, 1000)
    lost = table[table.status == "oom"]
    assert set(lost.series) == {"torch_topk"} and lost.gbps.isna().all()


def test_fig23_without_torch_has_no_ratio(tmp_path: Path) -> None:
    rows = [row for row in topk() if row.impl == "sonic"]
    drawn = figures.build("fig23", write(tmp_path, rows))
    assert "speed" not in drawn.table and "Speed of" not in texts_of(drawn.figure)


@pytest.mark.parametrize(("figure_id", "op"), [("fig16", "experts"), ("fig23", "router_topk")])
def test_a_cpu_figure_says_so(tmp_path: Path, figure_id: str, op: str) -> None:
    sweep = figures.module_of(figure_id).SWEEP
    rows = [
        measured(SHAPE, gpu="cpu", op=op, sweep=sweep, routing=Routing(method=router))
        for router in (PADDING if figure_id == "fig16" else ["topk"])
    ]
    assert "not GPU speed" in texts_of(figures.build(figure_id, write(tmp_path, rows)).figure)
