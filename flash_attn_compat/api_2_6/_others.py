"""For the packages beside: what 2.6 had as 2.8 has it."""

from __future__ import annotations

import importlib
from types import ModuleType


def submodule(package: str, name: str) -> ModuleType:
    """The module of 2.8 of that name in `package` (as api_2_6 mirrors it); AttributeError where there is none."""
    current = package.replace(".api_2_6", "")
    try:
        return importlib.import_module(f"{current}.{name}")
    except ModuleNotFoundError:
        raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
