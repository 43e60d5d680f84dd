"""Who meets whom, in plain torch: routers, distributions of expert ids that no router made, and recorded routings.

A router says which pairs of token and expert are kept and what they weigh: `choose` returns a mask (T, E) and weights
(T, E), differentiable where the mask is set. These are the definitions; `sonic.routing` runs the same on the device
without waiting for it. A distribution takes its randomness from a `torch.Generator`, returns ids (T, K) whose rows hold
K different experts, and gives the same ids for the same seed on one device type, however many ranks share the tokens.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F

from sonic.recorded import read_routing, write_routing
from sonic.shapes import DEFAULT_TILE, check_routing

ZIPF_ALPHA = 1.2
#: Standard deviation of the log odds of `lognormal`.
LOGNORMAL_SIGMA = 1.0
#: Zipf exponent within a burst, and tokens in a burst on average.
BURST_ALPHA, BURST_TOKENS = 2.0, 64
#: LASER: from this share of a token's scores on, its top K are clear; otherwise its best LASER_WIDEN K compete.
LASER_CLEAR, LASER_WIDEN = 0.6, 2
LASER_CHUNKS = 32


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores are fp32 beside every dtype but fp64, where fp32 scores would hide an error of 1e-10."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def plain_router(x_Td: torch.Tensor, router_w_Ed: torch.Tensor, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The router for packages without one: logits in x's dtype, top-K, softmax over the K in fp32.

    Returns scores (T, K), fp32 (fp64 for fp64 inputs) and differentiable, and ids (T, K), int64 as `torch.topk` makes
    them.
    """
    logits_TE = F.linear(x_Td, router_w_Ed)
    values_TK, ids_TK = logits_TE.topk(K, dim=-1)
    return values_TK.to(score_dtype(x_Td.dtype)).softmax(dim=-1), ids_TK


def close_calls(logits_TE: torch.Tensor, K: int) -> torch.Tensor:
    """Tokens (T,) bool whose K-th and (K+1)-th logit are so close that two correct routers may disagree.

    One unit in the last place counts as close in 16 bits, where only the final rounding differs between two matrix
    multiplications; fp32 and fp64 leave room for a different order of summation.
    """
    T, E = logits_TE.shape
    if K == E:
        return torch.zeros(T, dtype=torch.bool, device=logits_TE.device)
    top = logits_TE.topk(K + 1, dim=-1).values.to(torch.float64)
    last, next_ = top[:, K - 1], top[:, K]
    units = 1 if logits_TE.dtype in (torch.bfloat16, torch.float16) else 64
    return last - next_ <= units * torch.finfo(logits_TE.dtype).eps * last.abs()


def balanced(T: int, E: int, K: int, generator: torch.Generator) -> torch.Tensor:
    """Ids (T, K) whose expert counts differ by at most one: equal wherever T*K is a multiple of E.

    Tokens are taken in groups of E. In a group, token j goes to (j + o) mod E for K random different offsets o, so
    each expert is chosen exactly K times. What is left of the last group is dealt out in turn. Tokens and experts are
    shuffled.
    """
    device = generator.device
    groups, rest = divmod(T, E)
    offsets = torch.rand(groups, 1, E, device=device, generator=generator).argsort(dim=-1)[..., :K]
    full = (torch.arange(E, device=device).view(1, E, 1) + offsets) % E
    tail = torch.arange(rest * K, device=device).view(rest, K) % E
    ids_TK = torch.cat([full.reshape(groups * E, K), tail])
    tokens = torch.randperm(T, device=device, generator=generator)
    experts = torch.randperm(E, device=device, generator=generator)
    return experts[ids_TK[tokens]]


def uniform(T: int, E: int, K: int, generator: torch.Generator) -> torch.Tensor:
    """Ids (T, K): every token draws K different experts, all equally likely."""
    return torch.rand(T, E, device=generator.device, generator=generator).topk(K, dim=-1).indices


def _without_replacement(log_odds: torch.Tensor, K: int, generator: torch.Generator) -> torch.Tensor:
    """Ids (T, K) drawn by log odds (T, E): Gumbel noise, then the top K."""
    noise = torch.rand(log_odds.shape, device=generator.device, generator=generator)
    noise = noise.clamp_(1e-30).log_().neg_().clamp_(1e-30).log_().neg_()
    return noise.add_(log_odds).topk(K, dim=-1).indices


