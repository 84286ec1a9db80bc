"""For interpreter start (children of a patched process, persistent installation) and for `import flash_attn`.

Every start of the interpreter pays for this file, so it imports nothing until it is needed.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def make_package_importable() -> None:
    """Append flash_attn_compat's parent to sys.path where a child's path lacks what its patched parent had."""
    import importlib.util
    import os

    if importlib.util.find_spec("flash_attn_compat") is not None:
        return
    # This file's place in the package is <root>/flash_attn_compat/naming/site/; a persistent installation is elsewhere.
    root = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3))
    if not os.path.isfile(os.path.join(root, "flash_attn_compat", "__init__.py")):
        raise ModuleNotFoundError(
            "flash_attn stands for flash-attn-compat here, which is no longer installed: "
            "pip install flash-attn-compat, or pip uninstall flash-attn",
            name="flash_attn_compat",
        )
    sys.path.append(root)


def put_ours_in_place(name: str) -> None:
    """Let the module called flash_attn.X, or the raw extension's name, be flash_attn_compat's X.

    The files of the package are for tools that look for files; one is run where no finder of ours came before it.
    """
    import importlib

    make_package_importable()
    from flash_attn_compat.naming import finder

    sys.modules[name] = importlib.import_module(
        finder.source_name(name.removeprefix("flash_attn."), finder.stand_in_api())
    )


def with_other_distributions(path: list[str]) -> list[str]:
    """The package's path and, as flash-attn extends it, directories that others put under its name (flash_attn.cute).

    A whole other flash-attn stays out: what this one lacks must not come from there and mix with it.
    """
    import os
    import pkgutil

    def belongs(entry: str) -> bool:
        return entry in path or not os.path.exists(os.path.join(entry, "flash_attn_interface.py"))

    return [entry for entry in pkgutil.extend_path(path, "flash_attn") if belongs(entry)]


def wait_for_imports(sdpa: str = "") -> None:
    """Do what patch() does to other packages once their import starts; until then only compare names.

    sdpa: what FLASH_ATTN_COMPAT_SDPA is where it is not set, as install --sdpa wrote it
    """
    import os

    wish = os.environ.get("FLASH_ATTN_COMPAT_SDPA") or sdpa
    if wish not in ("", "0"):
        os.environ["FLASH_ATTN_COMPAT_SDPA"] = wish
        _awaited.add("torch")
    if _Wait not in sys.meta_path:
        sys.meta_path.insert(0, _Wait)


_awaited = {"transformers", "torch.nn.attention.varlen"}


class _Wait:
    @classmethod
    def find_spec(cls, fullname: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if fullname not in _awaited:
            return None
        _awaited.discard(fullname)
        try:
            make_package_importable()
            from flash_attn_compat.naming import extras
        except ImportError:
            return None
        extras.prepare(fullname)
        # What has just been put before this finder would not be asked any more.
        finders: list[Any] = list(sys.meta_path)
        others = (finder for finder in finders if finder is not cls and hasattr(finder, "find_spec"))
        found = (finder.find_spec(fullname, path, target) for finder in others)
        return next((spec for spec in found if spec is not None), None)
