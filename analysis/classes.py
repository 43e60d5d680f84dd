"""What a kernel of a layer does, told from its name: the classes of the paper's runtime breakdown (Fig 6).

Names are those that CUPTI gives. A rule is a pattern and the classes of its first, second, ... call within a pass, the
last for all that follow: `_weight_grad_kernel` is dW2 first and dW1 then. Calls that a row sums up under one name and
that belong to different classes are `GEMM` if all are products. An implementation's own rules come before those that
hold for all; what no rule knows is `other`, and figures say how much these are.

The rules of `sonic`, `sonicmoe_official`, `scattermoe` and `torch_grouped_mm_compiled` were made from rows of an H200,
those of the other packages from their sources and the order in which these launch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.traffic import Multiples

#: Classes in the order of the paper's legend; `GEMM` is products whose places nobody told.
FORWARD = ("router", "gather X", "up proj", "SwiGLU", "down proj", "scatter Y", "expert agg", "GEMM", "other")
BACKWARD = (
    "router", "gather dO", "gather X", "gather dO, X", "dH", "dS", "dSwiGLU", "dW2", "dXt", "dW1", "expert agg", "GEMM",
    "other",
)  # fmt: skip
#: Model FLOPs of a class over R n d.
FLOPS = {"up proj": 4, "down proj": 2, "dH": 2, "dW2": 2, "dXt": 4, "dW1": 4}
_ROWS = Multiples(wide=1, narrow=0, weights=0, tokens=1)
#: What a class moves by the paper's notes on bandwidth: rows of a (T, d) tensor gathered or summed, H and A through an
#: activation, operands and result of a product.
_BYTES = {
    "gather X": _ROWS, "gather dO": _ROWS, "dS": _ROWS, "expert agg": _ROWS, "gather dO, X": Multiples(2, 0, 0, 2),
    "SwiGLU": Multiples(0, 3, 0, 0), "dSwiGLU": Multiples(0, 6, 0, 0), "down proj": Multiples(1, 1, 1, 0),
}  # fmt: skip
#: dH with dSwiGLU, dS and A' in its epilogue, and the product alone.
_FUSED_DH, _PLAIN_DH = Multiples(1, 5, 1, 0), Multiples(1, 1, 1, 0)

Rules = tuple[tuple[str, tuple[str, ...]], ...]

_OURS_FWD: Rules = (
    ("_gather_rows", ("gather X",)), ("_up_proj_kernel", ("up proj",)), ("^_swiglu", ("SwiGLU",)),
    ("_grouped_gemm", ("down proj",)), ("_aggregate_kernel|_sum_rows", ("expert agg",)),
)  # fmt: skip
_OURS_BWD: Rules = (
    ("_gather_rows", ("gather dO", "gather X")), ("_d_act_kernel", ("dH",)), ("_d_swiglu", ("dSwiGLU",)),
    ("_scores_of_y|_d_scores|_sum_parts", ("dS",)), ("_weight_grad", ("dW2", "dW1")), ("_grouped_gemm", ("dXt",)),
    ("_aggregate_kernel|_sum_rows", ("expert agg",)),
)  # fmt: skip
#: PyTorch's kernels on bf16 rows: gathers and the gradients of gathers, products by elements, sums.
_TAKE = r"index_select|indexSelect|vectorized_gather|index_elementwise.*index_kernel_impl.*OpaqueType<2>"
_ADD_AT = "indexFunc|indexing_backward|index_put_kernel_impl.*OpaqueType<2>"
_TIMES = "BinaryFunctor<c10::BFloat16"
_SUM = r"reduce_kernel.*ReduceOp<c10::BFloat16.*sum_functor"
# The products of autograd's grouped_mm: the gradient of the weights before that of the rows.
_TORCH_FWD: Rules = (
    ("prepare_grouped_gemm", ("other",)), ("GroupProblemShape|grouped_mm", ("up proj", "down proj")),
    ("index_select.*sum", ("expert agg",)), (_TAKE, ("gather X", "scatter Y")),
    (_TIMES, ("SwiGLU", "expert agg")), (_SUM, ("expert agg",)),
)  # fmt: skip
_TORCH_BWD: Rules = (
    ("prepare_grouped_gemm", ("other",)), ("GroupProblemShape|grouped_mm", ("dW2", "dH", "dW1", "dXt")),
    ("expand_index_select_mul_sum", ("dS",)),
    ("expand_index_select", ("gather dO",)), ("index_select.*sum|sum.*index_select", ("expert agg",)),
    (_TAKE, ("gather dO", "expert agg")), (_ADD_AT, ("gather dO", "expert agg")), (_TIMES, ("dS", "dS", "dSwiGLU")),
    ("CatArray", ("dSwiGLU",)), (_SUM, ("dS", "expert agg")),
)  # fmt: skip
_MOMOE_FWD: Rules = (
    ("scatter_cols", ("router",)), ("lin1_kernel", ("up proj",)), ("lin2_kernel", ("down proj",)),
    (_SUM, ("expert agg",)),
)  # fmt: skip
# H and Y are computed again within the kernels of dH and dXt.
_MOMOE_BWD: Rules = (
    ("making_nice_scatter", ("gather dO, X",)), ("swiglu_backward_kernel", ("dH",)),
    ("weights_update", ("dW2", "dW1")), ("lin1_backward", ("dXt",)), (_SUM, ("expert agg",)),
)  # fmt: skip
_DEEPGEMM_FWD: Rules = (
    ("deep_gemm|sm90_bf16", ("up proj", "down proj")), *_OURS_FWD, (_TAKE, ("gather X", "scatter Y")),
    (f"{_TIMES}|{_SUM}", ("expert agg",)),
)  # fmt: skip
_DEEPGEMM_BWD: Rules = (
    ("deep_gemm|sm90_bf16", ("dH", "dW2", "dXt", "dW1")), *_OURS_BWD, (_TAKE, ("gather dO", "expert agg")),
    (_SUM, ("expert agg",)),
)  # fmt: skip
# cuBLAS expert by expert, where the ends of nvjet's names tell which operand is transposed. Both weight gradients have
# one name, and so has all of Megatron's that is not for rows.
_MEGABLOCKS_FWD: Rules = (
    ("_padded_copy", ("gather X", "scatter Y")), ("_TNN$", ("router", "up proj")), ("_NNN$", ("down proj",)),
    (_TIMES, ("SwiGLU",)), (_SUM, ("expert agg",)),
)  # fmt: skip
_MEGABLOCKS_BWD: Rules = (
    ("_padded_copy_wgrad", ("dS",)), ("_padded_copy", ("gather dO", "expert agg")), ("_TNN$", ("dH",)),
    ("_NNN$", ("dXt",)), ("CUDAFunctor_add<c10::BFloat16", ("dXt", "router")), (_TIMES, ("dSwiGLU",)),
    (_SUM, ("expert agg",)),
)  # fmt: skip
_MEGATRON_FWD: Rules = (
    ("_TNN$", ("router",)), ("_NNN$", ("GEMM",)), ("_scatter_gather_elementwise.*<true, c10::BFloat16", ("scatter Y",)),
    (_TAKE, ("gather X",)),
)  # fmt: skip
_MEGATRON_BWD: Rules = (
    ("_scatter_gather_elementwise.*OpaqueType<2>|vectorized_gather", ("gather dO",)), (_ADD_AT, ("expert agg",)),
)  # fmt: skip
#: Implementation -> rules of the forward and of the backward.
_RULES: Mapping[str, tuple[Rules, Rules]] = {
    "sonic": (_OURS_FWD, _OURS_BWD),
    "sonicmoe_official": (
        (("GemmGated", ("up proj",)), ("GemmDefault", ("down proj",)), ("token_gather_sum", ("expert agg",))),
        (("GemmDGated", ("dH",)), ("GemmDefault", ("dW2", "dXt", "dW1")), ("token_gather_sum", ("expert agg",))),
    ),
    "scattermoe": (
        (("_scatter2scatter", ("up proj", "down proj")), ("silu|BinaryFunctor", ("SwiGLU",)),
         ("nvjet|gemv|gemm", ("router", "expert agg"))),
        (("_scatter2scatter", ("dH", "dXt")), ("_groupXtY", ("dW2", "dW1")), ("_group$", ("gather dO", "gather X")),
         ("silu|CatArray|BinaryFunctor<c10", ("dSwiGLU",)), ("reduce_kernel.*sum_functor", ("expert agg",)),
         ("splitK", ("router",)), ("nvjet|gemv|gemm", ("dS", "router"))),
    ),
    "torch_grouped_mm": (_TORCH_FWD, _TORCH_BWD),
    "torch_grouped_mm_compiled": (_TORCH_FWD, _TORCH_BWD),
    "transformers": (
        ((_TAKE, ("gather X", "router", "scatter Y")), *_TORCH_FWD),
        ((_ADD_AT, ("gather dO", "router", "expert agg")), *_TORCH_BWD),
    ),
    "momoe": (_MOMOE_FWD, _MOMOE_BWD),
    "momoe_save_all": (_MOMOE_FWD, _MOMOE_BWD),
    "deepgemm_pt": (_DEEPGEMM_FWD, _DEEPGEMM_BWD),
    "deepgemm_pp": (_DEEPGEMM_FWD, _DEEPGEMM_BWD),
    "megablocks": (_MEGABLOCKS_FWD, _MEGABLOCKS_BWD),
    "megatron": (_MEGATRON_FWD, _MEGATRON_BWD),
    "liger": (
        (("_moe_router", ("router",)), ("_fused_up_proj", ("up proj",)), ("_fused_down_proj", ("down proj",)),
         ("_token_gather_weighted_sum", ("expert agg",))),
        (("_bwd_down_proj", ("dH",)), ("_bwd_dW2", ("dW2",)), ("_bwd_dX_expanded", ("dXt",)), ("_bwd_dW1", ("dW1",)),
         ("_token_gather_weighted_sum", ("expert agg",))),
    ),
    "moe_ops": (
        (("_group_offsets", ("router",)), ("_permute_countsort", ("gather X",)), ("_unpermute_kernel", ("expert agg",)),
         ("grouped_matmul_tma|gmm_forward", ("up proj", "down proj")), (_TIMES, ("SwiGLU",))),
        (("_unpermute_bwd", ("gather dO",)), ("grouped_matmul_tma|gmm_forward", ("dH", "dXt")),
         ("gmm_gradB", ("dW2", "dW1")), ("_unpermute_kernel", ("expert agg",)), (f"{_TIMES}|CatArray", ("dSwiGLU",))),
    ),
}  # fmt: skip
_ROUTER = (
    r"[Tt]op_?[Kk]|softmax|[Ss]ort|[Hh]istogram|bitmatrix|cumsum|_prefix_kernel|_scatter_kernel|_restore_kernel|tile_map"
    r"|col_partial_sum|searchsorted|arange|MinNan|MaxNan|_scatter_gather_elementwise|fill_reverse|index_elementwise"
)
_EVERY_FWD: Rules = (
    (_ROUTER, ("router",)), ("silu|[Ss]wi[Gg][Ll][Uu]", ("SwiGLU",)), ("unpermute|scatter", ("scatter Y",)),
    ("permute|gather|index_select|indexSelect", ("gather X",)),
    ("nvjet|gemm|Gemm|GEMM|cutlass|splitK", ("router", "GEMM")),
)  # fmt: skip
_EVERY_BWD: Rules = (
    (_ROUTER, ("router",)), ("silu|[Ss]wi[Gg][Ll][Uu]", ("dSwiGLU",)),
    ("permute|gather|index_select|indexSelect", ("gather dO", "gather X")),
    ("nvjet|gemm|Gemm|GEMM|cutlass|splitK", ("GEMM",)),
)  # fmt: skip
#: Where cuBLAS has only the router's products.
_ROUTER_BY_CUBLAS = frozenset({
    "sonic", "sonicmoe_official", "torch_grouped_mm", "torch_grouped_mm_compiled", "transformers", "momoe",
    "momoe_save_all", "deepgemm_pt", "deepgemm_pp", "liger", "moe_ops",
})  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A kernel, or several of one name summed up, of one pass."""

    name: str
    us: float
    kind: str


