"""From kernel sources to something a GPU can run: for which architecture, kept under which name, given which struct."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from flash_attn_compat.backends.fused.building import kernel_files, nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import Kernel, KernelError, Target
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.variants import Kind, Variant
from flash_attn_compat.backends.fused.launching import params
from flash_attn_compat.core import cuda_capture

VARIANT = variants.forward(Kind(75, variants.FP16, 64))
FIELDS = (*params.HEAD_FIELDS, *params.REST_FIELDS)
KNOWN = (75, 80, 86, 89, 90, 100)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a Turing GPU, as far as the loader can see."""
    monkeypatch.setattr(nvrtc, "compiler", lambda: SimpleNamespace(version=(13, 0), architectures=KNOWN))
    monkeypatch.setattr(nvrtc, "real_capability", lambda device: (7, 5))
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CAPABILITY", raising=False)
    monkeypatch.setattr(nvrtc, "_kernels", {})
    monkeypatch.setattr(nvrtc, "_locks", {})
    return monkeypatch


# ---- for which architecture


@pytest.mark.parametrize(
    ("real", "forced", "expected"),
    [
        ((7, 5), None, Target("sm_75", 75)),
        ((8, 9), None, Target("sm_89", 89)),
        ((9, 0), "7.5", Target("compute_75", 75)),
        ((9, 0), "7.0", Target("compute_75", 75)),
        ((9, 0), "8.0", Target("sm_90", 90)),
        ((7, 5), "9.0", Target("sm_75", 75)),
        ((12, 1), None, Target("compute_100", 100)),
    ],
)
def test_kernels_are_made_for_the_gpu_or_the_forced_capability(
    real: tuple[int, int], forced: str | None, expected: Target, gpu: pytest.MonkeyPatch
) -> None:
    gpu.setattr(nvrtc, "real_capability", lambda device: real)
    if forced:
        gpu.setenv("FLASH_ATTN_COMPAT_CAPABILITY", forced)
    assert nvrtc.target(0) == expected


