"""The strategies of other implementations on our kernels: what a strategy costs when the GEMMs are equal.

A `Strategy` says where rows are gathered and scattered, what is fused, what is kept, how dS is made and whether rows
are padded; `Styled` runs it with one family of `sonic.kernels`. Matrices: Xe gathered X, H, A = SwiGLU(H), Y, and in
the backward dYe = s gather(dO). These are readings of the strategies, not the packages: see each `<name>_style`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sonic import layer
from sonic.impls import _padded
from sonic.impls._common import KernelPackage, Properties, dtype_refusal, source_hash
from sonic.impls._padded import Padded, pad
from sonic.kernels.metadata import Metadata
from sonic.layer import Steps
from sonic.problem import DTYPES, Problem
from sonic.record import Point


@dataclass(frozen=True)
class Strategy:
    """`gather_fused`: X is gathered by the loads of the forward's GEMM, else stored as Xe. `activation_fused`: SwiGLU
    and its gradient in an epilogue. `scatter_fused`: the stores of Y and dXt go to slot order, else rows are brought
    back by the kernel that sums. `kept` beside X, of Xe H A Y; what is not kept is computed again. `block`: rows per
    expert are padded to multiples of it. The backward always stores gathered X and s dO, and dS = <dO, Y>.
    """

    gather_fused: bool
    activation_fused: bool
    scatter_fused: bool
    kept: tuple[str, ...]
    block: int = 1

    def properties(self) -> Properties:
        """The row of the feature matrix that this strategy is."""
        return Properties(
            gather_fused_forward=self.gather_fused,
            gather_fused_backward=False,
            activation_fused=self.activation_fused,
            d_activation_fused=self.activation_fused,
            ds_from_da=False,
            d_act_whole=False,
            io_overlapped=False,
            no_scatter_kernel=self.scatter_fused,
            efficient_topk=False,
            no_padding=self.block == 1,
            kept=self.kept,
            padding=self.block,
        )


class Styled(KernelPackage):
    """Base of the `<name>_style` implementations; `strategy` is all that they differ in."""

    KNOBS = frozenset({"knobs.family"})
    strategy: Strategy

    @classmethod
    def version(cls) -> str:
        """Of our kernels, and of what is made of them here."""
        from sonic.impls import sonic as ours

        return (
            f"{ours.Impl.version()}+{source_hash((__file__, _padded.__file__, sys.modules[cls.__module__].__file__))}"
        )

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        if refusal := dtype_refusal(point, DTYPES):
            return refusal
        try:
            layer.resolve_family(point.knobs.family, device, DTYPES[point.dtype], point.shape.d, point.shape.n)
        except ValueError as error:
            return str(error)
        return None

    def __init__(self, problem: Problem, point: Point) -> None:
        super().__init__(problem, point)
        shape = problem.shape
        self.family = layer.resolve_family(point.knobs.family, problem.device, problem.dtype, shape.d, shape.n)
        self.note = "a strategy on our kernels, not the package"

    def experts(self, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        call = _Call(self.strategy, layer.FAMILIES[self.family], self.problem.shape.E)
        return _Experts.apply(self.x_Td, scores_TK, self.w1_E2nd, self.w2_Edn, ids_TK.int(), call)


@dataclass(frozen=True)
class _Call:
    """One call's strategy and kernels."""

    strategy: Strategy
    steps: Steps
    E: int

    def rows(self, ids: torch.Tensor) -> Padded:
        """Rows in expert order; without padding the metadata's own, and no wait for the device."""
        meta, K = self.steps.metadata(ids, self.E), ids.shape[1]
        if self.strategy.block > 1:
            return pad(meta, K, self.strategy.block)
        return Padded(meta, meta.gather_idx_R, meta.slot_idx_R, meta.row_idx_R, [])

    def up(self, x: torch.Tensor, w1: torch.Tensor, meta: Metadata, gather: bool, with_a: bool = True) -> tuple:
        """H and A of rows, or of tokens that the GEMM gathers."""
        fused = self.strategy.activation_fused and with_a
        h, a = self.steps.up_proj(x, _halves(w1), meta, gather=gather, with_act=fused)
        return h, self.steps.swiglu(h) if with_a and not fused else a

    def total(self, y: torch.Tensor, rows: Padded, scores: torch.Tensor | None, K: int) -> torch.Tensor:
        """(T, d) from rows, or from slots when the GEMM has scattered them."""
        back = None if self.strategy.scatter_fused else rows.row_idx_R
        return self.steps.aggregate(y, back, scores, rows.row_idx_R.numel() // K, K)

    @property
    def into(self) -> str:
        return "slots" if self.strategy.scatter_fused else "rows"


def _halves(w1: torch.Tensor) -> torch.Tensor:
    """W1 (E, 2n, d) as (E, 2, n, d)."""
    return w1.view(w1.shape[0], 2, w1.shape[1] // 2, w1.shape[2])


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scores: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        ids: torch.Tensor,
        call: _Call,
    ) -> torch.Tensor:
        steps, strategy, K = call.steps, call.strategy, ids.shape[1]
        rows = call.rows(ids)
        gathered = None if strategy.gather_fused else steps.gather_rows(x, rows.meta.gather_idx_R)
        h, a = call.up(x if gathered is None else gathered, w1, rows.meta, gathered is None)
        y = steps.down_proj(a, w2, rows.meta, into=call.into)
        found = {"Xe": gathered, "H": h, "A": a, "Y": y}
        matrices = [found[name] if name in strategy.kept else None for name in ("Xe", "H", "A", "Y")]
        meta = rows.meta
        ctx.save_for_backward(x, scores, w1, w2, *matrices, meta.offsets_E1, meta.slot_idx_R, meta.gather_idx_R,
                              meta.row_idx_R, rows.slot_P, rows.row_idx_R)  # fmt: skip
        ctx.call = call
        return call.total(y, rows, scores, K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scores, w1, w2, xe, h, a, y, offsets, slots, tokens, places, slot_P, row_idx = ctx.saved_tensors
        call, steps, (T, K) = ctx.call, ctx.call.steps, scores.shape
        meta = Metadata(offsets, slots, tokens, places, T if call.strategy.block == 1 else len(tokens))
        rows = Padded(meta, tokens, slot_P, row_idx, [])
        do = do.contiguous()
        scores_P = scores.reshape(-1)[slot_P.long()] if call.strategy.block == 1 else rows.scores(scores)
        dy = steps.gather_rows(do, tokens, scores_P)
        xe = steps.gather_rows(x, tokens) if xe is None else xe
        if h is None:
            h, _ = call.up(xe, w1, meta, False, with_a=False)
        # dY has its score already, so the kernels' own is one, and their A' is A.
        one = torch.ones_like(scores_P)
        if call.strategy.activation_fused:
            dh, again, _ = steps.d_act(dy, w2, h, one, meta, gather=False)
        else:
            dh, again, _ = steps.d_swiglu(steps.d_act_gemm(dy, w2, meta, gather=False), h, one)
        a = again if a is None else a
        y = steps.down_proj(a, w2, meta, into=call.into) if y is None else y
        y_TKd = (y if call.strategy.scatter_fused else y.index_select(0, row_idx)).view(T, K, y.shape[1])
        ds = torch.bmm(y_TKd, do[..., None])[..., 0].to(scores.dtype)
        dw1, dw2 = torch.empty_like(w1), torch.empty_like(w2)
        steps.weight_grad_2(dy, a, dw2, meta, gather=False)
        dx = call.total(steps.d_input(dh, _halves(w1), meta, into=call.into), rows, None, K)
        steps.weight_grad_1(xe, dh, _halves(dw1), meta, gather=False)
        return dx, ds, dw1, dw2, None, None
