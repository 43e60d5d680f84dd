"""Padding, and token rounding on open models: counts, gains and costs from made-up rows that follow simple rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from analysis import common, figures, paper
from sonic.record import Knobs, Routing, Row
from sonic.shapes import Shape
from tests.analysis_rows import check_sheet, measured, unmeasured, write
from tests.test_analysis_figures import SHAPE, bars_of, lines_of, texts_of

QWEN_NEXT, DEEPSEEK = "Qwen3-Next-80B-A3B-Thinking", "DeepSeek-V3.2-Exp"
TILE = {"topk": None, "tr_nearest_freq": 128}
#: Time of a router alone.
ROUTING_US = {"topk": 100.0, "tr_nearest_freq": 400.0}
GAIN = 1.1


def routed(router: str, distribution: str = "uniform") -> Routing:
    return Routing(method=router, distribution=distribution, tile=TILE[router])


def padding(**changes: object) -> Iterator[Row]:
    """Fig 11: top-K wastes half a tile of 64 rows per expert, rounding nothing; rounding crashes at the last E."""
    d, n, K, experts = paper.FIG16_PANELS[3]
    for E in experts:
        shape = Shape(paper.FIG16_T, d, n, E, K)
        flops = shape.flops("fwd_bwd")
        for router in TILE:
            given = {"op": "experts", "mode": "fwd_bwd", "sweep": "padding", "routing": routed(router)} | changes
            wasted = 18 * n * d * E * 32 if router == "topk" else 0
            if router != "topk" and E == 256:
                yield unmeasured(shape, "crashed", **given)
            else:
                yield measured(shape, **({"flops_padded": flops + wasted} | given))


def models(**changes: object) -> Iterator[Row]:
    """Fig 17: rounding is 10% faster in both passes, and with the backward out of memory at DeepSeek; its router takes
    300 us more."""
    fields = {"sweep": "token_rounding_models"} | changes
    for name, sizes in paper.MODEL_SHAPES.items():
        shape = Shape(*sizes)
        for router in TILE:
            for mode in ("fwd", "fwd_bwd"):
                given = {"op": "experts", "mode": mode, "routing": routed(router)} | fields
                took = shape.flops(mode) / 500e6 / (1 if router == "topk" else GAIN)
                if router != "topk" and mode == "fwd_bwd" and name == DEEPSEEK:
                    yield unmeasured(shape, "oom", **given)
                else:
                    yield measured(shape, us=took, **given)
            given = {"op": "routing", "flops_model": 0, "flops_padded": None, "held_bytes": None} | fields
            yield measured(shape, us=ROUTING_US[router], routing=routed(router, "learned"), **given)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("padding"), [*padding(), *models()])


def marks(ax: Axes) -> list[float]:
    """The paper's values in a panel."""
    return [float(line.get_ydata()[0]) for line in ax.lines if line.get_markerfacecolor() == "white"]


@pytest.mark.parametrize("figure_id", ["fig11", "fig17"])
def test_figures_stay_on_their_sheet(results: Path, figure_id: str) -> None:
    check_sheet(figures.build(figure_id, results))


def test_fig11_draws_what_is_wasted_beside_the_papers_model(results: Path) -> None:
    drawn = figures.build("fig11", results)
    (ax,) = drawn.figure.axes
    assert ax.get_title() == "d=4096 n=1024 K=4 T=16384"
    topk, rounding = lines_of(ax, common.look("sonic").colour)
    assert topk == pytest.approx([0.0773, 0.1546, 0.3092, 0.6185], abs=1e-4)
    assert rounding[:3] == pytest.approx([0.0] * 3) and np.isnan(rounding[3])
    (theirs,) = lines_of(ax, common.GREY)
    assert theirs == pytest.approx(2 * topk)
    assert [text.get_text() for text in ax.texts] == ["\N{MULTIPLICATION SIGN} crashed"]
    assert ax.get_xticklabels()[3].get_text() == "256\n1/64"
    assert [handle.get_text() for handle in drawn.figure.legends[0].get_texts()] == [
        "sonic (triton, top-K)", "sonic (triton, token rounding)", "expected of top-K: half a tile, 64 rows per expert",
    ]  # fmt: skip
    text = " ".join(texts_of(drawn.figure).split())
    assert "Wasted by sonic (triton, top-K): 1.6% to 12.5% of the model FLOPs." in text
    assert "counted, not timed" in text and "device time" not in text


