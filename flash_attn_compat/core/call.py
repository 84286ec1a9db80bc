"""One attention call as one immutable value, however it was spelled by the caller.

Arguments are checked before the value is made (checks.py); afterwards nothing is checked again. What a
row sees is in mask.py, how sequences lie in the tensors in varlen.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import eight_bit
from flash_attn_compat.core.features import Feature, Traits
from flash_attn_compat.core.mask import Mask

# Flags: how the caller uses a call's results. Every key holds them; most become fields of AttentionCall.
NEEDS_GRAD, RETURN_LSE, RETURN_DMASK, SHARES_DROPOUT_MASK, GIVEN_LSE, TRANSFORMED, SLOPES_GRADIENT = (
    1 << bit for bit in range(7)
)
RETURN_PROBS = 1 << 7  # softmax_lse, and under dropout S_dmask
EQUAL_LENGTHS = 1 << 8  # AttentionCall.equal_lengths


class Scalars(NamedTuple):
    """The numbers of a call, in the order in which keys, operators and functions take them.

    max_seqlen_q, max_seqlen_k: 0 for dense calls; a tensor of one integer is read, which waits for its GPU
    k_factor, v_factor: a descale of an 8-bit cache that is a number; 1 if it is a tensor
    """

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float | None = 0.0
    deterministic: bool = False
    max_seqlen_q: int | Tensor = 0
    max_seqlen_k: int | Tensor = 0
    k_factor: float = 1.0
    v_factor: float = 1.0


class _Absent:
    """None for every tensor that a family of calls never has: all can be asked for by name."""

    __slots__ = ()
    alibi_slopes: Any = None
    bias: Any = None
    rng_state: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_k: Any = None
    leftpad_k: Any = None
    block_table: Any = None
    k_descale: Any = None
    v_descale: Any = None
    k_new: Any = None
    v_new: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None


class _Dense(NamedTuple):
    q: Any
    k: Any
    v: Any
    alibi_slopes: Any = None
    bias: Any = None
    rng_state: Any = None


class _Packed(NamedTuple):
    q: Any
    k: Any
    v: Any
    alibi_slopes: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_k: Any = None
    leftpad_k: Any = None
    block_table: Any = None
    k_descale: Any = None
    v_descale: Any = None
    rng_state: Any = None


class _Cache(NamedTuple):
    q: Any
    k: Any
    v: Any
    alibi_slopes: Any = None
    seqused_k: Any = None
    leftpad_k: Any = None
    block_table: Any = None
    k_descale: Any = None
    v_descale: Any = None
    k_new: Any = None
    v_new: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None


class DenseInputs(_Dense, _Absent):
    """A dense call's tensors by name. A call's family is the type of its inputs: keys and graphs hold its fields alone.

    rng_state is the last field here and of packed inputs: the forward's in a backward.
    """

    __slots__ = ()


class PackedInputs(_Packed, _Absent):
    """The tensors of a packed call, or of one over pages."""

    __slots__ = ()


class CacheInputs(_Cache, _Absent):
    """The tensors of a call over a cache. k_new to rotary_sin: what it appends behind seqused_k (core/append.py)."""

    __slots__ = ()


Inputs = DenseInputs | PackedInputs | CacheInputs
# As DenseInputs(...) and the others, of all fields, in half the time.
new_inputs: Any = tuple.__new__


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
    return_lse: bool = False  # the caller gets softmax_lse
    return_dmask: bool = False  # the caller gets S_dmask
    needs_grad: bool = False  # autograd records the call: a backward follows
    given_lse: bool = False  # a backward alone, from an out and softmax_lse of somebody else's forward
    shares_dropout_mask: bool = False  # others must be able to draw the dropout mask again, from rng_state
    transformed: bool = False  # torch.func or forward-mode AD differentiates the backend's own operators
    appends: bool = False  # the backend's run writes keys into the cache first, which seqused_k counts already
    lse_gradient: bool = False  # the backward has a gradient of softmax_lse to count; the forward cannot know
    slopes_gradient: bool = False  # autograd wants the gradient of alibi_slopes, which no kernel computes
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
        left, right = self.mask
        # A reentrant checkpoint records its recomputation only, and some backends draw masks of their own: both passes
        # must go to one backend. No such backend computes gradients over pages.
        is_drawn_again = self.dropout_p != 0 and not self.shares_dropout_mask and self.block_table is None
        is_recorded = self.needs_grad or is_drawn_again
        asked = {
            "CAUSAL": right == 0,
            "WINDOW_LEFT": left is not None,
            "WINDOW_RIGHT": right is not None and right != 0,
            "SOFTCAP": self.softcap != 0,
            "ALIBI": self.alibi_slopes is not None,
            "DROPOUT": self.dropout_p != 0,
            "SHARED_DROPOUT_MASK": self.dropout_p != 0 and self.shares_dropout_mask,
            "GQA": self.nheads != self.nheads_k,
            "VALUE_HEAD_DIM": self.q.shape[-1] != self.v.shape[-1],
            "VARLEN": self.cu_seqlens_q is not None,
            "SEQUSED_K": self.seqused_k is not None,
            "LEFTPAD_K": self.leftpad_k is not None,
            "PAGED": self.block_table is not None,
            "APPEND": self.appends,
            "LSE": self.return_lse,
            "BACKWARD": is_recorded,
            "GIVEN_LSE": self.given_lse,
            "LSE_GRADIENT": self.lse_gradient,
            "TRANSFORMS": self.transformed,
            "DETERMINISTIC": self.deterministic and (is_recorded or self.given_lse),
            "SCALE_NOT_POSITIVE": self.softmax_scale <= 0,
            "BIAS": self.bias is not None,
            "WIDE_SOFTCAP": self.softcap > 1024.0,
            "EIGHT_BIT_CACHE": eight_bit.is_eight_bit(self.k),
        }
        return sum([_BITS[name] for name, is_asked in asked.items() if is_asked])

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
        return AttentionCall._make((
            x.q, x.k, x.v, *self[3:9], x.alibi_slopes, x.cu_seqlens_q, starts_k, x.seqused_k, x.leftpad_k,
            x.block_table, x.k_descale, x.v_descale, x.bias, x.rng_state, *self[19:],
        ))  # fmt: skip


NO_INPUTS = DenseInputs(None, None, None)


# Plain ints: combining members of an enum costs a microsecond each.
_BITS = {feature.name: int(feature) for feature in Feature}


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
