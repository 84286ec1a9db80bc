"""FlashAttention-3's functions with its own signatures, computed by our flash-attn 2 functions.

Differences from flash-attn 2: names and order of arguments, no dropout, no ALiBi, a pair of results with the LSE, and
softmax_lse -inf in rows that see no key. num_splits, pack_gqa, sm_margin and scheduler_metadata steer the speed of
FlashAttention-3 and are ignored; unsupported arguments raise NotImplementedError. patch(interfaces=("fa3",)) makes it
importable as flash_attn_interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import flash_attn_interface as fa2
from flash_attn_compat.core import overlap

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return out as flash-attn 2's flash_attn_func does, or (out, softmax_lse) with return_attn_probs."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    result: Any = fa2.flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip
    return _with_fa3_lse(result, k) if return_attn_probs else result


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Sequence[int] = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return out as flash-attn 2's flash_attn_varlen_func does, or (out, softmax_lse) with return_attn_probs."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
            seqused_q=seqused_q, seqused_k=seqused_k)  # fmt: skip
    result: Any = fa2.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip
    return _with_fa3_lse(result, k) if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """Return out only. qkv: (batch_size, seqlen, 3, nheads, headdim); the layout with num_heads_q is refused."""
    _refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
            num_heads_q=num_heads_q)  # fmt: skip
    out: Any = fa2.flash_attn_qkvpacked_func(
        qkv, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic,
    )  # fmt: skip
    return out  # type: ignore[no-any-return]  # a tensor, for nothing else was asked for


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """Return out as flash-attn 2's flash_attn_with_kvcache does; page_table is what flash-attn 2 names block_table.

    With return_softmax_lse: (out, softmax_lse, None, None), without the partial results of a split over keys.
    """
    _refuse(qv=qv, q_descale=q_descale, attention_chunk=attention_chunk,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens)  # fmt: skip
    result: Any = fa2.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=page_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse, k_descale=k_descale,
        v_descale=v_descale,
    )  # fmt: skip
    return (*_with_fa3_lse(result, k_cache), None, None) if return_softmax_lse else result


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None, v_new: Tensor | None, qv: Tensor | None, out: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, cu_seqlens_k_new: Tensor | None, seqused_q: Tensor | None,
    seqused_k: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None, page_table: Tensor | None,
    kv_batch_idx: Tensor | None, leftpad_k: Tensor | None, rotary_cos: Tensor | None, rotary_sin: Tensor | None,
    seqlens_rotary: Tensor | None, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None,
    softmax_scale: float | None, causal: bool, window_size: Sequence[int] = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None,
    num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """Return (out, softmax_lse, None, None) of dense attention, or of packed with cu_seqlens, outside of autograd.

    out: a tensor to write the result to. Arguments of a cache are refused: `flash_attn_with_kvcache` takes them.
    """
    _refuse(k_new=k_new, v_new=v_new, qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, seqused_q=seqused_q,
            seqused_k=seqused_k, page_table=page_table, kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin, seqlens_rotary=seqlens_rotary, q_descale=q_descale,
            k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)  # fmt: skip
    if out is not None:
        overlap.refuse("out", out)
    options: Any = (0.0, softmax_scale, causal, *window_size, softcap, None, False)
    lengths: Any = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    forward: Any = fa2._flash_attn_varlen_forward if lengths else fa2._flash_attn_forward
    result, lse = _with_fa3_lse(forward(q, k, v, *lengths, *options), k)
    return result if out is None else out.copy_(result), lse, None, None


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, sequed_q: Tensor | None, sequed_k: Tensor | None, max_seqlen_q: int | None,
    max_seqlen_k: int | None, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, softmax_scale: float | None,
    causal: bool, window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv, softmax_d) from a forward's out and softmax_lse; dq, dk, dv are written to unless None."""
    _refuse(sequed_q=sequed_q, sequed_k=sequed_k)
    gradients = [torch.empty_like(x) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv))]
    lse = softmax_lse.masked_fill(softmax_lse == -torch.inf, torch.inf)  # flash-attn 2's LSE of rows without keys
    options: Any = (0.0, softmax_scale, causal, *window_size, softcap, None, deterministic)
    lengths: Any = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    backward: Any = fa2._flash_attn_varlen_backward if lengths else fa2._flash_attn_backward
    softmax_d = backward(dout, q, k, v, out, lse, *gradients, *lengths, *options)
    return gradients[0], gradients[1], gradients[2], softmax_d


def _lengths(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[Tensor, Tensor, int, int] | tuple[()]:
    """Return the arguments of packed sequences, or () for dense tensors."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return ()
    if cu_seqlens_q is None or cu_seqlens_k is None or max_seqlen_q is None or max_seqlen_k is None:
        raise ValueError(
            "packed sequences need cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k, or none of them, got "
            f"max_seqlen_q={max_seqlen_q}, max_seqlen_k={max_seqlen_k}, cu_seqlens_q "
            f"{'given' if cu_seqlens_q is not None else 'None'}, cu_seqlens_k "
            f"{'given' if cu_seqlens_k is not None else 'None'}"
        )
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and not (name == "attention_chunk" and value == 0):
            raise NotImplementedError(f"{name} of FlashAttention-3 is not served by flash_attn_compat")


def _with_fa3_lse(results: tuple[Tensor, ...], k: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, softmax_lse) with -inf in rows that see no key, but +inf if k is empty, as FlashAttention-3 does."""
    out, lse = results[:2]
    return out, lse.masked_fill(lse == torch.inf, -torch.inf) if k.numel() else lse
