"""Read untrusted JSON into values of expected types, and make text safe to print."""

from __future__ import annotations

import math
import types
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Wanted = TypeVar("Wanted")

# Unicode categories of characters that terminals obey: control and format characters, surrogates, line separators.
_OBEYED = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def printable(text: str) -> str:
    """Return the text with Python's escapes for terminal control characters; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        ascii(letter)[1:-1] if unicodedata.category(letter) in _OBEYED and letter not in "\n\t" else letter
        for letter in text
    )


def value_of(kind: type[Wanted], given: object) -> Wanted:
    """Return ``given``, a result of json.loads, as a dataclass, NamedTuple or generic type of these.

    Fields with a default may be missing; unknown fields are dropped; text becomes printable. Raises TypeError,
    KeyError, ValueError or OverflowError for anything else, such as infinite numbers or tuples of a wrong length.
    """
    return cast("Wanted", _value(kind, given))


def _value(kind: Any, given: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _of_fields(kind, given)
    if origin in (Union, types.UnionType):
        return _first(arguments, given)
    if origin is Literal:
        return _checked(given, given in arguments)
    if kind in (str, bool, int, float, type(None)):
        return _plain(kind, given)
    if origin is not None and issubclass(origin, Mapping):
        names, values = arguments
        pairs = _checked(given, type(given) is dict).items()
        return {_value(names, name): _value(values, each) for name, each in pairs}
    _checked(given, type(given) is list)
    if hasattr(kind, "_fields"):  # a NamedTuple
        hints = [*get_type_hints(kind).values()]
        needed = len(hints) - len(kind._field_defaults)
        return kind(*_each(hints[: max(needed, len(given))], given))
    if origin is tuple:
        return tuple(_each(arguments, given))
    assert issubclass(origin, Sequence), kind
    return [_value(arguments[0], each) for each in given]


def _plain(kind: Any, given: Any) -> Any:
    if kind is float and type(given) is int:
        given = float(given)
    _checked(given, type(given) is kind)
    if kind is float and not math.isfinite(given):
        raise ValueError(f"not finite: {given}")
    return printable(given) if kind is str else given


def _of_fields(kind: Any, given: Any) -> Any:
    _checked(given, type(given) is dict)
    hints, default = get_type_hints(kind), vars(kind)
    wanted = [each.name for each in fields(kind) if each.name in given or each.name not in default]
    return kind(**{name: _value(hints[name], given[name]) for name in wanted})


def _first(kinds: Sequence[Any], given: Any) -> Any:
    for kind in kinds[:-1]:
        try:
            return _value(kind, given)
        except (TypeError, KeyError, ValueError):
            continue
    return _value(kinds[-1], given)


def _each(kinds: Any, given: Sequence[Any]) -> list[Any]:
    return [_value(kind, each) for kind, each in zip(kinds, given, strict=True)]


def _checked(given: Any, is_right: bool) -> Any:
    if not is_right:
        raise TypeError(f"unexpected {type(given).__name__}")
    return given
