"""What steers the package: environment variables, read at the call they steer, and the backend of use_backend.

docs/environment.md lists the variables. A value that means nothing raises a ValueError that names the choices; an
empty one counts as not set.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PREFIX = "FLASH_ATTN_COMPAT_"
BACKEND = "FLASH_ATTN_COMPAT_BACKEND"
CAPABILITY = "FLASH_ATTN_COMPAT_CAPABILITY"
COMPILE = "FLASH_ATTN_COMPAT_COMPILE"
DISABLE_OFFICIAL = "FLASH_ATTN_COMPAT_DISABLE_OFFICIAL"
FUSED = "FLASH_ATTN_COMPAT_FUSED"
CACHE = "FLASH_ATTN_COMPAT_CACHE"
TRUST_CACHE = "FLASH_ATTN_COMPAT_TRUST_CACHE"
API = "FLASH_ATTN_COMPAT_API"
HUB_KERNELS = "FLASH_ATTN_COMPAT_HUB_KERNELS"
VARLEN_ATTN = "FLASH_ATTN_COMPAT_VARLEN_ATTN"
SDPA = "FLASH_ATTN_COMPAT_SDPA"
DEBUG = "FLASH_ATTN_COMPAT_DEBUG"
VARIABLES = (
    BACKEND, CAPABILITY, COMPILE, DISABLE_OFFICIAL, FUSED, CACHE, TRUST_CACHE, API, HUB_KERNELS, VARLEN_ATTN, SDPA,
    DEBUG,
)  # fmt: skip

# The releases of flash-attn whose interface can stand under its name, and what each reports as its version.
API_VERSIONS = {"2.6": "2.6.3", "2.8": "2.8.3"}
APIS = tuple(API_VERSIONS)
# The compute capabilities of all GPUs that a supported PyTorch, or its NVRTC, compiles for.
CAPABILITIES = (
    "5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.8", "8.9", "9.0",
    "10.0", "10.1", "10.3", "11.0", "12.0", "12.1",
)  # fmt: skip

# os.environ.get costs a microsecond for a variable that is not set, the mapping inside it a twentieth;
# with six variables that is half of the host time of a whole call.
_variables: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_DECISIVE = (BACKEND, CAPABILITY, COMPILE, DISABLE_OFFICIAL, FUSED, DEBUG)
_keys = tuple(name if _variables is os.environ else os.environ.encodekey(name) for name in _DECISIVE)
_are_unset, _UNSET = _variables.keys().isdisjoint, (None,) * len(_keys)

# The backend that use_backend names, and whether calls are explained instead of served: one, for every call asks.
_asked: contextvars.ContextVar[tuple[str | None, bool]] = contextvars.ContextVar(
    "flash_attn_compat_asked", default=(None, False)
)


def fingerprint() -> tuple[object, ...]:
    """Equal for equal settings: what a remembered decision is valid for."""
    return _asked.get(), _UNSET if _are_unset(_keys) else tuple(map(_variables.get, _keys))


@functools.cache
def _warn_of(name: str) -> None:
    import difflib
    import warnings

    like = difflib.get_close_matches(name, VARIABLES, 1)
    hint = f"did you mean {like[0]}?" if like else "docs/environment.md lists those that are read"
    warnings.warn(f"unknown environment variable {name}: {hint}", stacklevel=3)


def check() -> None:
    """Raise for a value that means nothing, whether or not this machine or call would ask for it.

    Warns of variables with this package's prefix that nobody reads: misspelt ones, most likely.
    """
    for name in sorted(name for name in os.environ if name.startswith(PREFIX) and name not in VARIABLES):
        _warn_of(name)
    for switch in (COMPILE, DISABLE_OFFICIAL, FUSED, TRUST_CACHE, HUB_KERNELS, VARLEN_ATTN, DEBUG):
        _switch(switch)
    forced_capability()
    api()
    sdpa()


def backend_variable() -> str | None:
    """The only backend allowed to serve, unless use_backend names another."""
    return os.environ.get(BACKEND) or None


def used_backend() -> str | None:
    """The backend that use_backend names in this thread or task."""
    return _asked.get()[0]


def named_backend() -> str | None:
    """The only backend allowed to serve, if one was named: use_backend's in this thread or task, or the variable's."""
    return used_backend() or backend_variable()


def using_backend(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Let ``name``, or the variable's, be the named backend for the length of a block."""
    return _asking(name, explains())


