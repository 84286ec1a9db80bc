"""Tensors as CUDA kernels want them: read 16 bytes at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def is_ready(tensor: Tensor) -> bool:
    """Whether channels are contiguous and every step is on 16 bytes, even along axes of size 1."""
    unit = 16 // tensor.element_size()
    strides = tensor.stride()
    return strides[-1] == 1 and tensor.data_ptr() % 16 == 0 and not any([stride % unit for stride in strides[:-1]])


def ready(tensor: Tensor) -> Tensor:
    """``tensor`` as the kernel reads it: a copy where its memory is not laid out that way."""
    return tensor if is_ready(tensor) else tensor.clone(memory_format=torch.contiguous_format)
