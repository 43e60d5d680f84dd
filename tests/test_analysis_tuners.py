"""The figure `tuners`: pairs of one card, what has no partner, and what either list cost, from made-up rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from analysis import common, figures, paper
from sonic.record import Knobs, Method, Row
from tests.analysis_rows import H200, measured, time_us, unmeasured, write
from tests.rows import make_env
from tests.test_analysis_figures import bars_of, texts_of

IMPLS = ("sonicmoe_official", "momoe", "momoe_save_all", "liger", "moe_ops")
SHAPES = (("7B", 256), ("30B", 1024))
NOTES = {
    "throughput": "tuner cut to 4 configs; concat_layout=True",
    "tuners": "tuner over all configs; concat_layout=True",
}
#: Time with the full list over that with the cut one.
GAIN = 0.95


def row(sweep: str, impl: str, size: str = "7B", n: int = 256, mode: str = "fwd", **changes: Any) -> Row:
    """A layer; with the full list it takes `GAIN` of the time, and its first calls 20 s instead of 4."""
    shape = paper.shape(size, n)
    given = {"us": 1.1 * time_us(shape, "sonic", mode) * (GAIN if sweep == "tuners" else 1.0)}
    given |= {"mode": mode, "sweep": sweep, "knobs": Knobs(family="auto"), "note": NOTES[sweep], "env_id": "first"}
    return measured(shape, impl, **(given | {"compile_s": 20.0 if sweep == "tuners" else 4.0} | changes))


def pairs(impls: Iterable[str] = IMPLS, modes: Iterable[str] = ("fwd", "fwd_bwd")) -> list[Row]:
    return [
        row(sweep, impl, size, n, mode)
        for size, n in SHAPES
        for mode in modes
        for impl in impls
        for sweep in NOTES
    ]  # fmt: skip


def build(folder: Path, rows: Iterable[Row]) -> figures.Drawn:
    """The figure from these rows; two environments are cards, the third does not tell its own."""
    results = write(folder, rows)
    cards = {"first": "card1", "second": "card2", "untold": None}
    envs = [make_env(env_id=name, gpu=H200, gpu_uuid=card) for name, card in cards.items()]
    (results / "env.jsonl").write_text("".join(env.model_dump_json() + "\n" for env in envs))
    return figures.build("tuners", results)


def words(drawn: figures.Drawn) -> str:
    """The words around the panels, read from top to bottom, then those in them."""
    around = sorted(drawn.figure.texts, key=lambda text: -text.get_position()[1])
    return " ".join([*(text.get_text().strip() for text in around), *texts_of(drawn.figure).split()])


@pytest.mark.parametrize(("impls", "modes"), [(IMPLS, ("fwd", "fwd_bwd")), (IMPLS[:1], ("fwd_bwd",))])
def test_two_bars_per_implementation_stay_on_their_sheet(tmp_path: Path, impls: tuple, modes: tuple) -> None:
    # The bound and our own kernels are in `throughput` alone, as is a shape: none of them belongs in the figure.
    others = [row("throughput", impl, note=None, knobs=Knobs(family="hopper")) for impl in ("sonic", "cublas_bmm")]
    drawn = build(tmp_path, [*pairs(impls, modes), *others, row("throughput", impls[0], "7B", 512)])
    assert len(drawn.figure.axes) == 2 * len(modes)
    assert figures.png(drawn.figure, dpi=50).startswith(b"\x89PNG")
    drawn.figure.canvas.draw()
    inches, box = drawn.figure.get_size_inches(), drawn.figure.get_tightbbox()
    assert 4 < inches[0] < 12 and 2 < inches[1] < 8
    assert box.x0 > -0.02 and box.y0 > -0.02 and box.x1 < inches[0] + 0.02 and box.y1 < inches[1] + 0.02
    ax = drawn.figure.axes[0]
    assert len(ax.patches) == 2 * len(impls) and len(drawn.table) == 2 * len(modes) * len(impls)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0.950"] * len(impls)
    boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:], strict=False))
    legend = [text.get_text() for text in drawn.figure.legends[0].get_texts()]
    ordered = sorted(impls, key=common.rank)
    assert legend == [f"{impl}, {name} list" for impl in ordered for name in ("cut", "full")]


def test_the_cut_list_has_the_full_colour_and_the_table_both(tmp_path: Path) -> None:
    drawn = build(tmp_path, pairs())
    ax = drawn.figure.axes[0]
    cut_ms = 1.1 * time_us(paper.shape("7B", 256), "sonic") / 1e3
    assert ax.get_title() == "7B n=256, forward"
    assert bars_of(ax, common.look("liger").colour) == pytest.approx([cut_ms])
    line = drawn.table[(drawn.table.series == "liger") & (drawn.table["mode"] == "fwd")].iloc[0]
    assert (line.cut_ms, line.full_ms, line.full_over_cut) == pytest.approx((cut_ms, GAIN * cut_ms, GAIN))
    assert (line.cut_compile_s, line.full_compile_s, line.full_note) == (4.0, 20.0, NOTES["tuners"])
    assert not [name for name in drawn.table if "tune_s" in name]
    text = words(drawn)
    assert "liger 4.0 to 4.0 cut, 20.0 to 20.0 full" in text
    assert "liger: cut list: tuner cut to 4 configs; full list: tuner over all configs" in text


def test_tuning_told_apart_counts_among_first_calls(tmp_path: Path) -> None:
    rows = [row("throughput", "liger"), row("tuners", "liger", tune_s=30.0)]
    drawn = build(tmp_path, rows)
    assert drawn.table.full_tune_s.item() == 30.0 and drawn.table.full_compile_s.item() == 20.0
    assert "liger 4.0 to 4.0 cut, 50.0 to 50.0 full." in words(drawn)


def test_only_rows_of_one_card_make_a_pair(tmp_path: Path) -> None:
    rows = [
        *pairs(["sonicmoe_official"], ["fwd"]),
        row("throughput", "liger"), row("tuners", "liger", env_id="second"),
        row("throughput", "momoe", env_id="untold"), row("tuners", "momoe", env_id="untold"),
        row("tuners", "moe_ops", "30B", 1024),
    ]  # fmt: skip
    drawn = build(tmp_path, rows)
    assert set(drawn.table.series) == {"sonicmoe_official"}
    assert (
        "Not drawn, without a row of throughput on the same card: "
        "liger: 7B n=256 forward; moe_ops: 30B n=1024 forward; momoe: 7B n=256 forward." in words(drawn)
    )
    with pytest.raises(figures.NotDrawn, match="no row of tuners has one of throughput on the same card"):
        build(tmp_path / "lone", rows[4:])


def test_the_newest_cut_row_counts(tmp_path: Path) -> None:
    newer = row("throughput", "liger", us=500.0, time="2026-02-02T00:00:00+00:00", impl_version="2")
    drawn = build(tmp_path, [row("throughput", "liger"), row("tuners", "liger"), newer])
    assert drawn.table.cut_ms.item() == 0.5


def test_a_full_list_that_takes_too_long_leaves_its_status(tmp_path: Path) -> None:
    shape = paper.shape("7B", 256)
    failed = {"sweep": "tuners", "knobs": Knobs(family="auto"), "env_id": "first"}
    rows = [
        *pairs(["sonicmoe_official", "liger"], ["fwd_bwd"]), row("throughput", "liger"),
        unmeasured(shape, "timeout", "more than 600 s", impl="liger", **failed),
        row("throughput", "moe_ops"), unmeasured(shape, "timeout", "more than 600 s", impl="moe_ops", **failed),
    ]  # fmt: skip
    drawn = build(tmp_path, rows)
    line = drawn.table[(drawn.table.series == "liger") & (drawn.table["mode"] == "fwd")].iloc[0]
    assert line.full_status == "timeout" and line.cut_ms > 0 and line.isna()["full_over_cut"]
    assert "\N{MULTIPLICATION SIGN} timeout" in [text.get_text() for text in drawn.figure.axes[0].texts]
    assert "Not drawn: moe_ops, full list: timeout (more than 600 s)" in words(drawn)


def test_methods_do_not_mix(tmp_path: Path) -> None:
    newer = Method(version=2, timer="cuda", l2="cold", warmup=1, samples=3)
    rows = [row("throughput", "liger", method=newer), row("tuners", "liger")]
    with pytest.raises(ValueError, match="rows of 2 method versions"):
        build(tmp_path, rows)
