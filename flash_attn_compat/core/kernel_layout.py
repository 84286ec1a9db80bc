"""The memory layout that PyTorch's CUDA kernels need: channels in multiples of 8, aligned to 16 bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.core import eight_bit


def is_ready(tensor: Tensor) -> bool:
    """Whether channels are contiguous and address and strides are multiples of 16 bytes, along axes of size 1 too."""
    unit = 16 // tensor.element_size()
    strides = tensor.stride()
    return strides[-1] == 1 and tensor.data_ptr() % 16 == 0 and not any([stride % unit for stride in strides[:-1]])


def ready(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a contiguous copy if a kernel cannot read its layout."""
    return tensor if is_ready(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def padded(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in a readable layout, with zero channels added up to a multiple of 8; of 16 for 8 bits."""
    missing = -tensor.shape[-1] % max(8, 16 // tensor.element_size())
    if not missing and is_ready(tensor):  # nearly always
        return tensor
    if eight_bit.is_eight_bit(tensor):  # PyTorch pads their bytes only
        return padded(eight_bit.as_bytes(tensor)).view(tensor.dtype)
    return ready(F.pad(tensor, (0, missing)) if missing else tensor)


def narrowed(result: Tensor, head_dim: int) -> Tensor:
    """Return the first ``head_dim`` channels: those that ``padded`` did not add."""
    return result if result.shape[-1] == head_dim else result[..., :head_dim]
