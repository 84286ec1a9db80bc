"""Which of PyTorch's attention calls we serve: the policy that a program asked for, and reasons to decline a call."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.core.prepared import PLAIN
from flash_attn_compat.torch_sdpa import bridge

HALF = frozenset({torch.float16, torch.bfloat16})
# Smaller calls wait for the host, and our call takes the host longer than PyTorch's. Measured on an H200 as 7.5,
# with 132 multiprocessors: forwards of 7e8 products were even and of 1e9 faster; with the backward, 2e9 slower and 6e9
# faster; one row over 1,024 keys slower, over 8,192 six times as fast.
LEAST_PRODUCTS = 3 * 2**21
RECORDED = 4
# Biases are read from memory: at twice the least products, 0.95 of the speed of PyTorch's kernel.
BIASED = 2
LEAST_KEYS = 2048
# By the same H200, of the GPU's time alone. With gradients, sequences of 49 to 64 tokens took 1.1 to 1.5 times as long,
# of 100 as long; under masks those of 16 and 32 as well, which are faster without. Biases that differ in each sequence
# and head took up to 1.4 times as long, and 1.7 with gradients: PyTorch's kernel reads them once.
SHORT, FEW_TOKENS = 32, 96


class Policy(NamedTuple):
    """Which calls a program asked us to serve.

    device: the device type whose operators are overridden
    always: serve GPUs for which PyTorch has flash kernels of its own, too
    least_products: of rows, keys, heads and channels, for each multiprocessor, in a call that is worth serving without
        gradients; with gradients, RECORDED times as many, with biases BIASED times; 0 serves calls of any shape
    least_keys: of one row
    """

    device: str = "cuda"
    always: bool = False
    least_products: int = LEAST_PRODUCTS
    least_keys: int = LEAST_KEYS


class Override:
    """An override of PyTorch's operators; without a policy it passes every call on to them."""

    def __init__(self, policy: Policy) -> None:
        self.device = policy.device
        self.policy: Policy | None = policy


def against_tensors(policy: Policy, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why plain (batch, ..., head_dim) tensors are declined, or None. q's dtype is in HALF."""
    dtype, device = q.dtype, q.device
    if device.type != policy.device:
        return f"it is on {device.type}, not on {policy.device}"
    if not (dtype is k.dtype is v.dtype and device == k.device == v.device):
        return "dtypes or devices differ"
    if not policy.always and bridge.has_flash(device):
        return 'PyTorch has flash kernels for this GPU: sdpa="always" asks for ours all the same'
    return None


@functools.cache
def not_half(dtype: torch.dtype) -> str:
    """Why a call in another dtype cannot be ours."""
    return f"our kernels compute float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"


def against_mask(mask: Tensor, q: Tensor, shape: tuple[int, int, int, int], drops: bool = False) -> str | None:
    """Why a dense mask cannot be ours. shape: (batch, heads, rows, keys), to which it is broadcast

    drops: whether there is dropout. The answer is then one for calls that are recorded and for those that are not.
    """
    if drops and mask.dtype is not torch.bool:
        return "its dropout must be drawn alike where a checkpoint makes its mask anew, which may want a gradient then"
    if (drops or torch.is_grad_enabled()) and (mask.requires_grad or mask.is_inference()):
        return "its mask wants a gradient" if mask.requires_grad else "autograd keeps no mask of inference mode"
    if type(mask) not in PLAIN or mask.device != q.device:
        return "its mask is on another device, or no plain tensor"
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        return f"its mask is {str(mask.dtype).removeprefix('torch.')}"
    if not 2 <= mask.dim() <= 4 or any(own not in (1, size) for own, size in zip(mask.shape[::-1], shape[::-1])):
        return "its mask has another shape"
    batch, heads, rows, keys = shape
    if max(*mask.stride(), batch * heads * rows, rows * keys) < 2**31:  # at most; most are far below
        return None
    return "its mask is too large" if _largest(mask, rows * keys) >= 2**31 else None


def _largest(mask: Tensor, of_a_copy: int) -> int:
    """Of what kernels hold in an int: strides of heads and rows, in the mask or in a copy of it, and how many rows."""
    strides = [stride for size, stride in zip(mask.shape[-3:], mask.stride()[-3:]) if size > 1]
    is_copied = mask.stride(-1) != 1 and mask.dtype is not torch.bool
    return max(*strides, mask.shape[:-1].numel(), of_a_copy * is_copied)


def against_size(
    policy: Policy, q: Tensor, rows: int, keys: int, channels: int, mask: Tensor | None, is_recorded: bool,
    at_any_size: bool = False,
) -> str | None:  # fmt: skip
    """Why a call is not worth our while. channels: of all heads of the batch; is_recorded: if a backward may follow"""
    products = rows * keys * channels
    if products == 0:
        return "it has no elements"
    if at_any_size or (rows == 1 and keys >= policy.least_keys):
        return None
    least = policy.least_products * processors(q.get_device()) * (RECORDED if is_recorded else 1)
    bias = None if mask is None or mask.dtype is torch.bool else mask
    if products < least * (1 if bias is None else BIASED):
        return "it is so small that only the host's time counts"
    if is_recorded and (SHORT if mask is None else 0) < max(rows, keys) <= FEW_TOKENS and least:
        return "with gradients, PyTorch's kernel is faster for such short sequences"
    if bias is not None and least and _numbers(bias) * q.shape[-1] == products:
        return "each of its scores has a bias of its own, which PyTorch's kernel reads once and ours twice"
    return None


def _numbers(mask: Tensor) -> int:
    """Which are in memory: those of an expanded mask count once."""
    return math.prod(size for size, stride in zip(mask.shape, mask.stride()) if stride)


@functools.cache
def processors(index: int) -> int:
    """Multiprocessors of a GPU, by which it takes longer or shorter; 1 of what is none, whose index is -1."""
    return torch.cuda.get_device_properties(index).multi_processor_count if index >= 0 else 1
