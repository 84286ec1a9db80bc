"""PyTorch's memory-efficient kernel, fed packed sequences without padding: where our own kernel cannot be compiled.

One launch (efficient_launch.py) computes a dense or packed call: full, causal, or causal with a left window, with
dropout. Grouped heads get copies of their keys. Everything else is left to chunked. Nothing waits for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends import efficient_launch
from flash_attn_compat.backends.base import Backend, Capabilities, deliver
from flash_attn_compat.backends.efficient_launch import CAUSAL_BOTTOM_RIGHT, NO_MASK, Launch, Native
from flash_attn_compat.engine import alignment, lengths, outside
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.engine.features import Feature, Traits

_SERVES = (
    Feature.CAUSAL | Feature.WINDOW_LEFT | Feature.DROPOUT | Feature.GQA | Feature.VALUE_HEAD_DIM | Feature.VARLEN
    | Feature.LSE | Feature.BACKWARD | Feature.GIVEN_LSE
)  # fmt: skip
# Before 2.15 the windowed backward aligns its mask as if there were as many queries as keys.
_OLD_WINDOW_BACKWARD = torch.__version__ < "2.15"  # as versions, not as letters


class TorchEfficient(Backend):
    name = "torch_efficient"
    capabilities = Capabilities(
        features=_SERVES,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        min_capability=(5, 0),
    )

    def unavailable_reasons(self) -> list[str]:
        if torch.version.hip is not None:
            return ["its LSE layout on ROCm differs and is untested"]
        missing = efficient_launch.missing_reason()
        return [missing] if missing else []

    def extra_reasons(self, traits: Traits) -> list[str]:
        features = Feature(traits.features)
        reasons = []
        if traits.dtype == torch.bfloat16 and traits.capability is not None and traits.capability < (8, 0):
            reasons.append("computes bfloat16 on GPUs of compute capability 8.0 and newer only")
        if not features & Feature.WINDOW_LEFT:
            return reasons
        if not features & Feature.CAUSAL:
            reasons.append("does not support a left window without a causal mask")
        if traits.sq_vs_sk == "?" and traits.needs_backward:
            reasons.append("does not compute gradients of a window over packed sequences whose lengths may differ")
        if traits.sq_vs_sk == "<" and traits.needs_backward and _OLD_WINDOW_BACKWARD:
            reasons.append("PyTorch before 2.15 computes wrong gradients of a window where seqlen_q < seqlen_k")
        return reasons

    def forward(self, call: AttentionCall) -> Result:
        launch = _launch(call)
        part, native = efficient_launch.forward(launch, keep_lse=call.needs_grad or call.return_lse)
        if call.cu_seqlens_q is None:
            rows = _rows_with_keys(call)
            out = part if part.shape[1] == call.q.shape[1] else part.new_zeros(*call.q.shape[:3], part.shape[3])
            if out is not part:
                out[:, rows] = part
        else:
            out = part.squeeze(0)
            if _may_lack_keys(call) and efficient_launch.skips_empty_rows(launch):
                out.masked_fill_(_rows_without_keys(call)[:, None, None], 0.0)
            outside.clear(out, call.cu_seqlens_q)
        lse = _official_lse(call, native) if call.return_lse else None
        return Result(out[..., : call.head_dim_v], lse, None, native if call.needs_grad else ())

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        launch = _launch(call)
        native = Native(*upstream.saved) if upstream.saved else _native(call, launch, upstream.lse)
        dout, out = (_rows(call, efficient_launch.pad_channels(t)) for t in (upstream.dout, upstream.out))
        dq, dk, dv = efficient_launch.backward(launch, dout, out, native)
        if _may_lack_keys(call):
            dq.masked_fill_(_rows_without_keys(call)[:, None, None], 0.0)
        found = Gradients(
            _all_rows(call, dq)[..., : call.q.shape[-1]],
            _grouped(dk, call.k)[..., : call.k.shape[-1]],
            _grouped(dv, call.v)[..., : call.v.shape[-1]],
        )
        if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
            for gradient, starts in zip(found, (call.cu_seqlens_q, call.cu_seqlens_k, call.cu_seqlens_k)):
                outside.clear(gradient, starts)
        return deliver(found, call, into)


def _launch(call: AttentionCall) -> Launch:
    """The launch that computes the rows that see a key; all rows of packed sequences."""
    q, (k, v) = _prepared(call.q), (_for_every_head(_prepared(tensor), call) for tensor in (call.k, call.v))
    left, right = call.mask
    mask = NO_MASK if right is None else CAUSAL_BOTTOM_RIGHT
    window = None if left is None else left + 1
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return Launch(
            q[:, _rows_with_keys(call)], k, v, call.softmax_scale, mask, window,
            dropout_p=call.dropout_p, deterministic=call.deterministic,
        )  # fmt: skip
    starts_q, starts_k = _packed_starts(call)
    longest_q, longest_k = max(1, min(call.max_seqlen_q, q.shape[0])), max(1, min(call.max_seqlen_k, k.shape[0]))
    return Launch(
        q[None], k[None], v[None], call.softmax_scale, mask, window, starts_q, starts_k, longest_q, longest_k,
        dropout_p=call.dropout_p, deterministic=call.deterministic,
    )  # fmt: skip


def _prepared(tensor: Tensor) -> Tensor:
    """Channels padded to a multiple of 8 and rows on 16 bytes."""
    if tensor.shape[-1] % 8 == 0 and alignment.is_ready(tensor):
        return tensor
    return alignment.ready(efficient_launch.pad_channels(tensor))


def _for_every_head(keys: Tensor, call: AttentionCall) -> Tensor:
    return keys if call.nheads == call.nheads_k else keys.repeat_interleave(call.nheads // call.nheads_k, dim=-2)


def _grouped(gradient: Tensor, keys: Tensor) -> Tensor:
    """Gradients of the copies of ``keys``, summed in fp32, without the batch of 1 of packed keys."""
    gradient = gradient.view(*keys.shape[:-2], *gradient.shape[-2:])
    if gradient.shape[-2] == keys.shape[-2]:
        return gradient
    return torch.unflatten(gradient, -2, (keys.shape[-2], -1)).sum(-2, dtype=torch.float32).to(keys.dtype)


def _rows_with_keys(call: AttentionCall) -> slice:
    return slice(*call.mask.rows_with_keys(call.q.shape[1], call.k.shape[1]))


def _rows(call: AttentionCall, tensor: Tensor) -> Tensor:
    """A tensor of the call's rows as the launch has them."""
    return tensor[None] if call.cu_seqlens_q is not None else tensor[:, _rows_with_keys(call)]


