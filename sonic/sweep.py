"""`python -m sonic.sweep`: measures an experiment, point by point, and says what came out.

  python -m sonic.sweep                               the default for this machine: smoke on a CPU, quick on a GPU
  python -m sonic.sweep sweeps=granularity shape=7b   an experiment, with any field overridden
  python -m sonic.sweep sweeps=custom shape=7b_n256 shape.G=3,6 shape.rho=1/16 impl=sonic,scattermoe tile.m=64,128

Exit codes: 0 every point ended as expected; 1 a point is wrong, failed, crashed, timed out or missing; 2 the command
line is at fault and nothing ran; 130 and 143 after SIGINT and SIGTERM, with the rows so far kept.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Self, get_args

from hydra import compose
from hydra._internal.callbacks import Callbacks
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sonic import config, derive, jobs, pool, record
from sonic.config import CommandError, Sweep
from sonic.jobs import Plan, Report
from sonic.pool import Description, WorkerFault
from sonic.record import EXPECTED, Point, RecordError, Row, Status
from sonic.tracking import Tracker

#: Seconds between looks at the rows files.
LOOK_S = 0.3
#: Seconds that drawing the closing figure may take.
FIGURE_S = 180.0
#: Width of tables where no terminal says its own.
PLAIN_WIDTH = 220
#: Model FLOPs of a point beyond which Triton's interpreter needs hours: about 100 times those of shape=tiny.
MOST_INTERPRETED = 200_000_000
FOR_GPU = "warning: these shapes are for a GPU: Triton's interpreter needs hours; shape=tiny fits"
#: What Triton adds to its texts about resources, longer than what there is to know.
ADVICE = " Reducing block sizes or `num_stages` may help."


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. No `Exception`, so that no layer between takes it for a failed job."""


class Signals:
    """SIGINT and SIGTERM become `Interrupted`, once: later ones, and any that come while closing, only set the code."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._raising = True
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # one more signal must not cut the process off on its last steps
            signal.signal(number, handler if self.received is None else signal.SIG_IGN)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            if self._raising:
                raise Interrupted

    def hold(self) -> None:
        """From now on nothing is raised: what is left is short and must be finished."""
        self._raising = False


class Output(Console):
    """A console that falls silent when its reader leaves (`| head`), instead of ending the sweep."""

    def on_broken_pipe(self) -> None:
        """Sends what is still to be printed nowhere."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Screen:
    """Where lines go: a terminal with a progress bar, or plain text without a control code."""

    def __init__(self) -> None:
        terminal = sys.stdout.isatty()
        self.console = (
            Output(highlight=False, markup=False, emoji=False)
            if terminal
            else Output(
                highlight=False,
                markup=False,
                emoji=False,
                force_terminal=False,
                force_interactive=False,
                color_system=None,
                width=PLAIN_WIDTH,
            )
        )
        self._bar: Progress | None = None
        if terminal:
            # redrawn when a point ends: a timer would disturb what is being measured
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self.console,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("measuring", total=None)

    def begin(self, done: int, total: int) -> None:
        """Shows the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            self._bar.start()
            self._bar.refresh()

    def advance(self) -> None:
        """One more point has ended."""
        if self._bar is not None:
            self._bar.advance(self._task)
            self._bar.refresh()

    def end(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line, not wrapped."""
        self.console.print(text, soft_wrap=True)


