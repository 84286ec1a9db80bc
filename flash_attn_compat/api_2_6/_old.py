"""Helpers for the modules of flash-attn 2.6: look up their submodules, and remove arguments that 2.6 lacks."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, TypeVar

R = TypeVar("R")


def import_submodule(package: str, name: str) -> ModuleType:
    """Return the module `name` of `package`, or else of 2.8's package. Raises AttributeError if neither has it."""
    for home in (package, package.replace(".api_2_6", "")):
        try:
            return importlib.import_module(f"{home}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{home}.{name}":
                raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def without(absent: Collection[str], current: Callable[..., R], module: str) -> Callable[..., R]:
    """Return 2.8's function ``current`` with 2.6's signature: without the arguments that 2.6 lacks.

    module: the name of 2.6's module, under which the function is pickled
    """
    parameters = inspect.signature(current).parameters
    signature = inspect.Signature([value for name, value in parameters.items() if name not in absent])

    @functools.wraps(current)
    def function(*arguments: Any, **named: Any) -> R:
        return current(**signature.bind(*arguments, **named).arguments)

    function.__module__ = module
    function.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it
    return function
