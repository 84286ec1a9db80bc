"""The five functions of flash-attn's compiled extension, with the positional arguments that flash_attn passes.

Callers that go below flash_attn's Python layer (and that layer itself) work unchanged on top of this
module. Nothing is computed here, and nothing is recorded for autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.core import checks, overlap
from flash_attn_compat.core.arguments.options import split_descales
from flash_attn_compat.core.call import BackwardInputs
from flash_attn_compat.core.inputs import DenseInputs, Options, PackedInputs
from flash_attn_compat.dispatch import kvcache, raw

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


def _unrecorded(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    @functools.wraps(function)
    def unrecorded(*arguments: Any, **named: Any) -> list[Tensor]:
        if not torch.is_grad_enabled():  # no_grad would cost two microseconds and change nothing
            return function(*arguments, **named)
        with torch.no_grad():
            return function(*arguments, **named)

    return unrecorded


@_unrecorded
def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_: Tensor | None,
    alibi_slopes_: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen_: Any = None,
) -> list[Tensor]:
    """Dense forward: q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim).

    out_: written in place through its strides and returned, if given
    gen_: must be None; dropout uses torch's default generator
    Returns [out, softmax_lse, S_dmask, rng_state], as _flash_attn_forward.
    """
    _check_generator(gen_)
    _check_out(out_, q)
    use = raw.forward_use(return_softmax)
    options = Options(p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, False, use)
    out, *rest = raw.forward(DenseInputs(q, k, v, alibi_slopes_), options)
    return [_written(out, out_), *rest]


@_unrecorded
def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k_: Tensor | None,
    block_table_: Tensor | None,
    alibi_slopes_: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen_: Any = None,
    num_splits: int = 0,
    *,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
) -> list[Tensor]:
    """Packed forward: q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim) or pages.

    out_, gen_: as in fwd
    num_splits, k_descale, v_descale: as in _flash_attn_varlen_forward
    Returns [out, softmax_lse, S_dmask, rng_state], as _flash_attn_varlen_forward.
    """
    _check_generator(gen_)
    _check_out(out_, q)
    descales, factors = split_descales(k_descale, v_descale)
    x = PackedInputs(
        q, k, v, alibi_slopes_, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k_, block_table_, *descales
    )  # fmt: skip
    options = Options(
        p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, False,
        raw.forward_use(return_softmax), max_seqlen_q, max_seqlen_k, *factors,
    )  # fmt: skip
    out, *rest = raw.varlen_forward(x, options, zero_tensors, num_splits)
    return [_written(out, out_), *rest]


@_unrecorded
def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq_: Tensor | None,
    dk_: Tensor | None,
    dv_: Tensor | None,
    alibi_slopes_: Tensor | None,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen_: Any = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """Dense backward, from the given out and softmax_lse; shapes as in fwd.

    dq_, dk_, dv_: written in place through their strides, if given
    Returns [dq, dk, dv, softmax_d], as _flash_attn_backward.
    """
    _check_generator(gen_)
    dq, dk, dv = _gradients((q, k, v), (dq_, dk_, dv_))
    options = Options(
        p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, deterministic, raw.BACKWARD
    )
    upstream = BackwardInputs(dout, out, softmax_lse, rng_state)
    return [dq, dk, dv, raw.backward(DenseInputs(q, k, v, alibi_slopes_), options, upstream, (dq, dk, dv))]


@_unrecorded
def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq_: Tensor | None,
    dk_: Tensor | None,
    dv_: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes_: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen_: Any = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """Packed backward, from the given out and softmax_lse; shapes as in varlen_fwd.

    Returns [dq, dk, dv, softmax_d], as _flash_attn_varlen_backward; gradients as in bwd.
    """
    _check_generator(gen_)
    dq, dk, dv = _gradients((q, k, v), (dq_, dk_, dv_))
    checks.is_given("cu_seqlens_q", cu_seqlens_q)
    x = PackedInputs(q, k, v, alibi_slopes_, cu_seqlens_q, cu_seqlens_k)
    options = Options(
        p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap, deterministic,
        raw.BACKWARD, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    upstream = BackwardInputs(dout, out, softmax_lse, rng_state)
    return [dq, dk, dv, raw.backward(x, options, upstream, (dq, dk, dv))]


@_unrecorded
def fwd_kvcache(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    k_: Tensor | None,
    v_: Tensor | None,
    seqlens_k_: Tensor | None,
    rotary_cos_: Tensor | None,
    rotary_sin_: Tensor | None,
    cache_batch_idx_: Tensor | None,
    leftpad_k_: Tensor | None,
    block_table_: Tensor | None,
    alibi_slopes_: Tensor | None,
    out_: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
    *,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
) -> list[Tensor]:
    """Forward over a KV cache, appending k_ and v_ in place; shapes as in flash_attn_with_kvcache.

    Returns [out, softmax_lse]; out_ is written in place and returned, if given.
    """
    _check_out(out_, q)
    out, softmax_lse = kvcache.attend(
        q, kcache, vcache, k_, v_, rotary_cos_, rotary_sin_, seqlens_k_, cache_batch_idx_, leftpad_k_, block_table_,
        alibi_slopes_, softmax_scale, is_causal, (window_size_left, window_size_right), softcap, is_rotary_interleaved,
        num_splits, k_descale, v_descale, True,
    )  # fmt: skip
    return [_written(out, out_), softmax_lse]


def _check_generator(gen: Any) -> None:
    if gen is None:
        return
    raise RuntimeError(
        "flash-attn: the RNG `generator` argument is no longer supported and must be None; "
        "dropout (when enabled) uses torch's default generator."
    )


def _check_out(out: Tensor | None, q: Tensor) -> None:
    """Raise RuntimeError unless ``out`` can take the result. Called before anything is computed or appended.

    ``out`` must have q's shape: callers that pass ``out`` use one head_dim for q, k and v.
    """
    if out is None:
        return
    if out.dtype != q.dtype:
        raise RuntimeError(f"Output must have the same dtype as inputs: out is {out.dtype}, q is {q.dtype}")
    if out.shape != q.shape:
        raise RuntimeError(f"out must have shape {tuple(q.shape)} (that of q), got {tuple(out.shape)}")
    overlap.refuse("out", out)


def _written(value: Tensor, target: Tensor | None) -> Tensor:
    return value if target is None else target.copy_(value)


def _gradients(
    inputs: tuple[Tensor, Tensor, Tensor], given: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(t) if grad is None else grad for t, grad in zip(inputs, given))
    return dq, dk, dv