def zipf(T: int, E: int, K: int, generator: torch.Generator, alpha: float = ZIPF_ALPHA) -> torch.Tensor:
    """Ids (T, K): every token draws K different experts with odds 1/rank^alpha; which expert has which rank is
    random."""
    ranks = torch.randperm(E, device=generator.device, generator=generator) + 1
    return _without_replacement((-alpha * ranks.log()).expand(T, E), K, generator)


def hot(T: int, E: int, K: int, generator: torch.Generator) -> torch.Tensor:
    """Ids (T, K): one random expert gets every token (all of them when K = 1), the other K-1 choices are uniform."""
    device = generator.device
    favourite = torch.randint(E, (1,), device=device, generator=generator)
    odds = torch.rand(T, E, device=device, generator=generator)
    odds.index_fill_(1, favourite, 2.0)
    return odds.topk(K, dim=-1).indices


def lognormal(T: int, E: int, K: int, generator: torch.Generator, sigma: float = LOGNORMAL_SIGMA) -> torch.Tensor:
    """Ids (T, K): every token draws K different experts whose odds are log-normal with this sigma."""
    odds_E = sigma * torch.randn(E, device=generator.device, generator=generator)
    return _without_replacement(odds_E.expand(T, E), K, generator)


def bursts(T: int, E: int, K: int, generator: torch.Generator, alpha: float = BURST_ALPHA) -> torch.Tensor:
    """Ids (T, K): neighbouring tokens prefer the same experts, as those of one document do.

    A new burst begins at each token with odds 1/BURST_TOKENS; within it odds are 1/rank^alpha, ranks anew per burst.
    """
    device = generator.device
    begins = torch.rand(T, device=device, generator=generator) < 1 / BURST_TOKENS
    burst_T = begins.long().cumsum(0)
    ranks = torch.rand(T // BURST_TOKENS * 2 + 16, E, device=device, generator=generator).argsort(dim=-1) + 1
    return _without_replacement(-alpha * ranks[burst_T % ranks.shape[0]].log(), K, generator)


def draw(distribution: str, T: int, E: int, K: int, generator: torch.Generator, alpha: float | None) -> torch.Tensor:
    """Ids (T, K) of a named distribution other than `learned` and `replay`. ValueError names the allowed ones.

    alpha is the exponent of zipf and bursts and the sigma of lognormal; None is each one's own.
    """
    shaped = {"zipf": zipf, "lognormal": lognormal, "bursts": bursts}
    draws = {"balanced": balanced, "uniform": uniform, "hot": hot}
    if distribution in shaped:
        given = () if alpha is None else (alpha,)
        return shaped[distribution](T, E, K, generator, *given)
    if distribution not in draws:
        allowed = ", ".join(["learned", "replay", *shaped, *draws])
        raise ValueError(f"routing.distribution is {distribution!r}; allowed: {allowed}")
    return draws[distribution](T, E, K, generator)


def logits_of(ids_TK: torch.Tensor, E: int, generator: torch.Generator) -> torch.Tensor:
    """Logits (T, E) fp32 under which the given experts are each token's top K: normal draws, the K largest moved there.

    A router that looks at all scores (token rounding) then starts from the distribution's ids.
    """
    T, K = ids_TK.shape
    noise = torch.randn(T, E, device=generator.device, generator=generator)
    top = noise.topk(K, dim=-1).values
    shuffled = top.gather(1, torch.rand(T, K, device=generator.device, generator=generator).argsort(dim=1))
    rest = torch.minimum(noise, top[:, -1:] - 1e-3)
    return rest.scatter(1, ids_TK.long(), shuffled)


def save(path: Path | str, ids_TK: torch.Tensor, scores_TK: torch.Tensor, E: int) -> None:
    """Record a routing for `routing.distribution=replay`: an .npz file of ids (T, K), scores (T, K) and E."""
    write_routing(Path(path), ids_TK.detach().cpu().int().numpy(), scores_TK.detach().cpu().float().numpy(), E)


def load(path: Path | str, T: int, E: int, K: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (T, K) int32 and scores (T, K) fp32 of a recorded routing. ValueError names what does not fit."""
    ids, scores = read_routing(Path(path), T, E, K)
    return torch.from_numpy(ids).to(device), torch.from_numpy(scores).to(device)


# Routers

ROUNDING = ("tr_nearest_freq", "tr_stochastic_freq", "tr_nearest_score", "tr_balance", "tr_up", "tr_down")
#: Methods whose experts may differ in number from token to token.
RAGGED = (*ROUNDING, "token_drop", "expert_choice")
METHODS = ("topk", *RAGGED, "grouped", "laser")
SCORES = ("softmax_over_topk", "topk_over_softmax", "sigmoid")


def top_ids(logits_TE: torch.Tensor, K: int) -> torch.Tensor:
    """Ids (T, K) int64 of the K largest logits, largest first, ties by the lower index."""
    return torch.sort(logits_TE, dim=1, descending=True, stable=True).indices[:, :K]


def group_ids(logits_TE: torch.Tensor, K: int, groups: int) -> torch.Tensor:
    """Ids (T, K): the K/groups largest logits of each group of E/groups neighbouring experts (MoGE)."""
    T, E = logits_TE.shape
    inside = top_ids(logits_TE.reshape(T * groups, E // groups), K // groups).view(T, groups, K // groups)
    return (inside + E // groups * torch.arange(groups, device=inside.device)[:, None]).flatten(1)


def laser_ids(logits_TE: torch.Tensor, K: int) -> torch.Tensor:
    """Ids (T, K): the top K where they hold LASER_CLEAR of a token's scores, else the K least loaded of its best
    LASER_WIDEN K, rank breaking ties; in order of rank. Load is what the tokens of the earlier chunks, of LASER_CHUNKS,
    have brought: tokens of one chunk do not see each other."""
    T, E = logits_TE.shape
    best = top_ids(logits_TE, min(E, LASER_WIDEN * K))
    share_T = logits_TE.to(score_dtype(logits_TE.dtype)).softmax(dim=1).gather(1, best[:, :K]).sum(dim=1)
    load_E = torch.zeros(E, dtype=torch.int64, device=best.device)
    chosen = []
    for part, share in zip(best.chunk(LASER_CHUNKS), share_T.chunk(LASER_CHUNKS), strict=True):
        order = torch.sort(load_E[part], dim=1, stable=True).indices[:, :K].sort(dim=1).values
        chosen.append(torch.where(share[:, None] >= LASER_CLEAR, part[:, :K], part.gather(1, order)))
        load_E.index_add_(0, chosen[-1].flatten(), torch.ones_like(chosen[-1].flatten()))
    return torch.cat(chosen)


def capacity_of(method: str, T: int, E: int, K: int, capacity: float | None, tile: int | None) -> int:
    """Tokens per expert at most (`token_drop`) or exactly (`expert_choice`): capacity times T K / E, 1 by default.

    Dropping rounds it up; choosing rounds down, or to the nearest multiple of a tile, between one and all tokens.
    """
    share = (1.0 if capacity is None else capacity) * T * K / E
    if method == "token_drop":
        return min(T, math.ceil(share))
    if tile is None or tile > T:
        return min(T, max(1, math.floor(share)))
    return min(T // tile, max(1, round(share / tile))) * tile


def chosen_scores(logits_TE: torch.Tensor, ids_TK: torch.Tensor, score: str | None = None) -> torch.Tensor:
    """Scores (T, K) of the chosen experts by a rule of SCORES, the first by default; fp32 (fp64 for fp64) and
    differentiable."""
    wide = score_dtype(logits_TE.dtype)
    if score == "topk_over_softmax":
        of_all = logits_TE.to(wide).softmax(dim=1).gather(1, ids_TK)
        return of_all / of_all.sum(dim=1, keepdim=True)
    chosen = logits_TE.gather(1, ids_TK).to(wide)
    return chosen.sigmoid() if score == "sigmoid" else chosen.softmax(dim=1)


def pair_weights(
    method: str, logits_TE: torch.Tensor, ids_TK: torch.Tensor | None, score: str | None = None
) -> torch.Tensor:
    """Weights (T, E) in fp32 (fp64 for fp64), differentiable; ids_TK are the experts that the tokens chose themselves,
    None for `expert_choice`. Zero for pairs that a method without padding never keeps.

    A chosen pair weighs the softmax over the chosen ones (`score` says otherwise), a padded-in one, and every one of
    `expert_choice` and `grouped`, the softmax over all experts (paper 2.4).
    """
    wide = logits_TE.to(score_dtype(logits_TE.dtype))
    if method in ("expert_choice", "grouped"):
        return wide.softmax(dim=1)
    own = chosen_scores(logits_TE, ids_TK, score)
    under = wide.softmax(dim=1) if method in ROUNDING else torch.zeros_like(wide)
    return under.scatter(1, ids_TK, own)


def choose(
    method: str, logits_TE: torch.Tensor, K: int, *, score: str | None = None, tile: int | None = None,
    capacity: float | None = None, groups: int | None = None, draws_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Kept pairs (T, E) bool, weights (T, E) and the tokens' own ids (T, K), None for `expert_choice`.

    The plain definition of every router, loops over experts and all; draws_E (E,) uniform in [0, 1) for the stochastic
    rules. Waits for the device.
    """
    T, E = logits_TE.shape
    check_routing(method, T, E, K, tile, capacity, groups, score)
    if method == "expert_choice":
        ids = None
    elif method == "grouped":
        ids = group_ids(logits_TE, K, groups or 1)
    else:
        ids = laser_ids(logits_TE, K) if method == "laser" else top_ids(logits_TE, K)
    weights = pair_weights(method, logits_TE, ids, score)
    own = torch.zeros(T, E, dtype=torch.bool, device=logits_TE.device)
    if ids is not None:
        own.scatter_(1, ids, True)
    if method not in RAGGED:
        return own, weights, ids
    kept, left = torch.zeros_like(own), 0
    ranks = weights.detach().float().nan_to_num()
    for e in range(E):
        chosen, padding = own[:, e].nonzero().flatten(), (~own[:, e]).nonzero().flatten()
        order = torch.cat([i[ranks[i, e].sort(descending=True, stable=True).indices] for i in (chosen, padding)])
        if method in ROUNDING:
            target = rounded(method, len(chosen), T, tile or DEFAULT_TILE, ranks[order, e], draws_E, e, left)
            left += target - len(chosen)
        else:
            target = capacity_of(method, T, E, K, capacity, tile)
            target = min(target, len(chosen)) if method == "token_drop" else target
        kept[order[:target], e] = True
    return kept, weights, ids


def rounded(
    method: str, count: int, T: int, tile: int, scores: torch.Tensor, draws_E: torch.Tensor | None, e: int, left: int
) -> int:
    """An expert's tokens after rounding: `scores` of its tokens in order of rank, `left` the sum of the deviations of
    the experts before it (paper F.2)."""
    down = count // tile * tile
    up = down + tile
    if count == down or up > T:
        return down
    if method == "tr_nearest_freq":
        rise = up - count < count - down
    elif method == "tr_stochastic_freq":
        rise = float(draws_E[e]) * tile < count - down
    elif method == "tr_nearest_score":
        rise = float(draws_E[e] * scores[down:up].sum()) < float(scores[down:count].sum())
    elif method == "tr_balance":
        rise = abs(up - count + left) < abs(down - count + left)
    else:
        rise = method == "tr_up"
    return up if rise else down


def load_balancing_loss(logits_TE: torch.Tensor, counts_E: torch.Tensor, coefficient: float = 0.01) -> torch.Tensor:
    """coefficient * E * sum_e f_e P_e: f_e the share of all pairs that expert e got, a constant, P_e its mean softmax
    probability (Switch Transformer; the paper trains with 0.01). Smallest where both are uniform, then `coefficient`.
    """
    wide = logits_TE.to(score_dtype(logits_TE.dtype))
    share_E = counts_E.to(wide.dtype) / counts_E.sum().clamp(min=1).to(wide.dtype)
    return coefficient * logits_TE.shape[1] * (share_E * wide.softmax(dim=1).mean(dim=0)).sum()


class BiasBalancer:
    """Balances without a loss: a bias per expert that only moves the choice, raised where an expert got too little
    (arXiv 2408.15664, DeepSeek-V3)."""

    def __init__(self, E: int, rate: float = 1e-3, device: torch.device | str | None = None) -> None:
        self.bias_E, self.rate = torch.zeros(E, device=device), rate

    def update(self, counts_E: torch.Tensor) -> None:
        """One step after a batch: every bias moves by `rate` towards the mean load."""
        counts = counts_E.to(self.bias_E.dtype)
        self.bias_E += self.rate * torch.sign(counts.mean() - counts)
