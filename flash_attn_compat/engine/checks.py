"""Rejecting malformed calls before anything is computed or written.

First lines are worded as flash-attn 2.8 words them, since people search and test for those; what was
given and what was expected follows. What we accept beyond flash-attn is simply not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.engine.call import AttentionCall, Upstream

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_DENSE = {"q": "(batch_size, seqlen_q, num_heads, head_size)", "k": "(batch_size, seqlen_k, num_heads_k, head_size)"}
_PACKED = {"q": "(total_q, num_heads, head_size)", "k": "(total_k, num_heads_k, head_size)"}
_PAGED = {"k": "(num_blocks, page_block_size, num_heads_k, head_size)"}


def is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise wrong_type(name, "Tensor", value)


def wrong_type(name: str, expected: str, value: object) -> RuntimeError:
    """PyTorch's message for an argument of a wrong type: flash-attn's functions are custom operators."""
    return RuntimeError(
        f"Expected a value of type '{expected}' for argument '{name}' but instead found type '{type(value).__name__}'"
    )


def are_tensors(q: object, k: object, v: object) -> None:
    if isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor):
        return
    for name, value in (("q", q), ("k", k), ("v", v)):
        is_tensor(name, value)


def tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One floating dtype and one device."""
    dtype, device = q.dtype, q.device
    if dtype == k.dtype == v.dtype and device == k.device == v.device and dtype in _DTYPES:
        return
    if q.dtype != k.dtype:
        raise _error("query and key must have the same dtype", q, k, v)
    if q.dtype != v.dtype:
        raise _error("query and value must have the same dtype", q, k, v)
    if dtype not in _DTYPES:
        raise _error("FlashAttention only support fp16 and bf16 data type (and here fp32 and fp64)", q, k, v)
    raise _error(_must_be_on("k" if device != k.device else "v", device), q, k, v)


def dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k, v of shapes (batch, seqlen, heads, head_dim)."""
    are_tensors(q, k, v)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        raise _rank_error(next(tensor for tensor in (q, k, v) if tensor.dim() != 4), 4, q, k, v)
    tensors(q, k, v)
    batch, _, nheads, head_dim = q_shape
    if batch == 0:
        raise _error("batch size must be positive", q, k, v)
    if k_shape[0] != batch or k_shape[3] != head_dim:
        raise _error(f"k must have shape {_DENSE['k']}", q, k, v)
    if v_shape != k_shape and v_shape[:3] != k_shape[:3]:  # cutting shapes is slow
        raise _error(f"v must have shape {_DENSE['k']}", q, k, v)
    _heads(nheads, k_shape[2], q, k, v)


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """q, k, v of shapes (total, heads, head_dim) with (batch + 1,) int32 starts."""
    are_tensors(q, k, v)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) != 3:
        raise _packed_rank_error(q, k, v)
    tensors(q, k, v)
    if len(k_shape) != 3 or k_shape[2] != q_shape[2]:
        raise _error(f"k must have shape {_PACKED['k']}", q, k, v)
    if v_shape != k_shape and (len(v_shape) != 3 or v_shape[:2] != k_shape[:2]):
        raise _error(f"v must have shape {_PACKED['k']}", q, k, v)
    _heads(q_shape[1], k_shape[1], q, k, v)
    starts(q, cu_seqlens_q, cu_seqlens_k)


def packed_over_pages(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_table: Tensor
) -> None:
    """Packed q over k, v of shape (num_blocks, page_size, heads, head_dim)."""
    are_tensors(q, k, v)
    if q.dim() != 3:
        raise _packed_rank_error(q, k, v)
    tensors(q, k, v)
    starts(q, cu_seqlens_q, cu_seqlens_k)
    pages(q, k, v, block_table, cu_seqlens_q.shape[0] - 1)


def starts(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    int32("cu_seqlens_q", cu_seqlens_q, q.device)
    if cu_seqlens_k is not cu_seqlens_q:
        int32("cu_seqlens_k", cu_seqlens_k, q.device)
    if cu_seqlens_q.dim() != 1:
        raise RuntimeError(f"cu_seqlens_q must have shape (batch_size + 1), got {tuple(cu_seqlens_q.shape)}")
    if cu_seqlens_q.shape[0] < 2:
        raise RuntimeError(f"batch size must be positive\n  cu_seqlens_q: {tuple(cu_seqlens_q.shape)}")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise RuntimeError(
            "cu_seqlens_k must have shape (batch_size + 1)\n"
            f"  cu_seqlens_q: {tuple(cu_seqlens_q.shape)}\n  cu_seqlens_k: {tuple(cu_seqlens_k.shape)}"
        )


def pages(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, batch: int) -> None:
    """Paged keys and values, and the (batch, max_blocks) int32 table that finds them."""
    is_tensor("block_table", block_table)
    if block_table.dtype != torch.int32:
        raise RuntimeError(f"block_table must have dtype torch.int32, got {block_table.dtype}")
    is_on("block_table", block_table, q.device)
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        shape = tuple(block_table.shape)
        raise RuntimeError(
            f"block_table must have shape (batch_size, max_num_blocks_per_seq), got {shape}, batch {batch}"
        )
    if k.dim() != 4 or k.shape[3] != q.shape[-1]:
        raise _error(f"k must have shape {_PAGED['k']}", q, k, v)
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise _error(f"v must have shape {_PAGED['k']}", q, k, v)
    _heads(q.shape[-2], k.shape[-2], q, k, v)


def alibi(slopes: Tensor, q: Tensor, batch: int) -> None:
    """(nheads,) or (batch, nheads) fp32."""
    is_tensor("alibi_slopes", slopes)
    if slopes.dtype != torch.float32:
        raise RuntimeError(f"ALiBi slopes must have dtype fp32, got {slopes.dtype}")
    is_on("alibi_slopes", slopes, q.device)
    nheads = q.shape[-2]
    if slopes.shape not in ((nheads,), (batch, nheads)):
        raise RuntimeError(
            f"Expected alibi_slopes.sizes() == ({nheads},) or ({batch}, {nheads}), that is (num_heads,) or "
            f"(batch_size, num_heads), got {tuple(slopes.shape)}"
        )


def dropout(dropout_p: float) -> None:
    if dropout_p >= 1.0:
        raise RuntimeError(f"Expected p_dropout < 1.f to be true, but got {dropout_p}")


def upstream(call: AttentionCall, given: Upstream, *gradients: Tensor | None) -> None:
    """A backward's dout, out and softmax_lse, and the dq, dk, dv it is to write (each may be None)."""
    if given.dout.dtype != call.q.dtype:
        raise RuntimeError(f"query and dout must have the same dtype, got {call.q.dtype} and {given.dout.dtype}")
    if given.out.dtype != call.q.dtype:
        raise RuntimeError(f"query and out must have the same dtype, got {call.q.dtype} and {given.out.dtype}")
    expected = {"dout": call.out_shape, "out": call.out_shape, "softmax_lse": call.lse_shape}
    for name, shape in expected.items():
        if getattr(given, name).shape != shape:
            raise RuntimeError(f"{name} must have shape {shape}, got {tuple(getattr(given, name).shape)}")
        is_on(name, getattr(given, name), call.q.device)
    # Kernels read it through its address, as fp32.
    lse_dtypes = {torch.float32, torch.float64 if call.q.dtype == torch.float64 else torch.float32}
    if given.lse.dtype not in lse_dtypes:
        raise RuntimeError(f"softmax_lse must have dtype fp32, got {given.lse.dtype}")
    for name, gradient, source in zip("qkv", gradients, (call.q, call.k, call.v)):
        if gradient is None:
            continue
        if gradient.dtype != source.dtype:
            raise RuntimeError(f"d{name} must have the same dtype as q, got {gradient.dtype} for {source.dtype}")
        if gradient.shape != source.shape:
            raise RuntimeError(f"d{name} must have shape {tuple(source.shape)}, got {tuple(gradient.shape)}")
        try:
            gradient.as_strided(gradient.shape, gradient.stride())
        except RuntimeError as error:
            raise RuntimeError(f"d{name} reaches beyond its memory: {error}") from error
    if call.dropout_p and given.rng_state is None:
        raise RuntimeError("rng_state must be given when dropout_p > 0: it holds the forward's dropout mask")


