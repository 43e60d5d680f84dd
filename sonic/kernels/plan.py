"""A routing plan in which tokens have any number of experts, made on the device from a mask, and what sums over it.

A plan lists the chosen (token, expert) pairs twice. *Slots* are in token order, experts rising within a token:

    token_offsets_T1   where each token's slots begin, with the total last
    ids_R scores_R     expert and score of a slot
    row_idx_R          slot -> row

*Rows* are in expert order, tokens rising within an expert, and lie as the grouped GEMMs want them: `Metadata`. How many
pairs there are is known to the device only: the index vectors have `limit` entries, a bound that the host knows, and
the entries behind the pairs name themselves (row_idx[i] = slot_idx[i] = i, token 0, score 0), so that whatever visits
them stays in bounds. Offsets and tile maps end at the pairs. Three launches, no atomics on data, no host sync.

Example: mask [[1, 0, 1], [0, 0, 0], [1, 0, 0]], limit 4 -> token_offsets [0, 2, 2, 3], ids [0, 2, 0, 0], offsets [0, 2,
2, 3], gather_idx [0, 2, 0, 0], slot_idx [0, 2, 1, 3], row_idx [0, 2, 1, 3].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from sonic.kernels.common import INTERPRET, cdiv, launch, narrow, next_power_of_2, widened
from sonic.kernels.metadata import Metadata, metadata, metadata_torch, offsets_of_counts, prefix_of_blocks

#: Score bits of a ranking key (`token_rounding`): the bit above says that the token chose the expert itself.
SCORE_BITS = 0x3FFFFFFF

#: Tokens per program when the mask is counted and scattered, and experts that one step of it takes: bits of an int32.
_BLOCK_T, _BLOCK_E = 32, 32
_PREFIX_ROWS, _PREFIX_COLS = 512, 8
_TOKENS = 4096
_TAIL = 1024


@dataclass(frozen=True)
class Plan:
    """Who goes where, with a number of experts per token that may differ; see the module.

    meta has T and the index vectors of the rows; scores_R is fp32 (fp64 in the torch family) and may have a graph.
    """

    meta: Metadata
    token_offsets_T1: torch.Tensor
    ids_R: torch.Tensor
    scores_R: torch.Tensor

    @property
    def limit(self) -> int:
        """Entries of the index vectors: at least the number of pairs."""
        return self.meta.R

    @property
    def rows(self) -> torch.Tensor:
        """How many pairs there are, on the device, (1,) int32."""
        return self.meta.offsets_E1[-1:]

    @property
    def counts_E(self) -> torch.Tensor:
        return self.meta.counts_E

    def exact(self) -> Plan:
        """The plan cut to its pairs. Waits for the device; for the plain-torch twins, which count on the host."""
        R = int(self.rows)
        if R == self.limit:
            return self
        m = self.meta
        meta = Metadata(m.offsets_E1, m.slot_idx_R[:R], m.gather_idx_R[:R], m.row_idx_R[:R], m.T)
        return Plan(meta, self.token_offsets_T1, self.ids_R[:R], self.scores_R[:R])


@triton.jit
def _count_kernel(
    kept_ptr, partial_ptr, tokens_ptr, finished_ptr, T, E, stride_t, stride_e,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Pairs of every expert in a block of tokens, and of every token."""
    block = tl.program_id(0)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    at = kept_ptr + t.to(tl.int64)[:, None] * stride_t
    per_token = tl.zeros((BLOCK_T,), dtype=tl.int32)
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        mask = (t < T)[:, None] & (e < E)[None, :]
        kept = tl.load(at + e.to(tl.int64)[None, :] * stride_e, mask=mask, other=0).to(tl.int32)
        tl.store(partial_ptr + block.to(tl.int64) * E + e, tl.sum(kept, axis=0), mask=e < E)
        per_token += tl.sum(kept, axis=1)
    tl.store(tokens_ptr + t, per_token, mask=t < T)
    if block == 0:
        tl.store(finished_ptr, 0)


