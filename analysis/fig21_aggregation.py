"""The sum over each token's rows, weighted by the scores: bandwidth, ours beside eager torch.

Mirrors Fig 21 of the paper. Bytes are those of the model, every row read once and every token written.
"""

from __future__ import annotations

import sys
from functools import partial

from analysis import alone, figures

SWEEP = "aggregation"
TITLE = "Bandwidth of the aggregation"
OPS = {"aggregate": "O = sum of a token's rows"}
_QUANTITY = "gbps"
_SAID = ("2.92 times ScatterMoE's torch.bmm, 1.05 times MoMoE's torch.sum, 0.98 of a sum over contiguous rows.",)

select = partial(alone.select, ops=tuple(OPS))
table = partial(alone.table, quantity=_QUANTITY)
draw = partial(alone.draw, title=TITLE, quantity=_QUANTITY, ops=OPS, said=_SAID)


def main() -> int:
    """Draws this figure; the options are those of `python -m analysis`."""
    return figures.file_main(__file__)


if __name__ == "__main__":
    sys.exit(main())
