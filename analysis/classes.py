"""What a kernel of a layer does, told from its name: the classes of the paper's runtime breakdown (Fig 6).

Names are those that CUPTI gives. A rule is a pattern and the classes of its first, second, ... match within a pass, the
last for all that follow: `_weight_grad_kernel` is dW2 first and dW1 then. An implementation's own rules come before
those that hold for all; what no rule knows is `other`, and figures say how much that is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Classes in the order of the paper's legend; `GEMM` is a product whose place nobody told.
FORWARD = ("router", "gather X", "up proj", "SwiGLU", "down proj", "scatter Y", "expert agg", "GEMM", "other")
BACKWARD = (
    "router", "gather dO", "gather X", "dH", "dS", "dSwiGLU", "dW2", "dXt", "dW1", "expert agg", "GEMM", "other",
)  # fmt: skip
#: Model FLOPs of a class over R n d.
FLOPS = {"up proj": 4, "down proj": 2, "dH": 2, "dW2": 2, "dXt": 4, "dW1": 4}

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
_TORCH_FWD: Rules = (
    ("prepare_grouped_gemm", ("other",)), ("GroupProblemShape|grouped_mm", ("up proj", "down proj")),
    ("index_select.*sum", ("expert agg",)),
    ("index_select|indexSelect", ("gather X",)),
)  # fmt: skip
_TORCH_BWD: Rules = (
    ("prepare_grouped_gemm", ("other",)), ("GroupProblemShape|grouped_mm", ("dH", "dW2", "dXt", "dW1")),
    ("expand_index_select_mul_sum", ("dS",)),
    ("expand_index_select", ("gather dO",)), ("index_select.*sum|sum.*index_select", ("expert agg",)),
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
         ("nvjet|gemv|gemm", ("dS", "router"))),
    ),
    "torch_grouped_mm": (_TORCH_FWD, _TORCH_BWD),
    "torch_grouped_mm_compiled": (_TORCH_FWD, _TORCH_BWD),
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
#: In our layer and the official one cuBLAS has only the router's products.
_ROUTER_BY_CUBLAS = frozenset({"sonic", "sonicmoe_official", "torch_grouped_mm", "torch_grouped_mm_compiled"})


@dataclass(frozen=True)
class Part:
    """A kernel, or several of one name summed up, of one pass."""

    name: str
    us: float
    kind: str


def rules_of(impl: str, backward: bool) -> Rules:
    """The rules of an implementation, its own first; a strategy twin runs our kernels."""
    own = _RULES.get("sonic" if impl.endswith("_style") else impl, ((), ()))[backward]
    cublas: Rules = (("nvjet|splitK", ("router",)),) if impl in _ROUTER_BY_CUBLAS else ()
    if backward and impl in _ROUTER_BY_CUBLAS | {"scattermoe"}:
        cublas += (("CUDAFunctor_add", ("router",)),)  # the router's part of dX
    return (*own, *cublas, *(_EVERY_BWD if backward else _EVERY_FWD))


def classify(impl: str, kernels: Iterable[Mapping[str, Any]], backward: bool) -> list[Part]:
    """The class of every kernel (`name`, `us`) of one pass, in launch order."""
    rules, seen = rules_of(impl, backward), {}
    parts = []
    for kernel in kernels:
        kind = "other"
        for pattern, kinds in rules:
            if re.search(pattern, kernel["name"]):
                nth = seen[pattern] = seen.get(pattern, -1) + 1
                kind = kinds[min(nth, len(kinds) - 1)]
                break
        parts.append(Part(kernel["name"], kernel["us"], kind))
    return parts


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
