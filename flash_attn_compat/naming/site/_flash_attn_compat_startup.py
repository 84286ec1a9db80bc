"""For interpreter start (children of a patched process, persistent installation) and for `import flash_attn`.

Every start of the interpreter pays for this file, so it imports nothing until it is needed.
"""

import sys


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
            "flash_attn is answered here by flash-attn-compat, which is not installed (any more): "
            "pip install flash-attn-compat, or pip uninstall flash-attn",
            name="flash_attn_compat",
        )
    sys.path.append(root)


def with_other_distributions(path: list[str]) -> list[str]:
    """The package's path and, as flash-attn extends it, directories that others put under its name (flash_attn.cute).

    A whole other flash-attn stays out: what this one lacks must not come from there and mix with it.
    """
    import os
    import pkgutil

    def belongs(entry: str) -> bool:
        return entry in path or not os.path.exists(os.path.join(entry, "flash_attn_interface.py"))

    return [entry for entry in pkgutil.extend_path(path, "flash_attn") if belongs(entry)]


def wait_for_transformers() -> None:
    """Open transformers' checks once its import begins; until then only compare a name at each import."""
    if _WaitForTransformers not in sys.meta_path:
        sys.meta_path.insert(0, _WaitForTransformers)


class _WaitForTransformers:
    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> None:
        if fullname != "transformers":
            return
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
        try:
            make_package_importable()
            from flash_attn_compat.naming.transformers import open_gates
        except ImportError:
            return
        open_gates()
