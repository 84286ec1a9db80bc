"""The import finder that makes flash_attn.X the same module object as flash_attn_compat.X.

The package flash_attn itself is a file in site/; its submodules are found here. The other files in site/ are for tools
that look for files. Finding a module imports nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from flash_attn_compat.dropin.mirror import MIRRORED, give_flash_attns_names, source_name
from flash_attn_compat.dropin.undo import remove


class MirrorFinder(importlib.abc.MetaPathFinder):
    """Finds flash_attn.X.Y where flash_attn_compat.X.Y exists, while flash_attn is our stand-in."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, below = fullname.partition(".")
        if package != "flash_attn" or not is_stand_in(sys.modules.get("flash_attn")):
            return None
        if below == "models":
            # An import of flash_attn.models.X looks for flash_attn.models first, so this message comes first.
            raise ModuleNotFoundError(
                "flash_attn.models (whole models: GPT, BERT, ...) is not part of flash_attn_compat, which has the "
                "attention functions, layers, losses, modules, ops and utils of flash-attn; take the model from "
                "transformers, or from a checkout of flash-attn",
                name="flash_attn_compat.models",
            )
        if below.partition(".")[0] not in MIRRORED:
            return None
        source = importlib.util.find_spec(source_name(below, stand_in_api()))
        if source is None:
            return None
        return importlib.util.spec_from_file_location(
            fullname, source.origin, loader=MirrorLoader(source.name),
            submodule_search_locations=source.submodule_search_locations,
        )  # fmt: skip


class MirrorLoader(importlib.abc.Loader):
    """Loads a module by putting flash_attn_compat's module into sys.modules; the module's own __spec__ stays."""

    def __init__(self, source_name: str) -> None:
        self.source_name = source_name

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns the entry of sys.modules once this returns.
        put_in_place(module.__name__, self.source_name)


def put_in_place(name: str, source: str | None = None) -> None:
    """Make our module `source` the module `name`; its classes and functions are pickled under flash_attn's names.

    source: by default our module for `name`, which is flash_attn.X or the raw extension
    """
    if source is None:
        source = source_name(name.removeprefix("flash_attn."), stand_in_api())
    sys.modules[name] = importlib.import_module(source)
    give_flash_attns_names(stand_in_api())


_FINDER = MirrorFinder()


def add_to_meta_path() -> bool:
    """Put our finder first, or Python's would load a second copy of a module. Returns False if ours is in already."""
    if _FINDER in sys.meta_path:
        return False
    sys.meta_path.insert(0, _FINDER)
    return True


def remove_from_meta_path() -> None:
    remove(sys.meta_path, _FINDER)


def stand_in_api() -> str:
    """Return the interface of the imported stand-in, "2.6" or "2.8"; "2.8" if none is imported."""
    api: str = getattr(sys.modules.get("flash_attn"), "_flash_attn_compat_api", "2.8")
    return api


def is_stand_in(module: ModuleType | None) -> bool:
    """Whether a module named flash_attn is ours: only ours has the startup module of site/ as an attribute."""
    return module is not None and hasattr(module, "_flash_attn_compat_startup")
