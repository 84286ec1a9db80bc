"""Kernels before a GPU runs them: compiled ahead, their macros as docs/kernels.md lists them, and cached names."""

from __future__ import annotations

import functools
import itertools
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_compat import cli, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused import flex
from flash_attn_compat.backends.fused.building import aot, kernel_files, nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import KernelError
from flash_attn_compat.backends.fused.choosing import enumeration, variants
from flash_attn_compat.backends.fused.choosing.kinds import (
    BF16_AS_FP16,
    BOOLEANS,
    FP16,
    HALF_BIAS,
    HEAD_DIMS,
    Hints,
    KernelFeatures,
    Kind,
    Sizes,
    size_of,
)
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.judging import self_test
from flash_attn_compat.backends.fused.tuning import tuned
from tests import fused_coverage, paper_gpu
from tests.forms.inputs import ints
from tests.forms.support import check_refused_in_one_line
from tests.kernels import emulate, fused_on_cpu, offline

ONLY = ["--head-dim", "64", "--dtype", "float16"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Variant]:
    """Replace NVRTC by an old and quick one; return the requested variants."""
    asked: list[Variant] = []

    def binary(variant: Variant, architecture: str) -> bytes:
        asked.append(variant)
        return f"{variant.entry} for {architecture}".encode()

    paper_gpu.build_for(monkeypatch, version=(12, 9), architectures=(70, 75, 90))
    monkeypatch.setattr(nvrtc, "compile_variant", binary)
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", str(tmp_path / "kernels"))
    return asked


