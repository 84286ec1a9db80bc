"""Modules of 2.6 that are the same in 2.8."""

from __future__ import annotations

import importlib
from types import ModuleType


def submodule(package: str, name: str) -> ModuleType:
    """The module `name` of `package`, or of the package of 2.8 that it stands for; AttributeError if neither has it."""
    for home in (package, package.replace(".api_2_6", "")):
        try:
            return importlib.import_module(f"{home}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{home}.{name}":
                raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
