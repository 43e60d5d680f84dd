"""Up-projection of the Hopper family: H_e = gather(X) W1_e^T and A_e = silu(gate) * up in one warp-specialised kernel.

One load brings the gate half-tile and the up half-tile of the same columns as one operand, so one wgmma yields both and
SwiGLU stays in registers. H and A leave by TMA in chunks of 64 columns through the same staging buffers.
"""

from __future__ import annotations

from functools import partial

import torch

from sonic.kernels import tuning
from sonic.kernels import up_proj as portable
from sonic.kernels.common import HopperTile, Launch, Tile, launch_sized, num_sms, tma_ready
from sonic.kernels.hopper.gluon import gl, gluon, tma
from sonic.kernels.hopper.pipeline import (
    CHUNK,
    blocks,
    fits,
    fitting,
    halves,
    multiply,
    new_ring,
    output_tile,
    produce,
    ragged,
    ragged_row,
    row_blocks,
    rows_of,
    rows_per_warpgroup,
    staging,
    staging_bytes,
    store_block,
    take_turn,
    zeros,
)
from sonic.kernels.metadata import Metadata


def configs(n: int) -> list[Tile]:
    """Tiles worth trying; a block covers tile.n/2 gate and tile.n/2 up columns."""
    tiles = [
        HopperTile(128, 256, stages=4, group=4),
        HopperTile(128, 256, stages=4),
        HopperTile(128, 256, stages=3, buffers=3),
        HopperTile(128, 256, stages=3, buffers=3, group=4),
        HopperTile(128, 128, stages=4, schedule="pingpong", buffers=3),
        HopperTile(128, 128, stages=5),
    ]
    return fitting(tiles, 2 * n, 128)


