"""Weight gradients of the Hopper family: dW1_e = dH_e^T gather(X)_e and dW2_e = gather(dO)_e^T A'_e, warp-specialised.

The contraction runs over an expert's rows (varlen-K). P (R, H, n), in expert order, comes by TMA and is zero past the
expert's end; Q (T, d) comes row by row, each row's index read one block ahead, and repeats the expert's last row there.
An expert without rows gets zeros.
"""

from __future__ import annotations

from functools import partial

import torch

from sonic.kernels import tuning
from sonic.kernels import weight_grad as portable
from sonic.kernels.common import HopperTile, Launch, Tile, cdiv, launch_sized, num_sms, tma_ready
from sonic.kernels.hopper.gluon import async_copy, copy_rows, gl, gluon, mbarrier, tma, tma_load
from sonic.kernels.hopper.pipeline import (
    CHUNK,
    blocks,
    fits,
    fitting,
    grouped_tile,
    multiply,
    new_ring,
    ragged,
    ragged_row,
    rows_per_warpgroup,
    staging,
    staging_bytes,
    store_columns,
    zeros,
)
from sonic.kernels.metadata import Metadata


def configs(columns: int) -> list[Tile]:
    """Tiles worth trying; the contraction block k counts rows of an expert."""
    tiles = [
        HopperTile(128, 256, stages=4),
        HopperTile(128, 256, stages=4, group=4),
        HopperTile(128, 256, stages=3, buffers=4),
        HopperTile(256, 128, stages=4, buffers=1),
        HopperTile(256, 64, stages=4, buffers=1),
    ]
    return fitting(tiles, columns)


