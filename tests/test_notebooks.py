"""Notebooks: the `.py` and `.ipynb` of a pair hold the same cells, no outputs are stored, and every notebook runs."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from analysis import load, paper
from sonic.record import TileSpec
from tests import analysis_rows
from tests.analysis_rows import measured

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
PAIRS = sorted(path.stem for path in NOTEBOOKS.glob("*.py"))


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str, list[str]]]:
    return [(cell.cell_type, cell.source, list(cell.metadata.get("tags", []))) for cell in notebook.cells]


@pytest.mark.parametrize("stem", PAIRS)
def test_pair_is_in_step_and_stripped(stem: str) -> None:
    stored = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4)
    assert cells(stored) == cells(jupytext.read(NOTEBOOKS / f"{stem}.py")), f"run: jupytext --sync notebooks/{stem}.py"
    for cell in stored.cells:
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)


def test_tour_compares_within_one_sweep() -> None:
    """A second sweep with a slower `sonic` leaves the ratios of the granularity sweep as they are."""
    source = (NOTEBOOKS / "tour.py").read_text()
    (cell,) = (cell.source for cell in jupytext.reads(source, "py:percent").cells if "fastest =" in cell.source)
    shape = paper.shape("7B", 256)
    rows = [
        measured(shape, "sonic", us=1000.0, sweep="granularity", held_bytes=1 << 30),
        measured(shape, "scattermoe", us=2000.0, sweep="granularity", held_bytes=3 << 30),
        # Slower with less memory: no part of what the fastest setting takes.
        measured(shape, "scattermoe", us=2500.0, sweep="granularity", held_bytes=1 << 30, tile=TileSpec(m=64)),
        measured(shape, "scattermoe", us=500.0, sweep="quick", held_bytes=1 << 30),
        measured(shape, "sonic", us=800.0, sweep="quick", held_bytes=1 << 30),
    ]
    shown = []
    exec(cell, {"rows": load.tidy(rows), "pd": pd, "display": shown.append})
    (table,) = shown
    assert len(table) == 1
    assert table["ms", "scattermoe"].item() == 2 and table["held_gib", "scattermoe"].item() == 3


@pytest.mark.slow
@pytest.mark.parametrize("filled", [True, False], ids=["rows", "no rows"])
@pytest.mark.parametrize("stem", PAIRS)
def test_notebook_runs(stem: str, filled: bool, tmp_path: Path) -> None:
    if filled:
        analysis_rows.write(tmp_path, analysis_rows.everything())
    notebook = nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source += f"\nresults_path = {str(tmp_path)!r}"
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert bool(pictures) == filled
