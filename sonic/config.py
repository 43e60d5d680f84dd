"""From a command line to points: Hydra composes `conf/` and `sweeps/`, this module expands and checks.

Everything is expanded and checked before anything runs; what breaks a rule raises `CommandError`, which names the
field, its value and the rule. An axis is a key with several values: `shape.n=256,512`, `impl=sonic,scattermoe`, zipped
sizes `shape={n:1024,K:2},{n:512,K:4}`, a named shape or a family of them (`shape=7b`), and the derived `shape.G` and
`shape.rho`. An experiment has axes that all its points share (`hydra.sweeper.params`) and may have `grids`, each with
axes of its own.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, Field, ValidationError

from sonic import impls
from sonic.record import KERNEL_OPS, Point, Routing, Settings, Strict, default_results
from sonic.recorded import read_routing
from sonic.shapes import DEFAULT_TILE, Shape, check_routing
from sonic.shapes import gpu_slug as slug_of

#: A sweep with more points than this is taken for a slip of the keyboard.
MOST_POINTS = 20_000
COMMAND_LINE = "command line"
GROUPS = ("sweeps", "measure", "cluster", "wandb")
SUBTREES = ("shape", "routing", "knobs", "tile")
CONTROL = ("results", "resume", "fail_fast", "shard", "grids")


class CommandError(Exception):
    """The command line or an experiment file breaks a rule; nothing has run."""


class Measure(Settings):
    """`conf/measure/`: how a child measures, the seconds a point may take and those it usually takes."""

    timeout_s: float = Field(gt=0)
    estimate_s: float = Field(ge=0)

    def settings(self) -> Settings:
        """The part that a child needs."""
        return Settings.model_validate(self.model_dump(exclude={"timeout_s", "estimate_s"}))


class Cluster(Strict):
    """`conf/cluster/`: sets of points per job (null: all in one), and whether jobs are dealt out over visible GPUs."""

    chunk: int | None = Field(ge=1)
    spread: bool


class Wandb(Strict):
    """`conf/wandb/`: where runs are mirrored to."""

    mode: str = Field(pattern="^(offline|online|off)$")
    project: str
    entity: str | None


class Control(Strict):
    """What of the composed config is not a point."""

    about: str
    measure: Measure
    cluster: Cluster
    wandb: Wandb
    results: str | None
    resume: bool
    fail_fast: bool
    shard: str | None


@dataclass(frozen=True)
class Sweep:
    """An experiment with the command line laid over it: every point, in the order of measuring, and how to run them."""

    name: str
    points: list[Point]
    control: Control
    results: Path
    share: tuple[int, int] = (0, 1)
    launch: list[str] = field(default_factory=list)

    @property
    def state(self) -> Path:
        """Folder of plans, logs, Hydra's and wandb's output: `.sonic` beside the clone's results, or inside others."""
        return (root() if self.results == default_results() else self.results) / ".sonic"


@dataclass(frozen=True)
class Axis:
    """One key with its values, each a set of assignments {dotted leaf: value}.

    `origin` is where it was written, `slot` where the key was swept first (an override keeps the slot of what it
    replaces), `named` whether its values are named shapes.
    """

    key: str
    text: str
    values: tuple[dict[str, Any], ...]
    origin: str
    slot: str
    named: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.origin})" if self.origin else self.text

    @property
    def routes(self) -> set[str]:
        """Leaves that this axis decides. A named shape's T is only its usual microbatch, which `shape.T` may change."""
        leaves = {leaf for value in self.values for leaf in value}
        decided = leaves - {"shape.G", "shape.rho"} - ({"shape.T"} if self.named else set())
        if "shape.G" in leaves:
            decided |= {"shape.n", "shape.E", "shape.K"}
        if "shape.rho" in leaves:
            decided |= {"shape.E"}
        return decided

    @property
    def derived(self) -> bool:
        """Whether it only moves away from a base shape."""
        return self.key in ("shape.G", "shape.rho")


