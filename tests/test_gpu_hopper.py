"""The Hopper family on a card that runs it: every step with every tile, the layer, what it hands on, and a soak."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from sonic.kernels import hopper
from sonic.kernels.common import INTERPRET
from tests import soak_hopper
from tests.oracle import (
    DEVICE,
    DTYPES,
    HOPPER,
    LAYER_LIMIT,
    TRITON,
    TWINS,
    Case,
    Inputs,
    check,
    check_equal,
    compare,
    draw,
    hopper_tiles,
    oracle,
    tensors,
)
from tests.test_layer import run


def missing() -> str | None:
    """Why nothing here can run."""
    if INTERPRET or not torch.cuda.is_available():
        return "needs a CUDA device"
    return hopper.unknown(torch.device("cuda"))


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

#: Four pairs of sizes, since kernels are compiled for d and n: no multiples of 64 (200, 72), all aligned, wider than a
#: tile in n, narrower than one. T, K, E and the routing vary within.
CASES = [
    Case(1, 1, 3, 200, 72, "bf16", "one"),
    Case(17, 3, 5, 200, 72, "bf16", "empty"),
    Case(3000, 8, 300, 200, 72, "bf16", gather="separate"),
    Case(1, 3, 64, 256, 128, "fp16"),
    Case(130, 3, 3, 256, 128, "fp16", "one", aggregate="atomic"),
    Case(3000, 1, 5, 256, 128, "fp16", "one"),
    Case(17, 8, 300, 72, 264, "bf16", w="interleaved"),
    Case(130, 1, 64, 72, 264, "bf16", w="interleaved", activation="separate"),
    Case(3000, 3, 5, 72, 264, "bf16", "empty", w="interleaved", aggregate="scatter_sum"),
    Case(17, 1, 3, 328, 40, "fp16", w="interleaved"),
    Case(130, 8, 64, 328, 40, "fp16", "empty", w="interleaved", gather="separate", activation="separate"),
    Case(3000, 8, 64, 328, 40, "fp16", w="interleaved"),
]
IDS = [case.id for case in CASES]
GATHERED = {"gather": True}
ROWS = {"gather": False}
#: Under which switches a step runs.
OPTIONS = {
    "up_proj": [GATHERED, ROWS, {"with_h": False}, {"with_act": False}],
    "down_proj": [{}],
    "d_input": [{}],
    "d_act": [GATHERED, ROWS],
    "d_act_gemm": [GATHERED, ROWS],
    "weight_grad_1": [GATHERED, ROWS],
    "weight_grad_2": [GATHERED, ROWS],
}


class Layer:
    """What the steps of a layer are given, computed by the twins."""

    def __init__(self, case: Case) -> None:
        inputs = draw(case)
        self.x, self.do, self.w2 = inputs.x.detach(), inputs.do, inputs.w2.detach()
        self.w1 = case.choices("hopper").w1_view(inputs.w1.detach())
        scores, ids = TWINS.router_topk(F.linear(self.x, inputs.router_w.detach()), case.K)
        self.meta = TRITON.metadata(ids, case.E)
        self.scores_R = scores.flatten()[self.meta.slot_idx_R.long()]
        self.x_rows, self.do_rows = (TWINS.gather_rows(t, self.meta.gather_idx_R) for t in (self.x, self.do))
        self.h, self.a = TWINS.up_proj(self.x, self.w1, self.meta)
        self.dh, self.ap, _ = TWINS.d_act(self.do, self.w2, self.h, self.scores_R, self.meta)

    def call(self, family: object, step: str, **options: object) -> object:
        """A step of a family, weight gradients into NaN."""
        x, do = (self.x, self.do) if options.get("gather", True) else (self.x_rows, self.do_rows)
        unwritten = lambda w: torch.full_like(w, float("nan"))  # noqa: E731
        operands = {
            "up_proj": lambda: (x, self.w1),
            "down_proj": lambda: (self.a, self.w2),
            "d_input": lambda: (self.dh, self.w1),
            "d_act": lambda: (do, self.w2, self.h, self.scores_R),
            "d_act_gemm": lambda: (do, self.w2),
            "weight_grad_1": lambda: (x, self.dh, unwritten(self.w1)),
            "weight_grad_2": lambda: (do, self.ap, unwritten(self.w2)),
        }[step]()
        return getattr(family, step)(*operands, self.meta, **options)


@functools.lru_cache(maxsize=1)
def layer_of(case: Case) -> Layer:
    return Layer(case)


@pytest.mark.parametrize("step", OPTIONS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_tile_against_the_twin_and_the_portable_step(case: Case, step: str):
    """Two runs give the same bits, whatever the order in which programs take tiles."""
    inputs = layer_of(case)
    for options in OPTIONS[step]:
        want, portable = (inputs.call(family, step, **options) for family in (TWINS, TRITON))
        for tile in hopper_tiles(case.d, case.n)[step]:
            label = f"{case.id} {options} {tile}"
            got, again = (inputs.call(HOPPER, step, **options, tile=tile) for _ in range(2))
            compare(label, step, got, want)
            compare(f"{label}, portable", step, got, portable)
            for (name, first), second in zip(tensors(got).items(), tensors(again).values(), strict=True):
                check_equal(f"{label}, run again", f"{step}.{name}", second, first)


def check_layer(case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Output and gradients of the Hopper layer against fp64."""
    got = run(case, inputs, "hopper")
    _, ids = TWINS.router_topk(F.linear(inputs.x, inputs.router_w), case.K)
    for name, want in oracle(case, inputs, ids).items():
        check(case.id, name, got[name], want, LAYER_LIMIT[DTYPES[case.dtype]])
    return got


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_layer_against_fp64(case: Case):
    first = check_layer(case, draw(case))
    if case.aggregate != "atomic":  # sums in whatever order rows come
        for name, again in run(case, draw(case), "hopper").items():
            check_equal(f"{case.id}, run again", name, again, first[name])


