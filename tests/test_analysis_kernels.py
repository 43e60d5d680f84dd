"""Figs 19 to 22: single kernels with and without their fusions, from made-up rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import figures, paper
from sonic.record import Knobs, Row
from tests.analysis_rows import measured, unmeasured, write

SHAPES = [paper.shape("7B", n) for n in (256, 512)] + [paper.shape("30B", 1024)]


def of(sweep: str, op: str, us: float, impl: str = "sonic", **knobs: str) -> list[Row]:
    """One row per shape; flops and bytes are those of a layer, which no test minds."""
    family = {"family": "hopper"} if impl == "sonic" else {}
    given = {"sweep": sweep, "op": op, "mode": "fwd", "knobs": Knobs(**(family | knobs))}
    return [measured(shape, impl, us=us, **given) for shape in SHAPES]


ROWS = [
    *of("grouped_gemm", "up_proj", 400.0, gather="given", activation="separate"),
    *of("grouped_gemm", "up_proj", 480.0, "torch_grouped_mm", gather="given"),
    *of("grouped_gemm", "down_proj", 250.0),
    *of("gather", "up_proj", 424.0), *of("gather", "up_proj", 600.0, gather="separate"),
    *of("gather", "up_proj", 400.0, gather="given"),
    *of("gather", "weight_grad_1", 434.0), *of("gather", "weight_grad_1", 400.0, gather="given"),
    unmeasured(SHAPES[0], "unsupported", "reads rows", impl="torch_grouped_mm", sweep="gather", op="up_proj"),
    *of("aggregation", "aggregate", 165.0), *of("aggregation", "aggregate", 700.0, "torch_grouped_mm"),
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


def test_fig22_says_what_gathering_in_the_sum_saves(results: Path) -> None:
    said = " ".join(text.get_text() for text in figures.build("fig22", results).figure.texts)
    assert "Here, Triton kernels: +20.0% with the aggregation." in said


def test_a_sweep_without_times_draws_nothing(tmp_path: Path) -> None:
    row = unmeasured(SHAPES[0], "oom", impl="sonic", sweep="aggregation", op="aggregate")
    with pytest.raises(figures.NotDrawn, match="none of aggregate was measured"):
        figures.build("fig21", write(tmp_path, [row]))
