"""Bytes to and from memory of a layer under the ways of different implementations (paper sections 3 and 5, Fig 3).

A pass moves multiples of four tensors: rows of the model's width (R, d), rows of the experts' width (R, n), the weights
of one expert product (E, d, n) and tokens (T, d). The multiples are sums over kernels, every operand read once and
every result written once; with "at every use" a gathered token counts for each of its rows, with "once" only once. They
give the totals of the authors' figures for Qwen3-235B (13.75, 15.25, 15.75 and 23.25 GiB forward, 26.75, 41.75, 38.75
and 39.75 backward).
"""

from __future__ import annotations

from dataclasses import dataclass

from sonic.shapes import Shape


@dataclass(frozen=True)
class Multiples:
    """How often a pass moves each tensor; `gathered` of the `wide` rows are tokens, read through the routing."""

    wide: int
    narrow: int
    weights: int
    tokens: int
    gathered: int = 0

    def bytes(self, shape: Shape, itemsize: int = 2, once: bool = False) -> int:
        """Bytes at a shape; `once` counts a gathered token once."""
        wide, tokens = (self.wide - self.gathered, self.tokens + self.gathered) if once else (self.wide, self.tokens)
        R, T, d, n, E = shape.R, shape.T, shape.d, shape.n, shape.E
        return itemsize * (wide * R * d + self.narrow * R * n + self.weights * E * d * n + tokens * T * d)


#: Method -> forward and backward.
MODEL: dict[str, tuple[Multiples, Multiples]] = {
    # X gathered, Y written and read; H, A written, A read | X and dO twice gathered, dXt written and read; H read, dH
    # written and read twice, A' written and read
    "sonic": (Multiples(3, 4, 3, 1, gathered=1), Multiples(5, 10, 6, 1, gathered=3)),
    # H read again by SwiGLU | gathers of X and dO as kernels, Y read for dS, dY scaled, dA and dSwiGLU as kernels
    "scattermoe": (Multiples(3, 6, 3, 1, gathered=1), Multiples(11, 14, 6, 1)),
    # Y scaled before it is summed | as ScatterMoE, dSwiGLU in an epilogue
    "momoe": (Multiples(4, 4, 3, 1, gathered=1), Multiples(11, 10, 6, 1)),
    # gather and scatter as kernels, SwiGLU as a kernel | likewise, X kept in rows
    "standard": (Multiples(7, 6, 3, 1), Multiples(10, 14, 6, 1)),
}


def total(method: str, mode: str, shape: Shape, itemsize: int = 2, once: bool = False) -> int:
    """Bytes of a method's forward (`fwd`) or of both passes (`fwd_bwd`)."""
    forward, backward = MODEL[method]
    size = forward.bytes(shape, itemsize, once)
    return size if mode == "fwd" else size + backward.bytes(shape, itemsize, once)
