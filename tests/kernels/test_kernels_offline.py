"""Kernels compile for their GPUs, and on Turing fit its registers: seen without a GPU.

The variants that have gone wrong before. `python -m benchmarks.kernel_report` compiles each feature of each kernel,
alone and all together; with --every all variants, in hours.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import kernel_report
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import Compiler
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import (
    BF16,
    BF16_AS_FP16,
    BIAS_WORDS,
    BOOLEANS,
    E4M3,
    E5M2,
    FLOAT_BIAS,
    FP16,
    HALF_BIAS,
    Hints,
    KernelFeatures,
    Kind,
    Sizes,
)
from flash_attn_compat.backends.fused.choosing.tiles import TWO_GROUPS
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.launching import grids
from tests.forms.plain import some, some_of
from tests.kernels import offline

COMPILERS = offline.compilers()
VERSIONS = list(COMPILERS) or ["none"]
THOROUGH = [pytest.mark.thorough]


def full(number: int, type: int, head_dim: int, vec: int = 8) -> Kind:
    return Kind(
        number,
        type,
        Sizes(head_dim, window=104, vec=vec),
        KernelFeatures(local=True, alibi=True, softcap=True, dropout=True),
    )


class Row(NamedTuple):
    """share: of the busiest pipe's cycles, those of the products that are needed, at least; docs/kernels.md has all"""

    number: int
    variant: Variant
    share: float = 0.0