def root() -> Path:
    """Folder that holds `conf/` and `sweeps/`: the clone, or the package's `_assets` in a wheel."""
    package = Path(__file__).resolve().parent
    assets = package / "_assets"
    return assets if assets.is_dir() else package.parent


def known_impls() -> list[str]:
    """Names of the implementations; asking imports none of them."""
    return impls.names()


def experiments() -> list[str]:
    """Names of the experiments in `sweeps/`; those that begin with `_` are hidden."""
    return sorted(path.stem for path in (root() / "sweeps").glob("*.yaml") if not path.stem.startswith("_"))


def visible_gpus() -> list[tuple[str, str]]:
    """(UUID, name) of the NVIDIA GPUs that a child would see, by NVML and CUDA_VISIBLE_DEVICES; empty without either.

    Indices count in PCI order, which `pool` also asks of CUDA.
    """
    import pynvml

    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        cards = [(str(pynvml.nvmlDeviceGetUUID(h)), str(pynvml.nvmlDeviceGetName(h))) for h in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    if wanted is None:
        return cards
    chosen = []
    for item in (part.strip() for part in wanted.split(",")):
        if item.isdigit() and int(item) < len(cards):
            chosen.append(cards[int(item)])
        elif item.startswith("MIG-") and cards:
            chosen.append((item, cards[0][1]))
        elif match := [card for card in cards if item and card[0].startswith(item)]:
            chosen.append(match[0])
        else:  # CUDA ignores everything behind the first index that does not exist
            break
    return chosen


def gpu_slug() -> str:
    """`cpu`, or the name of the first visible card in lower case with `-` for the rest: `nvidia-h200`."""
    cards = visible_gpus()
    return slug_of(cards[0][1]) if cards else "cpu"


def default_experiment() -> str:
    """`quick` where NVML sees a GPU, else `smoke`."""
    return "quick" if visible_gpus() else "smoke"


def close_match(word: str, allowed: Iterable[str]) -> str:
    """` (did you mean ...?)` for a near miss, else nothing."""
    allowed = list(allowed)
    near = difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    near = near or [name for name in allowed if word and name.rpartition(".")[2] == word.rpartition(".")[2]][:1]
    return f" (did you mean {near[0]!r}?)" if near else ""


def leaves(model: type[BaseModel] = Point, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields of a point but `sweep`, which is the experiment's name."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{prefix}{name}.")
        elif prefix or name != "sweep":
            yield f"{prefix}{name}"


POINT_LEAVES = frozenset(leaves()) | {"shape.G", "shape.rho"}


def allowed_keys() -> list[str]:
    """Every key that a command line may set, Hydra's own aside."""
    groups = {"measure": Measure, "cluster": Cluster, "wandb": Wandb}
    nested = [f"{group}.{name}" for group, model in groups.items() for name in model.model_fields]
    return [*GROUPS, *SUBTREES, *sorted(POINT_LEAVES), *nested, *CONTROL]


def explain(error: ValidationError) -> str:
    """One line for the first fault: field, value, rule; with the allowed values where there is a list of them."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    value = first.get("input")
    if first["type"] == "extra_forbidden":
        return f"unknown field {name!r}{close_match(name, allowed_keys())}"
    if first["type"] == "missing":
        return f"{name} is missing"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "literal_error":
        allowed = re.findall(r"'([^']+)'", first["ctx"]["expected"])
        return f"{name} is {value!r}; allowed: {', '.join(allowed)}{close_match(str(value), allowed)}"
    rule = first["msg"].replace("Input should be", "it must be").replace("String should", "it should")
    return f"{name} is {value!r}; {rule}"


@contextmanager
def hydra_composer() -> Iterator[ConfigLoader]:
    """Hydra set up on `conf/`, in place of any other set-up in this process; yields its config loader."""
    os.environ["SONIC_GPUS"] = str(max(1, len(visible_gpus())))
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(root() / "conf"), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def options(loader: ConfigLoader, group: str) -> list[str]:
    """Names in a config group, numbers inside them in numerical order, hidden ones left out."""
    names = loader.get_group_options(group, ObjectType.CONFIG)
    return sorted(
        (name for name in names if not name.startswith("_")),
        key=lambda name: [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)],
    )


def parse(lines: Sequence[str]) -> list[Override]:
    """Command-line overrides in Hydra's grammar; CommandError for what it cannot read."""
    parser = OverridesParser.create()
    parsed = []
    for line in lines:
        if "=" not in line and not line.startswith("~"):
            raise CommandError(f"{line!r} is not of the form key=value; an experiment is sweeps=<name>")
        try:
            parsed.append(parser.parse_override(line))
        except HydraException as error:
            raise CommandError(f"cannot read {line!r}: {str(error).splitlines()[0]}") from error
    return parsed


def plain(value: Any) -> Any:
    """A parsed value as plain Python: quotes removed, inside dicts and lists too."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def elements(override: Override, names: Sequence[str]) -> list[Any]:
    """The values that an override lists; `glob(...)` picks among `names`."""
    value = override.value()
    if isinstance(value, Glob):
        return list(value.filter(list(names)))
    if not override.is_sweep_override():
        return [plain(value)]
    if override.is_interval_sweep():
        raise CommandError(
            f"{override.input_line}: an interval has no points; list values or use range(start,stop,step)"
        )
    values: list[Any] = []
    for item in override.sweep_iterator(transformer=lambda item: item):
        values += item.filter(list(names)) if isinstance(item, Glob) else [plain(item)]
    return values


class Shapes:
    """The named shapes of `conf/shape/`; a name without a file of its own stands for all that begin with `name_`."""

    def __init__(self, loader: ConfigLoader) -> None:
        self.loader = loader
        self.names = options(loader, "shape")

    def pick(self, name: str) -> list[dict[str, Any]]:
        """The shapes of a name or a family, as assignments."""
        family = [name] if name in self.names else [other for other in self.names if other.startswith(f"{name}_")]
        if not family or not name:
            families = sorted({other.partition("_")[0] for other in self.names if "_" in other})
            raise CommandError(
                f"shape is {name!r}; allowed: {', '.join(self.names)}; or a family: {', '.join(families)}"
                f"{close_match(name, [*self.names, *families])}"
            )
        return [self._load(member) for member in family]

    def _load(self, name: str) -> dict[str, Any]:
        found = self.loader.repository.load_config(f"shape/{name}")  # type: ignore[attr-defined]
        content = OmegaConf.to_container(found.config)
        if not isinstance(content, dict) or set(content) != {"T", "d", "n", "E", "K"}:
            raise CommandError(f"conf/shape/{name}.yaml must hold T, d, n, E and K and nothing else")
        return {f"shape.{size}": value for size, value in content.items()}


def make_axis(override: Override, origin: str, shapes: Shapes) -> Axis:
    """The axis that an override of a point's field or subtree stands for."""
    key, line = override.key_or_group, str(override.input_line)
    values: list[dict[str, Any]] = []
    named = False
    for value in elements(override, {"shape": shapes.names, "impl": known_impls()}.get(key, ())):
        if key not in SUBTREES:
            values.append({key: value})
        elif isinstance(value, dict):
            values.append(_leaf_values(key, value, line))
        elif key == "shape" and isinstance(value, str):
            values += shapes.pick(value)
            named = True
        else:
            rule = "a named shape or sizes such as {n:1024,K:2}" if key == "shape" else "fields such as {m:64,n:128}"
            raise CommandError(f"{key} is {value!r}; it must be {rule}")
    if not values:
        raise CommandError(f"{line}: no values")
    return Axis(key, line, tuple(values), origin, origin, named)


def _leaf_values(key: str, value: dict[str, Any], line: str) -> dict[str, Any]:
    flat = {f"{key}.{name}": item for name, item in value.items()}
    siblings = sorted(leaf for leaf in POINT_LEAVES if leaf.startswith(f"{key}."))
    for leaf in flat:
        if leaf not in POINT_LEAVES:
            raise CommandError(
                f"{line}: unknown key {leaf!r}; allowed: {', '.join(siblings)}{close_match(leaf, siblings)}"
            )
    parts = [Axis(leaf, f"{leaf} in {line}", ({leaf: item},), "", "") for leaf, item in flat.items()]
    check_routes(parts)
    return flat


def check_routes(axes: Sequence[Axis]) -> None:
    """CommandError where two axes set the same field by different routes; both are named.

    G and rho may cross (both move E, in this order), and they may start from a shape that was named in the same place.
    """
    for a, b in itertools.combinations(axes, 2):
        shared = a.routes & b.routes
        if not shared or (a.derived and b.derived and a.key != b.key):
            continue
        base = next((axis for axis in (a, b) if axis.named), None)
        other = b if base is a else a
        if base is not None and other.derived and (base.origin == other.origin or base.slot == other.slot):
            continue
        text = f"{a} and {b} both set {', '.join(sorted(shared))}; give one of them"
        dropped = next((axis for axis in (a, b) if axis.origin not in ("", COMMAND_LINE)), None)
        raise CommandError(text + (f" (~{dropped.key} drops the experiment's axis)" if dropped else ""))


def file_axes(params: dict[str, Any], where: str, shapes: Shapes) -> list[Axis]:
    """The axes that an experiment file writes, `{key: "values in Hydra's grammar"}`."""
    axes = []
    for key, text in params.items():
        if key not in POINT_LEAVES and key not in SUBTREES:
            raise CommandError(f"{where}: unknown key {key!r}{close_match(key, [*POINT_LEAVES, *SUBTREES])}")
        value = ",".join(map(str, text)) if isinstance(text, list) else "null" if text is None else str(text)
        axes.append(make_axis(parse([f"{key}={value}"])[0], where, shapes))
    return axes


def grid_axes(
    shared: list[Axis], grids: dict[str, list[Axis]], given: list[Axis], dropped: Sequence[str], where: str
) -> dict[str, list[Axis]]:
    """The axes of every grid: the file's, without the dropped ones, those on the command line in their place.

    An implementation that the file names in some of its grids only is measured there only; others go everywhere.
    """
    merged: dict[str, list[Axis]] = {}
    for name, own in (grids or {"": []}).items():
        keys = {axis.key: axis for axis in shared}
        keys.update({axis.key: axis for axis in own})
        merged[name] = [axis for key, axis in keys.items() if key not in dropped]
    swept = sorted({axis.key for axes in merged.values() for axis in axes} | set(dropped))
    every = {axis.key for axis in shared} | {axis.key for own in grids.values() for axis in own}
    for key in dropped:
        if key not in every:
            raise CommandError(
                f"~{key}: {where} sweeps no {key!r}; it sweeps {', '.join(s for s in swept if s in every)}"
            )
    named_impls = {name: _impls(axes) for name, axes in merged.items()}
    result: dict[str, list[Axis]] = {}
    for name, axes in merged.items():
        by_key = {axis.key: axis for axis in axes}
        for axis in given:
            here = axis
            if axis.key == "impl":
                keep = tuple(
                    value
                    for value in axis.values
                    if value["impl"] in named_impls[name] or not any(value["impl"] in n for n in named_impls.values())
                )
                here = replace(axis, values=keep)
            by_key[axis.key] = replace(here, slot=by_key[axis.key].slot if axis.key in by_key else axis.slot)
        ordered = [axis for axis in by_key.values() if axis.key != "impl"]
        ordered += [by_key["impl"]] if "impl" in by_key else []
        check_routes(ordered)
        if all(axis.values for axis in ordered):
            result[name] = ordered
    return result


def _impls(axes: list[Axis]) -> set[Any]:
    return {value["impl"] for axis in axes if axis.key == "impl" for value in axis.values}


def build_point(base: dict[str, Any], assignments: Iterable[dict[str, Any]]) -> Point:
    """The base with assignments laid over it. CommandError names the first field that breaks a rule."""
    tree = {name: dict(value) if isinstance(value, dict) else value for name, value in base.items()}
    derive: dict[str, Any] = {}
    for leaf, value in (item for assignment in assignments for item in assignment.items()):
        if leaf in ("shape.G", "shape.rho"):
            derive[leaf] = value
            continue
        parent, _, name = leaf.rpartition(".")
        (tree[parent] if parent else tree)[name] = value
    try:
        point = Point.model_validate(tree)
        if derive:
            tree["shape"] = derived_shape(point.shape.sizes(), derive)
            point = Point.model_validate(tree)
    except ValidationError as error:
        raise CommandError(explain(error)) from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    _check_tile(point)
    return _with_routing(point)


#: Routing fields that belong to some methods or distributions only, and those that they belong to.
_OF_METHOD = {
    "tile": lambda routing: routing.method.startswith("tr_") or routing.method == "expert_choice",
    "capacity": lambda routing: routing.method in ("token_drop", "expert_choice"),
    "groups": lambda routing: routing.method == "grouped",
    "file": lambda routing: routing.distribution == "replay",
}


def _with_routing(point: Point) -> Point:
    """The point with its routing checked, what the method has as default filled in, and the fields dropped that belong
    to other methods, so that `routing.method=topk,tr_up routing.tile=64` has one point of topk."""
    routing, shape = point.routing, point.shape
    for name in ("tile", "capacity", "groups"):
        value = getattr(routing, name)
        if value is not None and not 0 < value < math.inf:
            raise CommandError(f"routing.{name} is {value:g}; it must be positive and finite")
    changes: dict[str, Any] = {name: None for name, has in _OF_METHOD.items() if not has(routing)}
    if routing.method.startswith("tr_") and routing.tile is None:
        changes["tile"] = DEFAULT_TILE
    if routing.method in ("token_drop", "expert_choice") and routing.capacity is None:
        changes["capacity"] = 1.0
    if routing.method == "grouped" and routing.groups is None:
        raise CommandError("routing.groups is null; method grouped needs the number of groups")
    if routing.distribution == "replay":
        if routing.file is None:
            raise CommandError("routing.file is null; distribution replay needs a file (sonic.routers.save writes one)")
        if routing.method != "topk" or routing.score is not None:
            given = f"method is {routing.method!r}" if routing.method != "topk" else f"score is {routing.score!r}"
            raise CommandError(f"routing.{given}; distribution replay brings ids and scores, which only topk keeps")
        changes["file"] = str(Path(routing.file).expanduser().resolve())
    settled = Routing.model_validate(routing.model_dump() | changes)
    try:
        check_routing(
            settled.method, shape.T, shape.E, shape.K, settled.tile, settled.capacity, settled.groups, settled.score
        )
        if settled.file is not None:
            _read_once(settled.file, shape.T, shape.E, shape.K)
    except ValueError as error:
        raise CommandError(str(error)) from error
    return point.model_copy(update={"routing": settled})


@functools.cache
def _read_once(file: str, T: int, E: int, K: int) -> None:
    read_routing(Path(file), T, E, K)


def derived_shape(base: Shape, derive: dict[str, Any]) -> dict[str, int]:
    """Sizes after `shape.G`, then `shape.rho`. ValueError names the nearest values that give integer sizes."""
    for leaf in ("shape.G", "shape.rho"):
        if leaf not in derive:
            continue
        value = derive[leaf]
        try:
            number = None if isinstance(value, bool) else Fraction(value)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError):
            number = None
        if number is None:
            raise ValueError(f"{leaf} is {value!r}; it must be a number or a fraction such as 1/16")
        base = base.with_granularity(value) if leaf == "shape.G" else base.with_rho(value)
    return {size: getattr(base, size) for size in ("T", "d", "n", "E", "K")}


def _check_tile(point: Point) -> None:
    """Rules beyond types."""
    for name in ("m", "n", "k", "stages", "warps"):
        value = getattr(point.tile, name)
        if value is not None and value < 1:
            raise CommandError(f"tile.{name} is {value}; it must be at least 1")
    if point.tile.kernel is not None and point.tile.kernel not in KERNEL_OPS:
        raise CommandError(
            f"tile.kernel is {point.tile.kernel!r}; allowed: {', '.join(KERNEL_OPS)}"
            f"{close_match(point.tile.kernel, KERNEL_OPS)}"
        )


def expand(base: dict[str, Any], grids: dict[str, list[Axis]]) -> list[Point]:
    """The points of all grids without repeats; in a grid the first axis varies slowest, `impl` fastest."""
    total = sum(math.prod(len(axis.values) for axis in axes) for axes in grids.values())
    if total > MOST_POINTS:
        raise CommandError(f"the sweep has {total} points; at most {MOST_POINTS} are allowed")
    points: dict[str, Point] = {}
    known = known_impls()
    for axes in grids.values():
        # sizes of a named shape go first, since shape.T may change its T
        first = [axis.named for axis in axes]
        for values in itertools.product(*(axis.values for axis in axes)):
            named = [value for value, is_named in zip(values, first, strict=True) if is_named]
            others = [value for value, is_named in zip(values, first, strict=True) if not is_named]
            point = build_point(base, [*named, *others])
            if point.impl not in known:
                raise CommandError(
                    f"impl is {point.impl!r}; allowed: {', '.join(known)}{close_match(point.impl, known)}"
                )
            points.setdefault(point.model_dump_json(), point)
    return list(points.values())


def point_sets(points: list[Point]) -> list[list[Point]]:
    """Points grouped by everything but `impl`, in order of first appearance: what is compared, and stays together."""
    sets: dict[str, list[Point]] = {}
    for point in points:
        sets.setdefault(point.model_dump_json(exclude={"impl"}), []).append(point)
    return list(sets.values())


def share(shard: str | None) -> tuple[int, int]:
    """(2, 8) for `3/8`: which share, counted from 0, of how many."""
    if shard is None:
        return 0, 1
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise CommandError(f"shard is {shard!r}; it must be i/n with 1 <= i <= n, such as 3/8")
    return int(match[1]) - 1, int(match[2])


def quoted(value: object) -> str:
    """A value in Hydra's grammar, whatever characters it has."""
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def search_path() -> str:
    """The override that lets Hydra find `sweeps/`; with it no job needs an environment variable of its parent."""
    return f"hydra.searchpath=[{quoted(f'file://{root()}')}]"


def load(lines: Sequence[str]) -> Sweep:
    """The sweep that command-line overrides describe, expanded and checked. CommandError says what is wrong."""
    try:
        with hydra_composer() as loader:
            return _load(loader, lines)
    except (HydraException, OmegaConfBaseException) as error:
        raise CommandError(_hydra_message(error)) from error


def compose_config(lines: Sequence[str]) -> DictConfig:
    """The composed config of a command line with its axes left out, for `--cfg`."""
    try:
        with hydra_composer() as loader:
            overrides = sort_out(parse(lines), loader)
            return compose("config", overrides=[search_path(), *overrides.compose])
    except (HydraException, OmegaConfBaseException) as error:
        raise CommandError(_hydra_message(error)) from error


def _hydra_message(error: Exception) -> str:
    text = " ".join(str(error).split())
    if missing := re.search(r"Could not find 'hydra/launcher/(\w+)'", text):
        install = '`pip install -e ".[cluster]"` brings joblib, submitit and ray'
        return f"the launcher {missing[1]!r} is not installed; {install}"
    return text


@dataclass
class Given:
    """A command line, sorted: what Hydra composes, what launchers need again, axes, dropped ones, grids, the rest."""

    experiment: str
    compose: list[str]
    launch: list[str]
    axes: list[Override]
    dropped: list[str]
    grids: list[str] | None
    control: dict[str, Any]


def sort_out(overrides: list[Override], loader: ConfigLoader) -> Given:
    """Checks keys and group names; CommandError for unknown ones, lists where one value is needed, and repeats."""
    given = Given(default_experiment(), [], [], [], [], None, {})
    seen: dict[str, str] = {}
    for override in overrides:
        key, line = override.key_or_group, str(override.input_line)
        if key in seen:
            split = key in SUBTREES and re.match(r"\w+=\w+:", line)
            hint = " (the shell split the braces: quote it)" if split else ""
            raise CommandError(f"{seen[key]} and {line} both set {key}; give one of them{hint}")
        seen[key] = line
        if key.startswith(("hydra.", "hydra/")):
            given.compose.append(line)
            given.launch.append(line)
            continue
        if override.is_delete():
            given.dropped.append(key)
            continue
        if override.is_add() or override.is_force_add() or key not in allowed_keys():
            keys = allowed_keys()
            raise CommandError(f"unknown key {key!r}{close_match(key, keys)}; allowed: {', '.join(keys)}")
        if key in POINT_LEAVES or key in SUBTREES:
            given.axes.append(override)
        elif key == "grids":
            given.grids = [str(value) for value in elements(override, ())]
        else:
            values = elements(override, ())
            if len(values) != 1:
                what = "two experiments at once are" if key == "sweeps" else f"a list for {key} is"
                raise CommandError(f"{line}: {what} not possible; run one command for each")
            if key == "sweeps":
                given.experiment = _group_choice(key, values[0], experiments())
                continue
            if key in CONTROL:
                # not for Hydra: `results/` beside `sweeps/` on its search path looks like a config group to it
                as_text = key in ("results", "shard") and values[0] is not None
                given.control[key] = str(values[0]) if as_text else values[0]
                continue
            if key in GROUPS:
                _group_choice(key, values[0], options(loader, key))
            given.compose.append(line)
            if key == "cluster" or key.startswith("cluster."):
                given.launch.append(line)
    given.compose.append(f"sweeps={given.experiment}")
    return given


def _group_choice(group: str, value: Any, names: list[str]) -> str:
    name = str(value)
    if name not in names:
        raise CommandError(f"{group} is {name!r}; allowed: {', '.join(names)}{close_match(name, names)}")
    return name


def _load(loader: ConfigLoader, lines: Sequence[str]) -> Sweep:
    given = sort_out(parse(lines), loader)
    cfg = compose("config", overrides=[search_path(), *given.compose], return_hydra_config=True)
    params = OmegaConf.to_container(cfg.hydra.sweeper.params or OmegaConf.create({}))
    with open_dict(cfg):
        del cfg["hydra"]
    tree: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    tree.update(given.control)
    where = f"sweeps/{given.experiment}.yaml"
    shapes = Shapes(loader)
    written = tree.pop("grids") or {}
    tree.pop("job")
    if given.grids is not None:
        for name in given.grids:
            if name not in written:
                raise CommandError(f"grids is {name!r}; {where} has: {', '.join(written) or 'none'}")
        written = {name: axes for name, axes in written.items() if name in given.grids}

    fields = {name: tree.pop(name) for name in Point.model_fields if name in tree}
    try:
        control = Control.model_validate(tree)
    except ValidationError as error:
        raise CommandError(explain(error)) from error

    grids = grid_axes(
        file_axes(params, where, shapes),  # type: ignore[arg-type]
        {name: file_axes(axes, where, shapes) for name, axes in written.items()},
        [make_axis(override, COMMAND_LINE, shapes) for override in given.axes],
        given.dropped,
        where,
    )
    points = expand({**fields, "sweep": given.experiment}, grids)
    results = Path(control.results).expanduser().resolve() if control.results else default_results()
    return Sweep(given.experiment, points, control, results, share(control.shard), given.launch)
