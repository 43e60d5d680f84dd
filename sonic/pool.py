"""Child processes that measure: one per implementation, kept for many points, replaced after any fault.

A child is `python -m sonic.worker` (SONIC_WORKER names another command, for tests). It answers one JSON line per JSON
line on its standard input. Whatever a child does instead (die by a signal, `os._exit`, hang, write something else)
costs the point in hand and becomes its `Outcome`; the child, and what it started, is killed as a process group.
This module knows no MoE and imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from sonic.record import Outcome, Point, Settings

#: Seconds that a child gets to import its packages and answer `describe`.
START_S = 180.0
#: Seconds that an idle child gets to leave after its input is closed.
LEAVE_S = 10.0
#: Seconds between looks at a lock that another sweep holds.
POLL_S = 0.1
#: A longer reply than this is no reply.
LONGEST_LINE = 64 << 20
#: Statuses after which a child is not used again: its process may be poisoned or hold memory.
REPLACE_AFTER = frozenset({"failed", "crashed", "timeout", "oom"})

# The child dies with the thread that started it (PR_SET_PDEATHSIG = 1, kept over exec), even when that is killed by
# SIGKILL; a parent that was gone before the call is noticed by its pid.
_GUARD = (
    "import ctypes, os, sys\n"
    "try: ctypes.CDLL(None).prctl(1, 9)\n"
    "except (OSError, AttributeError): pass\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)

T = TypeVar("T", bound=BaseModel)


class Reported(BaseModel):
    """Part of a reply of `describe`; fields that this version does not know are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Device(Reported):
    """What a child runs on; `gpu` is the slug that names rows files, `cpu` without a GPU."""

    gpu: str
    name: str


class ImplInfo(Reported):
    """An implementation on this machine: the knobs and ops that it takes, or the reason why it is not available."""

    available: bool
    reason: str | None = None
    version: str
    knobs: list[str]
    ops: list[str]


class Description(Reported):
    """The reply of `describe`."""

    device: Device
    method_version: int
    impls: dict[str, ImplInfo]


class WorkerFault(Exception):
    """A child did not answer as it should; `status` is what becomes of the point."""

    def __init__(self, status: Literal["crashed", "timeout"], reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def worker_command() -> list[str]:
    """The command line of a child."""
    other = os.environ.get("SONIC_WORKER")
    return shlex.split(other) if other else [sys.executable, "-m", "sonic.worker"]


def worker_environment(interpreter: bool, device: str | None = None) -> dict[str, str]:
    """Environment of a child: Triton's interpreter where there is no GPU (read when triton is imported), GPUs counted
    as NVML counts them, and only `device` (a UUID) visible when it is given."""
    env = dict(os.environ)
    env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if interpreter:
        env["TRITON_INTERPRET"] = "1"
    if device is not None:
        env["CUDA_VISIBLE_DEVICES"] = device
    source = str(Path(__file__).resolve().parents[1])
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    if source not in paths:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, *paths]))
    return env


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a child and everything in its process group, then reaps it. Does nothing when it has been reaped."""
    if process.returncode is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def start(command: list[str], env: Mapping[str, str], stderr: int, stdin: int) -> subprocess.Popen[bytes]:
    """A child in a session of its own, so that a terminal's Ctrl-C does not reach it and its group can be killed."""
    guarded = [sys.executable, "-S", "-E", "-c", _GUARD, str(os.getpid()), *command]
    return subprocess.Popen(
        guarded, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, env=dict(env), start_new_session=True
    )


