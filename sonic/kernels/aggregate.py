"""Aggregation: O_t = sum_k s_tk Y_row(t,k), and dX the same without scores (paper Algorithm 2, kernel O).

Each token gathers its K rows and sums them in slot order in fp32: bandwidth-bound, deterministic, nothing scattered.
With `row_idx_R` None the rows are already in slot order (`aggregate=scatter_sum`). `gather_rows` is the separate
gather.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sonic.kernels.common import INTERPRET, Cost, cdiv, launch, launch_sized, narrow, next_power_of_2, widened
from sonic.shapes import Shape


@triton.jit
def _aggregate_kernel(
    y_ptr, row_idx_ptr, scores_ptr, o_ptr, T, d, K: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = t < T
    mask = inside[:, None] & (cols < d)[None, :]
    first = t.to(tl.int64) * K
    acc = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    # unrolled by UNROLL so that that many rows are in flight before the first is summed
    for k0 in tl.range(0, K, UNROLL):
        for j in tl.static_range(UNROLL):
            k = k0 + j
            valid = inside & (k < K)
            row = first + k
            if row_idx_ptr is not None:
                row = tl.load(row_idx_ptr + first + k, mask=valid, other=0).to(tl.int64)
            y = tl.load(y_ptr + row[:, None] * d + cols[None, :], mask=mask & valid[:, None], other=0.0).to(tl.float32)
            if scores_ptr is not None:
                y *= tl.load(scores_ptr + first + k, mask=valid, other=0.0)[:, None]
            acc += y
    tl.store(o_ptr + t.to(tl.int64)[:, None] * d + cols[None, :], narrow(acc, o_ptr.dtype.element_ty), mask=mask)


def aggregate(
    y_Rd: torch.Tensor, row_idx_R: torch.Tensor | None, scores_TK: torch.Tensor | None, T: int, K: int
) -> torch.Tensor:
    """O (T, d): the weighted sum of every token's K rows.

    y_Rd (R, d) contiguous; row_idx_R (R,) int32 slot -> row, or None for rows in slot order; scores_TK (T, K) fp32 or
    None.
    """
    d = y_Rd.shape[1]
    o = torch.empty(T, d, dtype=y_Rd.dtype, device=y_Rd.device)
    if T:
        block_d = min(2048, next_power_of_2(d))
        block_t = 32 if INTERPRET else max(1, 1024 // block_d)
        launch_sized(
            _aggregate_kernel,
            (y_Rd.dtype, T, d, K, row_idx_R is None, scores_TK is None),
            (y_Rd, row_idx_R, scores_TK, o),
            lambda: (
                (cdiv(T, block_t), cdiv(d, block_d)),
                (y_Rd, row_idx_R, scores_TK, o, T, d, K, min(K, 8), block_t, block_d),
                {},
            ),
        )
    return o


def aggregate_torch(
    y_Rd: torch.Tensor, row_idx_R: torch.Tensor | None, scores_TK: torch.Tensor | None, T: int, K: int
) -> torch.Tensor:
    """Plain-torch twin of `aggregate`."""
    wide = widened(y_Rd.dtype)
    y = (y_Rd if row_idx_R is None else y_Rd[row_idx_R.long()]).to(wide).view(T, K, y_Rd.shape[1])
    return (y if scores_TK is None else y * scores_TK.to(wide)[..., None]).sum(1).to(y_Rd.dtype)


@triton.jit
def _gather_rows_kernel(
    x_ptr, gather_ptr, scores_ptr, out_ptr, R, d, stride_x, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (r < R)[:, None] & (cols < d)[None, :]
    token = tl.load(gather_ptr + r, mask=r < R, other=0).to(tl.int64)
    x = tl.load(x_ptr + token[:, None] * stride_x + cols[None, :], mask=mask)
    if scores_ptr is not None:
        x = narrow(x.to(tl.float32) * tl.load(scores_ptr + r, mask=r < R)[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * d + cols[None, :], x, mask=mask)


def gather_rows(x_Td: torch.Tensor, gather_idx_R: torch.Tensor, scores_R: torch.Tensor | None = None) -> torch.Tensor:
    """Rows (R, d) of x_Td (T, d) in expert order, as a kernel of its own (`gather=separate`).

    Each times its score where scores_R (R,) fp32 is given: dY of dO (`ds=from_y`).
    """
    R, d = gather_idx_R.numel(), x_Td.shape[1]
    out = torch.empty(R, d, dtype=x_Td.dtype, device=x_Td.device)
    if R:
        block_d = min(2048, next_power_of_2(d))
        block_r = 32 if INTERPRET else max(1, 4096 // block_d)
        launch(
            _gather_rows_kernel,
            (cdiv(R, block_r), cdiv(d, block_d)),
            (x_Td, gather_idx_R, scores_R, out, R, d, x_Td.stride(0), block_r, block_d),
        )
    return out


def gather_rows_torch(
    x_Td: torch.Tensor, gather_idx_R: torch.Tensor, scores_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain-torch twin of `gather_rows`."""
    rows = x_Td[gather_idx_R.long()]
    wide = widened(x_Td.dtype)
    return rows if scores_R is None else (rows.to(wide) * scores_R[:, None].to(wide)).to(x_Td.dtype)


