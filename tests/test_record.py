"""Rows files: what is written comes back, whatever else happened to the file."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import multiprocessing
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from sonic import derive
from sonic.record import (
    Knobs,
    RecordError,
    Row,
    TileSpec,
    append_missing,
    append_row,
    default_results,
    effective,
    ensure_appendable,
    ensure_writable,
    newest,
    now,
    point_key,
    read_rows,
    rows_path,
)
from tests.rows import make_point, make_row


def test_a_row_comes_back_as_it_was(tmp_path: Path) -> None:
    path = rows_path(tmp_path, "smoke", "cpu")
    rows = [make_row(8, note="naïve \u2028 text\nsecond line"), make_row(16, status="wrong", event_us=None)]
    for row in rows:
        append_row(path, row)
    assert path == tmp_path / "smoke" / "cpu.jsonl"
    assert read_rows(path) == (rows, [])
    assert path.read_bytes().count(b"\n") == 2
    assert json.loads(path.read_text().splitlines()[0])["schema"] == 1


def test_an_infinite_or_undefined_error_ratio_survives(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, make_row(errors={"twin.o": math.inf, "twin.dx": math.nan}))
    (row,), faults = read_rows(path)
    assert not faults and row.errors is not None
    assert row.errors["twin.o"] == math.inf and math.isnan(row.errors["twin.dx"])
    assert derive.worst_error(row) == ("twin.dx", pytest.approx(math.nan, nan_ok=True))


def test_no_file_means_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none.jsonl") == ([], [])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot read the file \(Is a directory\)"):
        read_rows(tmp_path)


def test_appending_is_tried_without_writing(tmp_path: Path) -> None:
    path = tmp_path / "smoke" / "cpu.jsonl"
    ensure_appendable(path)
    assert list(path.parent.iterdir()) == []
    append_row(path, make_row())
    before = path.read_bytes()
    ensure_appendable(path)
    assert path.read_bytes() == before
    for bad, why in ((path.parent, "Is a directory"), (path / "cpu.jsonl", "Not a directory")):
        with pytest.raises(RecordError, match=rf"{bad}: cannot write the file \({why}\)"):
            ensure_appendable(bad)


BAD_LINES = {
    "half_written": (b'{"schema":1,"key":"ab', "not JSON (Unterminated string starting at column 19)"),
    "wrong_byte": (b'{"schema":1,"key":"\xff"}', "byte 0xff at column 20 is not UTF-8"),
    "not_an_object": (b"[1, 2]", "the line is [1, 2]"),
    "two_rows_in_one": (make_row().line().encode() * 2, "not JSON (Extra data"),
    "zero_bytes": (b"\x00" * 8, "not JSON"),
    "missing_fields": (b'{"schema":1}', "sweep: Field required"),
    "newer_schema": (make_row().line().replace('"schema":1', '"schema":9').encode(), "schema is 9: this version reads"),
    "unknown_field": (make_row().line().replace('"schema"', '"extra":1,"schema"').encode(), "extra is 1"),
    "wrong_type": (make_row().line().replace('"seed":0', '"seed":"0"').encode(), "seed is '0': Input should be"),
    "bad_size": (make_row().line().replace('"K":2', '"K":9').encode(), "K must not exceed E"),
    "bad_status": (make_row().line().replace('"ok"', '"fine"').encode(), "status is 'fine': Input should be 'ok'"),
    "escaping_path": (make_row().line().replace('"smoke"', '"../x"').encode(), "it names a file"),
    "no_offset": (make_row(time="2026-01-31T12:00:00Z").line().replace("00Z", "00").encode(), "with an offset"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_and_costs_no_row(tmp_path: Path, case: str) -> None:
    line, text = BAD_LINES[case]
    path = tmp_path / "cpu.jsonl"
    first, last = make_row(8), make_row(16)
    append_row(path, first)
    with path.open("ab") as file:
        file.write(line + b"\n")
    append_row(path, last)
    rows, faults = read_rows(path)
    assert rows == [first, last]
    assert len(faults) == 1 and text in str(faults[0])
    assert str(faults[0]).startswith(f"{path}, line 2: ")
    assert line in path.read_bytes()


def test_a_torn_tail_is_reported_and_closed_by_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    first, last = make_row(8), make_row(16)
    append_row(path, first)
    with path.open("ab") as file:
        file.write(first.line().encode()[:100])
    rows, (fault,) = read_rows(path)
    assert rows == [first] and "half-written last line" in str(fault) and ", line 2: " in str(fault)
    append_row(path, last)
    rows, (fault,) = read_rows(path)
    assert rows == [first, last] and ", line 2: " in str(fault)


def test_a_whole_last_line_without_its_newline_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    first, last = make_row(8), make_row(16)
    path.write_text(first.line())
    assert read_rows(path) == ([first], [])
    append_row(path, last)
    assert read_rows(path) == ([first, last], [])


def test_each_row_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (writes.append(data), write(fd, data))[1])
    row = make_row()
    append_row(tmp_path / "cpu.jsonl", row)
    assert writes == [row.line().encode() + b"\n"]


def test_a_full_disk_is_an_error_and_costs_no_other_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpu.jsonl"
    first, last = make_row(8), make_row(16)
    append_row(path, first)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:50]))
        with pytest.raises(RecordError, match="only 50 of"):
            append_row(path, last)
    append_row(path, last)
    rows, faults = read_rows(path)
    assert rows == [first, last] and len(faults) == 1


def test_a_file_system_without_locks_still_takes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    row = make_row()
    append_row(tmp_path / "cpu.jsonl", row)
    assert read_rows(tmp_path / "cpu.jsonl") == ([row], [])


def _append_many(path: Path, first: int) -> None:
    for n in range(first, first + 25):
        append_row(path, make_row(n, note="x" * 20_000))


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path, first)) for first in (1, 101, 201)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    rows, faults = read_rows(path)
    assert not faults and len({row.key for row in rows}) == len(rows) == 75


def test_append_missing_adds_each_row_once(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    rows = [make_row(n) for n in (8, 16, 32)]
    append_row(path, rows[0])
    assert append_missing(path, [*rows, rows[1]], Row.line) == 2
    assert append_missing(path, rows, Row.line) == 0
    assert read_rows(path) == (rows, [])


@pytest.mark.parametrize("make", [lambda p: p / "file" / "results", lambda p: p / "file"], ids=["below_file", "file"])
def test_a_results_folder_that_cannot_be_made(tmp_path: Path, make: object) -> None:
    (tmp_path / "file").touch()
    folder = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(RecordError, match=r"results is '.*file.*': cannot write there \(.*\); it must be a folder"):
        ensure_writable(folder)


def test_a_read_only_results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write anywhere, so the refusal is made by hand.
    def refuse(*_arguments: object, **_named: object) -> int:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(RecordError, match=r"Permission denied.*results=DIR"):
        ensure_writable(tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RecordError, match=r"cpu.jsonl: cannot write the file \(Permission denied\)"):
        append_row(tmp_path / "cpu.jsonl", make_row())


def test_ensure_writable_leaves_an_empty_folder(tmp_path: Path) -> None:
    ensure_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_the_newest_row_of_a_key_wins_whatever_its_place() -> None:
    old = make_row(8, time="2026-01-31T12:00:00+00:00")
    new = make_row(8, time="2026-01-31T14:00:00.5+01:00", status="failed")
    tie = make_row(8, time="2026-01-31T13:00:00.5+00:00", note="later line")
    other = make_row(16)
    assert newest([new, other, old]) == {"sonic-8": new, "sonic-16": other}
    assert newest([new, tie])["sonic-8"] is tie


def test_effective_drops_only_what_the_adapter_does_not_take() -> None:
    point = make_point(tile=TileSpec(m=64, n=128), knobs=Knobs(gather="separate", family="torch"))
    kept, dropped = effective(point, {"tile.m", "knobs.family"})
    assert kept.tile == TileSpec(m=64) and kept.knobs == Knobs(family="torch")
    assert dropped == ["knobs.gather", "tile.n"]
    assert effective(make_point(), set()) == (make_point(), [])


def test_the_key_tells_apart_what_must_not_be_mixed() -> None:
    def key(point=make_point(), version="1", gpu="cpu", method=1, interpreter=True, knobs=("tile.m",)):  # noqa: B008
        return point_key(point, version, gpu, method, interpreter, knobs)

    base = key()
    assert len(base) == 16 and base == key()
    others = [
        key(make_point(32)),
        key(make_point(seed=1)),
        key(make_point(impl="scattermoe")),
        key(make_point(tile=TileSpec(m=64))),
        key(version="2"),
        key(gpu="nvidia-h200"),
        key(method=2),
        key(interpreter=False),
    ]
    assert len({base, *others}) == len(others) + 1
    assert key(make_point(tile=TileSpec(m=64)), knobs=()) == base
    assert key(knobs=("tile.m", "tile.n")) == base


def test_a_bad_row_cannot_be_made() -> None:
    naive = "2026-01-31T12:00:00"
    for changes in ({"sweep": "a/b"}, {"gpu": ""}, {"time": "yesterday"}, {"time": naive}, {"schema": 2}):
        with pytest.raises(ValidationError):
            make_row(**changes)
    assert make_row(time=now())


def test_rates_come_from_the_median_of_the_right_time() -> None:
    row = make_row()
    assert derive.clock(row) == "event_us" and derive.median_us(row) == 110
    assert derive.tflops(row) == pytest.approx(0.1) and derive.gbps(row) == pytest.approx(10)
    on_gpu = make_row(device_us=[50.0, 60.0])
    assert derive.clock(on_gpu) == "device_us" and derive.median_us(on_gpu) == 55
    assert derive.median_us(on_gpu, "event_us") == 110
    assert derive.tflops(on_gpu, "event_us") == derive.tflops(row)
    assert derive.peak_bytes(make_row(peak_fwd_bytes=3)) == 3 and derive.gib(1 << 30) == 1


def test_what_was_not_measured_is_none_and_never_zero() -> None:
    row = make_row(status="oom", event_us=None, flops_model=None, bytes_model=None, errors=None)
    for value in (derive.clock, derive.median_us, derive.tflops, derive.gbps, derive.peak_bytes, derive.worst_error):
        assert value(row) is None
    assert derive.gib(None) is None
    assert derive.tflops(make_row(flops_model=0)) == 0
    assert derive.counts([row, row, make_row()]) == {"oom": 2, "ok": 1}


def test_the_default_results_folder_is_the_clone_s() -> None:
    assert default_results().name == "results"
