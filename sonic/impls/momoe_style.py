"""The strategy of MoMoE with nothing saved: X is gathered by the loads of the forward, SwiGLU and its gradient are
epilogues, rows are scattered to slots and summed. Nothing but X is kept, so the backward stores gathered X and s dO,
computes H and Y again, and dS = <dO, Y>.

Not reproduced: that H is computed inside the kernel of dSwiGLU and Y inside that of dXt, where dS is added with
atomics.
"""

from __future__ import annotations

from sonic.impls._style import Strategy, Styled


class Impl(Styled):
    strategy = Strategy(gather_fused=True, activation_fused=True, scatter_fused=True, kept=())
    properties = strategy.properties()
