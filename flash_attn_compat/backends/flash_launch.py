"""How a call becomes a launch of FlashAttention-2's kernels, PyTorch's (torch_flash) or flash-attn's (official).

Each call is one launch. Its tensors get the alignment and the head_dim the kernels read, its window the
lengths at which they would clamp it, and what they leave undefined is defined here. Nothing waits for the GPU.
"""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.backends.base import Backend
from flash_attn_compat.engine import alignment, outside
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.engine.features import DESCRIPTIONS, Feature, Traits

# Keys that are found by more than their place in a dense or packed tensor.
CACHED = Feature.SEQUSED_K | Feature.LEFTPAD_K | Feature.PAGED
NEEDS_BACKWARD = Feature.BACKWARD | Feature.GIVEN_LSE


class Launch(NamedTuple):
    """A kernel's inputs.

    q, k, v: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens; k and v
        (num_blocks, page_size, heads, head_dim) with block_table; head_dim a multiple of 8
    window: (left, right), -1 for unbounded; right is -1 with ``causal``, since one row of grouped heads is only
        folded, and its keys read once, where the kernels find both sides unbounded
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool
    window: tuple[int, int]
    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None
    block_table: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False


class Native(NamedTuple):
    """What a launch leaves: out (as q), LSE as the carrier lays it out, and the dropout's state, if any."""

    out: Tensor
    lse: Tensor
    state: tuple[Tensor, ...]


class FlashBackend(Backend):
    """A carrier of the kernels: it launches; what goes in and what comes out is prepared here.

    takes_caches: whether it launches dense rows over a cache as they are; otherwise they come packed
    """

    takes_caches: ClassVar[bool] = False

    @abc.abstractmethod
    def launch_forward(self, launch: Launch) -> Native:
        """One forward launch."""

    @abc.abstractmethod
    def launch_backward(self, launch: Launch, dout: Tensor, native: Native, into: Gradients | None) -> Gradients:
        """dq, dk, dv in the shapes of the launch's q, k, v, into the given tensors where possible."""

    def official_lse(self, launch: Launch, lse: Tensor) -> Tensor:
        """A carrier's LSE as flash-attn lays it out: (batch, heads, seqlen_q), packed (heads, total_q)."""
        return lse

    def native_lse(self, launch: Launch, lse: Tensor) -> Tensor:
        return lse.contiguous()

    def extra_reasons(self, traits: Traits) -> list[str]:
        features = Feature(traits.features)
        reasons = []
        if features & CACHED:
            reasons += _cache_reasons(features, traits, self.takes_caches)
        if features & NEEDS_BACKWARD and _backward_exceeds_shared_memory(traits):
            reasons.append(f"its backward does not fit this GPU's shared memory at head_dim {traits.head_dim}")
        return reasons

    def forward(self, call: AttentionCall) -> Result:
        launch = prepare(call, self.takes_caches)
        native = self.launch_forward(launch)
        packs = _is_packed_dense(call, launch)
        out = native.out
        if packs:
            out = out.view(*call.q.shape[:-1], out.shape[-1])
        if out.shape[-1] != call.q.shape[-1]:
            out = out[..., : call.q.shape[-1]]
        lse = None
        if call.return_lse:
            lse = self.official_lse(launch, native.lse)
            lse = _unpacked_lse(call, lse) if packs else lse
        saved = (native.lse, *native.state) if call.needs_grad else ()
        return Result(out, lse, None, saved)

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        launch = prepare(call, self.takes_caches)
        packs = _is_packed_dense(call, launch)
        dout, out = (_ready(t.flatten(0, 1) if packs else t) for t in (upstream.dout, upstream.out))
        if upstream.saved:
            native = Native(out, upstream.saved[0], upstream.saved[1:])
        else:
            lse = upstream.lse
            lse = self.native_lse(launch, lse.transpose(0, 1).flatten(1) if packs else lse)
            native = Native(out, lse, ())
        as_they_are = not packs and launch.q.shape[-1] == call.q.shape[-1]
        target = into if into is not None and as_they_are and all(_ready(t) is t for t in into) else None
        found = self.launch_backward(launch, dout, native, target)
        if target is not None:
            return target
        sources = (call.q, call.k, call.v)
        parts = (_shaped(gradient, source) for gradient, source in zip(found, sources))
        if into is None:
            return Gradients(*parts)
        for place, part in zip(into, parts):
            place.copy_(part)
        return into


