"""Public functions but flash_attn_with_kvcache: one operator under a compiler, trace or mode, else an eager call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flash_attn_compat.core import checks, sinks
from flash_attn_compat.core.call import RETURN_LSE, RETURN_PROBS, SHARES_DROPOUT_MASK
from flash_attn_compat.dispatch import autograd, ops
from flash_attn_compat.dispatch.observers import must_be_one_operator, recording_flags


def attend(
    inputs: tuple[Tensor, ...], others: tuple[Any, ...], dropout_p: float, softmax_scale: Any, causal: bool,
    window_size: Sequence[int], softcap: float, deterministic: bool, return_attn_probs: bool, max_seqlen_q: int = 0,
    max_seqlen_k: int = 0, s_aux: Tensor | None = None, k_factor: float = 1.0, v_factor: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out, or (out, softmax_lse, S_dmask) with return_attn_probs.

    inputs: (q, k, v), (q, kv) or (qkv,); others: the tensors behind v, in the order of TENSORS
    """
    if isinstance(softmax_scale, Tensor):
        inputs, softmax_scale = autograd.scale_queries(inputs, softmax_scale)
    is_one_operator = must_be_one_operator(inputs)
    flags = 0 if is_one_operator else recording_flags(inputs, others[0])
    q, k, v = inputs if len(inputs) == 3 else autograd.unpack(inputs)
    if s_aux is not None:
        sinks.check(s_aux, q, others[0])
        flags |= RETURN_LSE | SHARES_DROPOUT_MASK
    try:
        left, right = window_size
    except (TypeError, ValueError):
        left, right = checks.two_bounds(window_size)  # raises an error that describes a window
    scalars = (
        dropout_p, softmax_scale, causal, left, right, softcap, deterministic, max_seqlen_q, max_seqlen_k, k_factor,
        v_factor,
    )  # fmt: skip
    tensors = (q, k, v, *others)
    if is_one_operator:
        outputs = ops.attend(tensors, scalars, return_attn_probs, s_aux is not None)
    else:
        outputs = autograd.attend(inputs, tensors, scalars, flags | RETURN_PROBS if return_attn_probs else flags)
    if s_aux is not None:
        outputs = (*sinks.absorb(*outputs[:2], s_aux), outputs[2])
    return outputs if return_attn_probs else outputs[0]
