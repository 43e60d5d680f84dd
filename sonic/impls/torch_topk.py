"""`torch.topk` and a softmax over the K largest logits: a router without a kernel of its own (`op=router_topk`).

Returns scores (T, K) in fp32 and ids (T, K), int64 as `torch.topk` makes them. Of equal logits either may win.
"""

from __future__ import annotations

from sonic.impls._kernels import StepsAlone, TopKAlone


class Impl(StepsAlone):
    KNOBS = frozenset()
    ALONE = TopKAlone
    OPS = frozenset(TopKAlone.OPS)
    family = "torch"
    undeclared = "no layer: the router's top-K alone"
