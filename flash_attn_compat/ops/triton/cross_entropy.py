"""Cross entropy with label smoothing, z-loss and vocab-parallel logits, a block of rows at a time.

Pure PyTorch. The logits are read in blocks so that no fp32 copy of all of them ever exists; reductions
over rows (mean, sum) are `losses/cross_entropy.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits held in fp32 at once: 128 MiB.
_BLOCK_ELEMENTS = 2**25


class CrossEntropyLoss(torch.autograd.Function):
    """Per-row losses and their gradient in the logits. See `cross_entropy_loss`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        precomputed_lse: Tensor | None = None,
        smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        ignore_index: int = -100,
        inplace_backward: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        world_size, rank = _count_ranks(process_group)
        n_rows, n_cols = logits.shape
        total_classes = world_size * n_cols
        ignored = labels == ignore_index
        # Classes of this rank are [first_class, first_class + n_cols).
        local_labels = labels.long() - rank * n_cols
        local = (local_labels >= 0) & (local_labels < n_cols) & ~ignored
        known = (labels >= 0) & (labels < total_classes) & ~ignored

        columns = torch.where(local, local_labels, 0)[:, None]
        label_logit = logits.gather(1, columns).squeeze(1) if n_cols else logits.new_zeros(n_rows)
        label_logit = torch.where(local, label_logit.to(_compute_dtype(logits)) * logit_scale, 0.0)
        use_precomputed = precomputed_lse is not None and logit_scale == 1.0 and smoothing == 0.0
        if use_precomputed:
            assert precomputed_lse is not None
            lse = precomputed_lse.to(label_logit.dtype)
            logit_sum = torch.zeros_like(lse)
        else:
            lse, logit_sum = _sum_rows(logits, logit_scale, with_logit_sum=smoothing > 0.0)
        if world_size > 1:
            lse, label_logit, logit_sum = _combine_ranks(lse, label_logit, logit_sum, rank, world_size, process_group)

        # Rows whose label is no class keep only the terms of smoothing and z-loss.
        losses = (1.0 - smoothing) * torch.where(known, lse - label_logit, 0.0)
        if smoothing > 0.0:
            losses = losses + smoothing * (lse - logit_sum / total_classes)
        z_losses = torch.zeros_like(losses)
        if lse_square_scale != 0.0:
            z_losses = (lse_square_scale * lse.square()).masked_fill(ignored, 0.0)
        losses = (losses + z_losses).masked_fill(ignored, 0.0)

        ctx.save_for_backward(logits, lse, local_labels, local, ignored)
        ctx.smoothing, ctx.logit_scale, ctx.lse_square_scale = smoothing, logit_scale, lse_square_scale
        ctx.total_classes, ctx.inplace_backward = total_classes, inplace_backward
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, grad_z_losses: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, local_labels, local, ignored = ctx.saved_tensors
        # detach() shares the version counter: another backward that needs the overwritten logits raises an error,
        # instead of reading gradients as logits.
        dlogits = logits.detach() if ctx.inplace_backward else torch.empty_like(logits)
        row_scale = (grad_losses.to(lse.dtype) * ctx.logit_scale)[:, None]
        lse_factor = (1.0 + 2.0 * ctx.lse_square_scale * lse)[:, None]
        # No torch.where of two numbers: it would return the default dtype, which may be fp16.
        at_label = (local.to(lse.dtype) * -(1.0 - ctx.smoothing))[:, None]
        columns = torch.where(local, local_labels, 0)[:, None]
        for rows in _split_rows(logits):
            grad = _shift(logits[rows], ctx.logit_scale, lse[rows]).exp_()
            if ctx.lse_square_scale != 0.0:
                grad.mul_(lse_factor[rows])
            if ctx.smoothing > 0.0:
                grad.sub_(ctx.smoothing / ctx.total_classes)
            if logits.shape[1]:
                grad.scatter_add_(1, columns[rows], at_label[rows])
            _multiply_into(dlogits[rows], grad, row_scale[rows])
        # Set, not multiplied by 0: ignored rows may have nan as logits.
        dlogits.masked_fill_(ignored[:, None], 0.0)
        return dlogits, None, None, None, None, None, None, None, None


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of every row, in fp32 (fp64 for fp64 logits).

    With z = logits * logit_scale, lse = logsumexp(z) and e = label_smoothing, a row's loss is
    (1 - e) (lse - z[label]) + e (lse - mean(z)) + lse_square_scale * lse^2.

    Args:
        logits: (n_rows, vocab_size) of any floating dtype; with `process_group`, this rank's slice of the classes.
        labels: (n_rows,) int32 or int64, numbered over all classes. A label that is neither a class nor
            `ignore_index` has only the smoothing and z-loss terms, as in flash-attn 2.8.
        precomputed_lse: (n_rows,), logsumexp of these logits (of the local slice with `process_group`); used
            only if logit_scale is 1 and label_smoothing is 0.
        label_smoothing: weight of the uniform distribution over all classes.
        logit_scale: positive factor on the logits.
        lse_square_scale: weight of the z-loss (PaLM, Chowdhery et al. 2022).
        ignore_index: rows with this label have loss 0 and gradient 0.
        inplace_backward: write the gradient over the logits.
        process_group: vocab-parallel: rank r holds classes [r * vocab_size, (r + 1) * vocab_size).
    Returns:
        losses: (n_rows,), differentiable in logits (the gradient has the logits' dtype).
        z_losses: (n_rows,), the lse_square_scale * lse^2 already contained in losses; not differentiable.
    Raises:
        AssertionError: shapes do not fit, or logit_scale is not positive.
    """
    assert logits.ndim == 2, f"logits has shape {tuple(logits.shape)}, expected (n_rows, vocab_size)"
    assert labels.shape == logits.shape[:1], (
        f"logits has shape {tuple(logits.shape)}, labels has shape {tuple(labels.shape)}, "
        f"expected labels of shape {tuple(logits.shape[:1])}"
    )
    assert precomputed_lse is None or precomputed_lse.shape == labels.shape, (
        f"precomputed_lse has shape {tuple(precomputed_lse.shape)}, expected {tuple(labels.shape)}"
    )
    assert logit_scale > 0, f"logit_scale must be positive, got {logit_scale}"
    outputs: tuple[Tensor, Tensor] = CrossEntropyLoss.apply(
        logits,
        labels,
        precomputed_lse,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        inplace_backward,
        process_group,
    )
    return outputs


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _shift(logits: Tensor, logit_scale: float, shift: Tensor) -> Tensor:
    """Return logits * logit_scale - shift[:, None] in shift's dtype, computed in one pass over the logits."""
    return torch.add(-shift[:, None], logits, alpha=logit_scale)


def _multiply_into(target: Tensor, values: Tensor, factor: Tensor) -> None:
    """target = values * factor, rounded to target's dtype in the same pass."""
    if torch.compiler.is_compiling():
        target.copy_(values * factor)
        return
    torch.mul(values, factor, out=target)


def _split_rows(logits: Tensor) -> Iterator[slice]:
    n_rows, n_cols = logits.shape
    block = max(1, _BLOCK_ELEMENTS // max(n_cols, 1))
    for start in range(0, n_rows, block):
        yield slice(start, min(start + block, n_rows))


def _sum_rows(logits: Tensor, logit_scale: float, with_logit_sum: bool) -> tuple[Tensor, Tensor]:
    """Return every row's logsumexp of logits * logit_scale and its sum, or zeros instead of the sum."""
    n_rows, n_cols = logits.shape
    total = torch.zeros(n_rows, device=logits.device, dtype=_compute_dtype(logits))
    if n_cols == 0:
        return total.log(), total
    largest = logits.amax(dim=-1).to(total.dtype) * logit_scale
    # An infinite maximum would turn inf - inf into nan.
    largest = largest.masked_fill(largest.isinf(), 0.0)
    for rows in _split_rows(logits):
        total[rows] = _shift(logits[rows], logit_scale, largest[rows]).exp_().sum(dim=-1)
    lse = total.log().add_(largest)
    return lse, logits.sum(dim=-1, dtype=lse.dtype) * logit_scale if with_logit_sum else torch.zeros_like(lse)


def _count_ranks(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    if process_group is None:
        return 1, 0
    return dist.get_world_size(process_group), dist.get_rank(process_group)


def _combine_ranks(
    lse: Tensor,
    label_logit: Tensor,
    logit_sum: Tensor,
    rank: int,
    world_size: int,
    process_group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return lse, label_logit and logit_sum over all ranks' classes, by one all_reduce, which every backend has."""
    shared = lse.new_zeros(world_size + 2, lse.shape[0])
    shared[rank] = lse
    shared[world_size] = label_logit
    shared[world_size + 1] = logit_sum
    dist.all_reduce(shared, group=process_group)
    return torch.logsumexp(shared[:world_size], dim=0), shared[world_size], shared[world_size + 1]
