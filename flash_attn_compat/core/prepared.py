"""A prepared call: everything that calls with one cache key share. dispatch/call_cache.py keeps them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import (
    NO_INPUTS,
    AttentionCall,
    BackwardInputs,
    BackwardResult,
    Gradients,
    Inputs,
    Result,
)

# Types of tensors that have memory of their own and no property that a key lacks.
PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})

Key = Hashable
# Computes each call of one key, from its tensors and its length: an int cache_seqlens, which is in no key, or None.
Run = Callable[[Inputs, int | None], Result]
# The same, with the result's ``out`` written to a contiguous tensor of the caller's.
RunInto = Callable[[Inputs, int | None, Tensor], Result]
# Computes gradients from (tensors, upstream, into), and writes them into the last if that is not None.
BackwardRun = Callable[[Inputs, BackwardInputs, Gradients | None], BackwardResult]
# Returns the call over other tensors and another length, and the keys that it appends.
Bind = Callable[[Inputs, int | None], tuple[AttentionCall, Append | None]]
# Raises for numbers (lengths, positions) in tensors or for a length that do not fit.
Check = Callable[[Inputs, int | None], None]


def _never_run(inputs: Inputs, length: int | None) -> Result:
    raise AssertionError("a backward alone is never run forward")


@dataclass(eq=False, slots=True)
class Prepared:
    """Everything that follows from a cache key: a checked call, and after its preparation a backend and a run.

    family: the type of the call's inputs
    scalars, flags: as ``find`` takes them
    call: the checked call; ``seal`` drops its tensors
    bind: as Bind; over all slots of a cache if the length is None
    check: as Check; None where the host can read none of the numbers
    is_over_cache: whether tensors may hold those of Append, and the call may have a length
    whole: the call over all slots of a cache, which differs from ``call`` where the length is an int; None once sealed
    new: the keys and values that the call appends; None for none, and once sealed
    key: the cache key; None for a call that cannot be cached
    backend: None where nothing is to be computed
    run: as Run; of a backward alone it raises AssertionError
    tables: the tables that hold this entry, while they are the current ones
    backward: (backend, run) of the backward, by the signatures of the upstream gradients
    """

    family: type[Inputs]
    scalars: tuple[Any, ...]
    flags: int
    call: AttentionCall
    bind: Bind
    check: Check | None = None
    is_over_cache: bool = False
    whole: AttentionCall | None = None
    new: Append | None = None
    key: Key | None = None
    backend: Any = None
    run: Run = _never_run
    tables: object = None
    backward: dict[Key, tuple[Any, BackwardRun]] = field(default_factory=dict)

    def seal(self, backend: Any, run: Run | None, tables: object) -> None:
        """Note the backend and the run, and let go of the caller's tensors."""
        self.backend, self.run, self.tables = backend, run or _never_run, tables
        self.call, self.whole, self.new = self.call.over(NO_INPUTS), None, None


def checked(
    family: type[Inputs], scalars: tuple[Any, ...], flags: int, call: AttentionCall, check: Check | None = None
) -> Prepared:
    """Return the prepared call, without a backend, of a checked call over no cache."""
    described = call.over(NO_INPUTS)
    bind = lambda inputs, length: (described.over(inputs), None)  # noqa: E731
    return Prepared(family, scalars, flags, call, bind, check, whole=call)
