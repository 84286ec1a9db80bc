"""The cache of prepared calls: equal keys lead to one checked call, its backend and its run.

A key holds the function that builds the call, the scalars and flags, the signatures of the tensors (shape, strides,
dtype, device, alignment) and the context: settings, autocast, PyTorch's active flash implementation. A tensor's
identity, address and version are not in the key: ``x.data = y`` keeps all three under a new shape. Each call still
checks the numbers in its tensors. ``keyed`` and ``hashable`` make the parts of a key. Entries are added and dropped in
this file alone, the oldest first.
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
from flash_attn_compat.core.call import EQUAL_LENGTHS, NO_TENSORS, TENSORS, TRANSFORMED, AttentionCall, Scalars
from flash_attn_compat.core.prepared import PLAIN, Build, Key, Prepared, Tensors
from flash_attn_compat.core.torch_state import is_any_autocast_on, transforms_are_on

MOST = 4096
_VALUES = frozenset({bool, int, float, str, type(None)})
_INTEGERS = [
    Scalars._fields.index(name) for name in ("window_size_left", "window_size_right", "max_seqlen_q", "max_seqlen_k")
]
_DENSE_COUNTS = TENSORS.index("alibi_slopes") + 1, TENSORS.index("bias") + 1
_PACKED_COUNT = TENSORS.index("cu_seqlens_k") + 1
_DEFAULTS = Scalars()
# A call's family, tensors, scalars and flags, as ``find`` takes them.
Keyed = tuple[Build, Tensors, tuple[Any, ...], int]


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


def keyed(tensors: Tensors, scalars: tuple[Any, ...], flags: int = 0) -> Keyed:
    """Return the arguments of ``find`` (serve.py) for a dense call, or for a packed or paged one.

    Args:
        tensors: not checked here, in the order of TENSORS. Of a dense call as far as alibi_slopes, or as far as bias;
            of a packed one at least as far as cu_seqlens_k, at most as far as v_descale. With block_table cu_seqlens_k
            gives lengths only
        scalars: the fields of Scalars as the caller gave them, returned unchanged
    Returns:
        The family's build, and the others as ``find`` takes them.
    """
    count = len(tensors)
    if count == _PACKED_COUNT:
        starts_q, starts_k = tensors[4:]
        if starts_q is starts_k or (not flags & TRANSFORMED and _hold_the_same(starts_q, starts_k)):
            flags |= EQUAL_LENGTHS
        return packed, tensors, scalars, flags
    if count in _DENSE_COUNTS:
        return dense, tensors, scalars, flags
    q, k, v, slopes, starts_q, starts_k, used, leftpad, table, k_descale, v_descale = (*tensors, *NO_TENSORS)[:11]
    if table is not None:
        if used is None and isinstance(starts_k, Tensor) and starts_k.dim() == 1:
            used = starts_k[1:] - starts_k[:-1]
        tensors = (
            q, k, v, slopes, starts_q, None, used, leftpad, table, k_descale, v_descale, None, None, starts_k,
        )  # fmt: skip
    elif used is None and leftpad is None:
        if k_descale is None and v_descale is None:
            return keyed((q, k, v, slopes, starts_q, starts_k), scalars, flags)
        flags = keyed((q, k, v, slopes, starts_q, starts_k), scalars, flags)[3]
    return packed, tensors, scalars, flags


def call_of(tensors: Tensors, scalars: Scalars = _DEFAULTS, flags: int = 0) -> AttentionCall:
    """Return the checked call of the same arguments. Raises as checks.dense and checks.packed do."""
    build, tensors, _, flags = keyed(tensors, scalars, flags)
    return build(tensors, hashable(scalars), flags, None).call


def look_up(
    build: Build, tensors: Tensors, scalars: tuple[Any, ...], flags: int
) -> tuple[Key | None, Prepared | None]:  # fmt: skip
    """Return the cache key of a call and its prepared call, or None for each that does not exist."""
    if transforms_are_on():
        return None, None
    try:
        key = build, scalars, flags, tensor_signatures(tensors), context_key(tensors[0])
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
