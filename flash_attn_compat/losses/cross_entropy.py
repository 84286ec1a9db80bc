"""The cross-entropy module: reductions over rows on top of `ops/triton/cross_entropy.py`."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from flash_attn_compat.ops.triton.cross_entropy import cross_entropy_loss


class CrossEntropyLoss(nn.Module):
    """Cross entropy with label smoothing, z-loss and vocab-parallel logits, on any device.

    Args:
        ignore_index: rows with this label contribute nothing.
        reduction: "mean" (over the rows that are not ignored; nan if there are none), "sum" or "none".
        label_smoothing, logit_scale, lse_square_scale, inplace_backward, process_group:
            as in `flash_attn_compat.ops.triton.cross_entropy.cross_entropy_loss`.
        return_z_loss: return (loss, z_loss), both reduced alike; z_loss is part of loss and has no gradient.
    Raises:
        NotImplementedError: `reduction` is none of the three.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: dist.ProcessGroup | None = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError(f"reduction is {reduction!r}, expected 'mean', 'none' or 'sum'")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            input: (n_rows, vocab_size) logits.
            target: (n_rows,) int32 or int64 labels.
            precomputed_lse: (n_rows,) logsumexp of the logits, or None.
        Returns:
            fp32 loss, a scalar or (n_rows,) with reduction "none"; (loss, z_loss) with `return_z_loss`.
        """
        loss, z_loss = cross_entropy_loss(
            input,
            target,
            precomputed_lse=precomputed_lse,
            label_smoothing=self.label_smoothing,
            logit_scale=self.logit_scale,
            lse_square_scale=self.lse_square_scale,
            ignore_index=self.ignore_index,
            inplace_backward=self.inplace_backward,
            process_group=self.process_group,
        )
        if self.reduction == "mean":
            counted = (target != self.ignore_index).sum()
            loss, z_loss = loss.sum() / counted, z_loss.sum() / counted
        elif self.reduction == "sum":
            loss, z_loss = loss.sum(), z_loss.sum()
        return (loss, z_loss) if self.return_z_loss else loss
