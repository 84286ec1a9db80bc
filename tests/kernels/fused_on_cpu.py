"""The fused backend on CPU tensors: its launches are written down, or computed by the kernels' emulator.

What runs is all of it: dispatch, plans, addresses, struct Params and, when emulated, the very CUDA sources.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import mmap
import os
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends import BACKENDS
from flash_attn_compat.backends.fused import Fused, backward
from flash_attn_compat.backends.fused.building import kernel_files, nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import Kernel
from flash_attn_compat.backends.fused.choosing.kinds import FEW_ROWS
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.judging import faults, self_test
from flash_attn_compat.backends.fused.launching import calls, grids, launcher, params, workspaces
from flash_attn_compat.backends.fused.tuning import tuned
from flash_attn_compat.core import checks
from flash_attn_compat.dispatch import call_cache

FUSED = next(backend for backend in BACKENDS if isinstance(backend, Fused))


class Launch(NamedTuple):
    """One launch: the variant, the number of blocks and struct Params by name (strides as tuples)."""

    variant: Variant
    blocks: int
    fields: dict[str, Any]


@dataclass
class LaunchRecord:
    """Everything launched since the start, in order, and the variants that were loaded.

    conflicts: of banks of shared memory, in each that was emulated; files: what was written for other processes
    rows_overlap: set where lengths are no lengths, so that blocks write where others do
    """

    seen: list[Launch] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    rows_overlap: bool = False
    conflicts: list[int] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def write(self, name: str, payload: bytes, only_first: bool = False) -> bool:
        if only_first and name in self.files:
            return False
        self.files[name] = payload
        return True

    @property
    def last(self) -> Launch:
        return self.seen[-1]

    @property
    def entries(self) -> list[str]:
        return [launch.variant.entry for launch in self.seen]


class Driver:
    """What is asked of the CUDA driver; ``compute`` gets every launch and its struct."""

    version = 13, 0

    def __init__(self, found: LaunchRecord, compute: Callable[[Launch, bytes], None]) -> None:
        self.found, self.compute = found, compute

    def launch(self, kernel: Kernel, blocks: int, device: int, content: bytes) -> None:
        assert device == -1, "which is that of CPU tensors"
        launch = Launch(self.found.variants[(kernel.handle.value or 0) - 1], blocks, unpack(content))
        self.found.seen.append(launch)
        self.compute(launch, content)

    def sticky_error(self, device: int) -> str | None:
        return None


def unpack(content: bytes) -> dict[str, Any]:
    fields = (*params.HEAD_FIELDS, *params.REST_FIELDS)
    values = iter(struct.unpack_from("@" + "".join(kind for _, kind in fields), content))
    return {name: tuple(next(values) for _ in kind) if len(kind) > 1 else next(values) for name, kind in fields}


def record(
    monkeypatch: pytest.MonkeyPatch,
    number: int = 75,
    tried: bool = False,
    compute: Callable[[Launch, bytes], None] = lambda launch, content: None,
    one_tile: bool = False,
) -> LaunchRecord:
    """Let the backend serve CPU tensors from now on; every launch is written down.

    number: the architecture's; tried: whether kernels are tried before their first call; compute: gets every launch and
    the bytes of its struct; one_tile: whether sequences of few keys or rows have kernels of their own, as on a GPU
    """
    found = LaunchRecord()

    def kernel(variant: Variant, device: int) -> Kernel:
        rejected = nvrtc._kernels.get((variant, f"sm_{number}", device))
        if isinstance(rejected, nvrtc.KernelError):
            raise rejected
        found.variants.append(variant)
        return Kernel(ctypes.c_void_p(len(found.variants)), variant.threads, variant.shared)

    everywhere = dataclasses.replace(Fused.capabilities, devices=None, min_capability=None)
    monkeypatch.setattr(Fused, "capabilities", everywhere)
    monkeypatch.setattr(FUSED, "_failures", {})
    monkeypatch.setattr(nvrtc, "decline_reason", lambda: None)
    monkeypatch.setattr(nvrtc, "kernel", kernel)
    monkeypatch.setattr(nvrtc, "load_all", lambda *what: None)
    monkeypatch.setattr(nvrtc, "_kernels", {})
    monkeypatch.setattr(nvrtc, "target", lambda device: f"sm_{number}")
    monkeypatch.setattr(nvrtc, "real_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "device_name", lambda device: "CPU")
    monkeypatch.setattr(nvrtc, "cache_name", lambda variant, architecture: repr(variant))
    driver = Driver(found, compute)
    monkeypatch.setattr(nvrtc, "driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "stream", lambda device: 0)
    monkeypatch.setattr(workspaces, "_workspaces", {})
    monkeypatch.setattr(calls, "count_multiprocessors", lambda device: 40)
    monkeypatch.setattr(kernel_files, "read", found.files.get)
    monkeypatch.setattr(kernel_files, "write", found.write)
    monkeypatch.setattr(faults, "marks_folder", lambda: Path(os.devnull))
    monkeypatch.setattr(tuned, "_cards", {})
    monkeypatch.setattr(self_test, "_passed", set())
    if not one_tile:
        monkeypatch.setattr(grids, "choose_one_tile", lambda *sizes: 0)
        monkeypatch.setattr(grids, "takes_small_tiles", lambda rows, *others: rows <= FEW_ROWS)
    if not tried:
        monkeypatch.setattr(self_test, "check_kernels", lambda *what: None)
    monkeypatch.setattr(call_cache, "_current", call_cache.empty_tables())
    monkeypatch.setattr(checks, "may_read", lambda tensor: False)  # as on a GPU
    return found


def emulate(
    monkeypatch: pytest.MonkeyPatch,
    number: int = 75,
    tried: bool = False,
    sources: Path = nvrtc.SOURCES,
    seed: int = 1,
    truncates: bool = False,
    held: float = torch.nan,
    one_tile: bool = False,
) -> LaunchRecord:
    """As ``record``, and the emulator computes every launch; it allows no access outside of the call's tensors.

    Memory comes filled with ``held`` and other rubbish. sources: the folder of the kernels' sources; seed: orders a
    launch's blocks and warps; truncates: whether tensor cores do as Turing's do; one_tile: as in ``record``
    """
    from tests.kernels import emulate as emulator

    if emulator.skip_reason():
        pytest.skip(emulator.skip_reason())
    by_thread: dict[int, list[Tensor]] = defaultdict(list)  # or they would push each other's out
    run, empty, workspace = launcher.Plan.run, torch.empty, workspaces.acquire
    launch_over = launcher.launch_over

    def known_run(
        plan: launcher.Plan, tensors: Any, length: Any = None, given_out: Any = None, others: Sequence[Any] = ()
    ) -> dict[str, Tensor]:  # fmt: skip
        given = *tensors, given_out, *others
        by_thread[threading.get_ident()].extend(tensor for tensor in given if isinstance(tensor, Tensor))
        return run(plan, tensors, length, given_out, others)

    def known_empty(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = empty(*args, **kwargs)
        if found.is_cpu and type(found) is Tensor:  # a fake one has no memory
            rubbish = int.from_bytes(b"\x5b" * found.element_size(), "little")  # a large number, as floats go, too
            filling = held if found.is_floating_point() else rubbish
            by_thread[threading.get_ident()].append(found.detach().fill_(filling))  # it may be a leaf
        return found

    def known_allocate(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        return known_empty(math.prod(shape), dtype=dtype, device="cpu").as_strided(shape, strides)

    def known_launch(tensors: Sequence[Tensor], *others: Any) -> None:
        by_thread[threading.get_ident()].extend(tensors)
        launch_over(tensors, *others)

    def known_workspace(*args: Any) -> Tensor:
        found = workspace(*args)
        by_thread[threading.get_ident()].append(found)
        return found

    def compute(launch: Launch, content: bytes) -> None:
        variant = launch.variant
        source, macros = sources / variant.source, dict(variant.macros)
        compiled = emulator.compile_kernel(source, variant.entry, macros, variant.text)
        rules = emulator.Rules(seed, number, truncates, found.rows_overlap)
        memory = by_thread[threading.get_ident()][-64:]
        found.conflicts.append(compiled.launch(content, launch.blocks, variant.threads, variant.shared, memory, rules))

    found = record(monkeypatch, number, tried, compute, one_tile)
    monkeypatch.setattr(launcher.Plan, "run", known_run)
    monkeypatch.setattr(launcher, "launch_over", known_launch)
    monkeypatch.setattr(workspaces, "acquire", known_workspace)
    monkeypatch.setattr(torch, "empty", known_empty)
    for module in (launcher, backward):
        monkeypatch.setattr(module, "allocator", lambda place, device: known_allocate)
    return found


def share_grids(monkeypatch: pytest.MonkeyPatch, shares: bool = True) -> None:
    """Packed sequences share a grid, whether that pays or not, or none does."""
    grid = functools.partial(grids.choose_grid, shares=shares)
    monkeypatch.setattr(grids, "choose_grid", lambda *shape, clears=True, shares=False: grid(*shape, clears=clears))


def sparse(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory where they are touched alone, so that there may be more of them than memory."""
    no_reserve: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # which Python names from 3.11 on
    memory = mmap.mmap(-1, elements * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=dtype)
