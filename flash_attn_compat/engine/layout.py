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

# Work that one separate computation is worth, in floating-point operations: below it, padding a few
# sequences to a common length is cheaper than another round of launches (benchmarks/cpu.py).
_LAUNCH_FLOPS_CPU, _LAUNCH_FLOPS = 1e5, 2e9
# Sequences larger than this many launches gain nothing from company.
_LARGE = 16


class Spans(NamedTuple):
    """Where the sequences of one tensor lie: first slot and length of each, in host integers.

    batched: whether slots are counted within a row of a (batch, seqlen, ...) tensor.
    """

    starts: list[int]
    lengths: list[int]
    batched: bool
    table: Tensor | None = None
    page_size: int = 0


class BlockPlan(NamedTuple):
    """Sequences to compute together, all ``seqlen_q`` rows and ``seqlen_k`` keys long after padding."""

    sequences: list[int]
    seqlen_q: int
    seqlen_k: int
    padded: bool

    @property
    def pairs(self) -> int:
        """(row, key) pairs that are computed."""
        return len(self.sequences) * self.seqlen_q * self.seqlen_k


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

    def row_indices(self) -> Tensor:
        """(seqlen_q,) or (n, seqlen_q): each row's index in its own sequence, negative in padding."""
        return _indices(self.q.shape[1], self.first_row, self.q.device)

    def key_indices(self) -> Tensor:
        return _indices(self.k.shape[1], self.first_key, self.k.device)

    def padding(self, keys: Range) -> Tensor | None:
        """(n, 1, 1, keys) bool, True where a key is padding; None where none is."""
        if self.first_key is None:
            return None
        return (self.key_indices()[:, keys.start : keys.stop] < 0)[:, None, None]

    def kept(self, rng_state: Tensor | None, dropout_p: float, heads: Range, rows: Range, keys: Range) -> Tensor:
        """(n, heads, rows, keys) bool, which probabilities survive dropout; heads: query heads."""
        device = self.q.device
        return dropout.keep_tile(
            rng_state,
            dropout_p,
            torch.tensor(list(self.sequences), dtype=torch.int64, device=device),
            torch.arange(heads.start, heads.stop, device=device),
            self.row_indices()[..., rows.start : rows.stop],
            self.key_indices()[..., keys.start : keys.stop],
        )


def whole_block(call: AttentionCall) -> Block | None:
    """A dense call's own tensors as one block; None where sequences have lengths of their own."""
    if not call.is_dense:
        return None
    batch = call.q.shape[0]
    slopes = None if call.alibi_slopes is None else alibi.per_sequence(call.alibi_slopes, batch)
    return Block(call.q, call.k, call.v, slopes, range(batch))


def _indices(length: int, first: Tensor | None, device: torch.device) -> Tensor:
    indices = torch.arange(length, device=device)
    return indices if first is None else indices - first[:, None]


