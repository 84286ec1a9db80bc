"""Check the numbers of a call (scale, window, lengths, ...) and convert them to what a cache key may hold."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flash_attn_compat.core import checks, torch_state
from flash_attn_compat.core.inputs import Options


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


# The function that checks and converts a field of Options, by the type of its default. CHECKS has three exceptions.
_BY_TYPE: dict[type, Callable[[str, Any], Any]] = {
    int: integer,
    float: checks.number,
    bool: lambda name, value: bool(value),
    type(None): lambda name, value: value,
}
CHECKS = {name: _BY_TYPE[type(default)] for name, default in Options._field_defaults.items()} | {
    "causal": lambda name, value: checks.causal(value),
    "softcap": lambda name, value: checks.softcap(value),
    "softmax_scale": lambda name, value: None if value is None else checks.number(name, value),
}
_TYPES = {name: type(default) for name, default in Options._field_defaults.items()}
_PLAIN = frozenset({int, float, type(None)})
# integers_of(options) returns the fields that must be ints.
integers_of = operator.itemgetter(*[at for at, kind in enumerate(_TYPES.values()) if kind is int])


def checked(options: Options) -> Options:
    """Return options of plain Python numbers only, as a cache key needs: the same object if they are plain already.

    Raises RuntimeError: a value cannot be converted, such as a window bound that is no integer
    """
    kinds = zip(options, _TYPES.values())
    if all([type(value) is kind or (kind is type(None) and type(value) in _PLAIN) for value, kind in kinds]):
        return options
    return Options(*[CHECKS[name](name, value) for name, value in options._asdict().items()])


def split_descales(k_descale: object, v_descale: object) -> tuple[tuple[Any, Any], tuple[float, float]]:
    """Split descales by type: return (k_descale, v_descale), tensors or None, and (k_factor, v_factor), numbers or 1.0.

    Raises RuntimeError for a number that is not positive and finite, and for any other type.
    """
    if k_descale is None and v_descale is None:  # as in most calls
        return _NO_DESCALES
    k_tensor, v_tensor = (x if isinstance(x, Tensor) else None for x in (k_descale, v_descale))
    k_factor, v_factor = (
        1.0 if x is None or isinstance(x, Tensor) else checks.descale_factor(name, x)
        for name, x in (("k_descale", k_descale), ("v_descale", v_descale))
    )
    return (k_tensor, v_tensor), (k_factor, v_factor)


_NO_DESCALES = (None, None), (1.0, 1.0)
