"""Inputs and routing: the same for everyone, of the stated size and spread, and beyond dispute between routers."""

import pytest
import torch
import torch.nn.functional as F

from sonic import routers
from sonic.problem import INPUT_STD, WEIGHT_STD, Problem, twin_shape
from sonic.record import Point, Routing, ShapeSpec
from sonic.routers import METHODS, RAGGED, ROUNDING, choose, save
from sonic.shapes import Shape

DISTRIBUTIONS = ("learned", "balanced", "uniform", "zipf", "lognormal", "hot", "bursts")
CASES = [
    pytest.param(Shape(130, 40, 12, 16, 4), id="ragged"),
    pytest.param(Shape(17, 8, 8, 5, 5), id="K_is_E"),
    pytest.param(Shape(64, 16, 8, 300, 8), id="more_experts_than_tokens"),
    pytest.param(Shape(1, 16, 8, 3, 1), id="one_token"),
    pytest.param(Shape(0, 16, 8, 4, 2), id="no_token"),
]


def make(shape: Shape, distribution: str = "learned", dtype: str = "bf16", seed: int = 0) -> Problem:
    return Problem(shape, Routing(distribution=distribution), dtype, "cpu", seed)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", CASES)
def test_a_token_meets_k_different_experts(shape, distribution):
    problem = make(shape, distribution)
    T, E, K = shape.T, shape.E, shape.K
    assert problem.ids_TK.shape == (T, K) and problem.ids_TK.dtype == torch.int32
    assert all(len(set(row)) == K and 0 <= min(row) and max(row) < E for row in problem.ids_TK.tolist())
    assert problem.counts_E.tolist() == [(problem.ids_TK == e).sum().item() for e in range(E)]
    assert problem.R == T * K == problem.counts_E.sum()
    torch.testing.assert_close(problem.scores_TK.sum(-1), torch.ones(T))
    assert (problem.scores_TK > 0).all()
    tensors = (problem.x_Td, problem.w1_E2nd, problem.w2_Edn, problem.ids_TK, problem.scores_TK)
    assert all(tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_seed_names_the_problem(distribution):
    shape = Shape(50, 24, 8, 12, 3)
    one, same, other = (make(shape, distribution, seed=seed).fingerprint() for seed in (3, 3, 4))
    assert one == same
    assert all(one[name] != other[name] for name in ("x_Td", "do_Td", "w1_E2nd", "w2_Edn", "ids_TK", "scores_TK"))


def test_inputs_have_the_protocols_spread():
    problem = make(Shape(2048, 64, 64, 8, 2), dtype="fp32")
    assert problem.x_Td.std().item() == pytest.approx(INPUT_STD, rel=0.02)
    assert problem.do_Td.std().item() == pytest.approx(INPUT_STD, rel=0.02)
    assert problem.w1_E2nd.std().item() == pytest.approx(WEIGHT_STD, rel=0.02)
    logits_TE = F.linear(problem.x_Td, problem.router_w_Ed)
    assert logits_TE.std().item() == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_learned_routing_leaves_no_close_call(dtype):
    problem = make(Shape(400, 32, 8, 64, 8), dtype=dtype)
    logits_TE = F.linear(problem.x_Td, problem.router_w_Ed)
    assert not routers.close_calls(logits_TE, 8).any()
    assert logits_TE.topk(8).indices.tolist() == problem.ids_TK.tolist()
    assert problem.scores_TK.dtype == (torch.float64 if dtype == "fp64" else torch.float32)


def test_close_calls_counts_ties_and_neighbours_in_16_bits():
    eps = torch.finfo(torch.bfloat16).eps
    logits_TE = torch.tensor([[3.0, 1.0, 1.0], [3.0, 1.0 + eps, 1.0], [3.0, 1.0 + 2 * eps, 1.0]], dtype=torch.bfloat16)
    assert routers.close_calls(logits_TE, 2).tolist() == [True, True, False]
    assert not routers.close_calls(logits_TE, 3).any()


@pytest.mark.parametrize(("T", "E", "K"), [(48, 16, 2), (24, 16, 2), (130, 16, 8), (7, 16, 3), (256, 8, 8)])
def test_balanced_counts_differ_by_one_at_most(T, E, K):
    counts = make(Shape(T, 8, 8, E, K), "balanced").counts_E
    assert counts.max() - counts.min() <= (1 if T * K % E else 0)


def test_zipf_is_steeper_for_a_larger_alpha_and_hot_takes_every_token():
    shape = Shape(2000, 8, 8, 32, 2)
    shares = []
    for alpha in (0.5, 1.5):
        problem = Problem(shape, Routing(distribution="zipf", alpha=alpha), "bf16", "cpu", 0)
        shares.append(problem.counts_E.max().item() / shape.T)
    assert shares[0] < shares[1]
    assert make(shape, "hot").counts_E.max() == shape.T


def test_other_routing_keeps_the_tensors():
    problem = make(Shape(8, 8, 8, 4, 2), "uniform")
    ids_TK = torch.tensor([[0, 1]] * 8)
    other = problem.with_routing(ids_TK)
    assert other.x_Td is problem.x_Td and other.counts_E.tolist() == [8, 8, 0, 0]
    assert problem.ids_TK.data_ptr() != other.ids_TK.data_ptr()


def test_unknown_names_are_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match="dtype is 'fp8'; .*bf16, fp16, fp32, fp64"):
        make(Shape(4, 8, 8, 4, 2), dtype="fp8")
    with pytest.raises(ValueError, match="routing.distribution is .burst.; allowed: learned, replay, zipf, lognormal"):
        routers.draw("burst", 4, 4, 2, torch.Generator(), None)


