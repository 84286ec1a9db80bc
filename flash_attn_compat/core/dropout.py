"""Dropout masks that any backend can recompute for any tile, from ``rng_state`` alone.

Each (sequence, head, row, key) gets a pseudo-random 32-bit word: full-strength hashes of its row and of
its key, added and finalised by two multiply-xorshift rounds. No generator is advanced per tile, so
forward, backward and ``S_dmask`` agree whatever their block sizes are, and nothing is read by the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SEEDS = 2**62
_WORD = 0xFFFFFFFF
_MULTIPLIER_A = 0x7FEB352D
_MULTIPLIER_B = -0x7B935975  # 0x846CA68B as a signed 32-bit number


def new_rng_state(device: torch.device) -> Tensor:
    """Return a new rng_state, (2,) int64, drawn from PyTorch's default generator of ``device``."""
    return torch.randint(0, _SEEDS, (2,), dtype=torch.int64, device=device)


def rng_state_beside(tensor: Tensor) -> Tensor:
    """Return a new rng_state, (2,) int64, on the device of ``tensor``. For torch.jit.trace.

    A trace then uses the device of its input, and not a fixed one. Not for compilers, which merge two calls of
    randint_like into one.
    """
    return torch.randint_like(tensor.new_empty(2, dtype=torch.int64), _SEEDS)


def keep_tile(
    rng_state: Tensor | None, dropout_p: float, sequences: Tensor, heads: Tensor, rows: Tensor, keys: Tensor
) -> Tensor:
    """Return which probabilities dropout keeps, bool (batch, heads, rows, keys).

    sequences: (batch,) indices of the sequences in the call; heads: (heads,) query heads
    rows, keys: (rows,) or (batch, rows) indices, counted from each sequence's first row and key
    Raises ValueError without an rng_state.
    """
    if rng_state is None:
        raise ValueError("dropout needs the call's rng_state, got None")
    seed = _seed(rng_state)
    per_head = _mix(_mix(seed + sequences)[:, None] + heads)
    row_words = _mix(per_head[:, :, None] + rows[..., None, :])
    key_words = _mix(_mix(seed ^ _MULTIPLIER_A) + keys[..., None, :])
    word = _as_int32(row_words)[..., None] + _as_int32(key_words)[..., None, :]
    word ^= word >> 16
    word *= _MULTIPLIER_A
    word ^= word >> 15
    word *= _MULTIPLIER_B
    return word <= word_limit(dropout_p)


def word_limit(dropout_p: float) -> int:
    """Return the largest pseudo-random word (signed, 32 bits) whose probability is kept; larger words are dropped.

    flash-attn compares one random byte with floor(255 * (1 - p)), so p is honoured to 1/256. Here the top byte of the
    word is that random byte.
    """
    byte = int((1.0 - dropout_p) * 255.0)
    return ((byte + 1 - 128) << 24) - 1


def _seed(rng_state: Tensor) -> Tensor:
    seed, offset = rng_state.unbind()
    word = _mix(seed & _WORD)
    for part in (seed >> 32, offset, offset >> 32):
        word = _mix(word + (part & _WORD))
    return word


def _mix(word: Tensor) -> Tensor:
    """Mix the bits of 32-bit words, held in int64; different words stay different."""
    word = word & _WORD
    word = ((word ^ (word >> 16)) * _MULTIPLIER_A) & _WORD
    word = ((word ^ (word >> 15)) * (_MULTIPLIER_B & _WORD)) & _WORD
    return word ^ (word >> 16)


def _as_int32(word: Tensor) -> Tensor:
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)
