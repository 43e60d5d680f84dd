"""wandb as it is really written: offline runs are read back with `wandb leet inspect`; nothing here uses a network."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from sonic import tracking
from sonic.record import Clocks, Method, TileSpec
from sonic.tracking import AXES, CHARTED, Tracker, history
from tests.rows import make_env, make_row

LEET = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json"]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key and no settings of whoever runs the tests, and nothing written into their home."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


def make_tracker(tmp_path: Path, mode: Any = "offline", said: list[str] | None = None) -> Tracker:
    say = None if said is None else said.append
    return Tracker(mode, "sonic-test", None, "run1", "smoke", make_env(), tmp_path / ".sonic" / "wandb", say)


def inspect(place: str) -> list[dict[str, Any]]:
    """The records of an offline run, as wandb's own reader prints them."""
    (path,) = Path(place).glob("*.wandb")
    done = subprocess.run([*LEET, str(path)], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in records if record["type"] == kind]


def test_an_offline_run_reads_back(tmp_path: Path) -> None:
    figure = tmp_path / "smoke.png"
    Image.new("RGB", (4, 4)).save(figure)
    clocks = Clocks(sm_mhz=1980.0, mem_mhz=3201.0, power_w=500.0, temp_c=40.0)
    rows = [
        make_row(8, tile=TileSpec(m=64), clocks=clocks, peak_fwd_bytes=1 << 30),
        make_row(16, status="oom", event_us=None, reason="needs 9 GiB"),
        make_row(8, impl="torch_loop"),
    ]
    said: list[str] = []
    with make_tracker(tmp_path, said=said) as tracker:
        for row in rows[:2]:
            tracker.log(row)
        tracker.log(rows[0])
        live = [Path(place) for place in tracker.places.values()]
        # The last row comes with the closing alone, as one that the tail missed would.
        tracker.finish(rows, [figure, tmp_path / "smoke.pdf", tmp_path / "missing.png"])
    assert said == [] and set(tracker.places) == {"sonic", "torch_loop"}
    assert live[0].parent == tmp_path / ".sonic" / "wandb"
    assert not (tmp_path / "wandb").exists()

    records = inspect(tracker.places["sonic"])
    run = of(records, "run")[0]
    assert (run["run_id"], run["display_name"], run["run_group"], run["job_type"], run["project"]) == (
        *("run1-sonic", "sonic", "run1", "smoke", "sonic-test"),
    )
    config = run["config"]["update"]
    assert config["impl_version"] == "1.0" and config["env"]["commit"] == "c0ffee" and config["env"]["python"]
    axes = {metric["glob_name"]: metric["step_metric"] for metric in of(records, "metric") if "glob_name" in metric}
    assert axes == {f"by_{axis}/*": axis for axis in AXES}

    first, second, closing = (entry["item"] for entry in of(records, "history"))
    expected = {
        **{
            "G": 8,
            "rho": 0.25,
            "E": 8,
            "K": 2,
            "n": 8,
            "tile_m": 64,
            "status": "ok",
            "ms": 0.11,
            "ms_from": "event_us",
        },
        **{"tflops": 0.1, "gbps": 10, "bytes_model": 1_100_000, "held_gib": 1 / 1024, "peak_gib": 1},
        **{"error/twin_o": 0.5, "error/full_dw1": 1.25, "error_max": 1.25, "sm_mhz": 1980, "power_w": 500},
        **{"by_G/layer_fwd_bwd_tflops": 0.1, "by_tile_m/layer_fwd_bwd_ms": 0.11},
    }
    assert {name: first.get(name) for name in expected} == pytest.approx(expected)
    assert second["status"] == "oom" and second["G"] == 4 and "tflops" not in second and "tile_m" not in second
    assert closing["points.nrows"] == 2 and closing["figures/smoke._type"] == "image-file"
    assert [name for name in closing if name.startswith("figures/missing")] == []
    table = json.loads((Path(tracker.places["sonic"]) / "files" / closing["points.path"]).read_text())
    lines = [dict(zip(table["columns"], line, strict=True)) for line in table["data"]]
    assert lines[1]["reason"] == "needs 9 GiB" and lines[0]["tflops"] == pytest.approx(0.1)
    summary: dict[str, Any] = {}
    for record in of(records, "summary"):
        summary |= record.get("update", {})
    assert summary["points_ok"] == summary["points_oom"] == 1
    assert [record["exit_code"] for record in of(records, "exit")] == [0]

    (only, _closing) = of(inspect(tracker.places["torch_loop"]), "history")
    assert only["item"]["n"] == 8


