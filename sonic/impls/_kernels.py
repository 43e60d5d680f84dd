"""One step of a layer in plain PyTorch, for the sweeps of single kernels: what stands beside ours there.

GEMMs are `torch.nn.functional.grouped_mm` on rows in expert order; `knobs.gather` says whether a gather
(`index_select`) is timed before (`separate`) or the rows are there already (`given`). Sums are what eager PyTorch makes
of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sonic import layer, reference
from sonic.kernels import aggregate, d_input, down_proj, up_proj, weight_grad
from sonic.kernels.common import Cost
from sonic.problem import Problem
from sonic.record import Point

#: Steps that read x or dO through the routing, and so take `knobs.gather`.
GATHERING = ("up_proj", "weight_grad_1", "weight_grad_2")
OPS = (*GATHERING, "down_proj", "d_input", "aggregate", "combine")


def refusal(point: Point) -> str | None:
    """Why a step alone is out of reach: no GEMM here gathers while it loads."""
    gather = point.knobs.gather
    if point.op in GATHERING and gather == "fused":
        return f"knobs.gather is 'fused'; op={point.op} of plain PyTorch reads rows: separate, given"
    if point.op not in GATHERING and gather != "fused":
        return f"knobs.gather is {gather!r}; op={point.op} runs with 'fused'"
    return None


class Alone:
    """A step on drawn inputs: `call` is timed, `twin` is plain torch in fp32, `cost` the model."""

    def __init__(self, problem: Problem, point: Point) -> None:
        p, op = problem, point.op
        shape, twin = p.shape, layer.FAMILIES["torch"]
        T, d, n, E, K = shape.T, shape.d, shape.n, shape.E, shape.K
        meta = twin.metadata(p.ids_TK, E)
        ends, token = meta.offsets_E1[1:], meta.gather_idx_R.long()
        w1 = p.w1_E2nd.view(E, 2, n, d)
        draws = torch.Generator(p.device).manual_seed(p.seed + 1)
        rows = lambda wide: torch.empty(p.R, wide, dtype=p.dtype, device=p.device).normal_(generator=draws)  # noqa: E731
        there = {}
        if point.knobs.gather == "given":
            there = {id(t): t.index_select(0, token) for t in (p.x_Td, p.do_Td)}
        read = lambda t: there[id(t)] if there else t.index_select(0, token)  # noqa: E731
        self.cost: list[Cost]
        self.call: Callable[[], torch.Tensor]
        self.twin: Callable[[], torch.Tensor]
        size = p.dtype.itemsize
        match op:
            case "up_proj":
                self.call = lambda: F.grouped_mm(read(p.x_Td), p.w1_E2nd.transpose(-2, -1), offs=ends)
                self.twin = lambda: twin.up_proj(p.x_Td, w1, meta, with_act=False)[0]
                self.cost = [up_proj.up_proj_cost(shape, p.R, size, with_act=False)]
            case "down_proj" | "combine":
                a, place = rows(n), meta.row_idx_R.long()
                down = lambda: F.grouped_mm(a, p.w2_Edn.transpose(-2, -1), offs=ends)  # noqa: E731
                self.cost = [down_proj.down_proj_cost(shape, p.R, size)]
                self.call, self.twin = down, lambda: twin.down_proj(a, p.w2_Edn, meta)
                if op == "combine":
                    self.call = lambda: _summed(down(), place, p.scores_TK)
                    self.twin = lambda: twin.aggregate(twin.down_proj(a, p.w2_Edn, meta), place, p.scores_TK, T, K)
                    self.cost.append(aggregate.aggregate_cost(shape, p.R, size))
            case "aggregate":
                y, place = rows(d), meta.row_idx_R.long()
                self.call = lambda: _summed(y, place, p.scores_TK)
                self.twin = lambda: twin.aggregate(y, place, p.scores_TK, T, K)
                self.cost = [aggregate.aggregate_cost(shape, p.R, size)]
            case "d_input":
                dh = rows(2 * n)
                self.call = lambda: F.grouped_mm(dh, p.w1_E2nd, offs=ends)
                self.twin = lambda: twin.d_input(dh, w1, meta)
                self.cost = [d_input.d_input_cost(shape, p.R, size)]
            case "weight_grad_1":
                dh = rows(2 * n)
                self.call = lambda: F.grouped_mm(dh.t(), read(p.x_Td), offs=ends)
                self.twin = lambda: twin.weight_grad_1(p.x_Td, dh, torch.empty_like(w1), meta).view(E, 2 * n, d)
                self.cost = [weight_grad.weight_grad_1_cost(shape, p.R, size)]
            case "weight_grad_2":
                ap = rows(n)
                self.call = lambda: F.grouped_mm(read(p.do_Td).t(), ap, offs=ends)
                self.twin = lambda: twin.weight_grad_2(p.do_Td, ap, torch.empty_like(p.w2_Edn), meta)
                self.cost = [weight_grad.weight_grad_2_cost(shape, p.R, size)]
            case _:
                raise ValueError(f"op is {op!r}; alone there are: {', '.join(OPS)}")
        if op in GATHERING and not there:
            self.cost.append(aggregate.gather_rows_cost(shape, p.R, size))
        self._floor = reference.FLOOR[p.dtype]

    def check(self) -> dict[str, float]:
        """Relative error against the twin, as a multiple of what the dtype allows."""
        return {"kernel.0": reference.relative_error(self.call(), self.twin()) / self._floor}

    @property
    def flops(self) -> int:
        return sum(cost.flops for cost in self.cost)

    @property
    def bytes(self) -> int:
        return sum(cost.bytes for cost in self.cost)


def _summed(y_Rd: torch.Tensor, place_R: torch.Tensor, scores_TK: torch.Tensor) -> torch.Tensor:
    """O (T, d): rows in token order, weighted and summed, three kernels."""
    T, K = scores_TK.shape
    y_TKd = y_Rd.index_select(0, place_R).view(T, K, y_Rd.shape[1])
    return (y_TKd * scores_TK[..., None].to(y_TKd.dtype)).sum(dim=1)
