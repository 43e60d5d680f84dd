"""What a launcher's job does: a chunk of a plan's points, one after another, each in a child, each ending in a row.

The plan is a file that the sweep writes; a job writes a report beside it that says which keys its points have and which
of them it measures, so that the sweep can follow rows under any launcher. A job never raises for a point.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sonic import config, counters, env, pool, record
from sonic.pool import Description, ImplInfo
from sonic.record import EXPECTED, FINAL, Outcome, Point, RecordError, Row, Settings, Strict

log = logging.getLogger("sonic")


class Plan(Strict):
    """Everything that jobs need to know. `chunks` holds indices of `points`; `description` is null where jobs run on
    other machines and ask for themselves; `retry` measures these statuses only; `spread` deals jobs out over GPUs."""

    run_id: str
    sweep: str
    points: list[Point]
    chunks: list[list[int]]
    settings: Settings
    timeout_s: float
    results: str
    folder: str
    resume: bool
    fail_fast: bool
    retry: list[str]
    spread: bool
    description: dict[str, Any] | None

    @property
    def path(self) -> Path:
        """The plan's own file."""
        return Path(self.folder) / "plan.json"

    @property
    def stop(self) -> Path:
        """A file whose presence asks all jobs to begin no further point."""
        return Path(self.folder) / "stop"

    def report_path(self, chunk: int) -> Path:
        """Where the job of a chunk reports."""
        return Path(self.folder) / f"chunk-{chunk}.json"

    def save(self) -> None:
        """Writes the plan to its file. RecordError names the file and the reason when that is not possible."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(self.model_dump_json())
        except OSError as error:
            raise RecordError(
                f"{self.path}: cannot write the run's plan ({error.strerror}); "
                "the folder .sonic must be writable, results=DIR puts it into DIR"
            ) from error


class Report(Strict):
    """What a job found before measuring: `keys` of all its points, those it measures (`todo`), the rows file, the
    environment, and unreadable lines of the rows file."""

    keys: list[str]
    todo: list[str]
    rows: str
    env: env.Env
    faults: list[str]


def interpreted() -> bool:
    """Whether children run Triton kernels in the interpreter: without a GPU, or when the user asked for it."""
    return not config.visible_gpus() or os.environ.get("TRITON_INTERPRET") == "1"


def keys_of(points: Iterable[Point], description: Description) -> list[str]:
    """The keys of points on the machine that the description is of."""
    interpreter = interpreted()
    found = []
    for point in points:
        info = info_of(point, description)
        method = description.method_version
        found.append(record.point_key(point, info.version, description.device.gpu, method, interpreter, info.knobs))
    return found


def info_of(point: Point, description: Description) -> ImplInfo:
    """What the machine says about the point's implementation."""
    missing = ImplInfo(available=False, reason="the worker does not know it", version="unknown", knobs=[], ops=[])
    return description.impls.get(point.impl, missing)


def wanted(row: Row | None, info: ImplInfo, resume: bool, retry: Iterable[str], counters: bool = False) -> bool:
    """Whether a point with this newest row is measured (again), as it is where `counters` were never asked of it."""
    if retry:
        return row is not None and row.status in retry
    if not resume or row is None:
        return True
    if counters and row.status == "ok" and row.counters.status == "off":
        return True
    if row.status == "unavailable" and not info.available:
        return row.reason != info.reason
    return row.status not in FINAL


def refusal(info: ImplInfo) -> Outcome | None:
    """The outcome of every point of an implementation that is not available here: no child is needed to know it."""
    return None if info.available else Outcome(status="unavailable", reason=info.reason)


class Memory:
    """Remembers what ran out of memory, to spare larger T of the same layer."""

    def __init__(self, rows: Iterable[Row], versions: dict[str, str]) -> None:
        self._least: dict[str, int] = {}
        for row in rows:
            if row.status == "oom" and row.impl_version == versions.get(row.impl):
                self.add(row)

    @staticmethod
    def _layer(point: Point) -> str:
        """All that decides a point's memory but T; a row's family is what ran, so it is left out."""
        shape = point.shape
        knobs = point.knobs.model_dump_json(exclude={"family"})
        return f"{point.impl} {point.op} {point.mode} {point.dtype} {shape.d} {shape.n} {shape.E} {shape.K} {knobs}"

    def add(self, point: Point) -> None:
        """Notes that this point ran out of memory."""
        layer = self._layer(point)
        self._least[layer] = min(point.shape.T, self._least.get(layer, point.shape.T))

    def skips(self, point: Point) -> Outcome | None:
        """`skipped_oom` for a point larger than one that ran out."""
        least = self._least.get(self._layer(point))
        if least is None or point.shape.T <= least:
            return None
        return Outcome(status="skipped_oom", reason=f"T={least} of the same layer ran out of memory")


