"""Gradient of the gathered rows: dXt_e = dH_e W1_e (paper Algorithm 3, kernel dXt).

Reads dH (R, 2n) and W1 (E, 2, n, d) as it is stored, writes dXt (R, d) in expert order; `aggregate` sums a token's rows
to dX.
"""

from __future__ import annotations

from functools import partial

import torch

from sonic.kernels import tuning
from sonic.kernels.common import Cost, Tile, tma_ready
from sonic.kernels.grouped_gemm import Into, configs, grouped_gemm, grouped_gemm_torch, tuned_as
from sonic.kernels.metadata import Metadata
from sonic.shapes import Shape


def d_input(
    dh_R2n: torch.Tensor, w1_E2nd: torch.Tensor, meta: Metadata, *, into: Into = "rows", tile: Tile | None = None
) -> torch.Tensor:
    """dXt (R, d) from dh_R2n (R, 2n) contiguous and w1_E2nd (E, 2, n, d); with into="tokens" dX (T, d) fp32."""
    E, _, n, d = w1_E2nd.shape
    if tile is None:
        rerun = partial(d_input, dh_R2n, w1_E2nd, meta, into=into)
        tile = tuning.choose(
            tuned_as("d_input", into),
            d,
            n,
            E,
            dh_R2n.dtype,
            lambda: configs(dh_R2n.dtype, d, into, tma_ready(dh_R2n, w1_E2nd)),
            rerun,
        )
    return grouped_gemm(dh_R2n.view(-1, 2, n), w1_E2nd, meta, tile, k_major=False, into=into, scores=None)


def d_input_torch(
    dh_R2n: torch.Tensor, w1_E2nd: torch.Tensor, meta: Metadata, *, into: Into = "rows", tile: Tile | None = None
) -> torch.Tensor:
    """Plain-torch twin of `d_input`."""
    del tile
    n = w1_E2nd.shape[2]
    return grouped_gemm_torch(dh_R2n.view(-1, 2, n), w1_E2nd, meta, k_major=False, into=into, scores=None)


def d_input_cost(shape: Shape, R: int, itemsize: int) -> Cost:
    """4 R n d FLOPs; dH and W1 read once, dXt written."""
    d, n = shape.d, shape.n
    return Cost(
        4 * R * n * d, {"dh": itemsize * 2 * R * n, "w1": itemsize * 2 * shape.E * n * d, "dxt": itemsize * R * d}, {}
    )