def odd_rows(t: torch.Tensor) -> torch.Tensor:
    """t with rows that are no multiple of 16 bytes apart."""
    return F.pad(t, (0, 1), value=float("nan"))[..., :-1]


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """t at an address that is no multiple of 16 bytes."""
    return F.pad(t.flatten(), (1, 0))[1:].view(t.shape)


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("names", [("x",), ("w1",), ("w2",), ("do",), ("x", "w1", "w2", "do")], ids="+".join)
@pytest.mark.parametrize("change", [odd_rows, misaligned, transposed], ids=lambda f: f.__name__)
def test_operands_that_tma_cannot_take(change, names: tuple[str, ...]):
    """Those steps are the portable family's, the others stay."""
    case = Case(130, 3, 5, 200, 72, "bf16")
    inputs = draw(case)
    for name in names:
        setattr(inputs, name, change(getattr(inputs, name)))
    check_layer(case, inputs)


def test_a_layer_without_tokens():
    got = run(CASES[0], draw(Case(0, 1, 3, 200, 72, "bf16")), "hopper")
    assert got["o"].shape == (0, 200)
    assert all(got[name].count_nonzero() == 0 for name in ("dw1", "dw2"))


def test_experts_without_rows_get_zeros():
    case = Case(33, 1, 8, 200, 72, "bf16", "one")
    got = run(case, draw(case), "hopper")
    for name in ("dw1", "dw2"):
        assert got[name][1:].count_nonzero() == 0 and got[name][0].count_nonzero() > 0


def test_rows_that_are_not_finite_stay_with_their_expert():
    """Expert 1 shares row blocks, and the loads that run past an expert's end, with its neighbours."""
    case = Case(210, 1, 4, 200, 72, "bf16")
    meta = TRITON.metadata(torch.tensor([0, 1, 2] * 70, dtype=torch.int32, device=DEVICE)[:, None], case.E)
    clean, poisoned = Layer(case), Layer(case)
    for inputs in (clean, poisoned):
        inputs.meta = meta
    of_1 = slice(70, 140)  # rows are in expert order
    for t in (poisoned.x, poisoned.do):
        t[1::3] = float("nan")
    for t in (poisoned.h, poisoned.a, poisoned.dh, poisoned.ap, poisoned.x_rows, poisoned.do_rows):
        t[of_1] = float("nan")
    for step, options in OPTIONS.items():
        a, b = (tensors(inputs.call(HOPPER, step, **options[0])) for inputs in (clean, poisoned))
        for name in a:
            ours, theirs = a[name], b[name]
            if (step, name) == ("d_act", "2"):  # partial sums of dS, rows last
                ours, theirs = ours.T, theirs.T
            others = [0, 2, 3] if step.startswith("weight_grad") else [*range(70), *range(140, 210)]
            check_equal(f"{case.id} NaN", f"{step}.{name}", theirs[others], ours[others])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_soak():
    """`python -m tests.soak_hopper` is the long one."""
    counts = soak_hopper.soak(range(120), 4, soak_hopper.child_command(), timeout=120)
    assert counts == {"ok": 120}
