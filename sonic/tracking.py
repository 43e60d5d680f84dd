"""wandb mirrors rows, live: one run per (sweep run, implementation), one step per row. The rows file is the truth.

This is the only module that knows wandb, and imports it when the first row comes. Whatever goes wrong in it becomes one
line of warning and never reaches the sweep.

A run's sections: `by_<axis>/<op>_<mode>_<metric>` charts a metric over an axis (`define_metric`); the plain names hold
everything else. Its config names the environment and versions, its group is the sweep run's id. Offline runs are looked
at with `wandb leet`, or sent later with `wandb sync`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any, Literal

from sonic import derive
from sonic.env import Env
from sonic.record import Row

Mode = Literal["offline", "online", "off"]

#: What charts run over. A tile axis is logged only where the point asked for that size.
AXES = ("G", "rho", "E", "K", "n", "T", "d", "tile_m", "tile_n", "tile_k", "tile_stages")
#: The metrics that get one chart per axis.
CHARTED = ("tflops", "ms", "gbps", "held_gib", "peak_gib")
#: Columns of the closing table.
COLUMNS = (
    *("op", "mode", "dtype", "status", *AXES, "tflops", "ms", "event_ms", "gbps", "bytes_model"),
    *("held_gib", "peak_gib", "error_max", "sm_mhz", "throttled", "reason", "note", "key", "env_id", "time"),
)
#: Seconds that the wandb server gets to accept the key before everything is logged offline instead.
LOGIN_TIMEOUT_S = 8
#: Seconds that it gets, once logged in, to begin a run.
INIT_TIMEOUT_S = 8
#: Seconds that unsent data of one run may take at its end; what is left stays on disk for `wandb sync`.
FINISH_TIMEOUT_S = 60


class Tracker:
    """Mirrors rows of one sweep run into wandb; a context manager. No method raises.

    `mode` off does nothing and imports nothing. wandb keeps its runs in `directory` when that is called `wandb`, else
    in `directory/wandb`. `say` prints one line, to stderr by default.
    """

    def __init__(
        self,
        mode: Mode,
        project: str,
        entity: str | None,
        run_id: str,
        sweep: str,
        env: Env,
        directory: Path,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.asked: Mode = mode
        self.mode: Mode = mode
        self.project = project
        self.entity = entity
        self.run_id = run_id
        self.sweep = sweep
        self.env = env
        self.root = (directory.parent if directory.name == "wandb" else directory).resolve()
        #: Where each implementation's run is: a folder, or the address of an online run.
        self.places: dict[str, str] = {}
        self._say = say or (lambda text: print(text, file=sys.stderr))
        self._runs: dict[str, Any] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._logged: set[tuple[str, str]] = set()
        self._lock = RLock()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(exit_code=0 if kind is None else 1)

    def log(self, row: Row) -> None:
        """One step of the implementation's run, which the first row opens. A row is logged once."""
        self._guarded(lambda: self._log(row))

    def finish(self, rows: Sequence[Row], figures: Sequence[Path], exit_code: int = 0) -> None:
        """Logs what is missing of `rows`, a table of each implementation's rows and the PNG figures; ends the runs.

        With an `exit_code` of the sweep other than 0, wandb shows them as failed.
        """

        def closing() -> None:
            images = [path for path in figures if path.suffix.lower() == ".png" and path.is_file()]
            for row in rows:
                self._log(row)
            for impl, run in self._runs.items():
                mine = [row for row in rows if row.impl == impl]
                if mine or images:
                    self._log_closing(run, mine, images)

        self._guarded(closing)
        self._close(exit_code)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Does nothing when off; an exception becomes one warning and switches the mirror off."""
        with self._lock:
            if self.mode == "off":
                return
            try:
                action()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.mode = "off"
        text = " ".join(str(error).split()) or type(error).__name__
        kind = type(error).__name__
        self._say(f"wandb: stopped logging, the rows file is complete without it ({kind}: {text[:200]})")

    def _log(self, row: Row) -> None:
        if (row.key, row.time) in self._logged:
            return
        run = self._runs.get(row.impl) or self._open(row)
        run.log(history(row))
        self._logged.add((row.key, row.time))
        counts = self._counts.setdefault(row.impl, {})
        counts[row.status] = counts.get(row.status, 0) + 1

    def _log_closing(self, run: Any, rows: Sequence[Row], images: Sequence[Path]) -> None:
        import wandb

        lines = [{**history(row), "reason": row.reason, "note": row.note} for row in rows]
        table = wandb.Table(columns=list(COLUMNS), data=[[line.get(name) for name in COLUMNS] for line in lines])
        run.log({"points": table, **{f"figures/{path.stem}": wandb.Image(str(path)) for path in images}})

    def _close(self, exit_code: int) -> None:
        with self._lock:
            for impl, run in self._runs.items():
                try:
                    run.summary.update({f"points_{status}": n for status, n in self._counts.get(impl, {}).items()})
                    run.finish(exit_code=exit_code)
                except Exception as error:
                    self._give_up(error)
            self._runs.clear()

    def _open(self, row: Row) -> Any:
        """A new run for the row's implementation; online falls back to offline, for all later runs too."""
        if self.mode == "online":
            try:
                if not self._runs:
                    self._reach_server()
                run = self._init(row, "online")
            except Exception as error:
                self.mode = "offline"
                text = " ".join(str(error).split())
                self._say(f"wandb: not online, logging offline instead; `wandb sync` can send it later ({text[:200]})")
        if self.mode == "offline":
            run = self._init(row, "offline")
        self._runs[row.impl] = run
        self.places[row.impl] = run.url if self.mode == "online" else str(Path(run.dir).parent)
        for axis in AXES:
            run.define_metric(axis, hidden=True)
            run.define_metric(f"by_{axis}/*", step_metric=axis)
        return run

    def _reach_server(self) -> None:
        """Raises unless there is a key and the server accepts it in time, before any run is begun there."""
        import wandb

        # The settings read the variable below too, for every later request: they must be made before it is set.
        wandb.setup(wandb.Settings(silent=True))
        before = os.environ.get("WANDB_HTTP_TIMEOUT")
        os.environ["WANDB_HTTP_TIMEOUT"] = str(LOGIN_TIMEOUT_S)
        self._say(f"wandb: logging in, for {LOGIN_TIMEOUT_S} s at most")
        try:
            # Where there is a terminal, wandb would ask for a missing key and wait for the answer.
            if not wandb.login(prompt=False, verify=True):
                raise RuntimeError("no API key; `wandb login` stores one")
        finally:
            if before is None:
                del os.environ["WANDB_HTTP_TIMEOUT"]
            else:
                os.environ["WANDB_HTTP_TIMEOUT"] = before

    def _init(self, row: Row, mode: Literal["offline", "online"]) -> Any:
        import wandb

        self.root.mkdir(parents=True, exist_ok=True)
        # wandb keeps the id of a run that failed to begin online, so the one that stands in for it needs another.
        fallback = "-offline" if mode != self.asked else ""
        # Tables and images are staged in a data folder, which would otherwise be made in the user's home.
        os.environ.setdefault("WANDB_DATA_DIR", str(self.root / "wandb" / "data"))
        os.environ.setdefault("WANDB_CACHE_DIR", str(self.root / "wandb" / "cache"))
        settings = wandb.Settings(
            console="off",
            silent=True,
            x_disable_stats=True,
            use_dot_wandb=False,
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        )
        return wandb.init(
            mode=mode,
            project=self.project,
            entity=self.entity,
            dir=str(self.root),
            group=self.run_id,
            job_type=self.sweep,
            name=row.impl,
            id=f"{self.run_id}-{row.impl}{fallback}",
            config={
                "run_id": self.run_id,
                "sweep": self.sweep,
                "impl": row.impl,
                "impl_version": row.impl_version,
                "gpu": row.gpu,
                "method": row.method.model_dump() if row.method else None,
                "env": self.env.model_dump(),
            },
            reinit="create_new",
            settings=settings,
        )


