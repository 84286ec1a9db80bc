"""PyTorch's own build of FlashAttention-2, for GPUs of compute capability 8.0 and newer without flash-attn.

The operators got more arguments from version to version. If the installed PyTorch lacks an argument that we pass, this
backend declines. external.py turns a call into a launch.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flash_attn_compat.backends.base import HALF_DTYPES, Capabilities, aten_operator, missing_argument_reasons
from flash_attn_compat.backends.external import FLASH_UNSUPPORTED, FlashBackend, KernelResult, window_arguments
from flash_attn_compat.backends.unwritten import packed_lse, padded_lse
from flash_attn_compat.core import torch_state
from flash_attn_compat.core.call import AttentionCall, Gradients
from flash_attn_compat.core.features import Feature, all_but

# PyTorch builds its kernels without ALiBi, though the operator has an argument for slopes. Deterministic gradients
# would need a switch that affects the whole process.
_UNSUPPORTED = FLASH_UNSUPPORTED | Feature.SOFTCAP | Feature.ALIBI | Feature.DETERMINISTIC
_SHARED_ARGUMENTS = {"cum_seq_q", "cum_seq_k", "scale", "window_size_left", "window_size_right"}
_NEEDED_ARGUMENTS = {
    "_flash_attention_forward": _SHARED_ARGUMENTS | {"max_q", "max_k"},
    "_flash_attention_backward": _SHARED_ARGUMENTS | {"logsumexp"},
}


class TorchFlash(FlashBackend):
    name = "torch_flash"
    capabilities = Capabilities(
        features=all_but(_UNSUPPORTED),
        devices=frozenset({"cuda"}),
        dtypes=HALF_DTYPES,
        min_capability=(8, 0),
        max_capability=(12, 1),
        max_head_dim=256,
        rocm_reason="PyTorch's flash kernels for ROCm are different and untested",
    )

    def unavailable_reasons(self) -> list[str]:
        is_built = getattr(torch.backends.cuda, "is_flash_attention_available", None)
        if torch.version.cuda is not None and is_built is not None and not is_built():
            return ["this PyTorch was built without its flash kernels"]
        other = torch_state.flash_implementation()
        if other is not None:
            return [f"{other} was activated in place of PyTorch's own flash kernels"]
        return missing_argument_reasons(_NEEDED_ARGUMENTS)

    def launch_forward(self, call: AttentionCall) -> KernelResult:
        causal, left, right = window_arguments(call)
        out, lse, seed, offset, _ = aten_operator("_flash_attention_forward")(
            call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k,
            call.dropout_p, causal, False, scale=call.softmax_scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return KernelResult(out, lse, (seed, offset))

    def launch_backward(
        self, call: AttentionCall, dout: Tensor, result: KernelResult, into: Gradients | None
    ) -> Gradients:
        seed, offset = result.state or (dout.new_empty(0), dout.new_empty(0))
        causal, left, right = window_arguments(call)
        gradients = aten_operator("_flash_attention_backward")(
            dout, call.q, call.k, call.v, result.out, result.lse, call.cu_seqlens_q, call.cu_seqlens_k,
            call.max_seqlen_q, call.max_seqlen_k, call.dropout_p, causal, seed, offset, scale=call.softmax_scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return Gradients(*gradients)

    def to_flash_attn_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        if call.cu_seqlens_q is not None and lse.dim() == 3:
            lse = packed_lse(lse, call.cu_seqlens_q, call.q.shape[0])
        return lse

    def to_kernel_lse(self, call: AttentionCall, lse: Tensor) -> Tensor:
        if call.cu_seqlens_q is not None and _pads_lse(call.q.device):
            return padded_lse(lse, call.cu_seqlens_q, call.max_seqlen_q)
        return lse.contiguous()


@functools.cache
def _pads_lse(device: torch.device) -> bool:
    """Whether packed calls return a padded LSE, as before FlashAttention 2.6. Finds out by a tiny call.

    The padded LSE is (batch, heads, max_seqlen_q).
    """
    q = torch.zeros(1, 1, 8, dtype=torch.float16, device=device)
    starts = torch.arange(2, dtype=torch.int32, device=device)
    lse: Tensor = aten_operator("_flash_attention_forward")(q, q, q, starts, starts, 1, 1, 0.0, False, False)[1]
    return lse.dim() == 3
