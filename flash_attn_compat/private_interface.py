"""flash-attn's semi-public functions, which ring attention and others build on, in their 2.8 shapes.

They compute outside autograd: a gradient through their results is an error, as it is through flash-attn's.
The backward also accepts the ``out`` and ``softmax_lse`` of a longer sequence, and writes into the caller's dq, dk, dv.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.core.arguments.options import split_descales
from flash_attn_compat.core.call import BackwardInputs
from flash_attn_compat.core.checks import is_given
from flash_attn_compat.core.inputs import DenseInputs, Options, PackedInputs
from flash_attn_compat.core.kernel_layout import key_block_size, round_up
from flash_attn_compat.dispatch.raw import BACKWARD, backward, forward, forward_use, varlen_forward

USE_TRITON_ROCM = False


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """``x``, copied only if its last dimension is strided."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """The smallest multiple of ``m`` that is at least ``x``."""
    return round_up(x, m)


def _get_block_size_n(device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Width of the key blocks by which S_dmask was scaled; AssertionError for head_dim over 256."""
    return key_block_size(torch.device(device), head_dim, is_dropout, is_causal)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dense attention; arguments as in flash_attn_func.

    Returns (out, softmax_lse, S_dmask, rng_state): S_dmask is empty without return_softmax, rng_state (2,)
    int64 reproduces the dropout mask in _flash_attn_backward.
    """
    use = forward_use(return_softmax)
    options = Options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, False, use)
    return forward(DenseInputs(q, k, v, alibi_slopes, None, None), options)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
    *,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed attention; arguments as in flash_attn_varlen_func, and per sequence:

    seqused_k: (batch,) int32, how many keys are used; leftpad_k: (batch,) int32, how many are skipped first
    zero_tensors: tokens outside of all sequences get LSE -inf instead of 0 (their out is 0 in any case)
    num_splits: an argument of flash-attn after 2.8.3, which changes no result here. With a block table, more than one
        split is an error, as in flash-attn, except for single queries of grouped heads without dropout, ALiBi, windows
    k_descale, v_descale [not in flash-attn 2]: of 8-bit k and v, as in flash_attn_varlen_func
    """
    descales, factors = split_descales(k_descale, v_descale)
    x = PackedInputs(
        q, k, v, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, *descales, None
    )  # fmt: skip
    options = Options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, False,
        forward_use(return_softmax), max_seqlen_q, max_seqlen_k, *factors,
    )  # fmt: skip
    return varlen_forward(x, options, zero_tensors, num_splits)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Gradients of dense attention, written into dq, dk, dv through their strides.

    Probabilities are exp(score - softmax_lse) and their mean gradient is rowsum(dout * out), so ``out`` and
    ``softmax_lse`` may belong to a longer sequence of which k and v are one part: the results are then that
    part's exact share.

    Returns softmax_d: (batch, nheads, seqlen_q rounded up to 128) fp32, rowsum(dout * out) * (1 - dropout_p).
    """
    options = Options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic, BACKWARD
    )
    upstream = BackwardInputs(dout, out, softmax_lse, rng_state)
    return backward(DenseInputs(q, k, v, alibi_slopes, None, None), options, upstream, (dq, dk, dv))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Gradients of packed attention; as _flash_attn_backward, with tokens outside of all sequences set to 0.

    Returns softmax_d: (nheads, total_q + 128 * batch) fp32, sequence b from column cu_seqlens_q[b] + 128 * b.
    """
    options = Options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic, BACKWARD,
        max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    upstream = BackwardInputs(dout, out, softmax_lse, rng_state)
    is_given("cu_seqlens_q", cu_seqlens_q)
    return backward(PackedInputs(q, k, v, alibi_slopes, cu_seqlens_q, cu_seqlens_k), options, upstream, (dq, dk, dv))


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
