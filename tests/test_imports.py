"""Who may import whom (design section 4), read from the sources, and what importing a module really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = sorted((ROOT / "sonic" / "kernels").glob("*.py"))
ANALYSIS = sorted((ROOT / "analysis").glob("*.py"))
SOURCES = [*sorted((ROOT / "sonic").rglob("*.py")), *ANALYSIS]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, at its top or inside a function; of sonic also the members."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            found.add(base)
            if base.split(".")[0] == "sonic":
                found |= {f"{base}.{alias.name}" for alias in node.names if alias.name.islower()}
    return found


def top(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported(path)}


@pytest.mark.parametrize("path", KERNELS, ids=name)
def test_a_kernel_imports_torch_triton_and_kernels(path: Path) -> None:
    allowed = {"torch", "triton", "sonic", *sys.stdlib_module_names}
    if path.name == "tuning.py":
        allowed.add("filelock")
    assert top(path) <= allowed
    ours = {module for module in imported(path) if module.startswith("sonic.")}
    assert all(module.startswith(("sonic.kernels", "sonic.shapes")) for module in ours), ours


@pytest.mark.parametrize("path", ANALYSIS, ids=name)
def test_analysis_never_imports_torch(path: Path) -> None:
    assert not top(path) & {"torch", "triton", "hydra", "wandb"}


def test_only_config_and_sweep_know_hydra() -> None:
    users = {name(path) for path in SOURCES if top(path) & {"hydra", "omegaconf"}}
    assert users <= {"sonic/config.py", "sonic/sweep.py"}


def test_only_tracking_knows_wandb() -> None:
    assert {name(path) for path in SOURCES if "wandb" in top(path)} == {"sonic/tracking.py"}


def test_baselines_are_imported_in_their_adapter() -> None:
    baselines = {"transformers", "scattermoe", "sonicmoe", "quack", "megablocks", "liger_kernel", "deep_gemm"}
    users = {path for path in SOURCES if top(path) & baselines}
    assert all(name(path).startswith("sonic/impls/") for path in users), users


@pytest.mark.parametrize("rows", ["measure", "record"])
def test_measuring_and_recording_know_nothing_of_the_layer(rows: str) -> None:
    ours = imported(ROOT / "sonic" / f"{rows}.py")
    assert not any(module.startswith(("sonic.kernels", "sonic.layer", "sonic.impls")) for module in ours), ours


@pytest.mark.parametrize(
    "module",
    [
        "sonic",
        "sonic.shapes",
        "sonic.record",
        "sonic.config",
        "sonic.sweep",
        "sonic.merge",
        "sonic.doctor",
        "sonic.features",
        "analysis",
    ],
)
def test_importing_it_loads_neither_torch_nor_wandb(module: str) -> None:
    """In a process of its own. Triton and baselines stay out as well; Hydra may come with its users."""
    absent = {"torch", "triton", "wandb", "transformers"}
    if module not in ("sonic.config", "sonic.sweep"):
        absent |= {"hydra", "omegaconf"}
    script = f"import sys, {module}; print(*sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_a_layer_comes_on_first_use() -> None:
    script = "import sys, sonic; assert 'torch' not in sys.modules; sonic.MoE; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
