"""The package's settings: environment variables, read at each call that they steer, and the backend of use_backend.

A new variable is one line of the table below; its readers call ``value_of`` or ``is_on``. The check of values, the
cache key and the tests follow from the table, and a test compares docs/environment.md with it. An empty value counts as
unset.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

PREFIX = "FLASH_ATTN_COMPAT_"

# The interfaces that can have flash_attn's name, and the version that each reports.
API_VERSIONS = {"2.6": "2.6.3", "2.8": "2.8.3"}
APIS = tuple(API_VERSIONS)
# The compute capabilities of all GPUs that a supported PyTorch, or its NVRTC, compiles for.
CAPABILITIES = (
    "5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.8", "8.9", "9.0",
    "10.0", "10.1", "10.3", "11.0", "12.0", "12.1",
)  # fmt: skip
Reader = Literal["call", "compiler", "patch", "plugin"]


class Variable(NamedTuple):
    """An environment variable.

    choices: the accepted values; empty if any text is accepted here and its reader checks it
    default: the choice that means the same as no value; None if every choice changes something
    read_by: "call" if it may change which backend serves a call or how, so that cache keys hold its value; "compiler"
        if it is read when kernels are compiled or loaded; "patch" if it is read by patch() and an installed name;
        "plugin" if it is read when vLLM starts
    """

    choices: tuple[str, ...]
    default: str | None
    read_by: Reader


VARIABLES: dict[str, Variable] = {}


def _declare(name: str, choices: tuple[str, ...], default: str | None, read_by: Reader) -> str:
    """Enter a variable into VARIABLES and return its full name."""
    VARIABLES[PREFIX + name] = Variable(choices, default, read_by)
    return PREFIX + name


_SWITCH, _TEXT = ("0", "1"), ()
BACKEND = _declare("BACKEND", _TEXT, None, "call")  # dispatch/choice.py checks the name
CAPABILITY = _declare("CAPABILITY", CAPABILITIES, None, "call")
COMPILE = _declare("COMPILE", _SWITCH, "0", "call")
DISABLE_OFFICIAL = _declare("DISABLE_OFFICIAL", _SWITCH, "0", "call")
FUSED = _declare("FUSED", _SWITCH, None, "call")
DEBUG = _declare("DEBUG", _SWITCH, "0", "call")
CACHE = _declare("CACHE", _TEXT, None, "compiler")
TRUST_CACHE = _declare("TRUST_CACHE", _SWITCH, "0", "compiler")
API = _declare("API", APIS, None, "patch")
HUB_KERNELS = _declare("HUB_KERNELS", _SWITCH, "0", "patch")
VARLEN_ATTN = _declare("VARLEN_ATTN", _SWITCH, "0", "patch")
SDPA = _declare("SDPA", ("0", "1", "always"), None, "patch")
FLEX = _declare("FLEX", ("0", "1", "always"), None, "patch")
TRANSFORMERS = _declare("TRANSFORMERS", _SWITCH, None, "patch")
VLLM = _declare("VLLM", _SWITCH, None, "plugin")  # 1 allows releases of vLLM that the tests do not cover

# Every attention call reads several variables. os.environ.get takes a microsecond for an unset one; a look-up in the
# mapping inside os.environ takes a twentieth of that.
_variables: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_keys = {name: name if _variables is os.environ else os.environ.encodekey(name) for name in VARIABLES}
_cache_keys = tuple(_keys[name] for name, variable in VARIABLES.items() if variable.read_by == "call")

# The backend that use_backend names, and whether calls are explained instead of served. One variable, since every call
# reads it.
_context: contextvars.ContextVar[tuple[str | None, bool]] = contextvars.ContextVar(
    "flash_attn_compat_context", default=(None, False)
)
# Cache keys hold ``context()``, and ``values()`` unless ``are_unset()``: two keys are equal in these exactly if all
# settings that calls read are equal. ``context`` and ``are_unset`` are C functions, which cost a call little time.
context = _context.get
are_unset: Callable[[], bool] = functools.partial(_variables.keys().isdisjoint, _cache_keys)


def values() -> tuple[object, ...]:
    """Return the values of all variables that calls read."""
    return tuple(map(_variables.get, _cache_keys))


def value_of(name: str) -> str | None:
    """Return a variable's value, or None if it is unset or empty. Raises ValueError for a value outside its choices."""
    if not _variables.get(_keys[name]):
        return None
    value, choices = os.environ[name], VARIABLES[name].choices
    if choices and value not in choices:
        if name == CAPABILITY:
            expected, hint = f"a compute capability that GPUs have, one of {', '.join(choices)};", _suggest(value)
        else:
            expected, hint = f"{', '.join(choices[:-1])} or {choices[-1]},", ""
        raise ValueError(f"{name} must be {expected} got {value!r}{hint}")
    return value