def check(tile: Tile) -> None:
    """Raise for a tile that the kernel cannot run, as `fits`."""
    fits(tile, staging_bytes(tile, tile.n // CHUNK))
    if tile.schedule != "cooperative":
        raise ValueError(f"schedule is {tile.schedule!r}; the weight gradients run cooperative only")


@gluon.jit
def _place(
    pid, offsets_ptr, tiles_n: gl.constexpr, num_p: gl.constexpr, num_q: gl.constexpr, Q_ROWS: gl.constexpr,
    BLOCK_P: gl.constexpr, BLOCK_Q: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Expert, half of P, first column of P and of Q, and the expert's rows of the pid-th output tile."""
    expert = pid // (num_p * num_q)
    tile = pid % (num_p * num_q)
    if Q_ROWS:
        q_tile, p_tile = grouped_tile(tile, num_q, num_p, GROUP)
    else:
        p_tile, q_tile = grouped_tile(tile, num_p, num_q, GROUP)
    start = gl.load(offsets_ptr + expert)
    end = gl.load(offsets_ptr + expert + 1)
    return expert, p_tile // tiles_n, p_tile % tiles_n * BLOCK_P, q_tile * BLOCK_Q, start, end


@gluon.jit
def _produce(
    ring, p_desc, q_ptr, q_desc, gather_ptr, offsets_ptr, E,
    tiles_n: gl.constexpr, num_p: gl.constexpr, num_q: gl.constexpr, d: gl.constexpr, stride_q: gl.constexpr,
    Q_ROWS: gl.constexpr, GATHER: gl.constexpr, BLOCK_P: gl.constexpr, BLOCK_Q: gl.constexpr, K: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    p_bytes: gl.constexpr = BLOCK_P * K * 2
    q_bytes: gl.constexpr = BLOCK_Q * K * 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, K, layout=gl.SliceLayout(1, layout))
    num_tiles = E * num_p * num_q
    first = gl.program_id(0)
    _e, h, n0, d0, start, end = _place(
        gl.minimum(first, num_tiles - 1), offsets_ptr, tiles_n, num_p, num_q, Q_ROWS, BLOCK_P, BLOCK_Q, GROUP
    )
    _e, h1, n1, d1, start1, end1 = _place(
        gl.minimum(first + PROGRAMS, num_tiles - 1),
        offsets_ptr, tiles_n, num_p, num_q, Q_ROWS, BLOCK_P, BLOCK_Q, GROUP,
    )  # fmt: skip
    if GATHER:
        source = gl.load(gather_ptr + gl.minimum(start + rows, end - 1), mask=start + rows * 0 < end, other=0)
    stage = 0
    phase = 1
    for pid in range(first, num_tiles, PROGRAMS):
        _e, h2, n2, d2, start2, end2 = _place(
            gl.minimum(pid + 2 * PROGRAMS, num_tiles - 1),
            offsets_ptr, tiles_n, num_p, num_q, Q_ROWS, BLOCK_P, BLOCK_Q, GROUP,
        )  # fmt: skip
        if GATHER:
            cols = d0 + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, layout))
            # the next tile's first rows, as this tile's are at hand
            coming = gl.load(gather_ptr + gl.minimum(start1 + rows, end1 - 1), mask=start1 + rows * 0 < end1, other=0)
        # not range(start, end, K): Triton 3.6 overlooks that the outer loop carries what only bounds an inner one
        for step in range((end - start + K - 1) // K):
            row = start + step * K
            if GATHER:
                after = gl.load(gather_ptr + gl.minimum(row + K + rows, end - 1))
            mbarrier.wait(ring.empty.index(stage), phase)
            bar = ring.full.index(stage)
            p_stage = ring.b.index(stage) if Q_ROWS else ring.a.index(stage)
            q_stage = ring.a.index(stage) if Q_ROWS else ring.b.index(stage)
            if GATHER:
                mbarrier.expect(bar, p_bytes)
            else:
                mbarrier.expect(bar, p_bytes + q_bytes)
                tma_load(q_desc, [0x40000000, end, 0, ragged_row(row, end), d0], bar, q_stage)
            tma_load(p_desc, [0x40000000, end, h, ragged_row(row, end), n0], bar, p_stage)
            if GATHER:
                at = q_ptr + (gl.expand_dims(source.to(gl.int64) * stride_q, 1) + gl.expand_dims(cols, 0))
                if d % BLOCK_Q == 0:
                    copy_rows(q_stage.reshape((K, BLOCK_Q)), at)
                else:
                    copy_rows(q_stage.reshape((K, BLOCK_Q)), at, mask=gl.expand_dims(cols < d, 0))
                async_copy.mbarrier_arrive(bar, increment_count=False)
                source = after
            stage += 1
            if stage == ring.STAGES:
                stage = 0
                phase ^= 1
        if GATHER:
            source = coming
        h = h1
        n0 = n1
        d0 = d1
        start = start1
        end = end1
        h1 = h2
        n1 = n2
        d1 = d2
        start1 = start2
        end1 = end2


@gluon.jit
def _consume(
    WG: gl.constexpr, ring, out_desc, staging, offsets_ptr, E,
    tiles_n: gl.constexpr, num_p: gl.constexpr, num_q: gl.constexpr, Q_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    BLOCK_P: gl.constexpr = BLOCK_N if Q_ROWS else BLOCK_M
    BLOCK_Q: gl.constexpr = BLOCK_M if Q_ROWS else BLOCK_N
    ROWS: gl.constexpr = BLOCK_M // 2
    done = 0
    for pid in range(gl.program_id(0), E * num_p * num_q, PROGRAMS):
        expert, h, n0, d0, start, end = _place(pid, offsets_ptr, tiles_n, num_p, num_q, Q_ROWS, BLOCK_P, BLOCK_Q, GROUP)
        steps = (end - start + K - 1) // K
        acc = multiply(ring, zeros(ROWS, BLOCK_N), done, steps, WG, BLOCK_M, K, False, False, True)
        done += steps
        row = d0 if Q_ROWS else n0
        col = n0 if Q_ROWS else d0
        store_columns(acc, out_desc, staging, 0, expert, 0, h, row + WG * ROWS, col)
    tma.store_wait(pendings=0)


@gluon.jit
def _weight_grad_kernel(
    q_ptr, q_desc, p_desc, out_desc, gather_ptr, offsets_ptr, E,
    tiles_n: gl.constexpr, num_p: gl.constexpr, num_q: gl.constexpr, d: gl.constexpr, stride_q: gl.constexpr,
    Q_ROWS: gl.constexpr, GATHER: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr, CHUNK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    BLOCK_P: gl.constexpr = BLOCK_N if Q_ROWS else BLOCK_M
    BLOCK_Q: gl.constexpr = BLOCK_M if Q_ROWS else BLOCK_N
    ROWS: gl.constexpr = BLOCK_M // 2
    WARPS: gl.constexpr = 4 if GATHER else 1
    dtype: gl.constexpr = p_desc.dtype
    p = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, K, BLOCK_P], p_desc.layout)
    q = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, K, BLOCK_Q], p_desc.layout)
    NO: gl.constexpr = False
    if Q_ROWS:
        ring = new_ring(q, p, STAGES, NO, GATHER, WARPS)
    else:
        ring = new_ring(p, q, STAGES, NO, GATHER, WARPS)
    staging0 = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 1, ROWS, CHUNK], out_desc.layout)
    staging1 = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 1, ROWS, CHUNK], out_desc.layout)
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                W0, ring, out_desc, staging0, offsets_ptr, E, tiles_n, num_p, num_q, Q_ROWS,
                BLOCK_M, BLOCK_N, K, GROUP, PROGRAMS,
            )),
            (_consume, (
                W1, ring, out_desc, staging1, offsets_ptr, E, tiles_n, num_p, num_q, Q_ROWS,
                BLOCK_M, BLOCK_N, K, GROUP, PROGRAMS,
            )),
            (_produce, (
                ring, p_desc, q_ptr, q_desc, gather_ptr, offsets_ptr, E, tiles_n, num_p, num_q, d, stride_q,
                Q_ROWS, GATHER, BLOCK_P, BLOCK_Q, K, GROUP, PROGRAMS, WARPS,
            )),
        ],
        [4, WARPS], [208, 88],
    )  # fmt: skip


