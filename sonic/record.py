"""Points, rows and the files that keep them.

A `Point` is one line of a sweep's plan, a `Row` the same tree with what was measured (design: config tree = row tree).
Rows live in append-only JSON-lines files, one per sweep and GPU; `env.jsonl` beside them has a line per environment.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sonic.shapes import Shape

SCHEMA = 1

Status = Literal[
    "ok",
    "unavailable",
    "unsupported",
    "oom",
    "skipped_oom",
    "out_of_resources",
    "wrong",
    "failed",
    "crashed",
    "timeout",
]
#: Statuses that end a sweep with exit code 0.
EXPECTED = frozenset({"ok", "unavailable", "unsupported", "oom", "skipped_oom", "out_of_resources"})
#: Statuses that a second run does not measure again.
FINAL = frozenset({"ok", "unsupported", "oom", "skipped_oom", "out_of_resources", "wrong"})

Op = Literal[
    "layer", "experts",
    "router_topk", "metadata", "up_proj", "down_proj", "aggregate",
    "d_act", "d_input", "weight_grad_1", "weight_grad_2",
    "routing", "combine",
    "matmul", "copy",
]  # fmt: skip
OPS: tuple[Op, ...] = get_args(Op)
#: Ops with the experts' forward and backward in them; all others are one call without a backward.
LAYER_OPS: tuple[Op, ...] = ("layer", "experts")
#: Ops that measure the card and not the layer; the implementation `ceilings` alone runs them.
CEILING_OPS: tuple[Op, ...] = ("matmul", "copy")
#: Ops that are one kernel of the layer alone.
KERNEL_OPS = tuple(op for op in OPS if op not in (*LAYER_OPS, *CEILING_OPS))
Mode = Literal["fwd", "fwd_infer", "fwd_bwd"]
Dtype = Literal["bf16", "fp16", "fp32", "fp64", "fp8"]


class Strict(BaseModel):
    """Base of every part of a point or row: no unknown keys, no silent conversion of strings to numbers."""

    # An error ratio may be infinite or NaN: both are kept as the constants that Python's json reads, never as null.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


class ShapeSpec(Strict):
    """The five sizes; see `sonic.shapes.Shape`, which checks them."""

    T: int
    d: int
    n: int
    E: int
    K: int

    def model_post_init(self, _context: object) -> None:
        self.sizes()

    def sizes(self) -> Shape:
        """The same sizes as a `Shape`."""
        return Shape(self.T, self.d, self.n, self.E, self.K)


class Routing(Strict):
    """How tokens meet experts (`sonic.routers`); `seed` draws what is random in it.

    `score` belongs to topk and laser (null: softmax over the top K); `alpha` to the distributions zipf, bursts and
    lognormal; `tile` to token rounding and expert_choice; `capacity`, a factor of T K / E, to token_drop and
    expert_choice; `groups` to grouped; `file` to replay. A field that does not belong to a point's routing is null.
    """

    method: Literal[
        "topk",
        "tr_nearest_freq", "tr_stochastic_freq", "tr_nearest_score", "tr_balance", "tr_up", "tr_down",
        "token_drop", "expert_choice", "grouped", "laser",
    ] = "topk"  # fmt: skip
    distribution: Literal[
        "learned", "balanced", "uniform", "zipf", "lognormal", "hot", "bursts", "replay"
    ] = "learned"  # fmt: skip
    score: Literal["softmax_over_topk", "topk_over_softmax", "sigmoid"] | None = None
    alpha: float | None = None
    tile: int | None = None
    capacity: float | None = None
    groups: int | None = None
    file: str | None = None
    seed: int = 0


class Knobs(Strict):
    """Ablation switches of the `sonic` layer (design section 6). `family=auto` becomes what ran in a row.

    `gather=given` is for one kernel alone: its rows lie in expert order already. `ds=from_y` keeps Y for the backward,
    `cache=h_a_y` all that a plain autograd would keep, `none` recomputes H. A `schedule` of null leaves each kernel its
    own; `static_map` launches a program per tile.
    """

    family: Literal["auto", "hopper", "triton", "torch"] = "auto"
    gather: Literal["fused", "separate", "given"] = "fused"
    activation: Literal["fused", "separate"] = "fused"
    ds: Literal["from_da", "from_y"] = "from_da"
    cache: Literal["h", "h_a", "h_a_y", "none"] = "h"
    aggregate: Literal["gather_sum", "scatter_sum", "atomic"] = "gather_sum"
    schedule: Literal["cooperative", "pingpong", "persistent", "static_map"] | None = None
    order: Literal["grouped"] | None = None
    index: Literal["int64"] | None = None


class TileSpec(Strict):
    """What was asked of the GEMM kernels' tiles; null leaves a kernel its own choice. `kernel` aims it at one."""

    m: int | None = None
    n: int | None = None
    k: int | None = None
    stages: int | None = None
    warps: int | None = None
    kernel: str | None = None


