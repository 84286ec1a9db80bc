"""Online softmax over tiles of keys in plain PyTorch: every feature, every device, memory linear in length.

The forward is algorithm 1 of FlashAttention-2 (Dao, 2023) and the backward its algorithm 2, with tiles as large
as a fixed memory budget allows. If all keys that a tile of rows sees fit into one tile, no running maxima are
needed. The query heads that share a key head become rows of one matrix product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends import alibi
from flash_attn_compat.backends.base import HALF_DTYPES, BlockwiseBackend, Capabilities
from flash_attn_compat.backends.compilation import OptionallyCompiled
from flash_attn_compat.backends.varlen import Block, ByDistance
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, lse_dtype
from flash_attn_compat.core.features import Feature, all_but, lacks_tensor_cores
from flash_attn_compat.core.kernel_layout import ready
from flash_attn_compat.core.mask import Range

_BMM_HAS_OUT_DTYPE = hasattr(torch.ops.aten.bmm, "dtype")


class Chunked(BlockwiseBackend):
    name = "chunked"
    capabilities = Capabilities(features=all_but(Feature.TRANSFORMS | Feature.BIAS))

    def forward_block(
        self, call: AttentionCall, block: Block, rng_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        n, seqlen_q, nheads = block.q.shape[:3]
        out = block.q.new_empty(n, seqlen_q, nheads, call.head_dim_v)
        lse = None
        if call.use & (Feature.LSE | Feature.BACKWARD):
            lse = block.q.new_empty((n, nheads, seqlen_q), dtype=lse_dtype(block.q.dtype))
        if call.mask.rows_with_keys(seqlen_q, block.k.shape[1]).size < seqlen_q:
            # The tiles below do not write rows without keys.
            out.zero_()
            if lse is not None:
                lse.fill_(torch.inf)
        for sub in split_block(call, block, rng_state):
            for rows in sub.row_tiles():
                row_out, row_lse = _attend_rows(sub, rows)
                out[sub.n, rows.start : rows.stop, sub.heads] = row_out.transpose(1, 2)
                if lse is not None:
                    lse[sub.n, sub.heads, rows.start : rows.stop] = row_lse

        return out, lse

    def backward_block(
        self, call: AttentionCall, block: Block, upstream: BackwardInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.zeros_like(block.q), torch.empty_like(block.k), torch.empty_like(block.v)
        for sub in split_block(call, block, upstream.rng_state):
            totals = [torch.zeros_like(tensor, dtype=sub.dtype) for tensor in (sub.keys, sub.values)]
            for rows in sub.row_tiles():
                row_dq = _backpropagate_rows(sub, rows, upstream, *totals)
                dq[sub.n, rows.start : rows.stop, sub.heads] = row_dq.transpose(1, 2)
            for target, total in zip((dk, dv), totals):
                target[sub.n, :, sub.heads_kv] = total.unflatten(0, (sub.count, -1)).transpose(1, 2)
        return dq, dk, dv


def _attend_rows(sub: SubBlock, rows: Range) -> tuple[Tensor, Tensor]:
    """Algorithm 1 for one tile of rows: return out (n, q heads, rows, head_dim_v) and its LSE."""
    queries = sub.fold(sub.q, rows)
    first, *others = sub.key_tiles(rows)
    out, total, peak = _attend_tile(sub, queries, rows, first, None)
    for columns in others:
        tile_out, tile_total, new_peak = _attend_tile(sub, queries, rows, columns, peak)
        decay = torch.exp(peak - new_peak)
        out.mul_(decay).add_(tile_out)
        total.mul_(decay).add_(tile_total)
        peak = new_peak
    dead = total == 0  # rows whose visible scores are all -inf
    lse = total.log().add_(peak).masked_fill_(dead, torch.inf)
    return out.div_(total.mul_(1.0 - sub.call.dropout_p).masked_fill_(dead, 1.0)), lse.squeeze(-1)


def _attend_tile(
    sub: SubBlock, queries: Tensor, rows: Range, columns: Range, peak: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tile's terms of ``out`` and of the sum of its weights exp(score - maximum), and the running maximum."""
    weights, total, new_peak = _softmax_weights(sub, queries, rows, columns, peak)
    keep = sub.dropout_mask(rows, columns)
    if keep is not None:
        weights.mul_(keep)
    values = sub.values[:, columns.start : columns.stop]
    out = sub.unfold(sub.matmul(weights.reshape(*queries.shape[:2], -1), values), rows)
    return out, total, new_peak


