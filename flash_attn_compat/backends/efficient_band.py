"""Two-sided windows on the memory-efficient kernel, whose own window is causal only.

Tokens of all sequences are cut into blocks of rows; the keys a block can see are a slice of the tokens
around it, and slices of neighbouring blocks overlap, which a strided view expresses without a copy. One
launch computes many blocks as a batch, under a bias that hides keys outside the window or the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.backends import efficient_launch
from flash_attn_compat.backends.efficient_launch import Launch, Native
from flash_attn_compat.engine import alignment, outside
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream

# Rows per block are about half the window, so that a slice of keys is three blocks long.
_MIN_ROWS, _MAX_ROWS = 64, 1024
# Elements of the rows (and of the bias) that one launch takes: bounds the memory beside inputs and outputs.
_LAUNCH_ELEMENTS = 3 * 2**22


class _Band(NamedTuple):
    """Block geometry, in tokens: ``before`` and ``after`` are whole blocks."""

    rows: int
    before: int
    after: int
    left: int
    right: int

    @property
    def keys(self) -> int:
        return self.rows + self.before + self.after


class _Chunk(NamedTuple):
    """Consecutive blocks of one launch: their first token and how many blocks."""

    start: int
    blocks: int


def forward(call: AttentionCall) -> Result:
    """Tokens are rows and keys alike: every sequence has as many queries as keys."""
    q, k, v = (_tokens(tensor) for tensor in (call.q, call.k, call.v))
    total, nheads = q.shape[:2]
    out = q.new_empty(total, nheads, v.shape[-1])
    lse = torch.empty(nheads, total, device=q.device) if call.return_lse else None
    natives: list[Native] = []
    for chunk, member, launch in _launches(call, q, k, v):
        part, native = efficient_launch.forward(launch, keep_lse=call.needs_grad or call.return_lse)
        natives.append(native)
        tokens = _inside(chunk, launch, total)
        out[tokens, member] = part.flatten(0, 1)[: tokens.stop - tokens.start]
        if lse is not None:
            by_row = native.lse[:, :, : launch.q.shape[1]].transpose(0, 1).flatten(1)
            lse[member, tokens] = by_row[:, : tokens.stop - tokens.start]
    if call.cu_seqlens_q is not None:
        outside.set_to_zero(out, call.cu_seqlens_q)
    out = out[..., : call.head_dim_v].view(call.out_shape)
    if lse is not None and call.cu_seqlens_q is None:
        lse = lse.unflatten(1, call.q.shape[:2]).transpose(0, 1)
    return Result(out, lse, None, tuple(native.lse for native in natives) if call.needs_grad else ())


def backward(call: AttentionCall, upstream: Upstream) -> Gradients:
    q, k, v = (_tokens(tensor) for tensor in (call.q, call.k, call.v))
    dout, out = (_tokens(tensor) for tensor in (upstream.dout, upstream.out))
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in (k, v))
    band = _band(call)
    for index, (chunk, member, launch) in enumerate(_launches(call, q, k, v)):
        native = Native(upstream.saved[index] if upstream.saved else _given_lse(call, upstream, chunk, member, launch))
        rows_dout, rows_out = (_rows(tensor, chunk, band)[:, :, member] for tensor in (dout, out))
        found = efficient_launch.backward(launch, rows_dout, rows_out, native)
        tokens = _inside(chunk, launch, q.shape[0])
        dq[tokens, member] = found[0].flatten(0, 1)[: tokens.stop - tokens.start]
        for total, pieces in zip((dk, dv), found[1:]):
            _add_slab(total, _overlapping_sum(pieces, band), chunk.start - band.before)
    if call.cu_seqlens_q is not None:
        for gradient in (dq, dk, dv):
            outside.set_to_zero(gradient, call.cu_seqlens_q)
    channels = call.q.shape[-1], call.k.shape[-1], call.v.shape[-1]
    found = (gradient[..., :size] for gradient, size in zip((dq, dk, dv), channels))
    return Gradients(*(gradient.view(like.shape) for gradient, like in zip(found, (call.q, call.k, call.v))))


def _launches(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[_Chunk, slice, Launch]]:
    """Launches over (blocks, rows, heads, head_dim), one per chunk and per member of a group of query heads."""
    band = _band(call)
    marks = _marks(call, q.shape[0], band)
    chunks = list(_chunks(q, band))
    whole = _Chunk(0, sum(chunk.blocks for chunk in chunks))
    # One bias for all launches where it is small: a dozen operations less for each of them.
    shared = _bias(marks, whole, band, q.dtype) if whole.blocks * band.rows * band.keys <= _LAUNCH_ELEMENTS else None
    group = call.nheads // call.nheads_k
    for chunk in chunks:
        first = chunk.start // band.rows
        bias = _bias(marks, chunk, band, q.dtype) if shared is None else shared[first : first + chunk.blocks]
        queries = _rows(q, chunk, band)
        keys, values = _key_slices(k, chunk, band), _key_slices(v, chunk, band)
        for member in (slice(first, None, group) for first in range(group)):
            heads = queries[:, :, member]
            expanded = bias.expand(-1, heads.shape[2], -1, -1)
            launch = Launch(heads, keys, values, call.softmax_scale, bias=expanded, deterministic=call.deterministic)
            yield chunk, member, launch


def _band(call: AttentionCall) -> _Band:
    longest = call.max_seqlen_k
    left = longest if call.mask.left is None else min(call.mask.left, longest)
    right = longest if call.mask.right is None else min(call.mask.right, longest)
    rows = min(_MAX_ROWS, max(_MIN_ROWS, -(-(left + right) // 2 // 64) * 64))
    return _Band(rows, -(-left // rows) * rows, -(-right // rows) * rows, left, right)


def _chunks(q: Tensor, band: _Band) -> Iterator[_Chunk]:
    """Blocks at the edges apart, since their keys must be padded; the others by as many as memory allows."""
    total, width = q.shape[0], q.shape[1] * q.shape[2]
    size = max(1, _LAUNCH_ELEMENTS // (band.rows * max(width, band.keys)))
    blocks = -(-total // band.rows)
    first_inner = min(blocks, band.before // band.rows)
    last_inner = max(first_inner, (total - band.after) // band.rows)
    bounds = [0, *range(first_inner, last_inner, size), last_inner, blocks]
    for start, stop in zip(bounds, bounds[1:]):
        if stop > start:
            yield _Chunk(start * band.rows, stop - start)


def _tokens(tensor: Tensor) -> Tensor:
    """(tokens, heads, head_dim) as the kernel reads it; a view unless channels or sequences are oddly strided."""
    padded = alignment.ready(efficient_launch.pad_channels(tensor))
    return padded.flatten(0, 1) if padded.dim() == 4 else padded


def _slab(tensor: Tensor, start: int, length: int) -> Tensor:
    """``length`` tokens from ``start`` on: a view, or a zero-padded copy where they reach beyond the ends."""
    total = tensor.shape[0]
    before, after = max(0, -start), max(0, start + length - total)
    inside = tensor[max(0, start) : min(total, start + length)]
    if not before and not after:
        return inside
    return F.pad(inside, (0, 0) * (tensor.dim() - 1) + (min(before, length), min(after, length)))[:length]


def _rows(tensor: Tensor, chunk: _Chunk, band: _Band) -> Tensor:
    return _slab(tensor, chunk.start, chunk.blocks * band.rows).unflatten(0, (chunk.blocks, band.rows))


def _key_slices(tensor: Tensor, chunk: _Chunk, band: _Band) -> Tensor:
    """(blocks, keys, heads, head_dim): slices of the tokens that overlap, without a copy."""
    slab = _slab(tensor, chunk.start - band.before, (chunk.blocks - 1) * band.rows + band.keys)
    return slab.unfold(0, band.keys, band.rows).movedim(-1, 1)


def _marks(call: AttentionCall, total: int, band: _Band) -> Tensor:
    """Which sequence each token belongs to, from 1 on, with 0 for padding in front of and behind all tokens."""
    tokens = torch.arange(total, device=call.q.device)
    if call.cu_seqlens_q is None:
        sequence = tokens.div_(call.q.shape[1], rounding_mode="floor") + 1
    else:
        sequence = torch.searchsorted(call.cu_seqlens_q, tokens, right=True) + 1
    return F.pad(sequence.to(torch.int32), (band.before, band.rows + band.after))


def _bias(marks: Tensor, chunk: _Chunk, band: _Band, dtype: torch.dtype) -> Tensor:
    """(blocks, 1, rows, keys): 0 where a key of the same sequence is in the window, else the lowest number."""
    device = marks.device
    ahead = (
        torch.arange(band.keys, device=device)
        - torch.arange(band.before, band.before + band.rows, device=device)[:, None]
    )
    in_window = (ahead >= -band.left) & (ahead <= band.right)
    strip = marks[chunk.start : chunk.start + (chunk.blocks - 1) * band.rows + band.keys]
    keys = strip.unfold(0, band.keys, band.rows)
    rows = keys[:, band.before : band.before + band.rows]
    hidden = rows[:, :, None] != keys[:, None]
    hidden |= ~in_window
    # Finite, so that a row of padding averages instead of becoming nan; it is thrown away.
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)


def _inside(chunk: _Chunk, launch: Launch, total: int) -> slice:
    blocks, rows = launch.q.shape[:2]
    return slice(chunk.start, min(total, chunk.start + blocks * rows))


def _overlapping_sum(pieces: Tensor, band: _Band) -> Tensor:
    """(blocks, keys, heads, d) gradients of overlapping slices -> of the tokens they cover, summed in fp32."""
    blocks, keys = pieces.shape[:2]
    shares = keys // band.rows
    cut = pieces.unflatten(1, (shares, band.rows)).contiguous()
    covered = blocks + shares - 1
    total = cut.new_empty((covered, *cut.shape[2:]))
    inner = blocks - shares + 1
    if inner > 0:
        # total[j] = sum over s of cut[j - s, s]; with s counted down, both steps go forward in memory.
        block, share = cut.stride(0), cut.stride(1)
        sizes = (inner, shares, *cut.shape[2:])
        steps = (block, block - share, *cut.stride()[2:])
        view = cut.as_strided(sizes, steps, cut.storage_offset() + (shares - 1) * share)
        total[shares - 1 : blocks] = view.sum(1)
    edges = range(covered) if inner <= 0 else [*range(shares - 1), *range(blocks, covered)]
    for at in edges:
        members = [cut[at - share, share] for share in range(shares) if 0 <= at - share < blocks]
        total[at] = torch.stack(members).sum(0)
    return total.flatten(0, 1)


def _add_slab(total: Tensor, slab: Tensor, start: int) -> None:
    """Add ``slab`` to the tokens from ``start`` on; what reaches beyond the ends came from padding."""
    first, stop = max(0, start), min(total.shape[0], start + slab.shape[0])
    total[first:stop] += slab[first - start : stop - start]


def _given_lse(call: AttentionCall, upstream: Upstream, chunk: _Chunk, member: slice, launch: Launch) -> Tensor:
    """The caller's LSE for the rows of one launch: (blocks, heads, rows)."""
    lse = upstream.softmax_lse
    if call.cu_seqlens_q is None:
        lse = lse.transpose(0, 1).flatten(1)
    by_token = lse[member].t()
    rows = _slab(by_token, chunk.start, launch.q.shape[0] * launch.q.shape[1])
    return efficient_launch.lse_to_native(rows.unflatten(0, launch.q.shape[:2]).transpose(1, 2))
