"""Tokens of packed tensors that a kernel leaves unwritten: outside of all sequences, or beyond max_seqlen.

PyTorch's and flash-attn's kernels leave old memory contents in such tokens. Here they are set to 0, by some fourteen
PyTorch operators for each call; backends/fused/clearing.py does the same in one launch. A call skips this only if the
host can read its own lengths. Lengths from an earlier call do not count, because ``.data``, a CUDA graph or another
kernel may have changed them unseen by PyTorch. Nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.core.call import AttentionCall


class PackedResults(NamedTuple):
    """Results of a packed call: rows (out or dq) (total_q, nheads, head_dim), lse (nheads, total_q), and dk with dv."""

    rows: Tensor | None
    lse: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


# Sets the unwritten tokens of a call's results to 0, in place.
Clear = Callable[[AttentionCall, PackedResults], None]


def token_places(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return for each token its sequence, and its index in that; a token outside of all counts to the nearest one."""
    tokens = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:], tokens, right=True).clamp_(max=cu_seqlens.shape[0] - 2)
    return sequence, (tokens - cu_seqlens[sequence]).clamp_(min=0)


def packed_lse(lse: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Return a padded LSE (batch, nheads, rows) as a packed one (nheads, total)."""
    sequence, row = token_places(cu_seqlens, total)
    return lse[sequence, :, row.clamp_(max=lse.shape[2] - 1)].t()


def padded_lse(lse: Tensor, cu_seqlens: Tensor, rows: int) -> Tensor:
    """Return a packed LSE (nheads, total) as a contiguous padded one (batch, nheads, rows), +inf in the padding."""
    tokens = cu_seqlens[:-1, None] + torch.arange(rows, device=lse.device)
    inside = tokens < cu_seqlens[1:, None]
    gathered = lse[:, tokens.clamp_(max=lse.shape[1] - 1)].transpose(0, 1)
    return torch.where(inside[:, None], gathered, torch.inf).contiguous()


def is_outside(cu_seqlens: Tensor, total: int) -> Tensor:
    """Return (total,) bool: True for tokens outside of all sequences."""
    # Positions are at half a token, so that the first token after the last sequence differs from its end.
    tokens = torch.arange(0.5, total + 0.5, dtype=torch.float64, device=cu_seqlens.device)
    return tokens.clamp(cu_seqlens[0], cu_seqlens[-1]) != tokens


def is_unwritten(cu_seqlens: Tensor, total: int, longest: int) -> Tensor:
    """Return (total,) bool: True outside of all sequences, and for a sequence's tokens from ``longest`` on."""
    if longest >= total:
        return is_outside(cu_seqlens, total)
    starts, stops = cu_seqlens[:-1], cu_seqlens[1:]
    # ``bounds`` alternate: start and end of the written tokens of each sequence. A token after an even number of bounds
    # is unwritten.
    bounds = torch.stack((starts, torch.minimum(starts + longest, stops)), dim=1).flatten()
    tokens = torch.arange(total, dtype=bounds.dtype, device=bounds.device)
    return torch.searchsorted(bounds, tokens, right=True).bitwise_and_(1) == 0


def clear(cu_seqlens: Tensor, tensors: Sequence[Tensor], longest: int) -> None:
    """Set the unwritten tokens of each (total, heads, head_dim) tensor to 0, in place."""
    if not tensors:
        return
    first, *_ = tensors
    total = first.shape[0]
    if cu_seqlens.is_cpu and cu_seqlens[0] == 0 and cu_seqlens[-1] == total and int(cu_seqlens.diff().max()) <= longest:
        return
    lies_outside = is_unwritten(cu_seqlens, total, longest).view(-1, 1, 1)
    for tensor in tensors:
        is_of_words = tensor.shape[-1] * tensor.element_size() % 8 == 0  # filling eight bytes at once is faster
        (tensor.view(torch.int64) if is_of_words else tensor).masked_fill_(lies_outside, 0)


def clear_by_operators(call: AttentionCall, results: PackedResults) -> None:
    """Set the unwritten tokens of a call's results to 0, in place."""
    starts_q, longest_q = call.cu_seqlens_q, call.max_seqlen_q
    starts_k, longest_k = call.cu_seqlens_k, call.max_seqlen_k
    assert starts_q is not None and starts_k is not None  # the call is packed
    lse = None if results.lse is None else results.lse.t().unsqueeze(-1)
    queries = [tensor for tensor in (results.rows, lse) if tensor is not None]
    keys = [tensor for tensor in (results.dk, results.dv) if tensor is not None]
    if starts_q is starts_k and call.q.shape[0] == call.k.shape[0] and longest_q == longest_k:
        clear(starts_q, [*queries, *keys], longest_q)
    else:
        clear(starts_q, queries, longest_q)
        clear(starts_k, keys, longest_k)
