"""Routers on the device: logits -> who goes where, without waiting for the device, differentiable.

`route` gives `TopK` where every token has K experts (topk, grouped, laser) and a `Plan` where their number may differ
(token rounding, token drop, expert choice); `sonic.experts_plan` takes either. `sonic.routers.choose` is the plain
definition of all of them. The bound that a plan is allocated for is known beforehand: it is the only thing that the
host knows of the number of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sonic import routers
from sonic.kernels import plan as _plan
from sonic.kernels import router_topk as _router_topk
from sonic.kernels import token_rounding as _rounding
from sonic.kernels.common import INTERPRET
from sonic.kernels.plan import Plan
from sonic.shapes import check_routing


@dataclass(frozen=True)
class TopK:
    """K experts for every token: ids_TK (T, K) int32, scores_TK (T, K) fp32 (fp64 for fp64), which may have a graph."""

    ids_TK: Tensor
    scores_TK: Tensor


class _Kernels:
    """The routing steps of one family under one name."""

    def __init__(self, suffix: str) -> None:
        for module, names in (
            (_router_topk, ("router_topk",)),
            (_rounding, ("rank", "score_sums", "targets", "select", "d_logits")),
            (_plan, ("plan_of_mask",)),
        ):
            for name in names:
                setattr(self, name, getattr(module, name + suffix))


_FAMILIES = {"triton": _Kernels(""), "torch": _Kernels("_torch")}
_FAMILIES["hopper"] = _FAMILIES["triton"]


def _family(family: str, logits: Tensor) -> _Kernels:
    if family == "auto":
        family = "triton" if (logits.is_cuda or INTERPRET) and logits.dtype != torch.float64 else "torch"
    if family not in _FAMILIES:
        raise ValueError(f"family is {family!r}; allowed: auto, {', '.join(_FAMILIES)}")
    return _FAMILIES[family]


class _Scores(torch.autograd.Function):
    """The scores of a plan as a function of the logits; who is kept is a constant."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, plan: Plan, ids: Tensor | None, kernels: _Kernels) -> Tensor:
        ctx.save_for_backward(logits, ids)
        # without the scores, which would hold on to this very node
        ctx.plan, ctx.kernels = replace(plan, scores_R=plan.scores_R.new_empty(0)), kernels
        return plan.scores_R.view_as(plan.scores_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ds: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids = ctx.saved_tensors
        return ctx.kernels.d_logits(logits, ids, ds.contiguous(), ctx.plan), None, None, None


def route(
    logits_TE: Tensor,
    K: int,
    method: str = "topk",
    *,
    score: str | None = None,
    tile: int | None = None,
    capacity: float | None = None,
    groups: int | None = None,
    draws_E: Tensor | None = None,
    bias_E: Tensor | None = None,
    family: str = "auto",
) -> TopK | Plan:
    """Route T tokens to E experts by their logits (T, E); see `sonic.routers.METHODS` and `SCORES`.

    tile is token rounding's (128 unless given); capacity the factor of token_drop and expert_choice; groups belongs to
    grouped. draws_E (E,) uniform in [0, 1) decides the stochastic rules; without it new ones are drawn on the device.
    bias_E (E,) is added to the scores for the choice alone (topk; `sonic.routers.BiasBalancer`). The torch family waits
    for the device. Raises ValueError for what cannot be.
    """
    T, E = logits_TE.shape
    if method not in routers.METHODS:
        raise ValueError(f"routing.method is {method!r}; allowed: {', '.join(routers.METHODS)}")
    check_routing(method, T, E, K, tile, capacity, groups, score)
    kernels = _family(family, logits_TE)
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    if method not in routers.RAGGED:
        with torch.no_grad():
            ids = _fixed_ids(kernels, logits_TE, K, method, score, groups, bias_E)
        if method == "grouped":
            scores = logits_TE.to(routers.score_dtype(logits_TE.dtype)).softmax(dim=1).gather(1, ids)
        else:
            scores = routers.chosen_scores(logits_TE, ids, score)
        return TopK(ids.int(), scores)
    with torch.no_grad():
        plan, ids = _ragged(kernels, logits_TE, K, method, tile, capacity, draws_E)
    if logits_TE.dtype == torch.float64:  # keys hold scores in fp32
        weights = routers.pair_weights(method, logits_TE, None if ids is None else ids.long())
        plan = plan.exact()
        token = torch.repeat_interleave(plan.token_offsets_T1.diff().long())
        return replace(plan, scores_R=weights[token, plan.ids_R.long()])
    if torch.is_grad_enabled() and logits_TE.requires_grad:
        plan = replace(plan, scores_R=_Scores.apply(logits_TE, plan, ids, kernels))
    return plan


def _fixed_ids(
    kernels: _Kernels, logits: Tensor, K: int, method: str, score: str | None, groups: int | None, bias: Tensor | None
) -> Tensor:
    if method == "laser":
        return routers.laser_ids(logits, K)
    if method == "grouped":
        T, E = logits.shape
        m = groups or 1
        inside = kernels.router_topk(logits.reshape(T * m, E // m), K // m)[1].view(T, m, K // m)
        return (inside + E // m * torch.arange(m, device=logits.device, dtype=torch.int32)[:, None]).flatten(1).long()
    if bias is not None:
        wide = logits.to(routers.score_dtype(logits.dtype))
        logits = (wide.sigmoid() if score == "sigmoid" else wide.softmax(dim=1)) + bias.to(wide.dtype)
    return kernels.router_topk(logits, K)[1].long()


def _ragged(
    kernels: _Kernels, logits: Tensor, K: int, method: str, tile: int | None, capacity: float | None,
    draws: Tensor | None,
) -> tuple[Plan, Tensor | None]:  # fmt: skip
    """The plan, and the ids (T, K) that the tokens chose themselves."""
    T, E = logits.shape
    scores = ids = None
    if method != "expert_choice":
        scores, ids = kernels.router_topk(logits, K)
    keys, counts = kernels.rank(logits, ids, scores)
    if method in routers.ROUNDING:
        rule, tile = method.removeprefix("tr_"), tile or routers.DEFAULT_TILE
        if draws is None and rule in ("stochastic_freq", "nearest_score"):
            draws = torch.rand(E, device=logits.device)
        sums = kernels.score_sums(keys, counts, tile) if rule == "nearest_score" else None
        targets = kernels.targets(counts, T, tile, rule, draws, sums)
        limit = _rounding.most_rows(T, E, K, tile, rule)
    else:
        rows = routers.capacity_of(method, T, E, K, capacity, tile)
        limit = E * rows
        if method == "token_drop":
            targets, limit = counts.clamp(max=rows), min(limit, T * K)
        else:
            targets = torch.full_like(counts, rows)
    kept = kernels.select(keys, targets)
    return kernels.plan_of_mask(kept.T, keys.T, limit), ids
