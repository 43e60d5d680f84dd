"""The layer: every kernel on the layer's own inputs against its twin, the layer against fp64, and its edges."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from triton.runtime.errors import OutOfResources

import sonic
from sonic import layer, routing
from sonic.kernels.common import SMEM_LIMIT, Tile
from tests.oracle import (
    DEVICE,
    DTYPES,
    GEMMS,
    LAYER_LIMIT,
    TWINS,
    Case,
    Inputs,
    against_twin,
    check,
    check_equal,
    counted,
    draw,
    oracle,
    steps_replaced,
)

#: Every two values of two fields meet in some case (except where the interpreter would need minutes).
CASES = [
    Case(0, 1, 3, 72, 64, "fp32", "one", "columns", "concat", "separate", "fused", "gather_sum", "own"),
    Case(1, 1, 3, 72, 40, "fp32", "one", "plain", "concat", "separate", "separate", "atomic", "own"),
    Case(1, 3, 3, 72, 39, "bf16", "empty", "transposed", "view", "separate", "fused", "scatter_sum", "small"),
    Case(1, 3, 3, 71, 40, "bf16", "random", "rows", "interleaved", "separate", "fused", "gather_sum", "split"),
    Case(17, 3, 3, 64, 64, "fp32", "one", "rows", "interleaved", "fused", "separate", "atomic", "own"),
    Case(130, 1, 3, 71, 64, "bf16", "random", "transposed", "concat", "separate", "fused", "atomic", "small"),
    Case(0, 3, 5, 72, 40, "fp32", "empty", "transposed", "interleaved", "fused", "separate", "atomic", "small"),
    Case(1, 1, 5, 64, 40, "bf16", "random", "plain", "interleaved", "separate", "fused", "gather_sum", "split"),
    Case(17, 1, 5, 72, 39, "fp32", "random", "columns", "view", "fused", "separate", "scatter_sum", "own"),
    Case(130, 3, 5, 71, 64, "fp32", "one", "columns", "interleaved", "separate", "fused", "scatter_sum", "split"),
    Case(130, 3, 5, 72, 39, "bf16", "empty", "rows", "view", "separate", "separate", "atomic", "split"),
    Case(130, 3, 5, 64, 40, "bf16", "random", "plain", "concat", "fused", "separate", "atomic", "small"),
    Case(0, 3, 64, 64, 39, "bf16", "random", "transposed", "view", "fused", "separate", "gather_sum", "small"),
    Case(1, 1, 64, 64, 64, "bf16", "empty", "columns", "interleaved", "fused", "separate", "atomic", "small"),
    Case(1, 8, 64, 71, 39, "bf16", "empty", "plain", "interleaved", "fused", "separate", "atomic", "split"),
    Case(17, 8, 64, 64, 40, "bf16", "empty", "rows", "concat", "fused", "fused", "scatter_sum", "own"),
    Case(17, 8, 64, 72, 64, "bf16", "one", "plain", "view", "separate", "separate", "gather_sum", "small"),
    Case(130, 8, 64, 71, 40, "fp32", "one", "transposed", "view", "fused", "separate", "gather_sum", "own"),
    Case(0, 1, 300, 72, 64, "fp32", "empty", "rows", "view", "separate", "fused", "gather_sum", "small"),
    Case(0, 8, 300, 64, 40, "bf16", "one", "columns", "concat", "separate", "separate", "gather_sum", "split"),
    Case(0, 8, 300, 71, 39, "fp32", "random", "plain", "interleaved", "fused", "separate", "scatter_sum", "own"),
    Case(1, 1, 300, 72, 40, "fp32", "empty", "columns", "view", "separate", "separate", "atomic", "own"),
    Case(17, 3, 300, 71, 39, "fp32", "one", "transposed", "concat", "fused", "fused", "scatter_sum", "split"),
    Case(130, 1, 300, 71, 64, "fp32", "random", "columns", "interleaved", "separate", "fused", "scatter_sum", "own"),
    Case(17, 3, 5, 72, 40, "fp16"),
    Case(17, 6, 7, 192, 20, "fp32"),
    Case(130, 8, 300, 72, 40, "fp32"),
    Case(17, 3, 5, 72, 40, "fp32", gather="separate", activation="separate", aggregate="scatter_sum", tile="static",
         ds="from_y", cache="h_a_y"),
    Case(17, 3, 5, 72, 64, "bf16", activation="separate", aggregate="scatter_sum", ds="from_y", cache="h_a_y"),
    Case(33, 3, 8, 64, 64, "bf16", routing="empty", ds="from_y", cache="h_a", tile="static"),
    Case(17, 2, 5, 72, 39, "fp32", ds="from_y"),
    Case(17, 3, 5, 71, 40, "fp32", cache="h_a"),
    Case(17, 3, 5, 72, 40, "fp32", gather="separate", cache="h_a_y"),
    Case(33, 3, 8, 64, 64, "bf16", cache="none", tile="split"),
    Case(17, 3, 5, 72, 40, "fp32", gather="separate", activation="separate", aggregate="atomic", cache="none"),
    Case(0, 3, 5, 72, 40, "fp32", ds="from_y", cache="h_a_y", aggregate="scatter_sum"),
]  # fmt: skip
SMALL = Case(17, 3, 5, 72, 40)


def slow(case: Case) -> bool:
    return case.T * case.K > 0 and (case.E == 300 or (case.E == 64 and case.T * case.K > 100))


def test_outputs_start_as_nan() -> None:
    """The fixture that all tests here rest on: an output that a kernel leaves out is not a number."""
    found = {"__name__": "sonic.pretended", "torch": torch}
    made = "a = torch.empty(3); b = torch.empty_like(a); c = a.new_empty(2); i = torch.empty(2, dtype=torch.int32)"
    exec(made, found)
    assert all(found[name].isnan().all() for name in "abc") and (found["i"] < -1000).all()
    assert not found["a"].new_zeros(2).isnan().any()


def run(case: Case, inputs: Inputs, family: str = "triton") -> dict[str, torch.Tensor]:
    """O and all gradients of `moe`."""
    o = layer.moe(inputs.x, inputs.router_w, inputs.w1, inputs.w2, case.K, choices=case.choices(family))
    o.backward(inputs.do)
    return {"o": o.detach()} | inputs.grads()


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id, marks=[pytest.mark.slow] if slow(c) else []) for c in CASES])
def test_kernels_against_twins_and_layer_against_fp64(case: Case) -> None:
    """Every step on the inputs that the layer gives it, then output and gradients by name."""
    chosen = []

    def checked(name: str, _step: Callable) -> Callable:
        def both(*args, **kwargs):
            result = against_twin(case.id, name, *args, **kwargs)
            if name == "router_topk":
                chosen.append(result[1])
            return result

        return both

    inputs = draw(case)
    with steps_replaced(checked):
        got = run(case, inputs)
    assert got["o"].dtype == DTYPES[case.dtype]
    for name, want in oracle(case, inputs, chosen[0]).items():
        check(case.id, name, got[name], want, LAYER_LIMIT[DTYPES[case.dtype]])


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_torch_family_in_fp64(case: Case) -> None:
    inputs = draw(case, dtype=torch.float64)
    got = run(case, inputs, "torch")
    _, ids = TWINS.router_topk(F.linear(inputs.x, inputs.router_w), case.K)
    for name, want in oracle(case, inputs, ids).items():
        check(case.id, name, got[name], want, LAYER_LIMIT[torch.float64])


@pytest.mark.parametrize("family", ["triton", "torch"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_experts_with_a_routing_of_ones_own(family: str, ids_dtype: torch.dtype) -> None:
    """Any scores, ids from a view; their gradient comes back in their own dtype."""
    inputs = draw(SMALL)
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(17, 5, generator=generator).argsort(dim=1).to(DEVICE, ids_dtype)[:, :3]
    scores = torch.randn(17, 3, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()
    o = layer.experts(inputs.x, ids, scores, inputs.w1, inputs.w2, choices=SMALL.choices(family))
    o.backward(inputs.do)
    got = {"o": o, "ds": scores.grad} | inputs.grads()
    assert scores.grad.dtype == torch.float64
    for name, want in oracle(SMALL, inputs, ids, scores).items():
        check(f"experts {family}", name, got[name], want, 1e-5)


def test_a_wider_router_and_narrow_experts() -> None:
    case = Case(17, 3, 5, 72, 40, "bf16")
    inputs = draw(case)
    router_w = inputs.router_w.detach().float().requires_grad_()
    o = layer.moe(inputs.x, router_w, inputs.w1, inputs.w2, case.K, choices=case.choices())
    o.backward(inputs.do)
    _, ids = TWINS.router_topk(F.linear(inputs.x.float(), router_w), case.K)
    got = {"o": o} | inputs.grads() | {"drouter_w": router_w.grad}
    assert router_w.grad.dtype == torch.float32
    for name, want in oracle(case, inputs, ids).items():
        check("fp32 router", name, got[name], want, LAYER_LIMIT[torch.bfloat16])


@pytest.mark.parametrize("family", ["triton", "torch"])
def test_experts_without_tokens_get_zeros(family: str) -> None:
    case = Case(33, 1, 8, 72, 40, routing="one")
    got = run(case, draw(case), family)
    for name in ("dw1", "dw2"):
        assert got[name][1:].count_nonzero() == 0 and got[name][0].count_nonzero() > 0


@pytest.mark.parametrize("family", ["triton", "torch"])
@pytest.mark.parametrize("n", [40, 39])
@pytest.mark.parametrize("aggregate", ["gather_sum", "scatter_sum", "atomic"])
def test_nan_stays_with_its_expert(family: str, n: int, aggregate: str) -> None:
    """Tokens of expert 1 are not finite, its neighbours 0 and 2 share tiles, loads and sums with it."""
    case = Case(21, 1, 4, 72, n, aggregate=aggregate)
    ids = torch.tensor([0, 1, 2] * 7, dtype=torch.int32, device=DEVICE)[:, None]
    of_1 = ids[:, 0] == 1
    results = []
    for poison in (False, True):
        inputs = draw(case)
        if poison:
            with torch.no_grad():
                inputs.leaves["x"][of_1] = float("nan")
                inputs.do[of_1] = float("inf")
        scores = torch.full((21, 1), 0.5, device=DEVICE, requires_grad=True)
        o = layer.experts(inputs.x, ids, scores, inputs.w1, inputs.w2, choices=case.choices(family))
        o.backward(inputs.do)
        results.append({"o": o.detach(), "ds": scores.grad, **inputs.grads()})
    clean, poisoned = results
    others = [0, 2, 3]
    for name in ("dw1", "dw2"):
        check_equal(case.id, name, poisoned[name][others], clean[name][others])
    for name in ("o", "ds", "dx"):
        check_equal(case.id, name, poisoned[name][~of_1], clean[name][~of_1])
    assert poisoned["o"][of_1].isnan().all() and poisoned["dw1"][1].isnan().any()


def test_nan_weights_stay_with_their_expert() -> None:
    case = Case(21, 1, 4, 72, 40)
    ids = torch.tensor([0, 1, 2] * 7, dtype=torch.int32, device=DEVICE)[:, None]
    inputs = draw(case)
    with torch.no_grad():
        inputs.leaves["w1"][[1, 3]] = float("nan")
        inputs.leaves["w2"][[1, 3]] = float("nan")
    o = layer.experts(inputs.x, ids, torch.ones(21, 1, device=DEVICE), inputs.w1, inputs.w2, choices=case.choices())
    o.backward(inputs.do)
    assert (o.isfinite().all(dim=1) == (ids[:, 0] != 1)).all()
    assert inputs.leaves["w1"].grad[[0, 2, 3]].isfinite().all() and inputs.leaves["w2"].grad[[0, 2, 3]].isfinite().all()


FORWARD = {"router_topk", "metadata", "up_proj", "down_proj", "aggregate"}
NEEDS = [
    (("x", "router_w", "w1", "w2"), {"router_topk_backward", "d_input", "weight_grad_1", "weight_grad_2"}),
    (("x", "router_w"), {"router_topk_backward", "d_input"}),
    (("x",), {"router_topk_backward", "d_input"}),
    (("router_w",), {"router_topk_backward"}),
    (("w1",), {"weight_grad_1"}),
    (("w2",), {"weight_grad_2"}),
]


@pytest.mark.parametrize(("needed", "steps"), NEEDS, ids=["+".join(needed) for needed, _ in NEEDS])
def test_frozen_tensors_cost_no_gradient(needed: tuple[str, ...], steps: set[str]) -> None:
    inputs, everything = draw(SMALL), draw(SMALL)
    for name, leaf in inputs.leaves.items():
        leaf.requires_grad_(name in needed)
    with counted() as calls:
        got = run(SMALL, inputs)
    assert set(calls) - FORWARD == {"restore", "d_act"} | steps
    assert calls["aggregate"] == (2 if "d_input" in steps else 1)
    want = run(SMALL, everything)
    for name in inputs.leaves:
        if name in needed:
            check_equal("+".join(needed), f"d{name}", got[f"d{name}"], want[f"d{name}"])
        else:
            assert got[f"d{name}"] is None


def test_without_grad_nothing_is_kept() -> None:
    """H is not even written when no backward will come."""
    with_h = []

    def noted(name: str, step: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            if name == "up_proj":
                with_h.append(kwargs["with_h"])
            return step(*args, **kwargs)

        return wrapped

    inputs = draw(SMALL)
    with steps_replaced(noted), torch.no_grad():
        silent = layer.moe(inputs.x, inputs.router_w, inputs.w1, inputs.w2, 3, choices=SMALL.choices())
    assert with_h == [False] and not silent.requires_grad
    check_equal("no_grad", "o", silent, run(SMALL, draw(SMALL))["o"])


KEPT_MORE = [
    ({}, ""),
    ({"cache": "h_a"}, "a"),
    ({"cache": "h_a_y"}, "ay"),
    ({"cache": "h_a_y", "gather": "separate", "activation": "separate"}, "ayx"),
    ({"ds": "from_y"}, "y"),
    ({"ds": "from_y", "cache": "h_a", "aggregate": "scatter_sum"}, "ay"),
]


@pytest.mark.parametrize(("knobs", "more"), KEPT_MORE, ids=str)
@pytest.mark.parametrize("E", [5, 60])
def test_bytes_kept_for_the_backward(E: int, knobs: dict[str, str], more: str) -> None:
    """2Td + 4TKn and at most 16 bytes a pair, plus the experts' offsets; weights are the caller's. An ablation keeps A,
    Y and gathered rows of X on top."""
    T, K, d, n = 33, 3, 72, 40
    case = Case(T, K, E, d, n, "bf16", **knobs)
    inputs = draw(case)
    weights = {inputs.leaves[name].untyped_storage().data_ptr() for name in ("router_w", "w1", "w2")}
    kept = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        o = layer.moe(inputs.x, inputs.router_w, inputs.w1, inputs.w2, K, choices=case.choices())
    assert o.requires_grad
    held = sum(size for at, size in kept.items() if at not in weights)
    core = 2 * T * d + 4 * T * K * n + sum(2 * T * K * {"a": n, "y": d, "x": d}[name] for name in more)
    assert core + 12 * T * K <= held <= core + 16 * T * K + 8 * (E + 1)


@pytest.mark.parametrize("aggregate", ["gather_sum", "scatter_sum"])
def test_two_runs_are_bit_identical(aggregate: str) -> None:
    case = Case(33, 3, 5, 72, 40, "bf16", aggregate=aggregate)
    first, second = run(case, draw(case)), run(case, draw(case))
    for name, want in first.items():
        check_equal(case.id, name, second[name], want)


def test_a_second_backward_gives_the_same() -> None:
    inputs = draw(SMALL)
    o = layer.moe(inputs.x, inputs.router_w, inputs.w1, inputs.w2, SMALL.K, choices=SMALL.choices())
    leaves = list(inputs.leaves.values())
    first = torch.autograd.grad(o, leaves, inputs.do, retain_graph=True)
    for name, a, b in zip(inputs.leaves, first, torch.autograd.grad(o, leaves, inputs.do), strict=True):
        check_equal("retain_graph", f"d{name}", b, a)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("family", ["triton", "torch"])
def test_h_is_given_up_once_dh_is_there(family: str, planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the rows of dX, the largest of a backward, H would only take room; a graph that is kept keeps it."""
    steps, held, gone = layer.FAMILIES[family], [], []

    def up_proj(*args: object, **options: object) -> tuple:
        h, a = steps.up_proj(*args, **options)
        held.append(StorageWeakRef(h.untyped_storage()))
        return h, a

    def d_input(*args: object, **options: object) -> torch.Tensor:
        gone.append(held[-1].expired())
        return steps.d_input(*args, **options)

    monkeypatch.setitem(layer.FAMILIES, family, replace(steps, up_proj=up_proj, d_input=d_input))
    inputs = draw(SMALL)
    if planned:
        chosen = routing.route(inputs.x @ inputs.router_w.T, SMALL.K, "tr_up", tile=4, family=family)
        o = layer.experts_plan(inputs.x, chosen, inputs.w1, inputs.w2, family=family)
    else:
        o = layer.moe(inputs.x, inputs.router_w, inputs.w1, inputs.w2, SMALL.K, family=family)
    o.backward(inputs.do, retain_graph=True)
    o.backward(inputs.do)
    assert gone == [False, True]


