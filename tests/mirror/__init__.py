"""flash_attn's modules around attention, and its private and older interfaces."""
