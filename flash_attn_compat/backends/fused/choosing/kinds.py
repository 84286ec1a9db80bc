"""``Kind``: the properties of a call by which its kernels are chosen; and the choice of a tile for calls of a kind."""

from __future__ import annotations

from typing import Any, NamedTuple

from flash_attn_compat.backends.fused.choosing import tiles
from flash_attn_compat.backends.fused.choosing.tiles import Tile

FP16, BF16, BF16_AS_FP16 = 0, 1, 2
BOOLEANS, HALF_BIAS, FLOAT_BIAS = 1, 2, 4
E4M3, E5M2 = 4, 5
# A word of a dense mask's map stands for BAND rows and REACH keys. A block of the mask kernel reads PART_KEYS keys.
BAND, REACH, PART_KEYS = 64, 1024, 512
BIAS_WORDS = 2, 8, PART_KEYS // 32
# Keys of the widest tile of any kernel. The keys of every other tile divide it.
WIDEST_TILE = 128
# Head dims that kernels are compiled for, each when a call first needs it. A call takes the next size up. Up to 128
# every multiple of 16; then those of models.
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# A window of at most so many keys hides most of a tile of 128 rows or more.
NARROW = 255
# A sequence of at most so many rows leaves half of a tile of 128 rows empty.
FEW_ROWS = 64
# Sequences of at least so many rows and keys use tiles with three stages: their delay of half a turn at the start and
# the end of each block then costs less than it saves.
LONG = 2048
# Likewise under a causal mask, where a row sees half of the keys.
LONG_CAUSAL = 8192
# A sequence of at most so many rows and keys leaves half of a tile of 64 rows empty.
SHORT = 32
# ONE_TILE: sizes of a tile that holds all keys of a sequence, and the head dims for which the backward has such a tile.
_NARROW_HEADS, _WIDE_HEADS = (16, 32, 48, 64), (112, 128)
ONE_TILE = {
    32: _NARROW_HEADS,
    64: (*_NARROW_HEADS, 80, 96, *_WIDE_HEADS),
    96: (*_NARROW_HEADS, *_WIDE_HEADS),
    128: (*_NARROW_HEADS, *_WIDE_HEADS),
}


def half_of(type: int) -> int:
    """Return the TYPE of kernels over an 8-bit cache, whose numbers become fp16 on every GPU. type: of the queries"""
    return FP16 if type == FP16 else BF16_AS_FP16


def size_of(head_dim: int) -> int:
    return next(size for size in HEAD_DIMS if head_dim <= size)


class Sizes(NamedTuple):
    """Numbers that kernels are compiled for.

    head_dim: of queries and keys; head_dim_v: of values, None if it is head_dim
    window: how many keys a row sees, None if unbounded
    vec: how many elements are loaded at once: 8 if every row starts on 16 bytes, else 1
    bias_words: how many words of 32 keys a block of the mask kernel reads, one of BIAS_WORDS
    """

    head_dim: int
    head_dim_v: int | None = None
    window: int | None = None
    vec: int = 8
    bias_words: int = PART_KEYS // 32


class KernelFeatures(NamedTuple):
    """Features of a call beyond dense attention. Each is a macro of the kernels by its name; the macro is 0 without it.

    local: how positions hide keys, one of KERNEL_RULES of core/mask.py; 0 if they hide none
    copied: whether the rows that a kernel streams are fp16 copies of bf16
    bias, bias_pairs: for a dense mask, as in cuda/scores/mask.cuh; 0 without one
    cache: E4M3 or E5M2 for 8-bit keys and values, and bf16 queries then have the type BF16_AS_FP16; 0 in q's dtype
    """

    local: int = 0
    alibi: bool = False
    softcap: bool = False
    dropout: bool = False
    paged: bool = False
    copied: bool = False
    bias: int = 0
    bias_pairs: bool = False
    cache: int = 0


class Hints(NamedTuple):
    """Properties of a call that choose the fastest of several kernels, all of which would be correct.

    few_rows: tall tiles would be half empty, or leave multiprocessors idle (grids.takes_small_tiles)
    short: SHORT or FEW_ROWS if no sequence has more rows or keys, else 0
    few_keys: a size of ONE_TILE if no sequence has more keys, so that one kernel computes all gradients; else 0
    long: sequences have at least ``Kind.least_long`` rows and keys, and ``Kind.may_be_long`` holds
    flex: whether the kernel gets a score_mod, mask_mod or BlockMask of FlexAttention
    tiles: the fastest tiles on this GPU by kernel, as ``tune`` found them
    """

    few_rows: bool = False
    short: int = 0
    few_keys: int = 0
    long: bool = False
    flex: bool = False
    tiles: tuple[tuple[str, Tile], ...] = ()


