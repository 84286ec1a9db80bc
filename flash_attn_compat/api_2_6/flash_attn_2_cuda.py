"""The raw extension of flash-attn 2.6: the forwards also return q, k, v and the output before its padding was cut."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_attn_compat import flash_attn_2_cuda as _current
from flash_attn_compat.flash_attn_2_cuda import bwd, fwd_kvcache, varlen_bwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


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
    """[out, q, k, v, out, softmax_lse, S_dmask, rng_state]; arguments as `flash_attn_compat.flash_attn_2_cuda.fwd`."""
    out, *rest = _current.fwd(
        q, k, v, out_, alibi_slopes_, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right,
        softcap, return_softmax, gen_,
    )  # fmt: skip
    return [out, q, k, v, out, *rest]


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
) -> list[Tensor]:
    """As `fwd`, of packed sequences; arguments as `flash_attn_compat.flash_attn_2_cuda.varlen_fwd`."""
    out, *rest = _current.varlen_fwd(
        q, k, v, out_, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k_, block_table_, alibi_slopes_, max_seqlen_q,
        max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left, window_size_right,
        softcap, return_softmax, gen_,
    )  # fmt: skip
    return [out, q, k, v, out, *rest]
