"""PyTorch's own copy of FlashAttention-2: the path for GPUs of compute capability 8.0 and newer without flash-attn.

The operators' schemas grew over PyTorch's versions; what the installed one lacks is a reason. How a call
becomes a launch is in flash_launch.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.backends.base import HALF_DTYPES, Capabilities
from flash_attn_compat.backends.flash_launch import FlashBackend, Launch, Launched
from flash_attn_compat.engine import lengths, outside
from flash_attn_compat.engine.call import Gradients
from flash_attn_compat.engine.features import Feature

# PyTorch builds its kernels without slopes, whatever the operator's schema says. Deterministic gradients depend on a
# switch of the whole process. Lengths and pages of a cache came with its latest versions only, and fused has them.
_LACKS = (
    Feature.SOFTCAP | Feature.ALIBI | Feature.SHARED_DROPOUT_MASK | Feature.VALUE_HEAD_DIM | Feature.TRANSFORMS
    | Feature.SCALE_NOT_POSITIVE | Feature.DETERMINISTIC | Feature.SEQUSED_K | Feature.LEFTPAD_K | Feature.PAGED
)  # fmt: skip
_ALWAYS = {
    "forward": {"cum_seq_q", "cum_seq_k", "max_q", "max_k", "scale", "window_size_left", "window_size_right"},
    "backward": {"logsumexp", "cum_seq_q", "cum_seq_k", "scale", "window_size_left", "window_size_right"},
}


class TorchFlash(FlashBackend):
    name = "torch_flash"
    capabilities = Capabilities(
        features=~_LACKS,
        devices=frozenset({"cuda"}),
        dtypes=HALF_DTYPES,
        min_capability=(8, 0),
        max_capability=(12, 1),
        max_head_dim=256,
    )

    def unavailable_reasons(self) -> list[str]:
        if torch.version.hip is not None:
            return ["PyTorch's flash kernels for ROCm are different and untested"]
        is_built = getattr(torch.backends.cuda, "is_flash_attention_available", None)
        if torch.version.cuda is not None and is_built is not None and not is_built():
            return ["this PyTorch was built without its flash kernels"]
        other = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        if other is not None:
            return [f"{other} was activated in place of PyTorch's own flash kernels"]
        return [
            f"this PyTorch's aten::_flash_attention_{name} lacks {', '.join(sorted(missing))}"
            for name, needed in _ALWAYS.items()
            if (missing := needed - _arguments(name))
        ]

    def launch_forward(self, launch: Launch) -> Launched:
        left, right = launch.window
        out, lse, seed, offset, _ = _operator("forward")(
            launch.q, launch.k, launch.v, launch.cu_seqlens_q, launch.cu_seqlens_k, launch.max_seqlen_q,
            launch.max_seqlen_k, launch.dropout_p, launch.causal, False, scale=launch.scale, window_size_left=left,
            window_size_right=right,
        )  # fmt: skip
        if launch.cu_seqlens_q is not None:
            outside.clear(out, launch.cu_seqlens_q)
        return Launched(out, lse, (seed, offset))

    def launch_backward(self, launch: Launch, dout: Tensor, launched: Launched, into: Gradients | None) -> Gradients:
        seed, offset = launched.state or (dout.new_empty(0), dout.new_empty(0))
        left, right = launch.window
        found = _operator("backward")(
            dout, launch.q, launch.k, launch.v, launched.out, launched.lse, launch.cu_seqlens_q, launch.cu_seqlens_k,
            launch.max_seqlen_q, launch.max_seqlen_k, launch.dropout_p, launch.causal, seed, offset, scale=launch.scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        if launch.cu_seqlens_q is not None and launch.cu_seqlens_k is not None:
            for gradient, starts in zip(found, (launch.cu_seqlens_q, launch.cu_seqlens_k, launch.cu_seqlens_k)):
                outside.clear(gradient, starts)
        return Gradients(*found)

    def official_lse(self, launch: Launch, lse: Tensor) -> Tensor:
        if launch.cu_seqlens_q is not None and lse.dim() == 3:
            lse = lengths.packed_lse(lse, launch.cu_seqlens_q, launch.q.shape[0])
        return lse

    def native_lse(self, launch: Launch, lse: Tensor) -> Tensor:
        if launch.cu_seqlens_q is not None and _pads_lse(launch.q.device):
            return lengths.padded_lse(lse, launch.cu_seqlens_q, launch.max_seqlen_q)
        return lse.contiguous()


@functools.cache
def _operator(direction: str) -> Any:
    """The operator, None where this PyTorch has none, which is a reason against every call."""
    packet = getattr(torch.ops.aten, f"_flash_attention_{direction}", None)
    return packet and packet.default


@functools.cache
def _arguments(direction: str) -> frozenset[str]:
    """The names of an operator's arguments in the installed PyTorch."""
    operator = _operator(direction)
    return frozenset() if operator is None else frozenset(argument.name for argument in operator._schema.arguments)


@functools.cache
def _pads_lse(device: torch.device) -> bool:
    """Whether packed rows' LSE is (batch, heads, max_seqlen_q), as before FlashAttention 2.6; found by a tiny call."""
    q = torch.zeros(1, 1, 8, dtype=torch.float16, device=device)
    starts = torch.arange(2, dtype=torch.int32, device=device)
    lse: Tensor = _operator("forward")(q, q, q, starts, starts, 1, 1, 0.0, False, False)[1]
    return lse.dim() == 3
