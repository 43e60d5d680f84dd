"""The doctor's report, for machines that this one is not, and for children that fail in every way."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from sonic import doctor

H200 = {"gpu": "nvidia-h200", "name": "NVIDIA H200", "cc": [9, 0], "sms": 132, "torch": "2.13.0", "triton": "3.7.1"}
CPU = {"gpu": "cpu", "name": "cpu", "cc": None, "torch": "2.13.0", "triton": "3.7.1", "cuda": None, "python": "3.11.7"}
CARD = {
    **{"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580.1", "power_limit_w": 700.0, "power_w": None},
    **{"temp_c": 40, "sm_mhz": 1980, "sm_max_mhz": 1980, "mem_mhz": 3201, "persistence": 1, "memory_gib": 141.0},
}
IMPLS = {
    "sonic": {"available": True, "reason": None, "version": "0.1+ab", "ops": ["layer", "experts", "up_proj"]},
    "scattermoe": {"available": False, "reason": "scattermoe is not installed", "version": ""},
}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(doctor, "default_results", lambda: tmp_path / "results")
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, device: dict[str, Any], card: dict[str, Any] | None, impls: Any) -> None:
    monkeypatch.setattr(doctor, "describe", lambda: {"device": device, "method_version": 1, "impls": impls})
    monkeypatch.setattr(doctor, "nvml_card", lambda _uuid=None: card)


def test_on_a_cpu(monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, CPU, None, IMPLS)
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for part in (
        "NVML sees no GPU",
        "event_us                      wall clock",
        "null on a CPU",
        "none: no GPU",
        "sonic       available  0.1+ab  op: layer, experts, 1 kernels",
        "scattermoe  not here: scattermoe is not installed",
        "triton  runs in Triton's interpreter",
        "a sweep can run here",
    ):
        assert part in text


def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, H200, CARD, IMPLS)
    monkeypatch.setattr(doctor, "find_ncu", lambda: None)
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for part in (
        "NVIDIA H200, 141 GiB",
        "9.0, 132 SMs",
        "CUDA events",
        "CUPTI",
        "missing: no ncu",
        "NVML: SM 1980 of 1980 MHz, memory 3201 MHz, 40 C;",
        "compiled for sm_90",
    ):
        assert part in text


def test_a_card_that_torch_does_not_see(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, CPU, CARD, IMPLS)
    monkeypatch.setattr(doctor, "counters", lambda: "ok")
    doctor.main([])
    assert "torch does not: is this torch a CPU build?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "text"),
    [("import sys; sys.exit('no torch here')", "no torch here"), ("print('hello')", "--describe` failed")],
    ids=["fails", "babbles"],
)
def test_without_a_child_the_doctor_tells_the_rest(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str], code: str, text: str
) -> None:
    monkeypatch.setattr(doctor, "nvml_card", lambda _uuid=None: None)
    monkeypatch.setenv("SONIC_WORKER", shlex.join([sys.executable, "-c", code]))
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "problem: the describing child failed: `" in printed and text in printed
    assert "a sweep cannot run here" in printed
    assert "wandb" in printed and "not imported" in printed and "unknown until the child answers" in printed


def test_the_child_is_told_to_interpret_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import json, os; print(json.dumps({'device': {'gpu': 'cpu', 'name': os.environ['TRITON_INTERPRET']},"
        " 'method_version': 1, 'impls': {}}))"
    )
    monkeypatch.setattr(doctor, "nvml_card", lambda _uuid=None: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("SONIC_WORKER", shlex.join([sys.executable, "-c", code]))
    assert doctor.describe()["device"] == {"gpu": "cpu", "name": "1"}


@pytest.mark.parametrize("impls", [{}, {"scattermoe": IMPLS["scattermoe"]}], ids=["none", "unavailable"])
def test_no_implementation_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str], impls: Any
) -> None:
    answer(monkeypatch, CPU, None, impls)
    assert doctor.main([]) == 1
    assert "problem: no implementation is available" in capsys.readouterr().out


def test_results_that_cannot_be_written_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "results").touch()
    answer(monkeypatch, CPU, None, IMPLS)
    assert doctor.main([]) == 1
    assert "cannot write there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo '    dram__bytes_read.sum   Kbyte   12.5'", "ok:"),
        ("echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1", "denied:"),
        ("echo '==ERROR== failed to find dram__bytes_read.sum'; exit 1", "unknown: "),
        ("exit 3", "ended with code 3: no output"),
    ],
    ids=["ok", "denied", "no_metric", "silent"],
)
def test_counters_are_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, text: str) -> None:
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\n{script}\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert doctor.find_ncu() == str(ncu)
    assert text in doctor.counters()
