"""The standard layer of PyTorch: permute, GEMM, SwiGLU, GEMM, unpermute, with X, gathered X, H, A and Y kept (the
formula of the paper) and dS = <dO, Y>. No row is padded, since our GEMMs take any number.

Not reproduced: that the unpermuted Y is stored before the sum.
"""

from __future__ import annotations

from sonic.impls._style import Strategy, Styled


class Impl(Styled):
    strategy = Strategy(gather_fused=False, activation_fused=False, scatter_fused=False, kept=("Xe", "H", "A", "Y"))
    properties = strategy.properties()
