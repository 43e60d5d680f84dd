"""Routing metadata against a stable argsort, and the map of output tiles against a loop over experts."""

from __future__ import annotations

import pytest
import torch

from sonic.kernels import metadata as md
from tests.oracle import DEVICE, against_twin, check_equal


def routing(T: int, K: int, E: int, how: str = "random") -> torch.Tensor:
    generator = torch.Generator().manual_seed(T + K + E)
    if how == "one":
        ids = torch.arange(K).expand(T, K)
    elif how == "last":
        ids = torch.arange(E - K, E).expand(T, K)
    else:
        first = E // 2 if how == "empty" and E // 2 + K <= E else 0
        ids = first + torch.rand(T, E - first, generator=generator).argsort(dim=1)[:, :K]
    return ids.int().contiguous().to(DEVICE)


CASES = [
    (0, 2, 8, "random"),
    (1, 1, 1, "random"),
    (1, 8, 300, "random"),
    (17, 3, 5, "random"),
    (17, 1, 64, "empty"),
    (33, 2, 5, "one"),
    (130, 8, 300, "random"),
    (130, 3, 3, "random"),
    (300, 2, 60, "last"),
    (513, 1, 384, "empty"),
    (300, 10, 512, "last"),
    (65, 32, 2048, "random"),
    (40, 64, 4096, "empty"),
]


@pytest.mark.parametrize(("T", "K", "E", "how"), CASES)
def test_metadata_and_restore(T: int, K: int, E: int, how: str) -> None:
    case = f"T{T}-K{K}-E{E}-{how}"
    ids = routing(T, K, E, how)
    meta = against_twin(case, "metadata", ids, E)
    check_equal(case, "counts_E", meta.counts_E.cpu().long(), torch.bincount(ids.flatten().cpu(), minlength=E))
    scores = torch.rand(T, K, device=DEVICE)
    restored, scores_R = against_twin(case, "restore", meta.row_idx_R, meta.offsets_E1, scores)
    check_equal(case, "restored slot_idx", restored.slot_idx_R, meta.slot_idx_R)
    check_equal(case, "restored gather_idx", restored.gather_idx_R, meta.gather_idx_R)
    check_equal(case, "scores_R", scores_R, scores.flatten()[meta.slot_idx_R.long()])


@pytest.mark.parametrize("m", [16, 64, 128])
@pytest.mark.parametrize(
    "counts", [[1, 15, 17, 0, 31], [0, 0, 300], [300, 0, 0], [0, 1], [64, 64, 128, 16], [1] * 300], ids=str
)
def test_tile_map(counts: list[int], m: int) -> None:
    """Counts that are no multiple of the tile, empty experts first, last and in between."""
    offsets = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    got, want = md.tile_map(offsets, sum(counts), m), md.tile_map_torch(offsets, sum(counts), m)
    count = want.table[3 * want.limit].item()
    assert count == sum(-(-c // m) for c in counts) <= want.limit == got.limit
    assert got.table[3 * got.limit].item() == count
    for part in range(3):
        there = slice(part * want.limit, part * want.limit + count)
        check_equal(f"{counts} m={m}", ("expert", "row0", "end")[part], got.table[there], want.table[there])


def test_example_of_the_module() -> None:
    meta = md.metadata(torch.tensor([[0, 2], [2, 1]], dtype=torch.int32, device=DEVICE), 3)
    assert meta.offsets_E1.tolist() == [0, 1, 2, 4]
    assert meta.slot_idx_R.tolist() == [0, 3, 1, 2]
    assert meta.gather_idx_R.tolist() == [0, 1, 0, 1]


def test_tile_maps_are_made_once() -> None:
    meta = md.metadata(routing(17, 3, 5), 5)
    assert meta.tile_map(64) is meta.tile_map(64)
    assert meta.tile_map(64).m == 64 and meta.tile_map(16).m == 16
