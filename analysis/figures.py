"""Finds the figure files, draws them from rows and saves them; the command line of `python -m analysis`.

A figure file is `analysis/<id>_<name>.py` (a stem without `_` is no figure). It has `SWEEP` (the sweep that fills it),
`TITLE`, `select(rows)` (the rows it draws, one GPU and method), `draw(figure, data)` (pure) and `table(data)` (the
numbers drawn); `BESIDE` names further sweeps without whose rows it cannot be drawn, `ALSO` sweeps whose rows serve as
well as those of `SWEEP`.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from analysis import common, load
from sonic.record import Fault, RecordError
from sonic.say import say

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Drawn:
    """A figure, the rows behind it (`data`), the numbers in it (`table`) and the faulty lines of its files.

    `stem` names its files: that of the figure's source, and a clock or method that is not the one drawn by default.
    """

    id: str
    stem: str
    title: str
    claim: str
    sweep: str
    gpu: str
    figure: Figure
    table: pd.DataFrame
    data: pd.DataFrame
    faults: list[Fault]

    def _repr_png_(self) -> bytes:
        """How a notebook shows it."""
        return png(self.figure, dpi=110)


class NotDrawn(Exception):
    """A figure without rows to draw; the text says which sweep would fill it."""

    def __init__(self, reason: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(reason)
        self.faults = list(faults)


def discover() -> dict[str, str]:
    """Figure id -> stem of its file, numbers in numeric order. ValueError when two files share an id."""
    found: dict[str, str] = {}
    for path in sorted(HERE.glob("[a-z]*_*.py")):
        figure_id = path.stem.split("_")[0]
        if figure_id in found:
            raise ValueError(
                f"figure id {figure_id!r} belongs to both {found[figure_id]}.py and {path.name}; ids must differ"
            )
        found[figure_id] = path.stem
    return dict(sorted(found.items(), key=lambda item: _natural(item[0])))


def _natural(figure_id: str) -> tuple[str, int]:
    word = figure_id.rstrip("0123456789")
    return word, int(figure_id[len(word) :] or 0)


def module_of(figure_id: str) -> ModuleType:
    """The figure file of an id; KeyError lists the ids."""
    known = discover()
    if figure_id not in known:
        raise KeyError(f"unknown figure {figure_id!r}; there are {', '.join(known)}")
    return importlib.import_module(f"analysis.{known[figure_id]}")


def sweeps_of(module: ModuleType) -> tuple[str, ...]:
    """The sweeps whose rows a figure needs."""
    return module.SWEEP, *getattr(module, "BESIDE", ())


def build(
    figure_id: str,
    results: Path = load.RESULTS,
    gpu: str | None = None,
    method: int | None = None,
    clock: load.Clock = "auto",
) -> Drawn:
    """Draws one figure from the rows in `results`.

    Without `method` the newest timing method among the rows is drawn, and the figure says how many rows that leaves
    out. NotDrawn when there is nothing to draw, SelectionError when rows of several GPUs are left, KeyError for an
    unknown id.
    """
    module = module_of(figure_id)
    sweeps = sweeps_of(module)
    also = getattr(module, "ALSO", ())
    everything, faults = load.rows(results, (*sweeps, *also))
    fill = " and ".join(f"`python -m sonic.sweep sweeps={sweep}`" for sweep in sweeps)
    fill += " fills it" if len(sweeps) == 1 else " fill it"
    slugs = load.gpus(everything)
    if not slugs:
        raise NotDrawn(f"no rows; {fill}", faults)
    if gpu is not None and gpu not in slugs:
        raise NotDrawn(f"no rows of {gpu} (there are some of {', '.join(slugs)}); {fill}", faults)
    chosen = load.choose_gpu(slugs, gpu)
    rows, _ = load.rows(results, (*sweeps, *also), chosen, method, clock)
    # a figure of bytes minds no timing method
    newest, older = (rows, 0) if getattr(module, "ANY_METHOD", False) else load.newest_method(rows)
    # else the figure itself says that its sweeps do not go together
    if set(rows.sweep) & set(sweeps) <= set(newest.sweep):
        rows = newest
    else:
        older = 0
    there = set(rows.sweep)
    if absent := [s for s in sweeps if s not in there and not (s == module.SWEEP and there & set(also))]:
        raise NotDrawn(f"no rows of {chosen} of sweep {', '.join(absent)}; {fill}", faults)
    try:
        data = module.select(rows)
    except load.NothingLeft as error:
        raise NotDrawn(f"none of the {len(rows)} rows of {chosen} belongs in it ({error}); {fill}", faults) from None
    if not data[getattr(module, "QUANTITY", "ms")].notna().any():
        statuses = ", ".join(f"{count} {status}" for status, count in rows.status.value_counts().items())
        raise NotDrawn(f"no measured row of {chosen} (rows: {statuses or 'none'}); {fill}", faults)
    by_default = rows if (method, clock) == (None, "auto") else load.rows(results, (*sweeps, *also), chosen)[0]
    data.attrs["older_method"] = older
    figure = Figure()
    with matplotlib.rc_context(common.STYLE):
        module.draw(figure, data)
    claim = (module.__doc__ or "").strip()
    return Drawn(
        figure_id,
        discover()[figure_id] + _choice(by_default, data, method),
        module.TITLE,
        claim,
        module.SWEEP,
        chosen,
        figure,
        module.table(data),
        data,
        faults,
    )


def _choice(by_default: pd.DataFrame, data: pd.DataFrame, method: int | None) -> str:
    """Ending of the stem where clock or method are not those of `by_default`, the rows drawn without such options."""
    clock = data.clock.iloc[0]
    ending = "" if clock == by_default.clock.iloc[0] else f"_{clock}"
    if method is not None and set(by_default.method_version.dropna()) != {method}:
        ending += f"_method{method}"
    return ending


def show(
    figure_id: str,
    results: Path = load.RESULTS,
    gpu: str | None = None,
    method: int | None = None,
    clock: load.Clock = "auto",
) -> Drawn | None:
    """As `build`, for notebooks: prints which sweep would fill the figure and returns None where there are no rows."""
    try:
        return build(figure_id, results, gpu, method, clock)
    except NotDrawn as error:
        print(f"{figure_id}: {error}")
        return None


def png(figure: Figure, dpi: int = 200) -> bytes:
    """The figure as PNG, the same bytes every time."""
    return _bytes(figure, "png", dpi=dpi, metadata={"Software": None})


def pdf(figure: Figure) -> bytes:
    """The figure as PDF, the same bytes every time: no dates, no producer."""
    return _bytes(figure, "pdf", metadata={"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None})


def _bytes(figure: Figure, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(common.STYLE):
        figure.savefig(buffer, format=kind, facecolor="white", **options)
    return buffer.getvalue()


def home(results: Path, gpu: str) -> Path:
    """Where figures go that nobody sent elsewhere: see `common.HOME_GPU`."""
    return results / "figures" if gpu == common.HOME_GPU else results / "figures" / gpu


def save(drawn: Drawn, folder: Path) -> list[Path]:
    """Writes `<stem>.pdf` and `<stem>.png` to `folder`; returns the two paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, content in (("pdf", pdf(drawn.figure)), ("png", png(drawn.figure))):
        path = folder / f"{drawn.stem}.{kind}"
        path.write_bytes(content)
        paths.append(path)
    return paths


