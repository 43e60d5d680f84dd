"""The command, end to end, with children that measure nothing: rows, resume, faults, exit codes, signals."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from sonic import config, pool, record, sweep
from sonic.record import Row
from tests.rows import make_row

ROOT = Path(__file__).parents[1]
FAKE = f"{sys.executable} -S -E {Path(__file__).with_name('fake_worker.py')}"
TINY = ["sweeps=custom", "shape=tiny", "wandb=off", "measure=smoke"]


class Command:
    """Runs `python -m sonic.sweep` in this process, with rows in a folder of the test."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.results = folder / "results"
        self.log = folder / "log"
        self._capsys = capsys
        self.out = ""
        self.err = ""

    def __call__(self, *arguments: str) -> int:
        self.log.write_text("")
        try:
            code = sweep.main([*arguments, f"results={self.results}"])
        except SystemExit as left:
            code = int(left.code or 0)
        self.out, self.err = self._capsys.readouterr()
        return code

    def rows(self, name: str = "custom") -> list[Row]:
        return record.read_rows(self.results / name / "cpu.jsonl")[0]

    def measured(self) -> list[tuple[str, int, int]]:
        """(impl, T, routing.seed) of the points that children got in the last run."""
        lines = (line.split() for line in self.log.read_text().splitlines() if line.startswith("measure"))
        return [(impl, int(T), int(seed)) for _, impl, T, seed in lines]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("SONIC_WORKER", FAKE)
    monkeypatch.setenv("SONIC_FAKE", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(pool.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sweep, "draw", lambda *_: ([], None))
    return Command(tmp_path, capsys)


# --- rows and exit codes


def test_every_point_becomes_a_row_and_a_line(command: Command) -> None:
    assert command(*TINY, "impl=sonic,torch_loop", "seed=1,2") == 0
    rows = command.rows()
    assert [(row.seed, row.impl, row.status) for row in rows] == [
        (seed, impl, "ok") for seed in (1, 2) for impl in ("sonic", "torch_loop")
    ]
    assert [row.knobs.family for row in rows] == ["triton", "auto"] * 2
    assert len({row.run_id for row in rows}) == 1
    assert {row.gpu for row in rows} == {"cpu"}
    envs = [json.loads(line) for line in (command.results / "env-cpu.jsonl").read_text().splitlines()]
    assert {row.env_id for row in rows} == {env["env_id"] for env in envs}
    assert "[4/4] torch_loop" in command.out
    assert "4 points: 4 ok" in command.out
    assert f"rows    {command.results / 'custom' / 'cpu.jsonl'}" in command.out
    assert "\x1b" not in command.out


def test_the_table_shows_what_was_measured(command: Command) -> None:
    command(*TINY, "impl=torch_loop", "routing.seed=0,7")
    head, ok, wrong = [line.split() for line in command.out.splitlines() if line.startswith((" impl", " torch_loop"))]
    assert head == (
        ["impl", "op", "mode", *"TdnEK", "routing.seed", "status", "ms", "TFLOP/s", "held", "MiB", "error", "reason"]
    )
    assert ok == ["torch_loop", "layer", "fwd_bwd", "48", "64", "32", "2", "1", "0", "ok", "0.11", "0.01609", "1", "1"]
    assert wrong[8:12] == ["7", "wrong", "7", "full.o"]


def test_a_second_run_measures_nothing_and_says_so(command: Command) -> None:
    lines = [*TINY, "impl=sonic,scattermoe", "routing.seed=0,8"]
    assert command(*lines) == 0
    assert [row.status for row in command.rows()] == ["ok", "unavailable", "out_of_resources", "unavailable"]
    assert command(*lines) == 0
    assert command.measured() == []
    assert len(command.rows()) == 4
    assert "nothing to measure: every point has a row already" in command.out
    assert "2 unavailable" in command.out


def test_a_half_done_sweep_goes_on(command: Command) -> None:
    assert command(*TINY, "impl=sonic", "routing.seed=0,10") == 0
    assert command(*TINY, "impl=sonic", "routing.seed=0,10,11,12", "seed=0,1") == 0
    assert len(command.measured()) == 6
    assert "measured now: 6; rows of earlier runs: 2" in command.out


def test_counters_that_were_never_asked_of_a_row_are_a_reason_to_measure(command: Command) -> None:
    command(*TINY, "impl=sonic", "routing.seed=0,8")
    assert command(*TINY, "impl=sonic", "routing.seed=0,8", "measure.counters=true") == 0
    assert len(command.measured()) == 1  # the other one does not fit the card whatever is counted


def test_resume_false_adds_newer_rows(command: Command) -> None:
    command(*TINY, "impl=sonic")
    command(*TINY, "impl=sonic", "resume=false")
    old, new = command.rows()
    assert old.key == new.key
    assert old.run_id != new.run_id
    assert "1 point: 1 ok" in command.out


def test_a_new_version_of_an_implementation_is_measured_again(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(*TINY, "impl=torch_loop")
    monkeypatch.setenv("SONIC_FAKE_VERSION", "2")
    command(*TINY, "impl=torch_loop")
    assert len({row.key for row in command.rows()}) == 2


@pytest.mark.parametrize(("seed", "status"), [(1, "failed"), (2, "crashed"), (7, "wrong")])
def test_one_bad_point_does_not_stop_the_others(command: Command, seed: int, status: str) -> None:
    assert command(*TINY, "impl=torch_loop,transformers", f"routing.seed={seed},0") == 1
    assert [row.status for row in command.rows()] == [status, status, "ok", "ok"]


def test_a_hang_becomes_a_row(command: Command) -> None:
    assert command(*TINY, "impl=torch_loop", "routing.seed=0,3,10", "measure.timeout_s=0.5") == 1
    assert [row.status for row in command.rows()] == ["ok", "timeout", "ok"]
    assert "no reply within 0.5 s" in command.out


def test_failed_points_are_tried_again_and_wrong_ones_are_not(command: Command) -> None:
    lines = [*TINY, "impl=torch_loop", "routing.seed=0,1,2,7"]
    command(*lines)
    assert command(*lines) == 1
    assert command.measured() == [("torch_loop", 48, 1), ("torch_loop", 48, 2)]


def test_retry_measures_these_statuses_only(command: Command) -> None:
    lines = [*TINY, "impl=torch_loop", "routing.seed=0,1,2,7"]
    command(*lines)
    assert command(*lines, "--retry", "wrong,crashed") == 1
    assert [seed for _, _, seed in command.measured()] == [2, 7]
    assert command(*lines, "--retry=timeout") == 0
    assert "no point of custom has a row with status timeout" in command.out


def test_fail_fast_stops_after_the_first_fault(command: Command) -> None:
    assert command(*TINY, "impl=torch_loop", "routing.seed=8,1,0", "fail_fast=true") == 1
    assert [row.status for row in command.rows()] == ["out_of_resources", "failed"]
    assert "1 without a row" in command.out
    (line,) = [line for line in command.out.splitlines() if line.startswith("fail_fast=true stopped the sweep")]
    assert "torch_loop" in line and "routing.seed=1" in line and "failed  ValueError: no luck" in line


def test_unavailable_needs_no_child(command: Command) -> None:
    assert command(*TINY, "impl=scattermoe", "seed=1,2") == 0
    assert [(row.status, row.reason) for row in command.rows()] == [
        ("unavailable", "scattermoe is not importable here")
    ] * 2
    assert "start" not in command.log.read_text()


# --- what is not measured


def test_larger_T_is_spared_after_out_of_memory(command: Command) -> None:
    lines = [*TINY, "impl=sonic,torch_loop"]
    assert command(*lines, "shape.T=64,8192,4096,16384") == 0
    assert [(row.shape.T, row.status) for row in command.rows() if row.impl == "sonic"] == [
        (64, "ok"), (8192, "oom"), (4096, "oom"), (16384, "skipped_oom"),
    ]  # fmt: skip
    assert command(*lines, "shape.T=32768") == 0
    assert command.measured() == [], "an earlier run's oom counts"
    assert command(*lines, "shape.T=32768", "dtype=fp32") == 0
    assert len(command.measured()) == 2, "another dtype is another layer"
    command(*lines, "shape.T=16384", "--retry", "skipped_oom")
    assert len(command.measured()) == 2


def test_points_that_differ_in_ignored_knobs_are_measured_once(command: Command) -> None:
    assert command(*TINY, "impl=sonic,torch_loop,transformers", "tile.m=16,32", "knobs.gather=separate") == 0
    assert Counter(row.impl for row in command.rows()) == {"sonic": 2, "torch_loop": 1, "transformers": 1}
    assert {row.tile.m for row in command.rows() if row.impl == "torch_loop"} == {None}
    assert (
        "torch_loop, transformers take no tile.m: 2 points are the same as others and not measured again" in command.out
    )


def test_shards_are_disjoint_and_cover(command: Command) -> None:
    lines = [*TINY, "impl=sonic,torch_loop", "routing.seed=0,10,11,12,13", "tile.m=16,32"]
    sizes = []
    for part in (1, 2, 3):
        assert command(*lines, f"shard={part}/3") == 0
        sizes.append(len(command.measured()))
    assert sum(sizes) == len({row.key for row in command.rows()}) == 15
    assert min(sizes) >= 4


# --- looking without measuring


def test_list_names_every_experiment(command: Command) -> None:
    assert sweep.main(["--list"]) == 0
    command.out = command._capsys.readouterr().out
    for name in ("smoke", "quick", "granularity", "sparsity", "tile", "custom"):
        assert any(line.startswith(name) and " points  " in line for line in command.out.splitlines())
    assert "_none" not in command.out


def test_dry_run_tells_points_and_time(command: Command) -> None:
    lines = [*TINY, "impl=sonic,scattermoe", "seed=1,2"]
    assert command(*lines, "--dry-run") == 0
    assert not command.results.exists()
    assert "4 points, 4 to measure: about 2 s by measure.estimate_s=1" in command.out
    command(*lines)
    assert command(*lines, "--dry-run") == 0
    assert command.out.count("has a row (ok)") == 2
    assert "4 points, 0 to measure" in command.out


def test_list_takes_overrides_and_refuses_what_a_sweep_would(command: Command) -> None:
    assert command("--list", "sweeps=typo") == 2
    assert "sweeps is 'typo'; allowed:" in command.err
    assert command("--list", "sweeps=custom", "seed=1,2,3") == 0
    first, _ = command.out.splitlines()
    assert first.split()[:3] == ["custom", "3", "points"]


def test_shapes_for_a_gpu_are_named_where_kernels_are_interpreted(command: Command) -> None:
    tiny = config.load(["sweeps=custom", "shape=tiny"]).points[0]
    assert sweep.MOST_INTERPRETED == pytest.approx(100 * sweep.flops_of(tiny), rel=0.2)
    large = ["sweeps=custom", "wandb=off", "measure=smoke", "impl=sonic,scattermoe", "shape=7b_n256", "shape.T=2048"]
    assert command(*large, "--dry-run") == 0
    assert "these shapes are for a GPU: Triton's interpreter needs hours; shape=tiny fits" in command.out
    assert "2 points, 2 to measure: about 2 min by measure.estimate_s=1 and measure.timeout_s=120" in command.out
    assert command(*large) == 0
    assert command.out.splitlines()[1].startswith("warning: these shapes are for a GPU")
    assert command(*TINY, "impl=sonic") == 0
    assert "for a GPU" not in command.out


@pytest.mark.parametrize(
    "reason",
    [
        "tile 256x256x128 with 5 stages needs 655360 bytes of shared memory, limit 232448",
        "out of resource: shared memory of tile 256x256x128 with 5 stages, Required: 655360, Hardware limit: 232448. "
        "Reducing block sizes or `num_stages` may help.",
    ],
)
def test_the_table_shows_what_a_tile_needs_and_the_limit(reason: str) -> None:
    row = make_row(status="out_of_resources", event_us=None, reason=reason)
    *_, (name, _, (text,)) = sweep.columns_of([row], [])
    assert name == "reason" and "655360" in text and "imit" in text and "232448" in text and "..." not in text
    assert "Required" not in reason or "Required: 655360" in text


def test_what_does_no_flops_shows_gigabytes_per_second() -> None:
    copy = make_row(flops_model=0, bytes_model=2_200_000)
    assert sweep.line_of(copy, []).endswith("0.11 ms  20 GB/s")
    assert sweep.line_of(make_row(), []).endswith("0.11 ms  0.1 TFLOP/s")
    rates = {name: texts for name, _, texts in sweep.columns_of([make_row(), copy], [])}
    assert (rates["TFLOP/s"], rates["GB/s"]) == (["0.1", "0"], ["10", "20"])
    assert "GB/s" not in {name for name, *_ in sweep.columns_of([make_row()], [])}


def test_cfg_prints_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--cfg", "measure=publish"]) == 0
    assert "timeout_s: 900" in capsys.readouterr().out


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["impl="], "impl is ''"),
        (["sweeps=smoke,quick"], "two experiments at once"),
        (["seed=1,x"], "seed is 'x'"),
        (["--retry", "crash"], "did you mean 'crashed'?"),
        (["--lists"], "unrecognized arguments: --lists"),
    ],
)
def test_a_bad_command_line_ends_with_2_before_anything_runs(command: Command, arguments: list[str], text: str) -> None:
    assert command(*TINY[2:], *arguments) == 2
    assert text in command.err
    assert command.log.read_text() == ""
    assert not command.results.exists()


