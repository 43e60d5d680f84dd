"""Plain PyTorch, one expert after the other: what a first implementation looks like, and the yardstick of the gate's
limits.

For each expert: the tokens that chose it (a host sync to learn how many), two matrix multiplications, SwiGLU between
them, and the score-weighted result added to the output. Any device and dtype. Slow by construction when E is large; an
expert without tokens costs its launches all the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sonic.impls._common import Adapter
from sonic.routers import plain_router


class Impl(Adapter):
    family = "torch"

    def forward(self) -> torch.Tensor:
        scores_TK, ids_TK = self.scores_TK, self.ids_TK
        if self.layer:
            scores_TK, ids_TK = plain_router(self.x_Td, self.router_w_Ed, self.K)
        o_Td = torch.zeros_like(self.x_Td)
        for expert, (w1_2nd, w2_dn) in enumerate(zip(self.w1_E2nd.unbind(), self.w2_Edn.unbind(), strict=True)):
            token_r, slot_r = torch.where(ids_TK == expert)
            gate_rn, up_rn = F.linear(self.x_Td[token_r], w1_2nd).chunk(2, dim=-1)
            y_rd = F.linear(F.silu(gate_rn) * up_rn, w2_dn)
            o_Td.index_add_(0, token_r, y_rd * scores_TK[token_r, slot_r, None].to(y_rd.dtype))
        return o_Td
