"""The cases of compare: a named problem for each feature and each common mistake, then random problems."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .call import DTYPES, SHORT, Answer, Call
from .drawing import random_problem
from .problems import FUNCTIONS, KINDS, Problem

HALF = ("float16", "bfloat16")
EVERY = (*HALF, "float32")
RANDOM = 1200  # random problems beyond the named ones, unless --quick
PUBLIC_KINDS = tuple(kind for kind in KINDS if kind != "private_varlen")

# Windows are narrow compared with every length below, so that both of their edges hide keys.
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (11, 5)},
    "window-left": {"window": (13, -1)},
    "window-right": {"window": (-1, 7)},
    "window-causal": {"causal": True, "window": (19, 0)},
}
SKEWED: dict[str, Any] = {"seqlens_q": (37, 1, 0, 70), "seqlens_k": (52, 9, 8, 64)}
NO_EMPTY: dict[str, Any] = {"seqlens_q": (37, 5, 20, 70), "seqlens_k": (52, 9, 20, 64)}
# Factors of (q, k, v, dout): each (sequence, key head) takes the next entry. fp16 has less range.
SIZES = ((1.0, 1.0, 1.0, 1.0), (1e-6, 1e4, 1e-6, 1.0), (1e4, 1e-4, 1e4, 1e-6), (1.0, 1e-8, 1e-8, 1e4))
SIZES_FP16 = ((1.0, 1.0, 1.0, 1.0), (1e-2, 1e2, 1e-3, 1.0), (1.0, 1.0, 1e3, 1e-3), (1e-3, 1.0, 1.0, 1e-4))


@dataclass(frozen=True)
class Case:
    """A case: its name, a call or a Problem that describes one, and flash-attn's recorded answer, or None."""

    name: str
    problem: Problem | Call
    official: Answer | None = None

    @property
    def function(self) -> str:
        return self.problem.fn if isinstance(self.problem, Call) else FUNCTIONS[self.problem.kind]

    @property
    def dtype(self) -> str:
        dtype = self.problem.dtype
        return SHORT[DTYPES[dtype] if isinstance(dtype, str) else dtype]

    def forward_only(self) -> Case:
        """Return the case without gradients."""
        official = self.official and replace(self.official, grads={})
        if isinstance(self.problem, Call):
            return replace(self, problem=replace(self.problem, dout=None), official=official)
        return replace(self, problem=replace(self.problem, backward=False))


def _case(kind: str, feature: str, dtype: str, **fields: Any) -> Case:
    """Return a case. Its seed comes from its name, so that the same name always gives the same numbers."""
    short = FUNCTIONS[kind].removeprefix("flash_attn_").removesuffix("_func")
    name = f"{short} {feature} {SHORT[DTYPES[dtype]]}"
    return Case(name, Problem(kind=kind, dtype=dtype, seed=zlib.crc32(name.encode()), **fields))


def _dense(feature: str, dtype: str, lengths: tuple[int, int] = (83, 83), kind: str = "dense", **fields: Any) -> Case:
    batch = fields.pop("batch", 2)
    given = {"nheads_k": 4, "head_dim": 40, "seqlens_q": (lengths[0],) * batch, "seqlens_k": (lengths[1],) * batch}
    return _case(kind, feature, dtype, **given | fields)


def _varlen(feature: str, dtype: str, kind: str = "varlen", **fields: Any) -> Case:
    given = {"nheads_k": 4, "head_dim": 40, "seqlens_q": (37, 1, 0, 70)}
    given["seqlens_k"] = fields.get("seqlens_q", given["seqlens_q"])
    return _case(kind, feature, dtype, **given | fields)


def _cache_case(feature: str, dtype: str, new_keys: int | None = -1, seqlen_q: int = 1, **fields: Any) -> Case:
    given = {"nheads_k": 2, "group": 2, "head_dim": 64, "seqlens_k": (70, 0, 33), "capacity": 100}
    given |= {"seqlens_q": (seqlen_q,) * 3, "new_keys": seqlen_q if new_keys == -1 else new_keys}
    return _case("kvcache", feature, dtype, **given | fields)


GQA: dict[str, Any] = {"nheads_k": 2, "group": 2}
MQA: dict[str, Any] = {"nheads_k": 1, "group": 3}
DROPOUT: dict[str, Any] = {"dropout_p": 0.17}


