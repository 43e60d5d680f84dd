"""The adapter of our own layer: every kernel alone, the knobs' names, and what a row says beside times."""

from __future__ import annotations

import pytest
import torch

from sonic.impls.sonic import Impl
from sonic.problem import Problem
from sonic.record import KERNEL_OPS, KernelTime, Knobs, Point, Routing, Settings, ShapeSpec, TileSpec
from sonic.worker import serve_point

SHAPE = ShapeSpec(T=17, d=64, n=32, E=5, K=2)
SETTINGS = Settings(warmup_ms=0, samples=1, graph=False, l2="cold", profile=False, tune="cached")


def point(**fields: object) -> Point:
    given = {"sweep": "test", "impl": "sonic", "op": "layer", "mode": "fwd_bwd", "dtype": "fp32", "shape": SHAPE}
    return Point(**{**given, **fields})


def adapter(**fields: object) -> Impl:
    wanted = point(**fields)
    return Impl(Problem(SHAPE.sizes(), Routing(), wanted.dtype, "cpu", 0), wanted)


@pytest.mark.parametrize("op", KERNEL_OPS)
def test_every_kernel_alone_gives_a_row(op: str):
    outcome = serve_point(point(op=op, mode="fwd"), SETTINGS).outcome
    assert outcome.status == "ok", outcome.reason
    assert outcome.errors and max(outcome.errors.values()) <= 2


VARIANTS = [
    ("up_proj", {"gather": "separate"}),
    ("up_proj", {"gather": "given", "activation": "separate"}),
    ("d_act", {"gather": "given"}),
    ("d_act", {"gather": "separate", "activation": "separate"}),
    ("weight_grad_1", {"gather": "separate"}),
    ("weight_grad_1", {"gather": "given"}),
    ("weight_grad_2", {"gather": "given"}),
    ("combine", {"aggregate": "scatter_sum"}),
    ("combine", {"aggregate": "atomic"}),
]


@pytest.mark.parametrize(("op", "knobs"), VARIANTS, ids=str)
@pytest.mark.parametrize("family", ["triton", "torch"])
def test_a_kernel_without_one_of_its_fusions(op: str, knobs: dict[str, str], family: str):
    asked = point(op=op, mode="fwd", knobs=Knobs(family=family, **knobs))
    outcome = serve_point(asked, SETTINGS).outcome
    assert outcome.status == "ok", outcome.reason
    assert outcome.errors and max(outcome.errors.values()) <= 2


def test_the_cost_of_a_kernel_follows_its_knobs():
    """Rows instead of tokens are each read once; a gather kernel reads and writes them first; a GEMM alone has no A."""
    pair, weights = 4 * 34 * 64, 4 * 5 * 64 * 64

    def cost(**knobs: str) -> list[KernelTime]:
        return adapter(op="up_proj", mode="fwd", knobs=Knobs(family="triton", **knobs)).kernels_cost

    (fused,), (given,) = cost(), cost(gather="given")
    assert fused.bytes == given.bytes == given.bytes_once > fused.bytes_once
    gather, gemm = cost(gather="separate")
    assert (gather.bytes, gemm.bytes) == (2 * pair, given.bytes)
    (bare,) = cost(gather="given", activation="separate")
    assert bare.bytes == pair + weights + pair and bare.flops == fused.flops
    both = adapter(op="combine", mode="fwd", knobs=Knobs(family="triton"))
    assert [kernel.name for kernel in both.kernels_cost] == ["_grouped_gemm_kernel", "_aggregate_kernel"]
    assert both.flops_model == 2 * 34 * 32 * 64


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"op": "experts", "knobs": Knobs(gather="given")}, "gather is 'given'; allowed: fused, separate"),
        ({"op": "down_proj", "mode": "fwd", "knobs": Knobs(gather="given")}, "knobs.gather is 'given'; op=down_proj"),
        ({"op": "up_proj", "mode": "fwd", "knobs": Knobs(aggregate="atomic")}, "knobs.aggregate is 'atomic'; op=up"),
    ],
)  # fmt: skip
def test_a_knob_that_an_op_does_not_have(fields: dict, text: str):
    assert text in Impl.supports(point(**fields), torch.device("cpu"))


