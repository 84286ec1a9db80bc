"""The attention functions of flash-attn 2.8: signatures, documentation and return shapes.

core/arguments/ checks the arguments and turns them into a call; dispatch/autograd.py computes gradients. The private
functions, of private_interface.py, and flash_attn_with_kvcache, of kvcache.py, can be imported from here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from flash_attn_compat import flash_attn_2_cuda as flash_attn_gpu
from flash_attn_compat.core.arguments.options import split_descales
from flash_attn_compat.dispatch.public import attend
from flash_attn_compat.kvcache import flash_attn_with_kvcache
from flash_attn_compat.private_interface import (
    USE_TRITON_ROCM,
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
    maybe_contiguous,
    round_multiple,
)

__all__ = [
    "USE_TRITON_ROCM",
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_torch_custom_op_wrapper",
    "_torch_register_fake_wrapper",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
    "round_multiple",
]

# flash-attn's module has these two functions, which register its operators. dropin/operators.py registers ours.
_torch_custom_op_wrapper = torch.library.custom_op
_torch_register_fake_wrapper = torch.library.register_fake

# out, or with return_attn_probs (out, softmax_lse, S_dmask); overloads let type checkers know when it is out alone.
AttentionOutput = Tensor | tuple[Tensor, Tensor, Tensor]


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., *, s_aux: Tensor | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., *, s_aux: Tensor | None = ...,
) -> AttentionOutput: ...  # fmt: skip
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> AttentionOutput:
    """softmax(q @ k^T * softmax_scale) @ v, differentiable in q, k and v, alibi_slopes and a tensor as softmax_scale.

    Arguments:
        q: (batch_size, seqlen_q, nheads, headdim), fp16, bf16, fp32 or fp64
        k: (batch_size, seqlen_k, nheads_k, headdim); nheads_k divides nheads, and query head h reads
            key/value head h // (nheads / nheads_k)
        v: (batch_size, seqlen_k, nheads_k, headdim); its headdim may differ from k's
        dropout_p: probability of dropping a softmax entry, below 1, honoured to 1/256; 0 in evaluation
        softmax_scale: factor of q @ k^T; default headdim ** -0.5
        causal: row i sees the keys up to i + seqlen_k - seqlen_q (aligned at the bottom right)
        window_size: (left, right); row i sees the keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right, both included; a negative bound is unbounded
        softcap: positive values turn scaled scores into softcap * tanh(score / softcap)
        alibi_slopes: (nheads,) or (batch_size, nheads) fp32; -slope * |i + seqlen_k - seqlen_q - j| is
            added to the score of row i and key j
        deterministic: the same gradients to the bit in every run
        return_attn_probs: also return softmax_lse and S_dmask
        s_aux [not in flash-attn]: (nheads,), attention sinks: logits that take part in the softmax of every row
            and have no value; differentiable, softmax_lse counts them (it is the sink where a row sees no key); not
            together with alibi_slopes
    Returns:
        out: (batch_size, seqlen_q, nheads, headdim of v) in q's dtype; rows that see no key are 0
        softmax_lse [with return_attn_probs]: (batch_size, nheads, seqlen_q) fp32, the natural log of the
            softmax denominator; +inf for rows that see no key. With ALiBi and a causal mask it is larger
            by slope * (i + seqlen_k - seqlen_q), as flash-attn's is. Differentiable, as flash-attn's is not.
        S_dmask [with return_attn_probs]: (batch_size, nheads, seqlen_q and seqlen_k rounded up to 128)
            under dropout, negative where dropped, not normalised: for tests; else empty
    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together, dropout_p >= 1
        IndexError: a tensor has too few dimensions
    """
    return attend(
        (q, k, v), alibi_slopes, dropout_p, softmax_scale, causal, window_size, softcap, deterministic,
        return_attn_probs, s_aux,
    )  # fmt: skip


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ...,
) -> AttentionOutput: ...  # fmt: skip
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> AttentionOutput:
    """flash_attn_func with k and v in one tensor, whose gradient is one tensor too.

    Arguments:
        q: (batch_size, seqlen_q, nheads, headdim)
        kv: (batch_size, seqlen_k, 2, nheads_k, headdim), k first
    The other arguments, results and errors are those of flash_attn_func.
    """
    return attend(
        (q, kv), alibi_slopes, dropout_p, softmax_scale, causal, window_size, softcap, deterministic,
        return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ...,
) -> AttentionOutput: ...  # fmt: skip
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> AttentionOutput:
    """flash_attn_func with q, k and v in one tensor, whose gradient is one tensor too.

    Arguments:
        qkv: (batch_size, seqlen, 3, nheads, headdim), in the order q, k, v
    The other arguments, results and errors are those of flash_attn_func.
    """
    return attend(
        (qkv,), alibi_slopes, dropout_p, softmax_scale, causal, window_size, softcap, deterministic,
        return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: Sequence[int] = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., block_table: Tensor | None = ..., *, s_aux: Tensor | None = ...,
    k_descale: float | Tensor | None = ..., v_descale: float | Tensor | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: Sequence[int] = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
    block_table: Tensor | None = ..., *, s_aux: Tensor | None = ..., k_descale: float | Tensor | None = ...,
    v_descale: float | Tensor | None = ...,
) -> AttentionOutput: ...  # fmt: skip
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
) -> AttentionOutput:
    """flash_attn_func over sequences of different lengths, laid end to end.

    Arguments:
        q: (total_q, nheads, headdim), total_q the number of query tokens of the batch
        k, v: (total_k, nheads_k, headdim), or (num_blocks, page_block_size, nheads_k, headdim) with
            block_table
        cu_seqlens_q, cu_seqlens_k: (batch_size + 1,) int32, where each sequence starts and the last ends;
            sequences may be empty on either side
        max_seqlen_q, max_seqlen_k: the longest lengths. Rows of longer sequences may be NaN or 0 where lengths are on a
            GPU; on a CPU, and under FLASH_ATTN_COMPAT_DEBUG=1, they are an error
        block_table: (batch_size, max_num_blocks_per_seq) int32, the pages of each sequence in order;
            cu_seqlens_k then gives lengths only
        k_descale, v_descale [not in flash-attn 2]: of k and v in float8_e4m3fn or float8_e5m2, as in
            flash_attn_with_kvcache; such calls have no gradients
    The other arguments are those of flash_attn_func, applied to each sequence with its own lengths.
    Returns:
        out: (total_q, nheads, headdim of v); tokens outside of all sequences are 0
        softmax_lse [with return_attn_probs]: (nheads, total_q) fp32
        S_dmask [with return_attn_probs]: (batch_size, nheads, max_seqlen_q and max_seqlen_k rounded up to
            128), each sequence from [0, 0] of its own matrix
    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together, cu_seqlens not int32 or not contiguous
    """
    k_factor = v_factor = 1.0
    if k_descale is not None or v_descale is not None:
        (k_descale, v_descale), (k_factor, v_factor) = split_descales(k_descale, v_descale)
    return attend(
        (q, k, v), alibi_slopes, dropout_p, softmax_scale, causal, window_size, softcap, deterministic,
        return_attn_probs, s_aux, True, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table,
        k_descale, v_descale, k_factor, v_factor,
    )  # fmt: skip


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: Sequence[int] = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: Sequence[int] = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
) -> AttentionOutput: ...  # fmt: skip
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> AttentionOutput:
    """flash_attn_varlen_func with k and v in one tensor.

    Arguments:
        q: (total_q, nheads, headdim)
        kv: (total_k, 2, nheads_k, headdim), k first
    The other arguments, results and errors are those of flash_attn_varlen_func.
    """
    return attend(
        (q, kv), alibi_slopes, dropout_p, softmax_scale, causal, window_size, softcap, deterministic,
        return_attn_probs, None, True, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Sequence[int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ...,
) -> AttentionOutput: ...  # fmt: skip
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> AttentionOutput:
    """flash_attn_varlen_func with q, k and v in one tensor.

    Arguments:
        qkv: (total, 3, nheads, headdim), in the order q, k, v
        cu_seqlens: (batch_size + 1,) int32
        max_seqlen: the longest length
    The other arguments, results and errors are those of flash_attn_varlen_func.
    """
    return attend(
        (qkv,), alibi_slopes, dropout_p, softmax_scale, causal, window_size, softcap, deterministic,
        return_attn_probs, None, True, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
    )  # fmt: skip


class _Applied(torch.autograd.Function):
    """Base of the classes that have the names of flash-attn's autograd Functions.

    ``apply`` takes the arguments of ``forward`` without ctx. ``forward`` calls a public function, which records its own
    gradients, so ctx is unused.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return cls.forward(None, *args)


