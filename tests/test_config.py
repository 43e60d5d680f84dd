"""From a command line to points: expansion, and every refusal with its text."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml

from sonic import config, impls, record
from sonic.config import CommandError, load
from sonic.record import Point, Settings

IMPLS = [
    "ceilings", "cublas_bmm", "deepgemm_pp", "deepgemm_pt", "liger", "megablocks", "megablocks_style",
    "megatron", "moe_ops", "momoe", "momoe_save_all", "momoe_style", "scattermoe", "scattermoe_style", "sonic",
    "sonicmoe_official", "standard_style", "torch_bmm", "torch_grouped_mm", "torch_grouped_mm_compiled", "torch_loop",
    "torch_sum", "torch_topk", "transformers", "transformers_eager",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU that has a fixed set of adapters."""
    monkeypatch.setattr(config, "visible_gpus", list)
    monkeypatch.setattr(impls, "names", lambda: IMPLS)


def refused(*lines: str) -> str:
    with pytest.raises(CommandError) as caught:
        load(list(lines))
    return str(caught.value)


def axis(points: list[Point], leaf: str) -> list:
    """Values of a field in order of first appearance."""
    found = []
    for point in points:
        value = point
        for name in leaf.split("."):
            value = getattr(value, name)
        if value not in found:
            found.append(value)
    return found


# --- what a machine measures by default


def test_default_is_smoke_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load([]).name == "smoke"
    monkeypatch.setattr(config, "visible_gpus", lambda: [("GPU-1", "NVIDIA H200")])
    assert load([]).name == "quick"
    assert config.gpu_slug() == "nvidia-h200"


def test_smoke_crosses_granularity_sparsity_and_tiles() -> None:
    points = [point for point in load(["grids=tiles"]).points if point.impl == "sonic"]
    assert len(points) == 3 * 3 * 2
    assert len({p.shape.sizes().G for p in points}) == 3
    assert len({p.shape.sizes().rho for p in points}) == 3
    assert axis(points, "tile.m") == [16, 32]
    assert axis(points, "dtype") == ["fp32"]


@pytest.mark.parametrize("name", config.experiments())
def test_every_experiment_expands(name: str) -> None:
    sweep = load([f"sweeps={name}"])
    assert sweep.control.about
    assert sweep.points
    assert {point.sweep for point in sweep.points} == {name}
    assert len({point.model_dump_json() for point in sweep.points}) == len(sweep.points)


def test_defaults_of_the_config_are_those_of_a_point() -> None:
    tree = yaml.safe_load((config.root() / "conf" / "config.yaml").read_text())
    fields = {name: tree[name] for name in Point.model_fields if name in tree}
    shape = {"T": 1, "d": 8, "n": 8, "E": 1, "K": 1}
    assert Point(sweep="x", shape=shape, **fields) == Point(sweep="x", impl="sonic", shape=shape)


@pytest.mark.parametrize("name", ["smoke", "quick", "publish"])
def test_measure_files_hold_every_setting(name: str) -> None:
    tree = yaml.safe_load((config.root() / "conf" / "measure" / f"{name}.yaml").read_text())
    assert set(tree) == set(Settings.model_fields) | {"timeout_s", "estimate_s"}
    assert load([f"measure={name}"]).control.measure.timeout_s == tree["timeout_s"]


# --- axes


def test_lists_cross_and_implementations_alternate() -> None:
    lines = ["sweeps=custom", "shape=tiny", "impl=sonic,torch_loop", "shape.n=8,16", "tile.m=16,32"]
    assert "shape=tiny (command line) and shape.n=8,16 (command line)" in refused(*lines)
    points = load([line for line in lines if line != "shape=tiny"]).points
    assert [(p.shape.n, p.tile.m, p.impl) for p in points] == [
        (n, m, impl) for n in (8, 16) for m in (16, 32) for impl in ("sonic", "torch_loop")
    ]


def test_derived_axes_start_from_a_named_shape() -> None:
    points = load(["sweeps=custom", "shape=7b_n256", "shape.G=3,6", "shape.rho=1/16,1/32"]).points
    assert [(p.shape.n, p.shape.E, p.shape.K) for p in points] == [
        (512, 64, 4), (512, 128, 4), (256, 128, 8), (256, 256, 8),
    ]  # fmt: skip


