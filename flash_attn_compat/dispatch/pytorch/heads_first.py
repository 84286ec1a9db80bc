"""Attention over (batch, heads, seqlen, head_dim), recorded as PyTorch's own operators are: out is a tensor of its own.

It is no view, its version is 0, and it may be written to before its backward; so may a mask of booleans. autograd.py
records the call.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.core.entry import Entry
from flash_attn_compat.core.inputs import Inputs


class _Watch(NamedTuple):
    """Tells after a forward whether the caller has written to its ``out`` or to its mask of booleans.

    out, mask: tensors without elements that have the versions of these, mask None without such a mask
    mask_version: the mask's version in the forward
    """

    out: Tensor
    mask: Tensor | None
    mask_version: int


def as_own(out: Tensor) -> Tensor:
    """(batch, seqlen, heads, head_dim) with its axes swapped, as a tensor that is no view."""
    return out.contiguous().transpose(1, 2).data


def make_own(out: Tensor, x: Any) -> tuple[Tensor, _Watch, Inputs]:
    """Return ``out`` as a tensor of its own, its watch, and inputs whose mask of booleans may be saved and written to.

    The tensor shares the memory of ``out`` and has another version: writing to it does not end the graph.
    """
    own, mask = as_own(out), x.bias
    if mask is None or mask.dtype is not torch.bool:
        return own, _Watch(_version(own), None, 0), x
    return own, _Watch(_version(own), _version(mask), mask._version), x._replace(bias=mask.data)


def with_mask_of_forward(watch: _Watch, entry: Entry, x: Any, saved: tuple[Any, ...]) -> Inputs:
    """Return the inputs with the mask of booleans as it was in the forward, even if the caller has written to it."""
    is_written = watch.mask is not None and watch.mask._version != watch.mask_version
    found: Inputs = x._replace(bias=_kept_mask(entry, x.bias, saved)) if is_written else x
    return found


def _version(tensor: Tensor) -> Tensor:
    """A tensor without elements whose version is that of ``tensor``, now and later."""
    alias = tensor.detach()
    alias.data = _nothing(tensor.dtype, tensor.device)
    return alias


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def _kept_mask(entry: Entry, mask: Tensor, saved: tuple[Any, ...]) -> Tensor:
    """The mask of booleans as the forward saw it."""
    found: Tensor | None = entry.backend.saved_mask(mask, saved)
    if found is None:
        raise RuntimeError(
            "attn_mask is needed for gradients, and has been modified by an inplace operation since the forward. The "
            f"backend {entry.backend.name} kept no copy of it: give the forward a copy"
        )
    return found