CAUSAL = Kind(75, FP16, Sizes(64), KernelFeatures(local=True))
SHARES = {
    "forward": {80: 0.99, 96: 0.99, 128: 0.88, 160: 0.88, 256: 0.88, 512: 0.72},
    # At 160, 192 and 256 the code of both roles (ROLES) counts, of which a warp runs one.
    "dkdv": {64: 0.86, 96: 0.83, 128: 0.87, 160: 0.66, 192: 0.70, 224: 0.71, 256: 0.70, 512: 0.60},
    "dq": {48: 0.99, 128: 0.88, 160: 0.83, 256: 0.82, 512: 0.55},
}
OF_SHARES = [
    Row(75, variants.MAKERS[entry](CAUSAL.replace(head_dim=D)), share)
    for entry, shares in SHARES.items()
    for D, share in shares.items()
]
OTHERS = [
    *OF_SHARES[1::2],
    Row(75, variants.dkdv(CAUSAL.replace(head_dim=112))),
    *(Row(75, variants.dq(CAUSAL.replace(head_dim=D))) for D in (80, 192)),
]
# Bounded for what others of its size need, so that one more would fit.
SPARE = variants.decode(full(75, FP16, 64, vec=1).replace(paged=True))
ORDERED = variants.dkdv(Kind(80, BF16, Sizes(64)))
# Two groups of warps take all registers, and 64 KB of shared memory.
GROUPED = Hints(tiles=(("forward", TWO_GROUPS),))
IN_GROUPS = variants.forward(Kind(75, FP16, Sizes(128), hints=GROUPED))
# Each entry; the sizes and types that need most registers, each type and head dim once or more. Of newer GPUs those
# that split, with tiles of which they hold two and with those of which they hold one.
KERNELS = [
    *OF_SHARES[::2],
    Row(75, IN_GROUPS, 0.99),
    Row(
        75, variants.forward(Kind(75, BF16_AS_FP16, Sizes(128), KernelFeatures(local=True, copied=True), GROUPED)), 0.99
    ),
    *(
        Row(75, variant)
        for variant in (
            variants.forward(Kind(75, FP16, Sizes(64))),
            variants.forward(CAUSAL.replace(head_dim=16)),
            variants.forward(full(75, BF16_AS_FP16, 128)),
            variants.dkdv(full(75, BF16_AS_FP16, 128)),
            variants.dq(Kind(75, BF16_AS_FP16, Sizes(256))),
            variants.dkdv(Kind(75, BF16_AS_FP16, Sizes(192, head_dim_v=128))),
            *(variants.MAKERS[entry](full(75, BF16_AS_FP16, 512)) for entry in ("forward", "dkdv")),
            variants.decode_append(Kind(75, BF16_AS_FP16, Sizes(512))),
            variants.dq(CAUSAL.replace(head_dim=128, few_rows=True)),
            variants.forward(Kind(75, FP16, Sizes(64), hints=Hints(few_rows=True, short=64))),
            variants.forward(Kind(75, FP16, Sizes(192), hints=Hints(few_rows=True))),
            variants.dkdv(CAUSAL.replace(head_dim=64, few_rows=True, few_keys=64)),
            variants.dkdv(Kind(75, FP16, Sizes(64), hints=Hints(few_keys=128))),
            variants.decode(Kind(75, FP16, Sizes(64))),
            SPARE,
            variants.decode_append(Kind(75, FP16, Sizes(128))),
            variants.decode(Kind(75, FP16, Sizes(128), KernelFeatures(cache=E4M3))),
            variants.decode_append(Kind(75, BF16_AS_FP16, Sizes(128), KernelFeatures(paged=True, cache=E4M3))),
            variants.decode(full(75, FP16, 64).replace(dropout=False, paged=True, cache=E5M2)),
            variants.decode(Kind(75, BF16_AS_FP16, Sizes(256), KernelFeatures(cache=E4M3))),
            variants.forward(Kind(75, FP16, Sizes(128), KernelFeatures(paged=True, cache=E4M3))),
            variants.append(Kind(75, BF16_AS_FP16, Sizes(64), KernelFeatures(cache=E5M2))),
            variants.delta(Kind(75, FP16, Sizes(32))),
            variants.append(Kind(75, BF16_AS_FP16, Sizes(32, vec=1))),
            variants.absmax(Kind(75, BF16_AS_FP16, Sizes(128))),
            *(
                variants.mask(Kind(75, FP16, Sizes(64, bias_words=words), KernelFeatures(bias=BOOLEANS)))
                for words in BIAS_WORDS
            ),
            variants.forward(Kind(75, BF16_AS_FP16, Sizes(96), KernelFeatures(bias=BOOLEANS))),
            variants.dkdv(Kind(75, FP16, Sizes(96), KernelFeatures(bias=HALF_BIAS))),
            variants.forward(Kind(75, FP16, Sizes(64), KernelFeatures(bias=HALF_BIAS, bias_pairs=True))),
            variants.with_shared_grid(variants.forward(Kind(75, BF16_AS_FP16, Sizes(64), KernelFeatures(local=True)))),
            variants.with_shared_grid(variants.dkdv(Kind(75, FP16, Sizes(64), KernelFeatures(local=True)))),
        )
    ),
    Row(80, variants.forward(Kind(80, BF16, Sizes(128)))),
    Row(80, variants.dkdv(Kind(80, BF16, Sizes(256)))),
    Row(86, variants.forward(Kind(86, BF16, Sizes(128), KernelFeatures(local=True)))),
    Row(86, variants.dkdv(Kind(86, BF16, Sizes(64)))),
    Row(90, variants.decode(Kind(90, BF16, Sizes(128)))),
    Row(90, variants.forward(Kind(90, BF16, Sizes(256)))),
    Row(90, variants.decode(Kind(90, BF16_AS_FP16, Sizes(128), KernelFeatures(cache=E4M3)))),
    Row(90, variants.forward(Kind(90, FP16, Sizes(128), KernelFeatures(cache=E4M3)))),
]
EVERYWHERE = [Row(80, ORDERED), Row(90, variants.forward(full(90, FP16, 64)))]
# For each run of the suite: each source, and tiles that take their registers to the limit.
EVERY_RUN = {
    IN_GROUPS,
    variants.dkdv(CAUSAL.replace(head_dim=192)),
    variants.dq(CAUSAL.replace(head_dim=48)),
    variants.decode(Kind(75, FP16, Sizes(64))),
    variants.append(Kind(75, BF16_AS_FP16, Sizes(32, vec=1))),
    variants.absmax(Kind(75, BF16_AS_FP16, Sizes(128))),
    variants.delta(Kind(75, FP16, Sizes(32))),
}
MAIN_LOOPS = ("forward", "dkdv", "dq", "decode")  # of tensor-core instructions


def label(value: object) -> str:
    if not isinstance(value, Row):
        return str(value)
    macros = "-".join(f"{name}{number}" for name, number in value.variant.macros)
    return f"sm_{value.number}-{value.variant.entry}-{macros}"


