"""Routers that let an expert choose: token rounding (paper Algorithm 4), token drop and expert choice.

All of them rank the tokens of each expert and keep the first `targets_E[e]`. A ranking key is one integer per (expert,
token): the bits of a score in [0, 1], which sort as the score does, with a higher bit where the token chose the expert
itself, so that such a token always comes before one that is only padded in. Equal keys go to the lower token.

    rank         logits (T, E), ids and scores (T, K) of top-K -> keys (E, T) int32, counts_E of top-K
    targets      counts_E -> tokens that each expert keeps, multiples of the tile, by one of `RULES`
    score_sums   keys -> sums of scores that the rule `nearest_score` asks for
    select       keys, targets_E -> mask (E, T) int8 of the kept pairs, by a search for the last key that stays
    d_logits     dS of the kept pairs -> dlogits (T, E)

Scores (paper 2.4): of a pair that the token chose, softmax over the token's own top-K before anything was dropped; of a
padded-in pair, softmax over all experts. Which pairs are kept is a constant for the gradient.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from sonic.kernels.common import INTERPRET, cdiv, launch, narrow, next_power_of_2, widened
from sonic.kernels.plan import Plan

Rule = Literal["nearest_freq", "stochastic_freq", "nearest_score", "balance", "up", "down"]
RULES: tuple[Rule, ...] = get_args(Rule)

_CHOSEN = 1 << 30
_CHOSEN_BIT = tl.constexpr(_CHOSEN)
#: Tokens of an expert that one step of a search takes.
_BLOCK = 4096
#: Tokens whose keys of one expert the 1024 threads of a program can hold.
_IN_REGISTERS = 32768


@triton.jit
def _rank_kernel(
    logits_ptr, ids_ptr, scores_ptr, keys_ptr, counts_ptr, T, E, stride_t,
    K: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, E_PAD)
    mask = (t < T)[:, None] & (e < E)[None, :]
    at = logits_ptr + t.to(tl.int64)[:, None] * stride_t + e[None, :]
    x = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
    x = tl.where(mask, x, tl.where(e[None, :] == 0, 0.0, float("-inf")))  # a row past T is like any other
    p = tl.exp(x - tl.max(x, axis=1)[:, None])
    p = p / tl.sum(p, axis=1)[:, None]
    key = tl.where(p == p, p, 0.0).to(tl.int32, bitcast=True)  # a score that is not a number is the lowest
    if K > 0:
        for i in tl.range(K):
            index = tl.load(ids_ptr + t.to(tl.int64) * K + i, mask=t < T, other=-1)
            score = tl.load(scores_ptr + t.to(tl.int64) * K + i, mask=t < T, other=0.0)
            chosen = tl.where(score == score, score, 0.0).to(tl.int32, bitcast=True) | _CHOSEN_BIT
            key = tl.where(e[None, :] == index[:, None], chosen[:, None], key)
    tl.store(keys_ptr + e.to(tl.int64)[None, :] * T + t[:, None], key, mask=mask)
    if K > 0:
        count = tl.sum((mask & (key >= _CHOSEN_BIT)).to(tl.int32), axis=0)
        tl.atomic_add(counts_ptr + e, count, mask=(e < E) & (count > 0), sem="relaxed")


def rank(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor | None, scores_TK: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (E, T) int32 and counts_E int32 of the experts that tokens chose; without ids no token chose any.

    logits_TE (T, E) with contiguous rows; ids_TK (T, K) int32 and scores_TK (T, K) fp32 in [0, 1], contiguous.
    """
    T, E = logits_TE.shape
    keys = torch.empty(E, T, dtype=torch.int32, device=logits_TE.device)
    counts = torch.zeros(E, dtype=torch.int32, device=logits_TE.device)
    if T:
        e_pad = next_power_of_2(E)
        block = _block_t(e_pad)
        launch(
            _rank_kernel, (cdiv(T, block),),
            (
                logits_TE, ids_TK, scores_TK, keys, counts, T, E, logits_TE.stride(0),
                0 if ids_TK is None else ids_TK.shape[1], e_pad, block,
            ),
            num_warps=4 if e_pad <= 1024 else 8,
        )  # fmt: skip
    return keys, counts