class Point(Strict):
    """One thing to measure: everything that a child process needs to know."""

    sweep: str
    impl: str
    op: Op = "layer"
    mode: Mode = "fwd_bwd"
    dtype: Dtype = "bf16"
    seed: int = 0
    shape: ShapeSpec
    routing: Routing = Routing()
    knobs: Knobs = Knobs()
    tile: TileSpec = TileSpec()


class Settings(Strict):
    """How a child measures, the same for every point of a sweep; `conf/measure/` holds the named sets.

    warmup_ms of calls before `samples` timed ones; `graph` adds CUDA-graph replay, `profile` the times per kernel; `l2`
    says whether the cache is flushed between samples; `tune` picks committed tiles, a search, or each kernel's default.
    `fresh` measures every point in a child of its own: the profiler may stay attached to a process after its first use,
    which lengthens every later launch and so `enqueue_us`. `counters` reads the card's own byte counters of one more
    call (`sonic.counters`), in a process of its own, which takes about half a minute.
    """

    warmup_ms: float = Field(default=25.0, ge=0)
    samples: int = Field(default=20, ge=1)
    graph: bool = True
    l2: Literal["cold", "warm"] = "cold"
    profile: bool = True
    tune: Literal["cached", "full", "off"] = "cached"
    fresh: bool = False
    counters: bool = False


class Method(Strict):
    """How times were taken. `timer` is `cuda` (events, CUPTI, graph replay) or `wall` (a CPU's clock)."""

    version: int
    timer: Literal["cuda", "wall"]
    l2: Literal["cold", "warm"] | None
    warmup: int
    samples: int


class Counters(Strict):
    """Hardware counters of one pass; nulls unless status is `ok`."""

    status: Literal["ok", "off", "denied", "missing"] = "off"
    dram_read: int | None = None
    dram_write: int | None = None
    l2_hit: float | None = None
    tensor_pipe: float | None = None


class KernelTime(Strict):
    """One kernel of the timed pass: median microseconds, model FLOPs and bytes where its cost model knows them.

    `bytes` counts a gathered row at every use, `bytes_once` once. The last four are its own hardware counters, null
    where they were not read.
    """

    name: str
    us: float
    calls: int = 1
    flops: int | None = None
    bytes: int | None = None
    bytes_once: int | None = None
    tile: dict[str, int] | None = None
    dram_read: int | None = None
    dram_write: int | None = None
    l2_hit: float | None = None
    tensor_pipe: float | None = None


class Clocks(Strict):
    """NVML readings during the measurement (medians); null without NVML."""

    sm_mhz: float | None = None
    mem_mhz: float | None = None
    power_w: float | None = None
    temp_c: float | None = None
    reasons: list[str] = Field(default_factory=list)


class Measured(Strict):
    """What the child sends back: every field of a row that is not the point's or the launching job's."""

    status: Status
    reason: str | None = None
    note: str | None = None
    R: int | None = None
    event_us: list[float] | None = None
    device_us: list[float] | None = None
    span_us: list[float] | None = None
    graph_us: list[float] | None = None
    enqueue_us: list[float] | None = None
    launches: int | None = None
    method: Method | None = None
    flops_model: int | None = None
    flops_padded: int | None = None
    bytes_model: int | None = None
    counters: Counters = Counters()
    kernels: list[KernelTime] | None = None
    held_bytes: int | None = None
    held_source: Literal["allocator", "saved_tensors"] | None = None
    peak_fwd_bytes: int | None = None
    peak_bwd_bytes: int | None = None
    errors: dict[str, float] | None = None
    compile_s: float | None = None
    tune_s: float | None = None
    tuned: bool | None = None
    clocks: Clocks | None = None
    throttled: bool | None = None


