"""The cache of prepared calls: calls with equal cache keys share one entry, with its backend and its run.

A key holds the type of the inputs, the options, the signatures of the tensors (shape, strides, dtype, device,
alignment), a comparison of lengths, and the context: settings, autocast, PyTorch's active flash implementation. For
packed inputs the comparison says whether all sequences have as many queries as keys; for a cache whose length is an
int, whether there are more keys than rows. A key holds no identity, address or version of a tensor, since
``x.data = y`` changes the shape and keeps all three. Each call still checks the numbers in its tensors. Only this file
adds and drops entries, the oldest first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import torch_state
from flash_attn_compat.core.arguments.build import have_equal_lengths
from flash_attn_compat.core.entry import PLAIN, Entry, Key
from flash_attn_compat.core.inputs import Inputs, Options, PackedInputs
from flash_attn_compat.core.torch_state import is_any_autocast_on, transforms_are_on

MOST = 4096
_context, _are_unset = settings.context, settings.are_unset  # functions in C


class Tables(NamedTuple):
    """The cache's two tables: prepared calls by cache key, and chosen backends by traits and context."""

    calls: dict[Key, Entry]
    choices: dict[Key, Any]


def empty_tables() -> Tables:
    return Tables({}, {})


_adding = threading.Lock()
_current = empty_tables()
Kept = TypeVar("Kept")


def current() -> Tables:
    return _current


def forget() -> None:
    """Discard all prepared calls and chosen backends, because a backend can do more or less than before.

    Entries that other threads add meanwhile go to the discarded tables.
    """
    global _current  # noqa: PLW0603
    _current = empty_tables()


def keep(table: dict[Key, Kept], key: Key, value: Kept, most: int | None = None) -> None:
    """Add an entry to a table and drop the oldest beyond ``most`` (default MOST) entries."""
    with _adding:
        while len(table) >= (most or MOST):
            del table[next(iter(table))]
        table[key] = value


def look_up(x: Inputs, options: Options, length: int | None) -> tuple[Key | None, Entry | None]:
    """Return a call's cache key, None if it can have none, and its entry, None if there is none yet.

    length: cache_seqlens if it is one int for all sequences, else None
    """
    if transforms_are_on():
        return None, None
    try:
        signatures, family = tensor_signatures(x), type(x)
        relation: int | None = None
        if family is PackedInputs:
            relation = x.cu_seqlens_q is x.cu_seqlens_k or have_equal_lengths(x)
        elif length is not None:
            relation = _compare_lengths(x, length)
        key = family, options, signatures, relation, context_key(x.q)
        return key, _current.calls.get(key)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None, None  # q is no tensor, a tensor has no address, or an option no hash: later checks raise


def _compare_lengths(x: Inputs, length: int) -> int | None:
    """Return 1, 0 or -1 as a call over a cache has more, as many or fewer keys than rows; None without keys.

    The choice of the backend depends on it.
    """
    keys, rows = length + (0 if x.k_new is None else x.k_new.shape[1]), x.q.shape[1]
    return (keys > rows) - (keys < rows) if keys > 0 else None


def backward_key(q: Tensor, tensors: Iterable[Any]) -> Key | None:
    """Return the cache key of a backward's tensors, q among them; None if it cannot be cached."""
    try:
        return tensor_signatures(tensors), context_key(q)
    except RuntimeError:
        return None


def tensor_signatures(tensors: Iterable[Tensor | None]) -> Key:
    """Return (shape, strides, dtype, device, address modulo 16) of each tensor.

    True stands for the strides of a contiguous tensor. Raises RuntimeError for types that are not PLAIN.
    """
    return tuple([
        None if x is None
        else (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device, x.data_ptr() & 15)
        if type(x) is Tensor or type(x) in PLAIN
        else _refuse_subclass(x)
        for x in tensors
    ])  # fmt: skip


def _refuse_subclass(x: object) -> NoReturn:
    raise RuntimeError(f"{type(x).__name__} may see shapes and memory its own way")


def context_key(tensor: Tensor) -> Key:
    """Return the state outside of the arguments that decides how a call is computed."""
    return (
        _context(),
        None if _are_unset() else settings.values(),
        (is_any_autocast_on() or not (tensor.is_cuda or tensor.is_cpu)) and torch_state.autocasts(tensor),
        torch_state.flash_implementation(),
    )
