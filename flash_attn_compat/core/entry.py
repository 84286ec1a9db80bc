"""A prepared call: everything that calls with one cache key share. dispatch/call_cache.py keeps them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.core.call import AttentionCall, BackwardInputs, BackwardResult, Gradients, Result
from flash_attn_compat.core.inputs import Inputs, Options

# Types of tensors that have memory of their own and no property that a key lacks.
PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})

Key = Hashable
# Computes each call of one key, from its inputs and its length: an int cache_seqlens, which is in no key, or None.
Run = Callable[[Inputs, int | None], Result]
# The same, with the result's ``out`` written to a contiguous tensor of the caller's.
RunInto = Callable[[Inputs, int | None, Tensor], Result]
# Computes gradients from (inputs, upstream, into), and writes them into the last if that is not None.
BackwardRun = Callable[[Inputs, BackwardInputs, Gradients | None], BackwardResult]
# Raises for numbers (lengths, positions) in tensors or for a length that do not fit.
Check = Callable[[Inputs, int | None], None]


def never_run(inputs: Inputs, length: int | None) -> Result:
    raise AssertionError("a backward alone is never run forward")


@dataclass(eq=False, slots=True)
class Entry:
    """Everything that follows from a cache key: a checked call, its backend and its runs.

    options: as the key has them, with numbers in the place of tensors
    call: the checked call, without its tensors
    check: as Check; None where the host can read none of the numbers
    backend: None where nothing is to be computed
    run: as Run; of a backward alone it raises AssertionError
    tables: the tables that hold this entry, while they are the current ones
    backward: (backend, run) of the backward, by the signatures of the upstream gradients
    """

    options: Options
    call: AttentionCall
    check: Check | None
    backend: Any
    run: Run
    tables: object
    backward: dict[Key, tuple[Any, BackwardRun]] = field(default_factory=dict)
