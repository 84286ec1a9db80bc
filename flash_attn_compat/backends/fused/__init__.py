"""This package's own kernels (cuda/*.cu): NVIDIA GPUs from Turing on, compiled where they run by PyTorch's NVRTC."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from flash_attn_compat import settings
from flash_attn_compat.backends.base import HALF_DTYPES, Backend, CallRefused, Capabilities, KernelsFailed
from flash_attn_compat.backends.fused import backward, forward, loader, verdicts
from flash_attn_compat.backends.fused.loader import KernelError, TooManyBlocks
from flash_attn_compat.engine.append import Append, Step
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.engine.features import Feature, Traits


class Fused(Backend):
    name = "fused"
    capabilities = Capabilities(
        features=~Feature.TRANSFORMS,
        devices=frozenset({"cuda"}),
        dtypes=HALF_DTYPES,
        min_capability=(7, 5),
        max_head_dim=256,
    )

    def __init__(self) -> None:
        self._against: dict[Traits, str] = {}

    def reasons(self, traits: Traits) -> list[str]:
        # Only a call that nothing else speaks against is worth looking for NVRTC.
        against = super().reasons(traits)
        lacking = None if against else loader.why_not()
        return against if lacking is None else [lacking]

    def rank(self, traits: Traits) -> int:
        """Ahead of PyTorch's flash kernels where it was the faster one on an H200 (docs/dispatch.md)."""
        features = traits.features
        if traits.capability is None or traits.capability < (8, 0):
            return 0  # there are none
        if features & Feature.WINDOW_RIGHT:
            return -1
        if traits.needs_backward or features & Feature.DROPOUT or traits.sq_vs_sk == "<":
            return 0
        return -1 if max(traits.head_dim, traits.head_dim_v) <= 64 or features & Feature.WINDOW_LEFT else 0

    def times(self, traits: Traits) -> Mapping[str, float] | None:
        found = verdicts.times_of(traits)
        return None if found is None else found.milliseconds

    @property
    def has_failed(self) -> bool:
        return bool(self._against)

    def forget_failures(self) -> None:
        """Try again what has failed."""
        self._against.clear()

    def unavailable_reasons(self) -> list[str]:
        if settings.fused() is False:
            return [f"{settings.FUSED}=0 forbids it"]
        return ["its kernels are for NVIDIA GPUs"] if torch.version.hip is not None else []

    def extra_reasons(self, traits: Traits) -> list[str]:
        known = self._against.get(traits)
        reasons = [] if known is None else [f"failed before: {known}"]
        if traits.needs_backward and traits.features & Feature.PAGED:
            reasons.append("does not compute gradients over pages")
        return reasons

    def step(self, call: AttentionCall, whole: AttentionCall, new: Append | None) -> Step | None:
        traits = call.traits()
        try:
            run = forward.make_step(whole, new)
        except KernelError as error:
            raise self._failed(traits, error) from error
        if run is None:
            return None

        def step(*tensors: Any) -> Result:
            try:
                return run(*tensors)
            except KernelError as error:  # of a launch
                raise self._failed(traits, error) from error

        return step

    def forward(self, call: AttentionCall) -> Result:
        try:
            return forward.forward(call)
        except KernelError as error:
            raise self._failed(call.traits(), error) from error

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        try:
            return backward.backward(call, upstream, into)
        except KernelError as error:
            raise self._failed(call.from_given_results().traits(), error) from error

    def _failed(self, traits: Traits, error: KernelError) -> KernelsFailed:
        """Keep the failure as a reason, and warn once for each; but for one of this very call's sizes."""
        if isinstance(error, TooManyBlocks):
            return CallRefused(str(error))
        reason = " ".join(str(error).split())[:400]
        if reason not in self._against.values():
            warnings.warn(f"a fused kernel is not used: {reason}", RuntimeWarning, stacklevel=2)
        self._against[traits] = reason
        return KernelsFailed(str(error))
