"""How tensors must lie in memory for our kernels: strides, alignment, and copies of tensors that lie otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flash_attn_compat.core import kernel_layout
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.inputs import Inputs

_MAX_INT = 2**31 - 1
# For tensors of up to so many elements, single loads cost less than an aligned copy.
MAX_SCALAR_LOADS = 2**18


def addressed_bytes(tensor: Tensor | None) -> int:
    """Return how many bytes a tensor spans, from its first element to the end of the last; 0 for None."""
    if tensor is None or not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def kernel_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Return strides (batch or page, row, head) in elements: 0 for a packed tensor's batch and axes of one element."""
    *batch, row, head, _ = (effective_stride(tensor, axis) for axis in range(tensor.dim()))
    return batch[0] if batch else 0, row, head


def effective_stride(tensor: Tensor, axis: int) -> int:
    """Return the stride along an axis in elements; 0 for an axis of one element, whose stride is arbitrary."""
    return tensor.stride(axis) if tensor.shape[axis] > 1 else 0


def contiguous_strides(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return ``kernel_strides`` of a contiguous tensor of a shape, without making the tensor, which would cost time."""
    *batch, rows, heads, width = (max(size, 1) for size in shape)
    return rows * heads * width if batch else 0, heads * width, width


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a shape. As in PyTorch, an axis without elements counts as one."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


def has_kernel_layout(tensor: Tensor) -> bool:
    """Whether kernels can read the tensor: contiguous channels, and row and head strides within an int."""
    *rows, (channels, channel) = list(zip(tensor.shape, tensor.stride()))[-3:]
    return (channels == 1 or channel == 1) and all(size == 1 or stride <= _MAX_INT for size, stride in rows)


def is_aligned(tensor: Tensor) -> bool:
    """Whether every row is aligned to 16 bytes and a multiple of 16 bytes long."""
    unit = 16 // tensor.element_size()
    return (
        tensor.shape[-1] % unit == 0
        and tensor.data_ptr() % 16 == 0
        and all(stride % unit == 0 for size, stride in zip(tensor.shape[:-1], tensor.stride()) if size > 1)
    )


def vector_size(tensors: Iterable[Tensor | None], in_place: bool) -> int:
    """Return how many elements kernels load at once: 8 if all tensors are aligned, else 1; 0 to copy the tensors first.

    in_place: whether the tensors cannot be copied
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if not all(map(has_kernel_layout, present)):
        return 0
    if all(map(is_aligned, present)):
        return 8
    return 1 if in_place or sum(tensor.numel() for tensor in present) <= MAX_SCALAR_LOADS else 0


def align(tensor: Tensor) -> Tensor:
    """Return ``tensor`` if aligned, else a copy with aligned rows, channels padded with 0 to a multiple of 16 bytes."""
    if not has_kernel_layout(tensor):
        tensor = tensor.contiguous()
    return tensor if is_aligned(tensor) else kernel_layout.padded(tensor)


def copy_contiguous(tensor: Tensor) -> Tensor:
    """Return a copy with a contiguous last axis. Broadcast axes stay broadcast."""
    unique = tensor[tuple([slice(None if stride else 1) for stride in tensor.stride()[:-1]])]
    return unique.contiguous().expand(tensor.shape)


def find_strided_inputs(tensors: Inputs | AttentionCall) -> list[str]:
    """Return the names of inputs without a contiguous last axis, among slopes, block table and a bias of numbers."""
    present = {name: x for name in ("alibi_slopes", "block_table", "bias") if (x := getattr(tensors, name)) is not None}
    strided = {name: x for name, x in present.items() if x.stride(-1) != 1 and x.shape[-1] > 1}
    return [name for name, tensor in strided.items() if tensor.dtype is not torch.bool]


def append_has_kernel_layout(new: Append) -> bool:
    """Whether kernels can read the tensors of an append: all have the kernel layout, and cos and sin equal strides."""
    cos, sin = new.rotary_cos, new.rotary_sin
    have_layout = all(tensor is None or has_kernel_layout(tensor) for tensor in new[:4])
    return have_layout and (cos is None or sin is None or cos.stride() == sin.stride())
