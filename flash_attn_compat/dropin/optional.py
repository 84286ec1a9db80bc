"""What patch() does beyond the name where it is asked for; interpreters that start patched do it by the variables.

Like the rest of naming, this needs no torch: what does is imported behind the package that it is for.
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
_for_good = ExitStack()  # never closed: of an interpreter that starts patched


class Extra(NamedTuple):
    """asked: what its variable says; switch_on: until the stack is closed, given "1" or another wish"""

    package: str
    asked: Callable[[], bool | str | None]
    switch_on: Callable[[ExitStack, str], None]


def _varlen_attn(undo: ExitStack, wish: str) -> None:
    def hold(module: ModuleType, undo: ExitStack) -> None:
        from flash_attn_compat.dropin import varlen_attn

        varlen_attn.hold(module, undo)

    when_imported({"torch.nn.attention.varlen": hold}, undo)


def _sdpa(undo: ExitStack, wish: str) -> None:
    def hold(torch: ModuleType, undo: ExitStack) -> None:
        from flash_attn_compat.torch_sdpa import override

        undo.enter_context(override.sdpa(always=wish == "always"))

    when_imported({"torch": hold}, undo)


EXTRAS = {
    settings.HUB_KERNELS: Extra("transformers", settings.hub_kernels, lambda undo, wish: hub_kernels.redirect(undo)),
    settings.VARLEN_ATTN: Extra("torch.nn.attention.varlen", settings.varlen_attn, _varlen_attn),
    settings.SDPA: Extra("torch", settings.sdpa, _sdpa),
}


def switch_on(wanted: Mapping[str, bool | str | None], undo: ExitStack) -> None:
    """Those that are wanted, by their variables, and are not there already; children go by the variables."""
    for variable, asked in wanted.items():
        wish = asked if isinstance(asked, str) else "1" if asked else None
        if wish and not _in_force & {(variable, wish), (variable, "always")}:
            set_item(os.environ, variable, wish, undo)
            site_directory.add_to_pythonpath(undo, [])
            EXTRAS[variable].switch_on(undo, wish)
            _in_force.add((variable, wish))
            undo.callback(_in_force.discard, (variable, wish))


def prepare(package: str) -> None:
    """Called when the import of ``package`` begins in an interpreter that has not called patch()."""
    if package == "transformers" and installed.is_stand_in_spec(installed.first_spec()):
        transformers.allow_flash_attention_2(_for_good)
    for extra in EXTRAS.values():
        wish = extra.asked() if extra.package == package else None
        if wish:
            extra.switch_on(_for_good, str(wish))


def redirect_fa3(undo: ExitStack) -> None:
    """Let FlashAttention-3's name lead to our functions: its directory onto sys.path and children's PYTHONPATH.

    A module of that name which is there already, in a child ours, stays.
    """
    if importlib.util.find_spec(_FA3) is None:
        undo.callback(sys.modules.pop, _FA3, None)
        site_directory.put_on_path(undo, [SITE_FA3])
