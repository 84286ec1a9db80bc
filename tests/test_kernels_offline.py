"""Every kernel compiles for its GPUs, and on Turing fits its registers: seen without a GPU.

A part of the variants here, all of them by `python -m benchmarks.kernel_report`.
"""

from __future__ import annotations

import pytest

from flash_attn_compat.backends.fused import loader, variants
from flash_attn_compat.backends.fused.loader import Compiler
from flash_attn_compat.backends.fused.variants import BF16, BF16_AS_FP16, FP16, HEAD_DIMS, Kind, Variant
from tests.kernels import offline

COMPILERS = offline.compilers()


def some(number: int) -> list[Variant]:
    """Plain and with everything, at each head dim, in turns of dtypes; each entry at least twice."""
    bf16 = BF16 if number >= 80 else BF16_AS_FP16
    found: dict[Variant, None] = {}
    for index, D in enumerate(HEAD_DIMS):
        plain = Kind(number, (FP16, bf16)[index % 2], D)
        full = Kind(number, (bf16, FP16)[index % 2], D, local=True, alibi=True, softcap=True, dropout=True, window=104)
        found[variants.forward(plain)] = found[variants.dq(plain)] = found[variants.dkdv(full)] = None
        found[variants.forward(full)] = None
        found[variants.decode(full._replace(paged=True, vec=1))] = None
    for D in (32, 128):
        kind = Kind(number, bf16, D, vec=8 if D == 32 else 1)
        found[variants.delta(kind)] = found[variants.append(kind)] = None
        if bf16 == BF16_AS_FP16:
            found[variants.absmax(kind)] = None
    return list(found)


def label(value: object) -> str:
    if not isinstance(value, Variant):
        return str(value)
    return f"{value.entry}-" + "-".join(f"{name}{number}" for name, number in value.macros)


@pytest.fixture(params=sorted(COMPILERS) or ["none"])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    if request.param == "none":
        pytest.skip("no NVRTC here: it comes with the test extra on x86-64 Linux")
    return COMPILERS[request.param]


@pytest.fixture
def newest() -> Compiler:
    """One assembler's registers are enough."""
    if not COMPILERS:
        pytest.skip("no NVRTC here: it comes with the test extra on x86-64 Linux")
    return COMPILERS[max(COMPILERS, key=int)]


@pytest.mark.parametrize("variant", some(75), ids=label)
def test_a_kernel_fits_turing_with_no_spills_but_the_known_ones(variant: Variant, newest: Compiler) -> None:
    found = offline.compiled(newest, variant, "sm_75")
    assert list(offline.complaints(variant, found, 75)) == []
    assert found.spilled <= offline.allowed_spills(variant), f"{found.spilled} bytes spilled, stack {found.stack}"
    if found.spilled and offline.cuobjdump() is not None:
        loop = offline.main_loop(offline.instructions(found.cubin))
        assert offline.local_share(loop) <= offline.LOCAL_SHARE, loop


@pytest.mark.parametrize("number", [80, 90])
@pytest.mark.parametrize("index", range(5))
def test_a_kernel_fits_newer_gpus(index: int, number: int, compiler: Compiler) -> None:
    # Each compiler and architecture another part, so that together they see all.
    shift = 3 * (number == 90) + 5 * (compiler.version[0] == 12)
    variant = some(number)[(5 * index + shift) % len(some(number))]
    found = offline.compiled(compiler, variant, f"sm_{number}")
    assert list(offline.complaints(variant, found, number)) == []


@pytest.mark.parametrize("make", [variants.forward, variants.dkdv, variants.dq, variants.decode])
def test_the_main_loop_is_made_of_tensor_core_instructions(make: object, compiler: Compiler) -> None:
    if offline.cuobjdump() is None:
        pytest.skip("no cuobjdump here: it comes with the test extra on x86-64 Linux")
    assert callable(make)
    for D in (64, 128):
        variant = make(Kind(75, FP16, D))
        code = offline.instructions(offline.compiled(compiler, variant, "sm_75").cubin)
        loop = offline.main_loop(code)
        products = sum(count for name, count in loop.items() if name.startswith("HMMA.1688"))
        assert products >= 32, loop
        # Tensor cores without fp32 fused multiply-adds in their place.
        assert sum(count for name, count in loop.items() if name.startswith("FFMA")) < 8 * products


def test_turings_code_asks_nothing_of_newer_gpus(compiler: Compiler) -> None:
    """No cp.async, no m16n8k16, no bf16 products: the PTX that a forced capability runs is a T4's."""
    for make in (variants.forward, variants.dkdv, variants.dq):
        variant = make(Kind(75, BF16_AS_FP16, 64))
        text = compiler.compile(variant.source, loader.options(variant, "compute_75")).decode(errors="replace")
        assert ".target sm_75" in text and "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32" in text
        assert not any(word in text for word in ("cp.async", "m16n8k16", ".bf16"))
