"""One attention call as one immutable value, however it was spelled by the caller.

Arguments are checked before the value is made (checks.py); afterwards nothing is checked again. What a
row sees is in mask.py, how sequences lie in the tensors in varlen.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import eight_bit
from flash_attn_compat.core.features import BY_DISPATCH, Feature, Traits
from flash_attn_compat.core.mask import Mask


class Options(NamedTuple):
    """The numbers of a call, and how the caller uses its results. A cache key holds them all.

    max_seqlen_q, max_seqlen_k: 0 for dense calls; a tensor of one integer is read, which waits for its GPU
    use: BACKWARD where autograd records the call, LSE, GIVEN_LSE, TRANSFORMS and SHARED_DROPOUT_MASK of Feature; DMASK
        and SLOPES_GRADIENT (core/features.py). Without dropout DMASK and SHARED_DROPOUT_MASK ask for nothing
    k_factor, v_factor: a descale of an 8-bit cache that is a number; 1 if it is a tensor

    The others are of calls over a cache:
    has_rows: block_table holds (batch,) cache_batch_idx
    has_length: cache_seqlens is an int, which is in no key; side: the sign of keys - rows then, on which the backend
        depends; None without keys
    """

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float | None = 0.0
    deterministic: bool = False
    use: int = 0
    max_seqlen_q: int | Tensor = 0
    max_seqlen_k: int | Tensor = 0
    k_factor: float = 1.0
    v_factor: float = 1.0
    rotary_interleaved: bool = False
    num_splits: int = 0
    has_rows: bool = False
    has_length: bool = False
    side: int | None = None


class _Dense(NamedTuple):
    """The tensors of a dense call by name. rng_state: the dropout mask to use, in a backward that of the forward"""

    q: Any
    k: Any
    v: Any
    alibi_slopes: Any = None
    bias: Any = None
    rng_state: Any = None


class _Packed(NamedTuple):
    """The tensors of a packed call, or of one over pages."""

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
    """The tensors of a call over a cache. k_new to rotary_sin: what it appends behind seqused_k (core/append.py)"""

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


class _Absent:
    """None for every tensor that a family of calls never has: all can be asked for by name."""

    alibi_slopes: Any
    bias: Any
    rng_state: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    leftpad_k: Any
    block_table: Any
    k_descale: Any
    v_descale: Any
    k_new: Any
    v_new: Any
    rotary_cos: Any
    rotary_sin: Any


if TYPE_CHECKING:

    class DenseInputs(_Dense, _Absent): ...

    class PackedInputs(_Packed, _Absent): ...

    class CacheInputs(_Cache, _Absent): ...

else:  # Dynamo of PyTorch 2.4 takes no subclass of a named tuple for one

    def _with_absent(family: type, name: str) -> type:
        for absent in _Absent.__annotations__.keys() - set(family._fields):
            setattr(family, absent, None)
        family.__name__ = family.__qualname__ = name
        return family

    # A call's family is the type of its inputs: keys and graphs hold the fields of that family alone.
    DenseInputs = _with_absent(_Dense, "DenseInputs")
    PackedInputs = _with_absent(_Packed, "PackedInputs")
    CacheInputs = _with_absent(_Cache, "CacheInputs")


Inputs = DenseInputs | PackedInputs | CacheInputs
# As DenseInputs(...), the others and Options(...), of all fields, in half the time. Dynamo of PyTorch 2.4 knows it not.
new_tuple: Any = tuple.__new__


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
        left, right = self.mask
        use, drops = self.use & ~BY_DISPATCH, self.dropout_p != 0
        # A reentrant checkpoint records its recomputation only, and some backends draw masks of their own: both passes
        # must go to one backend. No such backend computes gradients over pages.
        if not drops:
            use &= ~Feature.SHARED_DROPOUT_MASK
        elif not use & Feature.SHARED_DROPOUT_MASK and self.block_table is None:
            use |= Feature.BACKWARD
        asked = {
            "CAUSAL": right == 0,
            "WINDOW_LEFT": left is not None,
            "WINDOW_RIGHT": right is not None and right != 0,
            "SOFTCAP": self.softcap != 0,
            "ALIBI": self.alibi_slopes is not None,
            "DROPOUT": drops,
            "GQA": self.nheads != self.nheads_k,
            "VALUE_HEAD_DIM": self.q.shape[-1] != self.v.shape[-1],
            "VARLEN": self.cu_seqlens_q is not None,
            "SEQUSED_K": self.seqused_k is not None,
            "LEFTPAD_K": self.leftpad_k is not None,
            "PAGED": self.block_table is not None,
            "DETERMINISTIC": self.deterministic and use & (Feature.BACKWARD | Feature.GIVEN_LSE) != 0,
            "SCALE_NOT_POSITIVE": self.softmax_scale <= 0,
            "BIAS": self.bias is not None,
            "WIDE_SOFTCAP": self.softcap > 1024.0,
            "EIGHT_BIT_CACHE": eight_bit.is_eight_bit(self.k),
        }
        return use | sum([Feature[name] for name, is_asked in asked.items() if is_asked])

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


NO_INPUTS = DenseInputs(None, None, None)


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
