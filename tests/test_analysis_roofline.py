"""The roofline: bounds against the kernels' own cost models, what is left out, where the roofs come from."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from analysis import figures, paper
from analysis import roofline_layer as roofline
from sonic import kernels
from sonic.impls.sonic import _COSTS, _FUNCTIONS
from sonic.record import Knobs, Method, Row
from sonic.shapes import Shape
from tests import analysis_rows
from tests.analysis_rows import BANDWIDTH, H200, PEAK, layer_kernels, measured, unmeasured, write
from tests.rows import make_env
from tests.test_analysis_figures import texts_of

SHAPE = paper.shape("7B", 256)


def layer(shape: Shape = SHAPE, mode: str = "fwd_bwd", **changes: object) -> Row:
    given = {
        "kernels": layer_kernels(shape, mode),
        "mode": mode,
        "sweep": "throughput",
        "knobs": Knobs(family="hopper"),
    }
    return measured(shape, **(given | changes))


def drawn(folder: Path, rows: list[Row]) -> figures.Drawn:
    return figures.build("roofline", write(folder, rows))


def words(figure: figures.Drawn) -> str:
    return " ".join(texts_of(figure.figure).split())


def test_every_bound_follows_from_the_kernels_own_cost(tmp_path: Path) -> None:
    found = roofline.kernels(drawn(tmp_path, [layer(), *analysis_rows.ceilings()]).data).set_index("step")
    steps = {name: name for name in ("up_proj", "down_proj", "d_act", "d_input", "weight_grad_1", "weight_grad_2")}
    for step, name in (steps | {"aggregate O": "aggregate", "aggregate dX": "aggregate"}).items():
        cost = _COSTS[name](SHAPE, SHAPE.R, 2)
        line = found.loc[step]
        assert (line.flops, line.bytes_per_use, line.bytes) == (cost.flops, cost.bytes, cost.bytes_once)
        assert line.bound_us == pytest.approx(max(cost.flops / PEAK / 1e6, cost.bytes_once / BANDWIDTH / 1e3))
        assert line.limit == ("compute" if cost.flops else "memory")


def test_the_functions_are_those_of_the_kernels() -> None:
    named = {step.split()[0]: name for name, steps in roofline._STEPS.items() for step in steps}
    left_out = ("router_topk", "metadata", "routing", "gather_rows")
    assert named == {step: name for step, name in _FUNCTIONS.items() if step not in left_out}
    for module, known in (("metadata", roofline.METADATA), ("router_topk", roofline.ROUTER)):
        tree = ast.parse((Path(kernels.__file__).parent / f"{module}.py").read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {name for name in defined if name.startswith("_") and name.endswith("_kernel")} == known


def test_the_share_leaves_out_router_and_metadata_and_nothing_else(tmp_path: Path) -> None:
    extra = [kernel.model_copy(update={"name": "_new_kernel", "flops": None, "bytes": None}) for kernel in
             layer_kernels(SHAPE, "fwd")[:1]]  # fmt: skip
    rows = [layer(), layer(mode="fwd", kernels=[*layer_kernels(SHAPE, "fwd"), *extra]), *analysis_rows.ceilings()]
    figure = drawn(tmp_path, rows)
    sums = figure.table[figure.table.step == "sum"].set_index("mode")
    assert sums.of_bound["fwd_bwd"] == pytest.approx(0.8) and sums.rest_us["fwd_bwd"] == pytest.approx(40)
    times = sum(kernel.us for kernel in layer_kernels(SHAPE, "fwd")) - 30
    assert sums.of_bound["fwd"] == pytest.approx(0.8 * times / (times + 10))
    text = words(figure)
    assert "= 0.800 (aim 0.80, floor 0.75); left out: 40 \N{GREEK SMALL LETTER MU}s of router and metadata." in text
    assert "700 TFLOP/s, the best of 3 cuBLAS products (131072\N{MULTIPLICATION SIGN}2048" in text
    assert "a gathered row counts as read from memory once" in text


def test_both_families_and_all_shapes_are_drawn(tmp_path: Path) -> None:
    figure = drawn(tmp_path, [*analysis_rows.throughput(), *analysis_rows.ceilings()])
    assert [handle.get_text() for handle in figure.figure.legends[0].get_texts()] == [
        "sonic (hopper)", "sonic (triton)", "bound",
    ]  # fmt: skip
    times, _, shares = figure.figure.axes
    assert [label.get_text() for label in times.get_yticklabels()] == [
        "1 up_proj", "2 down_proj", "3 aggregate O", "4 d_act", "5 weight_grad_2", "6 d_input", "7 aggregate dX",
        "8 weight_grad_1", "router, metadata",
    ]  # fmt: skip
    assert [label.get_text() for label in shares.get_yticklabels()] == [
        f"{size} n={n}" for size in ("7B", "30B") for n in (256, 512, 1024, 2048) if (size, n) != ("7B", 2048)
    ]
    triton = figure.table[(figure.table.step == "sum") & (figure.table.series == "sonic (triton)")]
    assert triton.of_bound.to_numpy() == pytest.approx(0.64)


def test_statuses_of_layers_and_roofs_are_visible(tmp_path: Path) -> None:
    product, *others = analysis_rows.ceilings()
    oom = {"op": "matmul", "impl": "ceilings", "sweep": "ceilings"}
    failed = layer(paper.shape("30B", 256), status="failed", device_us=None, event_us=None, kernels=None)
    rows = [layer(), failed, unmeasured(product.shape.sizes(), "oom", **oom), *others]
    text = words(drawn(tmp_path, rows))
    assert "\N{MULTIPLICATION SIGN} failed" in text
    assert "No roof from matmul 8192\N{MULTIPLICATION SIGN}8192\N{MULTIPLICATION SIGN}8192 in bf16: oom." in text
    assert "best of 2 cuBLAS products" in text


@pytest.mark.parametrize(
    ("roofs", "cards", "said"),
    [
        ({}, ("card1", "card1"), "Roofs and layers are of one run (run1), one card."),
        ({"run_id": "run2", "env_id": "env2"}, ("card1", "card1"), "up to 24.0 h apart, one card."),
        ({"run_id": "run2", "env_id": "env2"}, ("card1", "card2"), "up to 24.0 h apart, different cards."),
        ({"run_id": "run2", "env_id": "env2"}, ("card1", None), "up to 24.0 h apart, which card is not recorded."),
    ],
)
def test_runs_and_cards_that_differ_are_said(tmp_path: Path, roofs: dict, cards: tuple, said: str) -> None:
    lines = [make_env(env_id=f"env{n}", gpu=H200, gpu_uuid=card) for n, card in enumerate(cards, 1)]
    (tmp_path / "env.jsonl").write_text("".join(line.model_dump_json() + "\n" for line in lines))
    later = {"time": "2026-01-03T00:00:00+00:00"} if roofs else {}
    assert said in words(drawn(tmp_path, [layer(), *analysis_rows.ceilings(**roofs, **later)]))


def test_the_newest_ceilings_count(tmp_path: Path) -> None:
    slow = list(analysis_rows.ceilings())
    newer = {"time": "2026-02-02T00:00:00+00:00", "impl_version": "2"}
    fast = [
        row.model_copy(update={**newer, "key": f"newer{n}", "device_us": [us / 2 for us in row.device_us]})
        for n, row in enumerate(slow)
    ]
    data = drawn(tmp_path, [layer(), *fast, *slow]).data
    roof = roofline.roofs(data, "bf16")
    assert (roof.peak, roof.bandwidth) == pytest.approx((2 * PEAK, 2 * BANDWIDTH))


def test_an_ablation_has_no_bound(tmp_path: Path) -> None:
    bare = [kernel.model_copy(update={"bytes": None}) for kernel in layer_kernels(SHAPE, "fwd_bwd")]
    knobs = Knobs(family="hopper", gather="separate")
    figure = drawn(tmp_path, [layer(), layer(kernels=bare, knobs=knobs), *analysis_rows.ceilings()])
    sums = figure.table[figure.table.step == "sum"].set_index("series").of_bound
    assert sums["sonic (hopper, gather=fused)"] == pytest.approx(0.8)
    assert sums.isna()["sonic (hopper, gather=separate)"]
    assert "\N{MULTIPLICATION SIGN} no bound" in words(figure)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        figures.NotDrawn, match=r"no rows of nvidia-h200 of sweep ceilings; .*throughput` and .*ceilings"
    ):
        drawn(tmp_path / "a", [layer()])
    products = [row for row in analysis_rows.ceilings() if row.op == "matmul"]
    with pytest.raises(figures.NotDrawn, match="op copy of sweep ceilings has no device time: no row"):
        drawn(tmp_path / "b", [layer(), *products])
    with pytest.raises(figures.NotDrawn, match="no row of a layer has times of its kernels"):
        drawn(tmp_path / "c", [layer(kernels=None), *analysis_rows.ceilings()])


def test_roofs_of_another_method_are_not_drawn(tmp_path: Path) -> None:
    second = Method(version=2, timer="cuda", l2="cold", warmup=1, samples=3)
    with pytest.raises(figures.NotDrawn, match=r"no method version in common \(ceilings: 2; sonic: 1\)"):
        drawn(tmp_path, [layer(), *analysis_rows.ceilings(method=second)])


def test_a_sweep_draws_the_figures_that_need_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--results", str(tmp_path), "--out", str(tmp_path / "drawn")]
    write(tmp_path, analysis_rows.ceilings())
    assert figures.main(["--for-sweep", "ceilings", *here]) == 0
    assert "no figure is drawn from sweep 'ceilings'" in capsys.readouterr().out
    write(tmp_path, [layer()])
    assert figures.main(["--for-sweep", "ceilings", *here]) == 0
    assert sorted(path.name for path in (tmp_path / "drawn").glob("*.png")) == ["roofline_layer.png"]
    assert figures.main(["--for-sweep", "throughput", *here]) == 0
    assert sorted(path.name for path in (tmp_path / "drawn").glob("*.png")) == [
        "fig14_throughput.png", "roofline_layer.png",
    ]  # fmt: skip


def test_the_times_are_device_times_whatever_clock_is_asked(tmp_path: Path) -> None:
    write(tmp_path, [layer(), *analysis_rows.ceilings()])
    other = figures.build("roofline", tmp_path, clock="event")
    assert other.stem == "roofline_layer"
    assert roofline.roofs(other.data, "bf16").peak == pytest.approx(PEAK)
