"""Layer norm and RMS norm fused with dropout and residual addition.

Signatures, masks and return shapes; the arithmetic is in `ops/_add_norm.py`, that of the plain references in
`ops/triton/_norm_ref.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_attn_compat.ops._add_norm import NormInputs, NormOptions, add_norm, dropout_mask
from flash_attn_compat.ops.triton._norm_ref import layer_norm_ref, rms_norm_ref

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]

Results = Tensor | tuple[Tensor | None, ...]


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Results:
    """y = norm(h) * weight + bias with h = dropout(x * rowscale) [+ dropout(x1)] [+ residual], in fp32.

    Args:
        x: (..., n) of any floating dtype and any n.
        weight, bias: (n,), any floating dtype; bias may be None.
        residual: (..., n), added to h; may have another dtype.
        x1: (..., n), a second branch added to h with a dropout mask of its own.
        weight1, bias1: (n,), give a second output y1 = norm(h) * weight1 + bias1.
        dropout_p: probability of dropping an element, applied whenever positive (also in evaluation).
        rowscale: (...), one factor per row of x; not together with x1.
        prenorm: also return h, in residual's dtype, else fp32 if residual_in_fp32, else x's dtype.
            It is x itself if nothing was added, scaled, dropped or cast.
        zero_centered_weight: weights are stored minus one.
        is_rms_norm: divide by the root mean square, without centring.
        return_dropout_mask: append the two masks.
        out_dtype: dtype of y and y1, x's by default.
        out, residual_out: tensors of x's shape to write y and h into (and to return).
    Returns:
        y, or a tuple (y[, y1][, h][, mask, mask1]): y1 with weight1, h with prenorm, the masks (bool, x's shape,
        True = kept; None without dropout, mask1 None without x1) with return_dropout_mask.
    Raises:
        AssertionError: shapes do not fit, or rowscale together with x1.
    """
    assert rowscale is None or x1 is None, "rowscale is not supported with parallel LayerNorm"
    mask = dropout_mask(x, dropout_p)
    mask1 = None if x1 is None else dropout_mask(x1, dropout_p)
    residual_dtype = x.dtype
    if residual is not None:
        residual_dtype = residual.dtype
    elif residual_in_fp32:
        residual_dtype = torch.float32
    y, y1, h = add_norm(
        NormInputs(x, weight, bias, residual, x1, weight1, bias1, rowscale, mask=mask, mask1=mask1),
        NormOptions(
            eps=eps,
            is_rms_norm=is_rms_norm,
            out_dtype=x.dtype if out_dtype is None else out_dtype,
            residual_dtype=residual_dtype if prenorm else None,
            dropout_p=dropout_p,
            zero_centered_weight=zero_centered_weight,
        ),
    )
    y = _write(y, out)
    results: tuple[Tensor | None, ...] = (y,)
    if weight1 is not None:
        results += (y1,)
    if prenorm:
        assert h is not None
        results += (_write(h, residual_out),)
    if return_dropout_mask:
        results += (mask, mask1)
    return results if len(results) > 1 else y


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Results:
    """`layer_norm_fn` with is_rms_norm=True (Zhang and Sennrich 2019)."""
    return layer_norm_fn(
        x,
        weight,
        bias,
        residual=residual,
        x1=x1,
        weight1=weight1,
        bias1=bias1,
        eps=eps,
        dropout_p=dropout_p,
        rowscale=rowscale,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        zero_centered_weight=zero_centered_weight,
        is_rms_norm=True,
        return_dropout_mask=return_dropout_mask,
        out_dtype=out_dtype,
        out=out,
        residual_out=residual_out,
    )


class RMSNorm(nn.Module):
    """RMS norm over the last axis, with optional dropout and residual addition before it.

    Args:
        hidden_size: n, the size of the last axis.
        eps: added to the mean square.
        dropout_p: dropout of x in training.
        zero_centered_weight: store the weight minus one.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.zero_centered_weight = zero_centered_weight
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that it scales by 1."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Results:
        """x (..., n) to y in x's dtype, or (y, h) with `prenorm`; see `rms_norm_fn`."""
        return rms_norm_fn(
            x,
            self.weight,
            None,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )


def _write(value: Tensor, target: Tensor | None) -> Tensor:
    return value if target is None else target.copy_(value)
