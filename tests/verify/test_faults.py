"""Planted faults: locate names them, and a verdict claims no feature in which a wrong kernel passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.forms.plain import in_turns
from tests.verify import mutants
from tests.verify.seven_kernels import LargerGradient
from verify.call import parameters
from verify.cases import Case, generated, plain
from verify.compare_rows import DECLINED, FAIL, PASS, RIGHT_TO, Row, feature_counts, standing
from verify.diagnosis import Setting
from verify.examination import Examination
from verify.features import features_of
from verify.implementations import Imported
from verify.locate import Located, conclusion, locate
from verify.planted import planted
from verify.problems import Problem

REFERENCE = ("reference", mutants.correct.flash_attn_func)
CAUSAL, GQA, SOFTCAP = {"causal": True}, {"group": 2}, {"softcap": 5.0}


def looked_at(function: Callable[..., Tensor], keys: int = 0, n: int = 100, tile: int = 32, **fields: Any) -> Located:
    given = {"nheads_k": 2, "head_dim": 16, "dtype": "float32", **fields}
    call = Problem(seqlens_q=(n,), seqlens_k=(keys or n,), **given).build()
    return locate([("mine", function), REFERENCE], Setting(call, tile, tile, "cpu"))


# A fault: options of the problem that shows it, and what it has to be called.
OF_THE_OUTPUT = {
    "output": ({}, "the output O is not rescaled to the new maximum as the row sum is (FA2 algorithm 1, line 10)"),
    "output from tile 2": ({}, "the output O is not rescaled to the new maximum", ", from key tile 2 on"),
    "row sum": (CAUSAL, "the row sum l is not rescaled to the new maximum as the output is (FA2 algorithm 1, line 9)"),
    "row sum from tile 2": ({}, "the row sum l is not rescaled to the new maximum", ", from key tile 2 on"),
    "neither": ({}, "neither the row sum l nor the output O is rescaled to the new maximum"),
    "neither from tile 2": (CAUSAL, "neither the row sum l nor the output O", ", from key tile 2 on"),
    "maximum at next tile": ({}, "the running maximum m of the key tiles before is lost"),
    "no remainder": ({}, "the last 4 keys, behind the last whole key tile of 32, are left out"),
    "padding counted": ({}, "the last key tile of 32 counts 28 keys beyond the end, with score 0"),
    "tile left out": ({"n": 128}, "key tile 1 is never counted"),
    "tile twice": ({"n": 128}, "key tile 2 is counted twice"),
    "no scale": ({}, "the scores are 4 times the right ones: the softmax scale is missing"),
    "exp2 of scores": ({}, "the scores are 0.693 times the right ones: exp2 takes the scores, which lack log2(e)"),
    "scale of a padded head_dim": ({"head_dim": 24}, "the softmax scale is of a head_dim padded to 32"),
    "no softcap": ({"softcap": 1.0}, "the softcap is missing"),
    "mask one too far": (CAUSAL, "the causal mask shows each row one key too many"),
    "diagonal hidden": (CAUSAL, "the causal mask hides the key on the diagonal"),
    "hidden keys are 0": (CAUSAL, "hidden keys get the score 0 instead of -inf"),
    "top left": ({"keys": 130, **CAUSAL}, "the causal mask is aligned to the top left"),
    "NaN in empty rows": ({"keys": 50, **CAUSAL}, "only rows that see no key are wrong"),
    "own maximum": ({}, "each key tile subtracts its own maximum"),
    "inverted": ({}, "the row sum l and the output O are rescaled by exp(m_new - m)"),
    "no division": (CAUSAL, "the output is not divided by the row sum l"),
    "tiled heads": (GQA, "query head h reads key head h % nheads_k"),
    "V of the tile before": ({"n": 128}, "each key tile gets the V of the key tile before"),
    "K of the tile before": ({"n": 128}, "each key tile gets the K of the key tile before"),
    "channels swapped": ({}, "the softmax is right, so the product with V is wrong"),
}
OF_THE_GRADIENTS = {
    "no delta": ({}, "dq and dk: rowsum(dout * out) is not subtracted from dP"),
    "delta added": (CAUSAL, "dq and dk: rowsum(dout * out) is added to dP, not subtracted"),
    "no row sum": ({}, "dq and dk and dv: P is exp(S - m) and lacks the row sum"),
    "no derivative": (SOFTCAP, "dq and dk: the softcap's derivative, 1 - tanh^2, is missing"),
    "half of delta": ({}, "dq and dk: rowsum(dout * out) is subtracted 0.5 times from dP"),
    "delta undivided": ({}, "dq and dk: rowsum(dout * out) is of an out that is not divided by the row sum"),
    "exp2 of a natural LSE": ({}, "dq and dk and dv: exp2 takes scores that lack log2(e), or an LSE that does"),
    "dq heads reversed": ({}, "dq: heads hold the right values of others"),
    "dq a tile down": ({"n": 128}, "dq: each row is written 32 rows too late"),
    "the first head of a group": (GQA, "dk and dv: only one query head of each group counts"),
    "one head of a group": (GQA, "dk and dv: only one query head of each group counts"),
    "backward without mask": (CAUSAL, "dq and dk and dv: the backward has no causal mask"),
    "backward mask one too far": (CAUSAL, "dq and dk and dv: the backward's causal mask shows one key too many"),
    "dq without scale": ({}, "dq: all of it is 4 times the right value: the softmax scale is missing"),
    "dq in log2": ({}, "dq: all of it is 0.6931 times the right value: ln 2 too many"),
    "dq overwritten": ({}, "dq: the share of key tiles 0, 1, 2 is lost"),
    "dk off": ({}, "dk: all of it is 1.05 times the right value"),
    "dk scaled twice": (GQA, "dk: all of it is 0.25 times the right value: the softmax scale is applied twice"),
    "dv negative": ({}, "dv: all of it is -1 times the right value: the sign is wrong"),
    "query tile twice": (CAUSAL, "dv: the share of query tile 1 is counted twice"),
    "dk and dv swapped": ({}, "dk: it has the right values of dv"),
    "races": ({}, "dq: two calls differ: a race between blocks"),
}


@pytest.mark.parametrize(("mistake", "dtype"), in_turns(OF_THE_OUTPUT, ("float32", "float16")))
def test_a_mistake_of_the_forward_is_named(mistake: str, dtype: str) -> None:
    settings, *parts = OF_THE_OUTPUT[mistake]
    found = looked_at(mutants.kernel(mistake), backward=False, dtype=dtype, **settings)
    assert all(part in found.wrong["A"].sentences[-1] for part in parts) and set(found.wrong) == {"A"}


@pytest.mark.parametrize(("mistake", "dtype"), in_turns(OF_THE_GRADIENTS, ("float32", "float16")))
def test_a_mistake_of_the_backward_is_named(mistake: str, dtype: str) -> None:
    settings, part = OF_THE_GRADIENTS[mistake]
    found = looked_at(mutants.kernel(mistake), dtype=dtype, **settings)
    assert found.first is None and set(found.misgraded) == {"A"}
    assert f"=> {part}" in " ".join(found.misgraded["A"].sentences)


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mutants.kernel()(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def few_keys(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Rows with few keys get a smaller output, as if their row sum were at least 1.5."""
    out, keys = mutants.kernel()(q, k, v, causal), torch.arange(1, q.shape[1] + 1)
    return torch.where((keys < 3)[:, None, None], out / 2, out) if causal else out


