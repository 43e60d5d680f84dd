"""What adapters share: members that the harness asks for, leaf tensors, gradients under canonical names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from sonic.problem import DTYPES, Problem
from sonic.record import Point

#: A worker meets many shapes, each a recompilation of one function; past its limit torch would run eagerly.
RECOMPILES = 1 << 16


@functools.cache
def compiled(function: Callable) -> Callable:
    """`function` through torch.compile, whole and with static shapes; one per process, so a shape compiles once."""
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = RECOMPILES
    return torch.compile(function, fullgraph=True, dynamic=False)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf that wants a gradient and shares the memory of `tensor`."""
    return tensor.detach().requires_grad_()


class Adapter:
    """Base of the adapters: one implementation on one problem.

    KNOBS holds the dotted names that it takes (`knobs.gather`, `tile.m`); all others are dropped before a point is
    hashed. OPS holds what it can run, of `sonic.record.Op`. `note` says what a reader of the row must know (a cut-down
    tuner, a weight conversion that a training step would repeat). `problem` has the routing that is computed, which the
    gate checks. Members that a row takes where they exist: family, kernels_cost, bytes_model(), flops_padded, tune_s,
    tuned; for one kernel alone also flops_model and check().
    """

    KNOBS: frozenset[str] = frozenset()
    OPS: frozenset[str] = frozenset({"layer", "experts"})

    @staticmethod
    def available() -> str | None:
        """None, or why the implementation cannot run in this environment; cheap, imports nothing heavy."""
        return None

    @staticmethod
    def version() -> str:
        """Version that enters the key of a row."""
        return f"torch-{torch.__version__}"

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        """None, or why this one point is out of reach (status `unsupported`)."""
        return dtype_refusal(point, DTYPES)

    def __init__(self, problem: Problem, point: Point) -> None:
        self.note: str | None = None
        self.problem = problem
        self.layer = point.op == "layer"
        self.K = problem.shape.K
        self.x_Td = leaf(problem.x_Td)
        self.w1_E2nd, self.w2_Edn = leaf(problem.w1_E2nd), leaf(problem.w2_Edn)
        self.router_w_Ed, self.scores_TK, self.ids_TK = (
            leaf(problem.router_w_Ed),
            leaf(problem.scores_TK),
            problem.ids_TK,
        )

    def forward(self) -> torch.Tensor:
        """O (T, d), with a graph behind it unless the caller switched gradients off."""
        raise NotImplementedError

    def weights(self) -> Sequence[torch.Tensor]:
        """Parameters in the layout that the implementation reads; memory kept for the backward does not count them."""
        return (self.w1_E2nd, self.w2_Edn, self.router_w_Ed)

    def grads(self) -> dict[str, torch.Tensor]:
        """Gradients after the backward, canonical names and layouts: dx_Td dw1_E2nd dw2_Edn, drouter_Ed or ds_TK."""
        routing = ("drouter_Ed", self.router_w_Ed) if self.layer else ("ds_TK", self.scores_TK)
        named = (("dx_Td", self.x_Td), ("dw1_E2nd", self.w1_E2nd), ("dw2_Edn", self.w2_Edn), routing)
        return {name: tensor.grad for name, tensor in named}

    def zero_grad(self) -> None:
        """Drops all gradients, so that the next backward writes instead of adding."""
        for tensor in (self.x_Td, self.w1_E2nd, self.w2_Edn, self.router_w_Ed, self.scores_TK):
            tensor.grad = None


def dtype_refusal(point: Point, allowed: Sequence[str] | dict[str, torch.dtype]) -> str | None:
    """Why the point's dtype cannot run, naming it and the allowed ones; None when it can."""
    if point.dtype in allowed:
        return None
    return f"dtype is {point.dtype!r}; allowed: {', '.join(allowed)}"
