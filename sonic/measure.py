"""Times, memory and clocks of any callable; knows nothing of MoE.

On a CUDA device four times are taken and never mixed:
  event_us    CUDA events around the eager call: what a user waits for. Calls are queued one behind the other, each
              behind a flush of the L2 cache that lies outside the events; gradients are dropped in between.
  device_us   union of the intervals in which a kernel ran, one total per sample; with it span_us, first kernel's start
              to last kernel's end. Both from CUPTI (torch.profiler).
  graph_us    replay of a CUDA graph of the same call, the cache flushed between replays.
  enqueue_us  host time of a call that follows another without a wait, as in a training loop, the queue far from full.
In the passes for device_us and graph_us the card rests after each sample until it was busy for a quarter of the time
(`BUSY_SHARE`), and once before the first (`SETTLE_MS`), since clocks that the power cap took come back slowly. Else
what enqueues slowly would leave it idle, and cool, for part of the time, and run at higher clocks than what keeps it
busy.
Samples are returned, never their mean. The flush inverts a buffer of twice the L2 cache's size, by a kernel whose name
no implementation uses, so that it also marks where one sample ends and the next begins in the profiler's record. On a
CPU only wall-clock samples are taken, and returned as event_us; everything else is None.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from sonic.record import Clocks, KernelTime, Method, Settings

METHOD_VERSION = 4

#: Name of the kernel by which the flush, and nothing else, shows in a profile.
FLUSH_KERNEL = "bitwise_not"
#: Name of the kernel that waits while the card rests.
REST_KERNEL = "spin_kernel"
#: What that kernel counts, per microsecond; between the clocks at rest and at full load.
REST_CYCLES_PER_US = 1500
#: Ends of the names by which the profiler shows a wait as if it were work of the device.
HOST_MARKS = (" Sync", " Wait Event")
#: Part of the time for which the card works in the passes for device_us and graph_us.
BUSY_SHARE = 0.25
#: Rest before those passes' first sample: the power cap acts late, and full clocks need some 20 ms to come back.
SETTLE_MS = 100
#: Samples by which the device's busy time is told before those passes.
BUSY_SAMPLES = 3
PROFILED_SAMPLES = 10
GRAPH_SAMPLES = 10
ENQUEUE_SAMPLES = 10
#: One kind of sample ends early, with at least two taken, when it would take longer than this.
CUDA_BUDGET_S = 6.0
CPU_BUDGET_S = 5.0
#: Above this number of launches the short ones, or all, are summed by name instead of listed one by one.
LISTED_LAUNCHES = 64
#: Microseconds under which a call is not worth a line of its own then.
SHORT_US = 10.0
NAME_LENGTH = 160

#: Bits of NVML's clock event reasons, and those among them that slow a busy GPU down.
REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
SLOWING = frozenset(
    {"sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)
#: A fall of the SM clock below this share of its highest reading counts as throttling whatever the reasons say.
CLOCK_DROP = 0.85


@dataclass(frozen=True)
class Work:
    """One call to time: forward, and where `backward` is given the backward from the forward's output; `clear` drops
    the gradients and is never timed."""

    forward: Callable[[], torch.Tensor]
    backward: Callable[[torch.Tensor], object] | None = None
    clear: Callable[[], object] = lambda: None

    def __call__(self) -> None:
        out = self.forward()
        if self.backward is not None:
            self.backward(out)


@dataclass(frozen=True)
class Interval:
    """One activity of the device: kernel, memset or copy, in nanoseconds on the profiler's clock."""

    name: str
    start_ns: int
    end_ns: int


