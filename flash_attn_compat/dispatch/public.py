"""The public functions, except flash_attn_with_kvcache: one operator if compiled, traced or observed, else eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.core import checks, torch_state
from flash_attn_compat.core.arguments.build import with_page_lengths
from flash_attn_compat.core.features import DMASK, Feature
from flash_attn_compat.core.inputs import DenseInputs, Options, PackedInputs, new_tuple
from flash_attn_compat.dispatch import autograd, ops, sinks
from flash_attn_compat.dispatch.pytorch import sharding
from flash_attn_compat.dispatch.pytorch.observers import (
    are_strided,
    are_transformed,
    must_be_one_operator,
    plain_use,
    recorded_use,
)

_WITH_SINKS = Feature.LSE | Feature.SHARED_DROPOUT_MASK
_WITH_PROBABILITIES = _WITH_SINKS | DMASK


def attend(
    inputs: tuple[Tensor, ...], slopes: Tensor | None, dropout_p: float, softmax_scale: Any, causal: bool,
    window_size: Sequence[int], softcap: float, deterministic: bool, return_attn_probs: bool,
    s_aux: Tensor | None = None, is_packed: bool = False, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: int = 0, max_seqlen_k: int = 0, block_table: Any = None, k_descale: Any = None, v_descale: Any = None,
    k_factor: float = 1.0, v_factor: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out, or (out, softmax_lse, S_dmask) with return_attn_probs.

    inputs: (q, k, v), (q, kv) or (qkv,)
    """
    if isinstance(softmax_scale, Tensor):
        inputs, softmax_scale = _scale_queries(inputs, softmax_scale)
    q, k, v = inputs if len(inputs) == 3 else _unpack(inputs)
    family: Any = PackedInputs if is_packed else DenseInputs
    tensors: tuple[Any, ...] = (
        (q, k, v, slopes, cu_seqlens_q, cu_seqlens_k, None, None, block_table, k_descale, v_descale, None)
        if is_packed else (q, k, v, slopes, None, None)
    )  # fmt: skip
    use, is_one_operator = plain_use(inputs) if slopes is None else None, False
    if use is None:
        is_one_operator = must_be_one_operator(inputs) and are_strided(tensors)
        use = 0 if is_one_operator else recorded_use(inputs, slopes)
    if s_aux is not None:
        sinks.check(s_aux, q.shape[-2], q.device, slopes)
        sharding.check_alike((("q", q), ("s_aux", s_aux)))
        use |= _WITH_SINKS
    if return_attn_probs:
        use |= _WITH_PROBABILITIES
    try:
        left, right = window_size
    except (TypeError, ValueError):
        left, right = checks.two_bounds(window_size)  # raises an error that describes a window
    numbers = (
        dropout_p, softmax_scale, causal, left, right, softcap, deterministic, use, max_seqlen_q, max_seqlen_k,
        k_factor, v_factor, False, 0, False, False,
    )  # fmt: skip
    if is_one_operator:
        if is_packed:
            checks.is_given("cu_seqlens_q", cu_seqlens_q)  # without it the operator would take the call for dense
        outputs = ops.forward(family(*tensors), Options(*numbers))[:3]
    else:
        x = new_tuple(family, tensors)
        x = x if block_table is None else with_page_lengths(x)
        outputs = autograd.attend(inputs, x, new_tuple(Options, numbers))
    if s_aux is not None:
        outputs = (*sinks.absorb(*outputs[:2], s_aux), outputs[2])
    return outputs if return_attn_probs else outputs[0]


def _scale_queries(inputs: tuple[Any, ...], scale: Tensor) -> tuple[tuple[Any, ...], Tensor | None]:
    """Return inputs and softmax_scale; if the scale needs a derivative, multiply the queries by it, and return None.

    Kernels take the scale as a number, without a derivative. With None they use the default, head_dim ** -0.5, so the
    queries are multiplied by scale * head_dim ** 0.5.
    """
    queries = inputs[0]
    wants_gradient = scale.requires_grad and torch.is_grad_enabled()
    is_traced = torch.compiler.is_compiling() or torch_state.is_jit_traced()
    if not (wants_gradient or is_traced or are_transformed((scale,))):
        return inputs, scale
    if scale.numel() != 1 or not isinstance(queries, Tensor):
        return inputs, scale  # malformed: a later check raises
    if len(inputs) == 1 and (queries.dim() < 4 or queries.shape[-3] != 3):
        return inputs, scale
    q, *others = inputs if len(inputs) > 1 else queries.unbind(-3)
    wide = q.to(torch.promote_types(q.dtype, torch.float32))  # so the scale's gradient is summed in fp32
    return ((wide * (scale.reshape(()) * q.shape[-1] ** 0.5)).to(q.dtype), *others), None


def _unpack(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return q, k and v as views of (q, kv) or (qkv,), which hold them along the third axis from the end."""
    *alone, packed = inputs
    if alone:
        _check_packed("kv", packed)
    else:
        _check_packed("qkv", packed)
    return *alone, *packed.unbind(-3)


def _check_packed(name: str, packed: Tensor) -> None:
    checks.is_tensor(name, packed)
    axis, expected = packed.dim() - 3, len(name)
    if axis < 0:
        raise IndexError(f"Dimension out of range: {name} must have at least 4 dimensions, got {tuple(packed.shape)}")
    size = packed.shape[axis]
    if size < expected:
        raise IndexError(
            f"index {expected - 1} is out of bounds for dimension {axis} with size {size}: {name} of shape "
            f"{tuple(packed.shape)} must hold {expected} tensors along its third axis from the end"
        )
    if size > expected:
        raise RuntimeError(f"{name} must hold {expected} tensors along axis {axis}, got shape {tuple(packed.shape)}")
