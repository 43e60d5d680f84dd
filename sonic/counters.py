"""Hardware counters of one call: bytes that DRAM really moved, L2 hits, use of the tensor pipe, by Nsight Compute.

`read` runs `ncu` on `python -m sonic.counters POINT`, a process of its own that builds the point as a worker does,
warms up and makes one call between the profiler's start and stop. Clocks are left alone; ncu empties the caches before
each kernel, which so reads its operands from DRAM, and repeats it as often as its counters need. Nothing here is a
model: where the card, the tool or the driver refuses, the status says so and the numbers are null.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sonic.record import Counters, KernelTime, Point

#: Where ncu lies when it is installed but not on the PATH.
PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
#: What is asked of a kernel, and under which names, of which cards know one each; the first is that of Hopper.
METRICS = {
    "dram_read": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "dram_write": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "l2_hit": ("lts__t_sector_hit_rate.pct",),
    "tensor_pipe": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "ns": ("gpu__time_duration.sum",),
}
#: Seconds for one point: kernels are repeated, and the memory that they write is saved and restored each time.
TIMEOUT_S = 240.0
QUERY_S = 60.0
WARM_CALLS = 2
#: What the profiler shows beside kernels, which ncu does not count.
NO_KERNEL = ("Memset", "Memcpy")


@dataclass(frozen=True)
class Launch:
    """One kernel launch as ncu saw it: bytes, per cent and nanoseconds by the names of `METRICS`."""

    name: str
    values: dict[str, float]


@dataclass(frozen=True)
class Reading:
    """Launches in order, or why there are none."""

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


@cache
def _metrics(ncu: str) -> dict[str, str]:
    """The name of each metric that this card has; the first one where ncu does not say what there is."""
    try:
        done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=QUERY_S, check=False)
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
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
            "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all",
            "--target-processes", "application-only", "--metrics", ",".join(metrics.values()),
            sys.executable, "-m", "sonic.counters", point.model_dump_json(),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return Reading("missing", f"ncu gave no answer in {timeout_s:g} s")
        except OSError as error:
            return Reading("missing", f"{ncu} could not be run ({error.strerror})")
        written = log.read_text(errors="replace") if log.exists() else ""
    if refused(written + done.stdout + done.stderr):
        return Reading("denied", "the driver refuses counters to this user (ERR_NVGPUCTRPERM)")
    launches = parse(written, metrics)
    if done.returncode or not launches:
        last = ((done.stderr + written).strip().splitlines() or ["no output"])[-1]
        return Reading("missing", f"ncu ended with code {done.returncode} and {len(launches)} kernels: {last[:200]}")
    return Reading("ok", launches=launches)


def parse(text: str, metrics: dict[str, str]) -> list[Launch]:
    """Launches in ncu's raw CSV page: lines of its own, a header, a line of units, a line per launch."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches = []
    for found in csv.DictReader(line for line in lines[begin:] if line.startswith('"')):
        if not found["ID"]:  # the units
            continue
        numbers = {what: _number(found.get(name)) for what, name in metrics.items()}
        launches.append(Launch(found["Kernel Name"], {what: n for what, n in numbers.items() if n is not None}))
    return launches


def _number(text: str | None) -> float | None:
    """A value with or without separators of thousands; None for `n/a` and what is no number."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _base(name: str) -> str:
    """A kernel's name without return type, namespaces, template and arguments, by which two tools agree."""
    plain = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0]
    return plain.rsplit("::", 1)[-1].strip()


def total(reading: Reading) -> Counters:
    """Counters of the whole call: sums of bytes, hit rate and pipe use (0 to 1) weighted by ncu's kernel times."""
    if reading.status != "ok":
        return Counters(status=reading.status)
    return Counters(status="ok", **_summed(reading.launches))


def _summed(launches: Sequence[Launch]) -> dict[str, int | float | None]:
    found: dict[str, int | float | None] = {}
    for what in ("dram_read", "dram_write"):
        values = [launch.values[what] for launch in launches if what in launch.values]
        found[what] = round(sum(values)) if values else None
    for what in ("l2_hit", "tensor_pipe"):
        parts = [(launch.values[what], launch.values.get("ns", 0.0)) for launch in launches if what in launch.values]
        weight = sum(ns for _, ns in parts)
        found[what] = sum(value * ns for value, ns in parts) / weight / 100 if weight else None
    return found


def on_kernels(kernels: Sequence[KernelTime], launches: Sequence[Launch]) -> list[KernelTime]:
    """The kernels of a row with their own counters.

    Both lists are in launch order, of two calls that launch the same: a kernel takes the next launch of its name, one
    that was summed over several calls all of them. The counters stay null where names do not meet, and where a name
    is summed in part.
    """
    left, filled = list(launches), []
    names = [_base(kernel.name) for kernel in kernels]
    mixed = {name for name in names if names.count(name) > 1} & {
        name for name, kernel in zip(names, kernels, strict=True) if kernel.calls > 1
    }
    for kernel in kernels:
        mine: list[Launch] = []
        if not kernel.name.startswith(NO_KERNEL) and _base(kernel.name) not in mixed:
            same = [launch for launch in left if _base(launch.name) == _base(kernel.name)]
            mine = same if kernel.calls > 1 else same[:1]
            left = [launch for launch in left if not any(launch is taken for taken in mine)]
        filled.append(kernel.model_copy(update=_summed(mine)) if mine else kernel)
    return filled


def main() -> None:
    """The process that ncu watches: argument is a point as JSON."""
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
