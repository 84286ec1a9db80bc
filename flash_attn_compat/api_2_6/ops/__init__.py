"""The package ops as flash-attn 2.6 has it: only ops.triton differs from 2.8's."""

import functools

from flash_attn_compat.api_2_6._old import import_submodule

__getattr__ = functools.partial(import_submodule, __name__)
