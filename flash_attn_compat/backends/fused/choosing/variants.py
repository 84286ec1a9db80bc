"""Every kernel that is compiled: its entry, source file, macros and tile, and the one that a call takes.

A variant is an entry with its macros; docs/kernels.md lists the macros, cuda/*.cu describe the grids, and grids.py
counts the blocks. The offline compile test, the self-test and ``compile`` read the tables here too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

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
# Windows of fewer keys than this leave most of a tall tile masked; sequences of no more rows leave half of it empty.
_NARROW = 256
FEW_ROWS = 64
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
_DECODE_ROWS = 16
# Rows of a sequence, and with every head of a group, up to which the decode kernel serves.
_FEW_QUERIES, _FEW_FOLDED = 16, 128
# Bytes: the results of 4 warps for 16 rows of 64 channels, their maxima and sums, and 1 / sum of each row.
_DECODE_SHARED = 4 * 16 * 64 * 4 + 4 * 16 * 8 + 16 * 4
# For the widest heads two warps take half of the channels each and exchange scores of 16 rows and 8 keys, twice; over
# 8 bits of 16 keys.
_DECODE_SHARED_SPLIT_K = {False: 4 * 16 * 64 * 4 + 2 * 4 * 16 * 8 * 4, True: 4 * 16 * 64 * 4 + 2 * 4 * 16 * 16 * 4}
ABSMAX_ROWS = 512
_CONVERSIONS = 10


# Macros that are 0 unless a variant sets them.
_OFF = (
    *("SPLIT_N", "SPLIT_K", "ROLES", "STAGES", "LOAD_V_WITH_K", "FEW_KEYS", "DS_OVER_Q", "APPEND", "SHARED_GRID"),
    *("MMA_K16", "CP_ASYNC", "FLEX", "FLEX_SCORE", "FLEX_MASK"),
)
# Features of a kind in kernels with tiles of rows and keys; only the forward reads pages.
_FEATURES = "LOCAL", "ALIBI", "SOFTCAP", "DROPOUT", "PAGED", "COPIED", "BIAS", "BIAS_PAIRS", "CACHE"
DEFAULTS = {"D": 64, "TYPE": FP16, "VEC": 8, **dict.fromkeys((*_OFF, *_FEATURES), 0)}


class Variant(NamedTuple):
    """One compiled kernel: the function ``entry`` of the file ``source``, compiled with ``macros``.

    rows: stationary rows of a block (keys for dkdv); threads: of a block; shared: its bytes of dynamic shared memory
    text: the header flex_mods.cuh, with the macro FLEX
    """

    entry: str
    source: str
    macros: tuple[tuple[str, int], ...]
    rows: int
    threads: int
    shared: int
    text: str = ""


def half_of(type: int) -> int:
    """Return the type of the operands of an 8-bit cache, which become fp16 on every GPU."""
    return FP16 if type == FP16 else BF16_AS_FP16


def size_of(head_dim: int) -> int:
    return next(size for size in HEAD_DIMS if head_dim <= size)


class Kind(NamedTuple):
    """The properties of a call that choose a variant.

    number: the architecture's, as 75; type: FP16, BF16 or BF16_AS_FP16
    head_dim: of queries and keys; head_dim_v: of values, None if it is head_dim
    local: whether positions hide keys: causal, or a window; window: keys in sight, None unbounded
    alibi, softcap, dropout, paged: whether the call asks for it
    vec: elements of a load: 8 where every row starts on 16 bytes, else 1
    few_rows: tall tiles would leave half of a tile empty, or multiprocessors idle (grids.takes_small_tiles)
    short: SHORT or FEW_ROWS if no sequence has more rows or keys, else 0
    few_keys: one of ONE_TILE if no sequence has more keys: one kernel then finds all gradients. Else 0
    tiles: the fastest tiles on this GPU by entry, from ``tune``; copied: whether streamed rows are fp16 copies of bf16
    bias, bias_pairs: of a dense mask, as in cuda/scores/mask.cuh; 0 without one
    bias_words: words of 32 keys that a block of the pass over the mask reads, one of BIAS_WORDS
    cache: E4M3 or E5M2, of 8-bit keys and values; 0 if they are in q's dtype. bf16 queries then are BF16_AS_FP16
    """

    number: int
    type: int
    head_dim: int
    local: bool = False
    alibi: bool = False
    softcap: bool = False
    dropout: bool = False
    paged: bool = False
    vec: int = 8
    window: int | None = None
    few_rows: bool = False
    tiles: tuple[tuple[str, Tile], ...] = ()
    head_dim_v: int | None = None
    copied: bool = False
    short: int = 0
    few_keys: int = 0
    bias: int = 0
    bias_pairs: bool = False
    bias_words: int = PART_KEYS // 32
    cache: int = 0

    @property
    def D(self) -> int:
        return size_of(self.head_dim)

    @property
    def DV(self) -> int:
        return size_of(self.head_dim if self.head_dim_v is None else self.head_dim_v)

    @property
    def size(self) -> int:
        """The larger head dim, which chooses the tiles."""
        return max(self.D, self.DV)

    def macros(self, *names: str, D: int = 0) -> list[tuple[str, int]]:
        """names: features of the kernel, LOCAL for ``local`` and so on; D: the only size of a kernel without DV"""
        found = [("D", D or self.D), *([] if D or self.DV == self.D else [("DV", self.DV)])]
        found += [("TYPE", self.type), ("VEC", self.vec)]
        return found + [(name, int(value)) for name in names if (value := getattr(self, name.lower()))]

    def newer(self, cp_async: bool = True) -> list[tuple[str, int]]:
        """Macros for the instructions that sm_80 adds to Turing's."""
        if self.number < 80:
            return []
        # cp.async takes 16 bytes as they are: no conversion, no single elements.
        asynchronous = cp_async and self.type != BF16_AS_FP16 and self.vec == 8 and not self.cache
        return [("MMA_K16", 1), *([("CP_ASYNC", 1)] if asynchronous else [])]


