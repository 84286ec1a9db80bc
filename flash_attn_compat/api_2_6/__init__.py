"""Where flash-attn 2.6.3 differs from 2.8: signatures and return shapes, over the same functions.

Modules here stand under flash_attn's name where the interface of 2.6 is asked for (FLASH_ATTN_COMPAT_API); every other
module is the one of 2.8. Nothing is computed here.
"""
