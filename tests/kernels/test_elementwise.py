"""SwiGLU, its gradient and the sum of dS partials as kernels of their own."""

from __future__ import annotations

import pytest
import torch

from sonic.kernels.d_act import d_swiglu
from sonic.kernels.up_proj import swiglu
from tests.oracle import DEVICE, DTYPES, against_twin, check

SIZES = [(0, 8), (1, 1), (17, 40), (130, 39), (33, 71), (5, 600)]


def rows(*size: int, dtype: str = "fp32", seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("R", "n"), SIZES)
def test_swiglu_and_its_gradient(R: int, n: int, dtype: str) -> None:
    case = f"R{R}-n{n}-{dtype}"
    h = rows(R, 2 * n, dtype=dtype)
    against_twin(case, "swiglu", h)
    against_twin(case, "d_swiglu", rows(R, n, dtype=dtype, seed=1), h, rows(R, seed=2))


def test_gradient_is_that_of_autograd() -> None:
    h64 = rows(17, 80).cpu().double().requires_grad_()
    s64 = rows(17, seed=1).cpu().double().requires_grad_()
    da = rows(17, 40, seed=2)
    gate, up = h64.chunk(2, dim=1)
    a = torch.nn.functional.silu(gate) * up
    dh_want, ds_want = torch.autograd.grad(s64[:, None] * a, [h64, s64], da.cpu().double())
    dh, ap, ds = d_swiglu(da, h64.detach().float().to(DEVICE), s64.detach().float().to(DEVICE))
    for name, got, want in (("dh", dh, dh_want), ("ap", ap, s64[:, None] * a), ("ds", ds[0], ds_want)):
        check("autograd", name, got, want, 2e-6)


def test_large_gates_saturate() -> None:
    """exp overflows for a gate of -200: silu is -0 there and its slope 0, not NaN."""
    h = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 1.0]], device=DEVICE)
    assert swiglu(h).tolist() == [[0.0, 200.0, 0.0]]
    dh, _, ds = d_swiglu(torch.ones(1, 3, device=DEVICE), h, torch.ones(1, device=DEVICE))
    assert dh.tolist() == [[0.0, 1.0, 0.5, 0.0, 200.0, 0.0]] and ds.tolist() == [[200.0]]


@pytest.mark.parametrize(("parts", "R"), [(1, 0), (1, 17), (3, 1), (5, 1030)])
def test_d_scores(parts: int, R: int) -> None:
    index = torch.randperm(R).int().to(DEVICE)
    against_twin(f"parts{parts}-R{R}", "d_scores", rows(parts, R), index)