@pytest.mark.parametrize("family", ["triton", "torch"])
@pytest.mark.parametrize("gather", ["fused", "separate"])
def test_gradients_of_any_stride(family: str, gather: str) -> None:
    """`o.sum()` expands one number to (T, d) with strides 0; also rows of stride 0 and a transposed gradient."""
    case = Case(17, 3, 5, 72, 40, gather=gather)
    for do in (
        torch.ones((), device=DEVICE).expand(17, 72),
        torch.randn(72, device=DEVICE).expand(17, 72),
        torch.randn(72, 17, device=DEVICE).t(),
    ):
        got, want = draw(case), draw(case)
        got.do, want.do = do, do.contiguous()
        a, b = run(case, got, family), run(case, want, family)
        for name in b:
            check_equal(case.id, name, a[name], b[name])


def test_expanded_input() -> None:
    row, inputs = torch.randn(1, 72, device=DEVICE), draw(SMALL)
    expanded = row.expand(17, 72).requires_grad_()
    a = layer.moe(expanded, inputs.router_w, inputs.w1, inputs.w2, 3, choices=SMALL.choices())
    b = layer.moe(expanded.detach().contiguous(), inputs.router_w, inputs.w1, inputs.w2, 3, choices=SMALL.choices())
    check_equal("expanded x", "o", a, b)


