"""The modules of flash_attn_compat that stand under the name flash_attn, and the names under which they are pickled.

Classes and functions imported under that name are pickled under it: a model saved here then loads where only the real
flash-attn is. Files that hold our own names load wherever flash_attn_compat is importable.
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

# The part of flash_attn_compat that mirrors flash_attn. What is not listed (engine, backends, naming, ...) is ours
# alone and stays absent under flash_attn's name, as do the names of FlashAttention 1, 3 and 4.
MIRRORED = frozenset(
    {"bert_padding", "flash_attn_interface", "flash_attn_triton", "layers", "losses", "modules", "ops", "utils"}
)
_ROOT = Path(__file__).resolve().parents[1]
_OURS = "flash_attn_compat."
_OF_2_6 = "api_2_6."
# Modules of ours that flash-attn does not have: where it defines the same names.
_HOMES = {
    "kvcache": "flash_attn_interface",
    "private_interface": "flash_attn_interface",
    "modules._cached_attention": "modules.mha",
    "modules._inner_attention": "modules.mha",
    "ops.triton._norm_ref": "ops.triton.layer_norm",
}
_lock = threading.RLock()  # of what follows
_named: list[tuple[Any, str]] = []  # with the __module__ that each had before
_replaced: list[type] = []  # classes of 2.8 while those of 2.6 stand under the name


def source_name(below: str, api: str) -> str:
    """The module of flash_attn_compat that stands for flash_attn.<below> in that interface."""
    old = _ROOT / "api_2_6" / below.replace(".", "/")
    if api == "2.6" and (old.with_suffix(".py").is_file() or (old / "__init__.py").is_file()):
        return f"flash_attn_compat.api_2_6.{below}"
    return f"flash_attn_compat.{below}"


def give_flash_attns_names(api: str) -> None:
    """Name everything that the loaded modules of the mirror define after flash_attn's modules.

    api: the interface that stands under the name; instances of a class that it replaces are pickled as the older one's
    """
    for below, module in [(below, _module(below, api)) for below in _loaded()]:
        with _lock:
            for attribute, value in list(vars(module).items()):
                if (inspect.isclass(value) or inspect.isfunction(value)) and _is_defined_as(value, below, attribute):
                    _name(value, f"flash_attn.{below}")


def _loaded() -> set[str]:
    """The mirror's loaded modules, by what follows flash_attn in their names."""
    names = [name.removeprefix(_OURS).removeprefix(_OF_2_6) for name in list(sys.modules) if name.startswith(_OURS)]
    return {name for name in names if name.partition(".")[0] in MIRRORED}


def _module(below: str, api: str) -> ModuleType:
    """The module that stands for flash_attn.<below>; one that replaces a loaded one may have to be loaded."""
    name = source_name(below, api)
    return sys.modules.get(name) or importlib.import_module(name)


def take_names_back() -> None:
    """Let everything have our names again."""
    with _lock:
        while _named:
            value, before = _named.pop()
            value.__module__ = before
        while _replaced:
            copyreg.dispatch_table.pop(_replaced.pop(), None)


def remember_names(undo: ExitStack) -> None:
    """When `undo` is closed, the names are those of now."""
    now = [(value, value.__module__) for value, _ in list(_named)]

    def restore() -> None:
        with _lock:
            take_names_back()
            for value, name in now:
                _name(value, name)

    undo.callback(restore)


def _is_defined_as(value: Any, below: str, attribute: str) -> bool:
    """Whether flash_attn.<below> is where flash-attn defines it, by this name."""
    module: str = value.__module__ or ""
    if value.__qualname__ != attribute or not module.startswith(_OURS):
        return False
    home = module.removeprefix(_OURS).removeprefix(_OF_2_6)
    return _HOMES.get(home, home) == below


def _name(value: Any, name: str) -> None:
    _named.append((value, value.__module__))
    value.__module__ = name
    for base in getattr(value, "__mro__", ())[1:]:
        if base.__name__ == value.__name__ and base.__module__.startswith(_OURS):
            _replaced.append(base)
            copyreg.pickle(base, functools.partial(_as_instance_of, value))


def _as_instance_of(replacement: type, instance: Any) -> tuple[Any, ...]:
    """How to pickle an instance: as one of the class that stands under flash-attn's name."""
    return copyreg._reconstructor, (replacement, object, None), instance.__reduce_ex__(2)[2]  # type: ignore[attr-defined]  # of no stub
