"""How samples are told apart and added up, on made-up timelines; the CUDA path on stand-ins for the driver."""

import contextlib
import sys
import time
import types

import pytest
import torch

from sonic import measure
from sonic.measure import FLUSH_KERNEL, Interval, Work
from sonic.record import KernelTime, Settings

FLUSH = f"void at::native::vectorized_elementwise_kernel<4, at::native::{FLUSH_KERNEL}_kernel_cuda>"


def intervals(*spans: tuple[str, int, int]) -> list[Interval]:
    return [Interval(name, start * 1000, end * 1000) for name, start, end in spans]


@pytest.mark.parametrize(
    ("spans", "busy", "span"),
    [
        ([("a", 0, 10)], 10, 10),
        ([("a", 0, 10), ("b", 15, 20)], 15, 20),
        ([("a", 0, 10), ("b", 5, 20)], 20, 20),
        ([("a", 0, 30), ("b", 5, 10), ("c", 20, 40)], 40, 40),
        ([("b", 15, 20), ("a", 0, 10), ("c", 10, 15)], 20, 20),
        ([("a", 3, 3), ("b", 3, 5)], 2, 2),
    ],
)
def test_busy_time_is_the_union_of_intervals(spans, busy, span):
    sample = intervals(*spans)
    assert measure.busy_us(sample) == pytest.approx(busy)
    assert measure.span_us(sample) == pytest.approx(span)


def test_samples_lie_between_flushes_and_the_first_is_dropped():
    timeline = intervals(
        ("stray", 0, 1),
        (FLUSH, 1, 5), ("a", 5, 9),
        (FLUSH, 10, 15), ("a", 15, 17), ("Memset (Device)", 18, 19), ("b", 20, 22),
        (FLUSH, 30, 35), ("a", 35, 38), ("Memset (Device)", 38, 39), ("b", 39, 40),
        (FLUSH, 50, 55),
    )  # fmt: skip
    samples = measure.split_samples(timeline)
    assert [[interval.name for interval in sample] for sample in samples] == [["a", "Memset (Device)", "b"]] * 2
    assert [measure.busy_us(sample) for sample in samples] == [5, 5]
    assert [measure.span_us(sample) for sample in samples] == [7, 5]


@pytest.mark.parametrize("timeline", [[], intervals(("a", 0, 1)), intervals((FLUSH, 0, 1), ("a", 1, 2))])
def test_a_timeline_without_flushes_has_no_samples(timeline):
    assert measure.split_samples(timeline) == []


def test_kernels_are_medians_by_name_and_call():
    samples = [
        intervals(("gemm", 0, 10 + i), ("act", 20, 21), ("gemm", 30, 50 + 2 * i), *([("rare", 60, 61)] * (i == 0)))
        for i in range(3)
    ]
    assert [(k.name, k.us, k.calls) for k in measure.kernel_times(samples)] == [
        ("gemm", 11.0, 1),
        ("act", 1.0, 1),
        ("gemm", 22.0, 1),
    ]


def test_very_many_launches_are_summed_by_name():
    sample = intervals(*[(("gemm", "act")[i % 2], 10 * i, 10 * i + 3) for i in range(200)])
    found = measure.kernel_times([sample, sample])
    assert [(k.name, k.us, k.calls) for k in found] == [("gemm", 300.0, 100), ("act", 300.0, 100)]


def test_of_many_launches_the_long_ones_stand_alone():
    long = [("gemm", 0, 40), ("gemm", 40, 90), ("act", 90, 100)]
    sample = intervals(*long, *[("fill", 100 + 2 * i, 101 + 2 * i) for i in range(80)], ("gemm", 300, 303))
    found = measure.kernel_times([sample, sample])
    assert [(k.name, k.us, k.calls) for k in found] == [
        ("gemm", 40.0, 1), ("gemm", 50.0, 1), ("act", 10.0, 1), ("fill", 80.0, 80), ("gemm", 3.0, 1),
    ]  # fmt: skip


def test_costs_meet_their_kernels_in_launch_order():
    kernels = [KernelTime(name=name, us=1.0) for name in ("_up_proj_kernel", "memset", "_gemm_kernel", "_gemm_kernel")]
    costs = [
        KernelTime(name="gemm", us=0.0, flops=1, bytes=2),
        KernelTime(name="up_proj", us=0.0, flops=3, bytes=4, tile={"m": 128}),
        KernelTime(name="gemm", us=0.0, flops=5, bytes=6),
        KernelTime(name="absent", us=0.0, flops=7, bytes=8),
    ]
    found = measure.with_costs(kernels, costs)
    assert [(k.flops, k.bytes, k.tile, k.us) for k in found] == [
        (3, 4, {"m": 128}, 1.0),
        (None, None, None, 1.0),
        (1, 2, None, 1.0),
        (5, 6, None, 1.0),
    ]


