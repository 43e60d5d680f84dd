"""moe-ops (MIT, https://github.com/echogujy/moe_ops), its differentiable operators composed as its README does, read
at 0.1.0.

Pure Triton: counting sort with atomics and a permuting copy of X, one grouped GEMM for gate and up with W1 as it lies
(TMA, persistent; plain pointers for weight gradients), SwiGLU in PyTorch, grouped GEMM, and a weighted gather-and-sum.
The places of rows within an expert change from run to run. Kept for the backward: gathered X, H, silu(gate), A, Y.
`layer` uses its fused top-K and softmax, in fp32; `router_topk` is that kernel on the logits as they are. Never waits
for the device. The number of experts must be a power of two, since a histogram is that wide; the TMA GEMM needs d and n
in multiples of 8 and compute capability 9.0.

One configuration of the forward GEMM is chosen for each number of experts, whatever the other sizes are (16
candidates): the first shape of a process decides. `measure.tune=full` tries all, `cached` a cut, `off` one each.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
import torch.nn.functional as F

from sonic.impls._common import KernelPackage, Properties, cuda_refusal, hopper_refusal, missing, restrict_triton
from sonic.impls._kernels import StepsAlone, TopKAlone
from sonic.kernels import tuning
from sonic.problem import Problem
from sonic.record import Point

ALIGNMENT = 8
#: Of the package's own lists; the first of each is what `off` runs.
_CUT = {
    "gemm": [
        {"BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "num_stages": 3, "num_warps": 8},
        {"BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "num_stages": 4, "num_warps": 4},
        {"BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "num_stages": 3, "num_warps": 8},
    ],
    "weight_grad": [
        {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128},
        {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128},
        {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128},
    ],
}


class _TopK(TopKAlone):
    def topk(self) -> tuple[torch.Tensor, torch.Tensor]:
        import moe_ops

        return moe_ops.fused_topk_softmax(self.logits_TE, self.K)


class Impl(StepsAlone, KernelPackage):
    KNOBS = frozenset()
    ALONE = _TopK
    OPS = frozenset({"layer", "experts", *_TopK.OPS})
    family = "triton"
    properties = Properties(
        gather_fused_forward=False,
        gather_fused_backward=False,
        activation_fused=False,
        d_activation_fused=False,
        ds_from_da=False,
        d_act_whole=False,
        io_overlapped=False,
        no_scatter_kernel=True,
        efficient_topk=True,
        no_padding=True,
        kept=("Xe", "H", "A", "A", "Y"),
    )

    @staticmethod
    def available() -> str | None:
        return missing({"moe_ops": "moe-ops"}, "moe_ops", 'pip install "moe-ops==0.1.0"')

    @staticmethod
    def version() -> str:
        return importlib.metadata.version("moe-ops")

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        wider = ("fp32",) if point.op in _TopK.OPS else ()
        if refusal := cuda_refusal(point, device, ("bf16", "fp16", *wider)):
            return refusal
        E = point.shape.E
        if E & (E - 1):
            return f"shape.E is {E}; its histogram needs a power of two"
        return hopper_refusal(point, device, ALIGNMENT)

    def __init__(self, problem: Problem, point: Point) -> None:
        import moe_ops
        from moe_ops import grouped_gemm_ops, grouped_gemm_ops_sm90

        super().__init__(problem, point)
        self.ops = moe_ops
        if self._alone is not None:
            self.note = "scores in the dtype of the logits; its own tuner over all configs"
            return
        self.note = _restrict(grouped_gemm_ops_sm90, grouped_gemm_ops, tuning.mode())

    def forward(self) -> torch.Tensor:
        if not self.layer:  # one step, or the experts
            return super().forward()
        logits_TE = F.linear(self.x_Td, self.router_w_Ed)
        return self.experts(*self.ops.fused_topk_softmax(logits_TE, self.K, fp32_routing=True))

    def experts(self, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        ops, T = self.ops, len(ids_TK)
        x_Rd, row_of_slot, offsets = ops.permute(self.x_Td, ids_TK.int(), E=self.problem.shape.E)
        gate_Rn, up_Rn = ops.grouped_gemm(x_Rd, self.w1_E2nd, offsets).chunk(2, dim=-1)
        y_Rd = ops.grouped_gemm(F.silu(gate_Rn) * up_Rn, self.w2_Edn, offsets)
        return ops.unpermute(y_Rd, row_of_slot, scores_TK, T, self.K)


def _restrict(forward: Any, backward: Any, tune: str) -> str:
    """Gives the package's tuners the lists of `tune`; what a row's note says of it."""
    kinds = {"gemm": forward.grouped_matmul_tma_kernel, "weight_grad": backward.gmm_gradB_kernel}
    for kind, tuner in kinds.items():
        restrict_triton(tuner, {"full": None, "cached": _CUT[kind], "off": _CUT[kind][:1]}[tune])
    if tune == "full":
        return "tuner over all configs"
    if tune == "off":
        return "tuner off, one config per GEMM"
    return "tuner cut: configs per kernel " + ", ".join(f"{len(picks)} {kind}" for kind, picks in _CUT.items())
