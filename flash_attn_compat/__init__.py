"""flash-attn's API (FlashAttention-2, 2.8) in pure PyTorch, on every machine that flash-attn refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
# This package behaves like this release of flash-attn, and reports it as its version under flash-attn's name.
FLASH_ATTN_VERSION = "2.8.3"

if TYPE_CHECKING:
    from flash_attn_compat.dispatch.choice import (
        BackendNotSupported,
        Explanation,
        backend_counts,
        explain,
        reset_backend_counts,
        use_backend,
    )
    from flash_attn_compat.dropin.patch import patch, patched, unpatch
    from flash_attn_compat.dropin.transformers import register_with_transformers
    from flash_attn_compat.flash_attn_interface import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from flash_attn_compat.torch_flex.override import flex
    from flash_attn_compat.torch_sdpa.override import register_with_torch, sdpa

# The module of each public name. Modules are imported at first use, so that `patch` and the command work without torch.
_HOMES = {
    "flash_attn_func": "flash_attn_interface",
    "flash_attn_kvpacked_func": "flash_attn_interface",
    "flash_attn_qkvpacked_func": "flash_attn_interface",
    "flash_attn_varlen_func": "flash_attn_interface",
    "flash_attn_varlen_kvpacked_func": "flash_attn_interface",
    "flash_attn_varlen_qkvpacked_func": "flash_attn_interface",
    "flash_attn_with_kvcache": "flash_attn_interface",
    "BackendNotSupported": "dispatch.choice",
    "Explanation": "dispatch.choice",
    "backend_counts": "dispatch.choice",
    "explain": "dispatch.choice",
    "reset_backend_counts": "dispatch.choice",
    "use_backend": "dispatch.choice",
    "patch": "dropin",
    "patched": "dropin",
    "unpatch": "dropin",
    "register_with_transformers": "dropin",
    "register_with_torch": "torch_sdpa.override",
    "sdpa": "torch_sdpa.override",
    "flex": "torch_flex.override",
}

__all__ = [
    "FLASH_ATTN_VERSION",
    "BackendNotSupported",
    "Explanation",
    "__version__",
    "backend_counts",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex",
    "patch",
    "patched",
    "register_with_torch",
    "register_with_transformers",
    "reset_backend_counts",
    "sdpa",
    "unpatch",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
