"""What torch_efficient refuses, how it makes a launch of a call, and what its kernel gets wrong, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_attn_compat import flash_attn_func, flash_attn_interface, flash_attn_varlen_func, use_backend
from flash_attn_compat.backends.torch_efficient import TorchEfficient
from flash_attn_compat.engine.features import Feature, Traits
from tests import efficient_kernels
from tests.support import cumulative, qkv
from verify.drawing import random_problem
from verify.examination import Examination, Verdict
from verify.problems import Problem

PLAIN = Traits(
    device_type="cuda", capability=(7, 5), dtype=torch.float16, head_dim=64, head_dim_v=64, sq_vs_sk="=",
    features=0,
)  # fmt: skip


ONE_LAUNCH = (
    "ALIBI", "SOFTCAP", "WINDOW_LEFT", "WINDOW_RIGHT", "SEQUSED_K", "PAGED", "SHARED_DROPOUT_MASK"
)  # fmt: skip


@pytest.mark.parametrize(
    ("features", "changes", "words"),
    [
        (Feature.VARLEN, {"sq_vs_sk": "?"}, "cu_seqlens_q and cu_seqlens_k"),
        (Feature.VARLEN | Feature.CAUSAL | Feature.BACKWARD, {"sq_vs_sk": "="}, None),
        (Feature.CAUSAL, {"sq_vs_sk": ">"}, "no key"),
        (0, {"sq_vs_sk": ">"}, None),
        (Feature.CAUSAL, {"sq_vs_sk": "<"}, None),
        (0, {"dtype": torch.bfloat16}, "8.0"),
        (0, {"dtype": torch.bfloat16, "capability": (8, 0)}, None),
        *((Feature[name], {}, "") for name in ONE_LAUNCH),  # what takes more than one launch is left to others
    ],
)
def test_what_its_kernel_gets_wrong_or_lacks_is_a_reason(features: int, changes: Any, words: str | None) -> None:
    reasons = TorchEfficient().reasons(PLAIN._replace(features=int(features), **changes))
    assert reasons == [] if words is None else any(words in reason for reason in reasons)


# ---------------------------------------------------------------- launches of a stand-in with the kernel's traps


@pytest.fixture
def kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    efficient_kernels.install(monkeypatch)


def examine(problem: Problem) -> Verdict:
    examination = Examination(problem)
    # Half precision is the GPU's: an LSE may be as far off as its rounded operands allow.
    examination.device = "cuda"
    return examination.judge("torch_efficient")


@pytest.mark.usefixtures("kernels_on_a_cpu")
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_problems_are_right_or_refused(first: int) -> None:
    served = 0
    for number in range(first, first + 50):
        problem = random_problem(number)
        if problem.dropout_p <= 0:  # the stand-in has none
            verdict = examine(problem)
            assert not verdict.failures, (problem, verdict)
            served += not verdict.refused
    assert served


@pytest.mark.usefixtures("kernels_on_a_cpu")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [("dense", ((40, 40), (65, 65))), ("dense", ((90,), (33,))), ("varlen", ((9, 0, 40), (9, 0, 40)))],
)
def test_grouped_heads_are_right_under_every_mask_it_has(
    kind: str, lengths: tuple[tuple[int, ...], ...], window: tuple[int, int], dtype: str
) -> None:
    problem = Problem(kind, *lengths, window=window, group=2, nheads_k=2, dtype=dtype)
    verdict = examine(problem)
    assert not verdict.failures, verdict
    assert bool(verdict.refused) == (window == (-1, 0) and lengths == ((90,), (33,)))


@pytest.mark.usefixtures("kernels_on_a_cpu")
@pytest.mark.parametrize("packed", [False, True])
def test_its_backward_takes_an_out_and_an_lse_that_another_forward_left(packed: bool) -> None:
    tensors, lengths, kind = qkv(b=2, sq=40, sk=40, h=4, hk=2, dtype=torch.float16), (), "_flash_attn"
    if packed:
        starts = cumulative(9, 71)
        tensors, lengths, kind = [x.flatten(0, 1) for x in tensors], (starts, starts, 71, 71), "_flash_attn_varlen"
    options = (0.0, 0.25, True, -1, -1, 0.0, None, False)
    with use_backend("reference"):
        out, lse, *_ = getattr(flash_attn_interface, f"{kind}_forward")(*tensors, *lengths, *options)
    out, found = out.transpose(-3, -2).contiguous().transpose(-3, -2), {}
    for backend in ("torch_efficient", "reference"):
        found[backend] = [torch.empty_like(x) for x in tensors]
        with use_backend(backend):
            given = (torch.ones_like(out), *tensors, out, lse, *found[backend])
            getattr(flash_attn_interface, f"{kind}_backward")(*given, *lengths, *options)
    for ours, right in zip(*found.values()):
        torch.testing.assert_close(ours.float(), right.float(), rtol=4e-3, atol=4e-3)


# ---------------------------------------------------------------- on a GPU


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.gpu
def test_gradients_of_grouped_heads_do_not_depend_on_how_out_is_strided():
    q, k, v = random(1, 128, 4, 64).requires_grad_(), random(1, 128, 1, 64).requires_grad_(), random(1, 128, 1, 64)
    dout = random(1, 128, 4, 64)
    found = {}
    for name in ("torch_efficient", "chunked"):
        with use_backend(name):
            found[name] = torch.autograd.grad(flash_attn_func(q, k, v, causal=True), (q, k), dout)
    assert all((a - b).abs().max() < 2e-2 for a, b in zip(*found.values()))


@pytest.mark.gpu
def test_packed_calls_can_be_captured_in_a_cuda_graph():
    q, k, v = random(96, 4, 64), random(96, 4, 64), random(96, 4, 64)
    starts = torch.tensor([0, 33, 96], dtype=torch.int32, device="cuda")

    def call():
        with use_backend("torch_efficient"):
            return flash_attn_varlen_func(q, k, v, starts, starts, 63, 63, causal=True)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    q.copy_(random(96, 4, 64))
    graph.replay()
    torch.testing.assert_close(captured, call())
