"""Routers by their plain definitions: what each promises; distributions; recorded routings; balancing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sonic import routers
from sonic.recorded import read_routing, write_routing

T, E, K, TILE = 90, 12, 3, 8


def logits(seed: int = 0, skew: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T, E, generator=generator) + skew * torch.randn(E, generator=generator)


def choose(method: str, x: torch.Tensor | None = None, **options) -> tuple[torch.Tensor, torch.Tensor]:
    x = logits() if x is None else x
    draws = torch.rand(E, generator=torch.Generator().manual_seed(7))
    options = {
        "tile": TILE if method in routers.ROUNDING else None,
        "groups": 3 if method == "grouped" else None,
    } | options
    kept, weights, _ = routers.choose(method, x, K, draws_E=draws, **options)
    return kept, weights


def top(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(T, E, dtype=torch.bool).scatter(1, x.topk(K).indices, True)


@pytest.mark.parametrize("method", routers.ROUNDING)
@pytest.mark.parametrize("seed", range(3))
def test_rounding_gives_whole_tiles_next_to_top_k(method: str, seed: int) -> None:
    """Multiples of the tile, within one tile of top-K, and only the lowest ranks change."""
    x = logits(seed)
    kept, weights = choose(method, x)
    own = top(x)
    counts, before = kept.sum(0), own.sum(0)
    assert (counts % TILE == 0).all() and ((counts - before).abs() < TILE).all()
    for e in range(E):
        dropped, added = own[:, e] & ~kept[:, e], kept[:, e] & ~own[:, e]
        assert not (dropped.any() and added.any())
        if dropped.any() and counts[e]:
            assert weights[dropped, e].max() <= weights[kept[:, e], e].min()
        rest = ~own[:, e] & ~kept[:, e]
        if added.any() and rest.any():
            assert weights[added, e].min() >= weights[rest, e].max()


def test_rules_of_rounding() -> None:
    before = top(logits()).sum(0)
    down, up = before // TILE * TILE, -(-before // TILE) * TILE
    up = torch.where(up <= T, up, down)
    counts = {method: choose(method)[0].sum(0) for method in routers.ROUNDING}
    assert torch.equal(counts["tr_down"], down) and torch.equal(counts["tr_up"], up)
    nearest = torch.where((before - down) * 2 > TILE, up, down)
    assert torch.equal(counts["tr_nearest_freq"], nearest)
    apart = (counts["tr_balance"] - before).cumsum(0)
    assert apart.abs().max() <= TILE / 2


def test_stochastic_rounding_follows_its_draw() -> None:
    before = top(logits()).sum(0)
    for value, method in ((0.0, "tr_up"), (1 - 1e-6, "tr_down")):
        draws = torch.full((E,), value)
        for stochastic in ("tr_stochastic_freq", "tr_nearest_score"):
            kept = routers.choose(stochastic, logits(), K, tile=TILE, draws_E=draws)[0]
            assert torch.equal(kept.sum(0), choose(method)[0].sum(0)), (stochastic, before)


def test_no_expert_is_rounded_beyond_all_tokens() -> None:
    """Every token to the first K experts, and T no multiple of the tile: only down fits."""
    x = torch.zeros(T, E)
    x[:, :K] = 9.0
    counts = choose("tr_up", x)[0].sum(0)
    assert counts.tolist() == [T // TILE * TILE] * K + [0] * (E - K)


def test_scores_are_those_of_the_paper() -> None:
    """Chosen: softmax over the token's top K before rounding; padded in: softmax over all; nothing renormalised."""
    x = logits()
    kept, weights = choose("tr_up", x)
    own = top(x)
    everything = x.softmax(1)
    chosen = x.masked_fill(~own, -torch.inf).softmax(1)
    torch.testing.assert_close(weights[kept & own], chosen[kept & own])
    torch.testing.assert_close(weights[kept & ~own], everything[kept & ~own])


