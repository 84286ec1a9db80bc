"""What a caller gives: tensors by name, whose type is the call's family, and numbers. Nothing here is checked yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor


class Options(NamedTuple):
    """The numbers of a call, and how the caller uses its results. A cache key holds them all.

    max_seqlen_q, max_seqlen_k: 0 for dense calls; a tensor of one integer is read, which waits for its GPU
    use: BACKWARD where autograd records the call, LSE, GIVEN_LSE, TRANSFORMS and SHARED_DROPOUT_MASK of Feature; DMASK
        and SLOPES_GRADIENT (core/features.py). Without dropout DMASK and SHARED_DROPOUT_MASK ask for nothing
    k_factor, v_factor: a descale of an 8-bit cache that is a number; 1 if it is a tensor

    The others are of calls over a cache:
    has_rows: block_table holds (batch,) cache_batch_idx
    has_length: cache_seqlens is an int, which is in no key
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

NO_INPUTS = DenseInputs(None, None, None)
