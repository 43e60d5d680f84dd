"""Hardware counters: ncu's raw page, its refusals, and which launch belongs to which kernel. A script plays ncu."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sonic import counters, measure, worker
from sonic.record import Counters, KernelTime, Outcome, Settings, ShapeSpec
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
    header, cut = ",".join(f'"{name}"' for name in COLUMNS), '"0","7","python3'
    assert counters.parse(f"{header}\n{cut}", NAMES) == counters.parse('"ID"\n"0"', NAMES) == []


def test_totals_are_sums_and_means_weighted_by_time() -> None:
    told = counters.total(counters.Reading("ok", launches=counters.parse(PAGE, NAMES)))
    assert (told.status, told.dram_read, told.dram_write) == ("ok", 1_006_010, 500_400)
    assert told.l2_hit == pytest.approx((60.5 * 300 + 50 * 200) / 600 / 100)
    assert told.tensor_pipe == pytest.approx((80 * 300 + 40 * 200) / 600 / 100)
    assert counters.total(counters.Reading("denied", "why")) == Counters(status="denied")


def test_without_times_the_mean_is_plain() -> None:
    names = {what: name for what, name in NAMES.items() if what != "ns"}
    told = counters.total(counters.Reading("ok", launches=counters.parse(PAGE, names)))
    assert told.l2_hit == pytest.approx((60.5 + 50 + 0 + 50) / 4 / 100) and told.dram_read == 1_006_010


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
    launches = [*counters.parse(PAGE, NAMES), counters.Launch("_grouped_gemm_kernel", {"dram_read": 1.0})]
    assert counters.on_kernels(kernels, launches) == kernels


def test_a_name_with_other_launches_than_the_row_gets_no_counters() -> None:
    kernels = [KernelTime(name="_up_proj_kernel", us=1.0), KernelTime(name="_grouped_gemm_kernel", us=1.0)]
    filled = counters.on_kernels(kernels, counters.parse(PAGE, NAMES))
    assert filled[0].dram_read == 1_000_000 and filled[1] == kernels[1]


def test_two_tools_write_one_name_in_their_own_ways() -> None:
    profiler = (
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::Opaque<2>>"
    )
    ours = [
        KernelTime(name=name, us=1.0) for name in (profiler, "void (anonymous namespace)::softmax_warp_forward<T>()")
    ]
    theirs = (
        "void at::native::<unnamed>::CatArrayBatchedCopy<at::native::<unnamed>::Opaque<(unsigned int)2>>(T1 *)",
        "void <unnamed>::softmax_warp_forward<T1>()",
    )
    launches = [counters.Launch(name, {"dram_read": float(i)}) for i, name in enumerate(theirs)]
    assert [kernel.dram_read for kernel in counters.on_kernels(ours, launches)] == [0, 1]


def test_a_point_is_read_by_ncu(ncu, tmp_path: Path) -> None:
    ncu(f"cat > $log <<'X'\n{PAGE}\nX")
    reading = counters.read(make_point())
    assert reading.status == "ok" and len(reading.launches) == 4
    asked = (tmp_path / "ncu.args").read_text()
    for part in ("--clock-control none", "--profile-from-start off", "-m sonic.counters", *NAMES.values()):
        assert part in asked


def test_a_metric_that_the_card_lacks_leaves_the_others(ncu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "sm__pipe_tensor_op_hmma_cycles_active"
    known = QUERY.replace("sm__pipe_tensor_cycles_active", other).replace("lts__t_sector_hit_rate", "lts__other")
    monkeypatch.setattr(sys.modules[__name__], "QUERY", known)
    ncu(f"cat > $log <<'X'\n{PAGE.replace('sm__pipe_tensor_cycles_active', other)}\nX")
    reading = counters.read(make_point())
    assert reading.status == "ok" and f"tensor_pipe is {other}" in reading.reason
    assert "l2_hit is not among" in reading.reason and "lts__t" not in (tmp_path / "ncu.args").read_text()
    told = counters.total(reading)
    assert told.dram_read == 1_006_010 and told.l2_hit is None and told.tensor_pipe == pytest.approx(32_000 / 60_000)
    monkeypatch.setattr(sys.modules[__name__], "QUERY", "other__metric  Counter")
    ncu("exit 0")
    assert counters.read(make_point()).status == "missing"


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        ('echo "==ERROR== ERR_NVGPUCTRPERM - no permission" > $log; exit 1', "denied", "ERR_NVGPUCTRPERM"),
        (
            "echo Traceback >&2; echo 'ValueError: no such point' >&2; echo '==PROF== Connected' > $log; "
            "echo '==ERROR== The application returned an error code (1).' >> $log; exit 1",
            "missing",
            "code 1 and 0 kernels: ValueError: no such point; ==ERROR== The application returned an error code (1).",
        ),
        ("echo garbage > $log", "missing", "0 kernels: garbage"),
        (
            "echo '==PROF== x' > $log; echo '==WARNING== No kernels were profiled.' >> $log",
            "missing",
            "No kernels were",
        ),
        (f"cat > $log <<'X'\n{PAGE}\nX\nexit 9", "missing", "code 9 and 4 kernels"),
        ("exec sleep 20", "missing", "no answer in 0.5 s"),
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


def test_counters_of_a_gpu_go_into_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "device", lambda: torch.device("cuda"))
    outcome = Outcome(status="ok", note="a conversion", kernels=[KernelTime(name="_up_proj_kernel", us=3.0)])
    for reading in (
        counters.Reading("ok", launches=counters.parse(PAGE, NAMES)),
        counters.Reading("denied", "the driver refuses"),
    ):
        monkeypatch.setattr(counters, "read", lambda _, told=reading: told)
        found = worker._with_counters(make_point(), outcome)
        denied = reading.status == "denied"
        assert found.counters == counters.total(reading)
        assert found.kernels[0].dram_write == (None if denied else 500_000) and found.kernels[0].us == 3.0
        assert found.note == ("a conversion; counters denied: the driver refuses" if denied else "a conversion")


def test_the_watched_process_makes_the_call_of_a_worker() -> None:
    point = make_point(impl="torch_loop", shape=ShapeSpec(T=8, d=16, n=16, E=4, K=2), dtype="fp32", mode="fwd_bwd")
    work = worker.work_of(point)
    out = work.forward()
    work.backward(out)
    work.clear()
    assert out.shape == (8, 16)


def test_one_call_is_watched_after_the_warm_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(sys, "argv", ["counters", make_point().model_dump_json()])
    monkeypatch.setattr(counters.signal, "alarm", lambda seconds: done.append(f"alarm {seconds}"))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: done.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: done.append("stop"))
    work = measure.Work(lambda: done.append("call"), None, lambda: done.append("clear"))
    monkeypatch.setattr(worker, "work_of", lambda point: work)
    counters.main()
    assert done == ["alarm 180", *["call", "clear"] * 2, "start", "call", "stop"]


def test_the_parent_stays_free_of_torch() -> None:
    code = "import sys, sonic.counters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
