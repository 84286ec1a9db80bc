"""aten::_efficient_attention_forward and _backward, the operators of PyTorch's memory-efficient kernel.

Their callers are aten::_scaled_dot_product_efficient_attention (in compiled graphs and DTensors), nested tensors and
xformers. PyTorch's dispatcher calls us after autograd and dispatch modes, and before the device's own kernel, which
computes the calls that we decline. We decline dropout: if another kernel computed the backward, it would draw another
dropout mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends import unwritten
from flash_attn_compat.core import cuda_capture
from flash_attn_compat.core.call import BackwardInputs, Gradients
from flash_attn_compat.core.entry import PLAIN
from flash_attn_compat.core.inputs import DenseInputs, Inputs, Options, PackedInputs
from flash_attn_compat.core.mask import align_with_last_key
from flash_attn_compat.core.torch_state import DECIDED
from flash_attn_compat.dispatch import choice
from flash_attn_compat.torch_sdpa import bridge
from flash_attn_compat.torch_sdpa.policy import (
    HALF,
    Override,
    Policy,
    check_mask,
    check_size,
    check_tensors,
    dtype_reason,
)

FORWARD, BACKWARD = "_efficient_attention_forward", "_efficient_attention_backward"
KEY = "BackendSelect"
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
NO_MASK, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2
_LSE_ROWS = 32  # The operators' LSE is padded with +inf to a multiple of these rows.


class Problem(NamedTuple):
    """The arguments that both operators share, by the operators' names.

    query, key, value: (batch, rows or keys, heads, channels); with cu_seqlens the batch is 1 and holds packed sequences
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
        """Whether each sequence surely has as many rows as keys: masks TOP_LEFT and BOTTOM_RIGHT are then the same."""
        starts_q, starts_k = self.cu_seqlens_q, self.cu_seqlens_k
        if starts_q is None or starts_k is None:
            return self.query.shape[1] == self.key.shape[1]
        return self.seqlen_k is None and (starts_q is starts_k or starts_q.data_ptr() == starts_k.data_ptr())

    @property
    def sequences(self) -> int:
        return self.query.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


def make_operator(override: Override, name: str) -> Callable[..., Any]:
    """Return our kernel for PyTorch's dispatcher. Its first argument, the dispatch keys, serves to pass calls on."""
    compute = forward if name == FORWARD else backward
    redispatch = getattr(torch.ops.aten, name).default._handle.redispatch_boxed

    def attention(keys: Any, first: Tensor, *others: Any, **named: Any) -> Any:
        policy = override.policy
        # Fake tensors and tensors on other devices come here too: the dispatch key of our registration covers them.
        if policy is not None and not DECIDED.yet and type(first) in PLAIN and first.device.type == policy.device:
            results = compute(policy, first, *others, **named)
            if results is not None:
                return results
        return redispatch(keys & _BELOW, first, *others, **named)

    return attention


def forward(
    policy: Policy, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None, dropout_p: float,
    custom_mask_type: int, return_lse: bool = False, *, scale: float | None = None, seqlen_k: Tensor | None = None,
    window_size: int | None = None,
) -> Any:  # fmt: skip
    """Compute the forward operator, or return None to decline it."""
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    problem = Problem(q, k, v, bias, *lengths, dropout_p, custom_mask_type, scale, seqlen_k, window_size)
    reason = decline_reason(policy, problem, return_lse)
    if settings.is_explaining():
        bridge.explain([reason] if reason else bridge.decline_reasons(*_as_flash(problem)))
    result = None if reason else bridge.forward(*_as_flash(problem), return_lse)
    if result is None:
        choice.served[bridge.PYTORCH] += 1
        return None
    out = result.out.contiguous()
    no_rows = problem.sequences, q.shape[-2], 0
    lse = _pad_lse(problem, result.lse) if return_lse else q.new_empty(no_rows, dtype=torch.float32)
    # Seed and offset, unused without dropout: PyTorch returns them on the CPU, during a capture on the GPU.
    place = q.device if cuda_capture.is_capturing(q.get_device()) else "cpu"
    seed, offset = (torch.empty((), dtype=torch.int64, device=place) for _ in range(2))
    return out[None] if problem.is_packed else out, lse, seed, offset, problem.rows, problem.keys


def backward(
    policy: Policy, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, lse: Tensor,
    dropout_p: float, seed: Tensor, offset: Tensor, custom_mask_type: int, bias_requires_grad: bool,
    *, scale: float | None = None, num_splits_key: int | None = None, window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> Any:  # fmt: skip
    """Compute the backward operator, whichever kernel computed the forward, or return None to decline it."""
    if shared_storage_dqdkdv or bias_requires_grad:
        return None
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    problem = Problem(q, k, v, bias, *lengths, dropout_p, custom_mask_type, scale, None, window_size)
    if decline_reason(policy, problem, True) or not _fits_forward(problem, dout, out, lse):
        return None
    tensors, options = _as_flash(problem)
    q, k = tensors.q, tensors.k
    if problem.cu_seqlens_q is None:
        lse = lse[:, :, : q.shape[1]]
    else:
        dout, out, lse = dout[0], out[0], unwritten.packed_lse(lse, problem.cu_seqlens_q, q.shape[0])
    into = None
    if k.shape != problem.key.shape and not problem.is_packed:  # keys that no row sees get gradients of 0
        dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (problem.key, problem.value))
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        into = Gradients(dq, dk[:, : k.shape[1]], dv[:, : k.shape[1]])
    gradients = bridge.backward(tensors, options, BackwardInputs(dout, out, lse, None), into)
    if gradients is None:
        return None
    if into is None:
        dq, dk, dv = (gradient.contiguous() for gradient in gradients)
    return (dq[None], dk[None], dv[None], None) if problem.is_packed else (dq, dk, dv, None)