def test_an_unwritable_results_folder_is_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    assert command(*TINY) == 2
    assert f"results is '{tmp_path / 'results'}'" in command.err


@pytest.mark.parametrize("name", ["custom/cpu.jsonl", "env-cpu.jsonl"])
def test_files_that_cannot_be_written_are_refused_before_anything_runs(command: Command, name: str) -> None:
    (command.results / name).mkdir(parents=True)
    assert command(*TINY, "impl=sonic") == 2
    assert command.err == (
        f"error: {command.results / name}: cannot write the file (Is a directory); "
        "it and its folder must be readable and writable\n"
    )
    assert command.log.read_text() == ""


def test_a_job_elsewhere_refuses_them_too(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "runs_here", lambda _: False)
    (command.results / "env-cpu.jsonl").mkdir(parents=True)
    assert command(*TINY, "impl=sonic") == 1
    assert f"a job failed: {command.results / 'env-cpu.jsonl'}: cannot write the file" in command.out
    assert command.err == ""
    assert command.log.read_text() == ""


def test_an_unwritable_state_folder_is_one_line(command: Command) -> None:
    command.results.mkdir()
    (command.results / ".sonic").write_text("a file")
    assert command(*TINY, "impl=sonic") == 2
    assert len(command.err.splitlines()) == 1
    assert f"{command.results / '.sonic'}/runs" in command.err and "the folder .sonic must be writable" in command.err
    assert command.log.read_text() == ""


