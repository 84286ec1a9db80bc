"""verify locate names planted faults of forwards and backwards, and calls right kernels right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.forms.plain import some_of
from tests.verify import faulty, mutants
from verify.call import parameters
from verify.diagnosis import Setting
from verify.locate import Located, conclusion, locate
from verify.planted import planted
from verify.problems import Problem
from verify.steps import fused_rows, naive, online_tiles

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


def in_one_dtype(mistakes: Iterable[str]) -> list[Any]:
    """Each mistake in fp32 or fp16 in turn for each run of the suite, and in the other for the thorough ones."""
    rows = (
        (mistake, dtype)
        for index, mistake in enumerate(mistakes)
        for dtype in ("float32", "float16")[:: -1 if index % 2 else 1]
    )
    return some_of(rows, 2)


@pytest.mark.parametrize(("mistake", "dtype"), in_one_dtype(OF_THE_OUTPUT))
def test_a_mistake_of_the_forward_is_named(mistake: str, dtype: str) -> None:
    settings, *parts = OF_THE_OUTPUT[mistake]
    found = looked_at(faulty.kernel(mistake), backward=False, dtype=dtype, **settings)
    assert all(part in found.wrong["A"].sentences[-1] for part in parts) and set(found.wrong) == {"A"}


@pytest.mark.parametrize(("mistake", "dtype"), in_one_dtype(OF_THE_GRADIENTS))
def test_a_mistake_of_the_backward_is_named(mistake: str, dtype: str) -> None:
    settings, part = OF_THE_GRADIENTS[mistake]
    found = looked_at(faulty.kernel(mistake), dtype=dtype, **settings)
    assert found.first is None and set(found.misgraded) == {"A"}
    assert f"=> {part}" in " ".join(found.misgraded["A"].sentences)


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return faulty.kernel()(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def few_keys(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Rows with few keys get a smaller output, as if their row sum were at least 1.5."""
    out, keys = faulty.kernel()(q, k, v, causal), torch.arange(1, q.shape[1] + 1)
    return torch.where((keys < 3)[:, None, None], out / 2, out) if causal else out


@pytest.mark.parametrize(
    ("kernel", "settings", "words"),
    [
        (turned, {}, "it reads (batch, heads, seqlen, head_dim)"),
        (lambda q, k, v: faulty.kernel()(q, v, k), {}, "K and V are swapped"),
        (lambda q, k, v: faulty.kernel()(q, k, v).flip(2), {}, "heads hold the right values of others: head 0"),
        (lambda q, k, v: faulty.kernel()(q, k, v.flip(2)), {},
         "the weights are right, but heads read the V of others: head 0 that of key head 1"),
        (lambda q, k, v: faulty.kernel()(q, k.repeat_interleave(2, 2), v.repeat(1, 1, 2, 1)), GQA,
         "query head h reads V of key head h % nheads_k, not h // (nheads // nheads_k); its K is right"),
        (lambda q, k, v: faulty.kernel()(q, k.repeat(1, 1, 2, 1), v.repeat_interleave(2, 2)), GQA,
         "query head h reads K of key head h % nheads_k, not h // (nheads // nheads_k); its V is right"),
        (lambda q, k, v: 0.9 * faulty.kernel()(q, k, v), {}, "all of the output is 0.9 times the right one"),
        (few_keys, CAUSAL, "the causal mask: its diagonal, the tiles it skips, or rows with few keys"),
        (mutants.alibi_sign.flash_attn_func, {"alibi": "h"}, "the sign of the ALiBi bias is wrong"),
        (faulty.kernel(), {"alibi": "h"}, "the ALiBi bias is missing"),
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


@pytest.mark.parametrize(
    ("mistake", "settings", "said"),
    [
        ("output from tile 2", {}, "from key tile 2 on (key tiles of 32)"),
        ("own maximum", CAUSAL, "(FA2 algorithm 1, line 9) (key tiles of 32)"),
        ("inverted", CAUSAL, "not by exp(m - m_new) (key tiles of 32)"),
    ],
)
def test_a_mistake_is_named_for_key_tiles_of_another_size_than_was_told(
    mistake: str, settings: dict[str, Any], said: str
) -> None:
    found = looked_at(faulty.kernel(mistake), n=160, tile=64, backward=False, **settings)
    assert found.wrong["A"].sentences[-1].endswith(said)


def test_a_mistake_is_named_for_key_tiles_of_48() -> None:
    kernel = functools.partial(planted("output not rescaled"), block_rows=48, block_columns=48)
    found = looked_at(kernel, n=160, tile=64, backward=False)
    assert found.wrong["A"].sentences[-1].endswith("(FA2 algorithm 1, line 10) (key tiles of 48)")


@pytest.mark.parametrize("settings", [{}, {"keys": 130, **CAUSAL}, GQA, SOFTCAP, {"dtype": "float16"}], ids=str)
def test_a_right_kernel_is_the_same_in_its_output_and_its_gradients(settings: dict[str, Any]) -> None:
    found = looked_at(faulty.kernel(), **settings)
    assert found.is_same and conclusion(found)[-1].endswith("(compared: out, dq, dk and dv)")


@pytest.mark.parametrize(
    "step",
    [naive, fused_rows, functools.partial(online_tiles, block_columns=24)],
    ids=["naive", "fused_rows", "online_tiles"],
)
def test_a_right_step_of_the_ladder_is_the_same(step: Callable[..., Tensor]) -> None:
    assert looked_at(step, **CAUSAL, backward=False).is_same


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
        return faulty.kernel()(*rounded)

    found = looked_at(kernel)
    assert found.misgraded["A"].sentences == ["=> dq and dk and dv: rounded to fp16 somewhere, and no other mistake"]
