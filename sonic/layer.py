"""The Mixture-of-Experts layer: `MoE`, `moe` and `experts`, with the backward of the paper (Algorithms 2, 3 and 5).

Kept for the backward: X, H, scores and ids (T, K), the row of every slot and the experts' offsets; nothing else. Y, A, A',
dH and dXt live inside one pass. Forward and backward are `torch.library` operators with fake kernels, so that
`torch.compile(fullgraph=True)` sees two opaque calls; nothing waits for the device, so CUDA graphs can capture them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonic.kernels import aggregate as _aggregate
from sonic.kernels import d_act as _d_act
from sonic.kernels import d_input as _d_input
from sonic.kernels import down_proj as _down_proj
from sonic.kernels import metadata as _metadata
from sonic.kernels import router_topk as _router_topk
from sonic.kernels import up_proj as _up_proj
from sonic.kernels import weight_grad as _weight_grad
from sonic.kernels.common import INTERPRET, Tile
from sonic.shapes import MAX_E, MAX_K, Shape

Family = Literal["auto", "triton", "torch"]
W1Layout = Literal["concat", "interleaved"]

_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Steps:
    """One family of kernels: every step of the layer under one name."""

    router_topk: Callable
    router_topk_backward: Callable
    metadata: Callable
    restore: Callable
    gather_rows: Callable
    up_proj: Callable
    swiglu: Callable
    down_proj: Callable
    aggregate: Callable
    d_act: Callable
    d_act_gemm: Callable
    d_swiglu: Callable
    d_scores: Callable
    weight_grad_1: Callable
    weight_grad_2: Callable
    d_input: Callable


_MODULES = (_router_topk, _metadata, _up_proj, _down_proj, _aggregate, _d_act, _weight_grad, _d_input)


def _family(suffix: str) -> Steps:
    known = {name: value for module in _MODULES for name, value in vars(module).items()}
    return Steps(**{name: known[name + suffix] for name in Steps.__dataclass_fields__})


FAMILIES = {"triton": _family(""), "torch": _family("_torch")}


@dataclass(frozen=True)
class Choices:
    """Which kernels a layer runs: the ablation knobs of design section 6 and tiles by kernel name."""

    family: str = "triton"
    w1_layout: W1Layout = "concat"
    gather: Literal["fused", "separate"] = "fused"
    activation: Literal["fused", "separate"] = "fused"
    aggregate: Literal["gather_sum", "scatter_sum", "atomic"] = "gather_sum"
    tiles: Mapping[str, Tile] = field(default_factory=dict)
    #: All of it as one string, made once: an operator takes no Python objects.
    encoded: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.w1_layout not in ("concat", "interleaved"):
            raise ValueError(f"w1_layout is {self.w1_layout!r}; allowed: concat, interleaved")
        plain = {name: getattr(self, name) for name in ("family", "w1_layout", "gather", "activation", "aggregate")}
        plain["tiles"] = {name: asdict(tile) for name, tile in self.tiles.items()}
        object.__setattr__(self, "encoded", json.dumps(plain))

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(text: str) -> Choices:
        fields = json.loads(text)
        fields["tiles"] = {name: Tile(**tile) for name, tile in fields["tiles"].items()}
        return Choices(**fields)

    @property
    def steps(self) -> Steps:
        return FAMILIES[self.family]

    def tile(self, kernel: str) -> dict[str, Tile]:
        """Keyword argument of a kernel's launcher: the tile asked for, or nothing."""
        return {"tile": self.tiles[kernel]} if kernel in self.tiles else {}

    def w1_view(self, w1: Tensor) -> Tensor:
        """W1 (E, 2n, d) as (E, 2, n, d) with gate at [:, 0], whatever its layout; a view."""
        n = w1.shape[1] // 2
        if self.w1_layout == "concat":
            return w1.unflatten(1, (2, n))
        return w1.unflatten(1, (n, 2)).transpose(1, 2)


#: What runs when nothing else is asked for; made here, since `torch.compile` cannot trace the encoding.
_PLAIN = {(family, layout): Choices(family, layout) for family in FAMILIES for layout in ("concat", "interleaved")}


def resolve_family(family: Family, device: torch.device, dtype: torch.dtype) -> str:
    """The family that runs: Triton on a GPU and in the interpreter, plain torch elsewhere and for fp64.

    Raises ValueError when the family that was asked for cannot run there.
    """
    reason = None
    if dtype not in _TRITON_DTYPES:
        reason = f"dtype is {dtype}; the triton family runs bf16, fp16 and fp32 (use family='torch')"
    elif device.type != "cuda" and not INTERPRET:
        reason = f"device is {device}; the triton family needs a GPU, or TRITON_INTERPRET=1 set before triton is imported"
    elif device.type == "cuda" and INTERPRET:
        reason = "TRITON_INTERPRET=1 is set; it runs kernels on the CPU, so move the tensors there or unset it"
    if family == "auto":
        return "triton" if reason is None else "torch"
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; allowed: auto, {', '.join(FAMILIES)}")
    if family == "triton" and reason is not None:
        raise ValueError(f"family is 'triton': {reason}")
    return family


