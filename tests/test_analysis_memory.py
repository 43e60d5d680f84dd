"""Figs 13 and 15: bars, the paper's marks, declared bytes and the tables, from made-up rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from analysis import common, fig13_memory, figures, paper
from sonic.record import Row
from sonic.shapes import Shape
from tests.analysis_rows import H200, check_sheet, measured, unmeasured, write

MEMORY = {"mode": "fwd_bwd", "sweep": "memory"}
DEEPSEEK, QWEN = "DeepSeek-V3.2-Exp", "Qwen3-Next-80B-A3B-Thinking"


def gib(size: float) -> int:
    return int(size * paper.GIB)


def memory_rows() -> Iterator[Row]:
    """7B and 120B: all hold 2% more than they declare; scattermoe out of memory at 120B n=512, megablocks missing."""
    for size in ("7B", "120B"):
        for n, *_ in paper.CONFIGS[size]:
            shape = paper.shape(size, n)
            for impl in ("sonic", "scattermoe", "momoe", "momoe_save_all", "torch_grouped_mm_compiled"):
                if (impl, size, n) == ("scattermoe", "120B", 512):
                    yield unmeasured(shape, "oom", impl=impl, **MEMORY)
                    continue
                declared = fig13_memory.predicted_gib(impl if impl in fig13_memory.KEPT else "scattermoe", shape)
                held = gib(1.02 * declared)
                peaks = {"peak_fwd_bytes": held + gib(0.5), "peak_bwd_bytes": 2 * held}
                yield measured(shape, impl, held_bytes=held, **peaks, **MEMORY)
            yield unmeasured(shape, "unavailable", "not installed", impl="megablocks", **MEMORY)


def model_rows() -> Iterator[Row]:
    """Every model: `sonic` at 500 TFLOP/s, scattermoe at half of it but at DeepSeek, where it fails."""
    for name, sizes in paper.MODEL_SHAPES.items():
        shape = Shape(*sizes)
        for mode in ("fwd", "fwd_bwd"):
            given = {"mode": mode, "sweep": "open_models"}
            yield measured(shape, us=shape.flops(mode) / 500e6, **given)
            if name == DEEPSEEK:
                yield unmeasured(shape, "unsupported", "32 bits", impl="scattermoe", **given)
            else:
                yield measured(shape, "scattermoe", us=shape.flops(mode) / 250e6, **given)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("results"), [*memory_rows(), *model_rows()])


def bars_of(ax: Axes, impl: str) -> list[float]:
    colour = matplotlib.colors.to_rgba(common.look(impl).colour)
    bars = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    return [bar.get_height() for bar in bars if bar.get_facecolor() == pytest.approx(colour)]


def marks_of(ax: Axes) -> list[tuple[str, float]]:
    return [(line.get_color(), line.get_ydata()[0]) for line in ax.lines if line.get_markerfacecolor() == "white"]


@pytest.mark.parametrize("figure_id", ("fig13", "fig15"))
def test_nothing_hangs_over_the_edge(results: Path, figure_id: str) -> None:
    drawn = figures.build(figure_id, results)
    assert drawn.gpu == H200 and len(drawn.table) and not drawn.faults
    check_sheet(drawn)


def test_kept_is_what_the_adapters_declare() -> None:
    from sonic import impls

    declared = {name: impls.load(name).properties for name in impls.names()}
    assert fig13_memory.KEPT == {name: (found.kept, found.padding) for name, found in declared.items() if found}
    shape = paper.shape("7B", 256)
    for name, found in declared.items():
        if found and found.padding == 1:
            assert fig13_memory.predicted_gib(name, shape) * paper.GIB == pytest.approx(found.held_bytes(shape, 2))
            assert fig13_memory.predicted_gib(name, shape, 1000, "fp32") * paper.GIB == pytest.approx(
                found.held_bytes(shape, 4, 1000)
            )


def test_padded_rows_are_half_a_block_per_expert() -> None:
    shape = paper.shape("7B", 256)
    rows = shape.R + shape.E * 64
    expected = 2 * (shape.T * shape.d + rows * (shape.d + 2 * shape.n)) / paper.GIB
    assert fig13_memory.predicted_gib("deepgemm_pp", shape) == pytest.approx(expected)
    assert np.isnan(fig13_memory.predicted_gib("transformers", shape))


def test_fig13_draws_held_and_peak_with_marks_and_ticks(results: Path) -> None:
    drawn = figures.build("fig13", results)
    held, peak, held_120b, _ = drawn.figure.axes
    assert held.get_title() == "7B: T=24576 d=1536, held for the backward"
    assert peak.get_title() == "7B: T=24576 d=1536, peak"
    declared = fig13_memory.predicted_gib("sonic", paper.shape("7B", 256))
    assert bars_of(held, "sonic") == pytest.approx([1.02 * declared] * 3, rel=1e-6)
    assert bars_of(peak, "sonic") == pytest.approx([max(1.02 * declared + 0.5, 2.04 * declared)] * 3, rel=1e-6)
    (finest, *others) = bars_of(held_120b, "scattermoe")
    assert np.isnan(finest) and np.isfinite(others).all()
    assert [text.get_text() for text in held_120b.texts].count("\N{MULTIPLICATION SIGN} oom") == 1
    # The paper's MoMoE is the one that keeps H and Y; nothing of the paper stands on peaks.
    colours = [colour for colour, _ in marks_of(held)]
    names = ("sonic", "scattermoe", "momoe_save_all")
    assert sorted(colours) == sorted(3 * [common.look(name).colour for name in names])
    assert not marks_of(peak)
    theirs = paper.peak_memory().query("impl == 'sonic' and d == 1536").held_gib
    mine = [value for colour, value in marks_of(held) if colour == common.look("sonic").colour]
    assert sorted(mine) == pytest.approx(sorted(theirs))
    ticks = [path for found in held.collections for path in found.get_segments() if path[0][1] == path[1][1]]
    assert sorted({round(path[0][1], 6) for path in ticks})[1] == pytest.approx(declared, abs=1e-5)
    assert len(ticks) == 12
    assert [handle.get_text() for handle in drawn.figure.legends[0].get_texts()][-2:] == [
        "declared to be kept", "paper, H100 (Figs 1, 13; less weights and output)",
    ]  # fmt: skip
    text = " ".join(" ".join(text.get_text() for text in drawn.figure.texts).split())
    assert "megablocks: unavailable (not installed)" in text and "device time" not in text


def test_fig13_table_holds_declared_measured_and_the_papers(results: Path) -> None:
    table = figures.build("fig13", results).table
    line = table[(table["size"] == "7B") & (table.n == 256)].set_index("series")
    known = line.drop("torch_grouped_mm_compiled")
    assert known.held_vs_predicted.to_numpy() == pytest.approx(1.02, rel=1e-6)
    assert np.isnan(line.predicted_gib["torch_grouped_mm_compiled"])
    shape = paper.shape("7B", 256)
    ours, theirs = paper.held_bytes("sonic", shape), paper.held_bytes("scattermoe", shape)
    silu_gate = 2 * shape.R * shape.n  # which scattermoe keeps, and the paper does not count
    assert line.sonic_held["scattermoe"] == pytest.approx(ours / (theirs + silu_gate), rel=1e-6)
    assert line.paper_sonic_held["scattermoe"] == pytest.approx(ours / theirs, abs=0.02)
    assert line.held_vs_paper["momoe_save_all"] == pytest.approx(1.02, abs=0.05)
    assert np.isnan(line.paper_held_gib["momoe"])
    assert line.sonic_peak["sonic (triton)"] == 1.0
    missing = table[(table["size"] == "120B") & (table.n == 512) & (table.series == "scattermoe")].iloc[0]
    assert missing.status == "oom" and np.isnan(missing.held_gib) and np.isnan(missing.sonic_held)
    assert "megablocks" not in set(table.series)


def test_fig13_of_a_cpu_has_no_peak(tmp_path: Path) -> None:
    shape = Shape(T=64, d=64, n=16, E=8, K=2)
    rows = [measured(shape, impl, "cpu", mode="fwd_bwd", sweep="memory") for impl in ("sonic", "scattermoe_style")]
    drawn = figures.build("fig13", write(tmp_path, rows))
    assert len(drawn.figure.axes) == 1 and "peak_gib" not in drawn.table
    assert drawn.table.held_vs_predicted.to_numpy() == pytest.approx(1.0)


def test_fig13_without_held_bytes_draws_nothing(tmp_path: Path) -> None:
    row = measured(paper.shape("7B", 256), held_bytes=None, **MEMORY)
    with pytest.raises(figures.NotDrawn):
        figures.build("fig13", write(tmp_path, [row]))


def test_fig15_draws_models_in_the_papers_order(results: Path) -> None:
    drawn = figures.build("fig15", results)
    forward, both = drawn.figure.axes
    assert (forward.get_title(), both.get_title()) == ("forward", "forward + backward")
    ticks = [label.get_text().split("\n")[0] for label in forward.get_xticklabels()]
    assert ticks == ["OLMoE", "gpt-oss-20b", "Kimi-Linear", "Qwen3-Next", "Qwen3-235B", "DeepSeek-V3.2"]
    for ax in (forward, both):
        assert bars_of(ax, "sonic") == pytest.approx([500.0] * 6)
        (*others, last) = bars_of(ax, "scattermoe")
        assert others == pytest.approx([250.0] * 5) and np.isnan(last)
        assert [text.get_text() for text in ax.texts].count("\N{MULTIPLICATION SIGN} unsupported") == 1
    red = common.look("sonic").colour
    assert marks_of(forward) == [(red, 534.8)]
    assert marks_of(both) == [(red, pytest.approx(3 / (1 / 534.8 + 2 / 480.1)))]


def test_fig15_table_compares_speeds_and_sums_up(results: Path) -> None:
    table = figures.build("fig15", results).table.set_index(["model", "series"])
    line = table.loc[QWEN, "scattermoe"]
    for mode in ("fwd", "bwd", "fwd_bwd"):
        assert line[f"{mode}_speed"] == pytest.approx(2.0)
    assert (line.paper_fwd_speed, line.paper_bwd_speed) == (pytest.approx(1.61), pytest.approx(1.85))
    assert line.b300_fwd_speed == pytest.approx(774 / 395)
    ours = table.loc[DEEPSEEK, "sonic (triton)"]
    assert (ours.paper_fwd_tflops, ours.paper_bwd_tflops) == (534.8, 480.1)
    assert table.loc[DEEPSEEK, "scattermoe"].status == "unsupported"
    assert table.loc["geometric mean of 5", "scattermoe"].fwd_bwd_speed == pytest.approx(2.0)


def test_fig15_names_an_unknown_shape_by_its_sizes() -> None:
    assert common.model_name(64, 32, 16, 8, 2) == "T=64 d=32 n=16 E=8 K=2"


def test_rows_of_the_throughput_sweep_serve_as_well(tmp_path: Path) -> None:
    """A point of both sweeps counts once, as `memory` measured it."""
    shape, layer = paper.shape("7B", 256), {"op": "layer", "mode": "fwd_bwd"}
    rows = [
        measured(shape, held_bytes=gib(3), sweep="throughput", **layer),
        measured(shape, "scattermoe", held_bytes=gib(5), sweep="throughput", **layer),
    ]
    held = figures.build("fig13", write(tmp_path / "one", rows)).table.set_index("series").held_gib
    assert held.filter(like="sonic").item() == 3 and held["scattermoe"] == 5
    rows.append(measured(shape, held_bytes=gib(2), sweep="memory", **layer))
    held = figures.build("fig13", write(tmp_path / "both", rows)).table.set_index("series").held_gib
    assert held.filter(like="sonic").item() == 2 and held["scattermoe"] == 5
