"""FLOP formulas of our operators for PyTorch's FlopCounterMode: every row times every key, masked or not, as PyTorch's.

This file does not import the counter's module, because that imports Triton.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_Given = dict[str, Any]


def register_if_needed() -> None:
    """Register the formulas with PyTorch's FLOP counter, if this process has imported it."""
    if "torch.utils.flop_counter" not in sys.modules:
        return
    from torch.utils import flop_counter
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    found = {
        operator: functools.partial(_count, operator, formula)
        for namespace, formulas in _FORMULAS.items()
        for name, formula in formulas.items()
        if (operator := getattr(namespace, name, None)) and operator not in flop_counter.flop_registry
    }
    flop_counter.flop_registry.update(found)  # PyTorch 2.4 does not read what register_flop_formula writes
    for mode in _get_current_dispatch_mode_stack() if found else ():
        # A counter that is active already has its own copy of the registry, from when it was made.
        getattr(getattr(mode, "counter", mode), "flop_registry", {}).update(found)


def _count(operator: Any, formula: Callable[[_Given], int], *arguments: Any, out_val: Any = None) -> int:
    names = [argument.name for argument in operator.default._schema.arguments]
    given = dict(zip(names, arguments))  # trailing arguments with default values are missing
    return formula(given) if "k" in given else 0  # without k it is another library's operator of flash-attn's name


def _forward(given: _Given) -> int:
    return 2 * _pairs(given) * int(given["q"].shape[-1] + given["v"].shape[-1])


def _backward(given: _Given) -> int:
    """Count five products: the scores again, and the gradients of probabilities, values, queries and keys."""
    return 2 * _pairs(given) * int(3 * given["q"].shape[-1] + 2 * given["v"].shape[-1])


def _over_a_cache(given: _Given) -> int:
    q, cache, table = given["q"], given["k_cache"], given["block_table"]
    capacity = cache.shape[1] if table is None else cache.shape[1] * table.shape[1]
    new = 0 if given["k"] is None else given["k"].shape[1]
    used = capacity if given["cache_seqlen"] is None else given["cache_seqlen"] + new
    keys = _values(given["cache_seqlens"])
    total = q.shape[0] * used if keys is None else sum(keys) + new * len(keys)
    return int(2 * total * q.shape[1] * q.shape[2] * (q.shape[-1] + given["v_cache"].shape[-1]))


def _pairs(given: _Given) -> int:
    """Return rows times keys, summed over all heads and sequences."""
    q, k, starts_q = given["q"], given["k"], given.get("cu_seqlens_q")
    if starts_q is None:
        return int(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1])
    rows, keys = _values(starts_q.diff()), _values(given.get("seqused_k"))
    keys = _values(given["cu_seqlens_k"].diff()) if keys is None else keys
    if rows is None or keys is None:  # fake lengths: count the most that they can be
        return int(q.shape[1] * (starts_q.shape[0] - 1) * given["max_seqlen_q"] * given["max_seqlen_k"])
    return int(q.shape[1] * sum(row * key for row, key in zip(rows, keys)))


def _values(tensor: Tensor | None) -> list[int] | None:
    """Return a tensor's values; None for no tensor, or a fake one, which has no values."""
    has_values = type(tensor) is Tensor and not tensor.is_meta
    return tensor.tolist() if tensor is not None and has_values else None


_FORMULAS = {
    torch.ops.flash_attn_compat: {"attention": _forward, "attention_backward": _backward, "kvcache": _over_a_cache},
    torch.ops.flash_attn: {
        **dict.fromkeys(("_flash_attn_forward", "_flash_attn_varlen_forward"), _forward),
        **dict.fromkeys(("_flash_attn_backward", "_flash_attn_varlen_backward"), _backward),
    },
}
