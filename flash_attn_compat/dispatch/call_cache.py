"""The cache of prepared calls: calls with equal cache keys share one entry, with its backend and its run.

A key holds the type of the inputs, the options, the signatures of the tensors (shape, strides, dtype, device,
alignment), a comparison of lengths, and the context: settings, autocast, PyTorch's active flash implementation. For
packed inputs the comparison says whether all sequences have as many queries as keys; for a cache whose length is an
int, whether there are more keys than rows. A key holds no identity, address or version of a tensor, since
``x.data = y`` changes the shape and keeps all three. Each call still checks the numbers in its tensors. Only this file
adds and drops entries, the oldest first.

A key takes six reads of each tensor. So the second call of a key adds a guard, by which one call of PyTorch's C++ finds
the entry of the third.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import torch_state
from flash_attn_compat.core.arguments.build import have_equal_lengths
from flash_attn_compat.core.entry import PLAIN, BackwardRun, Entry, Key
from flash_attn_compat.core.inputs import Inputs, Options, PackedInputs
from flash_attn_compat.core.torch_state import is_any_autocast_on, transforms_are_on

MOST = 4096
_context, _are_unset = settings.context, settings.are_unset  # functions in C


# PyTorch's compiled graphs compare tensors with those of their compilation by this class, in one call of C++: types,
# dtypes, devices, shapes, strides, lazy negation, and the thread's state that decides what operators do with them
# (autocast, gradients, inference mode, transforms, traces). The tensors must be distinct objects.
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_MOST_GUARDS = 4  # of one outline; a call that meets none of them is found by its cache key


class Guard(NamedTuple):
    """Tells whether tensors are like earlier ones, whose addresses were multiples of 16, in less time than a cache key.

    absent: positions of None; twins: positions that hold the object of another position; pick: returns all others
    found: what is kept for calls of such tensors
    """

    absent: list[int]
    twins: list[tuple[int, int]]
    pick: Callable[[Sequence[Any]], tuple[Tensor, ...]]
    matches: Callable[..., bool]
    found: Any


# Guards by outline, which holds all of a cache key except what a guard compares.
Guards = dict[Key, list[Guard]]


class Tables(NamedTuple):
    """The cache's tables: prepared calls by cache key, chosen backends by traits and context, and guards of calls."""

    calls: dict[Key, Entry]
    choices: dict[Key, Any]
    guards: Guards


def empty_tables() -> Tables:
    return Tables({}, {}, {})


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
    try:
        family, tables = type(x), _current
        relation: int | None = None
        if family is PackedInputs:
            relation = x.cu_seqlens_q is x.cu_seqlens_k or have_equal_lengths(x)
        elif length is not None:
            relation = _compare_lengths(x, length)
        # The numbers of elements only tell most calls of other shapes apart.
        outline = family, options, relation, x.q.numel(), x.k.numel()
        found: tuple[Key, Entry] | None = find_guarded(tables.guards, outline, x)
        if found is not None:
            return found
        if transforms_are_on():
            return None, None
        key = family, options, tensor_signatures(x), relation, context_key(x.q)
        entry = tables.calls.get(key)
        if entry is not None:
            add_guard(tables.guards, outline, x, (key, entry))
        return key, entry
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None, None  # q is no tensor, a tensor has no address, or an option no hash: later checks raise


def find_guarded(guards: Guards, outline: Key, tensors: Sequence[Any]) -> Any:
    """Return what ``add_guard`` kept for tensors like these in the current context, or None."""
    if transforms_are_on():
        return None
    context = _context(), _are_unset() or settings.values(), torch_state.flash_implementation()
    for absent, twins, pick, matches, found in guards.get((outline, context), ()):
        for at in absent:
            if tensors[at] is not None:
                break
        else:
            for at, first in twins:
                if tensors[at] is not tensors[first]:
                    break
            else:
                picked = pick(tensors)
                if _may_be_compared(picked) and matches(*picked):
                    return found
    return None


