"""The fused backend's launches seen from a CPU: what each kernel would have been given, without a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends.fused import Fused, append, backward, forward, launcher, loader, maxima, params, trial
from flash_attn_compat.backends.fused.loader import Kernel, Target
from flash_attn_compat.backends.fused.variants import Variant


class Launch(NamedTuple):
    """One launch: the variant, the number of blocks and struct Params by name (strides as tuples)."""

    variant: Variant
    blocks: int
    fields: dict[str, params.Value]


@dataclass
class Launches:
    """Everything launched since the start, in order, and how many words were cleared."""

    seen: list[Launch] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)

    @property
    def last(self) -> Launch:
        return self.seen[-1]


def unpack(content: bytes) -> dict[str, params.Value]:
    values = iter(struct.unpack("<" + "".join(kind for _, kind in params.FIELDS), content))
    return {name: tuple(next(values) for _ in kind) if len(kind) > 1 else next(values) for name, kind in params.FIELDS}


def record(monkeypatch: pytest.MonkeyPatch, number: int = 75) -> Launches:
    """Let the backend serve CPU tensors from now on; nothing is computed, every launch is written down."""
    found = Launches()

    def kernel(variant: Variant, architecture: str, device: int) -> Kernel:
        found.variants.append(variant)
        return Kernel(ctypes.c_void_p(len(found.variants)), variant.threads, variant.shared)

    def submit(kernel: Kernel, blocks: int, device: int) -> None:
        variant = found.variants[kernel.handle.value - 1]
        found.seen.append(Launch(variant, blocks, unpack(launcher.arguments.buffer.raw)))

    class Driver:
        def clear(self, address: int, words: int, device: int) -> None:
            found.cleared.append(words)

    monkeypatch.setattr(loader, "kernel", kernel)
    monkeypatch.setattr(loader, "target", lambda device: Target(f"sm_{number}", number))
    monkeypatch.setattr(loader, "driver", Driver)
    monkeypatch.setattr(launcher, "submit", submit)
    monkeypatch.setattr(launcher, "stream", lambda device: 0)
    monkeypatch.setattr(launcher, "processors", lambda device: 40)
    monkeypatch.setattr(trial, "check", lambda *what: None)
    launcher.forget_plans()
    return found


def emulate(monkeypatch: pytest.MonkeyPatch, number: int = 75) -> Launches:
    """As ``record``, and every launch is computed by the emulator, which allows no access outside of the call's tensors."""
    from tests.kernels import emulate as emulator

    found = record(monkeypatch, number)
    memory: list[Tensor] = []
    address, empty = launcher.address, torch.empty

    def known_address(name: str, tensor: Tensor, *rest: Any) -> int:
        memory.append(tensor)
        return address(name, tensor, *rest)

    def known_empty(*args: Any, **kwargs: Any) -> Tensor:
        memory.append(empty(*args, **kwargs))
        return memory[-1].fill_(torch.nan if memory[-1].is_floating_point() else 0xAB)

    def submit(kernel: Kernel, blocks: int, device: int) -> None:
        variant = found.variants[kernel.handle.value - 1]
        content = launcher.arguments.buffer.raw
        found.seen.append(Launch(variant, blocks, unpack(content)))
        compiled = emulator.compile_kernel(variant.source, variant.entry, dict(variant.macros))
        compiled.launch(content, blocks, variant.threads, variant.shared, list(memory))

    class Driver:
        def clear(self, address: int, words: int, device: int) -> None:
            found.cleared.append(words)
            ctypes.memset(address, 0, 4 * words)

    for module in (append, backward, forward, maxima):
        monkeypatch.setattr(module, "address", known_address)
    monkeypatch.setattr(loader, "driver", Driver)
    monkeypatch.setattr(torch, "empty", known_empty)
    monkeypatch.setattr(launcher, "submit", submit)
    return found


def serve(monkeypatch: pytest.MonkeyPatch, number: int = 75) -> Launches:
    """As ``emulate``, and flash_attn's functions take the backend for CPU tensors under ``use_backend("fused")``."""
    found = emulate(monkeypatch, number)
    table = dataclasses.replace(Fused.capabilities, devices=frozenset({"cpu"}))
    monkeypatch.setattr(Fused, "capabilities", table)
    monkeypatch.setattr(loader, "why_not", lambda: None)
    return found