def _operator(name: str) -> Callable[[Callable], Callable]:
    """Register a function as the operator sonic::<name> and return the operator.

    The lower-level calls of `torch.library`: `custom_op` checks its outputs for aliases on every call, about a millisecond.
    """

    def register(function: Callable) -> Callable:
        qualified = f"sonic::{name}"
        torch.library.define(qualified, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(qualified, ("cpu", "cuda"), function)
        return getattr(torch.ops.sonic, name)

    return register


def _rows(t: Tensor) -> Tensor:
    """A matrix whose rows are contiguous and apart, copied only if it is not so already."""
    if t.stride(-1) == 1 and (t.shape[0] <= 1 or t.stride(0) >= t.shape[1]):
        return t
    return t.contiguous()


@_operator("experts_forward")
def _experts_forward(
    x: Tensor, ids: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, choices: str, keep_h: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """O (T, d), H (R, 2n; empty unless kept), row of every slot (R,), offsets (E+1,)."""
    c = Choices.decode(choices)
    steps = c.steps
    T, K = ids.shape
    meta = steps.metadata(ids, w1.shape[0])
    x = _rows(x)
    fused = c.gather == "fused"
    rows = x if fused else steps.gather_rows(x, meta.gather_idx_R)
    if c.activation == "fused":
        h, a = steps.up_proj(rows, c.w1_view(w1), meta, gather=fused, with_h=keep_h, **c.tile("up_proj"))
    else:
        h, _ = steps.up_proj(rows, c.w1_view(w1), meta, gather=fused, with_act=False, **c.tile("up_proj"))
        a = steps.swiglu(h)
    tile = c.tile("down_proj")
    if c.aggregate == "gather_sum":
        o = steps.aggregate(steps.down_proj(a, w2, meta, **tile), meta.row_idx_R, scores, T, K)
    elif c.aggregate == "scatter_sum":
        o = steps.aggregate(steps.down_proj(a, w2, meta, into="slots", **tile), None, scores, T, K)
    else:
        o = steps.down_proj(a, w2, meta, into="tokens", scores=scores, **tile).to(x.dtype)
    return o, h if keep_h else x.new_empty(0), meta.row_idx_R, meta.offsets_E1


@torch.library.register_fake("sonic::experts_forward")
def _(x, ids, scores, w1, w2, choices, keep_h):  # noqa: ANN001, ANN202
    index = ids.new_empty(ids.numel(), dtype=torch.int32)
    h = x.new_empty(ids.numel(), w1.shape[1]) if keep_h else x.new_empty(0)
    return x.new_empty(x.shape), h, index, ids.new_empty(w1.shape[0] + 1, dtype=torch.int32)


@_operator("experts_backward")
def _experts_backward(
    do: Tensor, x: Tensor, h: Tensor, scores: Tensor, row_idx: Tensor, offsets: Tensor, w1: Tensor, w2: Tensor,
    choices: str, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dX, dS, dW1, dW2; an empty tensor stands for one that nobody needs (`needs`, in this order)."""
    c = Choices.decode(choices)
    steps = c.steps
    T, K = scores.shape
    need_x, need_scores, need_w1, need_w2 = needs
    dx, dscores, dw1, dw2 = (x.new_empty(0) for _ in needs)
    meta, scores_R = steps.restore(row_idx, offsets, scores)
    fused = c.gather == "fused"
    x, do = _rows(x), _rows(do)
    do_rows = do if fused else steps.gather_rows(do, meta.gather_idx_R)
    if c.activation == "fused":
        dh, ap, ds = steps.d_act(do_rows, w2, h, scores_R, meta, gather=fused, **c.tile("d_act"))
    else:
        da = steps.d_act_gemm(do_rows, w2, meta, gather=fused, **c.tile("d_act"))
        dh, ap, ds = steps.d_swiglu(da, h, scores_R)
    if need_scores:
        dscores = steps.d_scores(ds, row_idx).view(T, K)
    if need_w2:
        dw2 = torch.empty(w2.shape, dtype=w2.dtype, device=w2.device)
        steps.weight_grad_2(do_rows, ap, dw2, meta, gather=fused, **c.tile("weight_grad_2"))
    if need_x:
        tile = c.tile("d_input")
        w1_view = c.w1_view(w1)
        if c.aggregate == "gather_sum":
            dx = steps.aggregate(steps.d_input(dh, w1_view, meta, **tile), row_idx, None, T, K)
        elif c.aggregate == "scatter_sum":
            dx = steps.aggregate(steps.d_input(dh, w1_view, meta, into="slots", **tile), None, None, T, K)
        else:
            dx = steps.d_input(dh, w1_view, meta, into="tokens", **tile).to(x.dtype)
    if need_w1:
        dw1 = torch.empty(w1.shape, dtype=w1.dtype, device=w1.device)
        x_rows = x if fused else steps.gather_rows(x, meta.gather_idx_R)
        steps.weight_grad_1(x_rows, dh, c.w1_view(dw1), meta, gather=fused, **c.tile("weight_grad_1"))
    return dx, dscores, dw1, dw2


@torch.library.register_fake("sonic::experts_backward")
def _(do, x, h, scores, row_idx, offsets, w1, w2, choices, needs):  # noqa: ANN001, ANN202
    likes = zip(needs, (x, scores, w1, w2), strict=True)
    return tuple(t.new_empty(t.shape) if need else x.new_empty(0) for need, t in likes)


def _keep_experts(ctx, inputs, output) -> None:  # noqa: ANN001
    x, _ids, scores, w1, w2, ctx.choices, keep_h = inputs
    _o, h, row_idx, offsets = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(h, row_idx, offsets)
    if keep_h:
        ctx.save_for_backward(x, h, scores, row_idx, offsets, w1, w2)


def _experts_gradient(ctx, do, _dh, _drow_idx, _doffsets):  # noqa: ANN001, ANN202
    if do is None:
        return (None,) * 7
    needs = [ctx.needs_input_grad[i] for i in (0, 2, 3, 4)]
    grads = _experts_backward(do, *ctx.saved_tensors, ctx.choices, needs)
    dx, dscores, dw1, dw2 = (g if need else None for g, need in zip(grads, needs, strict=True))
    return dx, None, dscores, dw1, dw2, None, None


torch.library.register_autograd("sonic::experts_forward", _experts_gradient, setup_context=_keep_experts)


@_operator("route")
def _route(logits: Tensor, K: int, family: str) -> tuple[Tensor, Tensor]:
    """Scores (T, K) and ids (T, K) int32 of the K largest logits."""
    return FAMILIES[family].router_topk(_rows(logits), K)


@torch.library.register_fake("sonic::route")
def _(logits, K, family):  # noqa: ANN001, ANN202
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    size = (logits.shape[0], K)
    return logits.new_empty(size, dtype=wide), logits.new_empty(size, dtype=torch.int32)


@_operator("route_backward")
def _route_backward(
    dscores: Tensor, scores: Tensor, ids: Tensor, E: int, dtype: torch.dtype, family: str
) -> Tensor:
    """dlogits (T, E) in dtype."""
    return FAMILIES[family].router_topk_backward(dscores.contiguous(), scores, ids, E, dtype)


@torch.library.register_fake("sonic::route_backward")
def _(dscores, scores, ids, E, dtype, family):  # noqa: ANN001, ANN202
    return scores.new_empty((scores.shape[0], E), dtype=dtype)


def _keep_route(ctx, inputs, output) -> None:  # noqa: ANN001
    logits, _K, ctx.family = inputs
    scores, ids = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(ids)
    ctx.E, ctx.dtype = logits.shape[1], logits.dtype
    ctx.save_for_backward(scores, ids)


def _route_gradient(ctx, dscores, _dids):  # noqa: ANN001, ANN202
    if dscores is None:
        return None, None, None
    return _route_backward(dscores, *ctx.saved_tensors, ctx.E, ctx.dtype, ctx.family), None, None


torch.library.register_autograd("sonic::route", _route_gradient, setup_context=_keep_route)


def _check_experts(x: Tensor, ids: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> None:
    """Raise ValueError naming the tensor, its shape or dtype and what was expected."""
    for name, tensor, axes in (("x", x, 2), ("ids", ids, 2), ("scores", scores, 2), ("w1", w1, 3), ("w2", w2, 3)):
        if tensor.dim() != axes:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have {axes} axes")
    T, d = x.shape
    E, n2, K = w1.shape[0], w1.shape[1], ids.shape[1]
    expected = {"ids": (T, K), "scores": (T, K), "w1": (E, n2, d), "w2": (E, d, n2 // 2)}
    for (name, shape), tensor in zip(expected.items(), (ids, scores, w1, w2), strict=True):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with x {(T, d)}, w1 {tuple(w1.shape)} it must be {shape}")
    if n2 % 2:
        raise ValueError(f"w1 has {n2} rows per expert; gate and up need an even number")
    if not 1 <= K <= min(E, MAX_K) or E > MAX_E:
        raise ValueError(f"K is {K} and E is {E}; K must lie in 1..min(E, {MAX_K}) and E in 1..{MAX_E}")
    for name, tensor in (("w1", w1), ("w2", w2)):
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and x is {x.dtype}; they must agree")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids is {ids.dtype}; it must be int32 or int64")


def _experts(x: Tensor, ids: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, choices: str) -> Tensor:
    keep_h = torch.is_grad_enabled() and any(t.requires_grad for t in (x, scores, w1, w2))
    w1, w2 = (w if w.stride(-1) == 1 else w.contiguous() for w in (w1, w2))
    return _experts_forward(x, ids.int().contiguous(), scores, w1, w2, choices, keep_h)[0]


def experts(
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    w1_layout: W1Layout = "concat",
    family: Family = "auto",
    choices: Choices | None = None,
) -> Tensor:
    """O (T, d) of the experts for a routing of one's own.

    x (T, d); ids (T, K) integer, distinct per token, in [0, E); scores (T, K), weights of the sum, differentiable;
    w1 (E, 2n, d), gate rows then up rows (`w1_layout="concat"`) or alternating ("interleaved"); w2 (E, d, n). Any strides;
    weights without a contiguous last axis are copied on every call. `choices` picks kernels and wins over family and layout.
    Raises ValueError for shapes, dtypes or a family that do not fit. Paper Algorithms 2 and 3.
    """
    _check_experts(x, ids, scores, w1, w2)
    if choices is None:
        at = (resolve_family(family, x.device, x.dtype), w1_layout)
        if at not in _PLAIN:
            raise ValueError(f"w1_layout is {w1_layout!r}; allowed: concat, interleaved")
        choices = _PLAIN[at]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return _experts(x, ids, scores.to(wide).contiguous(), w1, w2, choices.encoded)


def route(x: Tensor, router_w: Tensor, K: int, *, family: Family = "auto") -> tuple[Tensor, Tensor]:
    """Scores (T, K) fp32 and ids (T, K) int32: softmax over the K largest of the logits x router_w^T (paper section 4.3).

    x (T, d), router_w (E, d). Ties go to the lower expert. Raises ValueError for K outside 1..min(E, 64).
    """
    E = router_w.shape[0]
    if not 1 <= K <= min(E, MAX_K) or E > MAX_E:
        raise ValueError(f"K is {K} and E is {E}; K must lie in 1..min(E, {MAX_K}) and E in 1..{MAX_E}")
    logits = F.linear(x.to(router_w.dtype), router_w)
    return _route(logits, K, resolve_family(family, x.device, logits.dtype))


def moe(
    x: Tensor,
    router_w: Tensor,
    w1: Tensor,
    w2: Tensor,
    K: int,
    *,
    w1_layout: W1Layout = "concat",
    family: Family = "auto",
    choices: Choices | None = None,
) -> Tensor:
    """The whole layer: route every token to K of E experts and sum what they return.

    x (..., d); router_w (E, d); w1, w2 and the rest as in `experts`. Returns the shape of x.
    """
    flat = x.reshape(-1, x.shape[-1])
    scores, ids = route(flat, router_w, K, family=family if choices is None else choices.family)
    return experts(flat, ids, scores, w1, w2, w1_layout=w1_layout, family=family, choices=choices).view(x.shape)


class MoE(nn.Module):
    """A Mixture-of-Experts layer with SwiGLU experts and a softmax-over-top-K router.

    d width, n expert intermediate size, E experts, K experts per token. Parameters: router (E, d), w1 (E, 2n, d), w2 (E, d, n).
    Raises ValueError for sizes that no layer can have.
    """

    def __init__(
        self,
        d: int,
        n: int,
        E: int,
        K: int,
        *,
        w1_layout: W1Layout = "concat",
        family: Family = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        Shape(0, d, n, E, K)
        self.d, self.n, self.E, self.K = d, n, E, K
        self.w1_layout, self.family = w1_layout, family
        new = lambda *size: nn.Parameter(torch.empty(size, device=device, dtype=dtype))  # noqa: E731
        self.router, self.w1, self.w2 = new(E, d), new(E, 2 * n, d), new(E, d, n)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Normal weights with standard deviation std, as in the paper's training runs."""
        for weight in self.parameters():
            nn.init.normal_(weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) -> (..., d)."""
        return moe(x, self.router, self.w1, self.w2, self.K, w1_layout=self.w1_layout, family=self.family)

    def extra_repr(self) -> str:
        return f"d={self.d}, n={self.n}, E={self.E}, K={self.K}, w1_layout={self.w1_layout!r}, family={self.family!r}"
