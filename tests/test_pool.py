"""Children: every way to misbehave costs one point, and none of them outlives its pool."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sonic import pool
from sonic.pool import Pool, WorkerFault
from sonic.record import Point, Settings

FAKE = [sys.executable, "-S", "-E", str(Path(__file__).with_name("fake_worker.py"))]


def point(seed: int = 0, impl: str = "torch_loop", T: int = 8) -> Point:
    shape = {"T": T, "d": 8, "n": 8, "E": 2, "K": 1}
    return Point.model_validate({"sweep": "x", "impl": impl, "shape": shape, "routing": {"seed": seed}})


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log that fake children write."""
    monkeypatch.setenv("SONIC_FAKE", str(tmp_path))
    return tmp_path / "log"


def children(tmp_path: Path, command: list[str] | None = None) -> Pool:
    return Pool(command or FAKE, pool.worker_environment(interpreter=True), tmp_path / "logs")


def started(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("start")]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("seed", "status", "texts"),
    [
        (1, "failed", ["ValueError: no luck"]),
        (2, "crashed", ["exit code 139", "it printed: ", "about to leave"]),
        (3, "timeout", ["no reply within 0.4 s"]),
        (4, "crashed", ["broke the protocol", "this is no JSON"]),
        (5, "crashed", ["SIGSEGV"]),
        (6, "crashed", ["broke the protocol", "status"]),
        (9, "crashed", ["exit code 1"]),
    ],
)
def test_a_fault_costs_one_point(seed: int, status: str, texts: list[str], tmp_path: Path, log: Path) -> None:
    with children(tmp_path) as pool_:
        assert pool_.measure(point(), Settings(), 20).status == "ok"
        outcome = pool_.measure(point(seed), Settings(), 0.4 if seed == 3 else 20)
        assert outcome.status == status
        for text in texts:
            assert text in (outcome.reason or "")
        assert pool_.measure(point(), Settings(), 20).status == "ok"
    pids = started(log)
    assert len(pids) == 2, "a child is replaced after a fault, once"
    grandchildren = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("grandchild")]
    time.sleep(0.05)
    assert not any(map(alive, pids + grandchildren))


def test_a_child_serves_many_points_of_one_implementation(tmp_path: Path, log: Path) -> None:
    with children(tmp_path) as pool_:
        for seed in (0, 7, 8, 0):
            for impl in ("torch_loop", "transformers"):
                pool_.measure(point(seed, impl), Settings(), 20)
    assert len(started(log)) == 2
    assert "interpret=1" in log.read_text()


def test_fresh_gives_every_point_its_own_child(tmp_path: Path, log: Path) -> None:
    with children(tmp_path) as pool_:
        for _ in range(3):
            assert pool_.measure(point(), Settings(fresh=True), 20).status == "ok"
    assert len(started(log)) == 3


def test_out_of_memory_gets_a_fresh_child(tmp_path: Path, log: Path) -> None:
    with children(tmp_path) as pool_:
        assert pool_.measure(point(T=4096), Settings(), 20).status == "oom"
        assert pool_.measure(point(), Settings(), 20).status == "ok"
    assert len(started(log)) == 2


def test_children_start_side_by_side(tmp_path: Path, log: Path) -> None:
    with children(tmp_path) as pool_:
        description = pool_.start(["torch_loop", "transformers"])
        assert description is not None
        assert description.device.gpu == "cpu"
        assert len(started(log)) == 2
        pool_.measure(point(), Settings(), 20)
    assert len(started(log)) == 2


def test_a_command_that_does_not_start_costs_one_point(tmp_path: Path) -> None:
    with children(tmp_path, [sys.executable, "-c", "raise SystemExit('no torch here')"]) as pool_:
        assert pool_.start(["torch_loop"]) is None
        outcome = pool_.measure(point(), Settings(), 5)
    assert outcome.status == "crashed"
    assert "exit code 1" in (outcome.reason or "")
    assert "no torch here" in (outcome.reason or "")


def test_an_exception_kills_at_once(tmp_path: Path, log: Path) -> None:
    with pytest.raises(KeyError), children(tmp_path) as pool_:
        pool_.start(["torch_loop"])
        raise KeyError
    assert not any(map(alive, started(log)))


def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path: Path, log: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from sonic import pool\n"
        f"p = pool.Pool({FAKE!r}, pool.worker_environment(True), Path({str(tmp_path)!r}))\n"
        "p.start(['torch_loop']); print('up', flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    (pid,) = started(log)
    assert alive(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
    parent.stdout.close()


def test_describe() -> None:
    description = pool.describe(FAKE, pool.worker_environment(interpreter=True))
    assert description.impls["scattermoe"].available is False
    assert "not importable" in (description.impls["scattermoe"].reason or "")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise SystemExit('torch is broken')", "torch is broken"),
        ("print('{}')", "device: Field required"),
        ("import os; os._exit(7)", "exit code 7"),
    ],
)
def test_describe_tells_what_is_wrong(code: str, text: str) -> None:
    with pytest.raises(WorkerFault) as caught:
        pool.describe([sys.executable, "-c", code], dict(os.environ))
    assert text in str(caught.value)
    with pytest.raises(WorkerFault, match="no answer in 0.3 s"):
        pool.describe([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), timeout_s=0.3)


def test_environment_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    on_card = pool.worker_environment(interpreter=False, device="GPU-1")
    assert "TRITON_INTERPRET" not in on_card
    assert (on_card["CUDA_VISIBLE_DEVICES"], on_card["CUDA_DEVICE_ORDER"]) == ("GPU-1", "PCI_BUS_ID")
    assert pool.worker_environment(interpreter=True)["TRITON_INTERPRET"] == "1"
    monkeypatch.setenv("SONIC_WORKER", "other --with 'two words'")
    assert pool.worker_command() == ["other", "--with", "two words"]


def test_a_device_is_measured_on_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.tempfile, "tempdir", str(tmp_path))
    first, second = pool.device_lock("MIG-1/2"), pool.device_lock("MIG-1/2")
    assert not pool.device_lock("cpu").is_locked
    waits: list[str] = []
    pool.acquire(first, lambda: waits.append("first"))
    thread = threading.Thread(target=lambda: pool.acquire(second, lambda: waits.append("second")))
    thread.start()
    thread.join(0.3)
    assert waits == ["second"]
    assert thread.is_alive()
    first.release()
    thread.join(10)
    assert not thread.is_alive()


def test_who_waits_for_a_device_gets_it_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pool, "POLL_S", 0.01)
    order: list[str] = []

    def points(name: str, first: threading.Event | None = None) -> None:
        lock = pool.device_lock("GPU-1")
        for _ in range(6):
            pool.acquire(lock, lambda: None)
            order.append(name)
            if first is not None:
                first.set()
            time.sleep(0.05)
            lock.release()

    began = threading.Event()
    threads = [threading.Thread(target=points, args=("a", began)), threading.Thread(target=points, args=("b",))]
    threads[0].start()
    began.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert len(order) == 12
    assert order.index("b") <= 3
    assert "bbb" not in "".join(order[:9]) and "aaaa" not in "".join(order)
