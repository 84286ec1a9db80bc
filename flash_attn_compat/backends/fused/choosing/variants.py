"""The kernels that calls of a kind launch: function, source file, macros, and the shared memory of a block.

A variant is a kernel's function (its entry) compiled with given macros. docs/kernels.md lists the macros, cuda/*.cu
describe the grids, and grids.py counts the blocks.
"""

from __future__ import annotations

from typing import NamedTuple

from flash_attn_compat.backends.fused.choosing.kinds import (
    BAND,
    FP16,
    HALF_BIAS,
    KernelFeatures,
    Kind,
    choose_tile,
)
from flash_attn_compat.backends.fused.choosing.tiles import Tile

_DECODE_ROWS = 16
# The decode kernel serves up to _FEW_QUERIES rows of a sequence, and _FEW_FOLDED rows times the query heads of a group.
_FEW_QUERIES, _FEW_FOLDED = 16, 128
# Bytes of shared memory: the results of 4 warps for 16 rows of 64 channels, their maxima and sums, and 1 / sum by row.
_DECODE_SHARED = 4 * 16 * 64 * 4 + 4 * 16 * 8 + 16 * 4
# The same for the widest heads, by whether the cache has 8 bits. Two warps take half of the channels each, and exchange
# scores of 16 rows and 8 keys, twice; of 16 keys over 8 bits.
_DECODE_SHARED_SPLIT_K = {False: 4 * 16 * 64 * 4 + 2 * 4 * 16 * 8 * 4, True: 4 * 16 * 64 * 4 + 2 * 4 * 16 * 16 * 4}
ABSMAX_ROWS = 512
_CONVERSIONS = 10


# Macros that are 0 unless a variant sets them.
_OFF = (
    *("SPLIT_N", "SPLIT_K", "ROLES", "STAGES", "LOAD_V_WITH_K", "FEW_KEYS", "DS_OVER_Q", "KEY_GROUPS"),
    *("APPEND", "SHARED_GRID", "MMA_K16", "CP_ASYNC", "FLEX", "FLEX_SCORE", "FLEX_MASK", "FLEX_GRADIENTS"),
)
# The macros of all features, for kernels with tiles of rows and keys.
_FEATURES = tuple(name.upper() for name in KernelFeatures._fields)
_NOT_DECODED = "DROPOUT", "COPIED", "BIAS", "BIAS_PAIRS"
DEFAULTS = {"D": 64, "TYPE": FP16, "VEC": 8, **dict.fromkeys((*_OFF, *_FEATURES), 0)}


class Variant(NamedTuple):
    """One compiled kernel: the function ``entry`` of the file ``source``, compiled with ``macros``.

    rows: how many queries (keys for dkdv) a block keeps; threads: of a block; shared: a block's bytes of shared memory
    text: the content of the header flex_mods.cuh, for a kernel with the macro FLEX
    """

    entry: str
    source: str
    macros: tuple[tuple[str, int], ...]
    rows: int
    threads: int
    shared: int
    text: str = ""


def forward(kind: Kind) -> Variant:
    tile = choose_tile("forward", kind)
    kind = _rounded(kind, tile)
    macros = kind.macros(*_FEATURES)
    macros += tile.macros()
    macros += [("SPLIT_K", tile.split_k)] * (tile.split_k > 0) + kind.newer()
    stages = 1 if kind.features.cache else tile.stages
    macros += [("STAGES", stages)] * (stages > 1)
    macros += [("LOAD_V_WITH_K", 1)] * (tile.load_v_with_k and not kind.features.cache)
    macros += [("KEY_GROUPS", tile.groups)] * (tile.groups > 1)
    row, row_v = 2 * kind.D, 2 * kind.DV
    # With split_k, warps that share rows exchange partial scores of a tile.
    partial_sums = tile.warps * tile.mma_m * 16 * tile.streamed_rows * 4 * (tile.split_k > 0)
    stationary, streamed = tile.rows * row, tile.streamed_rows * (min(stages, 2) * row + stages * row_v) + partial_sums
    streamed *= tile.groups
    shared = max(stationary if tile.qk_in_regs else stationary + streamed, streamed, tile.rows * row_v * tile.groups)
    return Variant("forward", "forward.cu", tuple(macros), tile.rows, tile.warps * 32, shared)


