"""Let transformers' names of flash attention kernels on its hub lead to our functions, where that is asked for.

transformers 5 sends models with attention sinks (gpt-oss) from flash_attention_2 to such a kernel, which needs the
package `kernels`, a download and a GPU of the kernel's kind. It has no setting for the case; what stands in here is its
private function that loads one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from flash_attn_compat.naming.journal import give_back, set_attribute, when_imported

NAMES = ("kernels-community/flash-attn2", "kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3")
_LOADED = ("_loaded_implementation", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


def answer(undo: ExitStack) -> None:
    """Let NAMES lead to our functions in transformers 5, imported already or later; older ones are left alone."""
    handlers = {
        "transformers.modeling_flash_attention_utils": _answer_loader,
        "transformers.modeling_utils": _register,
    }
    when_imported(handlers, undo)


def _answer_loader(module: ModuleType, undo: ExitStack) -> None:
    original = getattr(module, "_lazy_imports", None)
    if original is not None and hasattr(module, "FLASH_ATTN_KERNEL_FALLBACK"):
        give_back(module, _LOADED, undo)
        set_attribute(module, "_lazy_imports", _with_ours(original), undo)


def _with_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation not in NAMES:
            return original(implementation, *args, **kwargs)
        ours = importlib.import_module("flash_attn_compat.flash_attn_interface")
        # In the order, and with the padding functions, that this transformers wants.
        given = original("flash_attention_2", *args, **kwargs)
        return tuple(getattr(ours, getattr(f, "__name__", ""), f) for f in given)

    return _lazy_imports


def _register(module: ModuleType, undo: ExitStack) -> None:
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return
    masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    for registry in (module.ALL_ATTENTION_FUNCTIONS, masks):
        known = registry._global_mapping
        for name in NAMES:
            if name not in known and "flash_attention_2" in known:
                registry.register(name, known["flash_attention_2"])
                undo.callback(known.pop, name, None)