def is_on(name: str) -> bool:
    """Whether a variable of the choices 0 and 1 is 1. Raises as ``value_of`` does."""
    return value_of(name) == "1"


def check() -> None:
    """Raise ValueError if any variable has a value outside its choices, whether or not this machine would read it.

    Warns of unknown variables with this package's prefix: they are probably misspelt.
    """
    for name in sorted(name for name in os.environ if name.startswith(PREFIX) and name not in VARIABLES):
        _warn_of_unknown(name)
    for name in VARIABLES:
        value_of(name)


@functools.cache
def _warn_of_unknown(name: str) -> None:
    import difflib
    import warnings

    similar = difflib.get_close_matches(name, VARIABLES, 1)
    hint = f"did you mean {similar[0]}?" if similar else "docs/environment.md lists the known ones"
    warnings.warn(f"unknown environment variable {name}: {hint}", stacklevel=3)


def used_backend() -> str | None:
    """Return the backend that use_backend names in this thread or task, or None."""
    return _context.get()[0]


def forced_backend() -> str | None:
    """Return the only backend that may serve, by use_backend in this thread or task or by the variable, or None."""
    return used_backend() or value_of(BACKEND)


def using_backend(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Force the backend ``name`` during a block; with None the variable BACKEND decides."""
    return _enter(name, is_explaining())


def is_explaining() -> bool:
    """Whether calls of this thread or task are explained instead of served."""
    return _context.get()[1]


def explaining() -> contextlib.AbstractContextManager[None]:
    """Explain calls instead of serving them during a block."""
    return _enter(used_backend(), True)


@contextlib.contextmanager
def _enter(name: str | None, explains: bool) -> Iterator[None]:
    token = _context.set((name, explains))
    try:
        yield
    finally:
        _context.reset(token)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the CUDA compute capability that dispatch uses: the forced one (such as 7.5) or the GPU's own."""
    return forced_capability() or device_capability(device)


def forced_capability() -> tuple[int, int] | None:
    """Return the compute capability that the variable forces, or None. Raises as ``value_of`` does."""
    value = value_of(CAPABILITY)
    if value is None:
        return None
    major, _, minor = value.partition(".")
    return int(major), int(minor)


@functools.cache
def device_capability(device: torch.device) -> tuple[int, int]:
    """Return the GPU's own CUDA compute capability."""
    import torch

    return torch.cuda.get_device_capability(device)


def gpu(device: torch.device) -> str | None:
    """Return the GPU's model, with its forced capability if there is one; None for a device other than CUDA's."""
    if device.type != "cuda":
        return None
    name, forced = _device_name(device), forced_capability()
    return name if forced is None else f"{name} as {forced[0]}.{forced[1]}"


@functools.cache
def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device)


def _suggest(text: str) -> str:
    """Return a question that names the capabilities probably meant: 7.5 for 75, sm_75, 7.55, any script's digits."""
    import difflib
    import unicodedata

    digits = "".join(str(unicodedata.digit(letter)) for letter in text if letter.isdigit())
    similar = [known for known in CAPABILITIES if known.replace(".", "") == digits]
    similar = similar or [known for known in CAPABILITIES if known.partition(".")[0] == digits]
    similar = similar or difflib.get_close_matches(text, CAPABILITIES, 1)
    return f": did you mean {' or '.join(similar)}?" if similar else ""