class Event:
    """Stands for a profiler event."""

    def __init__(self, name, kind, start_ns, duration_ns, annotation=False):
        self._values = (name, kind, start_ns, duration_ns, annotation)

    def name(self):
        return self._values[0]

    def device_type(self):
        return self._values[1]

    def start_ns(self):
        return self._values[2]

    def duration_ns(self):
        return self._values[3]

    def is_user_annotation(self):
        return self._values[4]


def test_only_the_devices_own_work_is_kept():
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        Event("late", cuda, 50, 5),
        Event("cudaLaunchKernel", cpu, 0, 5),
        Event("Torch-Compiled Region", cuda, 0, 90, annotation=True),
        Event("Context Sync", cuda, 0, 90),
        Event("early", cuda, 10, 5),
    ]
    assert measure.device_intervals(events) == [Interval("early", 10, 15), Interval("late", 50, 55)]


@pytest.mark.parametrize(
    ("wanted", "seconds", "expected"), [(20, 0.001, 20), (20, 1.0, 6), (20, 60.0, 2), (1, 60.0, 1)]
)
def test_slow_calls_get_fewer_samples(wanted, seconds, expected):
    assert measure.affordable(wanted, seconds) == expected


@pytest.mark.parametrize(
    ("sm", "reasons", "throttled"),
    [
        ([1980, 1980, 1950], [["gpu_idle"]] * 3, False),
        ([1980, 1400, 1400], [[]] * 3, True),
        ([1980] * 3, [[], ["sw_power_cap"], []], True),
    ],
)
def test_throttling_is_told_from_reasons_and_from_a_falling_clock(sm, reasons, throttled):
    taken = [{"sm_mhz": mhz, "reasons": why, "power_w": 600.0} for mhz, why in zip(sm, reasons, strict=True)]
    clocks, slowed = measure.summarise(taken)
    assert slowed is throttled
    assert clocks.sm_mhz == sorted(sm)[1] and clocks.power_w == 600.0 and clocks.temp_c is None
    assert clocks.reasons == sorted(set(sum(reasons, [])))


def test_without_readings_there_are_no_clocks():
    assert measure.summarise([]) == (None, None)
    assert measure.reason_names(0x4 | 0x40) == ["sw_power_cap", "hw_thermal_slowdown"]


def toy(T: int = 8, d: int = 16) -> tuple[Work, torch.Tensor, torch.Tensor]:
    """relu(x) @ w: autograd saves x (by way of relu's output) and w."""
    x, w = torch.randn(T, d, requires_grad=True), torch.randn(d, d, requires_grad=True)

    def clear() -> None:
        x.grad = w.grad = None

    return Work(lambda: x.sigmoid() @ w, lambda out: out.backward(torch.ones_like(out)), clear), x, w


def test_cpu_times_are_wall_clock_samples():
    calls = []
    work = Work(lambda: calls.append(time.sleep(0.002)) or torch.zeros(1))
    found = measure.times(work, torch.device("cpu"), Settings(samples=4, warmup_ms=0.0))
    assert len(found.event_us) == 4 == len(calls) and all(us >= 2000 for us in found.event_us)
    assert found.method.timer == "wall" and found.method.l2 is None and found.method.samples == 4
    assert found.device_us is found.span_us is found.graph_us is found.enqueue_us is found.clocks is None


def test_cpu_times_stop_at_the_budget(monkeypatch):
    monkeypatch.setattr(measure, "CPU_BUDGET_S", 0.0)
    work, _, _ = toy()
    assert len(measure.times(work, torch.device("cpu"), Settings(samples=50, warmup_ms=0.0)).event_us) == 2


def test_memory_on_a_cpu_counts_saved_storages_once():
    work, x, w = toy()
    found = measure.memory(work, torch.device("cpu"), x, [w], training=True)
    assert found.held_source == "saved_tensors" and found.peak_fwd_bytes is found.peak_bwd_bytes is None
    assert found.held_bytes == 2 * x.untyped_storage().nbytes()  # x itself, and sigmoid(x), which two steps save
    assert measure.memory(work, torch.device("cpu"), x, [w], training=False).held_bytes is None


