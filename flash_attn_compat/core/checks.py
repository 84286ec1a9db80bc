"""Checks that reject a malformed call before anything is computed or written.

The first line of an error has flash-attn 2.8's words, since people search and test for them; then follow the given
and the expected value. Arguments that flash-attn rejects and this package supports are not checked.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import cuda_capture, eight_bit, overlap
from flash_attn_compat.core.call import AttentionCall, BackwardInputs
from flash_attn_compat.core.torch_state import numbers_of

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_DENSE = {"q": "(batch_size, seqlen_q, num_heads, head_size)", "k": "(batch_size, seqlen_k, num_heads_k, head_size)"}
_PACKED = {"q": "(total_q, num_heads, head_size)", "k": "(total_k, num_heads_k, head_size)"}
_PAGED = {"k": "(num_blocks, page_block_size, num_heads_k, head_size)"}


def wrong_type(name: str, expected: str, value: object, hint: str = "") -> RuntimeError:
    """Return the error for an argument of a wrong type, in the words of PyTorch's operators, as flash-attn's are."""
    message = f"Expected a value of type '{expected}' for argument '{name}' but instead found type"
    return RuntimeError(f"{message} '{type(value).__name__}'{hint}")


def causal(value: object) -> bool:
    """Return ``value`` as a bool; it may be a number, None or a tensor of one element. Else raises RuntimeError."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Tensor) and value.numel() != 1:
        hint = f" of shape {tuple(value.shape)}: no mask is taken; see causal, window_size and cu_seqlens"
        raise wrong_type("causal", "bool", value, hint)
    if not hasattr(value, "__bool__") or not _is_one(value):
        raise wrong_type("causal", "bool", value, f": {value!r}")
    return bool(value)


def number(name: str, value: Any) -> float:
    """Return ``value`` as a float; it may be an int or a tensor of one element. Else raises RuntimeError."""
    if type(value) is float:
        return value
    if not hasattr(value, "__float__") or not _is_one(value):
        raise wrong_type(name, "float", value, "" if isinstance(value, Tensor) else f": {value!r}")
    return float(value)


def two_bounds(value: Any) -> tuple[Any, Any]:
    """Return window_size as (left, right), of any types. Raises TypeError unless ``value`` holds two elements."""
    try:
        left, right = value
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be two integers (left, right), got {value!r}") from None
    return left, right


def dropout(dropout_p: object) -> float:
    """Return dropout_p as a float in [0, 1). Raises RuntimeError for other numbers, and for other types."""
    found = number("dropout_p", dropout_p)
    if found >= 1.0:
        raise RuntimeError(f"Expected p_dropout < 1.f to be true, but got {found}")
    if not found >= 0.0:
        raise RuntimeError(f"dropout_p must be a probability, at least 0 and below 1, got {found}")
    return found


def softcap(value: object) -> float:
    """Return softcap as a float, 0.0 for None, 0 and -1. RuntimeError for other negative numbers, inf and NaN."""
    found = 0.0 if value is None else number("softcap", value)
    if not (0.0 <= found < math.inf or found == -1.0):
        raise RuntimeError(f"softcap must be positive, or 0 for none, got {found}")
    return max(found, 0.0)


def _is_one(value: object) -> bool:
    """Whether a tensor, or an array, is a single number."""
    count = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 1)
    return bool(count == 1)


def is_given(name: str, value: object) -> None:
    """Raise RuntimeError if ``value`` is None: for cu_seqlens_q, without which a packed call would count as dense."""
    if value is None:
        raise wrong_type(name, "Tensor", value)


def is_tensor(name: str, value: object) -> None:
    """Raise RuntimeError unless ``value`` is a dense tensor, neither nested nor sparse."""
    if not isinstance(value, Tensor):
        raise wrong_type(name, "Tensor", value)
    if value.is_nested:
        raise RuntimeError(
            f"{name} must be a dense tensor, got a nested one: pass its values, and its offsets as cu_seqlens, to "
            "flash_attn_varlen_func"
        )
    if value.layout != torch.strided:
        raise RuntimeError(f"{name} must be a dense tensor, got layout {value.layout}: call {name}.to_dense()")


