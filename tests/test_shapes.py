"""Sizes of a layer, what follows from them, and the named shapes of `conf/shape/`."""

from __future__ import annotations

import pytest
import yaml

from sonic import config
from sonic.shapes import Shape

SHAPE_FILES = sorted((config.root() / "conf" / "shape").glob("*.yaml"))
BASE = Shape(T=24576, d=1536, n=256, E=128, K=8)


def named(name: str) -> Shape:
    return Shape(**yaml.safe_load((config.root() / "conf" / "shape" / f"{name}.yaml").read_text()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"T": -1}, "shape.T is -1; it must be at least 0"),
        ({"d": 0}, "shape.d is 0; it must be at least 1"),
        ({"n": -8}, "shape.n is -8; it must be at least 1"),
        ({"T": 2**31 + 1}, "shape.T is 2147483649; at most 2147483648 tokens"),
        ({"d": 2**20 + 1}, "shape.d is 1048577; at most 1048576 columns"),
        ({"n": 10**30}, f"shape.n is {10**30}; at most 1048576 columns"),
        ({"K": 200}, "shape.K is 200; at most 64"),
        ({"E": 5000}, "shape.E is 5000; at most 4096"),
        ({"E": 4}, "shape.K is 8 and shape.E is 4; K must not exceed E"),
        ({"n": 2.0}, "shape.n is 2.0; it must be an integer"),
        ({"n": True}, "shape.n is True; it must be an integer"),
    ],
)
def test_a_broken_rule_is_named(change: dict, text: str) -> None:
    sizes = {"T": 1, "d": 8, "n": 8, "E": 8, "K": 8} | change
    with pytest.raises(ValueError, match="shape") as caught:
        Shape(**sizes)
    assert text in str(caught.value)


def test_no_tokens_is_a_shape() -> None:
    assert Shape(T=0, d=8, n=8, E=2, K=1).flops("fwd_bwd") == 0


def test_flops_count_routed_rows_only() -> None:
    assert BASE.flops("fwd") == 6 * 24576 * 8 * 256 * 1536
    assert BASE.flops("fwd_bwd") == 3 * BASE.flops("fwd_infer")
    assert BASE.flops("fwd", R=10) == 6 * 10 * 256 * 1536


@pytest.mark.parametrize("G", [1.5, 3, "6", 12, "24"])
def test_granularity_keeps_work_and_parameters(G: float | str) -> None:
    moved = BASE.with_granularity(G)
    assert moved.G == float(G)
    assert (moved.n * moved.E, moved.n * moved.K) == (BASE.n * BASE.E, BASE.n * BASE.K)


def test_granularity_names_the_nearest_sizes() -> None:
    with pytest.raises(ValueError, match="nearest: G=6 "):
        BASE.with_granularity(5)


def test_rho_sets_the_number_of_experts() -> None:
    assert BASE.with_rho("1/64").E == 512
    with pytest.raises(ValueError, match=r"E = K/rho = 26\.6667 with K=8 .* nearest: rho=4/13 \(E=26\), rho=8/27"):
        BASE.with_rho("3/10")
    with pytest.raises(ValueError, match=r"it must lie in \(0, 1\]"):
        BASE.with_rho(2)


@pytest.mark.parametrize("path", SHAPE_FILES, ids=lambda path: path.stem)
def test_every_named_shape_is_one(path) -> None:
    assert named(path.stem).T >= 1


@pytest.mark.parametrize(
    ("family", "T", "d", "nE", "nK", "ns"),
    [
        ("1.4b", 40960, 768, 32768, 2048, [64, 128, 256, 512, 1024]),
        ("7b", 24576, 1536, 32768, 2048, [64, 128, 256, 512, 1024]),
        ("30b", 32768, 4096, 65536, 4096, [64, 128, 256, 512, 1024, 2048]),
        ("120b", 32768, 4096, 131072, 8192, [128, 256, 512, 1024, 2048]),
    ],
)
def test_model_sizes_keep_work_along_n(family: str, T: int, d: int, nE: int, nK: int, ns: list[int]) -> None:
    found = [named(path.stem) for path in SHAPE_FILES if path.stem.startswith(f"{family}_n")]
    assert sorted(shape.n for shape in found) == ns
    assert {(s.T, s.d, s.n * s.E, s.n * s.K) for s in found} == {(T, d, nE, nK)}


@pytest.mark.parametrize(
    ("panel", "K", "experts"),
    [
        ("fig16_d1536_n256", 8, [64, 128, 256, 512]),
        ("fig16_d1536_n1024", 2, [16, 32, 64, 128]),
        ("fig16_d4096_n512", 8, [64, 128, 256, 512]),
        ("fig16_d4096_n1024", 4, [32, 64, 128, 256]),
    ],
)
def test_panels_of_fig16_share_one_axis_of_rho(panel: str, K: int, experts: list[int]) -> None:
    base = named(panel)
    assert (base.T, base.K) == (16384, K)
    assert [base.with_rho(rho).E for rho in ("1/8", "1/16", "1/32", "1/64")] == experts


def test_open_models() -> None:
    assert named("open_deepseek_v3.2") == Shape(T=32768, d=7168, n=2048, E=256, K=8)
    assert len([path for path in SHAPE_FILES if path.stem.startswith("open_")]) == 6
