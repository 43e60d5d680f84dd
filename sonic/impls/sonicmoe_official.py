"""SonicMoE as its authors publish it (`sonic-moe` on PyPI, Apache-2.0, https://github.com/Dao-AILab/sonic-moe), read
at 0.1.2.post1 with quack-kernels 0.3.11 (Apache-2.0).

QuACK's CuTe-DSL GEMMs with the gather and SwiGLU fused, Triton kernels for the metadata and for the sum over a token's
rows, and a top-K kernel of its own. `layer` is `moe_TC_softmax_topk_layer` with its router, `experts` is
`moe_general_routing_inputs`, which takes (token, expert, score) triples sorted by token; the tokens are known from T
and K alone and are listed once; `router_topk` is that router's kernel. None waits for the device. Kept for the
backward: X, H, scores, indices. Weights lie as here: `concat_layout=True` reads the n gate rows and the n up rows of
(E, 2n, d) where they are, through views.

The wheel asks for Python 3.12 and torch <= 2.9.1; it works on newer torch when that pin is passed over (`pip install
--no-deps`). It needs nvidia-cutlass-dsl 4.4.2 (NVIDIA's licence), apache-tvm-ffi and cuda-bindings. Limits: compute
capability 9.0 or newer, bf16 and fp16, n and d multiples of 8, at least one token, and fewer than 2**32 elements of Y.

QuACK tunes each of six GEMMs anew for every shape, over 9 to 22 configurations on Hopper that compile for some 3 s
each. `measure.tune=full` does so; `cached` cuts the tuner to four configurations on Hopper (the last is not in its own
list), `off` takes the one that QuACK runs untuned. The note says which. The Triton kernels keep their own tuners.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import torch

from sonic.impls._common import (
    HOPPER,
    Properties,
    cuda_refusal,
    element_refusal,
    hopper_refusal,
    leaf,
    own_configs,
    set_configs,
)
from sonic.impls._kernels import StepsAlone, TopKAlone
from sonic.kernels import tuning
from sonic.problem import Problem
from sonic.record import Point
from sonic.routers import RAGGED

PACKAGES = {"sonicmoe": "sonic-moe", "quack": "quack-kernels", "cutlass": "nvidia-cutlass-dsl"}
#: The tuners behind the six GEMMs: H and A; Y, dX, dW1 and dW2; dH and dS.
TUNERS = ("gemm_gated_tuned", "gemm_tuned", "gemm_dgated_tuned")
#: m and n of a tile, pingpong (else cooperative), m and n of the cluster.
CUT = ((128, 256, False, 2, 1), (128, 192, True, 2, 1), (128, 128, True, 2, 1), (128, 256, False, 1, 1))
#: 16 bytes, what TMA and its copies move.
ALIGNMENT = 8
#: An argument that the package asks for and never reads.
STREAM = 0
_TOPK_LIMITS = "its own top-K needs E a multiple of 8 up to 4096 and K up to 16"


class _TopK(TopKAlone):
    def topk(self) -> tuple[torch.Tensor, torch.Tensor]:
        from sonicmoe.functional import _topk_softmax_fwd

        T, E, K = self.problem.shape.T, self.problem.shape.E, self.K
        scores_TK = torch.empty(T, K, dtype=torch.float32, device=self.logits_TE.device)
        ids_TK = torch.empty_like(scores_TK, dtype=torch.int32)
        _topk_softmax_fwd(self.logits_TE, scores_TK, ids_TK, E, K, is_softmax_over_topk=True, norm_topk_probs=False)
        return scores_TK, ids_TK


class Impl(StepsAlone):
    KNOBS = frozenset()
    ALONE = _TopK
    OPS = frozenset({"layer", "experts", *_TopK.OPS})
    RAGGED = True
    properties = Properties(
        gather_fused_forward=True,
        gather_fused_backward=True,
        activation_fused=True,
        d_activation_fused=True,
        ds_from_da=True,
        d_act_whole=True,
        io_overlapped=True,
        no_scatter_kernel=True,
        efficient_topk=True,
        no_padding=True,
        kept=("H",),
    )

    @staticmethod
    def available() -> str | None:
        for module, package in PACKAGES.items():
            if importlib.util.find_spec(module) is None:
                return (
                    f"sonicmoe_official needs the package {package!r}, which is not installed "
                    "(pip install --no-deps; Python 3.12)"
                )
        return None

    @staticmethod
    def version() -> str:
        """Of the package and of QuACK, which holds its GEMMs."""
        return "+".join(
            f"{name}-{importlib.metadata.version(package)}"
            for name, package in PACKAGES.items()
            if name in ("sonicmoe", "quack")
        )

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        alone = point.op in _TopK.OPS
        dtypes = ("bf16", "fp16", "fp32") if alone else ("bf16", "fp16")
        if refusal := cuda_refusal(point, device, dtypes) or hopper_refusal(point, device, ALIGNMENT):
            return refusal
        if alone and not _own_topk(point.shape.E, point.shape.K):
            return f"shape.E is {point.shape.E} and shape.K is {point.shape.K}; {_TOPK_LIMITS}"
        # of its sum over a token's rows
        return element_refusal(2**32 - 1, T_K_d=point.shape.T * point.shape.K * point.shape.d)

    def __init__(self, problem: Problem, point: Point) -> None:
        import sonicmoe
        from sonicmoe.enums import ActivationType

        super().__init__(problem, point)
        if self._alone is not None:
            return
        self.package, self.swiglu = sonicmoe, ActivationType.SWIGLU
        notes = [_restrict_tuners(tuning.mode(), problem.device), "concat_layout=True"]
        T, E, K = problem.shape.T, problem.shape.E, problem.shape.K
        if self.layer and not _own_topk(E, K):
            notes.append(f"torch's top-K and softmax, since {_TOPK_LIMITS}")
        self.note = "; ".join(notes)
        self.pairs = None
        if point.routing.method in RAGGED:
            self.pairs = problem.pairs()
            self.scores_R, self.ids_R, self.token_R = leaf(self.pairs.scores_R), self.pairs.ids_R, self.pairs.token_R
            return
        self.ids_R = problem.ids_TK.flatten()
        self.token_R = torch.arange(T, dtype=torch.int32, device=problem.device).repeat_interleave(K, output_size=T * K)

    def forward(self) -> torch.Tensor:
        if self._alone is not None:
            return super().forward()
        weights = self.w1_E2nd.permute(1, 2, 0), None, self.w2_Edn.permute(1, 2, 0), None
        options = {
            "activation_type": self.swiglu,
            "is_inference_mode_enabled": not torch.is_grad_enabled(),
            "concat_layout": True,
        }
        if self.layer:
            layer = self.package.moe_TC_softmax_topk_layer
            return layer(self.x_Td, self.router_w_Ed, *weights, self.K, STREAM, **options)[0]
        experts = self.package.moe_general_routing_inputs
        scores_R = self.scores_TK.flatten() if self.pairs is None else self.scores_R
        routing = scores_R, self.token_R, self.ids_R
        return experts(self.x_Td, *routing, *weights, self.problem.shape.E, STREAM, **options)[0]

    def grads(self) -> dict[str, torch.Tensor]:
        found = super().grads()
        if self.pairs is not None and self.scores_R.grad is not None:
            there = self.ids_TK >= 0
            found["ds_TK"] = self.scores_R.grad.new_zeros(there.shape).masked_scatter(there, self.scores_R.grad)
        return found

    def zero_grad(self) -> None:
        super().zero_grad()
        if self.pairs is not None:
            self.scores_R.grad = None


def _own_topk(E: int, K: int) -> bool:
    """Whether the package runs a top-K kernel of its own."""
    return E <= 4096 and E % 8 == 0 and K <= 16


def _restrict_tuners(tune: str, device: torch.device) -> str:
    """Gives QuACK's tuners the configurations of `tune` (`cached`, `full`, `off`); what a row's note says of it.

    Their lists are made when QuACK is imported, and read at each first call of a shape; QuACK's file of earlier choices
    is keyed by the list, its memory of this process is not and is dropped when the list changes.
    """
    from quack import gemm_interface
    from quack.autotuner import AutotuneConfig
    from quack.gemm_config import GemmConfig

    only, note = None, "tuner over all configs"
    if tune == "off":
        only, note = [gemm_interface.default_config(device)], "tuner off, QuACK's default config"
    elif tune == "cached" and torch.cuda.get_device_capability(device)[0] == HOPPER:
        only = [GemmConfig(m, n, pingpong, False, *cluster) for m, n, pingpong, *cluster in CUT]
        note = f"tuner cut to {len(CUT)} configs"
        # Processes that compile beforehand take as long to start as so few configurations to compile.
        os.environ.setdefault("QUACK_COMPILE_WORKERS", "1")
    for name in TUNERS:
        tuner = getattr(gemm_interface, name)
        set_configs(tuner, own_configs(tuner) if only is None else [AutotuneConfig(config=config) for config in only])
    return note
