"""Varlen-M grouped GEMM, warp-specialised: `down_proj`, `d_input` and `d_act_gemm` of the Hopper family.

Reads A (R, H, k) in expert order, or X (T, k) by row index, and B per expert as it is stored; writes Y (R, columns) in
expert order by TMA. Other destinations (`into`) are the portable family's.
"""

from __future__ import annotations

from functools import partial

import torch

from sonic.kernels import d_act as portable_d_act
from sonic.kernels import d_input as portable_d_input
from sonic.kernels import down_proj as portable_down
from sonic.kernels import tuning
from sonic.kernels.common import HopperTile, Launch, Tile, launch_sized, num_sms, tma_ready
from sonic.kernels.grouped_gemm import Into
from sonic.kernels.hopper.gluon import gl, gluon, tma
from sonic.kernels.hopper.pipeline import (
    CHUNK,
    blocks,
    fits,
    fitting,
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
    store_columns,
    take_turn,
    zeros,
)
from sonic.kernels.metadata import Metadata


def configs(columns: int) -> list[Tile]:
    """Tiles worth trying: short contractions want ping-pong, long ones the wide tile."""
    tiles = [
        HopperTile(128, 128, stages=5, schedule="pingpong"),
        HopperTile(128, 128, stages=5, schedule="pingpong", group=4),
        HopperTile(128, 256, stages=4),
        HopperTile(128, 256, stages=4, group=4),
        HopperTile(128, 128, stages=6),
    ]
    return fitting(tiles, columns, 128)


def check(tile: Tile) -> None:
    """Raise for a tile that the kernel cannot run, as `fits`."""
    fits(tile, staging_bytes(tile, tile.n // CHUNK))


@gluon.jit
def _consume(
    WG: gl.constexpr, ring, y_desc, staging, map_ptr, limit, num_m, columns,
    k_size: gl.constexpr, H: gl.constexpr, K_MAJOR: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    steps: gl.constexpr = H * ((k_size + K - 1) // K)
    ROWS: gl.constexpr = BLOCK_M if ring.PINGPONG else BLOCK_M // 2
    STRIDE: gl.constexpr = 2 if ring.PINGPONG else 1
    FIRST: gl.constexpr = WG if ring.PINGPONG else 0
    num_n = (columns + BLOCK_N - 1) // BLOCK_N
    done = FIRST * steps
    turn_phase = 1 - WG
    for pid in range(gl.program_id(0) + FIRST * PROGRAMS, num_m * num_n, STRIDE * PROGRAMS):
        _expert, row0, end, n_tile = output_tile(map_ptr, limit, pid, num_m, num_n, GROUP)
        take_turn(ring, turn_phase, WG)
        acc = multiply(ring, zeros(ROWS, BLOCK_N), done, steps, WG, BLOCK_M, K, True, K_MAJOR, True)
        turn_phase ^= 1
        done += STRIDE * steps
        row = row0
        if not ring.PINGPONG:
            row += WG * ROWS
        store_columns(acc, y_desc, staging, 0, 0x40000000, end, 0, ragged_row(row, end), n_tile * BLOCK_N)
    tma.store_wait(pendings=0)


@gluon.jit
def _grouped_gemm_kernel(
    x_ptr, x_desc, b_desc, y_desc, gather_ptr, map_ptr, limit, columns: gl.constexpr,
    k_size: gl.constexpr, stride_x: gl.constexpr, H: gl.constexpr, K_MAJOR: gl.constexpr, GATHER: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
    BUFFERS: gl.constexpr, CHUNK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK_M if PINGPONG else BLOCK_M // 2
    WARPS: gl.constexpr = 4 if GATHER else 1
    dtype: gl.constexpr = b_desc.dtype
    a = row_blocks(x_desc, dtype, STAGES, BLOCK_M, K, GATHER)
    if K_MAJOR:
        b = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, K], b_desc.layout)
    else:
        b = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, K, BLOCK_N], b_desc.layout)
    ring = new_ring(a, b, STAGES, PINGPONG, GATHER, WARPS)
    staging0 = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 1, ROWS, CHUNK], y_desc.layout)
    staging1 = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 1, ROWS, CHUNK], y_desc.layout)
    num_m = gl.load(map_ptr + 3 * limit)
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    W_BYTES: gl.constexpr = BLOCK_N * K * 2
    gl.warp_specialize(
        [
            (_consume, (
                W0, ring, y_desc, staging0, map_ptr, limit, num_m, columns,
                k_size, H, K_MAJOR, BLOCK_M, BLOCK_N, K, GROUP, PROGRAMS,
            )),
            (_consume, (
                W1, ring, y_desc, staging1, map_ptr, limit, num_m, columns,
                k_size, H, K_MAJOR, BLOCK_M, BLOCK_N, K, GROUP, PROGRAMS,
            )),
            (produce, (
                ring, x_ptr, x_desc, b_desc, gather_ptr, map_ptr, limit, num_m, columns,
                k_size, stride_x, H, GATHER, K_MAJOR, BLOCK_M, W_BYTES, BLOCK_N, K, GROUP, PROGRAMS, WARPS,
            )),
        ],
        [4, WARPS], [216 if GATHER else 232, 72 if GATHER else 40],
    )  # fmt: skip


