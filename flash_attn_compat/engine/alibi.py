"""ALiBi (Press et al., 2022): the bias ``-slope * |position - key|`` and its trace in the LSE.

flash-attn adds ``slope * key`` instead when the mask is purely causal. Outputs and gradients are the
same, but the LSE it returns is then larger by ``slope * position``; callers that merge partial results
rely on that number, so every backend computes the plain bias and converts with the functions here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_attn_compat.engine.mask import Range, distance


def per_sequence(slopes: Tensor, batch: int) -> Tensor:
    """(nheads,) or (batch, nheads) slopes as (batch, nheads), without a copy."""
    return slopes if slopes.dim() == 2 else slopes.expand(batch, -1)


def bias(slopes: Tensor, rows: Range, keys: Range, offset: int, dtype: torch.dtype) -> Tensor:
    """(batch, nheads) slopes -> additive bias (batch, nheads, rows, keys)."""
    gap = distance(rows, keys, offset, slopes.device).abs_().to(dtype)
    return slopes.to(dtype).neg()[:, :, None, None] * gap


def add_bias_(scores: Tensor, slopes: Tensor, rows: Range, keys: Range, offset: int) -> Tensor:
    """Add the bias to ``scores`` (batch, nheads, rows, keys) in place, without materialising it."""
    gap = distance(rows, keys, offset, scores.device).abs_().to(scores.dtype)
    return scores.addcmul_(slopes.to(scores.dtype)[:, :, None, None], gap, value=-1)


def causal_lse_shift(slopes: Tensor, seqlen_q: int, offset: int | Tensor) -> Tensor:
    """``slope * position`` per row: (batch, nheads) slopes -> (batch, nheads, seqlen_q).

    ``offset`` is seqlen_k - seqlen_q, one number or one per sequence (batch,).
    """
    rows = torch.arange(seqlen_q, device=slopes.device)
    positions = rows + (offset[:, None, None] if isinstance(offset, Tensor) else offset)
    return slopes[:, :, None] * positions


def key_channels(positions: Tensor, softmax_scale: float, seqlen_k: int, dtype: torch.dtype) -> Tensor:
    """Channels that put a key's position into an inner product: (...,) -> (..., 6) in ``dtype``.

    The position is written to base 64, whose digits times a power of two half precision holds exactly: up to
    a million keys in bf16, four million in fp16.
    """
    unit = _channel_unit(softmax_scale, seqlen_k)
    digits = torch.stack((positions // 4096 * 64, positions // 64 % 64, positions % 64), dim=-1).float() * unit
    return digits.repeat_interleave(2, dim=-1).to(dtype)


def query_channels(slopes: Tensor, softmax_scale: float, seqlen_k: int, dtype: torch.dtype) -> Tensor:
    """The other side: (..., nheads) slopes -> (..., nheads, 6), so that scaled products sum to slope * position.

    Each factor is its nearest number in ``dtype`` and the rest. A slope too large for that is limited to one
    that leaves nothing but the nearest key either way.
    """
    factor = (slopes.double() / (softmax_scale * _channel_unit(softmax_scale, seqlen_k))).clamp(-1000.0, 1000.0)
    factors = torch.stack((factor * 64, factor * 64, factor), dim=-1)
    nearest = factors.to(dtype)
    rest = (factors - nearest).to(dtype)
    return torch.stack((nearest, rest), dim=-1).flatten(-2)


def _channel_unit(softmax_scale: float, seqlen_k: int) -> float:
    """A power of two for the keys that leaves factors of ordinary slopes around 8, far from fp16's limits."""
    largest = 60000 * 64 / max(seqlen_k, 4096)
    return 2.0 ** math.floor(math.log2(min(largest, max(2.0**-6, 1.0 / (8.0 * abs(softmax_scale) + 1e-30)))))


def append_channels(tensor: Tensor, added: Tensor) -> Tensor:
    """``tensor`` with further channels, which are broadcast to its other axes."""
    size = tensor.shape[-1]
    wider = tensor.new_empty((*tensor.shape[:-1], size + added.shape[-1]))
    if _in_words(tensor) and _in_words(added):
        # Eight bytes at a time, for speed.
        place, start = wider.view(torch.int64), size * tensor.element_size() // 8
        place[..., :start] = tensor.view(torch.int64)
        place[..., start:] = added.view(torch.int64)
    else:
        wider[..., :size] = tensor
        wider[..., size:] = added
    return wider


def _in_words(tensor: Tensor) -> bool:
    """Whether channels can be read eight bytes at a time."""
    unit = 8 // tensor.element_size()
    return (
        tensor.stride(-1) == 1
        and not (tensor.storage_offset() % unit or tensor.shape[-1] % unit)
        and not any([stride % unit for stride in tensor.stride()[:-1]])
    )
