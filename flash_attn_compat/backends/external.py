"""Backends that compute a call by one launch of an external CUDA kernel: PyTorch's or flash-attn's.

Tensors get the alignment and head_dim that such kernels need. LSE and gradients are converted to flash-attn's layout.
Nothing waits for the GPU.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends.base import Backend, write_gradients
from flash_attn_compat.backends.unwritten import Clear, PackedResults, clear_by_operators
from flash_attn_compat.core import kernel_layout
from flash_attn_compat.core.arguments import call_of
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, BackwardResult, Gradients, Result
from flash_attn_compat.core.entry import BackwardRun, Run
from flash_attn_compat.core.features import Feature, Traits
from flash_attn_compat.core.inputs import NO_INPUTS, Inputs, Options

# Features that neither PyTorch's nor flash-attn's build of FlashAttention-2 gets. Calls over a cache go to ``fused``,
# which appends and attends in one launch.
FLASH_UNSUPPORTED = (
    Feature.SHARED_DROPOUT_MASK | Feature.VALUE_HEAD_DIM | Feature.TRANSFORMS | Feature.SCALE_NOT_POSITIVE
    | Feature.SEQUSED_K | Feature.LEFTPAD_K | Feature.PAGED | Feature.APPEND | Feature.LSE_GRADIENT
    | Feature.BIAS | Feature.EIGHT_BIT_CACHE
)  # fmt: skip


class KernelResult(NamedTuple):
    """A forward launch's results: out in q's layout, LSE in the kernel's layout, and the dropout's state, if any."""

    out: Tensor
    lse: Tensor
    state: tuple[Tensor, ...]


class SingleLaunchBackend(Backend):
    """A backend with one launch for a forward, and one for a backward. This class converts inputs and results.

    zeroes_outside: whether the launches write 0 to out and gradients at tokens outside of all sequences
    choose_clear: returns the function that sets unwritten tokens to 0, for calls with the cache key of its argument
    """

    zeroes_outside: ClassVar[bool] = False

    def __init__(self, choose_clear: Callable[[AttentionCall], Clear] = lambda call: clear_by_operators) -> None:
        self._choose_clear = choose_clear

    @abc.abstractmethod
    def launch_forward(self, call: AttentionCall) -> KernelResult:
        """Launch the forward over the call's tensors, which the caller has brought into the kernel's layout.

        The LSE that it returns for tokens outside of all sequences may be anything: the caller replaces it.
        """

    @abc.abstractmethod
    def launch_backward(
        self, call: AttentionCall, dout: Tensor, result: KernelResult, into: Gradients | None
    ) -> Gradients:
        """Launch the backward; return dq, dk, dv in the shapes of the call's q, k, v: ``into``, or new tensors."""

    def with_kernel_layout(self, call: AttentionCall) -> AttentionCall:
        """Return the call with q, k, v in a layout that the kernel can read; copies where necessary."""
        q, k, v = [kernel_layout.padded(x.resolve_neg() if x.is_neg() else x) for x in (call.q, call.k, call.v)]
        return call if q is call.q and k is call.k and v is call.v else AttentionCall._make((q, k, v, *call[3:]))

    def to_flash_attn_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        """Return the kernel's LSE in flash-attn's layout: (batch, heads, seqlen_q), packed (heads, total_q)."""
        return lse

    def to_kernel_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        """Return flash-attn's LSE in the layout that the kernel's backward reads."""
        return lse.contiguous()

    def prepare(self, x: Inputs, options: Options, length: int | None) -> Run:
        call, _ = call_of(x, options, length)
        if call.cu_seqlens_q is None or (self.zeroes_outside and not call.use & Feature.LSE):
            return super().prepare(x, options, length)
        described, clear = call.over(NO_INPUTS), self._choose_clear(call)
        return lambda x, length, out=None: self._forward(described.over(x), clear)

    def prepare_backward(self, call: AttentionCall, upstream: BackwardInputs, into: Gradients | None) -> BackwardRun:
        if call.cu_seqlens_q is None or self.zeroes_outside:
            return super().prepare_backward(call, upstream, into)
        described, clear = call.over(NO_INPUTS), self._choose_clear(call)
        return lambda x, upstream, into: BackwardResult(self._backward(described.over(x), upstream, into, clear))

    def forward(self, call: AttentionCall) -> Result:
        return self._forward(call, clear_by_operators)

    def backward(self, call: AttentionCall, upstream: BackwardInputs, into: Gradients | None) -> Gradients:
        return self._backward(call, upstream, into, clear_by_operators)

    def _forward(self, call: AttentionCall, clear: Clear) -> Result:
        ready = self.with_kernel_layout(call)
        result = self.launch_forward(ready)
        lse = self.to_flash_attn_lse(ready, result.lse) if call.use & Feature.LSE else None
        if call.cu_seqlens_q is not None and not (self.zeroes_outside and lse is None):
            clear(ready, PackedResults(None if self.zeroes_outside else result.out, lse))
        saved = (result.lse, *result.state) if call.use & Feature.BACKWARD else ()
        return Result(kernel_layout.narrowed(result.out, call.head_dim_v), lse, None, saved)

    def _backward(
        self, call: AttentionCall, upstream: BackwardInputs, into: Gradients | None, clear: Clear
    ) -> Gradients:
        ready = self.with_kernel_layout(call)
        dout, out = kernel_layout.padded(upstream.dout), kernel_layout.padded(upstream.out)
        lse, *state = upstream.saved or (self.to_kernel_lse(ready, upstream.lse),)
        is_writable = into is not None and all(x.shape[-1] % 8 == 0 and kernel_layout.is_ready(x) for x in into)
        target = into if is_writable else None
        gradients = self.launch_backward(ready, dout, KernelResult(out, lse, tuple(state)), target)
        if call.cu_seqlens_q is not None and not self.zeroes_outside:
            dq, dk, dv = gradients
            clear(ready, PackedResults(dq, dk=dk, dv=dv))
        if gradients is target or (into is None and all(map(_is_alike, gradients, (call.q, call.k, call.v)))):
            return gradients
        return write_gradients(Gradients(*map(_reduce_to_shape, gradients, (call.q, call.k, call.v))), call, into)


