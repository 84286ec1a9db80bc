"""Memory that overlaps itself: two elements of one tensor at one address, as unfold, expand and as_strided make it.

A call may read such a tensor. It refuses to write to one: one address cannot hold two results.
"""

from __future__ import annotations

import functools
import math

from torch import Tensor

# The most addresses that are marked one by one, a bit each; a longer stretch of memory counts as overlapping.
_MOST_ADDRESSES = 2**24


def refuse(name: str, tensor: Tensor) -> None:
    """Raise RuntimeError if ``tensor``, which a call writes to, overlaps itself."""
    if overlaps_itself(tensor):
        raise RuntimeError(
            f"{name} must not overlap itself, for the call writes to it: elements of {name} with shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()} share memory. Give it memory of its own, such as "
            f"{name}.contiguous()"
        )


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of ``tensor`` share an address. False if sizes or strides are a compiler's symbols.

    As exact as ``strides_overlap``. Empty tensors and axes of one element never overlap.
    """
    return not tensor.is_contiguous() and strides_overlap(tuple(tensor.shape), tensor.stride())


def strides_overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether two different indices lead to the same offset. Strides are not negative, as PyTorch's.

    The answer is exact if every axis steps over all smaller ones, as in any permuted, sliced or paged contiguous
    memory. Otherwise independent axes are dropped, and the other strides divided by their common divisor; the answer is
    exact if fewer than _MOST_ADDRESSES addresses remain, and True if more do.
    """
    return all([type(number) is int for number in (*shape, *strides)]) and _overlap(shape, strides)


@functools.lru_cache(4096)
def _overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return False
    axes = _drop_independent([(stride, size) for size, stride in zip(shape, strides) if size > 1])
    if not axes:
        return False
    if any([not stride for stride, _ in axes]):
        return True
    divisor = math.gcd(*[stride for stride, _ in axes])
    axes = [(stride // divisor, size) for stride, size in axes]
    return _reach(axes) >= _MOST_ADDRESSES or _count_addresses(axes) < math.prod([size for _, size in axes])


def _drop_independent(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the axes (stride, size) without those along which two elements at one address have the same index."""
    for index, (stride, size) in enumerate(axes):
        others = axes[:index] + axes[index + 1 :]
        # Two elements at one address differ by some steps along this axis. The other axes make up for steps * stride,
        # which is therefore a multiple of their common divisor.
        divisor = math.gcd(*[other for other, _ in others])
        least_steps = divisor // math.gcd(divisor, stride) if divisor else size
        if stride and (stride > _reach(others) or least_steps >= size):
            return _drop_independent(others)
    return axes


def _reach(axes: list[tuple[int, int]]) -> int:
    """Return the largest offset that axes (stride, size) reach."""
    return sum([stride * (size - 1) for stride, size in axes])


def _count_addresses(axes: list[tuple[int, int]]) -> int:
    """Return the number of different offsets that axes (stride, size) reach."""
    marked = 1  # bit n: an element lies at offset n
    for stride, size in axes:
        steps = 1  # how many indices along this axis are marked already
        while steps < size:
            added = min(steps, size - steps)
            marked |= marked << (added * stride)
            steps += added
    return marked.bit_count()
