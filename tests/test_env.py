"""The environment record: what it holds, that it is written once, and that results never make a clone dirty."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sonic import env as envs
from tests.rows import make_env

REPLY = {
    "device": {
        **{"gpu": "nvidia-h200", "name": "NVIDIA H200", "cc": [9, 0], "sms": 132},
        **{"torch": "2.13.0", "triton": "3.7.1", "cuda": "13.0", "python": "3.12.1"},
    },
    "method_version": 1,
    "impls": {
        "sonic": {"available": True, "reason": None, "version": "0.1+ab"},
        "scattermoe": {"available": False, "reason": "not installed", "version": "1"},
    },
}


class FakeNvml:
    """Two cards, the second of which refuses to tell its power limit."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_CLOCK_MEM = 0
    uuids = ("GPU-aaaa-1", "GPU-bbbb-2")

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.uuids[handle]

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError("not supported")
        return 700_000

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetMemoryInfo(self, _handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=141 << 30)

    def __getattr__(self, name: str) -> object:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        return lambda *_arguments: 7


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A git clone with one commit and a results folder."""
    root = tmp_path / "clone"
    (root / "results").mkdir(parents=True)
    (root / "code.py").write_text("1\n")
    (root / "results" / "README.md").write_text("rows\n")
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    return root


def test_a_cpu_environment_needs_no_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert envs.nvml_card() is None
    env = envs.collect({"device": {"gpu": "cpu", "name": "cpu", "cc": None, "torch": "2.13.0"}}, tmp_path)
    assert env.gpu == "cpu" and env.torch == "2.13.0" and env.triton is None
    assert env.driver is None and env.gpu_name is None and env.cores
    assert envs.collect({}, tmp_path).gpu == "cpu"


def test_a_gpu_environment_names_the_card_and_hides_its_uuid(nvml: FakeNvml, tmp_path: Path) -> None:
    env = envs.collect(REPLY, tmp_path)
    assert (env.gpu, env.gpu_name, env.cc, env.sms) == ("nvidia-h200", "NVIDIA H200", [9, 0], 132)
    assert (env.driver, env.power_limit_w, env.cuda, env.python) == ("580.1", 700.0, "13.0", "3.12.1")
    assert env.impls == {"sonic": "0.1+ab"}
    assert env.gpu_uuid is not None and len(env.gpu_uuid) == 12 and "aaaa" not in env.model_dump_json()


def test_the_card_is_the_visible_one(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def uuid(visible: str, wanted: str | None = None) -> str | None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        card = envs.nvml_card(wanted)
        return card and card["uuid"]

    assert uuid("0,1") == "GPU-aaaa-1" and uuid("") is uuid("-1") is None
    assert uuid("1") == uuid("1,0") == uuid("GPU-bbbb") == "GPU-bbbb-2"
    assert uuid("0", "bbbb-2") == "GPU-bbbb-2"
    assert uuid("GPU-cccc") is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert envs.nvml_card()["uuid"] == "GPU-aaaa-1"  # type: ignore[index]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert envs.nvml_card()["power_limit_w"] is None  # type: ignore[index]


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SONIC_COMMIT", raising=False)


def test_the_id_follows_from_the_content(nvml: FakeNvml, tmp_path: Path) -> None:
    same, again = envs.collect(REPLY, tmp_path), envs.collect(REPLY, tmp_path)
    other = envs.collect(REPLY | {"device": REPLY["device"] | {"triton": "3.6.0"}}, tmp_path)  # type: ignore[operator]
    assert same == again and len(same.env_id) == 12 and same.env_id != other.env_id


def test_an_environment_is_written_once(tmp_path: Path) -> None:
    path = envs.env_path(tmp_path, "nvidia-h200")
    assert path.name == "env.jsonl" and envs.env_path(tmp_path, "cpu").name == "env-cpu.jsonl"
    one, two = make_env(env_id="a"), make_env(env_id="b")
    assert envs.record(one, path) and not envs.record(one, path)
    with path.open("ab") as file:
        file.write(b'{"env_id": "a", "comm')
    assert envs.record(two, path) and not envs.record(one, path)
    found, faults = envs.read_envs(path)
    assert found == {"a": one, "b": two} and len(faults) == 1


def test_results_do_not_make_a_clone_dirty(clone: Path) -> None:
    commit, dirty = envs.revision(clone / "results", clone)
    assert len(commit) == 40 and dirty is False
    (clone / "results" / "smoke").mkdir()
    (clone / "results" / "smoke" / "gpu.jsonl").write_text("{}\n")
    (clone / "results" / "README.md").write_text("changed\n")
    (clone / "mine").mkdir()
    (clone / "mine" / "gpu.jsonl").write_text("{}\n")
    assert envs.revision(clone / "mine", clone) == (commit, False)
    assert envs.revision(clone / "results", clone) == (commit, True)
    (clone / "code.py").write_text("2\n")
    assert envs.revision(clone / "mine", clone) == (commit, True)


def test_a_commit_that_is_told_wins(tmp_path: Path, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert envs.revision(tmp_path, tmp_path) == ("unknown", None)
    monkeypatch.setenv("SONIC_COMMIT", "abc123")  # a copy of the clone, whose history is older than its files
    assert envs.revision(clone, clone) == ("abc123", None)
    monkeypatch.setenv("SONIC_COMMIT", "abc123")
    assert envs.revision(tmp_path, tmp_path) == ("abc123", None)
    monkeypatch.setenv("SONIC_COMMIT", "abc123-dirty")
    assert envs.revision(tmp_path, tmp_path) == ("abc123", True)


def test_a_clone_without_git_or_commits(tmp_path: Path, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path / "empty")], check=True)
    assert envs.revision(tmp_path, tmp_path / "empty") == ("unknown", None)
    monkeypatch.setenv("PATH", "")
    assert envs.revision(clone, clone) == ("unknown", None)


def test_collecting_imports_no_torch() -> None:
    code = "import sys, sonic.env, pathlib; sonic.env.collect({}, pathlib.Path()); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
