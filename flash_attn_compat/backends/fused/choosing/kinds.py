"""What is known of a call when its kernels are chosen, a ``Kind``, and the tile that calls of a kind take."""

from __future__ import annotations

from typing import Any, NamedTuple

from flash_attn_compat.backends.fused.choosing import tiles
from flash_attn_compat.backends.fused.choosing.tiles import Tile

FP16, BF16, BF16_AS_FP16 = 0, 1, 2
BOOLEANS, HALF_BIAS, FLOAT_BIAS = 1, 2, 4
E4M3, E5M2 = 4, 5
# Rows and keys of a word of a dense mask's map (cuda/scores/mask.cuh).
BAND, REACH, PART_KEYS = 64, 1024, 512
BIAS_WORDS = 2, 8, PART_KEYS // 32
# Keys of the widest tile of any kernel, of which the others are parts.
WIDEST_TILE = 128
# Every multiple of 16 up to 128; then the head dims of models. A size is compiled when a call asks for it.
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# A window of at most so many keys hides most of a tile of 128 rows or more.
NARROW = 255
# Sequences of at most so many rows leave half of such a tile empty.
FEW_ROWS = 64
# Rows and keys from which half a turn of lag, at the start and the end of each block, costs less than it saves.
LONG = 2048
# Rows and keys that leave half of a small tile empty.
SHORT = 32
# The most keys of sequences for which one tile holds all keys, and the sizes of heads that have room for it.
_NARROW_HEADS, _WIDE_HEADS = (16, 32, 48, 64), (112, 128)
ONE_TILE = {
    32: _NARROW_HEADS,
    64: (*_NARROW_HEADS, 80, 96, *_WIDE_HEADS),
    96: (*_NARROW_HEADS, *_WIDE_HEADS),
    128: (*_NARROW_HEADS, *_WIDE_HEADS),
}


def half_of(type: int) -> int:
    """Return the type of the operands of an 8-bit cache, which become fp16 on every GPU."""
    return FP16 if type == FP16 else BF16_AS_FP16


def size_of(head_dim: int) -> int:
    return next(size for size in HEAD_DIMS if head_dim <= size)


class Sizes(NamedTuple):
    """Numbers that kernels are compiled for.

    head_dim: of queries and keys; head_dim_v: of values, None if it is head_dim
    window: keys in sight of a row, None unbounded
    vec: elements of a load: 8 where every row starts on 16 bytes, else 1
    bias_words: words of 32 keys that a block of the pass over a dense mask reads, one of BIAS_WORDS
    """

    head_dim: int
    head_dim_v: int | None = None
    window: int | None = None
    vec: int = 8
    bias_words: int = PART_KEYS // 32


class Features(NamedTuple):
    """What a call asks for beyond dense attention. Each is a macro of its name; without it the macro is 0.

    local: how positions hide keys, one of KERNEL_RULES of core/mask.py; 0 if they hide none
    copied: whether streamed rows are fp16 copies of bf16
    bias, bias_pairs: of a dense mask, as in cuda/scores/mask.cuh; 0 without one
    cache: E4M3 or E5M2, of 8-bit keys and values; 0 if they are in q's dtype. bf16 queries then are BF16_AS_FP16
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
    """What chooses the fastest of several kernels that would be right.

    few_rows: tall tiles would leave half of a tile empty, or multiprocessors idle (grids.takes_small_tiles)
    short: SHORT or FEW_ROWS if no sequence has more rows or keys, else 0
    few_keys: one of ONE_TILE if no sequence has more keys: one kernel then finds all gradients. Else 0
    long: sequences have at least LONG rows and keys; only of calls that may be (``Kind.may_be_long``)
    flex: whether the kernel is to have a caller's functions or a BlockMask
    tiles: the fastest tiles on this GPU by entry, from ``tune``
    """

    few_rows: bool = False
    short: int = 0
    few_keys: int = 0
    long: bool = False
    flex: bool = False
    tiles: tuple[tuple[str, Tile], ...] = ()


class Kind(NamedTuple):
    """The properties of a call that choose its kernels.

    number: the architecture's, as 75; type: FP16, BF16 or BF16_AS_FP16
    """

    number: int
    type: int
    sizes: Sizes
    features: Features = Features()
    hints: Hints = Hints()

    def replace(self, **changes: Any) -> Kind:
        """Return the kind with other values of fields, its own or of a group's. Raises TypeError for an unknown one."""
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
        """The larger head dim, which chooses the tiles."""
        return max(self.D, self.DV)

    @property
    def is_narrow(self) -> bool:
        """Whether a window leaves most of a tall tile masked."""
        return self.sizes.window is not None and self.sizes.window <= NARROW

    @property
    def may_be_long(self) -> bool:
        """Whether long calls have tiles of their own: dense attention in fp16 or over copies, of rows on 16 bytes."""
        dense = Features(copied=self.type == BF16_AS_FP16)
        is_small = self.hints.few_rows or self.hints.few_keys > 0
        return (
            self.number < 80 and self.features == dense and self.sizes.vec == 8 and self.D == self.DV and not is_small
        )

    def macros(self, *names: str, D: int = 0) -> list[tuple[str, int]]:
        """Return macros with their values: head dims, TYPE, VEC, and those of ``names`` that the call asks for.

        names: features of the kernel, LOCAL for ``local`` and so on; D: the only size of a kernel without DV
        """
        found = [("D", D or self.D), *([] if D or self.DV == self.D else [("DV", self.DV)])]
        found += [("TYPE", self.type), ("VEC", self.sizes.vec)]
        return found + [(name, int(value)) for name in names if (value := getattr(self.features, name.lower()))]

    def newer(self, cp_async: bool = True) -> list[tuple[str, int]]:
        """Return the macros for the instructions that sm_80 adds to Turing's."""
        if self.number < 80:
            return []
        # cp.async takes 16 bytes as they are: no conversion, no single elements.
        asynchronous = cp_async and self.type != BF16_AS_FP16 and self.sizes.vec == 8 and not self.features.cache
        return [("MMA_K16", 1), *([("CP_ASYNC", 1)] if asynchronous else [])]


def has_plain_scores(kind: Kind) -> bool:
    """Return whether a forward of this kind leaves two groups of warps enough registers."""
    found = kind.features
    changes = found.alibi or found.softcap or found.dropout or found.bias or kind.hints.flex
    converts = kind.type == BF16_AS_FP16 and not found.copied
    return kind.sizes.vec == 8 and kind.D == kind.DV and not (changes or converts or found.paged or found.cache)


def conditions(kind: Kind) -> list[str]:
    """Return the conditions of tiles.py that a kind meets, the most particular first."""
    # Other kernels of few rows have no registers to load V with K.
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
        tiles.LONG: kind.hints.long,
        tiles.LESS_SHARED: kind.number not in (80, 90),
        tiles.USUAL: True,
    }
    return [name for name, has in named.items() if has]


def choose_tile(entry: str, kind: Kind) -> Tile:
    """Return the tile that ``tune`` found, for kinds like the timed ones; else the table's."""
    is_small = kind.is_narrow or kind.hints.few_rows or kind.hints.few_keys
    is_timed = not (is_small or kind.features.softcap or kind.features.dropout or kind.D != kind.DV)
    found = dict(kind.hints.tiles).get(entry) if is_timed else None
    if found is not None and kind.features.bias and (WIDEST_TILE % found.rows or WIDEST_TILE % found.streamed_rows):
        found = None  # wider than what a word of a dense mask's map stands for
    if found is not None and found.groups > 1 and not has_plain_scores(kind):
        found = None
    return found or tiles.find_tile(kind.number, entry, kind.size, conditions(kind))
