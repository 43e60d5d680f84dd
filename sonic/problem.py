"""The tensors that every implementation is given: seeded, on one device, with one routing for all.

x and dO are 0.2 * N(0, 1) and the expert weights N(0, 0.02^2), as in the paper's benchmark (section 5 of the notes on
it). The router's weights are scaled so that logits have unit variance, which spreads tokens over the experts and keeps
the scores of a token unequal.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import NamedTuple

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


#: Tile of token rounding on the twin of a shape at most: more than one tile per expert among so few tokens.
TWIN_TILE = 16


class Pairs(NamedTuple):
    """Chosen (token, expert) pairs in token order, experts rising within a token: what a package for any routing takes.

    token_R, ids_R int32, scores_R (R,) fp32 (fp64), and token_offsets_T1 int32, where each token's pairs begin.
    """

    token_R: torch.Tensor
    ids_R: torch.Tensor
    scores_R: torch.Tensor
    token_offsets_T1: torch.Tensor


class Problem:
    """Inputs, weights and routing of one point.

    x_Td do_Td (T, d); router_w_Ed (E, d); w1_E2nd (E, 2n, d), n gate rows first, then n up rows; w2_Edn (E, d, n), all
    in `dtype`. ids_TK (T, K) int32; scores_TK (T, K) fp32 (fp64 beside fp64). counts_E (E,) rows per expert; R their
    sum. With `learned` routing ids are the top K of `F.linear(x, router_w)` in `dtype` and scores the softmax over
    those logits; tokens are redrawn until no two correct routers can disagree. Other distributions draw ids and random
    scores, `replay` reads both from a file.

    Under another method the distribution gives logits (T, E), and `routers.choose` the pairs. Tokens may then have
    different numbers of experts: ids_TK and scores_TK are as wide as the longest list, experts rise within a token, and
    -1 and 0 stand where there is none; `pairs` lists them without gaps. own_TK (T, K) are the experts that the tokens
    chose themselves, None where experts choose; draws_E (E,) decides stochastic rounding. Raises ValueError for a dtype
    without a torch counterpart, an unknown distribution and a routing that cannot be.
    """

    own_TK: torch.Tensor | None = None
    draws_E: torch.Tensor | None = None
    _logits_TE: torch.Tensor | None = None

    def __init__(
        self,
        shape: Shape,
        routing: Routing,
        dtype: str | torch.dtype,
        device: torch.device | str,
        seed: int,
        recorded: tuple[torch.Tensor, torch.Tensor] | None = None,
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
        draws = torch.Generator(self.device).manual_seed(seed * 1_000_003 + routing.seed + 1)
        if routing.distribution == "learned":
            self._part_close_calls(generator)
            scores_TK, ids_TK = routers.plain_router(self.x_Td, self.router_w_Ed, K)
        elif routing.distribution == "replay":
            if recorded is None:
                recorded = routers.load(routing.file or "", T, E, K, self.device)
            ids_TK, scores_TK = recorded[0], recorded[1].to(routers.score_dtype(dtype))
        else:
            ids_TK = routers.draw(routing.distribution, T, E, K, draws, routing.alpha)
            noise = torch.randn(T, K, device=self.device, generator=draws, dtype=routers.score_dtype(dtype))
            scores_TK = noise.softmax(dim=-1)
        self._route(ids_TK, scores_TK)
        if not self.plain:
            self.draws_E = torch.rand(E, device=self.device, generator=draws)
            if routing.distribution != "learned":
                self._logits_TE = routers.logits_of(ids_TK, E, draws)
            kept_TE, weights_TE, self.own_TK = routers.choose(
                routing.method, self.logits_TE, K, score=routing.score, draws_E=self.draws_E, **self.options
            )
            self._keep(kept_TE, weights_TE)

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

    @property
    def plain(self) -> bool:
        """Whether tokens choose K experts each and weigh them by a softmax over the K."""
        return self.routing.method == "topk" and self.routing.score is None

    @property
    def options(self) -> dict[str, float | None]:
        """The method's own fields, as `routers.choose` and `routing.route` take them."""
        return {name: getattr(self.routing, name) for name in ("tile", "capacity", "groups")}

    @property
    def logits_TE(self) -> torch.Tensor:
        """What a router sees: x times its weights in the dtype of x, or fp32 logits that give a distribution's ids."""
        if self.routing.distribution == "learned":
            return F.linear(self.x_Td, self.router_w_Ed)
        if self._logits_TE is None:
            generator = torch.Generator(self.device).manual_seed(self.seed)
            self._logits_TE = routers.logits_of(self.ids_TK, self.shape.E, generator)
        return self._logits_TE

    def _route(self, ids_TK: torch.Tensor, scores_TK: torch.Tensor) -> None:
        self.ids_TK = ids_TK.to(torch.int32).contiguous()
        self.scores_TK = scores_TK.contiguous()
        chosen_R = self.ids_TK[self.ids_TK >= 0]
        self.counts_E = torch.bincount(chosen_R, minlength=self.shape.E)
        self.R = chosen_R.numel()

    def _keep(self, kept_TE: torch.Tensor, weights_TE: torch.Tensor) -> None:
        """Ids and scores of the pairs where kept_TE (T, E) is true."""
        token_R, expert_R = kept_TE.nonzero(as_tuple=True)
        count_T = kept_TE.sum(dim=1)
        width = max(1, int(count_T.max())) if count_T.numel() else 1
        place_R = torch.arange(token_R.numel(), device=token_R.device) - (count_T.cumsum(0) - count_T)[token_R]
        ids = torch.full((kept_TE.shape[0], width), -1, dtype=torch.int32, device=token_R.device)
        ids[token_R, place_R] = expert_R.int()
        scores = weights_TE.new_zeros(ids.shape)
        scores[token_R, place_R] = weights_TE[token_R, expert_R]
        self._route(ids, scores)

    def pairs(self) -> Pairs:
        """The routing without gaps."""
        there = self.ids_TK >= 0
        count_T = there.sum(dim=1)
        token_R = torch.repeat_interleave(count_T).int()
        offsets = torch.cat([count_T.new_zeros(1), count_T.cumsum(0)]).int()
        return Pairs(token_R, self.ids_TK[there], self.scores_TK[there], offsets)

    def kept(self) -> torch.Tensor:
        """Mask (T, E) of the chosen pairs."""
        mask = torch.zeros(self.shape.T, self.shape.E + 1, dtype=torch.bool, device=self.device)
        return mask.scatter(1, self.ids_TK.long() % (self.shape.E + 1), True)[:, :-1]

    def with_kept(self, kept_TE: torch.Tensor) -> Problem:
        """The same tensors with other pairs (T, E) bool: for a router that rounds differently in its last place."""
        other = copy.copy(self)
        other._keep(kept_TE, routers.pair_weights(self.routing.method, self.logits_TE, self.own_TK, self.routing.score))
        return other

    def router_scores(
        self, x_rd: torch.Tensor, router_w_Ed: torch.Tensor, tokens: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """Scores (r, K) that the router gives to the chosen experts of some tokens with inputs x_rd; differentiable."""
        logits_rE, ids_rK = F.linear(x_rd, router_w_Ed), self.ids_TK[tokens].long()
        if self.plain:
            chosen = logits_rE.gather(1, ids_rK)
            return chosen.to(routers.score_dtype(x_rd.dtype)).softmax(dim=-1)
        own_rK = None if self.own_TK is None else self.own_TK[tokens]
        weights_rE = routers.pair_weights(self.routing.method, logits_rE, own_rK, self.routing.score)
        return weights_rE.gather(1, ids_rK.clamp(min=0)).masked_fill(ids_rK < 0, 0.0)

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
        """The problem of `twin_shape`, with the point's routing, dtype and seed; tiles of `TWIN_TILE` rows at most, and
        of a recorded routing the first tokens."""
        sizes, routing = point.shape.sizes(), point.routing
        shape = twin_shape(sizes, routing.distribution, routing.groups or 1)
        recorded = None
        if routing.distribution == "replay":
            ids, scores = routers.load(routing.file or "", sizes.T, sizes.E, sizes.K, torch.device(device))
            recorded = ids[: shape.T], scores[: shape.T]
        if routing.tile is not None:
            routing = routing.model_copy(update={"tile": min(routing.tile, TWIN_TILE)})
        return Problem(shape, routing, point.dtype, device, point.seed, recorded)


def twin_shape(shape: Shape, distribution: str = "learned", groups: int = 1) -> Shape:
    """A shape small enough for fp64 on which a kernel takes the same paths: ragged last tiles, the same alignment.

    T at most 130, d at most 256, n at most 128, each still a multiple of the same power of two (up to 16); K stays, E
    is at most 16 or 2K, so that there is something to choose from, and a multiple of the groups; a recorded routing
    keeps all experts. Equal counts per expert stay equal (`balanced`).
    """

    def shrink(size: int, most: int) -> int:
        return size if size <= most else most - 16 + math.gcd(size, 16)

    E = min(shape.E, -(-max(16, 2 * shape.K) // groups) * groups)
    E = shape.E if distribution == "replay" else E
    T = min(shape.T, 130)
    if distribution == "balanced" and shape.R % shape.E == 0:
        step = E // math.gcd(E, shape.K)
        T = T // step * step if T >= step else min(shape.T, step)
    return replace(shape, T=T, d=shrink(shape.d, 256), n=shrink(shape.n, 128), E=E)
