"""The strategy of ScatterMoE: X is gathered by the loads of the forward and stored in expert order for the backward;
SwiGLU and its gradient are kernels of their own; the GEMMs scatter their rows to slot order and a weighted sum follows;
H, A and Y are kept, and dS = <dO, Y>.

Not reproduced: that its weighted sums are batched matrix products and its index work is plain torch.
"""

from __future__ import annotations

from sonic.impls._style import Strategy, Styled


class Impl(Styled):
    strategy = Strategy(gather_fused=True, activation_fused=False, scatter_fused=True, kept=("H", "A", "Y"))
    properties = strategy.properties()
