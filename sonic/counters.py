"""Hardware counters of one call: bytes that DRAM really moved, L2 hits, use of the tensor pipe, by Nsight Compute.

`read` runs `ncu` on `python -m sonic.counters POINT`, a process of its own that builds the point as a worker does,
warms up and makes one call between the profiler's start and stop. Clocks are left alone; ncu empties the caches before
each kernel, which so reads its operands from DRAM, and repeats it as often as its counters need. Nothing here is a
model: where the card, the tool or the driver refuses, the status says so and the numbers are null. Both passes of
`fwd_bwd` are one watched call; kernels of autograd's own thread belong to the same process and are in it.
"""

from __future__ import annotations

import csv
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sonic.record import Counters, KernelTime, Point

#: Where ncu lies when it is installed but not on the PATH.
PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
#: What is asked of a kernel and the names for it, the best first: no card knows all of them. On Hopper wgmma counts as
#: work of the tensor pipe and of its hmma part.
METRICS = {
    "dram_read": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "dram_write": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "l2_hit": ("lts__t_sector_hit_rate.pct",),
    "tensor_pipe": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "ns": ("gpu__time_duration.sum",),
}
#: Seconds after which the watched process ends itself, which it does even when ncu is gone. Kernels are repeated, and
#: the memory that they write is saved and restored each time.
WATCHED_S = 180
#: Seconds for ncu as a whole, and for asking it what the card can count.
TIMEOUT_S = WATCHED_S + 15.0
QUERY_S = 45.0
#: The most that counters add to a point.
LIMIT_S = TIMEOUT_S + QUERY_S
WARM_CALLS = 2


@dataclass(frozen=True)
class Launch:
    """One kernel launch as ncu saw it: bytes, per cent and nanoseconds by the names of `METRICS`."""

    name: str
    values: dict[str, float]


@dataclass(frozen=True)
class Reading:
    """Launches in order, or why there are none. With launches, the reason tells of metrics that are not the usual."""

    status: str
    reason: str | None = None
    launches: list[Launch] = field(default_factory=list)


def find_ncu() -> str | None:
    """The path of ncu, or None."""
    on_path = shutil.which("ncu")
    if on_path:
        return on_path
    return max((str(path) for place in PLACES for path in Path("/").glob(place.lstrip("/"))), default=None)


def refused(output: str) -> bool:
    """Whether the driver keeps the counters from this user, by ncu's output."""
    return "ERR_NVGPUCTRPERM" in output


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


@cache
def _metrics(ncu: str) -> dict[str, str]:
    """The name of each metric that this card has; the first one where ncu does not say what there is."""
    try:
        done = _run([ncu, "--query-metrics"], QUERY_S)
        known = set(re.findall(r"^\w+__\w+", done.stdout, re.MULTILINE))
    except (subprocess.TimeoutExpired, OSError):
        known = set()
    chosen = {}
    for what, names in METRICS.items():
        there = [name for name in names if name.split(".")[0] in known] if known else names[:1]
        if there:
            chosen[what] = there[0]
    return chosen


def read(point: Point, timeout_s: float = TIMEOUT_S) -> Reading:
    """Counters of every kernel of one call of a point, from a process of its own on the same GPU.

    Status `ok`, `denied` (the driver refuses) or `missing` (no ncu, or it gave no counters) with the reason.
    """
    ncu = find_ncu()
    if ncu is None:
        return Reading("missing", "no ncu on the PATH or under /usr/local/cuda and /opt/nvidia")
    metrics = _metrics(ncu)
    if not metrics:
        return Reading("missing", f"{ncu} knows none of the metrics that are asked for on this card")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
            "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all",
            "--replay-mode", "kernel", "--target-processes", "application-only",
            "--metrics", ",".join(metrics.values()),
            sys.executable, "-m", "sonic.counters", point.model_dump_json(),
        ]  # fmt: skip
        begin = time.monotonic()
        try:
            done = _run(command, timeout_s)
        except subprocess.TimeoutExpired:
            return Reading("missing", f"ncu gave no answer in {timeout_s:g} s")
        except OSError as error:
            return Reading("missing", f"{ncu} could not be run ({error.strerror})")
        written = log.read_text(errors="replace") if log.exists() else ""
    if refused(written + done.stdout + done.stderr):
        return Reading("denied", "the driver refuses counters to this user (ERR_NVGPUCTRPERM)")
    launches = parse(written, metrics)
    if done.returncode or not launches:
        how = (
            f"ncu ended after {time.monotonic() - begin:.0f} s with code {done.returncode} and {len(launches)} kernels"
        )
        return Reading("missing", f"{how}: {_why(done.stderr, written)}")
    return Reading("ok", _unusual(metrics), launches)