def _is_narrow(kind: Kind) -> bool:
    return kind.window is not None and kind.window < _NARROW


def kinds_of_call(kind: Kind) -> list[str]:
    """Return the names of tiles.py that a kind has, the most particular first."""
    # Other kernels of few rows have no registers to load V with K.
    loads_v = kind.few_rows and kind.type == FP16 and kind.vec == 8 and not kind.bias
    named = {
        tiles.few_keys(kind.few_keys): kind.few_keys > 0,
        tiles.SHORT_SEQUENCES: kind.short == SHORT,
        tiles.NARROW_WINDOW: _is_narrow(kind),
        tiles.SOFTCAP: kind.softcap,
        tiles.DROPOUT: kind.dropout,
        tiles.FEW_ROWS_AND_KEYS: loads_v and kind.short > 0,
        tiles.FEW_LOCAL_ROWS: loads_v and kind.local,
        tiles.FEW_FREE_ROWS: loads_v,
        tiles.FEW_ROWS: kind.few_rows,
        tiles.UNLIKE: kind.D != kind.DV,
        tiles.BIASES: kind.bias > BOOLEANS,
        tiles.DENSE_MASK: kind.bias > 0,
        tiles.UNALIGNED: kind.vec != 8,
        tiles.CONVERTED: kind.type == BF16_AS_FP16 and not kind.copied,
        tiles.LOCAL: kind.local,
        tiles.LESS_SHARED: kind.number not in (80, 90),
        tiles.USUAL: True,
    }
    return [name for name, has in named.items() if has]


def choose_tile(entry: str, kind: Kind) -> Tile:
    """Return the tile that ``tune`` found, for kinds like the timed ones; else the table's."""
    is_timed = not (_is_narrow(kind) or kind.few_rows or kind.softcap or kind.dropout or kind.few_keys)
    found = dict(kind.tiles).get(entry) if is_timed else None
    return found or tiles.find_tile(kind.number, entry, kind.size, kinds_of_call(kind))


