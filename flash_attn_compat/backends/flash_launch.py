"""How a call becomes a launch of FlashAttention-2's kernels, PyTorch's (torch_flash) or flash-attn's (official).

Each call is one launch. Its tensors get the alignment and the head_dim the kernels read, and packed windows the
lengths at which they are not clamped. Nothing waits for the GPU.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from torch import Tensor

from flash_attn_compat.backends.base import Backend, deliver
from flash_attn_compat.engine import alignment, outside
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.engine.features import Feature, Traits

# What neither carrier is asked for. Calls over a cache are left to fused, which appends and attends in one launch.
LACKS = (
    Feature.SHARED_DROPOUT_MASK | Feature.VALUE_HEAD_DIM | Feature.TRANSFORMS | Feature.SCALE_NOT_POSITIVE
    | Feature.SEQUSED_K | Feature.LEFTPAD_K | Feature.PAGED | Feature.APPEND
)  # fmt: skip


class Launched(NamedTuple):
    """What a launch leaves: out (as q), LSE as the carrier lays it out, and the dropout's state, if any."""

    out: Tensor
    lse: Tensor
    state: tuple[Tensor, ...]


class FlashBackend(Backend):
    """A carrier of the kernels: it launches; what goes in and what comes out is prepared here."""

    @abc.abstractmethod
    def launch_forward(self, call: AttentionCall) -> Launched:
        """One forward launch of a call that is ready for it."""

    @abc.abstractmethod
    def launch_backward(
        self, call: AttentionCall, dout: Tensor, launched: Launched, into: Gradients | None
    ) -> Gradients:
        """dq, dk, dv in the shapes of the call's q, k, v: ``into``, or new tensors."""

    def official_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        """A carrier's LSE as flash-attn lays it out: (batch, heads, seqlen_q), packed (heads, total_q)."""
        return lse

    def native_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        return lse.contiguous()

    def extra_reasons(self, traits: Traits) -> list[str]:
        features = traits.features
        reasons = []
        is_open = features & Feature.WINDOW_LEFT and not features & Feature.CAUSAL
        if traits.sq_vs_sk == ">" and (is_open or features & Feature.WINDOW_RIGHT):
            reasons.append("clamps windows to seqlen_k, which hides keys from rows that stand far before the first one")
        if traits.needs_backward and _backward_exceeds_shared_memory(traits):
            reasons.append(f"its backward does not fit this GPU's shared memory at head_dim {traits.head_dim}")
        return reasons

    def forward(self, call: AttentionCall) -> Result:
        ready = as_read(call)
        launched = self.launch_forward(ready)
        lse = self.official_lse(ready, launched.lse) if call.return_lse else None
        saved = (launched.lse, *launched.state) if call.needs_grad else ()
        return Result(alignment.narrowed(launched.out, call.head_dim_v), lse, None, saved)

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        ready = as_read(call)
        dout, out = alignment.padded(upstream.dout), alignment.padded(upstream.out)
        lse, *state = upstream.saved or (self.native_lse(ready, upstream.lse),)
        place = into if into is not None and all(map(is_readable, into)) else None
        found = self.launch_backward(ready, dout, Launched(out, lse, tuple(state)), place)
        if found is place:
            return found
        return deliver(Gradients(*(alignment.narrowed(one, call.head_dim_v) for one in found)), call, into)


def is_readable(tensor: Tensor) -> bool:
    """Whether the kernels read, or write, it as it is."""
    return tensor.shape[-1] % 8 == 0 and alignment.is_ready(tensor)


def window(call: AttentionCall) -> tuple[bool, int, int]:
    """causal, left, right as the kernels take them: -1 for unbounded.

    The right one is -1 with causal: one row of grouped heads is only folded, and its keys read once, where the
    kernels find both sides unbounded.
    """
    left, right = (-1 if bound is None else bound for bound in call.mask)
    return right == 0, left, -1 if right == 0 else right


def as_read(call: AttentionCall) -> AttentionCall:
    """The call with its tensors as the kernels read them, and with lengths at which they compute it."""
    changes: dict[str, Any] = {}
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not is_readable(tensor):
            changes[name] = alignment.padded(tensor)
    if call.alibi_slopes is not None and call.alibi_slopes.stride(-1) != 1:
        changes["alibi_slopes"] = call.alibi_slopes.contiguous()
    if call.cu_seqlens_q is not None:
        changes |= _packed_lengths(call, call.cu_seqlens_q)
    return call._replace(**changes) if changes else call


def _packed_lengths(call: AttentionCall, cu_seqlens_q: Tensor) -> dict[str, Any]:
    total = call.q.shape[0]
    # Windows are clamped to max_seqlen_k, which is wrong for rows that stand further before the first key.
    clamps = call.mask.right != 0 and not call.mask.is_full
    # With one row per sequence the kernels fold grouped heads into rows, and count on a row in every sequence.
    may_fold = call.max_seqlen_q <= 1 and (total != call.batch or outside.may_exist(cu_seqlens_q, total))
    lengths: dict[str, Any] = {
        "max_seqlen_q": 2 if may_fold else max(1, call.max_seqlen_q),
        "max_seqlen_k": max(1, call.max_seqlen_q if clamps else 0, call.max_seqlen_k),
    }
    same = lengths["max_seqlen_q"] == call.max_seqlen_q and lengths["max_seqlen_k"] == call.max_seqlen_k
    return {} if same else lengths


def _backward_exceeds_shared_memory(traits: Traits) -> bool:
    """From 193 channels on only the data-center GPUs have room for every variant of the backward."""
    if traits.capability not in {(8, 6), (8, 9), (12, 0), (12, 1)}:
        return False
    return traits.head_dim > 192 and (traits.head_dim <= 224 or bool(traits.features & Feature.DROPOUT))
