"""Helpers of several test files: the general backends, small inputs, and comparisons."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_attn_compat
from flash_attn_compat.backends import Backend
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.arguments import call_of
from flash_attn_compat.core.call import AttentionCall, Result
from flash_attn_compat.core.entry import Run
from flash_attn_compat.core.inputs import Inputs, Options
from flash_attn_compat.dispatch import call_cache, choice
from tests.tools.interpreters import forked_group

GENERAL = ("reference", "chunked", "sdpa")  # the backends of any device
on_general_backends = pytest.mark.parametrize("backend", GENERAL)


def driver_stand_in(folder: Path) -> str:
    """The library that answers as the CUDA driver does without a GPU, compiled into ``folder``."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: the stand-in for the driver cannot be compiled")
    target, source = folder / "driver.so", Path(__file__).parents[1] / "kernels" / "driver.cpp"
    subprocess.run(["g++", "-std=c++17", "-O0", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return str(target)


def load_file(path: Path) -> ModuleType:
    """Return the module of a file that lies in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_threads(work: Callable[[], object], count: int) -> None:
    """Call ``work`` in ``count`` threads at once; an error in one is raised here."""
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work) for _ in range(count)]:
            done.result()


def seed_random_numbers(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, which takes a millisecond without a GPU: it records its caller for each that is unused."""
    (torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed)(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000 * sum(shape))).to(dtype)


def qkv(
    b: int = 2,
    sq: int = 7,
    sk: int = 7,
    h: int = 2,
    hk: int | None = None,
    d: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    hk = hk or h
    return (
        randn(b, sq, h, d, seed=1, dtype=dtype),
        randn(b, sk, hk, d, seed=2, dtype=dtype),
        randn(b, sk, hk, d, seed=3, dtype=dtype),
    )


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cumulative(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


class OnGpu(Tensor):
    """A tensor in the host's memory that says it lies on a GPU."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


# Ways to write that leave the version of ``t`` as it is, or the tensor another one.
UNSEEN: dict[str, Callable[[Tensor, Tensor], object]] = {
    "numpy": lambda t, new: numpy.copyto(t.as_subclass(Tensor).numpy(), new.numpy()),
    "data": lambda t, new: t.data.copy_(new),
    "another tensor's data": lambda t, new: setattr(t, "data", new.as_subclass(type(t))),
    "in place": lambda t, new: t.copy_(new),
}


def on_backend(backend: str, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """The call on one backend; the test is skipped, with the backend's reasons, where that one does not serve it."""
    with flash_attn_compat.use_backend(backend):
        try:
            return fn(*args, **kwargs)
        except flash_attn_compat.BackendNotSupported as refusal:
            if backend in ("reference", "chunked"):
                raise
            pytest.skip(str(refusal).splitlines()[0])


class RecordingReference(Reference):
    """The reference backend, which records its calls."""

    def __init__(self) -> None:
        self.appended: list[Append | None] = []
        self.computed: list[AttentionCall] = []

    def prepare(self, x: Inputs, options: Options, length: int | None) -> Run:
        self.appended.append(call_of(x, options, length)[1])
        return super().prepare(x, options, length)

    def forward(self, call: AttentionCall) -> Result:
        self.computed.append(call)
        return super().forward(call)


def serve_by(patch: pytest.MonkeyPatch, *backends: Backend) -> None:
    """Replace the table of backends."""
    patch.setattr(choice, "BACKENDS", backends)
    patch.setattr(call_cache, "_current", call_cache.empty_tables())


def close(ours: Tensor, right: Tensor, magnitude: Tensor | float = 1.0, epsilons: float = 16) -> None:
    """Assert equality within some roundings of ``magnitude``, the size of the summed terms; infinities are equal."""
    assert ours.shape == right.shape
    atol = epsilons * torch.finfo(ours.dtype).eps * float(magnitude)
    torch.testing.assert_close(ours.double(), right.double(), rtol=epsilons * torch.finfo(ours.dtype).eps, atol=atol)


def in_group(function: Callable[..., object], *arguments: Any) -> None:
    """function(rank, *arguments) of a test module in each of two processes of a gloo group."""
    with tempfile.TemporaryDirectory() as folder:  # in a file: another process might take a port first
        forked_group(_member, function.__module__, function.__name__, f"file://{folder}/meeting", *arguments)


def _member(rank: int, module: str, name: str, meeting: str, *arguments: Any) -> NoReturn:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2"})
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    getattr(importlib.import_module(module), name)(rank, *arguments)
    dist.barrier()
    # Seen in PyTorch 2.4 and 2.6: the group's destructor, holding the GIL, waits for a thread that wants it
    # to free a tensor.
    dist.destroy_process_group()
    os._exit(0)


def check_refused_in_one_line(
    main: Callable[[list[str]], int], arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> str:
    """A command line that makes no sense: exit code 2 and one line on stderr with ``part`` in it; returns stdout."""
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse's way
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert part in printed.err and len(printed.err.splitlines()) == 1
    return printed.out
