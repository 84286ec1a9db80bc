"""flash_attn.ops.triton.rotary: the rotation of rotary embeddings, which core/rotary.py computes."""

from flash_attn_compat.core.rotary import apply_rotary

__all__ = ["apply_rotary"]