@pytest.mark.parametrize("family", ["triton", "torch"])
@pytest.mark.parametrize("op", ["moe", "experts"])
def test_compile_in_one_graph_equals_eager(op: str, family: str) -> None:
    torch._dynamo.reset()
    ids = torch.tensor([[0, 1, 4], [3, 2, 0]] * 8 + [[1, 2, 3]], device=DEVICE)

    def call(inputs: Inputs, scores: torch.Tensor) -> torch.Tensor:
        if op == "moe":
            return layer.moe(inputs.x, inputs.router_w, inputs.w1, inputs.w2, 3, family=family)
        return layer.experts(inputs.x, ids, scores, inputs.w1, inputs.w2, family=family)

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        inputs = draw(SMALL)
        scores = torch.linspace(0.1, 1, 51, device=DEVICE).view(17, 3).requires_grad_()
        o = function(inputs, scores)
        o.backward(inputs.do)
        results.append({"o": o.detach(), **inputs.grads(), "ds": scores.grad})
    for name, want in results[0].items():
        if want is None:
            assert results[1][name] is None
        else:
            check_equal(f"compiled {op}", name, results[1][name], want)


@pytest.mark.parametrize("T", [17, 0])
def test_compiled_layer_takes_any_number_of_tokens(T: int) -> None:
    """One graph for every T; frozen weights get no gradient in it."""
    torch._dynamo.reset()
    inputs = draw(SMALL)
    inputs.leaves["w1"].requires_grad_(False)
    compiled = torch.compile(
        lambda x: layer.moe(x, inputs.router_w, inputs.w1, inputs.w2, 3, family="triton"),
        fullgraph=True, backend="aot_eager", dynamic=True,
    )  # fmt: skip
    x = torch.randn(T, 72, device=DEVICE, requires_grad=True)
    o = compiled(x)
    o.sum().backward()
    assert o.shape == (T, 72) and x.grad.shape == (T, 72) and inputs.leaves["w1"].grad is None
    with torch.no_grad():
        check_equal("no_grad", "o", compiled(x), o)


