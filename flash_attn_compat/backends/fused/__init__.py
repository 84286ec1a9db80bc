"""This package's own kernels (cuda/*.cu): NVIDIA GPUs from Turing on, compiled where they run by PyTorch's NVRTC."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends.base import HALF_DTYPES, Backend, Capabilities
from flash_attn_compat.backends.fused import append, backward, forward, loader
from flash_attn_compat.backends.fused.loader import KernelError
from flash_attn_compat.backends.fused.probe import Slower
from flash_attn_compat.engine.append import Append, by_operators
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.engine.features import Feature, Traits


class Fused(Backend):
    name = "fused"
    counts_new_keys = True
    capabilities = Capabilities(
        features=~Feature.TRANSFORMS,
        devices=frozenset({"cuda"}),
        dtypes=HALF_DTYPES,
        min_capability=(7, 5),
        max_head_dim=256,
    )

    def __init__(self) -> None:
        self._failures: dict[Traits, str] = {}
        self._slower: dict[Traits, str] = {}
        self._told: set[str] = set()

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

    def unavailable_reasons(self) -> list[str]:
        if settings.fused() is False:
            return [f"{settings.FUSED}=0 forbids it"]
        return ["its kernels are for NVIDIA GPUs"] if torch.version.hip is not None else []

    def extra_reasons(self, traits: Traits) -> list[str]:
        from flash_attn_compat.engine import dispatch

        reasons = [f"failed before: {self._failures[traits]}"] if traits in self._failures else []
        # Whoever names this backend wants it, fast or not.
        if traits in self._slower and dispatch.wish() is None:
            reasons.append(self._slower[traits])
        if traits.needs_backward and traits.features & Feature.PAGED:
            reasons.append("gradients of pages")
        return reasons

    def append(self, call: AttentionCall, new: Append) -> Tensor:
        try:
            return append.append(call, new)
        except KernelError as error:
            self._remember(call, error)
            return by_operators(call, new)

    def forward(self, call: AttentionCall) -> Result:
        from flash_attn_compat.engine import dispatch

        found = self.attempt(call)
        if found is not None:
            return found
        if call.needs_grad:
            # The backward is asked here again: leave it what any backend can start from.
            call = call._replace(return_lse=True, shares_dropout_mask=call.dropout_p > 0)
        other = dispatch.serve_instead(self, call)
        if call.seqused_k is not None and call.seqlen_new and not other.counts_new_keys:
            call = call._replace(seqused_k=call.seqused_k + call.seqlen_new, seqlen_new=0)
        return other.forward(call)._replace(saved=())

    def attempt(self, call: AttentionCall) -> Result | None:
        try:
            return forward.forward(call)
        except KernelError as error:
            self._remember(call, error)
            return None

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        from flash_attn_compat.engine import dispatch

        # Others start from what was reported, and know the mask; what the forward kept is for this backend alone.
        given = call._replace(given_lse=True, shares_dropout_mask=call.dropout_p > 0)
        if not (self._failures or self._slower) or not self.reasons(given.traits()):
            try:
                return backward.backward(call, upstream, into)
            except KernelError as error:
                self._remember(given, error)
                dispatch.forget_decisions()
        return dispatch.choose(given).backward(given, upstream._replace(saved=()), into)

    def _remember(self, call: AttentionCall, error: KernelError) -> None:
        """A reason from now on, and one warning for each thing that went wrong."""
        if isinstance(error, Slower):
            self._slower[call.traits()] = str(error)
            return
        reason = self._failures[call.traits()] = " ".join(str(error).split())[:400]
        if reason in self._told:
            return
        self._told.add(reason)
        warnings.warn(f"a fused kernel is not used: {reason}", RuntimeWarning, stacklevel=2)