def _softmax_weights(
    sub: SubBlock, queries: Tensor, rows: Range, columns: Range, peak: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tile's weights exp(score - maximum), cast for the next product, their row sums, and the running maximum.

    The maximum is finite even for a row that has seen no key yet: exp(-inf - -inf) would be nan.
    """
    if _fused_weights.is_enabled and sub.block.slopes is None and sub.block.first_key is None:
        raw, hidden = sub.raw_scores(queries, rows, columns), sub.hidden(rows, columns)
        return _fused_weights(raw, hidden, sub.call.softcap, peak, sub.operand_dtype)
    scores = sub.scores(queries, rows, columns)
    tile_peak = scores.amax(-1, keepdim=True)
    new_peak = tile_peak.clamp_min(torch.finfo(scores.dtype).min) if peak is None else torch.maximum(peak, tile_peak)
    weights = scores.sub_(new_peak).exp_()
    return weights.to(sub.operand_dtype), weights.sum(-1, keepdim=True), new_peak


@OptionallyCompiled
def _fused_weights(
    raw: Tensor, hidden: Tensor | None, softcap: float, peak: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what _softmax_weights does, from its product ``raw``, out of place so that torch.compile can fuse it."""
    scores = torch.tanh(raw) * softcap if softcap else raw
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    tile_peak = scores.amax(-1, keepdim=True)
    new_peak = tile_peak if peak is None else torch.maximum(peak, tile_peak)
    new_peak = torch.where(new_peak == -torch.inf, torch.finfo(scores.dtype).min, new_peak)
    weights = torch.exp(scores - new_peak)
    return weights.to(dtype), weights.sum(-1, keepdim=True), new_peak


def _backpropagate_rows(sub: SubBlock, rows: Range, upstream: BackwardInputs, dk: Tensor, dv: Tensor) -> Tensor:
    """Algorithm 2 for one tile of rows: add to dk and dv, and return dq (n, q heads, rows, head_dim)."""
    call = sub.call
    queries, dout = sub.fold(sub.q, rows), sub.fold(upstream.dout, rows)
    delta = (dout.to(sub.dtype) * sub.fold(upstream.out, rows)).sum(-1, keepdim=True)
    where = sub.n, sub.heads, slice(rows.start, rows.stop)
    if upstream.dlse is not None:
        delta -= upstream.dlse[where].reshape(delta.shape)
    row_lse = upstream.lse[where].to(sub.dtype).unsqueeze(-1)
    dq: Tensor | None = None
    for columns in sub.key_tiles(rows):
        inside = slice(columns.start, columns.stop)
        scores = sub.scores(queries, rows, columns)
        slope = sub.softcap_slope(queries, rows, columns, scores) if call.softcap else None
        folded = scores.sub_(row_lse).exp_().reshape(*queries.shape[:2], -1)
        keep = sub.dropout_mask(rows, columns)
        dropped = folded.to(sub.operand_dtype)
        if keep is not None:
            keep = keep.mul_(1.0 / (1.0 - call.dropout_p)).reshape(folded.shape)
            dropped = dropped * keep
        dv[:, inside] += sub.matmul(dropped.transpose(1, 2), dout)
        dscores = sub.matmul(dout, sub.values[:, inside].transpose(1, 2))
        if keep is not None:
            dscores.mul_(keep)
        dscores.sub_(delta).mul_(folded)
        if slope is not None:
            dscores.mul_(slope.reshape(dscores.shape))
        dscores = dscores.to(sub.operand_dtype)
        tile_dq = sub.matmul(dscores, sub.keys[:, inside], call.softmax_scale)
        dq = tile_dq if dq is None else dq.add_(tile_dq)
        dk[:, inside] += sub.matmul(dscores.transpose(1, 2), queries, call.softmax_scale)
    assert dq is not None  # rows that see no keys are in no tile
    return sub.unfold(dq, rows)


# ---- tiles


def _choose_operand_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of matrix operands: halves for tensor cores, which accumulate in fp32; else fp32 or fp64.

    On a CPU, products of halves can be hundreds of times slower than those of fp32.
    """
    if not q.is_cuda or q.dtype not in HALF_DTYPES or not _BMM_HAS_OUT_DTYPE:
        return lse_dtype(q.dtype)
    return lse_dtype(q.dtype) if lacks_tensor_cores(settings.gpu(q.device)) else q.dtype


class SubBlock:
    """Some sequences and heads of a block in working precision, computed tile by tile."""

    def __init__(
        self, call: AttentionCall, block: Block, rng_state: Tensor | None, n: slice, heads_kv: slice, size: TileSize,
        hidden: ByDistance[Tensor | None],
    ) -> None:  # fmt: skip
        self.call, self.rng_state, self.n, self.heads_kv, self.size = call, rng_state, n, heads_kv, size
        self.group = call.nheads // call.nheads_k
        self.heads = slice(heads_kv.start * self.group, heads_kv.stop * self.group)
        self.q, self.block = block.q, block.narrow(n)
        self.count, self.seqlen_q = self.block.q.shape[:2]
        self.seqlen_k, self.offset = self.block.k.shape[1], block.offset
        self.dtype = lse_dtype(block.q.dtype)
        self.operand_dtype = _choose_operand_dtype(block.q)
        self.hidden = hidden
        self.keys = self._fold_keys(self.block.k)
        self.values = self._fold_keys(self.block.v)

    def row_tiles(self) -> Iterator[Range]:
        alive = self.call.mask.rows_with_keys(self.seqlen_q, self.seqlen_k)
        for start in range(alive.start, alive.stop, self.size.rows):
            yield Range(start, min(start + self.size.rows, alive.stop))

    def key_tiles(self, rows: Range) -> Iterator[Range]:
        """Yield tiles of the keys that any of ``rows`` sees; they start at multiples of 8, for fast matrix products."""
        visible = self.call.mask.visible_keys(rows, self.offset, self.seqlen_k)
        for start in range(visible.start - visible.start % 8, visible.stop, self.size.keys):
            yield Range(start, min(start + self.size.keys, visible.stop))

    def fold(self, tensor: Tensor, rows: Range) -> Tensor:
        """Return rows of a (n, seqlen_q, nheads, x) tensor as operands (n * kv heads, group * rows, x)."""
        some = tensor[self.n, rows.start : rows.stop, self.heads].to(self.operand_dtype).transpose(1, 2)
        return self._align_operand(some.reshape(-1, self.group * rows.size, tensor.shape[-1]))

    def unfold(self, folded: Tensor, rows: Range) -> Tensor:
        """Return a result of ``fold``'s shape (n * kv heads, group * rows, x) as (n, q heads, rows, x)."""
        return folded.reshape(self.count, -1, rows.size, folded.shape[-1])

    def _fold_keys(self, tensor: Tensor) -> Tensor:
        return self._align_operand(tensor[:, :, self.heads_kv].to(self.operand_dtype).transpose(1, 2).flatten(0, 1))

    def _align_operand(self, matrices: Tensor) -> Tensor:
        """Return ``matrices``, or an aligned copy: half-precision products on a GPU cannot read an unaligned view."""
        return ready(matrices) if self.operand_dtype != self.dtype and not matrices.shape[-1] % 8 else matrices

    def raw_scores(self, queries: Tensor, rows: Range, columns: Range) -> Tensor:
        """Return scaled products of queries and keys (n, q heads, rows, columns), divided by softcap if it is set."""
        keys = self.keys[:, columns.start : columns.stop].transpose(1, 2)
        return self.unfold(self.matmul(queries, keys, self.call.softmax_scale / (self.call.softcap or 1.0)), rows)

    def scores(self, queries: Tensor, rows: Range, columns: Range) -> Tensor:
        """Return scores (n, q heads, rows, columns), -inf where hidden."""
        scores = self.raw_scores(queries, rows, columns)
        if self.call.softcap:
            scores.tanh_().mul_(self.call.softcap)
        if self.block.slopes is not None:
            alibi.add_bias_(scores, self.block.slopes[:, self.heads], rows, columns, self.offset)
        for stretch in self.call.mask.partly_hidden(rows, columns, self.offset):
            hidden = self.hidden(rows, stretch)
            if hidden is not None:
                within = slice(stretch.start - columns.start, stretch.stop - columns.start)
                scores[..., within].masked_fill_(hidden, -torch.inf)
        padding = self.block.padding(columns)
        if padding is not None:
            scores.masked_fill_(padding, -torch.inf)
        return scores

    def softcap_slope(self, queries: Tensor, rows: Range, columns: Range, scores: Tensor) -> Tensor:
        """Return the derivative of softcap * tanh(x / softcap) at the uncapped scores x."""
        # Without ALiBi, tanh is scores / softcap. A hidden key's score is -inf: its slope is wrong, but not used.
        has_tanh = self.block.slopes is None
        tanh = scores / self.call.softcap if has_tanh else self.raw_scores(queries, rows, columns).tanh_()
        return tanh.clamp_(-1.0, 1.0).square_().neg_().add_(1.0)

    def matmul(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """Return a @ b * scale, accumulated and returned in fp32 (fp64 if the operands are), whatever their dtype."""
        if a.dtype == self.dtype:
            applied = 1.0 if math.isnan(scale) else scale  # on a CPU alpha=nan counts as 0
            result = torch.baddbmm(
                a.new_empty(1, 1, 1).expand(a.shape[0], a.shape[1], b.shape[2]), a, b, beta=0, alpha=applied
            )
        else:
            applied, result = 1.0, torch.bmm(a, b, out_dtype=self.dtype)
        return result if scale == applied else result.mul_(scale)

    def dropout_mask(self, rows: Range, columns: Range) -> Tensor | None:
        """Return a tile's dropout mask, 1 to keep and 0 to drop (n, q heads, rows, columns); None without dropout."""
        if not self.call.dropout_p:
            return None
        heads = Range(self.heads.start, self.heads.stop)
        return self.block.kept(self.rng_state, self.call.dropout_p, heads, rows, columns).to(self.operand_dtype)


class TileSize(NamedTuple):
    """The size of a tile: rows, keys, and the key heads and sequences computed together."""

    sequences: int
    heads_kv: int
    rows: int
    keys: int


class TileLimits(NamedTuple):
    """Limits of one tile.

    elements: the most scores; keys: the most keys; rows: the height that any tile may have
    share: under a mask, a taller tile has at most 1 / share as many rows as its window has keys
    small: a call of at most so many scores gets tiles of all rows, even if the mask hides half: launches cost more
    """

    elements: int
    keys: int
    rows: int
    share: int
    small: int


# On a CPU a tile should fit into a core's cache. On a GPU small tiles need too many launches.
_CPU_LIMITS = TileLimits(elements=2**19, keys=512, rows=128, share=2, small=0)
_ACCELERATOR_LIMITS = TileLimits(elements=5 * 2**23, keys=8192, rows=256, share=1, small=2**24)
_ALIGNED_ROWS = 64
# How many tiles' masks are cached for tiles that lie alike: one for each end of a window.
_CACHED_MASKS = 2


def _choose_tile_size(call: AttentionCall, block: Block) -> TileSize:
    """Return the largest tile within the device's limits: first rows and keys grow, then heads, sequences, rows again.

    Under a mask its rows are limited, because very tall tiles would mostly compute scores that the mask hides.
    """
    limits = _CPU_LIMITS if block.q.is_cpu else _ACCELERATOR_LIMITS
    n, seqlen_q = block.q.shape[:2]
    seqlen_k = block.k.shape[1]
    left, right = call.mask.left, call.mask.right
    band = seqlen_k if left is None or right is None else min(seqlen_k, left + right + 1)
    rows = min(seqlen_q, limits.rows)
    all_scores = n * call.nheads * seqlen_q * seqlen_k
    everything = call.mask.is_full or all_scores <= limits.small
    most_rows = seqlen_q if everything else max(rows, min(seqlen_k // (4 * limits.share), band // limits.share))
    keys = min(seqlen_k, band + most_rows, limits.keys)
    budget = limits.elements // (call.nheads // call.nheads_k)
    heads = max(1, min(call.nheads_k, budget // (rows * keys)))
    sequences = max(1, min(n, budget // (rows * keys * heads)))
    sequences = -(-n // -(-n // sequences))
    rows = max(min(rows, max(16, budget // keys)), min(most_rows, budget // (sequences * heads * keys)))
    if _ALIGNED_ROWS < rows < seqlen_q:
        # So that the visible keys of later tiles start at an aligned address, for fast matrix products.
        rows -= rows % _ALIGNED_ROWS
    return TileSize(sequences, heads, rows, keys)


def split_block(call: AttentionCall, block: Block, rng_state: Tensor | None) -> Iterator[SubBlock]:
    size = _choose_tile_size(call, block)
    make = functools.partial(call.mask.hidden, offset=block.offset, device=block.q.device)
    hidden = ByDistance(make, _CACHED_MASKS)
    for start in range(0, block.q.shape[0], size.sequences):
        n = slice(start, min(start + size.sequences, block.q.shape[0]))
        for first in range(0, call.nheads_k, size.heads_kv):
            heads_kv = slice(first, min(first + size.heads_kv, call.nheads_k))
            yield SubBlock(call, block, rng_state, n, heads_kv, size, hidden)
