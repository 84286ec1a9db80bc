"""One attention call as one immutable value, however it was spelled by the caller.

Arguments are checked before the value is made (checks.py); afterwards nothing is checked again. What a
row sees is in mask.py, how sequences lie in the tensors in varlen.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import eight_bit
from flash_attn_compat.core.features import BY_DISPATCH, Feature, Traits
from flash_attn_compat.core.inputs import Inputs
from flash_attn_compat.core.mask import Mask


class AttentionCall(NamedTuple):
    """Attention of ``q`` over ``k`` and ``v``."""

    # (batch, seqlen_q, nheads, head_dim), or (total_q, nheads, head_dim) with cu_seqlens_q
    q: Tensor
    # (batch, seqlen_k, nheads_k, head_dim), (total_k, nheads_k, head_dim) with cu_seqlens_k, or
    # (num_blocks, page_size, nheads_k, head_dim) with block_table; v likewise with its own head_dim
    k: Tensor
    v: Tensor
    softmax_scale: float  # what products of queries and keys are multiplied by
    mask: Mask  # the band of keys that each row sees
    max_seqlen_q: int  # as the caller said for packed calls, the tensors' lengths for dense ones
    max_seqlen_k: int
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0 for none
    dropout_p: float = 0.0  # the share of probabilities that is dropped
    alibi_slopes: Tensor | None = None  # (batch, nheads) or (nheads,) fp32
    cu_seqlens_q: Tensor | None = None  # (batch + 1,) int32, where packed sequences start, and the last one's end
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None  # (batch,) int32, one past the last key used, from the sequence's first slot on
    leftpad_k: Tensor | None = None  # (batch,) int32, slots skipped at the front
    block_table: Tensor | None = None  # (batch, max_blocks) int32, the pages of each sequence
    # (batch or 1, nheads_k or 1) fp32: a cache of 8-bit floats times its descale and its factor is the keys or values
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    # (batch, nheads, seqlen_q, seqlen_k) of any strides: boolean, True where a row sees a key; or what is added to
    # scores, in q's dtype or fp32. Only of dense tensors; it has no gradient
    bias: Tensor | None = None
    rng_state: Tensor | None = None  # (2,) int64, the dropout mask to use; None draws a new one
    is_dense: bool = True  # every sequence is as long as the tensors: no lengths, no pages
    equal_lengths: bool = False  # every packed sequence is known to have as many queries as keys
    deterministic: bool = False  # gradients are to have the same bits in every run
    # As Options.use; APPEND where the backend's run first writes keys into the cache, which seqused_k counts already;
    # LSE_GRADIENT where a backward has a gradient of softmax_lse to count, which the forward cannot know
    use: int = 0
    k_factor: float = 1.0
    v_factor: float = 1.0

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def nheads(self) -> int:
        return self.q.shape[-2]

    @property
    def nheads_k(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(batch, nheads, seqlen_q), or (nheads, total_q) for packed rows."""
        if self.cu_seqlens_q is None:
            return self.q.shape[0], self.q.shape[2], self.q.shape[1]
        return self.q.shape[1], self.q.shape[0]

    @property
    def is_empty(self) -> bool:
        """Whether no row sees a key because there are no rows or no keys at all."""
        return not (self.q.numel() and self.k.numel() and self.v.numel())

    @property
    def lse_carries_alibi_position(self) -> bool:
        """flash-attn returns LSE + slope * position when the mask is, for its kernel, purely causal."""
        return self.alibi_slopes is not None and self.mask.is_causal

    def features(self) -> int:
        """The combination of Feature values this call asks for."""
        use, drops = self.use & ~BY_DISPATCH, self.dropout_p != 0
        # A reentrant checkpoint records its recomputation only, and some backends draw masks of their own: both passes
        # must go to one backend. No such backend computes gradients over pages.
        if not drops:
            use &= ~Feature.SHARED_DROPOUT_MASK
        elif not use & Feature.SHARED_DROPOUT_MASK and self.block_table is None:
            use |= Feature.BACKWARD
        asked = {
            Feature.SOFTCAP: self.softcap != 0,
            Feature.ALIBI: self.alibi_slopes is not None,
            Feature.DROPOUT: drops,
            Feature.GQA: self.nheads != self.nheads_k,
            Feature.VALUE_HEAD_DIM: self.q.shape[-1] != self.v.shape[-1],
            Feature.VARLEN: self.cu_seqlens_q is not None,
            Feature.SEQUSED_K: self.seqused_k is not None,
            Feature.LEFTPAD_K: self.leftpad_k is not None,
            Feature.PAGED: self.block_table is not None,
            Feature.DETERMINISTIC: self.deterministic and use & (Feature.BACKWARD | Feature.GIVEN_LSE) != 0,
            Feature.SCALE_NOT_POSITIVE: self.softmax_scale <= 0,
            Feature.BIAS: self.bias is not None,
            Feature.WIDE_SOFTCAP: self.softcap > 1024.0,
            Feature.EIGHT_BIT_CACHE: eight_bit.is_eight_bit(self.k),
        }
        return use | self.mask.features | sum(feature for feature, is_asked in asked.items() if is_asked)

    def traits(self) -> Traits:
        q = self.q
        q_shape, k_shape, device = q.shape, self.k.shape, q.device
        device_type = device.type
        if self.is_dense:
            sq, sk = q_shape[1], k_shape[1]
            sq_vs_sk = "=" if sq == sk else "<" if sq < sk else ">"
        elif self.cu_seqlens_q is None and q_shape[1] > self.max_seqlen_k:
            sq_vs_sk = ">"
        else:
            sq_vs_sk = "=" if self.equal_lengths else "?"
        capability = settings.capability(device) if device_type == "cuda" else None
        # A compiler's symbols cannot be hashed.
        dims, features, gpu = (int(q_shape[-1]), int(self.v.shape[-1])), self.features(), settings.gpu(device)
        return Traits(device_type, capability, q.dtype, *dims, sq_vs_sk, features, gpu)

    def over(self, x: Inputs | AttentionCall) -> AttentionCall:
        """Return the call over other tensors of the same shapes and strides."""
        starts_k = x.cu_seqlens_k if x.block_table is None else None  # of pages they say lengths only
        return AttentionCall(
            x.q, x.k, x.v, self.softmax_scale, self.mask, self.max_seqlen_q, self.max_seqlen_k, self.softcap,
            self.dropout_p, x.alibi_slopes, x.cu_seqlens_q, starts_k, x.seqused_k, x.leftpad_k, x.block_table,
            x.k_descale, x.v_descale, x.bias, x.rng_state, self.is_dense, self.equal_lengths, self.deterministic,
            self.use, self.k_factor, self.v_factor,
        )  # fmt: skip


