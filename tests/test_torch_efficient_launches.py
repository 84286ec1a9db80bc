"""How torch_efficient cuts calls into launches, on a CPU: the kernel is a stand-in with the real one's traps."""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat.backends import efficient_launch
from flash_attn_compat.backends.base import HALF_DTYPES
from flash_attn_compat.engine import elementwise
from tests import cuda_on_cpu, efficient_kernels, elementwise_steps
from tests.judge import Examination
from tests.problems import Problem, random_problem

PROBLEMS = 500


@pytest.fixture(autouse=True)
def kernels_on_a_cpu(monkeypatch):
    efficient_kernels.install(monkeypatch)


def examine(problem: Problem):
    examination = Examination(problem)
    # Half precision is the GPU's: an LSE may be as far off as its rounded operands allow.
    examination.device = "cuda"
    return examination.judge("torch_efficient")


def is_served_by_the_stand_in(problem: Problem) -> bool:
    """The stand-in has no dropout."""
    return problem.dropout_p <= 0


@pytest.mark.parametrize("first", range(0, PROBLEMS, 50))
def test_random_problems_are_right_or_refused(first):
    for number in range(first, first + 50):
        problem = random_problem(number)
        if is_served_by_the_stand_in(problem):
            assert not (verdict := examine(problem)).failures, (problem, verdict)


@pytest.mark.parametrize("window", [(64, 64), (3, 40), (100, 1), (300, 300), (0, 5)])
@pytest.mark.parametrize(("kind", "nheads_k"), [("dense", 4), ("dense", 2), ("varlen_qkvpacked", 4)])
def test_two_sided_windows_over_many_blocks_are_right(kind, window, nheads_k):
    lengths = (700, 700) if kind == "dense" else (333, 0, 64, 1, 517)
    problem = Problem(
        kind=kind, seqlens_q=lengths, seqlens_k=lengths, window=window, group=4 // nheads_k, nheads_k=nheads_k
    )
    verdict = examine(problem)
    assert not verdict.refused and not verdict.failures, verdict


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("window", [(64, 64), (3, 40), (100, 1), (0, 5)])
def test_two_sided_windows_are_right_with_a_bias_from_one_kernel(monkeypatch, window, dtype):
    cuda_on_cpu.install(monkeypatch)
    assert elementwise.bias_is_usable(torch.device("cpu"), torch.float16)
    lengths = (333, 0, 64, 1, 117)
    problem = Problem(kind="varlen_qkvpacked", seqlens_q=lengths, seqlens_k=lengths, window=window, dtype=dtype)
    monkeypatch.setattr(elementwise, "bias_is_usable", lambda device, dtype: dtype in HALF_DTYPES)
    verdict = examine(problem)
    assert not verdict.refused and not verdict.failures, verdict


@pytest.mark.parametrize("gap", [(3, 0), (0, 5), (2, 2)])
def test_nan_outside_of_all_sequences_does_not_reach_into_a_two_sided_window(gap):
    lengths = (17, 0, 48)
    problem = Problem(
        kind="varlen_qkvpacked", seqlens_q=lengths, seqlens_k=lengths, window=(4, 9), gap=gap, poison=True
    )
    verdict = examine(problem)
    assert not verdict.refused and not verdict.failures, verdict


@pytest.mark.parametrize("window", [(-1, -1), (200, 30), (-1, 100), (100, 0)])
@pytest.mark.parametrize("lengths", [(400, 400), (150, 700), (700, 150)])
@pytest.mark.parametrize("alibi", ["h", "bh"])
@pytest.mark.parametrize("fused", [False, True])
def test_alibi_that_is_not_purely_causal_is_right_in_half_precision_for_slopes_of_any_sign(
    monkeypatch, window, lengths, alibi, fused
):
    monkeypatch.setattr(elementwise, "bias_is_usable", lambda device, dtype: fused)
    monkeypatch.setattr(elementwise, "alibi_bias", elementwise_steps.alibi_bias)
    seqlens_q, seqlens_k = ((length,) * 2 for length in lengths)
    problem = Problem(
        seqlens_q=seqlens_q, seqlens_k=seqlens_k, window=window, alibi=alibi, nheads_k=3, group=2, dtype="float16"
    )
    verdict = examine(problem)
    assert not verdict.refused and not verdict.failures, verdict


