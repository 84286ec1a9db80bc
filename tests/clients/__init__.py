"""Libraries that import flash_attn, unmodified, after patch()."""