@pytest.mark.parametrize("routed", [True, False], ids=["moe", "experts"])
def test_operators_keep_their_contract(routed: bool) -> None:
    """Schema, fake kernels, autograd registration and dispatch, by torch's own checks."""
    inputs = draw(SMALL)
    choices = SMALL.choices().encoded
    ids = torch.tensor([[0, 1, 4]] * 17, dtype=torch.int32, device=DEVICE)
    scores = torch.rand(17, 3, device=DEVICE, requires_grad=True)
    routing = (inputs.router_w, None, None) if routed else (None, ids, scores)
    args = (inputs.x, *routing, inputs.w1, inputs.w2, 3, choices)
    torch.library.opcheck(layer._forward_op, (*args, True))
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in args]
    torch.library.opcheck(layer._forward_op, (*plain, False))
    _, h, kept_ids, kept_scores, row_idx, offsets = layer._forward_op(*plain, True)
    if not routed:
        kept_ids, kept_scores = ids, scores.detach()
    for needs in ([True] * 4, [True, False, False, True]):
        back = (inputs.do, plain[0], plain[1], plain[4], plain[5], h, kept_ids, kept_scores, row_idx, offsets)
        torch.library.opcheck(layer._backward_op, (*back, choices, needs))


# Bad input


def bad(**changed: object) -> Callable[[], object]:
    """A call of `moe` (or `experts`, with ids) on good inputs but for those changed."""

    def call() -> object:
        x, router_w = torch.randn(6, 16), torch.randn(4, 16)
        w1, w2 = torch.randn(4, 16, 16), torch.randn(4, 16, 8)
        good = {"x": x, "router_w": router_w, "w1": w1, "w2": w2, "K": 2, "family": "auto", "w1_layout": "concat"}
        if "ids" in changed or "scores" in changed:
            del good["router_w"], good["K"]
            good |= {"ids": torch.zeros(6, 2, dtype=torch.int32), "scores": torch.ones(6, 2)}
            return layer.experts(**(good | changed))
        return layer.moe(**(good | changed))

    return call


