"""aten::scaled_dot_product_attention, the operator below F.scaled_dot_product_attention.

PyTorch composes it of other operators; on Turing, of the plain formula for grouped heads and for bfloat16. A call that
our kernels serve is one call of dispatch, recorded by dispatch's autograd function. Dispatch modes, traces and
transforms see PyTorch's operators; efficient.py serves the efficient ones that they execute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn_compat.core.call import Scalars
from flash_attn_compat.core.prepared import PLAIN
from flash_attn_compat.core.reentry import DECIDED
from flash_attn_compat.core.torch_state import count_modes, tracing_state, transforms_are_on
from flash_attn_compat.dispatch.choice import served
from flash_attn_compat.settings import is_explaining
from flash_attn_compat.torch_sdpa import bridge, graphs
from flash_attn_compat.torch_sdpa.policy import (
    HALF,
    Override,
    Policy,
    check_mask,
    check_size,
    check_tensors,
    dtype_reason,
)

NAME = "scaled_dot_product_attention"
# The kernels round the probability to keep a key to 1/256, but not the factor 1 / (1 - dropout_p): at 0.9, answers are
# 1.6 % too large on average, at 0.999 four times as large as they should be.
MOST_DROPOUT = 0.9
BROADCAST = "batches or heads are broadcast"
_is_deterministic = torch._C._get_deterministic_algorithms
_has_efficient, _has_flash = torch._C._get_mem_efficient_sdp_enabled, torch._C._get_flash_sdp_enabled
_has_formula = torch._C._get_math_sdp_enabled
_FORMULA, _FLASH, _EFFICIENT = (
    int(getattr(torch._C._SDPBackend, name)) for name in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
)
# Before PyTorch 2.6 programs cannot set the order.
_order: Callable[[], list[int]] = getattr(torch._C, "_get_sdp_priority_order", lambda: [_FLASH, _EFFICIENT, _FORMULA])


def make_operator(override: Override) -> Callable[..., Tensor]:
    """Return the operator for the override's device. PyTorch's dispatcher leaves out arguments with default values."""

    def attention(*arguments: Any, **named: Any) -> Any:
        policy = override.policy
        if policy is None:
            return graphs.trace(*arguments, **named)
        q, k, v = arguments[:3]
        if (  # a tensor subclass, a dispatch mode, a trace or a transform must see PyTorch's own operators
            type(q) not in PLAIN
            or type(k) not in PLAIN
            or type(v) not in PLAIN
            or count_modes()
            or tracing_state() is not None
            or transforms_are_on()
            or forward_ad._current_level >= 0
        ):
            return graphs.trace(*_repeat_keys_in_graphs(policy, *arguments, **named), **named)
        reason, expanded = decline_reason(policy, *arguments, **named), arguments
        if reason is BROADCAST:
            reason, expanded = None, (*_broadcast(q, k, v, **named), *arguments[3:])
        if reason is None or is_explaining():
            out = _run_fused(reason, *expanded, **named)
            if out is not None:
                return out
        served[bridge.PYTORCH] += 1
        before, DECIDED.yet = DECIDED.yet, True  # as_decided, inlined to save the time of its frame
        try:
            return graphs.compose(*arguments, **named)
        finally:
            DECIDED.yet = before

    return attention


def decline_reason(
    policy: Policy, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> str | None:  # fmt: skip
    """Return the reason to leave a call to PyTorch, or None; the kernels' own reasons come later. Shapes as PyTorch's.

    BROADCAST means: to be served once ``_broadcast`` has expanded its tensors.

    A declined call pays for every check, so the checks that decide most calls come first. With dropout, every call
    counts as recorded: its recomputation under a checkpoint must drop the same.
    """
    dtype = q.dtype
    if dtype not in HALF:
        return dtype_reason(dtype)
    if not q.dim() == k.dim() == v.dim() == 4:
        return "our kernels need four axes: (batch, heads, rows, channels)"
    (batch, heads, rows, width), (batch_k, heads_k, keys, width_k) = q.shape, k.shape
    # PyTorch has no fused kernel for these before 8.0, so ours is faster at any size.
    goes_to_formula = heads != heads_k or batch != batch_k or dtype is torch.bfloat16
    is_always_faster = goes_to_formula and not (policy.always and bridge.has_flash(q.device))
    drops = dropout_p != 0.0
    is_recorded = drops or ((q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled())
    reason = check_size(policy, q, rows, keys, batch * heads * width, attn_mask, is_recorded, is_always_faster)
    if reason is not None:
        return reason
    if attn_mask is not None and is_causal:
        return "it has both attn_mask and is_causal"
    if not 0.0 <= dropout_p <= MOST_DROPOUT:
        return f"dropout_p must be from 0 to {MOST_DROPOUT}: our kernels round the probability to keep a score to 1/256"
    reason = check_tensors(policy, q, k, v)
    if reason is not None:
        return reason
    batch_v, heads_v, keys_v, width_v = v.shape
    if keys != keys_v or width != width_k or not width_v:
        return "the shapes of q, k and v do not fit, or v has no channels"
    if not _allows_fused():
        return "the program disables PyTorch's fused kernels or prefers its plain formula, and ours with them"
    is_grouped = enable_gqa and heads_k > 0 and heads % heads_k == 0
    fits = batch == batch_k == batch_v and heads_k == heads_v and (heads == heads_k or is_grouped)
    if not fits:
        if not _can_broadcast(q, k, v, enable_gqa):
            return "batch sizes or numbers of heads do not broadcast"
        batch, heads = max(batch, batch_k, batch_v), heads if enable_gqa else max(heads, heads_k, heads_v)
    if attn_mask is not None:
        reason = check_mask(attn_mask, q, (batch, heads, rows, keys), drops)
    return reason or (None if fits else BROADCAST)


def _allows_fused() -> bool:
    """Whether the program prefers a fused kernel to the plain formula (torch.nn.attention.sdpa_kernel)."""
    if not _has_formula():
        return _has_efficient() or _has_flash()
    for backend in _order():
        if backend == _FORMULA:
            return False
        if (backend == _FLASH and _has_flash()) or (backend == _EFFICIENT and _has_efficient()):
            return True
    return False


def _can_broadcast(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Whether the plain formula would broadcast the tensors: sizes are equal or 1, or heads are grouped."""
    batches, heads = {x.shape[0] for x in (q, k, v)} - {1}, {x.shape[1] for x in (q, k, v)} - {1}
    if enable_gqa:
        heads_k = k.shape[1]
        return len(batches) < 2 and heads_k == v.shape[1] > 0 and q.shape[1] % heads_k == 0
    return len(batches) < 2 and len(heads) < 2