def test_wandb_learns_how_the_sweep_ended(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []

    class Quiet:
        places: dict[str, str] = {}

        def __init__(self, *_: object, **__: object) -> None: ...

        def log(self, row: Row) -> None: ...

        def finish(self, rows: list[Row], figures: list[Path], code: int) -> None:
            codes.append(code)

    monkeypatch.setattr(sweep, "Tracker", Quiet)
    for seed in (0, 1):
        command(*TINY, "impl=torch_loop", f"routing.seed={seed}")
    assert codes == [0, 1]


def test_a_worker_that_cannot_describe_ends_the_command(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONIC_WORKER", f"{sys.executable} -c \"raise SystemExit('no torch')\"")
    assert command(*TINY) == 1
    assert "no torch" in command.err


def test_broken_lines_lose_no_row(command: Command) -> None:
    command(*TINY, "impl=sonic", "seed=1,2")
    path = command.results / "custom" / "cpu.jsonl"
    first, second = path.read_bytes().splitlines()
    path.write_bytes(first + b"\n\xff\xfe\n" + second[: len(second) // 2])
    assert command(*TINY, "impl=sonic", "seed=1,2") == 0
    assert len(command.measured()) == 1
    assert [row.seed for row in command.rows()] == [1, 2]
    assert command.out.count("skipped a line that is no row") == 2
    assert path.read_bytes().startswith(first + b"\n\xff\xfe\n")


# --- processes


def environment(tmp_path: Path, **extra: str) -> dict[str, str]:
    mine = {"SONIC_WORKER": FAKE, "SONIC_FAKE": str(tmp_path), "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **mine, **extra}


def begin(tmp_path: Path, results: str, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sonic.sweep", *TINY, f"results={tmp_path / results}", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(tmp_path, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_rows_and_leaves_no_child(tmp_path: Path, number: signal.Signals, code: int) -> None:
    seeds = "routing.seed=" + ",".join(map(str, range(10, 60)))
    process = begin(tmp_path, "r", "impl=torch_loop,transformers", seeds, SONIC_FAKE_SLEEP="0.2")
    rows = tmp_path / "r" / "custom" / "cpu.jsonl"
    deadline = time.monotonic() + 30
    while not (rows.exists() and rows.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code, out
    kept = record.read_rows(rows)[0]
    assert 2 <= len(kept) < 100
    assert f"100 points: {len(kept)} ok, {100 - len(kept)} without a row" in out
    assert " impl " in out, "the table is printed"
    assert "Traceback" not in out
    pids = [int(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("start")]
    assert len(pids) == 2
    assert not any(map(alive, pids))


def test_two_sweeps_never_measure_at_the_same_time(tmp_path: Path) -> None:
    lines = ["impl=torch_loop", "routing.seed=10,11,12"]
    both = [begin(tmp_path, name, *lines, SONIC_FAKE_SLEEP="0.1") for name in ("a", "b")]
    outs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outs
    times = sorted(
        (float(line.split()[1]), float(line.split()[2]))
        for line in (tmp_path / "log").read_text().splitlines()
        if line.startswith("timed")
    )
    assert len(times) == 6
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(times))


def test_the_parent_never_imports_torch(tmp_path: Path) -> None:
    arguments = [*TINY, "impl=torch_loop", f"results={tmp_path / 'r'}"]
    code = (
        "import sys; from sonic import sweep; sweep.draw = lambda *_: ([], None)\n"
        "code = sweep.main(sys.argv[1:])\n"
        "print(code, sorted({'torch', 'triton', 'wandb', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_reader_that_leaves_loses_no_row(tmp_path: Path) -> None:
    process = begin(tmp_path, "r", "impl=torch_loop", "routing.seed=10,11,12,13", SONIC_FAKE_SLEEP="0.3")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert len(record.read_rows(tmp_path / "r" / "custom" / "cpu.jsonl")[0]) == 4


def test_exit_code_of_the_module(tmp_path: Path) -> None:
    process = begin(tmp_path, "r", "impl=torch_loop", "routing.seed=1")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ValueError: no luck" in out