def _weight_grad(
    p: torch.Tensor, q: torch.Tensor, out: torch.Tensor, meta: Metadata, tile: Tile, *, q_rows: bool, gather: bool
) -> None:
    """Fill out, (E, d, n) with `q_rows` or (E, H, n, d), from p (R, H n) and q."""
    H = out.shape[1] if out.dim() == 4 else 1
    E, d, n = out.shape[0], q.shape[1], p.shape[1] // H

    def build() -> Launch:
        block_p, block_q = (tile.n, tile.m) if q_rows else (tile.m, tile.n)
        check(tile)
        rows = rows_per_warpgroup(tile)
        tiles_n, num_q = cdiv(n, block_p), cdiv(d, block_q)
        programs = num_sms(q.device)
        arguments = (
            q, None if gather else ragged(q, 1, tile.k, block_q),
            ragged(p, H, tile.k, block_p), blocks(out, [1, 1, 1, rows, CHUNK]),
            meta.gather_idx_R if gather else None, meta.offsets_E1, E,
            tiles_n, H * tiles_n, num_q, d, q.stride(0), q_rows, gather, tile.m, tile.n, tile.k, tile.stages,
            staging(tile, tile.n // CHUNK), CHUNK, tile.group, programs,
        )  # fmt: skip
        return (programs,), arguments, tile.options()

    launch_sized(
        _weight_grad_kernel,
        (q.dtype, q.shape, q.stride(), p.shape, p.stride(), out.shape, out.stride(), q_rows, gather, tile),
        (q, p, out, meta.gather_idx_R, meta.offsets_E1),
        build,
    )


def weight_grad_1(
    x: torch.Tensor, dh_R2n: torch.Tensor, out_E2nd: torch.Tensor, meta: Metadata, *, gather: bool = True,
    tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `sonic.kernels.weight_grad.weight_grad_1`."""
    if not tma_ready(x, dh_R2n, out_E2nd):
        return portable.weight_grad_1(x, dh_R2n, out_E2nd, meta, gather=gather)
    E, _, n, d = out_E2nd.shape
    if tile is None:
        rerun = partial(weight_grad_1, x, dh_R2n, out_E2nd, meta, gather=gather)
        tile = tuning.choose("hopper.weight_grad_1", d, n, E, x.dtype, lambda: configs(d), rerun)
    _weight_grad(dh_R2n, x, out_E2nd, meta, tile, q_rows=False, gather=gather)
    return out_E2nd


def weight_grad_2(
    do: torch.Tensor, ap_Rn: torch.Tensor, out_Edn: torch.Tensor, meta: Metadata, *, gather: bool = True,
    tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `sonic.kernels.weight_grad.weight_grad_2`."""
    if not tma_ready(do, ap_Rn, out_Edn):
        return portable.weight_grad_2(do, ap_Rn, out_Edn, meta, gather=gather)
    E, d, n = out_Edn.shape
    if tile is None:
        rerun = partial(weight_grad_2, do, ap_Rn, out_Edn, meta, gather=gather)
        tile = tuning.choose("hopper.weight_grad_2", d, n, E, do.dtype, lambda: configs(n), rerun)
    _weight_grad(ap_Rn, do, out_Edn, meta, tile, q_rows=True, gather=gather)
    return out_Edn
