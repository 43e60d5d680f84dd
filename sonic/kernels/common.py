"""What the kernels share: tiles, costs, the interpreter's traps, descriptors and the order of tiles.

Letters as in the paper: T tokens, d width, n expert intermediate size, E experts, K experts per token, R = routed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    epilogue into column chunks. Programs are `persistent`, or one is launched per output tile.
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
    persistent: bool = True

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


def tile_step(device: torch.device, tile: Tile) -> int:
    """How many tiles a program moves on by: past all of them where there is one program per tile."""
    return num_sms(device) * tile.ctas if tile.persistent else 1 << 30


def grid_of(device: torch.device, tile: Tile, tiles: int) -> tuple[int]:
    return (max(1, min(tile_step(device, tile), tiles)),)


def _kind(argument: object) -> object:
    """What the just-in-time compiler distinguishes of an argument that is no compile-time constant."""
    if argument is None:
        return None
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >> 31
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument.base.dtype, *argument.block_shape  # a tensor descriptor


#: Of each kernel (by identity: hashing one costs as much as looking it up) which arguments are compile-time constants.
_constants: dict[int, tuple[bool, ...]] = {}
#: Compiled kernels by what they were specialised for.
_compiled: dict[tuple, CompiledKernel] = {}


def launch(
    kernel: JITFunction, grid: tuple[int, ...], arguments: Sequence[object], **options: int
) -> CompiledKernel | None:
    """`kernel[grid](*arguments, **options)`; the first argument is a tensor on the device of the launch.

    Triton's own call binds and specialises the arguments anew every time, at two to three times the cost of the launch;
    here the compiled kernel is looked up and launched. Returns it (None in the interpreter).
    """
    if INTERPRET:
        kernel[grid](*arguments, **options)
        return None
    constants = _constants.get(id(kernel))
    if constants is None:
        constants = _constants[id(kernel)] = tuple(parameter.is_constexpr for parameter in kernel.params)
    kinds = [a if constant else _kind(a) for a, constant in zip(arguments, constants, strict=True)]
    key = (id(kernel), arguments[0].get_device(), *options.values(), *kinds)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = kernel[grid](*arguments, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments)
    return compiled


#: What a launch needs beside addresses: grid, arguments and options.
Launch = tuple[tuple[int, ...], Sequence[object], dict[str, int]]
#: Launches by kernel, device and sizes; None for what was launched once.
_plans: dict[tuple, _Plan | None] = {}
_PLANS_KEPT = _MAPS_KEPT = 4096


class _Plan:
    """A launch with places for the addresses of some tensors, and for the tensor maps made of them.

    Triton's own launcher encodes each map anew at every launch (9 us on the host), and asks each tensor for its address
    and the driver for each address.
    """

    def __init__(self, compiled: CompiledKernel, launch: Launch, tensors: Sequence[torch.Tensor | None]) -> None:
        grid, arguments, _ = launch
        self.compiled, self.grid = compiled, (*grid, 1, 1)[:3]
        self.run = copy(compiled.run)
        if isfunction(self.run.launch):  # there are descriptors, and this is the step that encodes them
            self.run.launch = getclosurevars(self.run.launch).nonlocals["launcher"]
        metas = compiled.metadata.tensordesc_meta
        self.template: list[object] = []
        self.pointers: list[tuple[int, int]] = []
        self.maps: list[tuple[int, int, TensorDescriptor, object, dict[int, object]]] = []
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        for argument in arguments:
            at = len(self.template)
            if isinstance(argument, torch.Tensor):
                self.pointers.append((at, addresses.index(argument.data_ptr())))
                self.template.append(None)
            elif hasattr(argument, "block_shape"):
                address = argument.base.data_ptr()
                meta = metas[len(self.maps)] if metas else None
                expanded = make_tensordesc_arg(argument, meta)
                bare = copy(argument)
                bare.base = None  # a tensor must not live on in here
                self.maps.append((at, addresses.index(address), bare, meta, {address: expanded[0]}))
                self.template += [None, *expanded[1:]]
            else:
                self.template.append(argument)

    def __call__(self, device: int, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Launch; False, and nothing done, where an address is not the multiple of 16 that the kernel was compiled
        for."""
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        every = 0
        for address in addresses:
            every |= address
        if every % 16:
            return False
        passed = self.template.copy()
        for at, i in self.pointers:
            passed[at] = addresses[i]
        for at, i, bare, meta, known in self.maps:
            passed[at] = known.get(addresses[i]) or self._encode(tensors[i], bare, meta, known)
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled = self.compiled
        self.run(*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *passed)
        return True

    @staticmethod
    def _encode(tensor: torch.Tensor, bare: TensorDescriptor, meta: object, known: dict[int, object]) -> object:
        if meta is None:  # a card without tensor maps
            return tensor.data_ptr()
        if len(known) == _MAPS_KEPT:
            known.clear()
        whole = copy(bare)
        whole.base = tensor
        made = known[tensor.data_ptr()] = make_tensordesc_arg(whole, meta)[0]
        return made


def launch_sized(
    kernel: JITFunction, sizes: tuple, tensors: Sequence[torch.Tensor | None], build: Callable[[], Launch]
) -> None:
    """As `launch`, for what follows from hashable `sizes` (kernel, dtypes and strides included) and the addresses of
    `tensors` alone: once sizes come back, the launch is kept and only addresses are filled in.

    The first tensor is on the device of the launch, none of the others is at its address.
    """
    if INTERPRET:
        grid, arguments, options = build()
        kernel[grid](*arguments, **options)
        return
    device = tensors[0].get_device()
    key = (id(kernel), device, *sizes)
    plan = _plans.get(key)
    watched = _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls
    if plan is not None and not watched and plan(device, tensors):
        return
    grid, arguments, options = built = build()
    compiled = launch(kernel, grid, arguments, **options)
    if key not in _plans:  # sizes that never come back, as of batches of any length, are not worth a plan
        if len(_plans) == _PLANS_KEPT:
            _plans.clear()
        _plans[key] = None
    elif plan is None and not any(t is not None and t.data_ptr() % 16 for t in tensors):
        _plans[key] = _Plan(compiled, built, tensors)


def forget() -> None:
    """Drop the compiled kernels that launches would reuse."""
    _compiled.clear()
    _plans.clear()


def tma_ready(*tensors: torch.Tensor) -> bool:
    """Whether tensor descriptors can describe these: 16-byte rows and base, contiguous last axis, nothing empty."""
    for t in tensors:
        *strides, last = t.stride()
        size = t.element_size()
        if last != 1 or size == 8 or t.data_ptr() % 16 or t.numel() == 0:
            return False
        for stride in strides:
            if stride * size % 16:
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
