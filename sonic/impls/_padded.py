"""Rows in expert order with every expert's share rounded up to a block: what packages with aligned GEMMs are fed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sonic.kernels.metadata import Metadata


@dataclass(frozen=True)
class Padded:
    """P rows, those of one expert together, the last of them padding that repeats token 0 with score 0.

    `meta` has the padded offsets and treats the P rows as rows of their own; meta.gather_idx_R is the token of a row
    (P,) int32. expert_P int32; slot_P (P,) int64, the slot t K + k of a row, T K for padding; row_idx_R (T K,) int32
    slot -> row; sizes: rows per expert, on the host.
    """

    meta: Metadata
    expert_P: torch.Tensor
    slot_P: torch.Tensor
    row_idx_R: torch.Tensor
    sizes: list[int]

    def scores(self, scores_TK: torch.Tensor) -> torch.Tensor:
        """Scores of the rows (P,), zero for padding."""
        flat = scores_TK.reshape(-1)
        return torch.cat([flat, flat.new_zeros(1)])[self.slot_P]

    def unpadded(self, values_P: torch.Tensor) -> torch.Tensor:
        """Values of the rows (P,) in slot order (T K,)."""
        return values_P[self.row_idx_R.long()]


def pad(meta: Metadata, K: int, block: int) -> Padded:
    """`meta` with the rows of every expert rounded up to a multiple of `block`; waits once for the device."""
    offsets, R, device = meta.offsets_E1.long(), meta.R, meta.offsets_E1.device
    counts_E = offsets.diff()
    padded_E = (counts_E + block - 1) // block * block
    ends_E = padded_E.cumsum(0)
    sizes = padded_E.tolist()
    P, experts = sum(sizes), torch.arange(len(sizes), device=device)
    moved_E = ends_E - padded_E - offsets[:-1]
    place_R = torch.arange(R, device=device) + moved_E.repeat_interleave(counts_E, output_size=R)
    slot_R = meta.slot_idx_R.long()
    slot_P = torch.full((P,), R, device=device).scatter_(0, place_R, slot_R)
    row_idx_R = torch.empty_like(meta.row_idx_R).scatter_(0, slot_R, place_R.int())
    token_P = torch.where(slot_P < R, slot_P // max(K, 1), 0).int()
    starts = torch.cat([ends_E.new_zeros(1), ends_E]).int()
    rows_P = torch.arange(P, dtype=torch.int32, device=device)
    padded = Metadata(starts, rows_P, token_P, rows_P, P)
    expert_P = experts.repeat_interleave(padded_E, output_size=P).int()
    return Padded(padded, expert_P, slot_P, row_idx_R, sizes)