@dataclass
class Times:
    """What `times` found; None where the device or the settings give no such time, with the reason among `notes`."""

    event_us: list[float]
    method: Method
    device_us: list[float] | None = None
    span_us: list[float] | None = None
    graph_us: list[float] | None = None
    enqueue_us: list[float] | None = None
    launches: int | None = None
    kernels: list[KernelTime] | None = None
    clocks: Clocks | None = None
    throttled: bool | None = None
    notes: list[str] = field(default_factory=list)
    poisoned: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes; see `memory`. None where the device has no such number."""

    held_bytes: int | None
    held_source: str | None
    peak_fwd_bytes: int | None = None
    peak_bwd_bytes: int | None = None


def times(work: Work, device: torch.device, settings: Settings) -> Times:
    """Warms up and takes every kind of sample that the device and the settings allow.

    Capturing a graph comes last: a capture that fails may leave the process unfit for more (`poisoned`).
    """
    if device.type != "cuda":
        event_us, warmup = _wall_times(work, settings)
        return Times(
            event_us, Method(version=METHOD_VERSION, timer="wall", l2=None, warmup=warmup, samples=len(event_us))
        )
    with torch.cuda.device(device):
        return _cuda_times(work, device, settings)


def _wall_times(work: Work, settings: Settings) -> tuple[list[float], int]:
    warmup, started = 0, time.perf_counter()
    while (time.perf_counter() - started) * 1e3 < settings.warmup_ms:
        work.clear()
        work()
        warmup += 1
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < min(2, settings.samples) or (
        len(samples) < settings.samples and time.perf_counter() - started < CPU_BUDGET_S
    ):
        work.clear()
        begin = time.perf_counter_ns()
        work()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    work.clear()
    return samples, warmup


class Flush:
    """Replaces the whole L2 cache when called (`cold`), or only marks the place in a profile (`warm`); asynchronous."""

    def __init__(self, device: torch.device, l2: str) -> None:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        words = max(2 * cache_bytes, 64 << 20) // 4 if l2 == "cold" else 1
        self._buffer = torch.zeros(words, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        self._buffer.bitwise_not_()


class _Rest:
    """Keeps the device from working, when called, until it was busy for `BUSY_SHARE` of the time: `busy` of the `call`
    microseconds that went before; asynchronous, as `Flush`."""

    def __init__(self, busy: float, call: float) -> None:
        self._cycles = int(max(0.0, busy / BUSY_SHARE - call) * REST_CYCLES_PER_US)

    def __call__(self) -> None:
        if self._cycles:
            torch.cuda._sleep(self._cycles)

    @staticmethod
    def settle() -> None:
        """The rest before a pass's first sample."""
        torch.cuda._sleep(SETTLE_MS * 1000 * REST_CYCLES_PER_US)


def _warm_up(work: Work, warmup_ms: float) -> tuple[int, float]:
    """Calls, each waited for, until `warmup_ms` have passed; returns how many, and the seconds of the last."""
    calls, seconds, started = 0, 0.0, time.perf_counter()
    while calls == 0 or (time.perf_counter() - started) * 1e3 < warmup_ms:
        work.clear()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        calls += 1
    return calls, seconds


def affordable(wanted: int, seconds: float) -> int:
    """How many of the wanted samples fit into the budget for one kind, two at least (one if one is wanted)."""
    return min(wanted, max(2, int(CUDA_BUDGET_S / max(seconds, 1e-9))))


def _cuda_times(work: Work, device: torch.device, settings: Settings) -> Times:
    flush = Flush(device, settings.l2)
    readings = Readings(device)
    warmup, seconds = _warm_up(work, settings.warmup_ms)
    wanted = affordable(settings.samples, seconds)
    gc.collect()
    event_us = _event_times(work, work.clear, wanted, flush, readings)
    found = Times(
        event_us, Method(version=METHOD_VERSION, timer="cuda", l2=settings.l2, warmup=warmup, samples=len(event_us))
    )
    found.enqueue_us = _enqueue_times(work, min(wanted, ENQUEUE_SAMPLES))
    call = busy = statistics.median(event_us)
    if settings.profile:
        first = split_samples(_profile(work, BUSY_SAMPLES, flush, None, readings))
        busy = statistics.median(map(busy_us, first)) if first else call
        rest = _Rest(busy, call)
        samples = split_samples(_profile(work, min(wanted, PROFILED_SAMPLES), flush, rest, readings))
        if samples:
            found.device_us = [busy_us(sample) for sample in samples]
            found.span_us = [span_us(sample) for sample in samples]
            found.launches = int(statistics.median(len(sample) for sample in samples))
            found.kernels = kernel_times(samples)
        else:
            found.notes.append("device_us: the profiler recorded no kernels")
    if settings.graph:
        found.graph_us, refusal, found.poisoned = _graph_times(
            work, min(wanted, GRAPH_SAMPLES), flush, _Rest(busy, busy), readings
        )
        if refusal is not None:
            found.notes.append(f"graph_us: {refusal}")
    work.clear()
    found.clocks, found.throttled = readings.summary()
    return found