def grouped_gemm(
    a: torch.Tensor, b: torch.Tensor, meta: Metadata, tile: Tile, *, k_major: bool, gather: bool = False
) -> torch.Tensor:
    """Y (R, columns): rows of every expert times its matrix.

    a (R, H k) contiguous, or with `gather` (T, k) with contiguous rows; b (E, columns, k) with `k_major`, else
    (E, k, columns) or (E, H, k, columns).
    """
    H = b.shape[1] if b.dim() == 4 else 1
    *_, columns, k = b.shape if k_major else b.transpose(-1, -2).shape
    y = torch.empty(meta.R, columns, dtype=a.dtype, device=a.device)
    tiles = meta.tile_map(tile.m)

    def build() -> Launch:
        check(tile)
        rows = rows_per_warpgroup(tile)
        programs = num_sms(a.device)
        arguments = (
            a, None if gather else rows_of(a, H, [1, tile.m, tile.k]),
            blocks(b, [1, 1, tile.n, tile.k] if k_major else [1, 1, tile.k, tile.n]), ragged(y, 1, rows),
            meta.gather_idx_R if gather else None, tiles.table, tiles.limit, columns,
            k, a.stride(0), H, k_major, gather, tile.m, tile.n, tile.k, tile.stages, tile.schedule == "pingpong",
            staging(tile, tile.n // CHUNK), CHUNK, tile.group, programs,
        )  # fmt: skip
        return (programs,), arguments, tile.options()

    launch_sized(
        _grouped_gemm_kernel,
        (a.dtype, a.shape, a.stride(), b.shape, b.stride(), meta.R, k_major, gather, tile),
        (a, b, y, meta.gather_idx_R, tiles.table),
        build,
    )
    return y


def down_proj(
    a_Rn: torch.Tensor, w2_Edn: torch.Tensor, meta: Metadata, *, into: Into = "rows",
    scores: torch.Tensor | None = None, tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `sonic.kernels.down_proj.down_proj`."""
    if into != "rows":
        return portable_down.down_proj(a_Rn, w2_Edn, meta, into=into, scores=scores, tile=tile)
    if not tma_ready(a_Rn, w2_Edn):
        return portable_down.down_proj(a_Rn, w2_Edn, meta)
    E, d, n = w2_Edn.shape
    if tile is None:
        rerun = partial(down_proj, a_Rn, w2_Edn, meta)
        tile = tuning.choose("hopper.down_proj", d, n, E, a_Rn.dtype, lambda: configs(d), rerun)
    return grouped_gemm(a_Rn, w2_Edn, meta, tile, k_major=True)


def d_input(
    dh_R2n: torch.Tensor, w1_E2nd: torch.Tensor, meta: Metadata, *, into: Into = "rows", tile: Tile | None = None
) -> torch.Tensor:
    """As `sonic.kernels.d_input.d_input`."""
    if into != "rows":
        return portable_d_input.d_input(dh_R2n, w1_E2nd, meta, into=into, tile=tile)
    if not tma_ready(dh_R2n, w1_E2nd):
        return portable_d_input.d_input(dh_R2n, w1_E2nd, meta)
    E, _, n, d = w1_E2nd.shape
    if tile is None:
        rerun = partial(d_input, dh_R2n, w1_E2nd, meta)
        tile = tuning.choose("hopper.d_input", d, n, E, dh_R2n.dtype, lambda: configs(d), rerun)
    return grouped_gemm(dh_R2n, w1_E2nd, meta, tile, k_major=False)


def d_act_gemm(
    do: torch.Tensor, w2_Edn: torch.Tensor, meta: Metadata, *, gather: bool = True, tile: Tile | None = None
) -> torch.Tensor:
    """As `sonic.kernels.d_act.d_act_gemm`."""
    if not tma_ready(do, w2_Edn):
        return portable_d_act.d_act_gemm(do, w2_Edn, meta, gather=gather)
    E, d, n = w2_Edn.shape
    if tile is None:
        rerun = partial(d_act_gemm, do, w2_Edn, meta, gather=gather)
        tile = tuning.choose("hopper.d_act_gemm", d, n, E, do.dtype, lambda: configs(n), rerun)
    return grouped_gemm(do, w2_Edn, meta, tile, k_major=False, gather=gather)