# Problems that most kernels serve: half precision, one head_dim, lengths divisible by their tiles.
SQUARES, FEW_SQUARES = (64, 128, 256, 512, 1024), (80, 144, 208)


def plain(quick: bool = False) -> Iterator[Case]:
    """Yield the plain problems, which most kernels serve. They come first. quick: few long problems"""
    fp16, bf16, fp32 = EVERY

    def square(n: int, dtype: str, d: int, causal: bool, more: dict[str, Any], name: str = "") -> Case:
        feature = " ".join(filter(None, ["plain", str(n), f"d{d}", name, "causal" * causal]))
        return _dense(feature, dtype, (n, n), head_dim=d, causal=causal, batch=2 if n <= 128 else 1, **more)

    mha: dict[str, Any] = {"nheads_k": 2}
    for name, heads in (("", mha), ("gqa", GQA)):
        for n, d, causal in itertools.product(SQUARES, (64, 128), (False, True)):
            if n <= 256 or not quick or (not name and (n < 1024 or (d == 64 and causal))):
                yield square(n, fp16, d, causal, heads, name)
        for d in (64, 128):
            if not name:
                yield square(192, fp16, d, False, {**heads, "magnitude": 6.3}, "large scores")
    for n in FEW_SQUARES:
        yield square(n, fp16, 64, n != FEW_SQUARES[0], mha)
    for dtype in (bf16, fp32):
        for d, causal in ((64, True), (128, False)):
            yield square(128, dtype, d, causal, mha)


def of_few_features() -> Iterator[Case]:
    """Yield a case for each feature, for kernels that compute only dense fp16 calls without grouped heads, of head_dim
    64 or 128. Such a kernel declines most of the other cases, which show the features with other heads, dims or dtypes.
    """

    def case(feature: str, lengths: tuple[int, int] = (83, 83), head_dim: int = 64, **fields: Any) -> Case:
        name = f"d{head_dim} {feature}"
        return _dense(name, "float16", lengths, **{"nheads_k": 2, "head_dim": head_dim, **fields})

    for head_dim in (64, 128):
        for name in ("full", "causal"):
            yield case(f"{name} sq<sk", (41, 131), head_dim, **MASKS[name])
            yield case(f"{name} sq>sk", (131, 41), head_dim, **MASKS[name])
    for name in ("window", "window-left", "window-right", "window-causal"):
        yield case(f"{name} sq<sk", (41, 131), **MASKS[name])
    yield case("window-right sq>sk", (131, 41), **MASKS["window-right"])
    yield _dense("d64 causal", "float64", nheads_k=2, head_dim=64, causal=True)
    yield case("no keys", (5, 0), backward=False)
    yield case("one query", (1, 77), causal=True)
    yield case("scale 0.3", softmax_scale=0.3)
    yield case("softcap", softcap=4.0, magnitude=2.0)
    yield case("alibi", (60, 90), alibi="h")
    yield case("alibi-batch causal", alibi="bh", causal=True)
    yield case("dropout", **DROPOUT)
    for layout in ("heads_first", "sliced", "strided_dim"):
        yield case(f"{layout} causal", layouts=(layout,) * 4, causal=True)
    yield case("large logits causal", magnitude=6.3, causal=True)
    yield case("sizes", sizes=SIZES_FP16)
    for quantity, number in (("q", "nan"), ("k", "inf"), ("v", "inf"), ("v", "nan"), ("dout", "inf")):
        yield case(f"{number} in {quantity} of one sequence", stray=(quantity, 1, number))


