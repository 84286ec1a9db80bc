"""Packed, cached and paged sequences are right however they are put together: alone, as a view, gathered, padded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_attn_compat import flash_attn_varlen_func, use_backend
from flash_attn_compat.engine import layout
from tests.support import close, cumulative, on_backend, on_general_backends, randn
from verify.examination import Examination
from verify.problems import Problem

LENGTHS = {
    "skewed": [(n, n) for n in (22, 300, 48, 1, 79)],
    "runs of one length": [(8, 8)] * 5 + [(30, 30)] * 3,
    "one length, apart": [(8, 8), (5, 5), (8, 8), (8, 9), (5, 5)],
    "empty on either side": [(5, 5), (0, 7), (7, 0), (9, 9)],
    "a decode step": [(1, n) for n in (12, 5, 9, 12)],
    "more keys than rows": [(4, 9), (9, 9), (3, 20)],
    "more rows than keys": [(9, 4), (20, 3), (9, 9), (9, 4)],
    "many": [(1 + i % 16, 1 + i % 16) for i in range(40)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": dict(window=(-1, 0)),
    "wide window": dict(window=(400, 0)),
    "window": dict(window=(5, 0), stray=("v", 1, "nan")),
    "alibi": dict(causal=True, alibi="bh"),
    "softcap and dropout": dict(softcap=5.0, dropout_p=0.3),
    "strided": dict(layouts=("contiguous", "strided_dim", "strided_dim", "one_value"), gap=(0, 3)),
}


@pytest.fixture(params=["cpu", "accelerator"])
def device_type(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose sequences are put together: on an accelerator they are padded, which is the same on a CPU."""
    if request.param == "accelerator":
        monkeypatch.setattr(layout, "_CPU", layout._ACCELERATOR)
    return str(request.param)


# Every other pair; which ones does not matter.
PACKED = [(one, other) for i, one in enumerate(LENGTHS) for j, other in enumerate(OPTIONS) if (i + j) % 2]


@on_general_backends
@pytest.mark.parametrize(("lengths", "options"), PACKED)
def test_packed_sequences_are_right(device_type: str, lengths: str, options: str, backend: str) -> None:
    seqlens_q, seqlens_k = zip(*LENGTHS[lengths])
    dtype = ("float32", "bfloat16", "float16")[len(options) % 3]
    problem = Problem("varlen", seqlens_q, seqlens_k, group=2, dtype=dtype, **OPTIONS[options])
    verdict = Examination(problem).judge(backend)
    assert not verdict.failures, verdict


CACHES = [
    Problem("kvcache", (3,) * 4, (12, 0, 40, 12), capacity=48, group=2, causal=True, poison="nan"),
    Problem("kvcache", (1,) * 4, (12, 5, 40, 12), capacity=40, alibi="bh", leftpad=(0, 3, 7, 0), poison="nan"),
    Problem("paged", (3, 9, 9, 1), (12, 9, 40, 12), group=2, window=(7, 2), page_size=16, poison="nan"),
]


@on_general_backends
@pytest.mark.parametrize("problem", CACHES, ids=repr)
def test_sequences_in_a_cache_are_right(device_type: str, problem: Problem, backend: str) -> None:
    verdict = Examination(problem).judge(backend)
    assert not verdict.failures, verdict


def test_an_accelerator_pads_and_a_cpu_does_not(monkeypatch: pytest.MonkeyPatch, device_type: str) -> None:
    padded = []
    block = layout.Layout.block
    monkeypatch.setattr(layout.Layout, "block", lambda self, plan: padded.append(plan.padded) or block(self, plan))
    Examination(replace(CACHES[0], poison="")).judge("chunked")
    assert any(padded) == (device_type == "accelerator") and padded


def test_one_length_after_another_is_read_and_written_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    indexed = []
    monkeypatch.setattr(layout, "_slots", lambda *arguments: indexed.append(arguments))
    q = torch.randn(60, 2, 16, requires_grad=True)
    cu_seqlens = cumulative(7, 23, 15, 15)
    with use_backend("sdpa"):
        flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 23, 23, causal=True).sum().backward()
    assert not indexed


@on_general_backends
def test_rows_of_padding_give_no_gradient_however_large_their_scores_would_be(device_type: str, backend: str) -> None:
    inputs = [randn(length, 1, 8).requires_grad_() for length in (103, 200, 200)]
    starts = cumulative(3, 100), cumulative(100, 100)
    out = on_backend(backend, flash_attn_varlen_func, *inputs, *starts, 100, 100, alibi_slopes=torch.tensor([-1.0]))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), inputs))


@on_general_backends
def test_gradients_of_a_page_that_sequences_share_add_up(device_type: str, backend: str) -> None:
    q, k, v = randn(60, 2, 8), randn(1, 16, 2, 8, seed=1), randn(1, 16, 2, 8, seed=2)
    found = []
    for block_table in (torch.zeros(2, 1, dtype=torch.int32), None):
        inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        keys = inputs[1:]
        if block_table is None:
            keys = [torch.cat([tensor[0], tensor[0, :10]]) for tensor in keys]
        out = on_backend(backend, flash_attn_varlen_func, inputs[0], *keys, cumulative(50, 10), cumulative(16, 10),
                         50, 16, block_table=block_table)  # fmt: skip
        found.append(torch.autograd.grad(out.square().sum(), inputs))
    for ours, right in zip(*found):
        close(ours, right, right.abs().max())
