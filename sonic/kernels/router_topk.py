"""Router top-K: scores = softmax(top-K(logits)) with the K largest logits of each token (paper section 4.3).

Reads logits (T, E). Writes ids (T, K) int32, by falling logit, and scores (T, K) fp32. Backward: dlogits (T, E) from
the partial sums of dS.

Ties go to the lower index: a logit and its index are packed into one sortable integer, so all keys differ and the order
is that of a stable sort. NaN sorts above +inf (as in torch.topk). One pass over the logits; the softmax is fused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sonic.kernels.common import INTERPRET, Cost, cdiv, launch_sized, narrow, next_power_of_2
from sonic.shapes import Shape


@triton.jit
def _topk_kernel(
    logits_ptr, scores_ptr, ids_ptr, T, E, stride_t,
    K: tl.constexpr, K_PAD: tl.constexpr, E_PAD: tl.constexpr, WIDE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, E_PAD)
    inside = (t < T)[:, None] & (e < E)[None, :]
    at = logits_ptr + t.to(tl.int64)[:, None] * stride_t + e[None, :]
    raw = tl.load(at, mask=inside, other=float("-inf"))
    x = raw.to(tl.float32)
    if WIDE:
        bits = x.to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that sort as the floats do
        order = tl.where(x != x, 0x7FFFFFFF, order)  # one NaN, above +inf
        key_type: tl.constexpr = tl.int64
        lowest: tl.constexpr = -(1 << 62)
    else:
        # 16 bits leave room for the index in a key of 32, whose maximum costs a third
        bits = raw.to(tl.int16, bitcast=True).to(tl.int32)
        order = tl.where(x != x, 0x7FFF, bits ^ ((bits >> 15) & 0x7FFF))
        key_type: tl.constexpr = tl.int32
        lowest: tl.constexpr = -(1 << 31)
    order = tl.where(x == 0.0, 0, order)  # one zero: the two differ in their bits, and would not tie
    key = (order.to(key_type) << 16) | (0xFFFF - e)[None, :]
    # columns past E lose to every real one, -inf among them
    key = tl.where((e < E)[None, :], key, lowest)
    k = tl.arange(0, K_PAD)
    chosen = tl.full((BLOCK_T, K_PAD), lowest, key_type)
    for i in tl.range(K):
        best = tl.max(key, axis=1)[:, None]
        chosen = tl.where((k == i)[None, :], best, chosen)
        key = tl.where(key == best, lowest, key)
    order = (chosen >> 16).to(tl.int32)
    if WIDE:
        values = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        bits = (order ^ ((order >> 15) & 0x7FFF)).to(tl.int16)
        values = bits.to(logits_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    real = (k < K)[None, :]
    largest = tl.sum(tl.where((k == 0)[None, :], values, 0.0), axis=1)
    p = tl.where(real, tl.exp(values - largest[:, None]), 0.0)
    p = p / tl.sum(p, axis=1)[:, None]
    out = t.to(tl.int64)[:, None] * K + k[None, :]
    mask = (t < T)[:, None] & real
    tl.store(scores_ptr + out, p, mask=mask)
    tl.store(ids_ptr + out, 0xFFFF - (chosen & 0xFFFF).to(tl.int32), mask=mask)


@triton.jit
def _topk_backward_kernel(
    partial_ptr, row_idx_ptr, scores_ptr, ids_ptr, dlogits_ptr, T, E, R, parts,
    K: tl.constexpr, K_PAD: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, E_PAD)
    k = tl.arange(0, K_PAD)
    at = t.to(tl.int64)[:, None] * K + k[None, :]
    mask = (t < T)[:, None] & (k < K)[None, :]
    part = partial_ptr + tl.load(row_idx_ptr + at, mask=mask, other=0)
    dscores = tl.zeros((BLOCK_T, K_PAD), tl.float32)
    for _ in tl.range(parts):
        dscores += tl.load(part, mask=mask, other=0.0)
        part += R
    scores = tl.load(scores_ptr + at, mask=mask, other=0.0)
    ids = tl.load(ids_ptr + at, mask=mask, other=-1)
    dvalues = scores * (dscores - tl.sum(dscores * scores, axis=1)[:, None])
    row = tl.zeros((BLOCK_T, E_PAD), tl.float32)
    for i in tl.range(K):
        chosen = (k == i)[None, :]
        index = tl.sum(tl.where(chosen, ids, 0), axis=1)
        value = tl.sum(tl.where(chosen, dvalues, 0.0), axis=1)
        row = tl.where(e[None, :] == index[:, None], value[:, None], row)
    out = dlogits_ptr + t.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(out, narrow(row, dlogits_ptr.dtype.element_ty), mask=(t < T)[:, None] & (e < E)[None, :])


def _block_t(e_pad: int) -> int:
    return 64 if INTERPRET else max(1, min(32, 4096 // e_pad))


def router_topk(logits_TE: torch.Tensor, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest logits of each token and their softmax.

    logits_TE (T, E) bf16, fp16 or fp32 with contiguous rows, E at most 4096, K at most 64.
    Returns scores_TK (T, K) fp32 and ids_TK (T, K) int32, largest first, ties by the lower index.
    """
    T, E = logits_TE.shape
    scores = torch.empty(T, K, dtype=torch.float32, device=logits_TE.device)
    ids = torch.empty(T, K, dtype=torch.int32, device=logits_TE.device)
    if T:
        e_pad = next_power_of_2(E)
        block = _block_t(e_pad)
        launch_sized(
            _topk_kernel,
            (logits_TE.dtype, T, E, logits_TE.stride(0), K),
            (logits_TE, scores, ids),
            lambda: (
                (cdiv(T, block),),
                (
                    logits_TE, scores, ids, T, E, logits_TE.stride(0),
                    K, next_power_of_2(K), e_pad, logits_TE.element_size() == 4, block,
                ),
                {},
            ),
        )  # fmt: skip
    return scores, ids


