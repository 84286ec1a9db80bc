"""The modules of flash-attn 2.6.3 that differ from 2.8's in signatures or return shapes; all call the same functions.

With FLASH_ATTN_COMPAT_API=2.6, flash_attn's names lead to these modules; every other module is 2.8's.
"""
