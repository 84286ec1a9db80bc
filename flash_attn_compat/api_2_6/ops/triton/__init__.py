"""ops.triton of flash-attn 2.6."""

import functools

from flash_attn_compat.api_2_6._old import import_submodule

__getattr__ = functools.partial(import_submodule, __name__)
