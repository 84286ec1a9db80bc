"""The extras of patch(): hub kernels, torch.nn.attention.varlen, PyTorch's SDPA, FlashAttention-3's name.

An interpreter that starts patched applies them by their variables. Imports no torch: the modules that need it are
imported after the package that they change.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import NamedTuple

from flash_attn_compat import installed, settings
from flash_attn_compat.dropin import hub_kernels, site_directory, transformers
from flash_attn_compat.dropin.undo import set_item, when_imported
from flash_attn_compat.installed import SITE_FA3

_FA3 = "flash_attn_interface"
_in_force: set[tuple[str, str]] = set()  # variables and their values
_for_good = ExitStack()  # never closed: the changes of an interpreter that starts patched


class Extra(NamedTuple):
    """What one variable switches on.

    package: the module that it changes, once that is imported
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


EXTRAS = {
    settings.HUB_KERNELS: Extra("transformers", lambda undo, value: hub_kernels.redirect(undo)),
    settings.VARLEN_ATTN: Extra("torch.nn.attention.varlen", _serve_varlen_attn),
    settings.SDPA: Extra("torch", _serve_sdpa),
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
        transformers.allow_flash_attention_2(_for_good)
    for variable, extra in EXTRAS.items():
        value = requested_value(variable) if extra.package == package else None
        if value:
            extra.switch_on(_for_good, value)


def redirect_fa3(undo: ExitStack) -> None:
    """Make FlashAttention-3's name import our functions: put its directory on sys.path and children's PYTHONPATH.

    An importable module of that name stays; in a child it is ours already.
    """
    if importlib.util.find_spec(_FA3) is None:
        undo.callback(sys.modules.pop, _FA3, None)
        site_directory.put_on_path(undo, [SITE_FA3])
