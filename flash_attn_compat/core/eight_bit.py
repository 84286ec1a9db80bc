"""Caches of 8-bit floats: which dtypes they have, and how numbers go into them and come out.

A cache's number times its descale is the value. Descales are fp32, one for each sequence and key head, or a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


def is_eight_bit(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPES


def dequantize(x: Tensor, descale: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor:
    """Return 8-bit x (n, seqlen, heads, head_dim) times descale (n or 1, heads or 1) times factor, in ``dtype``."""
    wide = x.to(torch.promote_types(dtype, torch.float32))
    if descale is not None:
        wide = wide * descale[:, None, :, None].to(wide.dtype)
    return (wide if factor == 1.0 else wide * factor).to(dtype)


def quantize(x: Tensor, descale: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor:
    """Return (batch, seqlen, heads, head_dim) / (descale * factor) as 8-bit floats of ``dtype``.

    The quotient is rounded to fp32, then to the nearest number of ``dtype``, ties to even; beyond the largest it
    becomes the largest. Only NaN becomes NaN.
    """
    wide = x.float()
    if descale is not None:
        wide = wide / descale[:, None, :, None]
    if factor != 1.0:  # divide by a tensor: for a Python number, GPUs multiply by its rounded reciprocal
        wide = wide / torch.full((), factor, dtype=torch.float32, device=x.device)
    largest = torch.finfo(dtype).max
    return wide.clamp(-largest, largest).to(dtype)  # a conversion alone would make NaN of large numbers


def as_bytes(x: Tensor) -> Tensor:
    """Return 8-bit floats as uint8, which PyTorch can index; any other tensor unchanged."""
    return x.view(torch.uint8) if is_eight_bit(x) else x