def test_poison_is_nan_in_every_float_format():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        block = torch.empty(64, dtype=torch.uint8).fill_(0xFF)
        assert block.view(dtype).isnan().all()
    measure.poison(torch.device("cpu"), [0, 100, 1 << 20])


class Driver:
    """A stand-in for torch.cuda on a machine without a GPU: a clock that the calls advance, and a log of the calls."""

    def __init__(self) -> None:
        self.now_us, self.log, self.capturing, self.sync_mode = 0.0, [], False, 0
        driver = self

        class CudaEvent:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                self.at = driver.now_us

            def elapsed_time(self, other):
                return (other.at - self.at) / 1e3

        class Graph:
            def replay(self):
                driver.launch("replay", 7.0)

        class Stream:
            cuda_stream = 0

            def wait_stream(self, other):
                pass

        self.Event, self.CUDAGraph, self.Stream = CudaEvent, Graph, Stream

    def launch(self, name: str, us: float) -> None:
        self.now_us += us
        self.log.append(name)

    @contextlib.contextmanager
    def graph(self, graph):
        self.capturing = True
        yield
        self.capturing = False

    def set_sync_debug_mode(self, mode):
        self.sync_mode = mode


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    for name in ("Event", "CUDAGraph", "Stream", "graph", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    nothing = lambda *_, **__: None  # noqa: E731
    monkeypatch.setattr(torch.cuda, "synchronize", nothing)
    monkeypatch.setattr(torch.cuda, "empty_cache", nothing)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: fake.launch(measure.REST_KERNEL, cycles))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: fake.Stream())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: fake.sync_mode)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    flush = type("Flush", (), {"__init__": nothing, "__call__": lambda _: fake.launch("flush", 100.0)})
    monkeypatch.setattr(measure, "Flush", flush)
    readings = types.SimpleNamespace(take=lambda: fake.log.append("read"), summary=lambda: (None, None))
    monkeypatch.setattr(measure, "Readings", lambda _: readings)

    @contextlib.contextmanager
    def profile(activities):
        start = len(fake.log)
        recorded = types.SimpleNamespace(profiler=None)
        yield recorded
        names = [FLUSH if name == "flush" else name for name in fake.log[start:] if name not in ("read", "clear")]
        cuda = torch.autograd.DeviceType.CUDA
        events = [Event(name, cuda, 1000 * i, 400) for i, name in enumerate(names)]
        results = types.SimpleNamespace(events=lambda: events)
        recorded.profiler = types.SimpleNamespace(kineto_results=results)

    monkeypatch.setattr(torch.profiler, "profile", profile)
    return fake


def cuda_work(driver: Driver) -> Work:
    out = torch.zeros(1)
    return Work(
        lambda: driver.launch("fwd", 3.0) or out,
        lambda _: driver.launch("bwd", 5.0),
        lambda: driver.log.append("clear"),
    )


def test_cuda_times_leave_the_flush_out(driver):
    found = measure.times(cuda_work(driver), torch.device("cuda", 0), Settings(samples=6, warmup_ms=0.0))
    assert found.event_us == pytest.approx([8.0] * 6)
    assert found.graph_us == pytest.approx([7.0] * 6)
    assert found.device_us == pytest.approx([0.8] * 6) and found.span_us == pytest.approx([1.4] * 6)
    assert found.launches == 2 and [(k.name, k.us) for k in found.kernels] == [("fwd", 0.4), ("bwd", 0.4)]
    assert len(found.enqueue_us) == 6 and found.method.timer == "cuda" and found.method.samples == 6
    assert found.notes == [] and not found.poisoned
    first = driver.log.index("flush")
    assert driver.log[first - 1 : first + 3] == ["clear", "flush", "fwd", "bwd"]


def test_the_card_rests_until_it_was_busy_for_its_share_of_the_time(driver, monkeypatch):
    # a call takes 8 us, in which the profiler sees two kernels of 0.4 us
    monkeypatch.setattr(measure, "BUSY_SHARE", 0.05)
    cycles = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda n: cycles.append(n) or driver.launch(measure.REST_KERNEL, 0.0))
    measure.times(cuda_work(driver), torch.device("cuda", 0), Settings(samples=3, warmup_ms=0.0))
    rested = [i for i, name in enumerate(driver.log) if name == measure.REST_KERNEL]
    settled = [rested.pop(5), rested.pop(0)]
    assert all("flush" in driver.log[i + 1 : i + 3] for i in settled), "before a pass"
    assert {driver.log[i - 1] for i in rested} == {"bwd", "replay"}
    # the profiler's pass has a sample more, which is not kept; a replay holds no idle time
    per_us = measure.REST_CYCLES_PER_US
    settle = measure.SETTLE_MS * 1000 * per_us
    assert cycles == pytest.approx([settle, *[(16.0 - 8.0) * per_us] * 4, settle, *[(16.0 - 0.8) * per_us] * 3], abs=1)


