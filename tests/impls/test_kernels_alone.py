"""Single steps of a layer in plain PyTorch: right, with their cost, and refused where plain PyTorch has none."""

from __future__ import annotations

import pytest
import torch

from sonic.impls import _kernels, torch_grouped_mm
from sonic.problem import Problem
from sonic.record import Knobs, Point, Routing, Settings, ShapeSpec
from sonic.worker import serve_point

SHAPE = ShapeSpec(T=33, d=64, n=32, E=5, K=2)
SETTINGS = Settings(warmup_ms=0, samples=1, graph=False, l2="cold", profile=False, tune="cached")
WAYS = [
    (op, gather)
    for op in _kernels.OPS
    for gather in (("separate", "given") if op in _kernels.GATHERING else ("fused",))
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
        ("up_proj", "fused", "knobs.gather is 'fused'; op=up_proj of plain PyTorch reads rows: separate, given"),
        ("down_proj", "given", "knobs.gather is 'given'; op=down_proj runs with 'fused'"),
        ("layer", "separate", "knobs.gather is 'separate'; a whole layer of plain PyTorch has one way"),
    ],
)
def test_what_plain_torch_has_not(op: str, gather: str, text: str) -> None:
    assert text in torch_grouped_mm.Impl.supports(point(op, gather), torch.device("cpu"))
