"""What the kernels become on sm_90a, compiled without a card, and a short interpreted run, under two tritons.

`constrained` is the triton of this environment; `3.6.0`, which the H200 rows were made with, lies in a folder of its
own (SONIC_TRITON36, else `.venv/triton36`) that `make test` fills. Compiling needs a process without TRITON_INTERPRET,
so each group of `tests.kernels.compile_sm90` is one child process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonic.kernels.common import SMEM_LIMIT

ROOT = Path(__file__).parents[1]
TRITON36 = Path(os.environ.get("SONIC_TRITON36") or ROOT / ".venv" / "triton36")
#: Shared memory of a Hopper SM and what every resident program takes of it beside its own, bytes.
SM_SHARED, RESERVED = 233472, 1024
REGISTERS = 65536

VERSIONS = ["constrained", "3.6.0"]
GROUPS = {
    "bf16-7B": ("tiles", "--dtype", "bf16", "--d", "1536", "--n", "256"),
    "bf16-30B": ("tiles", "--dtype", "bf16", "--d", "4096", "--n", "1024", "--distinct"),
    "fp16-7B": ("tiles", "--dtype", "fp16", "--d", "1536", "--n", "256", "--distinct"),
    "narrow": ("tiles", "--dtype", "bf16", "--d", "512", "--n", "64", "--distinct", "--filter", "up_proj|d_act|grad_2"),
    "variants": ("variants", "--dtype", "bf16"),
    "tuned": ("tuned",),
    "hopper-7B": ("hopper", "--dtype", "bf16", "--d", "1536", "--n", "256", "--distinct"),
    "hopper-30B": ("hopper", "--dtype", "bf16", "--d", "4096", "--n", "1024", "--distinct"),
    "hopper-ragged": ("hopper", "--dtype", "fp16", "--d", "200", "--n", "72", "--distinct"),
    "hopper-narrow": ("hopper", "--d", "512", "--n", "64", "--distinct", "--filter", "up_proj|d_act|grad_2"),
    "hopper-variants": ("hopper_variants", "--dtype", "bf16"),
}
#: Warps of a Hopper kernel: two consumer warpgroups, and four warps that copy rows or one that asks TMA for them.
HOPPER_WARPS = 12


def environment(version: str, **more: str) -> dict[str, str]:
    """A child's environment: this one without the interpreter, with the wanted triton first on the path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_INTERPRET", "PYTEST"))}
    if version == "3.6.0":
        if not (TRITON36 / "triton").is_dir():
            pytest.fail(f"no triton 3.6.0 in {TRITON36}; run `make test`, which installs it, or set SONIC_TRITON36")
        env["PYTHONPATH"] = os.pathsep.join([str(TRITON36), *filter(None, [env.get("PYTHONPATH")])])
    return env | more


