"""PyTorch's grouped matrix multiplication under `torch.compile(fullgraph=True)`, static shapes, default mode.

The functions of `torch_grouped_mm`, router included; Inductor fuses the gather, the activation and the weighted sum,
and chooses what to keep for the backward. On a CPU it is left out: compiling takes longer than the points that run
there.
"""

from __future__ import annotations

import torch

from sonic.impls import torch_grouped_mm
from sonic.impls._common import compiled
from sonic.record import Point


class Impl(torch_grouped_mm.Impl):
    OPS = frozenset({"layer", "experts"})
    KNOBS = frozenset()
    properties = None
    undeclared = "Inductor decides what is fused and what is kept"

    @staticmethod
    def supports(point: Point, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"device is {device.type!r}; compiled only for cuda, since compiling outlasts what runs on a CPU"
        return torch_grouped_mm.Impl.supports(point, device)

    def forward(self) -> torch.Tensor:
        if self.layer:
            layer = compiled(torch_grouped_mm.layer)
            return layer(self.x_Td, self.router_w_Ed, self.K, self.w1_E2nd, self.w2_Edn)
        experts = compiled(torch_grouped_mm.experts)
        return experts(self.x_Td, self.ids_TK, self.scores_TK, self.w1_E2nd, self.w2_Edn)
