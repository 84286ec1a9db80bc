"""Results as (batch, heads, seqlen, head_dim) that behave like those of PyTorch's own attention operators.

``out`` is no view and its version is 0. The caller may write to it, and to a boolean mask, before the backward.
dispatch/autograd.py records the call.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.core.entry import Entry
from flash_attn_compat.core.inputs import Inputs


class _Watch(NamedTuple):
    """Tells, after a forward, whether the caller has written to its ``out`` or to its boolean mask.

    out, mask: empty tensors that share the version counters of ``out`` and of the mask; mask is None if there is none
    mask_version: the version of the mask during the forward
    """

    out: Tensor
    mask: Tensor | None
    mask_version: int


def as_own(out: Tensor) -> Tensor:
    """Return (batch, seqlen, heads, head_dim) as (batch, heads, seqlen, head_dim), as a tensor that is no view."""
    return out.contiguous().transpose(1, 2).data


def make_own(out: Tensor, x: Any) -> tuple[Tensor, _Watch, Inputs]:
    """Return ``out`` with heads first, a _Watch of it and the mask, and the inputs to save for the backward.

    The returned tensor and the saved boolean mask share memory with ``out`` and the caller's mask, but no version
    counter. So autograd raises no error if the caller writes to them.
    """
    own, mask = as_own(out), x.bias
    if mask is None or mask.dtype is not torch.bool:
        return own, _Watch(_version(own), None, 0), x
    return own, _Watch(_version(own), _version(mask), mask._version), x._replace(bias=mask.data)


def with_mask_of_forward(watch: _Watch, entry: Entry, x: Any, saved: tuple[Any, ...]) -> Inputs:
    """Return the inputs with the boolean mask as it was in the forward, even if the caller has written to it since."""
    is_written = watch.mask is not None and watch.mask._version != watch.mask_version
    found: Inputs = x._replace(bias=_kept_mask(entry, x.bias, saved)) if is_written else x
    return found


def _version(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of ``tensor``."""
    alias = tensor.detach()
    alias.data = _nothing(tensor.dtype, tensor.device)
    return alias


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def _kept_mask(entry: Entry, mask: Tensor, saved: tuple[Any, ...]) -> Tensor:
    """Return the boolean mask as the forward saw it, for a backward whose mask the caller has changed in place since.

    saved: what the backend's forward kept. Raises RuntimeError if no copy of the mask is in it.
    """
    found: Tensor | None = entry.backend.saved_mask(mask, saved)
    if found is None:
        raise RuntimeError(
            "attn_mask is needed for gradients, and has been modified by an inplace operation since the forward. The "
            f"backend {entry.backend.name} kept no copy of it: give the forward a copy"
        )
    return found
