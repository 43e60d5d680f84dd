"""Figs 19 to 22: single kernels with and without their fusions, from made-up rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import figures, paper
from sonic.record import Knobs, Routing, Row
from tests.analysis_rows import check_sheet, measured, unmeasured, write

LEARNED, BALANCED = Routing(), Routing(distribution="balanced")
SHAPES = [paper.shape("7B", n) for n in (256, 512)] + [paper.shape("30B", 1024)]


def of(sweep: str, op: str, us: float, impl: str = "sonic", routing: Routing = LEARNED, **knobs: str) -> list[Row]:
    """One row per shape; flops and bytes are those of a layer, which no test minds."""
    family = {"family": "hopper"} if impl == "sonic" else {}
    given = {"sweep": sweep, "op": op, "mode": "fwd", "routing": routing, "knobs": Knobs(**(family | knobs))}
    return [measured(shape, impl, us=us, **given) for shape in SHAPES]


ROWS = [
    *of("grouped_gemm", "up_proj", 400.0, gather="given", activation="separate"),
    *of("grouped_gemm", "up_proj", 480.0, "torch_grouped_mm", gather="given"),
    *of("grouped_gemm", "down_proj", 250.0), *of("grouped_gemm", "down_proj", 260.0, "deepgemm_pp"),
    *of("grouped_gemm", "up_proj", 500.0, "deepgemm_pp", gather="given"),
    *of("grouped_gemm", "up_proj", 380.0, "cublas_bmm", gather="given", routing=BALANCED),
    *of("gather", "up_proj", 424.0), *of("gather", "up_proj", 600.0, gather="separate"),
    *of("gather", "up_proj", 400.0, gather="given"),
    *of("gather", "weight_grad_1", 434.0), *of("gather", "weight_grad_1", 400.0, gather="given"),
    unmeasured(SHAPES[0], "unsupported", "reads rows", impl="torch_grouped_mm", sweep="gather", op="up_proj"),
    *of("gather", "up_proj", 530.0, "scattermoe"), *of("gather", "up_proj", 500.0, "scattermoe", gather="given"),
    *of("gather", "weight_grad_1", 868.0, "scattermoe", gather="separate"),
    *of("aggregation", "aggregate", 165.0), *of("aggregation", "aggregate", 700.0, "torch_grouped_mm"),
    *of("aggregation", "aggregate", 330.0, "torch_bmm"), *of("aggregation", "aggregate", 180.0, "torch_sum"),
    *of("combine", "combine", 400.0, family="triton"),
    *of("combine", "combine", 480.0, family="triton", aggregate="scatter_sum"),
    *of("combine", "down_proj", 300.0, family="triton"),
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("results"), ROWS)


@pytest.mark.parametrize("figure_id", ["fig19", "fig20", "fig21", "fig22"])
def test_every_figure_draws_its_ops_and_the_papers_words(results: Path, figure_id: str) -> None:
    drawn = figures.build(figure_id, results)
    said = " ".join(text.get_text() for text in drawn.figure.texts)
    assert "The paper, H100:" in said and len(drawn.figure.axes) == drawn.table.op.nunique()
    assert drawn.table[drawn.table.series.str.startswith("sonic")].over_sonic.min() == 1.0
    assert figures.png(drawn.figure, dpi=50)


def test_fig19_compares_through_the_fastest_of_ours(results: Path) -> None:
    table = figures.build("fig19", results).table
    theirs = table[(table.op == "up_proj") & table.series.str.startswith("torch_grouped_mm")]
    assert theirs.over_sonic.to_numpy() == pytest.approx([1.2] * 3)


def test_fig20_says_what_a_gather_costs(results: Path) -> None:
    said = " ".join(text.get_text() for text in figures.build("fig20", results).figure.texts)
    assert "Here the gather on M costs 6.0% fused and 50.0% as a kernel." in said
    assert "Here the gather on K costs 8.5% fused and nan% as a kernel" not in said


def test_the_papers_averages_have_ours_beside_them(results: Path) -> None:
    def said(figure_id: str) -> str:
        texts = sorted(figures.build(figure_id, results).figure.texts, key=lambda text: -text.get_position()[1])
        return " ".join(" ".join(text.get_text() for text in texts).split())

    assert "up over DeepGEMM 1.03 (here 1.25), down over DeepGEMM 1.10 (here 1.04)." in said("fig19")
    assert "30B, down over DeepGEMM +57.4% at n=256, +14% at n=512, +5.3% at n=1024." in said("fig19")
    assert "M-gather over ScatterMoE 1.10 (here 1.25), M-gather over MoMoE 1.31, " in said("fig20")
    assert "dW1 over ScatterMoE 1.24, " in said("fig20") and "K-gather over ScatterMoE 1.55 (here 2.00)" in said(
        "fig20"
    )
    assert "torch.bmm 2.92 (here 2.00), MoMoE's torch.sum 1.05 (here 1.09), a Triton sum" in said("fig21")


def test_the_bound_says_that_its_experts_are_equal(results: Path) -> None:
    table = figures.build("fig19", results).table
    assert set(table.series[table.series.str.startswith("cublas_bmm")]) == {"cublas_bmm (balanced)"}


def test_fig22_says_what_gathering_in_the_sum_saves(results: Path) -> None:
    said = " ".join(text.get_text() for text in figures.build("fig22", results).figure.texts)
    assert "Here, Triton kernels: +20.0% with the aggregation." in said


def test_a_sweep_without_times_draws_nothing(tmp_path: Path) -> None:
    row = unmeasured(SHAPES[0], "oom", impl="sonic", sweep="aggregation", op="aggregate")
    with pytest.raises(figures.NotDrawn, match="none of aggregate was measured"):
        figures.build("fig21", write(tmp_path, [row]))


def test_many_shapes_are_dealt_out_to_panels_of_one_scale(tmp_path: Path) -> None:
    """All twelve shapes of Fig 20 with every way of every package would be thrice as wide as a page."""
    ways = [("sonic", way) for way in ("fused", "separate", "given")]
    ways += [(impl, way) for impl in ("scattermoe", "deepgemm_pp", "torch_grouped_mm") for way in ("separate", "given")]
    shapes = [paper.shape(size, n) for size in paper.CONFIGS for n, *_ in paper.CONFIGS[size]]
    rows = [
        measured(
            shape, impl, us=1000.0 + 10 * at, op=op, sweep="gather", held_bytes=None,
            knobs=Knobs(family="hopper" if impl == "sonic" else "torch", gather=way, activation="separate"),
        )
        for at, shape in enumerate(shapes) for op in ("up_proj", "weight_grad_1") for impl, way in ways
    ]  # fmt: skip
    drawn = figures.build("fig20", write(tmp_path, rows))
    check_sheet(drawn)
    first, second, *_ = axes = drawn.figure.axes
    assert len(axes) == 4 and first.get_ylim() == second.get_ylim()
    ticks = [tick.get_text() for ax in axes[:2] for tick in ax.get_xticklabels()]
    assert len(ticks) == len(set(ticks)) == len(shapes)
