"""List all kinds of calls, and all kernels (variants) that calls of given kinds launch: for ``compile`` and tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from flash_attn_compat.backends.fused.choosing.kinds import (
    BF16,
    BF16_AS_FP16,
    BIAS_WORDS,
    BOOLEANS,
    E4M3,
    E5M2,
    FEW_ROWS,
    FLOAT_BIAS,
    FP16,
    HALF_BIAS,
    HEAD_DIMS,
    NARROW,
    ONE_TILE,
    SHORT,
    Hints,
    KernelFeatures,
    Kind,
    Sizes,
    half_of,
)
from flash_attn_compat.backends.fused.choosing.variants import MAKERS, Variant, backward_entries
from flash_attn_compat.core.mask import KERNEL_RULES


def _with_few_keys(kind: Kind) -> Iterator[Kind]:
    if kind.hints.few_rows and kind.number < 80 and kind.type == FP16:
        yield from (kind.replace(few_keys=keys) for keys, sizes in ONE_TILE.items() if kind.size in sizes)


def every_kind(number: int) -> Iterator[Kind]:
    """Yield every kind of call that can occur on the architecture ``number``, such as 75."""
    types = (FP16, BF16) if number >= 80 else (FP16, BF16_AS_FP16)
    flags = itertools.product((False, True), repeat=4)
    choices = itertools.product(KERNEL_RULES, flags, types, HEAD_DIMS, (8, 1))
    for local, (alibi, softcap, dropout, paged), type, D, vec in choices:
        for window, few_rows in itertools.product((None, NARROW) if local else (None,), (False, True)):
            features = KernelFeatures(local, alibi, softcap, dropout, paged)
            kind = Kind(number, type, Sizes(D, window=window, vec=vec), features, Hints(few_rows))
            yield kind
            if not dropout:
                yield from (kind.replace(type=half_of(type), cache=cache) for cache in (E4M3, E5M2))
            if few_rows and window is None and not paged and number < 80:
                yield from (kind.replace(short=short) for short in (SHORT, FEW_ROWS))
            if window is None and not paged:
                yield from _with_few_keys(kind)
            may_be_copied = type == BF16_AS_FP16 and vec == 8 and window is None and not paged
            if may_be_copied:
                yield kind.replace(copied=True)
            if kind.replace(copied=may_be_copied).may_be_long:
                yield kind.replace(copied=may_be_copied, long=True)
            if not (local or alibi or softcap or paged):
                for bias, copied in itertools.product((BOOLEANS, HALF_BIAS, FLOAT_BIAS), {False, may_be_copied}):
                    yield from (kind.replace(bias=bias, copied=copied, bias_words=words) for words in BIAS_WORDS)
                    if bias > BOOLEANS:
                        yield kind.replace(bias=bias, copied=copied, bias_pairs=True)
                    yield from (one.replace(bias=bias) for one in _with_few_keys(kind))


def entries(kind: Kind) -> Iterator[str]:
    """Yield the names of the kernels that calls of a kind may launch."""
    yield "forward"
    if kind.features.bias:
        yield "mask"
    elif not kind.features.dropout:
        yield from ("decode", "decode_append", "append")
    if kind.features.cache:
        return
    if not kind.features.paged:
        yield from backward_entries(kind)
    if kind.type == BF16_AS_FP16:
        yield "absmax"
    if kind.features.copied:
        yield "to_half"


def made_for(kinds: Iterable[Kind]) -> dict[Variant, Kind]:
    """Return every variant that calls of these kinds may launch, each with one of the kinds that launch it."""
    found: dict[Variant, Kind] = {}
    for kind in kinds:
        for entry in entries(kind):
            found.setdefault(MAKERS[entry](kind), kind)
    return found
