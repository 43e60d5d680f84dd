"""From rows files to one tidy table: the newest row of every point, with the numbers that are derived, never stored.

Columns (besides the row's own scalar fields, whose nested names are flattened: `router`, `distribution`, `family`,
`tile_m` ...): G, rho; `clock`, the time that was used, and `ms`, `ms_p20`, `ms_p80` of it; `event_ms`, `device_ms`,
`span_ms`, `graph_ms`, `enqueue_us` (medians, NaN where not measured); `tflops` (1e12/s, model FLOPs), `gbps` (1e9/s,
modelled bytes); `held_gib`, `peak_fwd_gib`, `peak_bwd_gib`, `peak_gib`; `worst_error`, `worst_error_name`; `padding`
(padded over model FLOPs, less 1); `interpreter`; `derived` (True only for what `with_backward` adds); `samples_ms` and
`kernels` keep the lists. `rows` adds `card`, a hash of the card's UUID, None where no environment tells it, and
`sonic_ms`, what `sonic` took for the same work on that very card.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from sonic import derive
from sonic.env import Env
from sonic.record import Fault, Knobs, Row, newest, read_lines, read_rows

RESULTS = Path(__file__).resolve().parents[1] / "results"
CPU = "cpu"

Clock = Literal["auto", "event", "device", "span", "graph"]
CLOCKS: tuple[Clock, ...] = ("auto", "event", "device", "span", "graph")

#: What makes two rows the same series of measurements, apart from the shape, the mode and the seeds.
VARIANT = (
    "op", "dtype", "router", "distribution", "alpha", "router_tile",
    "family", "gather", "activation", "ds", "cache", "aggregate", "schedule", "order", "index",
    "tile_m", "tile_n", "tile_k", "tile_stages", "tile_warps", "tile_kernel",
)  # fmt: skip
SHAPE = ("T", "d", "n", "E", "K")
SEEDS = ("seed", "routing_seed")
#: What two implementations share when they are given the same work.
WORK = ("sweep", "op", "mode", "dtype", "router", "distribution", "alpha", "router_tile", *SHAPE, *SEEDS)
#: What the others are compared with, and its families: the first that was measured stands for it.
OURS = "sonic"
FAMILIES = ("hopper", "triton", "torch")
#: What makes two rows the same point on the same card.
POINT = ("sweep", "gpu", "impl", "mode", *SHAPE, *VARIANT, *SEEDS)


class SelectionError(ValueError):
    """The rows do not answer the question asked: none left, or of several GPUs, methods or clocks."""


class NothingLeft(SelectionError):
    """A selection without rows."""


def sweeps(results: Path = RESULTS) -> list[str]:
    """Names of the sweeps that have a rows file in `results`."""
    return sorted({path.parent.name for path in results.glob("*/*.jsonl")})


def rows(
    results: Path = RESULTS,
    sweep: str | Sequence[str] | None = None,
    gpu: str | None = None,
    method: int | None = None,
    clock: Clock = "auto",
) -> tuple[pd.DataFrame, list[Fault]]:
    """The table of one sweep or several (or of all), of one GPU slug and method version where given, and the faulty
    lines.

    A line that is no row is left out and reported. `sonic.record.RecordError` when a file cannot be read at all.
    """
    good: list[Row] = []
    ours: list[Row] = []
    faults: list[Fault] = []
    names = ("*",) if sweep is None else (sweep,) if isinstance(sweep, str) else sweep
    for path in sorted(path for name in names for path in results.glob(f"{name}/*.jsonl")):
        found, bad = read_rows(path)
        # By key within a file only: two sweeps may hold the same point, and each keeps its own row.
        good += newest(found).values()
        ours += [row for row in found if row.impl == OURS and row.knobs == Knobs(family=row.knobs.family)]
        faults += bad
    if gpu is not None:
        good = [row for row in good if row.gpu == gpu]
    if method is not None:
        good = [row for row in good if row.method is None or row.method.version == method]
    table = tidy(good, clock)
    cards = environments(results, table.env_id).set_index("env_id").gpu_uuid.to_dict()
    table["card"] = table.env_id.map(cards).astype(object)
    every = _table(ours, table.clock.iloc[0] if len(table) else "event")
    every["card"] = every.env_id.map(cards).astype(object)
    return table.assign(sonic_ms=_on_the_same_card(table, every)), faults


def _on_the_same_card(table: pd.DataFrame, ours: pd.DataFrame) -> list[float]:
    """For every line the newest `ms` of `sonic` for the same work on the same card by the same method, NaN without.

    Rows of a sweep may be gathered on several cards, which differ by some percent: a ratio of two of them says little.
    """
    by = [*WORK, "gpu", "card", "method_version"]
    found = ours[ours.ms.notna() & ours.card.notna() & ours.tile_kernel.isna() & ours.tile_m.isna()]
    when = pd.to_datetime(found.time, utc=True, format="ISO8601")
    found = found.assign(_when=when, _family=found.family.map(FAMILIES.index))
    found = found.sort_values(["_family", "_when"], ascending=[True, False]).drop_duplicates(by)

    def works(lines: pd.DataFrame) -> list[tuple[object, ...]]:
        return [tuple(None if pd.isna(v) else v for v in line) for line in lines[by].itertuples(index=False, name=None)]

    known = dict(zip(works(found), found.ms, strict=True))
    return [known.get(work, np.nan) for work in works(table)]


def tidy(rows: Iterable[Row], clock: Clock = "auto") -> pd.DataFrame:
    """Rows as a table, one line per point: of several rows of a point (say, of two versions of its code) the newest.

    `clock`: which time becomes `ms`. `auto` is the wall clock on a CPU and on a GPU the device time, or the events when
    no GPU row has a device time; a GPU row without the chosen time keeps its status and gets no `ms`, so that times
    never mix.
    """
    if clock not in CLOCKS:
        raise SelectionError(f"unknown clock {clock!r}; there are {', '.join(CLOCKS)}")
    rows = list(rows)
    gpu_clock = clock
    if clock == "auto":
        gpu_clock = "device" if any(row.device_us for row in rows if row.gpu != CPU) else "event"
    return _newest_per_point(_table(rows, gpu_clock))


def _table(rows: Sequence[Row], gpu_clock: str) -> pd.DataFrame:
    records = [_record(row, "event" if row.gpu == CPU else gpu_clock) for row in rows]
    table = pd.DataFrame.from_records(records, columns=None if records else _COLUMNS)
    # A column that is null in every row has no type of its own.
    table[_NUMBERS] = table[_NUMBERS].apply(pd.to_numeric).astype(float)
    return table


def _record(row: Row, clock: str) -> dict[str, object]:
    sizes = row.shape.sizes()
    plain = (
        "sweep", "impl", "impl_version", "op", "mode", "dtype", "seed", "status", "reason", "note", "gpu", "env_id",
        "run_id", "key", "commit", "time",
    )  # fmt: skip
    record: dict[str, object] = {name: getattr(row, name) for name in plain}
    record |= {name: getattr(row.shape, name) for name in SHAPE} | {"G": sizes.G, "rho": sizes.rho}
    record["R"] = sizes.R if row.R is None else row.R
    routing = row.routing
    record |= {"router": routing.method, "distribution": routing.distribution, "alpha": routing.alpha}
    record |= {"router_tile": routing.tile, "routing_seed": routing.seed}
    record |= row.knobs.model_dump() | {f"tile_{name}": value for name, value in row.tile.model_dump().items()}
    record["interpreter"] = row.gpu == CPU and row.knobs.family in ("triton", "hopper")
    record["method_version"] = row.method.version if row.method else None
    record["samples"] = row.method.samples if row.method else None

    record["clock"] = clock
    record["samples_ms"] = [us / 1e3 for us in getattr(row, f"{clock}_us") or ()]
    for name in CLOCKS[1:]:
        us = derive.median_us(row, f"{name}_us")
        record[f"{name}_ms"] = np.nan if us is None else us / 1e3
    record["enqueue_us"] = float(np.median(row.enqueue_us)) if row.enqueue_us else np.nan
    record["launches"] = row.launches
    record |= {"flops": row.flops_model, "bytes": row.bytes_model, "held_bytes": row.held_bytes}
    counted = row.counters if row.counters.status == "ok" else None
    record["dram_bytes"] = counted.dram_read + counted.dram_write if counted else np.nan
    record["padding"] = row.flops_padded / row.flops_model - 1 if row.flops_padded and row.flops_model else np.nan
    sizes_of = {
        "held": row.held_bytes,
        "peak_fwd": row.peak_fwd_bytes,
        "peak_bwd": row.peak_bwd_bytes,
        "peak": derive.peak_bytes(row),
    }
    record |= {f"{name}_gib": np.nan if size is None else size / derive.GIB for name, size in sizes_of.items()}
    worst = derive.worst_error(row)
    record |= {"worst_error": worst[1] if worst else np.nan, "worst_error_name": worst[0] if worst else None}
    record |= {"compile_s": row.compile_s, "tune_s": row.tune_s, "tuned": row.tuned, "throttled": row.throttled}
    record["sm_mhz"] = row.clocks.sm_mhz if row.clocks else np.nan
    record["power_w"] = row.clocks.power_w if row.clocks else np.nan
    record |= {"kernels": [kernel.model_dump() for kernel in row.kernels or ()], "derived": False}
    return _rates(record)


def _rates(record: dict[str, object]) -> dict[str, object]:
    """Fills ms, its band and the rates from `samples_ms`, `flops` and `bytes`; NaN where nothing was measured."""
    samples = record["samples_ms"]
    p20, p50, p80 = np.percentile(samples, (20, 50, 80)) if samples else (np.nan,) * 3
    record |= {"ms": p50, "ms_p20": p20, "ms_p80": p80}
    for name, amount, per in (("tflops", record["flops"], 1e9), ("gbps", record["bytes"], 1e6)):
        record[name] = np.nan if amount is None or not p50 > 0 else amount / p50 / per
    return record


# An empty table still has the columns that selections ask for.
_COLUMNS = [
    *POINT, "status", "reason", "note", "impl_version", "env_id", "run_id", "key", "commit", "time", "G", "rho", "R",
    "clock", "samples_ms", "ms", "ms_p20", "ms_p80", "event_ms", "device_ms", "span_ms", "graph_ms", "enqueue_us",
    "launches", "flops", "bytes", "held_bytes", "dram_bytes", "tflops", "gbps", "held_gib", "peak_fwd_gib",
    "peak_bwd_gib", "peak_gib", "worst_error", "worst_error_name", "padding", "interpreter", "method_version",
    "samples", "compile_s", "tune_s", "tuned", "throttled", "sm_mhz", "power_w", "kernels", "derived",
]  # fmt: skip


_NUMBERS = [
    "alpha", "router_tile", "tile_m", "tile_n", "tile_k", "tile_stages", "tile_warps", "method_version", "samples",
    "launches", "flops", "bytes", "held_bytes", "dram_bytes", "R", "compile_s", "tune_s", "sm_mhz", "power_w",
]  # fmt: skip


def _newest_per_point(table: pd.DataFrame) -> pd.DataFrame:
    """The newest line of every point; a failure that never learnt its family (`auto`) yields to any newer line."""
    if table.empty:
        return table
    when = pd.to_datetime(table.time, utc=True, format="ISO8601")
    table = table.iloc[when.argsort(kind="stable")]
    table = table.drop_duplicates(list(POINT), keep="last")
    anywhere = [name for name in POINT if name != "family"]
    stale = (table.family == "auto") & table.duplicated(anywhere, keep="last")
    return table[~stale].reset_index(drop=True)


def gpus(table: pd.DataFrame) -> list[str]:
    """Slugs of the GPUs in the table, `cpu` among them."""
    return sorted(table.gpu.unique())


def choose_gpu(slugs: Iterable[str], asked: str | None = None) -> str:
    """The one GPU to draw: the one asked for, else the only one, else the only one that is not a CPU.

    SelectionError names the slugs when none or several are left.
    """
    found = sorted(set(slugs))
    if asked is not None:
        if asked not in found:
            raise SelectionError(f"no rows of --gpu {asked!r}; there are rows of {', '.join(found) or 'none'}")
        return asked
    cards = [slug for slug in found if slug != CPU] or found
    if len(cards) != 1:
        raise SelectionError(
            f"rows of {len(cards)} GPUs ({', '.join(cards) or 'none'}) are not drawn together; choose one with --gpu"
        )
    return cards[0]


def one_series(table: pd.DataFrame, any_method: bool = False) -> pd.DataFrame:
    """The table itself, once it holds rows of exactly one GPU, method version (unless `any_method`: bytes depend on
    none) and clock, else SelectionError."""
    if table.empty:
        raise NothingLeft("no rows are left by the selection")
    for column, name, option in (
        ("gpu", "GPU", "--gpu"),
        ("method_version", "method version", "--method"),
        ("clock", "clock", "--clock"),
    ):
        found = sorted(table[column].dropna().unique())
        # Rows that were never measured (unavailable, oom) have no method.
        if any_method and column == "method_version":
            continue
        if len(found) > 1 or (column == "gpu" and not found):
            values = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in found)
            raise SelectionError(
                f"rows of {len(found)} {name}s ({values}); exactly one can be drawn, choose it with {option}"
            )
    return table


def newest_method(table: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The table without rows of timing methods older than its newest, and how many those are. Rows that were never
    measured have no method and stay."""
    older = table.method_version < table.method_version.max()
    return table[~older], int(older.sum())


