"""ALiBi (Press et al., 2022): the bias ``-slope * |position - key|``, and how it changes flash-attn's LSE.

flash-attn adds ``slope * key`` instead when the mask is purely causal. Outputs and gradients are the
same, but the LSE it returns is then larger by ``slope * position``; callers that merge partial results
rely on that number, so every backend computes the plain bias and converts with the functions here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.core.mask import Range

# fp32 holds every integer up to this one.
_EXACT_INTEGERS = 2**24


def slopes_per_sequence(slopes: Tensor, batch: int) -> Tensor:
    """Return slopes of shape (nheads,) or (batch, nheads) as (batch, nheads), without a copy."""
    return slopes if slopes.dim() == 2 else slopes.expand(batch, -1)


def add_bias(scores: Tensor, slopes: Tensor, rows: Range, keys: Range, offset: int) -> Tensor:
    """Return ``scores`` (batch or 1, nheads or 1, rows, keys) plus the ALiBi bias, which gets no tensor of its own."""
    distance = gap(rows, keys, offset, scores.device, scores.dtype)
    # neg(), because value=-1 crashes PyTorch 2.4 to 2.15 if a mode sees a forward-mode tangent.
    return scores.addcmul(slopes.to(scores.dtype)[:, :, None, None].neg(), distance)


def add_bias_(scores: Tensor, slopes: Tensor, rows: Range, keys: Range, offset: int) -> Tensor:
    """Add the ALiBi bias to ``scores`` (batch or 1, nheads or 1, rows, keys) in place."""
    distance = gap(rows, keys, offset, scores.device, scores.dtype)
    return scores.addcmul_(slopes.to(scores.dtype)[:, :, None, None], distance, value=-1)


def gap(rows: Range, keys: Range, offset: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return each key's distance from each row's position, (rows, keys), in floats where exact: integers are slower."""
    first, last = rows.start + offset, rows.stop + offset
    exact = dtype if max(abs(first), abs(last), keys.stop) <= _EXACT_INTEGERS else torch.int64
    positions = torch.arange(first, last, dtype=exact, device=device)
    return torch.arange(keys.start, keys.stop, dtype=exact, device=device).sub(positions[:, None]).abs_().to(dtype)


def causal_lse_shift(slopes: Tensor, seqlen_q: int, offset: int | Tensor) -> Tensor:
    """Return slope * position of each row, (batch, nheads, seqlen_q), which flash-attn's causal LSE includes.

    slopes: (batch, nheads); offset: seqlen_k - seqlen_q, one number or one per sequence (batch,)
    """
    rows = torch.arange(seqlen_q, device=slopes.device)
    positions = rows + (offset[:, None, None] if isinstance(offset, Tensor) else offset)
    return slopes[:, :, None] * positions