@pytest.mark.parametrize(("real", "forced"), [((7, 5), None), ((9, 0), None), ((9, 0), "7.5")])
def test_a_gpu_finds_kernels_compiled_ahead(
    real: tuple[int, int], forced: str | None, compiled: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = "compute_75" if forced else f"sm_{real[0]}{real[1]}"
    assert cli.main(["compile", "--for", architecture, *ONLY]) == 0
    paper_gpu.build_for(monkeypatch, real, (12, 9), (70, 75, 90))
    if forced:
        monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", forced)
    for flags in ({}, {"local": True}, {"local": True, "softcap": True}, {"dropout": True}):
        for variant in enumeration.made_for([Kind(nvrtc.target_number(0), FP16, Sizes(64)).replace(**flags)]):
            kept = kernel_files.read(nvrtc.cache_name(variant, nvrtc.target(0)))
            assert kept == f"{variant.entry} for {architecture}".encode()


@pytest.mark.parametrize("asks", ["option", "variable", "nobody"])
def test_kernels_for_dense_masks_are_compiled_where_sdpa_is_asked_for(
    asks: str, compiled: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    if asks == "variable":
        monkeypatch.setenv("FLASH_ATTN_COMPAT_SDPA", "1")
    assert cli.main(["compile", "--for", "sm_75", *ONLY, *(["--sdpa"] if asks == "option" else [])]) == 0
    kinds = [
        Kind(75, FP16, Sizes(64), KernelFeatures(bias=BOOLEANS)),
        Kind(75, FP16, Sizes(64), KernelFeatures(bias=HALF_BIAS, bias_pairs=True)),
    ]
    kinds += [kind.replace(few_rows=True) for kind in kinds]
    of_masks = {variant for variant in enumeration.made_for(kinds) if "BIAS" in dict(variant.macros)}
    assert {variant.entry for variant in of_masks} == {"mask", "forward", "dkdv", "dq"}
    assert of_masks <= set(compiled) if asks != "nobody" else of_masks.isdisjoint(compiled)


def test_compile_shows_progress_and_skips_cached_kernels(
    compiled: list[Variant], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert cli.main(["compile", "--for", "sm_75", *ONLY]) == 0
    said, count = capsys.readouterr(), len(set(compiled))
    first, *lines = said.err.splitlines()[: said.err.splitlines().index(f"{count}/{count}") + 1]
    assert first.startswith(f"{count} ") and 3 < len(lines) <= 21 and lines[0].startswith("1/")
    told = said.out.splitlines()
    assert count == len(compiled) and told[0].startswith(f"{count} kernels compiled, 0 were there")
    assert told[1].startswith(f"0 kernels compiled, {count} were there")


def test_a_kernel_that_fails_to_compile_is_named_and_the_others_are_kept(
    compiled: list[Variant], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def binary(variant: Variant, architecture: str) -> bytes:
        if variant.entry == "delta":
            raise KernelError("NVRTC refuses delta.cu")
        return b"code"

    monkeypatch.setattr(nvrtc, "compile_variant", binary)
    assert cli.main(["compile", "--for", "sm_75", *ONLY]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "flash-attn-compat: NVRTC refuses delta.cu"
    assert len(list(kernel_files.folder().iterdir())) > 10


def test_a_folder_that_keeps_nothing_is_an_error_before_anything_is_compiled(
    compiled: list[Variant], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["compile", "--for", "sm_75", *ONLY, "--into", str(tmp_path / "file")]) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"flash-attn-compat: {tmp_path / 'file'} cannot be written: ") and not compiled


def test_without_a_home_directory_the_variable_that_names_a_folder_is_told_before_anything_is_compiled(
    compiled: list[Variant], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", "~nobody-of-this-name/kernels")
    assert cli.main(["compile", "--for", "sm_75", *ONLY]) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert "there is no home directory: set FLASH_ATTN_COMPAT_CACHE to a folder" in told and not compiled


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", ["sm_70", "sm_80", "turing", "sm_"])
def test_an_unsupported_architecture_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused_in_one_line(
        cli.main, ["compile", "--for", name], f"unknown architecture {name!r}; choose from sm_75, sm_90", capsys
    )


@pytest.mark.parametrize(("cuda", "wheel"), [("12.8", "nvidia-cuda-nvrtc-cu12"), (None, "nvidia-cuda-nvrtc")])
def test_without_nvrtc_the_package_to_install_is_named_before_anything_is_done(
    cuda: str | None, wheel: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(nvrtc, "library_paths", lambda major: [])
    monkeypatch.setattr(nvrtc, "compiler", nvrtc.compiler.__wrapped__)
    check_refused_in_one_line(cli.main, ["compile", "--for", "sm_75"], f"pip install {wheel} brings it", capsys)


PROGRAMS: dict[str, Callable[[], object]] = {
    "a LoRA step of a 7B model": lambda: train(flash_attn_func, (1, 300, 32, 128), (1, 300, 8, 128), causal=True),
    "the same in bf16": lambda: train(
        flash_attn_func, (1, 3000, 4, 128), (1, 3000, 4, 128), torch.bfloat16, causal=True
    ),
    "its generation": lambda: flash_attn_with_kvcache(
        half(2, 1, 32, 128), half(2, 500, 8, 128), half(2, 500, 8, 128), half(2, 1, 8, 128), half(2, 1, 8, 128),
        cache_seqlens=ints(400, 17), causal=True,
    ),
    "packed BERT": lambda: train(
        lambda *qkv, **options: flash_attn_varlen_func(*qkv, *[ints(0, 200, 512)] * 2, 312, 312, **options),
        (512, 12, 64), (512, 12, 64), dropout_p=0.1,
    ),
    "SDXL": lambda: flash_attn_func(half(2, 1024, 10, 64), half(2, 77, 10, 64), half(2, 77, 10, 64)),
    "SD 1.5": lambda: [flash_attn_func(*[half(2, 4096, 8, d)] * 3) for d in (40, 80, 160)],
}  # fmt: skip


def half(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def train(
    function: Callable[..., Any],
    q: tuple[int, ...],
    k: tuple[int, ...],
    dtype: torch.dtype = torch.float16,
    **options: Any,
) -> None:
    leaves = [half(*shape, dtype=dtype).requires_grad_() for shape in (q, k, k)]
    function(*leaves, **options).sum().backward()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_usual_kernels_are_all_that_a_program_launches(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch)
    with use_backend("fused"):
        PROGRAMS[program]()
    usual = set(enumeration.made_for(aot.usual_kinds(75)))
    assert launches.seen and {launch.variant for launch in launches.seen} <= usual
    assert len(usual) < 110


def test_a_head_dim_and_a_dtype_are_enough_for_their_calls() -> None:
    made = enumeration.made_for(aot.common_kinds(75, (80,), ("bfloat16",)))
    macros = [dict(variant.macros) for variant in made]
    assert {one["TYPE"] for one in macros} == {BF16_AS_FP16}
    assert {(one.entry, dict(one.macros)["D"]) for one in made if one.entry != "append"} == {
        *((entry, 80) for entry in ("forward", "dkdv", "dq")),
        *((entry, 128) for entry in ("decode", "absmax", "to_half", "delta")),
    }
    of_most = enumeration.made_for(aot.common_kinds(75, (), ()))
    assert {dict(one.macros)["D"] for one in of_most if one.entry == "dq"} == {32, 64, 80, 96, 128, 256}


# ---- shared memory


@pytest.mark.parametrize("number", [75, 80, 90])
def test_tiles_of_every_size_fit_the_shared_memory_of_a_multiprocessor(number: int) -> None:
    most = {75: 64, 80: 163, 90: 227}[number] * 1024
    for D, few_rows, DV, entry in itertools.product(
        HEAD_DIMS, (False, True), (0, *HEAD_DIMS), ("forward", "dkdv", "dq")
    ):
        kind = Kind(number, FP16, Sizes(D, head_dim_v=DV or D), hints=Hints(few_rows=few_rows))
        variant = getattr(variants, entry)(kind)
        assert variant.shared <= most, (kind, variant)
        if number == 75:
            assert variant.shared * offline.blocks(variant) <= most, (kind, variant)


# ---- what is asked for


def test_a_head_dim_takes_the_next_size_and_no_larger_one() -> None:
    assert [size_of(head_dim) for head_dim in (1, 16, 17, 40, 72, 96, 104, 129, 200, 256, 257)] == [
        16, 16, 32, 48, 80, 96, 112, 160, 224, 256, 512,
    ]  # fmt: skip
    assert all(size % 16 == 0 and math.gcd(size, 128) >= 16 for size in HEAD_DIMS)


# ---------------------------------------------------------------- the kernels' macros

PAGE = Path(__file__).parents[2] / "docs/kernels.md"
_ROW = re.compile(r"^\| `([A-Z0-9_]+)` \| ([^|]+) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
SOURCES = sorted(nvrtc.SOURCES.rglob("*.cu*"))


@functools.cache
def all_variants() -> list[Variant]:
    """Of Turing and of a newer GPU; each macro at each of its values."""
    found: list[Variant] = []
    for number in (75, 90):
        kinds = [*fused_coverage.kinds(number), *fused_coverage.masked_kinds(number)]
        kinds += fused_coverage.eight_bit_kinds(number)
        kinds.append(Kind(number, FP16, Sizes(192, head_dim_v=128)))
        found += enumeration.made_for(kinds)
    packed = Kind(75, FP16, Sizes(64))
    makers = variants.forward, variants.delta, variants.dkdv, variants.dq
    mods, blocks = (
        flex.Mods("", True, True, (0,)),
        flex.Blocks(128, 128, flex.BlockLists(torch.empty(0), torch.empty(0))),
    )
    found += [flex.make_variant(make.__name__, packed, mods, of) for make in makers for of in (None, blocks)]
    return [*found, *(variants.with_shared_grid(make(packed)) for make in makers)]


def table() -> dict[str, tuple[str, set[str]]]:
    """Each macro's values and kernels, as the page has them."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Macros\n")[2].partition("\n## ")[0]
    return {macro: (values, set(kernels.split(", "))) for macro, values, kernels in _ROW.findall(text)}


def includes(source: str) -> str:
    """A source with all headers that it includes, one after the other."""
    text = (nvrtc.SOURCES / source).read_text(encoding="utf-8")
    headers = re.findall(r'^#include "([\w/]+\.cuh)"', text, re.MULTILINE)
    return text + "".join(includes(header) for header in headers if header != nvrtc.GENERATED)


def test_the_page_lists_every_macro_with_the_kernels_whose_variants_set_it() -> None:
    kernels: dict[str, set[str]] = defaultdict(set)
    for variant in all_variants():
        for macro, _ in variant.macros:
            kernels[macro].add(variant.entry)
    assert {macro: entries for macro, (_, entries) in table().items()} == kernels
    assert kernels.keys() >= variants.DEFAULTS.keys()


def test_the_page_lists_every_value_that_a_macro_takes() -> None:
    taken: dict[str, set[int]] = defaultdict(set)
    for variant in all_variants():
        for macro, value in variant.macros:
            taken[macro].add(value)
    for macro, (values, _) in table().items():
        numbers = [int(number) for number in re.findall(r"\d+", values)]
        listed = set(range(numbers[0], numbers[-1] + 1)) if " to " in values else set(numbers)
        assert taken[macro] <= listed, macro


@pytest.mark.parametrize("entry", sorted(variants.MAKERS))
def test_the_sources_of_a_kernel_read_each_macro_of_its_variants(entry: str) -> None:
    name = "decode" if entry == "decode_append" else entry
    made = [variant for variant in all_variants() if variant.entry == name]
    text = re.sub(r"//.*", "", includes(made[0].source))
    for macro in {macro for variant in made for macro, _ in variant.macros}:
        assert re.search(rf"\b{macro}\b", text), macro


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_line_of_a_kernel_source_is_longer_than_120_columns(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 120] == []


# ---------------------------------------------------------------- cached files depend on every byte of their sources

KIND = Kind(75, FP16, Sizes(64), KernelFeatures(local=True))
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
    "architecture": other(nvrtc, "target", lambda device: "compute_75"),
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
EMULATOR = {f"kernels/{path.name}" for path in emulate.HERE.glob("*.*h")} | {"kernels/engine.cpp"}
BACKWARD = tuple(make(KIND) for make in (variants.delta, variants.dkdv, variants.dq))
CACHES = {
    "kernel": Cache(
        lambda copies: nvrtc.cache_name(variants.forward(KIND), nvrtc.target(0)),
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
    monkeypatch.setattr(nvrtc, "target", lambda device: "sm_75")
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
    names, places = [name()], (0.0, 0.5, 1.0)
    for file in sorted(files):
        names.append(with_a_byte_flipped(copies / file, places[len(names) % 3], name))
    assert names[0] == name()
    for change in options.values():
        with monkeypatch.context() as patch:
            change(patch)
            names.append(name())
    assert len(set(names)) == len(names)


def test_macros_are_in_the_names_of_kernels_and_libraries(copies: Path) -> None:
    made = enumeration.made_for(fused_coverage.kinds(75))
    assert len({nvrtc.cache_name(variant, "sm_75") for variant in made}) == len(made)
    if not emulate.skip_reason():
        assert len({emulate.built_name(copies / "cuda/dq.cu", macros) for macros in ((), MACROS)}) == 2
