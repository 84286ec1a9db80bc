"""Cut packed, padded and paged calls into blocks: dense tensors of sequences that are computed together.

Backends without a kernel for packed or paged data compute such blocks. The sequences of a block are equally
long, or nearly so. Padding is on the left, so that one offset aligns all rows of a block with its keys, and every
mask and bias applies unchanged. The host reads the lengths here, which waits for a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from flash_attn_compat.backends import alibi
from flash_attn_compat.core import cuda_capture, dropout
from flash_attn_compat.core.call import AttentionCall, lse_dtype
from flash_attn_compat.core.eight_bit import as_bytes, dequantize, is_eight_bit
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.mask import Range
from flash_attn_compat.core.torch_state import numbers_of

Made = TypeVar("Made")


class Joining(NamedTuple):
    """Limits for copying sequences that lie apart, or have different lengths, into one block.

    padding: the most floating-point operations that may be wasted on padding to add one more sequence
    elements: the most elements of q, or of k with as many heads as q, in such a block
    few: fewer blocks than this are faster uncopied, as views
    """

    padding: float
    elements: int
    few: int


# A sequence of more than _LONG * padding operations gains nothing if others are computed together with it.
_LONG = 16
# On a CPU new memory is expensive, on an accelerator launches are (benchmarks/cpu.py).
_CPU = Joining(padding=1e6, elements=2**18, few=12)
_ACCELERATOR = Joining(padding=2e9, elements=2**26, few=2)


class Spans(NamedTuple):
    """Where the sequences of one tensor lie: the first slot and the length of each, as Python integers.

    size: slots of a sequence (the tensor's second axis) or of a page; None if all sequences are packed
    table: the block table if the tensor has pages; ``starts`` then count from the sequence's first page
    """

    starts: list[int]
    lengths: list[int]
    size: int | None = None
    table: Tensor | None = None

    def adjoins(self, index: int) -> bool:
        """Whether one view can hold sequence ``index`` and the one before: equally long, and next to each other."""
        start, length = self.starts[index], self.lengths[index]
        step = length if self.size is None else 0
        return self.table is None and (self.starts[index - 1] + step, self.lengths[index - 1]) == (start, length)


class BlockPlan(NamedTuple):
    """Which sequences to compute together; after padding all have ``seqlen_q`` rows and ``seqlen_k`` keys."""

    sequences: list[int]
    seqlen_q: int
    seqlen_k: int

    @property
    def pairs(self) -> int:
        """The number of scores of one head: sequences * rows * keys, including padding and hidden keys."""
        return len(self.sequences) * self.seqlen_q * self.seqlen_k

    @property
    def tokens(self) -> int:
        """The number of rows or of keys of all sequences, whichever is larger, including padding."""
        return len(self.sequences) * max(self.seqlen_q, self.seqlen_k)

    def join(self, other: BlockPlan) -> BlockPlan:
        """Return one plan with the sequences of both plans, all padded to the longest."""
        return BlockPlan(self.sequences + other.sequences, *map(max, self[1:], other[1:]))


class Block(NamedTuple):
    """The dense tensors of the sequences of one plan.

    q: (n, seqlen_q, nheads, head_dim), k and v: (n, seqlen_k, nheads_k, ...), views where possible
    slopes: (n, nheads) or None; sequences: their indices in the call
    first_row, first_key: (n,) int64, how many rows and keys of padding precede each sequence, or None
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor | None
    sequences: Sequence[int]
    first_row: Tensor | None = None
    first_key: Tensor | None = None

    @property
    def offset(self) -> int:
        return self.k.shape[1] - self.q.shape[1]

    def narrow(self, n: slice) -> Block:
        """Return the block of only the sequences ``n``; its tensors are views."""
        per_sequence = (self.slopes, self.first_row, self.first_key)
        slopes, first_row, first_key = (None if tensor is None else tensor[n] for tensor in per_sequence)
        return Block(self.q[n], self.k[n], self.v[n], slopes, self.sequences[n], first_row, first_key)

    def padding(self, keys: Range) -> Tensor | None:
        """Return (n, 1, 1, keys) bool, True where a key is padding; None if no sequence of the block is padded."""
        if self.first_key is None:
            return None
        return (_indices(keys, self.first_key, self.k.device) < 0)[:, None, None]

    def kept(self, rng_state: Tensor | None, dropout_p: float, heads: Range, rows: Range, keys: Range) -> Tensor:
        """Return (n, heads, rows, keys) bool, True where a probability survives dropout. heads: query heads"""
        device = self.q.device
        sequences = torch.tensor(list(self.sequences), dtype=torch.int64, device=device)
        all_heads = torch.arange(heads.start, heads.stop, device=device)
        row_indices, key_indices = _indices(rows, self.first_row, device), _indices(keys, self.first_key, device)
        return dropout.keep_tile(rng_state, dropout_p, sequences, all_heads, row_indices, key_indices)


def whole_block(call: AttentionCall) -> Block | None:
    """Return a dense call's tensors as one block, 8-bit keys dequantized; None if sequences have their own lengths."""
    if not call.is_dense:
        return None
    batch = call.q.shape[0]
    slopes = None if call.alibi_slopes is None else alibi.slopes_per_sequence(call.alibi_slopes, batch)
    q, k, v = dequantized(call, call.q, as_bytes(call.k), as_bytes(call.v), range(batch))
    return Block(q, k, v, slopes, range(batch))


def with_folded_factor(call: AttentionCall) -> AttentionCall:
    """Return the call with k_factor moved into softmax_scale: without it 8-bit keys are exact in 16 bits."""
    if call.k_factor == 1.0:
        return call
    return call._replace(softmax_scale=call.softmax_scale * call.k_factor, k_factor=1.0)


def dequantized(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sequences: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of some of a call's sequences in one dtype, with 8-bit keys and values converted.

    The dtype is q's; fp32 if there is a tensor k_descale, because the product must not be rounded to q's dtype.
    k, v: 8-bit ones as bytes
    """
    if not is_eight_bit(call.k):
        return q, k, v
    dtype, found = q.dtype if call.k_descale is None else torch.float32, []
    for x, descale, factor in ((k, call.k_descale, call.k_factor), (v, call.v_descale, call.v_factor)):
        if descale is not None and descale.shape[0] > 1:
            descale = descale[list(sequences)]
        found.append(dequantize(x.view(call.k.dtype), descale, factor, dtype))
    return q.to(dtype), found[0], found[1]


def _indices(tokens: Range, first: Tensor | None, device: torch.device) -> Tensor:
    """Return each token's index in its own sequence, negative in padding: (tokens,) or (n, tokens)."""
    indices = torch.arange(tokens.start, tokens.stop, device=device)
    return indices if first is None else indices - first[:, None]


class Places:
    """Where the rows (or the keys) of a block lie in the call's tensors. Shorter sequences are padded on the left."""

    def __init__(self, spans: Spans, sequences: list[int], seqlen: int, device: torch.device) -> None:
        self.spans, self.sequences, self.seqlen, self.device = spans, sequences, seqlen, device
        first, *others = sequences
        self._are_even = spans.table is None and spans.lengths[first] == seqlen
        if others and self._are_even:
            self._are_even = all(index == first + n and spans.adjoins(index) for n, index in enumerate(others, 1))
        # (n,) int64, how many tokens each sequence is shorter than seqlen; None if all are that long.
        self.missing: Tensor | None = None
        missing = [] if self._are_even else [seqlen - spans.lengths[index] for index in sequences]
        if any(missing):
            self.missing = self._ints(missing)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the block's tokens (n, seqlen, heads, head_dim): a view if the sequences lie at equal distances.

        Padding repeats the first token of its own sequence. So an infinity in one sequence, which a weight of 0 would
        turn into NaN, never affects another.
        """
        if self._are_even:
            return self._view(tensor)
        size = self.spans.size
        if size is None or tensor.stride(0) == size * tensor.stride(1):
            # index_select copies whole tokens, several times as fast as indexing by two tensors.
            tokens = tensor if size is None else tensor.flatten(0, 1)
            return torch.unflatten(tokens.index_select(0, self._slots.flatten()), 0, self._slots.shape)
        return tensor[self._slots // size, self._slots % size]

    def scatter(self, target: Tensor, values: Tensor) -> None:
        """Write (n, seqlen, heads, head_dim) values to their slots in ``target``."""
        if self._are_even:
            self._view(target).copy_(values)
            return
        slots, values = self._slots.flatten(), values.flatten(0, 1)
        if self.missing is not None:
            tokens = (_indices(Range(0, self.seqlen), self.missing, slots.device) >= 0).flatten().nonzero().squeeze(1)
            slots, values = slots[tokens], values.index_select(0, tokens)
        size = self.spans.size
        where = (slots,) if size is None else (slots // size, slots % size)
        # Several sequences may share a page. Its gradient is then the sum of theirs.
        target.index_put_(where, values.to(target.dtype), accumulate=self.spans.table is not None)

    def gather_lse(self, source: Tensor, fill: float = torch.inf) -> Tensor:
        """Return the block's LSE (n, nheads, seqlen) from the call's. fill: in padding; +inf gives probability 0"""
        return self.with_padding(self.gather(self._by_token(source)), fill).squeeze(-1).transpose(1, 2)

    def with_padding(self, gathered: Tensor, fill: float) -> Tensor:
        """Return a result of ``gather`` with ``fill`` in its padding: a copy, or the tensor itself without padding."""
        if self.missing is None:
            return gathered
        padding = _indices(Range(0, self.seqlen), self.missing, gathered.device) < 0
        return gathered.masked_fill(padding[..., None, None], fill)

    def scatter_lse(self, target: Tensor, lse: Tensor) -> None:
        """Write the block's LSE (n, nheads, seqlen) into ``target``, the call's LSE."""
        self.scatter(self._by_token(target), lse.transpose(1, 2).unsqueeze(-1))

    def _by_token(self, lse: Tensor) -> Tensor:
        """Return the call's LSE as a view with the axes of q, where each head has one channel."""
        return (lse.t() if self.spans.size is None else lse.transpose(1, 2)).unsqueeze(-1)

    def _view(self, tensor: Tensor) -> Tensor:
        """Return the block's sequences, which must lie at equal distances, as a view of ``tensor``."""
        first, count = self.sequences[0], len(self.sequences)
        start = self.spans.starts[first]
        if self.spans.size is not None:
            return tensor[first : first + count, start : start + self.seqlen]
        if count == 1:
            return tensor[None, start : start + self.seqlen]
        return torch.unflatten(tensor[start : start + count * self.seqlen], 0, (count, self.seqlen))

    def _ints(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    @functools.cached_property
    def _slots(self) -> Tensor:
        """The slot of each token, (n, seqlen) int64, counted through all rows of the tensor.

        Padding has the slot of its sequence's first token.
        """
        spans, sequences = self.spans, self._ints(self.sequences)[:, None]
        starts = self._ints([spans.starts[index] for index in self.sequences])[:, None]
        indices = _indices(Range(0, self.seqlen), self.missing, sequences.device)
        slots = starts + (indices if self.missing is None else indices.clamp_min_(0))
        if spans.size is None:
            return slots
        rows = sequences
        if spans.table is not None:
            rows = spans.table[self._ints(self.sequences)].long().gather(1, slots // spans.size)
            slots = slots % spans.size
        return rows * spans.size + slots


class Layout:
    """Cuts one call into blocks, and makes the tensors into which the results of blocks are scattered."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.rows = _row_spans(call)
        self.keys = _key_spans(call)

    def alone(self) -> list[BlockPlan]:
        """Return a plan for each sequence that has rows and keys."""
        lengths = enumerate(zip(self.rows.lengths, self.keys.lengths))
        return [BlockPlan([index], *seqlens) for index, seqlens in lengths if all(seqlens)]

    def plans(self) -> list[BlockPlan]:
        """Return plans that together contain every sequence with rows and keys once.

        Neighbouring sequences of equal length share a plan, and so do short sequences of about equal length.
        """
        call = self.call
        stretches: list[BlockPlan] = []
        for plan in self.alone():
            index = plan.sequences[0]
            is_next = bool(stretches) and stretches[-1].sequences[-1] == index - 1
            if is_next and self.rows.adjoins(index) and self.keys.adjoins(index):
                stretches[-1].sequences.append(index)
            else:
                stretches.append(plan)
        joining = _CPU if call.q.is_cpu else _ACCELERATOR
        if len(stretches) < joining.few:
            return stretches
        padding = joining.padding / (2 * call.nheads * (call.q.shape[-1] + call.head_dim_v))
        most_tokens = joining.elements // (call.nheads * call.q.shape[-1])
        short: list[BlockPlan] = []
        others: list[BlockPlan] = []
        for stretch in stretches:
            # Sequences with rows that see no key are not padded, so that in a padded block only padding sees no key.
            sees_keys = call.mask.rows_with_keys(stretch.seqlen_q, stretch.seqlen_k).size == stretch.seqlen_q
            (short if sees_keys and stretch.seqlen_q * stretch.seqlen_k <= _LONG * padding else others).append(stretch)
        return others + _joined(short, padding, most_tokens, joining.few)

    def blocks(self, plans: list[BlockPlan]) -> Iterator[tuple[Block, Places, Places]]:
        """Yield for each plan its block, and where the block's rows and keys lie in the call's tensors."""
        call, device = self.call, self.call.q.device
        for sequences, seqlen_q, seqlen_k in plans:
            rows = Places(self.rows, sequences, seqlen_q, device)
            keys = Places(self.keys, sequences, seqlen_k, device)
            slopes = call.alibi_slopes
            if slopes is not None:
                shared = slopes.dim() == 1
                slopes = alibi.slopes_per_sequence(slopes, len(sequences)) if shared else slopes[sequences]
            q, k, v = rows.gather(call.q), keys.gather(as_bytes(call.k)), keys.gather(as_bytes(call.v))
            q, k, v = dequantized(call, q, k, v, sequences)
            yield Block(q, k, v, slopes, sequences, rows.missing, keys.missing), rows, keys

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, *others: Tensor) -> Tensor:
        """Return zeros on q's device, to scatter into.

        Under vmap they are batched if any tensor of the call or of ``others`` is, so that results can be written.
        """
        like = self.call.q
        if self.call.use & Feature.TRANSFORMS:
            given = [x for x in (*self.call, *others) if isinstance(x, Tensor)]
            like = sum((x.new_zeros(()) for x in given), like.new_zeros(()))
        return like.new_zeros(shape, dtype=dtype)

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """Return ``out`` and ``softmax_lse`` to scatter into: zeros, but an LSE of +inf for sequences without keys."""
        call = self.call
        out, lse = self.zeros(call.out_shape, call.q.dtype), self.zeros(call.lse_shape, lse_dtype(call.q.dtype))
        for index, (start, seqlen_q) in enumerate(zip(self.rows.starts, self.rows.lengths)):
            if not self.keys.lengths[index]:
                (lse[:, start : start + seqlen_q] if self.rows.size is None else lse[index]).fill_(torch.inf)
        return out, lse


def _joined(stretches: list[BlockPlan], padding: float, most_tokens: int, few: int) -> list[BlockPlan]:
    """Join plans of similar length, as far as the limits allow. Sorting by length keeps the padding small.

    stretches: plans of neighbouring sequences of equal length
    """
    groups: list[tuple[BlockPlan, list[BlockPlan]]] = []
    for stretch in sorted(stretches, key=lambda stretch: (stretch.seqlen_k, stretch.seqlen_q)):
        if groups:
            joined, members = groups[-1]
            both = joined.join(stretch)
            if both.tokens <= most_tokens and both.pairs - joined.pairs - stretch.pairs <= padding:
                groups[-1] = both, [*members, stretch]
                continue
        groups.append((stretch, [stretch]))
    plans: list[BlockPlan] = []
    for joined, members in groups:
        plans += members if len(members) < few else [joined._replace(sequences=sorted(joined.sequences))]
    return plans


def _row_spans(call: AttentionCall) -> Spans:
    if call.cu_seqlens_q is None:
        batch, seqlen_q = call.q.shape[:2]
        return Spans([0] * batch, [seqlen_q] * batch, seqlen_q)
    return Spans(*_packed_spans("cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0]))


def _key_spans(call: AttentionCall) -> Spans:
    table = call.block_table
    cu_seqlens = call.cu_seqlens_k if table is None else None
    if cu_seqlens is not None:
        starts, lengths = _packed_spans("cu_seqlens_k", cu_seqlens, call.k.shape[0])
        capacity = lengths
    else:
        slots = call.k.shape[1] * (1 if table is None else table.shape[1])
        starts, capacity = [0] * call.batch, [slots] * call.batch
        lengths = capacity
    if call.seqused_k is not None:
        lengths = _numbers("seqused_k", call.seqused_k)
        if any(not 0 <= used <= most for used, most in zip(lengths, capacity)):
            raise RuntimeError(f"seqused_k must lie between 0 and the keys each sequence has: {lengths} of {capacity}")
    if call.leftpad_k is not None:
        leftpad = [max(0, skipped) for skipped in _numbers("leftpad_k", call.leftpad_k)]  # as in our kernels
        starts = [start + skipped for start, skipped in zip(starts, leftpad)]
        lengths = [max(0, length - skipped) for length, skipped in zip(lengths, leftpad)]
    return Spans(starts, lengths, None if cu_seqlens is not None else call.k.shape[1], table)


def _packed_spans(name: str, cu_seqlens: Tensor, total: int) -> tuple[list[int], list[int]]:
    bounds = _numbers(name, cu_seqlens)
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    if bounds[0] < 0 or bounds[-1] > total or any(length < 0 for length in lengths):
        raise RuntimeError(f"{name} must rise from 0 to at most the {total} tokens of its tensor, got {bounds}")
    return bounds[:-1], lengths


def _numbers(name: str, lengths: Tensor) -> list[int]:
    if lengths.is_cuda and cuda_capture.is_capturing(lengths.get_device()):
        raise RuntimeError(
            f"{name} is on the GPU and must be read here, which the capture of a CUDA graph forbids: "
            "explain() says why the backends that need not read it do not serve"
        )
    return numbers_of(lengths)


class ByDistance(Generic[Made]):
    """Caches the last few results of ``make(rows, keys)``, which may depend only on the two sizes and the distance."""

    def __init__(self, make: Callable[[Range, Range], Made], most: int) -> None:
        self._make, self._most = make, most
        self._kept: dict[tuple[int, int, int], Made] = {}

    def __call__(self, rows: Range, keys: Range) -> Made:
        found = rows.size, keys.size, keys.start - rows.start
        if found not in self._kept:
            if len(self._kept) >= self._most:
                self._kept.clear()
            self._kept[found] = self._make(rows, keys)
        return self._kept[found]