def forward(kind: Kind) -> Variant:
    tile = choose_tile("forward", kind)
    kind = _rounded(kind, tile)
    macros = kind.macros(*_FEATURES)
    macros += tile.macros()
    macros += [("SPLIT_K", tile.split_k)] * (tile.split_k > 0) + kind.newer()
    stages = 1 if kind.cache else tile.stages
    macros += [("STAGES", stages)] * (stages > 1) + [("LOAD_V_WITH_K", 1)] * (tile.load_v_with_k and not kind.cache)
    row, row_v = 2 * kind.D, 2 * kind.DV
    # Warps with the same rows exchange partial scores of a tile.
    partial_sums = tile.warps * tile.mma_m * 16 * tile.streamed_rows * 4 * (tile.split_k > 0)
    stationary, streamed = tile.rows * row, tile.streamed_rows * (min(stages, 2) * row + stages * row_v) + partial_sums
    shared = max(stationary if tile.qk_in_regs else stationary + streamed, streamed, tile.rows * row_v)
    return Variant("forward", "forward.cu", tuple(macros), tile.rows, tile.warps * 32, shared)


def _rounded(kind: Kind, tile: Tile) -> Kind:
    """The head dims, rounded up so that warps share out channels in 16s."""
    unit = 16 << (tile.split_n + tile.split_k)
    return kind._replace(head_dim=-(-kind.D // unit) * unit, head_dim_v=-(-kind.DV // unit) * unit)


def decode(kind: Kind) -> Variant:
    """The decode kernel, which takes 64 channels at once; channels that do not exist are not loaded."""
    D = -(-kind.size // 64) * 64
    macros = kind.macros("LOCAL", "ALIBI", "SOFTCAP", "PAGED", "CACHE", D=D)
    few_registers = D == 64 and kind.vec == 8
    # Of Turing's 64 KB a multiprocessor, three blocks have room.
    macros.append(("MIN_BLOCKS", (4 if kind.number >= 80 else 3) if few_registers else 2))
    split_k = D > 256
    macros += [("SPLIT_K", 1)] * split_k
    shared = _DECODE_SHARED_SPLIT_K[kind.cache > 0] if split_k else _DECODE_SHARED
    return Variant("decode", "decode.cu", tuple(macros), _DECODE_ROWS, 128, shared)


def decode_append(kind: Kind) -> Variant:
    """The decode kernel for calls that bring new keys."""
    variant = decode(kind)
    return variant._replace(macros=(*variant.macros, ("APPEND", 1)))


def append(kind: Kind) -> Variant:
    """Copies numbers: most macros make no difference."""
    return Variant("append", "append.cu", tuple(kind.macros("PAGED", "CACHE", D=64)[1:]), 1, 128, 0)


def absmax(kind: Kind) -> Variant:
    macros = kind.macros("PAGED", "COPIED", D=_power_of_two(kind.size))
    return Variant("absmax", "convert.cu", tuple(macros), ABSMAX_ROWS, 256, 0)


def to_half(kind: Kind) -> Variant:
    return absmax(kind._replace(copied=False))._replace(entry="to_half")


def marks(kind: Kind, tokens: int, batch: int) -> int:
    """Marks of each head of k and of v: one for each warp and each set of rows that a block of absmax reads at once."""
    return (tokens // (8192 // _power_of_two(kind.size)) + batch + 1) * 8


def pays_to_copy(kind: Kind, variant: Variant, stationary: float, group: int = 1) -> bool:
    """Whether converting streamed rows to fp16 once pays, for ``stationary`` rows in each of a ``group`` of heads.

    It pays for many tiles of ``variant``: on a T4, writing the copies costs as much as some ten conversions.
    """
    seen = stationary if kind.window is None else min(stationary, kind.window)
    return group * (seen / 2 if kind.local and kind.window is None else seen) >= _CONVERSIONS * variant.rows


def delta(kind: Kind) -> Variant:
    D = _power_of_two(kind.DV)
    return Variant("delta", "delta.cu", tuple(kind.macros(D=D)), 8192 // D, 256, 0)


def mask(kind: Kind) -> Variant:
    """TYPE matters only for biases of the call's dtype."""
    type = kind.type if kind.bias == HALF_BIAS else FP16
    macros = (("TYPE", type), ("BIAS", kind.bias), ("BIAS_WORDS", kind.bias_words))
    warps = 4 * -(-kind.bias_words // 8)
    return Variant("mask", "mask.cu", macros, BAND, warps * 32, warps * 4)


def _power_of_two(D: int) -> int:
    """The size of kernels without tiles, whose lanes share a row: some lanes have nothing to load."""
    return 1 << (D - 1).bit_length()


def dkdv(kind: Kind) -> Variant:
    if kind.few_keys:
        # Neighbouring lanes share a row if it has a multiple of 32 channels.
        size = -(-kind.size // 32) * 32
        kind = kind._replace(head_dim=size, head_dim_v=size)
    tile = choose_tile("dkdv", kind)
    # A lane holds neighbouring queries, not keys: no pairs of biases.
    return _backward("dkdv", kind._replace(bias_pairs=False), tile, row_values=tile.streamed_rows * 8)


def dq(kind: Kind) -> Variant:
    return _backward("dq", kind, choose_tile("dq", kind), row_values=0)


def _backward(entry: str, kind: Kind, tile: Tile, row_values: int) -> Variant:
    """row_values: bytes of shared memory for LSE and delta of a streamed tile"""
    kind = _rounded(kind._replace(paged=False, cache=0), tile)
    macros = [*kind.macros(*_FEATURES), *kind.newer(tile.cp_async)]
    macros += [*tile.macros(), ("VO_IN_REGS", int(tile.vo_in_regs))]
    has_dq = entry == "dkdv" and kind.few_keys > 0
    macros += [("FEW_KEYS", 1)] * has_dq + [("DS_OVER_Q", 1)] * tile.ds_over_q + [("SPLIT_N", 1)] * tile.split_n
    macros += [("SPLIT_K", tile.split_k)] * (tile.split_k > 0) + [("ROLES", 1)] * tile.roles
    macros += [("STAGES", tile.stages)] * (tile.stages > 1)
    row, row_v = 2 * kind.D, 2 * kind.DV
    stationary = tile.rows * ((not tile.qk_in_regs) * row + (not tile.vo_in_regs) * row_v)
    exchanges = tile.split_n or tile.split_k
    exchanged = (tile.warps * tile.mma_m * 16 * tile.streamed_rows // 2 * 2 * 2) * (exchanges > 0)  # halves of P and dS
    partial_sums = tile.warps * tile.split_k * tile.mma_m * 512
    # Partial sums of S lie in the next tile's place, if that has room.
    exchanged += tile.rows * tile.streamed_rows * 2 * (has_dq and not tile.ds_over_q)
    exchanged += partial_sums * (1 + (tile.streamed_rows * row < partial_sums or ("CP_ASYNC", 1) in macros))
    if tile.roles:  # P, for each stage but the one that is loaded
        exchanged = tile.rows * tile.streamed_rows * 4 * (tile.stages - 1)
    slots, slots_v = 1 if tile.ds_over_q else max(tile.stages, 2), 2 if tile.roles else tile.stages
    streamed = tile.streamed_rows * (slots * row + slots_v * row_v) + row_values * slots + exchanged
    # Stationary operands go to registers through shared memory; gradients leave through all of it.
    through = tile.rows * max(tile.qk_in_regs * row, tile.vo_in_regs * row_v)
    through = 2 * through if tile.roles else through
    shared = max(stationary + max(streamed, through), tile.rows * max(row, row_v) * (1 + tile.roles))
    return Variant(entry, f"{entry}.cu", tuple(macros), tile.rows, tile.warps * 32, shared)


def backward_entries(kind: Kind) -> tuple[str, ...]:
    """The kernels of a backward, in order."""
    return ("dkdv",) if kind.few_keys else ("delta", "dkdv", "dq")


def backward(kind: Kind) -> tuple[Variant, ...]:
    """The variants of ``backward_entries``."""
    return tuple(MAKERS[entry](kind) for entry in backward_entries(kind))


def with_shared_grid(variant: Variant) -> Variant:
    """The same kernel for a grid that all packed sequences share."""
    return variant._replace(macros=(*variant.macros, ("SHARED_GRID", 1)))


def has_shared_grid(variant: Variant) -> bool:
    return ("SHARED_GRID", 1) in variant.macros


MAKERS = {
    make.__name__: make for make in (forward, decode, decode_append, append, absmax, to_half, mask, delta, dkdv, dq)
}


def _with_few_keys(kind: Kind) -> Iterator[Kind]:
    if kind.few_rows and kind.number < 80 and kind.type == FP16:
        yield from (kind._replace(few_keys=keys) for keys, sizes in ONE_TILE.items() if kind.size in sizes)


def kinds(number: int) -> Iterator[Kind]:
    """Every kind of call that may be asked for on an architecture."""
    types = (FP16, BF16) if number >= 80 else (FP16, BF16_AS_FP16)
    flags = itertools.product((False, True), repeat=5)
    for (local, alibi, softcap, dropout, paged), type, D, vec in itertools.product(flags, types, HEAD_DIMS, (8, 1)):
        for window, few_rows in itertools.product((None, _NARROW - 1) if local else (None,), (False, True)):
            kind = Kind(number, type, D, local, alibi, softcap, dropout, paged, vec, window, few_rows)
            yield kind
            if not dropout:
                yield from (kind._replace(type=half_of(type), cache=cache) for cache in (E4M3, E5M2))
            if few_rows and window is None and not paged and number < 80:
                yield from (kind._replace(short=short) for short in (SHORT, FEW_ROWS))
            if window is None and not paged:
                yield from _with_few_keys(kind)
            may_be_copied = type == BF16_AS_FP16 and vec == 8 and window is None and not paged
            if may_be_copied:
                yield kind._replace(copied=True)
            if not (local or alibi or softcap or paged):
                for bias, copied in itertools.product((BOOLEANS, HALF_BIAS, FLOAT_BIAS), {False, may_be_copied}):
                    yield from (kind._replace(bias=bias, copied=copied, bias_words=words) for words in BIAS_WORDS)
                    if bias > BOOLEANS:
                        yield kind._replace(bias=bias, copied=copied, bias_pairs=True)
                    yield from (one._replace(bias=bias) for one in _with_few_keys(kind))


def entries(kind: Kind) -> Iterator[str]:
    """The kernels that calls of a kind may launch."""
    yield "forward"
    if kind.bias:
        yield "mask"
    elif not kind.dropout:
        yield from ("decode", "decode_append", "append")
    if kind.cache:
        return
    if not kind.paged:
        yield from backward_entries(kind)
    if kind.type == BF16_AS_FP16:
        yield "absmax"
    if kind.copied:
        yield "to_half"


def made_for(kinds: Iterable[Kind]) -> dict[Variant, Kind]:
    """Every variant that calls of these kinds may launch, with one of the kinds that do."""
    found: dict[Variant, Kind] = {}
    for kind in kinds:
        for entry in entries(kind):
            found.setdefault(MAKERS[entry](kind), kind)
    return found


def takes_decode(seqlen_q: int, group: int, more: bool) -> bool:
    """Return whether the decode kernel serves: a call of so few query rows that reading the keys takes the time.

    The decode kernel reads the keys once for 16 rows, the forward kernel once for each query head.
    more: whether there is dropout or a dense mask, which the decode kernel lacks
    """
    return not more and seqlen_q <= _FEW_QUERIES and seqlen_q * group <= _FEW_FOLDED
