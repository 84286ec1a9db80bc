import flash_attn  # noqa: F401  (whose interface this goes by)
from _flash_attn_compat_startup import put_ours_in_place

put_ours_in_place(__name__)
