"""Attention sinks: a logit per head that takes part in the softmax and has no value (Xiao et al. 2024; gpt-oss).

The result out', lse' with sinks follows from the result out, lse of an ordinary call:

    out' = out * sigmoid(lse - sink),   lse' = log(exp(lse) + exp(sink)).

Autograd then gives the gradients, since an ordinary call has gradients of both out and lse. A row that sees no key has
only the sink: out' = 0, lse' = sink, although its lse is +inf.
Not part of flash-attn 2; the argument's name, s_aux, is that of FlashAttention 3's forks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check(s_aux: Tensor, nheads: int, device: torch.device, alibi_slopes: Tensor | None) -> None:
    """Raise unless s_aux is (nheads,) on q's device, and the call has no ALiBi."""
    if not isinstance(s_aux, Tensor) or not s_aux.is_floating_point() or s_aux.shape != (nheads,):
        found = f"{s_aux.dtype} of shape {tuple(s_aux.shape)}" if isinstance(s_aux, Tensor) else type(s_aux).__name__
        raise RuntimeError(f"s_aux must be a floating-point tensor of shape (nheads,) = ({nheads},), got {found}")
    if s_aux.device != device:
        raise RuntimeError(f"s_aux must be on q's device {device}, got {s_aux.device}")
    if alibi_slopes is not None:
        raise RuntimeError("s_aux and alibi_slopes cannot be combined")


def absorb(out: Tensor, lse: Tensor, s_aux: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out', lse'), the result with sinks, from (out, lse), the result without.

    out: (..., rows, nheads, headdim); lse: (..., nheads, rows); s_aux: (nheads,).
    """
    sink = s_aux.to(lse.dtype)
    share = _share_of_keys(lse, sink)
    of_both = torch.logaddexp(lse, sink[:, None])
    return (out * share).to(out.dtype), torch.where(lse.isposinf(), sink[:, None], of_both)


def absorb_in_place(out: Tensor, lse: Tensor, s_aux: Tensor) -> None:
    """Turn ``out`` into the result with sinks, in place, without an LSE. Shapes as in ``absorb``; s_aux is fp32."""
    out.mul_(_share_of_keys(lse, s_aux))


def _share_of_keys(lse: Tensor, sink: Tensor) -> Tensor:
    """Return the part of each row's softmax that goes to keys, not to the sink: (..., rows, nheads, 1)."""
    return torch.sigmoid(lse.transpose(-2, -1) - sink)[..., None]
