"""DeepGEMM's grouped GEMM with our top-K, metadata, gather and aggregation kernels: the paper's "DeepGEMM++".

See `_deepgemm` for version, limits and what is kept. The router is that of `sonic`: logits, then its top-K and softmax
kernel. One GEMM alone reads rows padded to blocks of 128; with `knobs.gather=separate` our gather kernel runs before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from sonic.impls._deepgemm import DeepGemm, StepAlone
from sonic.impls._kernels import StepsAlone
from sonic.impls._padded import Padded
from sonic.kernels.metadata import Metadata
from sonic.layer import Steps
from sonic.record import Point


class _TopK(torch.autograd.Function):
    """Scores and ids (T, K) of logits (T, E) by the top-K kernel, and its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, K: int, steps: Steps) -> tuple[torch.Tensor, torch.Tensor]:
        scores, ids = steps.router_topk(logits, K)
        ctx.save_for_backward(scores, ids)
        ctx.like, ctx.steps = (logits.shape[1], logits.dtype), steps
        ctx.mark_non_differentiable(ids)
        return scores, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ds: torch.Tensor, _ids: None) -> tuple[torch.Tensor | None, ...]:
        scores, ids = ctx.saved_tensors
        slots = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
        return ctx.steps.router_topk_backward(ds.reshape(1, -1), slots, scores, ids, *ctx.like), None, None


class Impl(StepsAlone, DeepGemm):
    OPS = frozenset({"layer", "experts", *StepAlone.OPS})
    ALONE = StepAlone
    properties = replace(DeepGemm.properties, no_scatter_kernel=True, efficient_topk=True)

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        return Impl.gather_refusal(point) or DeepGemm.supports(point, device)

    def forward(self) -> torch.Tensor:
        if not self.layer:
            return super().forward()
        return self.experts(*_TopK.apply(F.linear(self.x_Td, self.router_w_Ed), self.K, self.steps))

    def metadata(self, ids_TK: torch.Tensor) -> Metadata:
        return self.steps.metadata(ids_TK, self.problem.shape.E)

    def gather(self, x_Td: torch.Tensor, token_P: torch.Tensor) -> torch.Tensor:
        return self.steps.gather_rows(x_Td.contiguous(), token_P)

    def combine(self, y_Pd: torch.Tensor, rows: Padded, scores_TK: torch.Tensor | None, K: int) -> torch.Tensor:
        return self.steps.aggregate(y_Pd, rows.row_idx_R, scores_TK, rows.row_idx_R.numel() // K, K)
