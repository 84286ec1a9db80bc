"""torch.nn.attention.varlen on a CPU after patch(varlen_attn=True), against attention written out."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat.dropin import patch, unpatch
from tests.dropin.test_detection import CALL
from tests.forms.inputs import cumulative, randn
from tests.forms.plain import attention, check_function
from tests.tools.interpreters import forked

pytest.importorskip("torch.nn.attention.varlen", reason="torch.nn.attention.varlen came with torch 2.10")
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn

H, HK, D = 4, 2, 16
LENGTHS = (3, 6, 1)
STARTS = cumulative(*LENGTHS)
arguments = inspect.signature(varlen_attn).parameters


def needs(*names: str) -> Any:
    missing = [name for name in names if name not in arguments]
    return pytest.mark.skipif(bool(missing), reason=f"this torch's varlen_attn has no {missing}")


@pytest.fixture
def served() -> None:
    patch(varlen_attn=True)


def each(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    parts = zip(*(t[None].split(LENGTHS, dim=1) for t in (q, k, v)))
    return torch.cat([attention(*part, **options)[0] for part in parts])


def inputs(dtype: torch.dtype = torch.float32, heads_k: int = H) -> tuple[Tensor, Tensor, Tensor]:
    total = sum(LENGTHS)
    return tuple(randn(total, h, D, seed=s, dtype=dtype) for s, h in enumerate((H, heads_k, heads_k)))  # type: ignore[return-value]


def test_without_being_asked_nothing_changes() -> None:
    patch()
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen_attn(*inputs(torch.float16), STARTS, STARTS, 6, 6)


# options of varlen_attn, and of attention; causal is a window of (-1, 0) here
OPTIONS: list[Any] = [
    ({}, {}),
    *(
        pytest.param({"window_size": window}, {"window": window}, marks=needs("window_size"))
        for window in ((-1, 0), (2, 0), (1, 2))
    ),
    pytest.param({"scale": 0.3, "enable_gqa": True}, {"scale": 0.3}, marks=needs("enable_gqa")),
]


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("options", "plain"), OPTIONS)
def test_values_and_gradients(dtype: torch.dtype, options: dict[str, Any], plain: dict[str, Any]) -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(q, k, v, STARTS, STARTS, 6, 6, **options)

    given = inputs(dtype, HK if "enable_gqa" in options else H)
    check_function(ours, lambda *given: each(*given, **plain), *given, epsilons=4)


@pytest.mark.usefixtures("served")
def test_the_log_sum_exp_comes_along() -> None:
    q, k, v = inputs()
    out, lse = varlen_attn(q, k, v, STARTS, STARTS, 6, 6, return_aux=AuxRequest(lse=True))
    parts = zip(q.split(LENGTHS), k.split(LENGTHS))
    expected = [torch.einsum("thd,shd->hts", a, b).mul(D**-0.5).logsumexp(-1) for a, b in parts]
    torch.testing.assert_close(lse, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, each(q, k, v), rtol=1e-4, atol=1e-5)


@needs("block_table")
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("with_starts", [False, True])
def test_pages_and_used_lengths_are_read(with_starts: bool) -> None:
    page, used = 256, torch.tensor([5, 300], dtype=torch.int32)
    q = randn(3, H, D)
    keys, values = randn(4, page, H, D, seed=1), randn(4, page, H, D, seed=2)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    starts_q, starts_k = cumulative(1, 2), cumulative(5, 300) if with_starts else None
    out = varlen_attn(
        q, keys, values, starts_q, starts_k, 2, 300, window_size=(-1, 0), seqused_k=used, block_table=table
    )
    for i, rows in enumerate(q.split((1, 2))):
        k, v = (t[table[i]].flatten(0, 1)[None, : used[i]] for t in (keys, values))
        right = attention(rows[None], k, v, window=(-1, 0))[0]
        torch.testing.assert_close(out.split((1, 2))[i], right, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("served")
@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has no varlen_attn_out")
def test_a_given_output_is_written() -> None:
    q, k, v = inputs()
    out = torch.full_like(q, 7.0)
    assert varlen.varlen_attn_out(out, q, k, v, STARTS, STARTS, 6, 6) is out
    torch.testing.assert_close(out, each(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("served")
@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has no varlen_attn_out")
def test_a_given_output_that_overlaps_itself_is_refused_unwritten() -> None:
    q, k, v = inputs()
    out = torch.zeros_like(q)
    out = out.as_strided(out.shape, (out.stride(0) - 1, *out.stride()[1:]))
    with pytest.raises(RuntimeError, match="out must not overlap itself"):
        varlen.varlen_attn_out(out, q, k, v, STARTS, STARTS, 6, 6)
    assert not out.any()


@pytest.mark.usefixtures("served")
def test_a_compiled_graph_holds_the_operator() -> None:
    leaves = [t.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in inputs()]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(q, k, v, STARTS, STARTS, 6, 6).sin().sum()

    expected = torch.autograd.grad(each(*leaves).sin().sum(), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for found, right in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@needs("num_splits")
@pytest.mark.usefixtures("served")
def test_a_promise_that_we_do_not_keep_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="does not promise the same bits in every batch"):
        varlen_attn(*inputs(), STARTS, STARTS, 6, 6, num_splits=1)


def test_it_ends_with_unpatch_and_can_be_asked_for_later() -> None:
    patch()
    patch(varlen_attn=True)
    varlen_attn(*inputs(), STARTS, STARTS, 6, 6)
    unpatch()
    with pytest.raises(NotImplementedError):
        varlen_attn(*inputs(torch.float16), STARTS, STARTS, 6, 6)


@pytest.mark.parametrize("variables", [{}, {"FLASH_ATTN_COMPAT_VARLEN_ATTN": "1"}], ids=["asked", "by the variable"])
def test_it_is_served_where_it_is_imported_later(variables: dict[str, str]) -> None:
    answer = forked(f"import flash_attn_compat as c; c.patch(varlen_attn={not variables}); {CALL}", **variables)
    assert answer.stdout.strip() == "16.0", answer.stderr
