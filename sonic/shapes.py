"""Sizes of one MoE layer: the five letters of the paper (section 2) and what follows from them; the name of a card.

The one module that kernels, harness and analysis may all import: the standard library is all it needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

MAX_E = 4096
MAX_K = 64
#: Far beyond any model: a larger number is a slip of the keyboard.
MAX_T = 2**31
MAX_WIDTH = 2**20
#: Tile of token rounding in all of the paper's figures (section 2.4 of the notes).
DEFAULT_TILE = 128


def gpu_slug(name: str) -> str:
    """A card's name as files and rows have it, other characters a hyphen each run: `NVIDIA H200` is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@dataclass(frozen=True)
class Shape:
    """Sizes of one MoE layer.

    T tokens per microbatch, d model width, n expert intermediate size, E experts, K experts per token.
    Raises ValueError naming the field, its value and the rule that it breaks.
    """

    T: int
    d: int
    n: int
    E: int
    K: int

    def __post_init__(self) -> None:
        for field in ("T", "d", "n", "E", "K"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"shape.{field} is {value!r}; it must be an integer")
            least = 0 if field == "T" else 1
            if value < least:
                raise ValueError(f"shape.{field} is {value}; it must be at least {least}")
        if self.T > MAX_T:
            raise ValueError(f"shape.T is {self.T}; at most {MAX_T} tokens are supported")
        for field in ("d", "n"):
            if getattr(self, field) > MAX_WIDTH:
                raise ValueError(f"shape.{field} is {getattr(self, field)}; at most {MAX_WIDTH} columns are supported")
        if self.E > MAX_E:
            raise ValueError(f"shape.E is {self.E}; at most {MAX_E} experts are supported")
        if self.K > MAX_K:
            raise ValueError(f"shape.K is {self.K}; at most {MAX_K} experts per token are supported")
        if self.K > self.E:
            raise ValueError(f"shape.K is {self.K} and shape.E is {self.E}; K must not exceed E")

    @property
    def G(self) -> float:
        """Granularity d/n: higher means finer experts."""
        return self.d / self.n

    @property
    def rho(self) -> float:
        """Activation ratio K/E: lower means sparser."""
        return self.K / self.E

    @property
    def R(self) -> int:
        """Routed (token, expert) pairs of top-K routing."""
        return self.T * self.K

    def flops(self, mode: str, R: int | None = None) -> int:
        """Model FLOPs of `fwd`, `fwd_infer` (6 R n d) or `fwd_bwd` (18 R n d); no padding, no router (paper 3.2)."""
        factor = {"fwd": 6, "fwd_infer": 6, "fwd_bwd": 18}[mode]
        return factor * (self.R if R is None else R) * self.n * self.d

    def with_granularity(self, G: float | str) -> Shape:
        """The shape with n = d/G, E and K scaled so that nE and nK stay. ValueError names the nearest granularities."""
        G = Fraction(G).limit_denominator(1 << 16)
        if G <= 0:
            raise ValueError(f"shape.G is {G}; it must be positive")

        def fits(n: int) -> bool:
            return n > 0 and self.n * self.E % n == 0 and self.n * self.K % n == 0

        n = Fraction(self.d) / G
        if n.denominator == 1 and fits(int(n)):
            return replace(self, n=int(n), E=self.n * self.E // int(n), K=self.n * self.K // int(n))
        near = sorted((m for m in range(1, self.n * self.K + 1) if fits(m)), key=lambda m: abs(m - n))[:3]
        names = ", ".join(f"G={Fraction(self.d, m)} (n={m})" for m in near)
        raise ValueError(
            f"shape.G is {G}: n = d/G = {float(n):g} with d={self.d} must be an integer that divides "
            f"n*E = {self.n * self.E} and n*K = {self.n * self.K}; nearest: {names}"
        )

    def with_rho(self, rho: float | str) -> Shape:
        """The shape with E = K/rho. ValueError names the nearest activation ratios."""
        rho = Fraction(rho).limit_denominator(1 << 16)
        if not 0 < rho <= 1:
            raise ValueError(f"shape.rho is {rho}; it must lie in (0, 1]")
        E = self.K / rho
        if E.denominator == 1:
            return replace(self, E=int(E))
        below = int(E)
        names = ", ".join(f"rho={Fraction(self.K, e)} (E={e})" for e in (below, below + 1))
        raise ValueError(
            f"shape.rho is {rho}: E = K/rho = {float(E):g} with K={self.K} must be an integer; nearest: {names}"
        )


def check_routing(
    method: str, T: int, E: int, K: int, tile: int | None, capacity: float | None, groups: int | None, score: str | None
) -> None:
    """ValueError naming the first field of a routing that cannot be with these sizes, its value and the rule."""
    if capacity is not None and not 0 < capacity < float("inf"):
        raise ValueError(f"routing.capacity is {capacity:g}; it must be positive and finite")
    if tile is not None and tile < 1:
        raise ValueError(f"routing.tile is {tile}; it must be at least 1")
    if groups is not None and groups < 1:
        raise ValueError(f"routing.groups is {groups}; it must be at least 1")
    if method.startswith("tr_") or (method == "expert_choice" and tile is not None):
        rows = DEFAULT_TILE if tile is None else tile
        if rows > T > 0:
            raise ValueError(f"routing.tile is {rows} and shape.T is {T}; a tile must not exceed the tokens")
    if method == "grouped":
        for name, size in (("E", E), ("K", K)):
            if size % (groups or 1):
                raise ValueError(
                    f"routing.groups is {groups} and shape.{name} is {size}; the groups must divide {name} evenly"
                )
    if score is not None and method not in ("topk", "laser"):
        raise ValueError(f"routing.score is {score!r}; only methods topk and laser take it, not {method}")
