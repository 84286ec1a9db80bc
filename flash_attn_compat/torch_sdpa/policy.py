"""Which of PyTorch's attention calls we serve: the policy that a program requested, and reasons to decline a call."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core.entry import PLAIN

HALF = frozenset({torch.float16, torch.bfloat16})
# For small calls only host time counts, and ours take more of it than PyTorch's. Measured on an H200 treated as 7.5,
# with 132 multiprocessors. Forwards: ours are as fast at 7e8 products and faster at 1e9. With the backward: slower at
# 2e9, faster at 6e9. One row: slower over 1,024 keys, six times as fast over 8,192.
LEAST_PRODUCTS = 3 * 2**21
RECORDED = 4
# Our kernels read biases from memory: at twice the least products they have 0.95 of the speed of PyTorch's kernel.
BIASED = 2
LEAST_KEYS = 2048
# Our GPU time over that of PyTorch's kernel, for 512 sequences on an H100 treated as a Turing GPU. In the shapes that
# _is_short selects by these bounds it is 1.01 to 1.08 with gradients and 1.03 to 1.5 without; in the shapes around them
# at most 1. On an H200, a bias of its own for each sequence and head makes it up to 1.4, and 1.7 with gradients, since
# PyTorch's kernel reads such a bias once.
SHORT, FEW_TOKENS, SOME_TOKENS, MORE_TOKENS = 32, 64, 96, 128
FEW_CHANNELS, SOME_CHANNELS, MORE_CHANNELS, MANY_CHANNELS = 32, 64, 96, 192


class Policy(NamedTuple):
    """Which calls a program asked us to serve.

    device: the device type of the overridden operators
    always: also serve GPUs for which PyTorch has its own flash kernels
    least_products: the least rows * keys * heads * channels, per multiprocessor, of a call without gradients; RECORDED
        times as many with gradients, BIASED times with a bias; 0 serves calls of any shape
    least_keys: the least keys of a single row
    """

    device: str = "cuda"
    always: bool = False
    least_products: int = LEAST_PRODUCTS
    least_keys: int = LEAST_KEYS


class Override:
    """Holds the active policy for the kernels that we registered. While it is None, PyTorch computes every call."""

    def __init__(self, policy: Policy) -> None:
        self.device = policy.device
        self.policy: Policy | None = policy


def check_plain(
    policy: Policy, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, int], channels: int, mask: Tensor | None,
    is_causal: bool, is_recorded: bool, is_always_faster: bool,
) -> str | None:  # fmt: skip
    """Return the reason to decline a call for its size, dtypes or devices, or None. Arguments as in ``check_size``."""
    reason = check_size(policy, q, lengths, channels, mask, is_causal, is_recorded, is_always_faster)
    return reason or check_tensors(policy, q, k, v)


def check_tensors(policy: Policy, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return the reason to decline plain (batch, ..., head_dim) tensors, or None. q's dtype is in HALF."""
    dtype, device = q.dtype, q.device
    if device.type != policy.device:
        return f"it is on {device.type}, not on {policy.device}"
    if not (dtype is k.dtype is v.dtype and device == k.device == v.device):
        return "dtypes or devices differ"
    if not policy.always and has_flash(device):
        return 'PyTorch has flash kernels of its own for this GPU: sdpa="always" uses ours instead'
    return None


def has_flash(device: torch.device) -> bool:
    """Whether PyTorch has flash kernels of its own for this GPU."""
    return device.type == "cuda" and settings.capability(device) >= (8, 0)


@functools.cache
def dtype_reason(dtype: torch.dtype) -> str:
    """Return the reason to decline a dtype that is not in HALF."""
    return f"our kernels compute float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"


