"""Varlen-M grouped GEMM over contiguous rows: Y_e = A_e B_e, shared by `down_proj` and `d_input`.

Reads A (R, H, k) and B per expert, either (d, k) rows as W2 in the forward (`k_major`) or (H, k, d) as W1 in the
backward; the contraction runs over both H and k. Three ways to leave the result (`into`):

    rows     Y (R, d) in expert order; the sum over a token's rows is `aggregate`'s
    slots    Y (R, d) in token order, written through slot_idx (scatter_sum)
    tokens   O (T, d) fp32 by atomic addition, weighted: no Y at all, but run-to-run order and half the store speed
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from sonic.kernels.common import (
    INTERPRET,
    UNALIGNED,
    Launch,
    Tile,
    capped,
    cdiv,
    check_fits,
    descriptor,
    dot,
    grid_of,
    halves,
    launch_sized,
    narrow,
    output_tile,
    ragged,
    ragged_coords,
    rows_aligned,
    tile_step,
    tma_ready,
    widened,
)
from sonic.kernels.metadata import Metadata

Into = Literal["rows", "slots", "tokens"]


def tuned_as(kernel: str, into: Into) -> str:
    """Name under which a kernel's tile is chosen: other ends, other tiles."""
    return kernel if into == "rows" else f"{kernel}_{into}"


def configs(dtype: torch.dtype, d: int, into: Into = "rows", aligned: bool = True) -> list[Tile]:
    """Tiles worth trying: the wide one, whose next loads start under its epilogue, or two small programs per SM.

    Atomic addition (`into="tokens"`) passes a whole fp32 block through shared memory, which leaves room for less.
    """
    if INTERPRET:
        return [Tile(64, 64, 64)]
    if dtype == torch.float32:
        return [Tile(64, 64, 32, stages=3, store="pointer")]
    if not aligned:
        return [UNALIGNED]
    if into == "tokens":
        return capped([Tile(128, 128, 64, stages=4), Tile(128, 256, 64, stages=3)], d)
    tiles = [
        Tile(128, 256, 64, stages=4, split=2, flatten=True),
        Tile(128, 256, 64, stages=3, split=2, flatten=True),
        Tile(128, 256, 64, stages=3, flatten=True),
        Tile(128, 256, 64, stages=3, split=2),
        Tile(128, 256, 64, stages=4, split=2, flatten=True, group=4),
        Tile(128, 128, 64, stages=3, warps=4, ctas=2, split=2),
    ]
    return capped(tiles, d)