def test_off_imports_nothing_and_writes_nothing(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from sonic.tracking import Tracker
from tests.rows import make_env, make_row
with Tracker("off", "p", None, "r", "smoke", make_env(), Path({str(tmp_path / "none")!r})) as tracker:
    tracker.log(make_row())
    tracker.finish([make_row()], [])
sys.exit("wandb" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert not (tmp_path / "none").exists()


def test_importing_the_module_leaves_wandb_alone() -> None:
    code = "import sys, sonic.tracking; sys.exit('wandb' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("key", [None, "0" * 40], ids=["no_key", "no_network"])
def test_online_falls_back_within_a_stated_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    assert tracking.LOGIN_TIMEOUT_S <= 10
    # In a process of its own: wandb keeps the server's address and the key for as long as a process lives.
    code = f"""
import json, time
from pathlib import Path
from sonic import tracking
from tests.rows import make_env, make_row
tracking.LOGIN_TIMEOUT_S = 1
said, start = [], time.monotonic()
tracker = tracking.Tracker("online", "p", None, "r", "smoke", make_env(), Path({str(tmp_path)!r}), said.append)
with tracker:
    tracker.log(make_row())
    tracker.log(make_row(impl="torch_loop"))
    tracker.finish([], [])  # no rows, no table
print(json.dumps([said, time.monotonic() - start, tracker.places]))
"""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, seconds, places = json.loads(done.stdout.splitlines()[-1])
    assert len(said) == 2 and "for 1 s at most" in said[0] and "logging offline instead" in said[1]
    assert ("no API key" in said[1]) == (key is None)
    assert seconds < 10 and time.monotonic() - start < 15
    assert all(Path(place).parent == tmp_path / "wandb" for place in places.values()) and len(places) == 2
    assert len(of(inspect(places["torch_loop"]), "history")) == 1


class FakeRun:
    """Stands in for an online run."""

    def __init__(self, fails: bool = False, **settings: Any) -> None:
        self.settings = settings
        self.url = f"https://wandb.test/{settings['id']}"
        self.dir = f"/offline/{settings['id']}/files"
        self.summary: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []
        self.exit_code: int | None = None
        self.fails = fails

    def define_metric(self, *_arguments: Any, **_settings: Any) -> None: ...

    def log(self, item: dict[str, Any]) -> None:
        if self.fails:
            raise ConnectionError("the service\nis gone")
        self.logged.append(item)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A wandb that reaches its server."""
    fake = SimpleNamespace(
        runs=[], Settings=lambda **settings: settings, setup=lambda _settings: None, login=lambda **_arguments: True
    )

    def init(**settings: Any) -> FakeRun:
        fake.runs.append(FakeRun(**settings))
        return fake.runs[-1]

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


def test_online_opens_one_run_per_implementation(tmp_path: Path, wandb: SimpleNamespace) -> None:
    with make_tracker(tmp_path, "online", said := []) as tracker:
        for n in (8, 16):
            for impl in ("sonic", "scattermoe"):
                tracker.log(make_row(n, impl=impl))
    assert [run.settings["mode"] for run in wandb.runs] == ["online", "online"]
    assert [len(run.logged) for run in wandb.runs] == [2, 2]
    assert [run.exit_code for run in wandb.runs] == [0, 0]
    assert tracker.places["sonic"] == "https://wandb.test/run1-sonic"
    assert len(said) == 1


def test_a_run_that_does_not_begin_online_is_replaced(tmp_path: Path, wandb: SimpleNamespace) -> None:
    begin = wandb.init

    def init(**settings: Any) -> FakeRun:
        if settings["mode"] == "online":
            raise TimeoutError("no answer")
        return begin(**settings)

    wandb.init = init
    with make_tracker(tmp_path, "online", said := []) as tracker:
        tracker.log(make_row())
    (run,) = wandb.runs
    assert run.settings["id"] == "run1-sonic-offline" and len(run.logged) == 1
    assert tracker.places["sonic"] == "/offline/run1-sonic-offline" and "no answer" in said[-1]


def test_a_failure_is_one_line_and_never_reaches_the_sweep(tmp_path: Path, wandb: SimpleNamespace) -> None:
    wandb.init = lambda **settings: wandb.runs.append(FakeRun(fails=True, **settings)) or wandb.runs[-1]
    with make_tracker(tmp_path, said=(said := [])) as tracker:
        for n in (8, 16, 32):
            tracker.log(make_row(n))
        tracker.finish([make_row(64)], [])
    assert said == [
        "wandb: stopped logging, the rows file is complete without it (ConnectionError: the service is gone)"
    ]
    assert wandb.runs[0].exit_code is not None


def test_without_the_package_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with make_tracker(tmp_path, said=(said := [])) as tracker:
        tracker.log(make_row())
        tracker.finish([], [])
    assert len(said) == 1 and "rows file is complete" in said[0]


def test_an_interrupted_sweep_ends_its_runs_as_failed(tmp_path: Path, wandb: SimpleNamespace) -> None:
    with pytest.raises(KeyboardInterrupt), make_tracker(tmp_path) as tracker:
        tracker.log(make_row())
        raise KeyboardInterrupt
    assert wandb.runs[0].exit_code == 1


def test_history_prefers_device_time_and_keeps_every_clock() -> None:
    method = Method(version=1, timer="cuda", l2="cold", warmup=3, samples=2)
    item = history(make_row(device_us=[50.0, 60.0], graph_us=[40.0], method=method, throttled=False))
    assert (item["ms"], item["ms_from"], item["event_ms"], item["graph_ms"]) == (0.055, "device_us", 0.11, 0.04)
    assert item["throttled"] == 0 and "span_ms" not in item
    assert set(CHARTED) - {"peak_gib"} <= set(item) and None not in item.values()


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_failed_sweep_does_not_look_finished(tmp_path: Path, wandb: SimpleNamespace, code: int) -> None:
    wandb.Table = lambda **_contents: None
    with make_tracker(tmp_path) as tracker:
        tracker.log(make_row())
        tracker.finish([make_row()], [], exit_code=code)
    assert wandb.runs[0].exit_code == code