class Result(NamedTuple):
    """The results of a backend's forward.

    out: call.out_shape, in q's dtype; softmax_lse: call.lse_shape fp32 (None only where neither gradients
    nor return_lse asked for it); rng_state: (2,) int64, meaningful under dropout; saved: whatever else the
    backend's own backward needs; dmask: S_dmask, which dispatch adds where the call asks for it.
    """

    out: Tensor
    softmax_lse: Tensor | None
    rng_state: Tensor | None = None
    saved: tuple[Any, ...] = ()
    dmask: Tensor | None = None

    @property
    def lse(self) -> Tensor:
        """softmax_lse where it was asked for."""
        return _given(self.softmax_lse)

    @property
    def probabilities(self) -> Tensor:
        """S_dmask, without elements where it was not asked for."""
        return self.out.new_empty(0) if self.dmask is None else self.dmask


class Gradients(NamedTuple):
    """dq, dk, dv in the shapes and dtypes of q, k, v; any strides."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class BackwardResult(NamedTuple):
    """The results of a backward.

    delta: rowsum(dout * out) less the gradient of the LSE and laid out as that, where the backend has it; fp32, 0 for
        rows whose LSE is infinite
    """

    gradients: Gradients
    delta: Tensor | None = None


class BackwardInputs(NamedTuple):
    """The inputs of a backward: dout and dlse, and the results of a forward.

    softmax_lse may be missing where ``saved`` holds what the backend kept instead.
    dlse: the gradient of softmax_lse as that is laid out, 0 where a row sees no key; None for none. Since an LSE's
    derivative by a score is the probability, it is subtracted from delta = rowsum(dout * out) and changes nothing else.
    """

    dout: Tensor
    out: Tensor
    softmax_lse: Tensor | None
    rng_state: Tensor | None
    saved: tuple[Any, ...] = ()
    dlse: Tensor | None = None

    @property
    def lse(self) -> Tensor:
        """softmax_lse, for a backward that needs it."""
        return _given(self.softmax_lse)


def _given(softmax_lse: Tensor | None) -> Tensor:
    if softmax_lse is None:
        raise RuntimeError("softmax_lse is missing, although it was asked for")
    return softmax_lse


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return softmax_lse's dtype for q's: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
