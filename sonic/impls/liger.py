"""Liger-Kernel (BSD-2-Clause, https://github.com/linkedin/Liger-Kernel), `LigerFusedMoEFunction`, read at 0.8.5.

Pure Triton, after SonicMoE's algorithms without Hopper's instructions: X and dO are gathered while they are loaded,
SwiGLU and its gradient are epilogues, dS = <dA', A>, added with atomics in the dtype of dO over the column tiles, O and
dX are gather-and-sum kernels. Kept for the backward: X, H, scores, indices. Weights lie as here. The package has no
router, so `layer` gets the harness's plain one; scores may be fp32. The number of row tiles is read back once per
forward, which makes the host wait. Rows per tile are fixed at 64.

Its autotuner tries 32 configurations for each of four GEMMs, 16 for two weight gradients and 40 for the sums, per (d,
n). `measure.tune=full` does so; `cached` cuts the lists, `off` takes the ones that the package pins with
LIGER_FUSED_MOE_AUTOTUNE=0.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from sonic.impls._common import KernelPackage, Properties, cuda_refusal, missing, restrict_triton
from sonic.kernels import tuning
from sonic.problem import Problem
from sonic.record import Point

_PINNED = {
    "gemm": [{"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 2}],
    "weight_grad": [{"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 8, "num_stages": 2}],
    "sum": [{"BLOCK_H": 128, "BLOCK_K": 4, "num_warps": 4, "num_stages": 4}],
}
#: Deep and shallow rings, narrow and wide tiles, of the package's own lists.
_CUT = {
    "gemm": [
        {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
        {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
        {"BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 4},
        {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    ],
    "weight_grad": [
        {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 8},
        {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4},
        {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4},
    ],
    "sum": [
        {"BLOCK_H": 512, "BLOCK_K": 1, "num_warps": 4},
        {"BLOCK_H": 512, "BLOCK_K": 4, "num_warps": 8},
        {"BLOCK_H": 256, "BLOCK_K": 8, "num_warps": 4},
    ],
}
_TUNERS = {
    "gemm": (
        "_fused_up_proj_swiglu_kernel",
        "_fused_down_proj_kernel",
        "_moe_bwd_down_proj_kernel",
        "_moe_bwd_dX_expanded_kernel",
    ),
    "weight_grad": ("_moe_bwd_dW1_kernel", "_moe_bwd_dW2_kernel"),
    "sum": ("_token_gather_weighted_sum_kernel",),
}
_LISTS = {"full": None, "cached": _CUT, "off": _PINNED}


class Impl(KernelPackage):
    family = "triton"
    properties = Properties(
        gather_fused_forward=True,
        gather_fused_backward=True,
        activation_fused=True,
        d_activation_fused=True,
        ds_from_da=True,
        d_act_whole=True,
        io_overlapped=False,
        no_scatter_kernel=True,
        efficient_topk=None,
        no_padding=True,
        kept=("H",),
    )

    @staticmethod
    def available() -> str | None:
        return missing({"liger_kernel": "liger-kernel"}, "liger", 'pip install "liger-kernel==0.8.5"')

    @staticmethod
    def version() -> str:
        return importlib.metadata.version("liger-kernel")

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        return cuda_refusal(point, device, ("bf16", "fp16"))

    def __init__(self, problem: Problem, point: Point) -> None:
        from liger_kernel.ops import fused_moe, fused_moe_kernels

        super().__init__(problem, point)
        self.function = fused_moe.LigerFusedMoEFunction
        self.note = _restrict(fused_moe_kernels, tuning.mode())

    def experts(self, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.x_Td, self.w1_E2nd, self.w2_Edn, ids_TK.int(), scores_TK)


def _restrict(kernels: Any, tune: str) -> str:
    """Gives the package's tuners the lists of `tune`; what a row's note says of it."""
    lists = _LISTS[tune]
    for kind, names in _TUNERS.items():
        for name in names:
            restrict_triton(getattr(kernels, name), None if lists is None else lists[kind])
    if lists is None:
        return "tuner over all configs"
    sizes = ", ".join(f"{len(picks)} {kind}" for kind, picks in lists.items())
    return f"tuner {'off' if tune == 'off' else 'cut'}: configs per kernel {sizes}"
