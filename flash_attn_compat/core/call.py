"""AttentionCall: one attention call as one immutable value, the same whichever public function was called.

Arguments are checked before the value is made (checks.py), and not again afterwards. mask.py says which keys a
row sees, varlen.py how sequences lie in the tensors.
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
    """All arguments of one attention call, of ``q`` over ``k`` and ``v``, after their checks."""

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
    # (batch or 1, nheads_k or 1) fp32. A key is the cache's 8-bit floats times k_descale times k_factor; so is a value
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    # (batch, nheads, seqlen_q, seqlen_k) of any strides: boolean, True where a row sees a key; or numbers to add to
    # the scores, in q's dtype or fp32. For dense calls only; it gets no gradient
    bias: Tensor | None = None
    rng_state: Tensor | None = None  # (2,) int64, the dropout mask to use; None draws a new one
    is_dense: bool = True  # every sequence is as long as the tensors: no lengths, no pages
    equal_lengths: bool = False  # every packed sequence is known to have as many queries as keys
    deterministic: bool = False  # gradients are to have the same bits in every run
    # Bits of Feature as in Options.use, and two more. APPEND: the backend first writes new keys into the cache;
    # seqused_k counts them already. LSE_GRADIENT: a backward gets a gradient of softmax_lse
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
        """Whether flash-attn's LSE has slope * position added: under ALiBi, if the mask is purely causal."""
        return self.alibi_slopes is not None and self.mask.is_causal

    def features(self) -> int:
        """Return the bits of Feature that a backend must support to compute this call."""
        use, drops = self.use & ~BY_DISPATCH, self.dropout_p != 0
        # With dropout, the backend must support gradients even if autograd does not record. A reentrant checkpoint
        # records only its recomputation; both passes must get one backend, since some draw dropout masks of their own.
        # None of those supports gradients over pages.
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
        # int(): under a compiler these sizes may be symbols, which cannot be hashed.
        dims, features, gpu = (int(q_shape[-1]), int(self.v.shape[-1])), self.features(), settings.gpu(device)
        return Traits(device_type, capability, q.dtype, *dims, sq_vs_sk, features, gpu)

    def over(self, x: Inputs | AttentionCall) -> AttentionCall:
        """Return this call with the tensors of ``x``, which have the same shapes and strides."""
        starts_k = x.cu_seqlens_k if x.block_table is None else None  # over pages it gives only lengths, not places
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
        """softmax_lse; RuntimeError if the forward did not return it."""
        return _given(self.softmax_lse)

    @property
    def probabilities(self) -> Tensor:
        """S_dmask; an empty tensor if the call did not ask for it."""
        return self.out.new_empty(0) if self.dmask is None else self.dmask


class Gradients(NamedTuple):
    """dq, dk, dv in the shapes and dtypes of q, k, v; any strides."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class BackwardResult(NamedTuple):
    """The results of a backward.

    delta: rowsum(dout * out) minus the gradient of the LSE, in the LSE's shape, fp32; 0 for rows whose LSE is
        infinite. None if the backend does not compute it
    """

    gradients: Gradients
    delta: Tensor | None = None


class BackwardInputs(NamedTuple):
    """The inputs of a backward: dout and dlse, and the results of a forward.

    softmax_lse may be None if the backend kept tensors of its own in ``saved`` instead.
    dlse: the gradient of softmax_lse, in its shape, 0 where a row sees no key; None if there is none. The derivative
    of an LSE by a score is the probability. So dlse is subtracted from delta = rowsum(dout * out), and nothing else
    changes.
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
    """Return the dtype of softmax_lse for q of ``dtype``: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