def feature_cases() -> Iterator[Case]:
    """Yield a case for each feature, and for each common mistake in computing it."""
    fp16, bf16, fp32 = EVERY
    yield from of_few_features()
    for dtype in (*EVERY, "float64"):
        yield _dense("causal gqa", dtype, causal=True, **GQA)
    for name, mask in MASKS.items():
        yield _dense(f"{name} sq<sk", fp16, (41, 131), **mask)
        yield _dense(f"{name} sq>sk", bf16, (131, 41), **GQA, **mask)
    yield _dense("softcap", fp16, softcap=4.0, magnitude=2.0)
    yield _dense("softcap+alibi causal", fp32, softcap=6.0, alibi="h", causal=True, magnitude=1.7)
    yield _dense("alibi", fp16, (60, 90), alibi="h")
    yield _dense("alibi-batch causal mqa", bf16, alibi="bh", causal=True, **MQA)
    yield _dense("alibi window", fp32, alibi="bh", window=(11, 5))
    yield _dense("dropout", fp16, **DROPOUT)
    yield _dense("dropout window alibi", fp32, alibi="h", window=(11, 5), **DROPOUT)
    yield _dense("mqa scale 0.3", fp16, softmax_scale=0.3, **MQA)
    yield _dense("head_dim 52", fp16, head_dim=52)
    yield _dense("head_dim 13 causal", bf16, head_dim=13, causal=True)
    yield _dense("head_dim 256", fp16, (40, 60), head_dim=256)
    yield _dense("head_dim 264", bf16, (40, 60), head_dim=264)
    yield _dense("head_dim 64 value 32", fp16, head_dim=64, head_dim_v=32, causal=True)
    yield _dense("large logits", fp32, magnitude=6.3)
    yield _dense("large logits causal", fp16, magnitude=4.0, causal=True)
    # Values with a mean show the error of sums in fp16. Without a backward: it computes rowsum(dout * out) from the
    # rounded out, so that with such values even flash-attn's gradients are less accurate than plain PyTorch's.
    many: dict[str, Any] = {"batch": 1, "lengths": (4, 8192), "nheads_k": 1, "group": 2, "head_dim": 64}
    yield _dense("8192 keys one-sided values", fp16, value_mean=1.0, backward=False, **many)
    yield _dense("8192 keys", fp16, **many)
    yield _dense("1300 keys causal", fp32, (140, 1300), batch=1, nheads_k=2, causal=True)
    yield _dense("1300 keys window", fp16, (300, 1300), batch=1, nheads_k=1, group=2, window=(150, 60))
    yield _dense("no keys", fp16, (5, 0), backward=False)
    yield _dense("one query", fp16, (1, 77), causal=True, **GQA)
    yield _dense("deterministic causal", bf16, deterministic=True, causal=True)
    for layout in ("heads_first", "sliced", "strided_dim"):
        yield _dense(f"{layout} causal", fp16, layouts=(layout,) * 4, causal=True)
    yield _dense("causal gqa", fp16, (40, 70), "kvpacked", causal=True, **GQA)
    yield _dense("window d64", bf16, kind="qkvpacked", head_dim=64, window=(11, 5))

    yield _varlen("full", fp16)
    for name in ("causal", "window", "window-left"):
        yield _varlen(f"{name} skewed gqa", fp16, **GQA, **SKEWED, **MASKS[name])
    yield _varlen("empty key sequences", bf16, seqlens_q=(9, 20, 5), seqlens_k=(12, 0, 0))
    yield _varlen("softcap causal", fp32, softcap=4.0, causal=True, **SKEWED)
    yield _varlen("alibi-batch causal", fp16, alibi="bh", causal=True, **SKEWED)
    yield _varlen("dropout causal", fp16, causal=True, **DROPOUT)
    yield _varlen("many short", fp16, seqlens_q=tuple(range(1, 25)), causal=True)
    paged: dict[str, Any] = {"kind": "paged", "seqlens_q": (10, 15)}
    yield _varlen("paged 256 causal", fp16, seqlens_k=(300, 61), page_size=256, causal=True, **GQA, **paged)
    yield _varlen("paged 16 window", bf16, seqlens_k=(40, 61), page_size=16, window=(11, 5), **paged)
    yield _varlen("causal skewed", fp16, "varlen_kvpacked", causal=True, **GQA, **SKEWED)
    yield _varlen("causal d64", bf16, "varlen_qkvpacked", head_dim=64, causal=True)

    yield _cache_case("decode", fp16, causal=True)
    yield _cache_case("decode mqa window", bf16, nheads_k=1, group=4, causal=True, window=(19, 0))
    yield _cache_case("chunk", fp32, seqlen_q=5, causal=True)
    yield _cache_case("more new keys than queries", fp16, 9, seqlen_q=2, causal=True)
    yield _cache_case("read only", fp16, None, seqlens_k=(70, 12, 33))
    yield _cache_case("whole capacity", fp16, None, seqlen_q=3, lengths_as="none", seqlens_k=(100,) * 3)
    yield _cache_case("int length", bf16, lengths_as="int", seqlens_k=(50,) * 3, causal=True)
    for interleaved in (True, False):
        form = "interleaved" if interleaved else "halves"
        yield _cache_case(
            f"rotary {form}", fp16, seqlen_q=4, rotary_dim=32, causal=True, rotary_interleaved=interleaved
        )
    yield _cache_case("rotary unmasked", fp16, seqlen_q=4, rotary_dim=64)
    yield _cache_case("batch_idx", fp16, seqlen_q=2, batch_idx=True, causal=True)
    yield _cache_case("leftpad", fp16, seqlen_q=2, leftpad=(10, 0, 3), seqlens_k=(70, 4, 33), causal=True)
    yield _cache_case("paged 256", fp16, seqlen_q=3, page_size=256, capacity=300, causal=True, seqlens_k=(260, 0, 33))
    yield _cache_case("paged 16 rotary", fp16, seqlen_q=3, page_size=16, capacity=112, rotary_dim=32, causal=True)
    yield _cache_case("alibi", bf16, seqlen_q=3, alibi="h", causal=True)
    yield _cache_case("softcap", fp16, softcap=3.0, causal=True)
    yield _cache_case("splits", fp16, num_splits=3, capacity=700, seqlens_k=(650, 8, 300), causal=True)
    for bits, descale, dtype in (("e4m3", "number", fp16), ("e4m3", "heads", bf16), ("e5m2", "sequences", fp16)):
        name = f"{bits} by {descale}"
        given: dict[str, Any] = {"eight_bit": bits, "descale": descale, "causal": True}
        yield _cache_case(name, dtype, **given)
        yield _cache_case(f"{name} paged 16", dtype, seqlen_q=3, page_size=16, capacity=112, **given)
        yield _varlen(f"{name} paged 16", dtype, seqlens_k=(40, 61), page_size=16, **given, **paged)
    yield from _hurtful()