def pool_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """One line per point whatever its seeds: all samples together, worst error and largest memory of the `ok` seeds.

    A point is throttled when one of its seeds was.
    A point without an `ok` seed keeps the line of its first seed, with that seed's status.
    """
    by = [name for name in POINT if name not in SEEDS]
    if table.empty or not table.duplicated(by).any():
        return table
    lines = []
    for _, group in table.groupby(by, dropna=False, sort=False):
        measured = group[group.status == "ok"]
        line = (measured if len(measured) else group).iloc[0].to_dict()
        if len(measured) > 1:
            line["samples_ms"] = [ms for samples in measured.samples_ms for ms in samples]
            worst = measured.worst_error.idxmax() if measured.worst_error.notna().any() else measured.index[0]
            line |= measured.loc[worst, ["worst_error", "worst_error_name"]].to_dict()
            line["throttled"] = True if measured.throttled.eq(True).any() else line["throttled"]
            for name in ("held_bytes", "held_gib", "peak_fwd_gib", "peak_bwd_gib", "peak_gib"):
                line[name] = measured[name].max()
            for name in (
                "event_ms",
                "device_ms",
                "span_ms",
                "graph_ms",
                "enqueue_us",
                "padding",
                "flops",
                "bytes",
                "R",
                *(("sonic_ms",) if "sonic_ms" in measured else ()),
            ):
                line[name] = measured[name].median()
            _rates(line)
        lines.append(line)
    return pd.DataFrame(lines, columns=table.columns).reset_index(drop=True)


