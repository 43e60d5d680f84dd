"""Every figure draws from rows of its sweep; gaps are gaps; mixing is refused; the command line answers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis import common, figures, load, paper, report
from sonic.record import Knobs, Method, Routing, TileSpec
from sonic.shapes import Shape
from tests import analysis_rows
from tests.analysis_rows import H200, check_sheet, measured, unmeasured, write
from tests.rows import make_env

SHAPE = Shape(T=1024, d=512, n=128, E=16, K=4)
ROWS = analysis_rows.everything()
#: The figures that these rows fill.
IDS = [
    name
    for name in figures.discover()
    for module in (figures.module_of(name),)
    if {module.SWEEP, *getattr(module, "ALSO", ())} & {row.sweep for row in ROWS}
]


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
    assert {"fig1", "fig14", "roofline", "skew", "sparsity", "tile", "smoke", "quick"} <= set(IDS)
    for figure_id in known:
        module = figures.module_of(figure_id)
        assert module.__doc__ and module.TITLE and module.SWEEP
        assert all(callable(getattr(module, name)) for name in ("select", "draw", "table", "main"))
    with pytest.raises(KeyError, match="unknown figure 'fig99'; there are distributions, fig1"):
        figures.module_of("fig99")


@pytest.mark.parametrize("figure_id", IDS)
def test_every_figure_draws(results: Path, figure_id: str) -> None:
    drawn = figures.build(figure_id, results)
    assert drawn.gpu == ("cpu" if figure_id == "smoke" else H200)
    assert len(drawn.table) and not drawn.faults
    check_sheet(drawn)


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


def bars_of(ax: Axes, colour: str) -> list[float]:
    """Heights of the bars of an implementation's full colour, NaN where there is none."""
    return [
        bar.get_height()
        for bar in ax.patches
        if isinstance(bar, Rectangle) and matplotlib.colors.to_hex(bar.get_facecolor()) == colour
    ]


def test_fig14_draws_bars_the_papers_marks_statuses_and_the_bound(results: Path) -> None:
    drawn = figures.build("fig14", results)
    forward, both, forward_30b, _ = drawn.figure.axes
    assert forward.get_title() == "7B: T=24576 d=1536, forward" and both.get_title().endswith("forward + backward")
    for ax in (forward, both):
        assert bars_of(ax, common.look("sonic").colour) == pytest.approx([500.0] * 3)
        assert bars_of(ax, common.look("scattermoe").colour) == pytest.approx([250.0] * 3)
    (finest, *others) = bars_of(forward_30b, common.look("scattermoe").colour)
    assert np.isnan(finest) and others == pytest.approx([250.0] * 3)
    assert [text.get_text() for text in forward_30b.texts].count("\N{MULTIPLICATION SIGN} oom") == 1
    marks = {
        (line.get_color(), float(line.get_ydata()[0]))
        for line in forward.lines
        if line.get_markerfacecolor() == "white"
    }
    assert marks == {
        *((common.look("sonic").colour, value) for value in (366.0, 435.0, 468.0)),
        # the authors' package stands behind the paper's bars as well
        *((common.look("sonicmoe_official").colour, value) for value in (366.0, 435.0, 468.0)),
        *((common.look("scattermoe").colour, value) for value in (208.0, 235.0, 266.0)),
    }
    assert [handle.get_text() for handle in drawn.figure.legends[0].get_texts()] == [
        "sonic (hopper)", "sonic (triton)", "sonicmoe_official", "scattermoe", "cublas_bmm (experts, balanced)",
        "paper, H100 (Figs 1, 14; digitised)",
    ]  # fmt: skip
    text = " ".join(texts_of(drawn.figure).split())
    assert "megablocks: unavailable (not installed)" in text and "No line of cublas_bmm at 30B n=256 (oom)." in text
    mean = (1.1**6 * 0.9) ** (1 / 7)
    assert f"forward {mean:.3f} (geometric mean of 7 shapes), least 0.900 at 7B n=1024" in text


def test_fig14_table_compares_through_hopper_and_sums_up(results: Path) -> None:
    table = figures.build("fig14", results).table
    line = table[(table["size"] == "7B") & (table.n == 256)].set_index("series")
    assert line.fwd_bwd_speed["sonic (triton)"] == pytest.approx(1.25)
    assert line.fwd_bwd_speed["scattermoe"] == pytest.approx(2.0)
    assert line.paper_fwd_bwd_speed["scattermoe"] == pytest.approx(1.86, abs=0.01)
    assert line.paper_fwd_speed["scattermoe"] == pytest.approx(366 / 208)
    assert line.of_bound["sonic (hopper)"] == pytest.approx(0.8)
    assert np.isnan(line.fwd_speed["sonic (hopper, experts, balanced)"])
    sums = table[table.n.isna()].set_index(["series", "size"])
    assert sums.fwd_speed["sonicmoe_official", "geometric mean of 7"] == pytest.approx((1.1**6 * 0.9) ** (1 / 7))
    assert sums.fwd_speed["sonicmoe_official", "least of 7"] == pytest.approx(0.9)
    # The shape where scattermoe ran out of memory counts for the paper no more than for us.
    paper_speeds = [366 / 208, 435 / 235, 468 / 266, 503 / 325, 553 / 369, 585 / 351]
    assert sums.paper_fwd_speed["scattermoe", "geometric mean of 6"] == pytest.approx(np.prod(paper_speeds) ** (1 / 6))
    assert "sonic (hopper)" not in sums.index.get_level_values("series")


