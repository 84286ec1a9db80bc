"""PyTorch's own copy of FlashAttention-2: the path for GPUs of compute capability 8.0 and newer without flash-attn.

The operators' schemas grew over PyTorch's versions; what the installed one lacks is a reason. How a call
becomes a launch is in flash_launch.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.backends.base import HALF_DTYPES, Capabilities
from flash_attn_compat.backends.flash_launch import FlashBackend, Launch, Native
from flash_attn_compat.engine import lengths, outside
from flash_attn_compat.engine.call import Gradients
from flash_attn_compat.engine.features import Feature, Traits

# PyTorch builds its kernels without slopes, whatever the operator's schema says.
_LACKS = Feature.SOFTCAP | Feature.ALIBI | Feature.SHARED_DROPOUT_MASK | Feature.VALUE_HEAD_DIM | Feature.TRANSFORMS
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

    def extra_reasons(self, traits: Traits) -> list[str]:
        features = Feature(traits.features)
        needed = {Feature.SEQUSED_K: "seqused_k", Feature.LEFTPAD_K: "seqused_k", Feature.PAGED: "block_table"}
        lacking = {name for feature, name in needed.items() if features & feature} - _arguments("forward")
        reasons = [f"this PyTorch's aten::_flash_attention_forward lacks {name}" for name in sorted(lacking)]
        if features & Feature.PAGED and features & Feature.LEFTPAD_K:
            reasons.append("does not support leftpad_k with pages")
        if features & Feature.DETERMINISTIC:
            reasons.append("does not promise deterministic gradients: its operator obeys a switch of the whole process")
        return super().extra_reasons(traits) + reasons

    def launch_forward(self, launch: Launch) -> Native:
        native = _forward(launch)
        if launch.cu_seqlens_q is not None and outside.may_exist(launch.cu_seqlens_q, launch.q.shape[0]):
            outside.set_to_zero(native.out, launch.cu_seqlens_q)
        return native

    def launch_backward(self, launch: Launch, dout: Tensor, native: Native, into: Gradients | None) -> Gradients:
        found = _backward(launch, dout, native)
        if launch.cu_seqlens_q is not None:
            for gradient, starts in zip(found, (launch.cu_seqlens_q, launch.cu_seqlens_k, launch.cu_seqlens_k)):
                if starts is not None and outside.may_exist(starts, gradient.shape[0]):
                    outside.set_to_zero(gradient, starts)
        if into is None:
            return found
        for place, gradient in zip(into, found):
            place.copy_(gradient)
        return into

    def official_lse(self, launch: Launch, lse: Tensor) -> Tensor:
        if launch.cu_seqlens_q is not None and lse.dim() == 3:
            lse = lengths.packed_lse(lse, launch.cu_seqlens_q, launch.q.shape[0])
        return lse

    def native_lse(self, launch: Launch, lse: Tensor) -> Tensor:
        if launch.cu_seqlens_q is not None and _pads_lse(launch.q.device):
            return lengths.padded_lse(lse, launch.cu_seqlens_q, launch.max_seqlen_q)
        return lse.contiguous()


def _forward(launch: Launch) -> Native:
    seqused_k = launch.seqused_k
    optional = {}
    if seqused_k is not None or launch.leftpad_k is not None or launch.block_table is not None:
        launch = _without_leftpad(launch)
        optional = {"seqused_k": launch.seqused_k}
        if launch.block_table is not None:
            optional["block_table"] = launch.block_table
    left, right = launch.window
    out, lse, seed, offset, _ = _operator("forward")(
        launch.q, launch.k, launch.v, launch.cu_seqlens_q, launch.cu_seqlens_k, launch.max_seqlen_q,
        launch.max_seqlen_k, launch.dropout_p, launch.causal, False, scale=launch.scale, window_size_left=left,
        window_size_right=right, **optional,
    )  # fmt: skip
    return Native(out, lse, (seed, offset))


def _backward(launch: Launch, dout: Tensor, native: Native) -> Gradients:
    seed, offset = native.state or (dout.new_empty(0), dout.new_empty(0))
    left, right = launch.window
    return Gradients(
        *_operator("backward")(
            dout, launch.q, launch.k, launch.v, native.out, native.lse, launch.cu_seqlens_q, launch.cu_seqlens_k,
            launch.max_seqlen_q, launch.max_seqlen_k, launch.dropout_p, launch.causal, seed, offset, scale=launch.scale,
            window_size_left=left, window_size_right=right,
        )
    )  # fmt: skip


def _without_leftpad(launch: Launch) -> Launch:
    """Skipped slots as later starts: where the keys' lengths are given, their starts may lie anywhere."""
    if launch.leftpad_k is None and (launch.block_table is None or launch.seqused_k is not None):
        return launch
    starts = launch.cu_seqlens_k
    assert starts is not None  # flash_launch.py packs whatever has lengths, pages or padding
    lengths = starts.diff() if launch.seqused_k is None else launch.seqused_k
    if launch.leftpad_k is None:
        return launch._replace(seqused_k=lengths)
    starts = starts + F.pad(launch.leftpad_k, (0, 1))
    return launch._replace(cu_seqlens_k=starts, seqused_k=(lengths - launch.leftpad_k).clamp_(min=0), leftpad_k=None)


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
