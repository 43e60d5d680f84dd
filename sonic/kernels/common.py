"""What the kernels share: tiles, costs, the interpreter's traps, descriptors and the order of tiles.

Letters as in the paper: T tokens, d width, n expert intermediate size, E experts, K experts per token, R = routed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from inspect import getclosurevars, isfunction

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

#: True when kernels run in Triton's interpreter on a CPU; `TRITON_INTERPRET` is read when triton is imported.
INTERPRET = bool(triton.knobs.runtime.interpret)
_INTERPRET = tl.constexpr(INTERPRET)
_runtime = triton.knobs.runtime

#: Shared memory that one block may use on Hopper, bytes.
SMEM_LIMIT = 232448


@dataclass(frozen=True)
class Tile:
    """Launch choice of one GEMM kernel: block m x n x k, pipeline stages, warps, and how the block is run.

    `group` M-tiles share an L2-friendly column sweep; `ctas` programs sit on one SM; `store` writes results by TMA or
    by pointers; `flatten` lets the compiler start the next tile's loads under this tile's epilogue; `split` cuts the
    epilogue into column chunks.
    """

    m: int = 128
    n: int = 128
    k: int = 64
    stages: int = 3
    warps: int = 8
    group: int = 8
    ctas: int = 1
    store: str = "tma"
    flatten: bool = False
    split: int = 1

    def sizes(self) -> dict[str, int]:
        """The part that a row records."""
        return {name: getattr(self, name) for name in ("m", "n", "k", "stages", "warps")}

    def options(self) -> dict[str, int]:
        """Launch options: a register cap where several programs must fit on one SM (65536 registers)."""
        cap = {"maxnreg": 65536 // (self.ctas * self.warps * 32)} if self.ctas > 1 else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **cap}

    def override(self, **asked: int | None) -> Tile:
        """This tile with the sizes that were asked for. ValueError for a block that is no power of two or under 16."""
        given = {name: value for name, value in asked.items() if value is not None}
        for name in ("m", "n", "k"):
            value = given.get(name, 16)
            if value < 16 or value & (value - 1):
                raise ValueError(f"tile.{name} is {value}; a block size must be a power of two of at least 16")
        for name, allowed in (("stages", range(1, 9)), ("warps", (1, 2, 4, 8, 16))):
            if name in given and given[name] not in allowed:
                raise ValueError(f"tile.{name} is {given[name]}; allowed: {', '.join(map(str, allowed))}")
        return replace(self, **given)


@dataclass(frozen=True)
class HopperTile(Tile):
    """Launch choice of a warp-specialised kernel: two consumer warpgroups that share a tile (`cooperative`) or take
    tiles in turn (`pingpong`), and `buffers` blocks for results on their way out."""

    n: int = 256
    stages: int = 4
    schedule: str = "cooperative"
    buffers: int = 2

    def options(self) -> dict[str, int]:
        """The first consumer's four warps; the cap leaves room for twelve warps, which then trade registers."""
        return {"num_warps": 4, "maxnreg": 168}


def tile_of(fields: dict[str, object]) -> Tile:
    """A tile from its fields."""
    return (HopperTile if "schedule" in fields else Tile)(**fields)


#: Where rows are no multiple of 16 bytes operands come by pointers, whose masks and addresses fill the registers.
UNALIGNED = Tile(64, 64, 32, stages=3, store="pointer")


@dataclass(frozen=True)
class Cost:
    """Model FLOPs and bytes of one kernel. `bytes` names every tensor; gathered rows count once per use.

    `bytes_once` is the other bound, every gathered row read from memory once.
    """

    flops: int
    tensors: dict[str, int]
    gathered: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.tensors.values())

    @property
    def bytes_once(self) -> int:
        return self.bytes + sum(self.gathered.values()) - sum(self.tensors[name] for name in self.gathered)


class TileTooLarge(OutOfResources):
    """A tile that no launch was needed to refuse; `name` says which."""

    def __str__(self) -> str:
        return f"{self.name} needs {self.required} bytes of shared memory, limit {self.limit}"


