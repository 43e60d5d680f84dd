"""The oracles against each other and against errors that a kernel may make."""

import math

import pytest
import torch

from sonic import reference
from sonic.problem import Problem
from sonic.record import Routing
from sonic.shapes import Shape

SMALL = Shape(40, 24, 20, 8, 3)
OPS = [("layer", "learned"), ("experts", "zipf"), ("experts", "hot")]


def make(shape: Shape = SMALL, distribution: str = "learned", dtype: str = "fp64") -> Problem:
    return Problem(shape, Routing(distribution=distribution), dtype, "cpu", 0)


@pytest.mark.parametrize(("op", "distribution"), OPS)
def test_gradients_by_hand_equal_autograd(op, distribution, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ROWS", 7)
    problem = make(distribution=distribution)
    exact = reference.autograd(problem, op, torch.float64, backward=True)
    tokens = torch.tensor([0, 3, 39])
    rows = reference.reference_rows(problem, op, tokens)
    for name in ("o", "dx"):
        assert reference.relative_error(rows[name], exact[name][tokens]) < 1e-13, name
    for expert in range(problem.shape.E):
        for name, grad in reference.reference_weight_grads(problem, op, expert).items():
            assert reference.relative_error(grad, exact[name][expert]) < 1e-13, (name, expert)


@pytest.mark.parametrize(("op", "distribution"), OPS)
def test_autograd_equals_finite_differences(op, distribution):
    problem = make(Shape(5, 6, 4, 4, 2), distribution)
    exact = reference.autograd(problem, op, torch.float64, backward=True)
    routing = ("drouter", "router_w_Ed") if op == "layer" else ("ds", "scores_TK")

    def loss() -> float:
        return (reference.autograd(problem, op, torch.float64, False)["o"] * problem.do_Td).sum().item()

    for name, attribute in (("dx", "x_Td"), ("dw1", "w1_E2nd"), ("dw2", "w2_Edn"), routing):
        tensor = getattr(problem, attribute).view(-1)
        step = 1e-4
        for i in (0, tensor.numel() // 2, tensor.numel() - 1):
            value = tensor[i].item()
            tensor[i] = value + step
            above = loss()
            tensor[i] = value - step
            below = loss()
            tensor[i] = value
            assert (above - below) / (2 * step) == pytest.approx(exact[name].view(-1)[i].item(), rel=1e-5, abs=1e-9), (
                name
            )


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_plain_torch_passes_both_checks(dtype):
    problem = make(dtype=dtype)
    got = reference.autograd(problem, "layer", problem.dtype, backward=True)
    errors, yardsticks = reference.twin_errors(got, problem, "layer")
    assert set(errors) == {f"twin.{name}" for name in ("o", "dx", "dw1", "dw2", "drouter")}
    errors |= reference.full_errors(got, problem, "layer", yardsticks)
    assert {name for name in errors if name.startswith("full")} == {"full.o", "full.dx", "full.dw1", "full.dw2"}
    assert reference.failures(errors) == []


def test_a_forward_is_held_to_its_output_only():
    problem = make(dtype="bf16")
    got = reference.autograd(problem, "layer", torch.bfloat16, backward=False)
    errors, yardsticks = reference.twin_errors(got, problem, "layer")
    assert set(errors | reference.full_errors(got, problem, "layer", yardsticks)) == {"twin.o", "full.o"}


def _nan(t):
    t[-1, -1] = math.nan


def _lost_row(t):
    t[-1] = 0


def _swapped(t):
    t[[0, 1]] = t[[1, 0]]


def _scaled(t):
    t *= 1.05


@pytest.mark.parametrize("spoil", [_nan, _lost_row, _swapped, _scaled])
@pytest.mark.parametrize("name", ["o", "dx", "dw1", "dw2", "ds"])
def test_a_wrong_result_fails_by_name(name, spoil):
    problem = make(dtype="bf16", distribution="balanced")
    got = reference.autograd(problem, "experts", torch.bfloat16, backward=True)
    spoil(got[name])
    errors, yardsticks = reference.twin_errors(got, problem, "experts")
    assert reference.failures(errors) == [f"twin.{name}"]
    full = reference.full_errors(got, problem, "experts", yardsticks)
    assert reference.failures(full) == ([] if name == "ds" else [f"full.{name}"])
    assert f"twin.{name} is" in reference.describe(errors, [f"twin.{name}"])


def test_a_missing_gradient_and_a_wrong_shape_fail():
    problem = make(dtype="bf16")
    got = reference.autograd(problem, "layer", torch.bfloat16, backward=True)
    got |= {"dw1": None, "o": got["o"][:5]}
    errors, yardsticks = reference.twin_errors(got, problem, "layer")
    assert errors["twin.dw1"] == errors["twin.o"] == reference.WORST
    full = reference.full_errors(got, problem, "layer", yardsticks)
    assert full["full.dw1"] == full["full.o"] == reference.WORST


def test_an_empty_expert_must_get_zeros():
    problem = make(Shape(6, 16, 8, 8, 1), "hot", "bf16")
    assert 0 in problem.counts_E.tolist()
    got = reference.autograd(problem, "experts", torch.bfloat16, backward=True)
    _, yardsticks = reference.twin_errors(got, problem, "experts")
    assert reference.failures(reference.full_errors(got, problem, "experts", yardsticks)) == []
    empty = problem.counts_E.tolist().index(0)
    got["dw2"][empty, 0, 0] = 1e-6
    assert reference.full_errors(got, problem, "experts", yardsticks)["full.dw2"] == reference.WORST


def test_samples_hold_the_ends_the_fullest_and_an_empty_expert():
    problem = make(Shape(1000, 8, 8, 40, 1), "zipf", "fp32")
    tokens = reference.sampled_tokens(problem).tolist()
    assert len(tokens) == len(set(tokens)) == 256 and tokens == sorted(tokens)
    assert tokens[0] == 0 and tokens[-1] == 999
    counts = problem.counts_E.tolist()
    chosen = reference.sampled_experts(problem)
    assert {0, 39, counts.index(max(counts))} <= set(chosen)
    assert (0 in counts) == any(counts[expert] == 0 for expert in chosen)


def test_no_token_at_all():
    problem = make(Shape(0, 16, 8, 4, 2), dtype="bf16")
    got = reference.autograd(problem, "layer", torch.bfloat16, backward=True)
    errors, yardsticks = reference.twin_errors(got, problem, "layer")
    errors |= reference.full_errors(got, problem, "layer", yardsticks)
    assert set(errors.values()) == {0.0}


@pytest.mark.parametrize(("error", "expected"), [(1e-3, 0.5), (math.inf, reference.WORST), (math.nan, reference.WORST)])
def test_ratios_are_finite(error, expected):
    assert reference.ratio(error, 2e-3) == expected


def test_a_router_gradient_of_zero_may_come_from_cancellation():
    problem = make(Shape(20, 16, 8, 6, 1), dtype="fp32")
    got = reference.autograd(problem, "layer", torch.float32, backward=True)
    assert not got["drouter"].any()
    size = reference._uncancelled_router_gradient(problem)
    noise = torch.full_like(got["drouter"], size / got["drouter"].numel() ** 0.5)
    got["drouter"] += 1e-6 * noise
    errors, _ = reference.twin_errors(got, problem, "layer")
    assert reference.failures(errors) == []
    got["drouter"] += 1e-3 * noise
    errors, _ = reference.twin_errors(got, problem, "layer")
    assert reference.failures(errors) == ["twin.drouter"]