def _why(errors: str, log: str) -> str:
    """What the watched process said last and what ncu complains of, its errors before its warnings."""
    said = errors.strip().splitlines()[-1:]
    marks = ("==ERROR==", "==WARNING==")
    told = [line.strip() for mark in marks for line in log.splitlines() if line.startswith(mark)]
    return "; ".join(line[:200] for line in (said + told or log.strip().splitlines()[-1:] or ["no output"])[:4])


def _unusual(metrics: dict[str, str]) -> str | None:
    """Which metrics are taken under another than their first name, and which this card does not have."""
    told = [
        f"{what} is {metrics[what]}" if what in metrics else f"{what} is not among this card's metrics"
        for what, names in METRICS.items()
        if metrics.get(what) != names[0]
    ]
    return ", ".join(told) or None


def parse(text: str, metrics: dict[str, str]) -> list[Launch]:
    """Launches in ncu's raw CSV page: lines of its own, a header, a line of units, a line per launch."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches = []
    for found in csv.DictReader(line for line in lines[begin:] if line.startswith('"')):
        name = found.get("Kernel Name")
        if not found["ID"] or not name:  # the units, or a line that was cut off
            continue
        numbers = {what: _number(found.get(metric)) for what, metric in metrics.items()}
        launches.append(Launch(name, {what: n for what, n in numbers.items() if n is not None}))
    return launches


def _number(text: str | None) -> float | None:
    """A value with or without separators of thousands; None for `n/a` and what is no number."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _base(name: str) -> str:
    """A kernel's name without return type, namespaces, template and arguments, by which two tools agree."""
    for unnamed in ("(anonymous namespace)::", "<unnamed>::"):
        name = name.replace(unnamed, "")
    plain = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0]
    return plain.rsplit("::", 1)[-1].strip()


def total(reading: Reading) -> Counters:
    """Counters of the whole call: sums of bytes; hit rate and pipe use, as fractions, weighted by ncu's kernel times.

    Every launch that ncu saw counts, whether or not it belongs to a kernel of the row. Without times the plain mean.
    """
    if reading.status != "ok":
        return Counters(status=reading.status)
    return Counters(status="ok", **_summed(reading.launches))


def _summed(launches: Sequence[Launch]) -> dict[str, int | float | None]:
    found: dict[str, int | float | None] = {}
    timed = all("ns" in launch.values for launch in launches)
    for what in ("dram_read", "dram_write"):
        values = [launch.values[what] for launch in launches if what in launch.values]
        found[what] = round(sum(values)) if values else None
    for what in ("l2_hit", "tensor_pipe"):
        there = [launch.values for launch in launches if what in launch.values]
        parts = [(values[what], values["ns"] if timed else 1.0) for values in there]
        weight = sum(share for _, share in parts)
        found[what] = sum(value * share for value, share in parts) / weight / 100 if weight else None
    return found


def on_kernels(kernels: Sequence[KernelTime], launches: Sequence[Launch]) -> list[KernelTime]:
    """The kernels of a row with their own counters.

    Both lists are in launch order, of two calls that launch the same: the kernels of a name take its launches in turn,
    one that was summed over several calls takes all of them. The counters stay null where the two do not count as many
    launches of a name, and where a name is listed several times and summed at least once.
    """
    names = [_base(kernel.name) for kernel in kernels]
    listed = Counter(names)
    calls: Counter[str] = Counter()
    for name, kernel in zip(names, kernels, strict=True):
        calls[name] += kernel.calls
    waiting: dict[str, list[Launch]] = {name: [] for name in names}
    for launch in launches:
        waiting.setdefault(_base(launch.name), []).append(launch)
    agreed = {
        name
        for name in listed
        if len(waiting[name]) == calls[name] and (listed[name] == 1 or listed[name] == calls[name])
    }
    filled = []
    for name, kernel in zip(names, kernels, strict=True):
        if name in agreed:
            mine, waiting[name] = waiting[name][: kernel.calls], waiting[name][kernel.calls :]
            kernel = kernel.model_copy(update=_summed(mine))
        filled.append(kernel)
    return filled


def main() -> None:
    """The process that ncu watches: its argument is a point as JSON."""
    signal.alarm(WATCHED_S)  # no handler: the system ends the process, even inside a driver call
    import torch

    from sonic import worker

    point = Point.model_validate_json(sys.argv[1])
    with torch.cuda.device(worker.device()):
        work = worker.work_of(point)
        for _ in range(WARM_CALLS):
            work()
            work.clear()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        work()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
