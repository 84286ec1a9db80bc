from flash_attn_compat import fa3 as flash_attn_interface  # noqa: F401
from flash_attn_compat.fa3 import *  # noqa: F403
