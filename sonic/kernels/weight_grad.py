"""Weight gradients, varlen-K (paper Algorithm 3): dW1_e = dH_e^T gather(X)_e and dW2_e = gather(dO)_e^T A'_e.

The contraction runs over an expert's rows. One operand is contiguous in row order, P (R, H, n): dH with H = 2, or A'
with H = 1; the other is gathered from Q (T, d) by row index. The gradient is written in the layout of its weight:
dW1 (E, 2, n, d) has P's columns as rows, dW2 (E, d, n) has Q's. An expert without rows gets zeros.
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
    grouped_tile,
    halves,
    launch_sized,
    narrow,
    ragged,
    ragged_coords,
    tile_step,
    tma_ready,
    widened,
)
from sonic.kernels.metadata import Metadata
from sonic.shapes import Shape


def configs(dtype: torch.dtype, columns: int, aligned: bool = True) -> list[Tile]:
    """Tiles worth trying; the contraction block k counts rows of an expert."""
    if INTERPRET:
        return [Tile(64, 64, 64)]
    if dtype == torch.float32:
        return [Tile(64, 64, 32, stages=3, store="pointer")]
    if not aligned:
        return [UNALIGNED]
    tiles = [
        Tile(128, 128, 64, stages=3, warps=4, ctas=2, split=2),
        Tile(128, 128, 64, stages=3, warps=4, ctas=2),
        Tile(128, 256, 64, stages=3, split=2),
        Tile(128, 256, 64, stages=4, split=2),
        Tile(128, 256, 64, stages=3),
    ]
    return capped(tiles, columns)


@triton.jit
def _weight_grad_kernel(
    p_ptr, p_desc, q_ptr, out_ptr, out_desc, gather_ptr, offsets_ptr,
    E, n: tl.constexpr, d: tl.constexpr, stride_q, stride_oe, stride_oh, stride_on, stride_od,
    H: tl.constexpr, Q_ROWS: tl.constexpr, TMA: tl.constexpr, STORE_TMA: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    # output rows are Q's columns with Q_ROWS (dW2), else P's (dW1)
    BLOCK_P: tl.constexpr = BLOCK_N if Q_ROWS else BLOCK_M
    BLOCK_Q: tl.constexpr = BLOCK_M if Q_ROWS else BLOCK_N
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tiles_n = tl.cdiv(n, BLOCK_P)
    num_p = H * tiles_n
    num_q = tl.cdiv(d, BLOCK_Q)
    for pid in tl.range(tl.program_id(0), E * num_p * num_q, PROGRAMS):
        expert = pid // (num_p * num_q)
        tile = pid % (num_p * num_q)
        if Q_ROWS:
            q_tile, p_tile = grouped_tile(tile, num_q, num_p, GROUP)
        else:
            p_tile, q_tile = grouped_tile(tile, num_p, num_q, GROUP)
        h = p_tile // tiles_n if H > 1 else 0
        n0 = (p_tile % tiles_n if H > 1 else p_tile) * BLOCK_P
        d0 = q_tile * BLOCK_Q
        start = tl.load(offsets_ptr + expert)
        end = tl.load(offsets_ptr + expert + 1)
        q_cols = d0 + tl.arange(0, BLOCK_Q)
        p_cols = n0 + tl.arange(0, BLOCK_P)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        # the index of a block is read one step ahead: a load that waits for a load in the same step costs pipeline
        # stages
        source = tl.minimum(start + tl.arange(0, BLOCK_K), end - 1)
        if gather_ptr is not None:
            source = tl.load(gather_ptr + source, mask=source >= start, other=0)
        for row in tl.range(start, end, BLOCK_K):
            rows = row + tl.arange(0, BLOCK_K)
            # P is zero past the expert's end; Q repeats the expert's last row there, whose product with zero is zero
            # unless that row is not finite, and then the gradient is not finite anyway
            if TMA:
                c0, c1, c2 = ragged_coords(row, end)
                p = tl.reshape(p_desc.load([c0, c1, c2, h, n0]), (BLOCK_K, BLOCK_P))
            else:
                at = p_ptr + rows.to(tl.int64)[:, None] * (H * n) + h * n + p_cols[None, :]
                p = tl.load(at, mask=(rows < end)[:, None] & (p_cols < n)[None, :], other=0.0)
            at = q_ptr + source.to(tl.int64)[:, None] * stride_q + q_cols[None, :]
            if EVEN_D:
                q = tl.load(at)
            else:
                q = tl.load(at, mask=(q_cols < d)[None, :], other=0.0)
            source = tl.minimum(rows + BLOCK_K, end - 1)
            if gather_ptr is not None:
                source = tl.load(gather_ptr + source)
            if Q_ROWS:
                acc = dot(q.T, p, acc)
            else:
                acc = dot(p.T, q, acc)
        if STORE_TMA:
            row0 = d0 if Q_ROWS else n0
            col0 = n0 if Q_ROWS else d0
            if SPLIT == 1:
                out_desc.store([expert, h, row0, col0], tl.reshape(narrow(acc, dtype), (1, 1, BLOCK_M, BLOCK_N)))
            else:
                left, right = halves(acc, BLOCK_M, BLOCK_N)
                shape: tl.constexpr = (1, 1, BLOCK_M, BLOCK_N // 2)
                out_desc.store([expert, h, row0, col0], tl.reshape(narrow(left, dtype), shape))
                out_desc.store([expert, h, row0, col0 + BLOCK_N // 2], tl.reshape(narrow(right, dtype), shape))
        else:
            grad = narrow(acc, dtype)
            at = out_ptr + expert.to(tl.int64) * stride_oe + h * stride_oh
            if Q_ROWS:
                at += q_cols.to(tl.int64)[:, None] * stride_od + p_cols[None, :] * stride_on
                mask = (q_cols < d)[:, None] & (p_cols < n)[None, :]
            else:
                at += p_cols.to(tl.int64)[:, None] * stride_on + q_cols[None, :] * stride_od
                mask = (p_cols < n)[:, None] & (q_cols < d)[None, :]
            tl.store(at, grad, mask=mask)


def _weight_grad(
    p_RHn: torch.Tensor, q: torch.Tensor, out: torch.Tensor, meta: Metadata, tile: Tile, *, q_rows: bool, gather: bool
) -> torch.Tensor:
    """Fill out, (E, H, d, n) with `q_rows` or (E, H, n, d)."""
    R, H, n = p_RHn.shape
    E, d = out.shape[0], q.shape[1]
    if R == 0:
        return out.zero_()

    def build() -> Launch:
        check_fits(tile, q.element_size())
        block_p, block_q = (tile.n, tile.m) if q_rows else (tile.m, tile.n)
        tma = tma_ready(p_RHn)
        store_tma = tile.store == "tma" and tma_ready(out)
        stride_e, stride_h, *rest = out.stride()
        stride_d, stride_n = rest if q_rows else reversed(rest)
        arguments = (
            p_RHn, ragged(p_RHn, [tile.k, 1, block_p]) if tma else None, q,
            out, descriptor(out, [1, 1, tile.m, tile.n // tile.split]) if store_tma else None,
            meta.gather_idx_R if gather else None, meta.offsets_E1,
            E, n, d, q.stride(0), stride_e, stride_h, stride_n, stride_d,
            H, q_rows, tma, store_tma, d % block_q == 0, tile.m, tile.n, tile.k, tile.split,
            tile.group, tile_step(q.device, tile),
        )  # fmt: skip
        grid = grid_of(q.device, tile, E * H * cdiv(n, block_p) * cdiv(d, block_q))
        return grid, arguments, tile.options()

    launch_sized(
        _weight_grad_kernel,
        (q.dtype, q.shape, q.stride(), p_RHn.shape, out.shape, out.stride(), q_rows, gather, tile),
        (p_RHn, q, out, meta.gather_idx_R, meta.offsets_E1),
        build,
    )
    return out


def weight_grad_1(
    x: torch.Tensor, dh_R2n: torch.Tensor, out_E2nd: torch.Tensor, meta: Metadata, *, gather: bool = True,
    tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """Fill out_E2nd (E, 2, n, d), any layout that W1 may have, with dW1 and return it.

    x (T, d) with `gather`, else rows (R, d); dh_R2n (R, 2n) contiguous.
    """
    E, _, n, d = out_E2nd.shape
    if tile is None:
        rerun = partial(weight_grad_1, x, dh_R2n, out_E2nd, meta, gather=gather)
        tile = tuning.choose("weight_grad_1", d, n, E, x.dtype, lambda: configs(x.dtype, d, tma_ready(dh_R2n)), rerun)
    return _weight_grad(dh_R2n.view(-1, 2, n), x, out_E2nd, meta, tile, q_rows=False, gather=gather)


def weight_grad_1_torch(
    x: torch.Tensor, dh_R2n: torch.Tensor, out_E2nd: torch.Tensor, meta: Metadata, *, gather: bool = True,
    tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain-torch twin of `weight_grad_1`."""
    del tile
    wide = widened(x.dtype)
    rows = x[meta.gather_idx_R.long()] if gather else x
    out_E2nd.zero_()
    for e, i, j in meta.experts():
        out_E2nd[e] = (dh_R2n[i:j].to(wide).T @ rows[i:j].to(wide)).view(out_E2nd.shape[1:])
    return out_E2nd


