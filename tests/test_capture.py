"""What waits for a GPU asks whether that GPU's work is being captured, not the current one's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from flash_attn_compat import flash_attn_with_kvcache
from flash_attn_compat.backends.fused import loader, trial
from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.engine import capture


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("capturing", [0, 1])
def test_a_capture_is_seen_on_the_device_that_is_asked_about(
    monkeypatch: pytest.MonkeyPatch, current: int, capturing: int
) -> None:
    entered = [current]

    @contextlib.contextmanager
    def device(other: torch.device) -> Iterator[None]:
        entered.append(other.index)
        yield
        entered.pop()

    cuda = SimpleNamespace(
        current_device=lambda: entered[-1], device=device, is_current_stream_capturing=lambda: entered[-1] == capturing
    )
    monkeypatch.setattr(capture, "torch", SimpleNamespace(cuda=cuda))
    for index in (0, 1):
        assert capture.is_capturing(torch.device("cuda", index)) == (index == capturing)
    assert capture.is_capturing(torch.device("cuda")) == (current == capturing)


@pytest.mark.parametrize("device", [0, 1])
def test_kernels_are_tried_unless_their_own_gpus_work_is_captured(monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(capture, "is_capturing", lambda asked: asked.index == 1)
    monkeypatch.setattr(trial, "_right", set())
    monkeypatch.setattr(trial, "_verdict_name", lambda *what: "tried")
    monkeypatch.setattr(loader, "driver", lambda: None)
    monkeypatch.setattr(trial.cache, "read", lambda name: None)
    monkeypatch.setattr(trial.cache, "write", lambda name, payload: False)
    tries: list[int] = []
    trial.check((), Target("sm_75", 75), device, lambda: tries.append(device))
    assert tries == ([0] if device == 0 else [])
    assert bool(trial._right) == (device == 0)


@pytest.mark.gpu
def test_lengths_that_would_be_read_during_a_capture_are_named() -> None:
    q, k, v = (torch.zeros(2, length, 1, 16, device="cuda") for length in (1, 8, 8))
    lengths = torch.tensor([3, 5], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="seqused_k lies on the GPU and would be read"), torch.cuda.graph(graph):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
