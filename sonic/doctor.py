"""`python -m sonic.doctor`: what this machine is, what can be measured on it, and which implementations run.

Everything that needs torch is asked of a child, `python -m sonic.worker --describe`, as a sweep does. The doctor says
so plainly when the child fails, and still tells what it knows without it.

Exit codes: 0 a sweep can run here; 1 the child failed, no implementation is available or results cannot be written.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, get_args

from sonic import __version__, pool
from sonic.counters import find_ncu, refused
from sonic.env import cpu_name, nvml_card, revision
from sonic.record import Knobs, RecordError, default_results, ensure_writable
from sonic.say import say

#: Packages of the parent, whose versions the child does not tell.
PACKAGES = ("hydra-core", "wandb", "pydantic", "pandas", "matplotlib", "nvidia-ml-py", "filelock", "numpy")
#: One kernel, to see whether this user may read counters at all.
NCU_PROBE = "import torch; torch.ones(1, device='cuda'); torch.cuda.synchronize()"

Lines = list[tuple[str, str]]


def describe() -> dict[str, Any]:
    """The reply of the describing child, started as a sweep starts it. WorkerFault says how it failed."""
    interpreter = nvml_card() is None or os.environ.get("TRITON_INTERPRET") == "1"
    command, surroundings = pool.worker_command(), pool.worker_environment(interpreter)
    return pool.describe(command, surroundings).model_dump()


def device_lines(device: dict[str, Any], card: dict[str, Any] | None) -> Lines:
    """The machine: from the child's `device`, or from NVML and the system alone when that is empty."""
    gpu = device.get("gpu") or ("unknown until the child answers" if card else "cpu")
    lines: Lines = [("slug", f"{gpu} (names the rows files)")]
    if card:
        memory = card["memory_gib"]
        lines.append(("card", f"{card['name']}, {memory:.0f} GiB" if memory else str(card["name"])))
        lines.append(("driver", str(card["driver"])))
        if device and device.get("gpu") == "cpu":
            lines.append(("note", "NVML sees this card but torch does not: is this torch a CPU build?"))
    else:
        lines.append(("card", "none: NVML sees no GPU; Triton kernels run in its interpreter, right but slow"))
    if device.get("cc"):
        cc = ".".join(str(part) for part in device["cc"])
        lines.append(("capability", f"{cc}, {device.get('sms')} SMs" if device.get("sms") else cc))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines.append(("processor", f"{cpu_name() or 'unknown'}, {cores} cores"))
    return lines


def version_lines(device: dict[str, Any]) -> Lines:
    """Versions: torch and triton as the child imported them, the others as they are installed."""
    lines: Lines = [("python", str(device.get("python") or sys.version.split()[0]))]
    for name in ("torch", "triton"):
        lines.append((name, str(device.get(name) or f"{installed(name)} (installed; not imported)")))
    lines.append(("cuda", str(device.get("cuda") or "none (of torch)")))
    lines += [(name, installed(name)) for name in PACKAGES]
    commit, dirty = revision(default_results())
    state = {True: ", with changes", False: "", None: ", changes unknown"}[dirty]
    return [*lines, ("sonic", f"{__version__}, commit {commit}{state}")]


