"""aten::scaled_dot_product_attention: what F.scaled_dot_product_attention calls.

PyTorch composes it of other operators, behind a choice that on Turing takes the plain formula for grouped heads and for
bfloat16. Where ours compute it, it is one call of the engine, recorded by the engine's own autograd function. Modes,
traces and transforms see PyTorch's operators; efficient.py takes those that they execute.
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
from flash_attn_compat.settings import explains
from flash_attn_compat.torch_sdpa import bridge, graphs
from flash_attn_compat.torch_sdpa.policy import (
    HALF,
    Override,
    Policy,
    against_mask,
    against_size,
    against_tensors,
    not_half,
)

NAME = "scaled_dot_product_attention"
# How many keys are left is rounded, and what makes up for the others is not: at 0.9 answers are 1.6 % too large on
# average, at 0.999 four times as large.
MOST_DROPOUT = 0.9
BROADCAST = "batches or heads are broadcast"
_is_deterministic = torch._C._get_deterministic_algorithms
_has_efficient, _has_flash = torch._C._get_mem_efficient_sdp_enabled, torch._C._get_flash_sdp_enabled
_has_formula = torch._C._get_math_sdp_enabled
_FORMULA, _FLASH, _EFFICIENT = (
    int(getattr(torch._C._SDPBackend, name)) for name in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
)
# Before PyTorch 2.6 programs have no say in it.
_order: Callable[[], list[int]] = getattr(torch._C, "_get_sdp_priority_order", lambda: [_FLASH, _EFFICIENT, _FORMULA])


def implementation(override: Override) -> Callable[..., Tensor]:
    """The operator for the keys of the override's device. The dispatcher leaves out arguments that are the default."""

    def attention(*arguments: Any, **named: Any) -> Any:
        policy = override.policy
        if policy is None:
            return graphs.trace(*arguments, **named)
        q, k, v = arguments[:3]
        if (  # somebody must see PyTorch's own operators: a tensor's class, a mode, a trace, a transform
            type(q) not in PLAIN
            or type(k) not in PLAIN
            or type(v) not in PLAIN
            or count_modes()
            or tracing_state() is not None
            or transforms_are_on()
            or forward_ad._current_level >= 0
        ):
            return graphs.trace(*_ungrouped(policy, *arguments, **named), **named)
        against, given = decline_reason(policy, *arguments, **named), arguments
        if against is BROADCAST:
            against, given = None, (*_broadcast(q, k, v, **named), *arguments[3:])
        if against is None or explains():
            out = _run_fused(against, *given, **named)
            if out is not None:
                return out
        served[bridge.PYTORCH] += 1
        before, DECIDED.yet = DECIDED.yet, True  # as_decided, without the time that its frame takes
        try:
            return graphs.compose(*arguments, **named)
        finally:
            DECIDED.yet = before

    return attention