def test_an_nvrtc_that_has_forgotten_turing_is_an_error(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(nvrtc, "compiler", lambda: SimpleNamespace(version=(14, 0), architectures=(80, 90)))
    with pytest.raises(KernelError, match="80 and newer, the GPU is 75"):
        nvrtc.target(0)


# ---- once


def loading(gpu: pytest.MonkeyPatch, kept: bytes | None = None, understood: bytes = b"fresh") -> list[str]:
    """Return a driver that loads one machine code only, and its record."""
    done: list[str] = []

    def load(variant: Variant, code: bytes, device: int) -> Kernel:
        done.append(f"load {code.decode()}")
        if code != understood:
            raise KernelError("CUDA driver: CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
        return Kernel(ctypes.c_void_p(1), variant.threads, variant.shared)

    def binary(variant: Variant, architecture: str) -> bytes:
        done.append("compile")
        time.sleep(0.05)
        return b"fresh"

    gpu.setattr(nvrtc, "driver", lambda: SimpleNamespace(load=load))
    gpu.setattr(nvrtc, "compile_variant", binary)
    gpu.setattr(kernel_files, "read", lambda name: kept)
    gpu.setattr(kernel_files, "write", lambda name, payload: done.append(f"keep {payload.decode()}") or True)
    return done


@pytest.mark.parametrize(
    ("kept", "understood", "expected"),
    [
        (None, b"fresh", ["compile", "keep fresh", "load fresh"]),
        (b"old", b"old", ["load old"]),
        (b"old", b"fresh", ["load old", "compile", "keep fresh", "load fresh"]),
    ],
)
def test_a_kernel_is_loaded_once_for_all_threads_of_a_device_and_compiled_only_where_none_is_kept(
    kept: bytes | None, understood: bytes, expected: list[str], gpu: pytest.MonkeyPatch
) -> None:
    done = loading(gpu, kept, understood)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(nvrtc.kernel, [VARIANT] * 8, [0] * 8))
    assert done == expected
    nvrtc.kernel(VARIANT, 1)
    assert done == expected * 2


def test_a_capture_is_not_left_to_other_threads(gpu: pytest.MonkeyPatch) -> None:
    done = loading(gpu)
    gpu.setattr(cuda_capture, "is_capturing", lambda device: True)
    nvrtc.load_all([VARIANT, variants.delta(Kind(75, variants.FP16, 64))], 0)
    assert done == []


@pytest.mark.parametrize("captures", [False, True])
def test_kernels_are_loaded_ahead_by_other_threads_but_not_during_a_capture(
    captures: bool, gpu: pytest.MonkeyPatch
) -> None:
    done = loading(gpu)
    gpu.setattr(cuda_capture, "is_capturing", lambda device: captures)
    for thread in nvrtc.load_ahead([VARIANT], 0):
        thread.join()
    assert done == ([] if captures else ["compile", "keep fresh", "load fresh"])


def test_an_error_of_a_kernel_loaded_ahead_is_raised_where_it_is_needed(gpu: pytest.MonkeyPatch) -> None:
    done = loading(gpu, understood=b"nothing")
    gpu.setattr(cuda_capture, "is_capturing", lambda device: False)
    nvrtc.load_ahead([VARIANT], 0)
    with pytest.raises(KernelError, match="UNSUPPORTED_PTX_VERSION"):
        nvrtc.kernel(VARIANT, 0)
    assert done.count("compile") == 1


def test_a_failure_in_a_capture_names_the_remedy_and_is_not_remembered(gpu: pytest.MonkeyPatch) -> None:
    loading(gpu, understood=b"nothing")
    gpu.setattr(cuda_capture, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"forward kernel .* make the same call once before the capture") as caught:
        nvrtc.kernel(VARIANT, 0)
    assert not isinstance(caught.value, KernelError)
    gpu.setattr(cuda_capture, "is_capturing", lambda device: False)
    done = loading(gpu, understood=b"nothing")
    for _ in range(2):
        with pytest.raises(KernelError, match="UNSUPPORTED_PTX_VERSION"):
            nvrtc.kernel(VARIANT, 0)
    assert done.count("compile") == 1, "outside of a capture it is remembered"


# ---- NVRTC itself


@pytest.fixture(scope="module")
def real_compiler() -> nvrtc.Compiler:
    try:
        return nvrtc.compiler()
    except KernelError as error:
        pytest.skip(f"no NVRTC here: {error}")


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_log(
    real_compiler: nvrtc.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"broken.cu": '#include "part.cuh"\nint x = undeclared_name;', "part.cuh": "#pragma once\n"}
    monkeypatch.setattr(nvrtc, "read_source", texts.__getitem__)
    monkeypatch.setattr(nvrtc, "HEADERS", ("part.cuh",))
    with pytest.raises(KernelError, match=r"refuses broken.cu(.|\n)*undeclared_name"):
        real_compiler.compile("broken.cu", ("--gpu-architecture=compute_75",))


# ---- the struct that kernels get


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to ask for the layout of the C struct")
def test_python_and_c_agree_on_every_field(tmp_path: Path) -> None:
    ends = itertools.accumulate((struct.calcsize(f"<{kind}") for _, kind in FIELDS), initial=0)
    places = [*(f"offsetof(Params, {name})" for name, _ in FIELDS), "sizeof(Params)"]
    asserted = [f"static_assert({place} == {end});" for place, end in zip(places, ends, strict=True)]
    program = tmp_path / "layout.cpp"
    program.write_text("\n".join(["#include <cstddef>", '#include "base/params.cuh"', *asserted]))
    command = ["g++", "-std=c++17", "-w", "-fsyntax-only", f"-I{nvrtc.SOURCES}", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(KeyError, match="seqlen_x"):
        params.pack_rest({"seqlen_x": 1})


def test_addresses_in_another_order_than_the_structs_are_refused() -> None:
    head = params.head_struct(["q", "v", "delta"])
    names, kinds = zip(*params.HEAD_FIELDS, strict=True)
    written = dict(zip(names, struct.unpack("<" + "".join(kinds), head.pack(1, 2, 3, 4)), strict=True))
    assert {name: value for name, value in written.items() if value} == {"q": 1, "v": 2, "delta": 3, "seqlen_k": 4}
    for given in (["v", "q"], ["q", "q"], ["q", "w"]):
        with pytest.raises(ValueError, match="in the order of struct Params"):
            params.head_struct(given)