def history(row: Row) -> dict[str, Any]:
    """What one row logs, flat: identity, axes, metrics in the units of their names; what the row lacks is left out."""
    shape = row.shape.sizes()
    tile = row.tile
    axes = {
        **{"G": shape.G, "rho": shape.rho, "E": shape.E, "K": shape.K, "n": shape.n, "T": shape.T, "d": shape.d},
        **{"tile_m": tile.m, "tile_n": tile.n, "tile_k": tile.k, "tile_stages": tile.stages},
    }
    metrics = {
        "tflops": derive.tflops(row),
        "ms": _ms(derive.median_us(row)),
        "gbps": derive.gbps(row),
        "held_gib": derive.gib(row.held_bytes),
        "peak_gib": derive.gib(derive.peak_bytes(row)),
    }
    worst = derive.worst_error(row)
    clocks = row.clocks
    flat = {
        **{name: getattr(row, name) for name in ("op", "mode", "dtype", "status", "key", "env_id", "time", "seed")},
        **{"family": row.knobs.family, "distribution": row.routing.distribution, "method": row.routing.method},
        **axes,
        **metrics,
        "ms_from": derive.clock(row),
        "event_ms": _ms(derive.median_us(row, "event_us")),
        "device_ms": _ms(derive.median_us(row, "device_us")),
        "span_ms": _ms(derive.median_us(row, "span_us")),
        "graph_ms": _ms(derive.median_us(row, "graph_us")),
        "launches": row.launches,
        "flops_model": row.flops_model,
        "bytes_model": row.bytes_model,
        "peak_fwd_gib": derive.gib(row.peak_fwd_bytes),
        "peak_bwd_gib": derive.gib(row.peak_bwd_bytes),
        "compile_s": row.compile_s,
        "tune_s": row.tune_s,
        "error_max": worst[1] if worst else None,
        **{f"error/{name.replace('.', '_')}": ratio for name, ratio in (row.errors or {}).items()},
        **({name: getattr(clocks, name) for name in ("sm_mhz", "mem_mhz", "power_w", "temp_c")} if clocks else {}),
        "throttled": None if row.throttled is None else int(row.throttled),
    }
    for axis in AXES:
        if axes[axis] is not None:
            flat |= {f"by_{axis}/{row.op}_{row.mode}_{name}": metrics[name] for name in CHARTED}
    return {name: value for name, value in flat.items() if value is not None}


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1000