class Worker:
    """One child. `log` receives what it and its packages print."""

    def __init__(self, command: list[str], env: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.points = 0
        self._buffer = b""
        with log.open("ab") as stderr:
            self._mark = stderr.tell()
            self.process = start(command, env, stderr.fileno(), subprocess.PIPE)

    def send(self, message: dict[str, Any]) -> None:
        """Writes one request. WorkerFault when the child is gone."""
        assert self.process.stdin is not None
        if self.points > 1:  # what the first point's child printed while it started belongs to that point
            self._mark = self.log.stat().st_size
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise self._gone() from error

    def receive(self, model: type[T], timeout_s: float) -> T:
        """The reply to the last request. WorkerFault when none comes in time, the child dies or says something else."""
        line = self._line(timeout_s)
        try:
            return model.model_validate_json(line)
        except ValidationError as error:
            shown = line[:200].decode(errors="replace")
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            rule = f"{where}: {first['msg']}" if where else first["msg"]
            raise WorkerFault(
                "crashed", f"the child broke the protocol with {shown!r} ({rule}){self._tail()}"
            ) from error

    def _line(self, timeout_s: float) -> bytes:
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise WorkerFault("timeout", f"no reply within {timeout_s:g} s; the child was killed{self._tail()}")
                chunk = os.read(pipe, 1 << 20)
                if not chunk:
                    raise self._gone()
                self._buffer += chunk
                if len(self._buffer) > LONGEST_LINE:
                    raise WorkerFault("crashed", f"the child wrote {len(self._buffer)} bytes without a line's end")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _gone(self) -> WorkerFault:
        """How the child ended, in words. It is not reaped yet: its pid still names the group that is to be killed."""
        ended = self._wait(5.0)
        if ended is None:
            return WorkerFault("crashed", f"the child closed its output and went on{self._tail()}")
        if ended.si_code == os.CLD_EXITED:
            return WorkerFault("crashed", f"the child ended with exit code {ended.si_status}{self._tail()}")
        number = ended.si_status
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        hint = ", perhaps by the kernel for want of memory" if number == signal.SIGKILL else ""
        return WorkerFault("crashed", f"the child was ended by {name}{hint}{self._tail()}")

    def _wait(self, seconds: float) -> os.waitid_result | None:
        """Waits for the child's end without reaping it; None when it goes on."""
        deadline = time.monotonic() + seconds
        while True:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None or time.monotonic() > deadline:
                return ended
            time.sleep(0.01)

    def _tail(self) -> str:
        """The last lines that the child printed since the request, for a reason."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._mark, size - 2000))
            text = file.read().decode(errors="replace")
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return "; it printed: " + " | ".join(lines[-6:]) if lines else ""

    def hang_up(self) -> None:
        """Closes the child's input, at which an idle child leaves."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except OSError:
            pass

    def leave(self) -> None:
        """Gives a child that was hung up on some time to leave by itself."""
        if self.process.returncode is None:
            self._wait(LEAVE_S)

    def kill(self) -> None:
        """Ends the child and its group at once; may be called again."""
        kill_group(self.process)
        self.hang_up()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Pool:
    """The children of one job, one per implementation; a context manager that leaves none behind."""

    def __init__(self, command: list[str], env: Mapping[str, str], logs: Path) -> None:
        self._command = command
        self._env = env
        self._logs = logs
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)

    def start(self, impls: Iterable[str]) -> Description | None:
        """Starts the children of several implementations side by side, before anything is timed; a description of the
        machine by one of them. A child that does not come up is left out here and tried again when it is needed."""
        fresh = []
        for impl in impls:
            if impl in self._workers:
                continue
            worker = self._workers[impl] = Worker(self._command, self._env, self._logs / f"{impl}.log")
            fresh.append((impl, worker))
        description = None
        for impl, worker in fresh:
            try:
                worker.send({"cmd": "describe"})
            except WorkerFault:
                self._drop(impl)
        for impl, worker in fresh:
            if impl not in self._workers:
                continue
            try:
                description = worker.receive(Description, START_S)
            except WorkerFault:
                self._drop(impl)
        return description

    def measure(self, point: Point, settings: Settings, timeout_s: float) -> Outcome:
        """The outcome of one point. A child that is not there is started first, outside `timeout_s`; its first point,
        which pays for imports and contexts that `describe` did not need, gets twice the time."""
        try:
            worker = self._workers.get(point.impl) or self._begin(point.impl)
            first = worker.points == 0
            worker.points += 1
            worker.send({"cmd": "measure", "point": point.model_dump(), "settings": settings.model_dump()})
            outcome = worker.receive(Outcome, timeout_s * (2 if first else 1))
        except WorkerFault as fault:
            outcome = Outcome(status=fault.status, reason=fault.reason)
        if settings.fresh or outcome.status in REPLACE_AFTER:
            self._drop(point.impl)
        return outcome

    def _begin(self, impl: str) -> Worker:
        worker = self._workers[impl] = Worker(self._command, self._env, self._logs / f"{impl}.log")
        worker.send({"cmd": "describe"})
        worker.receive(Description, START_S)
        return worker

    def _drop(self, impl: str) -> None:
        worker = self._workers.pop(impl, None)
        if worker is not None:
            worker.kill()

    def close(self, kill: bool = False) -> None:
        """Ends all children: idle ones leave by themselves unless `kill`."""
        workers = list(self._workers.values())
        try:
            if not kill:
                for worker in workers:
                    worker.hang_up()
                for worker in workers:
                    worker.leave()
        finally:
            for worker in workers:
                worker.kill()
            self._workers.clear()


def describe(command: list[str], env: Mapping[str, str], timeout_s: float = START_S) -> Description:
    """What a child says about this machine and the implementations. WorkerFault with the reason when it does not."""
    with tempfile.TemporaryFile() as stderr:
        process = start([*command, "--describe"], env, stderr.fileno(), subprocess.DEVNULL)
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise WorkerFault(
                "timeout", f"`{shlex.join(command)} --describe` gave no answer in {timeout_s:g} s"
            ) from None
        finally:
            kill_group(process)
            assert process.stdout is not None
            process.stdout.close()
        stderr.seek(0)
        printed = stderr.read().decode(errors="replace").strip().splitlines()[-8:]
    lines = out.decode(errors="replace").strip().splitlines()
    try:
        if process.returncode == 0 and lines:
            return Description.model_validate_json(lines[-1])
        why = f"exit code {process.returncode}"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    text = f"`{shlex.join(command)} --describe` failed ({why})"
    raise WorkerFault("crashed", "\n".join([text, *printed]))


def device_lock(device: str) -> FileLock:
    """The lock that keeps two measurements on this machine off the same device; `device` is a GPU's UUID or `cpu`.

    The folder is for all users and not sticky: Linux may refuse others' files in sticky world-writable folders.
    """
    folder = Path(tempfile.gettempdir()) / "sonic-locks"
    try:
        folder.mkdir(exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o777)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="sonic-locks-"))
    return FileLock(folder / f"{re.sub(r'[^A-Za-z0-9-]', '_', device)}.lock", mode=0o666)


def acquire(lock: FileLock, waiting: Callable[[], None]) -> None:
    """Takes the lock; calls `waiting` once when that is not possible at once.

    Who waits for it holds a second lock, the turn, without which nobody takes the first: a sweep that has just measured
    a point then waits for the others, instead of being first again.
    """
    turn = FileLock(Path(lock.lock_file).with_suffix(".turn"), mode=0o666)
    try:
        turn.acquire(timeout=0)
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        turn.acquire(poll_interval=POLL_S)
        lock.acquire(poll_interval=POLL_S)
    finally:
        turn.release(force=True)
