"""Prepared calls of flex_attention: how a call runs that differs from an earlier one in its tensors' values alone.

A key holds everything else that may change between two calls: of each tensor its type, shape, strides, dtype, device
and alignment, the options, the settings and the policy. An eager call's functions are in it as weak references to their
graphs, a compiled call's as C++. No tensor and no graph is kept alive. Captured numbers have a look-up of their own,
since only the prepared functions say which they are.

Reading all that costs Python half of a warm call. So a call is first compared with the latest calls of its functions
by PyTorch's guards, as in ``dispatch/call_cache.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core.entry import PLAIN
from flash_attn_compat.dispatch import call_cache
from flash_attn_compat.torch_flex.functions import Functions, is_graph

_MOST, _MOST_NUMBERS = 2048, 256
_prepared: dict[Hashable, Prepared] = {}
_context, _are_unset = settings.context, settings.are_unset  # functions in C


class Prepared:
    """What calls of one key share: their functions, and a run for each tuple of captured numbers."""

    __slots__ = "functions", "runs"

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self.runs: dict[Hashable, Callable[..., Any]] = {}


def find(key: Hashable) -> Prepared | None:
    """Return the prepared call of a key, or None."""
    return _prepared.get(key)


def keep(key: Hashable, functions: Functions, numbers: tuple[int, ...], run: Callable[..., Any]) -> Prepared:
    """Add the run for a key and captured numbers, and return the prepared call."""
    found = _prepared.get(key)
    if found is None:
        found = Prepared(functions)
        call_cache.keep(_prepared, key, found, _MOST)
    call_cache.keep(found.runs, numbers, run, _MOST_NUMBERS)
    return found


def name_of(score_mod: Any, mask_mod: Any) -> Hashable:
    """Return an eager call's functions for a key; None unless both are graphs.

    Weak references are equal while their graphs live and are the same; a dead one equals only itself.
    """
    return (weakref.ref(score_mod), weakref.ref(mask_mod)) if is_graph(score_mod) and is_graph(mask_mod) else None


def make_key(fixed: Hashable, aligned: Iterable[Tensor | None], others: Iterable[Any]) -> Hashable:
    """Return a key.

    fixed: the functions and options; aligned: tensors whose alignment matters
    others: lists of blocks, captured tensors and numbers
    """
    return (
        fixed, _context(), _are_unset() or settings.values(),
        tuple([
            None if x is None else (x.shape, x.stride(), x.dtype, x.device, type(x), x.is_neg(), x.data_ptr() & 15)
            for x in aligned
        ]),
        tuple([
            (x.shape, x.stride(), x.dtype, x.device, type(x), x.is_neg()) if isinstance(x, Tensor) else type(x)
            for x in others
        ]),
    )  # fmt: skip


# ---- Guards


class Guarded(NamedTuple):
    """What is kept for calls that a guard finds. known: what else their caller needs to know"""

    run: Callable[..., Any]
    known: Any


_guards: call_cache.Guards = {}


def find_guarded(fixed: Hashable, tensors: Sequence[Any]) -> Guarded | None:
    """Return what was kept for a call like this one in all but values, or None.

    fixed: the functions and options; tensors: all tensors of the call, with None for those that are missing
    """
    found: Guarded | None = call_cache.find_guarded(_guards, fixed, tensors)
    return found


def guard(fixed: Hashable, tensors: Sequence[Any], run: Callable[..., Any], known: Any) -> None:
    """Let ``find_guarded`` find calls like this one, if PyTorch's guards can compare its tensors."""
    if all(x is None or type(x) in PLAIN for x in tensors):
        call_cache.add_guard(_guards, fixed, tensors, Guarded(run, known))
