"""Run a handler after a module is imported, or at once if it is loaded already."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Handler = Callable[[ModuleType], None]


def when_imported(handlers: dict[str, Handler], undo: ExitStack) -> list[str]:
    """Call each handler with the module of its name, now (in this order) or after its import.

    Returns the names still waited for. Closing `undo` ends the waiting.
    """
    waiting = {name: handler for name, handler in handlers.items() if name not in sys.modules}
    if waiting:
        watcher = _AfterImport(waiting)
        sys.meta_path.insert(0, watcher)
        undo.callback(_remove, sys.meta_path, watcher)
    for name, handler in handlers.items():
        if name not in waiting:
            handler(sys.modules[name])
    return list(waiting)


class _AfterImport:
    """A finder that finds nothing by itself: it lets a handler run once a module it waits for has been executed."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self._handlers = handlers

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        handler = self._handlers.get(fullname)
        if handler is None:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None and spec.loader is not None:
                _run_after(spec.loader, handler)
                return spec
        return None


def _run_after(loader: Any, handler: Handler) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        handler(module)

    loader.exec_module = exec_module


def _remove(finders: list[Any], finder: Any) -> None:
    if finder in finders:
        finders.remove(finder)
