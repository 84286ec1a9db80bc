"""flash_attn.cute, FlashAttention-4's name, answered by flash_attn_compat under patch(interfaces=("fa4",))."""

from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

__version__ = "4.0.0b27"
__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
