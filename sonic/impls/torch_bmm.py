"""The sum over each token's rows as one batched product, scores (1, K) times rows (K, d): `op=aggregate` alone.

As ScatterMoE does it (`torch.bmm`): the rows lie in token order already, since its GEMM scatters them while it stores,
so nothing is gathered here. Scores enter in the dtype of the rows.
"""

from __future__ import annotations

import torch

from sonic import layer, reference
from sonic.impls._common import Adapter, dtype_refusal
from sonic.kernels.aggregate import aggregate_cost
from sonic.problem import DTYPES, Problem
from sonic.record import Point


class Impl(Adapter):
    OPS = frozenset({"aggregate"})
    family = "torch"
    undeclared = "no layer: the sum over each token's rows alone"

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        return dtype_refusal(point, DTYPES)

    def __init__(self, problem: Problem, point: Point) -> None:
        super().__init__(problem, point)
        shape = problem.shape
        draws = torch.Generator(problem.device).manual_seed(problem.seed + 1)
        empty = torch.empty(shape.T, shape.K, shape.d, dtype=problem.dtype, device=problem.device)
        self._y_TKd = empty.normal_(generator=draws)
        self._scores_T1K = problem.scores_TK.to(problem.dtype).unsqueeze(1)
        self._cost = aggregate_cost(shape, problem.R, problem.dtype.itemsize)
        self.note = "rows in token order"

    def forward(self) -> torch.Tensor:
        """O (T, d)."""
        return torch.bmm(self._scores_T1K, self._y_TKd).squeeze(1)

    def _scores(self) -> torch.Tensor | None:
        """What the rows are still to be multiplied by (T, K)."""
        return self.problem.scores_TK

    def check(self) -> dict[str, float]:
        """Relative error against the plain sum, as a multiple of what the dtype allows."""
        T, K, _ = self._y_TKd.shape
        order = torch.arange(T * K, device=self._y_TKd.device)
        want = layer.FAMILIES["torch"].aggregate(self._y_TKd.flatten(0, 1), order, self._scores(), T, K)
        return {"kernel.0": reference.relative_error(self.forward(), want) / reference.FLOOR[self.problem.dtype]}

    @property
    def flops_model(self) -> int:
        return self._cost.flops

    def bytes_model(self) -> int:
        return self._cost.bytes
