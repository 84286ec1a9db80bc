"""What calls that are alike share is found once: a request finds one object that holds all of it.

Alike are requests of one kind for the same values, over tensors of the same shapes, strides, dtypes, devices and
alignment, in the same surroundings: settings, autocast, what PyTorch has active. Never by identity, address or version:
``x.data = y`` keeps all three under a new shape. Each call looks at what depends on numbers or on state. Here alone is
something added and forgotten, the oldest first.
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
from flash_attn_compat.core.call import AttentionCall, Derived, Gradients, Result, Upstream
from flash_attn_compat.core.torch_state import transforms_are_on

MOST = 4096
# Types whose objects have memory of their own, and nothing but what a key holds.
PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})

Key = Hashable
# q, k and v first, then as AttentionCall.with_tensors takes them; behind those what a cache is given: Append's tensors.
Tensors = tuple[Any, ...]
# Computes every call that is alike; takes a request's tensors and length.
Run = Callable[[Tensors, int | None], Result]
# The same for gradients, which are written into the last where that is given; tensors[RNG_STATE] is the dropout's.
BackwardRun = Callable[[Tensors, Upstream, Gradients | None], Derived]


class Alike(NamedTuple):
    """All calls that are alike, by the one of them that is made.

    whole: ``call`` over all of a cache's slots, where its length is a number, which may differ among the calls
    new: what it appends; bind: makes another one, and what that appends, of a request's tensors and length
    check: raises for numbers that do not fit; None where the host sees none of them
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


def alike_to(call: AttentionCall, check: Callable[[Request], None] | None = None) -> Alike:
    """All calls that take tensors like those of ``call``."""
    described = call.with_tensors()
    return Alike(call, call, None, lambda tensors, length: (described.with_tensors(*tensors), None), check=check)


@dataclass(frozen=True, eq=False)
class RequestKind:
    """A function's manner of asking.

    build: checks a request, but for the numbers in its tensors, which the check of what it returns looks at
    appended: the rest of a request whose new keys have been written, with another q
    """

    name: str
    build: Callable[[Request], Alike]
    appended: Callable[[Request, Tensor], Request] | None = None


@dataclass(eq=False, slots=True)
class Request:
    """What every function makes of its arguments; it is not changed.

    values: plain ones, everything that is no tensor; length: a cache's, where the host knows it for all sequences
    """

    kind: RequestKind
    tensors: Tensors
    values: tuple[Any, ...]
    length: int | None = None


@dataclass(eq=False, slots=True)
class Known:
    """All that follows from a request but for the numbers in its tensors.

    call: checked, without its tensors; backend: None where there is nothing to compute; run: None where the call is
    a backward alone; check: as Alike has it; backward: who computes gradients and how, by the layout of what comes from
    above; memory: what it is part of, as long as that is the current one
    """

    call: AttentionCall
    backend: Any
    run: Run | None
    check: Callable[[Request], None] | None
    memory: Memory
    backward: dict[Key, tuple[Any, BackwardRun]] = field(default_factory=dict)


class Memory:
    """What is known, by requests' keys; and which backend is chosen, by traits, for requests of new shapes."""

    def __init__(self) -> None:
        self.known: dict[Key, Known] = {}
        self.decisions: dict[Key, Any] = {}


_adding = threading.Lock()
_current = Memory()
Kept = TypeVar("Kept")


def current() -> Memory:
    return _current


def forget() -> None:
    """Begin anew: what a backend can serve, or how, has changed for a reason that no key shows.

    What is being prepared meanwhile goes into the memory that nobody asks any more.
    """
    global _current  # noqa: PLW0603
    _current = Memory()


def keep(table: dict[Key, Kept], key: Key, value: Kept, most: int | None = None) -> None:
    """In a table of what is known, of decisions, or of one call's backwards, of which there are few."""
    with _adding:
        while len(table) >= (most or MOST):
            del table[next(iter(table))]
        table[key] = value


def look_up(request: Request) -> tuple[Key | None, Known | None]:
    """The key of a request, equal for those that are alike, and what is known of them; no key where nothing is kept."""
    if transforms_are_on():
        return None, None
    tensors = request.tensors
    try:
        key = request.kind, request.values, layouts(tensors), surroundings(tensors[0])
    except (AttributeError, RuntimeError):
        return None, None  # q is none, or a tensor has no address: the checks say it better
    return key, _current.known.get(key)


def key_of(tensors: Tensors) -> Key | None:
    """Of a backward's, behind those of its request; None where nothing is kept."""
    try:
        return layouts(tensors), surroundings(tensors[0])
    except RuntimeError:
        return None


def layouts(tensors: Iterable[Tensor | None]) -> Key:
    """All of tensors but their numbers, and where beyond 16 bytes they lie. Raises RuntimeError for types not PLAIN.

    Strides follow from the shape of what is contiguous, but for those along axes of one element, which lead nowhere.
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


def surroundings(tensor: Tensor) -> Key:
    """What is not a call's own, and decides how it is computed."""
    return settings.fingerprint(), torch_state.autocasts(tensor), torch_state.flash_implementation()
