"""ops.triton.layer_norm of flash-attn 2.6: no zero_centered_weight, and no tensors to write results to."""

from __future__ import annotations

import torch

from flash_attn_compat.api_2_6._old import without
from flash_attn_compat.ops.triton import layer_norm as _current

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]

_ABSENT = "zero_centered_weight", "out_dtype", "out", "residual_out"
layer_norm_fn = without(_ABSENT, _current.layer_norm_fn, __name__)
rms_norm_fn = without(_ABSENT, _current.rms_norm_fn, __name__)
layer_norm_ref = without(_ABSENT, _current.layer_norm_ref, __name__)
rms_norm_ref = without(_ABSENT, _current.rms_norm_ref, __name__)


class RMSNorm(_current.RMSNorm):
    """`flash_attn_compat.ops.triton.layer_norm.RMSNorm` with the arguments in the order of 2.6."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, dropout_p, device=device, dtype=dtype)