class Outcome(Measured):
    """`Measured` and the kernel family that ran, which the launching job writes into the row's knobs."""

    family: Literal["hopper", "triton", "torch"] | None = None


class Row(Point, Measured):
    """One measured point, one JSON line (design section 3)."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    key: str
    run_id: str
    impl_version: str
    gpu: str
    env_id: str
    commit: str
    time: str

    @field_validator("schema_")
    @classmethod
    def _known_schema(cls, value: int) -> int:
        if value != SCHEMA:
            raise ValueError(f"this version reads schema {SCHEMA}")
        return value

    @field_validator("sweep", "gpu")
    @classmethod
    def _file_name(cls, value: str) -> str:
        # Both become parts of a path, in `rows_path`.
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", value):
            raise ValueError("it must be letters, digits, '_', '-' and '.', since it names a file")
        return value

    @field_validator("time")
    @classmethod
    def _instant(cls, value: str) -> str:
        if datetime.fromisoformat(value).tzinfo is None:
            raise ValueError("it must be ISO 8601 with an offset, such as 2026-01-31T12:00:00+00:00")
        return value

    def line(self) -> str:
        """The row as one JSON line, without the newline."""
        return _line(self)


class RecordError(Exception):
    """A file or folder of rows cannot be read or written; the text names it and the reason."""


@dataclass(frozen=True)
class Fault:
    """A line of a file that is not a row: where it is and which rule it breaks. The line itself is left as it is."""

    path: Path
    line_number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line_number}: {self.reason}"


Model = TypeVar("Model", bound=BaseModel)


def _line(model: BaseModel) -> str:
    """One line of ASCII: other characters are escaped, since some readers take U+2028 and its like for a line's end."""
    return json.dumps(model.model_dump(mode="json", by_alias=True), separators=(",", ":"))


def now() -> str:
    """The time as rows keep it: ISO 8601, UTC, microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def default_results() -> Path:
    """The results folder of the clone, or of the working directory when the package is installed without one."""
    root = Path(__file__).resolve().parents[1]
    return (root if (root / "pyproject.toml").is_file() else Path.cwd()) / "results"


def rows_path(results: Path, sweep: str, gpu: str) -> Path:
    """The file that keeps the rows of one sweep on one GPU model (or `cpu`)."""
    return results / sweep / f"{gpu}.jsonl"


def effective(point: Point, knobs: Collection[str]) -> tuple[Point, list[str]]:
    """The point with `knobs.*` and `tile.*` fields outside `knobs` at their defaults, and the names that this changed.

    `knobs` holds dotted names, as an adapter's KNOBS does.
    """
    plain = {"knobs": Knobs(), "tile": TileSpec()}
    dropped: list[str] = []
    changes: dict[str, BaseModel] = {}
    for group, default in plain.items():
        given = getattr(point, group)
        reset = {}
        for field in type(given).model_fields:
            if f"{group}.{field}" in knobs or getattr(given, field) == getattr(default, field):
                continue
            reset[field] = getattr(default, field)
            dropped.append(f"{group}.{field}")
        if reset:
            changes[group] = given.model_copy(update=reset)
    return point.model_copy(update=changes), dropped


def point_key(
    point: Point, impl_version: str, gpu: str, method_version: int, interpreter: bool, knobs: Collection[str]
) -> str:
    """16 hex digits that identify a measurement: the effective point and what it was measured with (design section 3).

    `gpu` is the slug of the GPU model or `cpu`; `interpreter` says whether Triton kernels are interpreted.
    """
    fields = effective(point, knobs)[0].model_dump(mode="json")
    # fields that came later: where they say nothing, a point is what it was before
    for name in ("score", "capacity", "groups", "file"):
        if fields["routing"][name] is None:
            del fields["routing"][name]
    parts = {
        "point": fields,
        "impl_version": impl_version,
        "gpu": gpu,
        "method_version": method_version,
        "interpreter": interpreter,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def ensure_writable(results: Path) -> None:
    """Makes the folder when it is missing and tries a file in it. RecordError names the folder and the reason."""
    try:
        _try_folder(results)
    except OSError as error:
        raise RecordError(
            f"results is {str(results)!r}: cannot write there ({error.strerror}); "
            "it must be a folder that can be made and written, choose one with results=DIR"
        ) from error


def ensure_appendable(path: Path) -> None:
    """Opens a file of rows or environments as appending does, or tries its folder when there is no file yet.

    Nothing is written. RecordError names the file and the reason.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_APPEND))
    except FileNotFoundError:
        try:
            _try_folder(path.parent)
        except OSError as error:
            raise _unusable(path, error) from error
    except OSError as error:
        raise _unusable(path, error) from error


