"""Parameters of kernels over caches of 8-bit floats (cuda/base/eight_bit.cuh): a macro, and fields of struct Params."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends.fused.choosing.kinds import E4M3, E5M2
from flash_attn_compat.backends.fused.launching import params
from flash_attn_compat.core.call import AttentionCall

# The dtype of a cache by the macro CACHE.
DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
_MACROS = {dtype: macro for macro, dtype in DTYPES.items()}


def cache_macro(k: Tensor) -> int:
    """Return the macro CACHE for keys: E4M3 or E5M2, 0 for any other dtype."""
    return _MACROS.get(k.dtype, 0)


def cache_fields(call: AttentionCall) -> dict[str, params.Value]:
    """Return factors, and strides of descales, as fields of struct Params; no fields unless the keys have 8 bits."""
    if not cache_macro(call.k):
        return {}
    fields: dict[str, params.Value] = {"k_factor": call.k_factor, "v_factor": call.v_factor}
    for name in params.TAIL_ADDRESSES:
        descale = getattr(call, name)
        if descale is not None:
            batch, head = (stride if size > 1 else 0 for size, stride in zip(descale.shape, descale.stride()))
            fields[f"{name}_s"] = batch, 0, head
    return fields
