"""How sequences lie in a call's tensors, and which of them are computed together.

Backends without a kernel for packed or paged data work on blocks: dense tensors of sequences that are
equally long, or nearly so. Where a block pads, it pads on the left, so that one offset aligns all its
rows with all its keys and every mask and bias applies unchanged. Lengths are read by the host here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.engine import alibi, capture, dropout
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.mask import Range


class Joining(NamedTuple):
    """When sequences are computed together, in floating-point operations.

    long: a sequence of more gains nothing from company; padding: what may be wasted to have one more
    """

    long: float
    padding: float


# A round of launches costs an accelerator more than some padding, while a CPU is slower with any (benchmarks/cpu.py).
_CPU, _ACCELERATOR = Joining(long=3e7, padding=0.0), Joining(long=3e10, padding=2e9)


class Spans(NamedTuple):
    """Where the sequences of one tensor lie: first slot and length of each, in host integers.

    is_packed: whether all lie in one row of slots, rather than each in its own
    table: the pages of each, where it has pages; starts count from the first one then
    """

    starts: list[int]
    lengths: list[int]
    is_packed: bool
    table: Tensor | None = None


class BlockPlan(NamedTuple):
    """Sequences to compute together, all ``seqlen_q`` rows and ``seqlen_k`` keys long after padding."""

    sequences: list[int]
    seqlen_q: int
    seqlen_k: int
    padded: bool = False

    @property
    def pairs(self) -> int:
        """(row, key) pairs that are computed."""
        return len(self.sequences) * self.seqlen_q * self.seqlen_k

    def join(self, other: BlockPlan) -> BlockPlan:
        return BlockPlan(
            self.sequences + other.sequences,
            max(self.seqlen_q, other.seqlen_q),
            max(self.seqlen_k, other.seqlen_k),
            self.padded or (self.seqlen_q, self.seqlen_k) != (other.seqlen_q, other.seqlen_k),
        )


class Block(NamedTuple):
    """Dense tensors of one plan.

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
        """The same for some of the sequences."""
        per_sequence = (self.slopes, self.first_row, self.first_key)
        slopes, first_row, first_key = (None if tensor is None else tensor[n] for tensor in per_sequence)
        return Block(self.q[n], self.k[n], self.v[n], slopes, self.sequences[n], first_row, first_key)

    def padding(self, keys: Range) -> Tensor | None:
        """(n, 1, 1, keys) bool, True where a key is padding; None where none is."""
        if self.first_key is None:
            return None
        return (_indices(keys, self.first_key, self.k.device) < 0)[:, None, None]

    def kept(self, rng_state: Tensor | None, dropout_p: float, heads: Range, rows: Range, keys: Range) -> Tensor:
        """(n, heads, rows, keys) bool, which probabilities survive dropout; heads: query heads."""
        device = self.q.device
        return dropout.keep_tile(
            rng_state,
            dropout_p,
            torch.tensor(list(self.sequences), dtype=torch.int64, device=device),
            torch.arange(heads.start, heads.stop, device=device),
            _indices(rows, self.first_row, device),
            _indices(keys, self.first_key, device),
        )


def whole_block(call: AttentionCall) -> Block | None:
    """A dense call's own tensors as one block; None where sequences have lengths of their own."""
    if not call.is_dense:
        return None
    batch = call.q.shape[0]
    slopes = None if call.alibi_slopes is None else alibi.per_sequence(call.alibi_slopes, batch)
    return Block(call.q, call.k, call.v, slopes, range(batch))


def _indices(tokens: Range, first: Tensor | None, device: torch.device) -> Tensor:
    """(tokens,) or (n, tokens): each one's index in its own sequence, negative in padding."""
    indices = torch.arange(tokens.start, tokens.stop, device=device)
    return indices if first is None else indices - first[:, None]