def _is_alike(gradient: Tensor, source: Tensor) -> bool:
    return gradient.shape == source.shape and gradient.dtype == source.dtype


def _reduce_to_shape(gradient: Tensor, source: Tensor) -> Tensor:
    """Return the gradient in the shape of ``source``: sum a head's copies in fp32, and cut off padded channels."""
    if gradient.shape[-2] != source.shape[-2]:
        gradient = torch.unflatten(gradient, -2, (source.shape[-2], -1)).sum(-2, dtype=torch.float32).to(source.dtype)
    return kernel_layout.narrowed(gradient, source.shape[-1])


class FlashBackend(SingleLaunchBackend):
    """A build of FlashAttention-2's kernels: PyTorch's (torch_flash) or flash-attn's (official)."""

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
        # The kernels clamp windows to max_seqlen_k, which is wrong for rows that far before the first key: raise it.
        clamps = call.mask.right != 0 and not call.mask.is_full
        longest_k = max(1, call.max_seqlen_q if clamps else 0, call.max_seqlen_k)
        # With max_seqlen_q 1 the kernels fold grouped heads into rows, and assume that no sequence is empty. The host
        # does not know that, so it passes at least 2.
        longest_q = max(2, call.max_seqlen_q)
        if (longest_q, longest_k) == (call.max_seqlen_q, call.max_seqlen_k):
            return call
        return call._replace(max_seqlen_q=longest_q, max_seqlen_k=longest_k)


def window_arguments(call: AttentionCall) -> tuple[bool, int, int]:
    """Return (causal, left, right) of a call's mask as the kernels take them: -1 for unbounded.

    With causal, right is -1, because for a single row the kernels fold grouped heads, and so read the keys only once,
    only if both bounds are -1.
    """
    left, right = call.mask.window
    return right == 0, left, -1 if right == 0 else right


def _backward_exceeds_shared_memory(traits: Traits) -> bool:
    """Whether the backward exceeds this GPU's shared memory. Only data-center GPUs have enough beyond head_dim 192."""
    if traits.capability not in {(8, 6), (8, 9), (12, 0), (12, 1)}:
        return False
    return traits.head_dim > 192 and (traits.head_dim <= 224 or bool(traits.features & Feature.DROPOUT))
