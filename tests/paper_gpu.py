"""A GPU that is not there, in one vocabulary: which card, whether our kernels compute, and who stands in for the rest.

A test file says which GPU it is on in one line; the fixture returns what our kernels launch:

>>> launches = paper_gpu.fixture(model="Tesla T4", others=("torch_efficient",))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from flash_attn_compat import reset_backend_counts, settings, use_backend
from flash_attn_compat.backends.fused.building import nvrtc
from tests.kernels import fused_on_cpu
from tests.kernels.fused_on_cpu import LaunchRecord


class PaperGpu(NamedTuple):
    """number: the architecture of the launches; computes: whether the emulator computes them, or they are written down

    model: the card's name; capability: what the driver says; others: backends with stand-ins for their kernels
    forced: the only backend that serves; one_tile, tried: as in ``fused_on_cpu.record``
    """

    number: int = 75
    computes: bool = False
    model: str | None = None
    capability: tuple[int, int] | None = None
    others: tuple[str, ...] = ()
    forced: str | None = None
    one_tile: bool = False
    tried: bool = False


@contextlib.contextmanager
def placed(gpu: PaperGpu, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[LaunchRecord]:
    """That GPU is in this machine. folder: where stand-ins for libraries may lie"""
    act = fused_on_cpu.emulate if gpu.computes else fused_on_cpu.record
    found = act(monkeypatch, gpu.number, gpu.tried, one_tile=gpu.one_tile)
    if gpu.model:
        set_model(monkeypatch, gpu.model)
    if gpu.capability:
        monkeypatch.setattr(nvrtc, "real_capability", lambda device: gpu.capability)
    if gpu.others:
        from tests.answers import others_kernels

        for name in gpu.others:
            others_kernels.install(monkeypatch, name, folder)
    reset_backend_counts()
    with use_backend(gpu.forced) if gpu.forced else contextlib.nullcontext():
        yield found


def fixture(**gpu: Any) -> Callable[..., Any]:
    """A fixture that puts a PaperGpu of these fields into the machine and returns what it is given to launch."""

    @pytest.fixture
    def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LaunchRecord]:
        with placed(PaperGpu(**gpu), monkeypatch, tmp_path) as found:
            yield found

    return place


def set_model(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The GPU is of this model from now on."""
    monkeypatch.setattr(settings, "gpu", lambda device: model)


def build_for(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] = (7, 5),
    version: tuple[int, int] = (13, 0),
    architectures: tuple[int, ...] = (75, 80, 86, 89, 90, 100),
) -> None:
    """A GPU of that capability and an NVRTC of that version are there, as far as kernels are built for them."""
    monkeypatch.setattr(nvrtc, "compiler", lambda: SimpleNamespace(version=version, architectures=architectures))
    monkeypatch.setattr(nvrtc, "real_capability", lambda device: capability)
    monkeypatch.setattr(nvrtc, "_kernels", {})
    monkeypatch.setattr(nvrtc, "_locks", {})
    monkeypatch.delenv(settings.CAPABILITY, raising=False)
