"""The generated problems: functions x features x dtypes, each repeatable from the seed that its own name gives.

A Case is cheap; its tensors are made by `build()`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verify.hurt import UNHURT, Hurt, cache_readers, packed_readers
from verify.problem import Problem

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
DROPOUT = {"dropout_p": 0.17}

# name -> options; window sides are small against every length below, so that both edges are met
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (11, 5)},
    "window-left": {"window_size": (13, -1)},
    "window-right": {"window_size": (-1, 7)},
    "window-causal": {"causal": True, "window_size": (19, 0)},
}
# name -> options; "alibi" is made into slopes by the builder
SCORES: dict[str, dict[str, Any]] = {
    "": {},
    "softcap": {"softcap": 4.0},
    "alibi": {"alibi": "H"},
    "alibi-batch": {"alibi": "BH"},
    "softcap+alibi": {"softcap": 6.0, "alibi": "H"},
    "dropout": DROPOUT,
    "dropout+alibi": {**DROPOUT, "alibi": "BH"},
}
LENGTHS = {"": (83, 83), "sq<sk": (41, 131), "sq>sk": (131, 41)}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (3, 1)}
HEAD_DIMS = (40, 64, 16, 52, 128)


@dataclass(frozen=True)
class Case:
    name: str
    function: str
    build: Callable[[], Problem]


class _Draw:
    """Tensors of one case, drawn on the CPU from the seed its name gives."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.dtype = dtype

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64) * scale + mean
        return drawn.to(torch.float32).to(self.dtype)  # fp64 inputs hold fp32 values: nothing depends on it

    def slopes(self, kind: str | None, batch: int, nheads: int) -> dict[str, Tensor]:
        if kind is None:
            return {}
        slopes = torch.rand(batch, nheads, generator=self.generator) * 0.3
        return {"alibi_slopes": slopes if kind == "BH" else slopes[0]}

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)


def _case(function: str, feature: str, dtype: torch.dtype, builder: Callable[..., Problem], **settings: Any) -> Case:
    name = f"{function.removeprefix('flash_attn_').removesuffix('_func')} {feature} {SHORT[dtype]}"
    return Case(name, function, partial(builder, name, function, dtype, **settings))


def _with_probabilities(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "return_attn_probs": True}


# ---- builders -------------------------------------------------------------------------------------------------------


def _dense(
    name: str,
    function: str,
    dtype: torch.dtype,
    *,
    batch: int = 2,
    lengths: tuple[int, int] = (83, 83),
    heads: tuple[int, int] = (4, 4),
    head_dim: int = 40,
    head_dim_v: int | None = None,
    alibi: str | None = None,
    q_scale: float = 1.0,
    v_mean: float = 0.0,
    layout: str = "contiguous",
    backward: bool = True,
    hurt: Hurt = UNHURT,
    **options: Any,
) -> Problem:
    draw = _Draw(name, dtype)
    (seqlen_q, seqlen_k), (nheads, nheads_k) = lengths, heads
    q = draw.normal(batch, seqlen_q, nheads, head_dim, scale=q_scale)
    k = draw.normal(batch, seqlen_k, nheads_k, head_dim)
    v = draw.normal(batch, seqlen_k, nheads_k, head_dim_v or head_dim, mean=v_mean)
    rows, keys = (torch.arange(batch)[:, None].expand(batch, length) for length in lengths)
    if hurt != UNHURT:
        q, k, v = (hurt.put(*each, nheads_k) for each in (("q", q, rows), ("k", k, keys), ("v", v, keys)))
    if "qkvpacked" in function:
        tensors = {"qkv": torch.stack((q, k, v), dim=2)}
    elif "kvpacked" in function:
        tensors = {"q": q, "kv": torch.stack((k, v), dim=2)}
    else:
        tensors = {"q": q, "k": k, "v": v}
    dout = draw.normal(batch, seqlen_q, nheads, v.shape[-1]) if backward else None
    if dout is not None and hurt != UNHURT:
        dout = hurt.put("dout", dout, rows, nheads_k)
    tensors.update(draw.slopes(alibi, batch, nheads))
    return Problem(name, function, tensors, _with_probabilities(options), dout, layout)


