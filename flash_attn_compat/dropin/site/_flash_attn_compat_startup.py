"""Runs at interpreter start (in children of a patched process, and under an installed name) and at `import flash_attn`.

Every start of the interpreter pays for this file, so it imports nothing until it is needed.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def make_package_importable() -> None:
    """Append flash_attn_compat's parent to sys.path, in a child whose path lacks it."""
    import importlib.util
    import os

    if importlib.util.find_spec("flash_attn_compat") is not None:
        return
    # In the package this file is in <root>/flash_attn_compat/dropin/site/; a copy by `install` is elsewhere.
    root = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3))
    if not os.path.isfile(os.path.join(root, "flash_attn_compat", "__init__.py")):
        raise ModuleNotFoundError(
            "flash_attn stands for flash-attn-compat here, which is no longer installed: "
            "pip install flash-attn-compat, or pip uninstall flash-attn",
            name="flash_attn_compat",
        )
    sys.path.append(root)


def put_ours_in_place(name: str) -> None:
    """Make flash_attn_compat's X the module `name`, which is flash_attn.X or the raw extension.

    The files of site/ call this. Python runs them only if our finder is not the first to be asked.
    """
    make_package_importable()
    from flash_attn_compat.dropin import finder

    finder.put_in_place(name)


def with_other_distributions(path: list[str]) -> list[str]:
    """Return the package's path, extended as flash-attn does by other packages' directories (flash_attn.cute).

    The directory of another complete flash-attn is left out: its modules must not mix with ours.
    """
    import os
    import pkgutil

    def belongs(entry: str) -> bool:
        return entry in path or not os.path.exists(os.path.join(entry, "flash_attn_interface.py"))

    return [entry for entry in pkgutil.extend_path(path, "flash_attn") if belongs(entry)]


def wait_for_imports(sdpa: str = "", stand_in: str = "", transformers: bool = False, flex: str = "") -> None:
    """Apply patch()'s changes to other packages once their import starts; until then only compare names.

    sdpa: the default of FLASH_ATTN_COMPAT_SDPA, from install --sdpa
    stand_in: the directory that provides flash_attn, whatever comes before it on sys.path; "" for none
    transformers: make 1 the default of FLASH_ATTN_COMPAT_TRANSFORMERS, from install --transformers
    flex: the default of FLASH_ATTN_COMPAT_FLEX, from install --flex
    """
    import os

    value = os.environ.get("FLASH_ATTN_COMPAT_SDPA") or sdpa
    if value not in ("", "0"):
        os.environ["FLASH_ATTN_COMPAT_SDPA"] = value
        _awaited.add("torch")
    if transformers and not os.environ.get("FLASH_ATTN_COMPAT_TRANSFORMERS"):
        os.environ["FLASH_ATTN_COMPAT_TRANSFORMERS"] = "1"
    if flex and not os.environ.get("FLASH_ATTN_COMPAT_FLEX"):
        os.environ["FLASH_ATTN_COMPAT_FLEX"] = flex
    if stand_in:
        _Wait.stand_in = stand_in
    if _Wait not in sys.meta_path:
        sys.meta_path.insert(0, _Wait)


def catch_up() -> None:
    """Call wait_for_imports at `import flash_attn`, in case another sitecustomize kept ours from calling it before."""
    patch = sys.modules.get("flash_attn_compat.dropin.patch")
    if _Wait in sys.meta_path or getattr(patch, "_undo", None) is not None:
        return
    wait_for_imports()
    for name in _awaited & sys.modules.keys():
        _prepare(name)


_awaited = {"transformers", "torch.nn.attention.varlen", "torch.nn.attention.flex_attention"}


def _prepare(name: str) -> None:
    """Apply patch()'s changes to the package `name`."""
    _awaited.discard(name)
    try:
        make_package_importable()
        from flash_attn_compat.dropin import optional
    except ImportError:
        return
    optional.prepare(name)


class _Wait:
    """A finder that notices imports and leaves finding to the others."""

    stand_in = ""
    has_warned = False

    @classmethod
    def find_spec(cls, fullname: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if fullname == "flash_attn" and cls.stand_in:
            return cls._find_stand_in(path, target)
        if fullname not in _awaited:
            return None
        _prepare(fullname)
        # _prepare may have inserted finders before this one. The running import has passed their place: call them here.
        return cls._ask_others(fullname, path, target)

    @classmethod
    def _ask_others(cls, fullname: str, path: "Any", target: "Any") -> "Any":
        finders: list[Any] = list(sys.meta_path)
        others = (finder for finder in finders if finder is not cls and hasattr(finder, "find_spec"))
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        return next((spec for spec in specs if spec is not None), None)

    @classmethod
    def _find_stand_in(cls, path: "Any", target: "Any") -> "Any":
        """Return the stand-in's spec; warn of another flash_attn in front of it, such as a file beside a script."""
        import os
        from importlib.machinery import PathFinder

        first = cls._ask_others("flash_attn", path, target)
        ours = PathFinder.find_spec("flash_attn", [cls.stand_in])
        if ours is None or first is None or not first.origin:
            return ours or first
        if os.path.realpath(first.origin) == os.path.realpath(ours.origin or ""):
            return first
        if not cls.has_warned:
            import warnings

            cls.has_warned = True
            warnings.warn(
                f"{first.origin} is not used: flash_attn_compat stands for flash_attn here, in a process started under "
                "flash_attn_compat.patch() or flash-attn-compat run. Rename it unless it is meant to be flash-attn",
                stacklevel=2,
            )
        return ours
