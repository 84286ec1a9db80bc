"""Cached files depend on every byte of their sources: each is part of the name."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import Target
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.variants import FP16, Kind
from flash_attn_compat.backends.fused.judging import self_test
from flash_attn_compat.backends.fused.tuning import tuned
from tests.kernels import emulate

KIND = Kind(75, FP16, 64, local=True)
HEADERS = {f"cuda/{name}" for name in nvrtc.HEADERS}
MACROS = ("-DD=64", "-DLOCAL=1")
Change = Callable[[pytest.MonkeyPatch], object]


class Cache(NamedTuple):
    """A cache's names: the source files, and the other values that go into them."""

    name: Callable[[Path], str]
    files: set[str]
    options: dict[str, Change]


def compiler(*version: int) -> Callable[[], Any]:
    return lambda: SimpleNamespace(version=version)


def other(module: Any, name: str, value: Any) -> Change:
    return lambda patch: patch.setattr(module, name, value)


def other_option(patch: pytest.MonkeyPatch) -> None:
    options = nvrtc.compile_options
    patch.setattr(nvrtc, "compile_options", lambda *given: (*options(*given), "--use_fast_math"))


COMPILED: dict[str, Change] = {
    "compiler": other(nvrtc, "compiler", compiler(12, 9)),
    "option": other_option,
    "architecture": other(nvrtc, "target", lambda device: Target("compute_75", 75)),
}
OF_A_GPU: dict[str, Change] = {
    "GPU": other(nvrtc, "device_name", lambda device: "Tesla T4x"),
    "driver": other(nvrtc, "driver", lambda: SimpleNamespace(version=(12, 8))),
}
EMULATED: dict[str, Change] = {
    "engine's options": other(emulate, "ENGINE_OPTIONS", ("-O3",)),
    "libraries": other(emulate, "LIBRARIES", ("-lc",)),
    "compiler": other(emulate, "compiler_version", lambda: "g++ 99"),
}
EMULATOR = {f"kernels/{path.name}" for path in emulate.HERE.glob("*.h")} | {"kernels/engine.cpp"}
BACKWARD = tuple(make(KIND) for make in (variants.delta, variants.dkdv, variants.dq))
CACHES = {
    "kernel": Cache(
        lambda copies: nvrtc.cache_name(variants.forward(KIND), nvrtc.target(0).architecture),
        {"cuda/forward.cu", *HEADERS},
        COMPILED,
    ),
    "trial of a backward": Cache(
        lambda copies: self_test._result_name(BACKWARD, 0),
        {"cuda/delta.cu", "cuda/dkdv.cu", "cuda/dq.cu", *HEADERS},
        COMPILED | OF_A_GPU,
    ),
    "what a trial asks": Cache(
        lambda copies: self_test._result_name((variants.forward(KIND),), 0),
        {f"fused/{path.relative_to(self_test._CODE).as_posix()}" for path in self_test._CODE.rglob("*.py")},
        {},
    ),
    "what was tuned": Cache(
        lambda copies: tuned._file_name("Tesla T4"),
        {*HEADERS, *(f"cuda/{path.name}" for path in nvrtc.SOURCES.glob("*.cu"))},
        {"PyTorch": other(torch, "__version__", "2.99")},
    ),
    # Wherever its source lies: a library is kept for the next run of the tests.
    **{
        f"emulated library of {source}": Cache(
            lambda copies, source=source: emulate.built_name(copies / source, MACROS),
            {source, *files, *HEADERS, *EMULATOR},
            EMULATED,
        )
        for source, files in {
            "cuda/forward.cu": (),
            "kernels/machine.cu": (),
            "copy/forward.cu": ("copy/splits.cuh",),
        }.items()
    },
}


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with copies of all that something is made from, which count instead of the originals."""
    for name, original in (("cuda", nvrtc.SOURCES), ("fused", self_test._CODE), ("kernels", emulate.HERE)):
        shutil.copytree(original, tmp_path / name)
    (tmp_path / "copy").mkdir()
    for name in ("forward.cu", "splits.cuh"):
        shutil.copy(nvrtc.SOURCES / name, tmp_path / "copy")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path / "cuda")
    monkeypatch.setattr(self_test, "_CODE", tmp_path / "fused")
    monkeypatch.setattr(emulate, "SOURCES", tmp_path / "cuda")
    monkeypatch.setattr(emulate, "HERE", tmp_path / "kernels")
    monkeypatch.setattr(emulate, "ENGINE", tmp_path / "kernels/engine.cpp")
    monkeypatch.setattr(nvrtc, "compiler", compiler(12, 8))
    monkeypatch.setattr(nvrtc, "target", lambda device: Target("sm_75", 75))
    monkeypatch.setattr(nvrtc, "device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(nvrtc, "driver", lambda: SimpleNamespace(version=(12, 4)))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def forget() -> None:
    """Clear this process's caches."""
    nvrtc.read_source.cache_clear()
    self_test._test_digests.cache_clear()


def with_a_byte_flipped(path: Path, place: float, name: Callable[[], str]) -> str:
    """The name meanwhile. place: between 0, the file's first byte, and 1, its last one"""
    content = path.read_bytes()
    at = int(place * (len(content) - 1))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    forget()
    found = name()
    path.write_bytes(content)
    forget()
    return found


@pytest.mark.parametrize("what", CACHES)
def test_each_file_and_option_is_part_of_the_cache_name(
    what: str, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what.startswith("emulated") and emulate.skip_reason():
        pytest.skip(emulate.skip_reason())
    of, files, options = CACHES[what]
    name = functools.partial(of, copies)
    names = [name()]
    for file in sorted(files):
        names += [with_a_byte_flipped(copies / file, place, name) for place in (0.0, 0.5, 1.0)]
    assert names[0] == name()
    for change in options.values():
        with monkeypatch.context() as patch:
            change(patch)
            names.append(name())
    assert len(set(names)) == len(names)


def test_macros_are_in_the_names_of_kernels_and_libraries(copies: Path) -> None:
    made = variants.made_for(list(variants.kinds(75))[::7])
    assert len({nvrtc.cache_name(variant, "sm_75") for variant in made}) == len(made)
    if not emulate.skip_reason():
        assert len({emulate.built_name(copies / "cuda/dq.cu", macros) for macros in ((), MACROS)}) == 2