def _event_times(
    call: Callable[[], object], clear: Callable[[], object], samples: int, flush: Flush, readings: Readings,
    rest: _Rest | None = None,
) -> list[float]:  # fmt: skip
    """Microseconds between two events around the call, queued without waiting in between; clocks are read before the
    queue has drained."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    torch.cuda.synchronize()
    if rest is not None:
        rest.settle()
    for begin, end in pairs:
        clear()
        flush()
        begin.record()
        call()
        end.record()
        if rest is not None:
            rest()
    readings.take()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def _enqueue_times(work: Work, samples: int) -> list[float]:
    taken: list[float] = []
    for _ in range(samples):
        work.clear()
        torch.cuda.synchronize()
        # the call before the timed one warms the host's caches and threads, which a wait lets go cold
        work()
        work.clear()
        begin = time.perf_counter_ns()
        work()
        taken.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return taken


def _profile(work: Work, samples: int, flush: Flush, rest: _Rest | None, readings: Readings) -> list[Interval]:
    """Device activities of one discarded and `samples` kept calls, each behind a flush, and of a last flush."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        if rest is not None:
            rest.settle()
        for _ in range(samples + 1):
            work.clear()
            flush()
            work()
            if rest is not None:
                rest()
        readings.take()
        flush()
        torch.cuda.synchronize()
    return device_intervals(profiler.profiler.kineto_results.events())