BAD = [
    ("K over E", bad(K=6), "K is 6 and E is 4"),
    ("K zero", bad(K=0), "K is 0 and E is 4"),
    ("K over 64", bad(K=65, router_w=torch.zeros(80, 16), w1=torch.zeros(80, 4, 16), w2=torch.zeros(80, 16, 2)), "64"),
    ("w1 axes", bad(w1=torch.zeros(4, 16)), r"w1 has shape \(4, 16\); it must have 3 axes"),
    ("w1 odd", bad(w1=torch.zeros(4, 15, 16)), "w1 has 15 rows per expert"),
    ("w1 width", bad(w1=torch.zeros(4, 16, 12)), r"w1 has shape \(4, 16, 12\).*must be \(4, 16, 16\)"),
    ("w2 shape", bad(w2=torch.zeros(4, 8, 16)), r"w2 has shape \(4, 8, 16\).*must be \(4, 16, 8\)"),
    ("router shape", bad(router_w=torch.zeros(5, 16)), r"router_w has shape \(5, 16\).*must be \(4, 16\)"),
    ("w2 dtype", bad(w2=torch.zeros(4, 16, 8, dtype=torch.float64)), "w2 is torch.float64 and x is torch.float32"),
    ("router narrower", bad(router_w=torch.zeros(4, 16, dtype=torch.bfloat16)), "router_w is torch.bfloat16"),
    ("w1 device", bad(w1=torch.zeros(4, 16, 16, device="meta")), "w1 is on meta and x on"),
    ("ids float", bad(ids=torch.zeros(6, 2)), "ids is torch.float32; it must be int32 or int64"),
    ("ids axes", bad(ids=torch.zeros(12, dtype=torch.int64)), r"ids has shape \(12,\); it must be \(T, K\)"),
    ("ids rows", bad(ids=torch.zeros(5, 2, dtype=torch.int64)), r"ids has shape \(5, 2\).*must be \(6, 2\)"),
    ("scores shape", bad(scores=torch.zeros(6, 3)), r"scores has shape \(6, 3\).*must be \(6, 2\)"),
    ("family", bad(family="cuda"), "family is 'cuda'; allowed: auto, triton, torch"),
    ("layout", bad(w1_layout="packed"), "w1_layout is 'packed'; allowed: concat, interleaved"),
]


