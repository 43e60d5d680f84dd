"""Bytes to and from memory of a layer under the ways of different implementations (paper sections 3 and 5, Fig 3).

A pass moves multiples of four tensors: rows of the model's width (R, d), rows of the experts' width (R, n), the weights
of one expert product (E, d, n) and tokens (T, d). The multiples are those of `paper.io_multiples`, sums over kernels,
every operand read once and every result written once; with "at every use" a gathered token counts for each of its rows,
with "once" only once. They give the totals of the authors' figures for Qwen3-235B (13.75, 15.25, 15.75 and 23.25 GiB
forward, 26.75, 41.75, 38.75 and 39.75 backward).
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis import paper
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


def _of_paper(impl: str, gathered: tuple[int, int]) -> tuple[Multiples, Multiples]:
    """Forward and backward of an implementation of `paper.io_multiples`, with the gathered rows of each."""
    found = []
    for direction, count in zip(("fwd", "bwd"), gathered, strict=True):
        tokens, narrow, wide, weights = paper.io_multiples(impl, direction)
        found.append(Multiples(wide, narrow, weights, tokens, count))
    return found[0], found[1]


#: Method -> forward and backward. How many reads are gathers, in a GEMM or by a kernel, the coefficients do not say.
MODEL: dict[str, tuple[Multiples, Multiples]] = {
    "sonic": _of_paper("sonic", gathered=(1, 3)),  # X | X, and dO twice
    "scattermoe": _of_paper("scattermoe", gathered=(1, 2)),  # X | X and dO, by kernels of their own
    "momoe": _of_paper("momoe_save_all", gathered=(1, 2)),
    "standard": _of_paper("standard_style", gathered=(1, 1)),  # X | dO, X being kept in rows
}


def total(method: str, mode: str, shape: Shape, itemsize: int = 2, once: bool = False) -> int:
    """Bytes of a method's forward (`fwd`) or of both passes (`fwd_bwd`)."""
    forward, backward = MODEL[method]
    size = forward.bytes(shape, itemsize, once)
    return size if mode == "fwd" else size + backward.bytes(shape, itemsize, once)


def of_knobs(gather: str, activation: str, ds: str, cache: str) -> tuple[Multiples, Multiples]:
    """Forward and backward of the `sonic` layer under its ablation knobs; those at rest give `MODEL["sonic"]`.

    Where sums are taken and how tiles are scheduled moves no bytes in this model.
    """
    forward, backward = MODEL["sonic"]
    apart, kernel = 2 * (gather == "separate"), 2 * (activation == "separate")
    # rows of X written and read by the GEMM instead of gathered there; H read by a SwiGLU kernel
    forward = Multiples(forward.wide + apart, forward.narrow + kernel, forward.weights, forward.tokens, 1)
    wide, narrow, gathered = backward.wide, backward.narrow + kernel, backward.gathered
    if ds == "from_y":
        # dO gathered for dY and for <dO, Y>, dY written and read twice, Y read: six in the place of two gathers
        wide += 4
        narrow -= cache in ("h_a", "h_a_y")  # A was kept: no A' is written
    elif gather == "separate":
        wide, gathered = wide + 2, gathered - 1
    if gather == "separate":
        kept = cache == "h_a_y"
        wide, gathered = wide + (0 if kept else 2), gathered - kept
    return forward, Multiples(wide, narrow, backward.weights, backward.tokens, gathered)


def total_of_knobs(mode: str, shape: Shape, itemsize: int = 2, once: bool = False, **knobs: str) -> int:
    """Bytes of the `sonic` layer under ablation knobs (`of_knobs`), forward or both passes."""
    forward, backward = of_knobs(**knobs)
    size = forward.bytes(shape, itemsize, once)
    return size if mode == "fwd" else size + backward.bytes(shape, itemsize, once)
