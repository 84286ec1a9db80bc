"""transformers' attention function over flash_attn_compat, for its registry: padding, packing, windows.

The one file of naming that needs torch; register_with_transformers imports it on its first use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flash_attn_compat.bert_padding import index_first_axis, pad_input
from flash_attn_compat.flash_attn_interface import flash_attn_func, flash_attn_varlen_func


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
    # Rotary embeddings leave queries and keys in fp32 where autocast has made the values half.
    q, k, v = (states.transpose(1, 2).to(value.dtype) for states in (query, key, value))
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
    keys = _Tokens.of(attention_mask[:, :seqlen_k])
    if not options["causal"] and options["window_size"] == (-1, -1):
        rows = _Tokens.of(attention_mask.new_ones(batch, seqlen_q))  # maybe of another text than the keys
    elif seqlen_q == seqlen_k:
        rows = keys  # the same tensor of starts for both: equal lengths open the way to faster kernels
    elif seqlen_q < seqlen_k:
        rows = _Tokens.of(attention_mask[:, seqlen_k - seqlen_q : seqlen_k])  # the newest tokens
    else:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} covers fewer tokens than the {seqlen_q} queries"
        )
    q, k, v = (index_first_axis(x.flatten(0, 1), of.indices) for x, of in ((q, rows), (k, keys), (v, keys)))
    out: Any = flash_attn_varlen_func(q, k, v, rows.cu_seqlens, keys.cu_seqlens, seqlen_q, seqlen_k, **options)
    return pad_input(out, rows.indices, batch, seqlen_q)


class _Tokens(NamedTuple):
    """The order of (batch * seqlen) tokens in which padding stands behind all others, and the others' starts.

    Padding is carried along, since how much of it there is only the GPU knows. It belongs to no sequence, so it is not
    attended to, and comes back as 0. Found anew for every layer: nothing shows that a mask was written to.
    """

    indices: Tensor
    cu_seqlens: Tensor

    @staticmethod
    def of(mask: Tensor) -> _Tokens:
        is_token = mask != 0
        indices = torch.argsort(is_token.flatten().to(torch.uint8), descending=True, stable=True)
        lengths = is_token.sum(1, dtype=torch.int32)
        return _Tokens(indices, torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)))


class _Packed(NamedTuple):
    """Where sequences start in a row of tokens; ``cu_seqlens`` is None for a row that is one."""

    is_start: Tensor
    cu_seqlens: Tensor | None
    longest: int


_known = WeakTensorKeyDictionary()


def _lengths(position_ids: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The starts and longest lengths of several sequences in one row; None for a row that is one."""
    if q.shape[0] != 1 or q.shape[1] != k.shape[1] or position_ids.shape != q.shape[:2] or q.shape[1] == 1:
        return None, None, 0, 0
    found = _packed(position_ids)
    return found.cu_seqlens, found.cu_seqlens, found.longest, found.longest


def _packed(position_ids: Tensor) -> _Packed:
    """How many sequences there are decides what is called, so it is read from the GPU, once for all layers.

    The GPU itself checks in every layer that the sequences are still those, since ``.data``, CUDA graphs and kernels
    change numbers and leave no sign: a device assert then, rather than a wrong answer.
    """
    is_start = _starts(position_ids.flatten())
    # Tensors of inference mode do not count their changes.
    if not _is_waited_for(position_ids) or torch.compiler.is_compiling() or position_ids.is_inference():
        return _read(is_start)
    stream = torch.cuda.current_stream(position_ids.device) if position_ids.is_cuda else None
    key = position_ids._version, stream, torch.is_inference_mode_enabled()
    known = _known.get(position_ids)
    if known is None or known[0] != key:
        known = _known[position_ids] = key, _read(is_start)
    found: _Packed = known[1]
    message = "position_ids have other sequences than before, and PyTorch was not told that they changed"
    torch._assert_async((is_start == found.is_start).all(), message)
    return found


def _is_waited_for(tensor: Tensor) -> bool:
    """Whether reading it keeps the host waiting."""
    return tensor.is_cuda


def _starts(positions: Tensor) -> Tensor:
    """Where sequences start: as transformers has it, at the lowest position, and the first, maybe cut off, anywhere.

    Positions within one may repeat (of an image's tokens, say) or skip some.
    """
    is_start = positions == positions.min()
    is_start[0] = True
    return is_start


def _read(is_start: Tensor) -> _Packed:
    starts = torch.nonzero(is_start).flatten()
    if starts.numel() == 1:
        return _Packed(is_start, None, 0)
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=is_start.numel()).to(torch.int32)
    return _Packed(is_start, cu_seqlens, int(cu_seqlens.diff().max()))
