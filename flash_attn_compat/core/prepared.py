"""The cache of prepared calls: a request finds the checked call, its backend and its run by one key.

The key of a request is its kind, its values, the signatures of its tensors (shape, strides, dtype, device, alignment)
and its context: settings, autocast, PyTorch's active flash implementation. A tensor's identity, address and version are
not in the key: ``x.data = y`` keeps all three under a new shape. Each call still checks the numbers in its tensors.
Entries are added and dropped in this file alone, the oldest first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import torch_state
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, BackwardResult, Gradients, Result
from flash_attn_compat.core.torch_state import transforms_are_on

MOST = 4096
# Types of tensors that have memory of their own and no property that a key lacks.
PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})

Key = Hashable
# q, k, v and the others in the order of AttentionCall.with_tensors; after them, for a cache, the tensors of Append.
Tensors = tuple[Any, ...]
# Computes each call of one key, from a request's tensors and length.
Run = Callable[[Tensors, int | None], Result]
# Computes gradients from (tensors, upstream, into), and writes them into the last if that is not None.
BackwardRun = Callable[[Tensors, BackwardInputs, Gradients | None], BackwardResult]


class Alike(NamedTuple):
    """The properties shared by every call with the same cache key, shown by one such call.

    whole: ``call`` over all slots of a cache; it differs from ``call`` where the cache's length is an int, which is in
        no key
    new: the keys and values that ``call`` appends, or None
    bind: returns the call and its Append for other tensors and another length
    check: raises for numbers (lengths, positions) that do not fit; None where the host can read none of them
    """

    call: AttentionCall
    whole: AttentionCall
    new: Append | None
    bind: Callable[[Tensors, int | None], tuple[AttentionCall, Append | None]]
    is_over_cache: bool = False
    check: Callable[[Request], None] | None = None

    @property
    def tensors(self) -> Tensors:
        return self.whole.tensors if self.new is None else (*self.whole.tensors, *self.new[:4])


def shared_properties(call: AttentionCall, check: Callable[[Request], None] | None = None) -> Alike:
    """Return the shared properties of calls over tensors with the signatures of ``call``'s."""
    described = call.with_tensors()
    return Alike(call, call, None, lambda tensors, length: (described.with_tensors(*tensors), None), check=check)


@dataclass(frozen=True, eq=False)
class RequestKind:
    """How a family of functions (dense, packed, over a cache) turns a request into a call.

    build: checks shapes, dtypes and values and returns the shared properties; numbers in tensors are checked per call
    appended: returns the request that is left once its new keys are in the cache, with a rotated q
    """

    name: str
    build: Callable[[Request], Alike]
    appended: Callable[[Request, Tensor], Request] | None = None


@dataclass(eq=False, slots=True)
class Request:
    """The arguments of one function call, immutable.

    values: hashable arguments that are no tensors
    length: an int cache_seqlens, which holds for all sequences and is in no key; None otherwise
    """

    kind: RequestKind
    tensors: Tensors
    values: tuple[Any, ...]
    length: int | None = None


@dataclass(eq=False, slots=True)
class Known:
    """A prepared call: everything that follows from a cache key.

    call: the checked call without its tensors
    backend: None where nothing is to be computed
    run: computes the call; None for a backward alone
    check: as in Alike
    memory: the table that holds this entry, while that table is the current one
    backward: (backend, run) of the backward, by the signatures of the upstream gradients
    """

    call: AttentionCall
    backend: Any
    run: Run | None
    check: Callable[[Request], None] | None
    memory: Memory
    backward: dict[Key, tuple[Any, BackwardRun]] = field(default_factory=dict)


class Memory:
    """Two tables: prepared calls by key, and chosen backends by traits (which many keys share)."""

    def __init__(self) -> None:
        self.known: dict[Key, Known] = {}
        self.decisions: dict[Key, Any] = {}


_adding = threading.Lock()
_current = Memory()
Kept = TypeVar("Kept")


def current() -> Memory:
    return _current


def forget() -> None:
    """Discard all prepared calls and decisions: a backend's abilities have changed in a way that no key shows.

    Entries added concurrently land in the discarded table.
    """
    global _current  # noqa: PLW0603
    _current = Memory()


def keep(table: dict[Key, Kept], key: Key, value: Kept, most: int | None = None) -> None:
    """Add an entry to a table and drop the oldest beyond ``most`` (default MOST) entries."""
    with _adding:
        while len(table) >= (most or MOST):
            del table[next(iter(table))]
        table[key] = value


def look_up(request: Request) -> tuple[Key | None, Known | None]:
    """Return the cache key of a request and its prepared call, or None for each that does not exist."""
    if transforms_are_on():
        return None, None
    tensors = request.tensors
    try:
        key = request.kind, request.values, tensor_signatures(tensors), context_key(tensors[0])
    except (AttributeError, RuntimeError):
        return None, None  # q is no tensor, or a tensor has no address: the checks name the argument
    return key, _current.known.get(key)


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
