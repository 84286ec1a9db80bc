"""Changes outside of this package that an ExitStack undoes: attributes, entries, and modules imported later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Handler = Callable[[ModuleType, ExitStack], None]
_MISSING = object()


def set_item(mapping: MutableMapping[str, Any], key: str, value: Any, undo: ExitStack) -> None:
    """Set mapping[key] (os.environ included) until `undo` is closed."""
    before = mapping.get(key, _MISSING)
    mapping[key] = value
    if before is _MISSING:
        undo.callback(mapping.pop, key, None)
    else:
        undo.callback(mapping.__setitem__, key, before)


def set_attribute(target: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Set target.name until `undo` is closed."""
    before = getattr(target, name, _MISSING)
    setattr(target, name, value)
    if before is _MISSING:
        undo.callback(delattr, target, name)
    else:
        undo.callback(setattr, target, name, before)


def insert(entries: MutableSequence[Any], index: int, entry: Any, undo: ExitStack) -> None:
    """Insert an entry until `undo` is closed, unless it is gone by then."""
    entries.insert(index, entry)
    undo.callback(remove, entries, entry)


def remove(entries: MutableSequence[Any], entry: Any) -> None:
    """Remove the first such entry, if there is one."""
    if entry in entries:
        entries.remove(entry)


def restore_later(module: ModuleType, names: Iterable[str], undo: ExitStack) -> None:
    """Restore the present values of these globals when `undo` is closed: the module itself may rebind them."""
    for name in names:
        if hasattr(module, name):
            undo.callback(setattr, module, name, getattr(module, name))


def when_imported(handlers: Mapping[str, Handler], undo: ExitStack) -> list[str]:
    """Call each handler with the module of its name and an ExitStack, now (in this order) or after its import.

    Returns the names of the modules not yet imported. Closing `undo` ends the waiting and closes the handlers' stack.
    """
    steps = ExitStack()  # not `undo`: its owner may have moved its callbacks elsewhere by the time a handler runs
    undo.callback(steps.close)
    waiting = {name: handler for name, handler in handlers.items() if name not in sys.modules}
    if waiting:
        watcher = _AfterImport(waiting, steps)
        insert(sys.meta_path, 0, watcher, steps)
    for name, handler in handlers.items():
        if name not in waiting:
            handler(sys.modules[name], steps)
    return list(waiting)


class _AfterImport:
    """A finder that leaves finding to the others and runs a handler once its module has been executed."""

    def __init__(self, handlers: dict[str, Handler], steps: ExitStack) -> None:
        self._handlers = handlers
        self._steps = steps

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._handlers:
            return None
        # Only later finders are asked: earlier ones were, and two watchers of one module must not call each other.
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else finders:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None and spec.loader is not None:
                self._run_after(spec.loader, self._handlers[fullname])
                return spec
        return None

    def _run_after(self, loader: Any, handler: Handler) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            handler(module, self._steps)

        loader.exec_module = exec_module
