"""Which sequence a token of packed tensors belongs to, and LSE by sequence or by token. Nothing waits for the GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def token_places(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Each token's sequence and its index there; tokens outside of all sequences count to the nearest one."""
    tokens = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:], tokens, right=True).clamp_(max=cu_seqlens.shape[0] - 2)
    return sequence, (tokens - cu_seqlens[sequence]).clamp_(min=0)


def packed_lse(lse: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """(batch, nheads, rows) as (nheads, total)."""
    sequence, row = token_places(cu_seqlens, total)
    return lse[sequence, :, row.clamp_(max=lse.shape[2] - 1)].t()


def padded_lse(lse: Tensor, cu_seqlens: Tensor, rows: int) -> Tensor:
    """(nheads, total) as (batch, nheads, rows), contiguous; +inf behind the end of a sequence."""
    tokens = cu_seqlens[:-1, None] + torch.arange(rows, device=lse.device)
    inside = tokens < cu_seqlens[1:, None]
    gathered = lse[:, tokens.clamp_(max=lse.shape[1] - 1)].transpose(0, 1)
    return torch.where(inside[:, None], gathered, torch.inf).contiguous()
