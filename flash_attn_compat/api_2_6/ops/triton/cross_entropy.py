"""ops.triton.cross_entropy of flash-attn 2.6: no precomputed_lse."""

from flash_attn_compat.api_2_6._old import without
from flash_attn_compat.ops.triton import cross_entropy as _current
from flash_attn_compat.ops.triton.cross_entropy import CrossEntropyLoss

__all__ = ["CrossEntropyLoss", "cross_entropy_loss"]

cross_entropy_loss = without({"precomputed_lse"}, _current.cross_entropy_loss, __name__)
