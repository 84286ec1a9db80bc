"""The attention function that register_with_transformers puts into transformers' registry: padding, packing, windows.

Needs torch, unlike most of dropin; register_with_transformers imports it on its first use.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flash_attn_compat.bert_padding import index_first_axis, pad_input
from flash_attn_compat.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

# Layers of transformers 4 that pass is_causal=False with a mask, since they expect SDPA's mask, which is causal itself.
_MEAN_SDPA = frozenset({"GPT2Attention", "DecisionTransformerGPT2Attention", "MoonshineAttention"})


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, is_causal: bool | None = None, position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, max_length_q: int | None = None,
    max_length_k: int | None = None, s_aux: Tensor | None = None, deterministic: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention with transformers' arguments. Other keyword arguments are ignored.

    Args:
        query: (batch, nheads, seqlen_q, head_dim)
        key, value: (batch, nheads_k, seqlen_k, head_dim)
        attention_mask: (batch, seqlen_k), 1 for tokens and 0 for padding; None without padding
        sliding_window: the number of keys that a token sees on each side, itself included
        s_aux: (nheads,), attention sinks
        deterministic: as flash_attn_func's; None: as FLASH_ATTENTION_DETERMINISTIC=1 says, transformers' variable

    Returns (batch, seqlen_q, nheads, head_dim), and None instead of attention weights.
    Raises ValueError for a mask of another shape.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must have shape (batch, seqlen_k), got {tuple(attention_mask.shape)}")
    # Under autocast, rotary embeddings leave queries and keys in fp32 beside values of half precision.
    q, k, v = (states.transpose(1, 2).to(value.dtype) for states in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if type(module).__name__ in _MEAN_SDPA:
        causal = module.is_causal and not getattr(module, "is_cross_attention", False)
    window = -1
    if sliding_window is not None and k.shape[1] > sliding_window:
        window = sliding_window if not causal and _sees_one_more(module) else sliding_window - 1
    if deterministic is None:
        deterministic = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    options: dict[str, Any] = dict(
        dropout_p=dropout, softmax_scale=scaling, causal=causal, window_size=(window, window), softcap=softcap or 0.0,
        s_aux=s_aux, deterministic=deterministic,
    )  # fmt: skip
    if attention_mask is not None:
        return _padded(q, k, v, attention_mask, options), None
    lengths: Any = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if cu_seq_lens_q is None and position_ids is not None and _may_be_packed(position_ids, q, k):
        _, cu_seqlens, longest = _find_sequences(position_ids)
        lengths = cu_seqlens, cu_seqlens, longest, longest
    if lengths[0] is not None:
        packed: Any = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *lengths, **options)
        return packed.unflatten(0, q.shape[:2]), None
    dense: Any = flash_attn_func(q, k, v, **options)
    return dense, None


def _sees_one_more(module: torch.nn.Module) -> bool:
    """Whether a token of this bidirectional layer sees sliding_window keys on each side, itself not counted.

    True for T5Gemma in transformers 5, whose mask for eager defines it so. Other layers with that mask pass
    sliding_window + 1 to flash attention, which counts the token itself.
    """
    bases = [base for base in type(module).__mro__ if base.__name__ == "T5GemmaSelfAttention"]
    return any(hasattr(sys.modules[base.__module__], "create_bidirectional_sliding_window_mask") for base in bases)


def _padded(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, options: dict[str, Any]) -> Tensor:
    batch, seqlen_q = q.shape[:2]
    seqlen_k = min(k.shape[1], attention_mask.shape[1])
    k, v = k[:, :seqlen_k], v[:, :seqlen_k]  # a static cache is longer than its content
    keys = _Tokens.from_mask(attention_mask[:, :seqlen_k])
    if not options["causal"] and options["window_size"] == (-1, -1):
        rows = _Tokens.from_mask(attention_mask.new_ones(batch, seqlen_q))  # cross-attention: the mask is of keys
    elif seqlen_q == seqlen_k:
        rows = keys  # one cu_seqlens tensor for both shows that lengths are equal, which faster kernels need
    elif seqlen_q < seqlen_k:
        rows = _Tokens.from_mask(attention_mask[:, seqlen_k - seqlen_q : seqlen_k])  # the newest tokens
    else:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} covers fewer tokens than the {seqlen_q} queries"
        )
    q, k, v = (index_first_axis(x.flatten(0, 1), own.indices) for x, own in ((q, rows), (k, keys), (v, keys)))
    out: Any = flash_attn_varlen_func(q, k, v, rows.cu_seqlens, keys.cu_seqlens, seqlen_q, seqlen_k, **options)
    return pad_input(out, rows.indices, batch, seqlen_q)


class _Tokens(NamedTuple):
    """The order of (batch * seqlen) tokens that puts padding last, and the starts of the sequences without padding.

    Padding is not cut off, since only the GPU knows its size. It belongs to no sequence: no row attends to it, and its
    result is 0. Every layer sorts again, since a mask may have changed in place without notice.
    """

    indices: Tensor
    cu_seqlens: Tensor

    @staticmethod
    def from_mask(mask: Tensor) -> _Tokens:
        is_token = mask != 0
        indices = torch.argsort(is_token.flatten().to(torch.uint8), descending=True, stable=True)
        lengths = is_token.sum(1, dtype=torch.int32)
        return _Tokens(indices, torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)))


class _Packed(NamedTuple):
    """The sequences in one row of tokens; ``cu_seqlens`` is None if the row is one sequence."""

    is_start: Tensor
    cu_seqlens: Tensor | None
    longest: int


_cache = WeakTensorKeyDictionary()  # by position_ids: (key, _Packed)


def _may_be_packed(position_ids: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether the batch is one row that may hold packed sequences: no cache, and position_ids for all its tokens."""
    return q.shape[0] == 1 and q.shape[1] == k.shape[1] > 1 and position_ids.shape == q.shape[:2]


