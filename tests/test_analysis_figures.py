"""Every figure draws from rows of its sweep; gaps are gaps; mixing is refused; the command line answers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import common, figures, load, report
from sonic.record import Knobs
from sonic.shapes import Shape
from tests import analysis_rows
from tests.analysis_rows import H200, measured, unmeasured, write
from tests.rows import make_env

SHAPE = Shape(T=1024, d=512, n=128, E=16, K=4)
ROWS = analysis_rows.everything()
#: The figures that these rows fill.
IDS = [name for name in figures.discover() if figures.module_of(name).SWEEP in {row.sweep for row in ROWS}]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(tmp_path_factory.mktemp("results"), ROWS)
    (folder / "env.jsonl").write_text(make_env(gpu=H200, gpu_name="NVIDIA H200").model_dump_json() + "\n")
    return folder


def lines_of(ax: Axes, colour: str) -> list[np.ndarray]:
    """y data of the lines of an implementation's colour, the paper's hollow ones left out."""
    return [
        np.asarray(line.get_ydata(), float)
        for line in ax.lines
        if line.get_color() == colour and line.get_markerfacecolor() != "white"
    ]


def texts_of(figure: Figure) -> str:
    found = [text.get_text() for text in figure.texts]
    for ax in figure.axes:
        found += [text.get_text() for text in ax.texts] + [ax.get_xlabel(), ax.get_ylabel(), ax.get_title()]
    return "\n".join(found)


def test_every_figure_file_is_found_and_complete() -> None:
    known = figures.discover()
    assert {"fig1", "sparsity", "tile", "smoke", "quick"} <= set(IDS)
    for figure_id in known:
        module = figures.module_of(figure_id)
        assert module.__doc__ and module.TITLE and module.SWEEP
        assert all(callable(getattr(module, name)) for name in ("select", "draw", "table", "main"))
    with pytest.raises(KeyError, match="unknown figure 'fig99'; there are fig1"):
        figures.module_of("fig99")


@pytest.mark.parametrize("figure_id", IDS)
def test_every_figure_draws(results: Path, figure_id: str) -> None:
    drawn = figures.build(figure_id, results)
    assert drawn.gpu == ("cpu" if figure_id == "smoke" else H200)
    assert len(drawn.table) and not drawn.faults
    assert figures.png(drawn.figure, dpi=50).startswith(b"\x89PNG")
    inches = drawn.figure.get_size_inches()
    assert 4 < inches[0] < 20 and 2 < inches[1] < 20
    # Nothing hangs over the edge of the sheet.
    drawn.figure.canvas.draw()
    box = drawn.figure.get_tightbbox()
    assert box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < inches[0] + 0.02 and box.y1 < inches[1] + 0.02


def test_fig1_draws_measured_values_and_a_gap(results: Path) -> None:
    drawn = figures.build("fig1", results)
    ax = drawn.figure.axes[0]
    assert "7B" in ax.get_title()
    sonic = lines_of(ax, common.look("sonic").colour)
    assert len(sonic) == 2  # whole layers, and the one to hold against the bound
    assert all(line == pytest.approx([500.0] * 3) for line in sonic)
    (scattermoe,) = lines_of(ax, common.look("scattermoe").colour)
    assert scattermoe[:2] == pytest.approx([250.0, 250.0]) and np.isnan(scattermoe[2])
    assert "oom" in "\n".join(text.get_text() for text in ax.texts)
    assert not lines_of(ax, common.look("megablocks").colour)
    assert [handle.get_text() for handle in drawn.figure.legends[0].get_texts()] == [
        "sonic (triton)", "sonic (triton, experts, balanced)", "scattermoe", "torch_grouped_mm",
        "cublas_bmm (experts, balanced)", "paper, H100 (Figs 1, 13, 14; digitised)", "paper's formula",
    ]  # fmt: skip
    assert "megablocks: unavailable (not installed)" in texts_of(drawn.figure)


def test_fig1_table_holds_ours_the_papers_and_ratios(results: Path) -> None:
    table = figures.build("fig1", results).table
    line = table[(table["size"] == "7B") & (table.n == 512) & (table.series == "scattermoe")].iloc[0]
    assert (line.fwd_tflops, line.paper_fwd_tflops) == (pytest.approx(250), 235)
    assert line.fwd_vs_paper == pytest.approx(250 / 235)
    assert line.sonic_speed == pytest.approx(2.0)
    assert line.paper_sonic_speed == pytest.approx(1.80, abs=0.01)
    assert line.held_vs_formula == pytest.approx(1.0)
    assert line.of_bound == pytest.approx(0.4)
    assert "megablocks" not in set(table.series)


def test_sparsity_derives_the_backward(results: Path) -> None:
    drawn = figures.build("sparsity", results)
    assert "backward (fwd_bwd" in texts_of(drawn.figure)
    sonic = drawn.table[drawn.table.series.str.startswith("sonic")]
    assert sonic.bwd_tflops.to_numpy() == pytest.approx(500.0)
    assert sonic.padding.to_numpy() == pytest.approx(1 / 16)
    assert drawn.table[drawn.table.status == "crashed"].fwd_tflops.isna().all()


def test_tile_names_the_best_and_what_did_not_fit(results: Path) -> None:
    drawn = figures.build("tile", results)
    assert set(drawn.table["best m x n x k x stages"]) == {"64x128x32x4"}
    assert drawn.table.statuses.str.contains("1 out_of_resources").all()
    assert texts_of(drawn.figure).count("no\nfit") == len(analysis_rows.KERNELS)


def test_a_cpu_figure_says_that_it_is_no_gpu_speed(results: Path) -> None:
    text = texts_of(figures.build("smoke", results).figure)
    assert "CPU wall time, Triton interpreted;\nnot GPU speed" in text
    assert "not GPU speed" not in texts_of(figures.build("quick", results).figure)


def test_saving_is_deterministic_and_keeps_cpu_figures_apart(results: Path, tmp_path: Path) -> None:
    first = figures.save(figures.build("smoke", results), tmp_path / "a")
    second = figures.save(figures.build("smoke", results), tmp_path / "b")
    assert [path.relative_to(tmp_path / "a").as_posix() for path in first] == [
        "cpu/smoke_overview.pdf",
        "cpu/smoke_overview.png",
    ]
    digests = [[hashlib.sha256(path.read_bytes()).hexdigest() for path in paths] for paths in (first, second)]
    assert digests[0] == digests[1]


def test_crossing_another_axis_adds_series() -> None:
    rows = load.tidy(
        [
            measured(SHAPE),
            measured(SHAPE, dtype="fp16"),
            measured(SHAPE, knobs=Knobs(family="triton", gather="separate")),
        ]
    )
    names = set(common.label_series(rows).series)
    assert names == {
        "sonic (triton, bf16, gather=fused)",
        "sonic (triton, fp16, gather=fused)",
        "sonic (triton, bf16, gather=separate)",
    }


def test_a_failure_of_unknown_family_joins_the_only_one() -> None:
    failed = unmeasured(Shape(512, 512, 128, 16, 4), "failed", knobs=Knobs(family="auto"))
    assert set(common.label_series(load.tidy([measured(SHAPE), failed])).series) == {"sonic (triton)"}


def test_notes_of_rows_and_throttling_stand_below(tmp_path: Path) -> None:
    rows = [
        measured(SHAPE, sweep="granularity", note="its tuner was cut to 4 tiles", throttled=True),
        measured(SHAPE, "scattermoe", sweep="granularity"),
    ]
    write(tmp_path, rows)
    text = texts_of(figures.build("fig1", tmp_path).figure)
    assert "sonic: its tuner was cut to 4 tiles" in text
    assert "1 of 2 rows were taken while the card throttled" in text


def test_colours_are_one_per_implementation() -> None:
    colours = [look.colour for look in common.LOOKS.values()]
    assert len(set(colours)) == len(colours)
    assert all(matplotlib.colors.is_color_like(colour) for colour in colours)
    assert common.look("brand_new") == common.look("brand_new")
    assert common.look("brand_new").colour not in colours


def test_rows_of_two_cards_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path,
        [*analysis_rows.tiles(), *(row.model_copy(update={"gpu": "nvidia-h100"}) for row in analysis_rows.tiles())],
    )
    with pytest.raises(load.SelectionError, match=r"2 GPUs \(nvidia-h100, nvidia-h200\)"):
        figures.build("tile", tmp_path)
    assert figures.build("tile", tmp_path, gpu="nvidia-h100").gpu == "nvidia-h100"
    assert figures.main(["tile", "--results", str(tmp_path)]) == 2
    assert "choose one with --gpu" in capsys.readouterr().err


def test_command_draws_what_has_rows_and_lists_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, analysis_rows.tiles())
    path = tmp_path / "tile" / f"{H200}.jsonl"
    path.write_bytes(path.read_bytes() + b"torn")
    assert figures.main(["--results", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert f"wrote {tmp_path / 'figures' / 'tile_sizes.png'}" in out
    assert "fig1: no rows; `python -m sonic.sweep sweeps=granularity` fills it" in out
    assert f"{path}:{len(list(analysis_rows.tiles())) + 1}: left out" in err
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == ["tile_sizes.pdf", "tile_sizes.png"]


def test_command_line_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, analysis_rows.tiles())
    here = ["--results", str(tmp_path), "--out", str(tmp_path / "drawn")]
    assert figures.main(["fig1", *here]) == 1
    assert figures.main(["--for-sweep", "tile", "--gpu", H200, *here]) == 0
    assert (tmp_path / "drawn" / "tile_sizes.png").exists()
    assert figures.main(["--for-sweep", "custom", *here]) == 0
    assert "no figure is drawn from sweep 'custom'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig99"], "unknown figure 'fig99'; there are fig1"),
        (["tile", "--for-sweep", "tile"], "not both"),
        (["--gpu", "nvidia-b200"], "no rows of --gpu 'nvidia-b200'; there are rows of cpu, nvidia-h200"),
        (["--clock", "wall"], "invalid choice: 'wall'"),
        (["--results", "/nowhere/at/all"], "is no folder"),
    ],
)
def test_command_line_refusals(
    results: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        figures.main(["--results", str(results), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_figure_file_runs_on_its_own(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = figures.module_of("tile").__file__
    assert figures.file_main(file, ["--results", str(results), "--out", str(tmp_path)]) == 0
    assert f"wrote {tmp_path / 'tile_sizes.pdf'}" in capsys.readouterr().out


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    write(tmp_path, [unmeasured(SHAPE, "unavailable", impl="scattermoe", sweep="granularity")])
    with pytest.raises(figures.NotDrawn, match=r"no measured row of nvidia-h200 \(rows: 1 unavailable\)"):
        figures.build("fig1", tmp_path)
    write(tmp_path, [measured(SHAPE, sweep="tile")])
    with pytest.raises(figures.NotDrawn, match="none of the 1 rows of nvidia-h200 belongs in it"):
        figures.build("tile", tmp_path)


def test_report_is_one_page_without_outside_references(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert report.main(["--results", str(results), "--out", str(page)]) == 0
    text = page.read_text()
    assert text.count("data:image/png;base64,") == len(IDS)
    assert 'src="http' not in text and 'href="http' not in text
    assert "NVIDIA H200" in text and "crashed" in text and "Rows that must not be" in text


def test_report_of_no_rows(tmp_path: Path) -> None:
    text = report.render(tmp_path)
    assert "No rows." in text and "sweeps=granularity" in text


@pytest.mark.skipif(not list(load.RESULTS.glob("*/*.jsonl")), reason="no rows are committed yet")
def test_every_figure_builds_from_the_committed_results() -> None:
    # Rows of this machine's own CPU sweeps lie there as well; they are not part of the clone.
    slugs = [slug for slug in load.gpus(load.rows(load.RESULTS)[0]) if slug != load.CPU]
    for slug in slugs:
        for figure_id in figures.discover():
            try:
                drawn = figures.build(figure_id, load.RESULTS, slug)
            except figures.NotDrawn:
                continue
            assert len(drawn.table) and not drawn.faults
