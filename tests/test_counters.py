"""Hardware counters: ncu's raw page, its refusals, and which launch belongs to which kernel. A script plays ncu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sonic import counters, worker
from sonic.record import Counters, KernelTime, Settings, ShapeSpec
from tests.rows import make_point

NAMES = {
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "l2_hit": "lts__t_sector_hit_rate.pct",
    "tensor_pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "ns": "gpu__time_duration.sum",
}
COLUMNS = "ID,Process ID,Process Name,Host Name,Kernel Name,Context,Stream,Block Size,Grid Size,Device,CC".split(",")
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int, T2)"


def line(i: int, kernel: str, *values: str) -> str:
    told = ",".join(f'"{value}"' for value in values)
    return f'"{i}","7","python3","127.0.0.1","{kernel}","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0",{told}'


PAGE = "\n".join(
    [
        "==PROF== Connected to process 7 (/usr/bin/python3)",
        '==PROF== Profiling "_up_proj_kernel": 0%....50%....100% - 3 passes',
        ",".join(f'"{name}"' for name in (*COLUMNS, *NAMES.values())),
        ",".join(['""'] * 11 + ['"byte"', '"byte"', '"%"', '"%"', '"ns"']),
        line(0, "_up_proj_kernel", "1,000,000", "500000", "60.5", "80", "300"),
        line(1, "_grouped_gemm_kernel", "2000", "100", "50", "40", "100"),
        line(2, FILL, "10", "n/a", "0", "0", "100"),
        line(3, "_grouped_gemm_kernel", "4000", "300", "50", "40", "100"),
        "==PROF== Disconnected from process 7",
    ]
)
QUERY = "\n".join(f"{name.split('.')[0]}     Counter    what it is" for name in NAMES.values())


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a script on the PATH that plays ncu; its `$log` is the file that it was told to write."""

    def put(script: str) -> None:
        path = tmp_path / "ncu"
        find = 'log=; for a; do [ "$last" = --log-file ] && log=$a; last=$a; done; echo "$@" > "$0.args"'
        query = f'[ "$1" = --query-metrics ] && {{ cat <<X\n{QUERY}\nX\nexit 0; }}'
        path.write_text(f"#!/bin/sh\n{query}\n{find}\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        counters._metrics.cache_clear()

    return put


def test_the_raw_page_becomes_launches() -> None:
    found = counters.parse(PAGE, NAMES)
    assert [launch.name for launch in found] == [
        "_up_proj_kernel",
        "_grouped_gemm_kernel",
        FILL,
        "_grouped_gemm_kernel",
    ]
    assert found[0].values == {"dram_read": 1e6, "dram_write": 5e5, "l2_hit": 60.5, "tensor_pipe": 80.0, "ns": 300.0}
    assert "dram_write" not in found[2].values
    assert counters.parse("==ERROR== nothing to see", NAMES) == []


def test_totals_are_sums_and_means_weighted_by_time() -> None:
    told = counters.total(counters.Reading("ok", launches=counters.parse(PAGE, NAMES)))
    assert (told.status, told.dram_read, told.dram_write) == ("ok", 1_006_010, 500_400)
    assert told.l2_hit == pytest.approx((60.5 * 300 + 50 * 200) / 600 / 100)
    assert told.tensor_pipe == pytest.approx((80 * 300 + 40 * 200) / 600 / 100)
    assert counters.total(counters.Reading("denied", "why")) == Counters(status="denied")


def test_kernels_take_the_launches_of_their_name_in_order() -> None:
    names = ("_up_proj_kernel", "Memset (Device)", "_grouped_gemm_kernel", "_aggregate_kernel", "_grouped_gemm_kernel")
    kernels = [KernelTime(name=name, us=1.0) for name in (*names, FILL.replace("int, T2", "long"))]
    filled = counters.on_kernels(kernels, counters.parse(PAGE, NAMES))
    assert [kernel.dram_read for kernel in filled] == [1_000_000, None, 2000, None, 4000, 10]
    assert filled[0].tensor_pipe == pytest.approx(0.8) and filled[3] == kernels[3]


def test_a_kernel_summed_over_calls_takes_all_of_them() -> None:
    kernels = [KernelTime(name="_grouped_gemm_kernel", us=2.0, calls=2)]
    assert counters.on_kernels(kernels, counters.parse(PAGE, NAMES))[0].dram_read == 6000


def test_a_name_that_is_summed_in_part_gets_no_counters() -> None:
    kernels = [
        KernelTime(name="_grouped_gemm_kernel", us=20.0),
        KernelTime(name="_grouped_gemm_kernel", us=2.0, calls=2),
    ]
    assert counters.on_kernels(kernels, counters.parse(PAGE, NAMES)) == kernels


def test_a_point_is_read_by_ncu(ncu, tmp_path: Path) -> None:
    ncu(f"cat > $log <<'X'\n{PAGE}\nX")
    reading = counters.read(make_point())
    assert reading.status == "ok" and len(reading.launches) == 4
    asked = (tmp_path / "ncu.args").read_text()
    for part in ("--clock-control none", "--profile-from-start off", "-m sonic.counters", *NAMES.values()):
        assert part in asked


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        ('echo "==ERROR== ERR_NVGPUCTRPERM - no permission" > $log; exit 1', "denied", "ERR_NVGPUCTRPERM"),
        ("echo Traceback >&2; echo 'ValueError: no such point' >&2; exit 1", "missing", "no such point"),
        ("echo garbage > $log", "missing", "0 kernels: garbage"),
        ("sleep 20", "missing", "no answer in 0.5 s"),
    ],
)
def test_what_gives_no_counters_says_why(ncu, script: str, status: str, text: str) -> None:
    ncu(script)
    reading = counters.read(make_point(), timeout_s=0.5 if "sleep" in script else 30.0)
    assert reading.status == status and text in reading.reason and not reading.launches


def test_without_ncu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(counters, "PLACES", ())
    assert counters.read(make_point()).status == "missing"


def test_a_cpu_has_none_and_keeps_its_times() -> None:
    point = make_point(impl="torch_loop", shape=ShapeSpec(T=8, d=16, n=16, E=4, K=2), dtype="fp32")
    outcome = worker.serve_point(point, Settings(warmup_ms=0.0, samples=1, counters=True)).outcome
    assert outcome.status == "ok" and outcome.event_us
    assert outcome.counters == Counters(status="missing") and "there is no GPU" in outcome.note


def test_the_watched_process_makes_the_call_of_a_worker() -> None:
    point = make_point(impl="torch_loop", shape=ShapeSpec(T=8, d=16, n=16, E=4, K=2), dtype="fp32", mode="fwd_bwd")
    work = worker.work_of(point)
    out = work.forward()
    work.backward(out)
    work.clear()
    assert out.shape == (8, 16)


def test_the_parent_stays_free_of_torch() -> None:
    code = "import sys, sonic.counters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
