"""The only list of all backends, in order. The first backend that can compute a call exactly serves it."""

from __future__ import annotations

from flash_attn_compat.backends.base import Backend, CallRefused, Capabilities, KernelsFailed, NegatedView
from flash_attn_compat.backends.chunked import Chunked
from flash_attn_compat.backends.fused import Fused
from flash_attn_compat.backends.official import Official
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.backends.sdpa import Sdpa
from flash_attn_compat.backends.torch_efficient import TorchEfficient
from flash_attn_compat.backends.torch_flash import TorchFlash

_fused = Fused()
BACKENDS: tuple[Backend, ...] = (
    Official(_fused.choose_clear),
    TorchFlash(_fused.choose_clear),
    _fused,
    TorchEfficient(),
    Sdpa(),
    Chunked(),
    Reference(),
)

__all__ = ["BACKENDS", "Backend", "CallRefused", "Capabilities", "KernelsFailed", "NegatedView"]
