"""PyTorch's grouped matrix multiplication, eager: what a user gets from `torch.nn.functional.grouped_mm` (torch >=
2.10).

Sort the (token, slot) pairs by expert, gather x, grouped GEMM, SiLU * up, grouped GEMM, weight by the scores, put the
rows back into token order and sum over the K slots. No host sync. Weights are read where they lie, as transposed
views. Limits: bf16 on CUDA; bf16, fp16 and fp32 on a CPU; rows of every operand must be multiples of 16 bytes, so d
and n multiples of 8 in 16 bits. `torch_grouped_mm_compiled` runs the same functions through torch.compile.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sonic.impls._common import Properties, dtype_refusal
from sonic.impls._kernels import Alone, StepsAlone
from sonic.problem import DTYPES
from sonic.record import Point
from sonic.routers import plain_router

ROW_BYTES = 16
#: torch 2.11 refuses this many groups ("Can't process more than 1024 groups", seen at 1024).
MOST_EXPERTS = 1024


class _Gather(torch.autograd.Function):
    """x[order // K], whose gradient gathers and sums instead of adding with atomics, as plain indexing would."""

    @staticmethod
    def forward(ctx: Any, x_Td: torch.Tensor, order_R: torch.Tensor, place_R: torch.Tensor, K: int) -> torch.Tensor:
        ctx.save_for_backward(place_R)
        ctx.K = K
        return x_Td.index_select(0, order_R // K)

    @staticmethod
    def backward(ctx: Any, dx_Rd: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place_R,) = ctx.saved_tensors
        return dx_Rd.index_select(0, place_R).view(-1, ctx.K, dx_Rd.shape[1]).sum(dim=1), None, None, None


class _Permute(torch.autograd.Function):
    """y[place], whose gradient is indexed by the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, y_Rd: torch.Tensor, place_R: torch.Tensor, order_R: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order_R)
        return y_Rd.index_select(0, place_R)

    @staticmethod
    def backward(ctx: Any, dy_Rd: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order_R,) = ctx.saved_tensors
        return dy_Rd.index_select(0, order_R), None, None


def experts(
    x_Td: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor, w1_E2nd: torch.Tensor, w2_Edn: torch.Tensor
) -> torch.Tensor:
    """O (T, d) from given ids and scores (T, K)."""
    T, K = ids_TK.shape
    E = w1_E2nd.shape[0]
    sorted_R, order_R = ids_TK.flatten().sort(stable=True)
    ends_E = torch.searchsorted(sorted_R, torch.arange(E, device=sorted_R.device, dtype=sorted_R.dtype), right=True)
    ends_E = ends_E.to(torch.int32)
    place_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(T * K, device=order_R.device))
    x_Rd = _Gather.apply(x_Td, order_R, place_R, K)
    gate_Rn, up_Rn = F.grouped_mm(x_Rd, w1_E2nd.transpose(-2, -1), offs=ends_E).chunk(2, dim=-1)
    y_Rd = F.grouped_mm(F.silu(gate_Rn) * up_Rn, w2_Edn.transpose(-2, -1), offs=ends_E)
    y_TKd = _Permute.apply(y_Rd, place_R, order_R).view(T, K, x_Td.shape[1])
    return (y_TKd * scores_TK[..., None].to(y_TKd.dtype)).sum(dim=1)


def layer(
    x_Td: torch.Tensor, router_w_Ed: torch.Tensor, K: int, w1_E2nd: torch.Tensor, w2_Edn: torch.Tensor
) -> torch.Tensor:
    """O (T, d) behind the plain router."""
    scores_TK, ids_TK = plain_router(x_Td, router_w_Ed, K)
    return experts(x_Td, ids_TK, scores_TK, w1_E2nd, w2_Edn)


class Impl(StepsAlone):
    OPS = frozenset({"layer", "experts", *Alone.OPS})
    family = "torch"
    #: Autograd keeps silu(gate) too, as wide as A.
    properties = Properties(
        gather_fused_forward=False,
        gather_fused_backward=False,
        activation_fused=False,
        d_activation_fused=False,
        ds_from_da=False,
        d_act_whole=False,
        io_overlapped=False,
        no_scatter_kernel=False,
        efficient_topk=False,
        no_padding=True,
        kept=("Xe", "H", "A", "A", "Y"),
    )

    @staticmethod
    def available() -> str | None:
        return None if hasattr(F, "grouped_mm") else f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"

    @classmethod
    def supports(cls, point: Point, device: torch.device) -> str | None:
        if reason := cls.gather_refusal(point):
            return reason
        allowed = ("bf16",) if device.type == "cuda" else ("bf16", "fp16", "fp32")
        if reason := dtype_refusal(point, allowed):
            return reason
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return f"compute capability is {torch.cuda.get_device_capability(device)}; grouped_mm needs (8, 0) or newer"
        if device.type == "cuda" and point.shape.E >= MOST_EXPERTS:
            return f"shape.E is {point.shape.E}; grouped_mm takes fewer than {MOST_EXPERTS} groups on CUDA"
        itemsize = DTYPES[point.dtype].itemsize
        for name in ("d", "n"):
            size = getattr(point.shape, name)
            if size * itemsize % ROW_BYTES:
                return f"shape.{name} is {size}; grouped_mm needs multiples of {ROW_BYTES // itemsize} in {point.dtype}"
        return None

    def forward(self) -> torch.Tensor:
        if self._alone is not None:
            return self._alone.call()
        if self.layer:
            return layer(self.x_Td, self.router_w_Ed, self.K, self.w1_E2nd, self.w2_Edn)
        return experts(self.x_Td, self.ids_TK, self.scores_TK, self.w1_E2nd, self.w2_Edn)
