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

from flash_attn_compat.aten import door
from flash_attn_compat.aten.wish import HALF, Front, Wish, against_mask, against_size, against_tensors, not_half
from flash_attn_compat.engine.build import Options
from flash_attn_compat.engine.callers_state import count_modes, tracing_state, transforms_are_on
from flash_attn_compat.engine.decided import DECIDED
from flash_attn_compat.engine.memory import PLAIN
from flash_attn_compat.serving.dispatch import served
from flash_attn_compat.settings import explains

NAME = "scaled_dot_product_attention"
# How many keys are left is rounded, and what makes up for the others is not: at 0.9 answers are 1.6 % too large on
# average, at 0.999 four times as large.
MOST_DROPOUT = 0.9
# PyTorch's composition is what the operator has where no device is known; this way of calling it parses the least.
_compose = torch.ops.aten.scaled_dot_product_attention.default._handle.redispatch_boxed
_NOWHERE = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
_is_deterministic = torch._C._get_deterministic_algorithms
_has_efficient, _has_flash = torch._C._get_mem_efficient_sdp_enabled, torch._C._get_flash_sdp_enabled


def implementation(front: Front) -> Callable[..., Tensor]:
    """The operator for the keys of the front's device. The dispatcher leaves out arguments that are the default."""

    def attention(*arguments: Any, **named: Any) -> Any:
        wish = front.wish
        if wish is None:
            return _compose(_NOWHERE, *arguments, **named)
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
            return _compose(_NOWHERE, *_ungrouped(wish, *arguments, **named), **named)
        against = why_not(wish, *arguments, **named)
        if against is None or explains():
            out = _ours(against, *arguments, **named)
            if out is not None:
                return out
        served[door.PYTORCH] += 1
        before, DECIDED.yet = DECIDED.yet, True  # as_decided, without the time that its frame takes
        try:
            return _compose(_NOWHERE, *arguments, **named)
        finally:
            DECIDED.yet = before

    return attention


def why_not(
    wish: Wish, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> str | None:  # fmt: skip
    """What keeps our kernels from such a call, besides their own reasons; None for nothing. Shapes as in PyTorch.

    A call that is left pays for each look that is taken at it, so what decides most calls comes first.
    """
    dtype = q.dtype
    if dtype not in HALF:
        return not_half(dtype)
    if not q.dim() == k.dim() == v.dim() == 4:
        return "our kernels compute four axes: (batch, heads, rows, channels)"
    (batch, heads, rows, width), (batch_k, heads_k, keys, width_k) = q.shape, k.shape
    # These would go to the plain formula, which is slower at any size.
    at_any_size = (heads != heads_k or dtype is torch.bfloat16) and not (wish.always and door.has_flash(q.device))
    is_recorded = (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
    against = against_size(wish, q, rows, keys, batch * heads * width, attn_mask, is_recorded, at_any_size)
    if against is not None:
        return against
    if attn_mask is not None and is_causal:
        return "it has a mask, and is causal besides"
    if not 0.0 <= dropout_p <= MOST_DROPOUT:
        return "its dropout leaves too little for a probability that is rounded to 1/256"
    against = against_tensors(wish, q, k, v)
    if against is not None:
        return against
    if v.shape[:3] != k.shape[:3] or batch != batch_k or width != width_k or not v.shape[3]:
        return "shapes differ, or values have no channels"
    if heads != heads_k and not (enable_gqa and heads_k and heads % heads_k == 0):
        return "heads differ"
    if not (_has_efficient() or _has_flash()):
        return "the program forbids PyTorch's fused kernels, and so ours"
    return None if attn_mask is None else against_mask(attn_mask, q, (batch, heads, rows, keys))


def _ours(
    against: str | None, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """The answer of our kernels, or what speaks against them where only that is asked; None if others would compute."""
    if against is not None:
        door.explain([against])
    bias = None if attn_mask is None else attn_mask.expand(*q.shape[:3], k.shape[2])
    call = _as_flash(q, k, v, dropout_p, is_causal, scale)
    if explains():
        door.explain(door.against(*call, bias=bias))
    out = _attend(*call, bias)
    if out is None:
        return None
    out = out.contiguous()
    if out.requires_grad:
        return out.transpose(1, 2)
    # Autograd lets nobody write into a view that was made while nothing was recorded.
    return (out.data if out._is_view() else out).transpose_(1, 2)


def _as_flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """The same call in flash-attn's axes, whose causal mask stands at the last key instead of the first."""
    rows, keys, window = q.shape[2], k.shape[2], (-1, -1)
    if is_causal and rows < keys:  # nobody sees the others
        k, v = k[:, :, :rows], v[:, :, :rows]
    elif is_causal and rows > keys:
        window, is_causal = (-1, rows - keys), False
    options = Options(dropout_p, scale, is_causal, window, deterministic=_is_deterministic())
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), options


def _attend(q: Tensor, k: Tensor, v: Tensor, options: Options, bias: Tensor | None) -> Tensor | None:
    """door.attend. A group's heads of one row are rows where one mask is for all: so their keys are read once."""
    (batch, rows, heads, _), heads_k = q.shape, k.shape[2]
    if bias is None or rows > 1 or heads == heads_k or bias.stride(1):
        return door.attend(q, k, v, options, bias)
    grouped = q.unflatten(2, (heads_k, -1))[:, 0].transpose(1, 2)
    out = door.attend(grouped, k, v, options, bias[:, :heads_k].expand(-1, -1, heads // heads_k, -1))
    return None if out is None else out.transpose(1, 2).reshape(batch, 1, heads, -1)


def _ungrouped(
    wish: Wish, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
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
    if q.device.type != wish.device or door.has_flash(q.device) or torch._guards.TracingContext.try_get() is None:
        return given
    return q, *(x.repeat_interleave(heads // heads_k, 1) for x in (k, v)), attn_mask, *rest
