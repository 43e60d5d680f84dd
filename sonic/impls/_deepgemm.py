"""DeepGEMM's grouped bf16 GEMMs as a layer, in the two forms of the paper: `deepgemm_pt` and `deepgemm_pp`.

DeepGEMM (MIT, https://github.com/deepseek-ai/DeepGEMM), read at 9b680f4, the commit behind the paper's H100 numbers,
and as PyPI's sgl-deep-gemm 0.1.4 (Apache-2.0, SGLang's fork, built for torch 2.11 and CUDA 13), which has the same two
calls. Kernels are compiled at run time, by nvcc or NVRTC, per (d, n) and kind: six for a training step.

The rows of every expert are gathered into memory and padded to blocks of 128, which is all that it multiplies; their
number goes to the host once per forward. H = Xe W1^T and Y = A W2^T, dA' = dOe W2 and dXt = dH W1 by
`m_grouped_bf16_gemm_{nt,nn}_contiguous`; dW1 = dH^T Xe and dW2 = A'^T dOe by `k_grouped_bf16_gemm_tn_contiguous`,
which adds to fp32 (zeroed here in every step, then rounded to bf16). SwiGLU is a kernel of its own, and so is dSwiGLU
+ dS + A', both ours, as in the paper. Kept for the backward: Xe and H, with their padding, scores and indices. Weights
are read where they lie.
"""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from sonic import layer
from sonic.impls import _kernels, _padded
from sonic.impls._common import (
    HOPPER,
    KernelPackage,
    Properties,
    cuda_refusal,
    element_refusal,
    missing,
    source_hash,
    version_of,
)
from sonic.impls._kernels import GEMMS, Alone
from sonic.impls._padded import Padded, pad
from sonic.kernels.metadata import Metadata
from sonic.problem import Problem
from sonic.record import Point

#: K of a GEMM, for the m-grouped call; H and dH have 2n columns.
ALIGNMENT = 64
BLOCK = 128
DISTRIBUTIONS = ("deep_gemm", "sgl-deep-gemm")