def are_tensors(q: object, k: object, v: object) -> None:
    """Raise RuntimeError unless q, k and v are dense tensors."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        is_tensor(name, value)


def tensors(q: Tensor, k: Tensor, v: Tensor, takes_eight_bits: bool = False) -> None:
    """Raise RuntimeError unless q, k and v share a device and one of the dtypes fp16, bf16, fp32 and fp64.

    takes_eight_bits: k and v may also be 8-bit floats if q is fp16 or bf16
    """
    dtype, device = q.dtype, q.device
    if dtype == k.dtype == v.dtype and device == k.device == v.device and dtype in _DTYPES:
        return
    if takes_eight_bits and eight_bit.is_eight_bit(k):
        if k.dtype != v.dtype:
            raise _error("key and value must have the same dtype", q, k, v)
        if dtype not in (torch.float16, torch.bfloat16):
            raise _error("keys and values of 8-bit floats need q in fp16 or bf16", q, k, v)
        if device == k.device == v.device:
            return
    elif q.dtype != k.dtype:
        raise _error("query and key must have the same dtype", q, k, v)
    elif q.dtype != v.dtype:
        raise _error("query and value must have the same dtype", q, k, v)
    elif dtype not in _DTYPES:
        raise _error("FlashAttention only support fp16 and bf16 data type (and here fp32 and fp64)", q, k, v)
    raise _error(_must_be_on("k" if device != k.device else "v", device), q, k, v)


def dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise RuntimeError unless q, k, v are (batch, seqlen, heads, head_dim); IndexError for fewer than four axes."""
    are_tensors(q, k, v)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        raise _rank_error(next(tensor for tensor in (q, k, v) if tensor.dim() != 4), q, k, v)
    tensors(q, k, v)
    batch, head_dim = q_shape[0], q_shape[3]
    if batch == 0:
        raise _error("batch size must be positive", q, k, v)
    if k_shape[0] != batch or k_shape[3] != head_dim:
        raise _error(f"k must have shape {_DENSE['k']}", q, k, v)
    if v_shape != k_shape and v_shape[:3] != k_shape[:3]:  # whole shapes first: slicing one is slow
        raise _error(f"v must have shape {_DENSE['k']}", q, k, v)
    heads(q, k, v)


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Raise RuntimeError unless q, k, v are (total, heads, head_dim), and both cu_seqlens (batch + 1,) int32."""
    are_tensors(q, k, v)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) != 3:
        raise _packed_rank_error(q, k, v)
    tensors(q, k, v, takes_eight_bits=True)
    if len(k_shape) != 3 or k_shape[2] != q_shape[2]:
        raise _error(f"k must have shape {_PACKED['k']}", q, k, v)
    if v_shape != k_shape and (len(v_shape) != 3 or v_shape[:2] != k_shape[:2]):
        raise _error(f"v must have shape {_PACKED['k']}", q, k, v)
    heads(q, k, v)
    starts(q, cu_seqlens_q, cu_seqlens_k)


def packed_over_pages(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_table: Tensor
) -> None:
    """Raise RuntimeError unless q is packed, and k and v are (num_blocks, page_size, heads, head_dim) pages."""
    are_tensors(q, k, v)
    if q.dim() != 3:
        raise _packed_rank_error(q, k, v)
    tensors(q, k, v, takes_eight_bits=True)
    starts(q, cu_seqlens_q, cu_seqlens_k)
    pages(q, k, v, block_table, cu_seqlens_q.shape[0] - 1)


def starts(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Raise RuntimeError unless both cu_seqlens are contiguous (batch + 1,) int32 tensors on q's device."""
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
    """Raise RuntimeError unless k and v are pages for q, and block_table is (batch, max_blocks) int32."""
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
    heads(q, k, v)


def may_read(tensor: Tensor) -> bool:
    """Whether to check a tensor's values: on a CPU, or on a GPU if FLASH_ATTN_COMPAT_DEBUG is 1, outside captures."""
    if tensor.is_cpu:
        return tensor.numel() > 0
    return settings.is_on(settings.DEBUG) and tensor.is_cuda and not cuda_capture.is_capturing(tensor.get_device())


