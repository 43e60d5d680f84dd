"""Plans of any mask against their twins, the entries behind the pairs, and the sums over a token's rows."""

from __future__ import annotations

import pytest
import torch

from sonic.kernels import plan as pl
from tests.oracle import DEVICE, DTYPES, check, check_equal

CASES = [
    pytest.param(0, 4, 0.5, id="no_token"),
    pytest.param(1, 1, 1.0, id="one_pair"),
    pytest.param(17, 5, 0.0, id="no_pair"),
    pytest.param(130, 7, 0.3, id="ragged"),
    pytest.param(65, 70, 0.1, id="many_experts"),
    pytest.param(33, 3, 1.0, id="all_pairs"),
    pytest.param(130, 70, 1.0, id="every_bit_of_a_word"),
    pytest.param(70, 130, 0.6, id="several_words"),
]


def mask(T: int, E: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(T + E)
    kept = (torch.rand(T, E, generator=generator) < share).to(torch.int8)
    return kept.to(DEVICE), torch.rand(T, E, generator=generator).to(DEVICE)


def check_plan(case: str, got: pl.Plan, want: pl.Plan) -> None:
    for name in ("offsets_E1", "slot_idx_R", "gather_idx_R", "row_idx_R"):
        check_equal(case, name, getattr(got.meta, name), getattr(want.meta, name))
    for name in ("token_offsets_T1", "ids_R", "scores_R"):
        check_equal(case, name, getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("room", [0, 9])
@pytest.mark.parametrize(("T", "E", "share"), CASES)
def test_plan_of_mask(T: int, E: int, share: float, room: int) -> None:
    """With and without room behind the pairs, from masks in either order of memory."""
    kept, weights = mask(T, E, share)
    limit = int(kept.sum()) + room
    case = f"T{T}-E{E}-{share}-{limit}"
    want = pl.plan_of_mask_torch(kept, weights, limit)
    check_plan(case, pl.plan_of_mask(kept, weights, limit), want)
    by_expert = pl.plan_of_mask(kept.T.contiguous().T, weights.T.contiguous().T, limit)
    check_plan(case, by_expert, want)
    keys = weights.view(torch.int32) | 1 << 30
    check_plan(case, pl.plan_of_mask(kept, keys, limit), want)
    if T:
        check_equal(
            case,
            "row of a slot",
            want.meta.slot_idx_R[want.meta.row_idx_R.long()].cpu().long(),
            torch.arange(want.limit),
        )
    exact = by_expert.exact()
    assert exact.limit == int(kept.sum()) == int(by_expert.rows)
    token = torch.repeat_interleave(exact.token_offsets_T1.diff().long())
    check_equal(case, "pairs", torch.stack([token, exact.ids_R.long()], 1), kept.nonzero())


def test_plan_of_pairs_is_that_of_the_mask() -> None:
    kept, weights = mask(40, 6, 0.4)
    want = pl.plan_of_mask_torch(kept, weights)
    token = torch.repeat_interleave(want.token_offsets_T1.diff().long()).int()
    given = token, want.ids_R, want.scores_R, want.token_offsets_T1, 6
    check_plan("pairs", pl.plan_of_pairs(*given), want)
    check_plan("pairs", pl.plan_of_pairs_torch(*given), want)


def test_example_of_the_module() -> None:
    kept = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 0, 0]], dtype=torch.int8, device=DEVICE)
    plan = pl.plan_of_mask(kept, torch.ones(3, 3, device=DEVICE), 4)
    assert plan.token_offsets_T1.tolist() == [0, 2, 2, 3] and plan.ids_R.tolist() == [0, 2, 0, 0]
    assert plan.meta.offsets_E1.tolist() == [0, 2, 2, 3] and plan.meta.gather_idx_R.tolist() == [0, 2, 0, 0]
    assert plan.meta.slot_idx_R.tolist() == [0, 2, 1, 3] and plan.meta.row_idx_R.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("T", "E", "d", "share", "dtype"),
    [(0, 3, 16, 0.5, "fp32"), (17, 5, 71, 0.5, "bf16"), (3, 20, 40, 1.0, "fp16"), (33, 4, 72, 0.0, "fp32")],
)
def test_sums_over_the_rows_of_a_token(T: int, E: int, d: int, share: float, dtype: str) -> None:
    """What lies behind the pairs is not a number and reaches no sum."""
    kept, weights = mask(T, E, share)
    R = int(kept.sum())
    plan = pl.plan_of_mask(kept, weights, R + 5)
    generator = torch.Generator().manual_seed(R)
    y = torch.randn(plan.limit, d, generator=generator).to(DEVICE, DTYPES[dtype])
    y[R:] = float("nan")
    for scores in (plan.scores_R, None):
        got, want = pl.sum_rows(y, plan, scores), pl.sum_rows_torch(y, plan, scores)
        check(f"T{T}-d{d}-{dtype}", "o", got, want, {"fp32": 2e-6, "bf16": 1e-3, "fp16": 1.5e-4}[dtype])
    assert (got[kept.sum(1) == 0] == 0).all()
    parts = torch.randn(3, plan.limit, generator=generator).to(DEVICE)
    parts[:, R:] = float("nan")
    got = pl.sum_parts(parts, plan)
    check("parts", "ds", got, pl.sum_parts_torch(parts, plan), 2e-6)
    assert (got[R:] == 0).all()
