"""How a call becomes a launch of FlashAttention-2's kernels, PyTorch's (torch_flash) or flash-attn's (official).

Each call is one launch. Its tensors get the alignment and the head_dim the kernels read, and packed windows the
lengths at which they are not clamped. Nothing waits for the GPU.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.backends.base import Backend, deliver
from flash_attn_compat.engine import alignment, outside
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.engine.features import Feature, Traits


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


class Launched(NamedTuple):
    """What a launch leaves: out (as q), LSE as the carrier lays it out, and the dropout's state, if any."""

    out: Tensor
    lse: Tensor
    state: tuple[Tensor, ...]


class FlashBackend(Backend):
    """A carrier of the kernels: it launches; what goes in and what comes out is prepared here."""

    @abc.abstractmethod
    def launch_forward(self, launch: Launch) -> Launched:
        """One forward launch."""

    @abc.abstractmethod
    def launch_backward(self, launch: Launch, dout: Tensor, launched: Launched, into: Gradients | None) -> Gradients:
        """dq, dk, dv in the shapes of the launch's q, k, v: ``into``, or new tensors."""

    def official_lse(self, launch: Launch, lse: Tensor) -> Tensor:
        """A carrier's LSE as flash-attn lays it out: (batch, heads, seqlen_q), packed (heads, total_q)."""
        return lse

    def native_lse(self, launch: Launch, lse: Tensor) -> Tensor:
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
        launch = prepare(call)
        launched = self.launch_forward(launch)
        lse = self.official_lse(launch, launched.lse) if call.return_lse else None
        saved = (launched.lse, *launched.state) if call.needs_grad else ()
        return Result(_narrowed(launched.out, call.q), lse, None, saved)

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        launch = prepare(call)
        dout, out = _ready(upstream.dout), _ready(upstream.out)
        lse, *state = upstream.saved or (self.native_lse(launch, upstream.lse),)
        place = into if into is not None and all(_ready(tensor) is tensor for tensor in into) else None
        found = self.launch_backward(launch, dout, Launched(out, lse, tuple(state)), place)
        if found is place:
            return found
        return deliver(Gradients(*map(_narrowed, found, (call.q, call.k, call.v))), call, into)


def prepare(call: AttentionCall) -> Launch:
    """The launch that computes ``call``."""
    left, right = (-1 if bound is None else bound for bound in call.mask)
    max_seqlen_q, max_seqlen_k = call.max_seqlen_q, call.max_seqlen_k
    cu_seqlens_q, cu_seqlens_k, slopes = call.cu_seqlens_q, call.cu_seqlens_k, call.alibi_slopes
    if cu_seqlens_q is not None:
        # Windows are clamped to max_seqlen_k, which is wrong for rows that stand further before the first key.
        clamps = right != 0 and (left >= 0 or right > 0)
        # With one row per sequence the kernels fold grouped heads into rows, and count on a row in every sequence.
        total = call.q.shape[0]
        may_fold = max_seqlen_q <= 1 and (total != call.batch or outside.may_exist(cu_seqlens_q, total))
        max_seqlen_k = max(1, max_seqlen_q if clamps else 0, max_seqlen_k)
        max_seqlen_q = 2 if may_fold else max(1, max_seqlen_q)
        if cu_seqlens_k is None:
            pages = 1 if call.block_table is None else call.block_table.shape[1]
            slots = call.k.shape[1] * pages
            cu_seqlens_k = torch.arange(0, call.batch * slots + 1, slots, dtype=torch.int32, device=call.q.device)
    return Launch(
        _ready(call.q), _ready(call.k), _ready(call.v),
        call.softmax_scale, right == 0, (left, -1 if right == 0 else right),
        max_seqlen_q, max_seqlen_k, cu_seqlens_q, cu_seqlens_k, call.seqused_k, call.leftpad_k, call.block_table,
        slopes if slopes is None or slopes.stride(-1) == 1 else slopes.contiguous(),
        call.softcap, call.dropout_p, call.deterministic,
    )  # fmt: skip


def _ready(tensor: Tensor) -> Tensor:
    """``tensor`` as the kernels read it: a multiple of 8 channels, contiguous, every row on 16 bytes."""
    missing = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, missing)) if missing else alignment.ready(tensor)


def _narrowed(result: Tensor, source: Tensor) -> Tensor:
    """Without the channels that were added to ``source``."""
    return result if result.shape[-1] == source.shape[-1] else result[..., : source.shape[-1]]


def _backward_exceeds_shared_memory(traits: Traits) -> bool:
    """From 193 channels on only the data-center GPUs have room for every variant of the backward."""
    if traits.capability not in {(8, 6), (8, 9), (12, 0), (12, 1)}:
        return False
    return traits.head_dim > 192 and (traits.head_dim <= 224 or bool(traits.features & Feature.DROPOUT))