def compiled(version: str, *arguments: str) -> list[dict]:
    """The lines that compile_sm90 prints."""
    command = [sys.executable, "-m", "tests.kernels.compile_sm90", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(version), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if version == "3.6.0":
        assert {line["triton"] for line in lines} <= {"3.6.0"}
    return lines


def faults(line: dict, itemsize: int) -> Iterator[str]:
    """What is wrong with one compiled GEMM kernel."""
    tile, shared = line["tile"], line["shared"]
    if line["spills"]:
        yield f"{line['spills']} spills"
    if shared > SMEM_LIMIT:
        yield f"{shared} bytes of shared memory, limit {SMEM_LIMIT}"
    if itemsize == 2 and not line["hgmma"]:
        yield "no HGMMA"
    if not line["tma_loads"]:
        yield "no TMA load"
    # A buffer too few is a race that no error reports: the next load overwrites what the tensor cores still read.
    ring = tile["stages"] * (tile["m"] + tile["n"]) * tile["k"] * itemsize
    if shared < ring:
        yield f"{shared} bytes of shared memory for a ring of {ring}"
    warps = HOPPER_WARPS if "schedule" in tile else tile["warps"]
    if line["registers"] * 32 * warps * tile["ctas"] > REGISTERS:
        yield f"{line['registers']} registers leave no room for {tile['ctas']} programs per SM"
    if "schedule" in tile:
        yield from hopper_faults(line)


def hopper_faults(line: dict) -> Iterator[str]:
    """Results leave by TMA, and rows come by cp.async where they are gathered and nowhere else."""
    if not line["tma_stores"]:
        yield "no TMA store"
    gathered = not re.search(r"down_proj|d_input|rows", line["name"])
    if bool(line["cp_async"]) != gathered:
        yield f"{line['cp_async']} cp.async, rows {'are' if gathered else 'are not'} gathered"


def check_room(lines: list[dict]) -> None:
    """The first candidate runs where nothing was measured; if it says two programs per SM, two must fit."""
    first: dict[str, dict] = {}
    for line in lines:
        first.setdefault(line["name"], line)
    for name, line in first.items():
        need = line["tile"]["ctas"] * (line["shared"] + RESERVED)
        assert need <= SM_SHARED, f"{name} {line['tile']} needs {need} bytes per SM, there are {SM_SHARED}"


def report(lines: list[dict], itemsize: int = 2) -> list[str]:
    return [f"{line['name']} {line['tile']}: {fault}" for line in lines for fault in faults(line, itemsize)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "group", [pytest.param(g, marks=[] if g.endswith("variants") else [pytest.mark.slow]) for g in GROUPS]
)
def test_every_shipped_tile(version: str, group: str) -> None:
    """No spills, tensor cores, TMA, shared memory within the limit and enough for the ring of operand blocks."""
    lines = compiled(version, *GROUPS[group])
    assert lines or group == "tuned"
    assert report(lines) == []
    if GROUPS[group][0] == "tiles":
        check_room(lines)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_fp32_tiles(version: str) -> None:
    """Without tensor cores, but without spills and within shared memory as well."""
    lines = compiled(version, "tiles", "--dtype", "fp32")
    assert len(lines) == 6
    assert [line["name"] for line in lines if line["spills"] or line["shared"] > SMEM_LIMIT] == []


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_unaligned_sizes_compile(version: str) -> None:
    """Rows that are no multiple of 16 bytes take pointers in the place of TMA."""
    lines = compiled(version, "variants", "--d", "1025", "--n", "250", "--filter", "without H|slots|d_act|grad_. rows")
    assert {line["tma_loads"] + line["tma_stores"] for line in lines} == {0}
    assert [line["name"] for line in lines if line["shared"] > SMEM_LIMIT or not line["hgmma"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_without_a_tile(version: str) -> None:
    lines = compiled(version, "others")
    assert len({line["kernel"] for line in lines}) >= 12
    assert [line for line in lines if line["spills"] or line["shared"] > SMEM_LIMIT] == []


@pytest.mark.slow
def test_interpreter_of_the_older_triton() -> None:
    """A few kernels and one layer, interpreted by triton 3.6.0 and the numpy beside it."""
    script = """
import sys, numpy, triton, pytest
assert triton.__version__ == "3.6.0", triton.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""
    chosen = [
        "tests/kernels/test_router_topk.py::test_experts_past_256_are_chosen",
        "tests/kernels/test_metadata.py::test_example_of_the_module",
        "tests/kernels/test_metadata.py::test_metadata_and_restore",
        "tests/kernels/test_aggregate.py",
        "tests/kernels/test_elementwise.py::test_swiglu_and_its_gradient",
        "tests/test_layer.py::test_kernels_against_twins_and_layer_against_fp64",
    ]
    only = "(T17 and not E300 and not E64) or T1-K3 or past_256 or example or 17-3-5 or aggregate or R17"
    command = [sys.executable, "-c", script, "-p", "no:cacheprovider", "-W", "ignore", *chosen, "-k", only]
    env = environment("3.6.0", TRITON_INTERPRET="1")
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "100%" in done.stdout
