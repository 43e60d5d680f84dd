"""Up-projection of the experts: H_e = gather(X) W1_e^T, A_e = silu(gate) * up (paper Algorithm 2, kernel A).

Reads X (T, d) by row index, W1 (E, 2, n, d); writes H (R, 2n), gate columns first, and A (R, n).

One block multiplies a row tile of X with the gate half-tile and the up half-tile of the same n columns, loaded as one
operand: column j of gate and of up end in the same thread, so that SwiGLU stays in registers. Switches:

    gather_idx None   X is already in row order (R, d): the separate gather of `gather_rows`
    with_act False    writes H alone; `swiglu` is then a kernel of its own
    with_h False      writes A alone: inference, where nothing is kept for a backward
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
    """Tiles worth trying; a block covers tile.n/2 gate and tile.n/2 up columns, so 128 x 256 suits n >= 128."""
    if INTERPRET:
        return [Tile(64, 64, 64)]
    if dtype == torch.float32:
        return [Tile(64, 64, 32, stages=3, store="pointer")]
    if not aligned:
        return [UNALIGNED]
    tiles = [
        Tile(128, 256, 64, stages=4, flatten=True, group=4),
        Tile(128, 256, 64, stages=4, flatten=True),
        Tile(128, 256, 64, stages=3, group=4),
        Tile(128, 256, 64, stages=4),
        Tile(128, 256, 64, stages=4, group=4),
        Tile(128, 128, 64, stages=3, ctas=2),
    ]
    return capped(tiles, 2 * n)


@triton.jit
def _up_proj_kernel(
    x_ptr, w1_ptr, w1_desc, h_ptr, h_desc, a_ptr, a_desc, gather_ptr, map_ptr,
    n: tl.constexpr, d: tl.constexpr, limit, stride_x, stride_we, stride_wh, stride_wn, stride_wd,
    WITH_H: tl.constexpr, WITH_ACT: tl.constexpr, TMA: tl.constexpr, STORE_TMA: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK_N // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    num_m = tl.load(map_ptr + 3 * limit)
    num_n = tl.cdiv(n, HALF)
    steps = tl.cdiv(d, BLOCK_K)
    for pid in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        expert, row0, end, n_tile = output_tile(map_ptr, limit, pid, num_m, num_n, GROUP)
        rows = row0 + tl.arange(0, BLOCK_M)
        inside = rows < end
        # rows past the expert's end repeat its first row: read, multiplied, never stored
        source = tl.where(inside, rows, row0)
        if gather_ptr is not None:
            source = tl.load(gather_ptr + source)
        x_rows = x_ptr + source.to(tl.int64)[:, None] * stride_x
        col0 = n_tile * HALF
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in tl.range(steps):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            if EVEN_D:
                x = tl.load(x_rows + k[None, :])
            else:
                x = tl.load(x_rows + k[None, :], mask=(k < d)[None, :], other=0.0)
            if TMA:
                w = tl.reshape(w1_desc.load([expert, 0, col0, step * BLOCK_K]), (BLOCK_N, BLOCK_K)).T
            else:
                # column j of the block: gate column col0 + j in the left half, up column in the right half
                j = tl.arange(0, BLOCK_N)
                col = col0 + j % HALF
                at = w1_ptr + expert.to(tl.int64) * stride_we
                at += (j // HALF).to(tl.int64)[None, :] * stride_wh
                at += col.to(tl.int64)[None, :] * stride_wn + k.to(tl.int64)[:, None] * stride_wd
                w = tl.load(at, mask=(col < n)[None, :] & (k < d)[:, None], other=0.0)
            acc = dot(x, w, acc)
        gate, up = halves(acc, BLOCK_M, BLOCK_N)
        cols = col0 + tl.arange(0, HALF)
        mask = inside[:, None] & (cols < n)[None, :]
        # 64 bits only in the tile's first address: within a tile 32 are enough, and cost half the registers
        first = tl.cast(row0, tl.int64)
        row = tl.arange(0, BLOCK_M)
        if WITH_H:
            if STORE_TMA:
                # one block shape for all three stores, so that they share one staging buffer
                c0, c1, c2 = ragged_coords(row0, end)
                h_desc.store([c0, c1, c2, 0, col0], tl.reshape(narrow(gate, dtype), (1, 1, BLOCK_M, 1, HALF)))
                h_desc.store([c0, c1, c2, 1, col0], tl.reshape(narrow(up, dtype), (1, 1, BLOCK_M, 1, HALF)))
            else:
                h = h_ptr + first * 2 * n + row[:, None] * (2 * n) + cols[None, :]
                tl.store(h, narrow(gate, dtype), mask=mask)
                tl.store(h + n, narrow(up, dtype), mask=mask)
        if WITH_ACT:
            a = narrow(gate * up / (1.0 + tl.exp(-gate)), dtype)
            if STORE_TMA:
                c0, c1, c2 = ragged_coords(row0, end)
                a_desc.store([c0, c1, c2, 0, col0], tl.reshape(a, (1, 1, BLOCK_M, 1, HALF)))
            else:
                tl.store(a_ptr + first * n + row[:, None] * n + cols[None, :], a, mask=mask)


def up_proj(
    x: torch.Tensor,
    w1_E2nd: torch.Tensor,
    meta: Metadata,
    *,
    gather: bool = True,
    with_act: bool = True,
    with_h: bool = True,
    tile: Tile | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """H (R, 2n) and A (R, n) of the routed rows; None for one that was not asked for.

    x (T, d) with `gather`, else the rows themselves (R, d); contiguous rows. w1_E2nd (E, 2, n, d), any strides but 1 on
    the last axis: gate rows at [:, 0], up rows at [:, 1].
    """
    E, _, n, d = w1_E2nd.shape
    R = meta.R
    h = torch.empty(R, 2 * n, dtype=x.dtype, device=x.device) if with_h else None
    a = torch.empty(R, n, dtype=x.dtype, device=x.device) if with_act else None
    if R == 0:
        return h, a
    if tile is None:
        rerun = partial(up_proj, x, w1_E2nd, meta, gather=gather, with_act=with_act, with_h=with_h)
        tile = tuning.choose("up_proj", d, n, E, x.dtype, lambda: configs(x.dtype, n, tma_ready(w1_E2nd)), rerun)
    tiles = meta.tile_map(tile.m)

    def build() -> Launch:
        check_fits(tile, x.element_size())
        half = tile.n // 2
        tma = tma_ready(w1_E2nd)
        h3 = h.view(R, 2, n) if with_h else None
        store_tma = tile.store == "tma" and rows_aligned(n, x.element_size())
        arguments = (
            x, w1_E2nd, descriptor(w1_E2nd, [1, 2, half, tile.k]) if tma else None,
            h, ragged(h3, [tile.m, 1, half]) if store_tma and with_h else None,
            a, ragged(a[:, None], [tile.m, 1, half]) if store_tma and with_act else None,
            meta.gather_idx_R if gather else None, tiles.table,
            n, d, tiles.limit, x.stride(0), *w1_E2nd.stride(),
            with_h, with_act, tma, store_tma, d % tile.k == 0, tile.m, tile.n, tile.k,
            tile.group, tile.flatten, tile_step(x.device, tile),
        )  # fmt: skip
        return grid_of(x.device, tile, tiles.limit * cdiv(n, half)), arguments, tile.options()

    launch_sized(
        _up_proj_kernel,
        (x.dtype, x.shape, x.stride(), w1_E2nd.shape, w1_E2nd.stride(), R, gather, with_h, with_act, tile),
        (x, w1_E2nd, h, a, meta.gather_idx_R, tiles.table),
        build,
    )
    return h, a


def up_proj_torch(
    x: torch.Tensor,
    w1_E2nd: torch.Tensor,
    meta: Metadata,
    *,
    gather: bool = True,
    with_act: bool = True,
    with_h: bool = True,
    tile: Tile | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Plain-torch twin of `up_proj`: products in fp32 (fp64 for fp64 inputs), expert by expert."""
    del tile
    rows = x[meta.gather_idx_R.long()] if gather else x
    wide = widened(x.dtype)
    parts = [rows[i:j].to(wide) @ w1_E2nd[e].flatten(0, 1).to(wide).T for e, i, j in meta.experts()]
    h = torch.cat(parts) if parts else rows.new_zeros(0, 2 * w1_E2nd.shape[2], dtype=wide)
    a = _swiglu_wide(h).to(x.dtype) if with_act else None
    return h.to(x.dtype) if with_h else None, a


