"""Helpers for tests written against flash-attn: random masks, packed inputs, and attention by plain matrix products.

Windows here are (left, right) with None for unbounded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

from flash_attn_compat.bert_padding import pad_input, unpad_input

Window = tuple[int | None, int | None]


def generate_random_padding_mask(
    max_seqlen: int,
    batch_size: int,
    device: torch.device | str,
    mode: str = "random",
    zero_lengths: bool = False,
) -> Tensor:
    """Return a mask (batch_size, max_seqlen) bool, True for the first tokens of each sequence.

    Args:
        mode: lengths are "full", "random" (at most 20 short) or "third" (from a third on).
        zero_lengths: every fifth sequence and the last are empty.
    """
    assert mode in ("full", "random", "third"), f'mode must be "full", "random" or "third", got {mode!r}'
    if mode == "full":
        lengths = torch.full((batch_size, 1), max_seqlen, dtype=torch.int64, device=device)
    else:
        least = max_seqlen // 3 if mode == "third" else max(0 if zero_lengths else 1, max_seqlen - 20)
        lengths = torch.randint(least, max_seqlen + 1, (batch_size, 1), device=device)
    if zero_lengths:
        lengths[::5] = 0
        lengths[-1] = 0
    return torch.arange(max_seqlen, device=device) < lengths


def generate_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    qv: Tensor | None = None,
    kvpacked: bool = False,
    qkvpacked: bool = False,
    query_unused_mask: Tensor | None = None,
    key_unused_mask: Tensor | None = None,
) -> tuple[Any, ...]:
    """Pack padded inputs for the varlen functions. Returns leaves that require gradients, and functions that pad again.

    Args:
        q: (batch, seqlen_q, nheads, d); k (batch, seqlen_k, nheads_k, d); v (batch, seqlen_k, nheads_k, d_v).
        query_padding_mask, key_padding_mask: (batch, seqlen) bool, True for tokens; None without padding.
        query_unused_mask, key_unused_mask: (batch, seqlen), tokens that are packed but do not count as used.
    Returns:
        qkvpacked: (qkv_unpad, cu_seqlens, max_seqlen, qkv, pad the output, pad dqkv).
        kvpacked: (q_unpad, kv_unpad, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q, kv, pad the output,
            pad dq, pad dkv).
        Otherwise: (q_unpad, k_unpad, v_unpad, qv_unpad, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            max_seqlen_q, max_seqlen_k, q, k, v, qv, pad the output, pad dq, pad dk).
    """
    assert not (kvpacked and qkvpacked), "kvpacked and qkvpacked exclude each other"
    batch, _, nheads, d = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    assert k.shape == (batch, seqlen_k, nheads_k, d), f"k has shape {tuple(k.shape)}, q has shape {tuple(q.shape)}"
    assert v.shape[:3] == k.shape[:3], f"v has shape {tuple(v.shape)}, k has shape {tuple(k.shape)}"
    if query_unused_mask is not None or key_unused_mask is not None:
        assert not kvpacked and not qkvpacked, "unused masks exclude kvpacked and qkvpacked"
    of_q, of_k = _Packing(q, query_padding_mask, query_unused_mask), _Packing(k, key_padding_mask, key_unused_mask)
    q_unpad, k_unpad, v_unpad = of_q.pack(q), of_k.pack(k), of_k.pack(v)
    if qkvpacked:
        assert nheads == nheads_k, "qkvpacked needs as many heads of k as of q"
        masks = (query_padding_mask, key_padding_mask)
        assert (masks[0] is None) == (masks[1] is None), "qkvpacked needs equal masks"
        assert masks[0] is None or masks[1] is None or torch.equal(masks[0], masks[1]), "qkvpacked needs equal masks"
        packed, padded = torch.stack((q_unpad, k_unpad, v_unpad), dim=1), torch.stack((q, k, v), dim=2)
        return _leaf(packed), of_q.cu_seqlens, of_q.max_seqlen, _leaf(padded), of_q.pad, of_q.pad
    if kvpacked:
        packed, padded = torch.stack((k_unpad, v_unpad), dim=1), torch.stack((k, v), dim=2)
        lengths = (of_q.cu_seqlens, of_k.cu_seqlens, of_q.max_seqlen, of_k.max_seqlen)
        return _leaf(q_unpad), _leaf(packed), *lengths, _leaf(q), _leaf(padded), of_q.pad, of_q.pad, of_k.pad
    return (
        *(_leaf(q_unpad), _leaf(k_unpad), _leaf(v_unpad), None if qv is None else of_q.pack(qv).detach()),
        *(of_q.cu_seqlens, of_k.cu_seqlens, of_q.seqused, of_k.seqused, of_q.max_seqlen, of_k.max_seqlen),
        *(_leaf(q), _leaf(k), _leaf(v), None if qv is None else qv.detach()),
        *(of_q.pad, of_q.pad, of_k.pad),
    )


class _Packing:
    """Packs padded tensors, and pads packed ones. Keeps the tokens where ``mask`` is True; without a mask, all."""

    def __init__(self, padded: Tensor, mask: Tensor | None, unused: Tensor | None) -> None:
        self.batch, self.seqlen = padded.shape[:2]
        self.indices: Tensor | None = None
        self.seqused: Tensor | None = None
        self.max_seqlen = self.seqlen
        if mask is not None:
            _, self.indices, self.cu_seqlens, self.max_seqlen, self.seqused = unpad_input(padded, mask, unused)
        else:
            starts = torch.arange(self.batch + 1, dtype=torch.int32, device=padded.device)
            self.cu_seqlens = starts * self.seqlen

    def pack(self, padded: Tensor) -> Tensor:
        tokens: Tensor = padded.flatten(0, 1)
        return tokens if self.indices is None else tokens[self.indices]

    def pad(self, packed: Tensor) -> Tensor:
        if self.indices is not None:
            return pad_input(packed, self.indices, self.batch, self.seqlen)
        padded: Tensor = packed.unflatten(0, (self.batch, self.seqlen))
        return padded


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def construct_local_mask(
    seqlen_q: int,
    seqlen_k: int,
    window_size: Window = (None, None),
    sink_token_length: int = 0,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    key_leftpad: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the keys that a window hides: bool, broadcastable to (batch, 1, seqlen_q, seqlen_k), True = hidden.

    Args:
        sink_token_length: first keys that the left side of the window never hides.
        key_leftpad: (batch,), keys to skip at the front.
    """
    rows, columns, keys = _align(seqlen_q, seqlen_k, query_padding_mask, key_padding_mask, key_leftpad, device)
    left, right = window_size
    if right is None:
        hidden = (columns > keys) & (columns > rows)  # the keys that key_leftpad skips
    elif left is None:
        hidden = columns > rows + right
    else:
        last = rows + right
        hidden = columns > (last.clamp(max=keys) if isinstance(keys, int) else torch.minimum(last, keys))
    if left is None:
        return hidden
    return hidden | ((columns < rows - left) & (columns >= sink_token_length))