def is_int32(name: str, tensor: Tensor, device: torch.device) -> None:
    """Indices beside the data."""
    is_tensor(name, tensor)
    if tensor.dtype != torch.int32:
        raise RuntimeError(f"{name} must have dtype int32, got {str(tensor.dtype).removeprefix('torch.')}")
    is_on(name, tensor, device)


def int32(name: str, tensor: Tensor, device: torch.device) -> None:
    """Indices as CUDA kernels read them: contiguous, too."""
    is_int32(name, tensor, device)
    if not tensor.is_contiguous():
        raise RuntimeError(f"{name} must be contiguous, got strides {tensor.stride()}")


def per_sequence(name: str, tensor: Tensor, batch: int, device: torch.device) -> None:
    """A (batch,) int32 tensor."""
    int32(name, tensor, device)
    if tensor.shape != (batch,):
        raise RuntimeError(f"{name} must have shape (batch_size), got {tuple(tensor.shape)} for batch size {batch}")


def _heads(nheads: int, nheads_k: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    if nheads_k == 0 or nheads % nheads_k:
        raise _error("Number of heads in key/value must divide number of heads in query", q, k, v)


def is_on(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise RuntimeError(_must_be_on(name, device))


def _must_be_on(name: str, device: torch.device) -> str:
    where = "CUDA" if device.type == "cuda" else device.type
    return f"{name} must be on {where}, the device of q ({device})"


def _rank_error(tensor: Tensor, rank: int, q: Tensor, k: Tensor, v: Tensor) -> Exception:
    if tensor.dim() >= rank:
        return _error(f"q, k and v must have {rank} dimensions, as q: {_DENSE['q']}", q, k, v)
    last = tensor.dim() - 1
    message = f"Dimension out of range (expected to be in range of [{-last - 1}, {last}], but got {rank - 1})"
    return IndexError(_with_shapes(f"{message}: q must have shape {_DENSE['q']}", q, k, v))


def _packed_rank_error(q: Tensor, k: Tensor, v: Tensor) -> RuntimeError:
    return _error(
        f"q must have shape {_PACKED['q']} when cu_seqlens_q is given (flash-attn says: query, key, value, "
        "and out_ must have a head_size that is a multiple of 8)",
        q, k, v,
    )  # fmt: skip


def _error(message: str, q: Tensor, k: Tensor, v: Tensor) -> RuntimeError:
    return RuntimeError(_with_shapes(message, q, k, v))


def _with_shapes(message: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    lines = [f"  {name}: {tuple(t.shape)} {t.dtype} {t.device}" for name, t in (("q", q), ("k", k), ("v", v))]
    return "\n".join([message, *lines])
