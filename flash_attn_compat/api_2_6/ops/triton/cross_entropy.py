"""ops.triton.cross_entropy of flash-attn 2.6: label_smoothing is the third argument."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from flash_attn_compat.ops.triton import cross_entropy as _current
from flash_attn_compat.ops.triton.cross_entropy import CrossEntropyLoss

__all__ = ["CrossEntropyLoss", "cross_entropy_loss"]


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, logit_scale: float = 1.0,
    lse_square_scale: float = 0.0, ignore_index: int = -100, inplace_backward: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`flash_attn_compat.ops.triton.cross_entropy.cross_entropy_loss` with the arguments in the order of 2.6."""
    return _current.cross_entropy_loss(
        logits, labels, None, label_smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward,
        process_group,
    )  # fmt: skip
