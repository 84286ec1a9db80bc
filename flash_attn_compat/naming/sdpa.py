"""F.scaled_dot_product_attention on our kernels, from the import of torch on, for who asks patch() for it.

What is done to PyTorch's operators is in aten/. Like the rest of naming, this needs no torch.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import ModuleType

from flash_attn_compat.naming.journal import when_imported


def switch_on(undo: ExitStack, wish: str) -> None:
    """Hold the switch until `undo` is closed. wish: "1", or "always", as FLASH_ATTN_COMPAT_SDPA says it."""

    def hold(torch: ModuleType, undo: ExitStack) -> None:
        from flash_attn_compat.aten import switch

        undo.enter_context(switch.sdpa(always=wish == "always"))

    when_imported({"torch": hold}, undo)
