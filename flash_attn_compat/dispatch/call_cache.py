"""The cache of prepared calls: equal keys lead to one checked call, its backend and its run.

A key holds the inputs' type, the scalars and flags, the signatures of the tensors (shape, strides,
dtype, device, alignment) and the context: settings, autocast, PyTorch's active flash implementation. A tensor's
identity, address and version are not in the key: ``x.data = y`` keeps all three under a new shape. Each call still
checks the numbers in its tensors. ``settled`` and ``hashable`` make the parts of a key. Entries are added and dropped
in this file alone, the oldest first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import checks, torch_state
from flash_attn_compat.core.arguments import dense, integer, packed
from flash_attn_compat.core.cache_arguments import over_cache
from flash_attn_compat.core.call import (
    EQUAL_LENGTHS,
    TRANSFORMED,
    AttentionCall,
    CacheInputs,
    DenseInputs,
    Inputs,
    PackedInputs,
    Scalars,
)
from flash_attn_compat.core.prepared import PLAIN, Key, Prepared
from flash_attn_compat.core.torch_state import is_any_autocast_on, transforms_are_on

MOST = 4096
_VALUES = frozenset({bool, int, float, str, type(None)})
_INTEGERS = [
    Scalars._fields.index(name) for name in ("window_size_left", "window_size_right", "max_seqlen_q", "max_seqlen_k")
]
_DEFAULTS = Scalars()
_BUILDS: dict[type, Any] = {DenseInputs: dense, PackedInputs: packed, CacheInputs: over_cache}


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


def settled(x: Inputs, flags: int = 0) -> tuple[Inputs, int]:
    """Return the inputs and flags of a call over no cache as ``find`` (serve.py) takes them. Nothing is checked."""
    if type(x) is not PackedInputs:
        return x, flags
    starts_q, starts_k = x.cu_seqlens_q, x.cu_seqlens_k
    if x.block_table is not None:  # cu_seqlens_k gives lengths only
        if x.seqused_k is None and isinstance(starts_k, Tensor) and starts_k.dim() == 1:
            x = x._replace(seqused_k=starts_k[1:] - starts_k[:-1])
        return x, flags
    if x.seqused_k is not None or x.leftpad_k is not None:
        return x, flags
    if starts_q is starts_k or (not flags & TRANSFORMED and _hold_the_same(starts_q, starts_k)):
        flags |= EQUAL_LENGTHS
    return x, flags


def build(x: Inputs, scalars: tuple[Any, ...], flags: int, length: int | None) -> Prepared:
    """Check a call and return it without a backend. scalars: as ``hashable`` returns them"""
    prepared: Prepared = _BUILDS[type(x)](x, scalars, flags, length)
    return prepared


def call_of(inputs: Inputs, scalars: Scalars = _DEFAULTS, flags: int = 0) -> AttentionCall:
    """Return the checked call of these arguments. Raises as checks.dense and checks.packed do."""
    inputs, flags = settled(inputs, flags)
    return build(inputs, hashable(scalars), flags, None).call


def look_up(x: Inputs, scalars: tuple[Any, ...], flags: int) -> tuple[Key | None, Prepared | None]:
    """Return the cache key of a call and its prepared call, or None for each that does not exist."""
    if transforms_are_on():
        return None, None
    try:
        key = type(x), scalars, flags, tensor_signatures(x), context_key(x.q)
        return key, _current.calls.get(key)
    except (AttributeError, RuntimeError, TypeError):
        return None, None  # q is no tensor, a tensor has no address, a scalar has no hash: the checks name it


def hashable(scalars: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return scalars that may be kept in a cache key: unchanged, or with numbers in the place of tensors and the like.

    scalars: the fields of Scalars as the caller gave them, and further values that are hashable
    Raises:
        RuntimeError: a bound or a longest length is no integer
    """
    if _VALUES.issuperset(map(type, scalars)) and {type(scalars[index]) for index in _INTEGERS} == {int}:
        return scalars
    dropout_p, scale, causal, left, right, softcap, deterministic, longest_q, longest_k, *others = scalars
    left, right = integer("window_size_left", left), integer("window_size_right", right)
    longest_q, longest_k = integer("max_seqlen_q", longest_q), integer("max_seqlen_k", longest_k)
    if not _VALUES.issuperset(map(type, (dropout_p, scale, causal, softcap, deterministic))):
        dropout_p, causal = checks.number("dropout_p", dropout_p), checks.causal(causal)
        scale = None if scale is None else checks.number("softmax_scale", scale)
        softcap, deterministic = checks.softcap(softcap), bool(deterministic)
    return dropout_p, scale, causal, left, right, softcap, deterministic, longest_q, longest_k, *others


def backward_key(tensors: tuple[Any, ...]) -> Key | None:
    """Return the cache key of a backward's tensors; None where it cannot be cached."""
    try:
        return tensor_signatures(tensors), context_key(tensors[0])
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
        settings.context(),
        None if settings.are_unset() else settings.values(),
        (is_any_autocast_on() or not (tensor.is_cuda or tensor.is_cpu)) and torch_state.autocasts(tensor),
        torch_state.flash_implementation(),
    )


def _hold_the_same(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> bool:
    """Whether both hold the same numbers, as far as the host can read them without waiting for a GPU."""
    if not isinstance(cu_seqlens_q, Tensor) or not isinstance(cu_seqlens_k, Tensor):
        return False
    if cu_seqlens_q.is_nested or cu_seqlens_k.is_nested:
        return False  # the checks name it
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.device != cu_seqlens_k.device:
        return False
    if cu_seqlens_q.device.type == "cpu":
        return torch.equal(cu_seqlens_q, cu_seqlens_k)
    return cu_seqlens_q.is_cuda and cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr()
