"""The README's headline is what the committed rows say."""

from __future__ import annotations

from pathlib import Path

from analysis import headline, load

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_the_readme_holds_the_table_of_the_rows():
    assert headline.markdown(headline.numbers()) in README


def test_the_readme_names_the_share_of_the_bound():
    rows, _ = load.rows(sweep="granularity", gpu=headline.GPU)
    experts = rows[(rows["op"] == "experts") & (rows["d"] == 1536) & (rows["mode"] == "fwd")]
    ours, bound = (experts[experts["impl"] == name].set_index("n")["ms"] for name in ("sonic", "cublas_bmm"))
    share = bound / ours
    assert f"reaches {share.min():.2f} to {share.max():.2f} of the cuBLAS bound" in README