def _block_t(e_pad: int) -> int:
    """Tokens per program: enough that their keys, which lie one behind the other, fill sectors of memory."""
    return 64 if INTERPRET else max(2, min(32, 8192 // e_pad))


def rank_torch(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor | None, scores_TK: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain-torch twin of `rank`."""
    p = logits_TE.float().softmax(dim=1)
    keys = p.nan_to_num().view(torch.int32)
    counts = torch.zeros(logits_TE.shape[1], dtype=torch.int32, device=logits_TE.device)
    if ids_TK is not None:
        chosen = scores_TK.float().nan_to_num().view(torch.int32) | _CHOSEN
        keys = keys.scatter(1, ids_TK.long(), chosen)
        counts = torch.bincount(ids_TK.flatten(), minlength=counts.numel()).int()
    return keys.T.contiguous(), counts


@triton.jit
def _last_key(keys, T, target, BLOCK: tl.constexpr):
    """The target-th largest of T keys, and how many keys equal to it are among the first `target`; target >= 1.

    Eight bits at a time: a histogram of the keys that agree in the bits found so far.
    """
    found = target * 0
    left = target
    bins = tl.arange(0, 256)
    for step in range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((256,), dtype=tl.int32)
        for first in range(0, T, BLOCK):
            t = first + tl.arange(0, BLOCK)
            key = tl.load(keys + t, mask=t < T, other=-1)
            # two shifts, since the first step's would be by all 32 bits
            alive = (t < T) & ((((key ^ found) >> (shift + 7)) >> 1) == 0)
            counts += tl.histogram((key >> shift) & 255, 256, mask=alive)
        total = tl.sum(counts, axis=0)
        at_least = total - tl.cumsum(counts, axis=0) + counts
        digit = tl.max(tl.where(at_least >= left, bins, 0), axis=0)
        left -= tl.sum(tl.where(bins > digit, counts, 0), axis=0)
        found = found | (digit << shift)
    return found, left


@triton.jit
def _last_of(keys, T, target, BLOCK: tl.constexpr):
    """`_last_key`, and for a target of 0 a key above all."""
    last = 0x7FFFFFFF
    left = 0
    if target > 0:
        last, left = _last_key(keys, T, target, BLOCK)
    return last, left


@triton.jit
def _kept_of(key, last, left):
    """Which keys are above `last`, or among the first `left` that equal it; and how many equal it."""
    same = (key == last).to(tl.int32)
    rank = tl.cumsum(same, axis=0) - same
    return (key > last) | ((same != 0) & (rank < left)), tl.sum(same, axis=0)


@triton.jit
def _select_kernel(keys_ptr, targets_ptr, kept_ptr, T, BLOCK: tl.constexpr):
    """All keys of an expert in registers; the last key that stays is found bit by bit, the highest first."""
    e = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + e * T + t, mask=t < T, other=-1)
    target = tl.minimum(tl.load(targets_ptr + e), T)
    last = target * 0
    for step in range(31):
        higher = last | (1 << (30 - step))
        last = tl.where(tl.sum((key >= higher).to(tl.int32), axis=0) >= target, higher, last)
    kept, _ = _kept_of(key, last, target - tl.sum((key > last).to(tl.int32), axis=0))
    tl.store(kept_ptr + e * T + t, kept.to(tl.int8), mask=t < T)


@triton.jit
def _select_long_kernel(keys_ptr, targets_ptr, kept_ptr, T, BLOCK: tl.constexpr):
    """As `_select_kernel`, for more keys than the registers hold."""
    e = tl.program_id(0).to(tl.int64)
    keys = keys_ptr + e * T
    target = tl.minimum(tl.load(targets_ptr + e), T)
    last, left = _last_of(keys, T, target, BLOCK)
    for first in range(0, T, BLOCK):
        t = first + tl.arange(0, BLOCK)
        kept, same = _kept_of(tl.load(keys + t, mask=t < T, other=-1), last, left)
        tl.store(kept_ptr + e * T + t, kept.to(tl.int8), mask=t < T)
        left -= same


def select(keys_ET: torch.Tensor, targets_E: torch.Tensor) -> torch.Tensor:
    """Mask (E, T) int8 of the `targets_E[e]` (int32) highest keys of every expert; all of them where it exceeds T."""
    E, T = keys_ET.shape
    kept = torch.empty(E, T, dtype=torch.int8, device=keys_ET.device)
    block = next_power_of_2(max(1, T))
    if T > _IN_REGISTERS:
        launch(_select_long_kernel, (E,), (keys_ET, targets_E, kept, T, _BLOCK), num_warps=8)
    elif T:
        launch(_select_kernel, (E,), (keys_ET, targets_E, kept, T, block), num_warps=max(4, min(32, block // 1024)))
    return kept


def select_torch(keys_ET: torch.Tensor, targets_E: torch.Tensor) -> torch.Tensor:
    """Plain-torch twin of `select`."""
    order = torch.sort(keys_ET, dim=1, descending=True, stable=True).indices
    first = torch.arange(keys_ET.shape[1], device=keys_ET.device)[None] < targets_E[:, None]
    return torch.zeros_like(keys_ET, dtype=torch.int8).scatter_(1, order, first.to(torch.int8))


@triton.jit
def _score_sum(keys, T, above, above_left, target, BLOCK: tl.constexpr):
    """Sum of the scores from behind the place that `above` and `above_left` name (see `_last_key`) to the target-th."""
    last, left = _last_of(keys, T, target, BLOCK)
    total = 0.0
    same = 0
    for first in range(0, T, BLOCK):
        t = first + tl.arange(0, BLOCK)
        key = tl.load(keys + t, mask=t < T, other=-1)
        score = (key & 0x3FFFFFFF).to(tl.float32, bitcast=True)
        total += tl.sum(tl.where((key > last) & (key < above), score, 0.0), axis=0)
        same += tl.sum((key == above).to(tl.int32), axis=0)
    # keys equal to the ends: those of `above` that are still to come, and those of `last` that are taken
    same = tl.where(last == above, left, same) - above_left
    total += (above & 0x3FFFFFFF).to(tl.float32, bitcast=True) * tl.where(target > 0, same, 0)
    return total + (last & 0x3FFFFFFF).to(tl.float32, bitcast=True) * tl.where(last == above, 0, left)


@triton.jit
def _score_sums_kernel(keys_ptr, counts_ptr, sums_ptr, T, E, tile, BLOCK: tl.constexpr):
    e = tl.program_id(0)
    keys = keys_ptr + e.to(tl.int64) * T
    count = tl.load(counts_ptr + e)
    down = count // tile * tile
    above, left = _last_of(keys, T, down, BLOCK)
    which = tl.program_id(1)
    target = tl.where(which == 0, count, tl.minimum(down + tile, T))
    tl.store(sums_ptr + which * E + e, _score_sum(keys, T, above, left, target, BLOCK))


def score_sums(keys_ET: torch.Tensor, counts_E: torch.Tensor, tile: int) -> torch.Tensor:
    """(2, E) fp32: what the scores of an expert's own tokens, and those of the tokens after rounding up, add to the sum
    after rounding down."""
    E, T = keys_ET.shape
    sums = torch.zeros(2, E, dtype=torch.float32, device=keys_ET.device)
    if T:
        block = min(_BLOCK, next_power_of_2(T))
        launch(_score_sums_kernel, (E, 2), (keys_ET, counts_E, sums, T, E, tile, block), num_warps=8)
    return sums


def score_sums_torch(keys_ET: torch.Tensor, counts_E: torch.Tensor, tile: int) -> torch.Tensor:
    """Plain-torch twin of `score_sums`."""
    down = counts_E // tile * tile
    order = torch.sort(keys_ET, dim=1, descending=True, stable=True).values
    scores = (order & (_CHOSEN - 1)).view(torch.float32)
    place = torch.arange(keys_ET.shape[1], device=keys_ET.device)[None]
    upto = lambda n: torch.where((place >= down[:, None]) & (place < n[:, None]), scores, 0.0).sum(1)  # noqa: E731
    return torch.stack([upto(counts_E), upto(down + tile)])


@triton.jit
def _targets_kernel(counts_ptr, draws_ptr, sums_ptr, targets_ptr, T, E, tile, RULE: tl.constexpr, E_PAD: tl.constexpr):
    if RULE == "balance":
        residual = 0
        for i in range(E):
            count = tl.load(counts_ptr + i)
            down = count // tile * tile
            up = tl.where((count > down) & (down + tile <= T), down + tile, down)
            over, under = up - count + residual, down - count + residual
            target = tl.where(tl.abs(over) < tl.abs(under), up, down)
            residual += target - count
            tl.store(targets_ptr + i, target)
    else:
        e = tl.arange(0, E_PAD)
        count = tl.load(counts_ptr + e, mask=e < E, other=0)
        down = count // tile * tile
        rest = count - down
        if RULE == "nearest_freq":
            up = tile - rest < rest
        elif RULE == "stochastic_freq":
            up = tl.load(draws_ptr + e, mask=e < E, other=1.0) * tile < rest
        elif RULE == "nearest_score":
            own = tl.load(sums_ptr + e, mask=e < E, other=0.0)
            up = tl.load(draws_ptr + e, mask=e < E, other=1.0) * tl.load(sums_ptr + E + e, mask=e < E, other=0.0) < own
        else:
            up = rest * 0 + (1 if RULE == "up" else 0) != 0
        up = up & (rest > 0) & (down + tile <= T)
        tl.store(targets_ptr + e, tl.where(up, down + tile, down), mask=e < E)


def targets(
    counts_E: torch.Tensor, T: int, tile: int, rule: Rule, draws_E: torch.Tensor | None, sums_2E: torch.Tensor | None
) -> torch.Tensor:
    """Tokens (E,) int32 that each expert keeps: its count rounded to a multiple of the tile, up only if at most T.

    draws_E (E,) fp32 uniform in [0, 1) for the rules `stochastic_freq` and `nearest_score`; sums_2E of `score_sums` for
    the latter.
    """
    E = counts_E.numel()
    out = torch.empty_like(counts_E)
    launch(_targets_kernel, (1,), (counts_E, draws_E, sums_2E, out, T, E, tile, rule, next_power_of_2(E)))
    return out


def targets_torch(
    counts_E: torch.Tensor, T: int, tile: int, rule: Rule, draws_E: torch.Tensor | None, sums_2E: torch.Tensor | None
) -> torch.Tensor:
    """Plain-torch twin of `targets`; the rule `balance` counts on the host."""
    down = counts_E // tile * tile
    rest = counts_E - down
    can = (rest > 0) & (down + tile <= T)
    if rule == "balance":
        residual, chosen = 0, []
        for count, low, may in zip(counts_E.tolist(), down.tolist(), can.tolist(), strict=True):
            high = low + tile if may else low
            chosen.append(high if abs(high - count + residual) < abs(low - count + residual) else low)
            residual += chosen[-1] - count
        return torch.tensor(chosen, dtype=torch.int32, device=counts_E.device)
    if rule == "nearest_freq":
        up = tile - rest < rest
    elif rule == "stochastic_freq":
        up = draws_E * tile < rest
    elif rule == "nearest_score":
        up = draws_E * sums_2E[1] < sums_2E[0]
    else:
        up = torch.full_like(can, rule == "up")
    return torch.where(up & can, down + tile, down).int()


def most_rows(T: int, E: int, K: int, tile: int, rule: Rule) -> int:
    """A bound on the pairs that a rule keeps: what the host can know."""
    more = {"down": 0, "balance": tile // 2, "nearest_freq": E * ((tile - 1) // 2)}.get(rule, E * (tile - 1))
    return min(T * K + more, T * E)


@triton.jit
def _d_logits_kernel(
    logits_ptr, ids_ptr, ds_ptr, slot_ids_ptr, tokens_ptr, out_ptr, T, E, stride_t,
    K: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, E_PAD)
    mask = (t < T)[:, None] & (e < E)[None, :]
    at = logits_ptr + t.to(tl.int64)[:, None] * stride_t + e[None, :]
    x = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
    x = tl.where(mask, x, tl.where(e[None, :] == 0, 0.0, float("-inf")))
    p = tl.exp(x - tl.max(x, axis=1)[:, None])
    chosen = tl.zeros((BLOCK_T, E_PAD), tl.int32)
    if K > 0:
        for i in tl.range(K):
            index = tl.load(ids_ptr + t.to(tl.int64) * K + i, mask=t < T, other=-1)
            chosen += (e[None, :] == index[:, None]).to(tl.int32)
    first = tl.load(tokens_ptr + t, mask=t < T, other=0)
    end = tl.load(tokens_ptr + t + 1, mask=t < T, other=0)
    grad = tl.zeros((BLOCK_T, E_PAD), tl.float32)
    for i in range(0, tl.max(end - first, axis=0)):
        slot = first + i
        index = tl.load(slot_ids_ptr + slot, mask=slot < end, other=-1)
        ds = tl.load(ds_ptr + slot, mask=slot < end, other=0.0)
        grad = tl.where(e[None, :] == index[:, None], ds[:, None], grad)
    padded = tl.where(chosen == 0, grad, 0.0)
    p_all = p / tl.sum(p, axis=1)[:, None]
    out = p_all * (padded - tl.sum(p_all * padded, axis=1)[:, None])
    if K > 0:
        own = tl.where(chosen != 0, grad, 0.0)
        s = tl.where(chosen != 0, p, 0.0)
        s = s / tl.maximum(tl.sum(s, axis=1), 1e-37)[:, None]
        out += s * (own - tl.sum(s * own, axis=1)[:, None])
    to = out_ptr + t.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(to, narrow(out, out_ptr.dtype.element_ty), mask=mask)


def d_logits(logits_TE: torch.Tensor, ids_TK: torch.Tensor | None, ds_R: torch.Tensor, plan: Plan) -> torch.Tensor:
    """dlogits (T, E) in the dtype of the logits, from ds_R fp32 in slot order and the top-K ids (or None)."""
    T, E = logits_TE.shape
    out = torch.empty(T, E, dtype=logits_TE.dtype, device=logits_TE.device)
    if T:
        e_pad = next_power_of_2(E)
        block = 64 if INTERPRET else max(1, min(16, 2048 // e_pad))
        launch(
            _d_logits_kernel, (cdiv(T, block),),
            (
                logits_TE, ids_TK, ds_R, plan.ids_R, plan.token_offsets_T1, out, T, E, logits_TE.stride(0),
                0 if ids_TK is None else ids_TK.shape[1], e_pad, block,
            ),
        )  # fmt: skip
    return out


def d_logits_torch(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor | None, ds_R: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """Plain-torch twin of `d_logits`. Waits for the device."""
    plan, ds_R = plan.exact(), ds_R[: int(plan.rows)]
    x = logits_TE.to(widened(logits_TE.dtype))
    token = torch.repeat_interleave(plan.token_offsets_T1.diff().long())
    grad = torch.zeros_like(x).index_put_((token, plan.ids_R.long()), ds_R.to(x.dtype))
    chosen = torch.zeros_like(x, dtype=torch.bool)
    if ids_TK is not None:
        chosen.scatter_(1, ids_TK.long(), True)
    out = torch.zeros_like(x)
    for s, part in (
        (x.softmax(1), ~chosen),
        (x.masked_fill(~chosen, -torch.inf).softmax(1).nan_to_num(), chosen),
    ):
        g = grad.where(part, 0.0)
        out += s * (g - (s * g).sum(1, keepdim=True))
    return out.to(logits_TE.dtype)
