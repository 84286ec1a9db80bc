"""Whether a GPU of capability 7.5 has tensor cores: found out once for each model, and never at the cost of a call."""

from __future__ import annotations

import ctypes
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attn_compat import doctor, flash_attn_func, settings
from flash_attn_compat.backends import chunked
from flash_attn_compat.backends.fused import cache, faults, nvrtc, tensor_cores, tuned
from flash_attn_compat.backends.fused.tuned import Card
from flash_attn_compat.core import arithmetic, cuda_capture
from flash_attn_compat.core.features import Feature, Traits
from flash_attn_compat.dispatch import choice
from tests import fused_on_cpu
from tests.fused_on_cpu import LaunchRecord
from tests.kernels import emulate, offline
from tests.support import randn

GPU = "GeForce GTX 1650"


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> LaunchRecord:
    found = fused_on_cpu.record(monkeypatch)
    tensor_cores._measure_once.cache_clear()
    tensor_cores._warn.cache_clear()
    monkeypatch.setattr(arithmetic, "_without_tensor_cores", set())
    monkeypatch.setattr(nvrtc, "real_capability", lambda device: (7, 5))
    monkeypatch.setattr(nvrtc, "device_name", lambda device: GPU)
    monkeypatch.setattr(settings, "gpu", lambda device: GPU)
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda device: False)
    return found


def takes(monkeypatch: pytest.MonkeyPatch, cycles: float) -> list[int]:
    """Set the time of a matrix product; return the list of devices that are measured."""
    asked: list[int] = []
    monkeypatch.setattr(tensor_cores, "measure_cycles", lambda device: asked.append(device) or cycles)
    return asked


def call(*, length: int = 20) -> None:
    q, k, v = (randn(1, length, 2, 64, seed=seed, dtype=torch.float16) for seed in range(3))
    flash_attn_func(q, k, v)


