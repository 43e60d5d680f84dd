"""Who meets whom: the plain router, and distributions of expert ids that no router made.

Every function takes its randomness from a `torch.Generator`, returns ids (T, K) whose rows hold K different experts,
and gives the same ids for the same seed on one device type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ZIPF_ALPHA = 1.2


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


def zipf(T: int, E: int, K: int, generator: torch.Generator, alpha: float = ZIPF_ALPHA) -> torch.Tensor:
    """Ids (T, K): every token draws K different experts with odds 1/rank^alpha; which expert has which rank is random.

    Drawn without replacement by adding Gumbel noise to the log odds and taking the top K.
    """
    device = generator.device
    ranks = torch.randperm(E, device=device, generator=generator) + 1
    noise = torch.rand(T, E, device=device, generator=generator).clamp_(1e-30).log_().neg_().clamp_(1e-30).log_().neg_()
    return noise.sub_(alpha * ranks.log()).topk(K, dim=-1).indices


def hot(T: int, E: int, K: int, generator: torch.Generator) -> torch.Tensor:
    """Ids (T, K): one random expert gets every token (all of them when K = 1), the other K-1 choices are uniform."""
    device = generator.device
    favourite = torch.randint(E, (1,), device=device, generator=generator)
    odds = torch.rand(T, E, device=device, generator=generator)
    odds.index_fill_(1, favourite, 2.0)
    return odds.topk(K, dim=-1).indices


def draw(distribution: str, T: int, E: int, K: int, generator: torch.Generator, alpha: float | None) -> torch.Tensor:
    """Ids (T, K) of a named distribution other than `learned`. ValueError names the allowed ones."""
    if distribution == "zipf":
        return zipf(T, E, K, generator, ZIPF_ALPHA if alpha is None else alpha)
    draws = {"balanced": balanced, "uniform": uniform, "hot": hot}
    if distribution not in draws:
        allowed = ", ".join(["learned", "zipf", *draws])
        raise ValueError(f"routing.distribution is {distribution!r}; allowed: {allowed}")
    return draws[distribution](T, E, K, generator)
