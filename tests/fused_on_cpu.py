"""The fused backend on CPU tensors: its launches are written down, or computed by the kernels' emulator.

What runs is all of it: dispatch, plans, addresses, struct Params and, when emulated, the very CUDA sources.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends import BACKENDS
from flash_attn_compat.backends.fused import (
    Fused,
    append,
    backward,
    cache,
    forward,
    launcher,
    loader,
    maxima,
    params,
    trial,
)
from flash_attn_compat.backends.fused.loader import Kernel, Target
from flash_attn_compat.backends.fused.variants import Variant
from flash_attn_compat.serving import dispatch

FUSED = next(backend for backend in BACKENDS if isinstance(backend, Fused))


class Launch(NamedTuple):
    """One launch: the variant, the number of blocks and struct Params by name (strides as tuples)."""

    variant: Variant
    blocks: int
    fields: dict[str, Any]


@dataclass
class Launches:
    """Everything launched since the start, in order, and how many words were cleared."""

    seen: list[Launch] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)

    @property
    def last(self) -> Launch:
        return self.seen[-1]

    @property
    def entries(self) -> list[str]:
        return [launch.variant.entry for launch in self.seen]


class Driver:
    """What is asked of the CUDA driver beside launches."""

    version = 13, 0

    def __init__(self, found: Launches) -> None:
        self.found = found

    def clear(self, address: int, words: int, device: int) -> None:
        self.found.cleared.append(words)
        ctypes.memset(address, 0, 4 * words)


def unpack(content: bytes) -> dict[str, Any]:
    values = iter(struct.unpack("<" + "".join(kind for _, kind in params.FIELDS), content))
    return {name: tuple(next(values) for _ in kind) if len(kind) > 1 else next(values) for name, kind in params.FIELDS}


def record(monkeypatch: pytest.MonkeyPatch, number: int = 75, tried: bool = False) -> Launches:
    """Let the backend serve CPU tensors from now on; nothing is computed, every launch is written down.

    number: the architecture's; tried: whether kernels are tried before their first call
    """
    found = Launches()

    def kernel(variant: Variant, architecture: str, device: int) -> Kernel:
        rejected = loader._kernels.get((variant, architecture, device))
        if isinstance(rejected, loader.KernelError):
            raise rejected
        found.variants.append(variant)
        return Kernel(ctypes.c_void_p(len(found.variants)), variant.threads, variant.shared)

    def submit(kernel: Kernel, blocks: int, device: int) -> None:
        variant = found.variants[(kernel.handle.value or 0) - 1]
        found.seen.append(Launch(variant, blocks, unpack(launcher.arguments.buffer.raw)))

    everywhere = dataclasses.replace(Fused.capabilities, devices=None, min_capability=None)
    monkeypatch.setattr(Fused, "capabilities", everywhere)
    monkeypatch.setattr(FUSED, "_failures", {})
    monkeypatch.setattr(FUSED, "_slower", {})
    monkeypatch.setattr(loader, "why_not", lambda: None)
    monkeypatch.setattr(loader, "kernel", kernel)
    monkeypatch.setattr(loader, "load_together", lambda *what: None)
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(loader, "target", lambda device: Target(f"sm_{number}", number))
    monkeypatch.setattr(loader, "capability", lambda device: (9, 0))
    monkeypatch.setattr(loader, "device_name", lambda device: "CPU")
    monkeypatch.setattr(loader, "cache_name", lambda variant, architecture: repr(variant))
    monkeypatch.setattr(loader, "driver", lambda: Driver(found))
    monkeypatch.setattr(launcher, "submit", submit)
    monkeypatch.setattr(launcher, "stream", lambda device: 0)
    monkeypatch.setattr(launcher, "_workspaces", {})
    monkeypatch.setattr(launcher, "processors", lambda device: 40)
    monkeypatch.setattr(launcher, "_plans", {})
    monkeypatch.setattr(cache, "read", lambda name: None)
    monkeypatch.setattr(cache, "write", lambda name, payload: False)
    monkeypatch.setattr(trial, "_right", set())
    if not tried:
        monkeypatch.setattr(trial, "check", lambda *what: None)
    monkeypatch.setattr(dispatch, "_decisions", {})
    monkeypatch.setattr(dispatch, "_steps", {})
    return found


def emulate(
    monkeypatch: pytest.MonkeyPatch,
    number: int = 75,
    tried: bool = False,
    sources: Path = loader.SOURCES,
    seed: int = 1,
) -> Launches:
    """As ``record``, and the emulator computes every launch; it allows no access outside of the call's tensors.

    Memory comes filled with NaN and other rubbish. sources: the folder of the kernels' sources; seed: orders a
    launch's blocks and warps
    """
    from tests.kernels import emulate as emulator

    if emulator.why_not():
        pytest.skip(emulator.why_not())
    found = record(monkeypatch, number, tried)
    memory: list[Tensor] = []
    address, empty, workspace = launcher.address, torch.empty, launcher.workspace

    def known_address(name: str, tensor: Tensor, *rest: Any) -> int:
        memory.append(tensor)
        return address(name, tensor, *rest)

    def known_empty(*args: Any, **kwargs: Any) -> Tensor:
        memory.append(empty(*args, **kwargs))
        return memory[-1].fill_(torch.nan if memory[-1].is_floating_point() else 0xAB)

    def known_workspace(*args: Any) -> Tensor:
        memory.append(workspace(*args))
        return memory[-1]

    def submit(kernel: Kernel, blocks: int, device: int) -> None:
        variant = found.variants[(kernel.handle.value or 0) - 1]
        content = launcher.arguments.buffer.raw
        found.seen.append(Launch(variant, blocks, unpack(content)))
        compiled = emulator.compile_kernel(sources / variant.source, variant.entry, dict(variant.macros))
        compiled.launch(content, blocks, variant.threads, variant.shared, memory[-64:], seed)

    for module in (append, backward, launcher):
        monkeypatch.setattr(module, "address", known_address)
    for module in (append, backward, forward, maxima):
        monkeypatch.setattr(module, "torch", _Torch(torch, known_empty))
    monkeypatch.setattr(launcher, "workspace", known_workspace)
    monkeypatch.setattr(launcher, "submit", submit)
    return found


class _Torch:
    """PyTorch with another torch.empty, through which torch.empty_like goes too."""

    def __init__(self, module: Any, empty: Any) -> None:
        self._module, self.empty = module, empty

    def empty_like(self, tensor: Tensor) -> Tensor:
        return self.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