@dataclass
class Follower:
    """Follows the rows of a run in a thread of its own: prints each, mirrors it to wandb.

    Knows the jobs by their reports and the rows by `run_id`, so that every launcher looks the same.
    """

    plan: Plan
    sweep: Sweep
    screen: Screen
    reports: dict[int, Report] = field(default_factory=dict)
    fresh: dict[str, Row] = field(default_factory=dict)
    tracker: Tracker | None = None
    leaves: list[str] = field(default_factory=list)
    _offsets: dict[Path, int] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Notes where the rows files end now, and begins."""
        folder = Path(self.plan.results) / self.plan.sweep
        self._offsets = {path: path.stat().st_size for path in folder.glob("*.jsonl")}
        self.leaves = varying(self.plan.points)
        self._thread = threading.Thread(target=self._follow, name="rows", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Takes in what was written last, and ends."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        while not self._done.wait(LOOK_S):
            self._look()
        self._look()

    def _look(self) -> None:
        for chunk in range(len(self.plan.chunks)):
            if chunk not in self.reports and (path := self.plan.report_path(chunk)).exists():
                self.reports[chunk] = Report.model_validate_json(path.read_text())
                if len(self.reports) == 1:
                    self._first(self.reports[chunk])
        for path in {Path(report.rows) for report in self.reports.values()}:
            for row in self._new_rows(path):
                self._take(row)

    def _first(self, report: Report) -> None:
        known = len(report.keys) - len(report.todo)
        self.screen.begin(known, len(self.plan.points))
        if report.todo or self.sweep.control.wandb.mode == "online":
            wandb = self.sweep.control.wandb
            self.tracker = Tracker(
                wandb.mode,
                wandb.project,
                wandb.entity,
                self.plan.run_id,
                self.plan.sweep,
                report.env,
                self.sweep.state,
                say=self.screen.say,
            )

    def _new_rows(self, path: Path) -> list[Row]:
        """Whole lines behind the last offset that are rows of this run."""
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        rows = []
        for line in whole.splitlines():
            if self.plan.run_id.encode() in line:
                rows.append(Row.model_validate_json(line))
        return [row for row in rows if row.run_id == self.plan.run_id]

    def _take(self, row: Row) -> None:
        self.fresh[row.key] = row
        width = len(str(len(self.plan.points)))
        done = sum(len(report.keys) - len(report.todo) for report in self.reports.values()) + len(self.fresh)
        self.screen.say(f"[{done:>{width}}/{len(self.plan.points)}] {line_of(row, self.leaves)}")
        self.screen.advance()
        if self.tracker is not None:
            self.tracker.log(row)

    def closing_rows(self) -> list[Row]:
        """The newest row of every point of the plan, earlier runs' rows too, in the order of the plan."""
        rows: dict[str, Row] = {}
        for path in {Path(report.rows) for report in self.reports.values()}:
            rows |= record.newest(record.read_rows(path)[0])
        keys = [key for chunk in sorted(self.reports) for key in self.reports[chunk].keys]
        return [rows[key] for key in dict.fromkeys(keys) if key in rows]


def sizes(point: Point) -> str:
    """`T=48 d=64 n=16 E=4 K=2`."""
    return " ".join(f"{name}={value}" for name, value in point.shape.model_dump().items())


def varying(points: Sequence[Point]) -> list[str]:
    """Leaves, beyond those that every line shows, in which the points differ or ask for something of their own."""
    shown = ("impl", "op", "mode", "shape.")
    leaves = [leaf for leaf in config.leaves() if not leaf.startswith(shown)]
    asked = [leaf for leaf in leaves if leaf.startswith("tile.") and any(value_of(p, leaf) is not None for p in points)]
    return [leaf for leaf in leaves if leaf in asked or len({value_of(point, leaf) for point in points}) > 1]


def value_of(point: Point, leaf: str) -> Any:
    """The value of a dotted field."""
    value: Any = point
    for name in leaf.split("."):
        value = getattr(value, name)
    return value


def settings_of(point: Point, leaves: Sequence[str]) -> str:
    """`tile.m=16 dtype=fp32`: the set ones of the given fields."""
    pairs = [(leaf, value_of(point, leaf)) for leaf in leaves]
    return " ".join(f"{leaf}={value}" for leaf, value in pairs if value is not None)


def milliseconds(us: float | None) -> str:
    """Four significant digits, or nothing."""
    return "" if us is None else f"{us / 1000:.4g}"


def line_of(row: Row, leaves: Sequence[str]) -> str:
    """One finished point in one line; `leaves` are the fields that tell it from others."""
    parts = [f"{row.impl:<16} {row.op} {row.mode}  {sizes(row)}", settings_of(row, leaves), row.status]
    if row.status == "ok":
        speed, moved = derive.tflops(row), derive.gbps(row)
        parts.append(f"{milliseconds(derive.median_us(row))} ms")
        parts.append(f"{speed:.4g} TFLOP/s" if speed else "" if moved is None else f"{moved:.4g} GB/s")
    elif row.reason:
        parts.append(short(row.reason))
    return "  ".join(part for part in parts if part)


