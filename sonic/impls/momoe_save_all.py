"""MoMoE with `save_percent=100`: H and Y are kept for the backward instead of computed again, as in the paper's figure
of memory. See `momoe`.

The rows of the last, partial tile of an expert may still be computed again, as the package decides tile by tile.
"""

from __future__ import annotations

from dataclasses import replace

from sonic.impls import momoe


class Impl(momoe.Impl):
    SAVE_PERCENT = 100
    properties = replace(momoe.Impl.properties, kept=("H", "Y"))

    @staticmethod
    def available() -> str | None:
        reason = momoe.Impl.available()
        return reason and reason.replace("momoe", "momoe_save_all", 1)
