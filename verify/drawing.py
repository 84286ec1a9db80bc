"""Random attention problems: strange layouts, heads and sequences of very different size, NaN or infinity in one
sequence, in padding and behind a cache's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from .problems import KINDS, QUANTITIES, WITH_GRADIENTS, Problem


def _chance(source: Random, percent: int) -> bool:
    return source.randint(0, 99) >= 100 - percent


_KINDS = ("dense",) * 6 + ("varlen",) * 6 + ("kvcache",) * 6 + tuple(k for k in KINDS for _ in range(2))
_DTYPES = ("float32", "float16", "bfloat16") * 5 + ("float64",)
_HEAD_DIMS = (8, 16, 32, 64, 40, 24, 1, 5, 100, 128) * 2 + (48, 80, 96, 112, 72, 160, 1, 192, 224, 128) + (264,)
_LAYOUTS = ("contiguous",) * 4 + ("sliced", "heads_first", "wide_rows", "offset", "strided_dim", "one_head")


def random_problem(
    seed: int, kinds: Sequence[str] | None = None, dtypes: Sequence[str] | None = None, mixes: int | None = None
) -> Problem:
    """Return problem number `seed`, always the same.

    mixes: how many combinations of features occur, which limits how many kernels are compiled; lengths, numbers and
    values still differ in each problem. None for no limit.
    """
    source = Random(seed)
    features = Random(seed % mixes) if mixes else source
    kind = features.choice(kinds or _KINDS)
    packed = kind.endswith("packed")
    dtype = features.choice(dtypes or _DTYPES)
    seqlens_q, seqlens_k = _lengths(source, kind)
    work = sum(q * k for q, k in zip(seqlens_q, seqlens_k))
    small = work > 20_000
    found: dict[str, Any] = dict(
        kind=kind, dtype=dtype, seqlens_q=seqlens_q, seqlens_k=seqlens_k,
        nheads_k=1 if small else source.randint(1, 3),
        group=1 if small or kind.endswith("qkvpacked") else source.choice((1, 1, 2, 3)),
        head_dim=source.choice((8, 16)) if small else features.choice(_HEAD_DIMS),
        causal=features.choice((False, True)),
        window=_window(features, max(seqlens_k, default=0)),
        window_as=source.choice(("tuple", "tuple", "list", "tensor", "scalars")),
        alibi=features.choice(("", "", "", "h", "bh")),
        softmax_scale=source.choice((None, None, None, 0.05, 0.3, 1.0)),
        magnitude=source.choice((1.0, 1.0, 1.0, 3.0, 0.1)),
        return_attn_probs=source.choice((True, True, False)),
        poison=source.choice(("", "nan")),
        seed=source.randint(0, 2**31 - 1),
    )  # fmt: skip
    if not packed and _chance(features, 15):
        found["head_dim_v"] = features.choice((8, 16, 33))
    if _chance(features, 20):
        found["softcap"] = source.choice((30.0, 5.0, 0.5))
    if kind != "kvcache" and _chance(features, 20):
        found["dropout_p"] = source.choice((0.1, 0.17, 0.5, 0.9))
    if kind in WITH_GRADIENTS:
        found["deterministic"] = source.choice((False, True))
    found["layouts"] = _layouts(features, kind)
    if kind == "kvcache":
        found |= _cache_fields(source, features, found)
    elif "varlen" in kind or kind == "paged":
        found |= _varlen_fields(source, features, found)
    return Problem(**found | _hurtful_fields(source, found))


def random_eight_bit_problem(seed: int, dtypes: Sequence[str] | None = None, mixes: int | None = None) -> Problem:
    """Return problem number `seed` over a cache, or pages, of 8-bit floats.

    It has no rotary embedding: keys rotated, then rounded to half precision and to 8 bits, have no single right value.
    """
    halves = [dtype for dtype in dtypes or ("float16", "bfloat16") if dtype in ("float16", "bfloat16")]
    p = random_problem(seed, ("kvcache", "kvcache", "paged", "private_varlen"), halves, mixes)
    features = Random(seed % mixes if mixes else seed)
    descale = features.choice(("number", "heads", "sequences"))
    return replace(p, eight_bit=features.choice(("e4m3", "e5m2")), descale=descale, dropout_p=0.0, rotary_dim=0)


def _length(source: Random) -> int:
    return source.randint(*source.choice(((0, 5), (1, 20), (1, 20), (10, 80), (120, 135), (0, 0))))


def _lengths(source: Random, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    batch = source.randint(1, 4 if "varlen" in kind or kind == "paged" else 3)
    if _chance(source, 2):  # long enough for several tiles of any kernel
        batch = 1
        q, k = source.randint(1, 700), source.randint(300, 1500)
    elif kind == "kvcache":
        q, k = source.choice((1, 1, 2, 7, 33)), 0
    else:
        q, k = _length(source), _length(source)
    if kind == "kvcache":
        if k == 0:
            return (q,) * batch, tuple(_length(source) for _ in range(batch))
        return (q,), (k,)
    same = kind.endswith("qkvpacked") or _chance(source, 40)
    if "varlen" not in kind and kind != "paged":
        return (q,) * batch, (q if same else k,) * batch
    seqlens_q = (q, *(_length(source) for _ in range(batch - 1)))
    return seqlens_q, seqlens_q if same else (k, *(_length(source) for _ in range(batch - 1)))


def _window(source: Random, longest: int) -> tuple[int, int]:
    if _chance(source, 50):
        return (-1, -1)
    sides = (-1, 0, 1, source.randint(2, 20), longest, max(longest - 1, 0), 1000, -2)
    return source.choice(sides), source.choice(sides)


def _layouts(source: Random, kind: str) -> tuple[str, str, str, str]:
    if _chance(source, 40):
        return ("contiguous",) * 4
    dout = source.choice((*_LAYOUTS, "one_value"))
    inputs: tuple[str, ...] = _LAYOUTS
    if kind in ("kvcache", "paged", "private_varlen"):  # a cache must have a contiguous last dimension and be writable
        inputs = tuple(x for x in _LAYOUTS if x not in ("strided_dim", "one_head"))
    if kind.endswith("packed"):  # a packed one_head tensor is not tried
        inputs = tuple(x for x in _LAYOUTS if x != "one_head")
    q, k, v = source.choice(inputs), source.choice(inputs), source.choice(inputs)
    if "varlen" in kind:  # the tokens between sequences are written to, so no layout may share memory
        q, k, v, dout = ("contiguous" if x in ("one_head", "one_value") else x for x in (q, k, v, dout))
    return q, k, v, dout


def _varlen_fields(source: Random, features: Random, fields: dict[str, Any]) -> dict[str, Any]:
    lengths = fields["seqlens_k"]
    found: dict[str, Any] = dict(
        gap=source.choice(((0, 0), (0, 0), (0, 0), (3, 0), (0, 5), (2, 2))),
        max_seqlen_slack=source.choice((0, 0, 0, 1, 50)),
        max_seqlen_as=source.choice(("int", "int", "tensor")),
    )
    if fields["kind"] == "private_varlen":
        found["head_dim"] = -(-fields["head_dim"] // 8) * 8  # the private functions take only multiples of 8
        if "head_dim_v" in fields:
            found["head_dim_v"] = 16
        if _chance(source, 70):
            found["seqused"] = tuple(source.randint(0, n) for n in lengths)
        if _chance(features, 30):
            found["page_size"] = source.choice((16, 7, 64, 256))
        elif _chance(source, 60):
            found["leftpad"] = tuple(source.randint(0, n) for n in found.get("seqused", lengths))
    if fields["kind"] == "paged":
        found["page_size"] = source.choice((16, 1, 7, 64, 256))
    return found


def _cache_fields(source: Random, features: Random, fields: dict[str, Any]) -> dict[str, Any]:
    sq, lengths = fields["seqlens_q"][0], fields["seqlens_k"]
    found: dict[str, Any] = dict(
        lengths_as=source.choice(("tensor", "tensor", "int", "none")),
        num_splits=source.choice((0, 0, 1, 3)),
        new_keys=source.choice((None, 1, sq, sq, 5)),
        rotary_interleaved=source.choice((True, False)),
    )
    if found["lengths_as"] == "none":
        found["new_keys"] = None
    if found["lengths_as"] != "tensor":
        lengths = (max(lengths),) * len(lengths)
    reach = max(lengths) + (found["new_keys"] or 0)
    found["capacity"] = max(reach, sq, fields["group"], 1) + source.choice((0, 0, 1, 40))
    if _chance(features, 30):
        found["page_size"] = source.choice((16, 1, 7, 64, 256))
    if found["lengths_as"] == "none":
        page = found.get("page_size", 1)
        lengths = (-(-found["capacity"] // page) * page,) * len(lengths)
    if "page_size" not in found:
        found["batch_idx"] = _chance(source, 30)
        if _chance(source, 30):
            found["leftpad"] = tuple(source.randint(0, n) for n in lengths)
    dims = [n for n in (16, 32, 64, 128) if n <= fields["head_dim"]]
    if dims and found["new_keys"] is not None and _chance(source, 50):
        found["rotary_dim"] = source.choice(dims)
    return found | {"seqlens_k": lengths}


# Factors of (q, k), and of (v, dout), so small that fp16 holds them, q @ k and v @ dout; _WIDE: for other dtypes.
_SCORE_SIZES = ((1.0, 1.0),) * 3 + ((1e-3, 1.0), (1.0, 1e-3), (1e2, 1e-2), (1e-2, 1e2), (1e-3, 1e-3))
_SCORE_SIZES_WIDE = (*_SCORE_SIZES, (1e-8, 1.0), (1.0, 1e-8), (1e4, 1e-4), (1e-4, 1e4), (1e-6, 1e4))
_VALUE_SIZES = ((1.0, 1.0), (1e-6, 1.0), (1e-3, 1.0), (1.0, 1e-6), (1.0, 1e-3), (1e4, 1e-3), (1e3, 1e-2), (1e-3, 1e3))
_VALUE_SIZES_WIDE = (*_VALUE_SIZES, (1e-6, 1e-6), (1e4, 1e4), (1e4, 1e-6), (1e-8, 1e4))


def _hurtful_fields(source: Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Draw values that a wrong kernel spreads to other sequences and heads: very different sizes, NaN, infinity."""
    found: dict[str, Any] = {}
    wide = fields["dtype"] != "float16"
    if _chance(source, 35):
        scores, values = (_SCORE_SIZES_WIDE, _VALUE_SIZES_WIDE) if wide else (_SCORE_SIZES, _VALUE_SIZES)
        # With dropout, which enlarges values, large values would make out infinite in fp16.
        fitting = [pair for pair in values if wide or pair[0] <= 1 or not fields.get("dropout_p")]
        drawn = [(*source.choice(scores), *source.choice(fitting)) for _ in range(source.randint(2, 4))]
        found["sizes"] = tuple(drawn)
        # No layout in which heads share memory: factors of several heads would multiply, beyond fp16's range.
        found["layouts"] = tuple("contiguous" if x in ("one_head", "one_value") else x for x in fields["layouts"])
    if _chance(source, 12):
        quantities = QUANTITIES if fields["kind"] in WITH_GRADIENTS else QUANTITIES[:3]
        sequence = source.randint(0, len(fields["seqlens_q"]) - 1)
        found["stray"] = (source.choice(quantities), sequence, source.choice(("nan", "inf", "-inf")))
    if fields["poison"] and _chance(source, 33):
        found["poison"] = "inf"
    if fields["kind"] in WITH_GRADIENTS and _chance(source, 15):
        found["backward"] = False
    return found