def _rounded(kind: Kind, tile: Tile) -> Kind:
    """Return the kind with head dims rounded up, so that each warp that shares rows gets a multiple of 16 channels."""
    unit = 16 << (tile.split_n + tile.split_k)
    return kind.replace(head_dim=-(-kind.D // unit) * unit, head_dim_v=-(-kind.DV // unit) * unit)


def decode(kind: Kind) -> Variant:
    """Return the decode kernel. It computes 64 channels at once, and does not load channels beyond the head dim."""
    D = -(-kind.size // 64) * 64
    macros = kind.macros(*(name for name in _FEATURES if name not in _NOT_DECODED), D=D)
    few_registers = D == 64 and kind.sizes.vec == 8
    # Turing's 64 KB of shared memory a multiprocessor have room for three blocks.
    macros.append(("MIN_BLOCKS", (4 if kind.number >= 80 else 3) if few_registers else 2))
    split_k = D > 256
    macros += [("SPLIT_K", 1)] * split_k
    shared = _DECODE_SHARED_SPLIT_K[kind.features.cache > 0] if split_k else _DECODE_SHARED
    return Variant("decode", "decode.cu", tuple(macros), _DECODE_ROWS, 128, shared)


def decode_append(kind: Kind) -> Variant:
    """Return the decode kernel that also appends new keys to the cache."""
    variant = decode(kind)
    return variant._replace(macros=(*variant.macros, ("APPEND", 1)))


def append(kind: Kind) -> Variant:
    """Return the append kernel. It only copies numbers, so few macros matter."""
    return Variant("append", "append.cu", tuple(kind.macros("PAGED", "CACHE", D=64)[1:]), 1, 128, 0)


def absmax(kind: Kind) -> Variant:
    macros = kind.macros("PAGED", "COPIED", D=_power_of_two(kind.size))
    return Variant("absmax", "convert.cu", tuple(macros), ABSMAX_ROWS, 256, 0)


def to_half(kind: Kind) -> Variant:
    return absmax(kind.replace(copied=False))._replace(entry="to_half")


def marks(kind: Kind, tokens: int, batch: int) -> int:
    """Return how many marks a head of k or of v has. A mark is the maximum by which a warp of absmax scaled its copies.

    There is one mark for each warp and each set of rows that a block of absmax reads at once.
    """
    return (tokens // (8192 // _power_of_two(kind.size)) + batch + 1) * 8


def pays_to_copy(kind: Kind, variant: Variant, stationary: float, group: int = 1) -> bool:
    """Whether it pays to convert the streamed rows to fp16 once, instead of in each tile of ``variant``.

    It pays if many tiles read the same rows: on a T4, writing the copies costs as much as some ten conversions.
    stationary: rows that read them, in each of a ``group`` of heads
    """
    window = kind.sizes.window
    seen = min(stationary, window) if window is not None else stationary / 2 if kind.features.local else stationary
    return group * seen >= _CONVERSIONS * variant.rows


def delta(kind: Kind) -> Variant:
    D = _power_of_two(kind.DV)
    return Variant("delta", "delta.cu", tuple(kind.macros(D=D)), 8192 // D, 256, 0)


def mask(kind: Kind) -> Variant:
    """Return the kernel that reads a dense mask once. Its TYPE matters only for biases in the call's dtype."""
    type = kind.type if kind.features.bias == HALF_BIAS else FP16
    macros = (("TYPE", type), ("BIAS", kind.features.bias), ("BIAS_WORDS", kind.sizes.bias_words))
    warps = 4 * -(-kind.sizes.bias_words // 8)
    return Variant("mask", "mask.cu", macros, BAND, warps * 32, warps * 4)


def _power_of_two(D: int) -> int:
    """Return the size for kernels whose lanes share a row, a power of 2. Some lanes then have nothing to load."""
    return 1 << (D - 1).bit_length()


def dkdv(kind: Kind) -> Variant:
    if kind.hints.few_keys:
        # A multiple of 32 channels, so that neighbouring lanes can share a row.
        size = -(-kind.size // 32) * 32
        kind = kind.replace(head_dim=size, head_dim_v=size)
    tile = choose_tile("dkdv", kind)
    # No pairs of biases: in dkdv a lane holds neighbouring queries, and pairs are of neighbouring keys.
    return _backward("dkdv", kind.replace(bias_pairs=False), tile, row_values=tile.streamed_rows * 8)


def dq(kind: Kind) -> Variant:
    return _backward("dq", kind, choose_tile("dq", kind), row_values=0)


def _backward(entry: str, kind: Kind, tile: Tile, row_values: int) -> Variant:
    """Return the variant of dkdv or dq. row_values: bytes of shared memory for LSE and delta of a streamed tile"""
    kind = _rounded(kind.replace(paged=False, cache=0), tile)
    macros = [*kind.macros(*_FEATURES), *kind.newer(tile.cp_async)]
    macros += [*tile.macros(), ("VO_IN_REGS", int(tile.vo_in_regs))]
    has_dq = entry == "dkdv" and kind.hints.few_keys > 0
    macros += [("FEW_KEYS", 1)] * has_dq + [("DS_OVER_Q", 1)] * tile.ds_over_q + [("SPLIT_N", 1)] * tile.split_n
    macros += [("SPLIT_K", tile.split_k)] * (tile.split_k > 0) + [("ROLES", 1)] * tile.roles
    macros += [("STAGES", tile.stages)] * (tile.stages > 1)
    row, row_v = 2 * kind.D, 2 * kind.DV
    stationary = tile.rows * ((not tile.qk_in_regs) * row + (not tile.vo_in_regs) * row_v)
    exchanges = tile.split_n or tile.split_k
    exchanged = (tile.warps * tile.mma_m * 16 * tile.streamed_rows // 2 * 2 * 2) * (exchanges > 0)  # halves of P and dS
    partial_sums = tile.warps * tile.split_k * tile.mma_m * 512
    # With split_k, partial sums of S go to the place of the next tile, if that is large enough.
    exchanged += tile.rows * tile.streamed_rows * 2 * (has_dq and not tile.ds_over_q)
    exchanged += partial_sums * (1 + (tile.streamed_rows * row < partial_sums or ("CP_ASYNC", 1) in macros))
    if tile.roles:  # P of each stage, except the stage that is being loaded
        exchanged = tile.rows * tile.streamed_rows * 4 * (tile.stages - 1)
    slots, slots_v = 1 if tile.ds_over_q else max(tile.stages, 2), 2 if tile.roles else tile.stages
    streamed = tile.streamed_rows * (slots * row + slots_v * row_v) + row_values * slots + exchanged
    # Operands that are kept in registers pass through shared memory at the start, gradients at the end.
    through = tile.rows * max(tile.qk_in_regs * row, tile.vo_in_regs * row_v)
    through = 2 * through if tile.roles else through
    shared = max(stationary + max(streamed, through), tile.rows * max(row, row_v) * (1 + tile.roles))
    return Variant(entry, f"{entry}.cu", tuple(macros), tile.rows, tile.warps * 32, shared)


def backward_entries(kind: Kind) -> tuple[str, ...]:
    """Return the names of the kernels of a backward, in the order of their launches."""
    return ("dkdv",) if kind.hints.few_keys else ("delta", "dkdv", "dq")


def backward(kind: Kind) -> tuple[Variant, ...]:
    """Return the variants of a backward's kernels, in the order of their launches."""
    return tuple(MAKERS[entry](kind) for entry in backward_entries(kind))


def with_shared_grid(variant: Variant) -> Variant:
    """Return the variant for a grid that all packed sequences share."""
    return variant._replace(macros=(*variant.macros, ("SHARED_GRID", 1)))


def has_shared_grid(variant: Variant) -> bool:
    return ("SHARED_GRID", 1) in variant.macros


MAKERS = {
    make.__name__: make for make in (forward, decode, decode_append, append, absmax, to_half, mask, delta, dkdv, dq)
}


def takes_decode(seqlen_q: int, group: int, more: bool) -> bool:
    """Return whether the decode kernel serves: a call has so few query rows that reading keys takes most of its time.

    The decode kernel reads the keys once for 16 rows, the forward kernel once for each query head.
    group: query heads for each key head; more: whether there is dropout or a dense mask, which the decode kernel lacks
    """
    return not more and seqlen_q <= _FEW_QUERIES and seqlen_q * group <= _FEW_FOLDED