class Layout:
    """The blocks of one call, and the way back from a block's results to the call's tensors."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.rows = _row_spans(call)
        self.keys = _key_spans(call)

    def alone(self) -> list[BlockPlan]:
        """A plan for each sequence that has rows and keys."""
        lengths = enumerate(zip(self.rows.lengths, self.keys.lengths))
        return [BlockPlan([index], *seqlens) for index, seqlens in lengths if all(seqlens)]

    def plans(self) -> list[BlockPlan]:
        """Long sequences alone, short ones of like length together."""
        call = self.call
        joining = _CPU if call.q.is_cpu else _ACCELERATOR
        flops_per_pair = 2 * call.nheads * (call.q.shape[-1] + call.head_dim_v)
        short: list[BlockPlan] = []
        alone: list[BlockPlan] = []
        for plan in self.alone():
            # So a row of a padded block that sees no key is padding, whatever is computed for it.
            sees_keys = call.mask.rows_with_keys(plan.seqlen_q, plan.seqlen_k).size == plan.seqlen_q
            (short if sees_keys and plan.pairs * flops_per_pair <= joining.long else alone).append(plan)
        return alone + _joined(short, joining.padding / flops_per_pair)

    def block(self, plan: BlockPlan) -> Block:
        call = self.call
        slopes = call.alibi_slopes
        if slopes is not None:
            shared = slopes.dim() == 1
            slopes = alibi.per_sequence(slopes, len(plan.sequences)) if shared else slopes[plan.sequences]
        return Block(
            q=self.gather(call.q, self.rows, plan, plan.seqlen_q),
            k=self.gather(call.k, self.keys, plan, plan.seqlen_k),
            v=self.gather(call.v, self.keys, plan, plan.seqlen_k),
            slopes=slopes,
            sequences=plan.sequences,
            first_row=_missing(self.rows, plan, plan.seqlen_q, call.q.device),
            first_key=_missing(self.keys, plan, plan.seqlen_k, call.q.device),
        )

    def gather(self, tensor: Tensor, spans: Spans, plan: BlockPlan, seqlen: int, fill: float = 0.0) -> Tensor:
        """(n, seqlen, heads, head_dim) of the plan's sequences, a view where they lie evenly; fill: in padding."""
        view = _view(tensor, spans, plan)
        if view is not None:
            return view
        where, valid = _slots(tensor, spans, plan, seqlen)
        if len(where) == 1:
            # Whole rows at a time; indexing with the index's own shape goes element by element.
            gathered = torch.unflatten(tensor.index_select(0, where[0].flatten()), 0, where[0].shape)
        else:
            gathered = tensor[where]
        # Padding was read from some other token, whose infinities a weight of 0 would not undo.
        return gathered if valid is None else gathered.masked_fill(~valid[..., None, None], fill)

    def scatter(self, target: Tensor, spans: Spans, plan: BlockPlan, values: Tensor) -> None:
        """Write (n, seqlen, heads, head_dim) block values to their slots in ``target``."""
        view = _view(target, spans, plan)
        if view is not None:
            view.copy_(values)
            return
        where, valid = _slots(target, spans, plan, values.shape[1])
        if valid is not None:
            where, values = tuple(index[valid] for index in where), values[valid]
        # Sequences may share pages, whose gradients add up.
        target.index_put_(where, values.to(target.dtype), accumulate=spans.table is not None)

    def scatter_lse(self, target: Tensor, plan: BlockPlan, lse: Tensor) -> None:
        """Write (n, nheads, seqlen_q) to ``target`` of call.lse_shape."""
        self.scatter(self._by_token(target), self.rows, plan, lse.transpose(1, 2).unsqueeze(-1))

    def gather_lse(self, source: Tensor, plan: BlockPlan) -> Tensor:
        """(n, nheads, seqlen_q); +inf for rows of padding, which have no probability then, and give no gradient."""
        gathered = self.gather(self._by_token(source), self.rows, plan, plan.seqlen_q, fill=torch.inf)
        return gathered.squeeze(-1).transpose(1, 2)

    def _by_token(self, lse: Tensor) -> Tensor:
        """An LSE of call.lse_shape as other tensors are: each head has one channel."""
        return (lse.t() if self.rows.is_packed else lse.transpose(1, 2)).unsqueeze(-1)

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """``out`` and ``softmax_lse`` to scatter into: 0 and +inf where a sequence has no keys."""
        call = self.call
        out = call.q.new_zeros(call.out_shape)
        lse = torch.zeros(call.lse_shape, dtype=lse_dtype(call.q.dtype), device=call.q.device)
        for index, (start, seqlen_q, seqlen_k) in enumerate(
            zip(self.rows.starts, self.rows.lengths, self.keys.lengths)
        ):
            if not seqlen_k:
                (lse[:, start : start + seqlen_q] if self.rows.is_packed else lse[index]).fill_(torch.inf)
        return out, lse


