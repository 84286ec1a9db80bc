"""flash-attn's API (FlashAttention-2, 2.8) in pure PyTorch, on every machine that flash-attn refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
# The release of flash-attn whose behaviour this package has, and reports when it answers to its name.
FLASH_ATTN_VERSION = "2.8.3"

if TYPE_CHECKING:
    from flash_attn_compat.aten.switch import register_with_torch, sdpa
    from flash_attn_compat.flash_attn_interface import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from flash_attn_compat.naming.patch import patch, patched, unpatch
    from flash_attn_compat.naming.transformers import register_with_transformers
    from flash_attn_compat.serving.dispatch import (
        BackendNotSupported,
        Explanation,
        backend_counts,
        explain,
        reset_backend_counts,
        use_backend,
    )

# Where each public name lives. Loading them on first use lets `patch` and the command line work without torch.
_HOMES = {
    "flash_attn_func": "flash_attn_interface",
    "flash_attn_kvpacked_func": "flash_attn_interface",
    "flash_attn_qkvpacked_func": "flash_attn_interface",
    "flash_attn_varlen_func": "flash_attn_interface",
    "flash_attn_varlen_kvpacked_func": "flash_attn_interface",
    "flash_attn_varlen_qkvpacked_func": "flash_attn_interface",
    "flash_attn_with_kvcache": "flash_attn_interface",
    "BackendNotSupported": "serving.dispatch",
    "Explanation": "serving.dispatch",
    "backend_counts": "serving.dispatch",
    "explain": "serving.dispatch",
    "reset_backend_counts": "serving.dispatch",
    "use_backend": "serving.dispatch",
    "patch": "naming",
    "patched": "naming",
    "unpatch": "naming",
    "register_with_transformers": "naming",
    "register_with_torch": "aten.switch",
    "sdpa": "aten.switch",
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
