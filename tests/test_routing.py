"""Routers on the device against their plain definitions, and whole layers behind them against autograd in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sonic import layer, routers, routing
from tests.oracle import DEVICE, LAYER_LIMIT, check

T, E, K = 70, 6, 2
OPTIONS = {
    **{method: {"tile": 8} for method in routers.ROUNDING},
    "token_drop": {"capacity": 0.7},
    "expert_choice": {"capacity": 1.3},
    "grouped": {"groups": 2},
}


def dense(chosen: routing.TopK | routing.Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask and scores (T, E); the scores keep their graph."""
    if isinstance(chosen, routing.TopK):
        token = torch.arange(T, device=DEVICE).repeat_interleave(K)
        expert, scores = chosen.ids_TK.flatten().long(), chosen.scores_TK.flatten()
    else:
        chosen = chosen.exact()
        token = torch.repeat_interleave(chosen.token_offsets_T1.diff().long())
        expert, scores = chosen.ids_R.long(), chosen.scores_R
    mask = torch.zeros(T, E, dtype=torch.bool, device=DEVICE).index_put(
        (token, expert), torch.tensor(True, device=DEVICE)
    )
    return mask, torch.zeros(T, E, device=DEVICE, dtype=scores.dtype).index_put((token, expert), scores)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    new = lambda *size: torch.randn(size, generator=generator, dtype=torch.float64).to(DEVICE, dtype)  # noqa: E731
    return new(T, E), new(T, E), torch.rand(E, generator=generator).to(DEVICE)


@pytest.mark.parametrize("family", ["triton", "torch"])
@pytest.mark.parametrize("method", routers.METHODS)
def test_a_router_is_its_definition(method: str, family: str) -> None:
    """Who is kept, with which score, and the gradient of the logits against autograd."""
    x, weight, draws = inputs()
    given, want = x.clone().requires_grad_(), x.clone().requires_grad_()
    kept, weights, _ = routers.choose(method, want, K, draws_E=draws, **OPTIONS.get(method, {}))
    chosen = routing.route(given, K, method, draws_E=draws, family=family, **OPTIONS.get(method, {}))
    mask, scores = dense(chosen)
    assert torch.equal(mask, kept)
    check(method, "scores", scores, torch.where(kept, weights, 0.0), 2e-6)
    (scores * weight).sum().backward()
    (torch.where(kept, weights, 0.0) * weight).sum().backward()
    check(method, "dlogits", given.grad, want.grad, 5e-6)


@pytest.mark.parametrize("score", routers.SCORES)
def test_score_functions_and_their_gradients(score: str) -> None:
    x, weight, _ = inputs()
    given, want = x.clone().requires_grad_(), x.clone().requires_grad_()
    _, scores = dense(routing.route(given, K, score=score))
    kept, weights, _ = routers.choose("topk", want, K, score=score)
    (scores * weight).sum().backward()
    (torch.where(kept, weights, 0.0) * weight).sum().backward()
    check(score, "dlogits", given.grad, want.grad, 5e-6)


def test_a_bias_moves_the_choice_and_not_the_scores() -> None:
    x, _, _ = inputs()
    bias = torch.zeros(E, device=DEVICE)
    bias[0] = 9.0
    chosen = routing.route(x, K, score="sigmoid", bias_E=bias)
    assert (chosen.ids_TK == 0).any(1).all()
    assert torch.equal(chosen.scores_TK, x.gather(1, chosen.ids_TK.long()).sigmoid())


def expected(method: str, leaves: list[torch.Tensor], do: torch.Tensor, kept: torch.Tensor) -> list[torch.Tensor]:
    """O, dX, dW_router, dW1, dW2 in fp64, expert by expert, for pairs already kept."""
    x, router_w, w1, w2 = wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    own = routers.choose(method, (leaves[0] @ leaves[1].T).detach(), K, **OPTIONS.get(method, {}))[2]
    weights = routers.pair_weights(method, x @ router_w.T, own)
    o = 0 * x
    for e in range(E):
        token = kept[:, e].nonzero().flatten()
        gate, up = (x[token] @ w1[e].T).chunk(2, dim=1)
        o = o.index_add(0, token, weights[token, e, None] * ((F.silu(gate) * up) @ w2[e].T))
    return [o, *torch.autograd.grad(o, wide, do.double())]