def show_table(table: pd.DataFrame) -> str:
    """The numbers of a figure as text, four significant digits, `-` where there is none."""
    return table.map(cell).to_string(index=False)


def cell(value: object) -> str:
    """One number or word of a table: four significant digits, `-` for none."""
    if isinstance(value, (list, dict)):
        return str(value)
    if pd.isna(value):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run(ids: Sequence[str], options: argparse.Namespace, named: bool = True) -> int:
    """Draws the figures and prints their numbers.

    0 when all that were named are drawn (without names: all that have rows; where `ids` are not what a user named: at
    least one), 1 when one has no rows, 2 when rows of several GPUs, methods or clocks would be mixed, or a file cannot
    be read or written; the other figures are drawn all the same.
    """
    pending: list[str] = []
    count = 0
    refused = False
    reported: set[tuple[Path, int]] = set()
    for figure_id in ids or discover():
        try:
            drawn = build(figure_id, options.results, options.gpu, options.method, options.clock)
        except NotDrawn as error:
            pending.append(f"{figure_id}: {error}")
            faults = error.faults
        except (load.SelectionError, RecordError) as error:
            print(f"{figure_id}: {error}", file=sys.stderr)
            refused, faults = True, []
        else:
            faults, count = drawn.faults, count + 1
            say(f"{drawn.id}: {drawn.title} [{drawn.gpu}]")
            say(show_table(drawn.table))
            folder = options.out or home(options.results, drawn.gpu)
            try:
                for path in save(drawn, folder):
                    say(f"wrote {path}")
            except OSError as error:
                print(f"{figure_id}: {_unwritable(folder, error)}", file=sys.stderr)
                refused = True
            say()
        for fault in faults:
            if (fault.path, fault.line_number) not in reported:
                reported.add((fault.path, fault.line_number))
                print(f"{fault.path}:{fault.line_number}: left out, {fault.reason}", file=sys.stderr)
    if pending:
        say("Not drawn:")
        for line in pending:
            say(f"  {line}")
    return 2 if refused else 1 if pending and ids and (named or not count) else 0


