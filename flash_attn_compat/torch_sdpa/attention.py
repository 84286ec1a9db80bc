"""aten::scaled_dot_product_attention, the operator below F.scaled_dot_product_attention.

PyTorch composes it of other operators; on Turing, grouped heads and bfloat16 get the plain formula. A call that our
kernels serve becomes one call of this package's dispatch, with its autograd Function. Dispatch modes, traces and
transforms see PyTorch's operators. If these include the memory-efficient ones, efficient.py serves them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn_compat.core.entry import PLAIN
from flash_attn_compat.core.inputs import DenseInputs, Options
from flash_attn_compat.core.mask import align_with_last_key
from flash_attn_compat.core.torch_state import DECIDED, count_modes, is_jit_traced, transforms_are_on
from flash_attn_compat.dispatch.choice import served
from flash_attn_compat.settings import is_explaining
from flash_attn_compat.torch_sdpa import bridge, graphs
from flash_attn_compat.torch_sdpa.policy import (
    HALF,
    Override,
    Policy,
    check_mask,
    check_plain,
    dtype_reason,
    has_flash,
)

NAME = "scaled_dot_product_attention"
# The kernels round the probability to keep a key to 1/256, but not the factor 1 / (1 - dropout_p): at 0.9, answers are
# 1.6 % too large on average, at 0.999 four times as large as they should be.
MOST_DROPOUT = 0.9
BROADCAST = "batches or heads are broadcast"  # decline_reason returns it for a call to serve after _broadcast
_is_deterministic = torch._C._get_deterministic_algorithms
_has_efficient, _has_flash = torch._C._get_mem_efficient_sdp_enabled, torch._C._get_flash_sdp_enabled
_has_formula = torch._C._get_math_sdp_enabled
_FORMULA, _FLASH, _EFFICIENT = (
    int(getattr(torch._C._SDPBackend, name)) for name in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
)
# Before PyTorch 2.6 programs cannot set the order.
_order: Callable[[], list[int]] = getattr(torch._C, "_get_sdp_priority_order", lambda: [_FLASH, _EFFICIENT, _FORMULA])


class SdpaCall(NamedTuple):
    """The operator's arguments, by its names. query, key, value: (batch, heads, rows or keys, channels)"""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def make_operator(override: Override) -> Callable[..., Tensor]:
    """Return the operator for the override's device. PyTorch's dispatcher leaves out arguments with default values."""

    def attention(*arguments: Any, **named: Any) -> Any:
        policy = override.policy
        if policy is None:
            return graphs.trace(*arguments, **named)
        call = SdpaCall(*arguments, **named)
        if (  # a tensor subclass, a dispatch mode, a trace or a transform must see PyTorch's own operators
            type(call.query) not in PLAIN
            or type(call.key) not in PLAIN
            or type(call.value) not in PLAIN
            or count_modes()
            or is_jit_traced()
            or transforms_are_on()
            or forward_ad._current_level >= 0
        ):
            k, v = _repeat_keys_in_graphs(policy, call)
            _, _, _, *others = arguments
            return graphs.trace(call.query, k, v, *others, **named)
        reason = decline_reason(policy, call)
        if reason is BROADCAST:
            reason, call = None, _broadcast(call)
        if is_explaining():
            bridge.explain([reason] if reason else bridge.decline_reasons(*_as_flash(call)))
        out = None if reason else _run_fused(call)
        if out is not None:
            return out
        served[bridge.PYTORCH] += 1
        before, DECIDED.yet = DECIDED.yet, True  # as as_decided() does, without the time of a call
        try:
            return graphs.compose(*arguments, **named)
        finally:
            DECIDED.yet = before

    return attention