def _varlen(
    name: str,
    function: str,
    dtype: torch.dtype,
    *,
    lengths_q: tuple[int, ...] = (37, 1, 0, 70),
    lengths_k: tuple[int, ...] = (37, 1, 0, 70),
    heads: tuple[int, int] = (4, 4),
    head_dim: int = 40,
    alibi: str | None = None,
    page: int | None = None,
    layout: str = "contiguous",
    gap: tuple[int, int] = (0, 0),
    hurt: Hurt = UNHURT,
    **options: Any,
) -> Problem:
    draw = _Draw(name, dtype)
    nheads, nheads_k = heads
    cu_q, cu_k = (
        torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32) + gap[0]
        for lengths in (lengths_q, lengths_k)
    )
    q = draw.normal(sum(gap) + sum(lengths_q), nheads, head_dim)
    rows, keys = (packed_readers(lengths, gap) for lengths in (lengths_q, lengths_k))
    if hurt != UNHURT:
        q = hurt.put("q", q, rows, nheads_k)
    if page is None:
        k, v = (draw.normal(sum(gap) + sum(lengths_k), nheads_k, head_dim) for _ in "kv")
        if hurt != UNHURT:
            k, v = (hurt.put(*each, keys, nheads_k) for each in (("k", k), ("v", v)))
    else:
        per_sequence = -(-max(lengths_k) // page)
        blocks = len(lengths_k) * per_sequence + 1
        k, v = (draw.normal(blocks, page, nheads_k, head_dim) for _ in "kv")
        table = draw.permutation(blocks)[: blocks - 1].view(len(lengths_k), per_sequence).int()
    if "qkvpacked" in function:
        tensors = {"qkv": torch.stack((q, k, v), dim=1), "cu_seqlens": cu_q}
        options["max_seqlen"] = max(lengths_q)
    else:
        packed = {"q": q, "kv": torch.stack((k, v), dim=1)} if "kvpacked" in function else {"q": q, "k": k, "v": v}
        tensors = {**packed, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        options.update(max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k))
    if page is not None:
        tensors["block_table"] = table
    dout = draw.normal(*q.shape) if page is None else None
    if dout is not None and hurt != UNHURT:
        dout = hurt.put("dout", dout, rows, nheads_k)
    tensors.update(draw.slopes(alibi, len(lengths_q), nheads))
    return Problem(name, function, tensors, _with_probabilities(options), dout, layout)


def _cache(
    name: str,
    function: str,
    dtype: torch.dtype,
    *,
    seqlen_q: int = 1,
    new: int | None = None,
    lengths: Any = (70, 0, 33),
    capacity: int = 100,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    alibi: str | None = None,
    rotary_dim: int = 0,
    page: int | None = None,
    batch_idx: bool = False,
    leftpad: tuple[int, ...] | None = None,
    hurt: Hurt = UNHURT,
    **options: Any,
) -> Problem:
    draw = _Draw(name, dtype)
    batch, (nheads, nheads_k) = 3, heads
    tensors = {"q": draw.normal(batch, seqlen_q, nheads, head_dim)}
    if page is None:
        rows = batch + 2 if batch_idx else batch
        shape = (rows, capacity, nheads_k, head_dim)
    else:
        per_sequence = -(-capacity // page)
        shape = (batch * per_sequence + 2, page, nheads_k, head_dim)
        tensors["block_table"] = draw.permutation(shape[0])[: batch * per_sequence].view(batch, per_sequence).int()
        capacity = per_sequence * page
    tensors["k_cache"], tensors["v_cache"] = draw.normal(*shape), draw.normal(*shape)
    new = seqlen_q if new is None else new
    if new:
        tensors["k"], tensors["v"] = (draw.normal(batch, new, nheads_k, head_dim) for _ in "kv")
    if hurt != UNHURT:
        readers = cache_readers(shape[:2], lengths, leftpad, tensors.get("block_table"))
        every = torch.arange(batch)[:, None]
        appended = replace(hurt, stray=None)
        for quantity in "kv":
            cache = f"{quantity}_cache"
            tensors[cache] = hurt.put(quantity, tensors[cache], readers, nheads_k)
            if new:
                tensors[quantity] = appended.put(quantity, tensors[quantity], every.expand(batch, new), nheads_k)
        tensors["q"] = hurt.put("q", tensors["q"], every.expand(batch, seqlen_q), nheads_k)
    if rotary_dim:
        angles = torch.rand(capacity, rotary_dim // 2, generator=draw.generator) * 6.28
        tensors["rotary_cos"], tensors["rotary_sin"] = angles.cos().to(dtype), angles.sin().to(dtype)
    if isinstance(lengths, tuple):
        tensors["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    elif lengths is not None:
        options["cache_seqlens"] = lengths
    if batch_idx:
        tensors["cache_batch_idx"] = draw.permutation(rows)[:batch].int()
    if leftpad is not None:
        tensors["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
    tensors.update(draw.slopes(alibi, batch, nheads))
    return Problem(name, function, tensors, {**options, "return_softmax_lse": True})


# ---- the collections ------------------------------------------------------------------------------------------------

DENSE, DENSE_KV, DENSE_QKV = "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"
VARLEN, VARLEN_KV, VARLEN_QKV = (
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
)
CACHE = "flash_attn_with_kvcache"


def _label(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def essential() -> Iterator[Case]:
    """One case for each feature and each mistake people make with it: the quick set."""
    fp16, bf16, fp32, fp64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
    for dtype in (*DTYPES, fp64):
        yield _case(DENSE, "causal gqa", dtype, _dense, heads=(4, 2), causal=True)
    for name, mask in MASKS.items():
        yield _case(DENSE, _label(name, "sq<sk"), fp16, _dense, lengths=(41, 131), **mask)
        yield _case(DENSE, _label(name, "sq>sk"), bf16, _dense, lengths=(131, 41), heads=(4, 2), **mask)
    yield _case(DENSE, "softcap", fp16, _dense, softcap=4.0, q_scale=4.0)
    yield _case(DENSE, "softcap+alibi causal", fp32, _dense, softcap=6.0, alibi="H", causal=True, q_scale=3.0)
    yield _case(DENSE, "alibi", fp16, _dense, alibi="H", lengths=(60, 90))
    yield _case(DENSE, "alibi-batch causal mqa", bf16, _dense, alibi="BH", heads=(3, 1), causal=True)
    yield _case(DENSE, "alibi window", fp32, _dense, alibi="BH", **MASKS["window"])
    yield _case(DENSE, "dropout", fp16, _dense, **DROPOUT)
    yield _case(DENSE, "dropout window alibi", fp32, _dense, alibi="H", **DROPOUT, **MASKS["window"])
    yield _case(DENSE, "mqa scale 0.3", fp16, _dense, heads=(4, 1), softmax_scale=0.3)
    yield _case(DENSE, "head_dim 52", fp16, _dense, head_dim=52)
    yield _case(DENSE, "head_dim 13 causal", bf16, _dense, head_dim=13, causal=True)
    yield _case(DENSE, "head_dim 256", fp16, _dense, head_dim=256, lengths=(40, 60))
    yield _case(DENSE, "head_dim 264", bf16, _dense, head_dim=264, lengths=(40, 60))
    yield _case(DENSE, "head_dim 64 value 32", fp16, _dense, head_dim=64, head_dim_v=32, causal=True)
    yield _case(DENSE, "large logits", fp32, _dense, q_scale=40.0)
    yield _case(DENSE, "large logits causal", fp16, _dense, q_scale=16.0, causal=True)
    # The mean shows what fp16 sums lose. Forward only: the backward takes rowsum(dout * out) from the rounded out, so
    # with values this one-sided even flash-attn's own gradients are further off than plain PyTorch's.
    many = {"batch": 1, "lengths": (4, 8192), "heads": (2, 1), "head_dim": 64}
    yield _case(DENSE, "8192 keys one-sided values", fp16, _dense, v_mean=1.0, backward=False, **many)
    yield _case(DENSE, "8192 keys", fp16, _dense, **many)
    yield _case(DENSE, "1300 keys causal", fp32, _dense, batch=1, lengths=(140, 1300), heads=(2, 2), causal=True)
    yield _case(
        DENSE, "1300 keys window", fp16, _dense, batch=1, lengths=(300, 1300), heads=(2, 1), window_size=(150, 60)
    )
    yield _case(DENSE, "no keys", fp16, _dense, lengths=(5, 0), backward=False)
    yield _case(DENSE, "one query", fp16, _dense, lengths=(1, 77), heads=(4, 2), causal=True)
    yield _case(DENSE, "deterministic causal", bf16, _dense, deterministic=True, causal=True)
    for layout in ("heads_first", "sliced", "last_dim_strided"):
        yield _case(DENSE, f"{layout} causal", fp16, _dense, layout=layout, causal=True)
    yield _case(DENSE_KV, "causal gqa", fp16, _dense, heads=(4, 2), causal=True, lengths=(40, 70))
    yield _case(DENSE_QKV, "window d64", bf16, _dense, head_dim=64, **MASKS["window"])

    skewed = {"lengths_q": (37, 1, 0, 70), "lengths_k": (52, 9, 8, 64)}
    yield _case(VARLEN, "full", fp16, _varlen)
    for name in ("causal", "window", "window-left"):
        yield _case(VARLEN, _label(name, "skewed gqa"), fp16, _varlen, heads=(4, 2), **skewed, **MASKS[name])
    yield _case(VARLEN, "empty key sequences", bf16, _varlen, lengths_q=(9, 20, 5), lengths_k=(12, 0, 0))
    yield _case(VARLEN, "softcap causal", fp32, _varlen, softcap=4.0, causal=True, **skewed)
    yield _case(VARLEN, "alibi-batch causal", fp16, _varlen, alibi="BH", causal=True, **skewed)
    yield _case(VARLEN, "dropout causal", fp16, _varlen, causal=True, **DROPOUT)
    yield _case(
        VARLEN, "many short", fp16, _varlen, lengths_q=tuple(range(1, 25)), lengths_k=tuple(range(1, 25)), causal=True
    )
    yield _case(
        VARLEN,
        "paged 256 causal",
        fp16,
        _varlen,
        lengths_q=(10, 15),
        lengths_k=(300, 61),
        page=256,
        heads=(4, 2),
        causal=True,
    )
    yield _case(
        VARLEN, "paged 16 window", bf16, _varlen, lengths_q=(10, 15), lengths_k=(40, 61), page=16, **MASKS["window"]
    )
    yield _case(VARLEN_KV, "causal skewed", fp16, _varlen, heads=(4, 2), causal=True, **skewed)
    yield _case(VARLEN_QKV, "causal d64", bf16, _varlen, head_dim=64, causal=True)

    yield from _hurtful()

    yield _case(CACHE, "decode", fp16, _cache, causal=True)
    yield _case(CACHE, "decode mqa window", bf16, _cache, heads=(4, 1), **MASKS["window-causal"])
    yield _case(CACHE, "chunk", fp32, _cache, seqlen_q=5, causal=True)
    yield _case(CACHE, "more new keys than queries", fp16, _cache, seqlen_q=2, new=9, causal=True)
    yield _case(CACHE, "read only", fp16, _cache, new=0, lengths=(70, 12, 33))
    yield _case(CACHE, "whole capacity", fp16, _cache, new=0, seqlen_q=3, lengths=None)
    yield _case(CACHE, "int length", bf16, _cache, lengths=50, causal=True)
    for interleaved in (True, False):
        yield _case(
            CACHE,
            f"rotary {'interleaved' if interleaved else 'halves'}",
            fp16,
            _cache,
            seqlen_q=4,
            rotary_dim=32,
            causal=True,
            rotary_interleaved=interleaved,
        )
    yield _case(CACHE, "rotary unmasked", fp16, _cache, seqlen_q=4, rotary_dim=64)
    yield _case(CACHE, "batch_idx", fp16, _cache, batch_idx=True, causal=True, seqlen_q=2)
    yield _case(CACHE, "leftpad", fp16, _cache, leftpad=(10, 0, 3), lengths=(70, 4, 33), causal=True, seqlen_q=2)
    yield _case(CACHE, "paged 256", fp16, _cache, page=256, capacity=300, causal=True, lengths=(260, 0, 33), seqlen_q=3)
    yield _case(CACHE, "paged 16 rotary", fp16, _cache, page=16, capacity=112, rotary_dim=32, causal=True, seqlen_q=3)
    yield _case(CACHE, "alibi", bf16, _cache, alibi="H", causal=True, seqlen_q=3)
    yield _case(CACHE, "softcap", fp16, _cache, softcap=3.0, causal=True)
    yield _case(CACHE, "splits", fp16, _cache, num_splits=3, capacity=700, lengths=(650, 8, 300), causal=True)


def _hurtful() -> Iterator[Case]:
    """Where one maximum over a whole tensor, or a product with 0, would be seen to be wrong."""
    sizes, nan, inf = Hurt(sizes=True), float("nan"), float("inf")
    skewed = {"lengths_q": (37, 5, 20, 70), "lengths_k": (52, 9, 20, 64)}
    for dtype in DTYPES:
        yield _case(DENSE, "sizes gqa", dtype, _dense, heads=(4, 2), hurt=sizes)
        yield _case(VARLEN, "sizes causal gqa", dtype, _varlen, heads=(4, 2), causal=True, hurt=sizes, **skewed)
        yield _case(CACHE, "sizes", dtype, _cache, hurt=sizes, causal=True, seqlen_q=2, lengths=(70, 20, 33))
    yield _case(DENSE_QKV, "sizes window", torch.bfloat16, _dense, hurt=sizes, **MASKS["window"])
    yield _case(VARLEN_KV, "sizes alibi", torch.bfloat16, _varlen, heads=(4, 2), hurt=sizes, alibi="H", **skewed)
    for quantity, number in (("q", nan), ("k", inf), ("v", inf), ("v", nan), ("dout", inf)):
        hurt = Hurt(stray=(quantity, 1, number))
        yield _case(DENSE, f"{number} in {quantity} of one sequence", torch.bfloat16, _dense, heads=(4, 2), hurt=hurt)
        yield _case(
            VARLEN, f"{number} in {quantity} of one sequence causal", torch.float16, _varlen, hurt=hurt, causal=True,
            **skewed,
        )  # fmt: skip
    yield _case(CACHE, "inf in v of one sequence", torch.bfloat16, _cache, hurt=Hurt(stray=("v", 0, inf)))
    for number, dtype in ((nan, torch.float16), (inf, torch.bfloat16)):
        hurt = Hurt(outside=number)
        yield _case(VARLEN, f"{number} outside", dtype, _varlen, hurt=hurt, gap=(3, 5), **skewed)
        yield _case(VARLEN_QKV, f"{number} outside causal", dtype, _varlen, hurt=hurt, gap=(0, 4), causal=True)
        yield _case(CACHE, f"{number} behind the end", dtype, _cache, hurt=hurt, causal=True, seqlen_q=3)
        yield _case(
            CACHE, f"{number} behind the end leftpad", dtype, _cache, hurt=hurt, leftpad=(10, 0, 3), lengths=(70, 4, 33)
        )
        yield _case(CACHE, f"{number} behind the end paged", dtype, _cache, hurt=hurt, page=16, capacity=112)


def thorough() -> Iterator[Case]:
    """Every mask with every score feature, every relation of lengths and every dtype, heads and head_dim taking
    turns.
    """
    heads, head_dims = itertools.cycle(HEADS.items()), itertools.cycle(HEAD_DIMS)
    for (mask, mask_options), (score, score_options), (relation, lengths), dtype in itertools.product(
        MASKS.items(), SCORES.items(), LENGTHS.items(), DTYPES
    ):
        (head_name, nheads), head_dim = next(heads), next(head_dims)
        feature = _label(mask, score, relation, head_name, f"d{head_dim}")
        yield _case(
            DENSE,
            feature,
            dtype,
            _dense,
            lengths=lengths,
            heads=nheads,
            head_dim=head_dim,
            **mask_options,
            **score_options,
        )

    skewed = {"": (37, 1, 0, 70), "sq<sk": (37, 60, 9, 170), "sq>sk": (20, 1, 0, 31)}
    for (mask, mask_options), (score, score_options), (relation, lengths_k), dtype in itertools.product(
        MASKS.items(), SCORES.items(), skewed.items(), DTYPES
    ):
        (head_name, nheads), head_dim = next(heads), next(head_dims)
        feature = _label(mask, score, relation, head_name, f"d{head_dim}")
        yield _case(
            VARLEN,
            feature,
            dtype,
            _varlen,
            lengths_k=lengths_k,
            heads=nheads,
            head_dim=head_dim,
            **mask_options,
            **score_options,
        )

    few = {name: SCORES[name] for name in ("", "alibi", "dropout")}  # packing meets the features in one place only
    for (mask, mask_options), (score, score_options), dtype in itertools.product(MASKS.items(), few.items(), DTYPES):
        feature = _label(mask, score)
        yield _case(DENSE_KV, feature, dtype, _dense, heads=(4, 2), lengths=(50, 75), **mask_options, **score_options)
        yield _case(DENSE_QKV, feature, dtype, _dense, **mask_options, **score_options)
        yield _case(VARLEN_KV, feature, dtype, _varlen, heads=(4, 2), **mask_options, **score_options)
        yield _case(VARLEN_QKV, feature, dtype, _varlen, **mask_options, **score_options)

    cached = {
        "decode": {},
        "chunk": {"seqlen_q": 6},
        "paged": {"seqlen_q": 3, "page": 256, "capacity": 300, "lengths": (270, 0, 33)},
        "paged small": {"seqlen_q": 2, "page": 32},
        "leftpad": {"seqlen_q": 3, "leftpad": (9, 0, 2), "lengths": (70, 5, 33)},
        "batch_idx": {"seqlen_q": 2, "batch_idx": True},
        "rotary": {"seqlen_q": 4, "rotary_dim": 32},
        "rotary halves": {"seqlen_q": 4, "rotary_dim": 64, "rotary_interleaved": False},
        "rotary paged": {"seqlen_q": 3, "rotary_dim": 32, "page": 32},
    }
    without_dropout = {name: options for name, options in SCORES.items() if "dropout_p" not in options}
    dtypes = itertools.cycle(DTYPES)
    for (kind, settings), (mask, mask_options), (score, score_options) in itertools.product(
        cached.items(), MASKS.items(), without_dropout.items()
    ):
        feature = _label(kind, mask, score)
        yield _case(CACHE, feature, next(dtypes), _cache, **settings, **mask_options, **score_options)

    for (mask, mask_options), score, dtype in itertools.product(MASKS.items(), ("", "softcap", "alibi"), DTYPES):
        yield _case(
            DENSE,
            _label("long", mask, score),
            dtype,
            _dense,
            batch=1,
            lengths=(260, 1400),
            heads=(2, 1),
            head_dim=64,
            **mask_options,
            **SCORES[score],
        )
        yield _case(
            VARLEN,
            _label("long", mask, score),
            dtype,
            _varlen,
            lengths_q=(700, 3, 120),
            lengths_k=(700, 900, 1100),
            heads=(2, 1),
            head_dim=32,
            **mask_options,
            **SCORES[score],
        )


def generated(quick: bool) -> list[Case]:
    """The quick set, or that and every combination."""
    return list(essential()) if quick else [*essential(), *thorough()]