def compiler_of(version: str) -> Compiler:
    if not COMPILERS:
        pytest.skip("no NVRTC here: it comes with the test extra on x86-64 Linux")
    return COMPILERS[version]


@pytest.fixture
def compiler() -> Compiler:
    """The newest."""
    return compiler_of(VERSIONS[-1])


@pytest.mark.parametrize(
    ("row", "version"),
    [
        *(pytest.param(row, VERSIONS[-1], marks=[] if row.variant in EVERY_RUN else THOROUGH) for row in KERNELS),
        *some_of(itertools.product(EVERYWHERE, reversed(VERSIONS)), 2),
        *some_of(itertools.product((row for row in KERNELS if row.number == 75), VERSIONS[:-1]), 99),
        *(pytest.param(*each, marks=THOROUGH) for each in itertools.product(OTHERS, VERSIONS)),
    ],
    ids=label,
)
def test_a_kernel_fits_its_gpu_and_splits_count_on_the_blocks_that_it_holds(row: Row, version: str) -> None:
    """Fewer blocks would leave it idle; of more, the last would wait for the first to end."""
    number, variant, _ = row
    found = offline.compiled(compiler_of(version), variant, f"sm_{number}")
    assert list(offline.complaints(variant, found, number)) == []
    if variant.entry in offline.SPLITTING and variant != SPARE and version == VERSIONS[-1]:
        assert offline.MULTIPROCESSORS[number].resident_blocks(variant, found) == grids.resident_blocks(
            variant, 1, number
        )
    if number == 75:
        assert found.spilled <= offline.allowed_spills(variant), f"{found.spilled} bytes spilled, stack {found.stack}"
    if offline.cuobjdump() is None:
        return
    code = offline.instructions(found.cubin)
    assert list(offline.store_complaints(variant, code)) == []
    if number == 75 and variant.entry in MAIN_LOOPS:
        check_turings_loop(row, offline.main_loop(code), version)
    if variant == ORDERED:
        # The two steps of an operand lie in neighbouring registers: dkdv once moved each there, a move a product.
        loop = offline.main_loop(code)
        assert count(loop, "MOV", "IMAD.MOV") < count(loop, "HMMA.16816") // 2, loop


def check_turings_loop(row: Row, loop: Counter[str], version: str) -> None:
    assert offline.local_share(loop) <= offline.LOCAL_SHARE, loop
    products = count(loop, "HMMA.1688")
    assert products >= 32, loop
    # Tensor cores without fp32 fused multiply-adds in their place; softcap and ALiBi have some of their own.
    assert count(loop, "FFMA") < 8 * products
    if row.share and version == VERSIONS[-1]:  # no pipe is much busier than needed products make one
        pipes, D = kernel_report.model_turing(loop, row.variant), dict(row.variant.macros)["D"]
        assert kernel_report.useful_share(pipes, row.variant, D, D) >= row.share, pipes


def test_a_row_stored_in_words_is_a_complaint() -> None:
    """Compilers once made four stores of each 16 bytes of the epilogues."""
    variant = variants.dq(Kind(75, FP16, Sizes(64)))
    whole, words = [(0, "STG.E.128.SYS [R2], R8")], [(0, "@P0 STG.E.SYS [R2+0x4], R9")]
    assert list(offline.store_complaints(variant, whole)) == []
    assert list(offline.store_complaints(variant, words)) == [
        "1 stores of 32 bits, of which 0 at most are not part of a row's 16 bytes"
    ]
    assert list(offline.store_complaints(variants.dq(Kind(75, FP16, Sizes(64, vec=1))), words)) == []


def count(loop: Counter[str], *names: str) -> int:
    return sum(number for name, number in loop.items() if name.startswith(names))


@pytest.mark.parametrize(("D", "type"), some_of([(128, BF16_AS_FP16), (128, FP16), (64, BF16_AS_FP16), (64, FP16)], 4))
def test_decoding_over_8_bits_spills_nothing_on_turing(D: int, type: int, compiler: Compiler) -> None:
    kind = Kind(75, type, Sizes(D), KernelFeatures(local=True, paged=True, cache=E4M3))
    found = offline.compiled(compiler, variants.decode(kind), "sm_75")
    assert found.spilled == 0 and not list(offline.complaints(variants.decode(kind), found, 75))


