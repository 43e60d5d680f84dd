"""Ranking, rounding and selecting tokens, each step against its twin; the bounds that the host relies on."""

from __future__ import annotations

import pytest
import torch

from sonic.kernels import token_rounding as tr
from sonic.kernels.plan import plan_of_mask, plan_of_mask_torch
from sonic.kernels.router_topk import router_topk_torch
from tests.oracle import DEVICE, check, check_equal


def logits(T: int, E: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(T * E + 1)).to(DEVICE, dtype)


def ranked(T: int, E: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = logits(T, E)
    scores, ids = router_topk_torch(x, K)
    return tr.rank_torch(x, ids, scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("T", "E", "K"), [(0, 4, 2), (1, 3, 1), (65, 5, 5), (130, 20, 3)])
def test_rank(T: int, E: int, K: int, dtype: torch.dtype) -> None:
    x = logits(T, E, dtype)
    scores, ids = router_topk_torch(x, K)
    for given in ((ids, scores), (None, None)):
        (keys, counts), (want, want_counts) = tr.rank(x, *given), tr.rank_torch(x, *given)
        check_equal("rank", "counts", counts, want_counts)
        check_equal("rank", "chosen", keys >> 30, want >> 30)
        below = [(k & (1 << 30) - 1).view(torch.float32) for k in (keys, want)]
        check("rank", "scores", *below, 2e-6)


def test_scores_that_are_no_numbers_rank_last() -> None:
    x = logits(8, 4)
    x[3] = float("nan")
    x[5, 1:] = float("-inf")
    scores, ids = router_topk_torch(x, 2)
    keys, _ = tr.rank(x, ids, scores)
    assert (keys >= 0).all()
    assert ((keys[:, 3] & (1 << 30) - 1) == 0).all()


@pytest.mark.parametrize("in_registers", [True, False])
@pytest.mark.parametrize("T", [1, 17, 130])
def test_select_takes_the_first_of_equal_keys(T: int, in_registers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_registers:
        monkeypatch.setattr(tr, "_IN_REGISTERS", 0)
        monkeypatch.setattr(tr, "_BLOCK", 64)
    generator = torch.Generator().manual_seed(T)
    for most in (3, 1 << 31):  # many ties, hardly any
        keys = torch.randint(most, (6, T), generator=generator).int().to(DEVICE)
        targets = torch.tensor([0, 1, T // 2, T - 1, T, T + 5]).int().to(DEVICE)
        kept = tr.select(keys, targets)
        check_equal(f"T{T}", "kept", kept, tr.select_torch(keys, targets))
        assert kept.sum(1).tolist() == [min(t, T) for t in targets.tolist()]


@pytest.mark.parametrize(("T", "E", "K", "tile"), [(130, 20, 3, 16), (65, 5, 5, 7), (1, 3, 1, 1), (60, 6, 2, 60)])
def test_targets(T: int, E: int, K: int, tile: int) -> None:
    keys, counts = ranked(T, E, K)
    sums = tr.score_sums(keys, counts, tile)
    check("sums", "sums", sums, tr.score_sums_torch(keys, counts, tile), 1e-5)
    draws = torch.rand(E, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for rule in tr.RULES:
        got = tr.targets(counts, T, tile, rule, draws, sums)
        check_equal(rule, "targets", got, tr.targets_torch(counts, T, tile, rule, draws, sums))
        assert (got % tile == 0).all() and ((got - counts).abs() < tile).all() and (got <= T).all()
        assert got.sum() <= tr.most_rows(T, E, K, tile, rule)


def test_the_bound_of_every_rule_holds_for_any_counts() -> None:
    """Counts that no router made, every sum of them T K."""
    generator = torch.Generator().manual_seed(0)
    T, E, K = 64, 12, 3
    for tile in (1, 2, 7, 8, 64):
        for _ in range(50):
            ids = (torch.rand(T, E, generator=generator) ** 4).topk(K).indices
            counts = torch.bincount(ids.flatten(), minlength=E).int()
            draws = torch.rand(E, generator=generator)
            sums = torch.rand(2, E, generator=generator)
            for rule in tr.RULES:
                targets = tr.targets_torch(counts, T, tile, rule, draws, sums)
                assert targets.sum() <= tr.most_rows(T, E, K, tile, rule), (rule, tile, counts)


def test_balance_stays_within_half_a_tile_on_every_prefix() -> None:
    """Where no expert is held back by T (paper F.2)."""
    generator = torch.Generator().manual_seed(0)
    for tile in (2, 7, 16):
        for _ in range(20):
            counts = torch.randint(100, (30,), generator=generator).int()
            apart = (tr.targets_torch(counts, 1000, tile, "balance", None, None) - counts).cumsum(0)
            assert apart.abs().max() <= tile / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("chosen", [True, False], ids=["top_k", "experts_choose"])
def test_gradient_of_the_logits(chosen: bool, dtype: torch.dtype) -> None:
    T, E, K = 70, 9, 3
    x = logits(T, E, dtype)
    scores, ids = router_topk_torch(x, K)
    given = (ids, scores) if chosen else (None, None)
    keys, _ = tr.rank_torch(x, *given)
    kept = tr.select_torch(keys, torch.arange(0, 9 * E, 9, device=DEVICE)).T
    plan = plan_of_mask(kept, keys.T, int(kept.sum()) + 3)
    ds = torch.randn(plan.limit, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    ds[int(kept.sum()) :] = float("nan")
    limit = 2e-6 if dtype == torch.float32 else 1e-3
    check("d_logits", "dlogits", tr.d_logits(x, given[0], ds, plan), tr.d_logits_torch(x, given[0], ds, plan), limit)
    assert plan_of_mask_torch(kept, keys.T).limit == int(kept.sum())
