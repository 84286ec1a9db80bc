"""flash_attn.cute.interface, where FlashAttention-4 defines its functions."""

from flash_attn_compat.fa4 import flash_attn_func, flash_attn_varlen_func  # noqa: F401
