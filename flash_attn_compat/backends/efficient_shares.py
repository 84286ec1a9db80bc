"""How the keys of a cache are cut into shares for the memory-efficient kernel, each a sequence of its own to it.

Small batches are bound by the host, so what depends on sizes alone is made once and remembered, per stream:
a tensor made on a stream is complete for whatever comes after it there. Nothing remembered goes into a CUDA
graph, which would read it after it was forgotten, and nothing is remembered out of one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.engine.call import AttentionCall

# Below this many (sequence, key head) pairs a cache is cut into shares until the GPU has that many.
_ENOUGH_WORK = 128
_SHORTEST_SHARE = 256
# Elements of the largest table of even shares that is kept: 4 MiB.
_LARGEST_TABLE = 2**20


class Shares(NamedTuple):
    """``count`` per sequence, in the sequences' order.

    cu_seqlens_q: (batch * count + 1,) int32, the rows repeated for each share
    starts: (batch * count + 1,) int32, first keys in the flattened cache; the last one is not read
    lengths: (batch * count,) int32
    longest: no share has more keys
    alike: whether the shares of a sequence all have keys, or none of them
    """

    count: int
    cu_seqlens_q: Tensor
    starts: Tensor
    lengths: Tensor
    longest: int
    alike: bool = False


class _Sizes(NamedTuple):
    """pages: of one sequence, 0 for cache rows in their order; pitch: slots from one row or page to the next."""

    batch: int
    nheads_k: int
    rows: int
    page: int
    pages: int
    pitch: int

    @property
    def slots(self) -> int:
        return self.page * max(1, self.pages)


class _Cut(NamedTuple):
    """``count`` shares per sequence of ``size`` slots each.

    offsets: (count,) int32, each share's first slot in its sequence
    starts: (batch * count + 1,) int32 in the flattened cache; with pages (2, 1, count or 1) in the page, twice
        because the kernel wants one number more than there are shares
    """

    count: int
    size: int
    cu_seqlens_q: Tensor
    offsets: Tensor
    starts: Tensor


def cut(call: AttentionCall, pitch: int) -> Shares:
    """Pages are shares; a cache row is cut into equal ones, as many as fill the GPU.

    pitch: how many slots of the flattened cache lie between the starts of two cache rows, or pages
    """
    batch, seqlen_q, nheads, _ = call.q.shape
    _, page, nheads_k, _ = call.k.shape
    table, used, device = call.block_table, call.seqused_k, call.q.device
    pages = 0 if table is None else table.shape[1]
    sizes = _Sizes(batch, nheads_k, seqlen_q * (nheads // nheads_k), page, pages, pitch)
    stream = _stream(call.q)
    parts = _make_cut(sizes, device) if stream is None else _remembered_cut(sizes, device, stream)
    count, size, cu_seqlens_q, offsets, starts = parts
    skips = call.leftpad_k is not None or call.mask.left is not None
    if batch == 1 and count > 1 and table is None and used is not None and not skips and not call.return_lse:
        even = _known_even_shares(page, count, device, stream)
        if even is not None:
            found = even.index_select(0, used)
            starts, lengths = found.as_strided((count + 1,), (1,)), found.as_strided((count,), (1,), count + 1)
            return Shares(count, cu_seqlens_q, starts, lengths, page, alike=True)
    if used is None:
        used = torch.full((batch,), sizes.slots, dtype=torch.int32, device=device)
    stop = used.unsqueeze(1)
    lengths = stop.clamp(0, size) if count == 1 else (stop - offsets).clamp_(0, size)
    if table is not None:
        starts = torch.add(starts, table, alpha=pitch)
    if skips:
        starts = starts[:-1].view(batch, count) if table is None else starts[0]
        first = call.leftpad_k
        if call.mask.left is not None:
            # The only row stands at the last key.
            edge = used - 1 - call.mask.left
            first = edge if first is None else torch.maximum(first, edge)
        skipped = torch.minimum((first.unsqueeze(1) - offsets).clamp_(min=0), lengths)
        starts, lengths = F.pad((starts + skipped).view(-1), (0, 1)), lengths - skipped
    elif table is not None:
        starts = starts.as_strided((batch * count + 1,), (1,))
    return Shares(count, cu_seqlens_q, starts, lengths.view(-1), size)


def _make_cut(sizes: _Sizes, device: torch.device) -> _Cut:
    batch, page = sizes.batch, sizes.page
    if sizes.pages > 1:
        count, size = sizes.pages, page
    else:
        count = max(1, min(-(-_ENOUGH_WORK // (batch * sizes.nheads_k)), page // _SHORTEST_SHARE))
        size = -(-page // count)
        count = -(-page // size)
    ints = functools.partial(torch.arange, dtype=torch.int32, device=device)
    cu_seqlens_q = ints(0, (batch * count + 1) * sizes.rows, sizes.rows)
    offsets = ints(0, count * size, size)
    if sizes.pages == 0:
        rows = ints(0, (batch + 1) * sizes.pitch, sizes.pitch).unsqueeze(1)
        starts = (rows + offsets).view(-1)[: batch * count + 1]
    else:
        within = offsets if sizes.pages == 1 else offsets.new_zeros(1)
        starts = within.repeat(2, 1, 1)
    return _Cut(count, size, cu_seqlens_q, offsets, starts)


@functools.lru_cache(maxsize=64)
def _remembered_cut(sizes: _Sizes, device: torch.device, stream: int) -> _Cut:
    with torch.inference_mode(False):
        return _make_cut(sizes, device)


def _known_even_shares(slots: int, count: int, device: torch.device, stream: int | None) -> Tensor | None:
    """A table of even shares if there is one; it is worth making when the same sizes come up again."""
    if stream is None or (slots + 1) * (2 * count + 1) > _LARGEST_TABLE:
        return None
    if next(_sightings(slots, count, device, stream)) == 0:
        return None
    return _even_shares(slots, count, device, stream)


@functools.lru_cache(maxsize=64)
def _sightings(slots: int, count: int, device: torch.device, stream: int) -> Iterator[int]:
    return itertools.count()


@functools.lru_cache(maxsize=8)
def _even_shares(slots: int, count: int, device: torch.device, stream: int) -> Tensor:
    """For every length from 0 to ``slots``, one row: the starts of ``count`` even shares and its end, their lengths.

    A length looked up in it is one operation, and no share of it is empty: of fewer keys than shares, each share
    has all, and merged they are what they are alone.
    """
    with torch.inference_mode(False):
        length = torch.arange(slots + 1, dtype=torch.int32, device=device).unsqueeze(1)
        bounds = (length * torch.arange(count + 1, dtype=torch.int64, device=device) // count).int()
        few = length < count
        starts = bounds.masked_fill(few, 0)
        lengths = torch.where(few, length, bounds[:, 1:] - bounds[:, :-1])
        return torch.cat([starts, lengths], 1)


def _stream(q: Tensor) -> int | None:
    """The stream that q's device works on now; None where nothing may be remembered: in a CUDA graph, under fakes."""
    if type(q) is not Tensor:
        return None
    if q.device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch._C._cuda_getCurrentRawStream(q.device.index)
