"""The sum over each token's rows by `torch.sum`, the rows weighted and in token order already: `op=aggregate` alone.

As MoMoE does it. On a GPU the faster of eager PyTorch and `torch.compile` is timed, as in the paper's Fig 21; the note
says which.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sonic.impls import torch_bmm
from sonic.impls._common import compiled
from sonic.problem import Problem
from sonic.record import Point

WARM, TRIALS = 2, 10


def _sum(y_TKd: torch.Tensor) -> torch.Tensor:
    return y_TKd.sum(dim=1)


class Impl(torch_bmm.Impl):
    def __init__(self, problem: Problem, point: Point) -> None:
        super().__init__(problem, point)
        self._run, way = _sum, "eager, not compared on a CPU"
        if problem.device.type == "cuda":
            ways = {"eager": _sum, "compiled": compiled(_sum)}
            way = min(ways, key=lambda name: self._milliseconds(ways[name]))
            self._run, way = ways[way], f"{way}, the faster of two"
        self.note = f"rows in token order, weighted already; {way}"

    def _milliseconds(self, run: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """A few calls in a row: the kernels hide what the host takes between them, which is not what is compared."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for call in range(WARM + TRIALS):
            if call == WARM:
                begin.record()
            run(self._y_TKd)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def forward(self) -> torch.Tensor:
        return self._run(self._y_TKd)

    def _scores(self) -> None:
        return None