def decline_reason(
    policy: Policy, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> str | None:  # fmt: skip
    """What keeps our kernels from such a call, besides their own reasons; None for nothing. Shapes as in PyTorch.

    BROADCAST where the same call is ours once its tensors are of one batch and of heads that fit.

    A call that is left pays for each look that is taken at it, so what decides most calls comes first. What autograd
    records decides about no call with dropout: its recomputation under a checkpoint has to drop the same.
    """
    dtype = q.dtype
    if dtype not in HALF:
        return not_half(dtype)
    if not q.dim() == k.dim() == v.dim() == 4:
        return "our kernels compute four axes: (batch, heads, rows, channels)"
    (batch, heads, rows, width), (batch_k, heads_k, keys, width_k) = q.shape, k.shape
    # These would go to the plain formula, which is slower at any size.
    goes_to_formula = heads != heads_k or batch != batch_k or dtype is torch.bfloat16
    at_any_size = goes_to_formula and not (policy.always and bridge.has_flash(q.device))
    drops = dropout_p != 0.0
    is_recorded = drops or ((q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled())
    against = against_size(policy, q, rows, keys, batch * heads * width, attn_mask, is_recorded, at_any_size)
    if against is not None:
        return against
    if attn_mask is not None and is_causal:
        return "it has a mask, and is causal besides"
    if not 0.0 <= dropout_p <= MOST_DROPOUT:
        return "its dropout leaves too little for a probability that is rounded to 1/256"
    against = against_tensors(policy, q, k, v)
    if against is not None:
        return against
    batch_v, heads_v, keys_v, width_v = v.shape
    if keys != keys_v or width != width_k or not width_v:
        return "shapes differ, or values have no channels"
    if not _allows_fused():
        return "the program forbids PyTorch's fused kernels or asks for the formula first, and so forbids ours"
    is_grouped = enable_gqa and heads_k > 0 and heads % heads_k == 0
    fits = batch == batch_k == batch_v and heads_k == heads_v and (heads == heads_k or is_grouped)
    if not fits:
        if not _can_broadcast(q, k, v, enable_gqa):
            return "batches or heads differ"
        batch, heads = max(batch, batch_k, batch_v), heads if enable_gqa else max(heads, heads_k, heads_v)
    if attn_mask is not None:
        against = against_mask(attn_mask, q, (batch, heads, rows, keys), drops)
    return against or (None if fits else BROADCAST)


def _allows_fused() -> bool:
    """Whether the program, by torch.nn.attention.sdpa_kernel, prefers a fused kernel to the plain formula."""
    if not _has_formula():
        return _has_efficient() or _has_flash()
    for backend in _order():
        if backend == _FORMULA:
            return False
        if (backend == _FLASH and _has_flash()) or (backend == _EFFICIENT and _has_efficient()):
            return True
    return False


def _can_broadcast(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Whether the plain formula would compute it: sizes are equal but for those of 1, or heads are grouped."""
    batches, heads = {x.shape[0] for x in (q, k, v)} - {1}, {x.shape[1] for x in (q, k, v)} - {1}
    if enable_gqa:
        heads_k = k.shape[1]
        return len(batches) < 2 and heads_k == v.shape[1] > 0 and q.shape[1] % heads_k == 0
    return len(batches) < 2 and len(heads) < 2


def _broadcast(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, enable_gqa: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """All with as many sequences, keys with as many heads as values, queries with a multiple of that."""
    batch = max(x.shape[0] for x in (q, k, v))
    heads = q.shape[1] if enable_gqa else max(x.shape[1] for x in (q, k, v))
    heads_k = k.shape[1] if enable_gqa or k.shape[1] == v.shape[1] else heads
    return q.expand(batch, heads, -1, -1), k.expand(batch, heads_k, -1, -1), v.expand(batch, heads_k, -1, -1)


def _run_fused(
    against: str | None, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """The answer of our kernels, or what speaks against them where only that is asked; None if others would compute."""
    if against is not None:
        bridge.explain([against])
    bias = None
    if attn_mask is not None:
        (batch, heads, rows, _), keys = q.shape, k.shape[2]
        bias = attn_mask.expand(batch, heads, rows, keys)
    call = _as_flash(q, k, v, dropout_p, is_causal, scale)
    if explains():
        q, k, v, scalars = call
        tensors = bridge.dense_tensors(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias)
        bridge.explain(bridge.against(tensors, scalars))
    return _attend(*call, bias)


def _as_flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Scalars]:
    """The same call with flash-attn's arguments, whose causal mask stands at the last key instead of the first."""
    right = -1
    if is_causal:
        rows, keys = q.shape[2], k.shape[2]
        if rows < keys:  # nobody sees the others
            k, v = k[:, :, :rows], v[:, :, :rows]
        elif rows > keys:
            right, is_causal = rows - keys, False
    return q, k, v, Scalars(dropout_p, scale, is_causal, -1, right, 0.0, _is_deterministic())


def _attend(q: Tensor, k: Tensor, v: Tensor, scalars: Scalars, bias: Tensor | None) -> Tensor | None:
    """door.attend. A group's heads of one row are rows where one mask is for all: so their keys are read once.

    But not with dropout or gradients: a forward and its recomputation have to drop the same.
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


def _ungrouped(
    policy: Policy, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
) -> tuple[Any, ...]:
    """The arguments by position. In a graph that is compiled, keys and values are repeated for the heads of a group.

    The graph then holds an operator that efficient.py takes, instead of the plain formula.
    """
    given = q, k, v, attn_mask, *rest
    if attn_mask is not None or not named.get("enable_gqa") or not q.dim() == k.dim() == v.dim() == 4:
        return given
    heads, heads_k = q.shape[1], k.shape[1]
    if q.dtype is not torch.float16 or heads == heads_k or heads_k != v.shape[1] or not heads_k or heads % heads_k:
        return given
    if q.device.type != policy.device or bridge.has_flash(q.device) or not _allows_fused():
        return given
    if torch._guards.TracingContext.try_get() is None:
        return given
    return q, *(x.repeat_interleave(heads // heads_k, 1) for x in (k, v)), attn_mask, *rest
