"""The tensors that every implementation is given: seeded, on one device, with one routing for all.

x and dO are 0.2 * N(0, 1) and the expert weights N(0, 0.02^2), as in the paper's benchmark (section 5 of the notes on
it). The router's weights are scaled so that logits have unit variance, which spreads tokens over the experts and keeps
the scores of a token unequal.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from sonic import routers
from sonic.record import Point, Routing
from sonic.shapes import Shape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

INPUT_STD = 0.2
WEIGHT_STD = 0.02
#: Redraws of tokens whose routing is a close call; even E=4096, K=64 in bf16 needs a few hundred.
MAX_REDRAWS = 5000


class Problem:
    """Inputs, weights and routing of one point.

    x_Td do_Td (T, d); router_w_Ed (E, d); w1_E2nd (E, 2n, d), n gate rows first, then n up rows; w2_Edn (E, d, n), all
    in `dtype`. ids_TK (T, K) int32; scores_TK (T, K) fp32 (fp64 beside fp64). counts_E (E,) rows per expert; R their
    sum. With `learned` routing ids are the top K of `F.linear(x, router_w)` in `dtype` and scores the softmax over
    those logits; tokens are redrawn until no two correct routers can disagree. Other distributions draw ids and random
    scores. Raises ValueError for a dtype without a torch counterpart and for an unknown distribution.
    """

    def __init__(
        self, shape: Shape, routing: Routing, dtype: str | torch.dtype, device: torch.device | str, seed: int
    ) -> None:
        if isinstance(dtype, str):
            if dtype not in DTYPES:
                raise ValueError(f"dtype is {dtype!r}; tensors can be made in: {', '.join(DTYPES)}")
            dtype = DTYPES[dtype]
        T, d, n, E, K = shape.T, shape.d, shape.n, shape.E, shape.K
        self.shape, self.routing, self.dtype, self.device, self.seed = shape, routing, dtype, torch.device(device), seed
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(*sizes: int, std: float) -> torch.Tensor:
            return torch.empty(*sizes, dtype=dtype, device=self.device).normal_(0.0, std, generator=generator)

        self.x_Td = normal(T, d, std=INPUT_STD)
        self.do_Td = normal(T, d, std=INPUT_STD)
        self.router_w_Ed = normal(E, d, std=1 / (INPUT_STD * math.sqrt(d)))
        self.w1_E2nd = normal(E, 2 * n, d, std=WEIGHT_STD)
        self.w2_Edn = normal(E, d, n, std=WEIGHT_STD)
        if routing.distribution == "learned":
            self._part_close_calls(generator)
            scores_TK, ids_TK = routers.plain_router(self.x_Td, self.router_w_Ed, K)
        else:
            draws = torch.Generator(self.device).manual_seed(seed * 1_000_003 + routing.seed + 1)
            ids_TK = routers.draw(routing.distribution, T, E, K, draws, routing.alpha)
            noise = torch.randn(T, K, device=self.device, generator=draws, dtype=routers.score_dtype(dtype))
            scores_TK = noise.softmax(dim=-1)
        self._route(ids_TK, scores_TK)

    def _part_close_calls(self, generator: torch.Generator) -> None:
        """Redraws tokens of x until none has a K-th and a (K+1)-th logit that are a close call.

        Only the redrawn tokens are looked at again, then all of them once more: a matrix multiplication of fewer rows
        may sum in another order than the one that the implementations will run.
        """
        redraws = 0
        while True:
            left = routers.close_calls(F.linear(self.x_Td, self.router_w_Ed), self.shape.K).nonzero().flatten()
            if left.numel() == 0:
                return
            while left.numel() > 0:
                if redraws == MAX_REDRAWS:
                    raise ValueError(
                        f"{left.numel()} of {self.shape.T} tokens still have tied logits after {redraws} redraws "
                        f"(shape.E={self.shape.E}, shape.K={self.shape.K}, {self.dtype})"
                    )
                redraws += 1
                fresh = torch.empty(left.numel(), self.shape.d, dtype=self.dtype, device=self.device)
                fresh.normal_(0.0, INPUT_STD, generator=generator)
                self.x_Td[left] = fresh
                left = left[routers.close_calls(F.linear(fresh, self.router_w_Ed), self.shape.K)]

    def _route(self, ids_TK: torch.Tensor, scores_TK: torch.Tensor) -> None:
        self.ids_TK = ids_TK.to(torch.int32).contiguous()
        self.scores_TK = scores_TK.contiguous()
        self.counts_E = torch.bincount(self.ids_TK.flatten(), minlength=self.shape.E)
        self.R = self.ids_TK.numel()

    def with_routing(self, ids_TK: torch.Tensor) -> Problem:
        """The same tensors and scores under other expert ids (T, K): for a bound with a routing of its own."""
        other = copy.copy(self)
        other._route(ids_TK, self.scores_TK)
        return other

    def fingerprint(self) -> dict[str, int]:
        """One number per tensor, from its bits: two fingerprints tell which inputs an implementation wrote to."""
        names = ("x_Td", "do_Td", "router_w_Ed", "w1_E2nd", "w2_Edn", "ids_TK", "scores_TK")
        ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = []
        for name in names:
            tensor = getattr(self, name)
            sums.append(tensor.view(ints[tensor.element_size()]).sum(dtype=torch.int64))
        return dict(zip(names, torch.stack(sums).tolist(), strict=True))

    @staticmethod
    def twin(point: Point, device: torch.device | str) -> Problem:
        """The problem of `twin_shape`, with the point's routing, dtype and seed."""
        shape = twin_shape(point.shape.sizes(), point.routing.distribution)
        return Problem(shape, point.routing, point.dtype, device, point.seed)


def twin_shape(shape: Shape, distribution: str = "learned") -> Shape:
    """A shape small enough for fp64 on which a kernel takes the same paths: ragged last tiles, the same alignment.

    T at most 130, d at most 256, n at most 128, each still a multiple of the same power of two (up to 16); K stays, E
    is at most 16 or 2K, so that there is something to choose from. Equal counts per expert stay equal (`balanced`).
    """

    def shrink(size: int, most: int) -> int:
        return size if size <= most else most - 16 + math.gcd(size, 16)

    E = min(shape.E, max(16, 2 * shape.K))
    T = min(shape.T, 130)
    if distribution == "balanced" and shape.R % shape.E == 0:
        step = E // math.gcd(E, shape.K)
        T = T // step * step if T >= step else min(shape.T, step)
    return replace(shape, T=T, d=shrink(shape.d, 256), n=shrink(shape.n, 128), E=E)