@triton.jit
def _grouped_gemm_kernel(
    a_ptr, a_desc, b_ptr, b_desc, y_ptr, y_desc, slot_idx_ptr, gather_ptr, scores_ptr, map_ptr,
    k_size: tl.constexpr, d: tl.constexpr, limit, stride_be, stride_bh, stride_bk, stride_bd,
    H: tl.constexpr, K_MAJOR: tl.constexpr, INTO: tl.constexpr, TMA: tl.constexpr, STORE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = a_ptr.dtype.element_ty
    num_m = tl.load(map_ptr + 3 * limit)
    num_n = tl.cdiv(d, BLOCK_N)
    steps = tl.cdiv(k_size, BLOCK_K)
    for pid in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        expert, row0, end, n_tile = output_tile(map_ptr, limit, pid, num_m, num_n, GROUP)
        rows = row0 + tl.arange(0, BLOCK_M)
        inside = rows < end
        col0 = n_tile * BLOCK_N
        cols = col0 + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in tl.range(H * steps):
            h = step // steps if H > 1 else 0
            k0 = (step % steps if H > 1 else step) * BLOCK_K
            if TMA:
                # Rows past the expert's end are the next expert's: multiplied, never stored. Columns past k_size meet
                # zeros of B. A is described in two axes: reshaped to a matrix it gets one buffer too few, and the next
                # load overwrites what the tensor cores still read (seen on triton 3.6).
                a = a_desc.load([row0, h * k_size + k0])
                if K_MAJOR:
                    b = tl.reshape(b_desc.load([expert, h, col0, k0]), (BLOCK_N, BLOCK_K)).T
                else:
                    b = tl.reshape(b_desc.load([expert, h, k0, col0]), (BLOCK_K, BLOCK_N))
            else:
                k = k0 + tl.arange(0, BLOCK_K)
                at = a_ptr + tl.where(inside, rows, row0).to(tl.int64)[:, None] * (H * k_size) + h * k_size + k[None, :]
                a = tl.load(at, mask=(k < k_size)[None, :], other=0.0)
                bt = b_ptr + expert.to(tl.int64) * stride_be + h * stride_bh
                bt += k.to(tl.int64)[:, None] * stride_bk + cols.to(tl.int64)[None, :] * stride_bd
                b = tl.load(bt, mask=(k < k_size)[:, None] & (cols < d)[None, :], other=0.0)
            acc = dot(a, b, acc)
        if INTO == "tokens":
            slot = tl.load(slot_idx_ptr + rows, mask=inside, other=0)
            token = tl.load(gather_ptr + rows, mask=inside, other=0)
            if scores_ptr is not None:
                acc *= tl.load(scores_ptr + slot, mask=inside, other=0.0)[:, None]
            at = y_ptr + token.to(tl.int64)[:, None] * d + cols[None, :]
            tl.atomic_add(at, acc, mask=inside[:, None] & (cols < d)[None, :], sem="relaxed")
        elif STORE_TMA:
            c0, c1, c2 = ragged_coords(row0, end)
            if SPLIT == 1:
                y_desc.store([c0, c1, c2, col0], tl.reshape(narrow(acc, dtype), (1, 1, BLOCK_M, BLOCK_N)))
            else:
                left, right = halves(acc, BLOCK_M, BLOCK_N)
                shape: tl.constexpr = (1, 1, BLOCK_M, BLOCK_N // 2)
                y_desc.store([c0, c1, c2, col0], tl.reshape(narrow(left, dtype), shape))
                y_desc.store([c0, c1, c2, col0 + BLOCK_N // 2], tl.reshape(narrow(right, dtype), shape))
        else:
            to = rows
            if INTO == "slots":
                to = tl.load(slot_idx_ptr + rows, mask=inside, other=0)
            at = y_ptr + to.to(tl.int64)[:, None] * d + cols[None, :]
            tl.store(at, narrow(acc, dtype), mask=inside[:, None] & (cols < d)[None, :])


def grouped_gemm(
    a_RHk: torch.Tensor,
    b: torch.Tensor,
    meta: Metadata,
    tile: Tile,
    *,
    k_major: bool,
    into: Into,
    scores: torch.Tensor | None,
) -> torch.Tensor:
    """Rows of every expert times its matrix; see the module.

    a_RHk (R, H, k) contiguous; b (E, H, d, k) with `k_major`, else (E, H, k, d), any strides but 1 on the last axis.
    scores (T, K) fp32 weigh the rows with into="tokens". Returns (R, d) in the dtype of a, or (T, d) fp32 with
    into="tokens".
    """
    R, H, k = a_RHk.shape
    d = b.shape[2] if k_major else b.shape[3]
    if into == "tokens":
        y = torch.zeros(meta.T, d, dtype=torch.float32, device=a_RHk.device)
    else:
        y = torch.empty(R, d, dtype=a_RHk.dtype, device=a_RHk.device)
    if R == 0:
        return y
    tiles = meta.tile_map(tile.m)

    def build() -> Launch:
        check_fits(tile, a_RHk.element_size())
        tma = tma_ready(a_RHk, b)
        store_tma = into == "rows" and tile.store == "tma" and rows_aligned(d, y.element_size())
        stride_e, stride_h, *rest = b.stride()
        stride_bd, stride_bk = rest if k_major else reversed(rest)
        block_b = [1, 1, tile.n, tile.k] if k_major else [1, 1, tile.k, tile.n]
        arguments = (
            a_RHk, descriptor(a_RHk.view(R, H * k), [tile.m, tile.k]) if tma else None, b,
            descriptor(b, block_b) if tma else None,
            y, ragged(y, [tile.m, tile.n // tile.split]) if store_tma else None,
            meta.slot_idx_R, meta.gather_idx_R, scores, tiles.table,
            k, d, tiles.limit, stride_e, stride_h, stride_bk, stride_bd,
            H, k_major, into, tma, store_tma, tile.m, tile.n, tile.k, tile.split,
            tile.group, tile.flatten, tile_step(a_RHk.device, tile),
        )  # fmt: skip
        return grid_of(a_RHk.device, tile, tiles.limit * cdiv(d, tile.n)), arguments, tile.options()

    launch_sized(
        _grouped_gemm_kernel,
        (a_RHk.dtype, a_RHk.shape, b.shape, b.stride(), meta.T, k_major, into, scores is None, tile),
        (a_RHk, b, y, meta.slot_idx_R, meta.gather_idx_R, scores, tiles.table),
        build,
    )
    return y


def grouped_gemm_torch(
    a_RHk: torch.Tensor, b: torch.Tensor, meta: Metadata, *, k_major: bool, into: Into, scores: torch.Tensor | None
) -> torch.Tensor:
    """Plain-torch twin of `grouped_gemm`."""
    wide = widened(a_RHk.dtype)
    a = a_RHk.flatten(1).to(wide)
    as_matrix = (lambda w: w.transpose(1, 2).flatten(0, 1)) if k_major else (lambda w: w.flatten(0, 1))
    parts = [a[i:j] @ as_matrix(b[e].to(wide)) for e, i, j in meta.experts()]
    y = torch.cat(parts) if parts else a.new_zeros(0, b.shape[2] if k_major else b.shape[3])
    if into == "rows":
        return y.to(a_RHk.dtype)
    if into == "slots":
        return y[meta.row_idx_R.long()].to(a_RHk.dtype)
    if scores is not None:
        y = y * scores.flatten()[meta.slot_idx_R.long()][:, None].to(wide)
    return y.new_zeros(meta.T, y.shape[1]).index_add_(0, meta.gather_idx_R.long(), y)
