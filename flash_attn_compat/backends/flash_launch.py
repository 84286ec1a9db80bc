"""What FlashAttention-2's kernels compute and are given, launched by PyTorch (torch_flash) or by flash-attn (official).

The kernels clamp windows to max_seqlen_k: packed calls are given a larger one where that would hide keys.
"""

from __future__ import annotations

from typing import Any

from flash_attn_compat.backends.one_launch import OneLaunch
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.features import Feature, Traits

# What neither carrier is asked for. Calls over a cache are left to fused, which appends and attends in one launch.
LACKS = (
    Feature.SHARED_DROPOUT_MASK | Feature.VALUE_HEAD_DIM | Feature.TRANSFORMS | Feature.SCALE_NOT_POSITIVE
    | Feature.SEQUSED_K | Feature.LEFTPAD_K | Feature.PAGED | Feature.APPEND | Feature.LSE_GRADIENT
    | Feature.BIAS
)  # fmt: skip


class FlashBackend(OneLaunch):
    """A carrier of the kernels."""

    def extra_reasons(self, traits: Traits) -> list[str]:
        features = traits.features
        reasons = []
        is_open = features & Feature.WINDOW_LEFT and not features & Feature.CAUSAL
        if traits.sq_vs_sk == ">" and (is_open or features & Feature.WINDOW_RIGHT):
            reasons.append("clamps windows to seqlen_k, which hides keys from rows that stand far before the first one")
        if traits.needs_backward and _backward_exceeds_shared_memory(traits):
            reasons.append(f"its backward does not fit this GPU's shared memory at head_dim {traits.head_dim}")
        return reasons

    def as_read(self, call: AttentionCall) -> AttentionCall:
        call = super().as_read(call)
        changes: dict[str, Any] = {}
        if call.alibi_slopes is not None and call.alibi_slopes.stride(-1) != 1:
            changes["alibi_slopes"] = call.alibi_slopes.contiguous()
        if call.cu_seqlens_q is not None:
            changes |= _lengths(call)
        return call._replace(**changes) if changes else call


def window_arguments(call: AttentionCall) -> tuple[bool, int, int]:
    """causal, left, right as the kernels take them: -1 for unbounded.

    The right one is -1 with causal: one row of grouped heads is only folded, and its keys read once, where the
    kernels find both sides unbounded.
    """
    left, right = (-1 if bound is None else bound for bound in call.mask)
    return right == 0, left, -1 if right == 0 else right


def _lengths(call: AttentionCall) -> dict[str, Any]:
    """The longest lengths of packed sequences, where the kernels need others than the caller says."""
    # Windows are clamped to max_seqlen_k, which is wrong for rows that stand further before the first key.
    clamps = call.mask.right != 0 and not call.mask.is_full
    # With one row per sequence the kernels fold grouped heads into rows, and count on a row in every sequence. Whether
    # each has one is in cu_seqlens_q, on the GPU.
    longest_q = max(2, call.max_seqlen_q)
    longest_k = max(1, call.max_seqlen_q if clamps else 0, call.max_seqlen_k)
    same = longest_q == call.max_seqlen_q and longest_k == call.max_seqlen_k
    return {} if same else {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}


def _backward_exceeds_shared_memory(traits: Traits) -> bool:
    """From 193 channels on only the data-center GPUs have room for every variant of the backward."""
    if traits.capability not in {(8, 6), (8, 9), (12, 0), (12, 1)}:
        return False
    return traits.head_dim > 192 and (traits.head_dim <= 224 or bool(traits.features & Feature.DROPOUT))
