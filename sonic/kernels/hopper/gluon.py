"""Names of Gluon, those that moved between Triton 3.6 and later versions among them, in one place."""

from __future__ import annotations

import triton.language.core as _core
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

aggregate = getattr(_core, "_aggregate", None) or _core.aggregate
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

__all__ = [
    "TensorDescriptor",
    "aggregate",
    "async_copy",
    "copy_rows",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma",
    "tma_load",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
