"""Work on cu_seqlens without synchronisation, and capture, checked on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_with_kvcache
from flash_attn_compat.backends import unwritten
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import Kind, Sizes
from flash_attn_compat.backends.fused.judging import self_test
from flash_attn_compat.core import cuda_capture
from tests.forms.inputs import UNSEEN, OnGpu, cumulative
from tests.kernels import fused_on_cpu


@pytest.mark.parametrize("where", [Tensor, OnGpu])
@pytest.mark.parametrize("how", UNSEEN)
def test_tokens_outside_follow_the_current_cu_seqlens_however_written(where: type[Tensor], how: str) -> None:
    cu_seqlens = cumulative(30, 50).as_subclass(where)
    for lengths in ((30, 50), (30, 50), (30, 20)):
        if lengths != (30, 50):
            UNSEEN[how](cu_seqlens, cumulative(*lengths))
        rows, lse = torch.ones(80, 2, 8), torch.ones(80, 3, 1)
        unwritten.clear(cu_seqlens, [rows, lse], 50)
        for cleared in (rows, lse):
            assert cleared[: sum(lengths)].all() and not cleared[sum(lengths) :].any()


@pytest.mark.parametrize("where", [Tensor, OnGpu])
@pytest.mark.parametrize("longest", [0, 1, 20, 30, 49, 50, 100])
def test_tokens_beyond_max_seqlen_count_as_outside(where: type[Tensor], longest: int) -> None:
    rows = torch.ones(90, 2, 8)
    unwritten.clear(cumulative(30, 0, 50).as_subclass(where), [rows], longest)
    written = [*range(min(longest, 30)), *range(30, 30 + min(longest, 50))]
    assert rows[written].all() and int(rows.any(2).any(1).sum()) == len(written)


@pytest.mark.parametrize("longest", [30, 100])
def test_unwritten_tokens_are_cleared_without_synchronisation(longest: int) -> None:
    starts = cumulative(30, 50).to("meta")  # which has none to wait for
    unwritten.clear(starts, [torch.ones(80, 2, 8, device="meta")], longest)


# ---------------------------------------------------------------- a capture asks of the GPU it is about


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("capturing", [0, 1])
def test_a_capture_is_seen_on_the_device_that_is_asked_about(
    monkeypatch: pytest.MonkeyPatch, current: int, capturing: int
) -> None:
    entered = [current]

    @contextlib.contextmanager
    def device(other: int) -> Iterator[None]:
        entered.append(other)
        yield
        entered.pop()

    cuda = SimpleNamespace(
        is_available=lambda: True, device=device, is_current_stream_capturing=lambda: entered[-1] == capturing
    )
    fast = SimpleNamespace(_cuda_isCurrentStreamCapturing=lambda: current == capturing)
    monkeypatch.setattr(cuda_capture, "torch", SimpleNamespace(cuda=cuda, _C=fast))
    monkeypatch.setattr(cuda_capture, "current_device", lambda: current)
    for index in (0, 1):
        assert cuda_capture.is_capturing(index) == (index == capturing)
    assert not cuda_capture.is_capturing(-1)


@pytest.mark.parametrize("device", [0, 1])
def test_kernels_are_tried_unless_their_own_gpus_work_is_captured(monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    fused_on_cpu.record(monkeypatch, tried=True)
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda asked: asked == 1)
    tries: list[int] = []
    self_test.check_kernels((variants.delta(Kind(75, 0, Sizes(64))),), device, lambda watch: tries.append(device))
    assert tries == ([0] if device == 0 else [])
    assert bool(self_test._passed) == (device == 0)


@pytest.mark.gpu
def test_lengths_that_would_be_read_during_a_capture_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.zeros(2, length, 1, 16, device="cuda") for length in (1, 8, 8))
    lengths = torch.tensor([3, 5], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="seqused_k is on the GPU and must be read"), torch.cuda.graph(graph):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
