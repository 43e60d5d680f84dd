"""Single steps of a layer by other packages' kernels: right, with their cost, and refused where a package has none.

Packages that a CPU cannot run are stand-ins with their signatures.
"""

from __future__ import annotations

import functools
import sys
import types

import pytest
import torch

from sonic import reference
from sonic.impls import (
    _kernels,
    cublas_bmm,
    deepgemm_pp,
    moe_ops,
    scattermoe,
    sonicmoe_official,
    torch_bmm,
    torch_grouped_mm,
    torch_grouped_mm_compiled,
    torch_sum,
    torch_topk,
)
from sonic.impls._kernels import Alone
from sonic.problem import Problem
from sonic.record import Knobs, Point, Routing, Settings, ShapeSpec
from sonic.worker import serve_point
from tests.impls.test_baselines import _grouped, _weight_grad

SHAPE = ShapeSpec(T=33, d=64, n=32, E=5, K=2)
SETTINGS = Settings(warmup_ms=0, samples=1, graph=False, l2="cold", profile=False, tune="cached")
WAYS = [
    (op, gather) for op in Alone.OPS for gather in (("separate", "given") if op in _kernels.GATHERING else ("fused",))
]


def point(op: str, gather: str, dtype: str = "fp32", **fields: object) -> Point:
    given = {"sweep": "test", "impl": "torch_grouped_mm", "op": op, "mode": "fwd", "dtype": dtype, "shape": SHAPE}
    return Point(**(given | fields), knobs=Knobs(gather=gather))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("op", "gather"), WAYS)
def test_a_step_alone_gives_a_row(op: str, gather: str, dtype: str) -> None:
    outcome = serve_point(point(op, gather, dtype), SETTINGS).outcome
    assert outcome.status == "ok", outcome.reason
    assert outcome.errors and max(outcome.errors.values()) <= 2
    assert outcome.bytes_model and (outcome.flops_model or op == "aggregate")


def test_a_gather_before_costs_its_bytes() -> None:
    def size(gather: str) -> int:
        problem = Problem(SHAPE.sizes(), Routing(), "fp32", "cpu", 0)
        return torch_grouped_mm.Impl(problem, point("up_proj", gather)).bytes_model()

    assert size("separate") - size("given") == 2 * 4 * 66 * 64


@pytest.mark.parametrize(
    ("op", "gather", "text"),
    [
        ("up_proj", "fused", "knobs.gather is 'fused'; op=up_proj of torch_grouped_mm has: separate, given"),
        ("down_proj", "given", "knobs.gather is 'given'; op=down_proj of torch_grouped_mm has: fused"),
        ("layer", "separate", "knobs.gather is 'separate'; op=layer of torch_grouped_mm has: fused"),
    ],
)
def test_what_plain_torch_has_not(op: str, gather: str, text: str) -> None:
    assert text in torch_grouped_mm.Impl.supports(point(op, gather), torch.device("cpu"))


def gate(
    module: types.ModuleType, op: str, gather: str, dtype: str = "fp32", shape: ShapeSpec = SHAPE, **fields
) -> object:
    """The adapter on one step, twice right: what is timed leaves nothing behind that would spoil the next call."""
    given = point(op, gather, dtype, impl=module.__name__.rpartition(".")[2], shape=shape, **fields)
    assert given.op in module.Impl.OPS
    problem = Problem(shape.sizes(), given.routing, dtype, "cpu", 0)
    before = problem.fingerprint()
    with torch.no_grad():
        impl = module.Impl(problem, given)
        assert impl.forward().shape[-1] and impl.bytes_model() and impl.flops_model is not None
        for _ in range(2):
            ratios = {name: reference.ratio(value, 1.0) for name, value in impl.check().items()}
            assert not reference.failures(ratios), ratios
    assert problem.fingerprint() == before
    return impl


# cuBLAS


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("op", "gather"), [way for way in WAYS if way[0] in _kernels.GEMMS])
def test_the_bound_multiplies_equal_experts(op: str, gather: str, dtype: str) -> None:
    shape, routing = ShapeSpec(T=20, d=64, n=32, E=5, K=2), Routing(distribution="balanced")
    for layout in cublas_bmm.LAYOUTS:
        impl = gate(cublas_bmm, op, gather, dtype, shape, routing=routing)
        if not op.startswith("weight_grad"):
            assert "weights (out_in)" in impl.note
            impl._use(layout)
            assert impl.check()["kernel.0"] <= 2
    assert "'learned'" in cublas_bmm.Impl.supports(point(op, gather), torch.device("cpu"))


# ScatterMoE


