"""PyTorch's memory-efficient kernel (aten::_efficient_attention_*), for GPUs on which our kernels cannot be compiled.

One launch computes a dense or packed call, full or causal, with dropout. Grouped key heads are copied. Windows are left
to ``chunked``. So are dense calls with rows that see no key, because the kernel computes these rows wrong. In packed
calls such rows become sequences without keys, which the kernel leaves unwritten. Nothing waits for the GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.backends.base import Capabilities, aten_operator, missing_argument_reasons
from flash_attn_compat.backends.external import KernelResult, SingleLaunchBackend
from flash_attn_compat.backends.unwritten import packed_lse, padded_lse, token_places
from flash_attn_compat.core.call import AttentionCall, Gradients
from flash_attn_compat.core.features import Feature, Traits
from flash_attn_compat.core.torch_state import as_decided

_SUPPORTED = (
    Feature.CAUSAL | Feature.DROPOUT | Feature.GQA | Feature.VALUE_HEAD_DIM | Feature.VARLEN | Feature.LSE
    | Feature.BACKWARD | Feature.GIVEN_LSE
)  # fmt: skip
NO_MASK, CAUSAL_BOTTOM_RIGHT = 0, 2
# The kernel pads each sequence's LSE to a multiple of this many rows, and its backward reads the padding.
_LSE_ROWS = 32
_SHARED_ARGUMENTS = {"cu_seqlens_q", "cu_seqlens_k", "custom_mask_type"}
_NEEDED_ARGUMENTS = {
    "_efficient_attention_forward": _SHARED_ARGUMENTS | {"max_seqlen_q"},
    "_efficient_attention_backward": _SHARED_ARGUMENTS | {"logsumexp", "philox_seed"},
}


class TorchEfficient(SingleLaunchBackend):
    name = "torch_efficient"
    capabilities = Capabilities(
        features=_SUPPORTED,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        min_capability=(5, 0),
        rocm_reason="its LSE layout on ROCm differs and is untested",
    )

    def unavailable_reasons(self) -> list[str]:
        return missing_argument_reasons(_NEEDED_ARGUMENTS)

    def extra_reasons(self, traits: Traits) -> list[str]:
        reasons = []
        if traits.dtype == torch.bfloat16 and traits.capability is not None and traits.capability < (8, 0):
            reasons.append("computes bfloat16 on GPUs of compute capability 8.0 and newer only")
        if traits.sq_vs_sk == ">" and traits.features & Feature.CAUSAL:
            reasons.append("computes rows that see no key wrong: under a causal mask with more queries than keys")
        return reasons

    def with_kernel_layout(self, call: AttentionCall) -> AttentionCall:
        """Return the call in a layout that the kernel can read, with key and value heads repeated for query heads."""
        call, group = super().with_kernel_layout(call), call.nheads // call.nheads_k
        if group == 1:
            return call
        return call._replace(k=call.k.repeat_interleave(group, dim=-2), v=call.v.repeat_interleave(group, dim=-2))

    def launch_forward(self, call: AttentionCall) -> KernelResult:
        bias = None
        out, lse, seed, offset, _, _ = as_decided(
            aten_operator("_efficient_attention_forward"), *_add_batch_axis(call, call.q, call.k, call.v), bias,
            *_sequence_starts(call), *_max_lengths(call), call.dropout_p, _mask_type(call),
            bool(call.use & (Feature.BACKWARD | Feature.LSE)), scale=call.softmax_scale,
        )  # fmt: skip
        if call.cu_seqlens_q is not None:
            out = out.squeeze(0)
            _fill_unwritten(call, 0.0, out)
        return KernelResult(out, lse, (seed, offset))

    def launch_backward(
        self, call: AttentionCall, dout: Tensor, result: KernelResult, into: Gradients | None
    ) -> Gradients:
        longest_q, longest_k = _max_lengths(call)
        longest_q, longest_k = longest_q or call.q.shape[1], longest_k or call.k.shape[1]
        unused = torch.empty((), dtype=torch.int64, device=call.q.device)
        seed, offset = result.state or (unused, unused)
        # The kernel ignores the strides of ``out`` and reads it as contiguous (PyTorch 2.11, fp16).
        dout, q, k, v, out = _add_batch_axis(call, dout, call.q, call.k, call.v, result.out.contiguous())
        # Several blocks that share a head's keys would add to dq by atomics. With few rows, one block for each head
        # took a tenth of the time of several.
        splits = 1 if longest_q <= 2 * _LSE_ROWS else None
        bias, bias_requires_grad = None, False
        dq, dk, dv, _ = as_decided(
            aten_operator("_efficient_attention_backward"), dout, q, k, v, bias, out, *_sequence_starts(call),
            longest_q, longest_k, result.lse, call.dropout_p, seed, offset, _mask_type(call), bias_requires_grad,
            scale=call.softmax_scale, num_splits_key=splits,
        )  # fmt: skip
        gradients = Gradients(dq.view(call.q.shape), dk.view(call.k.shape), dv.view(call.v.shape))
        _fill_unwritten(call, 0.0, *gradients)
        return gradients

    def to_flash_attn_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        """Return the kernel's LSE as flash-attn lays it out: without padding, and +inf for rows without keys."""
        starts, _ = _sequence_starts(call)
        if starts is None:
            return lse[:, :, : call.q.shape[1]]
        lse = packed_lse(lse, starts, call.q.shape[0])
        _fill_unwritten(call, torch.inf, lse.t()[..., None])
        return lse

    def to_kernel_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        """Return the LSE (n, heads, rows padded to a multiple of _LSE_ROWS), contiguous, padded with +inf."""
        (starts, _), (longest, _) = _sequence_starts(call), _max_lengths(call)
        if starts is not None and longest is not None:
            return padded_lse(lse, starts, longest + -longest % _LSE_ROWS)
        return F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf).contiguous()