def test_what_leaves_the_card_idle_for_longer_than_its_share_gets_no_rest_beside(driver):
    measure.times(cuda_work(driver), torch.device("cuda", 0), Settings(samples=3, warmup_ms=0.0, graph=False))
    assert driver.log.count(measure.REST_KERNEL) == 1, "before the pass"


def test_what_is_switched_off_is_not_taken(driver):
    settings = Settings(samples=3, warmup_ms=0.0, graph=False, profile=False)
    found = measure.times(cuda_work(driver), torch.device("cuda", 0), settings)
    assert found.graph_us is found.device_us is found.kernels is found.launches is None and found.notes == []


def test_a_call_that_waits_for_the_device_is_not_captured(driver):
    def forward():
        if driver.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    found = measure.times(Work(forward), torch.device("cuda", 0), Settings(samples=2, warmup_ms=0.0, profile=False))
    assert found.graph_us is None and "synchronizing" in found.notes[0] and driver.sync_mode == 0
    assert not found.poisoned and len(found.event_us) == 2


@pytest.mark.parametrize("usable", [True, False])
def test_a_failed_capture_costs_only_the_graph_time(driver, monkeypatch, usable):
    def forward():
        if driver.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return torch.zeros(1)

    monkeypatch.setattr(measure, "_usable", lambda: usable)
    found = measure.times(Work(forward), torch.device("cuda", 0), Settings(samples=2, warmup_ms=0.0, profile=False))
    assert found.graph_us is None and found.poisoned is not usable
    assert found.notes == ["graph_us: capture failed: operation not permitted when stream is capturing"]


def test_cuda_memory_is_corrected_for_x_and_the_output(monkeypatch):
    """An allocator that hands out 1000 bytes for the output, 300 to keep, 500 in passing, and 2000 in the backward."""
    state = {"now": 5000, "peak": 5000}

    def use(passing: int, kept: int) -> None:
        state["peak"] = max(state["peak"], state["now"] + passing + kept)
        state["now"] += kept

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: state.update(peak=state["now"]))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: {"requested_bytes.all.current": state["now"]})
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: state["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: state["peak"])
    x, out = torch.zeros(64, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    work = Work(lambda: use(500, 1300) or out, lambda _: use(2000, 0))
    found = measure.memory(work, torch.device("cuda", 0), x, [], training=True)
    assert (found.held_bytes, found.held_source) == (300 + 64, "allocator")
    assert (found.peak_fwd_bytes, found.peak_bwd_bytes) == (1800 + 64, 1300 + 2000 + 64)


def test_poison_fills_the_free_blocks_of_this_stream_only(monkeypatch):
    def segment(stream, pool, *blocks):
        found = [{"size": size, "state": state} for size, state in blocks]
        return {"device": 0, "stream": stream, "segment_pool_id": pool, "blocks": found}

    segments = [
        segment(0, (0, 0), (512, "inactive"), (1024, "active_allocated"), (2048, "inactive")),
        segment(7, (0, 0), (4096, "inactive")),
        segment(0, (0, 1), (8192, "inactive")),
    ]
    taken = []
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: taken.append(size) or empty(size, dtype=dtype))
    measure.poison(torch.device("cuda", 0))
    assert taken == [2048, 512]


def test_nvml_is_read_once_per_take_and_may_refuse_single_readings(monkeypatch):
    class Refused(Exception):
        pass

    def refuse(*_):
        raise Refused

    nvml = types.SimpleNamespace(
        NVMLError=Refused,
        NVML_CLOCK_SM=0,
        NVML_CLOCK_MEM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda _, kind: (1980, 3201)[kind],
        nvmlDeviceGetPowerUsage=refuse,
        nvmlDeviceGetTemperature=lambda *_: 41,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x1,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="abc"))
    readings = measure.Readings(torch.device("cuda", 0))
    readings.take()
    clocks, throttled = readings.summary()
    assert (clocks.sm_mhz, clocks.mem_mhz, clocks.temp_c, clocks.power_w) == (1980, 3201, 41, None)
    assert clocks.reasons == ["gpu_idle"] and throttled is False


def test_no_nvml_means_no_readings(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    readings = measure.Readings(torch.device("cuda", 0))
    readings.take()
    assert readings.summary() == (None, None)