def weight_grad_2(
    do: torch.Tensor, ap_Rn: torch.Tensor, out_Edn: torch.Tensor, meta: Metadata, *, gather: bool = True,
    tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """Fill out_Edn (E, d, n) with dW2 and return it.

    do (T, d) with `gather`, else rows (R, d); ap_Rn = s A (R, n) contiguous.
    """
    E, d, n = out_Edn.shape
    if tile is None:
        rerun = partial(weight_grad_2, do, ap_Rn, out_Edn, meta, gather=gather)
        tile = tuning.choose("weight_grad_2", d, n, E, do.dtype, lambda: configs(do.dtype, n, tma_ready(ap_Rn)), rerun)
    _weight_grad(ap_Rn[:, None], do, out_Edn[:, None], meta, tile, q_rows=True, gather=gather)
    return out_Edn


def weight_grad_2_torch(
    do: torch.Tensor, ap_Rn: torch.Tensor, out_Edn: torch.Tensor, meta: Metadata, *, gather: bool = True,
    tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain-torch twin of `weight_grad_2`."""
    del tile
    wide = widened(do.dtype)
    rows = do[meta.gather_idx_R.long()] if gather else do
    out_Edn.zero_()
    for e, i, j in meta.experts():
        out_Edn[e] = rows[i:j].to(wide).T @ ap_Rn[i:j].to(wide)
    return out_Edn


def weight_grad_1_cost(shape: Shape, R: int, itemsize: int) -> Cost:
    """4 R n d FLOPs; X gathered, dH read once, dW1 written."""
    d, n = shape.d, shape.n
    return Cost(
        4 * R * n * d,
        {"x": itemsize * R * d, "dh": itemsize * 2 * R * n, "dw1": itemsize * 2 * shape.E * n * d},
        {"x": itemsize * shape.T * d},
    )


def weight_grad_2_cost(shape: Shape, R: int, itemsize: int) -> Cost:
    """2 R n d FLOPs; dO gathered, A' read once, dW2 written."""
    d, n = shape.d, shape.n
    return Cost(
        2 * R * n * d,
        {"do": itemsize * R * d, "ap": itemsize * R * n, "dw2": itemsize * shape.E * n * d},
        {"do": itemsize * shape.T * d},
    )