class Kind(NamedTuple):
    """The properties of a call that choose its kernels.

    number: of the architecture, such as 75; type: FP16, BF16, or BF16_AS_FP16 if bf16 is converted to fp16
    """

    number: int
    type: int
    sizes: Sizes
    features: KernelFeatures = KernelFeatures()
    hints: Hints = Hints()

    def replace(self, **changes: Any) -> Kind:
        """Return a changed copy. changes: fields of Kind or of its three groups; TypeError for any other name."""
        own: dict[str, Any] = {}
        for name in ("sizes", "features", "hints"):
            group = changes.pop(name, getattr(self, name))
            own[name] = group._replace(**{field: changes.pop(field) for field in group._fields if field in changes})
        if changes.keys() - self._fields:
            raise TypeError(f"a kind has no {', '.join(changes.keys() - self._fields)}")
        return self._replace(**own, **changes)

    @property
    def D(self) -> int:
        return size_of(self.sizes.head_dim)

    @property
    def DV(self) -> int:
        return size_of(self.sizes.head_dim if self.sizes.head_dim_v is None else self.sizes.head_dim_v)

    @property
    def size(self) -> int:
        """The larger of the two head dims. It chooses the tiles."""
        return max(self.D, self.DV)

    @property
    def is_narrow(self) -> bool:
        """Whether a window is so narrow that it hides most of a tile of 128 rows."""
        return self.sizes.window is not None and self.sizes.window <= NARROW

    @property
    def may_be_long(self) -> bool:
        """Whether tiles for long sequences suit the call: Turing, aligned fp16 or fp16 copies, and no other feature.

        In fp16 a causal mask may hide scores, but no window.
        """
        dense = self.features == KernelFeatures(copied=self.type == BF16_AS_FP16)
        is_causal = self.type == FP16 and self.features == KernelFeatures(local=1) and self.sizes.window is None
        is_small = self.hints.few_rows or self.hints.few_keys > 0
        is_aligned = self.sizes.vec == 8 and self.D == self.DV
        return self.number < 80 and (dense or is_causal) and is_aligned and not is_small

    @property
    def least_long(self) -> int:
        """The fewest rows and keys of sequences that count as long."""
        return LONG_CAUSAL if self.features.local else LONG

    def macros(self, *names: str, D: int = 0) -> list[tuple[str, int]]:
        """Return macros with values: head dims, TYPE, VEC, and the features among ``names`` that the call has.

        names: macros of the features that the kernel supports, such as LOCAL; D: the head dim of a kernel without DV
        """
        found = [("D", D or self.D), *([] if D or self.DV == self.D else [("DV", self.DV)])]
        found += [("TYPE", self.type), ("VEC", self.sizes.vec)]
        return found + [(name, int(value)) for name in names if (value := getattr(self.features, name.lower()))]

    def newer(self, cp_async: bool = True) -> list[tuple[str, int]]:
        """Return the macros for the instructions that sm_80 adds to Turing's."""
        if self.number < 80:
            return []
        # cp.async copies 16 bytes unchanged: it can neither convert numbers nor load single elements.
        asynchronous = cp_async and self.type != BF16_AS_FP16 and self.sizes.vec == 8 and not self.features.cache
        return [("MMA_K16", 1), *([("CP_ASYNC", 1)] if asynchronous else [])]


def has_plain_scores(kind: Kind) -> bool:
    """Return whether a forward does so little with scores that two groups of warps have enough registers."""
    found = kind.features
    changes = found.alibi or found.softcap or found.dropout or found.bias or kind.hints.flex
    converts = kind.type == BF16_AS_FP16 and not found.copied
    return kind.sizes.vec == 8 and kind.D == kind.DV and not (changes or converts or found.paged or found.cache)


def conditions(kind: Kind) -> list[str]:
    """Return the conditions of tiles.py that a kind meets, the most specific first."""
    # Only these kernels for few rows have the registers to load V together with K.
    loads_v = kind.hints.few_rows and kind.type == FP16 and kind.sizes.vec == 8 and not kind.features.bias
    named = {
        tiles.few_keys(kind.hints.few_keys): kind.hints.few_keys > 0,
        tiles.SHORT_SEQUENCES: kind.hints.short == SHORT,
        tiles.NARROW_WINDOW: kind.is_narrow,
        tiles.SOFTCAP: kind.features.softcap,
        tiles.DROPOUT: kind.features.dropout,
        tiles.FEW_ROWS_AND_KEYS: loads_v and kind.hints.short > 0,
        tiles.FEW_LOCAL_ROWS: loads_v and kind.features.local,
        tiles.FEW_FREE_ROWS: loads_v,
        tiles.FEW_ROWS: kind.hints.few_rows,
        tiles.UNLIKE: kind.D != kind.DV,
        tiles.BIASES: kind.features.bias > BOOLEANS,
        tiles.DENSE_MASK: kind.features.bias > 0,
        tiles.UNALIGNED: kind.sizes.vec != 8,
        tiles.PLAIN: has_plain_scores(kind) and not kind.features.local,
        tiles.PLAIN_LOCAL_COPIES: has_plain_scores(kind) and kind.features.local and kind.features.copied,
        tiles.PLAIN_LOCAL: has_plain_scores(kind) and kind.features.local,
        tiles.CONVERTED: kind.type == BF16_AS_FP16 and not kind.features.copied,
        tiles.LOCAL: kind.features.local,
        tiles.LONG_CAUSAL: kind.hints.long and kind.features.local > 0,
        tiles.LONG_FP16: kind.hints.long and not kind.features.local and kind.type == FP16,
        tiles.LONG: kind.hints.long and not kind.features.local,
        tiles.LESS_SHARED: kind.number not in (80, 90),
        tiles.USUAL: True,
    }
    return [name for name, has in named.items() if has]


def choose_tile(entry: str, kind: Kind) -> Tile:
    """Return the tile that ``tune`` found for this kernel, if ``tune`` times such calls; else the table's."""
    is_small = kind.is_narrow or kind.hints.few_rows or kind.hints.few_keys
    is_timed = not (is_small or kind.features.softcap or kind.features.dropout or kind.D != kind.DV)
    found = dict(kind.hints.tiles).get(entry) if is_timed else None
    if found is not None and kind.features.bias and (WIDEST_TILE % found.rows or WIDEST_TILE % found.streamed_rows):
        found = None  # such tiles do not fit the map of a dense mask
    if found is not None and found.groups > 1 and not has_plain_scores(kind):
        found = None
    return found or tiles.find_tile(kind.number, entry, kind.size, conditions(kind))
