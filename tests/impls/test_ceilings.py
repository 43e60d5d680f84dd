"""Products and copies of the card's ceilings: rows on a CPU, their work, their gate, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

from sonic import derive
from sonic.impls.ceilings import Impl
from sonic.problem import Problem
from sonic.record import CEILING_OPS, KERNEL_OPS, Outcome, Point, Row, Settings, ShapeSpec
from sonic.worker import serve_point
from tests.rows import make_row

SHAPES = {"matmul": ShapeSpec(T=300, d=48, n=20, E=1, K=1), "copy": ShapeSpec(T=300, d=48, n=1, E=1, K=1)}


def point(op: str, **changes: object) -> Point:
    given = {"sweep": "test", "impl": "ceilings", "op": op, "mode": "fwd", "dtype": "bf16", "shape": SHAPES[op]}
    return Point(**(given | changes))


def measured(p: Point) -> Outcome:
    return serve_point(p, Settings(samples=2, warmup_ms=0.0)).outcome


def adapter(op: str) -> Impl:
    p = point(op)
    return Impl(Problem(p.shape.sizes(), p.routing, p.dtype, torch.device("cpu"), p.seed), p)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("op", CEILING_OPS)
def test_a_row_has_the_work_of_its_sizes(op: str, dtype: str) -> None:
    found = measured(point(op, dtype=dtype))
    assert found.status == "ok", found.reason
    width = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[dtype]
    flops = 2 * 300 * 48 * 20 if op == "matmul" else 0
    elements = 300 * 48 + 48 * 20 + 300 * 20 if op == "matmul" else 2 * 300 * 48
    assert (found.flops_model, found.bytes_model) == (flops, elements * width)
    assert max(found.errors.values()) <= 2
    row: Row = make_row(**found.model_dump(exclude={"family"}), impl="ceilings", op=op, mode="fwd")
    us = derive.median_us(row)
    assert derive.tflops(row) == pytest.approx(flops / us / 1e6)
    assert derive.gbps(row) == pytest.approx(elements * width / us / 1e3)


def test_the_product_is_a_times_b() -> None:
    impl = adapter("matmul")
    want = impl.problem.x_Td.double() @ impl.problem.w1_E2nd[0, :20].double().T
    torch.testing.assert_close(impl.forward().double(), want, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("wrong", [(-1, 0, math.nan), (-1, 0, 1.0), (0, -1, 1.0)])
def test_a_wrong_element_of_a_sampled_row_shows(wrong: tuple[int, int, float]) -> None:
    row, column, value = wrong
    for op in CEILING_OPS:
        impl = adapter(op)
        right = impl.forward().clone()
        right[row, column] = value
        impl.forward = lambda right=right: right
        assert max(impl.check().values()) > 2


@pytest.mark.parametrize(
    ("op", "changes", "reason"),
    [
        ("matmul", {"shape": ShapeSpec(T=8, d=8, n=8, E=4, K=1)}, "shape.E is 4; op=matmul has no such size"),
        ("matmul", {"shape": ShapeSpec(T=8, d=8, n=8, E=4, K=2)}, "so only 1 fits"),
        ("copy", {"shape": ShapeSpec(T=8, d=8, n=8, E=1, K=1)}, "shape.n is 8; op=copy has no such size"),
        ("copy", {"shape": ShapeSpec(T=0, d=8, n=1, E=1, K=1)}, "shape.T is 0"),
        ("copy", {"dtype": "fp8"}, "dtype is 'fp8'"),
        ("copy", {"mode": "fwd_bwd"}, "so only 'fwd' fits"),
        ("matmul", {"impl": "torch_loop"}, "op is 'matmul'; torch_loop runs: experts, layer"),
        ("matmul", {"impl": "sonic"}, "op is 'matmul'; sonic runs: "),
    ],
)
def test_what_has_no_ceiling_is_unsupported(op: str, changes: dict, reason: str) -> None:
    found = measured(point(op, **changes))
    assert found.status == "unsupported" and reason in found.reason


def test_ceilings_are_no_kernels_of_the_layer() -> None:
    assert not set(CEILING_OPS) & set(KERNEL_OPS)
    assert measured(point("copy").model_copy(update={"op": "up_proj"})).status == "unsupported"