def _try_folder(folder: Path) -> None:
    """Makes the folder, and a file in it that is removed again. OSError when that is not possible."""
    probe = folder / f".writable-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    probe.touch()
    probe.unlink()


def _unusable(path: Path, error: OSError) -> RecordError:
    return RecordError(
        f"{path}: cannot write the file ({error.strerror}); it and its folder must be readable and writable"
    )


@contextmanager
def _appending(path: Path) -> Iterator[int]:
    """A descriptor of `path` for reading and appending, under the file's lock; a torn tail is closed with a newline.

    The lock is taken on the file itself, so that a results folder holds nothing but results.
    RecordError names the file and the reason when it cannot be opened or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                # Some cluster file systems have no locks; one appending write per line still keeps lines whole.
                if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                    raise
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                _write(fd, b"\n")
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise _unusable(path, error) from error


def _write(fd: int, data: bytes) -> None:
    """One write; OSError when the system took only a part of it, as it does on a full disk."""
    written = os.write(fd, data)
    if written != len(data):
        raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were taken; the disk may be full")


def append_row(path: Path, row: Row) -> None:
    """Adds the row as one line, in one write, under the file's lock. RecordError when that fails."""
    with _appending(path) as fd:
        _write(fd, row.line().encode() + b"\n")


def append_missing(path: Path, lines: Iterable[Model], identity: Callable[[Model], object]) -> int:
    """Adds, under one lock, the lines whose identity the file does not hold yet; returns how many were added.

    Lines of the file that cannot be read stay and count for nothing. RecordError when the file cannot be written.
    """
    lines = list(lines)
    if not lines:
        return 0
    added = 0
    with _appending(path) as fd:
        held = {identity(line) for line in _parse(path, _content(fd), type(lines[0]))[0]}
        for line in lines:
            if identity(line) in held:
                continue
            _write(fd, _line(line).encode() + b"\n")
            held.add(identity(line))
            added += 1
    return added


def _content(fd: int) -> bytes:
    """All bytes of an open file, wherever its position is."""
    size = os.fstat(fd).st_size
    parts: list[bytes] = []
    while size > (done := sum(map(len, parts))):
        parts.append(os.pread(fd, size - done, done))
    return b"".join(parts)


def read_rows(path: Path) -> tuple[list[Row], list[Fault]]:
    """The rows of a file in its order, and a fault for every line that is none; no file, no rows.

    RecordError when the file exists and cannot be read at all.
    """
    return read_lines(path, Row)


def read_lines(path: Path, model: type[Model]) -> tuple[list[Model], list[Fault]]:
    """As `read_rows`, for a JSON-lines file of any model."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise RecordError(f"{path}: cannot read the file ({error.strerror})") from error
    return _parse(path, content, model)


def _parse(path: Path, content: bytes, model: type[Model]) -> tuple[list[Model], list[Fault]]:
    good: list[Model] = []
    faults: list[Fault] = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            # A last line without its newline is still a row when all of it is there.
            good.append(_parse_line(line, model))
        except ValueError as error:
            torn = number == len(lines)
            faults.append(Fault(path, number, ("half-written last line: " if torn else "") + str(error)))
    return good, faults


def _parse_line(line: bytes, model: type[Model]) -> Model:
    """ValueError says which rule the line breaks."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; a line must be UTF-8 JSON"
        ) from None
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise ValueError(f"not JSON ({what} at column {error.colno}); a line must be one JSON object") from None
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """A validation error on one line: each field, its value and the rule, at most three of them."""
    texts = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"]) or "the line"
        rule = item["msg"].removeprefix("Value error, ")
        value = "" if item["type"] == "missing" else f" is {_short(item['input'])}"
        texts.append(f"{field}{value}: {rule}")
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def newest(rows: Iterable[Row]) -> dict[str, Row]:
    """The newest row of every key, by time; of equal times the later in order. Keys keep the order of first sight."""
    found: dict[str, Row] = {}
    for row in rows:
        held = found.get(row.key)
        if held is None or datetime.fromisoformat(row.time) >= datetime.fromisoformat(held.time):
            found[row.key] = row
    return found