def add_options(command: argparse.ArgumentParser) -> None:
    """The options that choose rows; all commands of this package share them."""
    command.add_argument(
        "--gpu", metavar="SLUG", help="whose rows, such as nvidia-h200 or cpu; needed where several GPUs have rows"
    )
    command.add_argument(
        "--results", type=Path, default=load.RESULTS, metavar="DIR", help="where the rows are (default: results/)"
    )
    command.add_argument(
        "--method", type=int, metavar="N", help="timing method version, where rows of several are left"
    )
    command.add_argument(
        "--clock", choices=load.CLOCKS, default="auto", help="which of the four times (default: device time on a GPU)"
    )


def check_choice(command: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with exit code 2 when the results folder does not exist or holds no row of the GPU asked for."""
    if not options.results.is_dir():
        command.error(f"--results {options.results} is no folder")
    if options.gpu is not None:
        slugs = load.gpus(load.rows(options.results)[0])
        if options.gpu not in slugs:
            command.error(f"no rows of --gpu {options.gpu!r}; there are rows of {', '.join(slugs) or 'none'}")


def _check_out(command: argparse.ArgumentParser, folder: Path | None) -> None:
    """Ends with exit code 2 when no file can be made in the folder that was asked for, which it creates."""
    if folder is None:
        return
    try:
        try_folder(folder)
    except OSError as error:
        command.error(_unwritable(folder, error))


def try_folder(folder: Path) -> None:
    """Creates a folder and a file in it that goes away at once; OSError when either is impossible."""
    folder.mkdir(parents=True, exist_ok=True)
    # Permission bits do not tell: root passes them, and /proc takes no file for all that.
    with tempfile.TemporaryFile(dir=folder):
        pass


def _unwritable(folder: Path, error: OSError) -> str:
    return f"--out must be a folder in which files can be written, and {folder} is none: {error.strerror}"


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m analysis`."""
    command = _parser("python -m analysis")
    command.add_argument("id", nargs="*", help="figures to draw; without any, all that have rows")
    command.add_argument("--for-sweep", metavar="NAME", help="the figures that this sweep fills")
    options = command.parse_args(argv)
    known = discover()
    unknown = [name for name in options.id if name not in known]
    if unknown:
        command.error(f"unknown figure {unknown[0]!r}; there are {', '.join(known)}")
    if options.id and options.for_sweep:
        command.error("name figures or --for-sweep, not both")
    check_choice(command, options)
    _check_out(command, options.out)
    ids = options.id
    if options.for_sweep:
        held = {options.for_sweep, *load.sweeps(options.results)}
        needs = {name: sweeps_of(module_of(name)) for name in known}
        # A figure that waits for another sweep's rows is no fault of this one.
        ids = [name for name, sweeps in needs.items() if options.for_sweep in sweeps and held.issuperset(sweeps)]
        if not ids:
            say(f"no figure is drawn from sweep {options.for_sweep!r}")
            return 0
    return run(ids, options, named=not options.for_sweep)


def file_main(file: str, argv: Sequence[str] | None = None) -> int:
    """`python -m analysis.<stem>`: the one figure of a file, with the same options."""
    stem = Path(file).stem
    command = _parser(f"python -m analysis.{stem}")
    options = command.parse_args(argv)
    check_choice(command, options)
    _check_out(command, options.out)
    return run([stem.split("_")[0]], options)


def _parser(prog: str) -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog=prog, description="Draws figures from measured rows and prints the numbers drawn."
    )
    add_options(command)
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"where the figures go (default: figures/ in the results folder for {common.HOME_GPU}, "
        "figures/SLUG/ for others)",
    )
    return command