@pytest.mark.parametrize(("call", "text"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_named(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32], ids=str)
@pytest.mark.parametrize("family", ["auto", "triton", "torch"])
def test_a_dtype_that_no_family_runs(dtype: torch.dtype, family: str) -> None:
    x, router_w, w1, w2 = (torch.zeros(s).to(dtype) for s in ((6, 16), (4, 16), (4, 16, 16), (4, 16, 8)))
    with pytest.raises(ValueError, match=str(dtype)):
        layer.moe(x, router_w, w1, w2, 2, family=family)


def test_fp64_is_not_for_triton() -> None:
    inputs = draw(SMALL, dtype=torch.float64)
    with pytest.raises(
        ValueError, match="family is 'triton': dtype is torch.float64; the triton family runs bf16, fp16"
    ):
        layer.moe(inputs.x, inputs.router_w, inputs.w1, inputs.w2, 3, family="triton")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"m": 100}, "tile.m is 100; a block size must be a power of two of at least 16"),
        ({"n": 8}, "tile.n is 8; a block size must be a power of two of at least 16"),
        ({"k": 0}, "tile.k is 0"),
        ({"m": -64}, "tile.m is -64"),
        ({"stages": 0}, "tile.stages is 0; allowed: 1, 2"),
        ({"warps": 3}, "tile.warps is 3; allowed: 1, 2, 4, 8, 16"),
    ],
    ids=str,
)
def test_a_tile_that_is_none(asked: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Tile().override(**asked)


@pytest.mark.parametrize("kernel", GEMMS)
def test_a_tile_that_exceeds_shared_memory(kernel: str) -> None:
    """Need and limit are named, before anything is launched."""
    inputs = draw(SMALL)
    tile = Tile().override(m=256, n=256, k=128, stages=5)
    need = 5 * (256 + 256) * 128 * 4
    with pytest.raises(OutOfResources, match=f"256x256x128.*{need}.*{SMEM_LIMIT}"):
        o = layer.moe(inputs.x, inputs.router_w, inputs.w1, inputs.w2, 3, choices=layer.Choices(tiles={kernel: tile}))
        o.backward(inputs.do)


def test_choices_travel_as_text() -> None:
    choices = layer.Choices("torch", "interleaved", "separate", "separate", "atomic", {"d_act": Tile(64, 32, 16)})
    assert layer.Choices.decode(choices.encoded) == choices


# Module


def test_module_equals_the_function() -> None:
    torch.manual_seed(0)
    module = sonic.MoE(24, 16, 5, 2, w1_layout="interleaved", device=DEVICE)
    x = torch.randn(2, 3, 24, device=DEVICE)
    o = module(x)
    want = sonic.moe(x, module.router, module.w1, module.w2, 2, w1_layout="interleaved")
    assert o.shape == x.shape
    check_equal("module", "o", o, want)
    o.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    check_equal("one token", "o", module(x[0, 0]), o[0, 0])


def test_state_dict_and_copies() -> None:
    module, other = sonic.MoE(24, 16, 5, 2), sonic.MoE(24, 16, 5, 2)
    state = module.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "router": (5, 24), "w1": (5, 32, 24), "w2": (5, 24, 16),
    }  # fmt: skip
    other.load_state_dict(state)
    for copied in (other, copy.deepcopy(module)):
        for name, t in copied.state_dict().items():
            check_equal("copy", name, t, state[name])
    assert sonic.MoE(24, 16, 5, 2, dtype=torch.bfloat16).w1.dtype == torch.bfloat16
    assert sonic.MoE(24, 16, 5, 2, device="meta").w1.is_meta


