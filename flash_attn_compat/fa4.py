"""FlashAttention-4's functions with its own signatures, computed by our flash-attn 2 functions.

Differences from flash-attn 2: names and order of arguments, windows with None for no bound, no dropout, no ALiBi,
attention sinks, a pair of results in every call, and softmax_lse -inf in rows that see no key. num_splits, pack_gqa,
min_seqlen_k, scheduler_metadata, seqlen_k_per_split and disable_scheduler_metadata steer the speed of FlashAttention-4
and are ignored. Functions in CuTe's language, and other unsupported arguments, raise NotImplementedError.
patch(interfaces=("fa4",)) makes this module importable as flash_attn.cute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import flash_attn_interface as fa2

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int | None] = (None, None),
    learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Sequence[Tensor] | None = None, aux_scalars: Sequence[Any] | None = None,
    block_sparse_tensors: Any = None, block_sparse_tensors_bwd: Any = None, return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return (out, softmax_lse) of dense attention.

    Args:
        q: (batch, seqlen_q, nheads, headdim)
        k: (batch, seqlen_k, nheads_k, headdim)
        v: (batch, seqlen_k, nheads_k, headdim_v)
        window_size: (left, right), how many keys a row sees on each side of its own; None for no bound
        learnable_sink: (nheads,), a logit that takes part in the softmax of every row of its head

    Returns:
        out: (batch, seqlen_q, nheads, headdim_v)
        softmax_lse: (batch, nheads, seqlen_q) fp32, sinks included; (batch, seqlen_q, nheads) where ``k is v`` with
            head_dim 512, as FlashAttention-4 has it. None unless return_lse or an input requires gradients; only with
            return_lse do its gradients count.

    Raises NotImplementedError for an argument that flash-attn 2's functions cannot express.
    """
    _refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )  # fmt: skip
    options = _options(q, softmax_scale, causal, window_size, learnable_sink, softcap, deterministic)
    returns_lse = return_lse or _require_gradients(q, k, v, learnable_sink)
    result: Any = fa2.flash_attn_func(q, k, v, return_attn_probs=returns_lse, **options)
    return _with_fa4_lse(result, return_lse, k is v and v.shape[-1] == 512) if returns_lse else (result, None)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None, page_table: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int | None] = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None, score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None, block_sparse_tensors: Any = None,
    aux_tensors: Sequence[Tensor] | None = None, aux_scalars: Sequence[Any] | None = None, return_lse: bool = False,
    scheduler_metadata: Any = None, seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return (out, softmax_lse) of sequences of different lengths, packed, padded or paged on either side.

    Args:
        q: (total_q, nheads, headdim) with cu_seqlens_q, else (batch, seqlen_q, nheads, headdim)
        k, v: (total_k, nheads_k, headdim) with cu_seqlens_k, (pages, page_size, nheads_k, headdim) with page_table,
            else (batch, seqlen_k, nheads_k, headdim); v may have another headdim
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, where each sequence starts and the last ends
        max_seqlen_q, max_seqlen_k: the longest lengths, or None for the number of tokens
        seqused_q, seqused_k: (batch,) int32, how many tokens of each sequence count, from its first; the out of a row
            behind them is 0 and its softmax_lse undefined
        page_table: (batch, max_pages) int32, the pages of each sequence in order; not with cu_seqlens_k

    The other arguments, the results and the errors are flash_attn_func's; softmax_lse of packed q is (nheads, total_q).
    """
    _refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
    )  # fmt: skip
    if page_table is not None and cu_seqlens_k is not None:
        raise ValueError("page_table is not supported with cu_seqlens_k: give the lengths as seqused_k")
    options = _options(q, softmax_scale, causal, window_size, learnable_sink, softcap, deterministic)
    requires_gradients = _require_gradients(q, k, v, learnable_sink)
    returns_lse = return_lse or requires_gradients
    has_shared_layout = k is v and v.shape[-1] == 512
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table)
    if all(length is None for length in lengths):
        result: Any = fa2.flash_attn_func(q, k, v, return_attn_probs=returns_lse, **options)
    elif all(length is None for length in lengths[:3]) and not requires_gradients:
        result = fa2.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=seqused_k, block_table=page_table, return_softmax_lse=returns_lse,
            **{name: value for name, value in options.items() if name != "deterministic"},
        )  # fmt: skip
    else:
        rows = _tokens("q", q, cu_seqlens_q, seqused_q, max_seqlen_q)
        if page_table is None:
            keys = _tokens("k", k, cu_seqlens_k, seqused_k, max_seqlen_k)
            k, v = keys.take(k), keys.take(v)
        else:
            keys = _paged_tokens(k, page_table, seqused_k)
        result = fa2.flash_attn_varlen_func(
            rows.take(q), k, v, rows.cu_seqlens, keys.cu_seqlens, rows.longest, keys.longest,
            return_attn_probs=returns_lse, block_table=page_table, **options,
        )  # fmt: skip
        result = (rows.put_back(result[0]), rows.put_back_lse(result[1])) if returns_lse else rows.put_back(result)
    return _with_fa4_lse(result, return_lse, has_shared_layout) if returns_lse else (result, None)


class _Tokens(NamedTuple):
    """Sequences as one row of tokens.

    shape: (batch, seqlen) of a padded tensor; None for packed tokens
    indices: the order of the tokens that puts unused ones last; None if all are used
    """

    cu_seqlens: Tensor
    longest: int
    shape: tuple[int, int] | None
    indices: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Return the tokens of ``x`` as (total, heads, headdim), one sequence after another, unused tokens last."""
        x = x if self.shape is None else x.flatten(0, 1)
        return x if self.indices is None else x[self.indices]

    def put_back(self, out: Tensor) -> Tensor:
        """Return ``out``, computed from the tokens of ``take``, in the layout of the caller's q."""
        if self.indices is not None:
            out = torch.zeros_like(out).index_copy(0, self.indices, out)
        return out if self.shape is None else out.unflatten(0, self.shape)

    def put_back_lse(self, lse: Tensor) -> Tensor:
        """Return an LSE (nheads, total) in the layout of the caller's q: (batch, nheads, seqlen) if q is padded."""
        if self.indices is not None:
            lse = torch.zeros_like(lse).index_copy(1, self.indices, lse)
        return lse if self.shape is None else lse.unflatten(1, self.shape).transpose(0, 1).contiguous()


