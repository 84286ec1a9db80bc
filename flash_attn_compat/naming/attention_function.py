"""transformers' attention function over flash_attn_compat, for its registry: padding, packing, windows.

The one file of naming that needs torch; register_with_transformers imports it on its first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flash_attn_compat.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn_compat.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

T = TypeVar("T")


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    query (batch, nheads, seqlen_q, head_dim), key and value (batch, nheads_k, seqlen_k, head_dim).
    attention_mask (batch, seqlen_k): 1 for tokens, 0 for padding; None where nothing is padded.
    sliding_window: how many keys a token sees, itself included.
    Returns (batch, seqlen_q, nheads, head_dim) and None for the weights.
    s_aux: (nheads,), attention sinks.
    Raises ValueError for masks of other shapes: they would be ignored.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must have shape (batch, seqlen_k), got {tuple(attention_mask.shape)}")
    q, k, v = (states.transpose(1, 2) for states in (query, key, value))
    window = -1 if sliding_window is None or k.shape[1] <= sliding_window else sliding_window - 1
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "causal": getattr(module, "is_causal", True) if is_causal is None else is_causal,
        "window_size": (window, window),
        "softcap": softcap or 0.0,
        "s_aux": s_aux,
    }
    if attention_mask is not None:
        return _padded(q, k, v, attention_mask, options), None
    lengths: Any = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if cu_seq_lens_q is None and position_ids is not None:
        lengths = _lengths(position_ids, q, k)
    if lengths[0] is not None:
        packed: Any = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *lengths, **options)
        return packed.unflatten(0, q.shape[:2]), None
    dense: Any = flash_attn_func(q, k, v, **options)
    return dense, None


def _padded(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, options: dict[str, Any]) -> Tensor:
    batch, seqlen_q = q.shape[:2]
    seqlen_k = min(k.shape[1], attention_mask.shape[1])
    k, v = k[:, :seqlen_k], v[:, :seqlen_k]  # a static cache is longer than its content
    rows, keys = _remembered(
        attention_mask, (seqlen_q, seqlen_k), lambda: _tokens_of(attention_mask[:, :seqlen_k], seqlen_q)
    )
    q, k, v = (index_first_axis(x.flatten(0, 1), of.indices) for x, of in ((q, rows), (k, keys), (v, keys)))
    lengths = rows.cu_seqlens, keys.cu_seqlens, rows.longest, keys.longest
    out: Any = flash_attn_varlen_func(q, k, v, *lengths, **options)
    return pad_input(out, rows.indices, batch, seqlen_q)


class _Tokens(NamedTuple):
    """Which tokens of (batch, seqlen) are no padding, and how long the sequences are without it."""

    indices: Tensor
    cu_seqlens: Tensor
    longest: int

    @staticmethod
    def of(mask: Tensor) -> _Tokens:
        _, indices, cu_seqlens, longest, _ = unpad_input(mask.unsqueeze(-1), mask)
        return _Tokens(indices, cu_seqlens, longest)


def _tokens_of(mask: Tensor, seqlen_q: int) -> tuple[_Tokens, _Tokens]:
    """Of the queries and of the keys. Queries are the newest tokens; one that is itself padding is left zero."""
    keys = _Tokens.of(mask)
    # The same tensor of starts for both: equal lengths open the way to faster kernels.
    return (keys if seqlen_q == mask.shape[1] else _Tokens.of(mask[:, -seqlen_q:])), keys


_known = WeakTensorKeyDictionary()


def _remembered(tensor: Tensor, about: object, work: Callable[[], T]) -> T:
    """`work()`, run once for this tensor as it is now: every layer asks, and each answer would wait for the GPU."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return work()  # tensors of inference mode do not tell when they were written to
    stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
    key = tensor._version, about, stream, torch.is_inference_mode_enabled()
    known = _known.get(tensor)
    if known is not None and known[0] == key:
        answer: T = known[1]
        return answer
    answer = work()
    _known[tensor] = key, answer
    return answer


def _lengths(position_ids: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The starts and longest lengths of several sequences in one row; None for a row that is one.

    As transformers has it, each sequence but the first, which may be cut off in front, starts at the lowest position:
    positions within one may repeat (of an image's tokens, say) or skip some.
    """
    if q.shape[0] != 1 or q.shape[1] != k.shape[1] or position_ids.shape != q.shape[:2] or q.shape[1] == 1:
        return None, None, 0, 0
    return _remembered(position_ids, None, lambda: _starts(position_ids.flatten()))


def _starts(positions: Tensor) -> tuple[Tensor | None, Tensor | None, int, int]:
    is_start = positions == positions.min()
    is_start[0] = True
    starts = torch.nonzero(is_start).flatten()
    if starts.numel() == 1:
        return None, None, 0, 0
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)
    longest = int(cu_seqlens.diff().max())
    return cu_seqlens, cu_seqlens, longest, longest
