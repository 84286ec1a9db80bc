"""Causal ALiBi on kernels without slopes: the bias as further channels of q and k.

Under a causal mask -slope * (i - j) is slope * j plus a constant of the row, and slope * j an inner product.
Its factors are rounded, so the LSE of such a launch and flash-attn's differ by what its row's own key gets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.backends.flash_launch import Launch
from flash_attn_compat.engine import alibi
from flash_attn_compat.engine.features import Feature, Traits

_CHANNELS = 6
# (row, head) pairs that keep a GPU busy.
_ENOUGH_ROWS = 2**16


def reasons(traits: Traits) -> list[str]:
    """Why the channels cannot stand in for slopes."""
    found = []
    if not traits.features & Feature.CAUSAL:
        found.append("ALiBi slopes without a causal mask")
    if traits.features & (Feature.SEQUSED_K | Feature.LEFTPAD_K | Feature.PAGED):
        found.append("ALiBi slopes over a cache or with seqused_k")
    if traits.head_dim + _CHANNELS > 256:
        found.append(f"ALiBi slopes need a head_dim of at most {256 - _CHANNELS}")
    return found


def parts(launch: Launch) -> list[slice]:
    """As few sequences of a dense launch at a time as fill the GPU: their widened copies are what memory goes to."""
    if launch.cu_seqlens_q is not None:
        return [slice(None)]
    batch, seqlen_q, nheads = launch.q.shape[:3]
    step = max(1, -(-_ENOUGH_ROWS // max(1, seqlen_q * nheads)))
    return [slice(start, start + step) for start in range(0, batch, step)]


class Channels(NamedTuple):
    """What the bias adds to q, (batch, 1, heads, size) or (total_q, heads, size), and to k, (keys, 1, size).

    The size fills up q's head_dim to the next multiple of 8.
    """

    queries: Tensor
    keys: Tensor


def channels(launch: Launch) -> Channels:
    size = _CHANNELS + -(launch.q.shape[-1] + _CHANNELS) % 8
    keys = alibi.key_channels(_key_positions(launch), launch.scale, _longest(launch), launch.k.dtype)
    return Channels(widen(_query_channels(launch), size), widen(keys, size).unsqueeze(-2))


def with_channels(launch: Launch, added: Channels, part: slice) -> Launch:
    """The launch, or a part of it, without slopes: q and k wider by their channels, v by zeros."""
    q, k, v = launch.q[part], launch.k[part], launch.v[part]
    queries = added.queries if launch.cu_seqlens_q is not None else added.queries[part]
    return launch._replace(
        q=alibi.append_channels(q, queries),
        k=alibi.append_channels(k, added.keys),
        v=alibi.append_channels(v, v.new_zeros(queries.shape[-1])),
        alibi_slopes=None,
    )


def widen(tensor: Tensor, size: int) -> Tensor:
    """Zero channels up to ``size``."""
    missing = size - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def to_channels(launch: Launch, lse: Tensor) -> Tensor:
    """From flash-attn's LSE to that of the launch by channels, (batch, heads, seqlen_q) or (heads, total_q)."""
    return (lse + _difference(launch)).float()


def from_channels(launch: Launch, lse: Tensor) -> Tensor:
    return (lse - _difference(launch)).float()


def _difference(launch: Launch) -> Tensor:
    """In fp64: scores are large where sequences are long, and what counts is the difference."""
    positions = _row_positions(launch)
    own = alibi.key_channels(positions, launch.scale, _longest(launch), launch.k.dtype).double().unsqueeze(-2)
    bias = (own * _query_channels(launch).double()).sum(-1) * launch.scale
    if launch.window[0] < 0:
        # flash-attn's kernel adds slope * key here, too.
        bias = bias - _row_slopes(launch).double() * positions.unsqueeze(-1)
    return bias.transpose(-1, -2)


def _query_channels(launch: Launch) -> Tensor:
    """(batch, 1, heads, 6), packed (total, heads, 6)."""
    return alibi.query_channels(_row_slopes(launch), launch.scale, _longest(launch), launch.q.dtype)


def _longest(launch: Launch) -> int:
    return launch.k.shape[0 if launch.k.dim() == 3 else 1]


def _row_slopes(launch: Launch) -> Tensor:
    """(batch, 1, heads), packed (total, heads)."""
    slopes = launch.alibi_slopes
    assert slopes is not None  # nobody else asks for channels
    if launch.cu_seqlens_q is None:
        return alibi.per_sequence(slopes, launch.q.shape[0]).unsqueeze(1)
    if slopes.dim() == 1:
        return slopes.expand(launch.q.shape[0], -1)
    return slopes[_sequences(launch.cu_seqlens_q, launch.q.shape[0])]


def _row_positions(launch: Launch) -> Tensor:
    """Where each row stands among its sequence's keys, 0 for rows before the first: (seqlen_q,) or (total_q,)."""
    if launch.cu_seqlens_q is None or launch.cu_seqlens_k is None:
        seqlen_q, seqlen_k = launch.q.shape[1], launch.k.shape[1]
        return torch.arange(seqlen_k - seqlen_q, seqlen_k, device=launch.q.device).clamp_(min=0)
    total = launch.q.shape[0]
    sequence = _sequences(launch.cu_seqlens_q, total)
    offsets = launch.cu_seqlens_k.diff() - launch.cu_seqlens_q[1:]
    return (torch.arange(total, device=launch.q.device) + offsets[sequence]).clamp_(min=0)


def _key_positions(launch: Launch) -> Tensor:
    """(seqlen_k,) or (total_k,)."""
    if launch.cu_seqlens_k is None:
        return torch.arange(launch.k.shape[1], device=launch.k.device)
    total = launch.k.shape[0]
    starts = launch.cu_seqlens_k
    return (torch.arange(total, device=launch.k.device) - starts[:-1][_sequences(starts, total)]).clamp_(min=0)


def _sequences(starts: Tensor, total: int) -> Tensor:
    """The sequence of each token; tokens outside of all count to the nearest one."""
    tokens = torch.arange(total, device=starts.device)
    return torch.searchsorted(starts[1:], tokens, right=True).clamp_(max=starts.shape[0] - 2)
