"""The README's table: one line per implementation at a fine and a coarse shape of one sweep.

`python -m analysis.headline` prints it as markdown from the committed rows; a test holds the README to it. The paper's
speed of SonicMoE over an implementation (Fig 14, H100) and what it saves of the memory held for the backward (Fig 13,
less what the bars hold beside it) stand beside the measured ones.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis import common, load, paper
from analysis.fig1_granularity import select, table
from sonic.say import say

GPU = common.HOME_GPU
SWEEP = "granularity"
SHAPES = (("7B", 256), ("30B", 1024))
HEAD = (
    "shape", "implementation", "fwd ms", "fwd + bwd ms", "fwd TFLOP/s", "held GiB",
    "sonic's speed (fwd + bwd)", "the paper's, H100", "sonic holds less by", "the paper's",
)  # fmt: skip


def numbers(results: Path = load.RESULTS) -> pd.DataFrame:
    """The rows behind the table: the shapes of `SHAPES`, op=layer, with times, both speeds, held memory and the parts
    of it that `sonic` saves (`saved`, `paper_saved`)."""
    rows, _ = load.newest_method(load.rows(results, sweep=SWEEP, gpu=GPU)[0])
    found = table(select(rows))
    shown = (found[(found["size"] == size) & (found["n"] == n)] for size, n in SHAPES)
    return pd.concat([_with_savings(part) for part in shown])


def _with_savings(lines: pd.DataFrame) -> pd.DataFrame:
    """The lines of one shape with the parts of the held memory that the first line of `sonic` saves."""
    mine = lines.series.str.startswith("sonic (")
    ours = lines[mine & lines.held_gib.notna()].iloc[0]
    saved, paper_saved = (1 - ours[name] / lines[name].mask(mine) for name in ("held_gib", "paper_held_gib"))
    return lines.assign(saved=saved, paper_saved=paper_saved)


def markdown(found: pd.DataFrame) -> str:
    """The table as it stands in the README; a dash where there is no row or no number of the paper."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for row in found[found["fwd_bwd_ms"].notna()].itertuples():
        shape = paper.shape(row.size, row.n)
        flops = shape.flops("fwd")
        cells = (
            f"{row.size}, n = {row.n}",
            f"`{row.series}`",
            _cell(flops / row.fwd_tflops / 1e9, ".2f"),
            _cell(row.fwd_bwd_ms, ".2f"),
            _cell(row.fwd_tflops, ".0f"),
            _cell(row.held_gib, ".2f"),
            _cell(row.sonic_speed, ".2f"),
            _cell(row.paper_sonic_speed, ".2f"),
            _cell(row.saved, ".0%"),
            _cell(row.paper_saved, ".0%"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def caution(results: Path = load.RESULTS) -> str:
    """How many of the measurements behind the table are to be taken with care, as the README says it."""
    rows, _ = load.newest_method(load.rows(results, sweep=SWEEP, gpu=GPU)[0])
    layers = rows[(rows.op == "layer") & rows["mode"].isin(("fwd", "fwd_bwd")) & rows.ms.notna()]
    sizes = [paper.shape(size, n) for size, n in SHAPES]
    behind = [layers[(layers[list(load.SHAPE)] == [getattr(shape, name) for name in load.SHAPE]).all(axis=1)]
              for shape in sizes]  # fmt: skip
    every = pd.concat(behind)
    parts = ", ".join(
        f"{part.throttled.eq(True).sum()} of {len(part)} at {size}"
        for (size, _), part in zip(SHAPES, behind, strict=True)
    )
    return (
        f"The card throttled in {every.throttled.eq(True).sum()} of the {len(every)} measurements behind the table "
        f"({parts}); device time is more than {common.CLOCKS_DIFFER - 1:.0%} above event time in "
        f"{common.clocks_differ(every).sum()} of them, since the clocks differed between the passes."
    )


def _cell(value: float, form: str) -> str:
    return "-" if pd.isna(value) else format(value, form)


def main() -> int:
    """Print the table and the sentence below it."""
    say(markdown(numbers()))
    say()
    say(caution())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
