"""The oracles that every implementation is held against, and how far it may be from them.

Two checks come before any timing. On a small twin of the shape everything is compared with autograd in fp64. At full
size 256 rows of O and dX and the weight gradients of four experts are compared with an fp32 reference that visits one
expert at a time, so that it fits beside the largest layers. An error is a relative Frobenius norm; the ratio that is
reported divides it by the error of plain torch in the same dtype on the same twin, or by the dtype's floor where that
is larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F

from sonic.problem import Problem
from sonic.routers import score_dtype

LIMIT = 2.0
#: Errors too small to divide by. In 16 bits the unit roundoff; in fp32 and fp64 half of the error that a layer may
#: have at most (1e-5, 1e-10), because plain torch on the twin is far more exact than a long sum in another order can
#: be.
FLOOR = {torch.bfloat16: 2e-3, torch.float16: 2.5e-4, torch.float32: 5e-6, torch.float64: 5e-11}
#: Stands for an infinite or undefined ratio; JSON has no word for it.
WORST = 1e9

SAMPLED_ROWS = 256
CHUNK_ROWS = 8192
SHORT = {"dx_Td": "dx", "dw1_E2nd": "dw1", "dw2_Edn": "dw2", "drouter_Ed": "drouter", "ds_TK": "ds"}


def experts(
    x_Td: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor, w1_E2nd: torch.Tensor, w2_Edn: torch.Tensor
) -> torch.Tensor:
    """O (T, d): O_t = sum_k s_tk W2_e (silu(gate) * up), with gate and up the two halves of W1_e x_t and e = ids_tk; an
    id of -1 is nobody."""
    o_Td = torch.zeros_like(x_Td)
    for expert, (w1_2nd, w2_dn) in enumerate(zip(w1_E2nd.unbind(), w2_Edn.unbind(), strict=True)):
        token_r, slot_r = torch.where(ids_TK == expert)
        gate_rn, up_rn = F.linear(x_Td[token_r], w1_2nd).chunk(2, dim=-1)
        y_rd = F.linear(F.silu(gate_rn) * up_rn, w2_dn)
        o_Td = o_Td.index_add(0, token_r, y_rd * scores_TK[token_r, slot_r, None].to(y_rd.dtype))
    return o_Td


def autograd(problem: Problem, op: str, dtype: torch.dtype, backward: bool) -> dict[str, torch.Tensor]:
    """Output and gradients of plain torch computed in `dtype`, from the problem's inputs and its expert ids.

    Keys o, and with `backward` dx dw1 dw2 and drouter (`op` layer) or ds (experts).
    """
    x, w1, w2, router_w = (
        t.detach().to(dtype).requires_grad_()
        for t in (problem.x_Td, problem.w1_E2nd, problem.w2_Edn, problem.router_w_Ed)
    )
    given = problem.scores_TK.detach().to(score_dtype(dtype)).requires_grad_()
    with torch.enable_grad():
        scores = problem.router_scores(x, router_w) if op == "layer" else given
        o = experts(x, problem.ids_TK, scores, w1, w2)
    found = {"o": o.detach()}
    if backward:
        o.backward(problem.do_Td.to(dtype))
        routing = ("drouter", router_w) if op == "layer" else ("ds", given)
        found |= {name: leaf.grad for name, leaf in (("dx", x), ("dw1", w1), ("dw2", w2), routing)}
    return found


def relative_error(got: torch.Tensor, want: torch.Tensor, size_of_zero: float = 0.0) -> float:
    """|got - want| / |want| in Frobenius norms; infinite for NaN, Inf, a wrong shape, or non-zero where zero is due.

    `size_of_zero` takes the place of |want| where that is zero by cancellation.
    """
    if got.shape != want.shape:
        return math.inf
    got, want = got.detach().to(want.dtype), want.detach()
    difference, size = torch.linalg.vector_norm(got - want).item(), torch.linalg.vector_norm(want).item()
    if not math.isfinite(difference):
        return math.inf
    size = size or size_of_zero
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size


def ratio(error: float, yardstick: float) -> float:
    """Error over yardstick, at most `WORST`."""
    return min(error / yardstick, WORST) if math.isfinite(error) else WORST


def short_names(o_Td: torch.Tensor, grads: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Output and gradients of an adapter under the names of the errors: o dx dw1 dw2 drouter ds."""
    return {"o": o_Td} | {SHORT[name]: grad for name, grad in grads.items()}