def test_8_bit_values_are_converted_between_the_products_of_scores(compiler: Compiler) -> None:
    """Behind them, the tensor cores would wait for all warps' conversions at once."""
    if offline.cuobjdump() is None:
        pytest.skip("no cuobjdump here: it comes with the test extra on x86-64 Linux")
    found = offline.compiled(
        compiler, variants.forward(Kind(75, FP16, Sizes(128), KernelFeatures(cache=E4M3))), "sm_75"
    )
    names = [text.split()[0] for _, text in offline.instructions(found.cubin)]
    products = [place for place, name in enumerate(names) if name.startswith("HMMA")]
    scores = names[products[0] : products[127]]  # the products with one tile of K
    # A thread converts 32 numbers of a tile of V, two at once, with two fp16 products each, and stores 8 numbers.
    counts = Counter(name.split(".")[0] for name in scores)
    assert found.spilled == 0 and counts["HMUL2"] + counts["HFMA2"] >= 16 and counts["STS"] >= 3, counts


@pytest.mark.parametrize("make", some([variants.dkdv, variants.forward, variants.dq], 3))
def test_turings_code_asks_nothing_of_newer_gpus(make: object, compiler: Compiler) -> None:
    """No cp.async, no m16n8k16, no bf16 products: the PTX that a forced capability runs is a T4's."""
    assert callable(make)
    variant = make(Kind(75, BF16_AS_FP16, Sizes(64)))
    text = compiler.compile(variant.source, nvrtc.compile_options(variant, "compute_75")).decode(errors="replace")
    assert ".target sm_75" in text and "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32" in text
    assert not any(word in text for word in ("cp.async", "m16n8k16", ".bf16"))


@pytest.mark.parametrize(("bias", "words", "number"), [(BOOLEANS, 16, 32), (HALF_BIAS, 8, 32), (FLOAT_BIAS, 2, 8)])
def test_the_pass_over_a_mask_waits_for_many_loads_at_once(
    bias: int, words: int, number: int, compiler: Compiler
) -> None:
    """Compilers branch around a load that is behind a condition, and then each waits for memory alone."""
    if offline.cuobjdump() is None:
        pytest.skip("no cuobjdump here: it comes with the test extra on x86-64 Linux")
    found = offline.compiled(
        compiler, variants.mask(Kind(75, FP16, Sizes(64, bias_words=words), KernelFeatures(bias=bias))), "sm_75"
    )
    texts = [text for _, text in offline.instructions(found.cubin)]
    loads = [place for place, text in enumerate(texts) if "LDG" in text]
    between = texts[loads[0] : loads[-1]]
    assert len(loads) == number and not any("BRA" in text or "VOTE" in text for text in between)


def test_a_compiler_is_found_wherever_it_was_unpacked_and_once(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    major = str(compiler.version[0])
    path = next(path for path in nvrtc.library_paths(major) if Path(path).is_file())
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / f"libnvrtc.so.{major}").symlink_to(path)
    (folders[1] / "libnvrtc.so.11.2").write_text("no library")
    monkeypatch.setattr(nvrtc, "library_paths", lambda major: [])
    monkeypatch.delenv(offline.FOLDERS, raising=False)
    assert offline.compilers.__wrapped__() == {}
    monkeypatch.setenv(offline.FOLDERS, os.pathsep.join(map(str, folders)))
    (found,) = offline.compilers.__wrapped__().items()
    assert found[0] == VERSIONS[-1] and found[1].version == compiler.version


@pytest.mark.thorough
def test_the_report_shows_fewer_variants_than_there_are() -> None:
    some, every = (kernel_report.choose_variants(75, every, ["append", "delta"]) for every in (False, True))
    assert some and some.keys() <= every.keys()


@pytest.mark.thorough
@pytest.mark.parametrize("make", [kernel_report.make_table, kernel_report.make_mask_table])
def test_the_tables_of_the_page_are_those_that_the_report_prints(make: Callable[[str], Iterator[str]]) -> None:
    """The page names NVRTC 13.5; another compiler gives other registers."""
    if "13.5" not in offline.compilers():
        pytest.skip("needs NVRTC 13.5")
    page = (Path(__file__).parents[2] / "docs/kernels.md").read_text(encoding="utf-8")
    assert [row for row in make("13.5") if row not in page] == []
