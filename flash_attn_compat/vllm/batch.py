"""A batch of vLLM's for our kernels: its decode steps and its prefills, a call for each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

# From so many rows on, the longest query length of a batch is rounded up: fewer different calls are prepared.
_ROUNDED = 128


class Part(NamedTuple):
    """Neighbouring sequences of a batch, computed by one call.

    rows: of the batch's tokens, None for all
    starts: where each sequence starts in them, and the last one's end; None where each sequence has one row
    longest: the most rows of a sequence; table, lengths: the pages and the keys of each sequence
    before: the keys that each sequence had before this step, -1 for one that writes none; None where the step's launch
        cannot write them
    """

    rows: slice | None
    starts: Tensor | None
    longest: int
    table: Tensor
    lengths: Tensor
    before: Tensor | None = None


@dataclass
class CompatMetadata:
    """A batch: what vLLM's CommonAttentionMetadata says, and the calls that compute it.

    The first ``num_decodes`` sequences have few rows (a token, and drafts of it), the others any number.
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
    """Return the sequences in front that have at most ``threshold`` rows each, and their rows."""
    if batch.max_query_len <= threshold:
        return batch.num_reqs, batch.num_actual_tokens
    starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
    for sequence, (start, end) in enumerate(itertools.pairwise(starts)):
        if end - start > threshold:
            return sequence, start
    return batch.num_reqs, batch.num_actual_tokens


def with_parts(batch: CompatMetadata, few: int) -> CompatMetadata:
    """Return the metadata with its calls: the decode steps, of at most ``few`` rows, apart from the prefills."""
    first, tokens = batch.num_decodes, batch.num_decode_tokens
    longest = batch.max_query_len
    if longest > _ROUNDED:
        longest = -(-longest // _ROUNDED) * _ROUNDED
    starts, tables, lengths = batch.query_start_loc, split(batch.block_table, batch), split(batch.seq_lens, batch)
    # Row i is sequence i's. A graph is padded with as many sequences as rows; they have no keys.
    has_one_row_each = few == 1 and tokens == first > 0
    if len(tables) == 1:  # padding behind the rows lies outside of all sequences
        return replace(batch, parts=(Part(None, None if has_one_row_each else starts, longest, *tables, *lengths),))
    decodes = Part(slice(0, tokens), None if has_one_row_each else starts[: first + 1], few, tables[0], lengths[0])
    prefills = Part(slice(tokens, None), starts[first:] - tokens, longest, tables[1], lengths[1])
    return replace(batch, parts=(decodes, prefills))


def split(of_sequences: Tensor, batch: CompatMetadata) -> tuple[Tensor, ...]:
    """Return the share of each part of a tensor with a row for each sequence."""
    first = batch.num_decodes
    is_whole = first in (0, batch.seq_lens.shape[0])
    return (of_sequences,) if is_whole else (of_sequences[:first], of_sequences[first:])
