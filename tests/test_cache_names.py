"""Nothing that is remembered outlives what it was made from: each byte of that is in the name it is kept under."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from flash_attn_compat.backends.fused import loader, trial, variants, verdicts
from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.backends.fused.variants import FP16, Kind
from tests.kernels import emulate

KIND = Kind(75, FP16, 64, local=True)
HEADERS = {path.name for path in loader.SOURCES.glob("*.cuh")}
MACROS = ("-DD=64", "-DLOCAL=1")


class Cache(NamedTuple):
    """How what is kept is named, from which files of the copy, and what else goes into it."""

    name: Callable[[], str]
    files: set[str]
    options: dict[str, Callable[[pytest.MonkeyPatch], object]]
    folder: str = "cuda"


def compiler(*version: int) -> Callable[[], Any]:
    return lambda: SimpleNamespace(version=version)


def other_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loader, "compiler", compiler(12, 9))


def other_option(patch: pytest.MonkeyPatch) -> None:
    options = loader.options
    patch.setattr(loader, "options", lambda *given: (*options(*given), "--use_fast_math"))


def other_target(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loader, "target", lambda device: Target("compute_75", 75))


def other_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loader, "device_name", lambda device: "Tesla T4x")


def other_driver(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loader, "driver", lambda: SimpleNamespace(version=(12, 8)))


def other_pytorch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "2.99")


COMPILED = {"compiler": other_compiler, "option": other_option, "architecture": other_target}
CACHES = {
    "kernel": Cache(
        lambda: loader.cache_name(variants.forward(KIND), loader.target(0).architecture),
        {"forward.cu", *HEADERS},
        COMPILED,
    ),
    "trial of a backward": Cache(
        lambda: trial._file(tuple(make(KIND) for make in (variants.delta, variants.dkdv, variants.dq)), 0),
        {"delta.cu", "dkdv.cu", "dq.cu", *HEADERS},
        {**COMPILED, "GPU": other_gpu, "driver": other_driver},
    ),
    "what a trial asks": Cache(
        lambda: trial._file((variants.forward(KIND),), 0), {path.name for path in trial._CODE.glob("*.py")}, {}, "fused"
    ),
    "what was tuned": Cache(
        lambda: verdicts._file("Tesla T4"),
        {path.name for path in loader.SOURCES.glob("*.cu*")},
        {"PyTorch": other_pytorch},
    ),
}


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with copies of all that something is made from, which count instead of the originals."""
    for name, original in (("cuda", loader.SOURCES), ("fused", trial._CODE), ("kernels", emulate.HERE)):
        shutil.copytree(original, tmp_path / name)
    monkeypatch.setattr(loader, "SOURCES", tmp_path / "cuda")
    monkeypatch.setattr(trial, "_CODE", tmp_path / "fused")
    monkeypatch.setattr(emulate, "SOURCES", tmp_path / "cuda")
    monkeypatch.setattr(emulate, "HERE", tmp_path / "kernels")
    monkeypatch.setattr(emulate, "ENGINE", tmp_path / "kernels/engine.cpp")
    monkeypatch.setattr(loader, "compiler", compiler(12, 8))
    monkeypatch.setattr(loader, "target", lambda device: Target("sm_75", 75))
    monkeypatch.setattr(loader, "device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(loader, "driver", lambda: SimpleNamespace(version=(12, 4)))
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def forget() -> None:
    """What this process has read."""
    loader.source.cache_clear()
    trial._asked.cache_clear()


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
def test_each_file_and_option_is_in_the_name_of_what_is_kept(
    what: str, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, files, options, folder = CACHES[what]
    names = [name()]
    for file in sorted(files):
        names += [with_a_byte_flipped(copies / folder / file, place, name) for place in (0.0, 0.5, 1.0)]
    assert names[0] == name()
    for change in options.values():
        with monkeypatch.context() as patch:
            change(patch)
            names.append(name())
    assert len(set(names)) == len(names)


def test_a_kernels_macros_are_in_its_name(copies: Path) -> None:
    made = variants.made_for(variants.kinds(75))
    assert len({loader.cache_name(variant, "sm_75") for variant in made}) == len(made)


@pytest.mark.skipif(bool(emulate.why_not()), reason=emulate.why_not())
@pytest.mark.parametrize("source", ["cuda/forward.cu", "copy/forward.cu", "kernels/machine.cu"])
def test_each_file_and_option_is_in_the_name_of_an_emulated_library(
    source: str, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever its source lies: a library is kept for the next run of the tests."""
    (copies / "copy").mkdir()
    shutil.copy(copies / "cuda/forward.cu", copies / "copy")
    shutil.copy(copies / "cuda/splits.cuh", copies / "copy")

    def name() -> str:
        return emulate.built_name(copies / source, MACROS)

    files = [copies / source, emulate.ENGINE]
    files += [path for pattern in ("cuda/*.cuh", "copy/*.cuh", "kernels/*.h") for path in copies.glob(pattern)]
    if source.startswith(("cuda", "kernels")):
        files.remove(copies / "copy/splits.cuh")
    names = [name()]
    names += [with_a_byte_flipped(file, place, name) for file in files for place in (0.0, 0.5, 1.0)]
    assert names[0] == name()
    names += [emulate.built_name(copies / source, (*MACROS, "-DX=1"))]
    others = ("ENGINE_OPTIONS", ("-O3",)), ("LIBRARIES", ("-lc",)), ("compiler_version", lambda: "g++ 99")
    for option, value in others:
        with monkeypatch.context() as patch:
            patch.setattr(emulate, option, value)
            names.append(name())
    assert len(set(names)) == len(names)


@pytest.mark.skipif(bool(emulate.why_not()), reason=emulate.why_not())
def test_a_copy_of_the_sources_shares_the_libraries_of_what_did_not_change_in_it(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(emulate.SOURCES, copy)
    (copy / "dq.cu").write_text("")
    names = [emulate.built_name(folder / "forward.cu", MACROS) for folder in (copy, emulate.SOURCES)]
    assert names[0] == names[1]
