"""The numbers of a call: from what callers give to what a cache key may hold."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from flash_attn_compat.core import checks, torch_state
from flash_attn_compat.core.call import Options

_PLAIN = frozenset({bool, int, float, str, type(None)})


def checked(options: Options) -> Options:
    """Return options that a cache key may hold: unchanged, or with numbers in the place of tensors and the like.

    Raises RuntimeError: a bound or a longest length is no integer
    """
    left, right = options.window_size_left, options.window_size_right
    longest_q, longest_k = options.max_seqlen_q, options.max_seqlen_k
    has_integers = type(left) is type(right) is type(longest_q) is type(longest_k) is int
    if has_integers and _PLAIN.issuperset(map(type, options)):
        return options
    scale = options.softmax_scale
    return options._replace(
        window_size_left=integer("window_size_left", left),
        window_size_right=integer("window_size_right", right),
        max_seqlen_q=integer("max_seqlen_q", longest_q),
        max_seqlen_k=integer("max_seqlen_k", longest_k),
        dropout_p=checks.number("dropout_p", options.dropout_p),
        causal=checks.causal(options.causal),
        softmax_scale=None if scale is None else checks.number("softmax_scale", scale),
        softcap=checks.softcap(options.softcap),
        deterministic=bool(options.deterministic),
    )


def split_descales(k_descale: object, v_descale: object) -> tuple[tuple[Any, Any], tuple[float, float]]:
    """Return (k_descale, v_descale) as tensors or None, and (k_factor, v_factor), the descales that are numbers.

    Raises RuntimeError for a number that is not positive and finite, and for any other type.
    """
    if k_descale is None and v_descale is None:  # as in most calls
        return _NO_DESCALES
    tensors = [x if isinstance(x, Tensor) else None for x in (k_descale, v_descale)]
    factors = [
        1.0 if x is None or isinstance(x, Tensor) else checks.descale_factor(name, x)
        for name, x in (("k_descale", k_descale), ("v_descale", v_descale))
    ]
    return (tensors[0], tensors[1]), (factors[0], factors[1])


_NO_DESCALES = (None, None), (1.0, 1.0)


def integer(name: str, value: object) -> int:
    """Return ``value`` as an int; it may be a 0-dim tensor of integers or a NumPy integer."""
    if type(value) is int:
        return value
    if isinstance(value, Tensor) and torch_state.is_hidden(value):
        raise RuntimeError(
            f"{name} must be an int here: it is a tensor that a compiler traces, or that vmap gives another axis, so "
            "its number cannot be read"
        )
    try:
        return operator.index(value)  # type: ignore[arg-type]  # or TypeError
    except TypeError:
        raise checks.wrong_type(name, "int", value) from None