def ensure_files(results: Path, sweep: str, description: Description) -> None:
    """RecordError unless the files of rows and environments can be read and appended to."""
    record.ensure_appendable(record.rows_path(results, sweep, description.device.gpu))
    record.ensure_appendable(env.env_path(results, description.device.gpu))


def make_row(point: Point, outcome: Outcome, key: str, info: ImplInfo, run_id: str, where: env.Env) -> Row:
    """The row of a measured point: its knobs say which family ran."""
    tree = point.model_dump()
    if outcome.family is not None:
        tree["knobs"]["family"] = outcome.family
    return Row.model_validate(
        {
            **tree,
            **outcome.model_dump(exclude={"family"}),
            "schema": record.SCHEMA,
            "key": key,
            "run_id": run_id,
            "impl_version": info.version,
            "gpu": where.gpu,
            "env_id": where.env_id,
            "commit": where.commit,
            "time": record.now(),
        }
    )


def run_job(cfg: Any) -> None:
    """A Hydra job: the chunk `job.chunk` of the plan file `job.plan`."""
    plan = Plan.model_validate_json(Path(cfg.job.plan).read_text())
    run_chunk(plan, int(cfg.job.chunk))


def run_chunk(plan: Plan, chunk: int) -> None:
    """Measures what a chunk has to measure. RecordError when rows cannot be written, WorkerFault without any child."""
    results = Path(plan.results)
    cards = config.visible_gpus()
    chosen = cards[chunk % len(cards)][0] if plan.spread and cards else None
    turns = Turns(pool.device_lock(chosen or (cards[0][0] if cards else "cpu")))
    command, environment = pool.worker_command(), pool.worker_environment(interpreted(), chosen)
    if plan.description is not None:
        description = Description.model_validate(plan.description)
    else:
        description = pool.describe(command, environment)
    where = env.collect(description.model_dump(), results)
    path = record.rows_path(results, plan.sweep, description.device.gpu)
    ensure_files(results, plan.sweep, description)

    points = [plan.points[index] for index in plan.chunks[chunk]]
    keys = keys_of(points, description)
    rows, faults = record.read_rows(path)
    held = record.newest(rows)
    todo = [
        (key, point, info)
        for key, point, info in zip(keys, points, (info_of(point, description) for point in points), strict=True)
        if wanted(held.get(key), info, plan.resume, plan.retry, plan.settings.counters)
    ]
    report = Report(
        keys=keys, todo=[key for key, *_ in todo], rows=str(path), env=where, faults=[str(fault) for fault in faults]
    )
    _write_whole(plan.report_path(chunk), report.model_dump_json())
    if not todo:
        return
    env.record(where, env.env_path(results, description.device.gpu))

    fresh = not plan.resume or {"oom", "skipped_oom"} & set(plan.retry)
    versions = {name: info.version for name, info in description.impls.items()}
    memory = Memory(() if fresh else held.values(), versions)
    with pool.Pool(command, environment, Path(plan.folder) / "logs") as children:
        children.start({point.impl: None for _, point, info in todo if info.available})
        for key, point, info in todo:
            if plan.stop.exists():
                return
            outcome = refusal(info) or memory.skips(point)
            if outcome is None:
                outcome = _measured(children, turns, point, plan)
            if outcome.status == "oom":
                memory.add(point)
            record.append_row(path, make_row(point, outcome, key, info, plan.run_id, where))
            if plan.fail_fast and outcome.status not in EXPECTED:
                plan.stop.touch()


class Turns:
    """A context manager that holds the device for one point; says once that it is shared."""

    def __init__(self, lock: pool.FileLock) -> None:
        self._lock = lock
        self._told = False

    def __enter__(self) -> None:
        pool.acquire(self._lock, self._tell)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _tell(self) -> None:
        if not self._told:
            log.warning("waiting: another sweep is measuring on this device; both go on in turns, point by point")
        self._told = True


def _measured(children: pool.Pool, turns: Turns, point: Point, plan: Plan) -> Outcome:
    with turns:
        more = counters.LIMIT_S if plan.settings.counters else 0.0  # a slow ncu must not cost the point its times
        return children.measure(point, plan.settings, plan.timeout_s + more)


def _write_whole(path: Path, text: str) -> None:
    """Readers see all of the text or no file."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
