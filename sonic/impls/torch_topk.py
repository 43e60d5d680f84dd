"""`torch.topk` and a softmax over the K largest logits: a router without a kernel of its own (`op=router_topk`).

Returns scores (T, K) in fp32 and ids (T, K), int64 as `torch.topk` makes them. Of equal logits either may win.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sonic import reference
from sonic.impls._common import Adapter, dtype_refusal
from sonic.kernels.common import Cost
from sonic.kernels.router_topk import router_topk_cost
from sonic.problem import DTYPES, Problem
from sonic.record import Point
from sonic.routers import score_dtype


class Impl(Adapter):
    OPS = frozenset({"router_topk"})
    family = "torch"
    undeclared = "no layer: the router's top-K alone"

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        return dtype_refusal(point, DTYPES)

    def __init__(self, problem: Problem, point: Point) -> None:
        super().__init__(problem, point)
        self._logits_TE = F.linear(problem.x_Td, problem.router_w_Ed)
        self._cost: Cost = router_topk_cost(problem.shape, problem.R, problem.dtype.itemsize)

    def forward(self) -> torch.Tensor:
        """Scores (T, K)."""
        return self._topk()[0]

    def _topk(self) -> tuple[torch.Tensor, torch.Tensor]:
        values_TK, ids_TK = self._logits_TE.topk(self.K, dim=-1)
        return values_TK.to(score_dtype(values_TK.dtype)).softmax(dim=-1), ids_TK

    def check(self) -> dict[str, float]:
        """Relative error of the scores against a full sort in fp64, as a multiple of what the dtype allows."""
        wide = self._logits_TE.to(torch.float64)
        want_TK = wide.sort(dim=-1, descending=True).values[:, : self.K].softmax(dim=-1)
        scores_TK, ids_TK = self._topk()
        named_TK = wide.gather(1, ids_TK).softmax(dim=-1)
        floor = reference.FLOOR[self.problem.dtype]
        return {
            "kernel.0": reference.relative_error(scores_TK, want_TK.to(scores_TK.dtype)) / floor,
            "kernel.1": reference.relative_error(named_TK, want_TK) / floor,
        }

    @property
    def flops_model(self) -> int:
        return self._cost.flops

    def bytes_model(self) -> int:
        """Logits read once, ids and scores written, as int32 and fp32; its own ids are twice as wide."""
        return self._cost.bytes
