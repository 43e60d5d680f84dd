"""The sum over each token's rows, weighted by the scores: bandwidth, ours beside PyTorch's.

Mirrors Fig 21 of the paper. Bytes are those of the model, every row read once and every token written. `torch_bmm` and
`torch_sum` read rows that lie in token order, the latter weighted already; all others gather theirs.
"""

from __future__ import annotations

import sys
from functools import partial

from analysis import alone, figures, paper

SWEEP = "aggregation"
TITLE = "Bandwidth of the aggregation"
OPS = {"aggregate": "O = sum of a token's rows"}
_QUANTITY = "gbps"
_SAID = ("2.85 TB/s and more by a Triton sum over contiguous rows, 85% of the peak, at most shapes.",)

select = partial(alone.select, ops=tuple(OPS))
table = partial(alone.table, quantity=_QUANTITY)
draw = partial(alone.draw, title=TITLE, quantity=_QUANTITY, ops=OPS, said=_SAID, gains=paper.KERNEL_GAINS["fig21"])


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