@pytest.mark.parametrize(
    ("shape", "distribution", "expected"),
    [
        (Shape(24576, 1536, 256, 128, 8), "learned", Shape(130, 256, 128, 16, 8)),
        (Shape(24576, 1000, 250, 128, 12), "learned", Shape(130, 248, 114, 24, 12)),
        (Shape(17, 1025, 31, 3, 1), "zipf", Shape(17, 241, 31, 3, 1)),
        (Shape(32768, 4096, 256, 256, 16), "balanced", Shape(130, 256, 128, 32, 16)),
        (Shape(1024, 64, 64, 64, 1), "balanced", Shape(128, 64, 64, 16, 1)),
        (Shape(0, 64, 64, 64, 1), "learned", Shape(0, 64, 64, 16, 1)),
    ],
)
def test_the_twin_is_small_and_aligned_alike(shape, distribution, expected):
    assert twin_shape(shape, distribution) == expected


def test_the_twin_follows_its_point():
    shape = ShapeSpec(T=500, d=600, n=300, E=40, K=4)
    point = Point(sweep="s", impl="torch_loop", dtype="fp16", shape=shape, routing=Routing(distribution="balanced"))
    twin = Problem.twin(point, "cpu")
    assert twin.dtype == torch.float16 and twin.shape == twin_shape(shape.sizes(), "balanced")
    assert twin.counts_E.unique().numel() == 1


def routing_of(method: str, **fields) -> Routing:
    tile = 16 if method in ROUNDING else None
    capacity = 0.8 if method in ("token_drop", "expert_choice") else None
    groups = 4 if method == "grouped" else None
    return Routing(method=method, **({"tile": tile, "capacity": capacity, "groups": groups} | fields))


@pytest.mark.parametrize("distribution", ["learned", "zipf"])
@pytest.mark.parametrize("method", METHODS[1:])
def test_a_problem_under_any_router(method, distribution):
    """Ids rise within a token and end in -1; pairs, mask and counts say the same; a seed names them."""
    shape = Shape(90, 16, 8, 12, 4)
    problem, same = (Problem(shape, routing_of(method, distribution=distribution), "fp32", "cpu", 3) for _ in range(2))
    assert problem.fingerprint() == same.fingerprint()
    kept, weights, _ = choose(method, problem.logits_TE, 4, draws_E=problem.draws_E, **problem.options)
    assert torch.equal(problem.kept(), kept) and problem.R == kept.sum()
    assert problem.counts_E.tolist() == kept.sum(0).tolist()
    pairs = problem.pairs()
    assert torch.equal(torch.stack([pairs.token_R, pairs.ids_R], 1).long(), kept.nonzero())
    torch.testing.assert_close(pairs.scores_R, weights[kept])
    assert torch.equal(pairs.token_offsets_T1[1:].long(), kept.sum(1).cumsum(0))
    missing = problem.ids_TK < 0
    assert (problem.scores_TK[missing] == 0).all() and (missing.any() == (kept.sum(1).unique().numel() > 1))
    if method not in RAGGED:
        assert problem.ids_TK.shape == (90, 4) and not missing.any()
    if distribution == "learned":
        torch.testing.assert_close(problem.router_scores(problem.x_Td, problem.router_w_Ed), problem.scores_TK)
    assert torch.equal(problem.with_kept(kept).ids_TK, problem.ids_TK)


def test_the_twin_of_a_router_has_small_tiles_and_whole_groups():
    shape = ShapeSpec(T=500, d=16, n=8, E=60, K=3)
    twin = Problem.twin(Point(sweep="s", impl="sonic", shape=shape, routing=routing_of("tr_up", tile=128)), "cpu")
    assert twin.routing.tile == 16 and (twin.counts_E % 16 == 0).all()
    groups = Problem.twin(Point(sweep="s", impl="sonic", shape=shape, routing=routing_of("grouped", groups=3)), "cpu")
    assert groups.shape.E == 18


def test_a_recorded_routing_is_replayed(tmp_path):
    """Ids and scores as they were, whatever the seed; the twin takes the first tokens and keeps all experts."""
    recorded = make(Shape(200, 16, 8, 40, 3), "zipf")
    save(tmp_path / "r.npz", recorded.ids_TK, recorded.scores_TK, 40)
    routing = Routing(distribution="replay", file=str(tmp_path / "r.npz"))
    problem = Problem(recorded.shape, routing, "bf16", "cpu", 9)
    assert torch.equal(problem.ids_TK, recorded.ids_TK) and torch.equal(problem.scores_TK, recorded.scores_TK)
    shape = ShapeSpec(T=200, d=16, n=8, E=40, K=3)
    twin = Problem.twin(Point(sweep="s", impl="sonic", op="experts", shape=shape, routing=routing), "cpu")
    assert twin.shape.E == 40 and torch.equal(twin.ids_TK, recorded.ids_TK[: twin.shape.T])
    with pytest.raises(ValueError, match="shape.T and shape.K say"):
        Problem(Shape(201, 16, 8, 40, 3), routing, "bf16", "cpu", 0)