def short(text: str, length: int = 160) -> str:
    """The beginning and the end of a text on one line: what happened, and an exception's message, which comes last."""
    flat = " ".join(text.split()).removesuffix(ADVICE)
    head = length // 3
    return flat if len(flat) <= length else f"{flat[:head]} ... {flat[-(length - head) :]}"


def runs_here(sweep: Sweep) -> bool:
    """Whether the points are measured by this process's children, and not by jobs that may be anywhere."""
    return sweep.launch == [] or "cluster=local" in sweep.launch


def most_flops(sweep: Sweep) -> float:
    """Model FLOPs that a point of this run should not exceed: no limit where kernels are compiled."""
    return MOST_INTERPRETED if runs_here(sweep) and jobs.interpreted() else math.inf


def flops_of(point: Point) -> int:
    """Model FLOPs of the layer that the point belongs to."""
    return point.shape.sizes().flops(point.mode)


def new_run_id(sweep: str) -> str:
    """`20260131-120000-smoke-1a2b`: sorts by time and is unique."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{sweep}-{uuid.uuid4().hex[:4]}"


@dataclass(frozen=True)
class Merged:
    """Points after knobs that an implementation ignores went back to their defaults: sets of points that differ in the
    implementation only, and per implementation the swept names it ignored and how many points that saved."""

    sets: list[list[Point]]
    ignored: dict[str, set[str]]
    saved: Counter[str]

    @property
    def points(self) -> list[Point]:
        """All points, in order."""
        return [point for members in self.sets for point in members]

    def notes(self) -> list[str]:
        """A line for each set of names that implementations ignored, if that made points coincide."""
        together: dict[tuple[str, ...], list[str]] = {}
        for impl in self.saved:
            together.setdefault(tuple(sorted(self.ignored[impl])), []).append(impl)
        return [
            f"{', '.join(impls)} take{'s' if len(impls) == 1 else ''} no {', '.join(names)}: "
            f"{sum(self.saved[impl] for impl in impls)} points are the same as others and not measured again"
            for names, impls in together.items()
        ]


def merge_points(points: list[Point], description: Description) -> Merged:
    """Drops knobs that do not exist for a point's implementation, and the repeats that this makes."""
    sets: list[list[Point]] = []
    ignored: dict[str, set[str]] = {}
    saved: Counter[str] = Counter()
    seen: set[str] = set()
    for members in config.point_sets(points):
        kept = []
        for point in members:
            plain, dropped = record.effective(point, jobs.info_of(point, description).knobs)
            ignored.setdefault(point.impl, set()).update(dropped)
            if (text := plain.model_dump_json()) in seen:
                saved[point.impl] += 1
            else:
                seen.add(text)
                kept.append(plain)
        sets.append(kept)
    for impl, names in ignored.items():
        mine = [point for point in points if point.impl == impl]
        names.intersection_update({leaf for leaf in names if len({value_of(point, leaf) for point in mine}) > 1})
    return Merged(sets, ignored, saved)


def make_plan(
    sweep: Sweep, merged: Merged, description: Description, retry: list[str], run_id: str, here: bool
) -> Plan:
    """The plan of a run: this command's share of the points, cut into chunks. `here`: jobs run on this machine."""
    part, parts = sweep.share
    mine = [members for index, members in enumerate(merged.sets) if index % parts == part]
    points = [point for members in mine for point in members]
    size = sweep.control.cluster.chunk or max(1, len(mine))
    chunks: list[list[int]] = []
    first = 0
    for start in range(0, len(mine), size):
        count = sum(len(members) for members in mine[start : start + size])
        if count:
            chunks.append(list(range(first, first + count)))
        first += count
    return Plan(
        run_id=run_id,
        sweep=sweep.name,
        points=points,
        chunks=chunks,
        settings=sweep.control.measure.settings(),
        timeout_s=sweep.control.measure.timeout_s,
        results=str(sweep.results),
        folder=str(sweep.state / "runs" / run_id),
        resume=sweep.control.resume,
        fail_fast=sweep.control.fail_fast,
        retry=retry,
        spread=sweep.control.cluster.spread,
        description=description.model_dump() if here else None,
    )


