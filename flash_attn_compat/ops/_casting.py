"""Changing dtypes inside autograd Functions."""

from __future__ import annotations

import torch
from torch import Tensor


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x.to(dtype)`, or x itself if it has the dtype already.

    torch 2.11's compiler silently loses the gradients of a Function that returns a `.to` without effect.
    """
    return x if x.dtype == dtype else x.to(dtype)


def upcast(x: Tensor) -> Tensor:
    """Return x in fp32, or x itself in fp64."""
    return cast(x, torch.promote_types(x.dtype, torch.float32))
