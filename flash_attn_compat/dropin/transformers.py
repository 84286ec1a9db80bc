"""Let transformers' checks for flash-attn pass on devices that flash-attn does not support (CPU, MPS).

With CUDA, the files of site/ alone pass every check, and nothing below changes a result. Works with transformers 4.48
and later, imported before or afterwards; never imports transformers itself.
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
from typing import Any, Literal

from flash_attn_compat.dropin import named_attention
from flash_attn_compat.dropin.undo import restore_later, set_item, when_imported

_IMPORT_UTILS = "transformers.utils.import_utils"
_FLASH_UTILS = "transformers.modeling_flash_attention_utils"
_MODELING_UTILS = "transformers.modeling_utils"
_ORIGINAL = "_flash_attn_compat_original"  # the attribute of our check that holds the replaced one
_GUARDS = {"is_flash_attn_2_available", "is_flash_attn_available"}

# Checks that transformers caches for the life of the process; each version has some of them.
_CACHED_CHECKS = (
    "is_flash_attn_2_available", "is_flash_attn_4_available", "is_flash_attn_greater_or_equal",
    "is_flash_attn_greater_or_equal_2_10", "_package_distribution_mapping",
)  # fmt: skip
# Globals in which transformers keeps the functions of a loaded flash-attn.
_LOADED_FUNCTIONS = (
    "_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn",
    "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn",
)  # fmt: skip
# Methods of PreTrainedModel that refuse a model on the CPU, and the argument that turns off only this check.
_DEVICE_CHECKS = {
    "_check_and_enable_flash_attn_2": ("check_device_map", False),  # to 4.53
    "_flash_attn_2_can_dispatch": ("is_init_check", True),  # 4.54 to 5.0
    "_flash_attn_can_dispatch": ("is_init_check", True),  # 5.1 and later
}

# A lock for each version of flash-attn, held while transformers accepts flash_attention_<version>.
_allowed = {2: threading.Lock(), 4: threading.Lock()}


def allow_flash_attention(version: Literal[2, 4], undo: ExitStack) -> None:
    """Let transformers accept attn_implementation="flash_attention_<version>" until `undo` is closed."""
    if not _allowed[version].acquire(blocking=False):
        return
    undo.callback(_allowed[version].release)
    handlers = {  # in this order: the later ones use the check that the first replaces
        _IMPORT_UTILS: functools.partial(_allow_in_import_utils, version),
        _FLASH_UTILS: functools.partial(_allow_in_flash_utils, version),
        _MODELING_UTILS: functools.partial(_allow_in_modeling_utils, version),
    }
    if _IMPORT_UTILS not in when_imported(handlers, undo) and version == 2:
        _run_skipped_code(undo)


def _check_name(version: int) -> str:
    """Return the name of transformers' check for a version of flash-attn."""
    return f"is_flash_attn_{version}_available"


def _allow_in_import_utils(version: int, module: ModuleType, undo: ExitStack) -> None:
    original = getattr(module, _check_name(version), None)
    if original is None:
        return
    undo.callback(_forget_checks, module, original)
    mapping = getattr(module, "PACKAGE_DISTRIBUTION_MAPPING", {})
    before = mapping.get("flash_attn", [])
    distribution = "flash-attn" if version == 2 else f"flash-attn-{version}"
    if mapping and distribution not in before:
        set_item(mapping, "flash_attn", [*before, distribution], undo)
    _forget_checks(module)
    opened = _always_available(original)
    _replace_everywhere(_check_name(version), original, opened)
    undo.callback(_replace_everywhere, _check_name(version), opened, original)


def _allow_in_flash_utils(version: int, module: ModuleType, undo: ExitStack) -> None:
    restore_later(module, _LOADED_FUNCTIONS, undo)
    entry = getattr(module, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).get(version, {})
    checked = entry.get("general_availability_check")
    if checked is not None:  # if imported while patched, the module's table holds our check
        undo.callback(entry.__setitem__, "general_availability_check", getattr(checked, _ORIGINAL, checked))
        entry["general_availability_check"] = getattr(module, _check_name(version), checked)