def test_repr_shows_sizes() -> None:
    shown = repr(sonic.MoE(24, 16, 5, 2, family="torch"))
    assert shown == "MoE(d=24, n=16, E=5, K=2, w1_layout='concat', family='torch')"


def test_weights_are_drawn() -> None:
    module = sonic.MoE(64, 64, 8, 2)
    for name, p in module.named_parameters():
        assert p.isfinite().all() and abs(p.std().item() - 0.02) < 2e-3, name


@pytest.mark.parametrize(
    ("sizes", "text"), [((24, 0, 5, 2), "n is 0"), ((24, 16, 2, 5), "K is 5"), ((24, 16, 5000, 2), "E is 5000")]
)
def test_a_module_that_cannot_be(sizes: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sonic.MoE(*sizes)


def test_autocast_leaves_the_dtypes_alone():
    x, router_w = torch.randn(40, 32), torch.randn(16, 32)
    w1, w2 = torch.randn(16, 32, 32), torch.randn(16, 32, 16)
    plain = layer.moe(x, router_w, w1, w2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.moe(x, router_w, w1, w2, 4), plain)


def test_copies_of_transposed_weights_are_not_kept():
    x = torch.randn(17, 32, requires_grad=True)
    w1 = torch.randn(4, 32, 64).transpose(1, 2).requires_grad_()
    w2 = torch.randn(4, 32, 32).transpose(1, 2).requires_grad_()
    ids, scores = torch.tensor([[0, 1]] * 17), torch.rand(17, 2)
    kept: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(t.data_ptr()) or t, lambda t: t):
        layer.experts(x, ids, scores, w1, w2).sum().backward()
    assert {w1.data_ptr(), w2.data_ptr()} <= kept
    assert w1.grad is not None and w1.grad.shape == w1.shape


