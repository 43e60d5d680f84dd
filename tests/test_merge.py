"""Merging results folders: every row arrives once, every bad line is named, the exit code says which happened."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sonic.env import env_path, read_envs, record
from sonic.merge import main
from sonic.record import RecordError, Row, append_row, newest, read_rows, rows_path
from tests.rows import make_env, make_row

GPU = "nvidia-h200"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


def fill(folder: Path, *rows: Row) -> Path:
    """A results folder with these rows and their environments."""
    for row in rows:
        append_row(rows_path(folder, row.sweep, row.gpu), row)
        record(make_env(env_id=row.env_id, gpu=row.gpu), env_path(folder, row.gpu))
    return folder


def test_rows_and_environments_arrive_once(tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = make_row(8, gpu=GPU)
    theirs = [make_row(16, gpu=GPU, env_id="env2"), make_row(16, gpu=GPU, sweep="tile"), make_row(16)]
    fill(results, mine)
    source = fill(tmp_path / "out" / "deep" / "results", mine, *theirs)
    assert main([str(tmp_path / "out"), "--results", str(results)]) == 0
    printed = capsys.readouterr().out
    assert f"{rows_path(results, 'smoke', GPU)}: 1 added (1 new points), 1 already there" in printed
    assert "environments: 2 added" in printed and "3 rows added, 1 already there, 0 lines not taken" in printed
    assert read_rows(rows_path(results, "smoke", GPU)) == ([mine, theirs[0]], [])
    assert read_rows(rows_path(results, "tile", GPU))[0] == [theirs[1]]
    assert read_rows(rows_path(results, "smoke", "cpu"))[0] == [theirs[2]]
    assert set(read_envs(env_path(results, GPU))[0]) == {"env1", "env2"}
    before = {path: path.read_bytes() for path in results.rglob("*.jsonl")}
    assert main([str(source), "--results", str(results)]) == 0
    assert "0 rows added, 4 already there" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in results.rglob("*.jsonl")}


def test_a_point_measured_twice_keeps_both_rows(tmp_path: Path, results: Path) -> None:
    old = make_row(8, gpu=GPU, time="2026-01-01T00:00:00Z", status="failed")
    new = make_row(8, gpu=GPU, time="2026-01-02T00:00:00Z")
    fill(results, new)
    fill(tmp_path / "out", old, new)
    assert main([str(tmp_path / "out"), "--results", str(results)]) == 0
    rows = read_rows(rows_path(results, "smoke", GPU))[0]
    assert rows == [new, old] and newest(rows) == {new.key: new}


def test_bad_lines_are_named_and_all_others_arrive(
    tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [make_row(n, gpu=GPU) for n in (8, 16)]
    source = fill(tmp_path / "out", rows[0])
    path = rows_path(source, "smoke", GPU)
    with path.open("ab") as file:
        file.write(b'{"schema":1,"\xfe":0}\n' + rows[1].line().encode() + b'\n{"schema":1,"key":"a')
    with env_path(source, GPU).open("ab") as file:
        file.write(b"{}\n")
    assert main([str(source), "--results", str(results)]) == 1
    captured = capsys.readouterr()
    assert f"not taken: {path}, line 2: byte 0xfe" in captured.err
    assert f"not taken: {path}, line 4: half-written last line" in captured.err
    assert f"not taken: {env_path(source, GPU)}, line 2: env_id: Field required" in captured.err
    assert "2 rows added, 0 already there, 3 lines not taken" in captured.out
    assert read_rows(rows_path(results, "smoke", GPU)) == (rows, [])


def test_a_torn_tail_of_the_target_swallows_nothing(tmp_path: Path, results: Path) -> None:
    mine, theirs = make_row(8, gpu=GPU), make_row(16, gpu=GPU)
    fill(results, mine)
    path = rows_path(results, "smoke", GPU)
    with path.open("ab") as file:
        file.write(b'{"schema":1,"key":"a')
    assert main([str(fill(tmp_path / "out", theirs)), "--results", str(results)]) == 0
    rows, faults = read_rows(path)
    assert rows == [mine, theirs] and len(faults) == 1


def test_a_row_whose_environment_is_missing_is_told(
    tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append_row(rows_path(tmp_path / "out", "smoke", GPU), make_row(8, gpu=GPU, env_id="lost"))
    assert main([str(tmp_path / "out"), "--results", str(results)]) == 0
    assert "1 rows name env_id 'lost'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("none", "must be an existing folder"),
        ("empty", "no rows files in it"),
        ("results", "neither may lie in the other"),
        (".", "neither may lie in the other"),
    ],
)
def test_refused_before_anything_is_done(
    tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str], source: str, text: str
) -> None:
    (tmp_path / "empty" / ".sonic").mkdir(parents=True)
    (tmp_path / "empty" / ".sonic" / "plan.jsonl").write_text("{}\n")
    fill(results, make_row(8))
    assert main([str(tmp_path / source), "--results", str(results)]) == 2
    assert text in capsys.readouterr().err


def test_results_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = fill(tmp_path / "out", make_row(8))
    (tmp_path / "file").touch()
    assert main([str(source), "--results", str(tmp_path / "file" / "results")]) == 2
    assert "cannot write there" in capsys.readouterr().err


def test_an_interrupted_merge_can_be_repeated(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [make_row(8, gpu=GPU), make_row(8, gpu=GPU, sweep="tile")]
    source = fill(tmp_path / "out", *rows)

    def refuse(path: Path, lines: list[Row], identity: object) -> int:
        if path.parent.name == "tile":
            raise RecordError(f"{path}: cannot write the file (No space left on device)")
        return append(path, lines, identity)

    import sonic.merge

    append = sonic.merge.append_missing
    with monkeypatch.context() as patch:
        patch.setattr(sonic.merge, "append_missing", refuse)
        assert main([str(source), "--results", str(results)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert main([str(source), "--results", str(results)]) == 0
    assert "1 rows added, 1 already there" in capsys.readouterr().out


def test_git_merges_rows_of_two_branches_by_union(tmp_path: Path) -> None:
    attributes = Path(__file__).resolve().parents[1] / ".gitattributes"
    clone = tmp_path / "clone"
    path = rows_path(clone / "results", "smoke", GPU)
    git = ["git", "-C", str(clone), "-c", "user.name=t", "-c", "user.email=t@t"]

    def commit(*rows: Row) -> None:
        fill(clone / "results", *rows)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "rows"], check=True)

    subprocess.run(["git", "init", "-q", "-b", "one", str(clone)], check=True)
    (clone / ".gitattributes").write_bytes(attributes.read_bytes())
    rows = [make_row(n, gpu=GPU, env_id=f"env{n}") for n in (8, 16, 32)]
    commit(rows[0])
    subprocess.run([*git, "checkout", "-q", "-b", "two"], check=True)
    commit(rows[1])
    subprocess.run([*git, "checkout", "-q", "one"], check=True)
    commit(rows[2])
    subprocess.run([*git, "merge", "-q", "-m", "both", "two"], check=True)
    merged, faults = read_rows(path)
    assert not faults and sorted(row.shape.n for row in merged) == [8, 16, 32]
    assert set(read_envs(env_path(clone / "results", GPU))[0]) == {"env8", "env16", "env32"}