@triton.jit
def _prefix_kernel(
    partial_ptr, counts_ptr, finished_ptr, offsets_ptr, tokens_ptr, T, blocks, E, columns,
    ROWS: tl.constexpr, COLS: tl.constexpr, E_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Exclusive prefixes in place: over blocks for COLS experts, and over tokens in the program behind those; of the
    former the one that ends last turns counts into offsets."""
    pid = tl.program_id(0)
    if pid == columns:
        before = 0
        for first in range(0, T, TOKENS):
            t = first + tl.arange(0, TOKENS)
            n = tl.load(tokens_ptr + t, mask=t < T, other=0)
            tl.store(tokens_ptr + t, before + tl.cumsum(n, axis=0) - n, mask=t < T)
            before += tl.sum(n, axis=0)
        tl.store(tokens_ptr + T, before)
    else:
        prefix_of_blocks(partial_ptr, counts_ptr, pid, blocks, E, ROWS, COLS)
        tl.debug_barrier()  # every thread's counts, before one thread says so
        if tl.atomic_add(finished_ptr, 1) == columns - 1:
            ends = offsets_of_counts(counts_ptr, offsets_ptr, E, E_PAD)
            tl.store(offsets_ptr + E, tl.max(ends, axis=0))


@triton.jit
def _place_of_bit(bit):
    """The place of the one bit that is set in an int32, by the exponent that it gives a float; 0 for none."""
    exponent = (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255
    return tl.where(bit == 0, 0, exponent - 127)


@triton.jit
def _ones(bits):
    """How many bits of an int32 are set, in pairs, fours, eights and all."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits += bits >> 8
    return (bits + (bits >> 16)) & 63


@triton.jit
def _scatter_kernel(
    kept_ptr, weights_ptr, partial_ptr, offsets_ptr, tokens_ptr,
    slot_idx_ptr, gather_idx_ptr, row_idx_ptr, ids_ptr, scores_ptr,
    T, E, limit, blocks, stride_t, stride_e, stride_wt, stride_we,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, TAIL: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The first `blocks` programs place the pairs of their tokens, the others the entries behind all pairs."""
    block = tl.program_id(0)
    if block >= blocks:
        i = (block - blocks) * TAIL + tl.arange(0, TAIL)
        behind = (i >= tl.load(offsets_ptr + E)) & (i < limit)
        tl.store(slot_idx_ptr + i, i, mask=behind)
        tl.store(row_idx_ptr + i, i, mask=behind)
        tl.store(gather_idx_ptr + i, tl.zeros((TAIL,), tl.int32), mask=behind)
        tl.store(ids_ptr + i, tl.zeros((TAIL,), tl.int32), mask=behind)
        tl.store(scores_ptr + i, tl.zeros((TAIL,), tl.float32), mask=behind)
    else:
        tokens = tl.arange(0, BLOCK_T)
        t = block * BLOCK_T + tokens
        slot = tl.load(tokens_ptr + t, mask=t < T, other=0)
        at = kept_ptr + t.to(tl.int64)[:, None] * stride_t
        weight_at = weights_ptr + t.to(tl.int64) * stride_wt
        row_at = partial_ptr + block.to(tl.int64) * E
        before = (1 << tokens) - 1
        for first in range(0, E, BLOCK_E):
            column = tl.arange(0, BLOCK_E)
            e = first + column
            mask = (t < T)[:, None] & (e < E)[None, :]
            kept = tl.load(at + e.to(tl.int64)[None, :] * stride_e, mask=mask, other=0).to(tl.int32)
            # a bit per expert for every token, a bit per token for every expert: few are set
            left = tl.sum(kept << column[None, :], axis=1)
            holders = tl.sum(kept << tokens[:, None], axis=0)
            while tl.max((left != 0).to(tl.int32), axis=0) != 0:
                lowest = left & -left
                chosen = left != 0
                place = _place_of_bit(lowest)
                expert = first + place
                earlier = _ones(tl.gather(holders, place, axis=0) & before)
                row = tl.load(offsets_ptr + expert, mask=chosen, other=0)
                row += tl.load(row_at + expert, mask=chosen, other=0) + earlier
                weight = tl.load(weight_at + expert.to(tl.int64) * stride_we, mask=chosen, other=0)
                if BITS:
                    weight = (weight & BITS).to(tl.float32, bitcast=True)
                tl.store(gather_idx_ptr + row, t, mask=chosen)
                tl.store(slot_idx_ptr + row, slot, mask=chosen)
                tl.store(row_idx_ptr + slot, row, mask=chosen)
                tl.store(ids_ptr + slot, expert, mask=chosen)
                tl.store(scores_ptr + slot, weight, mask=chosen)
                slot += chosen.to(tl.int32)
                left ^= lowest


def plan_of_mask(kept_TE: torch.Tensor, weights_TE: torch.Tensor, limit: int) -> Plan:
    """The plan of all pairs where kept_TE is 1.

    kept_TE (T, E) int8, 0 or 1; weights_TE (T, E) the pairs' scores in fp32, or ranking keys (int32) that hold them
    below `SCORE_BITS`; any strides. limit bounds the number of pairs, which nobody checks. E at most 4096.
    """
    T, E = kept_TE.shape
    limit, device = min(limit, T * E), kept_TE.device
    new = lambda size: torch.empty(size, dtype=torch.int32, device=device)  # noqa: E731
    meta = Metadata(new(E + 1), new(limit), new(limit), new(limit), T)
    tokens, ids = new(T + 1), new(limit)
    scores = torch.empty(limit, dtype=torch.float32, device=device)
    if T == 0 or limit == 0:
        meta.offsets_E1.zero_()
        return Plan(meta, tokens.zero_(), ids, scores)
    blocks = cdiv(T, _BLOCK_T)
    block_e, e_pad = min(_BLOCK_E, next_power_of_2(E)), next_power_of_2(E)
    parts = [cdiv(blocks * E, 4) * 4, cdiv(E, 4) * 4, 1]  # each at a multiple of 16 bytes
    partial, counts, finished = new(sum(parts)).split(parts)
    launch(
        _count_kernel, (blocks,),
        (kept_TE, partial, tokens, finished, T, E, *kept_TE.stride(), _BLOCK_T, block_e),
    )  # fmt: skip
    columns = cdiv(E, _PREFIX_COLS)
    launch(
        _prefix_kernel, (columns + 1,),
        (
            partial, counts, finished, meta.offsets_E1, tokens, T, blocks, E, columns,
            min(_PREFIX_ROWS, next_power_of_2(blocks)), _PREFIX_COLS, e_pad, min(_TOKENS, next_power_of_2(T)),
        ),
        num_warps=8,
    )  # fmt: skip
    launch(
        _scatter_kernel, (blocks + cdiv(limit, _TAIL),),
        (
            kept_TE, weights_TE, partial, meta.offsets_E1, tokens,
            meta.slot_idx_R, meta.gather_idx_R, meta.row_idx_R, ids, scores,
            T, E, limit, blocks, *kept_TE.stride(), *weights_TE.stride(),
            _BLOCK_T, block_e, _TAIL, 0 if weights_TE.is_floating_point() else SCORE_BITS,
        ),
        num_warps=4,
    )  # fmt: skip
    return Plan(meta, tokens, ids, scores)


def plan_of_mask_torch(kept_TE: torch.Tensor, weights_TE: torch.Tensor, limit: int | None = None) -> Plan:
    """Plain-torch twin of `plan_of_mask`; without a limit there is nothing behind the pairs. Waits for the device."""
    T, E = kept_TE.shape
    token, expert = kept_TE.nonzero(as_tuple=True)
    R = token.numel()
    limit = R if limit is None else min(limit, T * E)
    if not weights_TE.is_floating_point():
        weights_TE = (weights_TE & SCORE_BITS).view(torch.float32)
    behind = torch.arange(R, limit, device=token.device)
    by_expert = torch.argsort(expert, stable=True)
    slot_idx = torch.cat([by_expert, behind])
    row_idx = torch.empty_like(slot_idx)
    row_idx[slot_idx] = torch.arange(limit, device=token.device)
    padded = lambda values: torch.cat([values, values.new_zeros(limit - R)])  # noqa: E731
    zero = torch.zeros(1, dtype=torch.int64, device=token.device)
    starts = lambda counts: torch.cat([zero, counts.cumsum(0)]).int()  # noqa: E731
    offsets = starts(torch.bincount(expert, minlength=E))
    meta = Metadata(offsets, slot_idx.int(), padded(token[by_expert]).int(), row_idx.int(), T)
    tokens = starts(torch.bincount(token, minlength=T))
    return Plan(meta, tokens, padded(expert).int(), padded(weights_TE[token, expert]))


def plan_of_pairs(
    token_R: torch.Tensor, ids_R: torch.Tensor, scores_R: torch.Tensor, token_offsets_T1: torch.Tensor, E: int
) -> Plan:
    """The plan of given pairs in token order, whose number the host knows: a sort by expert and one gather.

    token_R, ids_R (R,) int32, token never falling and ids in [0, E); scores_R (R,) fp32; token_offsets_T1 (T+1,) int32.
    """
    return _of_pairs(metadata, token_R, ids_R, scores_R, token_offsets_T1, E)


def plan_of_pairs_torch(
    token_R: torch.Tensor, ids_R: torch.Tensor, scores_R: torch.Tensor, token_offsets_T1: torch.Tensor, E: int
) -> Plan:
    """Plain-torch twin of `plan_of_pairs`."""
    return _of_pairs(metadata_torch, token_R, ids_R, scores_R, token_offsets_T1, E)


def _of_pairs(sort, token_R, ids_R, scores_R, token_offsets_T1, E) -> Plan:
    meta = replace(sort(ids_R.view(-1, 1), E, token_R), T=token_offsets_T1.numel() - 1)
    return Plan(meta, token_offsets_T1, ids_R, scores_R)


@triton.jit
def _sum_rows_kernel(
    y_ptr, row_idx_ptr, scores_ptr, tokens_ptr, o_ptr, T, d, UNROLL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = t < T
    mask = inside[:, None] & (cols < d)[None, :]
    first = tl.load(tokens_ptr + t, mask=inside, other=0)
    end = tl.load(tokens_ptr + t + 1, mask=inside, other=0)
    acc = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for k0 in range(0, tl.max(end - first, axis=0), UNROLL):
        for j in tl.static_range(UNROLL):
            slot = first + k0 + j
            valid = slot < end
            row = tl.load(row_idx_ptr + slot, mask=valid, other=0).to(tl.int64)
            y = tl.load(y_ptr + row[:, None] * d + cols[None, :], mask=mask & valid[:, None], other=0.0).to(tl.float32)
            if scores_ptr is not None:
                y *= tl.load(scores_ptr + slot, mask=valid, other=0.0)[:, None]
            acc += y
    tl.store(o_ptr + t.to(tl.int64)[:, None] * d + cols[None, :], narrow(acc, o_ptr.dtype.element_ty), mask=mask)


def sum_rows(y_Rd: torch.Tensor, plan: Plan, scores_R: torch.Tensor | None) -> torch.Tensor:
    """O (T, d): the sum of every token's rows in slot order, weighted by scores_R (slot order) unless None.

    y_Rd (limit, d) contiguous. A token without experts gets zeros.
    """
    T, d = plan.meta.T, y_Rd.shape[1]
    o = torch.empty(T, d, dtype=y_Rd.dtype, device=y_Rd.device)
    if T:
        block_d = min(2048, next_power_of_2(d))
        block_t = 32 if INTERPRET else max(1, 1024 // block_d)
        # two rows in flight are enough: more cost registers, and loads that are masked off
        unroll = 1 if plan.limit <= T else 2
        launch(
            _sum_rows_kernel, (cdiv(T, block_t), cdiv(d, block_d)),
            (y_Rd, plan.meta.row_idx_R, scores_R, plan.token_offsets_T1, o, T, d, unroll, block_t, block_d),
            num_warps=4,
        )  # fmt: skip
    return o


def sum_rows_torch(y_Rd: torch.Tensor, plan: Plan, scores_R: torch.Tensor | None) -> torch.Tensor:
    """Plain-torch twin of `sum_rows`, for an exact plan too (y of the pairs alone). Waits for the device."""
    R = int(plan.rows)
    y = y_Rd[plan.meta.row_idx_R[:R].long()].to(widened(y_Rd.dtype))
    if scores_R is not None:
        y = y * scores_R[:R, None].to(y.dtype)
    o = y.new_zeros(plan.meta.T, y.shape[1])
    token = torch.repeat_interleave(plan.token_offsets_T1.diff().long())
    return o.index_add_(0, token, y).to(y_Rd.dtype)


@triton.jit
def _sum_parts_kernel(partial_ptr, row_idx_ptr, total_ptr, out_ptr, limit, parts, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = slot < tl.load(total_ptr)
    at = partial_ptr + tl.load(row_idx_ptr + slot, mask=pair, other=0)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in tl.range(parts):
        acc += tl.load(at, mask=pair, other=0.0)
        at += limit
    tl.store(out_ptr + slot, acc, mask=slot < limit)


def sum_parts(partials: torch.Tensor, plan: Plan) -> torch.Tensor:
    """dS (limit,) fp32 in slot order: the partials (tiles, limit) of each row added tile by tile; zero behind the
    pairs."""
    parts, limit = partials.shape
    out = torch.empty(limit, dtype=torch.float32, device=partials.device)
    if limit:
        arguments = (partials, plan.meta.row_idx_R, plan.rows, out, limit, parts, 1024)
        launch(_sum_parts_kernel, (cdiv(limit, 1024),), arguments)
    return out


def sum_parts_torch(partials: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Plain-torch twin of `sum_parts`."""
    pair = torch.arange(plan.limit, device=partials.device) < plan.rows
    return torch.where(pair, partials.sum(0)[plan.meta.row_idx_R.long()], 0.0)
