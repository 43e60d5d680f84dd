"""What the card can do on this day, measured like everything else: the roofs that `analysis.roofline_layer` draws.

`matmul` is C = A B through torch.matmul (cuBLAS on a GPU), A (M, K) and B (K, N) random as a layer's x and weights are.
Its sizes are those of the point: M = T, N = n, K = d. On a GPU both layouts of B are timed at construction and the
faster one stays; the note says which. `copy` copies a (T, d) tensor within the device; its bytes are those read and
those written. Nothing is routed: E and K are 1, and so is n of a copy.
"""

from __future__ import annotations

import math
import time

import torch

from sonic import reference
from sonic.impls._common import Adapter, dtype_refusal
from sonic.problem import DTYPES, Problem
from sonic.record import CEILING_OPS, Point

TRIALS = 5


class Impl(Adapter):
    OPS = frozenset(CEILING_OPS)
    family = "torch"
    undeclared = "no layer: one matrix product or one copy"

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        if (refusal := dtype_refusal(point, DTYPES)) is not None:
            return refusal
        shape = point.shape
        for name in ("E", "K", "n") if point.op == "copy" else ("E", "K"):
            if getattr(shape, name) != 1:
                return f"shape.{name} is {getattr(shape, name)}; op={point.op} has no such size, so only 1 fits"
        if shape.T == 0:
            return f"shape.T is 0; op={point.op} needs at least 1 row"
        return None

    def __init__(self, problem: Problem, point: Point) -> None:
        super().__init__(problem, point)
        self.op, self.shape = point.op, problem.shape
        self._a_MK = problem.x_Td
        if self.op == "copy":
            self._copy_MK = torch.full_like(self._a_MK, math.nan)
            return
        layouts = {"K, N": problem.w2_Edn[0], "N, K": problem.w1_E2nd[0, : self.shape.n].T}
        layout = "N, K"
        if problem.device.type == "cuda":
            layout = min(layouts, key=lambda name: self._seconds(layouts[name]))
        self._b_KN = layouts[layout]
        choice = "the faster of two layouts" if problem.device.type == "cuda" else "layouts not compared on a CPU"
        self.note = f"B stored as ({layout}), {choice}"

    def _seconds(self, b_KN: torch.Tensor) -> float:
        """The shortest of a few products with B in this layout."""
        seconds = []
        for _ in range(TRIALS + 2):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            torch.matmul(self._a_MK, b_KN)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return min(seconds[2:])

    def forward(self) -> torch.Tensor:
        """C (M, N), or the copy (M, K)."""
        if self.op == "copy":
            return self._copy_MK.copy_(self._a_MK)
        return torch.matmul(self._a_MK, self._b_KN)

    def check(self) -> dict[str, float]:
        """A copy is right or wrong; of a product the relative error of sampled rows, the last among them, as a multiple
        of what the dtype allows."""
        got = self.forward()
        if self.op == "copy":
            return {"kernel.copy": 0.0 if torch.equal(got, self._a_MK) else math.inf}
        dtype = self.problem.dtype
        wide = torch.float64 if dtype.itemsize > 2 else torch.float32
        count = min(self.shape.T, reference.SAMPLED_ROWS)
        rows = torch.linspace(0, self.shape.T - 1, count, dtype=torch.float64, device=got.device).round().long()
        want = self._a_MK[rows].to(wide) @ self._b_KN.to(wide)
        return {"kernel.c": reference.relative_error(got[rows], want) / reference.FLOOR[dtype]}

    @property
    def flops_model(self) -> int:
        return 0 if self.op == "copy" else 2 * self.shape.T * self.shape.n * self.shape.d

    def bytes_model(self) -> int:
        """A and B read once and C written; of a copy what is read and what is written."""
        T, d, n = self.shape.T, self.shape.d, self.shape.n
        elements = 2 * T * d if self.op == "copy" else T * d + d * n + T * n
        return elements * self.problem.dtype.itemsize
