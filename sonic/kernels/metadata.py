"""Routing metadata: from expert ids in token order to rows sorted by expert, without a host synchronisation.

Reads ids (T, K) int32. Writes, for R = T K rows:

    offsets_E1       exclusive prefix sum of the rows per expert (counts_E), with the total last
    slot_idx_R       row -> slot t K + k that it serves
    gather_idx_R     row -> token t
    row_idx_R        slot -> row, the inverse of slot_idx

Rows of one expert keep the order of their slots, so every later sum has one order: the layer is deterministic.
Three launches: a histogram per block of slots, a prefix sum over blocks and experts, and the scatter, which also maps
output tiles of the usual height to experts; `tile_map` does so for another height.

Example: ids [[0, 2], [2, 1]], E = 3 -> counts [1, 1, 2], offsets [0, 1, 2, 4], slot_idx [0, 3, 1, 2], gather_idx [0, 1,
0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
import triton
import triton.language as tl

from sonic.kernels.common import INTERPRET, Cost, cdiv, launch_sized, next_power_of_2
from sonic.shapes import Shape

#: Slots per program, which the scatter sorts by expert; the interpreter sorts few at once far sooner.
_BLOCK = 64 if INTERPRET else 512
#: Slots per program of `restore`.
_RESTORE_BLOCK = 512
#: Blocks and experts that one step of the prefix sum takes.
_PREFIX_ROWS, _PREFIX_COLS = 1024, 4
#: Tile height of most GEMM kernels, whose map comes with the metadata.
_TILE_M = 64 if INTERPRET else 128


@dataclass(frozen=True)
class Metadata:
    """Who goes where; see the module's table. All int32. Tile maps are made on first use and kept."""

    offsets_E1: torch.Tensor
    slot_idx_R: torch.Tensor
    gather_idx_R: torch.Tensor
    row_idx_R: torch.Tensor
    T: int
    maps: dict[int, TileMap] = field(default_factory=dict)

    @property
    def R(self) -> int:
        return self.row_idx_R.numel()

    @property
    def counts_E(self) -> torch.Tensor:
        return self.offsets_E1.diff()

    def tile_map(self, m: int) -> TileMap:
        """Output tiles of height m."""
        if m not in self.maps:
            self.maps[m] = tile_map(self.offsets_E1, self.R, m)
        return self.maps[m]

    def experts(self) -> list[tuple[int, int, int]]:
        """(expert, first row, end row) of every expert that has rows, on the host: for the plain-torch twins."""
        offsets = self.offsets_E1.tolist()
        return [(e, i, j) for e, (i, j) in enumerate(pairwise(offsets)) if j > i]


@dataclass(frozen=True)
class TileMap:
    """Output tiles of a given height m, in expert order: int32 table (3 limit + 1) of expert, first row, end row, and
    the count.

    `limit` bounds the count without knowing the routing: R/m full tiles and one partial tile per expert.
    """

    table: torch.Tensor
    limit: int
    m: int


@triton.jit
def _histogram_kernel(ids_ptr, partial_ptr, finished_ptr, R, E, BLOCK: tl.constexpr, E_PAD: tl.constexpr):
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    # slots past the end fall into a bin of their own, which is not stored
    ids = tl.load(ids_ptr + slots, mask=slots < R, other=E_PAD - 1)
    counts = tl.histogram(ids, E_PAD)
    e = tl.arange(0, E_PAD)
    tl.store(partial_ptr + block.to(tl.int64) * E + e, counts, mask=e < E)
    if block == 0:
        tl.store(finished_ptr, 0)