def _find_sequences(position_ids: Tensor) -> _Packed:
    """Return where the sequences of a packed row start. The host reads this from the GPU once, for all layers.

    In every layer the GPU asserts that the starts are unchanged: writes by ``.data``, CUDA graphs or custom kernels
    change position_ids but not their version counter, and would make the answer wrong.
    """
    is_start = _mark_starts(position_ids.flatten())
    # Tensors of inference mode have no version counter.
    if not _waits_for_gpu(position_ids) or torch.compiler.is_compiling() or position_ids.is_inference():
        return _read_starts(is_start)
    stream = torch.cuda.current_stream(position_ids.device) if position_ids.is_cuda else None
    key = position_ids._version, stream, torch.is_inference_mode_enabled()
    entry = _cache.get(position_ids)
    if entry is None or entry[0] != key:
        entry = _cache[position_ids] = key, _read_starts(is_start)
    packed: _Packed = entry[1]
    message = "position_ids have other sequences than before, and PyTorch was not told that they changed"
    torch._assert_async((is_start == packed.is_start).all(), message)
    return packed


def _waits_for_gpu(tensor: Tensor) -> bool:
    """Whether the host waits for a GPU when it reads ``tensor``."""
    return tensor.is_cuda


def _mark_starts(positions: Tensor) -> Tensor:
    """Return which tokens start a sequence: by transformers' rule, those at the lowest position, and the first token.

    The first sequence may be cut off. Positions within a sequence may repeat (an image's tokens) or skip numbers.
    """
    is_start = positions == positions.min()
    is_start[0] = True
    return is_start


def _read_starts(is_start: Tensor) -> _Packed:
    starts = torch.nonzero(is_start).flatten()
    if starts.numel() == 1:
        return _Packed(is_start, None, 0)
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=is_start.numel()).to(torch.int32)
    return _Packed(is_start, cu_seqlens, int(cu_seqlens.diff().max()))
