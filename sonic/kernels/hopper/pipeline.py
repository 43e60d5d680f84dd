"""What the warp-specialised kernels share: ring of operand blocks, producer, tensor-core loop, stores and descriptors.

One persistent program per SM runs twelve warps: a producer fills a ring of stages in shared memory, by TMA or, where
rows are gathered, by 16-byte cp.async; two consumer warpgroups multiply and write. Each stage has two barriers, `full`
and `empty`. Two schedules:

    cooperative   both warpgroups work on one output tile, half of its rows each
    pingpong      they take whole tiles in turn (`turn` barriers): one's epilogue runs under the other's loop

Bounds: descriptors keep the experts' axis, so a block past n or d reads zeros and writes nothing; a gathered row past
the expert's end repeats its first row and is never stored.
"""

from functools import lru_cache

import torch

from sonic.kernels.common import SMEM_LIMIT, HopperTile, Tile, TileTooLarge, next_power_of_2
from sonic.kernels.hopper.gluon import (
    TensorDescriptor,
    aggregate,
    async_copy,
    copy_rows,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)

#: Contraction block: rows of exactly one 128-byte swizzle atom of 16-bit numbers.
BLOCK_K = 64
#: Columns of one store and of one step of an epilogue.
CHUNK = 64


# Host


def fits(tile: Tile, staging: int, *, least: int = CHUNK, chunks: int = 1) -> None:
    """Raise TileTooLarge when ring and `staging` bytes exceed an SM's shared memory, ValueError for a tile that no
    schedule can run: narrower than `least` columns, or with a number of chunks per warpgroup that `chunks` does not
    divide."""
    named = f"tile {tile.m}x{tile.n}x{tile.k} with schedule {getattr(tile, 'schedule', None)}"
    if not isinstance(tile, HopperTile):
        raise ValueError(f"{named}: the hopper family takes a HopperTile")
    rows = rows_per_warpgroup(tile)
    if tile.k != BLOCK_K or tile.m not in (64, 128, 256) or rows < 64 or not least <= tile.n <= 256:
        raise ValueError(
            f"{named}: this kernel of the hopper family takes k = {BLOCK_K}, n in {least}..256 and at least 64 rows "
            "per warpgroup"
        )
    if rows // 64 * (tile.n // CHUNK) % chunks:
        raise ValueError(f"{named}: {chunks} chunks of 64x{CHUNK} per warpgroup are loaded ahead, it has fewer")
    if rows * tile.n > 128 * 128 + 64 * 128:
        raise ValueError(f"{named} exceeds a warpgroup's registers")
    need = tile.stages * (tile.m + tile.n) * tile.k * 2 + staging + 1024
    if need > SMEM_LIMIT:
        raise TileTooLarge(need, SMEM_LIMIT, f"tile {tile.m}x{tile.n}x{tile.k} with {tile.stages} stages")


def rows_per_warpgroup(tile: HopperTile) -> int:
    return tile.m if tile.schedule == "pingpong" else tile.m // 2


def staging(tile: HopperTile, stores: int) -> int:
    """How many staging buffers each warpgroup uses in turn: they must come round in the `stores` of a tile, since each
    tile begins with the first one."""
    return max(b for b in range(1, tile.buffers + 1) if max(stores, 1) % b == 0)


def staging_bytes(tile: HopperTile, stores: int) -> int:
    """Of both warpgroups; none of a tile that `fits` refuses anyway."""
    if not isinstance(tile, HopperTile):
        return 0
    return 2 * staging(tile, stores) * rows_per_warpgroup(tile) * CHUNK * 2


def fitting(tiles: list[Tile], columns: int, least: int = 64) -> list[Tile]:
    """The tiles no wider than the columns that exist (`least` at least)."""
    widest = max(least, next_power_of_2(columns))
    return [t for t in tiles if t.n <= widest]


@lru_cache
def _layout(columns: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=rank)


