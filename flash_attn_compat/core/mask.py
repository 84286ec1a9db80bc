"""Which keys a query row sees: the band of keys that ``causal`` and ``window_size`` leave visible.

Only this file knows bottom-right alignment and what -1 means.

A row ``i`` of a sequence with ``seqlen_q`` queries and ``seqlen_k`` keys stands at key position
``i + offset`` with ``offset = seqlen_k - seqlen_q``; it sees the keys ``j`` with
``i + offset - left <= j <= i + offset + right``. Padding of a batch is not a mask: see varlen.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import Options

# No sequence may be longer. Kernels add window bounds to positions in int32, so no bound may be larger either.
MOST_TOKENS = 2**30
# Longer than any sequence that fits a GPU, and small enough for the kernels to add it to positions.
_MAX_WINDOW = 2**29
# Values of the kernels' macro LOCAL: how positions hide keys (cuda/scores/score.cuh). 0: not at all; 1: by a band.
KERNEL_RULES = (0, 1)


class Range(NamedTuple):
    """Half-open range of rows or keys."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)


class Mask(NamedTuple):
    """A band of visible keys around each row's own position; ``None`` means unbounded on that side.

    To add a rule beyond the band, add a field, and use it in ``of``, ``hidden`` and ``_ASKED``. Backends that call
    the other methods must decline the rule's feature until those methods use the field, too.
    """

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, options: Options, longest_q: int, longest_k: int) -> Mask:
        """Return the mask of checked options in its normal form, in which a bound that hides nothing is None.

        A negative bound means unbounded, and ``causal`` sets the right bound to 0.
        longest_q, longest_k: the most rows and keys that a sequence may have. A bound of longest_k or more becomes
        None, as in flash-attn. longest_k - 1 would hide nothing either, but stays a bound: flash-attn's LSE under ALiBi
        and its rotary positions differ. With more rows than keys, a right bound of longest_k may hide keys and stays.
        """
        left, right = options.window_size_left, options.window_size_right
        if left < 0 and right < 0:
            return _CAUSAL if options.causal else _FULL
        longest_k = min(longest_k, MOST_TOKENS)
        bound_left = None if left < 0 or left >= longest_k else left
        if options.causal:
            return cls(bound_left, 0)
        idle_right = right < 0 or right >= max(longest_k, min(longest_q, MOST_TOKENS) - 1)
        return cls(bound_left, None if idle_right else right)

    @property
    def features(self) -> int:
        """The bits of Feature that the mask asks for."""
        return sum(feature for feature, is_asked in _ASKED.items() if is_asked(self))

    @property
    def window(self) -> tuple[int, int]:
        """The bounds (left, right) as flash-attn's window_size has them, with -1 for unbounded."""
        return -1 if self.left is None else self.left, -1 if self.right is None else self.right

    @property
    def kernel_fields(self) -> dict[str, int]:
        """The mask as fields of struct Params (cuda/base/params.cuh)."""
        left, right = self.window
        return {"window_left": min(left, _MAX_WINDOW), "window_right": min(right, _MAX_WINDOW)}

    def kernel_rule(self, has_one_row: bool) -> int:
        """Return which of KERNEL_RULES hides keys as this mask does. has_one_row: no sequence has more than one row"""
        # A single row is at the last key: no key is to its right.
        return int(self.left is not None or (self.right is not None and not has_one_row))

    @classmethod
    def of_kernel_rule(cls, rule: int, is_narrow: bool) -> Mask:
        """Return a mask that needs the kernel rule ``rule``, for self-tests; it hides some of 45 or more keys."""
        return cls(30 if is_narrow else 100, 3) if rule else _FULL

    @property
    def width(self) -> int | None:
        """The most keys that one row sees; None if unbounded."""
        return None if self.left is None or self.right is None else self.left + self.right + 1

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        """Whether each row sees its own key and every earlier one, and no later key."""
        return self.left is None and self.right == 0

    def visible_keys(self, rows: Range, offset: int, seqlen_k: int) -> Range:
        """Return the range of keys that at least one of ``rows`` sees."""
        start = 0 if self.left is None else max(0, rows.start + offset - self.left)
        stop = seqlen_k if self.right is None else min(seqlen_k, rows.stop + offset + self.right)
        return Range(min(start, seqlen_k), max(stop, min(start, seqlen_k)))

    def rows_with_keys(self, seqlen_q: int, seqlen_k: int) -> Range:
        """Return the range of rows that see at least one key."""
        offset = seqlen_k - seqlen_q
        if seqlen_k == 0:
            return Range(0, 0)
        start = 0 if self.right is None else max(0, -offset - self.right)
        stop = seqlen_q if self.left is None else min(seqlen_q, seqlen_k - offset + self.left)
        return Range(min(start, seqlen_q), max(stop, min(start, seqlen_q)))

    def covers(self, rows: Range, keys: Range, offset: int) -> bool:
        """Whether every one of ``rows`` sees every one of ``keys``."""
        left_open = self.left is None or keys.start >= rows.stop - 1 + offset - self.left
        right_open = self.right is None or keys.stop - 1 <= rows.start + offset + self.right
        return left_open and right_open

    def partly_hidden(self, rows: Range, keys: Range, offset: int) -> list[Range]:
        """Return the parts of ``keys``, at most one at each end, that are hidden from at least one of ``rows``."""
        left_stop, right_start = keys.start, keys.stop
        if self.left is not None:
            left_stop = min(max(rows.stop - 1 + offset - self.left, keys.start), keys.stop)
        if self.right is not None:
            right_start = max(min(rows.start + offset + self.right + 1, keys.stop), keys.start)
        if right_start <= left_stop:
            return [keys] if keys.size else []
        stretches = (Range(keys.start, left_stop), Range(right_start, keys.stop))
        return [stretch for stretch in stretches if stretch.size]

    def hidden(self, rows: Range, keys: Range, offset: int, device: torch.device) -> Tensor | None:
        """Return a boolean tensor (rows, keys), True where the row does not see the key; None if all are visible."""
        tile = None
        # The key of the tile's column c lies c - r + ahead positions after row r's own position.
        ahead = keys.start - rows.start - offset
        if self.right is not None and keys.stop - 1 > rows.start + offset + self.right:
            tile = _ones(rows, keys, device).triu_(self.right - ahead + 1)
        if self.left is not None and keys.start < rows.stop - 1 + offset - self.left:
            earlier = _ones(rows, keys, device).tril_(-self.left - ahead - 1)
            tile = earlier if tile is None else tile.logical_or_(earlier)
        return tile


