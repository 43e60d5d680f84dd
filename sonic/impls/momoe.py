"""MoMoE (https://github.com/tilde-research/MoMoE-impl, no licence file), `momoe.momoe.MoMoE`, read at commit d6e2d68.

Pure Triton, from git only. Nothing but X, scores and indices is kept for the backward, which gathers X and s dO into
memory, computes H again inside the kernel of dSwiGLU and Y again inside the kernel of dXt, where dS = <dO, Y> is added
with atomics; `momoe_save_all` keeps H and Y instead. Rows are scattered to (K, T, d) by the GEMM's own stores, then
summed. The slots of a token are handed out with atomics, so sums have no fixed order.

Routing enters as an int32 mask and fp32 scores, both dense (E, T), built here from the harness's plain router (the
package's own router adds shared experts and a bias); their cost is part of the time. All in bf16. Weights are (E, d,
2n), up columns first, and (E, n, d), transposed once, outside the timing; a model that stores them so never converts.
Its offsets are 32 bits wide.

T, T K, d, n and E are compile-time constants, so each shape compiles anew: 8 configurations for each of four GEMMs, 4
for each weight gradient, 10 for the index kernel. `measure.tune=full` tries all, `cached` a cut, `off` one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sonic.impls._common import (
    KernelPackage,
    Properties,
    cuda_refusal,
    element_refusal,
    leaf,
    missing,
    restrict_triton,
    version_of,
)
from sonic.kernels import tuning
from sonic.problem import Problem
from sonic.record import Point

_GEMMS = ("lin1_kernel", "lin2_kernel", "swiglu_backward_kernel", "lin1_backward_kernel")
#: Of the package's own lists; the first of each is what `off` runs.
_CUT = {
    "gemm": [
        {"BLOCK_SIZE_Mi": 128, "BLOCK_SIZE_H": 128, "BLOCK_SIZE_D": 64, "GROUP_SIZE_Mi": 8},
        {"BLOCK_SIZE_Mi": 128, "BLOCK_SIZE_H": 128, "BLOCK_SIZE_D": 32, "GROUP_SIZE_Mi": 8},
        {"BLOCK_SIZE_Mi": 128, "BLOCK_SIZE_H": 64, "BLOCK_SIZE_D": 128, "GROUP_SIZE_Mi": 4},
    ],
    "weight_grad": [
        {"BLOCK_SIZE_Mi": 64, "BLOCK_SIZE_X": 128, "BLOCK_SIZE_Y": 128, "num_warps": 4},
        {"BLOCK_SIZE_Mi": 32, "BLOCK_SIZE_X": 128, "BLOCK_SIZE_Y": 128, "GROUP_SIZE_X": 8},
    ],
    "index": [{"BLOCK_SIZE_M": 1024, "num_warps": 4}],
}


class Impl(KernelPackage):
    family = "triton"
    SAVE_PERCENT = 0
    properties = Properties(
        gather_fused_forward=True,
        gather_fused_backward=False,
        activation_fused=True,
        d_activation_fused=True,
        ds_from_da=False,
        d_act_whole=False,
        io_overlapped=False,
        no_scatter_kernel=True,
        efficient_topk=False,
        no_padding=True,
        kept=(),
    )

    @staticmethod
    def available() -> str | None:
        how = "git only: pip install einops git+https://github.com/tilde-research/MoMoE-impl@d6e2d68"
        return missing({"momoe": "momoe", "einops": "einops"}, "momoe", how)

    @staticmethod
    def version() -> str:
        return version_of("MoMoE-impl", "momoe")

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        if refusal := cuda_refusal(point, device):
            return refusal
        T, d, n, E, K = (getattr(point.shape, name) for name in "TdnEK")
        return element_refusal(2**31, **{"T_K_d": T * K * d, "T_K_2n": T * K * 2 * n, "E_d_2n": E * d * 2 * n})

    def __init__(self, problem: Problem, point: Point) -> None:
        from momoe import momoe

        super().__init__(problem, point)
        tuned = _restrict(momoe, tuning.mode())
        self.note = f"save_percent={self.SAVE_PERCENT}; {tuned}; weights stored transposed, up columns first"
        shape = problem.shape
        self.w1_E2nd = leaf(_to_package(problem.w1_E2nd))
        self.w2_Edn = leaf(problem.w2_Edn.transpose(1, 2).contiguous())
        meta = (torch.empty(w.shape, device="meta") for w in (self.w1_E2nd, self.w2_Edn))
        self.block = momoe.MoMoE(shape.d, shape.n, shape.E, shape.K, self.SAVE_PERCENT, *meta)
        self.block.Wl1_ND2H = torch.nn.Parameter(self.w1_E2nd)
        self.block.Wl2_NHD = torch.nn.Parameter(self.w2_Edn)

    def experts(self, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        ids_TK, E = ids_TK.long(), self.problem.shape.E
        scores_TE = scores_TK.new_zeros(len(ids_TK), E).scatter(1, ids_TK, scores_TK)
        mask_ET = ids_TK.new_zeros(E, len(ids_TK), dtype=torch.int32).scatter_(0, ids_TK.T, 1)
        return self.block(self.x_Td[None], mask_ET, scores_TE.T)[0][0]

    def weights(self) -> Sequence[torch.Tensor]:
        return (*self.block.parameters(), self.router_w_Ed)

    def grads(self) -> dict[str, torch.Tensor]:
        w1, w2 = self.block.Wl1_ND2H.grad, self.block.Wl2_NHD.grad
        mapped = (None, None) if w1 is None else (_from_package(w1), w2.transpose(1, 2))
        return super().grads() | dict(zip(("dw1_E2nd", "dw2_Edn"), mapped, strict=True))

    def zero_grad(self) -> None:
        super().zero_grad()
        self.block.zero_grad(set_to_none=True)


def _to_package(w1_E2nd: torch.Tensor) -> torch.Tensor:
    """(E, 2n, d), gate rows then up rows, as (E, d, 2n), up columns then gate columns."""
    gate, up = w1_E2nd.chunk(2, dim=1)
    return torch.cat([up, gate], dim=1).transpose(1, 2).contiguous()


def _from_package(w1_Ed2n: torch.Tensor) -> torch.Tensor:
    """The inverse of `_to_package`."""
    up, gate = w1_Ed2n.chunk(2, dim=2)
    return torch.cat([gate, up], dim=2).transpose(1, 2)


def _restrict(kernels: Any, tune: str) -> str:
    """Gives the package's tuners the lists of `tune`; what a row's note says of it."""
    kinds = dict.fromkeys(_GEMMS, "gemm") | {"weights_update_kernel": "weight_grad", "scatter_cols_kernel": "index"}
    for name, kind in kinds.items():
        picks = {"full": None, "cached": _CUT[kind], "off": _CUT[kind][:1]}[tune]
        restrict_triton(getattr(kernels, name), picks)
    if tune == "full":
        return "tuner over all configs"
    if tune == "off":
        return "tuner off, one config per kernel"
    return "tuner cut: configs per kernel " + ", ".join(f"{len(picks)} {kind}" for kind, picks in _CUT.items())
