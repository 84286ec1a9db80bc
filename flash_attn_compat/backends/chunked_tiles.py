"""What `chunked` works on: sub-blocks, and how large a tile of scores is computed at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends.base import HALF_DTYPES
from flash_attn_compat.engine import alibi
from flash_attn_compat.engine.alignment import ready
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.layout import Block, lse_dtype
from flash_attn_compat.engine.mask import ByDistance, Range


class SubBlock:
    """Some sequences and heads of a block in working precision, worked on one tile at a time."""

    def __init__(
        self,
        call: AttentionCall,
        block: Block,
        rng_state: Tensor | None,
        n: slice,
        heads_kv: slice,
        size: TileSize,
        hidden: ByDistance[Tensor | None],
    ) -> None:
        self.call, self.rng_state, self.n, self.heads_kv, self.size = call, rng_state, n, heads_kv, size
        self.group = call.nheads // call.nheads_k
        self.heads = slice(heads_kv.start * self.group, heads_kv.stop * self.group)
        self.q, self.block = block.q, block.narrow(n)
        self.count, self.seqlen_q = self.block.q.shape[:2]
        self.seqlen_k, self.offset = self.block.k.shape[1], block.offset
        self.dtype = lse_dtype(block.q.dtype)
        self.operand_dtype = block.q.dtype if _multiplies_half(block.q) else self.dtype
        self.hidden = hidden
        self.keys = self._fold_keys(self.block.k)
        self.values = self._fold_keys(self.block.v)

    def row_tiles(self) -> Iterator[Range]:
        alive = self.call.mask.rows_with_keys(self.seqlen_q, self.seqlen_k)
        for start in range(alive.start, alive.stop, self.size.rows):
            yield Range(start, min(start + self.size.rows, alive.stop))

    def key_tiles(self, rows: Range) -> Iterator[Range]:
        """The keys that some of ``rows`` see, from a multiple of 8 on, where matrix products read fast."""
        visible = self.call.mask.visible_keys(rows, self.offset, self.seqlen_k)
        for start in range(visible.start - visible.start % 8, visible.stop, self.size.keys):
            yield Range(start, min(start + self.size.keys, visible.stop))

    def fold(self, tensor: Tensor, rows: Range) -> Tensor:
        """Rows of a (n, seqlen_q, nheads, x) tensor as operands (n * kv heads, group * rows, x)."""
        some = tensor[self.n, rows.start : rows.stop, self.heads].to(self.operand_dtype).transpose(1, 2)
        return self._operand(some.reshape(-1, self.group * rows.size, tensor.shape[-1]))

    def unfold(self, folded: Tensor, rows: Range) -> Tensor:
        """(n * kv heads, group * rows, x) -> (n, q heads, rows, x)."""
        return folded.reshape(self.count, -1, rows.size, folded.shape[-1])

    def _fold_keys(self, tensor: Tensor) -> Tensor:
        return self._operand(tensor[:, :, self.heads_kv].to(self.operand_dtype).transpose(1, 2).flatten(0, 1))

    def _operand(self, matrices: Tensor) -> Tensor:
        """A view of the caller's memory may begin anywhere, which half-precision products on a GPU can't read."""
        return ready(matrices) if self.operand_dtype != self.dtype and not matrices.shape[-1] % 8 else matrices

    def raw_scores(self, queries: Tensor, rows: Range, columns: Range) -> Tensor:
        """Scaled products of queries and keys, (n, q heads, rows, columns), divided by softcap where there is one."""
        keys = self.keys[:, columns.start : columns.stop].transpose(1, 2)
        return self.unfold(self.product(queries, keys, self.call.softmax_scale / (self.call.softcap or 1.0)), rows)

    def scores(self, queries: Tensor, rows: Range, columns: Range) -> Tensor:
        """Scores (n, q heads, rows, columns), -inf where unseen."""
        scores = self.raw_scores(queries, rows, columns)
        if self.call.softcap:
            scores.tanh_().mul_(self.call.softcap)
        if self.block.slopes is not None:
            alibi.add_bias_(scores, self.block.slopes[:, self.heads], rows, columns, self.offset)
        for stretch in self.call.mask.partly_hidden(rows, columns, self.offset):
            hidden = self.hidden(rows, stretch)
            if hidden is not None:
                scores[..., stretch.start - columns.start : stretch.stop - columns.start].masked_fill_(
                    hidden, -torch.inf
                )
        padding = self.block.padding(columns)
        if padding is not None:
            scores.masked_fill_(padding, -torch.inf)
        return scores

    def softcap_slope(self, queries: Tensor, rows: Range, columns: Range, scores: Tensor) -> Tensor:
        """The derivative of a score with regard to what softcap was applied to."""
        # Without ALiBi's bias, scores give the tanh; a hidden key's is -inf, and its gradient 0 whatever the slope.
        of_scores = self.block.slopes is None
        tanh = scores / self.call.softcap if of_scores else self.raw_scores(queries, rows, columns).tanh_()
        return tanh.clamp_(-1.0, 1.0).square_().neg_().add_(1.0)

    def product(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """a @ b * scale with fp32 (fp64) accumulation and result, whatever precision the operands are in."""
        if a.dtype == self.dtype:
            return torch.baddbmm(
                a.new_empty(1, 1, 1).expand(a.shape[0], a.shape[1], b.shape[2]), a, b, beta=0, alpha=scale
            )
        found = torch.bmm(a, b, out_dtype=self.dtype)
        return found if scale == 1.0 else found.mul_(scale)

    def keep(self, rows: Range, columns: Range) -> Tensor | None:
        """Surviving probabilities of a tile as 0 and 1, (n, q heads, rows, columns); None without dropout."""
        if not self.call.dropout_p:
            return None
        heads = Range(self.heads.start, self.heads.stop)
        return self.block.kept(self.rng_state, self.call.dropout_p, heads, rows, columns).to(self.operand_dtype)


class TileSize(NamedTuple):
    """How much is worked on at once: a tile of rows and keys, of so many heads of so many sequences."""

    sequences: int
    heads_kv: int
    rows: int
    keys: int


class Limits(NamedTuple):
    """Of one tile: elements of scores, keys, the fewest rows worth a tile, and the share of visible keys in rows.

    small: scores that are not worth a second round of launches, even if half of them are hidden
    """

    elements: int
    keys: int
    rows: int
    share: int
    small: int


# On a CPU a tile should stay in the cache of a core; on a GPU launches are what a small tile costs.
_CPU = Limits(elements=2**19, keys=512, rows=128, share=2, small=0)
_ACCELERATOR = Limits(elements=5 * 2**23, keys=8192, rows=256, share=1, small=2**24)
_ALIGNED_ROWS = 64
# Masks of tiles kept for the next ones: both ends of a window.
_REMEMBERED_TILES = 2


def _tile_size(call: AttentionCall, block: Block) -> TileSize:
    """The largest tile within the device's budget: first rows and keys, then heads, then sequences, then rows.

    Rows beyond some share of the keys, or of a window, would mostly compute scores that the mask hides.
    """
    limits = _CPU if block.q.is_cpu else _ACCELERATOR
    n, seqlen_q = block.q.shape[:2]
    seqlen_k = block.k.shape[1]
    left, right = call.mask
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
        # The keys that later rows see then begin where matrix products read fast.
        rows -= rows % _ALIGNED_ROWS
    return TileSize(sequences, heads, rows, keys)


def sub_blocks(call: AttentionCall, block: Block, rng_state: Tensor | None) -> Iterator[SubBlock]:
    size = _tile_size(call, block)
    make = functools.partial(call.mask.hidden, offset=block.offset, device=block.q.device)
    hidden = ByDistance(make, _REMEMBERED_TILES)
    for start in range(0, block.q.shape[0], size.sequences):
        n = slice(start, min(start + size.sequences, block.q.shape[0]))
        for first in range(0, call.nheads_k, size.heads_kv):
            heads_kv = slice(first, min(first + size.heads_kv, call.nheads_k))
            yield SubBlock(call, block, rng_state, n, heads_kv, size, hidden)


def _multiplies_half(tensor: Tensor) -> bool:
    """Whether half-precision operands go straight to the tensor cores with a result in fp32.

    On a CPU PyTorch's own half-precision products can be hundreds of times slower than fp32.
    """
    return tensor.is_cuda and tensor.dtype in HALF_DTYPES and _BMM_HAS_OUT_DTYPE


_BMM_HAS_OUT_DTYPE = hasattr(torch.ops.aten.bmm, "dtype")
