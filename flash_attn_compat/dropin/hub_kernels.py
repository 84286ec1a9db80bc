"""Resolve the names of flash attention kernels on Hugging Face's hub to our functions, on request.

The package `kernels` has a setting for it: LOCAL_KERNELS names folders to use instead of downloads. transformers 5
sends models with attention sinks (gpt-oss) from flash_attention_2 to such a kernel even if `kernels` is not installed.
transformers has no setting for that, so its private function that loads a kernel is replaced.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from flash_attn_compat.dropin.undo import restore_later, set_attribute, set_item, when_imported

NAMES = (
    "kernels-community/flash-attn2", "kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3",
    "kernels-community/flash-attn",  # the name of flash-attn2 until late 2025
    "kernels-community/flash-attn4",
)  # fmt: skip
# The variable in which `kernels` looks for folders to use instead of downloads: NAME=FOLDER:NAME=FOLDER
LOCAL_KERNELS = "LOCAL_KERNELS"
FOLDER = Path(__file__).with_name("hub_flash_attn2")
FOLDERS = {NAMES[0]: FOLDER, NAMES[1]: Path(__file__).with_name("hub_flash_attn3"), NAMES[3]: FOLDER}
_LOADED = ("_loaded_implementation", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


def redirect(undo: ExitStack) -> None:
    """Resolve NAMES to our functions in transformers 5, imported already or later; older versions stay as they are.

    `kernels`' get_kernel returns our flash-attn 2 for flash-attn2, or flash-attn, and our FlashAttention-3 for
    flash-attn3, here and in child processes. It still downloads vllm-flash-attn3 and flash-attn4, which have other
    functions.
    """
    entries = [entry for entry in os.environ.get(LOCAL_KERNELS, "").split(":") if entry]
    named = {entry.partition("=")[0] for entry in entries}
    ours = [f"{name}={folder}" for name, folder in FOLDERS.items() if name not in named]
    if ours and os.name != "nt":  # Windows' paths contain ":"
        set_item(os.environ, LOCAL_KERNELS, ":".join([*entries, *ours]), undo)
    handlers = {
        "transformers.modeling_flash_attention_utils": _redirect_loader,
        "transformers.modeling_utils": _add_names,
    }
    when_imported(handlers, undo)


def _redirect_loader(module: ModuleType, undo: ExitStack) -> None:
    original = getattr(module, "_lazy_imports", None)
    if original is not None and hasattr(module, "FLASH_ATTN_KERNEL_FALLBACK"):
        restore_later(module, _LOADED, undo)
        set_attribute(module, "_lazy_imports", _import_ours_for_names(original), undo)


def _import_ours_for_names(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if _repository(implementation) not in NAMES:
            return original(implementation, *args, **kwargs)
        for registry in _registries():
            registry.setdefault(implementation, registry["flash_attention_2"])
        ours = importlib.import_module("flash_attn_compat.flash_attn_interface")
        # Replaced by name: each version of transformers returns other functions, in another order.
        functions = original("flash_attention_2", *args, **kwargs)
        return tuple(getattr(ours, getattr(f, "__name__", ""), f) for f in functions)

    return _lazy_imports


def is_hub_name(implementation: str) -> bool:
    """Whether this is one of NAMES, also with a @revision or a :function behind it."""
    return _repository(implementation) in NAMES


def _repository(implementation: str | None) -> str:
    """Return the repository's name without the @revision and :function that may follow it."""
    return (implementation or "").partition(":")[0].partition("@")[0]


def _registries() -> list[dict[str | None, Any]]:
    """Return transformers' tables of attention and mask functions, by name."""
    masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    return [functions._global_mapping, masks._global_mapping]


def _add_names(module: ModuleType, undo: ExitStack) -> None:
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return
    for registry in _registries():
        added = [name for name in NAMES if name not in registry and "flash_attention_2" in registry]
        registry.update((name, registry["flash_attention_2"]) for name in added)
        undo.callback(_remove_names, registry, added)


def _remove_names(registry: dict[str | None, Any], added: list[str]) -> None:
    """Remove the added names, also with a revision or a function behind them."""
    for name in [name for name in registry if _repository(name) in added]:
        del registry[name]