def construct_chunk_mask(
    seqlen_q: int,
    seqlen_k: int,
    attention_chunk: int,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    key_leftpad: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return a mask, True = hidden: each row sees only the chunk of attention_chunk keys in which it stands itself."""
    rows, columns, _ = _align(seqlen_q, seqlen_k, query_padding_mask, key_padding_mask, key_leftpad, device)
    first = rows - rows % attention_chunk
    return (columns < first) | (columns >= first + attention_chunk)


def _align(
    seqlen_q: int,
    seqlen_k: int,
    query_padding_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    key_leftpad: Tensor | None,
    device: torch.device | str | None,
) -> tuple[Tensor, Tensor, int | Tensor]:
    """Return the key at which each row stands (the last row at the last key), each column's key, and the key count."""
    columns = torch.arange(seqlen_k, device=device)
    if key_leftpad is not None:
        leftpad = rearrange(key_leftpad, "b -> b 1 1 1")
        columns = torch.where(columns >= leftpad, columns - leftpad, 2**32)
    keys = seqlen_k if key_padding_mask is None else rearrange(key_padding_mask.sum(-1), "b -> b 1 1 1")
    queries = seqlen_q if query_padding_mask is None else rearrange(query_padding_mask.sum(-1), "b -> b 1 1 1")
    return torch.arange(seqlen_q, device=device)[:, None] + (keys - queries), columns, keys


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    key_leftpad: Tensor | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (None, None),
    attention_chunk: int = 0,
    sink_token_length: int = 0,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    upcast: bool = True,
    reorder_ops: bool = False,
    intermediate_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention by plain matrix products, differentiably.

    Args:
        q: (batch, seqlen_q, nheads, d); k (batch, seqlen_k, nheads_k, d); v (batch, seqlen_k, nheads_k, d_v).
        query_padding_mask, key_padding_mask: (batch, seqlen) bool, True for tokens.
        attn_bias: broadcastable to (batch, nheads, seqlen_q, seqlen_k), added to the scores.
        dropout_mask: (batch, nheads, seqlen_q, seqlen_k) bool, True = kept; v is scaled by 1 / (1 - dropout_p).
        qv: (batch, seqlen_q, nheads, d_v), adds qv @ v to the scores.
        q_descale, k_descale, v_descale: (batch, nheads_k), factors of the inputs.
        window_size: see `construct_local_mask`; attention_chunk: see `construct_chunk_mask`.
        learnable_sink: (nheads,), a logit of the softmax without a key and a value.
        upcast: compute in fp32, otherwise in the inputs' dtype.
        reorder_ops: scale k instead of q, which rounds differently.
        intermediate_dtype: round the probabilities to this dtype before the product with v.
    Returns:
        out (batch, seqlen_q, nheads, d_v) and the probabilities before dropout (batch, nheads, seqlen_q, seqlen_k),
        both in q's dtype.
    """
    dtype = q.dtype
    if upcast:
        q, k, v = q.float(), k.float(), v.float()
        qv = None if qv is None else qv.float()
    group = q.shape[2] // k.shape[2]
    if q_descale is not None:
        factor = repeat(q_descale, "b h -> b 1 (h g) 1", g=group)
        q = (q.float() * factor).to(q.dtype)
        qv = None if qv is None else (qv.float() * factor).to(qv.dtype)
    if k_descale is not None:
        k = (k.float() * rearrange(k_descale, "b h -> b 1 h 1")).to(k.dtype)
    if v_descale is not None:
        v = (v.float() * rearrange(v_descale, "b h -> b 1 h 1")).to(v.dtype)
    k, v = (repeat(t, "b s h d -> b s (h g) d", g=q.shape[2] // t.shape[2]) for t in (k, v))
    scale = 1.0 / math.sqrt(q.shape[-1] + (0 if qv is None else v.shape[-1]))
    scores = torch.einsum("bthd,bshd->bhts", *((q, k * scale) if reorder_ops else (q * scale, k)))
    if qv is not None:
        scores = scores + torch.einsum("bthd,bshd->bhts", qv * scale, v)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    padding = None if key_padding_mask is None else rearrange(~key_padding_mask, "b s -> b 1 1 s")
    if padding is not None:
        scores = scores.masked_fill(padding, -math.inf)
    window: Window = (window_size[0], 0) if causal else window_size
    masks: tuple[Any, ...] = (query_padding_mask, key_padding_mask, key_leftpad, q.device)
    hidden: Tensor | None = None
    if window != (None, None) or key_leftpad is not None:
        hidden = construct_local_mask(q.shape[1], k.shape[1], window, sink_token_length, *masks)
    if attention_chunk > 0:
        chunks = construct_chunk_mask(q.shape[1], k.shape[1], attention_chunk, *masks)
        hidden = chunks if hidden is None else hidden | chunks
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    if attn_bias is not None:
        scores = scores + attn_bias
    attention = _softmax(scores, learnable_sink).to(v.dtype)
    # The softmax of padding and of rows without keys is nan. Set to 0, or all of dv would be nan.
    queries = None if query_padding_mask is None else rearrange(~query_padding_mask, "b s -> b 1 s 1")
    for dead in (queries, padding, None if hidden is None else hidden.all(dim=-1, keepdim=True)):
        attention = attention if dead is None else attention.masked_fill(dead, 0.0)
    dropped = attention if dropout_mask is None else attention.masked_fill(~dropout_mask, 0.0)
    if intermediate_dtype is not None:
        dropped = dropped.to(intermediate_dtype).to(dropped.dtype)
    out = torch.einsum("bhts,bshd->bthd", dropped, v * (1.0 / (1 - dropout_p)))
    if queries is not None:
        out = out.masked_fill(rearrange(queries, "b 1 s 1 -> b s 1 1"), 0.0)
    return out.to(dtype), attention.to(dtype)


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    if sink is None:
        return torch.softmax(scores, dim=-1)
    column = rearrange(sink.float(), "h -> h 1 1").expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores.float(), column), dim=-1), dim=-1)[..., :-1]
