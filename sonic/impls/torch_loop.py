"""Plain PyTorch, one expert after the other: what a first implementation looks like, and the yardstick of the gate's
limits.

For each expert: the tokens that chose it (a host sync to learn how many), two matrix multiplications, SwiGLU between
them, and the score-weighted result added to the output. Any device and dtype. Slow by construction when E is large; an
expert without tokens costs its launches all the same. Takes any routing, and runs every router by its plain definition
(`sonic.routers.choose`), loops over experts and all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sonic.impls._common import Adapter, Properties
from sonic.routers import METHODS, choose, plain_router


class Impl(Adapter):
    RAGGED = True
    ROUTERS = frozenset(METHODS)
    family = "torch"
    #: Autograd keeps silu(gate) too, as wide as A, and Y times its score, which `index_add_` is given.
    properties = Properties(
        gather_fused_forward=False,
        gather_fused_backward=False,
        activation_fused=False,
        d_activation_fused=False,
        ds_from_da=False,
        d_act_whole=False,
        io_overlapped=False,
        no_scatter_kernel=False,
        efficient_topk=False,
        no_padding=True,
        kept=("Xe", "H", "A", "A", "Y", "Y"),
    )

    def forward(self) -> torch.Tensor:
        scores_TK, ids_TK = self.scores_TK, self.ids_TK
        if self.layer and self.problem.plain:
            scores_TK, ids_TK = plain_router(self.x_Td, self.router_w_Ed, self.K)
        elif self.layer:
            return self._routed()
        o_Td = torch.zeros_like(self.x_Td)
        for expert, (w1_2nd, w2_dn) in enumerate(zip(self.w1_E2nd.unbind(), self.w2_Edn.unbind(), strict=True)):
            token_r, slot_r = torch.where(ids_TK == expert)
            gate_rn, up_rn = F.linear(self.x_Td[token_r], w1_2nd).chunk(2, dim=-1)
            y_rd = F.linear(F.silu(gate_rn) * up_rn, w2_dn)
            o_Td.index_add_(0, token_r, y_rd * scores_TK[token_r, slot_r, None].to(y_rd.dtype))
        return o_Td

    def _routed(self) -> torch.Tensor:
        """The layer under any other router: whom it keeps, then the experts one by one."""
        problem, routing = self.problem, self.problem.routing
        logits_TE = F.linear(self.x_Td, self.router_w_Ed)
        kept_TE, weights_TE, _ = choose(
            routing.method, logits_TE, self.K, score=routing.score, draws_E=problem.draws_E, **problem.options
        )
        o_Td = torch.zeros_like(self.x_Td)
        for expert, (w1_2nd, w2_dn) in enumerate(zip(self.w1_E2nd.unbind(), self.w2_Edn.unbind(), strict=True)):
            token_r = kept_TE[:, expert].nonzero().flatten()
            gate_rn, up_rn = F.linear(self.x_Td[token_r], w1_2nd).chunk(2, dim=-1)
            y_rd = F.linear(F.silu(gate_rn) * up_rn, w2_dn)
            o_Td.index_add_(0, token_r, y_rd * weights_TE[token_r, expert, None].to(y_rd.dtype))
        return o_Td