class FlashAttnQKVPackedFunc(_Applied):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Sequence[int],
        softcap: float, alibi_slopes: Tensor | None, deterministic: bool, return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> AttentionOutput:  # fmt: skip
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_grad_enabled):
            return flash_attn_qkvpacked_func(
                qkv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                return_softmax,
            )  # fmt: skip


class FlashAttnKVPackedFunc(_Applied):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
        window_size: Sequence[int], softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        return_softmax: bool, is_grad_enabled: bool = True,
    ) -> AttentionOutput:  # fmt: skip
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_grad_enabled):
            return flash_attn_kvpacked_func(
                q, kv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                return_softmax,
            )  # fmt: skip


class FlashAttnFunc(_Applied):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
        window_size: Sequence[int], softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        return_softmax: bool, is_grad_enabled: bool = True,
    ) -> AttentionOutput:  # fmt: skip
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_grad_enabled):
            return flash_attn_func(
                q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                return_softmax,
            )  # fmt: skip


class FlashAttnVarlenQKVPackedFunc(_Applied):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, softmax_scale: float | None,
        causal: bool, window_size: Sequence[int], softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        return_softmax: bool, is_grad_enabled: bool = True,
    ) -> AttentionOutput:  # fmt: skip
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_grad_enabled):
            return flash_attn_varlen_qkvpacked_func(
                qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                deterministic, return_softmax,
            )  # fmt: skip


class FlashAttnVarlenKVPackedFunc(_Applied):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Sequence[int],
        softcap: float, alibi_slopes: Tensor | None, deterministic: bool, return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> AttentionOutput:  # fmt: skip
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_grad_enabled):
            return flash_attn_varlen_kvpacked_func(
                q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                window_size, softcap, alibi_slopes, deterministic, return_softmax,
            )  # fmt: skip


class FlashAttnVarlenFunc(_Applied):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Sequence[int],
        softcap: float, alibi_slopes: Tensor | None, deterministic: bool, return_softmax: bool,
        block_table: Tensor | None = None, is_grad_enabled: bool = True,
    ) -> AttentionOutput:  # fmt: skip
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_grad_enabled):
            return flash_attn_varlen_func(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                window_size, softcap, alibi_slopes, deterministic, return_softmax, block_table,
            )  # fmt: skip