def _fits_forward(problem: Problem, dout: Tensor, out: Tensor, lse: Tensor) -> bool:
    """Whether dout, out and lse have the shapes and dtypes of the problem's forward: kernels read them unchecked."""
    q, heads = problem.query, problem.query.shape[2]
    shape = (*q.shape[:3], problem.value.shape[3])
    fits = dout.shape == out.shape == shape and dout.dtype is out.dtype is q.dtype and lse.dtype is torch.float32
    return fits and lse.dim() == 3 and lse.shape[:2] == (problem.sequences, heads) and lse.shape[2] >= problem.rows


def decline_reason(policy: Policy, problem: Problem, is_recorded: bool) -> str | None:
    """Return the reason to decline a problem, before the kernels' own, or None. is_recorded: a backward may follow"""
    q, k, v, bias = problem[:4]
    if q.dtype not in HALF:
        return dtype_reason(q.dtype)
    if not q.dim() == k.dim() == v.dim() == 4:
        return "our kernels need four axes: (batch, rows, heads, channels)"
    (batch, _, heads, width), rows = q.shape, problem.rows
    size, is_causal = ((rows, problem.keys), problem.sequences * heads * width), problem.custom_mask_type != NO_MASK
    reason = check_size(policy, q, *size, bias, is_causal, is_recorded)
    if reason is not None:
        return reason
    if bias is not None and (problem.is_packed or problem.seqlen_k is not None or is_causal):
        return "it has a mask, and is causal or packed too"
    if problem.dropout_p != 0.0:
        return "it has dropout, and PyTorch's kernels would draw another mask in the backward"
    reason = check_tensors(policy, q, k, v)
    if reason is not None:
        return reason
    if k.shape[2:] != (heads, width) or k.shape[:3] != v.shape[:3] or k.shape[0] != batch or not v.shape[3]:
        return "the shapes or heads of query, key and value differ, or value has no channels"
    if problem.custom_mask_type not in (NO_MASK, TOP_LEFT, BOTTOM_RIGHT):
        return "its custom_mask_type is unknown"
    reason = None if bias is None else check_mask(bias, q, (batch, heads, rows, k.shape[1]))
    return reason or _check_lengths(problem)


def _check_lengths(problem: Problem) -> str | None:
    starts_q, starts_k = problem.cu_seqlens_q, problem.cu_seqlens_k
    if starts_q is None and starts_k is None:
        if problem.seqlen_k is not None:
            return "it has seqlen_k without cu_seqlens"
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
        return "its cu_seqlens do not describe packed sequences"
    is_top_left_apart = problem.custom_mask_type == TOP_LEFT and not problem.has_equal_lengths
    if problem.is_packed and is_top_left_apart:
        return "its causal mask is aligned with the first key, and sequences may differ in rows and keys"
    if problem.window_size is not None and (
        problem.custom_mask_type == NO_MASK or problem.window_size < 1 or is_top_left_apart
    ):
        return "its window is not aligned with the last key"
    return None


def _as_flash(problem: Problem) -> tuple[Inputs, Options]:
    """Return the problem in flash-attn's arguments, which align a causal mask with the last key."""
    q, k, v = problem.query, problem.key, problem.value
    is_causal, left, right = problem.custom_mask_type != NO_MASK, -1, -1
    if problem.window_size is not None:
        left, right = problem.window_size - 1, 0
    elif problem.custom_mask_type == TOP_LEFT and not problem.is_packed:
        k, v, is_causal, right = align_with_last_key(q, k, v, 1)
    options = Options(
        0.0, problem.scale, is_causal, left, right, deterministic=torch._C._get_deterministic_algorithms()
    )
    if problem.cu_seqlens_q is None or problem.cu_seqlens_k is None:
        bias = None if problem.bias is None else problem.bias.expand(len(q), q.shape[2], q.shape[1], k.shape[1])
        return DenseInputs(q, k, v, bias=bias), options
    starts_k = problem.cu_seqlens_q if problem.has_equal_lengths else problem.cu_seqlens_k
    tensors = PackedInputs(q[0], k[0], v[0], None, problem.cu_seqlens_q, starts_k, problem.seqlen_k)
    return tensors, options._replace(max_seqlen_q=problem.rows, max_seqlen_k=problem.keys)


def _pad_lse(problem: Problem, lse: Tensor) -> Tensor:
    """Return the LSE (sequences, heads, padded rows): 0 in rows without keys, +inf after a sequence's last row."""
    q, k = problem.query, problem.key
    has_more_rows = problem.custom_mask_type == BOTTOM_RIGHT and q.shape[1] > k.shape[1]
    if problem.bias is not None or (not problem.has_equal_lengths if problem.is_packed else has_more_rows):
        lse = lse.masked_fill(lse == torch.inf, 0.0)
    if problem.cu_seqlens_q is None:
        return F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf)
    return unwritten.padded_lse(lse, problem.cu_seqlens_q, problem.rows + -problem.rows % _LSE_ROWS)
