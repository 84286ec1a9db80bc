"""Pieces of work on side streams: what waits for what, seen through a stand-in for CUDA's streams."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from flash_attn_compat.engine import streams

DEVICE = torch.device("cuda", 0)


class Stream:
    """Knows which pieces of work are done once all that was issued to it is."""

    current: Stream

    def __init__(self, *_: object) -> None:
        self.done: set[object] = set()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def wait_event(self, done: frozenset[object]) -> None:
        self.done |= done

    def record_event(self) -> frozenset[object]:
        return frozenset(self.done)


@pytest.fixture(autouse=True)
def caller(monkeypatch) -> Stream:
    @contextlib.contextmanager
    def on(stream: Stream):
        before, Stream.current = Stream.current, stream
        try:
            yield
        finally:
            Stream.current = before

    Stream.current = Stream()
    cuda = SimpleNamespace(Stream=Stream, Event=object, stream=on, current_stream=lambda device: Stream.current)
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(streams, "_threads", streams._Threads())
    return Stream.current


class Kept:
    def __init__(self) -> None:
        self.read_by: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.read_by.append(stream)


def piece(name: object):
    def step() -> tuple[object, Stream, frozenset[object]]:
        found = name, Stream.current, frozenset(Stream.current.done)
        Stream.current.done.add(name)
        return found

    return step


def test_every_piece_comes_after_what_the_caller_issued_and_before_what_it_issues_next(caller):
    caller.done.add("inputs")
    found = []
    streams.in_turns([piece(n) for n in range(5)], lambda one: found.append(one) or [], DEVICE)
    assert all("inputs" in done for _, _, done in found)
    assert caller.done >= {"inputs", 0, 1, 2, 3, 4}


def test_neighbours_do_not_wait_for_each_other_and_collecting_keeps_the_order(caller):
    found, collected = [], []

    def collect(one):
        found.append(one)
        assert Stream.current.done >= {("collected", n) for n in range(len(collected))}
        collected.append(one[0])
        Stream.current.done.add(("collected", one[0]))
        return []

    streams.in_turns([piece(n) for n in range(5)], collect, DEVICE)
    assert collected == [0, 1, 2, 3, 4]
    for name, stream, done in found[1:]:
        assert name - 1 not in done and stream is not caller


def test_the_allocator_is_told_of_what_is_kept(caller):
    kept = Kept()
    streams.in_turns([piece(0), piece(1)], lambda _: [kept], DEVICE)
    assert kept.read_by == [caller, caller]


def test_a_failure_still_makes_the_caller_wait(caller):
    def fail(_):
        raise MemoryError

    with pytest.raises(MemoryError):
        streams.in_turns([piece(0), piece(1)], fail, DEVICE)
    assert 0 in caller.done


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("capturing", [0, 1])
def test_a_capture_is_seen_on_the_device_that_is_asked_about(monkeypatch, current, capturing):
    entered = [current]

    @contextlib.contextmanager
    def device(other: torch.device):
        entered.append(other.index)
        yield
        entered.pop()

    cuda = SimpleNamespace(
        current_device=lambda: entered[-1], device=device, is_current_stream_capturing=lambda: entered[-1] == capturing
    )
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda))
    for index in (0, 1):
        assert streams.is_capturing(torch.device("cuda", index)) == (index == capturing)
    assert streams.is_capturing(torch.device("cuda")) == (current == capturing)
