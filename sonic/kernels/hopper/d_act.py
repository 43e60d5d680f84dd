"""Kernel dH of the Hopper family: dA' = gather(dO) W2, then dSwiGLU, A' and dS in the epilogue, warp-specialised.

Each consumer reads its own H by TMA, in chunks of 64 rows x 64 columns, the first two of which load under the
tensor-core loop. dH is written back in the place of H and leaves by TMA from there; dS leaves as one fp32 partial per
row and column tile.
"""

from __future__ import annotations

from functools import partial

import torch

from sonic.kernels import d_act as portable
from sonic.kernels import tuning
from sonic.kernels.common import HopperTile, Launch, Tile, cdiv, launch_sized, num_sms, tma_ready
from sonic.kernels.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma, tma_load, tma_store
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
    row_halves,
    rows_of,
    take_turn,
    zeros,
)
from sonic.kernels.metadata import Metadata

#: Chunks of H in shared memory per consumer. With one, a chunk would wait for a load that it issues itself later.
_SLOTS = 2


def configs(n: int) -> list[Tile]:
    """Tiles worth trying; `buffers` counts blocks of A' on their way out."""
    tiles = [
        HopperTile(128, 128, stages=4),
        HopperTile(128, 128, stages=4, group=4),
        HopperTile(128, 256, stages=3, buffers=1),
        HopperTile(128, 256, stages=3, buffers=1, group=4),
        HopperTile(128, 64, stages=5, schedule="pingpong"),
    ]
    return fitting(tiles, n)


def check(tile: Tile) -> None:
    """Raise for a tile that the kernel cannot run, as `fits`."""
    buffers = tile.buffers if isinstance(tile, HopperTile) else 0
    fits(tile, 2 * (2 * _SLOTS + buffers) * 64 * CHUNK * 2, chunks=_SLOTS)