def check_mask(mask: Tensor, q: Tensor, shape: tuple[int, int, int, int], drops: bool = False) -> str | None:
    """Return the reason to decline a dense mask, or None. shape: (batch, heads, rows, keys), to which it is broadcast

    drops: whether the call has dropout: the decision must then not depend on whether autograd records the call
    """
    if drops and mask.dtype is not torch.bool:
        return "it has dropout, and attn_mask may require a gradient only in a checkpoint's recomputation"
    if (drops or torch.is_grad_enabled()) and (mask.requires_grad or mask.is_inference()):
        return "its mask requires a gradient" if mask.requires_grad else "autograd cannot save a mask of inference mode"
    if type(mask) not in PLAIN or mask.device != q.device:
        return "its mask is on another device or is no plain tensor"
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        return f"its mask's dtype is {str(mask.dtype).removeprefix('torch.')}"
    if not 2 <= mask.dim() <= 4 or any(own not in (1, size) for own, size in zip(mask.shape[::-1], shape[::-1])):
        return "its mask does not broadcast to the scores"
    batch, heads, rows, keys = shape
    if max(*mask.stride(), batch * heads * rows, rows * keys) < 2**31:  # an upper bound; most masks are far below it
        return None
    return "its mask is too large" if _largest_index(mask, rows * keys) >= 2**31 else None


def _largest_index(mask: Tensor, copy_stride: int) -> int:
    """Return the largest number that kernels need as an int32: a stride of the mask or of its copy, or its rows.

    copy_stride: rows * keys, the stride of a head in the copy, if kernels copy the mask. A batch's stride is no int32.
    """
    strides = [stride for size, stride in zip(mask.shape[-3:], mask.stride()[-3:]) if size > 1]
    is_copied = mask.stride(-1) != 1 and mask.dtype is not torch.bool
    return max(*strides, mask.shape[:-1].numel(), copy_stride * is_copied)


def check_size(
    policy: Policy, q: Tensor, lengths: tuple[int, int], channels: int, mask: Tensor | None, is_causal: bool,
    is_recorded: bool, is_always_faster: bool = False,
) -> str | None:  # fmt: skip
    """Return the reason to leave a call of this size to PyTorch, or None.

    lengths: rows and keys; channels: of all heads of the batch; is_recorded: whether a backward may follow
    is_always_faster: whether PyTorch has no fused kernel for the call, so that ours is faster at any size
    """
    rows, keys = lengths
    products = rows * keys * channels
    if products == 0:
        return "it has no elements"
    if is_always_faster or (rows == 1 and keys >= policy.least_keys):
        return None
    least = policy.least_products * count_multiprocessors(q.get_device()) * (RECORDED if is_recorded else 1)
    bias = None if mask is None or mask.dtype is torch.bool else mask
    if products < least * (1 if bias is None else BIASED):
        return "it is so small that host time decides, and ours is longer"
    if least and _is_short(max(lengths), q.shape[-1], is_causal, mask is not None, is_recorded):
        return "PyTorch's kernel is faster for sequences this short of so many channels"
    if bias is not None and least and _count_stored(bias) * q.shape[-1] == products:
        return "every score has a bias of its own, which PyTorch's kernel reads once and ours twice"
    return None


def _is_short(tokens: int, head_dim: int, is_causal: bool, has_mask: bool, is_recorded: bool) -> bool:
    """Whether PyTorch's kernel is faster than ours for sequences whose longer side has ``tokens`` tokens."""
    if not SHORT < tokens <= MORE_TOKENS:
        return False
    if not is_recorded:
        return head_dim > MANY_CHANNELS
    if FEW_CHANNELS < head_dim <= SOME_CHANNELS:
        return is_causal or (has_mask and tokens <= FEW_TOKENS)
    return SOME_CHANNELS < head_dim <= MORE_CHANNELS and tokens > SOME_TOKENS and not is_causal


def _count_stored(mask: Tensor) -> int:
    """Return how many numbers the mask has in memory: an expanded axis counts as one."""
    return math.prod(size for size, stride in zip(mask.shape, mask.stride()) if stride)


@functools.cache
def count_multiprocessors(index: int) -> int:
    """Return the number of multiprocessors of the GPU ``index``; 1 for index -1, which means no CUDA GPU."""
    return torch.cuda.get_device_properties(index).multi_processor_count if index >= 0 else 1
