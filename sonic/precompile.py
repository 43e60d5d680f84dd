"""`python -m sonic.precompile`: compiles the Triton kernels of a sweep's points for a card that is not here.

  python -m sonic.precompile --card nvidia-h200 sweeps=throughput shape=7b impl=sonic,scattermoe
  python -m sonic.precompile --jobs 4 sweeps=ladder

Triton keeps what it compiles in TRITON_CACHE_DIR (default `~/.triton/cache`). Carried to a machine with that card, the
same versions of Python and Triton and the same path of the folder, the cache is found there, and a sweep of the same
arguments starts measuring at once (`compile_s` of its rows is next to nothing). Every point's forward and backward runs
on CPU tensors that pose as CUDA's: a launch compiles and does nothing more, an autotuner compiles all its candidates,
and floating-point results of large operations of torch are left unwritten. What torch.compile or a package compiles by
itself is not covered.

Exit codes: 0 all points compiled; 1 some did not, with a line for each; 2 the command line is at fault.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

# Read when triton is imported, which the modules below do.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch._library.custom_ops import OPDEFS
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from sonic import config, impls, sweep, worker
from sonic.config import CommandError
from sonic.kernels import common, tuning
from sonic.problem import Problem
from sonic.record import LAYER_OPS, Point

CUDA = torch.device("cuda", 0)
#: Floating-point tensors with more elements than this are never computed, only allocated.
LARGE = 1 << 20


@dataclass(frozen=True)
class Card:
    """What kernels and their launchers ask of a card."""

    name: str
    capability: tuple[int, int]
    sms: int
    #: Shared memory that one block may use, bytes.
    shared: int
    l2: int

    @property
    def properties(self) -> SimpleNamespace:
        """As `torch.cuda.get_device_properties` gives them."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name, major=major, minor=minor, multi_processor_count=self.sms, L2_cache_size=self.l2,
            warp_size=32, shared_memory_per_block_optin=self.shared, regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048,
        )  # fmt: skip


#: Cards by the names that rows files have.
CARDS = {
    "nvidia-h200": Card("NVIDIA H200", (9, 0), 132, 232448, 60 << 20),
    "nvidia-h100-80gb-hbm3": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 50 << 20),
    "nvidia-a100-sxm4-80gb": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 40 << 20),
}


class Driver:
    """Stands in for Triton's driver: compiles for the card, loads nothing, launches nothing."""

    def __init__(self, card: Card, libraries: str) -> None:
        self.card = card
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, 0, 0, 0, 1024),
            get_device_properties=lambda _: {
                "max_shared_mem": card.shared, "multiprocessor_count": card.sms, "max_num_regs": 65536, "warpSize": 32,
                "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1,
            },
        )  # fmt: skip
        self._library_dirs = [nvidia.libdevice_dir, libraries]
        self._launcher(lambda: nvidia.CudaUtils())

    def _launcher(self, make: Callable[[], object]) -> None:
        """Runs what builds a C extension into the cache, without loading it."""
        with (
            mock.patch.object(nvidia, "library_dirs", lambda: self._library_dirs),
            mock.patch("triton.runtime.build._load_module_from_path", mock.MagicMock()),
            mock.patch.object(triton.runtime.driver, "_active", SimpleNamespace(utils=mock.MagicMock())),
        ):
            make()

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """The launcher of a compiled kernel: built where this triton writes one in C for each, and never called."""
        self._launcher(lambda: nvidia.CudaLauncher(src, metadata))
        return lambda *_, **__: None

    def get_current_target(self) -> GPUTarget:
        """The card's architecture."""
        major, minor = self.card.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        """The one device there is."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """No stream is ever used."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where an autotuner puts its tensors."""
        return CUDA

    def get_device_interface(self) -> Any:
        """What an autotuner synchronises."""
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """An autotuner's measurement: compiles the candidate, and finds all alike."""

        return _benchmark


def _benchmark(call: Callable[[], object], quantiles: Sequence[float] | None = None, **_: Any) -> float | list[float]:
    call()
    return 1.0 if quantiles is None else [1.0] * len(quantiles)


