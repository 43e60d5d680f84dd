"""The ablation ladder: rungs, what is left out, the model of bytes under knobs, and the figure; from made-up rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import figures, ladder_ideas, paper, traffic
from sonic.config import load
from sonic.record import Counters, Knobs, Routing, Row, TileSpec
from tests.analysis_rows import measured, unmeasured, write

SHAPE = paper.shape("7B", 256)
AT_REST = {"gather": "fused", "activation": "fused", "ds": "from_da", "cache": "h"}
GIVEN = {"sweep": "ladder", "op": "experts", "routing": Routing(distribution="uniform")}


def row(us: float, mode: str = "fwd_bwd", counted: bool = True, **knobs: str | None) -> Row:
    told = {name: knobs[name] for name in AT_REST}
    size = traffic.total_of_knobs(mode, SHAPE, 2, True, **told)
    counters = Counters(status="ok", dram_read=size, dram_write=0) if counted else Counters(status="missing")
    return measured(SHAPE, us=us, mode=mode, knobs=Knobs(**knobs), counters=counters, **GIVEN)


def rows(counted: bool = True) -> list[Row]:
    """Every rung takes 1 ms off the 12 of the first; left out, an idea costs 0.5 ms more than it saved."""
    steps = list(ladder_ideas.rungs().values())
    found = [row(12e3 - 1e3 * i, counted=counted, **knobs) for i, knobs in enumerate(steps)]
    top = steps[-1]
    for idea, change in ladder_ideas.OUT.items():
        if idea not in ("warp specialisation", "ping-pong"):  # these two are rungs
            found.append(row(4e3 + 1.5e3, counted=counted, **(top | change)))
    found.append(unmeasured(SHAPE, "oom", impl="torch_grouped_mm", mode="fwd_bwd", **GIVEN))
    rounding = GIVEN | {"routing": Routing(method="tr_nearest_freq", tile=128, distribution="uniform")}
    found.append(measured(SHAPE, us=3.5e3, mode="fwd_bwd", knobs=Knobs(family="hopper"), **rounding))
    return found


def test_the_ladder_ends_at_the_layer_itself() -> None:
    steps = ladder_ideas.rungs()
    assert list(steps)[0] == "standard" and len(steps) == 9
    assert list(steps.values())[-1] == AT_REST | {"family": "hopper", "aggregate": "gather_sum", "schedule": None}
    assert set(ladder_ideas.OUT) == set(ladder_ideas.IDEAS) - {"persistent"}


def test_knobs_at_rest_move_what_sonic_moves() -> None:
    assert traffic.of_knobs(**AT_REST) == traffic.MODEL["sonic"]


@pytest.mark.parametrize(
    ("knobs", "forward", "backward"),
    [
        ({"gather": "separate"}, (5, 4), (9, 10)),
        ({"activation": "separate"}, (3, 6), (5, 12)),
        ({"ds": "from_y"}, (3, 4), (9, 10)),
        ({"ds": "from_y", "cache": "h_a"}, (3, 4), (9, 9)),
        ({"cache": "h_a"}, (3, 4), (5, 10)),
        ({"gather": "separate", "activation": "separate", "ds": "from_y", "cache": "h_a_y"}, (5, 6), (9, 11)),
    ],
    ids=str,
)
def test_what_an_ablation_moves(knobs: dict[str, str], forward: tuple[int, int], backward: tuple[int, int]) -> None:
    fwd, bwd = traffic.of_knobs(**(AT_REST | knobs))
    assert ((fwd.wide, fwd.narrow), (bwd.wide, bwd.narrow)) == (forward, backward)


def test_every_rung_is_compared_from_below_and_from_above(tmp_path: Path) -> None:
    drawn = figures.build("ladder", write(tmp_path, rows()))
    found = drawn.table.set_index("rung")
    assert found.saved_ms.filter(like="+ ").to_numpy() == pytest.approx([1.0] * 8)
    assert found.out_saved["+ dS from dA"] == pytest.approx(1.5)
    assert found.interaction["+ dS from dA"] == pytest.approx(0.5)
    assert found.interaction["+ ping-pong"] == pytest.approx(0.0)
    assert found.saved_dram_gib["+ fused gather"] == pytest.approx(found.saved_model_once_gib["+ fused gather"])
    assert found.status["library"] == "oom" and found.ms["token rounding"] == 3.5
    said = " ".join(text.get_text() for text in drawn.figure.texts)
    assert "agree with the model within 10%" in said and "dS from dA +0.50" in said
    assert "Dearest to leave out: 7B n=256" in said


def test_without_counters_the_model_stands_alone(tmp_path: Path) -> None:
    drawn = figures.build("ladder", write(tmp_path, rows(counted=False)))
    said = " ".join(text.get_text() for text in drawn.figure.texts)
    assert "no row has hardware counters" in said and "dram_gib" not in drawn.table
    assert figures.png(drawn.figure, dpi=50)


def test_the_sweep_measures_every_rung_and_every_idea_left_out() -> None:
    points = load(["sweeps=ladder"]).points
    asked = [point.knobs.model_dump() for point in points if point.impl == "sonic"]
    named = lambda knobs: {name: knobs[name] for name in ladder_ideas._KNOBS}  # noqa: E731
    there = [named(knobs) for knobs in asked]
    steps = ladder_ideas.rungs()
    top = list(steps.values())[-1]
    for knobs in steps.values():
        assert knobs in there
    for idea, change in ladder_ideas.OUT.items():
        assert top | change in there, idea


def test_a_single_rung_is_no_ladder(tmp_path: Path) -> None:
    with pytest.raises(figures.NotDrawn, match="no shape has two rungs"):
        figures.build("ladder", write(tmp_path, rows()[:1]))


def test_a_shape_that_only_leaves_ideas_out_is_told_and_has_no_column(tmp_path: Path) -> None:
    fine, top = paper.shape("7B", 64), list(ladder_ideas.rungs().values())[-1]
    out = [row(us, **(top | change)).model_copy(update={"shape": fine, "key": f"fine{us}"}) for us, change in (
        (4e3, {}), (4.4e3, {"gather": "separate"}), (5e3, ladder_ideas.OUT["warp specialisation"]),
    )]  # fmt: skip
    drawn = figures.build("ladder", write(tmp_path, [*rows(), *out]))
    assert [ax.get_title() for ax in drawn.figure.axes if ax.get_title()] == ["7B n=256"]
    said = " ".join(" ".join(text.get_text() for text in drawn.figure.texts).split())
    assert "7B n=64 warp specialisation +25%, fused gather +10%" in said
    with pytest.raises(figures.NotDrawn, match="in a row"):
        figures.build("ladder", write(tmp_path / "alone", out))


def test_where_the_whole_cannot_run_nothing_is_worth_anything(tmp_path: Path) -> None:
    top = list(ladder_ideas.rungs().values())[-1]
    portable = [row for row in rows() if row.knobs.family == "triton"]
    portable.append(unmeasured(SHAPE, "unsupported", knobs=Knobs(**top), mode="fwd_bwd", **GIVEN))
    found = figures.build("ladder", write(tmp_path, portable)).table.set_index("rung")
    assert found.out_status["+ warp specialisation"] == "unsupported" == found.status["+ ping-pong"]
    assert found.saved_ms["+ persistent"] == pytest.approx(1.0) and "out_saved" not in found


def test_other_dtypes_and_tiles_are_no_rungs(tmp_path: Path) -> None:
    top = list(ladder_ideas.rungs().values())[-1]
    wide = measured(SHAPE, us=99e3, mode="fwd_bwd", knobs=Knobs(**top), dtype="fp32", **GIVEN)
    tiled = measured(SHAPE, us=99e3, mode="fwd_bwd", knobs=Knobs(**top), tile=TileSpec(m=64), **GIVEN)
    found = figures.build("ladder", write(tmp_path, [wide, tiled, *rows()])).table.set_index("rung")
    assert found.ms["+ ping-pong"] == pytest.approx(4.0)


def test_an_idea_that_could_not_be_left_out_shows_why(tmp_path: Path) -> None:
    top = list(ladder_ideas.rungs().values())[-1]
    failed = [row for row in rows() if row.knobs.ds == "from_da" or row.knobs.family == "triton"]
    failed.append(unmeasured(SHAPE, "oom", knobs=Knobs(**(top | {"ds": "from_y"})), mode="fwd_bwd", **GIVEN))
    drawn = figures.build("ladder", write(tmp_path, failed))
    assert drawn.table.set_index("rung").out_status["+ dS from dA"] == "oom"
    words = [text.get_text() for ax in drawn.figure.axes for text in ax.texts]
    assert words.count("\N{MULTIPLICATION SIGN} oom") == 3  # the library's bars, and the idea


def test_without_held_bytes_the_figure_still_draws(tmp_path: Path) -> None:
    bare = [row.model_copy(update={"held_bytes": None}) for row in rows()]
    assert figures.png(figures.build("ladder", write(tmp_path, bare)).figure, dpi=50)
