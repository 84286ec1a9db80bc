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
    # This file's place in the package is <root>/flash_attn_compat/dropin/site/; a persistent installation is elsewhere.
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
    make_package_importable()
    from flash_attn_compat.dropin import finder

    finder.put_in_place(name)


def with_other_distributions(path: list[str]) -> list[str]:
    """The package's path and, as flash-attn extends it, directories that others put under its name (flash_attn.cute).

    A whole other flash-attn stays out: what this one lacks must not come from there and mix with it.
    """
    import os
    import pkgutil

    def belongs(entry: str) -> bool:
        return entry in path or not os.path.exists(os.path.join(entry, "flash_attn_interface.py"))

    return [entry for entry in pkgutil.extend_path(path, "flash_attn") if belongs(entry)]


def wait_for_imports(sdpa: str = "", stand_in: str = "") -> None:
    """Do what patch() does to other packages once their import starts; until then only compare names.

    sdpa: what FLASH_ATTN_COMPAT_SDPA is where it is not set, as install --sdpa wrote it
    stand_in: the directory to which the name flash_attn leads whatever comes before it on sys.path; "" for none
    """
    import os

    wish = os.environ.get("FLASH_ATTN_COMPAT_SDPA") or sdpa
    if wish not in ("", "0"):
        os.environ["FLASH_ATTN_COMPAT_SDPA"] = wish
        _awaited.add("torch")
    if stand_in:
        _Wait.stand_in = stand_in
    if _Wait not in sys.meta_path:
        sys.meta_path.insert(0, _Wait)


def catch_up() -> None:
    """Begin to wait at `import flash_attn`, in a child of a patched process where another sitecustomize hid ours."""
    patch = sys.modules.get("flash_attn_compat.dropin.patch")
    if _Wait in sys.meta_path or getattr(patch, "_undo", None) is not None:
        return
    wait_for_imports()
    for name in _awaited & sys.modules.keys():
        _prepare(name)


_awaited = {"transformers", "torch.nn.attention.varlen"}


def _prepare(name: str) -> None:
    """What patch() does to this package."""
    _awaited.discard(name)
    try:
        make_package_importable()
        from flash_attn_compat.dropin import optional
    except ImportError:
        return
    optional.prepare(name)


class _Wait:
    """The finder that looks at what is imported: others find it."""

    stand_in = ""
    told = False

    @classmethod
    def find_spec(cls, fullname: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if fullname == "flash_attn" and cls.stand_in:
            return cls._find_stand_in(path, target)
        if fullname not in _awaited:
            return None
        _prepare(fullname)
        # What has just been put before this finder would not be asked any more.
        return cls._found_by_others(fullname, path, target)

    @classmethod
    def _found_by_others(cls, fullname: str, path: "Any", target: "Any") -> "Any":
        finders: list[Any] = list(sys.meta_path)
        others = (finder for finder in finders if finder is not cls and hasattr(finder, "find_spec"))
        found = (finder.find_spec(fullname, path, target) for finder in others)
        return next((spec for spec in found if spec is not None), None)

    @classmethod
    def _find_stand_in(cls, path: "Any", target: "Any") -> "Any":
        """The spec of the stand-in, with a warning of another flash_attn that comes before it, beside a script say."""
        import os
        from importlib.machinery import PathFinder

        first = cls._found_by_others("flash_attn", path, target)
        ours = PathFinder.find_spec("flash_attn", [cls.stand_in])
        if ours is None or first is None or not first.origin:
            return ours or first
        if os.path.realpath(first.origin) == os.path.realpath(ours.origin or ""):
            return first
        if not cls.told:
            import warnings

            cls.told = True
            warnings.warn(
                f"{first.origin} is not used: flash_attn_compat stands for flash_attn here, in a process started under "
                "flash_attn_compat.patch() or flash-attn-compat run. Rename it unless it is meant to be flash-attn",
                stacklevel=2,
            )
        return ours
