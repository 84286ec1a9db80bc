"""Pack padded tensors (batch, seqlen, ...) into (total, ...), and pad them again.

Only index arithmetic and its gradients. Clients import `rearrange` and `repeat` from this module.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

__all__ = [
    "IndexFirstAxis",
    "IndexFirstAxisResidual",
    "IndexPutFirstAxis",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "rearrange",
    "repeat",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


class IndexFirstAxis(torch.autograd.Function):
    """Rows `input[indices]`; the backward assigns (does not add) into zeros, as flash-attn 2.8 does."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> Tensor:
        _check_rows("index_first_axis", "input", input, indices)
        ctx.save_for_backward(indices)
        ctx.first_axis_dim = input.shape[0]
        return input.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return _put_rows(grad_output, indices, ctx.first_axis_dim), None


class IndexPutFirstAxis(torch.autograd.Function):
    """`values` written to rows `indices` of zeros; the backward gathers the same rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
        _check_rows("index_put_first_axis", "values", values, indices)
        ctx.save_for_backward(indices)
        return _put_rows(values, indices, first_axis_dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return grad_output.index_select(0, indices), None, None


class IndexFirstAxisResidual(torch.autograd.Function):
    """Rows `input[indices]` and `input` itself, so that one node receives both gradients."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        _check_rows("index_first_axis_residual", "input", input, indices)
        ctx.save_for_backward(indices)
        return input.index_select(0, indices), input.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_residual: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        # Out of place: autograd may pass the same (or an expanded) gradient to other nodes.
        return grad_residual.index_add(0, indices, grad_output), None


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Select rows along the first axis.

    Args:
        input: (n, ...) with at least two dimensions, any dtype.
        indices: (z,) int64 or int32, each row at most once: of a repeated row's gradients, only one is kept, as in
            flash-attn 2.8.
    Returns:
        (z, ...), differentiable in `input`.
    Raises:
        AssertionError: `input` has fewer than two dimensions, or `indices` is not 1-D.
    """
    if not _is_recorded(input):
        _check_rows("index_first_axis", "input", input, indices)
        return input.index_select(0, indices)
    rows: Tensor = IndexFirstAxis.apply(input, indices)
    return rows


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Scatter rows along the first axis of a zero tensor.

    Args:
        values: (z, ...) with at least two dimensions, any dtype.
        indices: (z,) int64 or int32, no duplicates.
        first_axis_dim: number of rows of the result.
    Returns:
        (first_axis_dim, ...) with `out[indices] = values` and zeros elsewhere, differentiable in `values`.
    Raises:
        AssertionError: `values` has fewer than two dimensions, or `indices` is not 1-D.
    """
    if not _is_recorded(values):
        _check_rows("index_put_first_axis", "values", values, indices)
        return _put_rows(values, indices, first_axis_dim)
    put: Tensor = IndexPutFirstAxis.apply(values, indices, first_axis_dim)
    return put


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Select rows along the first axis and also return the whole input for a residual connection.

    Args:
        input: (n, ...) with at least two dimensions.
        indices: (z,) int64 or int32.
    Returns:
        ((z, ...) selected rows, (n, ...) the input); the gradients of both reach `input`.
    """
    both: tuple[Tensor, Tensor] = IndexFirstAxisResidual.apply(input, indices)
    return both


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop the padding of a batch and pack the other tokens.

    Args:
        hidden_states: (batch, seqlen, ...) with at least three dimensions, any dtype.
        attention_mask: (batch, seqlen), bool or a number; non-zero means the token is used.
        unused_mask: (batch, seqlen), non-zero for further tokens to pack that do not count in `seqused`.
    Returns:
        hidden_states: (total_nnz, ...), the tokens of attention_mask + unused_mask; differentiable.
        indices: (total_nnz,) int64, their positions in the flattened (batch * seqlen) axis.
        cu_seqlens: (batch + 1,) int32, cumulative lengths of attention_mask + unused_mask.
        max_seqlen_in_batch: int, the longest of these (reading it synchronises with the device).
        seqused: (batch,) int32, tokens of attention_mask alone.

    Five values, as flash-attn has returned since 2.7.0 (2.6 returned the first four).
    """
    _check_mask("unpad_input", "attention_mask", attention_mask, hidden_states)
    kept = attention_mask != 0
    seqused = seqlens = kept.sum(dim=-1, dtype=torch.int32)
    if unused_mask is not None:
        _check_mask("unpad_input", "unused_mask", unused_mask, hidden_states)
        kept = kept | (unused_mask != 0)
        seqlens = kept.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    max_seqlen_in_batch = int(seqlens.max().item())
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _cumulative(seqlens), max_seqlen_in_batch, seqused


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Drop the padding of rows that hold several samples each.

    Args:
        hidden_states: (batch, seqlen, ...) with at least three dimensions.
        attention_mask_in_length: (batch, seqlen) integers: each row starts with the lengths of its
            samples and is zero after them. [2, 3, 0, 0, 0, 0] is a row of six tokens that holds a
            sample of two, a sample of three and one token of padding.
    Returns:
        hidden_states: (total_nnz, ...), differentiable.
        indices: (total_nnz,) int64 positions in the flattened (batch * seqlen) axis.
        cu_seqlens: (samples + 1,) int32 over all samples in row-major order.
        max_seqlen_in_batch: int, the longest sample.
    Raises:
        ValueError: the lengths of a row add up to more than seqlen.
    """
    name = "unpad_input_for_concatenated_sequences"
    _check_mask(name, "attention_mask_in_length", attention_mask_in_length, hidden_states)
    seqlen = hidden_states.shape[1]
    row_lengths = attention_mask_in_length.sum(dim=-1)
    positions = torch.arange(seqlen, device=row_lengths.device, dtype=row_lengths.dtype)
    kept = positions[None, :] < row_lengths[:, None]
    lengths = attention_mask_in_length.flatten()
    seqlens = lengths[torch.nonzero(lengths, as_tuple=False).flatten()].to(torch.int32)
    longest_row, max_seqlen_in_batch = torch.stack([row_lengths.max().to(torch.int32), seqlens.max()]).tolist()
    if longest_row > seqlen:
        raise ValueError(
            f"{name}: the lengths in a row of attention_mask_in_length add up to {longest_row}, "
            f"expected at most seqlen = {seqlen}"
        )
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _cumulative(seqlens), max_seqlen_in_batch


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens back into a padded batch.

    Args:
        hidden_states: (total_nnz, ...) with at least two dimensions.
        indices: (total_nnz,) int64 or int32, positions in the flattened (batch * seqlen) axis.
        batch: number of rows of the result.
        seqlen: padded length of the result.
    Returns:
        (batch, seqlen, ...) with zeros in the padding, differentiable.
    """
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *padded.shape[1:])


