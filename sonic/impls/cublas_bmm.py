"""The paper's upper bound: batched matrix multiplications of equal size, without router, metadata, gather or scatter.

It is a bound, not a layer. Every expert has exactly R/E rows, x and dO are gathered before the timing starts, and rows
lie so that a token's K rows are summed through a view: row r = k*T + t belongs to slot k of token t and to expert r //
(R/E). That is a balanced routing like any other (a token's K experts differ, since K*T/E <= T), and the gate checks
the output and every gradient against it; it is not the routing that the other implementations of a sweep get, which
costs the same here.

Forward: bmm, one SwiGLU kernel, bmm, one kernel for the score-weighted sum over K. Backward: bmm for dA', one kernel
for dSwiGLU, A' and dS, three bmm for dW2, dX~ and dW1, one kernel for the sum over K. The element-wise kernels are our
own, which run at the card's copy bandwidth (torch.compile's did not), and their plain-torch twins on a CPU. `op` is
experts: scores are given. Memory: H is kept, x counts as (T, d). Both operand layouts of the weights are timed at
construction, (E, out, in) and (E, in, out), and the faster one stays; the note says which. A training step would need
no conversion, since a model may store its weights in either.

One GEMM alone is one bmm on rows in expert order; with `knobs.gather=separate` our gather kernel runs before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from sonic.impls._common import dtype_refusal, leaf
from sonic.impls._kernels import GEMMS, Alone, StepsAlone
from sonic.layer import FAMILIES, Steps
from sonic.problem import DTYPES, Problem
from sonic.record import KERNEL_OPS, Point

LAYOUTS = ("out_in", "in_out")
TRIALS = 5


class _Bound(torch.autograd.Function):
    """The bound as one differentiable step of x, scores and weights, computed from arranged copies of x, dO and scores.

    x_Td (T, d) and s_TK (T, K) only receive gradients. w1 and w2 are (E, 2n, d) and (E, d, n), or with `in_out`
    (E, d, 2n) and (E, n, d). x_Ecd and do_Ecd are the gathered rows, s_R the scores in their order, row_idx the row of
    slot t*K + k.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_Td: torch.Tensor,
        s_TK: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        x_Ecd: torch.Tensor,
        do_Ecd: torch.Tensor,
        s_R: torch.Tensor,
        row_idx: torch.Tensor,
        in_out: bool,
        steps: Steps,
    ) -> torch.Tensor:
        T, K = s_TK.shape
        h = torch.bmm(x_Ecd, w1 if in_out else w1.mT)
        a = steps.swiglu(h.flatten(0, 1)).view(*h.shape[:2], -1)
        y = torch.bmm(a, w2 if in_out else w2.mT)
        ctx.save_for_backward(x_Ecd, do_Ecd, s_R, row_idx, w1, w2, h)
        ctx.in_out, ctx.steps, ctx.sizes = in_out, steps, (T, K)
        return steps.aggregate(y.flatten(0, 1), row_idx, s_TK, T, K)

    @staticmethod
    def backward(ctx: Any, _do_Td: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The incoming gradient is the same dO in token order; its gathered copy is used."""
        x_Ecd, do_Ecd, s_R, row_idx, w1, w2, h = ctx.saved_tensors
        T, K = ctx.sizes
        da = torch.bmm(do_Ecd, w2.mT if ctx.in_out else w2)
        dh, a, ds = ctx.steps.d_swiglu(da.flatten(0, 1), h.flatten(0, 1), s_R)
        dh, a = dh.view_as(h), a.view_as(da)
        if ctx.in_out:
            dw2, dw1, dx = torch.bmm(a.mT, do_Ecd), torch.bmm(x_Ecd.mT, dh), torch.bmm(dh, w1.mT)
        else:
            dw2, dw1, dx = torch.bmm(do_Ecd.mT, a), torch.bmm(dh.mT, x_Ecd), torch.bmm(dh, w1)
        dx = ctx.steps.aggregate(dx.flatten(0, 1), row_idx, None, T, K)
        return dx, ds.view(K, T).T, dw1, dw2, *(None,) * 6


def _steps(device: torch.device) -> Steps:
    """The kernels around the products: ours, on a CPU their twins."""
    return FAMILIES["triton" if device.type == "cuda" else "torch"]


class _Alone(Alone):
    OPS = GEMMS

    def prepare(self) -> None:
        self.steps = _steps(self.problem.device)

    def gather(self, t_Td: torch.Tensor) -> torch.Tensor:
        return self.steps.gather_rows(t_Td, self.meta.gather_idx_R)

    def multiply(self, rows: torch.Tensor, w_Eab: torch.Tensor) -> torch.Tensor:
        return torch.bmm(self._equal(rows), w_Eab).flatten(0, 1)

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.bmm(self._equal(a).mT, self._equal(b))

    def _equal(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(self.shape.E, -1, rows.shape[1])


class Impl(StepsAlone):
    OPS = frozenset({"experts", *_Alone.OPS})
    ALONE = _Alone
    family = "torch"
    undeclared = "a bound: rows are gathered and arranged before the call"

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        shape, distribution = point.shape, point.routing.distribution
        if reason := Impl.gather_refusal(point):
            return reason
        if distribution != "balanced":
            return f"routing.distribution is {distribution!r}; the bound needs equal counts per expert: 'balanced'"
        if shape.T == 0 or shape.T * shape.K % shape.E:
            return f"T*K is {shape.T * shape.K} and shape.E is {shape.E}; the bound needs a positive multiple of E rows"
        allowed = [name for name in DTYPES if name != "fp64"]
        return dtype_refusal(point, allowed)

    def __init__(self, problem: Problem, point: Point) -> None:
        if point.op in KERNEL_OPS:
            super().__init__(problem, point)
            what = "upper bound, equal experts"
        else:
            rows = torch.arange(problem.R, device=problem.device)
            ids_TK = (rows // (problem.R // problem.shape.E)).view(problem.shape.K, problem.shape.T).T
            super().__init__(problem.with_routing(ids_TK), point)
            self._arrange(problem, rows)
            what = "upper bound, no router, no gather"
        if point.op.startswith("weight_grad"):
            self.note = what
            return
        if problem.device.type == "cuda":
            self._use(self._faster(backward=point.mode == "fwd_bwd"))
            choice = "the faster of two layouts"
        else:
            self._use(LAYOUTS[0])
            choice = "layouts not compared on a CPU"
        self.note = f"{what}; weights ({self._layout}), {choice}"

    def _arrange(self, problem: Problem, rows: torch.Tensor) -> None:
        """What the layer reads without a gather; `rows` numbers its rows (R,)."""
        T, K, E = problem.shape.T, problem.shape.K, problem.shape.E
        # Each slot's rows hold all tokens in turn, so the gather is K copies one behind the other.
        self._x_Ecd = problem.x_Td.repeat(K, 1).view(E, -1, problem.shape.d)
        self._do_Ecd = problem.do_Td.repeat(K, 1).view(E, -1, problem.shape.d)
        self._s_R = problem.scores_TK.T.flatten()
        self._row_idx = rows.view(K, T).T.flatten().int()
        self._steps = _steps(problem.device)

    def _use(self, layout: str) -> None:
        """Builds the weights' leaves in the given layout."""
        self._layout = layout
        w1, w2 = self.problem.w1_E2nd, self.problem.w2_Edn
        if layout == "in_out":
            w1, w2 = w1.mT.contiguous(), w2.mT.contiguous()
        if self._alone is not None:
            self._alone.w1, self._alone.w2 = (w1.mT, w2.mT) if layout == "in_out" else (w1, w2)
            return
        self.w1_E2nd, self.w2_Edn = leaf(w1), leaf(w2)

    def _faster(self, backward: bool) -> str:
        """The layout whose fastest of a few calls is shortest."""
        best: dict[str, float] = {}
        for layout in LAYOUTS:
            self._use(layout)
            seconds = []
            for _ in range(TRIALS + 2):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                o_Td = self.forward()
                if backward:
                    o_Td.backward(self.problem.do_Td)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begin)
                self.zero_grad()
            best[layout] = min(seconds[2:])
        return min(best, key=best.__getitem__)

    def forward(self) -> torch.Tensor:
        if self._alone is not None:
            return self._alone.call()
        arranged = (self._x_Ecd, self._do_Ecd, self._s_R, self._row_idx)
        leaves = (self.x_Td, self.scores_TK, self.w1_E2nd, self.w2_Edn)
        return _Bound.apply(*leaves, *arranged, self._layout == "in_out", self._steps)

    def weights(self) -> Sequence[torch.Tensor]:
        # The arranged copies were there before the call, like weights.
        return (self.w1_E2nd, self.w2_Edn, self._x_Ecd, self._do_Ecd, self._s_R, self._row_idx)

    def grads(self) -> dict[str, torch.Tensor]:
        found = super().grads()
        if self._layout == "in_out":
            found |= {name: found[name].mT for name in ("dw1_E2nd", "dw2_Edn") if found[name] is not None}
        return found
