"""PyTorch's grouped matrix multiplication under `torch.compile(fullgraph=True)`, static shapes, default mode.

The functions of `torch_grouped_mm`, router included; Inductor fuses the gather, the activation and the weighted sum,
and chooses what to keep for the backward. Alone there are aggregate and combine, in which it has something to fuse. On
a CPU it is left out: compiling takes longer than the points that run there.
"""

from __future__ import annotations

import torch

from sonic.impls import torch_grouped_mm
from sonic.impls._common import compiled
from sonic.impls._kernels import Alone, down_and_sum, weighted_sum
from sonic.record import Point


class _Alone(Alone):
    OPS = ("aggregate", "combine")

    def summed(self, y_Rd: torch.Tensor, place_R: torch.Tensor, scores_TK: torch.Tensor) -> torch.Tensor:
        return compiled(weighted_sum)(y_Rd, place_R, scores_TK)

    def combined(self, a_Rn: torch.Tensor, place_R: torch.Tensor, scores_TK: torch.Tensor) -> torch.Tensor:
        return compiled(down_and_sum)(a_Rn, self.w2, self.ends_E, place_R, scores_TK)


class Impl(torch_grouped_mm.Impl):
    OPS = frozenset({"layer", "experts", *_Alone.OPS})
    KNOBS = frozenset()
    ALONE = _Alone
    properties = None
    undeclared = "Inductor decides what is fused and what is kept"

    @classmethod
    def supports(cls, point: Point, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"device is {device.type!r}; compiled only for cuda, since compiling outlasts what runs on a CPU"
        return super().supports(point, device)

    def forward(self) -> torch.Tensor:
        if self._alone is not None:
            return self._alone.call()
        if self.layer:
            layer = compiled(torch_grouped_mm.layer)
            return layer(self.x_Td, self.router_w_Ed, self.K, self.w1_E2nd, self.w2_Edn)
        experts = compiled(torch_grouped_mm.experts)
        return experts(self.x_Td, self.ids_TK, self.scores_TK, self.w1_E2nd, self.w2_Edn)
