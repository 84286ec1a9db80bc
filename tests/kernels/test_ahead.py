"""flash-attn-compat compile: kernels that are in the cache before a GPU asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import cli, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused.building import aot, kernel_files, nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import KernelError
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.variants import BF16_AS_FP16, FP16, Kind, Variant
from tests.forms.inputs import ints
from tests.forms.support import check_refused_in_one_line
from tests.kernels import fused_on_cpu

ONLY = ["--head-dim", "64", "--dtype", "float16"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Variant]:
    """Replace NVRTC by an old and quick one; return the requested variants."""
    asked: list[Variant] = []

    def binary(variant: Variant, architecture: str) -> bytes:
        asked.append(variant)
        return f"{variant.entry} for {architecture}".encode()

    monkeypatch.setattr(nvrtc, "compiler", lambda: SimpleNamespace(version=(12, 9), architectures=(70, 75, 90)))
    monkeypatch.setattr(nvrtc, "compile_variant", binary)
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", str(tmp_path / "kernels"))
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CAPABILITY", raising=False)
    return asked


@pytest.mark.parametrize(("real", "forced"), [((7, 5), None), ((9, 0), None), ((9, 0), "7.5")])
def test_a_gpu_finds_kernels_compiled_ahead(
    real: tuple[int, int], forced: str | None, compiled: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = "compute_75" if forced else f"sm_{real[0]}{real[1]}"
    assert cli.main(["compile", "--for", architecture, *ONLY]) == 0
    monkeypatch.setattr(nvrtc, "real_capability", lambda device: real)
    if forced:
        monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", forced)
    target = nvrtc.target(0)
    for flags in ({}, {"local": True}, {"local": True, "softcap": True}, {"dropout": True}):
        for variant in variants.made_for([Kind(target.number, FP16, 64, **flags)]):
            kept = kernel_files.read(nvrtc.cache_name(variant, target.architecture))
            assert kept == f"{variant.entry} for {architecture}".encode()


@pytest.mark.parametrize("asks", ["option", "variable", "nobody"])
def test_kernels_for_dense_masks_are_compiled_where_sdpa_is_asked_for(
    asks: str, compiled: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    if asks == "variable":
        monkeypatch.setenv("FLASH_ATTN_COMPAT_SDPA", "1")
    assert cli.main(["compile", "--for", "sm_75", *ONLY, *(["--sdpa"] if asks == "option" else [])]) == 0
    kinds = [Kind(75, FP16, 64, bias=variants.BOOLEANS), Kind(75, FP16, 64, bias=variants.HALF_BIAS, bias_pairs=True)]
    kinds += [kind._replace(few_rows=True) for kind in kinds]
    of_masks = {variant for variant in variants.made_for(kinds) if "BIAS" in dict(variant.macros)}
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
    usual = set(variants.made_for(aot.usual_kinds(75)))
    assert launches.seen and {launch.variant for launch in launches.seen} <= usual
    assert len(usual) < 110


def test_a_head_dim_and_a_dtype_are_enough_for_their_calls() -> None:
    made = variants.made_for(aot.common_kinds(75, (80,), ("bfloat16",)))
    macros = [dict(variant.macros) for variant in made]
    assert {one["TYPE"] for one in macros} == {BF16_AS_FP16}
    assert {(one.entry, dict(one.macros)["D"]) for one in made if one.entry != "append"} == {
        *((entry, 80) for entry in ("forward", "dkdv", "dq")),
        *((entry, 128) for entry in ("decode", "absmax", "to_half", "delta")),
    }
    assert {dict(one.macros)["D"] for one in variants.made_for(aot.common_kinds(75, (), ())) if one.entry == "dq"} == {
        32, 64, 80, 96, 128, 256,
    }  # fmt: skip