def decline_reason(policy: Policy, call: SdpaCall) -> str | None:
    """Return the reason to leave a call to PyTorch, or None; the kernels' own reasons come later.

    BROADCAST is no reason to decline: our kernels serve the call once ``_broadcast`` has expanded its tensors.

    The checks that decline most calls come first, to save time. Every call with dropout counts as recorded by autograd:
    a checkpoint's forward is not, its recomputation is, and both must get the same kernel and drop the same keys.
    """
    q, k, v, attn_mask, dropout_p, is_causal, _, enable_gqa = call
    dtype = q.dtype
    if dtype not in HALF:
        return dtype_reason(dtype)
    if not q.dim() == k.dim() == v.dim() == 4:
        return "our kernels need four axes: (batch, heads, rows, channels)"
    (batch, heads, rows, width), (batch_k, heads_k, keys, width_k) = q.shape, k.shape
    # PyTorch has no fused kernel for these before 8.0, so ours is faster at any size.
    goes_to_formula = heads != heads_k or batch != batch_k or dtype is torch.bfloat16
    is_always_faster = goes_to_formula and not (policy.always and has_flash(q.device))
    drops = dropout_p != 0.0
    is_recorded = drops or ((q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled())
    size = (rows, keys), batch * heads * width
    reason = check_plain(policy, q, k, v, *size, attn_mask, is_causal, is_recorded, is_always_faster)
    if reason is not None:
        return reason
    if attn_mask is not None and is_causal:
        return "it has both attn_mask and is_causal"
    if not 0.0 <= dropout_p <= MOST_DROPOUT:
        return f"dropout_p must be from 0 to {MOST_DROPOUT}: our kernels round the probability to keep a score to 1/256"
    batch_v, heads_v, keys_v, width_v = v.shape
    if keys != keys_v or width != width_k or not width_v:
        return "the shapes of q, k and v do not fit, or v has no channels"
    if not _allows_fused():
        return "the program disables PyTorch's fused kernels or prefers its plain formula, and ours with them"
    is_grouped = enable_gqa and heads_k > 0 and heads % heads_k == 0
    fits = batch == batch_k == batch_v and heads_k == heads_v and (heads == heads_k or is_grouped)
    if not fits:
        sizes = _broadcast_sizes(call)
        if sizes is None:
            return "batch sizes or numbers of heads do not broadcast"
        batch, heads = sizes
    if attn_mask is not None:
        reason = check_mask(attn_mask, q, (batch, heads, rows, keys), drops)
    return reason or (None if fits else BROADCAST)


def _allows_fused() -> bool:
    """Whether the program's sdpa_kernel settings prefer a fused kernel of PyTorch's to the plain formula."""
    if not _has_formula():
        return _has_efficient() or _has_flash()
    for backend in _order():
        if backend == _FORMULA:
            return False
        if (backend == _FLASH and _has_flash()) or (backend == _EFFICIENT and _has_efficient()):
            return True
    return False


def _broadcast_sizes(call: SdpaCall) -> tuple[int, int] | None:
    """Return the batch size and query heads to which PyTorch's formula broadcasts the call; None if they do not fit."""
    batches, all_heads = zip(*(x.shape[:2] for x in call[:3]))
    batch, heads = _broadcast_size(batches), _broadcast_size(all_heads)
    if call.enable_gqa:
        given, heads_k, heads_v = all_heads
        heads = given if heads_k == heads_v > 0 and given % heads_k == 0 else None
    return None if batch is None or heads is None else (batch, heads)


def _broadcast_size(sizes: Collection[int]) -> int | None:
    """Return the size to which axes of these sizes are broadcast; None if they do not fit."""
    largest = max(sizes)
    return largest if {*sizes} <= {1, largest} else None


def _broadcast(call: SdpaCall) -> SdpaCall:
    """Expand q, k and v to one batch size, k and v to the same heads, and q to a multiple of that number."""
    sizes, (q, k, v, *_) = _broadcast_sizes(call), call
    assert sizes is not None  # or decline_reason would not return BROADCAST
    (batch, heads), heads_k = sizes, k.shape[1] if k.shape[1] == v.shape[1] else sizes[1]
    k, v = (x.expand(batch, heads_k, -1, -1) for x in (k, v))
    return call._replace(query=q.expand(batch, heads, -1, -1), key=k, value=v)


def _as_flash(call: SdpaCall) -> tuple[DenseInputs, Options]:
    """Return the call in flash-attn's arguments, which align a causal mask with the last key."""
    q, k, v, attn_mask, dropout_p, is_causal, scale, _ = call
    bias = None if attn_mask is None else attn_mask.expand(*q.shape[:3], k.shape[2])
    right = -1
    if is_causal:
        k, v, is_causal, right = align_with_last_key(q, k, v, 2)
    x = DenseInputs(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias=bias)
    return x, Options(dropout_p, scale, is_causal, -1, right, 0.0, _is_deterministic())


def _run_fused(call: SdpaCall) -> Tensor | None:
    """Compute a call by our kernels; None if another backend would serve it.

    If each sequence has one row, and the query heads of a key head share a mask, these heads are passed as rows of one
    head, so that the kernel reads their keys once. Not with dropout or gradients: a checkpoint's forward and its
    recomputation would then take different ways and drop different keys.
    """
    q, k, v, mask, dropout_p, *_ = call
    heads, heads_k = q.shape[1], k.shape[1]
    if mask is None or dropout_p or q.shape[2] > 1 or heads == heads_k:
        return bridge.attend(*_as_flash(call))
    if mask.dim() > 2:
        if mask.shape[-3] > 1 and mask.stride(-3):
            return bridge.attend(*_as_flash(call))
        mask = mask.narrow(-3, 0, 1)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return bridge.attend(*_as_flash(call))
    rows = call._replace(query=q[:, :, 0].unflatten(1, (heads_k, -1)), attn_mask=mask)
    out = bridge.attend(*_as_flash(rows))
    return None if out is None else bridge.as_own(out.flatten(1, 2)[:, None])


def _repeat_keys_in_graphs(policy: Policy, call: SdpaCall) -> tuple[Tensor, Tensor]:
    """Return k and v. In a compiled graph, repeat the heads of grouped-query attention for each query head.

    PyTorch then puts its memory-efficient operator into the graph, which efficient.py serves, not the plain formula.
    """
    q, k, v = call[:3]
    if call.attn_mask is not None or not call.enable_gqa or not q.dim() == k.dim() == v.dim() == 4:
        return k, v
    heads, heads_k = q.shape[1], k.shape[1]
    if q.dtype is not torch.float16 or heads == heads_k or heads_k != v.shape[1] or not heads_k or heads % heads_k:
        return k, v
    if q.device.type != policy.device or has_flash(q.device) or not _allows_fused():
        return k, v
    if torch._guards.TracingContext.try_get() is None:
        return k, v
    return k.repeat_interleave(heads // heads_k, 1), v.repeat_interleave(heads // heads_k, 1)
