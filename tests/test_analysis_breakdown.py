"""Figs 3 and 6: the model of bytes beside counters, kernels sorted into the paper's classes; from made-up rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import classes, fig6_breakdown, figures, paper, traffic
from sonic.kernels import aggregate, d_act, d_input, down_proj, up_proj, weight_grad
from sonic.record import Counters, KernelTime, Knobs, Row
from sonic.shapes import Shape
from tests.analysis_rows import measured, unmeasured, write

SHAPE = paper.shape("7B", 256)
FORWARD = [("nvjet_a", 30), ("_topk_kernel", 10), ("_scatter_kernel", 15), ("_up_proj_kernel", 500),
           ("_grouped_gemm_kernel", 270), ("_aggregate_kernel", 165)]  # fmt: skip
BACKWARD = [("_restore_kernel", 10), ("_d_act_kernel", 420), ("_weight_grad_kernel", 250),
            ("_grouped_gemm_kernel", 490), ("_aggregate_kernel", 166), ("_weight_grad_kernel", 470),
            ("_topk_backward_kernel", 10), ("nvjet_b", 60), ("mystery", 100)]  # fmt: skip


def kernels(*parts: tuple[str, float], calls: int = 1) -> list[KernelTime]:
    return [KernelTime(name=name, us=us, calls=calls) for name, us in parts]


def dumped(*parts: tuple[str, float]) -> list[dict]:
    return [kernel.model_dump() for kernel in kernels(*parts)]


def test_our_kernels_have_their_classes() -> None:
    found = classes.classify("sonic", dumped(*FORWARD), backward=False)
    assert [part.kind for part in found] == ["router"] * 3 + ["up proj", "down proj", "expert agg"]
    rest = classes.backward_of(dumped(*FORWARD, *BACKWARD), dumped(*FORWARD))
    assert [(kernel["name"], kernel["us"]) for kernel in rest] == BACKWARD
    found = classes.classify("sonic", rest, backward=True)
    assert [part.kind for part in found] == [
        "router", "dH", "dW2", "dXt", "expert agg", "dW1", "router", "router", "other",
    ]  # fmt: skip


def test_a_name_that_is_summed_loses_the_forwards_time() -> None:
    both = [kernel.model_dump() for kernel in kernels(("_scatter2scatter", 2200.0), calls=4)]
    left = classes.backward_of(both, dumped(("_scatter2scatter", 650.0), ("_scatter2scatter", 500.0)))
    assert [(kernel["us"], kernel["calls"]) for kernel in left] == [(1050.0, 2)]


@pytest.mark.parametrize(
    ("impl", "name", "calls", "backward", "kind"),
    [
        ("scattermoe", "_scatter2scatter", 2, True, "GEMM"),  # dH and dXt
        ("scattermoe", "_group", 2, True, "gather dO, X"),
        ("momoe", "weights_update_kernel", 2, True, "GEMM"),
        ("megablocks", "nvjet_sm90_tst_64x64_64x8_1x2_h_bz_TNN", 257, False, "up proj"),  # the router's is one of them
        ("megablocks", "nvjet_sm90_tst_64x64_64x8_1x2_h_bz_NTN", 384, True, "GEMM"),
    ],
)
def test_the_class_of_calls_that_are_one_sum(impl: str, name: str, calls: int, backward: bool, kind: str) -> None:
    summed = [kernel.model_dump() for kernel in kernels((name, 1000.0), calls=calls)]
    assert classes.classify(impl, summed, backward)[0].kind == kind


@pytest.mark.parametrize(
    ("impl", "names", "kinds"),
    [
        ("torch_grouped_mm_compiled", ["gemm.GroupProblemShape"] * 4, ["dW2", "dH", "dW1", "dXt"]),
        ("deepgemm_pp", ["_gather_rows_kernel", "deep_gemm::sm90_bf16_gemm_impl", "_d_swiglu_kernel",
                         "deep_gemm::sm90_bf16_gemm_impl", "_aggregate_kernel"],
         ["gather dO", "dH", "dSwiGLU", "dW2", "expert agg"]),
        ("momoe", ["making_nice_scatter_kernel", "swiglu_backward_kernel", "weights_update_kernel",
                   "weights_update_kernel", "lin1_backward_kernel"], ["gather dO, X", "dH", "dW2", "dW1", "dXt"]),
        ("liger", ["_moe_bwd_down_proj_kernel", "_moe_bwd_dW2_kernel", "_moe_bwd_dX_expanded_kernel",
                   "_token_gather_weighted_sum_kernel", "_moe_bwd_dW1_kernel"],
         ["dH", "dW2", "dXt", "expert agg", "dW1"]),
        ("moe_ops", ["_unpermute_bwd_kernel", "grouped_matmul_tma_kernel", "gmm_gradB_kernel",
                     "grouped_matmul_tma_kernel", "gmm_gradB_kernel", "_unpermute_kernel"],
         ["gather dO", "dH", "dW2", "dXt", "dW1", "expert agg"]),
        ("megablocks", ["_padded_copy", "_padded_copy_wgrad", "nvjet_a_TNN", "nvjet_b_NNN", "_padded_copy"],
         ["gather dO", "dS", "dH", "dXt", "expert agg"]),
    ],
)  # fmt: skip
def test_backward_classes_by_order(impl: str, names: list[str], kinds: list[str]) -> None:
    found = classes.classify(impl, dumped(*((name, 1.0) for name in names)), backward=True)
    assert [part.kind for part in found] == kinds


@pytest.mark.parametrize(
    ("impl", "name", "backward", "kind"),
    [
        ("sonicmoe_official", "kernel_cutlass_kernel_quackgemm_actGemmGatedSm90_object_at_", False, "up proj"),
        ("sonicmoe_official", "kernel_cutlass_kernel_quackgemm_dactGemmDGatedSm90_object_at_", True, "dH"),
        ("scattermoe", "void at::native::elementwise_kernel<128, 4, silu_kernel(at::Tensor&)", False, "SwiGLU"),
        ("scattermoe", "_group", True, "gather dO"),
        ("torch_grouped_mm_compiled", "triton_poi_fused_floor_divide_index_select_4", False, "gather X"),
        ("torch_grouped_mm_compiled", "triton_per_fused_index_select_sum_view_3", True, "expert agg"),
        ("moe_ops", "_permute_countsort_kernel", False, "gather X"),
        ("momoe", "scatter_cols_kernel", False, "router"),
        ("liger", "_fused_up_proj_swiglu_kernel", False, "up proj"),
        ("transformers", "void at::native::vectorized_gather_kernel<16, long>", False, "gather X"),
        ("standard_style", "_gather_rows_kernel", False, "gather X"),
        ("megablocks", "void at::native::sbtopk::gatherTopK<c10::BFloat16>", False, "router"),
        ("megatron", "void cutlass::Kernel<cutlass_80_tensorop_bf16_s16816gemm>", True, "GEMM"),
        ("momoe", "what is this", False, "other"),
    ],
)  # fmt: skip
def test_classes_by_name(impl: str, name: str, backward: bool, kind: str) -> None:
    assert classes.classify(impl, dumped((name, 1.0)), backward)[0].kind == kind


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = {"sweep": "throughput", "op": "layer", "knobs": Knobs(family="hopper")}
    rows = [
        measured(SHAPE, us=990.0, mode="fwd", kernels=kernels(*FORWARD), **given),
        measured(SHAPE, us=3000.0, mode="fwd_bwd", kernels=kernels(*FORWARD, *BACKWARD), **given),
        measured(SHAPE, "scattermoe", us=1800.0, mode="fwd", sweep="throughput", op="layer",
                 kernels=kernels(("_scatter2scatter", 650), ("_scatter2scatter", 500), ("odd", 600))),
        unmeasured(SHAPE, "oom", impl="scattermoe", mode="fwd_bwd", sweep="throughput", op="layer"),
        unmeasured(SHAPE, "unavailable", "absent", impl="megablocks", mode="fwd", sweep="throughput", op="layer"),
    ]  # fmt: skip
    return write(tmp_path_factory.mktemp("results"), rows)


def test_fig6_sums_and_compares(results: Path) -> None:
    table = figures.build("fig6", results).table
    sums = table[table["class"] == "sum"].set_index(["series", "pass"])
    assert sums.ms.loc["sonic (hopper)", "fwd"] == pytest.approx(0.99)
    assert sums.ms.loc["sonic (hopper)", "bwd"] == pytest.approx(1.976)
    assert sums.paper_ms.loc["sonic (hopper)", "bwd"] == 2.173
    assert sums.over_sonic.loc["scattermoe", "fwd"] == pytest.approx(1.75 / 0.99)
    assert sums.paper_over_sonic.loc["scattermoe", "fwd"] == pytest.approx(2.255 / 1.237)
    up = table[(table["class"] == "up proj") & (table.series == "sonic (hopper)")].iloc[0]
    assert up.tflops == pytest.approx(4 * SHAPE.R * SHAPE.n * SHAPE.d / 500e-6 / 1e12)
    assert up.paper_tflops == 559 and up.paper_ms == 0.55
    d_act = table[(table["class"] == "dH") & (table.series == "sonic (hopper)")].iloc[0]
    moved = 2 * (SHAPE.R * SHAPE.d + 5 * SHAPE.R * SHAPE.n + SHAPE.E * SHAPE.d * SHAPE.n)
    assert d_act.tbps == pytest.approx(moved / 420e-6 / 1e12) and d_act.paper_tbps == 2.14
    assert ("scattermoe", "bwd") not in sums.index


def test_fig6_says_what_it_does_not_know(results: Path) -> None:
    figure = figures.build("fig6", results).figure
    said = " ".join(text.get_text() for text in figure.texts)
    assert "scattermoe: 34% of the time in no one class of the paper, most of it odd (0.6 ms)" in said
    words = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert "\N{MULTIPLICATION SIGN} oom" in words


def test_fig6_of_another_shape_has_no_paper(tmp_path: Path) -> None:
    shape = paper.shape("30B", 1024)
    row = measured(shape, us=990.0, mode="fwd", kernels=kernels(*FORWARD), sweep="throughput", op="layer")
    drawn = figures.build("fig6", write(tmp_path, [row]))
    assert "paper_ms" not in drawn.table and len(fig6_breakdown.parts(drawn.data)) == 4


QWEN = Shape(T=32768, d=4096, n=1536, E=128, K=8)


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [("sonic", 13.75, 26.75), ("scattermoe", 15.25, 41.75), ("momoe", 15.75, 38.75), ("standard", 23.25, 39.75)],
)
def test_the_traffic_gives_the_authors_totals(method: str, forward: float, backward: float) -> None:
    fwd, both = (traffic.total(method, mode, QWEN) / paper.GIB for mode in ("fwd", "fwd_bwd"))
    assert (fwd, both - fwd) == (forward, backward)


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
def test_the_traffic_is_the_sum_of_our_kernels_costs(mode: str) -> None:
    """Router and metadata are no part of it."""
    steps = {
        "fwd": [up_proj.up_proj_cost, down_proj.down_proj_cost, aggregate.aggregate_cost],
        "bwd": [d_act.d_act_cost, weight_grad.weight_grad_2_cost, d_input.d_input_cost, weight_grad.weight_grad_1_cost,
                aggregate.aggregate_cost],
    }  # fmt: skip
    costs = [cost(QWEN, QWEN.R, 2) for cost in steps["fwd"] + (steps["bwd"] if mode == "fwd_bwd" else [])]
    assert sum(cost.bytes for cost in costs) == traffic.total("sonic", mode, QWEN)
    assert sum(cost.bytes_once for cost in costs) == traffic.total("sonic", mode, QWEN, once=True)


def io_rows(counted: bool) -> list[Row]:
    rows = []
    for n in (256, 512, 1024):
        shape = paper.shape("7B", n)
        for impl, more in (("sonic", 1.0), ("scattermoe", 1.1), ("torch_grouped_mm_compiled", 2.0)):
            method = "sonic" if impl.startswith("torch") else impl
            size = int(more * traffic.total(method, "fwd_bwd", shape, once=True))
            told = Counters(status="ok", dram_read=size // 2, dram_write=size - size // 2, l2_hit=0.5, tensor_pipe=0.6)
            given = {"op": "layer", "mode": "fwd_bwd", "counters": told if counted else Counters(status="missing")}
            rows.append(measured(shape, impl, sweep="io" if counted else "granularity", **given))
    return rows


def test_fig3_sets_counters_beside_the_model(tmp_path: Path) -> None:
    drawn = figures.build("fig3", write(tmp_path, io_rows(counted=True)))
    found = drawn.table[drawn.table.impl == "scattermoe"]
    assert found.dram_over_once.to_numpy() == pytest.approx([1.1] * 3, rel=1e-6)
    said = " ".join(text.get_text() for text in drawn.figure.texts)
    assert "sonic (triton): counted over modelled bytes 1.00 to 1.00 with gathered rows once" in " ".join(said.split())
    compiled = drawn.table[drawn.table.impl == "torch_grouped_mm_compiled"]  # no method of the model, but counted
    assert len(compiled) == 3 and compiled.dram_gib.notna().all() and compiled.model_gib.isna().all()
    assert figures.png(drawn.figure, dpi=50)


def test_fig3_without_counters_is_the_model_and_says_so(tmp_path: Path) -> None:
    drawn = figures.build("fig3", write(tmp_path, io_rows(counted=False)))
    assert drawn.table.dram_gib.isna().all() and drawn.table.model_gib.notna().all()
    assert "no row has hardware counters" in " ".join(text.get_text() for text in drawn.figure.texts)