def _described(t: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A descriptor without the constructor's checks, which would cost more than a launch."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = t, shape, strides, block
    made.layout, made.padding, made.round_f32_to_tf32 = _layout(block[-1], len(block)), "zero", False
    return made


def blocks(t: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor of a tensor as it is; axes that the block has more than the tensor have one entry, and follow the
    first."""
    (size, *sizes), (stride, *strides) = t.shape, t.stride()
    more = len(block) - t.dim()
    return _described(t, [size, *[1] * more, *sizes], [stride, *[stride] * more, *strides], block)


def rows_of(t: torch.Tensor, H: int, block: list[int]) -> TensorDescriptor:
    """Descriptor (H, rows, columns / H) of a matrix of contiguous columns."""
    R, columns = t.shape
    n = columns // H
    return _described(t, [H, R, n], [n, t.stride(0), 1], block)


def ragged(t: torch.Tensor, H: int, rows: int, columns: int = CHUNK) -> TensorDescriptor:
    """Descriptor of blocks (rows, columns) of a matrix (R, H n), that end at an expert's end, through `ragged_row`: see
    `sonic.kernels.common.ragged`. The H axis comes before the rows, so that a block is a matrix."""
    row, n = t.stride(0), t.shape[1] // H
    return _described(
        t, [0x7FFF0000, 0x7FFF0000, H, 0x40000000, n], [2**34 - row, row, n, row, 1], [1, 1, 1, rows, columns]
    )


# Device


@aggregate
class Ring:
    """Stages of both operands with their barriers; `turn` hands the tensor cores from one warpgroup to the other."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    PINGPONG: gl.constexpr
    #: Whether an operand comes by cp.async, whose writes the tensor cores see only behind a fence.
    COPIED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a, b, full, empty, turn, STAGES, PINGPONG, COPIED):  # noqa: ANN204
        self.a = a
        self.b = b
        self.full = full
        self.empty = empty
        self.turn = turn
        self.STAGES = gl.constexpr(STAGES)
        self.PINGPONG = gl.constexpr(PINGPONG)
        self.COPIED = gl.constexpr(COPIED)


@gluon.jit
def row_blocks(x_desc, dtype: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, K: gl.constexpr,
               GATHER: gl.constexpr):  # fmt: skip
    """Shared memory for the ring's blocks of rows, which come by cp.async where they are gathered, else by TMA."""
    if GATHER:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, K], dtype)
        x = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, K], layout)
    else:
        x = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, K], x_desc.layout)
    return x


