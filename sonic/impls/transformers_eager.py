"""Hugging Face transformers' Qwen3-MoE block with `experts_implementation="eager"`: a loop over the experts that have
tokens, with a matrix product each. What versions before grouped_mm ran, and a host wait per layer. See `transformers`.
"""

from __future__ import annotations

from sonic.impls import transformers


class Impl(transformers.Impl):
    EAGER = True

    @staticmethod
    def available() -> str | None:
        reason = transformers.Impl.available()
        return reason and f"transformers_eager: {reason}"
