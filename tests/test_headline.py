"""The README's headline is what the committed rows say."""

from __future__ import annotations

from pathlib import Path

from analysis import headline, load, paper
from analysis.fig1_granularity import select, table
from tests.analysis_rows import measured, unmeasured, write

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_the_readme_holds_the_table_of_the_rows():
    assert headline.markdown(headline.numbers()) in README


def test_the_caution_counts_the_measurements_behind_the_table(tmp_path: Path):
    small, large = (paper.shape(size, n) for size, n in headline.SHAPES)
    apart = {"device_us": [1000.0] * 3, "event_us": [900.0] * 3}
    rows = [
        measured(small, sweep="granularity"),
        measured(small, sweep="granularity", mode="fwd_bwd", throttled=True),
        measured(large, sweep="granularity", throttled=True, **apart),
        unmeasured(large, "oom", impl="scattermoe", sweep="granularity"),
        measured(paper.shape("30B", 256), sweep="granularity", throttled=True, **apart),
        measured(large, sweep="granularity", op="experts", throttled=True, **apart),
    ]
    assert headline.caution(write(tmp_path, rows)) == (
        "The card throttled in 2 of the 3 measurements behind the table (1 of 2 at 7B, 1 of 1 at 30B); "
        "device time is more than 3% above event time in 1 of them, since the clocks differed between the passes."
    )


def test_the_readme_names_the_share_of_the_bound():
    rows, _ = load.rows(sweep="granularity", gpu=headline.GPU)
    experts = rows[(rows["op"] == "experts") & (rows["d"] == 1536) & (rows["mode"] == "fwd")]
    ours, bound = (experts[experts["impl"] == name].set_index("n")["ms"] for name in ("sonic", "cublas_bmm"))
    share = bound / ours
    text = " ".join(README.split())
    assert f"reaches {share.min():.2f} to {share.max():.2f} of the cuBLAS bound" in text
    layers = table(select(rows)).query("size == '30B' and n >= 256 and series == 'sonic (triton)'").of_bound.dropna()
    assert f"reach {layers.min():.2f} to {layers.max():.2f} of the bound by cuBLAS" in text


def test_the_readme_holds_the_caution_of_the_rows():
    assert headline.caution() in " ".join(README.split())