def test_fig11_table_holds_flops_shares_and_the_papers(results: Path) -> None:
    table = figures.build("fig11", results).table
    assert list(table.E) == [32, 32, 64, 64, 128, 128, 256, 256] and list(table.method) == 4 * list(TILE)
    line = table[table.E == 256].set_index("method").loc["topk"]
    flops = 18 * 16384 * 4 * 1024 * 4096
    assert (line.flops_model, line.flops_padded) == pytest.approx((flops, 1.125 * flops))
    assert (line.wasted_tflop, line.wasted_share, line.wasted_rows) == pytest.approx((flops / 8e12, 12.5, 32))
    assert (line.paper_tflop, line.paper_share) == pytest.approx((flops / 4e12, 25))
    assert (line.paper_low, line.paper_high) == (15, 20)
    rounded = table[table.method != "topk"].set_index("E")
    assert list(rounded.status) == ["ok"] * 3 + ["crashed"] and np.isnan(rounded.wasted_tflop[256])
    assert rounded.paper_tflop.to_numpy() == pytest.approx(0) and rounded.paper_low.isna().all()
    assert table.paper_low.notna().sum() == 1


def test_fig11_has_a_panel_per_fixed_k(tmp_path: Path) -> None:
    other = measured(SHAPE, op="experts", mode="fwd_bwd", sweep="padding", routing=routed("topk"))
    drawn = figures.build("fig11", write(tmp_path, [*padding(), other]))
    assert [ax.get_title() for ax in drawn.figure.axes] == ["d=512 n=128 K=4 T=1024", "d=4096 n=1024 K=4 T=16384"]


def test_fig11_without_padded_flops(tmp_path: Path) -> None:
    torch = {"knobs": Knobs(family="torch"), "flops_padded": None}
    drawn = figures.build("fig11", write(tmp_path / "both", [*padding(), *padding(**torch)]))
    assert set(drawn.table.series) == {"sonic (triton, top-K)", "sonic (triton, token rounding)"}
    text = " ".join(texts_of(drawn.figure).split())
    assert "Not drawn: sonic (torch, top-K): ok (measured, without wasted_tflop)" in text
    with pytest.raises(figures.NotDrawn, match="no row of both passes counts its padded FLOPs"):
        figures.build("fig11", write(tmp_path / "torch", padding(**torch)))


def test_fig17_draws_rates_gains_the_papers_and_the_cost(results: Path) -> None:
    drawn = figures.build("fig17", results)
    forward, backward, forward_gain, backward_gain, both_gain, cost = drawn.figure.axes
    assert [ax.get_title() for ax in drawn.figure.axes] == [
        "forward", "backward (fwd_bwd \N{MINUS SIGN} fwd)", "gain, forward",
        "gain, backward (fwd_bwd \N{MINUS SIGN} fwd)", "gain, forward + backward", "router alone, forward",
    ]  # fmt: skip
    for ax in (forward, backward):
        assert bars_of(ax, common.look("sonic").colour) == pytest.approx([500.0] * 6)
    heights = [[bar.get_height() for bar in ax.patches] for ax in drawn.figure.axes]
    assert heights[0][6:] == pytest.approx([550.0] * 6)
    for number in (1, 3, 4):
        assert np.isnan(heights[number][-1])
    assert heights[2] == pytest.approx([10.0] * 6)
    assert heights[3][:5] + heights[4][:5] == pytest.approx([10.0] * 10)
    assert heights[5] == pytest.approx([0.1] * 6 + [0.4] * 6)
    assert (marks(forward_gain), marks(backward_gain), marks(both_gain)) == ([19.6], [7.9], [])
    for ax in (backward, backward_gain, both_gain):
        assert [text.get_text() for text in ax.texts].count("\N{MULTIPLICATION SIGN} oom") == 1
    assert cost.get_xticklabels()[5].get_text() == "DeepSeek-V3.2\nd=7168\nn=2048\n256/8"
    assert [handle.get_text() for handle in drawn.figure.legends[0].get_texts()] == [
        "sonic (triton, top-K)", "sonic (triton, token rounding)", "gain with the router's extra time",
        "paper, H100 (Fig 17, stated in its text)",
    ]  # fmt: skip
    text = " ".join(texts_of(drawn.figure).split())
    assert "Gain of rounding, sonic (triton): forward +10.0% to +10.0% over 6 points" in text
    assert "The router of rounding takes 4 to 4 times as long as top-K's, sonic (triton)" in text


