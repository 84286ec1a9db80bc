"""In interpreters that start patched, or where the name is installed: prepare packages that are imported later."""

from __future__ import annotations

from contextlib import ExitStack

from flash_attn_compat import settings
from flash_attn_compat.naming import hub_kernels, sdpa, transformers, varlen_attn

_for_good = ExitStack()  # never closed


def prepare(package: str) -> None:
    """Called when the import of `package` prepare in an interpreter that has not called patch()."""
    if package == "transformers":
        transformers.allow_flash_attention_2(_for_good)
        if settings.hub_kernels():
            hub_kernels.redirect(_for_good)
    elif package == "torch":
        wish = settings.sdpa()
        if wish:
            sdpa.switch_on(_for_good, wish)
    elif settings.varlen_attn():
        varlen_attn.switch_on(_for_good)
