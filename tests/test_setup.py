"""Set-up and README: versions agree, a wheel is whole, make finds an interpreter, what the README shows runs."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sonic import config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def sweep_lines() -> list[list[str]]:
    """The overrides of every `python -m sonic.sweep` line that the README shows as it is to be typed."""
    lines = [line for block in blocks("sh") for line in block.splitlines() if "sonic.sweep" in line]
    shown = [line.replace("python", "printf '%s\\0'", 1) for line in lines]
    # by bash, which splits braces that are not quoted
    typed = [subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout for line in shown]
    return [line.split("\0")[2:-1] for line in typed]


def test_constraints_pin_what_the_project_asks_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(pins) == len(lines), "a package is pinned twice"
    extras = PROJECT["optional-dependencies"]
    asked = [Requirement(text) for text in (*PROJECT["dependencies"], *extras["notebooks"], *extras["dev"])]
    for requirement in asked:
        if canonicalize_name(requirement.name) != PROJECT["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)


def test_wheel_carries_configs_and_lists_experiments(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    wheel = next(builder.build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    for folder in ("conf", "sweeps"):
        wanted = {f"sonic/_assets/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.yaml")}
        assert wanted and wanted <= names
    assert not [name for name in names if not name.startswith(("sonic/", "sonic_harness-"))]
    listed = subprocess.run(
        [sys.executable, "-m", "sonic.sweep", "--list"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True,
    )  # fmt: skip
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()[:-1]] == config.experiments()


def test_make_skips_interpreters_that_do_not_start(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    scripts = {"first/python3.12": "exit 127", "first/python3.11": "exit 1", "good one/python3": 'exec "$REAL" "$@"'}
    for name, line in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("make", "sh", "nproc"):
        (tools / tool).symlink_to(shutil.which(tool))
    path = os.pathsep.join(str(tmp_path / name) for name in ("first", "missing", "good one", "tools"))
    env = {"PATH": path, "REAL": sys.executable}
    made = subprocess.run(["make", ".venv/bin/python"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "good one/python3 -m venv .venv" in made.stdout
    assert (tmp_path / ".venv/bin/python").exists()

    shutil.rmtree(tmp_path / ".venv")
    shutil.rmtree(tmp_path / "good one")
    made = subprocess.run(["make", ".venv/bin/python"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert made.returncode != 0 and "Python 3.11 or 3.12" in made.stderr


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1].endswith("exec make test")


def test_readme_python_runs() -> None:
    """All snippets in one process, each with names of its own."""
    snippets = blocks("python")
    assert snippets
    program = "\n".join(
        f"exec(compile({text!r}, 'README.md snippet {i}', 'exec'), {{}})" for i, text in enumerate(snippets)
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("overrides", sweep_lines(), ids=" ".join)
def test_readme_sweeps_expand(overrides: list[str]) -> None:
    assert config.load(overrides).points


def test_readme_names_what_exists() -> None:
    modules = set(re.findall(r"python -m (\w+(?:\.\w+)*)", README))
    assert {"sonic.sweep", "sonic.doctor", "sonic.merge", "analysis", "analysis.report"} <= modules
    for module in modules:
        assert importlib.util.find_spec(module), module
    for place in re.findall(r"`((?:sonic|analysis|conf|sweeps|notebooks)/[\w./]*)`", README):
        assert (ROOT / place).exists(), place
