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

# Below this many (sequence, key head) pairs a cache is cut into shares until the GPU has that many. Of 64 to 512
# shares this was the best in every case tried (batch 1 to 8, 2 to 32 key heads, 2048 to 32768 keys, an H200).
_ENOUGH_WORK = 256
_SHORTEST_SHARE = 256
# Shorter caches stay whole: launching the merge would take longer than it saves.
_WORTH_CUTTING = 2048
# Elements of the largest table of even shares that is kept: 4 MiB.
_LARGEST_TABLE = 2**20


# The LSE of a share without keys: finite, so that the shares of a sequence without any weigh the same.
NOTHING = -1e30


class Merging(NamedTuple):
    """How shares become sequences again, by torch.embedding_bag.

    members: (batch * nheads_k * rows * count,) int32, each share's row of the kernel's flattened output
    bags: (batch * nheads_k * rows,) int32, where the shares of a row and head begin in it
    nothing: (), NOTHING in fp32
    """

    members: Tensor
    bags: Tensor
    nothing: Tensor


class Shares(NamedTuple):
    """``count`` per sequence, in the sequences' order.

    cu_seqlens_q: (batch * count + 1,) int32, the rows repeated for each share
    starts: (batch * count + 1,) int32, first keys in the flattened cache; the last one is not read
    lengths: (batch * count,) int32
    longest: no share has more keys
    alike: whether the shares of a sequence all have keys, or none of them
    full: whether all of them have keys, whatever the sequence
    """

    count: int
    cu_seqlens_q: Tensor
    starts: Tensor
    lengths: Tensor
    longest: int
    merging: Merging
    alike: bool = False
    full: bool = False


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
    lengths: (batch * count,) int32, of sequences that fill all their slots
    """

    count: int
    size: int
    cu_seqlens_q: Tensor
    offsets: Tensor
    starts: Tensor
    lengths: Tensor
    merging: Merging


def cut(call: AttentionCall, pitch: int) -> Shares:
    """Pages are shares; a cache row is cut into equal ones, as many as fill the GPU.

    pitch: how many slots of the flattened cache lie between the starts of two cache rows, or pages
    """
    batch, seqlen_q, nheads, _ = call.q.shape
    _, page, nheads_k, _ = call.k.shape
    table, used, device = call.block_table, call.seqused_k, call.q.device
    sizes = _Sizes(
        batch, nheads_k, seqlen_q * (nheads // nheads_k), page, 0 if table is None else table.shape[1], pitch
    )
    stream = _stream(call.q)
    parts = _make_cut(sizes, device) if stream is None else _remembered_cut(sizes, device, stream)
    skips = call.leftpad_k is not None or call.mask.left is not None
    if batch == 1 and parts.count > 1 and table is None and used is not None and not skips and not call.return_lse:
        even = _known_even_shares(page, parts.count, device, stream)
        if even is not None:
            return _looked_up(even, used, parts, page)
    if used is None and table is None and not skips:
        full = parts.cu_seqlens_q, parts.starts, parts.lengths, parts.size, parts.merging
        return Shares(parts.count, *full, alike=True, full=True)
    if used is None:
        used = torch.full((batch,), sizes.slots, dtype=torch.int32, device=device)
    stop = used.unsqueeze(1)
    lengths = stop.clamp(0, parts.size) if parts.count == 1 else (stop - parts.offsets).clamp_(0, parts.size)
    starts = parts.starts if table is None else torch.add(parts.starts, table, alpha=pitch)
    if skips:
        places = starts[:-1].view(batch, parts.count) if table is None else starts[0]
        skipped = torch.minimum((_first(call, used).unsqueeze(1) - parts.offsets).clamp_(min=0), lengths)
        starts, lengths = F.pad((places + skipped).view(-1), (0, 1)), lengths - skipped
    elif table is not None:
        starts = starts.as_strided((batch * parts.count + 1,), (1,))
    return Shares(parts.count, parts.cu_seqlens_q, starts, lengths.view(-1), parts.size, parts.merging)


def is_worth_cutting(batch: int, nheads_k: int, slots: int) -> bool:
    """Whether the sequences alone leave the GPU idle, and for long enough."""
    return slots >= _WORTH_CUTTING and batch * nheads_k < _ENOUGH_WORK


def _first(call: AttentionCall, used: Tensor) -> Tensor:
    """(batch,) the first slot that is not skipped; may be negative."""
    if call.mask.left is None:
        return call.leftpad_k
    # The only row stands at the last key.
    edge = used - 1 - call.mask.left
    return edge if call.leftpad_k is None else torch.maximum(call.leftpad_k, edge)


def _looked_up(even: Tensor, used: Tensor, parts: _Cut, slots: int) -> Shares:
    found = even.index_select(0, used)
    starts = found.as_strided((parts.count + 1,), (1,))
    lengths = found.as_strided((parts.count,), (1,), parts.count + 1)
    return Shares(parts.count, parts.cu_seqlens_q, starts, lengths, slots, parts.merging, alike=True)


def _make_cut(sizes: _Sizes, device: torch.device) -> _Cut:
    batch, page = sizes.batch, sizes.page
    if sizes.pages > 1:
        count, size = sizes.pages, page
    else:
        count = 1
        if is_worth_cutting(batch, sizes.nheads_k, page):
            count = min(-(-_ENOUGH_WORK // (batch * sizes.nheads_k)), page // _SHORTEST_SHARE)
        size = -(-page // count)
        count = -(-page // size)
    ints = functools.partial(torch.arange, dtype=torch.int32, device=device)
    cu_seqlens_q = ints(0, (batch * count + 1) * sizes.rows, sizes.rows)
    offsets = ints(0, count * size, size)
    if sizes.pages == 0:
        firsts = ints(0, (batch + 1) * sizes.pitch, sizes.pitch).unsqueeze(1)
        starts = (firsts + offsets).view(-1)[: batch * count + 1]
    else:
        within = offsets if sizes.pages == 1 else offsets.new_zeros(1)
        starts = within.repeat(2, 1, 1)
    lengths = (sizes.slots - offsets).clamp_(max=size).repeat(batch)
    outputs = ints(batch * count * sizes.rows * sizes.nheads_k).view(batch, count, sizes.rows, sizes.nheads_k)
    members = outputs.permute(0, 3, 2, 1).reshape(-1)
    merging = Merging(members, ints(0, members.shape[0], count), torch.full((), NOTHING, device=device))
    return _Cut(count, size, cu_seqlens_q, offsets, starts, lengths, merging)


@functools.lru_cache(maxsize=32)
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
