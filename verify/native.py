"""Find out whether a kernel's file loads native code, where a mistake can end the process. It only reads the source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path

from flash_attn_compat.isolation import may_break

# Libraries with which people write native code, names that load or compile it, and libraries whose native code counts
# as safe.
_LIBRARIES = frozenset(("cffi", "ctypes", "cuda", "cupy", "numba", "pycuda", "pyopencl", "tilelang", "triton"))
_LOADERS = frozenset(("CDLL", "cpp_extension", "load_inline", "load_library"))
_TRUSTED = frozenset(("einops", "flash_attn_compat", "numpy", "torch", "verify"))


def is_isolated(asked: bool | None, kernel: str | None, device: str) -> bool:
    """Whether to run in child processes. asked: --isolate; if None, yes for a kernel with native code or on a GPU"""
    if asked is not None or not kernel:
        return bool(asked)
    return may_break(device.partition(":")[0]) or loads_native_code(kernel)


def loads_native_code(path: str) -> bool:
    """Whether the file of ``FILE.py[:ATTRIBUTE]`` or ``module[:ATTRIBUTE]`` loads native code, or a module that it
    imports does.
    """
    file = re.fullmatch(r"(.*\.py)(?::.*)?", path)
    if not file and re.split("[.:]", path)[0] in _TRUSTED:
        return False
    found = Path(file[1]) if file else _file_of(path.partition(":")[0])
    return found is not None and _loads(found, set())


def _loads(file: Path, seen: set[Path]) -> bool:
    if file in seen:
        return False
    seen.add(file)
    if file.name.endswith(tuple(EXTENSION_SUFFIXES)):
        return True
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # the import will raise the error
        return False
    imported = {name for node in ast.walk(tree) for name in _imports(node)}
    packages = {name.partition(".")[0] for name in imported}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if packages & _LIBRARIES or used & _LOADERS or {part for name in imported for part in name.split(".")} & _LOADERS:
        return True
    beside = (_file_of(name, [str(file.parent)]) for name in packages)
    if any(_loads(other, seen) for other in beside if other is not None):
        return True
    return any(_is_compiled(name) for name in packages - _TRUSTED - sys.stdlib_module_names)


def _is_compiled(package: str) -> bool:
    """Whether an installed package has compiled modules of its own."""
    file = _file_of(package)
    if file is None or file.name != "__init__.py":
        return file is not None and file.name.endswith(tuple(EXTENSION_SUFFIXES))
    return any(name.suffix in (".so", ".pyd") for name in file.parent.rglob("*"))


def _imports(node: ast.AST) -> Iterator[str]:
    """Yield the modules that a statement imports; for ``from a import b``, ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = [node.module] if node.module else []
        yield from (".".join([*module, alias.name]) for alias in node.names)


def _file_of(module: str, path: list[str] | None = None) -> Path | None:
    """Return the file of a module, or None. Nothing is imported for it."""
    spec, folders = None, [*sys.path] if path is None else path
    for part in filter(None, module.split(".")):
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = [*(spec.submodule_search_locations or ())]
    return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None