@pytest.mark.parametrize(
    ("method", "family", "dtype", "options"),
    [
        ("tr_nearest_freq", "triton", torch.float32, {}),
        ("tr_up", "triton", torch.bfloat16, {"gather": "separate", "activation": "separate"}),
        ("tr_down", "triton", torch.float32, {"w1_layout": "interleaved"}),
        ("tr_balance", "torch", torch.float64, {}),
        ("token_drop", "triton", torch.float32, {"gather": "separate"}),
        ("expert_choice", "triton", torch.bfloat16, {}),
        ("expert_choice", "torch", torch.float64, {}),
        ("grouped", "triton", torch.float32, {}),
        ("laser", "torch", torch.float64, {}),
    ],
    ids=str,
)
def test_a_layer_behind_a_router(method: str, family: str, dtype: torch.dtype, options: dict[str, str]) -> None:
    d, n = 40, 24
    generator = torch.Generator().manual_seed(1)
    sizes = ((T, d), (E, d), (E, 2 * n, d), (E, d, n))
    leaves = [torch.randn(s, generator=generator).mul(s[-1] ** -0.5).to(DEVICE, dtype).requires_grad_() for s in sizes]
    do = torch.randn(T, d, generator=generator).to(DEVICE, dtype)
    x, router_w, w1, w2 = leaves
    chosen = routing.route(x @ router_w.T, K, method, family=family, **OPTIONS.get(method, {}))
    if isinstance(chosen, routing.Plan) and family == "triton" and method == "tr_nearest_freq":
        assert chosen.limit > int(chosen.rows)  # there is room behind the pairs, and nothing of it shows
    o = layer.experts_plan(x, chosen, w1, w2, choices=layer.Choices(family, **options))
    o.backward(do)
    kept, _ = dense(chosen)
    stored = [leaf.detach() for leaf in leaves]
    if options.get("w1_layout") == "interleaved":
        stored[2] = torch.cat([stored[2][:, ::2], stored[2][:, 1::2]], dim=1)
    want = expected(method, stored, do, kept)
    got = [o, *(leaf.grad for leaf in leaves)]
    if options.get("w1_layout") == "interleaved":
        got[3] = torch.cat([got[3][:, ::2], got[3][:, 1::2]], dim=1)
    assert o.dtype == dtype and (o[~kept.any(1)] == 0).all()
    for name, g, w in zip(("o", "dx", "drouter", "dw1", "dw2"), got, want, strict=True):
        check(f"{method} {family}", name, g, w, LAYER_LIMIT[dtype])


def test_frozen_tensors_and_inference() -> None:
    x, w1, w2 = (
        torch.randn(T, 16, device=DEVICE),
        torch.randn(E, 16, 16, device=DEVICE),
        torch.randn(E, 16, 8, device=DEVICE),
    )
    plan = routing.route(inputs()[0], K, "tr_up", tile=8)
    assert not plan.scores_R.requires_grad
    assert not layer.experts_plan(x, plan, w1, w2).requires_grad
    w2.requires_grad_()
    layer.experts_plan(x, plan, w1, w2).sum().backward()
    assert w2.grad is not None and x.grad is None


def test_no_token() -> None:
    x = torch.zeros(0, 16, device=DEVICE, requires_grad=True)
    w1, w2 = torch.randn(E, 16, 16, device=DEVICE, requires_grad=True), torch.randn(E, 16, 8, device=DEVICE)
    for method in routers.METHODS:
        chosen = routing.route(x @ torch.randn(16, E, device=DEVICE), K, method, **OPTIONS.get(method, {}))
        o = layer.experts_plan(x, chosen, w1, w2)
        assert o.shape == (0, 16)
    o.sum().backward()
    assert (w1.grad == 0).all()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda x, p, w1, w2: layer.experts_plan(x[1:], p, w1, w2),
            "the plan is for T = 70 and E = 6; x has 69 tokens",
        ),
        (lambda x, p, w1, w2: layer.experts_plan(x, p, w1[1:], w2[1:]), "w1 5 experts"),
        (
            lambda x, p, w1, w2: layer.experts_plan(x, p, w1, w2, choices=layer.Choices(aggregate="atomic")),
            "aggregate is 'atomic'",
        ),
        (lambda *_: routing.route(torch.zeros(4, 4), 2, "tr_ceil"), "routing.method is 'tr_ceil'; allowed: topk"),
        (lambda *_: routing.route(torch.zeros(4, 4), 2, "tr_up"), "routing.tile is 128 and shape.T is 4"),
        (lambda *_: routing.route(torch.zeros(4, 4), 2, family="gpu"), "family is 'gpu'"),
    ],
    ids=["tokens", "experts", "aggregate", "method", "tile", "family"],
)
def test_bad_input_is_named(call, text: str) -> None:
    plan = routing.route(inputs()[0], K, "tr_up", tile=8)
    x, w1, w2 = (
        torch.zeros(T, 16, device=DEVICE),
        torch.zeros(E, 16, 16, device=DEVICE),
        torch.zeros(E, 16, 8, device=DEVICE),
    )
    with pytest.raises(ValueError, match=text):
        call(x, plan, w1, w2)
