"""The weighted sum of a token's rows and the separate gather."""

from __future__ import annotations

import pytest
import torch

from sonic.kernels.aggregate import aggregate
from tests.oracle import DEVICE, DTYPES, against_twin, check_equal


def rows(*size: int, dtype: str) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size[0])).to(DEVICE, DTYPES[dtype])


@pytest.mark.parametrize(
    ("T", "K", "d", "dtype"),
    [
        (0, 2, 16, "fp32"),
        (1, 1, 71, "bf16"),
        (17, 3, 72, "fp32"),
        (33, 8, 71, "bf16"),
        (5, 9, 40, "fp16"),
        (3, 33, 2049, "fp32"),
        (130, 1, 1, "fp32"),
    ],
)
def test_aggregate(T: int, K: int, d: int, dtype: str) -> None:
    case = f"T{T}-K{K}-d{d}-{dtype}"
    y, scores = rows(T * K, d, dtype=dtype), torch.rand(T, K, device=DEVICE)
    row_idx = torch.randperm(T * K).int().to(DEVICE)
    for index in (row_idx, None):
        for weights in (scores, None):
            against_twin(case, "aggregate", y, index, weights, T, K)


def test_the_sum_has_one_order() -> None:
    y, row_idx = rows(17 * 8, 72, dtype="bf16"), torch.randperm(17 * 8).int().to(DEVICE)
    first = aggregate(y, row_idx, None, 17, 8)
    moved = torch.randperm(17 * 8).to(DEVICE)
    check_equal("permuted rows", "o", aggregate(y[moved], moved.argsort()[row_idx.long()].int(), None, 17, 8), first)


@pytest.mark.parametrize(("T", "R", "d", "dtype"), [(5, 0, 16, "fp32"), (17, 50, 71, "bf16"), (3, 70, 2050, "fp32")])
def test_gather_rows(T: int, R: int, d: int, dtype: str) -> None:
    index = torch.randint(T, (R,)).int().to(DEVICE)
    wide = rows(T, d + 8, dtype=dtype)
    got = against_twin(f"T{T}-R{R}-d{d}-{dtype}", "gather_rows", wide[:, :d], index)
    check_equal("gather", "rows", got, wide[:, :d][index.long()])
