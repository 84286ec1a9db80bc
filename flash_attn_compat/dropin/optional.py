"""The extras of patch(): transformers' flash_attention_2, hub kernels, varlen, SDPA, flex, FlashAttention-3's and -4's.

An interpreter that starts patched, such as a child process, applies those that environment variables request. Imports
no torch: the modules that need it are imported after the package that they change.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from flash_attn_compat import installed, settings
from flash_attn_compat.dropin import hub_kernels, named_attention, site_directory, transformers
from flash_attn_compat.dropin.undo import insert, set_item, when_imported
from flash_attn_compat.installed import SITE_FA3, SITE_FA4

_FA3 = "flash_attn_interface"
_FA4 = "flash_attn.cute"
_FLEX = "torch.nn.attention.flex_attention"
_in_force: set[tuple[str, str]] = set()  # variables and their values
_for_good = ExitStack()  # never closed: the changes of an interpreter that starts patched


class Extra(NamedTuple):
    """A change to another package, which an environment variable or an argument of patch() requests.

    package: the module to change, once it is imported
    switch_on: apply the change, with the variable's value, until the stack is closed
    """

    package: str
    switch_on: Callable[[ExitStack, str], None]


def _serve_varlen_attn(undo: ExitStack, value: str) -> None:
    def serve(module: ModuleType, undo: ExitStack) -> None:
        from flash_attn_compat.dropin import varlen_attn

        varlen_attn.acquire(module, undo)

    when_imported({"torch.nn.attention.varlen": serve}, undo)


def _serve_sdpa(undo: ExitStack, value: str) -> None:
    def serve(torch: ModuleType, undo: ExitStack) -> None:
        from flash_attn_compat.torch_sdpa import override

        undo.enter_context(override.sdpa(always=value == "always"))

    when_imported({"torch": serve}, undo)


def _serve_flex(undo: ExitStack, value: str) -> None:
    def serve(module: ModuleType, undo: ExitStack) -> None:
        from flash_attn_compat.torch_flex import override

        undo.enter_context(override.flex(always=value == "always"))

    when_imported({_FLEX: serve}, undo)


EXTRAS = {
    settings.TRANSFORMERS: Extra("transformers", lambda undo, value: named_attention.serve(undo)),
    settings.HUB_KERNELS: Extra("transformers", lambda undo, value: hub_kernels.redirect(undo)),
    settings.VARLEN_ATTN: Extra("torch.nn.attention.varlen", _serve_varlen_attn),
    settings.SDPA: Extra("torch", _serve_sdpa),
    settings.FLEX: Extra(_FLEX, _serve_flex),
}


def requested_value(variable: str) -> str | None:
    """Return the variable's value, or None if it is unset, empty or 0."""
    value = settings.value_of(variable)
    return None if value == "0" else value


def switch_on(requests: Mapping[str, bool | str | None], undo: ExitStack) -> None:
    """Switch on the requested extras that are not on yet, and set their variables for child processes.

    requests: by variable: False or None for no request, True for the value "1", or a value
    """
    for variable, request in requests.items():
        value = request if isinstance(request, str) else "1" if request else None
        if value and not _in_force & {(variable, value), (variable, "always")}:
            set_item(os.environ, variable, value, undo)
            site_directory.add_to_pythonpath(undo, [])
            EXTRAS[variable].switch_on(undo, value)
            _in_force.add((variable, value))
            undo.callback(_in_force.discard, (variable, value))


def prepare(package: str) -> None:
    """Apply the requested changes to ``package``, whose import begins in an interpreter that has not called patch()."""
    if package == "transformers" and installed.is_stand_in_spec(installed.find_first_spec()):
        transformers.allow_flash_attention(2, _for_good)
    if package == "transformers" and SITE_FA4 in sys.path:
        transformers.allow_flash_attention(4, _for_good)
    for variable, extra in EXTRAS.items():
        value = requested_value(variable) if extra.package == package else None
        if value:
            extra.switch_on(_for_good, value)


def redirect_fa3(undo: ExitStack) -> None:
    """Make FlashAttention-3's name import our functions: put its directory on sys.path and children's PYTHONPATH.

    If a module of that name can be imported already, it stays. In a child process it is ours, by PYTHONPATH.
    """
    if importlib.util.find_spec(_FA3) is None:
        undo.callback(sys.modules.pop, _FA3, None)
        site_directory.put_on_path(undo, [SITE_FA3])


def redirect_fa4(undo: ExitStack) -> None:
    """Make FlashAttention-4's name import our functions, and transformers accept flash_attention_4.

    If a distribution flash-attn-4 is installed, it stays. In a child process it is ours, by PYTHONPATH.
    """
    if any(True for _ in importlib.metadata.distributions(name="flash-attn-4")):
        return
    undo.callback(_forget_fa4)
    site_directory.put_on_path(undo, [SITE_FA4])
    package = sys.modules.get("flash_attn")  # imported already, so it has read sys.path
    if package is not None and hasattr(package, "__path__"):
        _forget_fa4()  # flash-attn 2.8.3 has an early flash_attn.cute
        insert(package.__path__, 0, str(Path(SITE_FA4) / "flash_attn"), undo)
    transformers.allow_flash_attention(4, undo)


def _forget_fa4() -> None:
    """Remove flash_attn.cute and its modules from sys.modules and from the package."""
    for name in [name for name in sys.modules if name == _FA4 or name.startswith(f"{_FA4}.")]:
        del sys.modules[name]
    package = sys.modules.get("flash_attn")
    if hasattr(package, "cute"):
        delattr(package, "cute")
