"""Splits a batch of vLLM into its decode steps and its prefills: our kernels compute each in one call."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

# A longest query length above this is rounded up to a multiple of it, so that fewer different calls are prepared.
_ROUNDED = 128


class Part(NamedTuple):
    """Neighbouring sequences of a batch, computed by one call.

    rows: the part's range in the batch's tokens; None for all
    starts: where each sequence starts in this range, and where the last one ends; None if each sequence has one row
    longest: the most rows of a sequence
    table, lengths: the pages of each sequence, and its number of keys
    before: the number of keys of each sequence before this step, -1 for a sequence that writes none; None if the launch
        that attends cannot write the new keys too
    """

    rows: slice | None
    starts: Tensor | None
    longest: int
    table: Tensor
    lengths: Tensor
    before: Tensor | None = None


@dataclass
class CompatMetadata:
    """A batch: the fields of vLLM's CommonAttentionMetadata, and the parts that our kernels compute, one call each.

    The first ``num_decodes`` sequences are decode steps of few rows (a token, and draft tokens), the others prefills.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool
    num_decodes: int
    num_decode_tokens: int
    parts: tuple[Part, ...]


def count_decodes(batch: Any, threshold: int) -> tuple[int, int]:
    """Return how many sequences at the front have at most ``threshold`` rows each, and how many rows these have."""
    if batch.max_query_len <= threshold:
        return batch.num_reqs, batch.num_actual_tokens
    starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
    for sequence, (start, end) in enumerate(itertools.pairwise(starts)):
        if end - start > threshold:
            return sequence, start
    return batch.num_reqs, batch.num_actual_tokens


def with_parts(batch: CompatMetadata, few: int) -> CompatMetadata:
    """Return a copy of the batch whose ``parts`` are set. Each part is one call of our kernels.

    One part holds the sequences that decode, with at most ``few`` query tokens each, and one the prefills. A batch that
    has only one kind of sequence has one part.
    """
    first, tokens = batch.num_decodes, batch.num_decode_tokens
    longest = batch.max_query_len
    if longest > _ROUNDED:
        longest = -(-longest // _ROUNDED) * _ROUNDED
    starts, tables, lengths = batch.query_start_loc, split(batch.block_table, batch), split(batch.seq_lens, batch)
    # Row i then belongs to sequence i, also in a CUDA graph, which vLLM pads by sequences of one row without keys.
    has_one_row_each = few == 1 and tokens == first > 0
    if len(tables) == 1:  # one part: starts leave padded rows outside of all sequences
        return replace(batch, parts=(Part(None, None if has_one_row_each else starts, longest, *tables, *lengths),))
    decodes = Part(slice(0, tokens), None if has_one_row_each else starts[: first + 1], few, tables[0], lengths[0])
    prefills = Part(slice(tokens, None), starts[first:] - tokens, longest, tables[1], lengths[1])
    return replace(batch, parts=(decodes, prefills))


def split(of_sequences: Tensor, batch: CompatMetadata) -> tuple[Tensor, ...]:
    """Split a tensor with a row for each sequence into the rows of decode steps and of prefills, which come last.

    Returns the whole tensor if the batch has only one of the two.
    """
    first = batch.num_decodes
    is_whole = first in (0, batch.seq_lens.shape[0])
    return (of_sequences,) if is_whole else (of_sequences[:first], of_sequences[first:])