@triton.jit
def _swiglu_kernel(h_ptr, a_ptr, R, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row0 = tl.program_id(0) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < R - row0)[:, None] & (cols < n)[None, :]
    first = tl.cast(row0, tl.int64) * n
    h = h_ptr + 2 * first + row[:, None] * (2 * n) + cols[None, :]
    gate = tl.load(h, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h + n, mask=mask, other=0.0).to(tl.float32)
    a = narrow(gate * up / (1.0 + tl.exp(-gate)), a_ptr.dtype.element_ty)
    tl.store(a_ptr + first + row[:, None] * n + cols[None, :], a, mask=mask)


def swiglu(h_R2n: torch.Tensor) -> torch.Tensor:
    """A (R, n) = silu(gate) * up of H (R, 2n), as a kernel of its own (`activation=separate`)."""
    R, n = h_R2n.shape[0], h_R2n.shape[1] // 2
    a = torch.empty(R, n, dtype=h_R2n.dtype, device=h_R2n.device)
    if R:
        block_n = min(512, next_power_of_2(n))
        block_m = max(1, 4096 // block_n)
        launch(_swiglu_kernel, (cdiv(R, block_m), cdiv(n, block_n)), (h_R2n, a, R, n, block_m, block_n))
    return a


def swiglu_torch(h_R2n: torch.Tensor) -> torch.Tensor:
    """Plain-torch twin of `swiglu`."""
    return _swiglu_wide(h_R2n.to(widened(h_R2n.dtype))).to(h_R2n.dtype)


def _swiglu_wide(h_R2n: torch.Tensor) -> torch.Tensor:
    gate, up = h_R2n.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def up_proj_cost(shape: Shape, R: int, itemsize: int, with_h: bool = True, with_act: bool = True) -> Cost:
    """4 R n d FLOPs; X gathered, W1 read once, H (not in inference) and A written."""
    d, n = shape.d, shape.n
    tensors = {"x": itemsize * R * d, "w1": itemsize * 2 * shape.E * n * d}
    if with_act:
        tensors["a"] = itemsize * R * n
    if with_h:
        tensors["h"] = itemsize * 2 * R * n
    return Cost(4 * R * n * d, tensors, {"x": itemsize * shape.T * d})