@pytest.mark.parametrize("capacity", [0.25, 0.8, 1.0, 5.0])
def test_capacity(capacity: float) -> None:
    most = routers.capacity_of("token_drop", T, E, K, capacity, None)
    kept, _ = choose("token_drop", capacity=capacity)
    assert torch.equal(kept.sum(0), top(logits()).sum(0).clamp(max=most)) and not (kept & ~top(logits())).any()
    every = routers.capacity_of("expert_choice", T, E, K, capacity, None)
    assert choose("expert_choice", capacity=capacity)[0].sum(0).tolist() == [every] * E
    assert every == min(T, max(1, int(capacity * T * K / E)))


def test_expert_choice_in_whole_tiles() -> None:
    for capacity in (0.01, 1.0, 3.7, 100.0):
        rows = routers.capacity_of("expert_choice", T, E, K, capacity, TILE)
        assert rows % TILE == 0 and TILE <= rows <= T


def test_groups_get_equal_shares() -> None:
    kept, weights = choose("grouped")
    assert (kept.view(T, 3, E // 3).sum(2) == K // 3).all()
    torch.testing.assert_close(weights, logits().softmax(1))
    for g in range(3):
        inside = slice(g * E // 3, (g + 1) * E // 3)
        assert torch.equal(kept[:, inside].int().argmax(1), logits()[:, inside].argmax(1))


def test_laser_spreads_flat_tokens_and_leaves_clear_ones() -> None:
    x = logits(skew=0.0) * 0.1
    x[:, 0] += 0.3  # everybody slightly prefers one expert
    x[::5] *= 100
    kept, _ = choose("laser", x)
    plain = top(x)
    assert (kept.sum(1) == K).all()
    clear = (x.softmax(1) * plain).sum(1) >= routers.LASER_CLEAR
    assert clear.any() and not clear.all() and torch.equal(kept[clear], plain[clear])
    assert kept.sum(0).float().std() < plain.sum(0).float().std()
    second = torch.zeros(T, E, dtype=torch.bool).scatter(1, x.topk(routers.LASER_WIDEN * K).indices, True)
    assert not (kept & ~second).any()


def test_score_functions() -> None:
    x = logits()
    chosen = x.topk(K).values
    for score, want in {
        None: chosen.softmax(1),
        "softmax_over_topk": chosen.softmax(1),
        "topk_over_softmax": chosen.softmax(1),
        "sigmoid": chosen.sigmoid(),
    }.items():
        kept, weights = choose("topk", x, score=score)
        torch.testing.assert_close(weights[kept].view(T, K).sort(1).values, want.sort(1).values)


def test_ties_go_to_the_lower_index() -> None:
    kept, _ = choose("topk", torch.zeros(T, E))
    assert kept[:, :K].all()
    kept, _ = choose("expert_choice", torch.zeros(T, E), capacity=0.5)
    assert kept[: int(0.5 * T * K / E)].all()


@pytest.mark.parametrize("distribution", ["uniform", "zipf", "lognormal", "hot", "bursts", "balanced"])
def test_logits_that_give_a_distributions_ids(distribution: str) -> None:
    generator = torch.Generator().manual_seed(5)
    ids = routers.draw(distribution, T, E, K, generator, None)
    assert all(len(set(row)) == K for row in ids.tolist())
    x = routers.logits_of(ids, E, generator)
    assert torch.equal(x.topk(K).indices.sort(1).values, ids.sort(1).values)


def test_distributions_have_their_shapes() -> None:
    def shares(name: str, alpha: float | None = None) -> torch.Tensor:
        ids = routers.draw(name, 4000, 32, 2, torch.Generator().manual_seed(3), alpha)
        return torch.bincount(ids.flatten(), minlength=32) / ids.numel()

    assert shares("lognormal", 2.0).max() > shares("lognormal", 0.3).max() > shares("uniform").max()
    ids = routers.draw("bursts", 4000, 32, 2, torch.Generator().manual_seed(3), None)
    same = lambda step: (ids[step:, :, None] == ids[:-step, None]).any(-1).float().mean()  # noqa: E731
    assert same(1) > 2 * same(1000)


def test_balancing_loss_is_least_for_equal_loads_and_leads_there() -> None:
    x = torch.zeros(T, E)
    equal = torch.full((E,), T * K // E)
    assert routers.load_balancing_loss(x, equal).item() == pytest.approx(0.01)
    x = logits(skew=2.0).requires_grad_()
    loss = routers.load_balancing_loss(x, top(x).sum(0))
    assert loss.item() > 0.01
    loss.backward()
    counts = top(x.detach()).sum(0)
    assert x.grad[:, counts.argmax()].mean() > 0 > x.grad[:, counts.argmin()].mean()
    torch.autograd.gradcheck(
        lambda y: routers.load_balancing_loss(y, counts, 1.0), x.detach().double()[:4].requires_grad_()
    )


def test_bias_balancer_evens_the_load() -> None:
    x, balancer = logits(skew=2.0).sigmoid(), routers.BiasBalancer(E, rate=0.02)
    before = top(x).sum(0)
    for _ in range(200):
        balancer.update(top(x + balancer.bias_E).sum(0))
    after = top(x + balancer.bias_E).sum(0)
    assert after.float().std() < 0.3 * before.float().std()


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [
        ("token_drop", {"capacity": 0.0}, "routing.capacity is 0; it must be positive"),
        ("tr_up", {"tile": T + 1}, f"routing.tile is {T + 1} and shape.T is {T}"),
        ("tr_up", {"tile": 0}, "routing.tile is 0"),
        ("grouped", {"groups": 5}, "routing.groups is 5 and shape.E is 12"),
        ("grouped", {"groups": 2}, "routing.groups is 2 and shape.K is 3"),
        ("expert_choice", {"score": "sigmoid"}, "routing.score is 'sigmoid'"),
    ],
)
def test_what_cannot_be_is_named(method: str, options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        choose(method, **options)


def test_a_recorded_routing_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "routing.npz"
    ids, scores = logits().topk(K).indices, logits().topk(K).values.softmax(1)
    routers.save(path, ids, scores, E)
    got_ids, got_scores = routers.load(path, T, E, K, torch.device("cpu"))
    assert torch.equal(got_ids, ids.int()) and torch.equal(got_scores, scores)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"T": T + 1}, r"its ids have shape \(90, 3\); shape.T and shape.K say \(91, 3\)"),
        ({"E": 13}, "recorded with E = 12; shape.E is 13"),
        ({"id": 12}, r"token 4 has expert 12; ids must lie in \[0, 12\)"),
        ({"id": -1}, "token 4 has expert -1"),
        ({"twice": True}, "token 4 has expert \\d+ twice"),
        ({"score": float("nan")}, "token 4 has a score that is not finite"),
        ({"floats": True}, "its ids are float64; they must be integer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_recorded_routing_that_does_not_fit(change: dict, text: str, tmp_path: Path) -> None:
    path = tmp_path / "routing.npz"
    ids = np.argsort(np.random.default_rng(0).random((T, E)), axis=1)[:, :K]
    scores = np.ones((T, K))
    ids[4, 1] = change.get("id", ids[4, 0] if "twice" in change else ids[4, 1])
    scores[4, 0] = change.get("score", 1.0)
    write_routing(path, ids.astype(float) if "floats" in change else ids, scores, E)
    with pytest.raises(ValueError, match=text):
        read_routing(path, change.get("T", T), change.get("E", E), K)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "no.npz").write_text("no")
    for name in ("no.npz", "missing.npz"):
        with pytest.raises(ValueError, match="cannot be read .*it must be an .npz file"):
            read_routing(tmp_path / name, T, E, K)
