"""Two-sided windows on the memory-efficient kernel, whose own window is causal only.

Tokens of all sequences are cut into blocks of rows; the keys a block can see are a slice of the tokens
around it, and slices of neighbouring blocks overlap, which a strided view expresses without a copy. One
launch computes many blocks as a batch, under a bias that hides keys outside the window or the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends import efficient_launch
from flash_attn_compat.backends.efficient_launch import Launch, Native
from flash_attn_compat.engine import alignment, elementwise, outside
from flash_attn_compat.engine.band import add_overlapping
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.engine.mask import Mask

# Rows per block are about half the window, so that a slice of keys is three blocks long.
_MIN_ROWS, _MAX_ROWS = 64, 1024
# Elements of the rows (and of the bias) that one launch takes: bounds the memory beside inputs and outputs.
_LAUNCH_ELEMENTS = 2**24


class _Band(NamedTuple):
    """Block geometry, in tokens: ``before`` and ``after`` are whole blocks."""

    rows: int
    before: int
    after: int
    left: int
    right: int

    @property
    def width(self) -> int:
        """Keys of a slice."""
        return self.before + self.rows + self.after


class _Chunk(NamedTuple):
    """Consecutive blocks of one launch: the first block's rows and the first slice's keys, as start and size."""

    blocks: int
    start: int
    rows: int
    first_key: int
    keys: int


def forward(call: AttentionCall) -> Result:
    """Tokens are rows and keys alike: every sequence has as many queries as keys."""
    q, k, v = (_tokens(call, tensor) for tensor in (call.q, call.k, call.v))
    total, nheads = q.shape[:2]
    out = q.new_empty(total, nheads, v.shape[-1])
    lse = torch.empty(total, nheads, dtype=torch.float32, device=q.device) if call.return_lse else None
    kept: list[Tensor] = []
    band = _band(call)
    for chunk, bias in _chunks_with_bias(call, q, band):
        for member in efficient_launch.members(call.nheads, call.nheads_k):
            launch = _launch(call, chunk, member, band, bias, q, k, v)
            part, native = efficient_launch.forward(launch, keep_lse=call.needs_grad or call.return_lse)
            _rows(out, chunk, member).copy_(part)
            if lse is not None:
                _rows(lse, chunk, member).copy_(native.lse[:, :, : chunk.rows].transpose(1, 2))
            if call.needs_grad:
                kept.append(native.lse)
            # The next launch's output finds its place free.
            del launch, part, native
    if call.cu_seqlens_q is not None:
        outside.clear(out, call.cu_seqlens_q)
    out = out.view(*call.q.shape[:-1], out.shape[-1])[..., : call.head_dim_v]
    lse = None if lse is None else lse.view(call.q.shape[:-1]).transpose(-1, -2)
    return Result(out, lse, None, tuple(kept))


def backward(call: AttentionCall, upstream: Upstream) -> Gradients:
    q, k, v = (_tokens(call, tensor) for tensor in (call.q, call.k, call.v))
    dout, out = (_tokens(call, tensor) for tensor in (upstream.dout, upstream.out))
    given_lse = None if upstream.saved else _lse_by_token(call, upstream.lse)
    kept = iter(upstream.saved)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Sums over the query heads that share a key head are kept in fp32.
    dtype = k.dtype if call.nheads == call.nheads_k else torch.float32
    dk, dv = (torch.zeros_like(tensor, dtype=dtype, memory_format=torch.contiguous_format) for tensor in (k, v))
    band = _band(call)
    for chunk, bias in _chunks_with_bias(call, q, band):
        for member in efficient_launch.members(call.nheads, call.nheads_k):
            launch = _launch(call, chunk, member, band, bias, q, k, v)
            if given_lse is None:
                lse = next(kept)
            else:
                lse = efficient_launch.lse_to_native(_rows(given_lse, chunk, member).transpose(1, 2))
            rows_dout, rows_out = _rows(dout, chunk, member), _rows(out, chunk, member)
            rows_dq, *pieces = efficient_launch.backward(launch, rows_dout, rows_out, Native(lse))
            _rows(dq, chunk, member).copy_(rows_dq)
            for sums in (dv, dk):
                add_overlapping(sums, pieces.pop(), chunk.first_key, band.rows)
            del launch, lse, rows_out, rows_dq
    gradients = []
    for source, gradient in zip((call.q, call.k, call.v), (dq, dk, dv)):
        if call.cu_seqlens_q is not None:
            outside.clear(gradient, call.cu_seqlens_q)
        gradients.append(gradient.view(*source.shape[:-1], gradient.shape[-1])[..., : source.shape[-1]])
    return Gradients(*gradients)


def _launch(
    call: AttentionCall, chunk: _Chunk, member: slice, band: _Band, bias: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Launch:
    rows = _rows(q, chunk, member)
    return Launch(
        rows, _keys(k, chunk, band), _keys(v, chunk, band), call.softmax_scale,
        bias=bias.unsqueeze(1).expand(-1, rows.shape[2], -1, -1), deterministic=call.deterministic,
    )  # fmt: skip


def _band(call: AttentionCall) -> _Band:
    longest = call.max_seqlen_k
    left, right = call.mask
    assert left is not None and right is not None  # or it is no band
    left, right = min(left, longest), min(right, longest)
    rows = min(_MAX_ROWS, max(_MIN_ROWS, -(-(left + right) // 2 // 64) * 64))
    return _Band(rows, -(-left // rows) * rows, -(-right // rows) * rows, left, right)


def _chunks_with_bias(call: AttentionCall, q: Tensor, band: _Band) -> Iterator[tuple[_Chunk, Tensor]]:
    """Launches and the bias of each, (blocks, rows, keys)."""
    marks = _marks(call, q.shape[0], band)
    blocks = -(-q.shape[0] // band.rows)
    # One bias for all launches where it is small: some operations less for each of them.
    shares = blocks * band.rows * band.width <= _LAUNCH_ELEMENTS
    shared = _bias(marks, 0, blocks, band, q.dtype) if shares else None
    for chunk in _chunks(q, band):
        first, skipped = chunk.start // band.rows, chunk.first_key - (chunk.start - band.before)
        bias = (
            _bias(marks, first, chunk.blocks, band, q.dtype)
            if shared is None
            else shared.narrow(0, first, chunk.blocks)
        )
        if chunk.keys < band.width:
            bias = bias[:, : chunk.rows, skipped : skipped + chunk.keys]
        yield chunk, bias


def _chunks(q: Tensor, band: _Band) -> Iterator[_Chunk]:
    """Blocks whose slice reaches beyond the tokens one by one, cut off there; of the others what memory allows."""
    total, elements = q.shape[0], q.shape[1] * q.shape[2]
    blocks = -(-total // band.rows)
    first_inner = min(blocks, band.before // band.rows)
    last_inner = max(first_inner, (total - band.after) // band.rows)
    most = max(1, _LAUNCH_ELEMENTS // (band.rows * max(elements, band.width)))
    step = -(-(last_inner - first_inner) // max(1, -(-(last_inner - first_inner) // most)))
    for block in (*range(first_inner), *range(last_inner, blocks)):
        start = block * band.rows
        first_key, stop = max(0, start - band.before), min(total, start + band.rows + band.after)
        yield _Chunk(1, start, min(band.rows, total - start), first_key, stop - first_key)
    for block in range(first_inner, last_inner, max(1, step)):
        start = block * band.rows
        yield _Chunk(min(step, last_inner - block), start, band.rows, start - band.before, band.width)


def _tokens(call: AttentionCall, tensor: Tensor) -> Tensor:
    """(tokens, heads, head_dim) as the kernel reads it; a view unless channels or sequences are oddly strided.

    Blocks beside a sequence multiply what lies outside by 0, which NaN would survive.
    """
    if call.cu_seqlens_q is not None:
        tensor = outside.cleared(tensor, call.cu_seqlens_q)
    padded = alignment.ready(efficient_launch.pad_channels(tensor))
    return padded.flatten(0, 1) if padded.dim() == 4 else padded


def _rows(tensor: Tensor, chunk: _Chunk, member: slice) -> Tensor:
    """The blocks of (tokens, heads, ...): (blocks, rows, heads, ...)."""
    rows = _windows(tensor, chunk.start, (chunk.blocks, chunk.rows), chunk.rows)
    return rows if member.step is None else rows[:, :, member]


def _keys(tensor: Tensor, chunk: _Chunk, band: _Band) -> Tensor:
    """The slices, which overlap: (blocks, keys, heads, head_dim)."""
    return _windows(tensor, chunk.first_key, (chunk.blocks, chunk.keys), band.rows)


def _windows(tensor: Tensor, start: int, shape: tuple[int, int], step: int) -> Tensor:
    strides = tensor.stride()
    offset = tensor.storage_offset() + start * strides[0]
    return tensor.as_strided((*shape, *tensor.shape[1:]), (step * strides[0], *strides), offset)


def _marks(call: AttentionCall, total: int, band: _Band) -> Tensor:
    """Which sequence each token belongs to, from ``before`` tokens in front of the first to behind the last block."""
    stop = -(-total // band.rows) * band.rows + band.after
    tokens = torch.arange(-band.before, stop, dtype=torch.int32, device=call.q.device)
    if call.cu_seqlens_q is None:
        return tokens.div_(call.q.shape[1], rounding_mode="floor")
    return torch.searchsorted(call.cu_seqlens_q, tokens, right=True, out_int32=True)


def _bias(marks: Tensor, first: int, blocks: int, band: _Band, dtype: torch.dtype) -> Tensor:
    """(blocks, rows, keys): 0 where a key of the same sequence is in the window, else the lowest number or -inf."""
    if elementwise.bias_is_usable(marks.device, dtype):
        sizes = blocks, band.rows, band.width
        return elementwise.band_bias(marks[first * band.rows :], sizes, band.before, Mask(band.left, band.right), dtype)
    strip = marks[first * band.rows : (first + blocks - 1) * band.rows + band.width]
    keys = strip.unfold(0, band.width, band.rows)
    rows = keys[:, band.before : band.before + band.rows]
    lowest = torch.finfo(dtype).min
    # Row 0 is column ``before``.
    full = torch.full((band.rows, band.width), lowest, dtype=dtype, device=marks.device)
    window = full.tril(band.before - band.left - 1).add_(full.triu_(band.before + band.right + 1))
    return torch.add(window, rows[:, :, None] != keys[:, None], alpha=lowest)


def _lse_by_token(call: AttentionCall, lse: Tensor) -> Tensor:
    """(tokens, nheads), +inf outside of all sequences: such rows give no gradient to their neighbours."""
    by_token = lse.transpose(-1, -2)
    if call.cu_seqlens_q is None:
        return by_token.flatten(0, 1)
    if not outside.may_exist(call.cu_seqlens_q, by_token.shape[0]):
        return by_token
    return by_token.masked_fill(outside.mask(call.cu_seqlens_q, by_token.shape[0])[:, None], torch.inf)
