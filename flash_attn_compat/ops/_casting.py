"""Changing dtypes inside autograd Functions."""

from __future__ import annotations

import torch
from torch import Tensor


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, without calling it where x has that dtype already.

    The compiler of torch 2.11 silently loses the gradients of a Function whose output is a `.to` that did nothing.
    """
    return x if x.dtype == dtype else x.to(dtype)


def upcast(x: Tensor) -> Tensor:
    """x in fp32, or as it is if it is fp64."""
    return cast(x, torch.promote_types(x.dtype, torch.float32))
