"""Causal ALiBi on the memory-efficient kernel: the bias as further channels of q and k.

Under a causal mask -slope * (i - j) is slope * j plus a constant of the row. Keys carry j, queries
slope / scale, each in parts that half precision holds exactly or nearly so; the kernel adds their products in
fp32. Its LSE is larger by slope * i then, which is what flash-attn returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends import efficient_launch
from flash_attn_compat.engine import alibi
from flash_attn_compat.engine.call import AttentionCall

# (row, head) pairs that keep a GPU busy. The backward, which has more tensors beside the copies, may take more at once.
_ENOUGH_ROWS = 2**16
_ENOUGH_ROWS_BACKWARD = 2**19


class Channels(NamedTuple):
    """What is appended to q, (batch, 1, nheads, 8) or (total_q, nheads, 8), and to k, (keys, 1, 8)."""

    queries: Tensor
    keys: Tensor


def channels(call: AttentionCall, slopes: Tensor) -> Channels:
    """slopes: the call's, (nheads,) or (batch, nheads)."""
    slopes = alibi.per_sequence(slopes, call.batch)
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        longest = call.k.shape[1]
        positions, by_row = torch.arange(longest, device=call.k.device), slopes.unsqueeze(1)
    else:
        longest = call.k.shape[0]
        _, positions = efficient_launch.token_places(call.cu_seqlens_k, longest)
        sequence, _ = efficient_launch.token_places(call.cu_seqlens_q, call.q.shape[0])
        by_row = slopes[sequence]
    queries = alibi.query_channels(by_row, call.softmax_scale, longest, call.q.dtype)
    keys = alibi.key_channels(positions, call.softmax_scale, longest, call.k.dtype)
    return Channels(efficient_launch.pad_channels(queries), efficient_launch.pad_channels(keys).unsqueeze(1))


def batch_slices(call: AttentionCall, backward: bool) -> Iterator[slice]:
    """As few sequences at a time as fill the GPU: widened copies of them are what the memory goes to."""
    batch, rows = call.q.shape[0], call.q.shape[1] * call.nheads
    step = max(1, -(-_ENOUGH_ROWS // max(1, rows)))
    if backward:
        # Whole launches of the forward.
        step *= max(1, _ENOUGH_ROWS_BACKWARD // _ENOUGH_ROWS)
    if step >= batch:
        yield slice(None)
        return
    for start in range(0, batch, step):
        yield slice(start, min(start + step, batch))