def test_fig14_compares_through_triton_where_hopper_did_not_run(tmp_path: Path) -> None:
    given = {"sweep": "throughput"}
    rows = [
        unmeasured(SHAPE, "failed", knobs=Knobs(family="hopper"), **given),
        measured(SHAPE, us=1000.0, knobs=Knobs(family="triton"), **given),
        measured(SHAPE, "scattermoe", us=3000.0, **given),
    ]
    table = figures.build("fig14", write(tmp_path, rows)).table
    assert table[table.series == "scattermoe"].fwd_speed.to_numpy() == pytest.approx(3.0)


def test_fig14_compares_rows_of_one_card(tmp_path: Path) -> None:
    """A newer row of sonic from a slower card takes its place in the figure, not in the speed of another's row."""
    shape, hopper = paper.shape("7B", 256), Knobs(family="hopper")
    given = {"mode": "fwd", "sweep": "throughput", "env_id": "first"}
    rows = [
        measured(shape, us=1000.0, knobs=hopper, **given),
        measured(shape, us=1100.0, **given),
        measured(shape, "sonicmoe_official", us=1050.0, **given),
        measured(shape, us=1200.0, knobs=hopper, **given | {"env_id": "second", "time": "2026-01-03T00:00:00+00:00"}),
        measured(shape, "scattermoe", us=2400.0, **given | {"env_id": "second"}),
        measured(shape, "liger", us=3000.0, **given | {"env_id": "third"}),
    ]
    results = write(tmp_path, rows)
    envs = [make_env(env_id=name, gpu=H200, gpu_uuid=name) for name in ("first", "second", "third")]
    (results / "env.jsonl").write_text("".join(env.model_dump_json() + "\n" for env in envs))
    drawn = figures.build("fig14", results)
    speeds = drawn.table.dropna(subset="n").set_index("series").fwd_speed
    assert speeds.to_dict() == pytest.approx(
        {"sonic (hopper)": 1.0, "sonic (triton)": 1.1, "sonicmoe_official": 1.05, "scattermoe": 2.0, "liger": 2.5}
    )
    assert "Rows of 3 cards; a speed holds two rows of one card against each other, save 1 of 5." in texts_of(
        drawn.figure
    )


def test_fig14_has_room_for_eight_implementations(tmp_path: Path) -> None:
    others = ["momoe", "megatron", "liger", "torch_grouped_mm_compiled"]
    drawn = figures.build("fig14", write(tmp_path, analysis_rows.throughput(others)))
    (ax, *_) = drawn.figure.axes
    drawn.figure.canvas.draw()
    boxes = sorted((text.get_window_extent() for text in ax.texts), key=lambda box: box.x0)
    assert len(boxes) == 3 * 8
    assert all(left.x1 <= right.x0 for left, right in zip(boxes, boxes[1:], strict=False))
    assert drawn.figure.get_size_inches()[0] < 14


def test_fig14_without_whole_layers_draws_nothing(tmp_path: Path) -> None:
    bound = measured(SHAPE, op="experts", sweep="throughput")
    with pytest.raises(figures.NotDrawn, match=r"belongs in it \(no whole layer was measured\)"):
        figures.build("fig14", write(tmp_path, [bound]))


def test_skew_divides_by_uniform_and_by_the_official_package(results: Path) -> None:
    drawn = figures.build("skew", results)
    ax = drawn.figure.axes[0]
    assert ax.get_title() == "7B n=256, forward"
    assert bars_of(ax, common.look("sonic").colour) == pytest.approx([1.1, 1.2])
    assert bars_of(ax, common.look("sonicmoe_official").colour) == pytest.approx([1.21, 1.0])
    assert [label.get_text() for label in ax.get_xticklabels()] == [
        "zipf\nsonic : official 0.909", "hot\nsonic : official 1.200",
    ]  # fmt: skip
    assert "\N{MULTIPLICATION SIGN} crashed" in [text.get_text() for text in ax.texts]
    line = drawn.table[(drawn.table.routing == "hot") & drawn.table.compared].iloc[0]
    assert (line.slowdown, line.official_slowdown, line.vs_official) == pytest.approx((1.2, 1.0, 1.2))
    assert "scattermoe" in set(drawn.table[drawn.table.status == "crashed"].series)