@pytest.mark.parametrize(
    ("kernel", "settings", "words"),
    [
        (turned, {}, "it reads (batch, heads, seqlen, head_dim)"),
        (lambda q, k, v: mutants.kernel()(q, v, k), {}, "K and V are swapped"),
        (lambda q, k, v: mutants.kernel()(q, k, v).flip(2), {}, "heads hold the right values of others: head 0"),
        (lambda q, k, v: mutants.kernel()(q, k, v.flip(2)), {},
         "the weights are right, but heads read the V of others: head 0 that of key head 1"),
        (lambda q, k, v: mutants.kernel()(q, k.repeat_interleave(2, 2), v.repeat(1, 1, 2, 1)), GQA,
         "query head h reads V of key head h % nheads_k, not h // (nheads // nheads_k); its K is right"),
        (lambda q, k, v: mutants.kernel()(q, k.repeat(1, 1, 2, 1), v.repeat_interleave(2, 2)), GQA,
         "query head h reads K of key head h % nheads_k, not h // (nheads // nheads_k); its V is right"),
        (lambda q, k, v: 0.9 * mutants.kernel()(q, k, v), {}, "all of the output is 0.9 times the right one"),
        (few_keys, CAUSAL, "the causal mask: its diagonal, the tiles it skips, or rows with few keys"),
        (mutants.alibi_sign.flash_attn_func, {"alibi": "h"}, "the sign of the ALiBi bias is wrong"),
        (mutants.kernel(), {"alibi": "h"}, "the ALiBi bias is missing"),
        (mutants.softcap_before_scale.flash_attn_func, SOFTCAP, "the softcap comes before the softmax scale"),
        (mutants.left_edge_one_too_far.flash_attn_func, {"window": (20, 9)}, "left side shows one key too many"),
        (mutants.right_edge_one_too_near.flash_attn_func, {"window": (20, 9)}, "right side shows one key too few"),
    ],
)  # fmt: skip
def test_a_mistake_in_options_heads_or_layout_is_named(
    kernel: Callable[..., Tensor], settings: dict[str, Any], words: str
) -> None:
    found = looked_at(taking_options(kernel), backward=False, **settings)
    assert words in found.wrong["A"].sentences[-1]