def installed(name: str) -> str:
    """The installed version of a distribution, or `not installed`."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def measurable_lines(device: dict[str, Any], card: dict[str, Any] | None) -> Lines:
    """Timers, memory, counters and clocks, each with what it gives or why it does not."""
    if device.get("gpu", "cpu") == "cpu":
        why = "null on a CPU" if device else "unknown until the child answers"
        return [
            ("event_us", "wall clock" if device else why),
            ("device_us, span_us, graph_us", why),
            ("held_bytes", "saved-tensor hooks" if device else why),
            ("peak_*_bytes", why),
            ("counters", "none: no GPU" if card is None else counters()),
            ("clocks", clocks(card)),
        ]
    return [
        ("event_us", "CUDA events"),
        ("device_us, span_us", "kernel intervals from torch.profiler (CUPTI)"),
        ("graph_us", "CUDA-graph replay, L2 flushed between replays"),
        ("held_bytes, peak_*_bytes", "CUDA allocator"),
        ("counters", counters()),
        ("clocks", clocks(card)),
    ]


def clocks(card: dict[str, Any] | None) -> str:
    """What NVML tells of clocks, power and temperature now."""
    if card is None:
        return "none: NVML sees no GPU"
    parts = [
        f"SM {card['sm_mhz']} of {card['sm_max_mhz']} MHz",
        f"memory {card['mem_mhz']} MHz",
        f"{card['power_w']} of {card['power_limit_w']} W",
        f"{card['temp_c']} C",
    ]
    told = [part for part in parts if "None" not in part]
    return "NVML: " + (", ".join(told) or "tells none of them") + "; recorded with every row, never set"


def counters(timeout_s: float = 120) -> str:
    """Whether Nsight Compute reads hardware counters here: it is run on one tiny kernel."""
    ncu = find_ncu()
    if ncu is None:
        return "missing: no ncu on the PATH or under /usr/local/cuda and /opt/nvidia; bytes are modelled only"
    command = [ncu, "--metrics", "dram__bytes_read.sum", "--launch-count", "1", sys.executable, "-c", NCU_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"unknown: {ncu} could not be tried ({type(error).__name__})"
    output = done.stdout + done.stderr
    if refused(output):
        return f"denied: {ncu} is there, the driver refuses counters to this user (ERR_NVGPUCTRPERM)"
    if re.search(r"dram__bytes_read\.sum\s+\S+\s+[\d.,]+", output):
        return f"ok: {ncu} reads DRAM counters"
    last = (output.strip().splitlines() or ["no output"])[-1]
    return f"unknown: {ncu} ended with code {done.returncode}: {last[:200]}"


def impl_lines(impls: dict[str, dict[str, Any]]) -> Lines:
    """Every implementation: available with its version and ops, or the reason why not."""
    lines: Lines = []
    for name, facts in sorted(impls.items()):
        if facts.get("available"):
            ops = facts.get("ops") or []
            kernels = [op for op in ops if op not in ("layer", "experts")]
            shown = [op for op in ("layer", "experts") if op in ops] + ([f"{len(kernels)} kernels"] if kernels else [])
            lines.append((name, f"available  {facts.get('version') or ''}  op: {', '.join(shown)}"))
        else:
            lines.append((name, f"not here: {facts.get('reason') or 'no reason given'}"))
    return lines


def family_lines(device: dict[str, Any]) -> Lines:
    """The kernel families of `sonic`, by the names that `knobs.family` takes."""
    if not device:
        return [("any", "unknown until the child answers")]
    cc = device.get("cc") or []
    on_hopper = device.get("triton") and list(cc) == [9, 0]
    notes = {
        "torch": "runs: plain torch, every dtype",
        "hopper": "compiled for sm_90a: bf16, fp16" if on_hopper else "not here: needs compute capability 9.0",
    }
    if not device.get("triton"):
        notes["triton"] = "not here: triton is not installed"
    elif device.get("gpu", "cpu") == "cpu":
        notes["triton"] = "runs in Triton's interpreter: right, and no measure of speed"
    else:
        notes["triton"] = f"compiled for sm_{''.join(map(str, cc))}: bf16, fp16, fp32"
    names = [name for name in get_args(Knobs.model_fields["family"].annotation) if name != "auto"]
    return [(name, notes.get(name, "")) for name in names]


def report(title: str, lines: Lines) -> None:
    """Prints one section, its names in a column."""
    width = max((len(name) for name, _ in lines), default=0)
    say(f"\n{title}")
    for name, text in lines:
        say(f"  {name:<{width}}  {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sonic.doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.parse_args(arguments)
    problems: list[str] = []
    try:
        reply = describe()
    except pool.WorkerFault as error:
        reply = {}
        problems.append(f"the describing child failed: {error.reason}")
    device = reply.get("device") or {}
    impls = reply.get("impls") or {}
    card = nvml_card(device.get("uuid"))
    report("device", device_lines(device, card))
    report("versions", version_lines(device))
    report("what can be measured", measurable_lines(device, card))
    report("implementations", impl_lines(impls) or [("none", "no implementation was described")])
    report("kernel families of sonic", family_lines(device))
    try:
        ensure_writable(default_results())
        report("results", [(str(default_results()), "writable")])
    except RecordError as error:
        problems.append(str(error))
    if reply and not any(facts.get("available") for facts in impls.values()):
        problems.append("no implementation is available")
    for problem in problems:
        say(f"\nproblem: {problem}")
    say("\na sweep can run here: python -m sonic.sweep" if not problems else "\na sweep cannot run here")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
