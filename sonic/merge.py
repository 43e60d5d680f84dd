"""`python -m sonic.merge DIR`: brings rows measured elsewhere into `results/`, with the environments that they name.

    python -m sonic.merge ../from-cluster/results
    python -m sonic.merge out/results more/results --results results

DIR has the layout of a results folder, or holds such folders at any depth. A row goes into the file that its own sweep
and GPU name. A row that the file holds already is passed over, so a merge can be repeated; rows of one key that were
measured at different times all stay, and readers take the newest. Lines that are no rows are named and left in place.

Exit codes: 0 every row of DIR is in results now; 1 some lines of DIR are no rows, all others are in; 2 bad command
line, or a folder or file cannot be read or written (nothing is lost, the same command can be given again).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sonic.env import Env, env_path, read_envs
from sonic.record import (
    Fault,
    RecordError,
    Row,
    append_missing,
    default_results,
    ensure_writable,
    read_lines,
    read_rows,
    rows_path,
)
from sonic.say import say


@dataclass
class FileCount:
    """What a merge did to one file: rows added, rows that it held already, keys that it did not hold before."""

    added: int = 0
    known: int = 0
    new_keys: int = 0


@dataclass
class Report:
    """What a merge did. `orphans` counts rows by an `env_id` that no file of environments explains."""

    files: dict[Path, FileCount] = field(default_factory=dict)
    envs: int = 0
    faults: list[Fault] = field(default_factory=list)
    orphans: dict[str, int] = field(default_factory=dict)


def find(folder: Path) -> tuple[list[Path], list[Path]]:
    """The rows files and the environment files below a folder, sorted; hidden folders are passed over."""
    paths = [
        path
        for path in sorted(folder.rglob("*.jsonl"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    envs = [path for path in paths if path.name in ("env.jsonl", "env-cpu.jsonl")]
    return [path for path in paths if path not in envs], envs


def merge(sources: Sequence[Path], results: Path) -> Report:
    """Adds every row and environment below `sources` that `results` lacks. RecordError when a file cannot be used."""
    report = Report()
    rows: dict[Path, list[Row]] = {}
    envs: dict[Path, dict[str, Env]] = {}
    for source in sources:
        row_files, env_files = find(source)
        for path in row_files:
            good, faults = read_rows(path)
            report.faults += faults
            for row in good:
                rows.setdefault(rows_path(results, row.sweep, row.gpu), []).append(row)
        for path in env_files:
            lines, faults = read_lines(path, Env)
            report.faults += faults
            for env in lines:
                envs.setdefault(env_path(results, env.gpu), {})[env.env_id] = env

    # Environments first: an interrupted merge then leaves no row whose environment is missing.
    used = {row.env_id for found in rows.values() for row in found}
    for path, group in sorted(envs.items()):
        report.envs += append_missing(path, [env for env in group.values() if env.env_id in used], _env_id)
    explained = {env_id for gpu in ("cpu", "gpu") for env_id in read_envs(env_path(results, gpu))[0]}
    for path, found in sorted(rows.items()):
        held = {row.key for row in read_rows(path)[0]}
        added = append_missing(path, found, Row.line)
        report.files[path] = FileCount(added, len(found) - added, len({row.key for row in found} - held))
        for row in found:
            if row.env_id not in explained:
                report.orphans[row.env_id] = report.orphans.get(row.env_id, 0) + 1
    return report


def _env_id(env: Env) -> str:
    return env.env_id


def refusal(sources: Sequence[Path], results: Path) -> str | None:
    """Why these folders cannot be merged, or None."""
    for source in sources:
        if not source.is_dir():
            return f"DIR is {str(source)!r}: it must be an existing folder"
        inside, outside = source.resolve(), results.resolve()
        if inside == outside or inside.is_relative_to(outside) or outside.is_relative_to(inside):
            return f"DIR is {str(source)!r} and results is {str(results)!r}: neither may lie in the other"
        if not any(find(source)):
            return f"DIR is {str(source)!r}: no rows files in it; they are <sweep>/<gpu>.jsonl"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sonic.merge", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("DIR", nargs="+", type=Path, help="a results folder from elsewhere")
    parser.add_argument("--results", type=Path, default=None, help="where to (default: results/ of the clone)")
    given = parser.parse_args(arguments)
    results = given.results or default_results()
    reason = refusal(given.DIR, results)
    if reason is not None:
        say(f"merge: {reason}", sys.stderr)
        return 2
    try:
        ensure_writable(results)
        report = merge(given.DIR, results)
    except RecordError as error:
        say(f"merge: {error}", sys.stderr)
        return 2
    for path, count in report.files.items():
        say(f"{path}: {count.added} added ({count.new_keys} new points), {count.known} already there")
    say(f"environments: {report.envs} added")
    for fault in report.faults:
        say(f"not taken: {fault}", sys.stderr)
    for env_id, number in report.orphans.items():
        say(f"warning: {number} rows name env_id {env_id!r}, which no env.jsonl explains", sys.stderr)
    added = sum(count.added for count in report.files.values())
    known = sum(count.known for count in report.files.values())
    say(f"merged into {results}: {added} rows added, {known} already there, {len(report.faults)} lines not taken")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
