"""This package's own kernels (cuda/*.cu): NVIDIA GPUs from Turing on, compiled where they run by PyTorch's NVRTC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends.base import HALF_DTYPES, Backend, Capabilities
from flash_attn_compat.backends.fused import backward, clearing, forward
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.launching import masks
from flash_attn_compat.backends.fused.tuning import tuned
from flash_attn_compat.backends.unwritten import Clear, clear_by_operators
from flash_attn_compat.core.arguments import call_of
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, Gradients, Result
from flash_attn_compat.core.entry import BackwardRun, Run
from flash_attn_compat.core.features import Feature, Traits, all_but, split
from flash_attn_compat.core.inputs import CacheInputs, Inputs, Options

# Features that the kernels combine with a dense mask.
_SUPPORTED_WITH_BIAS = (
    Feature.BIAS | Feature.DROPOUT | Feature.GQA | Feature.VALUE_HEAD_DIM | Feature.LSE | Feature.BACKWARD
    | Feature.GIVEN_LSE | Feature.LSE_GRADIENT | Feature.DETERMINISTIC | Feature.SCALE_NOT_POSITIVE
)  # fmt: skip


class Fused(Backend):
    name = "fused"
    capabilities = Capabilities(
        # The kernels' tanh is off by 1e-7 of the softcap: up to 1024 that is less than half precision's rounding.
        features=all_but(Feature.TRANSFORMS | Feature.WIDE_SOFTCAP),
        devices=frozenset({"cuda"}),
        dtypes=HALF_DTYPES,
        min_capability=(7, 5),
        max_head_dim=512,
        rocm_reason="its kernels are for NVIDIA GPUs",
    )

    def rank(self, traits: Traits) -> int:
        """Return a rank before PyTorch's flash kernels for calls that were faster with ours on an H200."""
        features = traits.features
        if traits.capability is None or traits.capability < (8, 0):
            return 0  # PyTorch has no flash kernels there
        if features & Feature.WINDOW_RIGHT:
            return -1
        if traits.needs_backward or features & Feature.DROPOUT or traits.sq_vs_sk == "<":
            return 0
        return -1 if max(traits.head_dim, traits.head_dim_v) <= 64 or features & Feature.WINDOW_LEFT else 0

    def measured_times(self, traits: Traits) -> Mapping[str, float] | None:
        return tuned.find_times(traits) or tuned.estimate_times(traits)

    def unavailable_reasons(self) -> list[str]:
        return [f"{settings.FUSED}=0 forbids it"] if settings.value_of(settings.FUSED) == "0" else []

    def extra_reasons(self, traits: Traits) -> list[str]:
        refused = traits.features & (Feature.BACKWARD | Feature.GIVEN_LSE | Feature.DROPOUT | Feature.BIAS)
        if traits.features & Feature.EIGHT_BIT_CACHE and refused:
            names = ", ".join(feature.description for feature in split(refused))
            return [f"does not combine keys and values of 8-bit floats with {names}"]
        if traits.needs_backward and traits.features & Feature.PAGED:
            return ["does not compute gradients over pages"]
        if traits.features & Feature.BIAS and traits.features & ~_SUPPORTED_WITH_BIAS:
            return ["serves a dense mask of dense sequences only, with dropout at most"]
        return []

    def late_reasons(self, traits: Traits) -> list[str]:
        reason = nvrtc.decline_reason()
        return [] if reason is None else [reason]

    def prepare(self, x: Inputs, options: Options, length: int | None) -> Run:
        call, new = call_of(x, options, length)
        if length is not None:
            call, _ = call_of(x, options)  # over all slots, so that every step of a growing cache fits
        return forward.prepare(call, new, isinstance(x, CacheInputs)) or super().prepare(x, options, length)

    def prepare_backward(self, call: AttentionCall, upstream: BackwardInputs, into: Gradients | None) -> BackwardRun:
        return backward.prepare(call, upstream, into)

    def choose_clear(self, call: AttentionCall) -> Clear:
        """Return a function that sets another backend's unwritten tokens to 0: in one launch, or by operators."""
        if self.reasons(call.traits()):
            return clear_by_operators
        return clearing.find_clear(call.q.get_device()) or clear_by_operators

    def saved_mask(self, mask: Tensor, saved: tuple[Any, ...]) -> Tensor | None:
        return masks.unpack_saved_mask(mask, saved)

    def forward(self, call: AttentionCall) -> Result:
        run, inputs = forward.prepare(call, None, False), cast(Any, call)
        assert run is not None  # None is for calls over a cache
        return run(inputs, None)

    def backward(self, call: AttentionCall, upstream: BackwardInputs, into: Gradients | None) -> Gradients:
        inputs: Any = call
        return backward.prepare(call, upstream, into)(inputs, upstream, into).gradients
