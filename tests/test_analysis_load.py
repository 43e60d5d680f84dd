"""`analysis.load`: derived numbers against hand computation, the newest row of each point, and refusals to mix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import load
from sonic.record import Knobs, Method, TileSpec
from sonic.shapes import Shape
from tests.analysis_rows import H200, measured, unmeasured, write
from tests.rows import make_env

SHAPE = Shape(T=1024, d=512, n=128, E=16, K=4)


def only(table: pd.DataFrame) -> pd.Series:
    assert len(table) == 1
    return table.iloc[0]


def test_derived_numbers() -> None:
    row = measured(
        SHAPE, device_us=[100.0, 200.0, 300.0, 400.0, 500.0], event_us=[1000.0, 2000.0], span_us=[700.0],
        graph_us=None, flops_model=3 * 10**9, flops_padded=33 * 10**8, bytes_model=6 * 10**8, held_bytes=1 << 29,
        peak_fwd_bytes=1 << 30, peak_bwd_bytes=3 << 30, errors={"twin.o": 0.5, "full.dw1": 1.25},
    )  # fmt: skip
    line = only(load.tidy([row]))
    assert (line.G, line.rho, line.R) == (4.0, 0.25, 4096)
    assert line.clock == "device"
    # Percentiles of 0.1 .. 0.5 ms by linear interpolation: positions 0.8 and 3.2.
    assert (line.ms, line.ms_p20, line.ms_p80) == pytest.approx((0.3, 0.18, 0.42))
    assert (line.event_ms, line.device_ms, line.span_ms) == pytest.approx((1.5, 0.3, 0.7))
    assert np.isnan(line.graph_ms)
    assert line.tflops == pytest.approx(3e9 / 0.3e-3 / 1e12)
    assert line.gbps == pytest.approx(6e8 / 0.3e-3 / 1e9)
    assert (line.held_gib, line.peak_fwd_gib, line.peak_bwd_gib, line.peak_gib) == (0.5, 1.0, 3.0, 3.0)
    assert (line.worst_error, line.worst_error_name) == (1.25, "full.dw1")
    assert line.padding == pytest.approx(0.1)
    assert not line.interpreter and not line.derived


def test_nothing_measured_is_nan_and_never_zero() -> None:
    line = only(load.tidy([unmeasured(SHAPE, "oom")]))
    assert line.status == "oom"
    numbers = [
        "ms",
        "ms_p20",
        "ms_p80",
        "tflops",
        "gbps",
        "held_gib",
        "peak_gib",
        "worst_error",
        "padding",
        "device_ms",
    ]
    assert line[numbers].isna().all()


def test_a_cpu_takes_the_wall_clock_and_says_interpreter() -> None:
    line = only(load.tidy([measured(SHAPE, gpu="cpu", us=5000.0)]))
    assert (line.clock, line.ms, line.interpreter) == ("event", 5.0, True)
    assert not only(load.tidy([measured(SHAPE, "torch_loop", "cpu")])).interpreter
    assert np.isnan(line.peak_gib)


def test_clocks_never_mix() -> None:
    with_device = measured(SHAPE)
    without = measured(SHAPE, "scattermoe", device_us=None)
    table = load.tidy([with_device, without]).set_index("impl")
    assert table.ms["sonic"] == 1.0 and np.isnan(table.ms["scattermoe"])
    assert only(load.tidy([without])).ms == 2.0  # no GPU row has a device time: events for all
    assert load.tidy([with_device, without], clock="event").ms.tolist() == [2.0, 2.0]
    with pytest.raises(load.SelectionError, match="unknown clock 'wall'; there are auto, event"):
        load.tidy([], clock="wall")


def test_the_newest_row_of_a_point_wins() -> None:
    old = measured(SHAPE, us=1000.0, impl_version="1", key="a", time="2026-01-01T00:00:00+00:00")
    new = measured(SHAPE, us=500.0, impl_version="2", key="b", time="2026-01-03T00:00:00Z")
    assert only(load.tidy([new, old])).ms == 0.5


def test_a_failure_of_unknown_family_yields_to_a_newer_row() -> None:
    failed = unmeasured(SHAPE, "failed", "boom", knobs=Knobs(family="auto"), time="2026-01-01T00:00:00+00:00")
    assert only(load.tidy([failed, measured(SHAPE)])).status == "ok"
    later = unmeasured(SHAPE, "failed", "boom", knobs=Knobs(family="auto"), time="2026-02-01T00:00:00+00:00")
    assert sorted(load.tidy([measured(SHAPE), later]).status) == ["failed", "ok"]


def test_different_points_stay_apart() -> None:
    rows = [
        measured(SHAPE), measured(SHAPE, mode="fwd_bwd"), measured(SHAPE, tile=TileSpec(m=64)),
        measured(SHAPE, seed=1), measured(SHAPE, dtype="fp16"), measured(SHAPE, gpu="cpu"),
        measured(SHAPE, sweep="other"),
    ]  # fmt: skip
    assert len(load.tidy(rows)) == len(rows)


def test_reading_reports_faulty_lines_and_loses_none(tmp_path: Path) -> None:
    write(tmp_path, [measured(SHAPE), measured(SHAPE, "scattermoe")])
    path = tmp_path / "smoke" / f"{H200}.jsonl"
    path.write_bytes(b"not json\n" + path.read_bytes() + b'{"schema": 1, "key": "ha')
    table, faults = load.rows(tmp_path)
    assert sorted(table.impl) == ["scattermoe", "sonic"]
    assert [(fault.path, fault.line_number) for fault in faults] == [(path, 1), (path, 4)]


def test_reading_selects_sweep_gpu_and_method(tmp_path: Path) -> None:
    second = Method(version=2, timer="cuda", l2="cold", warmup=1, samples=3)
    write(
        tmp_path,
        [
            measured(SHAPE),
            measured(SHAPE, gpu="cpu"),
            measured(SHAPE, "scattermoe", method=second),
            measured(SHAPE, sweep="tile"),
        ],
    )
    assert load.sweeps(tmp_path) == ["smoke", "tile"]
    assert len(load.rows(tmp_path)[0]) == 4
    assert len(load.rows(tmp_path, "smoke", H200)[0]) == 2
    assert only(load.rows(tmp_path, "smoke", H200, method=2)[0]).impl == "scattermoe"
    assert load.rows(tmp_path, "nothing")[0].empty


def test_one_series_names_what_it_found() -> None:
    second = Method(version=2, timer="cuda", l2="cold", warmup=1, samples=3)
    with pytest.raises(load.SelectionError, match=r"2 GPUs \(cpu, nvidia-h200\).*--gpu"):
        load.one_series(load.tidy([measured(SHAPE), measured(SHAPE, gpu="cpu")]))
    with pytest.raises(load.SelectionError, match=r"2 method versions \(1, 2\).*--method"):
        load.one_series(load.tidy([measured(SHAPE), measured(SHAPE, "scattermoe", method=second)]))
    with pytest.raises(load.NothingLeft):
        load.one_series(load.tidy([]))
    # What was never measured has no method, and is no second one.
    assert len(load.one_series(load.tidy([measured(SHAPE), unmeasured(SHAPE, "oom", impl="scattermoe")]))) == 2


@pytest.mark.parametrize(
    ("slugs", "asked", "expected"),
    [
        (["cpu"], None, "cpu"),
        (["cpu", H200], None, H200),
        (["cpu", H200], "cpu", "cpu"),
        (["nvidia-h100", H200], H200, H200),
    ],
)
def test_choose_gpu(slugs: list[str], asked: str | None, expected: str) -> None:
    assert load.choose_gpu(slugs, asked) == expected


@pytest.mark.parametrize(
    ("slugs", "asked", "message"),
    [
        (["nvidia-h100", H200, "cpu"], None, r"2 GPUs \(nvidia-h100, nvidia-h200\).*--gpu"),
        ([H200], "nvidia-b200", "no rows of --gpu 'nvidia-b200'; there are rows of nvidia-h200"),
        ([], None, "none"),
    ],
)
def test_choose_gpu_refuses(slugs: list[str], asked: str | None, message: str) -> None:
    with pytest.raises(load.SelectionError, match=message):
        load.choose_gpu(slugs, asked)


def test_backward_is_a_difference_and_says_so() -> None:
    table = load.with_backward(load.tidy([measured(SHAPE, us=1000.0), measured(SHAPE, us=4000.0, mode="fwd_bwd")]))
    line = only(table[table["mode"] == "bwd"])
    assert line.derived and not table[table["mode"] != "bwd"].derived.any()
    assert line.ms == pytest.approx(3.0)
    # p20 and p80 of three samples lie 6% off the middle one here: 0.94 and 3.76, 1.06 and 4.24.
    assert (line.ms_p20, line.ms_p80) == pytest.approx((3.76 - 1.06, 4.24 - 0.94))
    assert line.flops == SHAPE.flops("fwd_bwd") - SHAPE.flops("fwd") == 12 * SHAPE.R * SHAPE.n * SHAPE.d
    assert line.tflops == pytest.approx(line.flops / 3e-3 / 1e12)


def test_no_backward_across_environments_or_from_a_failed_half() -> None:
    apart = [measured(SHAPE), measured(SHAPE, mode="fwd_bwd", env_id="env2")]
    assert "bwd" not in set(load.with_backward(load.tidy(apart))["mode"])
    assert "bwd" not in set(load.with_backward(load.tidy([measured(SHAPE)]))["mode"])
    table = load.with_backward(load.tidy([unmeasured(SHAPE, "timeout"), measured(SHAPE, mode="fwd_bwd")]))
    line = only(table[table["mode"] == "bwd"])
    assert line.status == "timeout" and np.isnan(line.ms) and np.isnan(line.tflops)


def test_seeds_are_pooled() -> None:
    rows = [
        measured(SHAPE, us=1000.0),
        measured(SHAPE, us=2000.0, seed=1, errors={"twin.o": 1.9}),
        unmeasured(SHAPE, "timeout", seed=2),
    ]
    line = only(load.pool_seeds(load.tidy(rows)))
    assert line.status == "ok"
    assert sorted(line.samples_ms) == pytest.approx([0.9, 1.0, 1.1, 1.8, 2.0, 2.2])
    assert (line.ms, line.worst_error) == (pytest.approx(1.45), 1.9)
    assert line.tflops == pytest.approx(SHAPE.flops("fwd") / 1.45e-3 / 1e12)


def test_environments(tmp_path: Path) -> None:
    lines = [make_env(env_id=name, gpu=H200).model_dump_json() for name in ("env1", "env2")]
    (tmp_path / "env.jsonl").write_text("\n".join(lines) + "\n")
    assert load.environments(tmp_path, ["env2"]).env_id.tolist() == ["env2"]
    assert load.environments(tmp_path / "nowhere").empty


def test_analysis_imports_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        "from analysis import figures, report\n"
        "for name in figures.discover(): figures.module_of(name)\n"
        "assert not {'torch', 'triton', 'hydra', 'wandb'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=load.RESULTS.parent)


def test_a_pooled_point_is_throttled_when_one_seed_was() -> None:
    shape = Shape(T=64, d=64, n=16, E=8, K=2)
    rows = [measured(shape, seed=seed, throttled=seed == 1) for seed in range(3)]
    (line,) = load.pool_seeds(load.tidy(rows)).itertuples()
    assert line.throttled is True


def test_rows_name_the_card_where_an_environment_tells_it(tmp_path: Path) -> None:
    rows = [measured(SHAPE, env_id=name, sweep=sweep, key=name) for name, sweep in (("a", "quick"), ("b", "tile"))]
    write(tmp_path, rows)
    (tmp_path / "env.jsonl").write_text(make_env(env_id="a", gpu_uuid="card1").model_dump_json() + "\n")
    both = load.rows(tmp_path, ("quick", "tile"))[0].set_index("sweep")
    assert both.card["quick"] == "card1" and pd.isna(both.card["tile"])
    assert set(load.rows(tmp_path, "tile")[0].sweep) == {"tile"}
    assert "card" in load.rows(tmp_path, "none")[0]