def twin_errors(
    got: Mapping[str, torch.Tensor | None], problem: Problem, op: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Error ratios of everything an implementation computed on the twin, and the yardsticks behind them.

    `got` holds o, and the gradients if there was a backward (see `short_names`). Returns ({"twin.o": ratio, ...},
    {"o": yardstick, ...}); the yardsticks also serve the check at full size. A missing gradient counts as `WORST`.
    """
    backward = len(got) > 1
    exact = autograd(problem, op, torch.float64, backward)
    plain = autograd(problem, op, problem.dtype, backward)
    cancels = "drouter" in exact and problem.shape.K == 1 and problem.plain
    zeros = {"drouter": _uncancelled_router_gradient(problem)} if cancels else {}
    yardsticks, ratios = {}, {}
    for name, want in exact.items():
        found, zero = got.get(name), zeros.get(name, 0.0)
        yardsticks[name] = max(relative_error(plain[name], want, zero), FLOOR[problem.dtype])
        ratios[f"twin.{name}"] = WORST if found is None else ratio(relative_error(found, want, zero), yardsticks[name])
    return ratios, yardsticks


def _uncancelled_router_gradient(problem: Problem) -> float:
    """Norm of the router's gradient if a token's only score were free.

    With K = 1 the score is 1 whatever the router says, so its gradient is zero; a router that renormalises a softmax
    over all experts reaches that zero by cancelling terms of this size.
    """
    ds_TK = autograd(problem, "experts", torch.float64, backward=True)["ds"]
    ds_TE = ds_TK.new_zeros(problem.shape.T, problem.shape.E).scatter_(1, problem.ids_TK.long(), ds_TK)
    return torch.linalg.vector_norm(ds_TE.T @ problem.x_Td.to(torch.float64)).item()


def expert_rows(
    x_rd: torch.Tensor, do_rd: torch.Tensor, s_r: torch.Tensor, w1_2nd: torch.Tensor, w2_dn: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Forward and backward of the rows r of one expert, gradients written out by hand.

    Returns y (r, d) unweighted, ds (r,), dx (r, d) of these rows, dw1 (2n, d) and dw2 (d, n) summed over them.
    """
    gate, up = (x_rd @ w1_2nd.T).chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    a = silu * up
    da_unweighted = do_rd @ w2_dn
    da = da_unweighted * s_r[:, None]
    dgate = da * up * (sigmoid + silu * (1 - sigmoid))
    dh = torch.cat([dgate, da * silu], dim=-1)
    return {
        "y": a @ w2_dn.T,
        "ds": (da_unweighted * a).sum(dim=-1),
        "dx": dh @ w1_2nd,
        "dw1": dh.T @ x_rd,
        "dw2": do_rd.T @ (a * s_r[:, None]),
    }


def sampled_tokens(problem: Problem) -> torch.Tensor:
    """Up to 256 token numbers, the first and the last among them; the same for every implementation."""
    T = problem.shape.T
    if T <= SAMPLED_ROWS:
        return torch.arange(T, device=problem.device)
    generator = torch.Generator().manual_seed(problem.seed)
    inner = torch.randperm(T - 2, generator=generator)[: SAMPLED_ROWS - 2] + 1
    return torch.cat([torch.tensor([0, T - 1]), inner]).sort().values.to(problem.device)


def sampled_experts(problem: Problem) -> list[int]:
    """The first, the fullest, the last and (if there is one) an empty expert."""
    counts = problem.counts_E.tolist()
    chosen = {0, len(counts) - 1, counts.index(max(counts))}
    if 0 in counts:
        chosen.add(counts.index(0))
    return sorted(chosen)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(problem: Problem, op: str, tokens: torch.Tensor, x_rd: torch.Tensor) -> torch.Tensor:
    """Scores (r, K) of some tokens in the precision of x_rd: the given ones, or the router's for `op` layer."""
    if op == "layer":
        return problem.router_scores(x_rd, problem.router_w_Ed.to(x_rd.dtype), tokens)
    return problem.scores_TK[tokens].to(x_rd.dtype)


def reference_rows(problem: Problem, op: str, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows of O and dX, (len(tokens), d) each, in fp32 (fp64 for an fp64 problem)."""
    wide = _wide(problem.dtype)
    x, do = problem.x_Td[tokens].to(wide), problem.do_Td[tokens].to(wide)
    ids = problem.ids_TK[tokens]
    router_x = x.clone().requires_grad_(op == "layer")
    with torch.enable_grad():
        router_scores = _scores(problem, op, tokens, router_x)
    scores = router_scores.detach()
    o, dx, ds = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(scores)
    for expert in ids[ids >= 0].unique().tolist():
        row, slot = torch.where(ids == expert)
        w1, w2 = problem.w1_E2nd[expert].to(wide), problem.w2_Edn[expert].to(wide)
        rows = expert_rows(x[row], do[row], scores[row, slot], w1, w2)
        o.index_add_(0, row, rows["y"] * scores[row, slot, None])
        dx.index_add_(0, row, rows["dx"])
        ds[row, slot] = rows["ds"]
    if op == "layer":
        dx += torch.autograd.grad(router_scores, router_x, ds)[0]
    return {"o": o, "dx": dx}


def reference_weight_grads(problem: Problem, op: str, expert: int) -> dict[str, torch.Tensor]:
    """dW1 (2n, d) and dW2 (d, n) of one expert over all its rows, chunk by chunk, in fp32 (fp64 for fp64)."""
    wide = _wide(problem.dtype)
    w1, w2 = problem.w1_E2nd[expert].to(wide), problem.w2_Edn[expert].to(wide)
    dw1, dw2 = torch.zeros_like(w1), torch.zeros_like(w2)
    all_tokens, all_slots = torch.where(problem.ids_TK == expert)
    for tokens, slots in zip(all_tokens.split(CHUNK_ROWS), all_slots.split(CHUNK_ROWS), strict=True):
        x, do = problem.x_Td[tokens].to(wide), problem.do_Td[tokens].to(wide)
        scores = _scores(problem, op, tokens, x).gather(1, slots[:, None]).squeeze(1)
        rows = expert_rows(x, do, scores, w1, w2)
        dw1 += rows["dw1"]
        dw2 += rows["dw2"]
    return {"dw1": dw1, "dw2": dw2}


def full_errors(
    got: Mapping[str, torch.Tensor | None], problem: Problem, op: str, yardsticks: Mapping[str, float]
) -> dict[str, float]:
    """Error ratios at full size: full.o, and with gradients full.dx (sampled rows), full.dw1 and full.dw2 (worst of the
    sampled experts). `yardsticks` are the twin's."""
    backward = len(got) > 1
    tokens = sampled_tokens(problem)
    want = reference_rows(problem, op, tokens)
    ratios = {}
    for name in ("o", "dx") if backward else ("o",):
        found = got.get(name)
        ratios[f"full.{name}"] = (
            WORST if found is None else ratio(relative_error(_rows(found, tokens), want[name]), yardsticks[name])
        )
    if not backward:
        return ratios
    worst = {"dw1": 0.0, "dw2": 0.0}
    for expert in sampled_experts(problem):
        for name, grad in reference_weight_grads(problem, op, expert).items():
            found = got.get(name)
            error = math.inf if found is None else relative_error(found[expert], grad)
            worst[name] = max(worst[name], ratio(error, yardsticks[name]))
    return ratios | {f"full.{name}": value for name, value in worst.items()}


def _rows(found: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The sampled rows of an output; all of it when it has too few rows, which then matches no reference."""
    return found[tokens] if tokens.numel() == 0 or found.shape[0] > int(tokens[-1]) else found


def failures(errors: Mapping[str, float], limit: float = LIMIT) -> list[str]:
    """Names of the ratios above the limit, worst first."""
    return sorted((name for name, value in errors.items() if not value <= limit), key=lambda name: -errors[name])


def describe(errors: Mapping[str, float], names: Iterable[str]) -> str:
    """One line for a row's reason: each failed name with its ratio."""
    return (
        ", ".join(f"{name} is {errors[name]:.3g}x" for name in names) + f" the error of plain torch (limit {LIMIT:g})"
    )