def test_a_wrong_index_is_an_error_of_its_own_kind():
    impl = adapter(op="metadata", mode="fwd")
    right = impl._outputs()
    impl._twin = lambda: [right[0], right[1].roll(1), *right[2:]]
    assert impl.check()["kernel.1"] == float("inf")


@pytest.mark.parametrize("knob", [{"gather": "separate"}, {"activation": "separate"}, {"aggregate": "atomic"}])
def test_a_kernel_alone_refuses_knobs_that_it_would_not_run(knob: dict[str, str]):
    (name, value), *_ = knob.items()
    refusal = Impl.supports(point(op="down_proj", mode="fwd", knobs=Knobs(**knob)), torch.device("cpu"))
    assert refusal is not None and refusal.startswith(f"knobs.{name} is {value!r}")


def test_inference_writes_no_h_and_the_byte_model_says_so():
    pairs = SHAPE.T * SHAPE.K
    difference = adapter(mode="fwd").bytes_model() - adapter(mode="fwd_infer").bytes_model()
    assert difference == 4 * 2 * pairs * SHAPE.n


def test_the_byte_model_is_silent_about_ablations():
    impl = adapter(knobs=Knobs(gather="separate"))
    assert impl.bytes_model() is None
    assert all(cost.bytes is None and cost.flops is not None for cost in impl.kernels_cost)


def test_a_tile_asked_for_is_what_the_row_names():
    impl = adapter(tile=TileSpec(m=16, n=32, kernel="d_act"))
    impl.forward()
    tiles = {cost.name: cost.tile for cost in impl.kernels_cost}
    assert tiles["_d_act_kernel"]["m"] == 16 and tiles["_d_act_kernel"]["n"] == 32
    assert impl.tuned is False


def test_a_tile_that_outgrows_shared_memory_names_need_and_limit():
    outcome = serve_point(point(tile=TileSpec(m=256, n=256, k=128, stages=5)), SETTINGS).outcome
    assert outcome.status == "out_of_resources"
    assert "1310720" in outcome.reason and "232448" in outcome.reason


@pytest.mark.parametrize(
    ("op", "method"), [("experts", "tr_balance"), ("layer", "tr_nearest_score"), ("layer", "laser")]
)
def test_another_router_gives_a_row(op: str, method: str):
    """Through both checks of the gate, with every gradient; R is what was kept."""
    tile = 4 if method.startswith("tr_") else None
    routing = Routing(method=method, tile=tile, distribution="learned" if op == "layer" else "zipf")
    outcome = serve_point(point(op=op, routing=routing), SETTINGS).outcome
    assert outcome.status == "ok", outcome.reason
    assert max(outcome.errors.values()) <= 2 and {"twin.ds", "twin.drouter"} & set(outcome.errors)
    assert outcome.R % (tile or 1) == 0 and outcome.flops_model == 18 * outcome.R * SHAPE.n * SHAPE.d


@pytest.mark.parametrize("method", ["tr_up", "expert_choice", "grouped"])
def test_routing_alone_gives_a_row(method: str):
    shape = ShapeSpec(T=17, d=64, n=32, E=6, K=2)
    fields = {"tr_up": {"tile": 4}, "expert_choice": {"capacity": 1.5}, "grouped": {"groups": 2}}[method]
    routing = Routing(method=method, distribution="zipf", **fields)
    outcome = serve_point(point(op="routing", mode="fwd", routing=routing, shape=shape), SETTINGS).outcome
    assert outcome.status == "ok", outcome.reason


def test_rows_of_a_varying_number_are_summed_by_gathering():
    asked = point(op="experts", routing=Routing(method="tr_up"), knobs=Knobs(aggregate="atomic"))
    assert "knobs.aggregate is 'atomic'" in Impl.supports(asked, torch.device("cpu"))