def test_skew_says_which_series_has_no_uniform_row(tmp_path: Path) -> None:
    given = {"op": "experts", "sweep": "skew"}
    rows = [
        measured(SHAPE, routing=Routing(distribution="uniform"), **given),
        measured(SHAPE, routing=Routing(distribution="zipf", alpha=1.5), **given),
        measured(SHAPE, "scattermoe", routing=Routing(distribution="zipf", alpha=1.5), **given),
    ]
    drawn = figures.build("skew", write(tmp_path, rows))
    assert "No uniform row to compare with: scattermoe." in texts_of(drawn.figure)
    assert set(drawn.table.routing) == {"zipf 1.5"}
    with pytest.raises(figures.NotDrawn, match="no skewed routing was measured"):
        figures.build("skew", write(tmp_path / "uniform", rows[:1]))


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


def test_saving_is_deterministic(results: Path, tmp_path: Path) -> None:
    first = figures.save(figures.build("smoke", results), tmp_path / "a")
    second = figures.save(figures.build("smoke", results), tmp_path / "b")
    assert [path.relative_to(tmp_path / "a").as_posix() for path in first] == [
        "smoke_overview.pdf",
        "smoke_overview.png",
    ]
    digests = [[hashlib.sha256(path.read_bytes()).hexdigest() for path in paths] for paths in (first, second)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("gpu", "options", "files"),
    [
        (H200, [], ["tile_sizes"]),
        (H200, ["--clock", "device", "--method", "1"], ["tile_sizes"]),
        (H200, ["--clock", "event"], ["tile_sizes_event"]),
        ("nvidia-h100", [], ["nvidia-h100/tile_sizes"]),
        ("nvidia-h100", ["--clock", "event"], ["nvidia-h100/tile_sizes_event"]),
        ("cpu", [], ["cpu/tile_sizes"]),
        ("cpu", ["--clock", "graph"], ["cpu/tile_sizes"]),  # a CPU has the wall clock alone
    ],
)
def test_only_the_default_of_the_home_card_goes_to_its_committed_place(
    tmp_path: Path, gpu: str, options: list[str], files: list[str]
) -> None:
    tile = TileSpec(m=64, n=64, k=32, stages=3)
    # Another card's device times must not make the default clock of one that has none.
    h200 = measured(SHAPE, sweep="tile", op="up_proj", tile=tile)
    others = [
        h200,
        *(measured(SHAPE, gpu=slug, sweep="tile", op="up_proj", tile=tile) for slug in ("nvidia-h100", "cpu")),
    ]
    write(tmp_path, others)
    assert figures.main(["tile", "--results", str(tmp_path), "--gpu", gpu, *options]) == 0
    drawn = sorted(path.relative_to(tmp_path / "figures").as_posix() for path in tmp_path.rglob("*.png"))
    assert drawn == [f"{name}.png" for name in files]
    elsewhere = tmp_path / "elsewhere"
    assert figures.main(["tile", "--results", str(tmp_path), "--gpu", gpu, "--out", str(elsewhere), *options]) == 0
    assert sorted(path.name for path in elsewhere.glob("*.png")) == [f"{Path(name).name}.png" for name in files]


def test_a_card_without_device_times_has_the_event_time_as_its_default(tmp_path: Path) -> None:
    tile = TileSpec(m=64, n=64, k=32, stages=3)
    for gpu, changes in ((H200, {}), ("nvidia-h100", {"device_us": None})):
        write(tmp_path, [measured(SHAPE, gpu=gpu, sweep="tile", op="up_proj", tile=tile, **changes)])
    assert figures.build("tile", tmp_path, "nvidia-h100").stem == "tile_sizes"


def test_an_older_method_is_named_in_the_stem(tmp_path: Path) -> None:
    tile = TileSpec(m=64, n=64, k=32, stages=3)
    newer = Method(version=2, timer="cuda", l2="cold", warmup=1, samples=3)
    for changes in ({}, {"method": newer, "key": "newer", "time": "2026-02-02T00:00:00+00:00"}):
        write(tmp_path, [measured(SHAPE, sweep="tile", op="up_proj", tile=tile, **changes)])
    stems = [figures.build("tile", tmp_path, method=method).stem for method in (None, 1, 2)]
    assert stems == ["tile_sizes", "tile_sizes_method1", "tile_sizes"]


