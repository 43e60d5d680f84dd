"""What only a card can show: graphs, the compiler's own code, the allocator, and tiles at sizes of real layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import sonic
from sonic.kernels import hopper
from sonic.kernels.common import INTERPRET
from sonic.problem import Problem
from sonic.record import CEILING_OPS, KERNEL_OPS, Knobs, Point, Routing, Settings, ShapeSpec
from sonic.shapes import Shape
from sonic.worker import serve_point

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRET or not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = Shape(T=2048, d=768, n=256, E=32, K=4)


@pytest.fixture
def problem() -> Problem:
    return Problem(SHAPE, Routing(), "bf16", "cuda", 0)


@pytest.fixture(params=["triton", "hopper"])
def family(request: pytest.FixtureRequest) -> str:
    """Every family of kernels that the card runs."""
    if request.param == "hopper" and (reason := hopper.unknown(torch.device("cuda"))) is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture
def moe(family: str) -> Callable:
    return partial(sonic.moe, family=family)


def step(p: Problem, leaves: list[torch.Tensor], function: Callable) -> list[torch.Tensor]:
    """Output and gradients of one forward and backward."""
    for leaf in leaves:
        leaf.grad = None
    o = function(*leaves, SHAPE.K)
    o.backward(p.do_Td)
    return [o, *(leaf.grad for leaf in leaves)]


def leaves_of(p: Problem) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in (p.x_Td, p.router_w_Ed, p.w1_E2nd, p.w2_Edn)]


def test_a_graph_replays_what_eager_computes(problem: Problem, moe: Callable):
    leaves = leaves_of(problem)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        eager = [t.clone() for t in step(problem, leaves, moe)]
    torch.cuda.current_stream().wait_stream(side)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(problem, leaves, moe)
    for t in captured:
        t.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))


def test_the_compiler_gives_the_same_bits(problem: Problem, moe: Callable):
    eager = [t.clone() for t in step(problem, leaves_of(problem), moe)]
    compiled = step(problem, leaves_of(problem), torch.compile(moe, fullgraph=True))
    assert torch.equal(compiled[0], eager[0])
    for ours, theirs in zip(compiled[1:], eager[1:], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_held_memory_is_x_and_h_and_at_most_16_bytes_a_pair(problem: Problem, moe: Callable):
    leaves = leaves_of(problem)
    step(problem, leaves, moe)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o = moe(*leaves, SHAPE.K)
    held = torch.cuda.memory_allocated() - before - o.numel() * 2
    bound = 4 * SHAPE.R * SHAPE.n + 16 * SHAPE.R + 8 * SHAPE.E + 16 * 512  # the allocator rounds each tensor up to 512
    assert held <= bound


@pytest.mark.parametrize("op", ["layer", "experts", *KERNEL_OPS])
def test_every_op_passes_the_gate(op: str, family: str):
    mode = "fwd" if op in KERNEL_OPS else "fwd_bwd"
    shape = ShapeSpec(T=SHAPE.T, d=SHAPE.d, n=SHAPE.n, E=SHAPE.E, K=SHAPE.K)
    settings = Settings(samples=2, warmup_ms=0.0)
    point = Point(sweep="test", impl="sonic", op=op, mode=mode, shape=shape, knobs=Knobs(family=family))
    outcome = serve_point(point, settings).outcome
    assert outcome.status == "ok", outcome.reason
    assert outcome.family == family
    assert outcome.device_us and outcome.graph_us


@pytest.mark.parametrize("op", CEILING_OPS)
def test_the_ceilings_pass_the_gate(op: str):
    shape = ShapeSpec(T=4096, d=2048, n=1 if op == "copy" else 1024, E=1, K=1)
    settings = Settings(samples=2, warmup_ms=0.0)
    point = Point(sweep="test", impl="ceilings", op=op, mode="fwd", shape=shape)
    outcome = serve_point(point, settings).outcome
    assert outcome.status == "ok", outcome.reason
    assert outcome.device_us and outcome.graph_us