def test_zipped_sizes() -> None:
    points = load(["sweeps=custom", "shape={n:1024,K:2},{n:512,K:4}"]).points
    assert [(p.shape.n, p.shape.K, p.shape.d) for p in points] == [(1024, 2, 1536), (512, 4, 1536)]


def test_a_family_of_named_shapes_in_order_of_n() -> None:
    sweep = load(["sweeps=custom", "shape=7b,30b_n1024", "shape.T=512"])
    assert [(p.shape.T, p.shape.d, p.shape.n) for p in sweep.points] == [
        *((512, 1536, n) for n in (64, 128, 256, 512, 1024)), (512, 4096, 1024),
    ]  # fmt: skip


def test_glob_picks_names() -> None:
    assert {p.impl for p in load(["sweeps=custom", "impl=glob(torch_*)"]).points} == {
        "torch_bmm", "torch_grouped_mm", "torch_grouped_mm_compiled", "torch_loop", "torch_sum", "torch_topk",
    }  # fmt: skip


def test_an_override_replaces_the_experiments_axis() -> None:
    points = load(["shape.rho=1/2", "shape.G=4", "tile.m=16", "impl=sonic", "grids=tiles"]).points
    assert len(points) == 1
    points = load(["sweeps=sparsity", "shape=fig16_d1536_n1024", "impl=sonic", "mode=fwd", "grids=uniform"]).points
    assert axis(points, "shape.E") == [16, 32, 64, 128]


def test_a_dropped_axis_leaves_the_base() -> None:
    points = load(["~shape.G", "~shape.rho", "~tile.m", "impl=sonic", "shape.n=16,8"]).points
    assert axis(points, "shape.n") == [16, 8]
    assert axis(points, "tile.m") == [None]


def test_an_implementation_stays_in_the_grids_that_name_it() -> None:
    assert {p.op for p in load(["impl=cublas_bmm"]).points} == {"experts"}
    assert {p.op for p in load(["impl=torch_loop"]).points} == {"layer"}
    assert {p.op for p in load(["impl=torch_grouped_mm_compiled"]).points} == {"layer", "experts"}


def test_bound_and_sonic_meet_at_the_same_points() -> None:
    points = load(["sweeps=granularity", "shape=30b", "grids=bound"]).points
    mine, bound = ({p.shape for p in points if p.impl == impl} for impl in ("sonic", "cublas_bmm"))
    assert mine == bound
    assert len(mine) == 6
    assert {(p.op, p.routing.distribution, p.mode) for p in points} == {("experts", "balanced", "fwd")}


def test_comparable_points_are_one_set() -> None:
    sets = config.point_sets(load(["sweeps=granularity", "shape=7b"]).points)
    assert {len(members) for members in sets} == {2, 3}
    assert all(len({p.model_copy(update={"impl": ""}) for p in members}) == 1 for members in map(tuple, sets))


def test_repeats_are_dropped() -> None:
    points = load(["sweeps=custom", "shape.n=8,16,8"]).points
    assert Counter(p.shape.n for p in points) == {8: 1, 16: 1}


# --- how a sweep runs


def test_control_fields() -> None:
    sweep = load(["resume=false", "fail_fast=true", "shard=3/8", "wandb=off", "measure.samples=7", "results=/tmp/x y"])
    assert (sweep.control.resume, sweep.control.fail_fast, sweep.share) == (False, True, (2, 8))
    assert (sweep.control.wandb.mode, sweep.control.measure.settings().samples) == ("off", 7)
    assert str(sweep.results) == "/tmp/x y"
    assert str(sweep.state) == "/tmp/x y/.sonic"


def test_results_default_to_the_clone() -> None:
    sweep = load([])
    assert sweep.results == record.default_results()
    assert sweep.state.parent == config.root()


def test_launchers_get_their_overrides_again() -> None:
    assert load(["cluster=local", "hydra.verbose=true", "seed=1"]).launch == ["cluster=local", "hydra.verbose=true"]


