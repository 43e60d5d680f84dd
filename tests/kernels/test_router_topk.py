"""Router top-K against a stable sort: order, ties, NaN and -inf, wide routing, and its gradient."""

from __future__ import annotations

import pytest
import torch

from sonic.kernels.router_topk import router_topk, router_topk_backward, router_topk_torch
from tests.oracle import DEVICE, DTYPES, against_twin, check

INF, NAN = float("inf"), float("nan")

CASES = [
    # T, K, E, dtype
    (0, 2, 8, "fp32"),
    (1, 1, 1, "fp32"),
    (1, 3, 3, "bf16"),
    (17, 1, 5, "fp32"),
    (17, 3, 60, "fp16"),
    (17, 5, 72, "fp32"),
    (17, 6, 384, "bf16"),
    (65, 7, 8, "bf16"),
    (130, 8, 300, "fp32"),
    (33, 10, 512, "fp32"),
    (5, 32, 2048, "bf16"),
    (3, 64, 4096, "fp32"),
]


def logits(T: int, E: int, dtype: str) -> torch.Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(T * E)).to(DEVICE, DTYPES[dtype])


@pytest.mark.parametrize(("T", "K", "E", "dtype"), CASES)
def test_forward_and_backward(T: int, K: int, E: int, dtype: str) -> None:
    case = f"T{T}-K{K}-E{E}-{dtype}"
    scores, ids = against_twin(case, "router_topk", logits(T, E, dtype), K)
    partials = torch.randn(3, T * K, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    row_idx = torch.randperm(T * K).int().to(DEVICE)
    against_twin(case, "router_topk_backward", partials, row_idx, scores, ids, E, DTYPES[dtype])


def test_rows_of_a_wider_matrix() -> None:
    against_twin("wide rows", "router_topk", logits(17, 100, "fp32")[:, :60], 4)


def test_gradient_is_that_of_autograd() -> None:
    x = logits(17, 60, "fp32").cpu().double().requires_grad_()
    scores, ids = router_topk_torch(x, 5)
    dscores = torch.randn(17, 5)
    (want,) = torch.autograd.grad(scores, x, dscores.double())
    row_idx = torch.randperm(17 * 5).int()
    partials = dscores.flatten()[row_idx.argsort()][None]
    inputs = (t.to(DEVICE) for t in (partials, row_idx, scores.detach().float(), ids))
    check("autograd", "dlogits", router_topk_backward(*inputs, 60, torch.float32), want, 2e-6)


def test_ties_go_to_the_lower_expert() -> None:
    x = torch.zeros(3, 300, device=DEVICE)
    x[1, [299, 256, 7]] = 1.0
    x[2] = -0.5
    _, ids = router_topk(x, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [7, 256, 299, 0], [0, 1, 2, 3]]


def test_bf16_logits_full_of_ties_match_a_stable_sort() -> None:
    x = (logits(65, 300, "fp32") * 4).round().to(torch.bfloat16)
    against_twin("ties", "router_topk", x, 8)


def test_experts_past_256_are_chosen() -> None:
    x = torch.zeros(2, 512, device=DEVICE)
    x[0, 300:310] = torch.arange(10.0, 0.0, -1.0, device=DEVICE)
    x[1, 502:] = torch.arange(1.0, 11.0, device=DEVICE)
    _, ids = router_topk(x, 10)
    assert ids.tolist() == [list(range(300, 310)), list(range(511, 501, -1))]


def test_minus_infinity_is_chosen_last_and_weighs_nothing() -> None:
    x = torch.tensor([[-INF, 1.0, -INF, 2.0, -INF]], device=DEVICE)
    scores, ids = against_twin("-inf", "router_topk", x, 4)
    assert ids.tolist() == [[3, 1, 0, 2]]
    assert scores[0, 2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_of_either_sign_sorts_above_infinity(sign: float) -> None:
    x = torch.tensor([[0.0, INF, 1.0, NAN, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0]], device=DEVICE)
    x[0, 3] = torch.copysign(torch.tensor(NAN), torch.tensor(sign))
    scores, ids = router_topk(x, 2)
    assert ids.tolist() == [[3, 1], [4, 3]]
    assert scores[0].isnan().all() and scores[1].isfinite().all()


def test_infinite_and_denormal_values_keep_their_order() -> None:
    x = torch.tensor([[1e-42, -1e-42, 0.0, -3e38, 3e38, -INF]], device=DEVICE)
    _, ids = router_topk(x, 6)
    assert ids.tolist() == [[4, 0, 2, 1, 3, 5]]


def test_signed_zeros_are_equal() -> None:
    """As in a stable sort: +0 and -0 tie, and the lower expert wins."""
    x = torch.tensor([[-0.0, 0.0, -0.0, 0.0]], device=DEVICE)
    _, ids = router_topk(x, 2)
    assert ids.tolist() == [[0, 1]]