def _is_recorded(tensor: Tensor) -> bool:
    """Whether autograd records functions of ``tensor``; if not, `apply` would only cost time, and callers skip it."""
    return tensor.requires_grad and torch.is_grad_enabled()


def _put_rows(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    out = torch.zeros(first_axis_dim, *values.shape[1:], device=values.device, dtype=values.dtype)
    if indices.dtype == torch.int64:
        return out.index_copy_(0, indices, values)
    out[indices] = values  # int32, which transformers passes in decoding
    return out


def _cumulative(seqlens: Tensor) -> Tensor:
    return F.pad(torch.cumsum(seqlens, dim=0, dtype=torch.int32), (1, 0))


def _check_rows(function: str, name: str, tensor: Tensor, indices: Tensor) -> None:
    assert tensor.ndim >= 2, f"{function}: {name} has shape {tuple(tensor.shape)}, expected at least 2 dimensions"
    assert indices.ndim == 1, f"{function}: indices has shape {tuple(indices.shape)}, expected 1 dimension"


def _check_mask(function: str, name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if mask.shape == hidden_states.shape[:2]:
        return
    raise ValueError(
        f"{function}: hidden_states has shape {tuple(hidden_states.shape)}, {name} has shape {tuple(mask.shape)}, "
        f"expected {name} of shape (batch, seqlen) = {tuple(hidden_states.shape[:2])}"
    )
