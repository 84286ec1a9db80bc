"""What is asked of a GPU without waiting for it, on a CPU: numbers in cu_seqlens, and whether it is captured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from flash_attn_compat import flash_attn_with_kvcache
from flash_attn_compat.backends.fused import trial
from flash_attn_compat.engine import capture, outside
from tests import fused_on_cpu
from tests.support import cumulative

ELSEWHERE = torch.device("cuda", 1)  # the tensors' device; the current one is number 0


class OnGpu(torch.Tensor):
    """A tensor in the host's memory that says it lies on a GPU."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: ELSEWHERE)


class Event:
    """Complete at once, unless told otherwise."""

    recorded_on: ClassVar[list[object]] = []
    is_complete = True

    def record(self, stream: object = "the current device's stream") -> None:
        Event.recorded_on.append(stream)

    def query(self) -> bool:
        return Event.is_complete


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*sizes: int, pin_memory: bool, **where: Any) -> torch.Tensor:
        found = torch.empty(*sizes, **where)
        assert pin_memory and found.device.type == "cpu", "Only dense CPU tensors can be pinned"
        return found

    cuda = SimpleNamespace(
        Event=Event,
        current_stream=lambda device=None: f"stream of {device}",
    )
    monkeypatch.setattr(outside, "torch", SimpleNamespace(empty=empty, cuda=cuda, int64=torch.int64))
    monkeypatch.setattr(capture, "is_capturing", lambda device: False)
    monkeypatch.setattr(outside, "_known", {}, raising=False)
    monkeypatch.setattr(Event, "is_complete", True)
    Event.recorded_on.clear()


def starts(*lengths: int) -> torch.Tensor:
    return cumulative(*lengths).as_subclass(OnGpu)


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_a_tensor_is_looked_at_once_without_waiting_and_known_as_long_as_it_lives(default: str) -> None:
    cu_seqlens = starts(30, 50)
    Event.is_complete = False
    with torch.device(default):
        assert outside.may_exist(cu_seqlens, 80) and outside.may_exist(cu_seqlens, 80)
        Event.is_complete = True
        assert not outside.may_exist(cu_seqlens, 80) and outside.may_exist(cu_seqlens, 81)
    # Behind the copy, whatever the current device.
    assert Event.recorded_on == [f"stream of {ELSEWHERE}"] and not vars(cu_seqlens)
    assert len(outside._known) == 1
    del cu_seqlens
    gc.collect()
    assert not outside._known


@pytest.mark.parametrize("how", ["captured", "inference"])
def test_numbers_that_may_change_unseen_are_never_known(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode(how == "inference"):
        cu_seqlens = starts(30, 50)
    monkeypatch.setattr(capture, "is_capturing", lambda device: how == "captured")
    assert all([outside.may_exist(cu_seqlens, 80) for _ in range(3)]) and not outside._known


def another_of_the_same_id(cu_seqlens: torch.Tensor) -> torch.Tensor:
    other = starts(30, 20)
    outside._known[id(other)] = outside._known[id(cu_seqlens)]._replace(state=outside.state_of(other))
    return other


@pytest.mark.parametrize(
    "change",
    [lambda t: t.copy_(cumulative(30, 20)), lambda t: setattr(t, "data", starts(30, 20)), another_of_the_same_id],
)
def test_other_numbers_are_looked_at_again(change: Any) -> None:
    cu_seqlens = starts(30, 50)
    for _ in range(2):
        outside.may_exist(cu_seqlens, 80)
    other = change(cu_seqlens)
    cu_seqlens = cu_seqlens if other is None else other
    assert outside.may_exist(cu_seqlens, 80)
    assert outside.may_exist(cu_seqlens, 80) and not outside.may_exist(cu_seqlens, 50)


# ---------------------------------------------------------------- a capture asks of the GPU it is about


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("capturing", [0, 1])
def test_a_capture_is_seen_on_the_device_that_is_asked_about(
    monkeypatch: pytest.MonkeyPatch, current: int, capturing: int
) -> None:
    monkeypatch.undo()
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
    monkeypatch.setattr(capture, "torch", SimpleNamespace(cuda=cuda, _C=fast))
    monkeypatch.setattr(capture, "current_device", lambda: current)
    for index in (0, 1):
        assert capture.is_capturing(index) == (index == capturing)
    assert not capture.is_capturing(-1)


@pytest.mark.parametrize("device", [0, 1])
def test_kernels_are_tried_unless_their_own_gpus_work_is_captured(monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    fused_on_cpu.record(monkeypatch, tried=True)
    monkeypatch.setattr(capture, "is_capturing", lambda asked: asked == 1)
    tries: list[int] = []
    trial.check((), device, lambda: tries.append(device))
    assert tries == ([0] if device == 0 else [])
    assert bool(trial._right) == (device == 0)


@pytest.mark.gpu
def test_lengths_that_would_be_read_during_a_capture_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # a real capture, which is asked about
    q, k, v = (torch.zeros(2, length, 1, 16, device="cuda") for length in (1, 8, 8))
    lengths = torch.tensor([3, 5], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="seqused_k lies on the GPU and would be read"), torch.cuda.graph(graph):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
