"""The strategy of MegaBlocks: X is copied to expert order with every expert padded to blocks of 128 rows, GEMMs run
over the blocks, SwiGLU and its gradient are kernels of their own, A is computed again, rows come back by a gather.
Gathered X, H and Y are kept with their padding, and dS = <dO, Y>. The number of rows goes to the host once per forward.

Not reproduced: its block-sparse matrices and their transposes, separate GEMMs for gate and up, and the unpermuted Y
that it stores before the sum.
"""

from __future__ import annotations

from sonic.impls._style import Strategy, Styled


class Impl(Styled):
    strategy = Strategy(
        gather_fused=False, activation_fused=False, scatter_fused=False, kept=("Xe", "H", "Y"), block=128
    )
    properties = strategy.properties()