def router_topk_torch(logits_TE: torch.Tensor, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain-torch twin of `router_topk`; scores stay in fp64 for fp64 logits."""
    order = torch.sort(logits_TE, dim=1, descending=True, stable=True)
    values = order.values[:, :K]
    values = values if values.dtype == torch.float64 else values.float()
    return torch.softmax(values, dim=1), order.indices[:, :K].int()


def router_topk_backward(
    partials: torch.Tensor,
    row_idx_R: torch.Tensor,
    scores_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    E: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """dlogits (T, E) in dtype, zero where an expert was not chosen.

    partials (tiles, R) fp32 of dS in row order, as `d_act` leaves them, added tile by tile; row_idx_R slot -> row.
    """
    T, K = ids_TK.shape
    dlogits = torch.empty(T, E, dtype=dtype, device=ids_TK.device)
    if T:
        e_pad = next_power_of_2(E)
        block = _block_t(e_pad)
        parts, R = partials.shape
        launch_sized(
            _topk_backward_kernel,
            (dtype, T, E, K, R, parts),
            (partials, row_idx_R, scores_TK, ids_TK, dlogits),
            lambda: (
                (cdiv(T, block),),
                (
                    partials, row_idx_R, scores_TK, ids_TK, dlogits, T, E, R, parts,
                    K, next_power_of_2(K), e_pad, block,
                ),
                {},
            ),
        )  # fmt: skip
    return dlogits


def router_topk_backward_torch(
    partials: torch.Tensor,
    row_idx_R: torch.Tensor,
    scores_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    E: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Plain-torch twin of `router_topk_backward`."""
    dscores = partials.sum(0)[row_idx_R.long()].view_as(scores_TK)
    d = scores_TK * (dscores - (dscores * scores_TK).sum(1, keepdim=True))
    out = torch.zeros(ids_TK.shape[0], E, dtype=d.dtype, device=d.device)
    return out.scatter_(1, ids_TK.long(), d).to(dtype)


def router_topk_cost(shape: Shape, R: int, itemsize: int) -> Cost:
    """Logits read once, ids and scores written."""
    del R
    pairs = shape.T * shape.K
    return Cost(0, {"logits": itemsize * shape.T * shape.E, "scores": 4 * pairs, "ids": 4 * pairs}, {})
