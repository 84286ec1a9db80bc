"""A call's arguments before any check: Options for the numbers, and one type of inputs for each family of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor


class Options(NamedTuple):
    """The numbers of a call, and how the caller uses its results. A cache key holds them all.

    max_seqlen_q, max_seqlen_k: 0 for dense calls; a tensor of one integer is read, which waits for its GPU
    use: bits of core/features.py: of Feature, BACKWARD if autograd records the call, LSE, GIVEN_LSE, TRANSFORMS and
        SHARED_DROPOUT_MASK; DMASK and SLOPES_GRADIENT. Without dropout DMASK and SHARED_DROPOUT_MASK have no effect
    k_factor, v_factor: the descales of an 8-bit cache if they are numbers; 1 if they are tensors

    The others are only for calls over a cache:
    has_rows: block_table holds cache_batch_idx, (batch,), the row of the cache for each sequence
    has_length: cache_seqlens is an int, which no cache key holds
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
    """The tensors of a dense call by name. rng_state: the dropout mask to use; a backward gets the forward's"""

    q: Any
    k: Any
    v: Any
    alibi_slopes: Any = None
    bias: Any = None
    rng_state: Any = None


class _Packed(NamedTuple):
    """The tensors by name of a call with packed q, whose keys are packed too or lie in pages."""

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
    """The tensors of a call over a cache. k_new to rotary_sin: the keys and values to append (core/append.py)"""

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
    """Names of tensors that some families of calls never have: their inputs then have None by that name."""

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

else:  # no subclasses: Dynamo of PyTorch 2.4 does not treat a subclass of a NamedTuple as a NamedTuple

    def _with_absent(family: type, name: str) -> type:
        for absent in _Absent.__annotations__.keys() - set(family._fields):
            setattr(family, absent, None)
        family.__name__ = family.__qualname__ = name
        return family

    # A call's family is the type of its inputs. Cache keys and graphs hold only the fields of that type.
    DenseInputs = _with_absent(_Dense, "DenseInputs")
    PackedInputs = _with_absent(_Packed, "PackedInputs")
    CacheInputs = _with_absent(_Cache, "CacheInputs")


Inputs = DenseInputs | PackedInputs | CacheInputs
# new_tuple(Options, fields) makes Options(*fields) in half the time; likewise the inputs. All fields must be given.
# Dynamo of PyTorch 2.4 cannot trace it.
new_tuple: Any = tuple.__new__

NO_INPUTS = DenseInputs(None, None, None)
