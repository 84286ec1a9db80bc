import flash_attn  # noqa: F401  (it decides the interface, 2.6 or 2.8)
from _flash_attn_compat_startup import put_ours_in_place

put_ours_in_place(__name__)
