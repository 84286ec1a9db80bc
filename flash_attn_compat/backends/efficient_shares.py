"""How the keys of a cache are cut into shares for the memory-efficient kernel, each a sequence of its own to it.

``prepare`` and ``merge`` are what surrounds the launch, in plain operators; efficient_decode.py has them as kernels.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.engine.alignment import ready
from flash_attn_compat.engine.call import AttentionCall

# Below this many (sequence, key head) pairs a cache is cut into shares until the GPU has that many. Of 64 to 512
# shares this was the best in every case tried (batch 1 to 8, 2 to 32 key heads, 2048 to 32768 keys, an H200).
_ENOUGH_WORK = 256
_SHORTEST_SHARE = 256
# Shorter caches stay whole: launching the merge would take longer than it saves.
_WORTH_CUTTING = 2048
# A finite stand-in for the LSE of a share without keys.
_NOTHING = -1e30


class Cut(NamedTuple):
    """How keys become shares: so many for each sequence, of ``size`` slots each.

    page, pitch: slots of a cache row or page, and from one to the next in the flattened cache
    pages: of one sequence, 0 for cache rows in their order, 1 where ``table`` holds a row for each sequence
    left: how many keys before its own the only row sees, -1 for all
    used, leftpad: (batch,) int32 or None; table: (batch, pages) int32 or None
    """

    shares: int
    size: int
    page: int
    pitch: int
    pages: int
    left: int
    used: Tensor | None
    leftpad: Tensor | None
    table: Tensor | None


class Prepared(NamedTuple):
    """What a launch over shares reads.

    rows: (1, batch * count * rows, nheads_k, head_dim), each sequence's rows once for each of its shares, where the
        query heads that share a key head are rows
    cu_seqlens_q: (batch * count + 1,) int32
    starts: (batch * count + 1,) int32, first keys in the flattened cache; the last one is not read
    lengths: (batch * count,) int32
    """

    rows: Tensor
    cu_seqlens_q: Tensor
    starts: Tensor
    lengths: Tensor


def cut(call: AttentionCall, pitch: int) -> Cut:
    """Pages are shares; a cache row is cut into equal ones, as many as fill the GPU.

    pitch: how many slots of the flattened cache lie between the starts of two cache rows, or pages
    """
    table, left = call.block_table, call.mask.left
    _, page, nheads_k, _ = call.k.shape
    pages = 0 if table is None else table.shape[1]
    count, size = (pages, page) if pages > 1 else _even_shares(call.q.shape[0], nheads_k, page)
    left = -1 if left is None else left
    return Cut(count, size, page, pitch, pages, left, call.seqused_k, call.leftpad_k, table)


def is_worth_cutting(batch: int, nheads_k: int, slots: int) -> bool:
    """Whether the sequences alone leave the GPU idle, and for long enough."""
    return slots >= _WORTH_CUTTING and batch * nheads_k < _ENOUGH_WORK


@functools.lru_cache(maxsize=1024)
def _even_shares(batch: int, nheads_k: int, slots: int) -> tuple[int, int]:
    count = 1
    if is_worth_cutting(batch, nheads_k, slots):
        count = min(-(-_ENOUGH_WORK // (batch * nheads_k)), slots // _SHORTEST_SHARE)
    size = -(-slots // count)
    return -(-slots // size), size


def prepare(q: Tensor, nheads_k: int, cut: Cut) -> Prepared:
    """q: (batch, seqlen_q, nheads, head_dim)."""
    batch, seqlen_q, nheads, head_dim = q.shape
    group, count = nheads // nheads_k, cut.shares
    by_head = q.unflatten(2, (nheads_k, group)).transpose(2, 3).unsqueeze(1)
    rows = ready(by_head.expand(-1, count, -1, -1, -1, -1).reshape(1, -1, nheads_k, head_dim))
    ints = functools.partial(torch.arange, dtype=torch.int32, device=q.device)
    offsets = ints(0, count * cut.size, cut.size)
    if cut.table is None:
        starts = ints(0, batch * cut.pitch, cut.pitch).unsqueeze(1) + offsets
    else:
        starts = cut.table * cut.pitch if cut.pages > 1 else cut.table * cut.pitch + offsets
    used = cut.used
    if used is None:
        used = torch.full((batch,), cut.page * max(1, cut.pages), dtype=torch.int32, device=q.device)
    lengths = (used.unsqueeze(1) - offsets).clamp_(0, cut.size)
    first = cut.leftpad
    if cut.left >= 0:
        # The only row stands at the last key.
        edge = used - 1 - cut.left
        first = edge if first is None else torch.maximum(first, edge)
    if first is not None:
        skipped = torch.minimum((first.unsqueeze(1) - offsets).clamp_(min=0), lengths)
        starts, lengths = starts + skipped, lengths - skipped
    cu_seqlens_q = ints(0, (batch * count + 1) * seqlen_q * group, seqlen_q * group)
    return Prepared(rows, cu_seqlens_q, torch.cat((starts.flatten(), starts.new_zeros(1))), lengths.flatten())


def merge(out: Tensor, lse: Tensor, lengths: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The whole output in ``shape``, (batch, seqlen_q, nheads, head_dim_v), of shares that were computed alone.

    out: (1, batch * count * rows, nheads_k, head_dim_v); lse: (batch * count, nheads_k, rows padded), fp32
    """
    batch, seqlen_q, nheads, head_dim = shape
    nheads_k = out.shape[2]
    group = nheads // nheads_k
    parts = out.view(batch, -1, seqlen_q, group, nheads_k, head_dim).transpose(3, 4)
    lse = by_share(lse, lengths, batch, seqlen_q * group)
    weights = torch.softmax(lse.masked_fill(lse == -torch.inf, _NOTHING), 1)
    weights = weights.unflatten(3, (seqlen_q, group)).permute(0, 1, 3, 2, 4).unsqueeze(-1)
    # Beyond 128 channels the output of a share without keys is whatever the memory held.
    empty = (lengths <= 0).view(batch, -1, 1, 1, 1, 1)
    merged: Tensor = (weights * parts).masked_fill(empty, 0.0).sum(1).to(out.dtype).reshape(shape)
    return merged


def by_share(lse: Tensor, lengths: Tensor, batch: int, rows: int) -> Tensor:
    """(batch, count, nheads_k, rows), -inf for shares without keys, for which the kernel reports 0."""
    ordered = torch.unflatten(lse[..., :rows], 0, (batch, -1))
    return ordered.masked_fill((lengths <= 0).view(batch, -1, 1, 1), -torch.inf)
