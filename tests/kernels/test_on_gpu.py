"""The fused backend on a GPU. Set FLASH_ATTN_COMPAT_CAPABILITY=7.5 for Turing's code."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_interface, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, HEAD_DIMS
from flash_attn_compat.backends.fused.judging import faults
from flash_attn_compat.backends.fused.launching import grids, launcher, workspaces
from flash_attn_compat.dispatch import call_cache
from tests import fused_coverage
from tests.forms.plain import pairwise
from tests.forms.support import on_backend
from verify.examination import Examination
from verify.problems import Problem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("half_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_variant_is_right(head_dim: int, half_dtype: str) -> None:
    wrong = []
    for name, kind, check in fused_coverage.checks(torch.device("cuda", torch.cuda.current_device())):
        if head_dim == kind.D and (kind.type == FP16) == (half_dtype == "float16"):
            try:
                check()
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


# ---- problems


def half(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to("cuda", torch.float16)


def close(got: Tensor, right: Tensor, bound: float = 4e-3) -> None:
    error = float((got.double() - right.double()).abs().max())
    assert error <= bound, f"off by {error:.2g}"


COMMON: dict[str, Any] = dict(
    nheads_k=2, group=2, head_dim=64, causal=True, dtype="float16", return_attn_probs=False, backward=False
)
PROBLEMS = {
    "dense": Problem("dense", (100, 100), (100, 100), **COMMON),
    "varlen": Problem("varlen", (30, 70), (30, 70), **COMMON),
    "varlen, other keys": Problem("varlen", (30, 70), (50, 40), **COMMON),
    "decode with append": Problem("kvcache", (1, 1), (5, 700), capacity=1000, new_keys=1, rotary_dim=32, **COMMON),
    # Few enough blocks for several to share the keys of one tile.
    "chunk of a prompt": Problem("kvcache", (70, 70), (300, 2900), capacity=3000, **COMMON),
}


def on_gpu(problem: Problem) -> tuple[Callable[[], Tensor], dict[str, Any]]:
    """The call, to be made again and again, and its arguments."""
    call = problem.build().to("cuda")
    if "cu_seqlens_q" in call.args and problem.seqlens_q == problem.seqlens_k:
        call.args["cu_seqlens_k"] = call.args["cu_seqlens_q"]
    return functools.partial(getattr(flash_attn_interface, call.fn), **call.args), call.args


def by(backend: str, call: Callable[[], Tensor]) -> Tensor:
    with use_backend(backend):
        return call()


# ---- in this process


def test_sixteen_threads_each_on_a_stream_of_its_own() -> None:
    lengths = [replace(PROBLEMS["dense"], seqlens_q=(n, n), seqlens_k=(n, n)) for n in (1, 40, 300, 1000)]
    calls = [on_gpu(problem)[0] for problem in (*PROBLEMS.values(), *lengths)]
    expected = [by("chunked", call) for call in calls]
    torch.cuda.synchronize()

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(40):
                index = (number + turn) % len(calls)
                found = by("fused", calls[index])
                torch.cuda.current_stream().synchronize()
                close(found, expected[index])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))  # raises what a thread raised


@pytest.mark.parametrize("half_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradients_are_the_same_bits_in_fifty_repeats(head_dim: int, half_dtype: str) -> None:
    shapes = (2, 777, 4, head_dim), (2, 900, 2, head_dim), (2, 900, 2, head_dim)
    leaves = [half(*shape, seed=i).to(getattr(torch, half_dtype)).requires_grad_() for i, shape in enumerate(shapes)]

    def gradients() -> tuple[Tensor, ...]:
        with use_backend("fused"):
            out = flash_attn_func(*leaves, causal=True, deterministic=True)
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out, leaves, out.detach())

    first = gradients()
    for _ in range(49):
        assert all(map(torch.equal, first, gradients()))


@pytest.mark.parametrize("half_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_blocks_that_share_keys_are_right_and_give_the_same_bits_in_fifty_repeats(
    head_dim: int, half_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    splits = grids.count_splits
    monkeypatch.setattr(grids, "count_splits", lambda *shapes: counts.append(splits(*shapes)) or counts[-1])
    problem = Problem(
        "kvcache", (70, 3, 40, 64), (5000, 1, 0, 300), 1, 4, head_dim, dtype=half_dtype, causal=True, capacity=5100,
        leftpad=(7, 0, 0, 290), poison="nan",
    )  # fmt: skip
    verdict = Examination(problem, torch.device("cuda", torch.cuda.current_device())).judge("fused")
    assert not verdict.failures and not verdict.refused, verdict
    splits_its_keys = head_dim <= 192 or nvrtc.target_number(torch.cuda.current_device()) >= 80
    assert (max(counts) > 1) == splits_its_keys
    call = problem.build("cuda")
    first = by("fused", lambda: flash_attn_with_kvcache(**call.args)[0])
    for _ in range(49):
        assert torch.equal(by("fused", lambda: flash_attn_with_kvcache(**call.args)[0]), first)


@pytest.mark.parametrize(
    ("head_dim", "half_dtype", "options"),
    pairwise(
        HEAD_DIMS,
        ("float16", "bfloat16"),
        ({}, {"causal": True}, {"alibi": "h", "softcap": 2.0, "window": (30, 3)}),
    ),
)
def test_sequences_of_very_different_lengths_share_a_grid(
    head_dim: int, half_dtype: str, options: dict[str, Any]
) -> None:
    lengths = (0, 2, 1, 0) * 150 + (1200,)
    problem = Problem(
        "varlen", lengths, lengths, 2, 2, head_dim, dtype=half_dtype, gap=(0, 40), max_seqlen_slack=2**20,
        poison="nan", **options,
    )  # fmt: skip
    verdict = Examination(problem, torch.device("cuda", torch.cuda.current_device())).judge("fused")
    assert not verdict.failures and not verdict.refused, verdict
    assert any(variants.has_shared_grid(variant) for variant, *_ in nvrtc._kernels)


@pytest.mark.skipif(not hasattr(torch.cuda, "use_mem_pool"), reason="PyTorch 2.5 brought memory pools")
def test_memory_kept_between_calls_is_outside_the_callers_pools() -> None:
    q, keys = half(1, 1, 8, 64), half(1, 4096, 2, 64)

    def attend() -> Tensor:
        out = flash_attn_func(q, keys, keys)
        assert isinstance(out, Tensor)
        return out

    right, pool = by("chunked", attend), torch.cuda.MemPool()
    by("fused", attend)  # the kernels are tried
    workspaces.discard()
    with torch.cuda.use_mem_pool(pool):
        close(by("fused", attend), right)
    kept = list(workspaces._workspaces.values())
    assert kept or not launcher._POOLS_ARE_PER_THREAD
    assert not any(map(workspaces._is_in_pool, kept))
    del pool
    torch.cuda.empty_cache()
    torch.full((2**26,), 0x5B, dtype=torch.uint8, device="cuda")
    close(by("fused", attend), right)


GRAPHS = [
    *[("fused", name) for name in PROBLEMS],
    *[(backend, name) for backend in ("torch_flash", "torch_efficient") for name in ("dense", "varlen")],
    ("torch_efficient", "varlen, other keys"),
]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("backend", "name"), GRAPHS)
def test_a_graph_is_replayed_over_other_numbers_and_lengths(backend: str, name: str, is_known: bool) -> None:
    """is_known: whether the call is prepared before the capture, which prepares none"""
    call, args = on_gpu(PROBLEMS[name])
    on_backend(backend, call)  # compiles and loads
    if not is_known:
        call_cache.forget()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        out = by(backend, call)
    assert bool(call_cache.current().calls) == bool(call_cache.current().choices) == is_known
    for x in args.values():
        if isinstance(x, Tensor) and x.dtype == torch.float16:
            x.mul_(0.5)
    if name.startswith("varlen"):
        args["cu_seqlens_q"][-1] -= 30  # the last tokens are outside of all sequences then
    if "cache_seqlens" in args:
        args["cache_seqlens"] //= 2
    right = by("chunked", call)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        close(out, right)
        close(by(backend, call), right)  # between replays, by a workspace of its own


def test_capturing_an_unloaded_variant_loads_it_or_names_the_remedy() -> None:
    q, graph = half(1, 50, 2, 32), torch.cuda.CUDAGraph()

    def call() -> Tensor:
        return flash_attn_func(q, q, q, softcap=3.0, window_size=(9, 5))

    try:
        with torch.cuda.graph(graph):
            out = by("fused", call)
    except RuntimeError as error:
        assert "once before the capture" in str(error)  # noqa: PT017  (either is right)
        return
    graph.replay()
    close(out, by("chunked", call))


# ---- in processes of their own


def test_a_later_process_compiles_and_tests_no_kernel_again(tmp_path: Path) -> None:
    """benchmarks.first_step times such processes."""
    environment = {**os.environ, "FLASH_ATTN_COMPAT_CACHE": str(tmp_path)}
    found = []
    for _ in range(2):
        command = [sys.executable, "-m", "tests.kernels.test_on_gpu"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads(done.stdout))
    first, later = found
    assert first["compiled"] > 0 and first["tested"] > 0
    assert later == {"compiled": 0, "tested": 0}


def first_calls() -> dict[str, int]:
    """How many kernels a process compiles for its first calls, and how many self-tests it runs."""
    problems = {name: on_gpu(problem)[0] for name, problem in PROBLEMS.items()}
    leaf = half(2, 100, 4, 64).requires_grad_()
    problems["training step"] = lambda: torch.autograd.grad(flash_attn_func(leaf, leaf, leaf).sum(), leaf)[0]
    compiled, tested = Mock(wraps=nvrtc.compile_variant), Mock(wraps=faults.watch_trial)
    with patch.object(nvrtc, "compile_variant", compiled), patch.object(faults, "watch_trial", tested):
        for call in problems.values():
            by("fused", call)
    torch.cuda.synchronize()
    return {"compiled": compiled.call_count, "tested": tested.call_count}


if __name__ == "__main__":
    print(json.dumps(first_calls()))