def _all_rows(call: AttentionCall, gradient: Tensor) -> Tensor:
    """The launch's rows among the call's; 0 for those that see no key."""
    if call.cu_seqlens_q is not None:
        return gradient.squeeze(0)
    if gradient.shape[1] == call.q.shape[1]:
        return gradient
    whole = gradient.new_zeros(*call.q.shape[:3], gradient.shape[3])
    whole[:, _rows_with_keys(call)] = gradient
    return whole


def _packed_starts(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Starts of the launch's sequences: where a causal mask may hide all keys of a row, such rows get no keys."""
    assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
    if call.mask.right == 0 and not call.equal_lengths:
        return _split_dead_rows(call.cu_seqlens_q, call.cu_seqlens_k)
    return call.cu_seqlens_q, call.cu_seqlens_k


def _split_dead_rows(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Each sequence as two: its first rows that see no key, with no keys, and the rest with all of them."""
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    alive_from = cu_seqlens_q[:-1] + (lengths_q - lengths_k).clamp_(min=0)
    starts_q = torch.stack((cu_seqlens_q[:-1], alive_from), dim=1).flatten()
    starts_k = cu_seqlens_k[:-1].repeat_interleave(2)
    return torch.cat((starts_q, cu_seqlens_q[-1:])), torch.cat((starts_k, cu_seqlens_k[-1:]))


def _may_lack_keys(call: AttentionCall) -> bool:
    """Whether packed rows may have no keys at all: the kernel's backward leaves their dq unwritten."""
    return call.cu_seqlens_q is not None and not call.equal_lengths


def _rows_without_keys(call: AttentionCall) -> Tensor:
    """(total_q,) bool."""
    starts_q, starts_k = _packed_starts(call)
    sequence, _ = lengths.token_places(starts_q, call.q.shape[0])
    return starts_k.diff()[sequence] == 0


def _official_lse(call: AttentionCall, native: Native) -> Tensor:
    """The launch's LSE in flash-attn's layout: +inf where a row sees no key."""
    if call.cu_seqlens_q is None:
        lse = torch.full(call.lse_shape, torch.inf, dtype=torch.float32, device=call.q.device)
        rows = lse[:, :, _rows_with_keys(call)]
        rows.copy_(native.lse[:, :, : rows.shape[2]])
        return lse
    packed = lengths.packed_lse(native.lse, _packed_starts(call)[0], call.q.shape[0])
    return packed.masked_fill_(_rows_without_keys(call), torch.inf) if _may_lack_keys(call) else packed


def _native(call: AttentionCall, launch: Launch, lse: Tensor) -> Native:
    """flash-attn's LSE as the backward kernel reads it."""
    if launch.cu_seqlens_q is None or launch.max_seqlen_q is None:
        return Native(efficient_launch.lse_to_native(lse[:, :, _rows_with_keys(call)]))
    return Native(efficient_launch.packed_lse_to_native(lse, launch.cu_seqlens_q, launch.max_seqlen_q))
