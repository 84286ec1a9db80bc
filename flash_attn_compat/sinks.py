"""Attention sinks: a logit per head that takes part in the softmax and has no value (Xiao et al. 2024; gpt-oss).

They follow from an ordinary call. With lse the log of its softmax denominator,

    out' = out * sigmoid(lse - sink),   lse' = log(exp(lse) + exp(sink)),

and the backward of attention, given out' and lse' in place of out and lse, gives the gradients of q, k and v.
Not part of flash-attn 2; the argument's name, s_aux, is that of FlashAttention 3's forks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_attn_compat import private_interface
from flash_attn_compat.engine import checks
from flash_attn_compat.engine.build import Options, Packing
from flash_attn_compat.engine.call import wants_transforms


def check(s_aux: Tensor, q: Tensor, alibi_slopes: Tensor | None) -> None:
    """Raise unless s_aux is (nheads,) on q's device, and the call has no ALiBi."""
    if not isinstance(s_aux, Tensor) or not s_aux.is_floating_point() or s_aux.shape != (q.shape[-2],):
        found = f"{s_aux.dtype} of shape {tuple(s_aux.shape)}" if isinstance(s_aux, Tensor) else type(s_aux).__name__
        raise RuntimeError(f"s_aux must be a floating-point tensor of shape (nheads,) = ({q.shape[-2]},), got {found}")
    if s_aux.device != q.device:
        raise RuntimeError(f"s_aux must be on q's device {q.device}, got {s_aux.device}")
    if alibi_slopes is not None:
        raise RuntimeError("s_aux and alibi_slopes cannot be combined")


def absorb(out: Tensor, lse: Tensor, s_aux: Tensor) -> tuple[Tensor, Tensor]:
    """(out', lse') of (out, lse).

    out: (..., rows, nheads, headdim); lse: (..., nheads, rows); s_aux: (nheads,).
    """
    sink = s_aux.to(lse.dtype)
    sunk = out * torch.sigmoid(lse.transpose(-2, -1) - sink)[..., None]
    # The compiler of torch 2.11 silently loses the gradients of a Function whose output is a `.to` that did nothing.
    sunk = sunk if sunk.dtype == out.dtype else sunk.to(out.dtype)
    return sunk, torch.logaddexp(lse, sink[:, None])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_aux: Tensor,
    options: Options,
    packing: Packing | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """out', or with options.return_attn_probs (out', lse', S_dmask); differentiable in q, k, v and s_aux."""
    check(s_aux, q, options.alibi_slopes)
    if not torch.compiler.is_compiling() and wants_transforms(q, k, v, s_aux):
        raise RuntimeError("s_aux cannot be combined with forward-mode derivatives or torch.func transforms")
    window = checks.window(options.window_size)
    scores = _Scores(
        checks.dropout(options.dropout_p), options.softmax_scale, checks.flag("causal", options.causal), *window,
        options.softcap,
    )  # fmt: skip
    *lengths, block_table = (None, None, 0, 0, None) if packing is None else packing[:5]
    outputs: tuple[Tensor, Tensor, Tensor] = _Sunk.apply(
        q, k, v, s_aux, block_table, *lengths, *scores, bool(options.deterministic), options.return_attn_probs
    )
    return outputs if options.return_attn_probs else outputs[0]


class _Scores(NamedTuple):
    """Arguments of the private functions from dropout_p on."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float | None


class _Sunk(torch.autograd.Function):
    """On the private functions, which a compiler sees as operators."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor, block_table: Tensor | None,
        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, softmax_scale: float | None, causal: bool, left: int, right: int, softcap: float | None,
        deterministic: bool, return_attn_probs: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        scores = (dropout_p, softmax_scale, causal, left, right, softcap)
        return_dmask = return_attn_probs and dropout_p > 0.0
        if cu_seqlens_q is None or cu_seqlens_k is None:
            found = private_interface._flash_attn_forward(q, k, v, *scores, None, return_dmask)
        else:
            found = private_interface._flash_attn_varlen_forward(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *scores, None, return_dmask,
                block_table,
            )  # fmt: skip
        out, lse, dmask, rng_state = found
        out, lse = absorb(out, lse, s_aux)
        ctx.save_for_backward(q, k, v, s_aux, out, lse, rng_state, cu_seqlens_q, cu_seqlens_k)
        ctx.is_paged = block_table is not None
        ctx.longest = max_seqlen_q, max_seqlen_k
        ctx.scores = scores
        ctx.deterministic = deterministic
        ctx.mark_non_differentiable(lse, dmask)
        return out, lse, dmask

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, s_aux, out, lse, rng_state, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        if ctx.is_paged:
            raise RuntimeError("s_aux with a block_table has no gradients")
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        given = (dout, q, k, v, out, lse, dq, dk, dv)
        options = (*ctx.scores, None, ctx.deterministic, rng_state)
        if cu_seqlens_q is None:
            private_interface._flash_attn_backward(*given, *options)
        else:
            private_interface._flash_attn_varlen_backward(*given, cu_seqlens_q, cu_seqlens_k, *ctx.longest, *options)
        # The sink's probability times -rowsum(dout * out'): its value is 0, so nothing else is left.
        products = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(-2, -1)
        dsink = -(torch.exp(s_aux.to(lse.dtype)[:, None] - lse) * products)
        dsink = dsink.sum(-1) if dsink.dim() == 2 else dsink.sum((0, 2))
        return dq, dk, dv, dsink.to(s_aux.dtype), *(None for _ in range(13))
