"""flash_attn_interface, FlashAttention-3's name, answered by flash_attn_compat under patch(interfaces=("fa3",))."""

from flash_attn_compat.fa3 import (  # noqa: F401
    _flash_attn_backward,
    _flash_attn_forward,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
