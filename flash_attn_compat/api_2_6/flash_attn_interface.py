"""flash_attn_interface of flash-attn 2.6: the public functions of 2.8, and private ones with window_size as a pair.

Private forwards return (out, q, k, v, out_padded, softmax_lse, S_dmask, rng_state), private backwards
(dq, dk, dv, softmax_d).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flash_attn_compat.api_2_6 import flash_attn_2_cuda as flash_attn_cuda
from flash_attn_compat.flash_attn_interface import (  # noqa: F401  2.6 has them too
    FlashAttnFunc,
    FlashAttnKVPackedFunc,
    FlashAttnQKVPackedFunc,
    FlashAttnVarlenFunc,
    FlashAttnVarlenKVPackedFunc,
    FlashAttnVarlenQKVPackedFunc,
    _get_block_size_n,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    maybe_contiguous,
)

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size: Sequence[int],
    softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Dense attention outside of autograd; arguments as `flash_attn_func`."""
    left, right = window_size
    return tuple(
        flash_attn_cuda.fwd(
            q, k, v, None, alibi_slopes, dropout_p, softmax_scale, causal, left, right, softcap, return_softmax, None
        )
    )


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False, block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Packed attention outside of autograd; arguments as `flash_attn_varlen_func`."""
    left, right = window_size
    outputs = flash_attn_cuda.varlen_fwd(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, False, causal, left, right, softcap, return_softmax, None,
    )  # fmt: skip
    return tuple(outputs)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool,
    window_size: Sequence[int], softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Return (dq, dk, dv, softmax_d) of dense attention. Writes to dq, dk and dv unless they are None."""
    left, right = window_size
    dq, dk, dv, softmax_d = flash_attn_cuda.bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, dropout_p, softmax_scale, causal, left, right,
        softcap, deterministic, None, rng_state,
    )  # fmt: skip
    return dq, dk, dv, softmax_d


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size: Sequence[int], softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Return (dq, dk, dv, softmax_d) of packed attention. Writes to dq, dk and dv unless they are None."""
    left, right = window_size
    dq, dk, dv, softmax_d = flash_attn_cuda.varlen_bwd(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, False, causal, left, right, softcap, deterministic, None, rng_state,
    )  # fmt: skip
    return dq, dk, dv, softmax_d
