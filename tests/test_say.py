"""A reader that leaves early ends no command and gets no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TALK = "import sys\nfrom sonic.say import say\nfor i in range(5): say(f'line {i}'{file})\nsys.exit(3)"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_command_goes_on_without_its_reader(stream: str) -> None:
    code = TALK.replace("{file}", f", sys.{stream}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes)  # type: ignore[call-overload]
    left, other = (process.stdout, process.stderr) if stream == "stdout" else (process.stderr, process.stdout)
    left.close()
    assert other.read() == b""
    other.close()
    assert process.wait(timeout=30) == 3


def test_lines_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    from sonic.say import say

    say("one")
    say()
    say("two", sys.stderr)
    assert capsys.readouterr() == ("one\n\n", "two\n")


def test_merge_ends_quietly_when_nobody_reads(tmp_path: Path) -> None:
    from tests.test_merge import fill, make_row

    fill(tmp_path / "out", make_row())
    command = [sys.executable, "-m", "sonic.merge", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=30) == 0
