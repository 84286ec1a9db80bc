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
from flash_attn_compat.core import cuda_capture, unwritten
from flash_attn_compat.core.call import BackwardInputs, Gradients, Scalars
from flash_attn_compat.core.prepared import PLAIN, Tensors
from flash_attn_compat.core.reentry import DECIDED
from flash_attn_compat.dispatch import choice
from flash_attn_compat.torch_sdpa import bridge
from flash_attn_compat.torch_sdpa.policy import (
    HALF,
    Override,
    Policy,
    against_mask,
    against_size,
    against_tensors,
    not_half,
)

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
        return self.max_seqlen_k if self.is_packed and self.max_seqlen_k is not None else self.key.shape[1]

    @property
    def has_equal_lengths(self) -> bool:
        """Whether each sequence is known to have as many rows as keys, so that both causal masks are one."""
        starts_q, starts_k = self.cu_seqlens_q, self.cu_seqlens_k
        if starts_q is None or starts_k is None:
            return self.query.shape[1] == self.key.shape[1]
        return self.seqlen_k is None and (starts_q is starts_k or starts_q.data_ptr() == starts_k.data_ptr())

    @property
    def sequences(self) -> int:
        return self.query.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def expanded_bias(self) -> Tensor | None:
        """The bias as the engine takes it."""
        batch, rows, heads, _ = self.query.shape
        return None if self.bias is None else self.bias.expand(batch, heads, rows, self.key.shape[1])

    @property
    def may_see_nothing(self) -> bool:
        """Whether there may be rows without keys."""
        if self.bias is not None:
            return True
        if self.is_packed:
            return not self.has_equal_lengths
        return self.custom_mask_type == BOTTOM_RIGHT and self.query.shape[1] > self.key.shape[1]


def implementation(override: Override, name: str) -> Callable[..., Any]:
    """One of the operators for the dispatcher, which hands its keys over first: those below get what we leave."""
    ours = forward if name == FORWARD else backward
    redispatch = getattr(torch.ops.aten, name).default._handle.redispatch_boxed

    def attention(keys: Any, *arguments: Any, **named: Any) -> Any:
        policy, first = override.policy, arguments[0]
        # Not of fake tensors, or of those on another device: the operator's key is one for all of them.
        if policy is not None and not DECIDED.yet and type(first) in PLAIN and first.device.type == policy.device:
            found = ours(policy, *arguments, **named)
            if found is not None:
                return found
        return redispatch(keys & _BELOW, *arguments, **named)

    return attention


def forward(
    policy: Policy,
    *given: Any,
    scale: float | None = None,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
) -> Any:
    """The forward, given what ``Problem`` begins with and, where that is True, compute_log_sumexp."""
    problem = Problem._make((*given[:10], scale, seqlen_k, window_size))
    return_lse = given[10] if len(given) > 10 else False
    against = decline_reason(policy, problem, return_lse)
    if settings.explains():
        bridge.explain([against] if against else bridge.against(*_as_flash(problem)))
    found = None if against else _forward(problem, return_lse)
    if found is None:
        choice.served[bridge.PYTORCH] += 1
    return found


