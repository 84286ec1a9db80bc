"""aten::_efficient_attention_forward and _backward: PyTorch's memory-efficient kernel, and what calls it.

Those are aten::_scaled_dot_product_efficient_attention, which compiled graphs and DTensors hold, nested tensors, and
xformers. A call reaches us below autograd and modes, above the device's own kernel, which gets what we leave.
Dropout stays there: its mask could not be drawn by whoever computes the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.aten import door
from flash_attn_compat.aten.wish import Front, Wish, against_mask, against_size, against_tensors, is_at_home
from flash_attn_compat.engine import outside
from flash_attn_compat.engine.build import Options, Packing
from flash_attn_compat.engine.call import Gradients, Upstream
from flash_attn_compat.engine.decided import is_decided
from flash_attn_compat.serving import dispatch

FORWARD, BACKWARD = "_efficient_attention_forward", "_efficient_attention_backward"
KEY = "BackendSelect"
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
NO_MASK, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2
# An LSE is padded with +inf to a multiple of so many rows.
_LSE_ROWS = 32


class Problem(NamedTuple):
    """What both operators are given, by their names there: q (batch, rows, heads, channels), k and v likewise.

    With cu_seqlens the batch is 1 and holds packed sequences.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    dropout_p: float
    custom_mask_type: int
    scale: float | None
    seqlen_k: Tensor | None
    window_size: int | None

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def rows(self) -> int:
        return self.max_seqlen_q if self.is_packed and self.max_seqlen_q is not None else self.query.shape[1]

    @property
    def keys(self) -> int:
        return self.max_seqlen_k if self.max_seqlen_k is not None else self.key.shape[1]

    @property
    def has_equal_lengths(self) -> bool:
        """Whether each sequence is known to have as many rows as keys, so that both causal masks are one."""
        starts_q, starts_k = self.cu_seqlens_q, self.cu_seqlens_k
        if starts_q is None or starts_k is None:
            return self.query.shape[1] == self.key.shape[1]
        return self.seqlen_k is None and (starts_q is starts_k or starts_q.data_ptr() == starts_k.data_ptr())

    @property
    def may_see_nothing(self) -> bool:
        """Whether there may be rows without keys."""
        if self.bias is not None:
            return True
        if self.is_packed:
            return not self.has_equal_lengths
        return self.custom_mask_type == BOTTOM_RIGHT and self.query.shape[1] > self.key.shape[1]


def serving_forward(front: Front) -> Callable[..., Any]:
    """The forward, for all devices' tensors."""

    def forward(
        wish: Wish,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        dropout_p: float,
        custom_mask_type: int,
        compute_log_sumexp: bool = False,
        *,
        scale: float | None = None,
        seqlen_k: Tensor | None = None,
        window_size: int | None = None,
    ) -> Any:
        problem = Problem(
            query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
            custom_mask_type, scale, seqlen_k, window_size,
        )  # fmt: skip
        against = why_not(wish, problem, compute_log_sumexp)
        if settings.explains():
            _explain(against, problem)
        found = None if against else _forward(problem, compute_log_sumexp)
        if found is None:
            dispatch.count(door.PYTORCH)
        return found

    return _in_front(front, forward, torch.ops.aten._efficient_attention_forward.default)


def serving_backward(front: Front) -> Callable[..., Any]:
    """The backward: of forwards that were ours and of others."""

    def backward(
        wish: Wish,
        grad_out_: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        out: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        logsumexp: Tensor,
        dropout_p: float,
        philox_seed: Tensor,
        philox_offset: Tensor,
        custom_mask_type: int,
        bias_requires_grad: bool,
        *,
        scale: float | None = None,
        num_splits_key: int | None = None,
        window_size: int | None = None,
        shared_storage_dqdkdv: bool = False,
    ) -> Any:
        if shared_storage_dqdkdv or bias_requires_grad:
            return None
        problem = Problem(
            query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
            custom_mask_type, scale, None, window_size,
        )  # fmt: skip
        found = None if why_not(wish, problem, True) else _backward(problem, grad_out_, out, logsumexp)
        return None if found is None else (*found, None)

    return _in_front(front, backward, torch.ops.aten._efficient_attention_backward.default)


def _in_front(front: Front, ours: Callable[..., Any], operator: Any) -> Callable[..., Any]:
    """``operator`` for the dispatcher, which hands its keys over first: what ``ours`` leaves goes on to those below."""
    redispatch = operator.redispatch

    def serve(keys: Any, *arguments: Any, **named: Any) -> Any:
        wish = front.wish
        if wish is not None and not is_decided() and is_at_home(wish, arguments[0]):
            found = ours(wish, *arguments, **named)
            if found is not None:
                return found
        return redispatch(keys & _BELOW, *arguments, **named)

    return serve


def why_not(wish: Wish, p: Problem, is_recorded: bool) -> str | None:
    """What keeps our kernels from a problem, besides their own reasons; None for nothing. is_recorded: as in wish"""
    if p.bias is not None and (p.is_packed or p.seqlen_k is not None or p.custom_mask_type != NO_MASK):
        return "it has a mask, and is causal or packed besides"
    if p.dropout_p != 0.0:
        return "its dropout mask is PyTorch's"
    against = against_tensors(wish, p.query, p.key, p.value)
    if against is not None:
        return against
    if not p.query.dim() == p.key.dim() == p.value.dim() == 4 or p.query.shape[2:] != p.key.shape[2:]:
        return "shapes or heads differ"
    if p.key.shape[:3] != p.value.shape[:3] or p.query.shape[0] != p.key.shape[0]:
        return "shapes or heads differ"
    if p.bias is not None:
        against = against_mask(wish, p.bias, p.query, (p.query.shape[0], p.query.shape[2], p.rows, p.key.shape[1]))
        if against is not None:
            return against
    if p.custom_mask_type not in (NO_MASK, TOP_LEFT, BOTTOM_RIGHT):
        return "its mask is unknown"
    return _against_lengths(p) or against_size(wish, p.query, p.rows, p.keys, _heads(p), is_recorded)


