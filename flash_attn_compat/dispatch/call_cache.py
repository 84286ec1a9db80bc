"""The cache of prepared calls: equal keys lead to one checked call, its backend and its run.

A key holds the function that builds the call, the scalars and flags, the signatures of the tensors (shape, strides,
dtype, device, alignment) and the context: settings, autocast, PyTorch's active flash implementation. A tensor's
identity, address and version are not in the key: ``x.data = y`` keeps all three under a new shape. Each call still
checks the numbers in its tensors. Entries are added and dropped in this file alone, the oldest first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import torch_state
from flash_attn_compat.core.prepared import PLAIN, Build, Key, Prepared, Tensors
from flash_attn_compat.core.torch_state import transforms_are_on

MOST = 4096


class Tables(NamedTuple):
    """Prepared calls by key, and chosen backends by traits and context, which many keys share."""

    calls: dict[Key, Prepared]
    choices: dict[Key, Any]


def empty_tables() -> Tables:
    return Tables({}, {})


_adding = threading.Lock()
_current = empty_tables()
Kept = TypeVar("Kept")


def current() -> Tables:
    return _current


def forget() -> None:
    """Discard all prepared calls and choices: a backend's abilities have changed in a way that no key shows.

    Entries added concurrently land in the discarded tables.
    """
    global _current  # noqa: PLW0603
    _current = empty_tables()


def keep(table: dict[Key, Kept], key: Key, value: Kept, most: int | None = None) -> None:
    """Add an entry to a table and drop the oldest beyond ``most`` (default MOST) entries."""
    with _adding:
        while len(table) >= (most or MOST):
            del table[next(iter(table))]
        table[key] = value


def look_up(
    build: Build, tensors: Tensors, scalars: tuple[Any, ...], flags: int
) -> tuple[Key | None, Prepared | None]:  # fmt: skip
    """Return the cache key of a call and its prepared call, or None for each that does not exist."""
    if transforms_are_on():
        return None, None
    try:
        key = build, scalars, flags, tensor_signatures(tensors), context_key(tensors[0])
    except (AttributeError, RuntimeError):
        return None, None  # q is no tensor, or a tensor has no address: the checks name the argument
    return key, _current.calls.get(key)


def backward_key(tensors: Tensors) -> Key | None:
    """Return the cache key of a backward's tensors; None where it cannot be cached."""
    try:
        return tensor_signatures(tensors), context_key(tensors[0])
    except RuntimeError:
        return None


def tensor_signatures(tensors: Iterable[Tensor | None]) -> Key:
    """Return (shape, strides, dtype, device, address modulo 16) of each tensor.

    True stands for the strides of a contiguous tensor. Raises RuntimeError for types that are not PLAIN.
    """
    return tuple(
        [
            x if x is None else (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device, x.data_ptr() & 15)
            for x in tensors
            if x is None or type(x) is Tensor or _is_plain(x)
        ]
    )


def _is_plain(x: object) -> bool:
    if type(x) not in PLAIN:
        raise RuntimeError("a subclass may see shapes and memory its own way")
    return True


def context_key(tensor: Tensor) -> Key:
    """Return the state outside of the arguments that decides how a call is computed."""
    return settings.fingerprint(), torch_state.autocasts(tensor), torch_state.flash_implementation()