@pytest.mark.parametrize("lengths", [(400,) * 2, (30,) * 9])
@pytest.mark.parametrize("group", [1, 2])
def test_a_backward_takes_the_rows_or_sequences_of_several_forward_launches(monkeypatch, lengths, group):
    counts = [0, 0]

    def counted(index, step):
        def launch(*arguments):
            counts[index] += 1
            return step(*arguments)

        return launch

    for index, name in enumerate(("forward", "backward")):
        monkeypatch.setattr(efficient_launch, name, counted(index, getattr(efficient_kernels, name)))
    problem = Problem(
        "dense", lengths, lengths, causal=lengths[0] < 100, alibi="h", nheads_k=2 // group, group=group, dtype="float16"
    )
    verdict = examine(problem)
    assert not verdict.refused and not verdict.failures, verdict
    assert counts[0] > counts[1] > 0


def test_a_cache_is_read_in_shares_and_merged():
    problem = Problem("kvcache", (1, 1), (1300, 7), capacity=1500, causal=True, group=2, nheads_k=2)
    verdict = examine(problem)
    assert not verdict.refused and not verdict.failures, verdict


@pytest.mark.parametrize("slopes", ["h", "bh"])
@pytest.mark.parametrize("lengths", [(65, 65), (40, 131), (90, 33)])
def test_causal_alibi_in_fp32_is_a_bias_and_right(monkeypatch, lengths, slopes):
    launches = []

    def recorded(launch, *arguments):
        launches.append(launch)
        return efficient_kernels.forward(launch, *arguments)

    monkeypatch.setattr(efficient_launch, "forward", recorded)
    seqlen_q, seqlen_k = lengths
    problem = Problem(
        "dense", (seqlen_q, seqlen_q), (seqlen_k, seqlen_k), causal=True, alibi=slopes, group=2, nheads_k=2,
        head_dim=16, dtype="float32",
    )  # fmt: skip
    verdict = examine(problem)
    assert not verdict.refused and not verdict.failures, verdict
    assert launches and all(launch.bias is not None and launch.q.shape[-1] == 16 for launch in launches)


def _dense(batch: int, seqlen: int, heads: int, head_dim: int) -> efficient_launch.Launch:
    tensor = torch.empty(batch, seqlen, heads, head_dim, dtype=torch.float16, device="meta")
    return efficient_launch.Launch(tensor, tensor, tensor, 1.0)


def _packed(batch: int, heads: int, head_dim: int, longest: int, total: int) -> efficient_launch.Launch:
    tensor = torch.empty(1, total, heads, head_dim, dtype=torch.float16, device="meta")
    starts = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    return efficient_launch.Launch(tensor, tensor, tensor, 1.0, 0, None, starts, starts, longest, longest)


# The fastest number of parts in benchmarks/key_splits.py on an H200, which holds 396 blocks of 64 channels, 132 of more.
SCANNED = [
    (_packed(32, 8, 64, 4096, 32 * 4096), 32),
    (_packed(512, 4, 16, 1024, 512 * 1024), 1),
    (_packed(64, 16, 64, 512, 64 * 512), 1),
    (_packed(128, 16, 64, 6998, 127744), 16),
    (_dense(8, 2048, 8, 128), 2),
    (_dense(8, 2048, 16, 64), 3),
    (_dense(8, 1024, 16, 64), 3),
    (_dense(4, 1000, 32, 128), 1),
    (_dense(4, 4096, 16, 72), 2),
    (_dense(2, 512, 12, 64), 8),
    (_dense(1, 16384, 8, 128), 16),
    (_dense(1, 8192, 8, 128), 16),
    (_dense(16, 64, 16, 64), 1),
]


@pytest.mark.parametrize(("launch", "fastest"), SCANNED)
def test_the_backward_cuts_keys_into_what_was_fastest_in_a_scan(monkeypatch, launch, fastest):
    monkeypatch.setattr(
        efficient_launch, "_blocks_at_once", lambda device, head_dim, dtype: 396 if head_dim <= 64 else 132
    )
    assert efficient_launch._key_splits(launch, 1) == fastest
