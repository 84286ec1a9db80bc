"""A prepared call: everything that calls with one cache key share. dispatch/call_cache.py keeps them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from flash_attn_compat.core.call import AttentionCall, BackwardInputs, BackwardResult, Gradients, Result
from flash_attn_compat.core.inputs import Inputs, Options

# Types of tensors that have memory of their own. A cache key holds every property of theirs that matters.
PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})

Key = Hashable

# Computes gradients from (inputs, upstream, into), and writes them to the tensors ``into`` unless that is None.
BackwardRun = Callable[[Inputs, BackwardInputs, Gradients | None], BackwardResult]
# Raises if the length, or the lengths and positions in the tensors, are out of range.
Check = Callable[[Inputs, int | None], None]


class Run(Protocol):
    """The function that computes every call of one cache key.

    length: cache_seqlens if that is an int, else None
    out: memory that no input shares. A run may write the result's ``out`` there and return it, or leave it alone and
        return another. A run that appends raises before if checks.is_writable_out does
    """

    def __call__(self, x: Inputs, length: int | None, out: Tensor | None = None, /) -> Result: ...


def never_run(x: Inputs, length: int | None, out: Tensor | None = None) -> Result:
    raise AssertionError("a backward alone is never run forward")


@dataclass(eq=False, slots=True)
class Entry:
    """Everything that follows from a cache key: a checked call, its backend and its runs.

    options: those of the cache key, as plain Python numbers
    call: the checked call, without its tensors
    check: the check that every call repeats; None if the host can read no lengths or positions
    backend: None where nothing is to be computed
    run: the forward; raises AssertionError if the entry is for a backward alone
    tables: the cache tables that hold this entry; once they are discarded, so is the entry
    backward: (backend, run) of the backward, by the shapes, strides and dtypes of the incoming gradients
    guards: of dispatch/call_cache.py, which find the same in less time
    """

    options: Options
    call: AttentionCall
    check: Check | None
    backend: Any
    run: Run
    tables: object
    backward: dict[Key, tuple[Any, BackwardRun]] = field(default_factory=dict)
    guards: dict[Key, Any] = field(default_factory=dict)
