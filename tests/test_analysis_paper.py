"""`analysis.paper`: the tables agree with each other and the models with totals that the authors print."""

from __future__ import annotations

import pytest

from analysis import paper
from sonic.shapes import Shape

QWEN3_235B = Shape(T=32768, d=4096, n=1536, E=128, K=8)


def gib(size: float) -> float:
    return size / paper.GIB


def test_every_number_has_a_source_a_kind_and_a_value() -> None:
    table = paper.numbers()
    assert set(table.kind) == {"stated", "digitised", "reported"}
    assert table.source.str.len().gt(0).all() and table.value.gt(0).all()
    assert not table.duplicated(["figure", "device", *"TdnEK", "method", "quantity", "unit"]).any()
    for sizes in table[list("TdnEK")].itertuples(index=False):
        Shape(*sizes)


@pytest.mark.parametrize(
    ("impl", "held"), [("sonic", 1.75), ("momoe_save_all", 3.75), ("scattermoe", 4.50), ("standard_style", 6.50)]
)
def test_held_formula_gives_the_authors_figure(impl: str, held: float) -> None:
    assert gib(paper.held_bytes(impl, QWEN3_235B)) == held


@pytest.mark.parametrize(
    ("impl", "fwd", "bwd"),
    [
        ("sonic", 13.75, 26.75),
        ("scattermoe", 15.25, 41.75),
        ("momoe_save_all", 15.75, 38.75),
        ("standard_style", 23.25, 39.75),
    ],
)
def test_io_model_gives_the_authors_figure(impl: str, fwd: float, bwd: float) -> None:
    assert gib(paper.io_total(impl, "fwd", QWEN3_235B)) == fwd
    assert gib(paper.io_total(impl, "bwd", QWEN3_235B)) == bwd
    kernels = paper.io_bytes(QWEN3_235B).groupby("direction").bytes.sum()
    assert (gib(kernels.fwd), gib(kernels.bwd)) == (13.75, 26.75)


def test_io_model_names_what_it_covers() -> None:
    with pytest.raises(KeyError, match="no IO model of 'liger'; there is one of sonic, scattermoe"):
        paper.io_total("liger", "fwd", QWEN3_235B)
    assert paper.held_bytes("liger", QWEN3_235B) is None


def test_held_formula_fits_the_digitised_bars() -> None:
    table = paper.peak_memory()
    table = table[table.impl.isin(("sonic", "scattermoe", "momoe"))]
    formula = [
        gib(paper.held_bytes(line.impl, Shape(line.T, line.d, line.n, line.E, line.K))) for line in table.itertuples()
    ]
    assert (table.held_gib - formula).abs().max() < 0.06


def test_abstracts_speed_follows_from_fig_14() -> None:
    ms = paper.layer_ms()
    at = ms[(ms["T"] == 24576) & (ms.n == 256)].set_index("impl").fwd_bwd_ms
    claim = paper.headline().set_index("claim").value["fwd+bwd speed over ScatterMoE, 7B n=256, H100"]
    assert at["scattermoe"] / at["sonic"] == pytest.approx(claim, abs=0.01)


def test_shares_of_the_bound_are_those_of_the_text() -> None:
    fwd = (
        paper.fig1()
        .query("device == 'H100' and quantity == 'fwd'")
        .pivot_table(index="n", columns="method", values="value")
    )
    share = 100 * fwd["SonicMoE"] / fwd["upper bound"]
    assert (share.mean(), share.min(), share.max()) == pytest.approx((88, 86, 91), abs=1)


def test_sizes_keep_work_and_parameters_along_granularity() -> None:
    for size in paper.SIZES:
        for n, E, K in paper.CONFIGS[size] + paper.FIG3_CONFIGS[size]:
            shape = paper.shape(size, n)
            assert paper.size_name(shape.T, shape.d, n, E, K) == size
    assert paper.size_name(1, 2, 3, 4, 4) is None
    with pytest.raises(KeyError, match="30B has no n=3; the paper has n = 2048"):
        paper.shape("30B", 3)
    with pytest.raises(KeyError, match="unknown model size '8B'; the paper has 1.4B, 7B"):
        paper.shape("8B", 256)


def test_open_models_and_intensity() -> None:
    table = paper.open_models().set_index("model")
    assert (table.G["Qwen3-Next-80B-A3B-Instruct"], table.rho["OLMoE"]) == (4.0, 0.125)
    assert paper.arithmetic_intensity(Shape(16384, 2048, 512, 512, 10)) == pytest.approx(210, abs=1)


def test_expected_padding_of_fig_16() -> None:
    d, n, K, experts = paper.FIG16_PANELS[3]
    fractions = [paper.expected_padding(Shape(paper.FIG16_T, d, n, E, K)) for E in experts]
    assert fractions == pytest.approx([0.03, 0.06, 0.125, 0.25], rel=0.05)
