"""Distributions and routers, strategies, rounding rules: figures of made-up rows that follow simple rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import common, figures, paper
from sonic.record import Knobs, Routing, Row
from sonic.shapes import Shape
from tests.analysis_rows import check_sheet, measured, time_us, unmeasured, write
from tests.rows import make_env
from tests.test_analysis_figures import SHAPE, bars_of, lines_of, texts_of

H200 = "nvidia-h200"
PLACES = (("7B", 256), ("30B", 1024))
#: Time over that of balanced, for every implementation but scattermoe, whose times are all the same.
SLOWER = {"balanced": 1.0, "uniform": 1.02, "lognormal": 1.04, "zipf": 1.1, "bursts": 1.06, "hot": 1.2}
#: Of each router under zipf: time over that of top-K, pairs kept of T K.
ROUTERS = {
    "tr_nearest_freq": (0.9, 1.0), "token_drop": (0.8, 0.75), "expert_choice": (0.95, 1.0), "grouped": (1.0, 1.0),
    "laser": (0.97, 1.0),
}  # fmt: skip
#: Of each strategy: time and held bytes over those of `sonic`.
STRATEGIES = {
    "scattermoe_style": (1.2, 2.0), "momoe_style": (1.3, 0.5), "megablocks_style": (1.5, 3.0),
    "standard_style": (1.8, 2.5),
}  # fmt: skip
#: Of each rule: pairs kept of T K, and the time of its router over that of top-K.
RULES = {
    "topk": (1.0, 1.0), "tr_nearest_freq": (1.0, 1.5), "tr_stochastic_freq": (1.0, 1.6), "tr_nearest_score": (1.0, 4.0),
    "tr_balance": (1.0, 3.0), "tr_up": (1.25, 1.4), "tr_down": (0.75, 1.3),
}  # fmt: skip
HOPPER = Knobs(family="hopper")


def distributions() -> Iterator[Row]:
    """Every point of the sweep; scattermoe crashes under the hot expert."""
    given = {"op": "experts", "sweep": "distributions"}
    for size, n in PLACES:
        shape = paper.shape(size, n)
        for mode in ("fwd", "fwd_bwd"):
            for name, slower in SLOWER.items():
                here = given | {"mode": mode, "routing": Routing(distribution=name)}
                for impl in ("sonic", "sonicmoe_official"):
                    knobs = HOPPER if impl == "sonic" else Knobs(family="auto")
                    yield measured(shape, impl, us=slower * time_us(shape, impl, mode), knobs=knobs, **here)
                if name == "hot":
                    yield unmeasured(shape, "crashed", impl="scattermoe", **here)
                else:
                    yield measured(shape, "scattermoe", us=time_us(shape, "scattermoe", mode), **here)
            topk = SLOWER["zipf"] * time_us(shape, "sonic", mode)
            for method, (slower, kept) in ROUTERS.items():
                tile = 128 if method.startswith("tr_") else None
                routing = Routing(
                    method=method, distribution="zipf", tile=tile, groups=4 if method == "grouped" else None
                )
                work = {"R": int(kept * shape.R), "flops_model": int(kept * shape.flops(mode)), "knobs": HOPPER}
                yield measured(shape, us=slower * topk, **given | {"mode": mode, "routing": routing} | work)


def strategies(**changes: object) -> Iterator[Row]:
    """Every point of the sweep."""
    for size, n in PLACES:
        shape = paper.shape(size, n)
        for mode in ("fwd", "fwd_bwd"):
            for impl, (slower, held) in {"sonic": (1.0, 1.0), **STRATEGIES}.items():
                given = {"op": "experts", "sweep": "strategies", "mode": mode, "knobs": HOPPER}
                given |= {"routing": Routing(distribution="uniform"), "held_bytes": int(held * 10**9)}
                us = slower * time_us(shape, "sonic", mode)
                yield measured(shape, impl, us=us, note=None if impl == "sonic" else "a strategy", **given | changes)


def panels() -> Iterator[Row]:
    """The grid `panels` of token rounding: top-K pads 25% of its FLOPs and takes 25% more time."""
    for d, n, K, experts in paper.FIG16_PANELS:
        for E in experts:
            shape = Shape(paper.FIG16_T, d, n, E, K)
            for mode in ("fwd", "fwd_bwd"):
                for method, more in (("topk", 1.25), ("tr_nearest_freq", 1.0)):
                    for impl in ("sonic", "sonicmoe_official"):
                        yield measured(
                            shape, impl, us=more * time_us(shape, impl, mode), **_rounding(shape, mode, method, more)
                        )


def rules() -> Iterator[Row]:
    """The grid `rules`: time and FLOPs follow the pairs kept."""
    for E in (64, 128):
        shape = Shape(paper.FIG16_T, 1536, 1024, E, 2)
        for mode in ("fwd", "fwd_bwd"):
            for method in list(RULES)[2:]:
                kept = RULES[method][0]
                flops = int(kept * shape.flops(mode))
                work = {"R": int(kept * shape.R), "flops_model": flops, "flops_padded": flops}
                yield measured(
                    shape, us=kept * time_us(shape, "sonic", mode), **_rounding(shape, mode, method, 1.0) | work
                )


def cost() -> Iterator[Row]:
    """The grid `cost`: top-K takes E us."""
    for E in (16, 32, 64, 128):
        shape = Shape(paper.FIG16_T, 1536, 1024, E, 2)
        for method, (_, times) in RULES.items():
            tile = None if method == "topk" else 128
            yield measured(
                shape, us=times * E, op="routing", sweep="token_rounding", routing=Routing(method=method, tile=tile),
                knobs=HOPPER, flops_model=0, flops_padded=None, held_bytes=None,
            )  # fmt: skip


def _rounding(shape: Shape, mode: str, method: str, padded: float) -> dict[str, object]:
    tile = None if method == "topk" else 128
    return {
        "op": "experts", "mode": mode, "sweep": "token_rounding", "flops_padded": int(padded * shape.flops(mode)),
        "routing": Routing(method=method, distribution="uniform", tile=tile), "knobs": HOPPER,
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [*distributions(), *strategies(), *panels(), *rules(), *cost()]
    return write(tmp_path_factory.mktemp("more_routing"), rows)


@pytest.mark.parametrize("figure_id", ["distributions", "strategies", "rounding"])
def test_figures_stay_on_their_sheet(results: Path, figure_id: str) -> None:
    drawn = figures.build(figure_id, results)
    check_sheet(drawn)
    assert len(drawn.table) and not drawn.faults


def test_distributions_draws_rates_and_what_sonic_loses(results: Path) -> None:
    drawn = figures.build("distributions", results)
    axes = np.array(drawn.figure.axes).reshape(4, 2)
    assert [ax.get_title() for ax in axes[0]] == ["7B n=256, forward", "30B n=1024, forward"]
    rates = [500 / slower for slower in SLOWER.values()]
    assert bars_of(axes[0, 0], common.look("sonic").colour) == pytest.approx(rates)
    assert bars_of(axes[1, 1], common.look("sonicmoe_official").colour) == pytest.approx(np.divide(rates, 1.1))
    assert [text.get_text() for text in axes[0, 0].texts].count("\N{MULTIPLICATION SIGN} crashed") == 1
    assert [label.get_text() for label in axes[0, 0].get_xticklabels()] == [
        f"{name}\n{slower:.3f}" for name, slower in SLOWER.items()
    ]
    assert axes[0, 0].get_xlabel() == "below: time of sonic (hopper) over that of balanced"
    text = " ".join(texts_of(drawn.figure).split())
    assert (
        "Time over that of balanced, sonic (hopper): uniform 1.020, lognormal 1.040, zipf 1.100, bursts 1.060" in text
    )
    assert "scattermoe: uniform 1.000, lognormal 1.000, zipf 1.000, bursts 1.000." in text


def test_distributions_draws_the_routers_under_zipf(results: Path) -> None:
    drawn = figures.build("distributions", results)
    ax = np.array(drawn.figure.axes).reshape(4, 2)[2, 0]
    rates = [500 / 1.1, *(500 / 1.1 * kept / slower for slower, kept in ROUTERS.values())]
    assert bars_of(ax, common.look("sonic").colour) == pytest.approx(rates)
    assert not bars_of(ax, common.look("scattermoe").colour)
    ticks = [label.get_text() for label in ax.get_xticklabels()]
    assert ticks[:3] == ["top-K\n\n1.000\n100.0%", "token\nrounding\n0.900\n100.0%", "token\ndrop\n0.800\n75.0%"]
    assert "token_drop 0.800" in " ".join(texts_of(drawn.figure).split())
    table = drawn.table[(drawn.table.part == "routers") & (drawn.table["mode"] == "fwd") & (drawn.table.n == 256)]
    assert list(table.group) == ["topk", *ROUTERS] and set(table.against) == {"topk"}
    assert list(table.kept) == pytest.approx([1.0, *(kept for _, kept in ROUTERS.values())])
    assert len(drawn.table) == 2 * 2 * (6 * 3 + 6)


def test_distributions_without_balanced_holds_against_uniform(tmp_path: Path) -> None:
    rows = [row for row in distributions() if row.routing.distribution != "balanced" and row.routing.method == "topk"]
    drawn = figures.build("distributions", write(tmp_path, rows))
    check_sheet(drawn)
    assert set(drawn.table.against) == {"uniform"} and len(drawn.figure.axes) == 4
    line = drawn.table[(drawn.table.group == "hot") & drawn.table.series.str.startswith("sonic (")].iloc[0]
    assert line.over == pytest.approx(1.2 / 1.02)


def test_distributions_with_nothing_to_hold_against_says_so(tmp_path: Path) -> None:
    given = {"op": "experts", "sweep": "distributions"}
    rows = [measured(SHAPE, routing=Routing(distribution=name, alpha=2.0), **given) for name in ("bursts", "zipf")]
    rows += [measured(SHAPE, routing=Routing(distribution="replay"), **given)]
    drawn = figures.build("distributions", write(tmp_path, rows))
    assert list(drawn.table.group) == ["zipf 2", "bursts 2", "replay"] and "over" not in drawn.table
    assert "No balanced or uniform row to compare with: sonic (triton)." in texts_of(drawn.figure)
    check_sheet(drawn)
    with pytest.raises(figures.NotDrawn, match="belongs in it"):
        figures.build("distributions", write(tmp_path / "layer", [measured(SHAPE, sweep="distributions")]))


def test_distributions_compares_rows_of_one_card(tmp_path: Path) -> None:
    given = {"op": "experts", "sweep": "distributions"}
    rows = [
        measured(SHAPE, us=100.0, env_id="first", routing=Routing(distribution="balanced"), **given),
        measured(SHAPE, us=110.0, env_id="first", routing=Routing(distribution="zipf"), **given),
        measured(SHAPE, us=150.0, env_id="second", routing=Routing(distribution="hot"), **given),
    ]
    results = write(tmp_path, rows)
    envs = [make_env(env_id=name, gpu=H200, gpu_uuid=name) for name in ("first", "second")]
    (results / "env.jsonl").write_text("".join(env.model_dump_json() + "\n" for env in envs))
    drawn = figures.build("distributions", results)
    over = drawn.table.set_index("group").over
    assert over.zipf == pytest.approx(1.1) and np.isnan(over.hot)
    assert "Rows of 2 cards" in texts_of(drawn.figure)


def test_strategies_draws_times_memory_and_ratios(results: Path) -> None:
    drawn = figures.build("strategies", results)
    axes = np.array(drawn.figure.axes).reshape(2, 3)
    assert [ax.get_title() for ax in axes[0]] == [
        "7B n=256, forward", "7B n=256, forward + backward", "7B n=256, held for the backward",
    ]  # fmt: skip
    shape = paper.shape("7B", 256)
    assert bars_of(axes[0, 0], common.look("momoe_style").colour) == pytest.approx(
        [1.3 * time_us(shape, "sonic") / 1e3]
    )
    assert bars_of(axes[1, 2], common.look("momoe_style").colour) == pytest.approx([0.5e9 / 2**30])
    assert [label.get_text() for label in axes[0, 1].get_xticklabels()] == ["1.00", "1.20", "1.50", "1.30", "1.80"]
    assert [label.get_text() for label in axes[0, 2].get_xticklabels()] == ["1.00", "2.00", "3.00", "0.50", "2.50"]
    text = " ".join(texts_of(drawn.figure).split())
    assert "All run the kernels of one family (hopper): the GEMMs are equal, the strategy differs." in text
    said = "momoe_style over sonic: forward 1.30, forward + backward 1.30, held GiB 0.50 (geometric mean of 2 shapes)."
    assert said in text
    assert len(drawn.table) == 2 * 2 * 5
    line = drawn.table[drawn.table.series == "megablocks_style"]
    assert line.over_sonic.to_numpy() == pytest.approx(1.5) and line.held_over_sonic.to_numpy() == pytest.approx(3)


def test_strategies_keeps_to_one_family(tmp_path: Path) -> None:
    """`sonic` alone has triton rows as well here, and a twin failed before its family was known."""
    rows = [row for row in strategies() if (row.impl, row.mode) != ("momoe_style", "fwd")]
    rows += [row for row in strategies(knobs=Knobs(family="triton")) if row.impl == "sonic"]
    auto = {"op": "experts", "sweep": "strategies", "routing": Routing(distribution="uniform")}
    rows += [unmeasured(paper.shape(*PLACES[0]), "oom", impl="momoe_style", knobs=Knobs(family="auto"), **auto)]
    drawn = figures.build("strategies", write(tmp_path, rows))
    assert set(drawn.data.family) == {"hopper"} and "4 rows of other families are left out" in texts_of(drawn.figure)
    texts = [text.get_text() for text in drawn.figure.axes[0].texts]
    assert texts.count("\N{MULTIPLICATION SIGN} oom") == 1
    check_sheet(drawn)


def test_strategies_without_sonic_has_no_ratio(tmp_path: Path) -> None:
    drawn = figures.build("strategies", write(tmp_path, [row for row in strategies() if row.impl != "sonic"]))
    assert "over_sonic" not in drawn.table and "so there is no ratio" in texts_of(drawn.figure)
    check_sheet(drawn)


def test_rounding_draws_every_rule_with_its_padding(results: Path) -> None:
    drawn = figures.build("rounding", results)
    axes = np.array(drawn.figure.axes).reshape(3, 2)
    assert axes[0, 0].get_title().startswith("d=1536 n=1024 E=64") and "1/64" in axes[0, 1].get_title()
    heights = [bar.get_height() for bar in axes[0, 0].patches]
    assert heights == pytest.approx([400.0] + [500.0] * 6)
    ticks = [label.get_text() for label in axes[0, 0].get_xticklabels()]
    assert ticks == ["+25.0%\n+0.0%", *["+0.0%\n+0.0%"] * 4, "+0.0%\n+25.0%", "+0.0%\n-25.0%"]
    assert [text.get_text() for text in drawn.figure.legends[0].get_texts()] == ["top-K", *list(RULES)[1:]]
    text = " ".join(texts_of(drawn.figure).split())
    assert "tr_up +25.0% (time 1.000)" in text and "tr_down +25.0% (time 0.600)" in text
    experts = drawn.table[drawn.table.op == "experts"]
    assert len(experts) == 2 * 2 * 7 and set(experts.series) == {"sonic (hopper)"}


def test_rounding_draws_what_the_router_costs(results: Path) -> None:
    drawn = figures.build("rounding", results)
    time, over = drawn.figure.axes[4:]
    assert [line.get_ydata()[0] for line in time.lines] == pytest.approx([16 * times for _, times in RULES.values()])
    assert [line.get_ydata()[-1] for line in over.lines] == pytest.approx([times for _, times in RULES.values()])
    assert "tr_nearest_score 4.00" in " ".join(texts_of(drawn.figure).split())
    table = drawn.table[drawn.table.op == "routing"]
    assert len(table) == 4 * 7 and table.tflops.isna().all() and table.ms.isna().all()
    assert list(table[table.E == 64].us) == pytest.approx([64 * times for _, times in RULES.values()])


@pytest.mark.parametrize(("grids", "count"), [((rules,), 4), ((cost,), 2), ((panels, cost), 2), ((panels, rules), 4)])
def test_rounding_draws_what_is_there(tmp_path: Path, grids: tuple, count: int) -> None:
    drawn = figures.build("rounding", write(tmp_path, [row for grid in grids for row in grid()]))
    check_sheet(drawn)
    assert len(drawn.figure.axes) == count
    if panels not in grids and rules in grids:
        assert "so there is no gain" in texts_of(drawn.figure)


def test_rounding_of_the_panels_alone_is_left_to_fig16(tmp_path: Path) -> None:
    with pytest.raises(figures.NotDrawn, match="no rule beside tr_nearest_freq was measured, and no router alone"):
        figures.build("rounding", write(tmp_path, panels()))


def test_rounding_names_what_failed(tmp_path: Path) -> None:
    rows = [row for row in [*panels(), *rules(), *cost()] if (row.routing.method, row.shape.E) != ("tr_balance", 128)]
    shape = Shape(paper.FIG16_T, 1536, 1024, 128, 2)
    for op, mode in (("experts", "fwd"), ("experts", "fwd_bwd"), ("routing", "fwd")):
        given = _rounding(shape, mode, "tr_balance", 1.0) | {"op": op, "flops_padded": None}
        given |= {"routing": Routing(method="tr_balance", tile=128)} if op == "routing" else {}
        rows.append(unmeasured(shape, "timeout", **given))
    drawn = figures.build("rounding", write(tmp_path, rows))
    check_sheet(drawn)
    for ax in (drawn.figure.axes[1], drawn.figure.axes[4]):
        assert [text.get_text() for text in ax.texts].count("\N{MULTIPLICATION SIGN} timeout") == 1


def test_fig16_ignores_the_rules_and_the_cost(tmp_path: Path, results: Path) -> None:
    alone = figures.build("fig16", write(tmp_path, panels()))
    pd.testing.assert_frame_equal(figures.build("fig16", results).table, alone.table)
    assert len(lines_of(alone.figure.axes[0], common.look("sonic").colour)) == 2


def test_skew_puts_unknown_distributions_behind(tmp_path: Path) -> None:
    given = {"op": "experts", "sweep": "skew"}
    names = ("uniform", "replay", "hot", "lognormal", "zipf", "bursts")
    rows = [measured(SHAPE, routing=Routing(distribution=name), **given) for name in names]
    drawn = figures.build("skew", write(tmp_path, rows))
    assert list(drawn.table.routing) == ["zipf", "hot", "bursts", "lognormal", "replay"]


@pytest.mark.parametrize("figure_id", ["distributions", "strategies", "rounding"])
def test_a_cpu_figure_says_so(tmp_path: Path, figure_id: str) -> None:
    sweep = figures.module_of(figure_id).SWEEP
    routing = Routing(method="tr_up" if figure_id == "rounding" else "topk", distribution="balanced")
    rows = [measured(SHAPE, gpu="cpu", op="experts", sweep=sweep, routing=routing)]
    assert "not GPU speed" in texts_of(figures.build(figure_id, write(tmp_path, rows)).figure)
