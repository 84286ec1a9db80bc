"""Let the names of flash attention kernels on Hugging Face's hub lead to our functions, where that is asked for.

The package `kernels` has a setting for it: LOCAL_KERNELS names folders that stand in for downloads. transformers 5
sends models with attention sinks (gpt-oss) from flash_attention_2 to such a kernel even where `kernels` is not
installed, and has no setting for that; what stands in there is its private function that loads one.
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

from flash_attn_compat.dropin.undo import give_back, set_attribute, set_item, when_imported

NAMES = ("kernels-community/flash-attn2", "kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3")
# Where `kernels` looks for builds of a kernel instead of downloading it: NAME=FOLDER:NAME=FOLDER
LOCAL_KERNELS = "LOCAL_KERNELS"
FOLDER = Path(__file__).with_name("hub_flash_attn2")
FOLDERS = {NAMES[0]: FOLDER, NAMES[1]: Path(__file__).with_name("hub_flash_attn3")}
_LOADED = ("_loaded_implementation", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


def redirect(undo: ExitStack) -> None:
    """Let NAMES lead to our functions in transformers 5, imported already or later; older ones are left alone.

    get_kernel does so for flash-attn2, and gives FlashAttention-3's functions for flash-attn3, here and in children.
    vllm-flash-attn3 has other functions.
    """
    given = [entry for entry in os.environ.get(LOCAL_KERNELS, "").split(":") if entry]
    theirs = {entry.partition("=")[0] for entry in given}
    ours = [f"{name}={folder}" for name, folder in FOLDERS.items() if name not in theirs]
    if ours and os.name != "nt":  # whose paths contain what separates the entries
        set_item(os.environ, LOCAL_KERNELS, ":".join([*given, *ours]), undo)
    handlers = {
        "transformers.modeling_flash_attention_utils": _redirect_loader,
        "transformers.modeling_utils": _register,
    }
    when_imported(handlers, undo)


def _redirect_loader(module: ModuleType, undo: ExitStack) -> None:
    original = getattr(module, "_lazy_imports", None)
    if original is not None and hasattr(module, "FLASH_ATTN_KERNEL_FALLBACK"):
        give_back(module, _LOADED, undo)
        set_attribute(module, "_lazy_imports", _with_ours(original), undo)


def _with_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if _repository(implementation) not in NAMES:
            return original(implementation, *args, **kwargs)
        for known in _registries():
            known.setdefault(implementation, known["flash_attention_2"])
        ours = importlib.import_module("flash_attn_compat.flash_attn_interface")
        # In the order, and with the padding functions, that this transformers wants.
        given = original("flash_attention_2", *args, **kwargs)
        return tuple(getattr(ours, getattr(f, "__name__", ""), f) for f in given)

    return _lazy_imports


def _repository(implementation: str | None) -> str:
    """Without the @revision and the :function that may follow a name."""
    return (implementation or "").partition(":")[0].partition("@")[0]


def _registries() -> list[dict[str | None, Any]]:
    """Of transformers' attention and mask functions, by name."""
    masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    return [functions._global_mapping, masks._global_mapping]


def _register(module: ModuleType, undo: ExitStack) -> None:
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return
    for known in _registries():
        added = [name for name in NAMES if name not in known and "flash_attention_2" in known]
        known.update((name, known["flash_attention_2"]) for name in added)
        undo.callback(_take_out, known, added)


def _take_out(known: dict[str | None, Any], added: list[str]) -> None:
    """The names that were added, those with a revision or a function included."""
    for name in [name for name in known if _repository(name) in added]:
        del known[name]