# --- refusals


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (["sweeps=smok"], ["sweeps is 'smok'", "granularity", "did you mean 'smoke'?"]),
        (["sweeps=_none"], ["sweeps is '_none'"]),
        (["sweeps=smoke,quick"], ["two experiments at once"]),
        (["sweeps="], ["sweeps is ''"]),
        (["sede=1"], ["unknown key 'sede'", "did you mean 'seed'?", "allowed: sweeps"]),
        (["tune=full"], ["did you mean 'measure.tune'?"]),
        (["+new=1"], ["unknown key 'new'"]),
        (["shape.m=1"], ["unknown key 'shape.m'"]),
        (["smoke"], ["'smoke' is not of the form key=value", "sweeps=<name>"]),
        (["shape.n=(8"], ["cannot read 'shape.n=(8'"]),
        (["seed=interval(1,2)"], ["an interval has no points"]),
        (["impl="], ["impl is ''", "cublas_bmm"]),
        (["impl=sonic,"], ["impl=sonic,"]),
        (["impl=scater"], ["impl is 'scater'", "did you mean 'scattermoe'?"]),
        (["impl=glob(x*)"], ["no values"]),
        (["mode=fwd,bwd"], ["mode is 'bwd'", "allowed: fwd, fwd_infer, fwd_bwd"]),
        (["dtype=float32"], ["dtype is 'float32'", "bf16, fp16, fp32"]),
        (["knobs.gather=fast"], ["knobs.gather is 'fast'", "fused, separate"]),
        (["seed=1,two"], ["seed is 'two'", "integer"]),
        (["seed='1'"], ["seed is '1'", "integer"]),
        (["shape.T=8,1.5"], ["shape.T is 1.5"]),
        (["shape.T=true"], ["shape.T is True"]),
        (["shape.T=-1"], ["shape.T is -1; it must be at least 0"]),
        (["shape.G=3"], ["shape.G is 3", "nearest: G=4 (n=16)"]),
        (["shape.G=2,abc"], ["shape.G is 'abc'", "a number or a fraction"]),
        (["shape.rho=2/0"], ["shape.rho is '2/0'"]),
        (["shape.rho=true"], ["shape.rho is True"]),
        (["shape.rho=3/7"], ["shape.rho is 3/7", "nearest"]),
        (["sweeps=custom", "shape.K=9", "shape.E=8"], ["shape.K is 9 and shape.E is 8"]),
        (["sweeps=custom", "shape=7b_n25"], ["shape is '7b_n25'", "a family: 1.4b"]),
        (["sweeps=custom", "shape="], ["shape is ''"]),
        (["sweeps=custom", "shape=3"], ["shape is 3; it must be a named shape or sizes"]),
        (["sweeps=custom", "tile=64"], ["tile is 64; it must be fields such as {m:64,n:128}"]),
        (["sweeps=custom", "tile={m:64,q:1}"], ["unknown key 'tile.q'", "tile.stages"]),
        (["tile.m=0"], ["tile.m is 0; it must be at least 1"]),
        (["tile.kernel=upproj"], ["tile.kernel is 'upproj'", "did you mean 'up_proj'?"]),
        (["seed=1", "seed=2"], ["seed=1 and seed=2 both set seed"]),
        (["shape.n=8"], ["shape.G=2,4,8 (sweeps/smoke.yaml) and shape.n=8 (command line)", "~shape.G drops"]),
        (["shape=7b_n256"], ["shape.G=2,4,8 (sweeps/smoke.yaml) and shape=7b_n256 (command line)"]),
        (["sweeps=custom", "shape.G=3", "shape.n=8"], ["shape.G=3 (command line) and shape.n=8 (command line)"]),
        (["sweeps=custom", "shape.rho=1/8", "shape.E=8"], ["shape.rho=1/8", "shape.E=8", "both set shape.E"]),
        (["sweeps=custom", "shape={n:8,K:2}", "shape.n=8"], ["shape={n:8,K:2} (command line) and shape.n=8"]),
        (["sweeps=custom", "shape={n:8,G:2}"], ["both set shape.n"]),
        (
            ["sweeps=custom", "shape=n:8", "shape=K:2"],
            ["shape=n:8 and shape=K:2", "the shell split the braces: quote it"],
        ),
        (["sweeps=custom", "shape={n:8,d:2097152}"], ["shape.d is 2097152; at most 1048576"]),
        (["sweeps=custom", "tile={m:64}", "tile.m=64"], ["both set tile.m"]),
        (["sweeps=granularity", "shape.G=4"], ["shape=1.4b,7b,30b,120b (sweeps/granularity.yaml) and shape.G=4"]),
        (["~seed"], ["sweeps no 'seed'"]),
        (["grids=nope"], ["grids is 'nope'", "tiles, bound"]),
        (["measure.samples=1,2"], ["a list for measure.samples is not possible"]),
        (["measure.samples=many"], ["measure.samples is 'many'"]),
        (["measure.samples=0"], ["measure.samples is 0"]),
        (["measure=publis"], ["measure is 'publis'", "did you mean 'publish'?"]),
        (["cluster=kubernetes"], ["cluster is 'kubernetes'; allowed: joblib, local, ray, slurm"]),
        (["wandb=maybe"], ["wandb is 'maybe'; allowed: off, offline, online"]),
        (["resume=maybe"], ["resume is 'maybe'"]),
        (["shard=9/8"], ["shard is '9/8'", "1 <= i <= n"]),
        (["shard=3"], ["shard is '3'"]),
        (["seed=range(0,30000)"], ["at most 20000"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refusal(lines: list[str], texts: list[str]) -> None:
    message = refused(*lines)
    for text in texts:
        assert text in message


def test_a_launcher_that_is_not_installed_is_named() -> None:
    pytest.importorskip("hydra")
    if "joblib" in _launchers():
        pytest.skip("the joblib launcher is installed")
    assert 'pip install -e ".[cluster]"' in refused("cluster=joblib")


def _launchers() -> list[str]:
    with config.hydra_composer() as loader:
        return config.options(loader, "hydra/launcher")


def test_an_experiment_file_with_a_wrong_key_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = config.root()
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "conf").symlink_to(real / "conf")
    (tmp_path / "sweeps" / "_none.yaml").write_text("# @package _global_\n")
    head = "# @package _global_\nabout: broken\n"
    (tmp_path / "sweeps" / "field.yaml").write_text(head + "sede: 3\n")
    (tmp_path / "sweeps" / "axis.yaml").write_text(head + "grids:\n  a:\n    shape.m: 1,2\n")
    (tmp_path / "sweeps" / "value.yaml").write_text(head + "dtype: fp33\n")
    monkeypatch.setattr(config, "root", lambda: tmp_path)
    assert "'sede'" in refused("sweeps=field")
    assert "sweeps/axis.yaml: unknown key 'shape.m'" in refused("sweeps=axis")
    assert "dtype is 'fp33'" in refused("sweeps=value")


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["routing.method=token_drop", "routing.capacity=0"], "routing.capacity is 0; it must be positive"),
        (["routing.method=tr_up", "shape.T=64"], "routing.tile is 128 and shape.T is 64"),
        (["routing.method=grouped", "routing.groups=7"], "routing.groups is 7 and shape.E is 128"),
        (["routing.method=grouped"], "routing.groups is null"),
        (["routing.method=tr_ceil"], "routing.method is 'tr_ceil'; allowed: topk, tr_nearest_freq"),
        (["routing.distribution=replay"], "routing.file is null"),
        (["routing.distribution=replay", "routing.file=/none.npz"], "'/none.npz': cannot be read"),
        (["routing.distribution=replay", "routing.file=x", "routing.method=laser"], "routing.method is 'laser'"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(lines: list[str], text: str) -> None:
    assert text in refused("sweeps=custom", "op=experts", *lines)


def test_fields_of_other_methods_are_dropped() -> None:
    methods = "routing.method=topk,tr_up,token_drop"
    points = load(["sweeps=custom", "op=experts", methods, "routing.tile=64,128", "routing.groups=4"]).points
    assert [(p.routing.method, p.routing.tile, p.routing.capacity, p.routing.groups) for p in points] == [
        ("topk", None, None, None), ("tr_up", 64, None, None), ("tr_up", 128, None, None),
        ("token_drop", None, 1.0, None),
    ]  # fmt: skip