@pytest.mark.parametrize(("cycles", "has"), [(8.1, True), (16.3, True), (32.0, False), (70.0, False)])
def test_the_time_of_a_product_tells_and_is_taken_once_for_all_processes(
    cycles: float, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = takes(monkeypatch, cycles)
    assert [tensor_cores.has_tensor_cores(0) for _ in range(2)] == [has, has] and asked == [0]
    tensor_cores._measure_once.cache_clear()
    assert tensor_cores.has_tensor_cores(0) is has and asked == [0]
    monkeypatch.setattr(nvrtc, "device_name", lambda device: "Tesla T4")
    tensor_cores.has_tensor_cores(1)
    assert asked == [0, 1], "another model is another question"


def test_ranks_that_ask_at_once_have_the_answer_that_was_kept_first(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, name = launches.files, cache.make_name("tensor-cores", GPU)

    def meanwhile(device: int) -> float:
        kept[name] = b"8.0"
        return 60.0

    monkeypatch.setattr(tensor_cores, "measure_cycles", meanwhile)
    assert tensor_cores.has_tensor_cores(0) and kept == {name: b"8.0"}


@pytest.mark.parametrize("failing", ["time", "file"])
def test_a_failed_measurement_decides_nothing_and_fails_no_call(
    failing: str, launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: int) -> float:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tensor_cores, "measure_cycles", fail)
    if failing == "file":
        launches.files[cache.make_name("tensor-cores", GPU)] = b"many"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    assert tensor_cores.has_tensor_cores(0)


def test_a_card_without_them_is_told_of_tune_once_and_not_after_it(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = takes(monkeypatch, 64.0)
    with pytest.warns(RuntimeWarning, match=f"{GPU} has no tensor cores.*flash-attn-compat tune"):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(length=30)
        tensor_cores._warn.cache_clear()
        tuned.store_card(Card(GPU, ""))
        call(length=40)
    assert asked == [-1] and launches.entries == ["forward"] * 3


@pytest.mark.parametrize(
    ("features", "dtype", "variable", "first"),
    [
        (Feature.CAUSAL | Feature.BACKWARD, torch.float16, None, "chunked"),
        (Feature.CAUSAL, torch.bfloat16, None, "chunked"),
        (Feature.APPEND | Feature.CAUSAL, torch.float16, None, "fused"),
        (Feature.SEQUSED_K, torch.float16, None, "fused"),
        (Feature.CAUSAL, torch.float16, "1", "fused"),
    ],
)
@pytest.mark.parametrize("cycles", [8.0, 64.0])
def test_without_tensor_cores_chunked_goes_first_but_for_steps_over_a_cache(
    cycles: float, features: Feature, dtype: torch.dtype, variable: str | None, first: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    takes(monkeypatch, cycles)
    if variable:
        monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", variable)
    traits = Traits("cuda", (7, 5), dtype, 64, 64, "=", int(features), GPU)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        order = [backend.name for backend in choice._ordered(traits)]
    ours = order.index("chunked" if first == "chunked" and cycles > 10 else "fused")
    assert all(ours < order.index(name) for name in ("torch_efficient", "sdpa"))
    assert len(told) == (first == "chunked" and cycles > 10)
    for warning in told:
        assert "use float32 there" in str(warning.message)


def test_tuning_results_come_before_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(monkeypatch, 64.0)
    traits = Traits("cuda", (7, 5), torch.float16, 64, 64, "=", int(Feature.CAUSAL), GPU)
    found = {"fused": 2.0, "chunked": 3.0, "torch_efficient": 1.0, "sdpa": 4.0}
    tuned.store_card(Card(GPU, "", (tuned.Times("causal", 64, "float16", False, found),)))
    order = [backend.name for backend in choice._ordered(traits)]
    assert [name for name in order if name in found] == ["torch_efficient", "fused", "chunked", "sdpa"]


@pytest.mark.parametrize(("cycles", "expected"), [(8.0, torch.float16), (64.0, torch.float32)])
def test_chunked_multiplies_in_fp32_where_tensor_cores_are_known_to_be_missing(
    cycles: float, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_BMM_HAS_OUT_DTYPE", True)
    q: Any = SimpleNamespace(is_cuda=True, dtype=torch.float16, device=torch.device("cuda", 1))
    assert chunked._choose_operand_dtype(q) == torch.float16, "nobody has asked"
    takes(monkeypatch, cycles)
    tensor_cores.has_tensor_cores(1)
    assert chunked._choose_operand_dtype(q) == expected
    q.device = torch.device("cuda", 0)
    assert chunked._choose_operand_dtype(q) == torch.float16, "another GPU"


def test_the_fastest_of_several_launches_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy GPU one figure may be anything."""
    figures = iter((70.0, 64.0, 8.1, 66.0, 90.0))

    def compute(launch: fused_on_cpu.Launch, content: bytes) -> None:
        place = (ctypes.c_float * launch.blocks).from_address(launch.fields["lse"])
        place[:] = [next(figures)] * launch.blocks

    fused_on_cpu.record(monkeypatch, compute=compute)
    assert tensor_cores.measure_cycles(-1) == pytest.approx(8.1)


def test_tune_measures_again_and_replaces_the_kept_result(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes(monkeypatch, 64.0)
    assert not tensor_cores.has_tensor_cores(0)
    asked = takes(monkeypatch, 8.0)
    assert not tensor_cores.has_tensor_cores(0) and not asked
    assert tensor_cores.remeasure(0) and asked == [0]
    assert tensor_cores.has_tensor_cores(0) and not arithmetic.lacks_tensor_cores(torch.device("cuda", 0))
    assert launches.files[cache.make_name("tensor-cores", GPU)] == b"8.0"


def test_where_our_kernels_are_forbidden_none_is_launched_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", "0")
    asked = takes(monkeypatch, 64.0)
    assert tensor_cores.has_tensor_cores(0) and not asked
    cache.write(cache.make_name("tensor-cores", GPU), b"64.0")
    assert not tensor_cores.has_tensor_cores(0), "it is known"


def test_a_timing_that_has_ended_a_process_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {cache.make_name("tensor-cores", GPU): "tensor_cores ended a process"}
    monkeypatch.setattr(faults, "decline_reason", reasons.get)
    asked = takes(monkeypatch, 64.0)
    assert tensor_cores.has_tensor_cores(0) and not asked
    reasons.clear()
    tensor_cores._measure_once.cache_clear()

    def fault(device: int) -> float:
        raise nvrtc.ContextLost("ILLEGAL_ADDRESS")

    monkeypatch.setattr(tensor_cores, "measure_cycles", fault)
    with pytest.raises(nvrtc.ContextLost):
        tensor_cores.has_tensor_cores(0)


def test_other_gpus_and_captures_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = takes(monkeypatch, 64.0)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_capture, "is_capturing", lambda device: True)
        assert tensor_cores.has_tensor_cores(0)
    monkeypatch.setattr(nvrtc, "real_capability", lambda device: (9, 0))
    call()
    assert tensor_cores.has_tensor_cores(0) and not asked


def test_doctor_reports_missing_tensor_cores_and_the_measured_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compiler", lambda: SimpleNamespace(version=(13, 0)))
    takes(monkeypatch, 64.0)
    first, *others = doctor.describe_kernels(torch.device("cuda", 0))
    assert "for sm_75 by NVRTC 13.0" in first and len(others) == 1, "nothing is launched to find out"
    tensor_cores.has_tensor_cores(0)
    _, *others = doctor.describe_kernels(torch.device("cuda", 0))
    assert "no tensor cores: use float32" in others[0] and "not tuned" in others[1] and len(others) == 2
    times = tuned.Times("causal", 64, "float16", True, {"fused": 2.0, "chunked": 1.0})
    tuned.store_card(Card(GPU, "torch 2.11", (times,)))
    assert doctor.describe_kernels(torch.device("cuda", 0))[2:] == [
        "tuned with torch 2.11",
        "causal, head_dim 64, float16, training  chunked 1 ms, fused 2 ms",
    ]
    monkeypatch.setattr(nvrtc, "decline_reason", lambda: "NVRTC cannot be used")
    assert doctor.describe_kernels(torch.device("cuda", 0)) == ["none: NVRTC cannot be used"]


# ---- the kernel


@pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())
def test_the_kernel_counts_every_product_of_its_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator's clock ticks once for each lane's part in a product, of one warp at least and of eight at most."""
    fused_on_cpu.emulate(monkeypatch)
    assert 16 <= tensor_cores.measure_cycles(-1) <= 128


def test_its_loop_is_products_and_little_else_between_two_looks_at_the_clock() -> None:
    compilers = offline.compilers()
    if not compilers or offline.cuobjdump() is None:
        pytest.skip("no NVRTC and cuobjdump here: they come with the test extra on x86-64 Linux")
    found = offline.compiled(compilers[max(compilers, key=float)], tensor_cores.VARIANT, "sm_75")
    code = [text for _, text in offline.instructions(found.cubin)]
    loop = offline.main_loop(offline.instructions(found.cubin))
    products = sum(count for name, count in loop.items() if name.startswith("HMMA.1688.F32"))
    assert products == 4 and sum(loop.values()) < 4 * products, "a T4 issues four in the time of a product"
    looks = [place for place, text in enumerate(code) if "CLOCK" in text]
    assert len(looks) == 2 and all(looks[0] < place < looks[1] for place, text in enumerate(code) if "HMMA" in text)
