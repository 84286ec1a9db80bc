"""kernels-community/flash-attn2, answered by flash_attn_compat."""

from flash_attn_compat import flash_attn_interface  # noqa: F401
from flash_attn_compat.flash_attn_interface import (  # noqa: F401
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