def with_backward(table: pd.DataFrame) -> pd.DataFrame:
    """The table and, per `fwd` and `fwd_bwd` line of a point in one environment, a `bwd` line marked `derived`.

    Its time is the difference of the two medians; its band is the widest that the two bands allow; FLOPs and bytes are
    differences, memory and errors those of `fwd_bwd`. Where a half is missing there is no line; where one is not `ok`
    the line carries that status.
    """
    by = [name for name in POINT if name != "mode"] + ["env_id"]

    def point(line: pd.Series) -> tuple[object, ...]:
        return tuple(None if pd.isna(line[name]) else line[name] for name in by)

    forward = {point(line): line for _, line in table[table["mode"] == "fwd"].iterrows()}
    pairs = ((forward.get(point(line)), line) for _, line in table[table["mode"] == "fwd_bwd"].iterrows())
    added = [_difference(half, both) for half, both in pairs if half is not None]
    if not added:
        return table
    # Through records, so that the columns keep the types of the table.
    lines = pd.DataFrame.from_records(added, columns=list(table.columns)).astype(table.dtypes.to_dict())
    return pd.concat([table, lines], ignore_index=True)


def _difference(forward: pd.Series, both: pd.Series) -> dict[str, object]:
    line = both.to_dict() | {"mode": "bwd", "derived": True, "samples_ms": [], "kernels": []}
    if forward.status != "ok":
        line |= {"status": forward.status, "reason": forward.reason}
    ms = both.ms - forward.ms
    line |= {"ms": ms, "ms_p20": both.ms_p20 - forward.ms_p80, "ms_p80": both.ms_p80 - forward.ms_p20}
    for name in ("event_ms", "device_ms", "span_ms", "graph_ms", "flops", "bytes"):
        line[name] = both[name] - forward[name]
    if "sonic_ms" in line:
        line["sonic_ms"] = both.sonic_ms - forward.sonic_ms
    line["tflops"] = line["flops"] / ms / 1e9 if ms > 0 else np.nan
    line["gbps"] = line["bytes"] / ms / 1e6 if ms > 0 else np.nan
    return line


def environments(results: Path = RESULTS, env_ids: Iterable[str] | None = None) -> pd.DataFrame:
    """The recorded environments, one line each (those of `env_ids`, where given); empty without an `env.jsonl`."""
    found = [env for name in ("env.jsonl", "env-cpu.jsonl") for env in read_lines(results / name, Env)[0]]
    wanted = None if env_ids is None else set(env_ids)
    kept = {env.env_id: env.model_dump() for env in found if wanted is None or env.env_id in wanted}
    return pd.DataFrame(list(kept.values()), columns=list(Env.model_fields))
