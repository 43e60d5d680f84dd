"""Megatron-Core (Apache-2.0 and BSD-3-Clause, https://github.com/NVIDIA/Megatron-LM), `GroupedMLP` between its
`permute` and `unpermute`, read at 0.16.1 (the paper: 610a75e).

What a single rank without Transformer Engine runs: X and scores are selected into expert order by a dense (T, E) map,
grouped GEMM, SwiGLU times the score in one compiled function (so dS = <dA', A>), grouped GEMM, `scatter_add_` back to
tokens, with atomics. Kept for the backward: gathered X, H, and A times its score. Its router adds losses and is not
used: `layer` gets the harness's plain one, spread to (T, E). `masked_select` and the counts make the host wait.

Grouped GEMMs come from the package `grouped_gemm` (tgale96's at ebeae0b, which calls cuBLAS per expert; the paper used
fanshiqing's fork with CUTLASS). Weights are (E, d, 2n) and (E, n, d), transposed once, outside the timing; a model that
stores them so never converts. bf16 only.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from sonic.impls._common import KernelPackage, Properties, allow_recompiles, cuda_refusal, leaf, missing
from sonic.problem import Problem
from sonic.record import Point

MODULES = {
    "megatron": "megatron-core",
    "megatron.core": "megatron-core",
    "grouped_gemm": "grouped-gemm",
    "grouped_gemm_backend": "grouped-gemm",
}


class Impl(KernelPackage):
    properties = Properties(
        gather_fused_forward=False,
        gather_fused_backward=False,
        activation_fused=False,
        d_activation_fused=False,
        ds_from_da=True,
        d_act_whole=False,
        io_overlapped=False,
        no_scatter_kernel=False,
        efficient_topk=False,
        no_padding=True,
        kept=("Xe", "H", "A"),
    )

    @staticmethod
    def available() -> str | None:
        how = 'pip install "megatron-core==0.16.1"; grouped-gemm needs nvcc: docs/baselines.md'
        return missing(MODULES, "megatron", how)

    @staticmethod
    def version() -> str:
        return importlib.metadata.version("megatron-core")

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        return cuda_refusal(point, device)

    def __init__(self, problem: Problem, point: Point) -> None:
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.moe.experts import GroupedMLP
        from megatron.core.transformer.transformer_config import TransformerConfig

        super().__init__(problem, point)
        allow_recompiles()
        self.note = "GroupedMLP with tgale96's grouped_gemm (cuBLAS per expert), unfused permute; weights transposed"
        shape = problem.shape
        config = TransformerConfig(
            num_layers=1,
            hidden_size=shape.d,
            num_attention_heads=1,
            num_moe_experts=shape.E,
            moe_ffn_hidden_size=shape.n,
            moe_grouped_gemm=True,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            bf16=True,
            params_dtype=problem.dtype,
            use_cpu_initialization=True,
            perform_initialization=False,
        )
        alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        groups = SimpleNamespace(ep=alone, expt_tp=alone, expt_dp=alone)
        with torch.device("meta"):
            self.block = GroupedMLP(shape.E, config, groups)
        self.utils = moe_utils
        for name, weight in (("weight1", problem.w1_E2nd), ("weight2", problem.w2_Edn)):
            rows = leaf(weight.transpose(1, 2).contiguous())
            setattr(self.block, name, torch.nn.Parameter(rows))

    def experts(self, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        T, E, ids_TK = len(ids_TK), self.problem.shape.E, ids_TK.long()
        chosen_TE = ids_TK.new_zeros(T, E, dtype=torch.bool).scatter_(1, ids_TK, True)
        scores_TE = scores_TK.new_zeros(T, E).scatter(1, ids_TK, scores_TK)
        counts_E = chosen_TE.sum(dim=0).cpu()
        x_Rd, scores_R, order_R = self.utils.permute(self.x_Td, chosen_TE, scores_TE, T * self.K)
        y_Rd, _ = self.block(x_Rd, counts_E, scores_R)
        return self.utils.unpermute(y_Rd, order_R, self.x_Td.shape)

    def weights(self) -> Sequence[torch.Tensor]:
        return (*self.block.parameters(), self.router_w_Ed)

    def grads(self) -> dict[str, torch.Tensor]:
        found = super().grads()
        for name, weight in (("dw1_E2nd", self.block.weight1), ("dw2_Edn", self.block.weight2)):
            found[name] = None if weight.grad is None else weight.grad.transpose(1, 2)
        return found

    def zero_grad(self) -> None:
        super().zero_grad()
        self.block.zero_grad(set_to_none=True)