def test_the_newest_method_is_drawn_and_the_older_rows_are_counted(tmp_path: Path) -> None:
    tile = TileSpec(m=64, n=64, k=32, stages=3)
    newer = Method(version=2, timer="cuda", l2="cold", warmup=1, samples=3)
    rows = [measured(SHAPE, sweep="tile", op="up_proj", tile=tile, method=newer)]
    rows.append(measured(SHAPE, sweep="tile", op="up_proj", tile=tile.model_copy(update={"m": 128})))
    drawn = figures.build("tile", write(tmp_path, rows))
    assert set(drawn.data.tile_m) == {64}
    assert "1 rows of an older timing method are left out" in texts_of(drawn.figure)
    assert set(figures.build("tile", tmp_path, method=1).data.tile_m) == {128}


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


@pytest.mark.parametrize("figure_id", ["fig1", "fig14", "sparsity", "quick"])
def test_notes_count_the_rows_of_both_passes(tmp_path: Path, figure_id: str) -> None:
    fast = {"device_us": [1000.0] * 3, "event_us": [900.0] * 3}
    near = {"device_us": [1000.0] * 3, "event_us": [980.0] * 3}
    sweep = figures.module_of(figure_id).SWEEP
    rows = [
        measured(SHAPE, sweep=sweep, **near),
        measured(SHAPE, sweep=sweep, mode="fwd_bwd", throttled=True, **fast),
        measured(SHAPE, "scattermoe", sweep=sweep, throttled=True),
        measured(SHAPE, "scattermoe", sweep=sweep, mode="fwd_bwd", throttled=True),
        unmeasured(SHAPE, "oom", impl="torch_loop", sweep=sweep),
    ]
    write(tmp_path, rows)
    text = " ".join(texts_of(figures.build(figure_id, tmp_path).figure).split())
    assert "3 of 4 rows were taken while the card throttled." in text
    assert "Busy time above event time in 1 of 4 rows, by up to 11%: the clocks differed between the passes." in text


def test_no_note_on_clocks_where_busy_time_is_within_event_time(results: Path) -> None:
    for figure_id in ("fig1", "smoke"):
        assert "Busy time" not in texts_of(figures.build(figure_id, results).figure)


def test_sparsity_of_both_passes_alone_draws_nothing(tmp_path: Path) -> None:
    write(tmp_path, [measured(SHAPE, sweep="sparsity", mode="fwd_bwd")])
    with pytest.raises(figures.NotDrawn, match="no measured row"):
        figures.build("sparsity", tmp_path)


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
        (["fig99"], "unknown figure 'fig99'; there are distributions, fig1"),
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


@pytest.mark.parametrize("kind", ["no folder can be made there", "a file"])
@pytest.mark.parametrize("main", [figures.main, report.main], ids=["figures", "report"])
def test_an_unwritable_out_is_refused_first(
    results: Path, tmp_path: Path, kind: str, main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" if kind == "a file" else tmp_path / "file" / "x"
    if main is report.main:
        out = tmp_path if kind == "a file" else out / "page.html"
    with pytest.raises(SystemExit) as stop:
        main(["--results", str(results), "--out", str(out)])
    assert stop.value.code == 2
    found = capsys.readouterr()
    must = "a file that can be written" if main is report.main else "a folder in which files can be written"
    assert f"error: --out must be {must}, and {out} is none: " in found.err.splitlines()[-1]
    assert not found.out


def test_a_figure_that_cannot_be_saved_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, analysis_rows.tiles())
    (tmp_path / "figures" / "tile_sizes.pdf").mkdir(parents=True)
    assert figures.main(["tile", "--results", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tile: --out must be a folder in which files can be written, and {tmp_path / 'figures'} is")


@pytest.mark.parametrize("module", ["analysis", "analysis.report"])
def test_a_reader_who_leaves_early_stops_nothing(tmp_path: Path, module: str) -> None:
    write(tmp_path, [*analysis_rows.overview("quick", H200), *analysis_rows.tiles()])
    read, written = os.pipe()
    os.close(read)
    out = tmp_path / ("out" if module == "analysis" else "page.html")
    command = [sys.executable, "-m", module, "--results", str(tmp_path), "--out", str(out)]
    clone = Path(figures.__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=clone, stdout=written, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(written)
    assert (done.returncode, done.stderr) == (0, "")
    if module == "analysis":
        assert sorted(path.name for path in out.glob("*.png")) == ["quick_overview.png", "tile_sizes.png"]
    else:
        assert out.read_text().endswith("</html>\n")


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


def test_report_marks_code_and_paragraphs_in_claims(results: Path) -> None:
    drawn = replace(figures.build("fig1", results), claim="The `a` of\nx < y.\n\nMirrors `b`.")
    text = report._figure(drawn)
    assert '<p class="claim">The <code>a</code> of\nx &lt; y.</p>' in text
    assert '<p class="claim">Mirrors <code>b</code>.</p>' in text
    assert "pre-line" not in report._PAGE


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