def prepare(call: AttentionCall, takes_caches: bool) -> Launch:
    """The launch that computes ``call``."""
    left, right = (-1 if bound is None else bound for bound in call.mask)
    max_seqlen_q, max_seqlen_k = call.max_seqlen_q, call.max_seqlen_k
    cu_seqlens_q, cu_seqlens_k, slopes = call.cu_seqlens_q, call.cu_seqlens_k, call.alibi_slopes
    # Windows are clamped to the longest key length, which is wrong for rows that stand further before the first key.
    clamped = max_seqlen_q > max_seqlen_k and right != 0 and (left >= 0 or right > 0)
    if cu_seqlens_q is not None:
        # With one row per sequence the kernels fold grouped heads into rows, and count on a row in every sequence.
        total = call.q.shape[0]
        may_fold = max_seqlen_q <= 1 and (total != call.batch or outside.may_exist(cu_seqlens_q, total))
        max_seqlen_k = max(1, max_seqlen_q if clamped else 0, max_seqlen_k)
        max_seqlen_q = 2 if may_fold else max(1, max_seqlen_q)
        if cu_seqlens_k is None:
            pages = 1 if call.block_table is None else call.block_table.shape[1]
            cu_seqlens_k = _even_starts(call, call.k.shape[1] * pages)
    launch = Launch(
        _ready(call.q), _ready(call.k), _ready(call.v),
        call.softmax_scale, right == 0, (left, -1 if right == 0 else right),
        max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, call.seqused_k, call.leftpad_k, call.block_table,
        slopes if slopes is None or slopes.stride(-1) == 1 else slopes.contiguous(),
        call.softcap, call.dropout_p, call.deterministic,
    )  # fmt: skip
    if cu_seqlens_q is not None or (not clamped and (call.is_dense or takes_caches)):
        return launch
    return _as_packed(call, launch)


def _as_packed(call: AttentionCall, launch: Launch) -> Launch:
    """Dense rows as packed ones, over packed keys or pages."""
    seqlen_q = call.q.shape[1]
    slots = call.k.shape[1] if call.block_table is None else call.k.shape[1] * call.block_table.shape[1]
    pages = call.block_table is not None
    return launch._replace(
        q=launch.q.flatten(0, 1),
        k=launch.k if pages else launch.k.flatten(0, 1),
        v=launch.v if pages else launch.v.flatten(0, 1),
        cu_seqlens_q=_even_starts(call, seqlen_q),
        cu_seqlens_k=_even_starts(call, slots),
        max_seqlen_k=max(launch.max_seqlen_q, launch.max_seqlen_k),
    )


def _even_starts(call: AttentionCall, length: int) -> Tensor:
    """(batch + 1,) starts of sequences that are all ``length`` long."""
    return torch.arange(0, call.batch * length + 1, length, dtype=torch.int32, device=call.q.device)


def _is_packed_dense(call: AttentionCall, launch: Launch) -> bool:
    return call.cu_seqlens_q is None and launch.cu_seqlens_q is not None


def _unpacked_lse(call: AttentionCall, lse: Tensor) -> Tensor:
    """(heads, batch * seqlen_q) -> (batch, heads, seqlen_q)."""
    return torch.unflatten(lse, 1, call.q.shape[:2]).transpose(0, 1)


def _shaped(gradient: Tensor, source: Tensor) -> Tensor:
    return gradient.view(*source.shape[:-1], gradient.shape[-1])[..., : source.shape[-1]]


def _ready(tensor: Tensor) -> Tensor:
    """``tensor`` as the kernels read it: a multiple of 8 channels, contiguous, every row on 16 bytes."""
    missing = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, missing)) if missing else alignment.ready(tensor)


def _cache_reasons(features: Feature, traits: Traits, takes_caches: bool) -> list[str]:
    """Against a call whose keys are found through seqused_k, leftpad_k or pages."""
    reasons = [
        f"does not support {DESCRIPTIONS[feature]} with pages, seqused_k or leftpad_k"
        for feature in (Feature.BACKWARD, Feature.GIVEN_LSE, Feature.DROPOUT)
        if features & feature
    ]
    if traits.head_dim % 8 or not traits.aligned:
        reasons.append("would copy the cache: its rows are not aligned to 16 bytes, or head_dim is no multiple of 8")
    if traits.one_query and not features & Feature.VARLEN and not takes_caches:
        reasons.append("does not split the keys of a cache among blocks for one query per sequence")
    if features & Feature.PAGED and traits.page_size % 256:
        reasons.append(f"reads pages of a multiple of 256 slots, got {traits.page_size}")
    return reasons


def _backward_exceeds_shared_memory(traits: Traits) -> bool:
    """From 193 channels on only the data-center GPUs have room for every variant of the backward."""
    if traits.capability not in {(8, 6), (8, 9), (12, 0), (12, 1)}:
        return False
    return traits.head_dim > 192 and (traits.head_dim <= 224 or bool(traits.features & Feature.DROPOUT))