def test_fig17_table_holds_three_passes_and_the_cost(results: Path) -> None:
    table = figures.build("fig17", results).table
    assert len(table) == 6 * 3 and set(table.series) == {"sonic (triton)"}
    line = table[table.model == QWEN_NEXT].set_index("mode")
    assert list(line.index) == ["fwd", "bwd", "fwd_bwd"]
    assert line.gain.to_numpy() == pytest.approx([10.0] * 3)
    assert list(line.paper_gain)[:2] == [19.6, 7.9] and np.isnan(line.paper_gain["fwd_bwd"])
    assert list(line.gain_vs_paper)[:2] == pytest.approx([10 / 19.6, 10 / 7.9])
    assert line.topk_routing_ms.to_numpy() == pytest.approx(0.1)
    assert line.rounding_routing_ms.to_numpy() == pytest.approx(0.4)
    assert np.isnan(line.net_gain["bwd"])
    for mode in ("fwd", "fwd_bwd"):
        took = line.topk_ms[mode] / GAIN + 0.3
        assert line.net_gain[mode] == pytest.approx(100 * (line.topk_ms[mode] / took - 1))
    last = table[table.model == DEEPSEEK].set_index("mode")
    assert list(last.status) == ["ok", "ok, oom", "ok, oom"]
    assert last.gain.isna().tolist() == last.net_gain.isna().tolist() == [False, True, True]


def test_fig17_keeps_families_apart(tmp_path: Path) -> None:
    rows = [*models(), *models(knobs=Knobs(family="hopper"))]
    drawn = figures.build("fig17", write(tmp_path, rows))
    assert set(drawn.table.series) == {"sonic (hopper)", "sonic (triton)"}
    assert marks(drawn.figure.axes[2]) == [19.6]
    assert len(drawn.figure.axes[5].patches) == 4 * 6


def test_fig17_without_the_routers_says_so(tmp_path: Path) -> None:
    drawn = figures.build("fig17", write(tmp_path, [row for row in models() if row.op == "experts"]))
    text = texts_of(drawn.figure)
    assert "what rounding costs is not known here" in text and "\N{MULTIPLICATION SIGN} no row" in text
    assert "net_gain" not in drawn.table and drawn.table.gain.notna().any()


def test_fig17_of_failed_routers_shows_their_status(tmp_path: Path) -> None:
    failed = {"status": "failed", "device_us": None, "event_us": None, "method": None}
    rows = [row.model_copy(update=failed) if row.op == "routing" else row for row in models()]
    cost = figures.build("fig17", write(tmp_path, rows)).figure.axes[5]
    assert [text.get_text() for text in cost.texts] == ["\N{MULTIPLICATION SIGN} failed"] * 12


def test_fig17_of_the_forward_alone_has_no_backward(tmp_path: Path) -> None:
    drawn = figures.build("fig17", write(tmp_path, [row for row in models() if row.mode == "fwd"]))
    assert [text.get_text() for text in drawn.figure.axes[3].texts] == ["\N{MULTIPLICATION SIGN} no row"] * 6
    assert set(drawn.table["mode"]) == {"fwd"}


def test_fig17_writes_a_loss_above_its_bar(tmp_path: Path) -> None:
    slower = [
        row.model_copy(update={"device_us": [1.2 * us for us in row.device_us]})
        if row.routing.method != "topk" and row.device_us
        else row
        for row in models()
    ]
    ax = figures.build("fig17", write(tmp_path, slower)).figure.axes[2]
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([100 * (GAIN / 1.2 - 1)] * 6)
    assert all(text.xy[1] == 0 for text in ax.texts) and ax.get_ylim()[1] >= 0


def test_fig17_of_one_router_says_that_there_is_no_gain(tmp_path: Path) -> None:
    rows = [row for row in models() if row.routing.method == "topk"]
    drawn = figures.build("fig17", write(tmp_path, rows))
    assert "No point has both top-K and token rounding measured" in texts_of(drawn.figure)
    assert "gain" not in drawn.table


def test_routers_alone_fill_no_figure(tmp_path: Path) -> None:
    rows = [row for row in models() if row.op == "routing"]
    with pytest.raises(figures.NotDrawn, match="no experts were measured"):
        figures.build("fig17", write(tmp_path, rows))


@pytest.mark.parametrize(("figure_id", "words"), [("fig11", "counted, not timed"), ("fig17", "not GPU speed")])
def test_a_cpu_figure_says_so(tmp_path: Path, figure_id: str, words: str) -> None:
    sweep = figures.module_of(figure_id).SWEEP
    rows = [
        measured(SHAPE, gpu="cpu", op="experts", mode=mode, sweep=sweep, routing=routed(router))
        for router in TILE
        for mode in ("fwd", "fwd_bwd")
    ]
    drawn = figures.build(figure_id, write(tmp_path, rows))
    assert drawn.gpu == "cpu" and words in texts_of(drawn.figure)


def test_the_papers_model_of_fig_11() -> None:
    d, n, K, experts = paper.FIG16_PANELS[3]
    wasted = [paper.wasted_flops(Shape(paper.FIG16_T, d, n, E, K)) / 1e12 for E in experts]
    assert wasted == pytest.approx([0.15, 0.31, 0.62, 1.24], abs=0.005)
