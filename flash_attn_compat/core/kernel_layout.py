"""Tensors as CUDA kernels of others want them: channels in multiples of 8, read 16 bytes at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def is_ready(tensor: Tensor) -> bool:
    """Whether channels are contiguous and every step is on 16 bytes, even along axes of size 1."""
    unit = 16 // tensor.element_size()
    strides = tensor.stride()
    return strides[-1] == 1 and tensor.data_ptr() % 16 == 0 and not any([stride % unit for stride in strides[:-1]])


def ready(tensor: Tensor) -> Tensor:
    """``tensor`` as the kernel reads it: a copy where its memory is not laid out that way."""
    return tensor if is_ready(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def padded(tensor: Tensor) -> Tensor:
    """The same with channels of 0 up to a multiple of 8."""
    missing = -tensor.shape[-1] % 8
    return ready(F.pad(tensor, (0, missing)) if missing else tensor)


def narrowed(result: Tensor, head_dim: int) -> Tensor:
    """Without the channels that were added."""
    return result if result.shape[-1] == head_dim else result[..., :head_dim]