def explains() -> bool:
    """Whether calls of this thread or task are explained instead of served."""
    return _asked.get()[1]


def explaining() -> contextlib.AbstractContextManager[None]:
    """Let calls be explained for the length of a block."""
    return _asking(used_backend(), True)


@contextlib.contextmanager
def _asking(name: str | None, explains: bool) -> Iterator[None]:
    token = _asked.set((name, explains))
    try:
        yield
    finally:
        _asked.reset(token)


def _choice(name: str, choices: tuple[str, ...]) -> str | None:
    value = os.environ.get(name)
    if not value:
        return None
    if value not in choices:
        raise ValueError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {value!r}")
    return value


def _switch(name: str) -> bool | None:
    chosen = _choice(name, ("0", "1"))
    return None if chosen is None else chosen == "1"


def _is_on(name: str) -> bool:
    return bool(_switch(name))


# Allow torch.compile inside backends.
compilation_enabled = functools.partial(_is_on, COMPILE)
# Leave an installed flash-attn aside.
official_disabled = functools.partial(_is_on, DISABLE_OFFICIAL)
# 0 forbids this package's own kernels, 1 uses them even where others were faster.
fused = functools.partial(_switch, FUSED)
# Use kept kernels whoever wrote them.
trusts_cache = functools.partial(_is_on, TRUST_CACHE)
# The flash-attn whose interface stands under its name, "2.6" or "2.8".
api = functools.partial(_choice, API, APIS)
# transformers' names of flash kernels on its hub lead to our functions.
hub_kernels = functools.partial(_is_on, HUB_KERNELS)
# torch.nn.attention.varlen runs where torch's kernels do not.
varlen_attn = functools.partial(_is_on, VARLEN_ATTN)


def cache_folder() -> str | None:
    """Where compiled kernels are kept; by default the user's cache directory."""
    return os.environ.get(CACHE) or None


def sdpa() -> str | None:
    """Where PyTorch\'s attention operators run on our kernels: "1" before capability 8.0, "always" on every GPU."""
    wish = _choice(SDPA, ("0", "1", "always"))
    return None if wish == "0" else wish


def debugs() -> bool:
    """Whether values of lengths and pages on a GPU are checked, too, which waits for it."""
    return not _are_unset(_keys) and _is_on(DEBUG)


def capability(device: torch.device) -> tuple[int, int]:
    """The CUDA compute capability dispatch goes by: the forced one (such as 7.5) or the GPU's own."""
    return forced_capability() or device_capability(device)


def forced_capability() -> tuple[int, int] | None:
    if _are_unset(_keys):
        return None
    forced = os.environ.get(CAPABILITY)
    return _parse_capability(forced) if forced else None


@functools.cache
def device_capability(device: torch.device) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(device)


def gpu(device: torch.device) -> str | None:
    """The GPU's model; what it is forced to be counts as another. None for what is no GPU of CUDA."""
    if device.type != "cuda":
        return None
    name, forced = _device_name(device), forced_capability()
    return name if forced is None else f"{name} as {forced[0]}.{forced[1]}"


@functools.cache
def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device)


@functools.cache
def _parse_capability(text: str) -> tuple[int, int]:
    if text not in CAPABILITIES:
        raise ValueError(
            f"{CAPABILITY} must be a compute capability that GPUs have, one of {', '.join(CAPABILITIES)}; "
            f"got {text!r}{_likely_capability(text)}"
        )
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _likely_capability(text: str) -> str:
    """A question that names the capabilities probably meant: 7.5 for 75, sm_75, 7.55 and other scripts' digits."""
    import difflib
    import unicodedata

    digits = "".join(str(unicodedata.digit(letter)) for letter in text if letter.isdigit())
    like = [one for one in CAPABILITIES if one.replace(".", "") == digits]
    like = like or [one for one in CAPABILITIES if one.partition(".")[0] == digits]
    like = like or difflib.get_close_matches(text, CAPABILITIES, 1)
    return f": did you mean {' or '.join(like)}?" if like else ""
