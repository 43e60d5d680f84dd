"""MegaBlocks (Apache-2.0, https://github.com/databricks/megablocks), `ParallelDroplessMLP`, read at 0.10.0, with
grouped_gemm (Apache-2.0, https://github.com/tgale96/grouped_gemm) at ebeae0b.

`mlp_impl="grouped"`: sort by expert, gather X into expert order, grouped GEMM for gate and for up, SwiGLU in PyTorch,
grouped GEMM, weight and scatter to (T, K, d), sum. No rows are padded. `mlp_impl="sparse"`, which pads every expert to
blocks of 128 rows, refuses triton 3.2 and newer, so it cannot run here. `memory_optimized_mlp=True`, as the memory that
the paper shows has it: A is computed again in the backward; kept are gathered X, gate and up, and Y for dS = <dO, Y>.

Its router is not used, so that all share one; `layer` gets the harness's plain one. The counts per expert go to the
host in every forward. grouped_gemm, built as its default is, calls cuBLAS once per expert and GEMM, so that many
experts cost host time. Weights are gate (E n, d), up (E n, d) and down (E n, d), copied once, outside the timing; a
model that stores them so never converts. bf16 only; its copies count elements in 32 bits. Two CUDA extensions
(`megablocks_ops`, `grouped_gemm_backend`) must be built for the torch at hand; docs/baselines.md tells how.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sonic.impls._common import KernelPackage, Properties, cuda_refusal, element_refusal, missing
from sonic.problem import Problem
from sonic.record import Point

MODULES = {
    "megablocks": "megablocks",
    "megablocks_ops": "megablocks",
    "stk": "stanford-stk",
    "grouped_gemm": "grouped-gemm",
    "grouped_gemm_backend": "grouped-gemm",
}


class Impl(KernelPackage):
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
        kept=("Xe", "H", "Y"),
    )

    @staticmethod
    def available() -> str | None:
        how = "pip install --no-deps --no-build-isolation megablocks==0.10.0 stanford-stk==0.7.1 grouped-gemm==0.3.0"
        return missing(MODULES, "megablocks", f"needs nvcc: {how}; see docs/baselines.md")

    @staticmethod
    def version() -> str:
        return importlib.metadata.version("megablocks")

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        if refusal := cuda_refusal(point, device):
            return refusal
        shape = point.shape
        return element_refusal(2**31, T_K_d=shape.T * shape.K * shape.d)

    def __init__(self, problem: Problem, point: Point) -> None:
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import ParallelDroplessMLP

        super().__init__(problem, point)
        self.note = "mlp_impl=grouped, memory_optimized_mlp=True, cuBLAS per expert; weights copied to its layout once"
        shape = problem.shape
        arguments = Arguments(
            hidden_size=shape.d,
            ffn_hidden_size=shape.n,
            moe_num_experts=shape.E,
            moe_top_k=shape.K,
            moe_loss_weight=0.0,
            mlp_type="glu",
            mlp_impl="grouped",
            memory_optimized_mlp=True,
            activation_fn=F.silu,
            bias=False,
            fp16=False,
            bf16=True,
            device=torch.device("meta"),
        )
        self.block = ParallelDroplessMLP(arguments)
        gate, up = problem.w1_E2nd.detach().chunk(2, dim=1)
        for name, weight in (("w1", gate), ("v1", up), ("w2", problem.w2_Edn.detach().transpose(1, 2))):
            rows = weight.reshape(-1, shape.d).contiguous()
            setattr(self.block.mlp, name, torch.nn.Parameter(rows))

    def experts(self, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        return self.block(self.x_Td[None], None, scores_TK, ids_TK)[0]

    def weights(self) -> Sequence[torch.Tensor]:
        return (*self.block.parameters(), self.router_w_Ed)

    def grads(self) -> dict[str, torch.Tensor]:
        found, mlp, shape = super().grads(), self.block.mlp, self.problem.shape
        if mlp.w1.grad is None:
            return found | {"dw1_E2nd": None, "dw2_Edn": None}
        gate, up, down = (w.grad.view(shape.E, shape.n, shape.d) for w in (mlp.w1, mlp.v1, mlp.w2))
        return found | {"dw1_E2nd": torch.cat([gate, up], dim=1), "dw2_Edn": down.transpose(1, 2)}

    def zero_grad(self) -> None:
        super().zero_grad()
        self.block.zero_grad(set_to_none=True)
