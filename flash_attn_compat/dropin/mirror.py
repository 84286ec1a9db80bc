"""The modules of flash_attn_compat that stand for flash_attn's, and the module names under which pickle finds them.

A class or function imported as flash_attn's is pickled as flash_attn's: a model saved here loads where only the real
flash-attn is installed. Files with our own names load wherever flash_attn_compat is importable.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

# The modules and packages of flash_attn_compat that mirror flash_attn's. The others (core, backends, dropin, ...) are
# not importable under flash_attn's name, and neither are the names of FlashAttention 1, 3 and 4.
MIRRORED = frozenset(
    {"bert_padding", "flash_attn_interface", "flash_attn_triton", "layers", "losses", "modules", "ops", "utils"}
)
_ROOT = Path(__file__).resolve().parents[1]
_OURS = "flash_attn_compat."
_API_2_6 = "api_2_6."
# Our modules that flash-attn does not have, and flash-attn's module that defines the same names.
_HOMES = {
    "kvcache": "flash_attn_interface",
    "private_interface": "flash_attn_interface",
    "modules._cached_attention": "modules.mha",
    "modules._inner_attention": "modules.mha",
    "ops.triton._norm_ref": "ops.triton.layer_norm",
}
_lock = threading.RLock()  # guards _renamed and _replaced
_renamed: list[tuple[Any, str]] = []  # each class or function with its __module__ before
_replaced: list[type] = []  # classes of 2.8 that are pickled as their subclasses of 2.6


def source_name(below: str, api: str) -> str:
    """Return the name of our module for flash_attn.<below> in the interface `api`."""
    old = _ROOT / "api_2_6" / below.replace(".", "/")
    if api == "2.6" and (old.with_suffix(".py").is_file() or (old / "__init__.py").is_file()):
        return f"flash_attn_compat.api_2_6.{below}"
    return f"flash_attn_compat.{below}"


def give_flash_attns_names(api: str) -> None:
    """Set __module__ of the mirrored classes and functions in loaded modules to flash_attn's modules.

    api: the interface under the name; with 2.6, instances of 2.8's classes are pickled as instances of 2.6's
    """
    for below, module in [(below, _import_source(below, api)) for below in _loaded_mirrors()]:
        with _lock:
            for attribute, value in list(vars(module).items()):
                if (inspect.isclass(value) or inspect.isfunction(value)) and _is_defined_as(value, below, attribute):
                    _rename(value, f"flash_attn.{below}")


def _loaded_mirrors() -> set[str]:
    """Return the loaded modules of ours that mirror flash_attn's, by their names without ``flash_attn.``."""
    names = [name.removeprefix(_OURS).removeprefix(_API_2_6) for name in list(sys.modules) if name.startswith(_OURS)]
    return {name for name in names if name.partition(".")[0] in MIRRORED}


def _import_source(below: str, api: str) -> ModuleType:
    """Return our module for flash_attn.<below>, imported if needed: with api 2.6, perhaps only 2.8's is loaded."""
    name = source_name(below, api)
    return sys.modules.get(name) or importlib.import_module(name)


def take_names_back() -> None:
    """Restore __module__ of every renamed class and function."""
    with _lock:
        while _renamed:
            value, before = _renamed.pop()
            value.__module__ = before
        while _replaced:
            copyreg.dispatch_table.pop(_replaced.pop(), None)


def remember_names(undo: ExitStack) -> None:
    """Restore the present names when `undo` is closed."""
    now = [(value, value.__module__) for value, _ in list(_renamed)]

    def restore() -> None:
        with _lock:
            take_names_back()
            for value, name in now:
                _rename(value, name)

    undo.callback(restore)


def _is_defined_as(value: Any, below: str, attribute: str) -> bool:
    """Whether flash-attn defines ``value`` in flash_attn.<below> under the name ``attribute``."""
    module: str = value.__module__ or ""
    if value.__qualname__ != attribute or not module.startswith(_OURS):
        return False
    home = module.removeprefix(_OURS).removeprefix(_API_2_6)
    return _HOMES.get(home, home) == below


def _rename(value: Any, name: str) -> None:
    _renamed.append((value, value.__module__))
    value.__module__ = name
    for base in getattr(value, "__mro__", ())[1:]:
        if base.__name__ == value.__name__ and base.__module__.startswith(_OURS):
            _replaced.append(base)
            copyreg.pickle(base, functools.partial(_reduce_as, value))


def _reduce_as(replacement: type, instance: Any) -> tuple[Any, ...]:
    """Return pickle's reduction of an instance as one of the class ``replacement``."""
    return copyreg._reconstructor, (replacement, object, None), instance.__reduce_ex__(2)[2]  # type: ignore[attr-defined]  # of no stub
