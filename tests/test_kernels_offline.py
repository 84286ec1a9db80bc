"""Kernels compile for their GPUs, and on Turing fit its registers: seen without a GPU.

The variants that have gone wrong before; all of them by `python -m benchmarks.kernel_report`.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from benchmarks import kernel_report
from flash_attn_compat.backends.fused import loader, variants
from flash_attn_compat.backends.fused.loader import Compiler
from flash_attn_compat.backends.fused.variants import BF16, BF16_AS_FP16, FP16, Kind, Variant
from tests.kernels import offline
from tests.plain import some_of

COMPILERS = offline.compilers()
VERSIONS = list(COMPILERS) or ["none"]


def full(number: int, type: int, head_dim: int, vec: int = 8) -> Kind:
    return Kind(number, type, head_dim, local=True, alibi=True, softcap=True, dropout=True, window=104, vec=vec)


CAUSAL = Kind(75, FP16, 64, local=True)
# Each entry; the sizes and types that need most registers, each type and head dim once or more.
TURING = [
    variants.forward(Kind(75, FP16, 64)),
    variants.forward(full(75, BF16_AS_FP16, 128)),
    variants.dkdv(full(75, BF16_AS_FP16, 128)),
    variants.dq(Kind(75, BF16_AS_FP16, 256)),
    *(variants.forward(CAUSAL._replace(head_dim=D)) for D in (16, 160)),
    *(variants.dkdv(CAUSAL._replace(head_dim=D)) for D in (96, 112)),
    *(variants.dq(CAUSAL._replace(head_dim=D)) for D in (80, 192)),
    variants.dkdv(Kind(75, BF16_AS_FP16, 192, head_dim_v=128)),
    variants.dq(CAUSAL._replace(head_dim=128, few_rows=True)),
    variants.decode(full(75, FP16, 64, vec=1)._replace(paged=True)),
    variants.step(Kind(75, FP16, 128)),
    variants.delta(Kind(75, FP16, 32)),
    variants.append(Kind(75, BF16_AS_FP16, 32, vec=1)),
    variants.absmax(Kind(75, BF16_AS_FP16, 128)),
    variants.in_seats(variants.forward(Kind(75, BF16_AS_FP16, 64, local=True))),
    variants.in_seats(variants.dkdv(Kind(75, FP16, 64, local=True))),
]
MAIN_LOOPS = ("forward", "dkdv", "dq", "decode")  # of tensor-core instructions
NEWER = {80: variants.dkdv(Kind(80, BF16, 64)), 90: variants.forward(full(90, FP16, 64))}


def label(value: object) -> str:
    if not isinstance(value, Variant):
        return str(value)
    return f"{value.entry}-" + "-".join(f"{name}{number}" for name, number in value.macros)


def compiler_of(version: str) -> Compiler:
    if not COMPILERS:
        pytest.skip("no NVRTC here: it comes with the test extra on x86-64 Linux")
    return COMPILERS[version]


@pytest.fixture
def compiler() -> Compiler:
    """The newest."""
    return compiler_of(VERSIONS[-1])


@pytest.mark.parametrize(
    ("variant", "version"),
    [
        *itertools.product(TURING, VERSIONS[-1:]),
        *some_of(itertools.product(TURING, VERSIONS[:-1]), 3),
    ],
    ids=label,
)
def test_a_kernel_fits_turing_with_no_spills_but_the_known_ones(variant: Variant, version: str) -> None:
    found = offline.compiled(compiler_of(version), variant, "sm_75")
    assert list(offline.complaints(variant, found, 75)) == []
    assert found.spilled <= offline.allowed_spills(variant), f"{found.spilled} bytes spilled, stack {found.stack}"
    if variant.entry not in MAIN_LOOPS or offline.cuobjdump() is None:
        return
    loop = offline.main_loop(offline.instructions(found.cubin))
    assert offline.local_share(loop) <= offline.LOCAL_SHARE, loop
    products = sum(count for name, count in loop.items() if name.startswith("HMMA.1688"))
    assert products >= 32, loop
    # Tensor cores without fp32 fused multiply-adds in their place; softcap and ALiBi have some of their own.
    assert sum(count for name, count in loop.items() if name.startswith("FFMA")) < 8 * products


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("number", NEWER)
def test_a_kernel_fits_newer_gpus(number: int, version: str) -> None:
    found = offline.compiled(compiler_of(version), NEWER[number], f"sm_{number}")
    assert list(offline.complaints(NEWER[number], found, number)) == []


# Each that splits; of newer GPUs, with tiles of which they hold two and with those of which they hold one.
HELD = [
    (75, variants.decode(Kind(75, FP16, 64))),
    (75, variants.forward(Kind(75, FP16, 128))),
    (75, variants.dkdv(Kind(75, FP16, 64))),
    (80, variants.forward(Kind(80, BF16, 128))),
    (80, variants.dkdv(Kind(80, BF16, 256))),
    (86, variants.forward(Kind(86, BF16, 128, local=True))),
    (86, variants.dkdv(Kind(86, BF16, 64))),
    (90, variants.decode(Kind(90, BF16, 128))),
    (90, variants.forward(Kind(90, BF16, 256))),
]


@pytest.mark.parametrize(("number", "variant"), HELD, ids=label)
def test_a_multiprocessor_holds_the_blocks_that_splits_count_on(
    number: int, variant: Variant, compiler: Compiler
) -> None:
    """Fewer would leave it idle; of more, the last would wait for the first to end."""
    found = offline.compiled(compiler, variant, f"sm_{number}")
    assert offline.MULTIPROCESSORS[number].holds(variant, found) == variants.Gpu(1, number).holds(variant), found[1:]


def test_operands_of_m16n8k16_are_loaded_in_the_order_it_wants(compiler: Compiler) -> None:
    """Its two steps lie in neighbouring registers: dkdv once moved each transposed operand there, a move a product."""
    if offline.cuobjdump() is None:
        pytest.skip("no cuobjdump here: it comes with the test extra on x86-64 Linux")
    loop = offline.main_loop(offline.instructions(offline.compiled(compiler, NEWER[80], "sm_80").cubin))
    moves = sum(count for name, count in loop.items() if name.startswith(("MOV", "IMAD.MOV")))
    assert moves < sum(count for name, count in loop.items() if name.startswith("HMMA.16816")) // 2, loop


@pytest.mark.parametrize("make", [variants.forward, variants.dkdv, variants.dq])
def test_turings_code_asks_nothing_of_newer_gpus(make: object, compiler: Compiler) -> None:
    """No cp.async, no m16n8k16, no bf16 products: the PTX that a forced capability runs is a T4's."""
    assert callable(make)
    variant = make(Kind(75, BF16_AS_FP16, 64))
    text = compiler.compile(variant.source, loader.options(variant, "compute_75")).decode(errors="replace")
    assert ".target sm_75" in text and "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32" in text
    assert not any(word in text for word in ("cp.async", "m16n8k16", ".bf16"))


