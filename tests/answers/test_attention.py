"""Values, LSE, gradients and caches as flash-attn promises them: the judge examines every general backend.

Each (sequence, head) is held against fp64; what a call must not read is NaN, what it must not write is looked at.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_varlen_func
from flash_attn_compat.backends import sdpa, varlen
from flash_attn_compat.core.call import BackwardInputs
from tests.forms.inputs import PROBLEMS, TOGETHER, cumulative, randn
from tests.forms.plain import some_of
from tests.forms.support import GENERAL, close, on_backend, on_general_backends
from tests.fuzz import must_serve
from verify.examination import Examination
from verify.problems import Problem


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_answer_is_right_and_nothing_else_is_touched(name: str) -> None:
    check(PROBLEMS[name], GENERAL[1:] if name.startswith("long") else GENERAL)


# ---------------------------------------------------------------- sequences alone, as a view, gathered, padded


@pytest.fixture(params=["cpu", "accelerator"])
def joining(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How sequences are joined: padded on an accelerator, where SDPA's gradients take no LSE."""
    if request.param == "accelerator":
        if torch.__version__ < "2.5":
            pytest.skip("SDPA's gradients are nan there, so that chunked serves")
        monkeypatch.setattr(varlen, "_CPU", varlen._ACCELERATOR)
        monkeypatch.setattr(sdpa, "_pays_to_split", lambda block: False)
        monkeypatch.setattr(sdpa, "_compute_gradients", gradients_without_lse)


def gradients_without_lse(
    q: Tensor, k: Tensor, v: Tensor, upstream: BackwardInputs, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    with torch.enable_grad():
        return torch.autograd.grad(sdpa._call_public_sdpa(q, k, v, causal, bias, scale), (q, k, v), upstream.dout)


@pytest.mark.parametrize(("joining", "name"), [
    *(("accelerator", name) for name in TOGETHER), *some_of((("cpu", name) for name in TOGETHER), 2),
], indirect=["joining"])  # fmt: skip
def test_sequences_are_right_however_they_are_put_together(joining: None, name: str) -> None:
    check(TOGETHER[name])


@pytest.mark.usefixtures("joining")
@on_general_backends
def test_rows_of_padding_give_no_gradient_however_large_their_scores_would_be(backend: str) -> None:
    inputs = [randn(length, 1, 8).requires_grad_() for length in (103, 200, 200)]
    starts = cumulative(3, 100), cumulative(100, 100)
    out = on_backend(backend, flash_attn_varlen_func, *inputs, *starts, 100, 100, alibi_slopes=torch.tensor([-1.0]))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.usefixtures("joining")
@on_general_backends
def test_of_a_page_that_sequences_share_gradients_add_up(backend: str) -> None:
    tensors, found = (randn(60, 2, 8), randn(1, 16, 2, 8, seed=1), randn(1, 16, 2, 8, seed=2)), []
    for table in (torch.zeros(2, 1, dtype=torch.int32), None):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        keys = inputs[1:] if table is not None else [torch.cat([x[0], x[0, :10]]) for x in inputs[1:]]
        lengths = cumulative(50, 10), cumulative(16, 10), 50, 16
        out = on_backend(backend, flash_attn_varlen_func, inputs[0], *keys, *lengths, block_table=table)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for ours, right in zip(*found):
        close(ours, right, right.detach().abs().max())


def check(problem: Problem, backends: tuple[str, ...] = GENERAL) -> None:
    examination = Examination(problem)
    for backend in backends:
        verdict = examination.judge(backend)
        assert not verdict.failures, (backend, verdict)
        assert not verdict.refused or not must_serve(problem, backend), (backend, verdict)