def test_recomputing_keeps_no_h() -> None:
    case = Case(33, 3, 5, 72, 40, cache="none")
    inputs, kept = draw(case), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        layer.moe(inputs.x, inputs.router_w, inputs.w1, inputs.w2, 3, choices=case.choices())
    assert (99, 80) not in kept and (33, 72) in kept


@pytest.mark.parametrize(
    ("knobs", "text"),
    [
        ({"ds": "from_y", "aggregate": "atomic"}, "aggregate is 'atomic', which leaves no Y"),
        ({"cache": "h_a_y", "aggregate": "atomic"}, "aggregate is 'atomic', which leaves no Y"),
        ({"ds": "from_y", "cache": "none"}, "ds is 'from_y', which keeps Y; cache=none keeps nothing"),
    ],
    ids=str,
)
def test_choices_that_exclude_each_other(knobs: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        layer.Choices(**knobs)


def test_ablations_of_what_is_kept_are_not_compiled() -> None:
    i, choices = draw(SMALL), layer.Choices("torch", cache="h_a")
    compiled = torch.compile(layer.moe, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="torch.compile runs 'from_da' and 'h' alone"):
        compiled(i.x, i.router_w, i.w1, i.w2, 3, choices=choices)


@pytest.mark.parametrize("name", ["family", "w1_layout", "gather", "activation", "aggregate", "ds", "cache"])
def test_choices_refuse_what_no_kernel_knows(name: str):
    with pytest.raises(ValueError, match=f"{name} is 'typo'; allowed: "):
        layer.Choices(**{name: "typo"})
