"""DeepGEMM's grouped GEMM with routing, gather and aggregation in plain PyTorch: the paper's "DeepGEMM-pt".

`torch.sort` for the order of rows, `index_select` to gather and to bring rows back to their tokens, a weighted sum.
See `_deepgemm` for version, limits and what is kept.
"""

from __future__ import annotations

import torch

from sonic.impls._deepgemm import DeepGemm
from sonic.impls._padded import Padded
from sonic.kernels.metadata import Metadata, metadata_torch


class Impl(DeepGemm):
    def metadata(self, ids_TK: torch.Tensor) -> Metadata:
        return metadata_torch(ids_TK, self.problem.shape.E)

    def gather(self, x_Td: torch.Tensor, token_P: torch.Tensor) -> torch.Tensor:
        return x_Td.index_select(0, token_P)

    def combine(self, y_Pd: torch.Tensor, rows: Padded, scores_TK: torch.Tensor | None, K: int) -> torch.Tensor:
        y_TKd = y_Pd.index_select(0, rows.row_idx_R).view(-1, K, y_Pd.shape[1])
        return y_TKd.sum(dim=1) if scores_TK is None else (y_TKd * scores_TK[..., None].to(y_TKd.dtype)).sum(dim=1)