def keep_retried(plan: Plan, description: Description) -> Plan:
    """The plan with only those points whose newest row has a status that is to be retried."""
    path = record.rows_path(Path(plan.results), plan.sweep, description.device.gpu)
    held = record.newest(record.read_rows(path)[0])
    keys = jobs.keys_of(plan.points, description)
    keep = [index for index, key in enumerate(keys) if (row := held.get(key)) is not None and row.status in plan.retry]
    place = {old: new for new, old in enumerate(keep)}
    chunks = [[place[index] for index in chunk if index in place] for chunk in plan.chunks]
    return plan.model_copy(
        update={"points": [plan.points[index] for index in keep], "chunks": [chunk for chunk in chunks if chunk]}
    )


def launch(sweep: Sweep, plan: Plan) -> list[str]:
    """Runs the plan's chunks as jobs of Hydra's launcher; what went wrong outside of points, one text per job."""
    folder = Path(plan.folder) / "hydra"
    common = ["sweeps=_none", *[line for line in sweep.launch if not line.startswith(("hydra.", "hydra/"))]]
    common.append(f"job.plan={config.quoted(plan.path)}")
    hydra_lines = [line for line in sweep.launch if line.startswith(("hydra.", "hydra/"))]
    hydra_lines += [config.search_path(), f"hydra.sweep.dir={config.quoted(folder)}"]
    with config.hydra_composer() as loader:
        cfg = compose("config", overrides=[*common, *hydra_lines], return_hydra_config=True)
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=jobs.run_job, config=cfg
        )
        try:
            done = launcher.launch([[*common, f"job.chunk={chunk}"] for chunk in range(len(plan.chunks))], 0)
        except Exception as error:  # a launcher's own failure, such as a broken pool; the rows tell what is missing
            return [f"{type(error).__name__}: {error}"]
    return [text for text in map(_failure, done) if text]


def _failure(job: JobReturn) -> str | None:
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # Hydra's own line, which says less
            job.return_value  # noqa: B018 - Hydra raises the job's exception here
    except (RecordError, WorkerFault) as error:
        return str(error)
    except Exception as error:
        return "".join(traceback.format_exception(error)).rstrip()
    return None


def columns_of(rows: Sequence[Row], leaves: Sequence[str]) -> list[tuple[str, bool, list[str]]]:
    """The closing table by columns: name, whether it holds numbers, one text per row.

    Times are medians; rates belong to the device time where there is one, else to the event time. GB/s, of modelled
    bytes, have a column where something does no FLOPs.
    """

    def texts(values: Iterable[Any], form: str = "") -> list[str]:
        return ["" if value is None else format(value, form) for value in values]

    on_device = any(row.device_us for row in rows)
    event = [milliseconds(derive.median_us(row, "event_us")) for row in rows]
    device = [milliseconds(derive.median_us(row, "device_us")) for row in rows]
    held = (None if row.held_bytes is None else row.held_bytes / 2**20 for row in rows)
    worst = (max(row.errors.values(), default=None) if row.errors else None for row in rows)
    moves = any(row.flops_model == 0 for row in rows)
    return [
        *((name, False, [str(getattr(row, name)) for row in rows]) for name in ("impl", "op", "mode")),
        *((name, True, [str(getattr(row.shape, name)) for row in rows]) for name in ("T", "d", "n", "E", "K")),
        *((leaf, False, texts(value_of(row, leaf) for row in rows)) for leaf in leaves),
        ("status", False, [row.status for row in rows]),
        ("event ms" if on_device else "ms", True, event),
        *([("device ms", True, device)] if on_device else []),
        ("TFLOP/s", True, texts((derive.tflops(row) for row in rows), ".4g")),
        *([("GB/s", True, texts((derive.gbps(row) for row in rows), ".4g"))] if moves else []),
        ("held MiB", True, texts(held, ".4g")),
        ("error", True, texts(worst, ".2g")),
        ("reason", False, [short(row.reason or "", 120) if row.status != "ok" else "" for row in rows]),
    ]


