"""Requirements of kernels that are not ours: PyTorch's aligned channels, and the key blocks of flash-attn's forward."""

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
    if eight_bit.is_eight_bit(tensor):  # F.pad takes their bytes, not the floats
        return padded(eight_bit.as_bytes(tensor)).view(tensor.dtype)
    return ready(F.pad(tensor, (0, missing)) if missing else tensor)


def narrowed(result: Tensor, head_dim: int) -> Tensor:
    """Return the first ``head_dim`` channels: those that ``padded`` did not add."""
    return result if result.shape[-1] == head_dim else result[..., :head_dim]


def round_up(number: int, multiple: int) -> int:
    return (number + multiple - 1) // multiple * multiple


def key_block_size(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Return how many keys flash-attn 2.8's forward kernel processes at once for this head_dim.

    At head dims 97 to 128 the number depends on the GPU; devices other than CUDA's get the number of most GPUs.
    """
    assert head_dim <= 256
    if head_dim <= 32:
        return 128
    if head_dim <= 64:
        return 64 if is_dropout else 128
    if not 96 < head_dim <= 128:
        return 64
    is_small = device.type == "cuda" and torch.cuda.get_device_capability(device) in ((8, 6), (8, 9))
    return 64 if not is_dropout and (is_causal or not is_small) else 32
