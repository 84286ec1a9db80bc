from flash_attn_compat import flash_attn_interface  # noqa: F401
from flash_attn_compat.flash_attn_interface import *  # noqa: F403