def print_table(console: Console, rows: Sequence[Row], leaves: Sequence[str]) -> None:
    """One line per point. Where a terminal is too narrow, what all points share moves above it, reasons below."""
    columns = columns_of(rows, leaves)
    if not console.is_terminal or _width(columns) <= console.width:
        console.print(_table(columns))
        return
    first = [name for name, _, _ in columns].index("status")
    same = {name: texts[0] for name, _, texts in columns[1:first] if len(set(texts)) == 1}
    console.print("all points: " + " ".join(f"{name}={text}" for name, text in same.items() if text), soft_wrap=True)
    columns = [column for column in columns[:-1] if column[0] not in same]
    before, console.width = console.width, max(console.width, _width(columns))
    console.print(_table(columns))
    console.width = before
    for impl, reason in dict.fromkeys((row.impl, row.reason) for row in rows if row.status != "ok" and row.reason):
        console.print(f"{impl}: {short(reason)}", soft_wrap=True)


def _width(columns: list[tuple[str, bool, list[str]]]) -> int:
    return sum(max(map(len, (name, *texts))) + 2 for name, _, texts in columns) + 2


def _table(columns: list[tuple[str, bool, list[str]]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, numbers, _ in columns:
        table.add_column(name, justify="right" if numbers else "left", no_wrap=name != "reason", overflow="fold")
    for line in zip(*(texts for _, _, texts in columns), strict=True):
        table.add_row(*line)
    return table


def counted(points: int) -> str:
    """`1 point`, `2 points`."""
    return f"{points} point" + ("" if points == 1 else "s")


def count_statuses(rows: Iterable[Row]) -> str:
    """`12 ok, 3 unavailable`."""
    counts = Counter(row.status for row in rows)
    return ", ".join(f"{counts[status]} {status}" for status in get_args(Status) if counts[status])


def draw(sweep: Sweep, gpu: str) -> tuple[list[Path], str | None]:
    """The figures of this sweep, drawn now from its rows, and why there are none."""
    if not (config.root() / "analysis").is_dir():
        return [], None
    folder = sweep.results / "figures"
    began = time.time() - 1
    command = [
        sys.executable,
        "-m",
        "analysis",
        "--for-sweep",
        sweep.name,
        "--gpu",
        gpu,
        "--results",
        str(sweep.results),
    ]
    process = subprocess.Popen(
        command, cwd=config.root(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=FIGURE_S)
    except subprocess.TimeoutExpired:
        return [], f"drawing took more than {FIGURE_S:g} s"
    finally:
        pool.kill_group(process)
    figures = sorted(path for path in folder.rglob("*.png") if path.stat().st_mtime >= began)
    if process.returncode != 0:
        last = output.decode(errors="replace").strip().splitlines()[-1:]
        return figures, f"python -m analysis ended with {process.returncode}: {' '.join(last)}"
    return figures, None


def exit_code(plan: Plan, rows: Sequence[Row], failures: Sequence[str], received: int | None) -> int:
    """See the module's text."""
    if received is not None:
        return 128 + received
    complete = len(rows) == len(plan.points) and all(row.status in EXPECTED for row in rows)
    return 0 if complete and not failures else 1


def measure(sweep: Sweep, merged: Merged, description: Description, retry: list[str], signals: Signals) -> int:
    """Runs the sweep and reports; returns the exit code."""
    screen = Screen()
    here = runs_here(sweep)
    if here:
        jobs.ensure_files(sweep.results, sweep.name, description)
    plan = make_plan(sweep, merged, description, retry, new_run_id(sweep.name), here)
    if retry:
        plan = keep_retried(plan, description)
        if not plan.points:
            screen.say(f"nothing to measure: no point of {sweep.name} has a row with status {' or '.join(retry)}")
            return 0
    plan.save()
    screen.say(
        f"{sweep.name}: {counted(len(plan.points))} on {description.device.name} ({description.device.gpu}), "
        f"run {plan.run_id}"
    )
    if max(map(flops_of, plan.points), default=0) > most_flops(sweep):
        screen.say(FOR_GPU)
    follower = Follower(plan, sweep, screen)
    follower.start()
    failures: list[str] = []
    with _logged(screen.say):
        try:
            failures = launch(sweep, plan)
            signals.hold()
        except Interrupted:
            plan.stop.touch()
        follower.stop()
    screen.end()
    return _close(sweep, plan, merged, follower, failures, signals)


def _close(sweep: Sweep, plan: Plan, merged: Merged, follower: Follower, failures: list[str], signals: Signals) -> int:
    """The table, the figure, the paths."""
    screen, rows, tracker = follower.screen, follower.closing_rows(), follower.tracker
    if rows:
        print_table(screen.console, rows, follower.leaves)
    for note in merged.notes():
        screen.say(note)
    for line in dict.fromkeys(line for report in follower.reports.values() for line in report.faults):
        screen.say(f"skipped a line that is no row: {line}")
    for failure in failures:
        screen.say(f"a job failed: {failure}")
    missing = len(plan.points) - len(rows)
    counts = count_statuses(rows) or "no rows"
    screen.say(f"{counted(len(plan.points))}: {counts}" + (f", {missing} without a row" if missing else ""))
    fault = next((row for row in follower.fresh.values() if row.status not in EXPECTED), None)
    if plan.fail_fast and missing and fault is not None and signals.received is None:
        screen.say(f"fail_fast=true stopped the sweep here: {line_of(fault, follower.leaves)}")
    if follower.fresh:
        screen.say(f"measured now: {len(follower.fresh)}; rows of earlier runs: {len(rows) - len(follower.fresh)}")
    elif signals.received is None and not missing:
        screen.say("nothing to measure: every point has a row already (resume=false measures again)")

    figures: list[Path] = []
    if follower.fresh and signals.received is None and any(row.status == "ok" for row in rows):
        figures, why = draw(sweep, rows[0].gpu)
        if why:
            screen.say(f"warning: no figure ({why})")
    code = exit_code(plan, rows, failures, signals.received)
    if tracker is not None:
        tracker.finish(rows, figures, code)
    for path in sorted({report.rows for report in follower.reports.values()}):
        screen.say(f"rows    {path}")
    for path in figures:
        screen.say(f"figure  {path}")
    for impl, place in (tracker.places if tracker is not None else {}).items():
        screen.say(f"wandb   {impl}: {place}")
    if signals.received is not None:
        name = signal.Signals(signals.received).name
        screen.say(f"interrupted by {name}; rows are kept, the same command goes on from here")
    return code


class _logged:
    """While it lasts, what jobs log in this process is said on the screen."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda entry: say(entry.getMessage())  # type: ignore[method-assign]

    def __enter__(self) -> None:
        jobs.log.addHandler(self._handler)

    def __exit__(self, *_: object) -> None:
        jobs.log.removeHandler(self._handler)


def list_experiments(screen: Screen, overrides: list[str]) -> None:
    """One line per experiment, or for the one of `sweeps=`: name, points under these overrides, what it shows."""
    if any(line.startswith("sweeps=") for line in overrides):
        sweeps = [config.load(overrides)]
    else:
        sweeps = [config.load([f"sweeps={name}", *overrides]) for name in config.experiments()]
    width = max(len(sweep.name) for sweep in sweeps)
    for sweep in sweeps:
        screen.say(f"{sweep.name:<{width}}  {len(sweep.points):>4} points  {sweep.control.about}")
    screen.say(
        "(implementations share the points that differ only in knobs they do not take, so fewer may be measured)"
    )


def seconds_per_point(rows: Iterable[Row]) -> dict[str, float]:
    """Median seconds between a row and the one before it in the same run, for each implementation."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row.run_id, []).append(row)
    gaps: dict[str, list[float]] = {}
    for members in runs.values():
        members.sort(key=lambda row: row.time)
        for before, row in itertools.pairwise(members):
            passed = datetime.fromisoformat(row.time) - datetime.fromisoformat(before.time)
            gaps.setdefault(row.impl, []).append(passed.total_seconds())
    return {impl: median(times) for impl, times in gaps.items()}


def dry_run(sweep: Sweep, merged: Merged, description: Description, retry: list[str]) -> None:
    """Prints the points of a run, which of them have a row, and how long the others may take."""
    screen = Screen()
    plan = make_plan(sweep, merged, description, retry, "dry-run", here=True)
    rows, faults = record.read_rows(record.rows_path(sweep.results, sweep.name, description.device.gpu))
    held = record.newest(rows)
    known = seconds_per_point(rows)
    usual, limit = sweep.control.measure.estimate_s, sweep.control.measure.timeout_s
    leaves = [leaf for leaf in varying(plan.points) if leaf not in ("dtype", "routing.distribution")]
    total = 0.0
    count = 0
    large = False
    most = most_flops(sweep)
    for key, point in zip(jobs.keys_of(plan.points, description), plan.points, strict=True):
        row = held.get(key)
        info = jobs.info_of(point, description)
        mine = jobs.wanted(row, info, plan.resume, retry, plan.settings.counters)
        seconds = known.get(point.impl, usual) if info.available else 0.0
        if mine and info.available and flops_of(point) > most:
            seconds, large = limit, True
        state = f"about {seconds:.1f} s" if mine else f"has a row ({row.status})" if row else "left out by --retry"
        total += seconds if mine else 0.0
        count += mine
        kind = f"{point.op} {point.mode} {point.dtype} {point.routing.distribution}"
        screen.say(
            "  ".join(filter(None, [f"{point.impl:<16} {kind}  {sizes(point)}", settings_of(point, leaves), state]))
        )
    for note in merged.notes():
        screen.say(note)
    for fault in faults:
        screen.say(f"skipped a line that is no row: {fault}")
    source = "the times of earlier rows" if known else f"measure.estimate_s={usual:g}"
    if large:
        screen.say(FOR_GPU)
        source += f" and measure.timeout_s={limit:g}"
    screen.say(
        f"{counted(len(plan.points))}, {count} to measure: about {duration(total)} by {source}, "
        "without the start of the children"
    )


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `2 h 5 min`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Our own flags, and the overrides that Hydra's grammar reads. Exits with 2 on an unknown flag."""
    parser = argparse.ArgumentParser(
        prog="python -m sonic.sweep",
        description=(__doc__ or "").replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog=f"experiments: {', '.join(config.experiments())}\nkeys: {', '.join(config.allowed_keys())}",
    )
    parser.add_argument("--list", action="store_true", help="the experiments, with one line and a point count each")
    parser.add_argument(
        "--dry-run", action="store_true", help="the points and how long they may take; measures nothing"
    )
    parser.add_argument("--retry", metavar="STATUS,...", help="measure only points whose newest row has one of these")
    parser.add_argument("--cfg", action="store_true", help="the composed config without its axes; measures nothing")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="in Hydra's grammar; comma lists sweep")
    return parser.parse_intermixed_args(arguments)


def retried(text: str | None) -> list[str]:
    """The statuses of `--retry`. CommandError for a word that is none."""
    if text is None:
        return []
    names = get_args(Status)
    chosen = [part.strip() for part in text.split(",")]
    for name in chosen:
        if name not in names:
            raise CommandError(f"--retry is {name!r}; allowed: {', '.join(names)}{config.close_match(name, names)}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    with Signals() as signals:
        try:
            if options.list:
                list_experiments(Screen(), options.overrides)
                return 0
            if options.cfg:
                print(OmegaConf.to_yaml(config.compose_config(options.overrides)), end="")
                return 0
            retry = retried(options.retry)
            sweep = config.load(options.overrides)
            if not options.dry_run:
                record.ensure_writable(sweep.results)
            description = pool.describe(pool.worker_command(), pool.worker_environment(jobs.interpreted()))
            merged = merge_points(sweep.points, description)
            if options.dry_run:
                dry_run(sweep, merged, description, retry)
                return 0
            return measure(sweep, merged, description, retry, signals)
        except (CommandError, RecordError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except WorkerFault as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except Interrupted:
            return 128 + (signals.received or signal.SIGINT)


if __name__ == "__main__":
    # as a module of its own name, so that launchers can pickle what belongs to it
    from sonic.sweep import main as run

    sys.exit(run())
