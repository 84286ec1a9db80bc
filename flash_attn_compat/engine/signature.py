"""What does not depend on the values in a call's tensors is found once, and kept for all calls that are alike.

Alike are calls whose options, settings and tensors' shapes, strides, dtypes, devices and alignment are equal. Kept are
the outcome of the checks, defaults, the mask, the backend, and a kernel's plan. Each call looks at what depends on
values or on state: autograd, autocast, transforms, lengths on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.engine.call import AttentionCall, Signature

Key = tuple[Any, ...]

_MOST = 4096
Kind = TypeVar("Kind")
Value = TypeVar("Value")
_TENSORS = (Tensor, torch.nn.Parameter)
_VALUES = frozenset({bool, int, float, str, type(None)})
_known: dict[Key, AttentionCall] = {}


def key(tensors: Sequence[Any], values: tuple[object, ...]) -> Key | None:
    """Equal for calls that are alike; None for a call of which nothing is kept.

    tensors: q, k and v, and all others; values: every other argument
    """
    if torch._C._are_functorch_transforms_active():
        return None
    try:
        if tensors[0].is_neg() or tensors[1].is_neg() or tensors[2].is_neg():
            return None  # their memory holds other numbers than they do
        alike = [
            None if x is None else (type(x), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15) for x in tensors
        ]
    except (AttributeError, RuntimeError):
        return None  # no tensor, or one without an address: the checks say it better
    return tuple(alike), values, settings.fingerprint()


def outline(tensors: Sequence[Any], values: tuple[object, ...]) -> Key | None:
    """As ``key``, without the dtypes and devices of all tensors but the first: they take a tenth of a call's time.

    Whoever goes by it must compare them, as launches do in any case.
    """
    if torch._C._are_functorch_transforms_active():
        return None
    try:
        alike = [None if x is None else (type(x), x.shape, x.stride(), x.data_ptr() & 15) for x in tensors]
        return tuple(alike), values, (tensors[0].dtype, tensors[0].device, settings.fingerprint())
    except (AttributeError, RuntimeError):
        return None


def found(kept: dict[Key, Value], key: Key | None) -> Value | None:
    """What is kept by ``key``."""
    try:
        return kept.get(key) if key is not None else None
    except TypeError:
        return None  # an argument of a type that the checks refuse or convert


def keep(kept: dict[Kind, Value], key: Kind, value: Value) -> None:
    """Among the latest few thousand: lengths may differ from step to step."""
    if len(kept) >= _MOST:
        kept.clear()
    kept[key] = value


def known(key: Key | None) -> AttentionCall | None:
    """A call that is alike, without its tensors, if there was one."""
    return found(_known, key)


def remembered(key: Key | None, call: AttentionCall) -> AttentionCall:
    """``call``, which passed its checks, kept under ``key`` with a signature if its arguments are plain ones."""
    if key is None or call.is_empty or not is_plain(key):
        return call
    call = AttentionCall._make((*call[:-1], Signature()))
    keep(_known, key, call.with_tensors())
    return call


def is_plain(key: Key) -> bool:
    """Whether neither tensors nor values can change, or mean something else to an equal key."""
    tensors, values, _ = key
    return all([x is None or x[0] in _TENSORS for x in tensors]) and _VALUES.issuperset(map(type, values))
