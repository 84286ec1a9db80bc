"""How a call becomes one launch of somebody else's CUDA kernel, and how its results become ours.

Tensors get the alignment and the head_dim that such kernels read; LSE and gradients come back as flash-attn has them.
Nothing waits for the GPU.
"""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends.base import Backend, cast_or_write_gradients
from flash_attn_compat.core import kernel_layout, unwritten
from flash_attn_compat.core.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.core.features import Feature, Traits

# What neither carrier of FlashAttention-2's kernels is asked for. Calls over a cache are left to fused, which appends
# and attends in one launch.
FLASH_UNSUPPORTED = (
    Feature.SHARED_DROPOUT_MASK | Feature.VALUE_HEAD_DIM | Feature.TRANSFORMS | Feature.SCALE_NOT_POSITIVE
    | Feature.SEQUSED_K | Feature.LEFTPAD_K | Feature.PAGED | Feature.APPEND | Feature.LSE_GRADIENT
    | Feature.BIAS
)  # fmt: skip


class LaunchResult(NamedTuple):
    """What a launch leaves: out (as q), LSE as the kernel lays it out, and the dropout's state, if any."""

    out: Tensor
    lse: Tensor
    state: tuple[Tensor, ...]


class SingleLaunchBackend(Backend):
    """A backend that launches; what goes in and what comes out is prepared here.

    zeroes_outside: whether its launches leave 0 in out and gradients at tokens outside of all sequences
    """

    zeroes_outside: ClassVar[bool] = False

    @abc.abstractmethod
    def launch_forward(self, call: AttentionCall) -> LaunchResult:
        """One forward launch of a call that is ready for it; tokens outside of all sequences may have any LSE."""

    @abc.abstractmethod
    def launch_backward(
        self, call: AttentionCall, dout: Tensor, launched: LaunchResult, into: Gradients | None
    ) -> Gradients:
        """dq, dk, dv in the shapes of the call's q, k, v: ``into``, or new tensors; outside as in launch_forward."""

    def with_kernel_layout(self, call: AttentionCall) -> AttentionCall:
        """The call with its tensors as the kernel reads them."""
        return AttentionCall._make((*(kernel_layout.padded(tensor.resolve_neg()) for tensor in call[:3]), *call[3:]))

    def to_flash_attn_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        """The kernel's LSE as flash-attn lays it out: (batch, heads, seqlen_q), packed (heads, total_q)."""
        return lse

    def to_kernel_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        """flash-attn's LSE as the kernel's backward reads it."""
        return lse.contiguous()

    def forward(self, call: AttentionCall) -> Result:
        ready = self.with_kernel_layout(call)
        launched = self.launch_forward(ready)
        lse = self.to_flash_attn_lse(ready, launched.lse) if call.return_lse else None
        if call.cu_seqlens_q is not None:
            rows = [] if self.zeroes_outside else [launched.out]
            cleared = rows if lse is None else [*rows, lse.t().unsqueeze(-1)]
            unwritten.clear(call.cu_seqlens_q, cleared, ready.max_seqlen_q)
        saved = (launched.lse, *launched.state) if call.needs_grad else ()
        return Result(kernel_layout.narrowed(launched.out, call.head_dim_v), lse, None, saved)

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        ready = self.with_kernel_layout(call)
        dout, out = kernel_layout.padded(upstream.dout), kernel_layout.padded(upstream.out)
        lse, *state = upstream.saved or (self.to_kernel_lse(ready, upstream.lse),)
        can_be_written = into is not None and all(x.shape[-1] % 8 == 0 and kernel_layout.is_ready(x) for x in into)
        place = into if can_be_written else None
        found = self.launch_backward(ready, dout, LaunchResult(out, lse, tuple(state)), place)
        if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None and not self.zeroes_outside:
            longest_q, longest_k = ready.max_seqlen_q, ready.max_seqlen_k
            if call.cu_seqlens_q is call.cu_seqlens_k and call.q.shape[0] == call.k.shape[0] and longest_q == longest_k:
                unwritten.clear(call.cu_seqlens_q, found, longest_q)
            else:
                unwritten.clear(call.cu_seqlens_q, found[:1], longest_q)
                unwritten.clear(call.cu_seqlens_k, found[1:], longest_k)
        if found is place:
            return found
        return cast_or_write_gradients(Gradients(*map(_reduce_to_shape, found, (call.q, call.k, call.v))), call, into)


def _reduce_to_shape(gradient: Tensor, source: Tensor) -> Tensor:
    """In the shape of ``source``: gradients of copies of a head summed in fp32, channels that were added cut off."""
    if gradient.shape[-2] != source.shape[-2]:
        gradient = torch.unflatten(gradient, -2, (source.shape[-2], -1)).sum(-2, dtype=torch.float32).to(source.dtype)
    return kernel_layout.narrowed(gradient, source.shape[-1])


class FlashBackend(SingleLaunchBackend):
    """A carrier of FlashAttention-2's kernels: PyTorch (torch_flash) or flash-attn (official)."""

    def extra_reasons(self, traits: Traits) -> list[str]:
        features = traits.features
        reasons = []
        is_open = features & Feature.WINDOW_LEFT and not features & Feature.CAUSAL
        if traits.sq_vs_sk == ">" and (is_open or features & Feature.WINDOW_RIGHT):
            reasons.append("clamps windows to seqlen_k, which hides keys from rows that stand far before the first one")
        if traits.needs_backward and _backward_exceeds_shared_memory(traits):
            reasons.append(f"its backward does not fit this GPU's shared memory at head_dim {traits.head_dim}")
        return reasons

    def with_kernel_layout(self, call: AttentionCall) -> AttentionCall:
        call = super().with_kernel_layout(call)
        slopes = call.alibi_slopes
        if slopes is not None and (slopes.stride(-1) != 1 or slopes.is_neg()):
            call = call._replace(alibi_slopes=slopes.resolve_neg().contiguous())
        if call.cu_seqlens_q is None:
            return call
        # Windows are clamped to max_seqlen_k, which is wrong for rows that stand further before the first key.
        clamps = call.mask.right != 0 and not call.mask.is_full
        longest_k = max(1, call.max_seqlen_q if clamps else 0, call.max_seqlen_k)
        # With one row per sequence the kernels fold grouped heads into rows, and count on a row in every sequence.
        # Whether each has one is in cu_seqlens_q, on the GPU.
        longest_q = max(2, call.max_seqlen_q)
        if (longest_q, longest_k) == (call.max_seqlen_q, call.max_seqlen_k):
            return call
        return call._replace(max_seqlen_q=longest_q, max_seqlen_k=longest_k)


def window_arguments(call: AttentionCall) -> tuple[bool, int, int]:
    """causal, left, right as the kernels take them: -1 for unbounded.

    The right one is -1 with causal: one row of grouped heads is only folded, and its keys read once, where the
    kernels find both sides unbounded.
    """
    left, right = (-1 if bound is None else bound for bound in call.mask)
    return right == 0, left, -1 if right == 0 else right


def _backward_exceeds_shared_memory(traits: Traits) -> bool:
    """From 193 channels on only the data-center GPUs have room for every variant of the backward."""
    if traits.capability not in {(8, 6), (8, 9), (12, 0), (12, 1)}:
        return False
    return traits.head_dim > 192 and (traits.head_dim <= 224 or bool(traits.features & Feature.DROPOUT))