class DeepGemm(KernelPackage):
    """Base of both forms; `steps` are the kernels around the GEMMs, `routing` and `combine` what differs."""

    properties = Properties(
        gather_fused_forward=False,
        gather_fused_backward=False,
        activation_fused=None,
        d_activation_fused=None,
        ds_from_da=None,
        d_act_whole=None,
        io_overlapped=False,
        no_scatter_kernel=None,
        efficient_topk=None,
        no_padding=False,
        kept=("Xe", "H"),
        padding=BLOCK,
    )

    @classmethod
    def available(cls) -> str | None:
        name = cls.__module__.rpartition(".")[2]
        how = "pip install apache-tvm-ffi==0.1.11 sgl-deep-gemm==0.1.4 for torch 2.11 with CUDA 13; docs/baselines.md"
        return missing({"deep_gemm": "deep-gemm"}, name, how)

    @classmethod
    def version(cls) -> str:
        """Of the package, and of our kernels around its GEMMs."""
        from sonic.impls import sonic as ours

        own = source_hash((__file__, _kernels.__file__, _padded.__file__, sys.modules[cls.__module__].__file__))
        return f"{_package_version()}+{ours.Impl.version()}+{own}"

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        if refusal := cuda_refusal(point, device):
            return refusal
        capability = torch.cuda.get_device_capability(device)
        if capability[0] != HOPPER:
            return f"compute capability is {capability[0]}.{capability[1]}; its calls here are for {HOPPER}.0"
        shape = point.shape
        for name in ("d", "n"):
            if getattr(shape, name) % ALIGNMENT:
                return f"shape.{name} is {getattr(shape, name)}; its GEMMs need multiples of {ALIGNMENT}"
        rows = shape.T * shape.K + shape.E * (BLOCK - 1)
        return element_refusal(2**31 - 1, rows=rows)

    def __init__(self, problem: Problem, point: Point) -> None:
        import deep_gemm

        super().__init__(problem, point)
        self.gemms = deep_gemm
        family = layer.resolve_family("auto", problem.device, problem.dtype, problem.shape.d, problem.shape.n)
        self.steps = layer.FAMILIES["torch" if family == "torch" else "triton"]
        self.note = f"rows padded to {BLOCK} per expert; weight gradients added to zeroed fp32, then rounded"

    def metadata(self, ids_TK: torch.Tensor) -> Metadata:
        """Rows in expert order, without padding."""
        raise NotImplementedError

    def gather(self, x_Td: torch.Tensor, token_P: torch.Tensor) -> torch.Tensor:
        """Rows of x in expert order."""
        raise NotImplementedError

    def combine(self, y_Pd: torch.Tensor, rows: Padded, scores_TK: torch.Tensor | None, K: int) -> torch.Tensor:
        """(T, d): the sum over the rows of every token, weighted if there are scores."""
        raise NotImplementedError

    def experts(self, scores_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        return _Experts.apply(self.x_Td, scores_TK, self.w1_E2nd, self.w2_Edn, ids_TK.int(), self)


class StepAlone(Alone):
    """One grouped GEMM on rows padded to blocks, and our gather kernel; padding repeats token 0 or is zero.

    Weight gradients are added to fp32 that is not zeroed between calls, nor rounded: the GEMM alone, as in the paper.
    """

    OPS = GEMMS

    def prepare(self) -> None:
        import deep_gemm

        p, shape = self.problem, self.shape
        self.gemms = deep_gemm
        family = layer.resolve_family("auto", p.device, p.dtype, shape.d, shape.n)
        self.steps = layer.FAMILIES["torch" if family == "torch" else "triton"]
        self.rows = pad(self.meta, shape.K, BLOCK)
        self.place_R = self.rows.row_idx_R.long()[self.meta.slot_idx_R.long()]
        self.sizes_E = torch.tensor(self.rows.sizes, dtype=torch.int32, device=p.device)
        self.dw = None

    def gather(self, t_Td: torch.Tensor) -> torch.Tensor:
        return self.steps.gather_rows(t_Td, self.rows.meta.gather_idx_R)

    def arranged(self, rows: torch.Tensor) -> torch.Tensor:
        padded = rows.new_zeros(self.rows.meta.R, rows.shape[1])
        padded[self.place_R] = rows
        return padded

    def plain(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.place_R]

    def multiply(self, rows: torch.Tensor, w_Eab: torch.Tensor) -> torch.Tensor:
        transposed = not w_Eab.is_contiguous()
        return _multiply(self.gemms, self.rows, rows, w_Eab.mT if transposed else w_Eab, transposed)

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.dw is None:
            self.dw = torch.zeros(self.shape.E, a.shape[1], b.shape[1], dtype=torch.float32, device=a.device)
        self.gemms.k_grouped_bf16_gemm_tn_contiguous(a, b, self.dw, self.rows.sizes, self.sizes_E, self.dw)
        return self.dw

    def check(self) -> dict[str, float]:
        if self.dw is not None:
            self.dw.zero_()
        return super().check()


def _package_version() -> str:
    """Of the distribution that brought `deep_gemm`; one unpacked by hand is told by its sources."""
    for name in DISTRIBUTIONS:
        try:
            return f"{name}-{importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return version_of("deep_gemm")


def _multiply(gemms: ModuleType, rows: Padded, x: torch.Tensor, w: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Rows (P, a) times the weights (E, b, a) of their expert, or (E, a, b) when not transposed."""
    out = x.new_empty(len(x), w.shape[1 if transposed else 2])
    call = gemms.m_grouped_bf16_gemm_nt_contiguous if transposed else gemms.m_grouped_bf16_gemm_nn_contiguous
    call(x, w, out, rows.expert_P)
    return out


def _weight_grad(gemms: ModuleType, rows: Padded, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a^T b of every expert, (E, columns of a, columns of b), in the dtype of a."""
    sizes = torch.tensor(rows.sizes, dtype=torch.int32).to(a.device, non_blocking=True)
    out = torch.zeros(len(rows.sizes), a.shape[1], b.shape[1], dtype=torch.float32, device=a.device)
    gemms.k_grouped_bf16_gemm_tn_contiguous(a, b, out, rows.sizes, sizes, out)
    return out.to(a.dtype)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scores: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        ids: torch.Tensor,
        impl: DeepGemm,
    ) -> torch.Tensor:
        K = ids.shape[1]
        rows = pad(impl.metadata(ids), K, BLOCK)
        xe = impl.gather(x, rows.meta.gather_idx_R)
        h = _multiply(impl.gemms, rows, xe, w1, True)
        y = _multiply(impl.gemms, rows, impl.steps.swiglu(h), w2, True)
        ctx.save_for_backward(xe, h, scores, w1, w2, rows.row_idx_R, rows.expert_P, rows.slot_P, rows.meta.gather_idx_R)
        ctx.sizes, ctx.impl = rows.sizes, impl
        return impl.combine(y, rows, scores, K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        xe, h, scores, w1, w2, row_idx, expert, slot, token = ctx.saved_tensors
        impl, gemms = ctx.impl, ctx.impl.gemms
        rows = Padded(Metadata(expert, slot, token, row_idx, len(token)), expert, slot, row_idx, ctx.sizes)
        doe = impl.gather(do, token)
        da = _multiply(gemms, rows, doe, w2, False)
        dh, ap, ds = impl.steps.d_swiglu(da, h, rows.scores(scores))
        dw2 = _weight_grad(gemms, rows, doe, ap)
        dxt = _multiply(gemms, rows, dh, w1, False)
        dw1 = _weight_grad(gemms, rows, dh, xe)
        dx = impl.combine(dxt, rows, None, scores.shape[1])
        return dx, rows.unpadded(ds[0]).view(scores.shape), dw1, dw2, None, None