def _add_batch_axis(call: AttentionCall, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as (batch, rows, heads, head_dim). Packed tensors become a batch of 1."""
    return tensors if call.cu_seqlens_q is None else tuple(tensor[None] for tensor in tensors)


def _max_lengths(call: AttentionCall) -> tuple[int | None, int | None]:
    """Return the most queries and keys of a packed sequence, at least 1 each; (None, None) for a dense call."""
    if call.cu_seqlens_q is None:
        return None, None
    return max(1, min(call.max_seqlen_q, call.q.shape[0])), max(1, min(call.max_seqlen_k, call.k.shape[0]))


def _sequence_starts(call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
    """Return cu_seqlens of queries and keys; (None, None) for a dense call, q's twice if q and k have equal lengths.

    Under a causal mask each sequence becomes two: its rows that see no key, and its other rows with all keys.
    """
    q, k = call.cu_seqlens_q, call.cu_seqlens_k
    if q is None or k is None or call.equal_lengths:
        return q, q
    if call.mask.right is None:
        return q, k
    first_seeing = q[:-1] + (q.diff() - k.diff()).clamp_(min=0)
    starts_q = torch.stack((q[:-1], first_seeing), dim=1).flatten()
    return torch.cat((starts_q, q[-1:])), torch.cat((k[:-1].repeat_interleave(2), k[-1:]))


def _fill_unwritten(call: AttentionCall, value: float, queries: Tensor, *keys: Tensor) -> None:
    """Write ``value`` to the tokens of (total, heads, ...) tensors that the kernel skips.

    queries: rows of sequences without keys are skipped; keys: tokens of sequences without queries are skipped
    """
    q, k = _sequence_starts(call)
    if q is None or k is None or q is k:
        return
    for tensor, own, others in ((queries, q, k), *((tensor, k, q) for tensor in keys)):
        sequence, _ = token_places(own, tensor.shape[0])
        tensor.masked_fill_((others.diff() == 0)[sequence][:, None, None], value)


def _mask_type(call: AttentionCall) -> int:
    return NO_MASK if call.mask.right is None else CAUSAL_BOTTOM_RIGHT
