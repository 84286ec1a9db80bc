"""A file for tools that look for files: what is imported is flash_attn_compat's module of this name."""

import _flash_attn_compat_startup

_flash_attn_compat_startup.put_ours_in_place(__name__)