def moved(kind: str, kinds: Iterable[str]) -> Multiples | None:
    """What a class moves in a pass that has these classes; None where the paper gives no formula."""
    if kind == "dH":
        return _PLAIN_DH if "dSwiGLU" in kinds else _FUSED_DH
    return _BYTES.get(kind)


def rules_of(impl: str, backward: bool) -> Rules:
    """The rules of an implementation, its own first; a strategy twin runs our kernels."""
    own = _RULES.get("sonic" if impl.endswith("_style") else impl, ((), ()))[backward]
    cublas: Rules = (("nvjet|splitK", ("router",)),) if impl in _ROUTER_BY_CUBLAS else ()
    if backward and impl in _ROUTER_BY_CUBLAS | {"scattermoe"}:
        cublas += (("CUDAFunctor_add", ("router",)),)  # the router's part of dX
    return (*own, *cublas, *(_EVERY_BWD if backward else _EVERY_FWD))


def classify(impl: str, kernels: Iterable[Mapping[str, Any]], backward: bool) -> list[Part]:
    """The class of every kernel (`name`, `us`, `calls`) of one pass, in launch order."""
    rules, seen = rules_of(impl, backward), Counter()
    parts = []
    for kernel in kernels:
        kind = "other"
        for pattern, kinds in rules:
            if re.search(pattern, kernel["name"]):
                calls = range(seen[pattern], seen[pattern] + kernel["calls"])
                seen[pattern] += kernel["calls"]
                kind = _class_of(Counter(kinds[min(nth, len(kinds) - 1)] for nth in calls))
                break
        parts.append(Part(kernel["name"], kernel["us"], kind))
    return parts


def _class_of(calls: Counter[str]) -> str:
    """The class of calls that are one sum; where they differ and are not all products, that of most of them."""
    if set(calls) == {"gather dO", "gather X"}:
        return "gather dO, X"
    if len(calls) > 1 and set(calls) <= set(FLOPS):
        return "GEMM"
    return calls.most_common(1)[0][0]


def backward_of(both: Sequence[Mapping[str, Any]], forward: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Kernels of the backward: those of a row of both passes less those of the forward's row, by name and in order.

    Of a name that a row sums over several calls the forward's time is taken off.
    """
    calls: dict[str, int] = {}
    time: dict[str, float] = {}
    for kernel in forward:
        calls[kernel["name"]] = calls.get(kernel["name"], 0) + kernel["calls"]
        time[kernel["name"]] = time.get(kernel["name"], 0.0) + kernel["us"]
    left = []
    for kernel in both:
        name = kernel["name"]
        taken = min(calls.get(name, 0), kernel["calls"])
        if not taken:
            left.append(dict(kernel))
            continue
        calls[name] -= taken
        if kernel["calls"] > taken:
            left.append(dict(kernel) | {"us": max(0.0, kernel["us"] - time[name]), "calls": kernel["calls"] - taken})
    return left