@contextlib.contextmanager
def libcuda() -> Iterator[str]:
    """A folder with a `libcuda.so.1` to link launchers against, which find the real one when they are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        command = [os.environ.get("CC", "cc"), "-shared", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1"]
        subprocess.run([*command, "-x", "c", os.devnull], check=True)
        yield folder


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a CUDA device."""

    def __torch_function__(self, func: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs `func` with every CUDA device among its arguments replaced."""
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.cuda:
            return args[0]
        args, kwargs = tree_map_only(torch.device, _cpu, (args, kwargs or {}))
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(_cpu(a) for a in args)
        return func(*args, **kwargs)


def _cpu(device: Any) -> Any:
    cuda = (isinstance(device, torch.device) and device.type == "cuda") or (
        isinstance(device, str) and device.startswith("cuda")
    )
    return torch.device("cpu") if cuda else device


class Event:
    """A CUDA event without a time of its own: what is compared by events is all the same."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, *_: Any) -> None:
        """Nothing to record."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, _end: Event) -> float:
        """One millisecond."""
        return 1.0


class Generator(torch.Generator):
    """A generator on the CPU, whatever it is asked for."""

    def __new__(cls, _device: Any = None) -> Generator:
        return super().__new__(cls, "cpu")


class Unwritten(TorchDispatchMode):
    """Leaves large floating-point results unwritten, and makes fresh integers zeros, which no index operation minds."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs `func`, or allocates what it would return."""
        kwargs = kwargs or {}
        if (custom := OPDEFS.get(func._schema.name)) is not None:  # a package's own operator, which launches kernels
            with OnCpu(), self:
                return next(iter(custom._backend_fns.values()))(*args, **kwargs)
        if any(t.is_floating_point() and t.numel() > LARGE for t in _tensors((args, kwargs))):
            if func._schema.is_mutable:
                return next(t for t, a in zip(args, func._schema.arguments, strict=False) if a.is_write)
            if all(r.alias_info is None for r in func._schema.returns):
                elsewhere = {"device": torch.device("meta")} if "device" in kwargs else {}
                shapes = func(*_meta(args), **_meta(kwargs) | elsewhere)
                if all(t.is_floating_point() for t in _tensors(shapes)):
                    return tree_map_only(torch.Tensor, partial(torch.empty_like, device="cpu"), shapes)
        result = func(*args, **kwargs)
        if "empty" in func.__name__ and not result.is_floating_point() and not result.is_complex():
            result.zero_()
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _meta(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to("meta"), tree)


_apply = BackwardCFunction.apply


def _backward(self: BackwardCFunction, *grads: torch.Tensor) -> Any:
    """A function's own backward, which autograd calls outside of the modes of its caller."""
    with OnCpu():
        return _apply(self, *grads)


def _device(tensor: torch.Tensor) -> torch.device:
    own = torch._C.TensorBase.device.__get__(tensor)
    return CUDA if own.type == "cpu" else own


@contextlib.contextmanager
def posing(card: Card, libraries: str) -> Iterator[None]:
    """Within, tensors and torch.cuda look as on a machine with the card, and Triton compiles for it."""
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda _: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "Event": Event,
        "get_device_name": lambda *_: card.name,
        "get_device_capability": lambda *_: card.capability,
        "get_device_properties": lambda *_: card.properties,
    }
    sonic = impls.load("sonic")
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        # in Python alone: torch itself goes on seeing tensors of the CPU
        stack.enter_context(mock.patch.object(torch.Tensor, "device", property(_device), create=True))
        stack.enter_context(
            mock.patch.object(torch.Tensor, "is_cuda", property(lambda t: t.device == CUDA), create=True)
        )
        stack.enter_context(mock.patch.object(torch.Tensor, "get_device", lambda _: 0))
        stack.enter_context(mock.patch.object(common, "_Plan", lambda *_: None))  # keeps launches, and there are none
        # every candidate tile is compiled; none is written down as the fastest
        stack.enter_context(mock.patch.object(triton.testing, "do_bench", _benchmark))
        stack.enter_context(mock.patch.object(tuning, "_keep"))
        stack.enter_context(mock.patch.object(Problem, "_part_close_calls", lambda *_: None))
        stack.enter_context(mock.patch.object(sonic, "_adopt", lambda _: None))
        before = triton.runtime.driver._active
        stack.callback(setattr, triton.runtime.driver, "_active", before)
        triton.runtime.driver.set_active(Driver(card, libraries))
        stack.enter_context(mock.patch.object(BackwardCFunction, "apply", _backward))
        stack.enter_context(OnCpu())
        stack.enter_context(Unwritten())
        yield