def _rows(ops_rows: torch.Tensor, w: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ra,rab->rb", ops_rows.float(), w[experts].float()).to(ops_rows.dtype)


def scatter2scatter(X, W, sorted_expert_idxs, sorted_scattered_idxs, k, b=None, x_grouped=False, y_grouped=False):
    """Stands for ScatterMoE's GEMM: reads tokens or rows in expert order, leaves rows in either order."""
    assert sorted_expert_idxs.dtype == sorted_scattered_idxs.dtype == torch.int64 and len(X) * k == len(
        sorted_expert_idxs
    )
    y = _rows(X if x_grouped else X[sorted_scattered_idxs // k], W, sorted_expert_idxs)
    return y if y_grouped else torch.empty_like(y).index_copy_(0, sorted_scattered_idxs, y)


def group_bwd_W(DY, X, expert_offsets, E, has_bias=False):
    assert expert_offsets.dtype == torch.int64 and len(expert_offsets) == E
    dw = torch.zeros(E, DY.shape[1], X.shape[1], dtype=DY.dtype)
    starts = [0, *expert_offsets.tolist()]
    for e in range(E):
        part = slice(starts[e], starts[e + 1])
        dw[e] = (DY[part].float().T @ X[part].float()).to(DY.dtype)
    return dw.permute(0, 2, 1), None


@pytest.fixture
def fake_scattermoe(monkeypatch: pytest.MonkeyPatch) -> None:
    def group(A, sorted_expert_idxs, coeff=None, fan_out=1, out=None):
        assert len(A) * fan_out == len(sorted_expert_idxs) and coeff is None and out is None
        return A[sorted_expert_idxs // fan_out]

    kernels = {"scatter2scatter": scatter2scatter, "group_bwd_W": group_bwd_W, "group": group, "ALLOW_TF32": True}
    ops = types.SimpleNamespace(**kernels)
    glu = types.SimpleNamespace(GLUMLP=lambda *sizes: types.SimpleNamespace(
        experts=types.SimpleNamespace(), output_experts=types.SimpleNamespace()
    ))  # fmt: skip
    modules = {
        "scattermoe": types.ModuleType("scattermoe"),
        "scattermoe.kernels": types.SimpleNamespace(ops=ops),
        "scattermoe.kernels.ops": ops,
        "scattermoe.mlp": glu,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("op", "gather"), [*(way for way in WAYS if way[0] != "aggregate"), ("up_proj", "fused")])
def test_scattermoe_gathers_and_scatters_in_its_gemm(op: str, gather: str, dtype: str, fake_scattermoe: None) -> None:
    gate(scattermoe, op, gather, dtype)


def test_scattermoe_has_no_fused_gather_on_k() -> None:
    refusal = scattermoe.Impl.supports(point("weight_grad_1", "fused", impl="scattermoe"), torch.device("cuda"))
    assert refusal == "knobs.gather is 'fused'; op=weight_grad_1 of scattermoe has: separate, given"


# DeepGEMM


@pytest.mark.parametrize(("op", "gather"), [way for way in WAYS if way[0] in _kernels.GEMMS])
def test_deepgemm_multiplies_padded_rows(op: str, gather: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.SimpleNamespace(
        m_grouped_bf16_gemm_nt_contiguous=lambda x, w, out, e: _grouped(x, w.transpose(1, 2), out, e),
        m_grouped_bf16_gemm_nn_contiguous=_grouped,
        k_grouped_bf16_gemm_tn_contiguous=_weight_grad,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", package)
    impl = gate(deepgemm_pp, op, gather, "bf16", ShapeSpec(T=300, d=64, n=32, E=5, K=2))
    assert impl.flops_model == impl._alone.flops > 0


# Sums of plain PyTorch


@pytest.mark.parametrize("module", [torch_bmm, torch_sum])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SHAPE, ShapeSpec(T=7, d=24, n=8, E=4, K=1)])
def test_a_sum_over_rows_in_token_order(module: types.ModuleType, dtype: str, shape: ShapeSpec) -> None:
    impl = gate(module, "aggregate", "fused", dtype, shape)
    assert impl.note.startswith("rows in token order") and module.Impl.OPS == {"aggregate"}


@pytest.mark.parametrize("op", ["aggregate", "combine"])
def test_compiled_sums_trace_whole(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by the compiler, run eagerly: what Inductor makes of it is for a GPU to show."""
    traced = functools.partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)
    monkeypatch.setattr(torch_grouped_mm_compiled, "compiled", traced)
    gate(torch_grouped_mm_compiled, op, "fused", "bf16")


# The router's top-K


def _topk_softmax_fwd(logits, scores, ids, E, K, is_softmax_over_topk, norm_topk_probs):
    """Stands for SonicMoE's kernel, which writes into what it is given."""
    assert is_softmax_over_topk and not norm_topk_probs and logits.shape[1] == E
    assert scores.dtype == torch.float32 and ids.dtype == torch.int32
    top, place = logits.topk(K, dim=-1)
    scores.copy_(top.float().softmax(dim=-1))
    ids.copy_(place)


def fused_topk_softmax(logits, K, fp32_routing=False):
    """Stands for moe_ops' kernel, whose scores have the dtype of the logits."""
    top, place = logits.topk(K, dim=-1)
    return top.float().softmax(dim=-1).to(logits.dtype), place.int()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("module", [torch_topk, sonicmoe_official, moe_ops], ids=lambda m: m.__name__.split(".")[-1])
def test_a_packages_top_k_alone(module: types.ModuleType, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = {
        "sonicmoe": types.SimpleNamespace(),
        "sonicmoe.enums": types.SimpleNamespace(ActivationType=types.SimpleNamespace(SWIGLU="swiglu")),
        "sonicmoe.functional": types.SimpleNamespace(_topk_softmax_fwd=_topk_softmax_fwd),
        "moe_ops": types.SimpleNamespace(
            fused_topk_softmax=fused_topk_softmax, grouped_gemm_ops=None, grouped_gemm_ops_sm90=None
        ),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    impl = gate(module, "router_topk", "fused", dtype, ShapeSpec(T=33, d=64, n=32, E=16, K=3))
    size = 2 if dtype == "bf16" else 4
    assert impl.bytes_model() == 33 * 16 * size + 33 * 3 * 8


@pytest.mark.parametrize(
    ("module", "E", "K", "text"),
    [
        (sonicmoe_official, 12, 2, "its own top-K needs E a multiple of 8 up to 4096 and K up to 16"),
        (sonicmoe_official, 64, 17, "shape.E is 64 and shape.K is 17"),
        (moe_ops, 12, 2, "shape.E is 12; its histogram needs a power of two"),
    ],
)
def test_a_top_k_beyond_a_packages_limits(module, E, K, text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    shape = ShapeSpec(T=33, d=64, n=32, E=E, K=K)
    assert text in module.Impl.supports(point("router_topk", "fused", "fp32", shape=shape), torch.device("cuda"))