def _tokens(
    name: str, x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None, longest: int | None
) -> _Tokens:  # fmt: skip
    """Return the tokens of q or k: packed by cu_seqlens, or (batch, seqlen); only the first ``seqused`` count."""
    expected = 4 if cu_seqlens is None else 3
    if x.dim() != expected:
        layout = "(batch, seqlen, heads, headdim) without" if cu_seqlens is None else "(total, heads, headdim) with"
        raise ValueError(f"{name} must have shape {layout} cu_seqlens_{name}, got {tuple(x.shape)}")
    shape = None
    if cu_seqlens is None:
        shape = batch, seqlen = x.shape[0], x.shape[1]
        cu_seqlens = torch.arange(0, batch * seqlen + 1, max(seqlen, 1), dtype=torch.int32, device=x.device)
        cu_seqlens = cu_seqlens if seqlen else cu_seqlens.new_zeros(batch + 1)
        longest = seqlen
    total = x.shape[0] if shape is None else shape[0] * shape[1]
    longest = total if longest is None else longest
    if seqused is None:
        return _Tokens(cu_seqlens, longest, shape, None)
    starts = cu_seqlens[:-1].long()
    if seqused.shape != starts.shape or seqused.dtype != torch.int32:
        raise ValueError(
            f"seqused_{name} must be int32 of shape (batch,) = ({len(starts)},), got {seqused.dtype} of shape "
            f"{tuple(seqused.shape)}"
        )
    positions = torch.arange(total, device=x.device)
    sequence = (torch.searchsorted(cu_seqlens[1:].long(), positions, right=True)).clamp(max=len(starts) - 1)
    is_used = (positions >= starts[sequence]) & (positions - starts[sequence] < seqused[sequence])
    is_used &= positions < cu_seqlens[-1]
    indices = torch.argsort(is_used.to(torch.uint8), descending=True, stable=True)
    used = torch.minimum(seqused.clamp(min=0), cu_seqlens.diff())
    return _Tokens(_starts(used), longest, shape, indices)


def _paged_tokens(k: Tensor, page_table: Tensor, seqused: Tensor | None) -> _Tokens:
    """Return the key sequences of a paged k: each has ``seqused`` tokens, or without it all slots of its pages."""
    longest = page_table.shape[1] * k.shape[1]
    lengths = page_table.new_full(page_table.shape[:1], longest) if seqused is None else seqused
    return _Tokens(_starts(lengths), longest, None, None)


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _options(
    q: Tensor, softmax_scale: float | None, causal: bool, window_size: Sequence[int | None],
    learnable_sink: Tensor | None, softcap: float | None, deterministic: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return these options as keyword arguments of our flash-attn 2 functions."""
    if learnable_sink is not None and (
        not isinstance(learnable_sink, Tensor) or learnable_sink.shape != q.shape[-2:-1]
    ):
        found = tuple(learnable_sink.shape) if isinstance(learnable_sink, Tensor) else type(learnable_sink).__name__
        raise ValueError(f"learnable_sink must have shape (nheads,) = ({q.shape[-2]},), got {found}")
    return {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": _two_bounds(window_size, causal),
        "softcap": softcap or 0.0, "deterministic": deterministic, "s_aux": learnable_sink,
    }  # fmt: skip


def _two_bounds(window_size: Sequence[int | None], causal: bool) -> tuple[int, int]:
    """Return the window with flash-attn 2's -1 for no bound.

    In FlashAttention-4 two bounds whose sum is negative mean no window. Another negative bound moves the window off a
    row's own key, which flash-attn 2 cannot express.
    """
    if len(window_size) != 2:
        raise ValueError(f"window_size must be two bounds, (left, right), got {window_size!r}")
    left, right = window_size[0], 0 if causal else window_size[1]
    if left is not None and right is not None and left + right < 0:
        left = right = None
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise NotImplementedError(
            f"window_size={tuple(window_size)} of FlashAttention-4 is not served by flash_attn_compat: a negative "
            "bound moves the window off a row's own key; None means no bound"
        )
    return -1 if left is None else left, -1 if right is None else right


def _require_gradients(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and not (isinstance(value, (list, tuple)) and not value):
            raise NotImplementedError(f"{name} of FlashAttention-4 is not served by flash_attn_compat")


def _with_fa4_lse(results: tuple[Tensor, ...], return_lse: bool, is_shared: bool) -> tuple[Tensor, Tensor]:
    """Return (out, softmax_lse) with -inf in rows that see no key; without gradients of the LSE unless asked for.

    is_shared: k and v are one tensor: FlashAttention-4 then returns softmax_lse with nheads as its last axis
    """
    out, lse = results[:2]
    lse = (lse if return_lse else lse.detach()).masked_fill(lse == torch.inf, -torch.inf)
    return out, lse.transpose(-2, -1).contiguous() if is_shared else lse