def taking_options(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the kernel with every option of flash_attn_func; it gets those that it knows."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return kernel(q, k, v, **{name: value for name, value in options.items() if name in parameters(kernel)})

    return attention


TILES_OF_48 = functools.partial(planted("output not rescaled"), block_rows=48, block_columns=48)


@pytest.mark.parametrize(
    ("kernel", "settings", "said"),
    [
        (mutants.kernel("output from tile 2"), {}, "from key tile 2 on (key tiles of 32)"),
        (mutants.kernel("own maximum"), CAUSAL, "(FA2 algorithm 1, line 9) (key tiles of 32)"),
        (mutants.kernel("inverted"), CAUSAL, "not by exp(m - m_new) (key tiles of 32)"),
        (TILES_OF_48, {}, "(FA2 algorithm 1, line 10) (key tiles of 48)"),
    ],
)
def test_a_mistake_is_named_for_key_tiles_of_another_size_than_was_told(
    kernel: Callable[..., Tensor], settings: dict[str, Any], said: str
) -> None:
    found = looked_at(kernel, n=160, tile=64, backward=False, **settings)
    assert found.wrong["A"].sentences[-1].endswith(said)


@pytest.mark.parametrize("settings", [{}, {"keys": 130, **CAUSAL}, GQA, SOFTCAP, {"dtype": "float16"}], ids=str)
def test_a_right_kernel_is_the_same_in_its_output_and_its_gradients(settings: dict[str, Any]) -> None:
    found = looked_at(mutants.kernel(), **settings)
    assert found.is_same and conclusion(found)[-1].endswith("(compared: out, dq, dk and dv)")


class _HalfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return upstream[0].half().float()


def test_gradients_that_are_rounded_and_otherwise_right_are_said_to_be() -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rounded = (_HalfGradients.apply(x) for x in (q, k, v))  # type: ignore[no-untyped-call]  # as torch types it
        return mutants.kernel()(*rounded)

    found = looked_at(kernel)
    assert found.misgraded["A"].sentences == ["=> dq and dk and dv: rounded to fp16 somewhere, and no other mistake"]


# ---------------------------------------------------------------- kernels that are wrong in one feature

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
        lambda q, k, v, **options: right(q, LargerGradient.apply(k), v, **options),
        lambda q, k, v, **options: right(q, k, LargerGradient.apply(v), **options),
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
