"""Is a variant right? It is compared with plain PyTorch once, on a tiny problem, before its first real call."""

from __future__ import annotations

from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.backends.fused.variants import Kind, Variant


def check(variant: Variant, kind: Kind, target: Target, device: int) -> None:
    """Nothing is tried yet."""