@gluon.jit
def _load_h(PART: gl.constexpr, h_desc, h_slots, loaded, end, row0, col0, PER_ROW: gl.constexpr):
    """Start to load the PART-th chunk of a tile: gate and up columns into the two halves of its slot."""
    ROWS: gl.constexpr = h_slots.shape[4]
    CHUNK: gl.constexpr = h_slots.shape[5]
    SLOT: gl.constexpr = PART % (h_slots.shape[0] // 2)
    bar = loaded.index(SLOT)
    row = ragged_row(row0 + PART // PER_ROW * ROWS, end)
    col = col0 + PART % PER_ROW * CHUNK
    mbarrier.expect(bar, 2 * ROWS * CHUNK * 2)
    tma_load(h_desc, [0x40000000, end, 0, row, col], bar, h_slots.index(2 * SLOT))
    tma_load(h_desc, [0x40000000, end, 1, row, col], bar, h_slots.index(2 * SLOT + 1))


@gluon.jit
def _chunk(
    da_prime, PART: gl.constexpr, tiles, scores, h_desc, dh_desc, ap_desc, h_slots, ap_blocks, loaded, end, row0, col0,
    PER_ROW: gl.constexpr, CHUNKS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """dH and A' of the PART-th chunk, stored; returns its part of dS."""
    SLOTS: gl.constexpr = h_slots.shape[0] // 2
    ROWS: gl.constexpr = h_slots.shape[4]
    CHUNK: gl.constexpr = h_slots.shape[5]
    dtype: gl.constexpr = dh_desc.dtype
    SLOT: gl.constexpr = PART % SLOTS
    gate_slot = h_slots.index(2 * SLOT)
    up_slot = h_slots.index(2 * SLOT + 1)
    gate_block = gate_slot.reshape((ROWS, CHUNK))
    up_block = up_slot.reshape((ROWS, CHUNK))
    # a slot is filled CHUNKS / SLOTS times per tile
    mbarrier.wait(loaded.index(SLOT), (tiles * (CHUNKS // SLOTS) + PART // SLOTS) & 1)
    gate = gate_block.load(layout).to(gl.float32)
    up = up_block.load(layout).to(gl.float32)
    da_prime = gl.convert_layout(da_prime, layout)
    sigmoid = 1.0 / (1.0 + gl.exp(-gate))
    silu = gate * sigmoid
    a = silu * up
    ds = gl.sum(da_prime * a, 1)
    s = gl.expand_dims(scores, 1)
    da = da_prime * s
    dgate = da * up * (sigmoid + silu * (1.0 - sigmoid))
    if PART >= 1 and PART - 1 + SLOTS < CHUNKS:
        # the chunk before has left its slot, which can take the next load
        tma.store_wait(pendings=0)
        _load_h(PART - 1 + SLOTS, h_desc, h_slots, loaded, end, row0, col0, PER_ROW)
    else:
        # A' blocks are used in turn; a chunk makes three stores
        tma.store_wait(pendings=3 * (ap_blocks.shape[0] - 1))
    gate_block.store(dgate.to(dtype))
    up_block.store((da * silu).to(dtype))
    ap_block = ap_blocks.index(PART % ap_blocks.shape[0])
    ap_block.reshape((ROWS, CHUNK)).store((a * s).to(dtype))
    fence_async_shared()
    row = ragged_row(row0 + PART // PER_ROW * ROWS, end)
    col = col0 + PART % PER_ROW * CHUNK
    tma_store(dh_desc, [0x40000000, end, 0, row, col], gate_slot)
    tma_store(dh_desc, [0x40000000, end, 1, row, col], up_slot)
    tma_store(ap_desc, [0x40000000, end, 0, row, col], ap_block)
    return ds


@gluon.jit
def _columns(
    da_prime, PART: gl.constexpr, tiles, scores, h_desc, dh_desc, ap_desc, h_slots, ap_blocks, loaded, end, row0, col0,
    PER_ROW: gl.constexpr, CHUNKS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """`_chunk` over all columns of da_prime, the first of which is in chunk PART."""
    N: gl.constexpr = da_prime.shape[1]
    CHUNK: gl.constexpr = h_slots.shape[5]
    if N == CHUNK:
        ds = _chunk(
            da_prime, PART, tiles, scores, h_desc, dh_desc, ap_desc, h_slots, ap_blocks, loaded, end, row0, col0,
            PER_ROW, CHUNKS, layout,
        )  # fmt: skip
    else:
        left, right = halves(da_prime)
        NEXT: gl.constexpr = PART + N // 2 // CHUNK
        ds = _columns(
            left, PART, tiles, scores, h_desc, dh_desc, ap_desc, h_slots, ap_blocks, loaded, end, row0, col0,
            PER_ROW, CHUNKS, layout,
        )  # fmt: skip
        ds += _columns(
            right, NEXT, tiles, scores, h_desc, dh_desc, ap_desc, h_slots, ap_blocks, loaded, end, row0, col0,
            PER_ROW, CHUNKS, layout,
        )  # fmt: skip
    return ds


@gluon.jit
def _consume(
    WG: gl.constexpr, ring, h_desc, dh_desc, ap_desc, scores_ptr, ds_ptr, h_slots, ap_blocks, loaded,
    map_ptr, limit, num_m, R, d: gl.constexpr, n: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    steps: gl.constexpr = (d + K - 1) // K
    EARLY: gl.constexpr = steps // 4
    ROWS: gl.constexpr = BLOCK_M if ring.PINGPONG else BLOCK_M // 2
    STRIDE: gl.constexpr = 2 if ring.PINGPONG else 1
    FIRST: gl.constexpr = WG if ring.PINGPONG else 0
    CHUNK: gl.constexpr = h_slots.shape[5]
    CHUNK_ROWS: gl.constexpr = h_slots.shape[4]
    PER_ROW: gl.constexpr = BLOCK_N // CHUNK
    PARTS: gl.constexpr = ROWS // CHUNK_ROWS
    CHUNKS: gl.constexpr = PARTS * PER_ROW
    SLOTS: gl.constexpr = h_slots.shape[0] // 2
    gl.static_assert(CHUNKS % SLOTS == 0)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    num_n = (n + BLOCK_N - 1) // BLOCK_N
    num_tiles = num_m * num_n
    done = FIRST * steps
    turn_phase = 1 - WG
    tiles = 0
    first = gl.program_id(0) + FIRST * PROGRAMS
    # where a tile lies is read one tile ahead, since its H is loaded before anything else
    _e, row1, end1, n_tile1 = output_tile(map_ptr, limit, gl.minimum(first, num_tiles - 1), num_m, num_n, GROUP)
    for pid in range(first, num_tiles, STRIDE * PROGRAMS):
        row0 = row1 + 0
        end = end1 + 0
        n_tile = n_tile1 + 0
        _e, row1, end1, n_tile1 = output_tile(
            map_ptr, limit, gl.minimum(pid + STRIDE * PROGRAMS, num_tiles - 1), num_m, num_n, GROUP
        )
        if not ring.PINGPONG:
            row0 += WG * ROWS
        col0 = n_tile * BLOCK_N
        rows = row0 + gl.arange(0, CHUNK_ROWS, layout=gl.SliceLayout(1, layout))
        scores = gl.load(scores_ptr + rows, mask=rows < end, other=0.0)
        take_turn(ring, turn_phase, WG)
        acc = zeros(ROWS, BLOCK_N)
        if EARLY > 0:
            acc = multiply(ring, acc, done, EARLY, WG, BLOCK_M, K, True, False, False)
        # the slots double as staging: they can take H once the last tile's results have left them, which is waited for
        # only after the loop has begun
        tma.store_wait(pendings=0)
        for i in gl.static_range(SLOTS):
            _load_h(i, h_desc, h_slots, loaded, end, row0, col0, PER_ROW)
        acc = multiply(ring, acc, done + EARLY, steps - EARLY, WG, BLOCK_M, K, True, False, True)
        turn_phase ^= 1
        done += STRIDE * steps
        ds_at = ds_ptr + n_tile.to(gl.int64) * R
        if PARTS == 1:
            ds = _columns(
                acc, 0, tiles, scores, h_desc, dh_desc, ap_desc, h_slots, ap_blocks, loaded, end, row0, col0,
                PER_ROW, CHUNKS, layout,
            )  # fmt: skip
            gl.store(ds_at + rows, ds, mask=rows < end)
        else:
            gl.static_assert(PARTS == 2)
            upper, lower = row_halves(acc)
            ds = _columns(
                upper, 0, tiles, scores, h_desc, dh_desc, ap_desc, h_slots, ap_blocks, loaded, end, row0, col0,
                PER_ROW, CHUNKS, layout,
            )  # fmt: skip
            gl.store(ds_at + rows, ds, mask=rows < end)
            rows += CHUNK_ROWS
            scores = gl.load(scores_ptr + rows, mask=rows < end, other=0.0)
            ds = _columns(
                lower, PER_ROW, tiles, scores, h_desc, dh_desc, ap_desc, h_slots, ap_blocks, loaded, end, row0, col0,
                PER_ROW, CHUNKS, layout,
            )  # fmt: skip
            gl.store(ds_at + rows, ds, mask=rows < end)
        tiles += 1
    tma.store_wait(pendings=0)


@gluon.jit
def _d_act_kernel(
    do_ptr, do_desc, w2_desc, h_desc, dh_desc, ap_desc, scores_ptr, ds_ptr, gather_ptr, map_ptr, limit, R,
    d: gl.constexpr, n: gl.constexpr, stride_do: gl.constexpr, GATHER: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
    SLOTS: gl.constexpr, BUFFERS: gl.constexpr, CHUNK: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = 4 if GATHER else 1
    dtype: gl.constexpr = w2_desc.dtype
    do = row_blocks(do_desc, dtype, STAGES, BLOCK_M, K, GATHER)
    w = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, K, BLOCK_N], w2_desc.layout)
    ring = new_ring(do, w, STAGES, PINGPONG, GATHER, WARPS)
    h_slots0 = gl.allocate_shared_memory(dtype, [2 * SLOTS, 1, 1, 1, 64, CHUNK], h_desc.layout)
    h_slots1 = gl.allocate_shared_memory(dtype, [2 * SLOTS, 1, 1, 1, 64, CHUNK], h_desc.layout)
    ap_blocks0 = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 1, 64, CHUNK], ap_desc.layout)
    ap_blocks1 = gl.allocate_shared_memory(dtype, [BUFFERS, 1, 1, 1, 64, CHUNK], ap_desc.layout)
    loaded0 = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    loaded1 = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(loaded0.index(i), count=1)
        mbarrier.init(loaded1.index(i), count=1)
    num_m = gl.load(map_ptr + 3 * limit)
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    ONE: gl.constexpr = 1
    NO: gl.constexpr = False
    W_BYTES: gl.constexpr = BLOCK_N * K * 2
    gl.warp_specialize(
        [
            (_consume, (
                W0, ring, h_desc, dh_desc, ap_desc, scores_ptr, ds_ptr, h_slots0, ap_blocks0, loaded0,
                map_ptr, limit, num_m, R, d, n, BLOCK_M, BLOCK_N, K, GROUP, PROGRAMS,
            )),
            (_consume, (
                W1, ring, h_desc, dh_desc, ap_desc, scores_ptr, ds_ptr, h_slots1, ap_blocks1, loaded1,
                map_ptr, limit, num_m, R, d, n, BLOCK_M, BLOCK_N, K, GROUP, PROGRAMS,
            )),
            (produce, (
                ring, do_ptr, do_desc, w2_desc, gather_ptr, map_ptr, limit, num_m, n,
                d, stride_do, ONE, GATHER, NO, BLOCK_M, W_BYTES, BLOCK_N, K, GROUP, PROGRAMS, WARPS,
            )),
        ],
        [4, WARPS], [224, 56],
    )  # fmt: skip


def d_act(
    do: torch.Tensor, w2_Edn: torch.Tensor, h_R2n: torch.Tensor, scores_R: torch.Tensor, meta: Metadata, *,
    gather: bool = True, with_ap: bool = True, tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """As `sonic.kernels.d_act.d_act`, which also runs what leaves A' out."""
    if not with_ap or not tma_ready(do, w2_Edn, h_R2n):
        return portable.d_act(do, w2_Edn, h_R2n, scores_R, meta, gather=gather, with_ap=with_ap)
    E, d, n = w2_Edn.shape
    R = meta.R
    if tile is None:
        rerun = partial(d_act, do, w2_Edn, h_R2n, scores_R, meta, gather=gather)
        tile = tuning.choose("hopper.d_act", d, n, E, do.dtype, lambda: configs(n), rerun)
    dh = torch.empty(R, 2 * n, dtype=do.dtype, device=do.device)
    ap = torch.empty(R, n, dtype=do.dtype, device=do.device)
    ds = torch.empty(cdiv(n, tile.n), R, dtype=torch.float32, device=do.device)
    tiles = meta.tile_map(tile.m)

    def build() -> Launch:
        check(tile)
        programs = num_sms(do.device)
        arguments = (
            do, None if gather else rows_of(do, 1, [1, tile.m, tile.k]),
            blocks(w2_Edn, [1, 1, tile.k, tile.n]),
            ragged(h_R2n, 2, 64), ragged(dh, 2, 64), ragged(ap, 1, 64),
            scores_R, ds, meta.gather_idx_R if gather else None, tiles.table, tiles.limit, R,
            d, n, do.stride(0), gather, tile.m, tile.n, tile.k, tile.stages, tile.schedule == "pingpong",
            _SLOTS, tile.buffers, CHUNK, tile.group, programs,
        )  # fmt: skip
        return (programs,), arguments, tile.options()

    launch_sized(
        _d_act_kernel,
        (do.dtype, do.shape, do.stride(), w2_Edn.shape, w2_Edn.stride(), R, h_R2n.stride(0), gather, tile),
        (do, w2_Edn, h_R2n, dh, ap, scores_R, ds, meta.gather_idx_R, tiles.table),
        build,
    )
    return dh, ap, ds