def _broadcast(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, enable_gqa: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Expand q, k and v to one batch size, k and v to the same heads, and q to a multiple of these."""
    batch = max(x.shape[0] for x in (q, k, v))
    heads = q.shape[1] if enable_gqa else max(x.shape[1] for x in (q, k, v))
    heads_k = k.shape[1] if enable_gqa or k.shape[1] == v.shape[1] else heads
    return q.expand(batch, heads, -1, -1), k.expand(batch, heads_k, -1, -1), v.expand(batch, heads_k, -1, -1)


def _run_fused(
    reason: str | None, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """Compute the call by our kernels; None if another backend would serve it. Under ``explain``, explain it instead.

    reason: to decline the call; given under ``explain`` only
    """
    if reason is not None:
        bridge.explain([reason])
    bias = None
    if attn_mask is not None:
        (batch, heads, rows, _), keys = q.shape, k.shape[2]
        bias = attn_mask.expand(batch, heads, rows, keys)
    call = _as_flash(q, k, v, dropout_p, is_causal, scale)
    if is_explaining():
        q, k, v, scalars = call
        tensors = bridge.dense_tensors(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias)
        bridge.explain(bridge.decline_reasons(tensors, scalars))
    return _attend(*call, bias)


def _as_flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Scalars]:
    """Return the call's tensors and scalars in flash-attn's terms, which align a causal mask with the last key."""
    right = -1
    if is_causal:
        k, v, is_causal, right = bridge.align_with_last_key(q, k, v, 2)
    return q, k, v, Scalars(dropout_p, scale, is_causal, -1, right, 0.0, _is_deterministic())


def _attend(q: Tensor, k: Tensor, v: Tensor, scalars: Scalars, bias: Tensor | None) -> Tensor | None:
    """Run bridge.attend. A group's heads of one row under one mask become rows, so that their keys are read once.

    Not with dropout or gradients: a forward and its recomputation must drop the same.
    """
    if bias is None or scalars.dropout_p:
        return bridge.attend(q, k, v, scalars, bias)
    (_, heads, rows, _), heads_k = q.shape, k.shape[1]
    if rows > 1 or heads == heads_k or bias.stride(1):
        return bridge.attend(q, k, v, scalars, bias)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return bridge.attend(q, k, v, scalars, bias)
    grouped = q[:, :, 0].unflatten(1, (heads_k, -1))
    out = bridge.attend(grouped, k, v, scalars, bias[:, :heads_k].expand(-1, -1, heads // heads_k, -1))
    return None if out is None else bridge.as_own(out.flatten(1, 2)[:, None])


def _repeat_keys_in_graphs(
    policy: Policy, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
) -> tuple[Any, ...]:
    """Return the arguments by position; in a compiled graph of grouped heads, with k and v repeated for each group.

    The graph then holds an operator that efficient.py serves, instead of the plain formula.
    """
    arguments = q, k, v, attn_mask, *rest
    if attn_mask is not None or not named.get("enable_gqa") or not q.dim() == k.dim() == v.dim() == 4:
        return arguments
    heads, heads_k = q.shape[1], k.shape[1]
    if q.dtype is not torch.float16 or heads == heads_k or heads_k != v.shape[1] or not heads_k or heads % heads_k:
        return arguments
    if q.device.type != policy.device or bridge.has_flash(q.device) or not _allows_fused():
        return arguments
    if torch._guards.TracingContext.try_get() is None:
        return arguments
    return q, *(x.repeat_interleave(heads // heads_k, 1) for x in (k, v)), attn_mask, *rest