class Layout:
    """The blocks of one call, and the way back from a block's results to the call's tensors."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.rows = _row_spans(call)
        self.keys = _key_spans(call)
        self.plans = self._plan()

    def alone(self, plan: BlockPlan) -> list[BlockPlan]:
        """A plan for each of its sequences."""
        return [
            BlockPlan([index], self.rows.lengths[index], self.keys.lengths[index], padded=False)
            for index in plan.sequences
        ]

    def block(self, plan: BlockPlan) -> Block:
        call = self.call
        slopes = call.alibi_slopes
        if slopes is not None:
            slopes = alibi.per_sequence(slopes, call.batch)[plan.sequences]
        return Block(
            q=self.gather(call.q, self.rows, plan, plan.seqlen_q),
            k=self.gather(call.k, self.keys, plan, plan.seqlen_k),
            v=self.gather(call.v, self.keys, plan, plan.seqlen_k),
            slopes=slopes,
            sequences=plan.sequences,
            first_row=_missing(self.rows, plan.sequences, plan.seqlen_q, call.q.device) if plan.padded else None,
            first_key=_missing(self.keys, plan.sequences, plan.seqlen_k, call.q.device) if plan.padded else None,
        )

    def gather(self, tensor: Tensor, spans: Spans, plan: BlockPlan, seqlen: int) -> Tensor:
        """(n, seqlen, heads, head_dim) of the plan's sequences: a view where they lie evenly."""
        view = _view(tensor, spans, plan, seqlen, self.call.transformed)
        if view is not None:
            return view
        where, valid = _slots(tensor, spans, plan.sequences, seqlen)
        if len(where) == 1:
            # Whole rows at a time; indexing with the index's own shape goes element by element.
            gathered = torch.unflatten(tensor.index_select(0, where[0].flatten()), 0, where[0].shape)
        else:
            gathered = tensor[where]
        if not plan.padded:
            return gathered
        # Padding was read from some other token, whose infinities a weight of 0 would not undo.
        return gathered.masked_fill(~valid[..., None, None], 0)

    def scatter(self, target: Tensor, spans: Spans, plan: BlockPlan, values: Tensor) -> None:
        """Write (n, seqlen, heads, head_dim) block values to their slots in ``target``."""
        seqlen = values.shape[1]
        view = _view(target, spans, plan, seqlen, self.call.transformed)
        if view is not None:
            view.copy_(values)
            return
        (where, valid), kept = _slots(target, spans, plan.sequences, seqlen), values
        if plan.padded:
            where, kept = tuple(index[valid] for index in where), values[valid]
        if len(where) == 1:
            target.index_copy_(0, where[0].flatten(), kept.reshape(-1, *kept.shape[-2:]).to(target.dtype))
            return
        # Sequences may share pages, whose gradients add up.
        target.index_put_(where, kept.to(target.dtype), accumulate=spans.table is not None)

    def scatter_lse(self, target: Tensor, plan: BlockPlan, lse: Tensor) -> None:
        """Write (n, nheads, seqlen_q) to ``target`` of call.lse_shape."""
        by_token = target.transpose(1, 2) if self.rows.batched else target.t()
        self.scatter(by_token.unsqueeze(-1), self.rows, plan, lse.transpose(1, 2).unsqueeze(-1))

    def gather_lse(self, source: Tensor, plan: BlockPlan) -> Tensor:
        by_token = source.transpose(1, 2) if self.rows.batched else source.t()
        gathered = self.gather(by_token.unsqueeze(-1), self.rows, plan, plan.seqlen_q)
        return gathered.squeeze(-1).transpose(1, 2)

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """``out`` and ``softmax_lse`` to scatter into: 0 and +inf where a sequence has no keys."""
        call = self.call
        out = call.q.new_zeros(call.out_shape)
        lse = torch.zeros(call.lse_shape, dtype=lse_dtype(call.q.dtype), device=call.q.device)
        for index, (start, seqlen_q, seqlen_k) in enumerate(
            zip(self.rows.starts, self.rows.lengths, self.keys.lengths)
        ):
            if not seqlen_k:
                (lse[index] if self.rows.batched else lse[:, start : start + seqlen_q]).fill_(torch.inf)
        return out, lse

    def _plan(self) -> list[BlockPlan]:
        call = self.call
        flops_per_pair = 2 * call.nheads * (call.q.shape[-1] + call.head_dim_v)
        launch = (_LAUNCH_FLOPS_CPU if call.q.is_cpu else _LAUNCH_FLOPS) / flops_per_pair
        runs = self._even_runs()
        small = [run for run in runs if run.seqlen_q * run.seqlen_k <= _LARGE * launch]
        large = [run for run in runs if run.seqlen_q * run.seqlen_k > _LARGE * launch]
        return large + _share_launches(small, launch)

    def _even_runs(self) -> list[BlockPlan]:
        """Neighbouring sequences of equal lengths, which one view can hold."""
        runs: list[BlockPlan] = []
        for index, (seqlen_q, seqlen_k) in enumerate(zip(self.rows.lengths, self.keys.lengths)):
            if not seqlen_q or not seqlen_k:
                continue
            last = runs[-1] if runs else None
            if (
                last is not None
                and (last.seqlen_q, last.seqlen_k) == (seqlen_q, seqlen_k)
                and last.sequences[-1] == index - 1
                and _continues(self.rows, index)
                and _continues(self.keys, index)
            ):
                last.sequences.append(index)
            else:
                runs.append(BlockPlan([index], seqlen_q, seqlen_k, padded=False))
        return runs


