"""The Mixture-of-Experts layer: `MoE`, `moe` and `experts`, with the backward of the paper (Algorithms 2, 3 and 5).

Kept for the backward: X, H, scores and ids (T, K), the row of every slot and the experts' offsets; nothing else. Y, A,
A', dH and dXt live inside one pass. Under `torch.compile` forward and backward are two `torch.library` operators with
fake kernels, so that `fullgraph=True` works; the Triton family never waits for the device, so CUDA graphs can capture
it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache, partial, wraps
from typing import Literal, NamedTuple, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sonic.kernels import aggregate as _aggregate
from sonic.kernels import d_act as _d_act
from sonic.kernels import d_input as _d_input
from sonic.kernels import down_proj as _down_proj
from sonic.kernels import hopper
from sonic.kernels import metadata as _metadata
from sonic.kernels import plan as _plan
from sonic.kernels import router_topk as _router_topk
from sonic.kernels import up_proj as _up_proj
from sonic.kernels import weight_grad as _weight_grad
from sonic.kernels.common import INTERPRET, Tile, tile_of
from sonic.kernels.grouped_gemm import Into
from sonic.kernels.plan import Plan
from sonic.routing import TopK
from sonic.shapes import MAX_E, MAX_K, Shape

Family = Literal["auto", "hopper", "triton", "torch"]
W1Layout = Literal["concat", "interleaved"]

_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DTYPES = (*_TRITON_DTYPES, torch.float64)


@dataclass(frozen=True)
class Steps:
    """One family of kernels: every step of the layer under one name."""

    router_topk: Callable
    router_topk_backward: Callable
    metadata: Callable
    restore: Callable
    gather_rows: Callable
    scores_of_y: Callable
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


_INTO: dict[str, Into] = {"gather_sum": "rows", "scatter_sum": "slots", "atomic": "tokens"}

FAMILIES = {"triton": _family(""), "torch": _family("_torch")}
FAMILIES["hopper"] = replace(FAMILIES["triton"], **hopper.STEPS)


@dataclass(frozen=True)
class Choices:
    """Which kernels a layer runs: the ablation knobs of design section 6 and tiles by kernel name."""

    family: str = "triton"
    w1_layout: W1Layout = "concat"
    gather: Literal["fused", "separate"] = "fused"
    activation: Literal["fused", "separate"] = "fused"
    aggregate: Literal["gather_sum", "scatter_sum", "atomic"] = "gather_sum"
    tiles: Mapping[str, Tile] = field(default_factory=dict)
    ds: Literal["from_da", "from_y"] = "from_da"
    cache: Literal["h", "h_a", "h_a_y", "none"] = "h"
    #: All of it as one string, made once: an operator takes no Python objects.
    encoded: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds = get_type_hints(Choices)
        allowed = {"family": tuple(FAMILIES)}
        knobs = ("w1_layout", "gather", "activation", "aggregate", "ds", "cache")
        allowed |= {name: get_args(kinds[name]) for name in knobs}
        plain = {name: getattr(self, name) for name in allowed}
        for name, value in plain.items():
            if value not in allowed[name]:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed[name])}")
        if self.keeps_y and self.aggregate == "atomic":
            raise ValueError(f"aggregate is 'atomic', which leaves no Y; ds={self.ds} and cache={self.cache} keep Y")
        if self.ds == "from_y" and self.cache == "none":
            raise ValueError("ds is 'from_y', which keeps Y; cache=none keeps nothing")
        plain["tiles"] = {name: asdict(tile) for name, tile in self.tiles.items()}
        object.__setattr__(self, "encoded", json.dumps(plain))

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(text: str) -> Choices:
        fields = json.loads(text)
        fields["tiles"] = {name: tile_of(tile) for name, tile in fields["tiles"].items()}
        return Choices(**fields)

    @property
    def steps(self) -> Steps:
        return FAMILIES[self.family]

    @property
    def into(self) -> Into:
        """Where a grouped GEMM leaves its result for this way to aggregate."""
        return _INTO[self.aggregate]

    @property
    def keeps_a(self) -> bool:
        return self.cache in ("h_a", "h_a_y")

    @property
    def keeps_y(self) -> bool:
        return self.ds == "from_y" or self.cache == "h_a_y"

    @property
    def keeps_h_alone(self) -> bool:
        """Whether the backward gets what the layer is made for: H, and dS from dA."""
        return self.ds == "from_da" and self.cache == "h"

    def tile(self, kernel: str) -> dict[str, Tile]:
        """Keyword argument of a kernel's launcher: the tile asked for, or nothing."""
        return {"tile": self.tiles[kernel]} if kernel in self.tiles else {}

    def w1_view(self, w1: Tensor) -> Tensor:
        """W1 (E, 2n, d) as (E, 2, n, d) with gate at [:, 0], whatever its layout; a view."""
        E, n2, d = w1.shape
        stride_e, stride_n, stride_d = w1.stride()
        half, row = (n2 // 2 * stride_n, stride_n) if self.w1_layout == "concat" else (stride_n, 2 * stride_n)
        return w1.as_strided((E, 2, n2 // 2, d), (stride_e, half, row, stride_d))


#: What runs when nothing else is asked for; made here, since `torch.compile` cannot trace the encoding.
_PLAIN = {(family, layout): Choices(family, layout) for family in FAMILIES for layout in ("concat", "interleaved")}


def resolve_family(family: Family, device: torch.device, dtype: torch.dtype, d: int, n: int) -> str:
    """The family that runs: hopper where it can, Triton on other GPUs and in the interpreter, plain torch elsewhere and
    for fp64.

    Raises ValueError when the family that was asked for cannot run there.
    """
    if family == "torch":
        return family
    if family not in ("auto", *FAMILIES):
        raise ValueError(f"family is {family!r}; allowed: auto, {', '.join(FAMILIES)}")
    if family != "triton":
        unknown, unsuited = hopper.unknown(device), hopper.unsuited(dtype, d, n)
        if unknown is None and unsuited is None:
            return "hopper"
        if family == "hopper":
            raise ValueError(f"family is 'hopper': {unknown or unsuited}")
    reason = _no_triton(device, dtype)
    if reason is None:
        # the compiler cannot trace a warning, and an eager call has given it
        if family == "auto" and device.type == "cuda" and unknown is not None and not torch.compiler.is_compiling():
            _say_once(f"{unknown}; the portable Triton family runs instead")
        return "triton"
    if family == "triton":
        raise ValueError(f"family is 'triton': {reason}")
    return "torch"


def _no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the portable Triton family cannot run; None when it can."""
    if dtype not in _TRITON_DTYPES:
        return f"dtype is {dtype}; the triton family runs bf16, fp16 and fp32 (use family='torch')"
    if device.type != "cuda" and not INTERPRET:
        return f"device is {device}; the triton family needs a GPU, or TRITON_INTERPRET=1 set before triton is imported"
    if torch.version.hip is not None:
        return "this build of torch is for AMD; the triton family was written for NVIDIA GPUs"
    if device.type == "cuda" and INTERPRET:
        return "TRITON_INTERPRET=1 is set; it runs kernels on the CPU, so move the tensors there or unset it"
    return None


@cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _rows(t: Tensor) -> Tensor:
    """A matrix whose rows are contiguous and apart, copied only if it is not so already."""
    if t.stride(-1) == 1 and (t.shape[0] <= 1 or t.stride(0) >= t.shape[1]):
        return t
    return t.contiguous()


class Extras(NamedTuple):
    """What an ablation hands to its backward beside H: gathered rows of X, A, and Y as a grouped GEMM left it."""

    xe: Tensor | None = None
    a: Tensor | None = None
    y: Tensor | None = None


#: What the layer hands on: nothing beside H.
_NO_EXTRAS = Extras()


class Kept(NamedTuple):
    """What a forward hands to its backward, beside the inputs and H; ids are empty when the router was not ours."""

    ids: Tensor
    scores: Tensor
    row_idx: Tensor
    offsets: Tensor


def _without_autocast(step: Callable) -> Callable:
    """The step in the dtypes that it was given: autocast would narrow the router's fp32, and differ under compile."""

    @wraps(step)
    def run(first: Tensor, *rest: object) -> object:
        if not torch.is_autocast_enabled(first.device.type):
            return step(first, *rest)
        with torch.autocast(first.device.type, enabled=False):
            return step(first, *rest)

    return run


def _rows_last(w: Tensor) -> Tensor:
    """Weights with a contiguous last axis, copied only if it is not so already; the copy is not kept."""
    return w if w.stride(-1) == 1 else w.contiguous()


def _summed(
    y: Tensor, c: Choices, meta: _metadata.Metadata, scores: Tensor | None, K: int, dtype: torch.dtype
) -> Tensor:
    """(T, d) from what a grouped GEMM left behind: the sum over a token's rows, unless atomic addition has made it."""
    if c.into == "tokens":
        return y.to(dtype)
    return c.steps.aggregate(y, meta.row_idx_R if c.into == "rows" else None, scores, meta.T, K)


def _up(
    x: Tensor, w1: Tensor, meta: _metadata.Metadata, c: Choices, with_h: bool, with_a: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """H and A where they are asked for, and the rows of X where a kernel gathered them."""
    steps, fused = c.steps, c.gather == "fused"
    xe = None if fused else steps.gather_rows(x, meta.gather_idx_R)
    call = partial(steps.up_proj, x if fused else xe, c.w1_view(w1), meta, gather=fused, **c.tile("up_proj"))
    if c.activation == "fused":
        return *call(with_h=with_h, with_act=with_a), xe
    h, _ = call(with_act=False)
    return h, steps.swiglu(h) if with_a else None, xe


def _expert_grads(
    do: Tensor, x: Tensor, w1: Tensor, w2: Tensor, held: list[Tensor], scores_R: Tensor, meta: _metadata.Metadata,
    c: Choices, needs: Sequence[bool], summed: Callable[[Tensor], Tensor], extras: Extras = _NO_EXTRAS,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """dX of the experts, the partial sums of dS in row order, dW1, dW2; dX, dW1 and dW2 where they are needed.

    `held` is H alone and is emptied: where no caller refers to it either, its memory is free once dH is there. scores_R
    in row order; `summed` makes dX (T, d) of what d_input leaves behind.
    """
    steps, fused = c.steps, c.gather == "fused"
    need_x, need_w1, need_w2 = needs
    dx = dw1 = dw2 = ds_of_y = None
    xe, a, y = extras
    h = held.pop()
    if c.cache == "none":
        h, _, xe = _up(x, w1, meta, c, True, with_a=False)
    in_place, with_ap = fused, {}
    if c.ds == "from_y":
        # dY = s dO in rows of its own, so that what follows knows no scores and A takes the place of A'
        do_rows, in_place = steps.gather_rows(do, meta.gather_idx_R, scores_R), False
        ds_of_y = steps.scores_of_y(do, y, meta.gather_idx_R, None if c.into == "rows" else meta.slot_idx_R)
        scores_R = torch.ones_like(scores_R)
        with_ap = {"with_ap": False} if a is not None else {}
    else:
        do_rows = do if fused else steps.gather_rows(do, meta.gather_idx_R)
    if c.activation == "fused":
        dh, ap, ds = steps.d_act(do_rows, w2, h, scores_R, meta, gather=in_place, **with_ap, **c.tile("d_act"))
    else:
        da = steps.d_act_gemm(do_rows, w2, meta, gather=in_place, **c.tile("d_act"))
        dh, ap, ds = steps.d_swiglu(da, h, scores_R, **with_ap)
    del h
    if need_w2:
        dw2 = torch.empty(w2.shape, dtype=w2.dtype, device=w2.device)
        operand = a if ap is None else ap
        steps.weight_grad_2(do_rows, operand, dw2, meta, gather=in_place, **c.tile("weight_grad_2"))
        del operand
    del ap, do_rows  # not needed beside dXt, which is the largest
    if need_x:
        dx = summed(steps.d_input(dh, c.w1_view(w1), meta, into=c.into, **c.tile("d_input")))
    if need_w1:
        dw1 = torch.empty(w1.shape, dtype=w1.dtype, device=w1.device)
        if not fused and xe is None:
            xe = steps.gather_rows(x, meta.gather_idx_R)
        steps.weight_grad_1(x if fused else xe, dh, c.w1_view(dw1), meta, gather=fused, **c.tile("weight_grad_1"))
    return dx, ds if ds_of_y is None else ds_of_y, dw1, dw2


@_without_autocast
def _forward(
    x: Tensor, router_w: Tensor | None, ids: Tensor | None, scores: Tensor | None, w1: Tensor, w2: Tensor,
    K: int, c: Choices, keep: bool,
) -> tuple[Tensor, Tensor, Kept, Extras]:  # fmt: skip
    """O (T, d), routed by router_w, or by ids and scores (T, K) where it is None; H, empty when no backward will come
    or recomputes it; what else is kept."""
    steps = c.steps
    w1, w2 = _rows_last(w1), _rows_last(w2)
    if router_w is not None:
        scores, ids = steps.router_topk(F.linear(x.to(router_w.dtype), router_w), K)
    meta = steps.metadata(ids, w1.shape[0])
    keeps_h = keep and c.cache != "none"
    h, a, xe = _up(_rows(x), w1, meta, c, keeps_h)
    if c.cache != "h_a_y":
        xe = None  # not needed beside Y
    y = steps.down_proj(a, w2, meta, into=c.into, scores=scores, **c.tile("down_proj"))
    a = a if keep and c.keeps_a else None  # not needed beside O
    o = _summed(y, c, meta, scores, K, x.dtype)
    kept_ids = ids if router_w is not None else ids.new_empty(0)
    extras = _NO_EXTRAS
    if keep and not c.keeps_h_alone:
        extras = Extras(xe, a, y if c.keeps_y else None)
    kept = Kept(kept_ids, scores, meta.row_idx_R, meta.offsets_E1)
    return o, h if keeps_h else x.new_empty(0), kept, extras


@_without_autocast
def _backward(
    do: Tensor,
    x: Tensor,
    router_w: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    held: list[Tensor],
    kept: Kept,
    c: Choices,
    needs: Sequence[bool],
    extras: Extras = _NO_EXTRAS,
) -> list[Tensor | None]:
    """dX, the routing's gradient (router_w's, or dS without a router), dW1, dW2; None for one that nobody needs. `held`
    as in `_expert_grads`."""
    steps = c.steps
    need_x, need_routing, need_w1, need_w2 = needs
    drouting = None
    T, K = kept.scores.shape
    w1, w2 = _rows_last(w1), _rows_last(w2)
    meta, scores_R = steps.restore(kept.row_idx, kept.offsets, kept.scores)
    x, do = _rows(x), _rows(do)
    dx, ds, dw1, dw2 = _expert_grads(
        do, x, w1, w2, held, scores_R, meta, c, (need_x, need_w1, need_w2),
        lambda dxt: _summed(dxt, c, meta, None, K, x.dtype), extras,
    )  # fmt: skip
    if router_w is None:
        drouting = steps.d_scores(ds, kept.row_idx).view(T, K) if need_routing else None
    elif need_routing or need_x:
        E, dtype = router_w.shape[0], router_w.dtype
        dlogits = steps.router_topk_backward(ds, kept.row_idx, kept.scores, kept.ids, E, dtype)
        if need_x:
            dx = dx.addmm_(dlogits, router_w) if dtype == dx.dtype else dx + (dlogits @ router_w).to(dx.dtype)
        drouting = dlogits.T @ x.to(dtype) if need_routing else None
    return [dx, drouting, dw1, dw2]


def _input_grads(ctx, saved: list[Tensor | None], run: Callable) -> tuple[Tensor | None, ...]:  # noqa: ANN001
    """Gradients in the order of the forward's inputs, of which run(needs, x, router_w, w1, w2, held, *kept) gives four.
    `saved` is emptied."""
    x, router_w, w1, w2, *kept = saved
    saved.clear()
    held = [kept.pop(0)]
    routed = router_w is not None
    needs = [ctx.needs_input_grad[i] for i in (0, 1 if routed else 3, 4, 5)]
    dx, drouting, dw1, dw2 = run(needs, x, router_w, w1, w2, held, *kept)
    drouter, dscores = (drouting, None) if routed else (None, drouting)
    return dx, drouter, None, dscores, dw1, dw2, None, None, None


class _Layer(torch.autograd.Function):
    """The layer in eager mode: an operator of `torch.library` would add a third to the host's time."""

    @staticmethod
    def forward(ctx, x, router_w, ids, scores, w1, w2, K, c, keep) -> Tensor:  # noqa: ANN001
        o, h, kept, extras = _forward(x, router_w, ids, scores, w1, w2, K, c, keep)
        if keep:
            ctx.save_for_backward(x, router_w, w1, w2, h, *kept, *(() if c.keeps_h_alone else extras))
            ctx.choices = c
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):  # noqa: ANN001, ANN205
        def run(needs, x, router_w, w1, w2, held, *kept) -> list[Tensor | None]:  # noqa: ANN001, ANN002
            kept, extras = Kept(*kept[: len(Kept._fields)]), Extras(*kept[len(Kept._fields) :])
            return _backward(do, x, router_w, w1, w2, held, kept, ctx.choices, needs, extras)

        return _input_grads(ctx, _taken(ctx), run)


def _taken(ctx) -> list[Tensor | None]:  # noqa: ANN001
    """The saved tensors, which the graph gives up at once, not when the backward ends, unless it is to be kept."""
    saved = list(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return saved


def _device_of(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it that of x. Autograd does so for an eager backward."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


@torch.library.custom_op("sonic::forward", mutates_args=())
def _forward_op(
    x: Tensor, router_w: Tensor | None, ids: Tensor | None, scores: Tensor | None, w1: Tensor, w2: Tensor,
    K: int, choices: str, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """O and what is kept; scores are empty where they were an input, which an operator must not return."""
    with _device_of(x):
        o, h, kept, _ = _forward(x, router_w, ids, scores, w1, w2, K, Choices.decode(choices), keep)
    return o, h, *(kept if router_w is not None else kept._replace(scores=scores.new_empty(0)))


@_forward_op.register_fake
def _(x, router_w, ids, scores, w1, w2, K, choices, keep):  # noqa: ANN001, ANN202
    R = x.shape[0] * K
    index = lambda size: x.new_empty(size, dtype=torch.int32)  # noqa: E731
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    routed = (x.shape[0], K) if router_w is not None else (0,)
    h = x.new_empty(R, w1.shape[1]) if keep else x.new_empty(0)
    return x.new_empty(x.shape), h, index(routed), x.new_empty(routed, dtype=wide), index(R), index(w1.shape[0] + 1)


@torch.library.custom_op("sonic::backward", mutates_args=())
def _backward_op(
    do: Tensor, x: Tensor, router_w: Tensor | None, w1: Tensor, w2: Tensor, h: Tensor, ids: Tensor, scores: Tensor,
    row_idx: Tensor, offsets: Tensor, choices: str, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `_backward`; an empty tensor stands for a gradient that nobody needs."""
    kept = Kept(ids, scores, row_idx, offsets)
    with _device_of(x):
        grads = _backward(do, x, router_w, w1, w2, [h], kept, Choices.decode(choices), needs)
    return tuple(g if g is not None else x.new_empty(0) for g in grads)


@_backward_op.register_fake
def _(do, x, router_w, w1, w2, h, ids, scores, row_idx, offsets, choices, needs):  # noqa: ANN001, ANN202
    likes = (x, scores if router_w is None else router_w, w1, w2)
    return tuple(t.new_empty(t.shape) if need else x.new_empty(0) for need, t in zip(needs, likes, strict=True))


def _keep_for_op(ctx, inputs, output) -> None:  # noqa: ANN001
    x, router_w, ids, scores, w1, w2, _K, ctx.choices, keep = inputs
    _o, h, *kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(h, *kept)
    if keep:
        kept = Kept(*kept) if router_w is not None else Kept(*kept)._replace(scores=scores)
        ctx.save_for_backward(x, router_w, w1, w2, h, *kept)


def _op_gradient(ctx, do, *_kept):  # noqa: ANN001, ANN002, ANN202
    def run(needs, x, router_w, w1, w2, held, *kept) -> list[Tensor | None]:  # noqa: ANN001, ANN002
        grads = _backward_op(do, x, router_w, w1, w2, held.pop(), *kept, ctx.choices, needs)
        return [g if need else None for g, need in zip(grads, needs, strict=True)]

    return _input_grads(ctx, list(ctx.saved_tensors), run)


_forward_op.register_autograd(_op_gradient, setup_context=_keep_for_op)


def _run(
    x: Tensor, router_w: Tensor | None, ids: Tensor | None, scores: Tensor | None, w1: Tensor, w2: Tensor, K: int,
    c: Choices,
) -> Tensor:  # fmt: skip
    """The operator under `torch.compile`, the autograd function otherwise."""
    inputs = (x, router_w, scores, w1, w2)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if torch.compiler.is_compiling():
        if not c.keeps_h_alone:
            raise ValueError(f"ds is {c.ds!r} and cache {c.cache!r}; torch.compile runs 'from_da' and 'h' alone")
        return _forward_op(x, router_w, ids, scores, w1, w2, K, c.encoded, keep)[0]
    with _device_of(x):
        return _Layer.apply(x, router_w, ids, scores, w1, w2, K, c, keep)


def _check(x: Tensor, w1: Tensor, w2: Tensor, K: int, **routing: Tensor) -> None:
    """Raise ValueError naming the tensor, its shape or dtype and what was expected."""
    for name, tensor, axes in (("x", x, 2), ("w1", w1, 3), ("w2", w2, 3)):
        if tensor.dim() != axes:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have {axes} axes")
    if x.dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    T, d = x.shape
    E, n2 = w1.shape[:2]
    if n2 % 2:
        raise ValueError(f"w1 has {n2} rows per expert; gate and up need an even number")
    if not 1 <= K <= min(E, MAX_K) or E > MAX_E:
        raise ValueError(f"K is {K} and E is {E}; K must lie in 1..min(E, {MAX_K}) and E in 1..{MAX_E}")
    expected = {"w1": (E, n2, d), "w2": (E, d, n2 // 2), "ids": (T, K), "scores": (T, K), "router_w": (E, d)}
    for name, tensor in {"w1": w1, "w2": w2, **routing}.items():
        if tuple(tensor.shape) != expected[name]:
            sizes = f"x {(T, d)} and w1 {tuple(w1.shape)}"
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with {sizes} it must be {expected[name]}")
    for name, tensor in (("w1", w1), ("w2", w2)):
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and x is {x.dtype}; they must agree")
    for name, tensor in {"w1": w1, "w2": w2, **routing}.items():
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and x on {x.device}; they must be on one device")


def _choose(family: Family, w1_layout: W1Layout, choices: Choices | None, x: Tensor, w2: Tensor) -> Choices:
    """The choices asked for, or the plain ones of a family and layout that can run on x."""
    _, d, n = w2.shape
    if choices is not None:
        resolve_family(choices.family, x.device, x.dtype, d, n)
        return choices
    at = (resolve_family(family, x.device, x.dtype, d, n), w1_layout)
    if at not in _PLAIN:
        raise ValueError(f"w1_layout is {w1_layout!r}; allowed: concat, interleaved")
    return _PLAIN[at]


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
    w1 (E, 2n, d), gate rows then up rows (`w1_layout="concat"`) or alternating ("interleaved"); w2 (E, d, n). Any
    strides; weights without a contiguous last axis are copied in every pass. `choices` picks kernels and wins over
    family and layout. Raises ValueError for shapes, dtypes or a family that do not fit. Ids are not looked at, which
    would wait for the device. Paper Algorithms 2 and 3.
    """
    if ids.dim() != 2:
        raise ValueError(f"ids has shape {tuple(ids.shape)}; it must be (T, K)")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids is {ids.dtype}; it must be int32 or int64")
    K = ids.shape[1]
    _check(x, w1, w2, K, ids=ids, scores=scores)
    c = _choose(family, w1_layout, choices, x, w2)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return _run(x, None, ids.int().contiguous(), scores.to(wide).contiguous(), w1, w2, K, c)


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
    """The whole layer: softmax over the K largest of the logits x router_w^T, K of E experts, and their weighted sum.

    x (..., d); router_w (E, d), in the dtype of x or in fp32; w1, w2, layout, family and choices as in `experts`.
    Ties go to the lower expert. Returns the shape of x. Paper section 2 and Algorithm 2.
    """
    if x.dim() == 0:
        raise ValueError("x has shape (); it must have at least 1 axis, the last of width d")
    flat = x.reshape(-1, x.shape[-1])
    _check(flat, w1, w2, K, router_w=router_w)
    if router_w.dtype not in (x.dtype, torch.float64 if x.dtype == torch.float64 else torch.float32):
        raise ValueError(f"router_w is {router_w.dtype} and x is {x.dtype}; it must be the dtype of x or fp32")
    c = _choose(family, w1_layout, choices, x, w2)
    return _run(flat, router_w, None, None, w1, w2, K, c).view(x.shape)


class MoE(nn.Module):
    """A Mixture-of-Experts layer with SwiGLU experts and a softmax-over-top-K router.

    d width, n expert intermediate size, E experts, K experts per token. Parameters: router (E, d), w1 (E, 2n, d), w2
    (E, d, n). Raises ValueError for sizes that no layer can have.
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


@_without_autocast
def _forward_plan(
    x: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, plan: Plan, c: Choices, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """O (T, d), and H if it is to be kept."""
    w1, w2 = _rows_last(w1), _rows_last(w2)
    h, a, _ = _up(_rows(x), w1, plan.meta, c, keep)
    y = c.steps.down_proj(a, w2, plan.meta, **c.tile("down_proj"))
    del a  # not needed beside O
    return _token_sums(c).sum_rows(y, plan, scores), h if keep else None


@_without_autocast
def _backward_plan(
    do: Tensor, x: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, held: list[Tensor], plan: Plan, c: Choices,
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """dX, dS in slot order, dW1, dW2; None for one that nobody needs. `held` as in `_expert_grads`."""
    sums = _token_sums(c)
    need_x, need_scores, need_w1, need_w2 = needs
    w1, w2 = _rows_last(w1), _rows_last(w2)
    x, do = _rows(x), _rows(do)
    scores_R = scores.index_select(0, plan.meta.slot_idx_R)
    dx, ds, dw1, dw2 = _expert_grads(
        do, x, w1, w2, held, scores_R, plan.meta, c, (need_x, need_w1, need_w2),
        lambda dxt: sums.sum_rows(dxt, plan, None),
    )  # fmt: skip
    return [dx, sums.sum_parts(ds, plan) if need_scores else None, dw1, dw2]


class _Planned(torch.autograd.Function):
    """The experts for a plan in which tokens have any number of them: the same steps, other sums over tokens."""

    @staticmethod
    def forward(ctx, x, scores, w1, w2, plan, c, keep) -> Tensor:  # noqa: ANN001
        o, h = _forward_plan(x, scores, w1, w2, plan, c, keep)
        if keep:
            ctx.save_for_backward(x, scores, w1, w2, h)
            # not the scores, which may lead back to a graph
            ctx.plan, ctx.choices = replace(plan, scores_R=scores.new_empty(0)), c
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):  # noqa: ANN001, ANN205
        saved = _taken(ctx)
        held = [saved.pop()]
        grads = _backward_plan(do, *saved, held, ctx.plan, ctx.choices, ctx.needs_input_grad[:4])
        return *grads, None, None, None


class _TokenSums(NamedTuple):
    sum_rows: Callable
    sum_parts: Callable


def _token_sums(c: Choices) -> _TokenSums:
    """What adds up a token's rows and the partial sums of dS in a family."""
    if c.family == "torch":
        return _TokenSums(_plan.sum_rows_torch, _plan.sum_parts_torch)
    return _TokenSums(_plan.sum_rows, _plan.sum_parts)


@torch.compiler.disable
def experts_plan(
    x: Tensor,
    plan: Plan | TopK,
    w1: Tensor,
    w2: Tensor,
    *,
    w1_layout: W1Layout = "concat",
    family: Family = "auto",
    choices: Choices | None = None,
) -> Tensor:
    """O (T, d) of the experts for what a router of `sonic.routing` chose: any number of experts per token.

    x, w1, w2 and the options as in `experts`; gradients reach the router through the plan's scores. A token without
    experts gets O = 0. Only aggregate="gather_sum"; not traced by `torch.compile`. The torch family waits for the
    device.
    """
    if isinstance(plan, TopK):
        return experts(x, plan.ids_TK, plan.scores_TK, w1, w2, w1_layout=w1_layout, family=family, choices=choices)
    _check(x, w1, w2, 1)
    T, E = plan.meta.T, plan.meta.offsets_E1.numel() - 1
    if (T, E) != (x.shape[0], w1.shape[0]):
        raise ValueError(f"the plan is for T = {T} and E = {E}; x has {x.shape[0]} tokens and w1 {w1.shape[0]} experts")
    if plan.scores_R.device != x.device:
        raise ValueError(f"the plan is on {plan.scores_R.device} and x on {x.device}; they must be on one device")
    c = _choose(family, w1_layout, choices, x, w2)
    if c.into != "rows":
        raise ValueError(f"aggregate is {c.aggregate!r}; a plan has a varying number of rows per token: gather_sum")
    if not c.keeps_h_alone:
        raise ValueError(f"ds is {c.ds!r} and cache {c.cache!r}; a plan runs with 'from_da' and 'h' alone")
    if c.family == "torch":
        plan = plan.exact()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    scores = plan.scores_R.to(wide).contiguous()
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, scores, w1, w2))
    with _device_of(x):
        return _Planned.apply(x, scores, w1, w2, plan, c, keep)