def _allow_in_modeling_utils(version: int, module: ModuleType, undo: ExitStack) -> None:
    model_class = module.PreTrainedModel
    for name, (argument, value) in _DEVICE_CHECKS.items():
        original = model_class.__dict__.get(name)
        if original is not None:
            setattr(model_class, name, _without_device_check(original, argument, value, version))
            undo.callback(setattr, model_class, name, original)
    if version == 2:
        named_attention.warn_of_padded_cross_attention(module, undo)


def _always_available(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_available(*args: Any, **kwargs: Any) -> bool:
        return True

    setattr(is_available, _ORIGINAL, original)
    if not hasattr(original, "cache_clear"):
        return is_available
    return functools.lru_cache(is_available)  # newer versions call its cache_clear


def _replace_everywhere(name: str, old: Any, new: Any) -> None:
    """Rebind the check in each module that imported it by name, including code downloaded at run time."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _forget_checks(module: ModuleType, *more: Any) -> None:
    checks: list[Any] = [getattr(module, name, None) for name in _CACHED_CHECKS]
    for function in [*checks, *more]:
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _without_device_check(method: Any, argument: str, value: bool, version: int) -> Any:
    function = method.__func__ if isinstance(method, classmethod) else method
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        import torch

        bound = signature.bind(*args, **kwargs)
        if not torch.cuda.is_available() and bound.arguments.get("flash_attn_version", 2) == version:
            bound.arguments[argument] = value
        return function(*bound.args, **bound.kwargs)

    return classmethod(checked) if isinstance(method, classmethod) else checked


def _run_skipped_code(undo: ExitStack) -> None:
    """Run the code that modules of transformers 4 skipped at import, below `if is_flash_attn_2_available():`."""
    guarded = [name for name in list(sys.modules) if name.startswith(("transformers.models.", "transformers_modules."))]
    for name in [_FLASH_UTILS, *guarded]:
        module = sys.modules.get(name)
        # getattr on a lazy module of transformers would import its content; __dict__ does not.
        if module is None or not _GUARDS & vars(module).keys():
            continue
        skipped = _skipped_code(module)
        if not skipped:
            continue
        undo.callback(_restore_namespace, module, dict(vars(module)))
        if name == _FLASH_UTILS:
            # A reload rebinds the globals of its functions, so that it also changes functions imported from it before.
            importlib.reload(module)
        else:
            exec(compile(ast.Module(skipped, []), module.__file__ or name, "exec"), vars(module))


def _skipped_code(module: ModuleType) -> list[ast.stmt]:
    """Return a module's guarded imports, and its classes with a base class from them (ModernBERT's rotary)."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return []
    imports = [
        statement
        for guard in tree.body
        if isinstance(guard, ast.If) and isinstance(guard.test, ast.Call)
        if isinstance(guard.test.func, ast.Name) and guard.test.func.id in _GUARDS
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


def _restore_namespace(module: ModuleType, before: dict[str, Any]) -> None:
    for name in vars(module).keys() - before.keys():
        delattr(module, name)
    vars(module).update(before)


def register_with_transformers(name: str = "fa2_compat") -> None:
    """Register our attention in transformers' own registry, for attn_implementation=`name`.

    Patches nothing and leaves the name flash_attn alone. Models that look for "flash" in the implementation's name
    (some vision towers) take their other branch: also right, but without packing. Needs transformers 4.53 or later.

    Raises ValueError for a name that contains "flash", which transformers takes for a kernel to download, and
    ImportError if transformers is missing or too old.
    """
    if "flash" in name:
        raise ValueError(f"name must not contain 'flash': transformers looks such names up on its hub; got {name!r}")
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    from flash_attn_compat.dropin import attention_classes
    from flash_attn_compat.dropin.attention_function import attention

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_classes.flash_attention_mask)
    attention_classes.register(name)