def _share_launches(runs: list[BlockPlan], launch: float) -> list[BlockPlan]:
    """Join runs of like length while the padding costs less than the launch it saves.

    Sorted by length, the padding that a joiner adds is smallest; launch: in (row, key) pairs.
    """
    plans: list[BlockPlan] = []
    for run in sorted(runs, key=lambda run: (run.seqlen_k, run.seqlen_q)):
        joined = _joined(plans[-1], run) if plans else run
        if plans and joined.pairs - plans[-1].pairs - run.pairs <= launch:
            plans[-1] = joined
        else:
            plans.append(run)
    return plans


def _joined(one: BlockPlan, other: BlockPlan) -> BlockPlan:
    uneven = (one.seqlen_q, one.seqlen_k) != (other.seqlen_q, other.seqlen_k)
    return BlockPlan(
        one.sequences + other.sequences,
        max(one.seqlen_q, other.seqlen_q),
        max(one.seqlen_k, other.seqlen_k),
        one.padded or other.padded or uneven,
    )


def _continues(spans: Spans, index: int) -> bool:
    if spans.table is not None:
        return False
    if spans.batched:
        return spans.starts[index] == spans.starts[index - 1]
    return spans.starts[index] == spans.starts[index - 1] + spans.lengths[index - 1]


def _view(tensor: Tensor, spans: Spans, plan: BlockPlan, seqlen: int, are_transformed: bool) -> Tensor | None:
    """The plan's sequences as a view of ``tensor``, or None where they don't lie evenly."""
    first, *others = plan.sequences
    if plan.padded or any(number != first + n or not _continues(spans, number) for n, number in enumerate(others, 1)):
        return None
    start, count = spans.starts[first], len(plan.sequences)
    if spans.table is not None:
        if start + seqlen > spans.page_size:
            return None
        page = int(spans.table[first, 0])
        return tensor[page : page + 1, start : start + seqlen]
    if spans.batched:
        return tensor[first : first + count, start : start + seqlen]
    if are_transformed:  # what differentiates or batches may keep other strides than these
        return torch.unflatten(tensor[start : start + count * seqlen], 0, (count, seqlen))
    # One operation: a slice and its unflattening take several times as long, which short sequences would notice.
    step, *inner = tensor.stride()
    shape, strides = (count, seqlen, *tensor.shape[1:]), (seqlen * step, step, *inner)
    return tensor.as_strided(shape, strides, tensor.storage_offset() + start * step)


def _slots(tensor: Tensor, spans: Spans, sequences: list[int], seqlen: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Index tensors (n, seqlen) of the slots of right-aligned sequences, and a bool one that is False for padding.

    Padding points at slot 0.
    """
    device = tensor.device
    ints = functools.partial(torch.tensor, dtype=torch.int64, device=device)
    starts = ints([spans.starts[index] for index in sequences])
    within = torch.arange(seqlen, device=device) - _missing(spans, sequences, seqlen, device)[:, None]
    valid = within >= 0
    slots = torch.where(valid, within + starts[:, None], 0)
    if spans.table is not None:
        pages = spans.table[ints(sequences)].long()
        return (pages.gather(1, slots // spans.page_size), slots % spans.page_size), valid
    if spans.batched:
        return (ints(sequences)[:, None].expand_as(slots), slots), valid
    return (slots,), valid


def _missing(spans: Spans, sequences: list[int], seqlen: int, device: torch.device) -> Tensor:
    """(n,) int64, by how much each sequence is shorter than ``seqlen``."""
    lengths = [seqlen - spans.lengths[index] for index in sequences]
    return torch.tensor(lengths, dtype=torch.int64, device=device)


def _row_spans(call: AttentionCall) -> Spans:
    if call.cu_seqlens_q is None:
        batch, seqlen_q = call.q.shape[:2]
        return Spans([0] * batch, [seqlen_q] * batch, batched=True)
    starts, lengths = _packed_spans("cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0])
    return Spans(starts, lengths, batched=False)


def _key_spans(call: AttentionCall) -> Spans:
    table = call.block_table
    page_size = call.k.shape[1] if table is not None else 0
    if call.cu_seqlens_k is not None and table is None:
        starts, lengths = _packed_spans("cu_seqlens_k", call.cu_seqlens_k, call.k.shape[0])
        capacity = lengths
    else:
        slots = table.shape[1] * page_size if table is not None else call.k.shape[1]
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
    return Spans(starts, lengths, table is not None or call.cu_seqlens_k is None, table, page_size)


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
