"""`sonic.precompile` fills Triton's cache for a card that is not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def precompile(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "sonic.precompile", "--jobs", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240)


@pytest.mark.slow
def test_a_point_is_compiled_once_for_the_card(tmp_path):
    point = ("sweeps=custom", "shape=tiny", "op=aggregate", "mode=fwd", "dtype=bf16")
    first = precompile(tmp_path, *point)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "for NVIDIA H200" in first.stdout
    found = [path for path in tmp_path.rglob("*") if path.suffix in (".cubin", ".ptx")]
    assert any(path.suffix == ".cubin" for path in found)
    assert all("sm_90a" in path.read_text() for path in found if path.suffix == ".ptx")

    again = precompile(tmp_path, *point)
    assert again.returncode == 0
    assert "0 kernels compiled" in again.stdout


@pytest.mark.slow
def test_what_an_implementation_refuses_is_said_and_no_failure(tmp_path):
    done = precompile(tmp_path, "sweeps=custom", "shape=tiny", "impl=sonic", "dtype=fp32", "knobs.family=hopper")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the hopper family runs bf16 and fp16" in done.stdout


@pytest.mark.slow
def test_a_typo_ends_before_anything_is_compiled(tmp_path):
    done = precompile(tmp_path, "sweeps=costum")
    assert done.returncode == 2
    assert "custom" in done.stderr
    assert not list(tmp_path.rglob("*.cubin"))
