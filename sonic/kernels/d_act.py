"""Backward through the down-projection and SwiGLU in one kernel (paper Algorithm 3, kernel dH).

    dA'_e = gather(dO)_e W2_e         dA = s dA'
    A, dH = dSwiGLU(dA, H)            A is recomputed from H, so only H was kept
    A' = s A                          what dW2 multiplies: dW2 = A'^T gather(dO)
    dS = <dA', A>                     instead of <dO, Y>: Y is neither kept nor read

Reads dO (T, d) by row index, W2 (E, d, n), H (R, 2n) and scores per row; writes dH (R, 2n), A' (R, n) and dS partials
(tiles of n, R) fp32, one per column tile: `d_scores` adds them in a fixed order, so nothing is atomic. Switches:

    gather_idx None   dO is already in row order (R, d)
    with_ap False     no A': somebody kept A, and dO has the scores in it
    fused False       `d_act_gemm` writes dA' (R, n) and `d_swiglu` is a kernel of its own
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from sonic.kernels import tuning
from sonic.kernels.common import (
    INTERPRET,
    UNALIGNED,
    Cost,
    Launch,
    Tile,
    capped,
    cdiv,
    check_fits,
    descriptor,
    dot,
    grid_of,
    halves,
    launch,
    launch_sized,
    narrow,
    next_power_of_2,
    output_tile,
    ragged,
    ragged_coords,
    rows_aligned,
    tile_step,
    tma_ready,
    widened,
)
from sonic.kernels.metadata import Metadata
from sonic.shapes import Shape


def configs(dtype: torch.dtype, n: int, aligned: bool = True) -> list[Tile]:
    """Tiles worth trying: two programs per SM, one's epilogue under the other's loop; the epilogue holds dA', gate and
    up at once, so it runs in chunks of 16 columns to stay in 128 registers."""
    if INTERPRET:
        return [Tile(64, 64, 64)]
    if dtype == torch.float32:
        return [Tile(64, 64, 32, stages=3, store="pointer")]
    if not aligned:
        return [UNALIGNED]
    tiles = [
        Tile(128, 128, 64, stages=3, split=8, ctas=2, store="pointer", group=4),
        Tile(128, 128, 64, stages=3, split=8, ctas=2, store="pointer"),
        Tile(128, 128, 64, stages=3, split=8, ctas=2),
        Tile(128, 128, 64, stages=4, split=2, store="pointer"),
        Tile(128, 64, 64, stages=4, split=4, warps=4, ctas=2, store="pointer"),
    ]
    return capped(tiles, n)


@triton.jit
def _d_swiglu_chunk(
    da_prime, scores, h_ptr, dh_ptr, dh_desc, ap_ptr, ap_desc, row0, end, col, n,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, STORE_TMA: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """dH and A' of a chunk of columns, written; returns the chunk's part of dS."""
    dtype: tl.constexpr = dh_ptr.dtype.element_ty
    cols = col + tl.arange(0, CHUNK)
    row = tl.arange(0, BLOCK_M)
    inside = row < end - row0
    mask = inside[:, None] if EVEN_N else inside[:, None] & (cols < n)[None, :]
    # 64 bits only in the tile's first address: within a tile 32 are enough, and cost half the registers
    at = row[:, None] * (2 * n) + cols[None, :]
    first = tl.cast(row0, tl.int64) * n
    gate = tl.load(h_ptr + 2 * first + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + 2 * first + n + at, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    a = silu * up
    ds = tl.sum(da_prime * a, axis=1)
    da = da_prime * scores[:, None]
    dgate = narrow(da * up * (sigmoid + silu * (1.0 - sigmoid)), dtype)
    dup = narrow(da * silu, dtype)
    a_prime = narrow(a * scores[:, None], dtype)
    if STORE_TMA:
        c0, c1, c2 = ragged_coords(row0, end)
        dh_desc.store([c0, c1, c2, 0, col], tl.reshape(dgate, (1, 1, BLOCK_M, 1, CHUNK)))
        dh_desc.store([c0, c1, c2, 1, col], tl.reshape(dup, (1, 1, BLOCK_M, 1, CHUNK)))
        if ap_desc is not None:
            ap_desc.store([c0, c1, c2, col], tl.reshape(a_prime, (1, 1, BLOCK_M, CHUNK)))
    else:
        tl.store(dh_ptr + 2 * first + at, dgate, mask=mask)
        tl.store(dh_ptr + 2 * first + n + at, dup, mask=mask)
        if ap_ptr is not None:
            tl.store(ap_ptr + first + row[:, None] * n + cols[None, :], a_prime, mask=mask)
    return ds


@triton.jit
def _d_swiglu(
    da_prime, scores, h_ptr, dh_ptr, dh_desc, ap_ptr, ap_desc, row0, end, col, n,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, STORE_TMA: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """`_d_swiglu_chunk` over SPLIT chunks of WIDTH columns, halved until one is left: fewer values live at once."""
    if SPLIT == 1:
        return _d_swiglu_chunk(
            da_prime, scores, h_ptr, dh_ptr, dh_desc, ap_ptr, ap_desc, row0, end, col, n,
            BLOCK_M, WIDTH, STORE_TMA, EVEN_N,
        )  # fmt: skip
    else:
        left, right = halves(da_prime, BLOCK_M, WIDTH)
        ds = _d_swiglu(
            left, scores, h_ptr, dh_ptr, dh_desc, ap_ptr, ap_desc, row0, end, col, n,
            BLOCK_M, WIDTH // 2, SPLIT // 2, STORE_TMA, EVEN_N,
        )  # fmt: skip
        return ds + _d_swiglu(
            right, scores, h_ptr, dh_ptr, dh_desc, ap_ptr, ap_desc, row0, end, col + WIDTH // 2, n,
            BLOCK_M, WIDTH // 2, SPLIT // 2, STORE_TMA, EVEN_N,
        )  # fmt: skip


@triton.jit
def _d_act_kernel(
    do_ptr, w2_ptr, w2_desc, h_ptr, scores_ptr, dh_ptr, dh_desc, ap_ptr, ap_desc, ds_ptr, gather_ptr, map_ptr,
    R, d: tl.constexpr, n: tl.constexpr, limit, stride_do, stride_we, stride_wd, stride_wn,
    FUSED: tl.constexpr, TMA: tl.constexpr, STORE_TMA: tl.constexpr, EVEN_D: tl.constexpr, EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    num_m = tl.load(map_ptr + 3 * limit)
    num_n = tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(d, BLOCK_K)
    for pid in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        expert, row0, end, n_tile = output_tile(map_ptr, limit, pid, num_m, num_n, GROUP)
        rows = row0 + tl.arange(0, BLOCK_M)
        inside = rows < end
        source = tl.where(inside, rows, row0)
        if gather_ptr is not None:
            source = tl.load(gather_ptr + source)
        do_rows = do_ptr + source.to(tl.int64)[:, None] * stride_do
        col0 = n_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in tl.range(steps):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            if EVEN_D:
                do = tl.load(do_rows + k[None, :])
            else:
                do = tl.load(do_rows + k[None, :], mask=(k < d)[None, :], other=0.0)
            if TMA:
                w = tl.reshape(w2_desc.load([expert, step * BLOCK_K, col0]), (BLOCK_K, BLOCK_N))
            else:
                cols = col0 + tl.arange(0, BLOCK_N)
                at = w2_ptr + expert.to(tl.int64) * stride_we
                at += k.to(tl.int64)[:, None] * stride_wd + cols[None, :] * stride_wn
                w = tl.load(at, mask=(k < d)[:, None] & (cols < n)[None, :], other=0.0)
            acc = dot(do, w, acc)
        if FUSED:
            scores = tl.load(scores_ptr + rows, mask=inside, other=0.0)
            ds = _d_swiglu(
                acc, scores, h_ptr, dh_ptr, dh_desc, ap_ptr, ap_desc, row0, end, col0, n,
                BLOCK_M, BLOCK_N, SPLIT, STORE_TMA, EVEN_N,
            )  # fmt: skip
            tl.store(ds_ptr + n_tile.to(tl.int64) * R + rows, ds, mask=inside)
        else:
            cols = col0 + tl.arange(0, BLOCK_N)
            mask = inside[:, None] & (cols < n)[None, :]
            at = ap_ptr + rows.to(tl.int64)[:, None] * n + cols[None, :]
            tl.store(at, narrow(acc, ap_ptr.dtype.element_ty), mask=mask)


def _launch(
    do: torch.Tensor, w2_Edn: torch.Tensor, h: torch.Tensor | None, scores_R: torch.Tensor | None, meta: Metadata,
    gather: bool, with_ap: bool, tile: Tile,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """dH, A' and dS partials; without h only dA' (in the place of A')."""
    E, d, n = w2_Edn.shape
    R = meta.R
    fused = h is not None
    new = lambda *size, dtype=do.dtype: torch.empty(*size, dtype=dtype, device=do.device)  # noqa: E731
    num_n = cdiv(n, tile.n)
    dh = new(R, 2 * n) if fused else None
    ap = new(R, n) if with_ap else None
    ds = new(num_n, R, dtype=torch.float32) if fused else None
    if R == 0:
        return dh, ap, ds
    tiles = meta.tile_map(tile.m)

    def build() -> Launch:
        check_fits(tile, do.element_size())
        tma = tma_ready(w2_Edn)
        dh3 = dh.view(R, 2, n) if fused else None
        store_tma = fused and tile.store == "tma" and rows_aligned(n, do.element_size())
        chunk = tile.n // tile.split
        arguments = (
            do, w2_Edn, descriptor(w2_Edn, [1, tile.k, tile.n]) if tma else None, h, scores_R,
            dh if fused else ap, ragged(dh3, [tile.m, 1, chunk]) if store_tma else None,
            ap, ragged(ap, [tile.m, chunk]) if store_tma and with_ap else None,
            ds, meta.gather_idx_R if gather else None, tiles.table,
            R, d, n, tiles.limit, do.stride(0), *w2_Edn.stride(),
            fused, tma, store_tma, d % tile.k == 0, n % tile.n == 0, tile.m, tile.n, tile.k, tile.split,
            tile.group, tile.flatten, tile_step(do.device, tile),
        )  # fmt: skip
        return grid_of(do.device, tile, tiles.limit * num_n), arguments, tile.options()

    launch_sized(
        _d_act_kernel,
        (do.dtype, do.shape, do.stride(), w2_Edn.shape, w2_Edn.stride(), R, gather, with_ap, fused, tile),
        (do, w2_Edn, h, scores_R, dh, ap, ds, meta.gather_idx_R, tiles.table),
        build,
    )
    return dh, ap, ds


def d_act(
    do: torch.Tensor,
    w2_Edn: torch.Tensor,
    h_R2n: torch.Tensor,
    scores_R: torch.Tensor,
    meta: Metadata,
    *,
    gather: bool = True,
    with_ap: bool = True,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """dH (R, 2n), A' (R, n; None unless `with_ap`) and the dS partials (tiles, R) fp32.

    do (T, d) with `gather`, else rows (R, d); w2_Edn (E, d, n), last axis contiguous; h_R2n (R, 2n); scores_R (R,) fp32
    in row order.
    """
    E, d, n = w2_Edn.shape
    if tile is None:
        rerun = partial(d_act, do, w2_Edn, h_R2n, scores_R, meta, gather=gather, with_ap=with_ap)
        tile = tuning.choose("d_act", d, n, E, do.dtype, lambda: configs(do.dtype, n, tma_ready(w2_Edn)), rerun)
    return _launch(do, w2_Edn, h_R2n, scores_R, meta, gather, with_ap, tile)


def d_act_torch(
    do: torch.Tensor,
    w2_Edn: torch.Tensor,
    h_R2n: torch.Tensor,
    scores_R: torch.Tensor,
    meta: Metadata,
    *,
    gather: bool = True,
    with_ap: bool = True,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Plain-torch twin of `d_act`; its dS is one partial."""
    del tile
    da_prime = d_act_gemm_torch(do, w2_Edn, meta, gather=gather, dtype=widened(do.dtype))
    return d_swiglu_torch(da_prime, h_R2n, scores_R, with_ap)


def d_act_gemm(
    do: torch.Tensor, w2_Edn: torch.Tensor, meta: Metadata, *, gather: bool = True, tile: Tile | None = None
) -> torch.Tensor:
    """dA' (R, n) alone, for `activation=separate`."""
    E, d, n = w2_Edn.shape
    if tile is None:
        rerun = partial(d_act_gemm, do, w2_Edn, meta, gather=gather)
        tile = tuning.choose("d_act_gemm", d, n, E, do.dtype, lambda: configs(do.dtype, n, tma_ready(w2_Edn)), rerun)
    return _launch(do, w2_Edn, None, None, meta, gather, True, tile)[1]


def d_act_gemm_torch(
    do: torch.Tensor,
    w2_Edn: torch.Tensor,
    meta: Metadata,
    *,
    gather: bool = True,
    tile: Tile | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Plain-torch twin of `d_act_gemm`; `dtype` of the result, by default that of do."""
    del tile
    wide = widened(do.dtype)
    rows = do[meta.gather_idx_R.long()] if gather else do
    parts = [rows[i:j].to(wide) @ w2_Edn[e].to(wide) for e, i, j in meta.experts()]
    da_prime = torch.cat(parts) if parts else rows.new_zeros(0, w2_Edn.shape[2], dtype=wide)
    return da_prime.to(dtype or do.dtype)


@triton.jit
def _d_swiglu_kernel(
    da_ptr, h_ptr, scores_ptr, dh_ptr, ap_ptr, ds_ptr, R, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    row0 = tl.program_id(0) * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    inside = rows < R
    scores = tl.load(scores_ptr + rows, mask=inside, other=0.0)
    ds = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for col in tl.range(0, n, BLOCK_N):
        cols = col + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (cols < n)[None, :]
        da = tl.load(da_ptr + rows.to(tl.int64)[:, None] * n + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        ds += _d_swiglu_chunk(
            da, scores, h_ptr, dh_ptr, None, ap_ptr, None, row0, R, col, n, BLOCK_M, BLOCK_N, False, False
        )  # fmt: skip
    tl.store(ds_ptr + rows, ds, mask=inside)


def d_swiglu(
    da_prime_Rn: torch.Tensor, h_R2n: torch.Tensor, scores_R: torch.Tensor, with_ap: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """dH, A' and dS (1, R) from dA' (R, n): the epilogue of `d_act` as a kernel of its own."""
    R, n = da_prime_Rn.shape
    dh, ap = torch.empty_like(h_R2n), torch.empty_like(da_prime_Rn) if with_ap else None
    ds = torch.empty(1, R, dtype=torch.float32, device=h_R2n.device)
    if R:
        block_n = min(256, next_power_of_2(n))
        block_m = max(1, 4096 // block_n)
        launch(
            _d_swiglu_kernel, (cdiv(R, block_m),), (da_prime_Rn, h_R2n, scores_R, dh, ap, ds, R, n, block_m, block_n)
        )
    return dh, ap, ds


def d_swiglu_torch(
    da_prime_Rn: torch.Tensor, h_R2n: torch.Tensor, scores_R: torch.Tensor, with_ap: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Plain-torch twin of `d_swiglu`, in fp32 or wider."""
    wide = widened(h_R2n.dtype)
    gate, up = h_R2n.to(wide).chunk(2, dim=1)
    da_prime, s = da_prime_Rn.to(wide), scores_R.to(wide)[:, None]
    sigmoid = torch.sigmoid(gate)
    a = gate * sigmoid * up
    da = s * da_prime
    dgate = da * up * sigmoid * (1 + gate * (1 - sigmoid))
    dh = torch.cat([dgate, da * gate * sigmoid], dim=1)
    return dh.to(h_R2n.dtype), (s * a).to(h_R2n.dtype) if with_ap else None, (da_prime * a).sum(1)[None]


@triton.jit
def _d_scores_kernel(partial_ptr, row_idx_ptr, out_ptr, R, parts, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = slot < R
    at = partial_ptr + tl.load(row_idx_ptr + slot, mask=mask, other=0)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in tl.range(parts):
        acc += tl.load(at, mask=mask, other=0.0)
        at += R
    tl.store(out_ptr + slot, acc, mask=mask)


def d_scores(partials: torch.Tensor, row_idx_R: torch.Tensor) -> torch.Tensor:
    """dS (R,) fp32 in slot order: the partials (tiles, R) of each row added tile by tile."""
    parts, R = partials.shape
    out = torch.empty(R, dtype=torch.float32, device=partials.device)
    if R:
        launch(_d_scores_kernel, (cdiv(R, 1024),), (partials, row_idx_R, out, R, parts, 1024))
    return out


def d_scores_torch(partials: torch.Tensor, row_idx_R: torch.Tensor) -> torch.Tensor:
    """Plain-torch twin of `d_scores`."""
    return partials.sum(0)[row_idx_R.long()]


def d_act_cost(shape: Shape, R: int, itemsize: int, fused: bool = True) -> Cost:
    """2 R n d FLOPs; dO gathered, W2 and H read once, dH and A' written; without the epilogue dA' alone."""
    d, n = shape.d, shape.n
    tensors = {"do": itemsize * R * d, "w2": itemsize * shape.E * n * d, "ap": itemsize * R * n}
    if fused:
        tensors |= {"h": itemsize * 2 * R * n, "dh": itemsize * 2 * R * n}
    return Cost(2 * R * n * d, tensors, {"do": itemsize * shape.T * d})