@triton.jit
def _scores_of_y_kernel(
    do_ptr, y_ptr, gather_ptr, slot_idx_ptr, ds_ptr, R, d, stride_do, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = r < R
    token = tl.load(gather_ptr + r, mask=inside, other=0).to(tl.int64)
    row = r if slot_idx_ptr is None else tl.load(slot_idx_ptr + r, mask=inside, other=0)
    ds = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for col in range(0, d, BLOCK_D):
        cols = col + tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (cols < d)[None, :]
        do = tl.load(do_ptr + token[:, None] * stride_do + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row.to(tl.int64)[:, None] * d + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        ds += tl.sum(do * y, axis=1)
    tl.store(ds_ptr + r, ds, mask=inside)


def scores_of_y(
    do_Td: torch.Tensor, y_Rd: torch.Tensor, gather_idx_R: torch.Tensor, slot_idx_R: torch.Tensor | None
) -> torch.Tensor:
    """dS (1, R) fp32 in row order as <dO, Y>, the way of `ds=from_y`: one partial, as those of `d_act`.

    do_Td (T, d); y_Rd (R, d) in row order, or in slot order where slot_idx_R row -> slot is given.
    """
    R, d = y_Rd.shape
    ds = torch.empty(1, R, dtype=torch.float32, device=y_Rd.device)
    if R:
        block_d = min(1024, next_power_of_2(d))
        block_r = 32 if INTERPRET else max(1, 2048 // block_d)
        launch(
            _scores_of_y_kernel,
            (cdiv(R, block_r),),
            (do_Td, y_Rd, gather_idx_R, slot_idx_R, ds, R, d, do_Td.stride(0), block_r, block_d),
        )
    return ds


def scores_of_y_torch(
    do_Td: torch.Tensor, y_Rd: torch.Tensor, gather_idx_R: torch.Tensor, slot_idx_R: torch.Tensor | None
) -> torch.Tensor:
    """Plain-torch twin of `scores_of_y`."""
    wide = widened(y_Rd.dtype)
    y = y_Rd if slot_idx_R is None else y_Rd[slot_idx_R.long()]
    return (do_Td[gather_idx_R.long()].to(wide) * y.to(wide)).sum(1)[None]


def gather_rows_cost(shape: Shape, R: int, itemsize: int) -> Cost:
    """Tokens read through the routing, rows written."""
    rows = itemsize * R * shape.d
    return Cost(0, {"x": rows, "rows": rows}, {"x": itemsize * shape.T * shape.d})


def aggregate_cost(shape: Shape, R: int, itemsize: int) -> Cost:
    """Y read once, O written; 2 R d additions and products are not model FLOPs."""
    return Cost(0, {"y": itemsize * R * shape.d, "o": itemsize * shape.T * shape.d}, {})
