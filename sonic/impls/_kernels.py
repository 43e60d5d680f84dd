"""One step of a layer by other packages' kernels, for the sweeps of single kernels: what stands beside ours there.

`Alone` is plain PyTorch: GEMMs are `torch.nn.functional.grouped_mm` on rows in expert order, sums what eager PyTorch
makes of them. A package replaces what it does otherwise. `knobs.gather` says whether a gather is timed before a GEMM
(`separate`), inside it where the package can (`fused`), or not at all, since the rows are there already (`given`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sonic import layer, reference
from sonic.impls._common import Adapter
from sonic.kernels import aggregate, d_input, down_proj, up_proj, weight_grad
from sonic.kernels.common import Cost
from sonic.kernels.router_topk import router_topk_cost
from sonic.problem import Problem
from sonic.record import KERNEL_OPS, Point
from sonic.routers import score_dtype

#: Steps that read x or dO through the routing, and so take `knobs.gather`.
GATHERING = ("up_proj", "weight_grad_1", "weight_grad_2")
#: Steps that are one grouped GEMM.
GEMMS = (*GATHERING, "down_proj", "d_input")


class Alone:
    """A step on drawn inputs: `call` is timed, `twin` is plain torch in fp32, `cost` the model.

    Weights are `w1` (E, 2n, d) and `w2` (E, d, n) with strides as the package likes them. OPS are the steps that a
    package has, FUSED those of them whose GEMM can gather while it loads.
    """

    OPS: tuple[str, ...] = (*GEMMS, "aggregate", "combine")
    FUSED: frozenset[str] = frozenset()

    def __init__(self, problem: Problem, point: Point) -> None:
        p, op = problem, point.op
        self.problem, self.shape = p, p.shape
        self.fused = op in self.FUSED and point.knobs.gather == "fused"
        shape, twin = p.shape, layer.FAMILIES["torch"]
        T, d, n, E, K = shape.T, shape.d, shape.n, shape.E, shape.K
        self.meta = meta = twin.metadata(p.ids_TK, E)
        self.ends_E, self.w1, self.w2 = meta.offsets_E1[1:], p.w1_E2nd, p.w2_Edn
        self.prepare()
        w1 = p.w1_E2nd.view(E, 2, n, d)
        draws = torch.Generator(p.device).manual_seed(p.seed + 1)
        rows = lambda wide: torch.empty(p.R, wide, dtype=p.dtype, device=p.device).normal_(generator=draws)  # noqa: E731
        source = p.do_Td if op == "weight_grad_2" else p.x_Td
        separate = op in GATHERING and point.knobs.gather == "separate"
        there = source if op not in GATHERING or separate or self.fused else self.gather(source)
        read = lambda: self.gather(source) if separate else there  # noqa: E731
        self.cost: list[Cost]
        self.call: Callable[[], torch.Tensor]
        self.twin: Callable[[], torch.Tensor]
        size = p.dtype.itemsize
        match op:
            case "up_proj":
                self.call = lambda: self.multiply(read(), self.w1.mT)
                self.twin = lambda: twin.up_proj(p.x_Td, w1, meta, with_act=False)[0]
                self.cost = [up_proj.up_proj_cost(shape, p.R, size, with_act=False)]
            case "down_proj" | "combine":
                drawn, place = rows(n), meta.row_idx_R.long()
                a = self.arranged(drawn)
                self.cost = [down_proj.down_proj_cost(shape, p.R, size)]
                self.call = lambda: self.multiply(a, self.w2.mT)
                self.twin = lambda: twin.down_proj(drawn, p.w2_Edn, meta)
                if op == "combine":
                    self.call = lambda: self.combined(a, place, p.scores_TK)
                    self.twin = lambda: twin.aggregate(twin.down_proj(drawn, p.w2_Edn, meta), place, p.scores_TK, T, K)
                    self.cost.append(aggregate.aggregate_cost(shape, p.R, size))
            case "aggregate":
                y, place = rows(d), meta.row_idx_R.long()
                self.call = lambda: self.summed(y, place, p.scores_TK)
                self.twin = lambda: twin.aggregate(y, place, p.scores_TK, T, K)
                self.cost = [aggregate.aggregate_cost(shape, p.R, size)]
            case "d_input":
                drawn = rows(2 * n)
                dh = self.arranged(drawn)
                self.call = lambda: self.multiply(dh, self.w1)
                self.twin = lambda: twin.d_input(drawn, w1, meta)
                self.cost = [d_input.d_input_cost(shape, p.R, size)]
            case "weight_grad_1":
                drawn = rows(2 * n)
                dh = self.arranged(drawn)
                self.call = lambda: self.outer(dh, read())
                self.twin = lambda: twin.weight_grad_1(p.x_Td, drawn, torch.empty_like(w1), meta).view(E, 2 * n, d)
                self.cost = [weight_grad.weight_grad_1_cost(shape, p.R, size)]
            case "weight_grad_2":
                drawn = rows(n)
                ap = self.arranged(drawn)
                self.call = lambda: self.outer(read(), ap)
                self.twin = lambda: twin.weight_grad_2(p.do_Td, drawn, torch.empty_like(p.w2_Edn), meta)
                self.cost = [weight_grad.weight_grad_2_cost(shape, p.R, size)]
            case _:
                raise ValueError(f"op is {op!r}; alone there are: {', '.join(self.OPS)}")
        if separate:
            self.cost.append(aggregate.gather_rows_cost(shape, p.R, size))
        self.in_rows = op in ("up_proj", "down_proj", "d_input")
        self._floor = reference.FLOOR[p.dtype]

    # What a package does in its own way

    def prepare(self) -> None:
        """Indices of the package's own, made before the call."""
        self.token_R = self.meta.gather_idx_R.long()

    def gather(self, t_Td: torch.Tensor) -> torch.Tensor:
        """Rows of x or dO in expert order."""
        return t_Td.index_select(0, self.token_R)

    def arranged(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in expert order (R, columns) as the GEMMs read them."""
        return rows

    def plain(self, rows: torch.Tensor) -> torch.Tensor:
        """Undoes `arranged`."""
        return rows

    def multiply(self, rows: torch.Tensor, w_Eab: torch.Tensor) -> torch.Tensor:
        """Rows, or tokens with a fused gather, times the weights (E, a, b) of their expert."""
        return F.grouped_mm(rows, w_Eab, offs=self.ends_E)

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a^T b of every expert, (E, columns of a, columns of b)."""
        return F.grouped_mm(a.t(), b, offs=self.ends_E)

    def summed(self, y_Rd: torch.Tensor, place_R: torch.Tensor, scores_TK: torch.Tensor) -> torch.Tensor:
        """O (T, d) from rows in expert order."""
        return weighted_sum(y_Rd, place_R, scores_TK)

    def combined(self, a_Rn: torch.Tensor, place_R: torch.Tensor, scores_TK: torch.Tensor) -> torch.Tensor:
        """The down-projection and the sum over each token's rows."""
        return down_and_sum(a_Rn, self.w2, self.ends_E, place_R, scores_TK)

    # What an adapter passes on

    def check(self) -> dict[str, float]:
        """Relative error against the twin, as a multiple of what the dtype allows."""
        got = self.call()
        return {
            "kernel.0": reference.relative_error(self.plain(got) if self.in_rows else got, self.twin()) / self._floor
        }

    @property
    def flops(self) -> int:
        return sum(cost.flops for cost in self.cost)

    @property
    def bytes(self) -> int:
        return sum(cost.bytes for cost in self.cost)


class TopKAlone:
    """The router's top-K and a softmax over it, on the problem's logits; a package replaces `topk`, PyTorch's here.

    Of equal logits either may win. Its own ids may be wider than the int32 that the bytes count.
    """

    OPS: tuple[str, ...] = ("router_topk",)
    FUSED: frozenset[str] = frozenset()

    def __init__(self, problem: Problem, point: Point) -> None:
        self.problem, self.K = problem, problem.shape.K
        self.logits_TE = F.linear(problem.x_Td, problem.router_w_Ed)
        cost = router_topk_cost(problem.shape, problem.R, problem.dtype.itemsize)
        self.flops, self.bytes = cost.flops, cost.bytes

    def call(self) -> torch.Tensor:
        """Scores (T, K)."""
        return self.topk()[0]

    def topk(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids (T, K)."""
        values_TK, ids_TK = self.logits_TE.topk(self.K, dim=-1)
        return values_TK.to(score_dtype(values_TK.dtype)).softmax(dim=-1), ids_TK

    def check(self) -> dict[str, float]:
        """Relative errors of the scores, and of those that the ids name, against a full sort in fp64, as multiples of
        what the dtype allows."""
        wide = self.logits_TE.to(torch.float64)
        want_TK = wide.sort(dim=-1, descending=True).values[:, : self.K].softmax(dim=-1)
        scores_TK, ids_TK = self.topk()
        named_TK = wide.gather(1, ids_TK.long()).softmax(dim=-1)
        floor = reference.FLOOR[self.problem.dtype]
        return {
            "kernel.0": reference.relative_error(scores_TK, want_TK.to(scores_TK.dtype)) / floor,
            "kernel.1": reference.relative_error(named_TK, want_TK) / floor,
        }


class StepsAlone(Adapter):
    """An adapter that also runs single steps, by the kernels of `ALONE`; its own base comes behind this one."""

    KNOBS = frozenset({"knobs.gather"})
    ALONE: type[Alone | TopKAlone] = Alone

    def __init__(self, problem: Problem, point: Point) -> None:
        super().__init__(problem, point)
        self._alone = self.ALONE(self.problem, point) if point.op in KERNEL_OPS else None

    @classmethod
    def gather_refusal(cls, point: Point) -> str | None:
        """Why the point's `knobs.gather` is none of this package's ways."""
        gather, alone = point.knobs.gather, cls.ALONE
        ways = ("fused",)
        if point.op in GATHERING and point.op in alone.OPS:
            ways = (*(ways if point.op in alone.FUSED else ()), "separate", "given")
        if gather in ways:
            return None
        return f"knobs.gather is {gather!r}; op={point.op} of {point.impl} has: {', '.join(ways)}"

    def forward(self) -> torch.Tensor:
        return super().forward() if self._alone is None else self._alone.call()

    def check(self) -> dict[str, float]:
        return self._alone.check()

    @property
    def flops_model(self) -> int | None:
        """Model FLOPs of one step alone; of a layer the harness knows them."""
        return None if self._alone is None else self._alone.flops

    def bytes_model(self) -> int | None:
        return None if self._alone is None else self._alone.bytes


def weighted_sum(y_Rd: torch.Tensor, place_R: torch.Tensor, scores_TK: torch.Tensor) -> torch.Tensor:
    """O (T, d): rows in token order, weighted and summed, three kernels unless compiled."""
    T, K = scores_TK.shape
    y_TKd = y_Rd.index_select(0, place_R).view(T, K, y_Rd.shape[1])
    return (y_TKd * scores_TK[..., None].to(y_TKd.dtype)).sum(dim=1)


def down_and_sum(
    a_Rn: torch.Tensor, w2_Edn: torch.Tensor, ends_E: torch.Tensor, place_R: torch.Tensor, scores_TK: torch.Tensor
) -> torch.Tensor:
    """O (T, d) from A in expert order."""
    return weighted_sum(F.grouped_mm(a_Rn, w2_Edn.mT, offs=ends_E), place_R, scores_TK)
