"""Each feature that verify --quick claims as judged has a case that a kernel wrong in this feature alone fails, for the
kinds of kernels that the commonest declines leave over, without flash-attn's recorded answers, as in a wheel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.verify import mutants
from verify.cases import Case, generated, plain
from verify.compare_rows import DECLINED, FAIL, PASS, RIGHT_TO, Row, feature_counts, standing
from verify.examination import Examination
from verify.features import features_of
from verify.implementations import Imported

Attention = Callable[..., Tensor]
MOST_KEYS = 256  # longer problems show nothing more here


# ---- right kernels of one kind ---------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """The calls that a kernel serves; it declines all others."""

    heads: bool = False  # equal heads alone
    gradients: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    dims: tuple[int, ...] = ()

    def of(self, attend: Attention) -> Attention:
        @functools.wraps(attend)
        def attention(q, k, v, **options: Any):
            if self.heads and q.shape[2] != k.shape[2]:
                raise NotImplementedError("grouped heads")
            if q.dtype not in self.dtypes or (self.dims and q.shape[-1] not in self.dims):
                raise NotImplementedError("this dtype or head_dim")
            if v.shape[-1] != q.shape[-1]:
                raise ValueError("one head_dim")
            if not self.gradients:
                q, k, v = q.detach(), k.detach(), v.detach()
            return attend(q, k, v, **options)

        return attention


ALL = "all declines at once"
HALF, SIZES = (torch.float16,), (64, 128)
KINDS = {
    "dense": Kind(),
    "equal heads": Kind(heads=True),
    "forward only": Kind(gradients=False),
    "fp16": Kind(dtypes=HALF),
    "head_dim 64 and 128": Kind(dims=SIZES),
    ALL: Kind(True, False, HALF, SIZES),
}
right = mutants.correct.flash_attn_func


# ---- one fault a feature ---------------------------------------------------------------------------------------------


def seldom(applies: Callable[..., bool], wrong: Attention) -> Attention:
    """Return a kernel that is wrong in the calls to which something applies."""

    @functools.wraps(right)
    def attention(q, k, v, **options: Any):
        return (wrong if applies(q, k, v, options) else right)(q, k, v, **options)

    return attention


def changed(out: Callable[[Tensor], Tensor]) -> Attention:
    """Return a kernel with another output, and the right softmax_lse."""

    def attention(q, k, v, **options: Any):
        got = right(q, k, v, **options)
        return (out(got[0]), *got[1:]) if isinstance(got, tuple) else out(got)

    return attention


def given(**change: Callable[[Tensor], Tensor]) -> Attention:
    """Return a kernel that sees other inputs."""

    def attention(q, k, v, **options: Any):
        inputs = {name: change.get(name, lambda x: x)(x) for name, x in (("q", q), ("k", k), ("v", v))}
        return right(**inputs, **options)

    return attention


def is_masked(options: dict[str, Any]) -> bool:
    return bool(options.get("causal")) or tuple(options.get("window_size", (-1, -1))) != (-1, -1)


def nan_in_rows(which: Callable[[int, int], Tensor]) -> Attention:
    def attention(q, k, v, **options: Any):
        rows = which(q.shape[1], k.shape[1])[:, None, None]
        return changed(lambda out: torch.where(rows, torch.nan, out))(q, k, v, **options)

    return attention


def reading_memory_as_if(stride: Callable[[Tensor], tuple[int, ...]]) -> Attention:
    def read(x: Tensor) -> Tensor:
        strides = stride(x)
        last = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, strides))
        fits = x.numel() and last < x.untyped_storage().nbytes() // x.element_size()
        return x.as_strided(x.shape, strides) if fits else x

    return given(q=read, k=read, v=read)


def without_last(count: Callable[[int], int]) -> Attention:
    """Return a kernel whose last values are 0: keys that it does not read."""

    def attention(q, k, v, **options: Any):
        kept = torch.arange(v.shape[1]) < v.shape[1] - count(v.shape[1])
        return given(v=lambda x: x * kept[:, None, None].to(x.dtype))(q, k, v, **options)

    return attention


def spreads(q, k, v, **options: Any):
    """0 times the numbers of all sequences is added."""
    zero = 0 * sum(x.detach().float().sum() for x in (q, k, v))
    return changed(lambda out: out + zero.to(out.dtype))(q, k, v, **options)


class _Grown(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        return 1.05 * upstream


def mutant(name: str) -> Attention:
    return getattr(mutants, name).flash_attn_func


def of_dtype(dtype: torch.dtype, coarse: torch.dtype) -> Attention:
    return seldom(lambda q, *_: q.dtype == dtype, changed(lambda out: out.to(coarse).to(out.dtype)))


FAULTS: dict[str, list[Attention]] = {
    "fp16": [of_dtype(torch.float16, torch.float8_e4m3fn)],
    "bf16": [of_dtype(torch.bfloat16, torch.float8_e4m3fn)],
    "fp32": [of_dtype(torch.float32, torch.float16)],
    "fp64": [of_dtype(torch.float64, torch.float16)],
    "head_dim 64": [seldom(lambda q, *_: q.shape[-1] == 64, given(q=lambda x: 1.06 * x))],
    "head_dim 128": [
        seldom(lambda q, *_: q.shape[-1] == 128, given(q=lambda x: x * (torch.arange(128) < 64).to(x.dtype)))
    ],
    "another head_dim": [mutant("scale_of_padded_head_dim")],
    "MHA": [seldom(lambda q, k, *_: q.shape[2] == k.shape[2], given(v=lambda x: x.flip(2)))],
    "GQA or MQA": [mutant("tiled_heads")],
    "no mask": [seldom(lambda q, k, v, options: not is_masked(options), without_last(lambda n: 1))],
    "causal": [
        seldom(lambda q, k, v, options: options.get("causal"), mutant("right_edge_one_too_near")),
        seldom(lambda q, k, v, options: options.get("causal"), mutant("right_edge_one_too_far")),
    ],
    "window": [
        mutant("left_edge_one_too_far"),
        mutant("left_edge_one_too_near"),
        seldom(lambda q, k, v, options: not options.get("causal"), mutant("right_edge_one_too_far")),
        seldom(lambda q, k, v, options: not options.get("causal"), mutant("right_edge_one_too_near")),
    ],
    "lengths in 64s": [seldom(lambda q, k, *_: k.shape[1] % 64 == 0, without_last(lambda n: 1))],
    "other lengths": [without_last(lambda n: n % 64 if n > 64 else 0), without_last(lambda n: n % 2)],
    "seqlen_q other than seqlen_k": [
        mutant("top_left_causal"),
        seldom(lambda q, k, *_: q.shape[1] < k.shape[1], without_last(lambda n: 1)),
        seldom(lambda q, k, *_: q.shape[1] > k.shape[1], without_last(lambda n: 1)),
    ],
    "rows without keys": [
        mutant("dead_rows_average"),
        seldom(
            lambda q, k, v, options: k.shape[1] and options.get("causal"),
            nan_in_rows(lambda rows, keys: torch.arange(rows) < rows - keys),
        ),
    ],
    "no keys at all": [
        seldom(lambda q, k, *_: not k.shape[1], nan_in_rows(lambda rows, keys: torch.ones(rows, dtype=torch.bool)))
    ],
    "dense": [changed(lambda out: 1.02 * out)],
    "softmax_scale": [lambda q, k, v, **options: right(q, k, v, **{**options, "softmax_scale": None})],
    "softcap": [
        mutant("softcap_before_scale"),
        lambda q, k, v, **options: right(q, k, v, **{**options, "softcap": 0.0}),
    ],
    "ALiBi": [mutant("alibi_sign"), lambda q, k, v, **options: right(q, k, v, **{**options, "alibi_slopes": None})],
    "dropout": [mutant("dropout_unscaled"), mutant("dropout_of_scores")],
    "strided inputs": [
        reading_memory_as_if(lambda x: torch.empty(x.shape, device="meta").stride()),
        reading_memory_as_if(lambda x: (*x.stride()[:-1], 1)),
        reading_memory_as_if(lambda x: (x.stride(0), x.stride(1), x.shape[3] * x.stride(3), x.stride(3))),
    ],
    "large scores": [mutant("no_maximum_subtracted")],
    "sizes far apart": [mutant("neighbouring_head_leaks")],
    "NaN or infinity": [spreads],
    "output": [changed(lambda out: 1.02 * out)],
    "softmax_lse": [mutant("log2_lse"), mutant("dead_rows_minus_inf")],
    "gradients": [
        mutant("unwindowed_backward"),
        lambda q, k, v, **options: right(q, _Grown.apply(k), v, **options),
        lambda q, k, v, **options: right(q, k, _Grown.apply(v), **options),
    ],
}
# Of a kernel with all the declines at once.
NARROW = [
    "fp16", "head_dim 64", "head_dim 128", "MHA", "no mask", "causal", "window", "lengths in 64s", "other lengths",
    "seqlen_q other than seqlen_k", "rows without keys", "no keys at all", "dense", "softmax_scale", "softcap", "ALiBi",
    "dropout", "strided inputs", "large scores", "sizes far apart", "NaN or infinity", "output", "softmax_lse",
]  # fmt: skip


# ---- judging ---------------------------------------------------------------------------------------------------------


class Problems:
    """The quick problems of dense kernels, each built once."""

    def __init__(self) -> None:
        cases = [*plain(quick=True), *generated(quick=True)]
        self.cases = [
            case for case in cases if case.problem.kind == "dense" and max(case.problem.seqlens_k) <= MOST_KEYS
        ]
        self.built: dict[str, Examination] = {}
        self.rows_of: dict[str, list[Row]] = {}

    def row(self, case: Case, kernel: Attention) -> Row:
        examination = self.built.get(case.name) or self.built.setdefault(case.name, Examination(case.problem))
        verdict = examination.examine(Imported("mine", kernel), None, twice=True, may_lack_gradients=True)
        return Row(case, "mine", "cpu", verdict)

    def of_kind(self, name: str) -> list[Row]:
        """Return the rows of the right kernel of a kind."""
        if name not in self.rows_of:
            self.rows_of[name] = [self.row(case, KINDS[name].of(right)) for case in self.cases]
        return self.rows_of[name]

    def judged(self, kind: str) -> list[str]:
        """Return the features that the verdict on the right kernel of a kind claims as judged."""
        counts = feature_counts(self.of_kind(kind))
        return [name for name, count in counts.items() if standing(count) in (PASS, RIGHT_TO)]

    def finds(self, kernel: Attention, feature: str, kind: str) -> bool:
        """Whether a case with the feature that this kind of kernel serves is wrong."""
        served = [row.case for row in self.of_kind(kind) if row.outcome != DECLINED]
        telling = [case for case in served if feature in features_of(case)] or served
        return any(self.row(case, KINDS[kind].of(kernel)).outcome == FAIL for case in telling)


@pytest.fixture(scope="module")
def problems() -> Problems:
    return Problems()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == ALL else [pytest.mark.thorough]) for kind in KINDS]
)
def test_a_right_kernel_of_each_kind_is_right_in_every_case_that_it_serves(kind: str, problems: Problems) -> None:
    assert {row.outcome for row in problems.of_kind(kind)} <= {PASS, RIGHT_TO, DECLINED}
    if kind == ALL:
        assert problems.judged(kind) == NARROW


def faults(features: Iterable[str]) -> list[Any]:
    return [
        pytest.param(feature, index, id=f"{feature}-{index}")
        for feature in features
        for index in range(len(FAULTS[feature]))
    ]


@pytest.mark.parametrize(("feature", "index"), faults(NARROW))
def test_a_kernel_of_few_features_that_is_wrong_in_one_of_them_alone_is_found(feature, index, problems) -> None:
    assert problems.finds(FAULTS[feature][index], feature, ALL)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != ALL])
@pytest.mark.parametrize(("feature", "index"), faults(FAULTS))
def test_a_kernel_of_each_kind_that_is_wrong_in_one_feature_alone_is_found(feature, index, kind, problems) -> None:
    assert feature not in problems.judged(kind) or problems.finds(FAULTS[feature][index], feature, kind)