def backward(
    policy: Policy, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, lse: Tensor,
    dropout_p: float, seed: Tensor, offset: Tensor, custom_mask_type: int, bias_requires_grad: bool,
    *, scale: float | None = None, num_splits_key: int | None = None, window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> Any:  # fmt: skip
    """The backward: of forwards that were ours and of others."""
    if shared_storage_dqdkdv or bias_requires_grad:
        return None
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    problem = Problem(q, k, v, bias, *lengths, dropout_p, custom_mask_type, scale, None, window_size)
    if decline_reason(policy, problem, True) or not _is_of_a_forward(problem, dout, out, lse):
        return None
    found = _backward(problem, dout, out, lse)
    return None if found is None else (*found, None)


def _is_of_a_forward(problem: Problem, dout: Tensor, out: Tensor, lse: Tensor) -> bool:
    """Whether these are a forward's results and the gradient of one: no kernel looks where they end."""
    q, heads = problem.query, problem.query.shape[2]
    shape = (*q.shape[:3], problem.value.shape[3])
    is_right = dout.shape == out.shape == shape and dout.dtype is out.dtype is q.dtype and lse.dtype is torch.float32
    return is_right and lse.dim() == 3 and lse.shape[:2] == (problem.sequences, heads) and lse.shape[2] >= problem.rows


def decline_reason(policy: Policy, problem: Problem, is_recorded: bool) -> str | None:
    """What keeps our kernels from a problem, besides their own reasons; None for nothing. is_recorded: as in policy"""
    q, k, v, bias = problem[:4]
    if q.dtype not in HALF:
        return not_half(q.dtype)
    if not q.dim() == k.dim() == v.dim() == 4:
        return "shapes or heads differ"
    (batch, _, heads, width), rows = q.shape, problem.rows
    against = against_size(policy, q, rows, problem.keys, problem.sequences * heads * width, bias, is_recorded)
    if against is not None:
        return against
    if bias is not None and (problem.is_packed or problem.seqlen_k is not None or problem.custom_mask_type != NO_MASK):
        return "it has a mask, and is causal or packed besides"
    if problem.dropout_p != 0.0:
        return "its dropout mask is PyTorch's"
    against = against_tensors(policy, q, k, v)
    if against is not None:
        return against
    if k.shape[2:] != (heads, width) or k.shape[:3] != v.shape[:3] or k.shape[0] != batch or not v.shape[3]:
        return "shapes or heads differ, or values have no channels"
    if problem.custom_mask_type not in (NO_MASK, TOP_LEFT, BOTTOM_RIGHT):
        return "its mask is unknown"
    against = None if bias is None else against_mask(bias, q, (batch, heads, rows, k.shape[1]))
    return against or _against_lengths(problem)


def _against_lengths(problem: Problem) -> str | None:
    starts_q, starts_k = problem.cu_seqlens_q, problem.cu_seqlens_k
    if starts_q is None and starts_k is None:
        if problem.seqlen_k is not None:
            return "it has lengths of keys without starts"
    elif (
        starts_q is None
        or starts_k is None
        or problem.query.shape[0] != 1
        or problem.max_seqlen_q is None
        or starts_q.dtype is not torch.int32
        or starts_k.dtype is not torch.int32
        or starts_q.shape != starts_k.shape
        or not (starts_q.is_contiguous() and starts_k.is_contiguous())
    ):
        return "it has starts that make no sequences"
    is_top_left_apart = problem.custom_mask_type == TOP_LEFT and not problem.has_equal_lengths
    if problem.is_packed and is_top_left_apart:
        return "sequences stand at the first key under its mask, and may have more keys than rows"
    if problem.window_size is not None and (
        problem.custom_mask_type == NO_MASK or problem.window_size < 1 or is_top_left_apart
    ):
        return "its window stands at the first key"
    return None


def _as_flash(problem: Problem) -> tuple[Tensors, Scalars]:
    """The same in flash-attn's arguments, whose causal mask stands at the last key."""
    q, k, v = problem.query, problem.key, problem.value
    is_causal, left, right = problem.custom_mask_type != NO_MASK, -1, -1
    if problem.window_size is not None:
        left, right = problem.window_size - 1, 0
    elif problem.custom_mask_type == TOP_LEFT and not problem.is_packed:
        rows, keys = q.shape[1], k.shape[1]
        if rows < keys:  # nobody sees the others
            k, v = k[:, :rows], v[:, :rows]
        elif rows > keys:
            right, is_causal = rows - keys, False
    scalars = Scalars(
        0.0, problem.scale, is_causal, left, right, deterministic=torch._C._get_deterministic_algorithms()
    )
    if problem.cu_seqlens_q is None or problem.cu_seqlens_k is None:
        return bridge.dense_tensors(q, k, v, problem.expanded_bias), scalars
    starts_k = problem.cu_seqlens_q if problem.has_equal_lengths else problem.cu_seqlens_k
    tensors = q[0], k[0], v[0], None, problem.cu_seqlens_q, starts_k, problem.seqlen_k
    return tensors, scalars._replace(max_seqlen_q=problem.rows, max_seqlen_k=problem.keys)


def _forward(problem: Problem, return_lse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int] | None:
    tensors, scalars = _as_flash(problem)
    result, q = bridge.forward(tensors, scalars, return_lse), problem.query
    if result is None:
        return None
    out = result.out.contiguous()
    no_rows = problem.sequences, q.shape[-2], 0
    lse = _padded(problem, result.lse) if return_lse else q.new_empty(no_rows, dtype=torch.float32)
    # Where PyTorch leaves them when nothing is dropped: a graph's results are all on the GPU.
    place = q.device if cuda_capture.is_capturing(q.get_device()) else "cpu"
    seed, offset = (torch.empty((), dtype=torch.int64, device=place) for _ in range(2))
    return out[None] if problem.is_packed else out, lse, seed, offset, problem.rows, problem.keys


def _padded(problem: Problem, lse: Tensor) -> Tensor:
    """The LSE (sequences, heads, padded rows): 0 in rows that see nothing, +inf behind the last one of a sequence."""
    if problem.may_see_nothing:
        lse = lse.masked_fill(lse == torch.inf, 0.0)
    if problem.cu_seqlens_q is None:
        return F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf)
    return unwritten.padded_lse(lse, problem.cu_seqlens_q, problem.rows + -problem.rows % _LSE_ROWS)


def _backward(problem: Problem, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    tensors, scalars = _as_flash(problem)
    q, k, *_ = tensors
    if problem.cu_seqlens_q is None:
        lse = lse[:, :, : q.shape[1]]
    else:
        dout, out, lse = dout[0], out[0], unwritten.packed_lse(lse, problem.cu_seqlens_q, q.shape[0])
    into = None
    if k.shape != problem.key.shape and not problem.is_packed:  # of keys that nobody sees
        dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (problem.key, problem.value))
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        into = Gradients(dq, dk[:, : k.shape[1]], dv[:, : k.shape[1]])
    found = bridge.backward(tensors, scalars, BackwardInputs(dout, out, lse, None), into)
    if found is None:
        return None
    if into is not None:
        return dq, dk, dv
    dq, dk, dv = (gradient.contiguous() for gradient in found)
    return (dq[None], dk[None], dv[None]) if problem.is_packed else (dq, dk, dv)
