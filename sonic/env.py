"""The environment of a measurement: commit, card, driver, versions. Rows name it by `env_id`; keys never depend on it.

The launching process collects it without importing torch: from the reply of `python -m sonic.worker --describe`, from
NVML and from git. `results/env.jsonl` holds one line per `env_id`, `results/env-cpu.jsonl` those without a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from pydantic import Field

from sonic.record import Fault, Strict, append_missing, read_lines

#: The clone (or the folder of site-packages) that this package lies in.
ROOT = Path(__file__).resolve().parents[1]


class Env(Strict):
    """One environment, one JSON line. A field is null where this machine does not tell it.

    `gpu` is the slug that names rows files, `cc` the compute capability, `gpu_uuid` a hash of the card's UUID,
    `impls` the version of every available implementation.
    """

    env_id: str
    commit: str
    dirty: bool | None
    gpu: str
    gpu_name: str | None = None
    gpu_uuid: str | None = None
    cc: list[int] | None = None
    sms: int | None = None
    power_limit_w: float | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    triton: str | None = None
    python: str
    system: str
    cpu: str | None = None
    cores: int | None = None
    impls: dict[str, str] = Field(default_factory=dict)


def collect(describe: dict[str, Any], results_dir: Path) -> Env:
    """The environment of this machine and process tree.

    `describe` is the reply of the describing child; changes under `results_dir` and `results/` do not make it dirty.
    """
    device = describe.get("device") or {}
    gpu = device.get("gpu") or "cpu"
    commit, dirty = revision(results_dir)
    facts: dict[str, Any] = {
        "commit": commit,
        "dirty": dirty,
        "gpu": gpu,
        "gpu_name": device.get("name") if gpu != "cpu" else None,
        "cc": device.get("cc"),
        "sms": device.get("sms") if gpu != "cpu" else None,
        **{name: device.get(name) for name in ("cuda", "torch", "triton")},
        "python": device.get("python") or platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "impls": {
            name: facts["version"]
            for name, facts in sorted((describe.get("impls") or {}).items())
            if facts.get("available") and facts.get("version")
        },
    }
    card = nvml_card(device.get("uuid")) if gpu != "cpu" else None
    if card is not None:
        uuid_hash = hashlib.sha256(card["uuid"].encode()).hexdigest()[:12]
        facts |= {"gpu_uuid": uuid_hash, "power_limit_w": card["power_limit_w"], "driver": card["driver"]}
    text = json.dumps(facts, sort_keys=True)
    return Env(env_id=hashlib.sha256(text.encode()).hexdigest()[:12], **facts)


def env_path(results: Path, gpu: str) -> Path:
    """The file that keeps environments of this kind of machine; `gpu` is a slug or `cpu`."""
    return results / ("env-cpu.jsonl" if gpu == "cpu" else "env.jsonl")


def record(env: Env, path: Path) -> bool:
    """Adds the environment unless the file has its `env_id`; says whether it did. RecordError as `append_row`."""
    return append_missing(path, [env], lambda line: line.env_id) == 1


def read_envs(path: Path) -> tuple[dict[str, Env], list[Fault]]:
    """The environments of a file by `env_id`, and a fault for every line that is none. RecordError as `read_rows`."""
    envs, faults = read_lines(path, Env)
    return {env.env_id: env for env in envs}, faults


def revision(results_dir: Path, root: Path = ROOT) -> tuple[str, bool | None]:
    """Commit of the sources under `root`, and whether they differ from it (None where that cannot be told).

    Both come from the variable SONIC_COMMIT where it is set, as `git describe --always --abbrev=40 --dirty` prints it:
    for a copy of a clone, whose history may have stayed behind or be older than its files. Else from git; where git
    knows no commit it is `unknown`.
    """
    if told := os.environ.get("SONIC_COMMIT"):
        commit, dash, _ = told.partition("-dirty")
        return commit, True if dash else None
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD") if (root / ".git").exists() else None
    if commit is None:
        return "unknown", None
    outside = [":(exclude)results"]
    if results_dir.resolve().is_relative_to(root) and results_dir.resolve() != root:
        outside.append(f":(exclude){results_dir.resolve().relative_to(root)}")
    changes = _git(root, "status", "--porcelain", "--", ".", *outside)
    return commit, None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints, or None when it fails or is not there."""
    # In a container the clone often belongs to another user, which git refuses unless told that this folder is meant.
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_name() -> str | None:
    """The processor's model name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)


def nvml_card(uuid: str | None = None) -> dict[str, Any] | None:
    """What NVML says about one card, or None where it sees none.

    The card is the one with this UUID, else the first of CUDA_VISIBLE_DEVICES, else card 0. Keys: index name uuid
    driver power_limit_w power_w temp_c sm_mhz sm_max_mhz mem_mhz persistence memory_gib; what NVML refuses is None.
    """
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no package, no library, no driver: all of them mean that there is nothing to ask
        return None
    try:
        handle = _handle(nvml, uuid)
        return None if handle is None else _card(nvml, handle)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, uuid: str | None) -> Any:
    """The handle of the card that `nvml_card` means."""
    wanted = uuid or os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if not nvml.nvmlDeviceGetCount() or wanted in ("", "-1"):  # both hide every card
        return None
    if wanted.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(wanted))
    # torch prints a UUID without NVML's prefix; CUDA_VISIBLE_DEVICES may hold the start of one.
    wanted = wanted if wanted.startswith(("GPU-", "MIG-")) else f"GPU-{wanted}"
    if wanted.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(wanted)
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if nvml.nvmlDeviceGetUUID(handle).startswith(wanted):
            return handle
    return None


def _card(nvml: Any, handle: Any) -> dict[str, Any]:
    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(*arguments)
        except nvml.NVMLError:
            return None

    def watts(milliwatts: int | None) -> float | None:
        return None if milliwatts is None else milliwatts / 1000

    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    return {
        "index": ask("nvmlDeviceGetIndex", handle),
        "name": ask("nvmlDeviceGetName", handle),
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "driver": ask("nvmlSystemGetDriverVersion"),
        "power_limit_w": watts(ask("nvmlDeviceGetPowerManagementLimit", handle)),
        "power_w": watts(ask("nvmlDeviceGetPowerUsage", handle)),
        "temp_c": ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        "sm_mhz": ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        "sm_max_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
        "mem_mhz": ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
        "persistence": ask("nvmlDeviceGetPersistenceMode", handle),
        "memory_gib": None if memory is None else memory.total / (1 << 30),
    }