def _may_be_compared(tensors: Sequence[Any]) -> bool:
    """Whether all are aligned tensors, none of them nested: PyTorch's guards end the process at a nested one."""
    try:
        for tensor in tensors:
            if tensor.is_nested or tensor.data_ptr() & 15:
                return False
    except AttributeError:  # None or a number, where an earlier call had a tensor
        return False
    return True


def add_guard(guards: Guards, outline: Key, tensors: Sequence[Any], found: Any) -> None:
    """Keep ``found`` for tensors like these in this context, unless one is unaligned or there are guards enough.

    outline: all of a cache key except the context and what a guard compares
    """
    context = _context(), _are_unset() or settings.values(), torch_state.flash_implementation()
    known, first = guards.get((outline, context), []), {id(x): at for at, x in reversed([*enumerate(tensors)])}
    absent = [at for at, x in enumerate(tensors) if x is None]
    twins = [(at, first[id(x)]) for at, x in enumerate(tensors) if x is not None and first[id(x)] != at]
    others = [at for at, x in enumerate(tensors) if x is not None and first[id(x)] == at]
    picked = [tensors[at] for at in others]
    if len(known) >= _MOST_GUARDS or len(picked) < 2 or not _guards_are_exact():
        return
    if not _may_be_compared(picked):
        return
    matches = _make_matcher(picked)
    keep(guards, (outline, context), [*known, Guard(absent, twins, operator.itemgetter(*others), matches, found)])


def _make_matcher(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    shapes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    matches: Callable[..., bool]
    matches = _TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return matches


@functools.cache
def _guards_are_exact() -> bool:
    """Whether PyTorch's guards tell apart all that cache keys tell apart. Their class is private, and may change.

    Tried in a new thread: inside a compiled graph PyTorch excludes autocast, which then changes nothing for guards.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_try_guards).result()


def _try_guards() -> bool:
    try:
        tensor, second = (torch.zeros(2, 2, 3, dtype=torch.float32, device="cpu") for _ in range(2))
        others = (
            tensor[:1], tensor[:, :, None], tensor.transpose(0, 1), tensor.double(), tensor.to("meta"),
            torch._neg_view(tensor), torch.nn.Parameter(tensor), None,
        )  # fmt: skip
        matches = _make_matcher([tensor, second])
        if not matches(tensor.clone(), second) or any([matches(other, second) for other in others]):
            return False
        with torch.autocast("cpu", enabled=not torch_state.autocasts(tensor)):
            return not matches(tensor, second)
    except (AttributeError, RuntimeError, TypeError):
        return False


def _compare_lengths(x: Inputs, length: int) -> int | None:
    """Return 1, 0 or -1 as a call over a cache has more, as many or fewer keys than rows; None without keys.

    The choice of the backend depends on it.
    """
    keys, rows = length + (0 if x.k_new is None else x.k_new.shape[1]), x.q.shape[1]
    return (keys > rows) - (keys < rows) if keys > 0 else None


def look_up_backward(
    entry: Entry, q: Tensor, tensors: Sequence[Any]
) -> tuple[Key | None, tuple[Any, BackwardRun] | None]:  # fmt: skip
    """Return the cache key of a backward of ``entry``, None if it can have none, and its (backend, run) or None.

    tensors: those of the backward, q among them
    """
    try:
        outline = len(tensors)
        found: tuple[Key, tuple[Any, BackwardRun]] | None = find_guarded(entry.guards, outline, tensors)
        if found is not None:
            return found
        key = tensor_signatures(tensors), context_key(q)
        kept = entry.backward.get(key)
        if kept is not None:
            add_guard(entry.guards, outline, tensors, (key, kept))
        return key, kept
    except RuntimeError:
        return None, None


def tensor_signatures(tensors: Iterable[Tensor | None]) -> Key:
    """Return (shape, strides, dtype, device, address modulo 16, whether it is lazily negated) of each tensor.

    True stands for the strides of a contiguous tensor. Raises RuntimeError for types that are not PLAIN.
    """
    return tuple([
        None if x is None
        else (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.is_neg())
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
