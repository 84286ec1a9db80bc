"""Whether a GPU of capability 7.5 has tensor cores: found out once for each model, and never at the cost of a call."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from flash_attn_compat import doctor, flash_attn_func, settings
from flash_attn_compat.backends.fused import cache, loader, tensor_cores, verdicts
from flash_attn_compat.backends.fused.verdicts import Card
from flash_attn_compat.engine import capture
from tests import fused_on_cpu
from tests.fused_on_cpu import Launches
from tests.kernels import emulate, offline
from tests.support import randn

GPU = "GeForce GTX 1650"


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = fused_on_cpu.record(monkeypatch)
    tensor_cores._exist.cache_clear()
    tensor_cores._warn.cache_clear()
    monkeypatch.setattr(loader, "own_capability", lambda device: (7, 5))
    monkeypatch.setattr(loader, "device_name", lambda device: GPU)
    monkeypatch.setattr(settings, "gpu", lambda device: GPU)
    monkeypatch.setattr(capture, "is_capturing", lambda device: False)
    return found


def takes(monkeypatch: pytest.MonkeyPatch, cycles: float) -> list[int]:
    """Let a product take so long; returns who was asked, as it goes."""
    asked: list[int] = []
    monkeypatch.setattr(tensor_cores, "cycles", lambda device: asked.append(device) or cycles)
    return asked


def call(*, length: int = 20) -> None:
    q, k, v = (randn(1, length, 2, 64, seed=seed, dtype=torch.float16) for seed in range(3))
    flash_attn_func(q, k, v)


@pytest.mark.parametrize(("cycles", "has"), [(8.1, True), (16.3, True), (32.0, False), (70.0, False)])
def test_the_time_of_a_product_tells_and_is_taken_once_for_all_processes(
    cycles: float, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = takes(monkeypatch, cycles)
    assert [tensor_cores.exist(0) for _ in range(2)] == [has, has] and asked == [0]
    tensor_cores._exist.cache_clear()
    assert tensor_cores.exist(0) is has and asked == [0]
    monkeypatch.setattr(loader, "device_name", lambda device: "Tesla T4")
    tensor_cores.exist(1)
    assert asked == [0, 1], "another model is another question"


def test_ranks_that_ask_at_once_have_the_answer_that_was_kept_first(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, name = launches.files, cache.name_of("tensor-cores", GPU)

    def meanwhile(device: int) -> float:
        kept[name] = b"8.0"
        return 60.0

    monkeypatch.setattr(tensor_cores, "cycles", meanwhile)
    assert tensor_cores.exist(0) and kept == {name: b"8.0"}


@pytest.mark.parametrize("failing", ["time", "file"])
def test_what_goes_wrong_is_no_answer_and_fails_no_call(
    failing: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: int) -> float:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tensor_cores, "cycles", fail)
    if failing == "file":
        launches.files[cache.name_of("tensor-cores", GPU)] = b"many"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    assert tensor_cores.exist(0)


def test_a_card_without_them_is_told_of_tune_once_and_not_after_it(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = takes(monkeypatch, 64.0)
    with pytest.warns(RuntimeWarning, match=f"{GPU} has no tensor cores.*flash-attn-compat tune"):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(length=30)
        tensor_cores._warn.cache_clear()
        verdicts.keep(Card(GPU, ""))
        call(length=40)
    assert asked == [-1] and launches.entries == ["forward"] * 3


def test_other_gpus_and_captures_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = takes(monkeypatch, 64.0)
    with monkeypatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda device: True)
        assert tensor_cores.exist(0)
    monkeypatch.setattr(loader, "own_capability", lambda device: (9, 0))
    call()
    assert tensor_cores.exist(0) and not asked


def test_doctor_says_that_there_are_none_and_what_is_known_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "compiler", lambda: SimpleNamespace(version=(13, 0)))
    takes(monkeypatch, 64.0)
    first, *others = doctor.kernels(torch.device("cuda", 0))
    assert "for sm_75 by NVRTC 13.0" in first
    assert others[0] == "this GPU has no tensor cores" and "not tuned" in others[1] and len(others) == 2
    times = verdicts.Times("causal", 64, "float16", True, {"fused": 2.0, "chunked": 1.0})
    verdicts.keep(Card(GPU, "torch 2.11", (times,)))
    assert doctor.kernels(torch.device("cuda", 0))[2:] == [
        "tuned with torch 2.11",
        "causal, head_dim 64, float16, training  chunked 1 ms, fused 2 ms",
    ]
    monkeypatch.setattr(loader, "why_not", lambda: "NVRTC cannot be used")
    assert doctor.kernels(torch.device("cuda", 0)) == ["none: NVRTC cannot be used"]


# ---- the kernel


@pytest.mark.skipif(bool(emulate.why_not()), reason=emulate.why_not())
def test_the_kernel_counts_every_product_of_its_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator's clock ticks once for each lane's part in a product, of one warp at least and of eight at most."""
    fused_on_cpu.emulate(monkeypatch)
    assert 16 <= tensor_cores.cycles(-1) <= 128


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