_FULL, _CAUSAL = Mask(), Mask(None, 0)
# For each feature, whether a mask needs it. A backend that hides keys by ``Mask.hidden`` supports all of them.
_ASKED: dict[Feature, Callable[[Mask], bool]] = {
    Feature.CAUSAL: lambda mask: mask.right == 0,
    Feature.WINDOW_LEFT: lambda mask: mask.left is not None,
    Feature.WINDOW_RIGHT: lambda mask: mask.right is not None and mask.right != 0,
}
MASK_FEATURES = sum(_ASKED)


def _ones(rows: Range, keys: Range, device: torch.device) -> Tensor:
    return torch.ones(rows.size, keys.size, dtype=torch.bool, device=device)


def align_with_last_key(q: Tensor, k: Tensor, v: Tensor, axis: int) -> tuple[Tensor, Tensor, bool, int]:
    """Express a causal mask aligned with the first key in flash-attn's terms, which align it with the last key.

    Returns k and v without the keys that no row sees, causal, and window_size_right. axis: the index of the axis of
    rows in q and of keys in k and v
    """
    rows, keys = q.shape[axis], k.shape[axis]
    if rows < keys:
        k, v = k.narrow(axis, 0, rows), v.narrow(axis, 0, rows)
    return (k, v, False, rows - keys) if rows > keys else (k, v, True, -1)