def check_fits(tile: Tile, itemsize: int) -> None:
    """Raise TileTooLarge when the ring of operand blocks alone exceeds Hopper's shared memory."""
    need = tile.stages * (tile.m + tile.n) * tile.k * itemsize
    if need > SMEM_LIMIT:
        raise TileTooLarge(need, SMEM_LIMIT, f"tile {tile.m}x{tile.n}x{tile.k} with {tile.stages} stages")


def capped(tiles: list[Tile], n: int) -> list[Tile]:
    """The tiles with their width cut to the columns that exist, without repeats."""
    widest = max(16, next_power_of_2(n))
    cut = (t if t.n <= widest else replace(t, n=widest, split=min(t.split, max(1, widest // 32))) for t in tiles)
    return list(dict.fromkeys(cut))


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a twin computes: fp64 stays, everything else becomes fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1; triton's own goes through its compile-time machinery."""
    return 1 << (n - 1).bit_length()


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device; a few programs suffice in the interpreter, which runs them one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def persistent_grid(device: torch.device, tile: Tile, tiles: int) -> tuple[int]:
    return (max(1, min(num_sms(device) * tile.ctas, tiles)),)


#: Of each kernel (by identity: hashing one costs as much as looking it up) which arguments are compile-time constants.
_constants: dict[int, tuple[bool, ...]] = {}
#: Compiled kernels by what they were specialised for.
_compiled: dict[tuple, _Prepared] = {}
#: Launch arguments of tensor descriptors, the encoded map among them, by all that they are made of.
_maps: dict[tuple, list[object]] = {}
_MAPS_KEPT = 4096


class _Prepared:
    """A compiled kernel, launched with addresses and with tensor maps that are encoded once.

    Triton's own launcher encodes each map anew at every launch (9 us on the host), and asks each tensor for its address
    and the driver for each address.
    """

    def __init__(self, compiled: CompiledKernel) -> None:
        self.compiled = compiled
        self.described = compiled.metadata.tensordesc_meta
        self.run = copy(compiled.run)
        if isfunction(self.run.launch):  # there are descriptors, and this is the step that encodes them
            self.run.launch = getclosurevars(self.run.launch).nonlocals["launcher"]

    def launch(
        self,
        device: int,
        grid: tuple[int, int, int],
        passed: list[object],
        descriptors: list[tuple[int, TensorDescriptor]],
    ) -> None:
        """Arguments as addresses and numbers, with the places where descriptors go."""
        for i in range(len(descriptors) - 1, -1, -1):
            at, descriptor = descriptors[i]
            passed[at : at + 1] = _launch_arguments(descriptor, self.described[i] if self.described else None)
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled = self.compiled
        self.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *passed)


def _launch_arguments(d: TensorDescriptor, meta: dict[str, object] | None) -> list[object]:
    if meta is None:  # a card without tensor maps
        return make_tensordesc_arg(d, None)
    key = (d.base.data_ptr(), meta["elem_type"], meta["swizzle"], *d.shape, *d.strides, *d.block_shape)
    made = _maps.get(key)
    if made is None:
        if len(_maps) == _MAPS_KEPT:
            _maps.clear()
        made = _maps[key] = make_tensordesc_arg(d, meta)
    return made


def launch(kernel: JITFunction, grid: tuple[int, ...], arguments: Sequence[object], **options: int) -> None:
    """`kernel[grid](*arguments, **options)`; the first argument is a tensor on the device of the launch.

    Triton's own call binds and specialises the arguments anew every time, at two to three times the cost of the launch;
    here the compiled kernel is looked up and launched.
    """
    if INTERPRET:
        kernel[grid](*arguments, **options)
        return
    constants = _constants.get(id(kernel))
    if constants is None:
        constants = _constants[id(kernel)] = tuple(parameter.is_constexpr for parameter in kernel.params)
    # what the just-in-time compiler distinguishes, and what the launcher takes
    device = arguments[0].get_device()
    key: list[object] = [id(kernel), device, *options.values()]
    passed: list[object] = []
    descriptors: list[tuple[int, TensorDescriptor]] = []
    for argument, constant in zip(arguments, constants, strict=True):
        if constant or argument is None:
            key.append(argument)
            passed.append(argument)
        elif isinstance(argument, torch.Tensor):
            address = argument.data_ptr()
            key += (argument.dtype, address % 16 == 0)
            passed.append(address)
        elif isinstance(argument, int):
            key += (argument == 1, argument % 16 == 0, argument >> 31)
            passed.append(argument)
        else:
            key += (argument.base.dtype, *argument.block_shape)
            descriptors.append((len(passed), argument))
            passed.append(argument)
    lookup = tuple(key)
    prepared = _compiled.get(lookup)
    if prepared is None:
        _compiled[lookup] = _Prepared(kernel[grid](*arguments, **options))
    elif _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls:  # a profiler wants to know
        prepared.compiled[(*grid, 1, 1)[:3]](*arguments)
    else:
        prepared.launch(device, (*grid, 1, 1)[:3], passed, descriptors)


def forget() -> None:
    """Drop the compiled kernels that launches would reuse."""
    _compiled.clear()


def tma_ready(*tensors: torch.Tensor) -> bool:
    """Whether tensor descriptors can describe these: 16-byte rows and base, contiguous last axis, nothing empty."""
    for t in tensors:
        size = t.element_size()
        if t.numel() == 0 or t.stride(-1) != 1 or t.data_ptr() % 16 or size == 8:
            return False
        if any(s * size % 16 for s in t.stride()[:-1]):
            return False
    return True


def _descriptor(t: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A descriptor without the constructor's checks, which `tma_ready` has made and which would cost more than a
    launch."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = t, shape, strides, block
    made.padding, made.round_f32_to_tf32 = "zero", False
    return made


def descriptor(t: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """TMA descriptor of a tensor; out-of-bounds parts of a block read as zero and are not written."""
    return _descriptor(t, list(t.shape), list(t.stride()), block)


def ragged(t: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor of rows (R, ...) that is cut to one expert's rows at run time, through `ragged_coords`.

    Two axes come before the tensor's own, and 64-bit addresses wrap around: the second axis moves the end of an expert
    to row 2^30, where the third axis ends, and the first moves it back (the scheme of `triton.tools.ragged_tma`).
    """
    row = t.stride(0)
    return _descriptor(
        t,
        [0x7FFF0000, 0x7FFF0000, 0x40000000, *t.shape[1:]],
        [2**34 - row, row, *t.stride()],
        [1, 1, *block],
    )


def rows_aligned(columns: int, itemsize: int) -> bool:
    """Whether a fresh contiguous matrix of this many columns suits TMA: rows of whole 16 bytes, no fp64."""
    return columns * itemsize % 16 == 0 and itemsize < 8


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in fp32. The interpreter multiplies the bit patterns of bf16, so operands are widened there."""
    if _INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """x (fp32) rounded to nearest even in dtype. The interpreter truncates to bf16, so the rounding is done by hand
    there."""
    if _INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        y = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
        return y.to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def grouped_tile(pid, num_m, num_n, GROUP: tl.constexpr):
    """Tile coordinates (m, n) of a linear id: GROUP M-tiles at a time sweep the columns, so that both operands stay
    in L2."""
    per_group = GROUP * num_n
    first = pid // per_group * GROUP
    size = tl.minimum(num_m - first, GROUP)
    within = pid % per_group
    return first + within % size, within // size


@triton.jit
def output_tile(map_ptr, limit, pid, num_m, num_n, GROUP: tl.constexpr):
    """Of the pid-th output tile its expert, first row, the expert's end row and the column tile (see `TileMap`)."""
    m_tile, n_tile = grouped_tile(pid, num_m, num_n, GROUP)
    expert = tl.load(map_ptr + m_tile)
    row0 = tl.load(map_ptr + limit + m_tile)
    end = tl.load(map_ptr + 2 * limit + m_tile)
    return expert, row0, end, n_tile


@triton.jit
def ragged_coords(row, end):
    """Leading coordinates of a `ragged` descriptor for the rows from `row`: those at or past `end` fall out of
    bounds."""
    return 0x40000000, end, 0x40000000 - end + row


@triton.jit
def halves(acc, M: tl.constexpr, N: tl.constexpr):
    """The left and right half (M, N/2) of a tile (M, N); both of a column pair sit in one thread, so nothing moves."""
    return tl.split(tl.permute(tl.reshape(acc, (M, 2, N // 2)), (0, 2, 1)))