def _joined(plans: list[BlockPlan], padding: float) -> list[BlockPlan]:
    """Sequences of like length together, each for at most so many (row, key) pairs of padding.

    Sorted by length, the padding that a joiner adds is smallest.
    """
    joined: list[BlockPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.seqlen_k, plan.seqlen_q)):
        both = joined[-1].join(plan) if joined else plan
        if joined and both.pairs - joined[-1].pairs - plan.pairs <= padding:
            joined[-1] = both
        else:
            joined.append(plan)
    return joined


def _view(tensor: Tensor, spans: Spans, plan: BlockPlan) -> Tensor | None:
    """The plan's sequences as a view of ``tensor``; None where they lie apart, in pages, or need padding."""
    if plan.padded or spans.table is not None:
        return None
    first, *others = plan.sequences
    start, seqlen, count = spans.starts[first], spans.lengths[first], len(plan.sequences)
    step = seqlen if spans.is_packed else 0
    if any((index, spans.starts[index]) != (first + n, start + n * step) for n, index in enumerate(others, 1)):
        return None
    if not spans.is_packed:
        return tensor[first : first + count, start : start + seqlen]
    if not others:
        return tensor[None, start : start + seqlen]
    return torch.unflatten(tensor[start : start + count * seqlen], 0, (count, seqlen))


def _slots(tensor: Tensor, spans: Spans, plan: BlockPlan, seqlen: int) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Index tensors (n, seqlen) of the slots of right-aligned sequences, and a bool one that is False for padding.

    Padding points at slot 0; None where there is none.
    """
    device = tensor.device
    ints = functools.partial(torch.tensor, dtype=torch.int64, device=device)
    slots = ints([[spans.starts[index] + spans.lengths[index] - seqlen] for index in plan.sequences])
    slots = slots + torch.arange(seqlen, device=device)
    valid = None
    if plan.padded:
        valid = slots >= ints([[spans.starts[index]] for index in plan.sequences])
        slots.masked_fill_(~valid, 0)
    if spans.table is not None:
        pages = spans.table[ints(plan.sequences)].long()
        return (pages.gather(1, slots // tensor.shape[1]), slots % tensor.shape[1]), valid
    if spans.is_packed:
        return (slots,), valid
    return (ints(plan.sequences)[:, None].expand_as(slots), slots), valid


def _missing(spans: Spans, plan: BlockPlan, seqlen: int, device: torch.device) -> Tensor | None:
    """(n,) int64, by how much each sequence is shorter than ``seqlen``; None where none is padded."""
    if not plan.padded:
        return None
    lengths = [seqlen - spans.lengths[index] for index in plan.sequences]
    return torch.tensor(lengths, dtype=torch.int64, device=device)


def _row_spans(call: AttentionCall) -> Spans:
    if call.cu_seqlens_q is None:
        batch, seqlen_q = call.q.shape[:2]
        return Spans([0] * batch, [seqlen_q] * batch, is_packed=False)
    starts, lengths = _packed_spans("cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0])
    return Spans(starts, lengths, is_packed=True)


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
        leftpad = _numbers("leftpad_k", call.leftpad_k)
        starts = [start + skipped for start, skipped in zip(starts, leftpad)]
        lengths = [max(0, length - skipped) for length, skipped in zip(lengths, leftpad)]
    return Spans(starts, lengths, cu_seqlens is not None, table)


def _packed_spans(name: str, cu_seqlens: Tensor, total: int) -> tuple[list[int], list[int]]:
    bounds = _numbers(name, cu_seqlens)
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    if bounds[0] < 0 or bounds[-1] > total or any(length < 0 for length in lengths):
        raise RuntimeError(f"{name} must rise from 0 to at most the {total} tokens of its tensor, got {bounds}")
    return bounds[:-1], lengths


def _numbers(name: str, lengths: Tensor) -> list[int]:
    if lengths.is_cuda and capture.is_capturing(lengths.get_device()):
        raise RuntimeError(
            f"{name} lies on the GPU and would be read, which a CUDA graph that is being captured forbids: "
            "explain() says why no backend served that leaves it there"
        )
    found: list[int] = lengths.tolist()
    return found


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """softmax_lse is fp32, except that fp64 problems keep theirs in fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