@triton.jit
def prefix_of_blocks(partial_ptr, counts_ptr, column, blocks, E, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Of the `column`-th COLS experts: exclusive prefix of partial (blocks, E) over blocks, in place, and totals."""
    e = column * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), dtype=tl.int32)
    for first in range(0, blocks, ROWS):
        b = first + tl.arange(0, ROWS)
        at = partial_ptr + b.to(tl.int64)[:, None] * E + e[None, :]
        mask = (b < blocks)[:, None] & (e < E)[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, tl.cumsum(counts, axis=0) - counts + total[None, :], mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(counts_ptr + e, total, mask=e < E)


@triton.jit
def offsets_of_counts(counts_ptr, offsets_ptr, E, E_PAD: tl.constexpr):
    """Offsets of all experts from counts that other programs have written; returns where each expert ends."""
    every = tl.arange(0, E_PAD)
    counts = tl.load(counts_ptr + every, mask=every < E, other=0, cache_modifier=".cg")
    ends = tl.cumsum(counts, axis=0)
    tl.store(offsets_ptr + every, ends - counts, mask=every < E)
    return ends


@triton.jit
def _prefix_kernel(
    partial_ptr, counts_ptr, finished_ptr, offsets_ptr, blocks, E, R,
    ROWS: tl.constexpr, COLS: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """Exclusive prefix over blocks, in place, for COLS experts; the totals are the counts, and the program that ends
    last turns all of them into offsets."""
    prefix_of_blocks(partial_ptr, counts_ptr, tl.program_id(0), blocks, E, ROWS, COLS)
    tl.debug_barrier()  # every thread's counts, before one thread says so
    if tl.atomic_add(finished_ptr, 1) == tl.num_programs(0) - 1:
        offsets_of_counts(counts_ptr, offsets_ptr, E, E_PAD)
        tl.store(offsets_ptr + E, R)


@triton.jit
def _write_tile_map(
    table_ptr, first, offsets_ptr, E, limit, TILE_M: tl.constexpr, BLOCK: tl.constexpr, E_PAD: tl.constexpr
):
    """Entries `first` .. `first + BLOCK` of a tile map."""
    e = tl.arange(0, E_PAD)
    starts = tl.load(offsets_ptr + e, mask=e < E, other=0)
    counts = tl.load(offsets_ptr + e + 1, mask=e < E, other=0) - starts
    last_tile = tl.cumsum((counts + TILE_M - 1) // TILE_M, axis=0)
    total = tl.max(last_tile)
    tile = first + tl.arange(0, BLOCK)
    done = last_tile[None, :] <= tile[:, None]  # experts whose tiles all come before this one
    expert = tl.minimum(tl.sum(done.to(tl.int32), axis=1), E - 1)
    first_tile = tl.max(tl.where(done, last_tile[None, :], 0), axis=1)
    start = tl.load(offsets_ptr + expert)
    inside = tile < total
    tl.store(table_ptr + tile, expert, mask=inside)
    tl.store(table_ptr + limit + tile, start + (tile - first_tile) * TILE_M, mask=inside)
    tl.store(table_ptr + 2 * limit + tile, tl.load(offsets_ptr + expert + 1), mask=inside)
    if first == 0:
        tl.store(table_ptr + 3 * limit, total)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _scatter_kernel(
    ids_ptr, partial_ptr, offsets_ptr, token_ptr, slot_idx_ptr, gather_idx_ptr, row_idx_ptr, table_ptr,
    R, E, K, blocks, limit, BLOCK: tl.constexpr, E_PAD: tl.constexpr, TILE_M: tl.constexpr, MAP_BLOCK: tl.constexpr,
):  # fmt: skip
    """The first `blocks` programs place their slots, the others write the tile map."""
    block = tl.program_id(0)
    if block >= blocks:
        _write_tile_map(table_ptr, (block - blocks) * MAP_BLOCK, offsets_ptr, E, limit, TILE_M, MAP_BLOCK, E_PAD)
    else:
        i = tl.arange(0, BLOCK)
        slots = block * BLOCK + i
        ids = tl.load(ids_ptr + slots, mask=slots < R, other=E)
        # sorted by expert, slots of one expert in their order: the rank among them is the distance to the first
        key = tl.sort(ids * BLOCK + i)
        expert, slot = key // BLOCK, block * BLOCK + key % BLOCK
        inside = expert < E
        first = (i == 0) | (tl.gather(expert, tl.maximum(i - 1, 0), 0) != expert)
        rank = i - tl.associative_scan(tl.where(first, i, 0), 0, _larger)
        start = tl.load(offsets_ptr + expert, mask=inside, other=0)
        row = start + tl.load(partial_ptr + block.to(tl.int64) * E + expert, mask=inside, other=0) + rank
        token = slot // K if token_ptr is None else tl.load(token_ptr + slot, mask=inside, other=0)
        tl.store(slot_idx_ptr + row, slot, mask=inside)
        tl.store(gather_idx_ptr + row, token, mask=inside)
        tl.store(row_idx_ptr + slot, row, mask=inside)


@triton.jit
def _restore_kernel(
    row_idx_ptr, scores_ptr, offsets_ptr, slot_idx_ptr, gather_idx_ptr, scores_R_ptr, table_ptr,
    R, E, K, blocks, limit, BLOCK: tl.constexpr, E_PAD: tl.constexpr, TILE_M: tl.constexpr, MAP_BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block >= blocks:
        _write_tile_map(table_ptr, (block - blocks) * MAP_BLOCK, offsets_ptr, E, limit, TILE_M, MAP_BLOCK, E_PAD)
    else:
        slot = block * BLOCK + tl.arange(0, BLOCK)
        mask = slot < R
        row = tl.load(row_idx_ptr + slot, mask=mask, other=0)
        tl.store(slot_idx_ptr + row, slot, mask=mask)
        tl.store(gather_idx_ptr + row, slot // K, mask=mask)
        tl.store(scores_R_ptr + row, tl.load(scores_ptr + slot, mask=mask, other=0.0), mask=mask)


@triton.jit
def _tile_map_kernel(offsets_ptr, table_ptr, E, limit, TILE_M: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr):
    _write_tile_map(table_ptr, tl.program_id(0) * BLOCK, offsets_ptr, E, limit, TILE_M, BLOCK, E_PAD)


def _new_tile_map(offsets_E1: torch.Tensor, R: int, m: int) -> TileMap:
    E = offsets_E1.numel() - 1
    limit = cdiv(R, m) + min(E, R)
    return TileMap(torch.empty(3 * limit + 1, dtype=torch.int32, device=offsets_E1.device), limit, m)


def _map_block(e_pad: int) -> int:
    """Entries of a tile map per program: each is compared with all experts."""
    return 64 if INTERPRET else max(2, min(64, 2048 // e_pad))


def metadata(ids_TK: torch.Tensor, E: int, token_R: torch.Tensor | None = None) -> Metadata:
    """Sort the rows of a routing by expert.

    ids_TK (T, K) int32, contiguous, every value in [0, E); E experts, at most 4096. token_R (R,) int32 names the token
    of a slot where that is not t. Returns `Metadata` on the same device, with the map of tiles of the usual height in
    it.
    """
    T, K = ids_TK.shape
    R = T * K
    new = lambda size: torch.empty(size, dtype=torch.int32, device=ids_TK.device)  # noqa: E731
    out = Metadata(new(E + 1), new(R), new(R), new(R), T)
    if R == 0:
        out.offsets_E1.zero_()
        return out
    blocks = cdiv(R, _BLOCK)
    # each part at a multiple of 16 bytes
    parts = [cdiv(blocks * E, 4) * 4, cdiv(E, 4) * 4, 1]
    partial, counts, finished = new(sum(parts)).split(parts)
    e_pad = next_power_of_2(E + 1)
    sizes = (R, E, K)
    launch_sized(
        _histogram_kernel, sizes, (ids_TK, partial, finished),
        lambda: ((blocks,), (ids_TK, partial, finished, R, E, _BLOCK, e_pad), {"num_warps": 16 if e_pad > 1024 else 4}),
    )  # fmt: skip
    launch_sized(
        _prefix_kernel, sizes, (partial, counts, finished, out.offsets_E1),
        lambda: (
            (cdiv(E, _PREFIX_COLS),),
            (
                partial, counts, finished, out.offsets_E1, blocks, E, R,
                min(_PREFIX_ROWS, next_power_of_2(blocks)), _PREFIX_COLS, e_pad,
            ),
            {"num_warps": 8},
        ),
    )  # fmt: skip
    tiles = out.maps[_TILE_M] = _new_tile_map(out.offsets_E1, R, _TILE_M)
    per_program = _map_block(e_pad)
    launch_sized(
        _scatter_kernel, (*sizes, token_R is None),
        (ids_TK, partial, out.offsets_E1, token_R, out.slot_idx_R, out.gather_idx_R, out.row_idx_R, tiles.table),
        lambda: (
            (blocks + cdiv(tiles.limit, per_program),),
            (
                ids_TK, partial, out.offsets_E1, token_R, out.slot_idx_R, out.gather_idx_R, out.row_idx_R, tiles.table,
                R, E, K, blocks, tiles.limit, _BLOCK, e_pad, _TILE_M, per_program,
            ),
            {"num_warps": 8},
        ),
    )  # fmt: skip
    return out


def metadata_torch(ids_TK: torch.Tensor, E: int, token_R: torch.Tensor | None = None) -> Metadata:
    """Plain-torch twin of `metadata`."""
    T, K = ids_TK.shape
    flat = ids_TK.flatten()
    slot_idx = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=E)
    row_idx = torch.empty_like(slot_idx)
    row_idx[slot_idx] = torch.arange(flat.numel(), device=flat.device)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    token = slot_idx // K if token_R is None else token_R[slot_idx]
    return Metadata(offsets.int(), slot_idx.int(), token.int(), row_idx.int(), T)


def restore(
    row_idx_R: torch.Tensor, offsets_E1: torch.Tensor, scores_TK: torch.Tensor
) -> tuple[Metadata, torch.Tensor]:
    """The whole metadata and the scores in row order (R,) from what the backward keeps: 4 bytes a pair instead of
    16."""
    T, K = scores_TK.shape
    R, E = T * K, offsets_E1.numel() - 1
    slot_idx, gather_idx = torch.empty_like(row_idx_R), torch.empty_like(row_idx_R)
    scores_R = torch.empty(R, dtype=scores_TK.dtype, device=row_idx_R.device)
    meta = Metadata(offsets_E1, slot_idx, gather_idx, row_idx_R, T)
    if R:
        tiles = meta.maps[_TILE_M] = _new_tile_map(offsets_E1, R, _TILE_M)
        blocks, e_pad = cdiv(R, _RESTORE_BLOCK), next_power_of_2(E)
        per_program = _map_block(e_pad)
        launch_sized(
            _restore_kernel, (scores_TK.dtype, R, E, K),
            (row_idx_R, scores_TK, offsets_E1, slot_idx, gather_idx, scores_R, tiles.table),
            lambda: (
                (blocks + cdiv(tiles.limit, per_program),),
                (
                    row_idx_R, scores_TK, offsets_E1, slot_idx, gather_idx, scores_R, tiles.table,
                    R, E, K, blocks, tiles.limit, _RESTORE_BLOCK, e_pad, _TILE_M, per_program,
                ),
                {},
            ),
        )  # fmt: skip
    return meta, scores_R


def restore_torch(
    row_idx_R: torch.Tensor, offsets_E1: torch.Tensor, scores_TK: torch.Tensor
) -> tuple[Metadata, torch.Tensor]:
    """Plain-torch twin of `restore`."""
    T, K = scores_TK.shape
    slot_idx = torch.empty_like(row_idx_R)
    slot_idx[row_idx_R.long()] = torch.arange(T * K, dtype=torch.int32, device=row_idx_R.device)
    meta = Metadata(offsets_E1, slot_idx, slot_idx // K, row_idx_R, T)
    return meta, scores_TK.flatten()[slot_idx.long()]


def tile_map(offsets_E1: torch.Tensor, R: int, m: int) -> TileMap:
    """Map the output tiles of height m to experts: offsets_E1 (E+1) int32 and R rows -> `TileMap`."""
    E = offsets_E1.numel() - 1
    tiles, e_pad = _new_tile_map(offsets_E1, R, m), next_power_of_2(E)
    block = _map_block(e_pad)
    grid = (max(1, cdiv(tiles.limit, block)),)
    launch_sized(
        _tile_map_kernel, (R, E, m), (offsets_E1, tiles.table),
        lambda: (grid, (offsets_E1, tiles.table, E, tiles.limit, m, e_pad, block), {}),
    )  # fmt: skip
    return tiles


def tile_map_torch(offsets_E1: torch.Tensor, R: int, m: int) -> TileMap:
    """Plain-torch twin of `tile_map`; entries past the count are zero."""
    E = offsets_E1.numel() - 1
    limit = cdiv(R, m) + min(E, R)
    table = torch.zeros(3 * limit + 1, dtype=torch.int32)
    rows = offsets_E1.tolist()
    tiles = [(e, first, rows[e + 1]) for e in range(E) for first in range(rows[e], rows[e + 1], m)]
    for i, tile in enumerate(tiles):
        table[i], table[limit + i], table[2 * limit + i] = tile
    table[3 * limit] = len(tiles)
    return TileMap(table.to(offsets_E1.device), limit, m)


def metadata_cost(shape: Shape, R: int, itemsize: int) -> Cost:
    """Bytes of the metadata: ids read twice, three index vectors written."""
    del itemsize
    return Cost(0, {"ids": 2 * 4 * R, "slot_idx": 4 * R, "gather_idx": 4 * R, "row_idx": 4 * R}, {})
