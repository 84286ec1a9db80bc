"""engine/jiterated.py's CUDA kernels compiled for a CPU by g++, thread after thread, so that they are tested anywhere."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends.base import HALF_DTYPES
from flash_attn_compat.engine import jiterated

_CUDA = """
#include <cmath>
#include <cstring>
struct float4 { float x, y, z, w; };
struct uint4 { unsigned int x, y, z, w; };
static uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }
#define __logf(x) std::log(x)
#define __expf(x) std::exp(x)
static float __fdividef(float x, float y) { return x / y; }
static unsigned int __float_as_uint(float x) { unsigned int y; std::memcpy(&y, &x, 4); return y; }
static float __uint_as_float(unsigned int x) { float y; std::memcpy(&y, &x, 4); return y; }
"""

_FLOAT16 = """
  auto bits_of = [](float x) { _Float16 y = (_Float16)x; unsigned short z; std::memcpy(&z, &y, 2); return (unsigned int)z; };
  auto pack = [&](float low, float high) { return bits_of(low) | (bits_of(high) << 16); };
  auto float_of = [](unsigned short x) { _Float16 y; std::memcpy(&y, &x, 2); return (float)y; };
  auto unpack = [&](unsigned int bits, float& low, float& high) {
    low = float_of(bits & 0xFFFF); high = float_of(bits >> 16); };
"""

_LOOP = """
extern "C" void run(long long count, const float* const* tensors, const double* scalars, float* found) {{
  for (long long i = 0; i < count; ++i) found[i] = {name}<float>({arguments});
}}
"""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run on CPU tensors from now on; skips where there is no g++ that knows _Float16."""
    reason = _lacks()
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(jiterated.Kernel, "_launch", _launch)
    monkeypatch.setattr(
        jiterated, "places", lambda count, device: torch.arange(count, dtype=torch.float32, device=device)
    )
    monkeypatch.setattr(jiterated, "why_not", lambda device, dtype, trial: "" if dtype in HALF_DTYPES else "no")


def devices() -> Iterator[object]:
    """Where kernels can be tried: "cpu" after install(), and a GPU."""
    yield "cpu"
    yield pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))


@functools.lru_cache(maxsize=None)
def _lacks() -> str:
    if shutil.which("g++") is None:
        return "no g++ to compile the kernels for the CPU with"
    probe = ["g++", "-x", "c++", "-std=c++17", "-fsyntax-only", "-"]
    found = subprocess.run(probe, input="_Float16 x;", capture_output=True, text=True)
    return "this g++ has no _Float16" if found.returncode else ""


def _launch(
    kernel: jiterated.Kernel, dtype: torch.dtype, tensors: tuple[Tensor, ...], scalars: dict[str, float]
) -> Tensor:
    source = kernel.source.replace("HALVES", _FLOAT16 if dtype == torch.float16 else jiterated._HALVES[dtype])
    run = _library(source, len(tensors), len(scalars)).run
    broadcast = [tensor.contiguous() for tensor in torch.broadcast_tensors(*tensors)]
    found = torch.empty_like(broadcast[0])
    run(
        ctypes.c_longlong(found.numel()),
        (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in broadcast)),
        (ctypes.c_double * len(scalars))(*(scalars[name] for name in kernel.scalars)),
        ctypes.c_void_p(found.data_ptr()),
    )
    return found


@functools.lru_cache(maxsize=None)
def _library(source: str, tensors: int, scalars: int) -> ctypes.CDLL:
    name = torch.cuda.jiterator._create_jit_fn(source).kernel_name
    arguments = [f"tensors[{index}][i]" for index in range(tensors)] + [f"scalars[{index}]" for index in range(scalars)]
    code = _CUDA + source + _LOOP.format(name=name, arguments=", ".join(arguments))
    folder = Path(tempfile.mkdtemp())
    library = folder / f"{hashlib.sha256(code.encode()).hexdigest()[:16]}.so"
    command = ["g++", "-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-o", str(library), "-"]
    subprocess.run(command, input=code, text=True, check=True)
    try:
        return ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(folder)