def device_intervals(events: Iterable[Any]) -> list[Interval]:
    """Kernels, memsets and copies among the profiler's events, by start; marks of the host and rests are left out."""
    cuda = torch.autograd.DeviceType.CUDA
    found = [
        Interval(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == cuda
        and not event.is_user_annotation()
        and not event.name().endswith(HOST_MARKS)
        and REST_KERNEL not in event.name()
    ]
    return sorted(found, key=lambda interval: interval.start_ns)


def split_samples(intervals: Sequence[Interval]) -> list[list[Interval]]:
    """What ran between two neighbouring flushes, for all pairs but the first (the profiler may miss its start)."""
    samples: list[list[Interval]] = []
    for interval in intervals:
        if FLUSH_KERNEL in interval.name:
            samples.append([])
        elif samples:
            samples[-1].append(interval)
    return [sample for sample in samples[1:-1] if sample]


def busy_us(sample: Iterable[Interval]) -> float:
    """Microseconds in which at least one activity ran: the union of the intervals."""
    total, reached = 0, None
    for interval in sorted(sample, key=lambda interval: interval.start_ns):
        begin = interval.start_ns if reached is None else max(interval.start_ns, reached)
        if interval.end_ns > begin:
            total += interval.end_ns - begin
            reached = interval.end_ns
    return total / 1e3


def span_us(sample: Sequence[Interval]) -> float:
    """Microseconds from the first start to the last end."""
    return (max(interval.end_ns for interval in sample) - min(interval.start_ns for interval in sample)) / 1e3


def kernel_times(samples: Sequence[Sequence[Interval]]) -> list[KernelTime]:
    """Medians over the samples of each call, in launch order, by kernel name and the how-maniest call of that name it
    is.

    Of more than `LISTED_LAUNCHES` calls those shorter than `SHORT_US` are summed up by name, and all of them where that
    leaves too many: `us` is then the sum of the medians of `calls` calls, in the place of the first.
    """
    durations: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        seen: dict[str, int] = {}
        for interval in sample:
            nth = seen.get(interval.name, 0)
            seen[interval.name] = nth + 1
            durations.setdefault((interval.name, nth), []).append((interval.end_ns - interval.start_ns) / 1e3)
    # A call that fewer than half of the samples show belongs to no typical pass.
    medians = {call: statistics.median(us) for call, us in durations.items() if 2 * len(us) >= len(samples)}
    for shortest in (0.0, SHORT_US, float("inf")):
        found: dict[tuple[str, int | None], list[float]] = {}
        for (name, nth), us in medians.items():
            found.setdefault((name, nth if us >= shortest else None), []).append(us)
        if len(found) <= LISTED_LAUNCHES:
            break
    return [KernelTime(name=name[:NAME_LENGTH], us=sum(us), calls=len(us)) for (name, _), us in found.items()]


def with_costs(kernels: Sequence[KernelTime], costs: Iterable[KernelTime]) -> list[KernelTime]:
    """Adds what a cost knows (flops, bytes, tile) to measured kernels: one goes to the next call, in launch order and
    not yet taken, of a kernel whose name contains the cost's name."""
    found = list(kernels)
    free = [kernel.calls == 1 for kernel in found]
    for cost in costs:
        for i, kernel in enumerate(found):
            if free[i] and cost.name in kernel.name:
                known = {name: getattr(cost, name) for name in ("flops", "bytes", "bytes_once", "tile")}
                found[i] = kernel.model_copy(update=known)
                free[i] = False
                break
    return found


def _graph_times(
    work: Work, samples: int, flush: Flush, rest: _Rest, readings: Readings
) -> tuple[list[float] | None, str | None, bool]:
    """Replay times, or None and the reason; and whether a failed capture left the process unusable."""
    work.clear()
    torch.cuda.synchronize()
    refusal = _host_sync(work)
    if refusal is not None:
        return None, refusal, False
    graph = torch.cuda.CUDAGraph()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work.clear()
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        work.clear()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        replayed = _event_times(graph.replay, lambda: None, samples, flush, readings, rest)
    except Exception as error:
        return None, f"capture failed: {_first_line(error)}", not _usable()
    finally:
        work.clear()
        del graph
        gc.collect()
    torch.cuda.empty_cache()
    return replayed, None, False


def _host_sync(work: Work) -> str | None:
    """Why the call cannot be captured: it makes the host wait for the device. Found without starting a capture, since
    one that fails can leave the allocator and the random state of the process unusable."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        work()
    except RuntimeError as error:
        return f"not captured, the call waits for the device: {_first_line(error)}"
    finally:
        torch.cuda.set_sync_debug_mode(before)
        work.clear()
        torch.cuda.synchronize()
    return None


def _usable() -> bool:
    """Whether kernels, allocations and random numbers still work."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return bool(torch.rand(8, device="cuda").add(1).sum().item() >= 8)
    except RuntimeError:
        return False


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


class Readings:
    """Clocks, power and temperature of one GPU, read through NVML when asked; silent without NVML."""

    def __init__(self, device: torch.device) -> None:
        self._taken: list[dict[str, Any]] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
        except Exception:  # no library, no driver, a hidden device: any of NVML's many errors means "no readings"
            self._nvml = None

    def take(self) -> None:
        """Reads once, about a millisecond of host time."""
        if self._nvml is None:
            return
        nvml, handle = self._nvml, self._handle
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        readers = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "mem_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temp_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "reasons": lambda: reason_names(reasons(handle)),
        }
        reading: dict[str, Any] = {}
        for name, read in readers.items():
            try:
                reading[name] = read()
            except nvml.NVMLError:  # a host may refuse single readings; the others still count
                continue
        self._taken.append(reading)

    def summary(self) -> tuple[Clocks | None, bool | None]:
        """Medians of the readings, all reasons seen, whether the GPU was slowed down; (None, None) without readings."""
        return summarise(self._taken)


