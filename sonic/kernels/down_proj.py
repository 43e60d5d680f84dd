"""Down-projection of the experts: Y_e = A_e W2_e^T (paper Algorithm 2, kernel Y).

Reads A (R, n) and W2 (E, d, n), writes Y (R, d) in expert order by TMA; `into` moves the result elsewhere
(`grouped_gemm`).
"""

from __future__ import annotations

from functools import partial

import torch

from sonic.kernels import tuning
from sonic.kernels.common import Cost, Tile, tma_ready
from sonic.kernels.grouped_gemm import Into, configs, grouped_gemm, grouped_gemm_torch, tuned_as
from sonic.kernels.metadata import Metadata
from sonic.shapes import Shape


def down_proj(
    a_Rn: torch.Tensor,
    w2_Edn: torch.Tensor,
    meta: Metadata,
    *,
    into: Into = "rows",
    scores: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Y (R, d) from a_Rn (R, n) contiguous and w2_Edn (E, d, n); with into="tokens" O (T, d) fp32, weighted by
    scores (T, K)."""
    E, d, n = w2_Edn.shape
    if tile is None:
        rerun = partial(down_proj, a_Rn, w2_Edn, meta, into=into, scores=scores)
        tile = tuning.choose(
            tuned_as("down_proj", into),
            d,
            n,
            E,
            a_Rn.dtype,
            lambda: configs(a_Rn.dtype, d, into, tma_ready(a_Rn, w2_Edn)),
            rerun,
        )
    return grouped_gemm(a_Rn[:, None], w2_Edn[:, None], meta, tile, k_major=True, into=into, scores=scores)


def down_proj_torch(
    a_Rn: torch.Tensor,
    w2_Edn: torch.Tensor,
    meta: Metadata,
    *,
    into: Into = "rows",
    scores: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Plain-torch twin of `down_proj`."""
    del tile
    return grouped_gemm_torch(a_Rn[:, None], w2_Edn[:, None], meta, k_major=True, into=into, scores=scores)


def down_proj_cost(shape: Shape, R: int, itemsize: int) -> Cost:
    """2 R n d FLOPs; A and W2 read once, Y written."""
    d, n = shape.d, shape.n
    return Cost(2 * R * n * d, {"a": itemsize * R * n, "w2": itemsize * shape.E * n * d, "y": itemsize * R * d}, {})