@dataclass(frozen=True)
class Done:
    """How many kernels a point compiled now, and how many there were already; `refused` says why the implementation
    does not run it, `error` what went wrong."""

    compiled: int
    found: int
    seconds: float
    refused: str | None = None
    error: str | None = None

    def __str__(self) -> str:
        reason = self.error or self.refused
        return sweep.short(reason) if reason else f"{self.compiled} compiled, {self.found} found, {self.seconds:.1f} s"


def precompile(point: Point, card: Card, libraries: str) -> Done:
    """Compiles every kernel that the point launches, on its twin and at full size; `libraries` is a folder of
    `libcuda`. Never raises for a point."""
    counts = {False: 0, True: 0}

    def listen(*_: Any, cache_hit: bool, **__: Any) -> None:
        counts[cache_hit] += 1

    begun, refused, error = time.perf_counter(), None, None
    with mock.patch.object(triton.knobs.compilation, "listener", listen), posing(card, libraries):
        try:
            impl = impls.load(point.impl)
            refused = impl.available() or worker.refusal(impl, point, CUDA)
            if refused is None:
                _run(impl, point)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return Done(counts[False], counts[True], time.perf_counter() - begun, refused, error)


def _run(impl_class: type, point: Point) -> None:
    """Calls the implementation as `sonic.worker` does, results aside."""
    sizes, whole = point.shape.sizes(), point.op in LAYER_OPS
    problems = [Problem.twin(point, CUDA)] if whole else []
    if not problems or problems[0].shape != sizes:
        problems.append(Problem(sizes, point.routing, point.dtype, CUDA, point.seed))
    for problem in problems:
        with torch.set_grad_enabled(whole and point.mode != "fwd_infer"):
            out = impl_class(problem, point).forward()
        if point.mode == "fwd_bwd":
            out.backward(problem.do_Td)


def _each(points: Sequence[Point], card: Card, jobs: int) -> Iterator[tuple[Point, Done]]:
    count = max(1, min(jobs, len(points)))
    with libcuda() as folder, ProcessPoolExecutor(count, get_context("spawn")) as processes:
        call = partial(precompile, card=card, libraries=folder)
        yield from zip(points, processes.map(call, points), strict=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sonic.precompile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--card", choices=CARDS, default="nvidia-h200", help="compile for this one (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for sonic.sweep")
    options = parser.parse_intermixed_args(arguments)
    try:
        wanted = config.load(options.overrides)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ["SONIC_TUNE"] = wanted.control.measure.settings().tune
    points = list({point.model_dump_json(): point for point in wanted.points}.values())
    card = CARDS[options.card]
    print(f"{wanted.name}: {sweep.counted(len(points))} for {card.name}, triton {triton.__version__}")
    failed = kernels = 0
    leaves = sweep.varying(points)
    try:
        for at, (point, done) in enumerate(_each(points, card, options.jobs), 1):
            failed += done.error is not None
            kernels += done.compiled
            asked = sweep.settings_of(point, leaves)
            parts = (f"{point.impl:<16} {point.op} {point.mode}", sweep.sizes(point), asked, str(done))
            print(f"[{at}/{len(points)}]", "  ".join(filter(None, parts)), flush=True)
    except BrokenProcessPool:
        print("error: a process was killed, out of memory perhaps (--jobs 1 needs least); the same command goes on "
              "from what is compiled", file=sys.stderr)  # fmt: skip
        return 1
    folder = triton.knobs.cache.dir or Path.home() / ".triton" / "cache"
    print(f"{kernels} kernels compiled into {folder}" + (f"; {sweep.counted(failed)} failed" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    # as a module of its own name, so that processes can be sent what belongs to it
    from sonic.precompile import main as run

    sys.exit(run())
