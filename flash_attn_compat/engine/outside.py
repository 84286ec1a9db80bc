"""Which sequence a token of packed tensors belongs to, and what to do with those that belong to none: set them to 0.

Kernels of others leave there whatever the memory held. Setting it costs a pass over the tensor, and hardly any call has
such tokens. So the bounds of each cu_seqlens tensor are copied to the host in the background when it is first seen, and
the pass is left out once they are known. Nothing waits for the GPU.
"""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.engine import capture


class _Bounds(NamedTuple):
    """The first and last number of a cu_seqlens tensor in ``state``: in ``values``, on the host after ``event``.

    event: None once they have arrived, as ``found``
    """

    tensor: weakref.ref[Tensor]
    state: tuple[int, ...]
    values: Tensor
    event: torch.cuda.Event | None
    found: tuple[int, int] = (0, 0)


# By the tensors' id, since tensors compare element by element. Each step on it is one operation of a dict, which
# threads may make at the same time; an entry goes when its tensor does, before another one can have that id.
_known: dict[int, _Bounds] = {}


def token_places(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Each token's sequence and its index there; tokens outside of all sequences count to the nearest one."""
    tokens = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:], tokens, right=True).clamp_(max=cu_seqlens.shape[0] - 2)
    return sequence, (tokens - cu_seqlens[sequence]).clamp_(min=0)


def may_exist(cu_seqlens: Tensor | None, total: int) -> bool:
    """Whether some of ``total`` tokens may lie outside; False only where the host knows better. Never waits."""
    if cu_seqlens is None:
        return False
    if not cu_seqlens.is_cuda:
        return bool(cu_seqlens[0] != 0 or cu_seqlens[-1] != total)
    # A captured graph may be replayed with other lengths, and inference tensors tell nobody when they change.
    if cu_seqlens.is_inference() or capture.is_capturing(cu_seqlens.get_device()):
        return True
    key = id(cu_seqlens)
    known = _known.get(key)
    if known is None or known.tensor() is not cu_seqlens or known.state != state_of(cu_seqlens):
        _known[key] = _copy_bounds(cu_seqlens)
        return True
    if known.event is not None:
        if not known.event.query():
            return True
        known = _known[key] = known._replace(event=None, found=tuple(known.values.tolist()))
    return known.found != (0, total)


def state_of(tensor: Tensor) -> tuple[int, ...]:
    """What changes whenever somebody gives a tensor other numbers."""
    return tensor._version, tensor.data_ptr(), tensor.shape[0]


def mask(cu_seqlens: Tensor, total: int) -> Tensor:
    """(total,) bool, True for tokens that lie outside."""
    # Half a token more than its index tells the token at a sequence's end from the last one within.
    tokens = torch.arange(0.5, total, dtype=torch.float64, device=cu_seqlens.device)
    return tokens.clamp(cu_seqlens[0], cu_seqlens[-1]) != tokens


def set_to_zero(tensor: Tensor, cu_seqlens: Tensor) -> None:
    """Set the tokens of (total, heads, head_dim) that lie outside to 0, in place."""
    whole_words = tensor.shape[-1] * tensor.element_size() % 8 == 0
    # Eight bytes at a time, for speed.
    words = tensor.view(torch.int64) if whole_words else tensor
    words.masked_fill_(mask(cu_seqlens, tensor.shape[0])[:, None, None], 0)


def clear(tensor: Tensor, cu_seqlens: Tensor) -> None:
    """set_to_zero where it may be needed."""
    if may_exist(cu_seqlens, tensor.shape[0]):
        set_to_zero(tensor, cu_seqlens)


def _copy_bounds(cu_seqlens: Tensor) -> _Bounds:
    # The caller's default device is another one's business: only memory of the host can be pinned.
    values = torch.empty(2, dtype=cu_seqlens.dtype, device="cpu", pin_memory=True)
    values.copy_(cu_seqlens[:: cu_seqlens.shape[0] - 1], non_blocking=True)
    event = torch.cuda.Event()
    # The copy is issued to this stream, whatever the current device is.
    event.record(torch.cuda.current_stream(cu_seqlens.device))
    reference = weakref.ref(cu_seqlens, functools.partial(_forget, id(cu_seqlens)))
    return _Bounds(reference, state_of(cu_seqlens), values, event)


def _forget(key: int, _: weakref.ref[Tensor]) -> None:
    _known.pop(key, None)