@gluon.jit
def new_ring(a, b, STAGES: gl.constexpr, PINGPONG: gl.constexpr, COPIED: gl.constexpr, COPY_WARPS: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # one arrival for the bytes of TMA, one of every thread that copies rows
        mbarrier.init(full.index(i), count=(1 + 32 * COPY_WARPS) if COPIED else 1)
        mbarrier.init(empty.index(i), count=1 if PINGPONG else 2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    return Ring(a, b, full, empty, turn, STAGES, PINGPONG, COPIED)


@gluon.jit
def grouped_tile(pid, num_m, num_n, GROUP: gl.constexpr):
    """Tile coordinates (m, n) of a linear id, as in `sonic.kernels.common`."""
    per_group = GROUP * num_n
    first = pid // per_group * GROUP
    size = gl.minimum(num_m - first, GROUP)
    within = pid % per_group
    return first + within % size, within // size


@gluon.jit
def output_tile(map_ptr, limit, pid, num_m, num_n, GROUP: gl.constexpr):
    """Of the pid-th output tile its expert, first row, the expert's end row and the column tile."""
    m_tile, n_tile = grouped_tile(pid, num_m, num_n, GROUP)
    expert = gl.load(map_ptr + m_tile)
    row0 = gl.load(map_ptr + limit + m_tile)
    end = gl.load(map_ptr + 2 * limit + m_tile)
    return expert, row0, end, n_tile


@gluon.jit
def ragged_row(row, end):
    """The row coordinate of a `ragged` descriptor; 0x40000000 and `end` stand before it."""
    return 0x40000000 - end + row


@gluon.jit
def halves(x):
    """Left and right half of the columns of a tile; both of a column pair sit in one thread, so nothing moves."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.split(x.reshape((M, 2, N // 2)).permute((0, 2, 1)))


@gluon.jit
def row_halves(x):
    """Upper and lower half of the rows."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.split(x.reshape((2, M // 2, N)).permute((1, 2, 0)))


@gluon.jit
def produce(
    ring, x_ptr, x_desc, w_desc, gather_ptr, map_ptr, limit, num_m, columns,
    k_size: gl.constexpr, stride_x: gl.constexpr, H: gl.constexpr, GATHER: gl.constexpr, K_MAJOR: gl.constexpr,
    BLOCK_M: gl.constexpr, W_BYTES: gl.constexpr, COLS: gl.constexpr, K: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Fill the ring for a varlen-M product: rows of X, gathered or as they come, and blocks of an expert's weights.

    The contraction runs over (H, k_size); COLS weight columns belong to one output tile. Where a tile lies is read two
    tiles ahead and its row indices one tile ahead: a load that waits for a load would leave the ring empty between
    tiles.
    """
    steps: gl.constexpr = (k_size + K - 1) // K
    num_n = (columns + COLS - 1) // COLS
    num_tiles = num_m * num_n
    x_bytes: gl.constexpr = BLOCK_M * K * 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (K // 8), K // 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, K, layout=gl.SliceLayout(0, layout))
    first = gl.program_id(0)
    expert, row0, end, n_tile = output_tile(map_ptr, limit, gl.minimum(first, num_tiles - 1), num_m, num_n, GROUP)
    expert1, row1, end1, n_tile1 = output_tile(
        map_ptr, limit, gl.minimum(first + PROGRAMS, num_tiles - 1), num_m, num_n, GROUP
    )
    if GATHER:
        source = gl.load(gather_ptr + gl.where(row0 + rows < end, row0 + rows, row0))
    stage = 0
    phase = 1
    for pid in range(first, num_tiles, PROGRAMS):
        expert2, row2, end2, n_tile2 = output_tile(
            map_ptr, limit, gl.minimum(pid + 2 * PROGRAMS, num_tiles - 1), num_m, num_n, GROUP
        )
        col0 = n_tile * COLS
        if GATHER:
            at = x_ptr + (gl.expand_dims(source.to(gl.int64) * stride_x, 1) + gl.expand_dims(cols, 0))
            source = gl.load(gather_ptr + gl.where(row1 + rows < end1, row1 + rows, row1))
        for step in range(H * steps):
            k0 = step * K
            h = 0
            if H > 1:
                h = step // steps
                k0 = step % steps * K
            mbarrier.wait(ring.empty.index(stage), phase)
            bar = ring.full.index(stage)
            if GATHER:
                mbarrier.expect(bar, W_BYTES)
            else:
                mbarrier.expect(bar, W_BYTES + x_bytes)
                tma_load(x_desc, [h, row0, k0], bar, ring.a.index(stage))
            if K_MAJOR:
                tma_load(w_desc, [expert, h, col0, k0], bar, ring.b.index(stage))
            else:
                tma_load(w_desc, [expert, h, k0, col0], bar, ring.b.index(stage))
            if GATHER:
                if k_size % K == 0:
                    copy_rows(ring.a.index(stage), at + k0)
                else:
                    copy_rows(ring.a.index(stage), at + k0, mask=gl.expand_dims(cols < k_size - k0, 0))
                async_copy.mbarrier_arrive(bar, increment_count=False)
            stage += 1
            if stage == ring.STAGES:
                stage = 0
                phase ^= 1
        expert = expert1
        row0 = row1
        n_tile = n_tile1
        expert1 = expert2
        row1 = row2
        end1 = end2
        n_tile1 = n_tile2


@gluon.jit
def take_turn(ring, turn_phase, WG: gl.constexpr):
    """Wait until the other warpgroup has left the tensor cores; nothing to wait for in a cooperative schedule."""
    if ring.PINGPONG:
        mbarrier.wait(ring.turn.index(WG), turn_phase)


@gluon.jit
def zeros(ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """An accumulator."""
    return gl.zeros((ROWS, BLOCK_N), gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))


@gluon.jit
def multiply(
    ring, acc, done, steps, WG: gl.constexpr, BLOCK_M: gl.constexpr, K: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, ENDS: gl.constexpr,
):  # fmt: skip
    """acc plus `steps` products of blocks, the first of which is the `done`-th of this program; the turn passes on
    where it `ENDS`."""
    ROWS: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = acc.shape[1]
    stage = done % ring.STAGES
    phase = (done // ring.STAGES) & 1
    # a variable of its own: Triton 3.6 loses the loop's updates of a plain alias
    last = (stage + ring.STAGES - 1) % ring.STAGES
    for step in range(steps):
        mbarrier.wait(ring.full.index(stage), phase)
        if ring.COPIED:
            fence_async_shared()
        if A_K_MAJOR:
            a = ring.a.index(stage).reshape((BLOCK_M, K))
            if not ring.PINGPONG:
                a = a.slice(WG * ROWS, ROWS, dim=0)
        else:
            a = ring.a.index(stage).reshape((K, BLOCK_M))
            if not ring.PINGPONG:
                a = a.slice(WG * ROWS, ROWS, dim=1)
            a = a.permute((1, 0))
        if B_K_MAJOR:
            b = ring.b.index(stage).reshape((BLOCK_N, K)).permute((1, 0))
        else:
            b = ring.b.index(stage).reshape((K, BLOCK_N))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, (acc,))
        mbarrier.arrive(ring.empty.index(last), count=1, pred=step > 0)
        last = stage
        stage += 1
        if stage == ring.STAGES:
            stage = 0
            phase ^= 1
    if ring.PINGPONG and ENDS:
        mbarrier.arrive(ring.turn.index(1 - WG), count=1)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(ring.empty.index(last), count=1, pred=steps > 0)
    return acc


@gluon.jit
def store_block(x, desc, staging, SLOT: gl.constexpr, c0, c1, c2, row, col):
    """One block of x by TMA through the SLOT-th of the staging buffers, which are used in turn."""
    BUFFERS: gl.constexpr = staging.shape[0]
    tma.store_wait(pendings=BUFFERS - 1)
    buffer = staging.index(SLOT % BUFFERS)
    buffer.reshape(x.shape).store(x.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, [c0, c1, c2, row, col], buffer)


@gluon.jit
def store_columns(x, desc, staging, SLOT: gl.constexpr, c0, c1, c2, row, col):
    """All columns of x, CHUNK at a time."""
    N: gl.constexpr = x.shape[1]
    CHUNK: gl.constexpr = staging.shape[5]
    if N == CHUNK:
        store_block(x, desc, staging, SLOT, c0, c1, c2, row, col)
    else:
        left, right = halves(x)
        store_columns(left, desc, staging, SLOT, c0, c1, c2, row, col)
        store_columns(right, desc, staging, SLOT + N // 2 // CHUNK, c0, c1, c2, row, col + N // 2)