def _heads(p: Problem) -> int:
    batch = p.query.shape[0] if p.cu_seqlens_q is None else p.cu_seqlens_q.shape[0] - 1
    return batch * p.query.shape[2]


def _against_lengths(p: Problem) -> str | None:
    starts_q, starts_k = p.cu_seqlens_q, p.cu_seqlens_k
    if starts_q is None and starts_k is None:
        if p.seqlen_k is not None:
            return "it has lengths of keys without starts"
    elif (
        starts_q is None
        or starts_k is None
        or p.query.shape[0] != 1
        or p.max_seqlen_q is None
        or starts_q.dtype is not torch.int32
        or starts_k.dtype is not torch.int32
        or starts_q.shape != starts_k.shape
    ):
        return "it has starts that make no sequences"
    is_top_left_apart = p.custom_mask_type == TOP_LEFT and not p.has_equal_lengths
    if p.is_packed and is_top_left_apart:
        return "sequences stand at the first key under its mask, and may have more keys than rows"
    if p.window_size is not None and (p.custom_mask_type == NO_MASK or p.window_size < 1 or is_top_left_apart):
        return "its window stands at the first key"
    return None


def _as_flash(p: Problem) -> tuple[Tensor, Tensor, Tensor, Options, Packing | None]:
    """The same in flash-attn's arguments, whose causal mask stands at the last key."""
    q, k, v = p.query, p.key, p.value
    is_causal, window = p.custom_mask_type != NO_MASK, (-1, -1)
    if p.window_size is not None:
        window = (p.window_size - 1, 0)
    elif p.custom_mask_type == TOP_LEFT and not p.is_packed:
        rows, keys = q.shape[1], k.shape[1]
        if rows < keys:  # nobody sees the others
            k, v = k[:, :rows], v[:, :rows]
        elif rows > keys:
            window, is_causal = (-1, rows - keys), False
    options = Options(0.0, p.scale, is_causal, window, deterministic=torch._C._get_deterministic_algorithms())
    if p.cu_seqlens_q is None or p.cu_seqlens_k is None:
        return q, k, v, options, None
    starts_k = p.cu_seqlens_q if p.has_equal_lengths else p.cu_seqlens_k
    packing = Packing(p.cu_seqlens_q, starts_k, p.rows, p.keys, seqused_k=p.seqlen_k)
    return q[0], k[0], v[0], options, packing


def _forward(p: Problem, return_lse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int] | None:
    q, k, v, options, packing = _as_flash(p)
    result = door.forward(q, k, v, options, packing, _bias(p), return_lse)
    if result is None:
        return None
    out = result.out.contiguous()
    lse = _padded(p, result.lse) if return_lse else q.new_empty((_sequences(p), q.shape[-2], 0), dtype=torch.float32)
    # Where PyTorch leaves them when nothing is dropped.
    seed, offset = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    return out if packing is None else out[None], lse, seed, offset, p.rows, p.keys


def _bias(p: Problem) -> Tensor | None:
    rows, heads = p.query.shape[1:3]
    return door.expanded(p.bias, (p.query.shape[0], heads, rows), p.key.shape[1])


def _sequences(p: Problem) -> int:
    return p.query.shape[0] if p.cu_seqlens_q is None else p.cu_seqlens_q.shape[0] - 1


def _padded(p: Problem, lse: Tensor) -> Tensor:
    """The LSE (sequences, heads, padded rows): 0 in rows that see nothing, +inf behind the last one of a sequence."""
    if p.may_see_nothing:
        lse = lse.masked_fill(lse == torch.inf, 0.0)
    if p.cu_seqlens_q is None:
        return F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf)
    return outside.padded_lse(lse, p.cu_seqlens_q, p.rows + -p.rows % _LSE_ROWS)


def _backward(p: Problem, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    q, k, v, options, packing = _as_flash(p)
    if p.cu_seqlens_q is None:
        lse = lse[:, :, : q.shape[1]]
    else:
        dout, out, lse = dout[0], out[0], outside.packed_lse(lse, p.cu_seqlens_q, q.shape[0])
    into = None
    if k.shape != p.key.shape and packing is None:  # of keys that nobody sees
        dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (p.key, p.value))
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        into = Gradients(dq, dk[:, : k.shape[1]], dv[:, : k.shape[1]])
    found = door.backward(q, k, v, options, packing, _bias(p), Upstream(dout, out, lse, None), into)
    if found is None:
        return None
    if into is not None:
        return dq, dk, dv
    dq, dk, dv = (gradient.contiguous() for gradient in found)
    return (dq, dk, dv) if packing is None else (dq[None], dk[None], dv[None])


def _explain(against: str | None, p: Problem) -> None:
    reasons = [against] if against else door.against(*_as_flash(p), _bias(p))
    served_by = door.PYTORCH if reasons else door.KERNELS
    dispatch.raise_explanation(dispatch.Explanation(served_by, {door.KERNELS: reasons, door.PYTORCH: []}))