def check(tile: Tile) -> None:
    """Raise for a tile that the kernel cannot run, as `fits`."""
    fits(tile, staging_bytes(tile, 3 * (tile.n // 2 // CHUNK)), least=2 * CHUNK)


@gluon.jit
def _write(
    gate, up, h_desc, a_desc, staging, SLOT: gl.constexpr, end, row, col, WITH_H: gl.constexpr, WITH_ACT: gl.constexpr
):
    """H and A of a tile, a chunk of columns at a time."""
    N: gl.constexpr = gate.shape[1]
    CHUNK: gl.constexpr = staging.shape[5]
    STORES: gl.constexpr = 2 * WITH_H + WITH_ACT
    if N == CHUNK:
        if WITH_H:
            store_block(gate, h_desc, staging, SLOT, 0x40000000, end, 0, row, col)
            store_block(up, h_desc, staging, SLOT + 1, 0x40000000, end, 1, row, col)
        if WITH_ACT:
            a = gate * up / (1.0 + gl.exp(-gate))
            store_block(a, a_desc, staging, SLOT + 2 * WITH_H, 0x40000000, end, 0, row, col)
    else:
        gate0, gate1 = halves(gate)
        up0, up1 = halves(up)
        _write(gate0, up0, h_desc, a_desc, staging, SLOT, end, row, col, WITH_H, WITH_ACT)
        NEXT: gl.constexpr = SLOT + STORES * (N // 2 // CHUNK)
        _write(gate1, up1, h_desc, a_desc, staging, NEXT, end, row, col + N // 2, WITH_H, WITH_ACT)


@gluon.jit
def _consume(
    WG: gl.constexpr, ring, h_desc, a_desc, staging, map_ptr, limit, num_m,
    n: gl.constexpr, d: gl.constexpr, WITH_H: gl.constexpr, WITH_ACT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    steps: gl.constexpr = (d + K - 1) // K
    HALF: gl.constexpr = BLOCK_N // 2
    ROWS: gl.constexpr = BLOCK_M if ring.PINGPONG else BLOCK_M // 2
    STRIDE: gl.constexpr = 2 if ring.PINGPONG else 1
    FIRST: gl.constexpr = WG if ring.PINGPONG else 0
    num_n = (n + HALF - 1) // HALF
    done = FIRST * steps
    turn_phase = 1 - WG
    for pid in range(gl.program_id(0) + FIRST * PROGRAMS, num_m * num_n, STRIDE * PROGRAMS):
        _expert, row0, end, n_tile = output_tile(map_ptr, limit, pid, num_m, num_n, GROUP)
        take_turn(ring, turn_phase, WG)
        acc = multiply(ring, zeros(ROWS, BLOCK_N), done, steps, WG, BLOCK_M, K, True, True, True)
        turn_phase ^= 1
        done += STRIDE * steps
        row = row0
        if not ring.PINGPONG:
            row += WG * ROWS
        gate, up = halves(acc)
        _write(gate, up, h_desc, a_desc, staging, 0, end, ragged_row(row, end), n_tile * HALF, WITH_H, WITH_ACT)
    tma.store_wait(pendings=0)


@gluon.jit
def _up_proj_kernel(
    x_ptr, x_desc, w1_desc, h_desc, a_desc, gather_ptr, map_ptr, limit,
    n: gl.constexpr, d: gl.constexpr, stride_x: gl.constexpr,
    WITH_H: gl.constexpr, WITH_ACT: gl.constexpr, GATHER: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
    BUFFERS: gl.constexpr, CHUNK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK_M if PINGPONG else BLOCK_M // 2
    HALF: gl.constexpr = BLOCK_N // 2
    WARPS: gl.constexpr = 4 if GATHER else 1
    dtype: gl.constexpr = w1_desc.dtype
    x = row_blocks(x_desc, dtype, STAGES, BLOCK_M, K, GATHER)
    w = gl.allocate_shared_memory(dtype, [STAGES, 1, 2, HALF, K], w1_desc.layout)
    ring = new_ring(x, w, STAGES, PINGPONG, GATHER, WARPS)
    if WITH_H:
        staged: gl.constexpr = h_desc.layout
    else:
        staged: gl.constexpr = a_desc.layout
    staging0 = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 1, ROWS, CHUNK], staged)
    staging1 = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 1, ROWS, CHUNK], staged)
    num_m = gl.load(map_ptr + 3 * limit)
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    ONE: gl.constexpr = 1
    YES: gl.constexpr = True
    W_BYTES: gl.constexpr = BLOCK_N * K * 2
    gl.warp_specialize(
        [
            (_consume, (
                W0, ring, h_desc, a_desc, staging0, map_ptr, limit, num_m,
                n, d, WITH_H, WITH_ACT, BLOCK_M, BLOCK_N, K, GROUP, PROGRAMS,
            )),
            (_consume, (
                W1, ring, h_desc, a_desc, staging1, map_ptr, limit, num_m,
                n, d, WITH_H, WITH_ACT, BLOCK_M, BLOCK_N, K, GROUP, PROGRAMS,
            )),
            (produce, (
                ring, x_ptr, x_desc, w1_desc, gather_ptr, map_ptr, limit, num_m, n,
                d, stride_x, ONE, GATHER, YES, BLOCK_M, W_BYTES, HALF, K, GROUP, PROGRAMS, WARPS,
            )),
        ],
        [4, WARPS], [224, 56],
    )  # fmt: skip


def up_proj(
    x: torch.Tensor, w1_E2nd: torch.Tensor, meta: Metadata, *, gather: bool = True, with_act: bool = True,
    with_h: bool = True, tile: Tile | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """As `sonic.kernels.up_proj.up_proj`."""
    if not tma_ready(x, w1_E2nd):
        return portable.up_proj(x, w1_E2nd, meta, gather=gather, with_act=with_act, with_h=with_h)
    E, _, n, d = w1_E2nd.shape
    R = meta.R
    h = torch.empty(R, 2 * n, dtype=x.dtype, device=x.device) if with_h else None
    a = torch.empty(R, n, dtype=x.dtype, device=x.device) if with_act else None
    if tile is None:
        rerun = partial(up_proj, x, w1_E2nd, meta, gather=gather, with_act=with_act, with_h=with_h)
        tile = tuning.choose("hopper.up_proj", d, n, E, x.dtype, lambda: configs(n), rerun)
    tiles = meta.tile_map(tile.m)

    def build() -> Launch:
        check(tile)
        rows = rows_per_warpgroup(tile)
        buffers = staging(tile, (2 * with_h + with_act) * (tile.n // 2 // CHUNK))
        programs = num_sms(x.device)
        arguments = (
            x, None if gather else rows_of(x, 1, [1, tile.m, tile.k]), blocks(w1_E2nd, [1, 2, tile.n // 2, tile.k]),
            ragged(h, 2, rows) if with_h else None, ragged(a, 1, rows) if with_act else None,
            meta.gather_idx_R if gather else None, tiles.table, tiles.limit,
            n, d, x.stride(0), with_h, with_act, gather, tile.m, tile.n, tile.k, tile.stages,
            tile.schedule == "pingpong", buffers, CHUNK, tile.group, programs,
        )  # fmt: skip
        return (programs,), arguments, tile.options()

    launch_sized(
        _up_proj_kernel,
        (x.dtype, x.shape, x.stride(), w1_E2nd.shape, w1_E2nd.stride(), R, gather, with_h, with_act, tile),
        (x, w1_E2nd, h, a, meta.gather_idx_R, tiles.table),
        build,
    )
    return h, a
