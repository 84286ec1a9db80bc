"""Let transformers' checks for flash-attn pass on devices that flash-attn does not know (CPU, MPS), until it is undone.

With CUDA, the files of site/ alone satisfy every check, and nothing below changes what they say. Works on
4.48 and later, whether transformers is loaded already or comes later; never imports transformers itself.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from flash_attn_compat.dropin.undo import give_back, set_item, when_imported

_IMPORT_UTILS = "transformers.utils.import_utils"
_FLASH_UTILS = "transformers.modeling_flash_attention_utils"
_MODELING_UTILS = "transformers.modeling_utils"
_AVAILABLE = "is_flash_attn_2_available"
_ORIGINAL = "_flash_attn_compat_original"  # of our check: the one it replaces
_GUARDS = {_AVAILABLE, "is_flash_attn_available"}

# Answers that transformers keeps for the life of the process (which of them exist depends on the version).
_CACHED_CHECKS = (
    _AVAILABLE, "is_flash_attn_greater_or_equal", "is_flash_attn_greater_or_equal_2_10",
    "_package_distribution_mapping",
)  # fmt: skip
# What it keeps of a flash-attn once loaded.
_LOADED_FUNCTIONS = (
    "_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn",
    "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn",
)  # fmt: skip
# Methods of PreTrainedModel that refuse a model on the CPU, and the argument that turns that refusal alone off.
_DEVICE_CHECKS = {
    "_check_and_enable_flash_attn_2": ("check_device_map", False),  # to 4.53
    "_flash_attn_2_can_dispatch": ("is_init_check", True),  # 4.54 to 5.0
    "_flash_attn_can_dispatch": ("is_init_check", True),  # 5.1 and later
}

_allowed = threading.Lock()  # held while it is let through


def allow_flash_attention_2(undo: ExitStack) -> None:
    """Let attn_implementation="flash_attention_2" through; `undo` takes back exactly what this call did."""
    if not _allowed.acquire(blocking=False):
        return
    undo.callback(_allowed.release)
    handlers = {  # in this order: the others build on what the first replaces
        _IMPORT_UTILS: _allow_in_import_utils,
        _FLASH_UTILS: _allow_in_flash_utils,
        _MODELING_UTILS: _allow_in_modeling_utils,
    }
    if _IMPORT_UTILS not in when_imported(handlers, undo):
        _replay_guarded_code(undo)


def _allow_in_import_utils(module: ModuleType, undo: ExitStack) -> None:
    original = getattr(module, _AVAILABLE, None)
    if original is None:
        return
    undo.callback(_forget_checks, module, original)
    mapping = getattr(module, "PACKAGE_DISTRIBUTION_MAPPING", {})
    before = mapping.get("flash_attn", [])
    if mapping and "flash-attn" not in before:
        set_item(mapping, "flash_attn", [*before, "flash-attn"], undo)
    _forget_checks(module)
    opened = _always_available(original)
    _replace_everywhere(original, opened)
    undo.callback(_replace_everywhere, opened, original)


def _allow_in_flash_utils(module: ModuleType, undo: ExitStack) -> None:
    give_back(module, _LOADED_FUNCTIONS, undo)
    entry = getattr(module, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).get(2, {})
    checked = entry.get("general_availability_check")
    if checked is not None:  # a module imported meanwhile took our check into its table
        undo.callback(entry.__setitem__, "general_availability_check", getattr(checked, _ORIGINAL, checked))
        entry["general_availability_check"] = getattr(module, _AVAILABLE, checked)


def _allow_in_modeling_utils(module: ModuleType, undo: ExitStack) -> None:
    model_class = module.PreTrainedModel
    for name, (argument, value) in _DEVICE_CHECKS.items():
        original = model_class.__dict__.get(name)
        if original is not None:
            setattr(model_class, name, _without_device_check(original, argument, value))
            undo.callback(setattr, model_class, name, original)


def _always_available(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_flash_attn_2_available(*args: Any, **kwargs: Any) -> bool:
        return True

    setattr(is_flash_attn_2_available, _ORIGINAL, original)
    if not hasattr(original, "cache_clear"):
        return is_flash_attn_2_available
    return functools.lru_cache(is_flash_attn_2_available)  # whose callers clear the cache that newer versions keep


def _replace_everywhere(old: Any, new: Any) -> None:
    """Rebind the check in each module that imported it by name, code downloaded at run time included."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_AVAILABLE) is old:
            setattr(module, _AVAILABLE, new)


def _forget_checks(module: ModuleType, *more: Any) -> None:
    checks: list[Any] = [getattr(module, name, None) for name in _CACHED_CHECKS]
    for function in [*checks, *more]:
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _without_device_check(method: Any, argument: str, value: bool) -> Any:
    function = method.__func__ if isinstance(method, classmethod) else method
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        import torch

        bound = signature.bind(*args, **kwargs)
        if not torch.cuda.is_available() and bound.arguments.get("flash_attn_version", 2) == 2:
            bound.arguments[argument] = value
        return function(*bound.args, **bound.kwargs)

    return classmethod(checked) if isinstance(method, classmethod) else checked


def _replay_guarded_code(undo: ExitStack) -> None:
    """Run what modules of transformers 4 skipped behind `if is_flash_attn_2_available():` when they were imported."""
    guarded = [name for name in list(sys.modules) if name.startswith(("transformers.models.", "transformers_modules."))]
    for name in [_FLASH_UTILS, *guarded]:
        module = sys.modules.get(name)
        # Looked up in __dict__: a lazy module of transformers would import its content to find an attribute.
        if module is None or not _GUARDS & vars(module).keys():
            continue
        skipped = _skipped_code(module)
        if not skipped:
            continue
        undo.callback(_restore_namespace, module, dict(vars(module)))
        if name == _FLASH_UTILS:
            # Its own functions look these names up when they run, so executing it again reaches earlier importers.
            importlib.reload(module)
        else:
            exec(compile(ast.Module(skipped, []), module.__file__ or name, "exec"), vars(module))


def _skipped_code(module: ModuleType) -> list[ast.stmt]:
    """The guarded imports of a module, and its classes that have an imported class as base (ModernBERT's rotary)."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return []
    imports = [
        statement
        for guard in tree.body
        if isinstance(guard, ast.If) and _asks_for_flash_attn(guard.test)
        for statement in guard.body
        if isinstance(statement, (ast.Import, ast.ImportFrom))
    ]
    names = {alias.asname or alias.name for statement in imports for alias in statement.names}
    classes = [
        statement
        for statement in tree.body
        if isinstance(statement, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id in names for base in statement.bases)
    ]
    return [*imports, *classes]


def _asks_for_flash_attn(test: ast.expr) -> bool:
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in _GUARDS


def _restore_namespace(module: ModuleType, before: dict[str, Any]) -> None:
    for name in vars(module).keys() - before.keys():
        delattr(module, name)
    vars(module).update(before)


def register_with_transformers(name: str = "fa2_compat") -> None:
    """Register our attention under `name`, for attn_implementation=name, through transformers' own registry.

    Nothing is patched and nothing takes the name flash_attn. Models that ask whether "flash" is requested (some
    vision towers) take their other branch: also right, but without packing. Needs transformers 4.53 or later.

    Raises ValueError for a name that contains "flash", which transformers takes for a kernel to download, and
    ImportError where transformers is missing or too old.
    """
    if "flash" in name:
        raise ValueError(f"name must not contain 'flash': transformers looks such names up on its hub; got {name!r}")
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    from flash_attn_compat.dropin.attention_function import attention

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, flash_attention_mask)
