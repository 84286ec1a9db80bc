"""Which calls are ours: what a program wished for, and the reasons that can be told without the engine."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.aten import door

_HALF = frozenset({torch.float16, torch.bfloat16})
# Below these a GPU is done before the host is, which takes some microseconds longer over our call than over PyTorch's.
LEAST_PRODUCTS = 2**26
LEAST_KEYS = 1024


class Wish(NamedTuple):
    """What was asked for.

    device: the type of device whose operators are served; always: on GPUs with flash kernels of PyTorch's own, too
    least_products: of rows, keys, heads and channels, in a call that is worth serving; least_keys: the same of one row
    """

    device: str = "cuda"
    always: bool = False
    least_products: int = LEAST_PRODUCTS
    least_keys: int = LEAST_KEYS


class Front:
    """What stands in front of PyTorch's operators; without a wish all calls go on to them."""

    def __init__(self, wish: Wish) -> None:
        self.device = wish.device
        self.wish: Wish | None = wish


def is_at_home(wish: Wish, tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor on the wish's kind of device, and not a fake one or one without memory."""
    return type(tensor) in door.PLAIN and tensor.device.type == wish.device


def against_tensors(wish: Wish, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why plain tensors of (batch, ..., head_dim) cannot be ours, whatever their axes mean."""
    dtype, device = q.dtype, q.device
    if dtype not in _HALF:
        return f"our kernels compute float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if device.type != wish.device:
        return f"it is on {device.type}, not on {wish.device}"
    if not (dtype is k.dtype is v.dtype and device == k.device == v.device):
        return "dtypes or devices differ"
    if not wish.always and door.is_of_today(device):
        return 'PyTorch has flash kernels for this GPU: sdpa="always" asks for ours all the same'
    return None


def against_mask(wish: Wish, mask: Tensor, q: Tensor, shape: tuple[int, int, int, int]) -> str | None:
    """Why a dense mask cannot be ours. shape: (batch, heads, rows, keys), to which it is broadcast"""
    if mask.requires_grad and torch.is_grad_enabled():
        return "its mask wants a gradient"
    if type(mask) not in door.PLAIN or mask.device != q.device:
        return "its mask is on another device, or no plain tensor"
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        return f"its mask is {str(mask.dtype).removeprefix('torch.')}"
    if not 2 <= mask.dim() <= 4 or any(own not in (1, size) for own, size in zip(mask.shape[::-1], shape[::-1])):
        return "its mask has another shape"
    return "its mask is too large" if max(mask.stride()) >= 2**31 else None


def against_size(wish: Wish, q: Tensor, rows: int, keys: int, heads: int, at_any_size: bool = False) -> str | None:
    """Why a call is not worth our while. heads: in the whole batch"""
    products = rows * keys * heads * q.shape[-1]
    if products == 0:
        return "it has no elements"
    if not at_any_size and products < wish.least_products and (rows > 1 or keys < wish.least_keys):
        return "it is so small that only the host's time counts"
    return None
