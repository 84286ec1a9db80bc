"""Find the modules that are the same in 2.6 and 2.8."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_submodule(package: str, name: str) -> ModuleType:
    """Return the module `name` of `package`, or else of 2.8's package. Raises AttributeError if neither has it."""
    for home in (package, package.replace(".api_2_6", "")):
        try:
            return importlib.import_module(f"{home}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{home}.{name}":
                raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