def _hurtful() -> Iterator[Case]:
    """Yield problems that reveal two mistakes: one maximum for a whole tensor, and 0 times NaN or infinity."""
    fp16, bf16, _ = EVERY
    for dtype in EVERY:
        sizes = SIZES_FP16 if dtype == fp16 else SIZES
        yield _dense("sizes gqa", dtype, sizes=sizes, **GQA)
        yield _varlen("sizes causal gqa", dtype, causal=True, sizes=sizes, **GQA, **NO_EMPTY)
        yield _cache_case("sizes", dtype, seqlen_q=2, sizes=sizes, causal=True, seqlens_k=(70, 20, 33))
    yield _dense("sizes window", bf16, kind="qkvpacked", sizes=SIZES, window=(11, 5))
    yield _varlen("sizes alibi", bf16, "varlen_kvpacked", sizes=SIZES, alibi="h", **GQA, **NO_EMPTY)
    for quantity, number in (("q", "nan"), ("k", "inf"), ("v", "inf"), ("v", "nan"), ("dout", "inf")):
        stray = (quantity, 1, number)
        yield _dense(f"{number} in {quantity} of one sequence", bf16, stray=stray, **GQA)
        yield _varlen(f"{number} in {quantity} of one sequence causal", fp16, stray=stray, causal=True, **NO_EMPTY)
    yield _cache_case("inf in v of one sequence", bf16, stray=("v", 0, "inf"))
    for poison, dtype in (("nan", fp16), ("inf", bf16)):
        yield _varlen(f"{poison} outside", dtype, poison=poison, gap=(3, 5), **NO_EMPTY)
        yield _varlen(f"{poison} outside causal", dtype, "varlen_qkvpacked", poison=poison, gap=(0, 4), causal=True)
        yield _cache_case(f"{poison} behind the end", dtype, seqlen_q=3, poison=poison, causal=True)
        padded: dict[str, Any] = {"leftpad": (10, 0, 3), "seqlens_k": (70, 4, 33)}
        yield _cache_case(f"{poison} behind the end leftpad", dtype, poison=poison, **padded)
        yield _cache_case(f"{poison} behind the end paged", dtype, poison=poison, page_size=16, capacity=112)


def _random(number: int) -> Case:
    """Return random problem ``number``, in a form that flash-attn takes. Its name holds all that rebuilds it."""
    problem = random_problem(number, PUBLIC_KINDS)
    problem = replace(problem, window_as="tuple", max_seqlen_as="int", return_attn_probs=True)
    return Case(f"random #{number} {problem!r}", problem)


def generated(quick: bool) -> list[Case]:
    """Return the named cases, and unless ``quick`` the random cases too."""
    return [*feature_cases(), *([] if quick else map(_random, range(RANDOM)))]