# Of the busiest pipe's cycles, those of the products that are needed; docs/kernels.md has all sizes.
EXPECTED = {
    "forward": {80: 0.99, 96: 0.99, 128: 0.88, 160: 0.88, 256: 0.88},
    "dkdv": {64: 0.86, 96: 0.86, 128: 0.89, 160: 0.78, 192: 0.81, 256: 0.62},
    "dq": {48: 0.99, 128: 0.92, 160: 0.88, 256: 0.83},
}


@pytest.mark.parametrize(("entry", "D"), some_of([(entry, D) for entry, shares in EXPECTED.items() for D in shares], 2))
def test_the_model_of_a_t4_finds_no_pipe_much_busier_than_needed_products_make_one(
    entry: str, D: int, compiler: Compiler
) -> None:
    if offline.cuobjdump() is None:
        pytest.skip("no cuobjdump here: it comes with the test extra on x86-64 Linux")
    variant = variants.MAKERS[entry](CAUSAL._replace(head_dim=D))
    loops = offline.main_loops(offline.instructions(offline.compiled(compiler, variant, "sm_75").cubin))
    pipes = kernel_report.turing_pipes(loops, variant)
    assert kernel_report.useful(pipes, variant, D, D) >= EXPECTED[entry][D], pipes


def test_a_compiler_is_found_wherever_it_was_unpacked_and_once(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    major = str(compiler.version[0])
    path = next(path for path in loader.places(major) if Path(path).is_file())
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / f"libnvrtc.so.{major}").symlink_to(path)
    (folders[1] / "libnvrtc.so.11.2").write_text("no library")
    monkeypatch.setattr(loader, "places", lambda major: [])
    assert offline.compilers.__wrapped__() == {}
    monkeypatch.setenv(offline.FOLDERS, os.pathsep.join(map(str, folders)))
    (found,) = offline.compilers.__wrapped__().items()
    assert found[0] == VERSIONS[-1] and found[1].version == compiler.version


def test_the_report_shows_fewer_variants_than_there_are() -> None:
    some, every = (kernel_report.chosen(75, every, ["append", "delta"]) for every in (False, True))
    assert some and some.keys() <= every.keys()
