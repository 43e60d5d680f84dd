"""ScatterMoE (https://github.com/shawntan/scattermoe, Apache-2.0), `scattermoe.mlp.GLUMLP`, read at commit 47b5e15.

Pure Triton, one tile configuration per kernel; from git only, not on a package index. The package has no router, so
`layer` gets the harness's plain one. Its first weight keeps the n up rows before the n gate rows, so they are swapped
once, outside the timing; a model that stores them so never converts. Scores enter its kernels in the dtype of x. It
counts tokens per expert with `torch.bincount`, which makes the host wait for the device.

One step alone calls `scattermoe.kernels.ops` as its module does: `scatter2scatter`, which gathers tokens while it loads
and scatters rows while it stores, and `group_bwd_W` on rows, which a kernel of its own gathers (`group`). combine
scatters the rows into token order and multiplies them by the scores in one batched product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sonic.impls._common import KernelPackage, Properties, cuda_refusal, leaf, missing, version_of
from sonic.impls._kernels import GEMMS, Alone, StepsAlone
from sonic.problem import Problem
from sonic.record import Point


class _Alone(Alone):
    OPS = (*GEMMS, "combine")
    FUSED = frozenset({"up_proj"})

    def prepare(self) -> None:
        from scattermoe.kernels import ops

        self.ops = ops
        self.slot_R = self.meta.slot_idx_R.long()
        self.expert_R = self.problem.ids_TK.flatten()[self.slot_R].long()
        self.ends_E = self.ends_E.long()

    def gather(self, t_Td: torch.Tensor) -> torch.Tensor:
        return self.ops.group(t_Td, self.slot_R, fan_out=self.shape.K)

    def multiply(self, rows: torch.Tensor, w_Eab: torch.Tensor, scatter: bool = False) -> torch.Tensor:
        """(R, b) in expert order, or with `scatter` in token order."""
        return self.ops.scatter2scatter(
            X=rows, W=w_Eab, k=self.shape.K if self.fused else 1, sorted_expert_idxs=self.expert_R,
            sorted_scattered_idxs=self.slot_R, x_grouped=not self.fused, y_grouped=not scatter,
        )  # fmt: skip

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dw_Eba, _ = self.ops.group_bwd_W(DY=a, X=b, expert_offsets=self.ends_E, E=self.shape.E)
        return dw_Eba.mT

    def combined(self, a_Rn: torch.Tensor, place_R: torch.Tensor, scores_TK: torch.Tensor) -> torch.Tensor:
        y_TKd = self.multiply(a_Rn, self.w2.mT, scatter=True).view(*scores_TK.shape, -1)
        return (scores_TK.to(y_TKd.dtype).unsqueeze(1) @ y_TKd).squeeze(1)


class Impl(StepsAlone, KernelPackage):
    OPS = frozenset({"layer", "experts", *_Alone.OPS})
    ALONE = _Alone
    family = "triton"
    #: SwiGLU runs as plain torch, so autograd keeps silu(gate) too, as wide as A, which the paper's formula leaves out.
    properties = Properties(
        gather_fused_forward=True,
        gather_fused_backward=False,
        activation_fused=False,
        d_activation_fused=False,
        ds_from_da=False,
        d_act_whole=False,
        io_overlapped=False,
        no_scatter_kernel=True,
        efficient_topk=False,
        no_padding=True,
        kept=("H", "A", "A", "Y"),
    )

    @staticmethod
    def available() -> str | None:
        how = "git only: pip install --no-deps git+https://github.com/shawntan/scattermoe"
        return missing({"scattermoe": "scattermoe"}, "scattermoe", how)

    @staticmethod
    def version() -> str:
        return version_of("scattermoe")

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        return Impl.gather_refusal(point) or cuda_refusal(point, device, ("bf16", "fp16", "fp32"))

    def __init__(self, problem: Problem, point: Point) -> None:
        from scattermoe.kernels import ops
        from scattermoe.mlp import GLUMLP

        super().__init__(problem, point)
        self.note = "w1 stored up rows first, as the package wants it"
        # In fp32 the package multiplies in TF32 unless told otherwise, which no other implementation does.
        ops.ALLOW_TF32 = point.dtype != "fp32"
        shape = problem.shape
        with torch.device("meta"):
            self.mlp = GLUMLP(shape.d, shape.n, shape.E, shape.K)
        self.w1_E2nd = leaf(_swap_halves(problem.w1_E2nd))
        self.mlp.experts.weight = torch.nn.Parameter(self.w1_E2nd)
        self.mlp.output_experts.weight = torch.nn.Parameter(self.w2_Edn)
        self.ids_TK = problem.ids_TK.long()

    def experts(self, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.x_Td, scores_TK.to(self.x_Td.dtype), ids_TK)

    def weights(self) -> Sequence[torch.Tensor]:
        return (*self.mlp.parameters(), self.router_w_Ed)

    def grads(self) -> dict[str, torch.Tensor]:
        found = super().grads()
        w1, w2 = self.mlp.experts.weight.grad, self.mlp.output_experts.weight.grad
        return found | {"dw1_E2nd": None if w1 is None else _swap_halves(w1), "dw2_Edn": w2}

    def zero_grad(self) -> None:
        super().zero_grad()
        self.mlp.zero_grad(set_to_none=True)


def _swap_halves(w_E2nd: torch.Tensor) -> torch.Tensor:
    """(E, 2n, d) with the first n and the last n rows of each expert exchanged."""
    first, second = w_E2nd.chunk(2, dim=1)
    return torch.cat([second, first], dim=1)