def reason_names(bits: int) -> list[str]:
    """Names of the bits that are set in NVML's clock event reasons."""
    return [name for bit, name in REASONS.items() if bits & bit]


def summarise(taken: Sequence[dict[str, Any]]) -> tuple[Clocks | None, bool | None]:
    """See `Readings.summary`. Slowed down: a reason of `SLOWING`, or an SM clock below `CLOCK_DROP` of its highest."""
    if not taken:
        return None, None
    values = {
        name: [float(reading[name]) for reading in taken if name in reading]
        for name in ("sm_mhz", "mem_mhz", "power_w", "temp_c")
    }
    reasons = sorted({reason for reading in taken for reason in reading.get("reasons", [])})
    medians = {name: statistics.median(found) if found else None for name, found in values.items()}
    sm = values["sm_mhz"]
    dropped = bool(sm) and min(sm) < CLOCK_DROP * max(sm)
    return Clocks(**medians, reasons=reasons), dropped or bool(SLOWING & set(reasons))


def memory(
    work: Work, device: torch.device, x_Td: torch.Tensor, weights: Iterable[torch.Tensor], training: bool
) -> Memory:
    """Bytes that one warm call keeps and needs.

    held: what the forward keeps for the backward, the input x included, weights and output excluded; None unless
    `training`. peak_fwd, peak_bwd: the most that was allocated during the forward, and during the backward, beyond
    what existed before the call, x included again (so weights and the output's incoming gradient are not in it). On a
    CPU peaks are None, and held counts the storages that autograd saves.
    """
    work.clear()
    gc.collect()
    if device.type == "cuda":
        return _cuda_memory(work, device, x_Td, training)
    if not training:
        return Memory(None, None)
    return Memory(_saved_bytes(work, x_Td, weights), "saved_tensors")


def _cuda_memory(work: Work, device: torch.device, x_Td: torch.Tensor, training: bool) -> Memory:
    def requested() -> int:
        return torch.cuda.memory_stats(device)["requested_bytes.all.current"]

    x_bytes = x_Td.untyped_storage().nbytes()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, allocated = requested(), torch.cuda.memory_allocated(device)
    out = work.forward()
    torch.cuda.synchronize(device)
    held = requested() - before - out.untyped_storage().nbytes() + x_bytes
    peak_fwd = torch.cuda.max_memory_allocated(device) - allocated + x_bytes
    peak_bwd = None
    if work.backward is not None:
        torch.cuda.reset_peak_memory_stats(device)
        work.backward(out)
        torch.cuda.synchronize(device)
        peak_bwd = torch.cuda.max_memory_allocated(device) - allocated + x_bytes
    del out
    work.clear()
    return Memory(held if training else None, "allocator" if training else None, peak_fwd, peak_bwd)


def _saved_bytes(work: Work, x_Td: torch.Tensor, weights: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages that autograd saves in one forward, each counted once; x included, weights and O not."""
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = work.forward()
    apart = {tensor.untyped_storage().data_ptr() for tensor in (x_Td, out, *weights)}
    return sum(s.nbytes() for pointer, s in saved.items() if pointer not in apart) + x_Td.untyped_storage().nbytes()


def poison(device: torch.device, sizes: Iterable[int] = ()) -> None:
    """Fills free memory with 0xFF bytes, NaN in every float format, so that an output that nobody wrote shows.

    On a CUDA device every free block of the caching allocator; on a CPU two blocks of each of `sizes` bytes, which the
    allocator is likely, not certain, to hand out again.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        stream = torch.cuda.current_stream(device).cuda_stream
        index = torch.cuda.current_device() if device.index is None else device.index
        free = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == index
            and segment["stream"] == stream
            and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)  # others belong to CUDA graphs
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
    else:
        free = [size for size in sizes for _ in range(2)]
    blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sorted(free, reverse=True) if size]
    for block in blocks:
        block.fill_(0xFF)
