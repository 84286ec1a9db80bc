"""Whether packed sequences have as many keys as queries, which kernels for self-attention alone need to know.

Two tensors of starts may hold the same numbers: transformers' collators hand over such pairs. What the host cannot
see is asked of the device only for calls whose backend would read all lengths anyway, so nobody waits who did not
before; the answer never depends on when it was asked, so a recomputed forward takes the path of the first.
"""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.engine import outside, streams
from flash_attn_compat.engine.call import AttentionCall


class _Answer(NamedTuple):
    """Whether two tensors are equal, as of their states."""

    starts: tuple[weakref.ref[Tensor], weakref.ref[Tensor]]
    states: tuple[outside.State, outside.State]
    is_equal: bool


# By the tensors' ids. Each step on it is one operation of a dict; an entry goes when one of its tensors does.
_answers: dict[tuple[int, int], _Answer] = {}


def is_visible(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
    """Whether the host sees for free that both hold the same numbers."""
    if cu_seqlens_q is cu_seqlens_k:
        return True
    if is_on_host(cu_seqlens_q):
        return torch.equal(cu_seqlens_q, cu_seqlens_k)
    same_memory = cu_seqlens_q.is_cuda and cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr()
    return same_memory and cu_seqlens_q.shape == cu_seqlens_k.shape


def may_be_asked(call: AttentionCall) -> bool:
    """Whether the lengths may be equal though the host does not see it, and the device can be asked now."""
    q, k = call.cu_seqlens_q, call.cu_seqlens_k
    if call.equal_lengths or q is None or k is None or is_on_host(q):
        return False
    if call.seqused_k is not None or call.leftpad_k is not None or call.block_table is not None:
        return False
    if call.max_seqlen_q != call.max_seqlen_k or call.q.shape[0] != call.k.shape[0]:
        return False
    return not call.is_empty and not _is_capturing(q)


def ask(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
    """Whether both hold the same numbers; waits for the device, once for each pair of tensors and what is in them."""
    if cu_seqlens_q.is_inference() or cu_seqlens_k.is_inference():  # they tell nobody when they change
        return _equal(cu_seqlens_q, cu_seqlens_k)
    key, pair = (id(cu_seqlens_q), id(cu_seqlens_k)), (cu_seqlens_q, cu_seqlens_k)
    states = outside.State.of(cu_seqlens_q), outside.State.of(cu_seqlens_k)
    known = _answers.get(key)
    if known is not None and known.states == states and all(r() is t for r, t in zip(known.starts, pair)):
        return known.is_equal
    forget = functools.partial(_forget, key)
    starts = weakref.ref(cu_seqlens_q, forget), weakref.ref(cu_seqlens_k, forget)
    answer = _answers[key] = _Answer(starts, states, _equal(cu_seqlens_q, cu_seqlens_k))
    return answer.is_equal


def is_on_host(cu_seqlens: Tensor) -> bool:
    return cu_seqlens.device.type == "cpu"


def _is_capturing(cu_seqlens: Tensor) -> bool:
    return cu_seqlens.is_cuda and streams.is_capturing(cu_seqlens.device)


def _equal(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
    return torch.equal(cu_seqlens_q, cu_seqlens_k)


def _forget(key: tuple[int, int], _: weakref.ref[Tensor]) -> None:
    _answers.pop(key, None)