def values_of_starts(
    starts_q: Tensor, starts_k: Tensor, total_q: int, total_k: int | None, longest_q: int, longest_k: int,
    used: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise RuntimeError unless cu_seqlens start with 0, never decrease, end within the tensor, and fit max_seqlen.

    Args:
        total_k: the number of packed keys; None if keys lie in pages
        longest_q, longest_k: the caller's max_seqlen_q and max_seqlen_k, which no sequence may exceed
        used: seqused_k (batch,), how many keys of each sequence count; None if all do
    """
    found = _values_of_starts("cu_seqlens_q", starts_q, "q", total_q)
    _check_longest("max_seqlen_q", longest_q, map(operator.sub, found[1:], found))
    if starts_k is not starts_q or (total_k is not None and total_k < total_q):
        found = _values_of_starts("cu_seqlens_k", starts_k, "k", total_k)
    elif longest_q <= longest_k and used is None:
        return
    _check_longest("max_seqlen_k", longest_k, map(operator.sub, found[1:], found) if used is None else numbers_of(used))


def _check_longest(name: str, longest: int, lengths: Iterable[int]) -> None:
    """Raise RuntimeError if a sequence is longer than ``longest``: kernels would not compute its further rows."""
    found = max(lengths, default=0)
    if found > longest:
        raise RuntimeError(f"{name} must be at least the longest sequence's length, which is {found}, got {longest}")


def _values_of_starts(name: str, starts: Tensor, tensor: str, total: int | None) -> list[int]:
    found = numbers_of(starts)
    if found[0] != 0:
        raise RuntimeError(
            f"{name} must start with 0, got {_abbreviate(found)}: it holds where each sequence starts and where the "
            "last one ends; of lengths it is torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))"
        )
    if any(map(operator.gt, found, found[1:])):
        raise RuntimeError(f"{name} must not decrease, got {_abbreviate(found)}")
    if total is not None and found[-1] > total:
        raise RuntimeError(f"{name} must end within the {total} tokens of {tensor}, got {_abbreviate(found)}")
    return found


def values_of_pages(k: Tensor, block_table: Tensor, lengths: Tensor | int) -> None:
    """Raise RuntimeError unless block_table names existing pages for the first ``lengths`` keys of each sequence."""
    pages, page_size, columns = k.shape[0], k.shape[1], block_table.shape[1]
    needed = torch.as_tensor(lengths, dtype=torch.int64, device=block_table.device).reshape(-1, 1)
    needed = needed.add(page_size - 1) // max(page_size, 1)
    if bool((needed > columns).any()):
        raise RuntimeError(
            f"sequences need up to {int(needed.max())} pages of {page_size} keys, block_table of shape "
            f"{tuple(block_table.shape)} names {columns}"
        )
    is_used = torch.arange(columns, device=block_table.device) < needed
    wrong = (is_used & ((block_table < 0) | (block_table >= pages))).nonzero()
    if wrong.numel():
        row, column = wrong[0].tolist()
        raise RuntimeError(
            f"block_table[{row}, {column}] must be one of the {pages} pages of k, got {int(block_table[row, column])}"
        )


def values_of_rows(k_cache: Tensor, cache_batch_idx: Tensor) -> None:
    """Raise RuntimeError unless each number of cache_batch_idx is a row of the cache."""
    rows = k_cache.shape[0]
    if bool(((cache_batch_idx < 0) | (cache_batch_idx >= rows)).any()):
        raise RuntimeError(f"cache_batch_idx must be below the kcache's {rows} rows, got {cache_batch_idx.tolist()}")


def values_of_leftpad(name: str, leftpad: Tensor) -> None:
    """Raise RuntimeError if a number of slots to skip is negative: they would lie outside of the sequence."""
    if bool((leftpad < 0).any()):
        raise RuntimeError(f"{name} must not be negative, got {_abbreviate(leftpad.tolist())}")


def _abbreviate(found: list[int]) -> str:
    """Format a list by its first eight numbers."""
    return str(found) if len(found) <= 8 else f"[{', '.join(map(str, found[:8]))}, ...]"


def alibi(slopes: Tensor, q: Tensor, batch: int) -> None:
    """Raise RuntimeError unless slopes are (nheads,) or (batch, nheads) fp32 on q's device."""
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


def upstream_memory(given: BackwardInputs, *gradients: Tensor | None) -> None:
    """Raise RuntimeError unless dout, out, softmax_lse are dense, and dq, dk, dv (or None) lie inside their storage."""
    for name in ("dout", "out", "softmax_lse"):
        is_tensor(name, getattr(given, name))
    for name, gradient in zip("qkv", gradients):
        try:
            _ = gradient is None or gradient.as_strided(gradient.shape, gradient.stride())
        except RuntimeError as error:
            raise RuntimeError(f"d{name} reaches beyond its memory: {error}") from error


def upstream(call: AttentionCall, given: BackwardInputs, *gradients: Tensor | None) -> None:
    """Raise RuntimeError unless a backward's dout, out, softmax_lse, dq, dk, dv (or None), rng_state fit ``call``."""
    expected = ("dout", given.dout, call.out_shape), ("out", given.out, call.out_shape)
    for name, tensor, shape in (*expected, ("softmax_lse", given.lse, call.lse_shape)):
        if name != "softmax_lse" and tensor.dtype != call.q.dtype:
            raise RuntimeError(f"query and {name} must have the same dtype, got {call.q.dtype} and {tensor.dtype}")
        if tensor.shape != shape:
            raise RuntimeError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        is_on(name, tensor, call.q.device)
    # Kernels read softmax_lse by its address, as fp32.
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
        overlap.refuse(f"d{name}", gradient)
    if call.dropout_p and given.rng_state is None:
        raise RuntimeError("rng_state must be given when dropout_p > 0: it holds the forward's dropout mask")


def is_writable_out(out: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ``out`` is contiguous. RuntimeError unless it fits (shape, dtype, device) and is writable."""
    if out.shape != tuple(shape) or out.dtype != dtype:
        raise RuntimeError(f"out must have shape {tuple(shape)} and {dtype}, got {tuple(out.shape)} and {out.dtype}")
    is_on("out", out, device)
    if out.is_neg():
        raise RuntimeError("out must not be a lazily negated view")
    if not out.is_contiguous():
        overlap.refuse("out", out)
        return False
    held, needed = out.untyped_storage().nbytes(), (out.storage_offset() + out.numel()) * out.element_size()
    if needed > held and out.numel():
        raise RuntimeError(f"out reaches beyond its memory: it needs {needed} bytes, its storage has {held}")
    return True


def is_writable_for(out: Tensor, q: Tensor, v: Tensor) -> bool:  # for the result of a call of q and v
    return is_writable_out(out, (*q.shape[:-1], v.shape[-1]), q.dtype, q.device)


def is_int32(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise RuntimeError unless ``tensor`` is a dense int32 tensor on ``device``."""
    is_tensor(name, tensor)
    if tensor.dtype != torch.int32:
        raise RuntimeError(f"{name} must have dtype int32, got {str(tensor.dtype).removeprefix('torch.')}")
    is_on(name, tensor, device)


def int32(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise RuntimeError unless ``tensor`` is a contiguous int32 tensor on ``device``, as CUDA kernels read it."""
    is_int32(name, tensor, device)
    if not tensor.is_contiguous():
        raise RuntimeError(f"{name} must be contiguous, got strides {tensor.stride()}")


def per_sequence(name: str, tensor: Tensor, batch: int, device: torch.device) -> None:
    """Raise RuntimeError unless ``tensor`` is a contiguous (batch,) int32 tensor on ``device``."""
    int32(name, tensor, device)
    if tensor.shape != (batch,):
        raise RuntimeError(f"{name} must have shape (batch_size), got {tuple(tensor.shape)} for batch size {batch}")


def descale_factor(name: str, value: object) -> float:
    """Return a descale that is a number. Raises RuntimeError unless it is positive and finite."""
    found = number(name, value)
    if not 0.0 < found < math.inf:
        raise RuntimeError(f"{name} must be positive and finite, got {found}")
    return found


def descales(
    k: Tensor, k_descale: Tensor | None, v_descale: Tensor | None, k_factor: float, v_factor: float, batch: int
) -> None:
    """Raise RuntimeError unless each descale is absent, or is well formed and the keys are 8-bit floats.

    k_descale, v_descale: None, or (batch or 1, nheads_k or 1) fp32 on k's device
    k_factor, v_factor: descales that are numbers; 1.0 counts as absent
    """
    for name, tensor, factor in (("k_descale", k_descale, k_factor), ("v_descale", v_descale, v_factor)):
        if tensor is None and factor == 1.0:
            continue
        if not eight_bit.is_eight_bit(k):
            raise RuntimeError(f"{name} is for keys and values of 8-bit floats, got k of {k.dtype}")
        if tensor is None:
            continue
        is_tensor(name, tensor)
        is_on(name, tensor, k.device)
        if tensor.dtype != torch.float32:
            raise RuntimeError(f"{name} must have dtype fp32, got {tensor.dtype}")
        if tensor.dim() != 2 or tensor.shape[0] not in (1, batch) or tensor.shape[1] not in (1, k.shape[-2]):
            expected = f"(batch_size or 1, num_heads_k or 1) = ({batch} or 1, {k.shape[-2]} or 1)"
            raise RuntimeError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")


def no_gradients(k: Tensor) -> None:
    """Raise RuntimeError if ``k`` is of 8-bit floats; for calls that need gradients."""
    if eight_bit.is_eight_bit(k):
        raise RuntimeError(
            f"keys and values of 8-bit floats have no gradients, got k of {k.dtype}: call under torch.no_grad()"
        )


def heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise RuntimeError unless key heads divide query heads, and heads have channels. Last axes: (heads, head_dim)."""
    nheads, nheads_k = q.shape[-2], k.shape[-2]
    if nheads_k == 0 or nheads % nheads_k:
        hint = ""
        # The caller probably swapped axes: as heads, axis -3 is smaller than axis -2, and k's divides q's.
        is_swapped = 0 < k.shape[-3] < nheads_k and q.shape[-3] % k.shape[-3] == 0
        if q.dim() == k.dim() and is_swapped:
            hint = "\n  These look like (batch_size, num_heads, seqlen, head_size): transpose(1, 2) them"
            hint = hint if q.dim() == 4 else "\n  These look like (num_heads, total, head_size): transpose(0, 1) them"
        expected = "(batch_size, seqlen, num_heads, head_size), or packed (total, num_heads, head_size)"
        message = "Number of heads in key/value must divide number of heads in query"
        raise _error(f"{message}, got {nheads_k} and {nheads} of tensors {expected}{hint}", q, k, v)
    if not (q.shape[-1] and v.shape[-1]):
        raise _error("head_size must be at least 1", q, k, v)


def is_on(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise RuntimeError unless ``tensor`` is on ``device``, which is q's."""
    if tensor.device != device:
        raise RuntimeError(_must_be_on(name, device))


def _must_be_on(name: str, device: torch.device) -> str:
    where = "CUDA" if device.type == "cuda" else device.type
    return f"{name} must be on {where}, the device of q ({device})"


def _rank_error(tensor: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Exception:
    if tensor.dim() > 4:
        return _error(f"q, k and v must have 4 dimensions, as q: {_DENSE['q']}", q, k, v)
    last = tensor.dim() - 1
    message = f"Dimension out of range (expected to be in range of [{-last - 1}, {last}], but got 3)"
    return IndexError(_with_shapes(f"{message}: q must have shape {_DENSE['q']}", q, k, v))


def _packed_rank_error(q: Tensor, k: Tensor, v: Tensor) -> RuntimeError:
    hint = "\n  This looks like a batch: pack it by bert_padding.unpad_input, or by flatten(0, 1) if nothing is padded"
    message = f"q must have shape {_PACKED['q']} when cu_seqlens_q is given"
    return _error(message + (hint if q.dim() == 4 else ""), q, k, v)


def _error(message: str, q: Tensor, k: Tensor, v: Tensor) -> RuntimeError:
    return RuntimeError(_with_shapes(message, q, k, v))


def _with_shapes(message: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    lines = [f"  {name}: {tuple(t.shape)} {t.dtype} {t.device}" for name, t in (("q", q), ("k", k), ("v", v))]
    return "\n".join([message, *lines])
