"""Prepared calls of flex_attention: how a call runs that differs from an earlier one in its tensors' values alone.

A key holds everything else that may change between two calls: of each tensor its type, shape, strides, dtype, device
and alignment, the options, the settings and the policy. An eager call's functions are in it as weak references to their
graphs, a compiled call's as C++. No tensor and no graph is kept alive. Captured numbers have a look-up of their own,
since only the prepared functions say which they are.

Reading all that costs Python half of a warm call. So a call is first compared with the latest calls of its functions
by Dynamo's guards, which compare tensors in C++ (``find_latest``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
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


def state() -> tuple[Any, ...]:
    """Return the state outside of the arguments that decides how a call is computed."""
    return _context(), None if _are_unset() else settings.values()


def make_key(fixed: Hashable, aligned: Iterable[Tensor | None], others: Iterable[Any]) -> Hashable:
    """Return a key.

    fixed: the functions, ``state`` and options; aligned: tensors whose alignment matters
    others: lists of blocks, captured tensors and numbers
    """
    return (
        fixed,
        tuple([
            None if x is None else (x.shape, x.stride(), x.dtype, x.device, type(x), x.is_neg(), x.data_ptr() & 15)
            for x in aligned
        ]),
        tuple([
            (x.shape, x.stride(), x.dtype, x.device, type(x), x.is_neg()) if isinstance(x, Tensor) else type(x)
            for x in others
        ]),
    )  # fmt: skip


# ---- The latest calls


class Latest(NamedTuple):
    """A call that may come again.

    fixed: everything that is compared besides tensors
    is_like: Dynamo's comparison with the call's tensors: types, shapes, strides, dtypes, devices and dispatch keys
    known: what the caller of ``keep_latest`` knows of the call besides its run
    """

    fixed: tuple[Any, ...]
    is_like: Callable[..., bool]
    run: Callable[..., Any]
    known: Any


_MOST_LATEST, _MOST_NAMES = 4, 1024
_latest: dict[Hashable, tuple[Latest, ...]] = {}  # by the functions; () where Dynamo cannot compare their tensors
_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def find_latest(name: Hashable, fixed: tuple[Any, ...], tensors: Sequence[Tensor]) -> Latest | None:
    """Return one of the latest calls that a call equals in all but values; None if there is none.

    name: its functions; fixed: what is compared, with the number of tensors, besides tensors; tensors: in any order,
    without None. The caller compares alignment: ``keep_latest`` keeps only calls of aligned tensors
    """
    for each in _latest.get(name, ()):
        if each.fixed == fixed and each.is_like(*tensors):
            return each
    return None


def keep_latest(
    name: Hashable, fixed: tuple[Any, ...], tensors: Sequence[Any], run: Callable[..., Any], known: Any
) -> None:
    """Let ``find_latest`` find calls like this one, if Dynamo can compare its tensors."""
    older = _latest.get(name)
    if older == ():
        return
    guard = _guard_of(tensors)
    new = () if guard is None else (Latest(fixed, guard, run, known), *(older or ())[: _MOST_LATEST - 1])
    _latest.pop(name, None)
    call_cache.keep(_latest, name, new, _MOST_NAMES)


def _guard_of(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """Return a comparison of other tensors with these, which it does not keep; None for tensors that Dynamo refuses."""
    if _Guards is None or not all(isinstance(x, Tensor) and type(x) in PLAIN for x in tensors):
        return None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    is_like: Callable[..., bool] = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return is_like if is_like(*tensors) else None  # no tensors are like these if one of these is there twice


def are_aligned(*tensors: Tensor) -> bool:
    """Return whether the addresses of tensors are multiples of 16."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return not addresses & 15
