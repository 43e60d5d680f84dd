"""The GEMM steps of the layer for sm_90a, warp-specialised in Gluon; signatures as in the portable family.

They run bf16 and fp16 with n and d multiples of 8 (TMA and 16-byte copies need it). Operands at addresses or strides
that TMA cannot take, and results that go elsewhere than to rows, are the portable family's. The other steps are shared.
"""

from __future__ import annotations

import torch
import triton

from sonic.kernels.common import INTERPRET
from sonic.kernels.hopper import d_act, grouped_gemm, up_proj, weight_grad

#: Minor versions of triton under which the kernels were compiled and run.
KNOWN_TRITON = ("3.6", "3.7")
DTYPES = (torch.bfloat16, torch.float16)
#: Steps of the layer that this family has of its own.
STEPS = {
    "up_proj": up_proj.up_proj,
    "down_proj": grouped_gemm.down_proj,
    "d_act": d_act.d_act,
    "d_act_gemm": grouped_gemm.d_act_gemm,
    "weight_grad_1": weight_grad.weight_grad_1,
    "weight_grad_2": weight_grad.weight_grad_2,
    "d_input": grouped_gemm.d_input,
}

#: What refuses a tile of each step.
CHECKS = {
    "up_proj": up_proj.check,
    "down_proj": grouped_gemm.check,
    "d_act": d_act.check,
    "d_act_gemm": grouped_gemm.check,
    "weight_grad_1": weight_grad.check,
    "weight_grad_2": weight_grad.check,
    "d_input": grouped_gemm.check,
}

__all__ = [
    "CHECKS",
    "DTYPES",
    "KNOWN_TRITON",
    "STEPS",
    "d_act",
    "grouped_gemm",
    "unknown",
    "unsuited",
    "up_proj",
    "weight_grad",
]


def unknown(device: torch.device) -> str | None:
    """Why the family does not know this card or this triton; None when it does."""
    if device.type != "cuda" or INTERPRET:
        return f"device is {device}; the hopper family needs a GPU, and has no interpreter"
    if ".".join(triton.__version__.split(".")[:2]) not in KNOWN_TRITON:
        return f"triton is {triton.__version__}; the hopper family knows {' and '.join(KNOWN_TRITON)}"
    if torch.version.hip is not None or (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        found = "an AMD GPU" if torch.version.hip is not None else "compute capability {}.{}".format(*capability)
        return f"device is {device} with {found}; the hopper family needs compute capability 9.0"
    return None


def unsuited(dtype: torch.dtype, d: int, n: int) -> str | None:
    """Why the family cannot run these sizes; None when it can."""
    if dtype not in DTYPES:
        return f"dtype is {dtype}; the hopper family runs bf16 and fp16"
    for name, size in (("d", d), ("n", n)):
        if size % 8:
            return f"{name} is {size}; the hopper family takes multiples of 8"
    return None
