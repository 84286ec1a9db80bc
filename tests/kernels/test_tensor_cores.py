"""Cards of capability 7.5 without tensor cores, which their names tell: what serves there, and what users are told."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attn_compat import backend_counts, doctor, explain, flash_attn_func, reset_backend_counts, settings
from flash_attn_compat.backends import chunked
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.tuning import tuned
from flash_attn_compat.backends.fused.tuning.tuned import Card
from flash_attn_compat.core.features import Feature, Traits, lacks_tensor_cores
from flash_attn_compat.dispatch import choice
from tests.forms.inputs import randn
from tests.kernels import fused_on_cpu

GPU, T4 = "NVIDIA GeForce GTX 1650", "Tesla T4"


@pytest.fixture(autouse=True)
def card_without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.record(monkeypatch)
    tuned._warn.cache_clear()
    set_gpu(monkeypatch, GPU)


def set_gpu(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    monkeypatch.setattr(settings, "gpu", lambda device: gpu)


def call(*, length: int = 20) -> None:
    q, k, v = (randn(1, length, 2, 64, seed=seed, dtype=torch.float16) for seed in range(3))
    flash_attn_func(q, k, v)


def find_order(gpu: str, features: int = Feature.CAUSAL, dtype: torch.dtype = torch.float16) -> list[str]:
    traits = Traits("cuda", (7, 5), dtype, 64, 64, "=", int(features), gpu)
    return [backend.name for backend in choice._ordered(traits)]


@pytest.mark.parametrize(
    "gpu",
    [
        "NVIDIA GeForce GTX 1660 Ti", "GeForce GTX 1650", "GeForce GTX 1650 with Max-Q Design", "GTX 1660 SUPER",
        "NVIDIA GeForce GTX 1630", "NVIDIA CMP 30HX", "GeForce MX450", "NVIDIA GeForce MX550", "T400 4GB", "T400E",
        "NVIDIA T500", "NVIDIA T550 Laptop GPU", "NVIDIA T600", "NVIDIA T1000 8GB", "T1200 Laptop GPU", "Quadro T1000",
        "Quadro T2000 with Max-Q Design", "GeForce GTX 1650 as 7.5",
    ],
)  # fmt: skip
def test_cards_of_tu116_and_tu117_have_no_tensor_cores(gpu: str) -> None:
    assert lacks_tensor_cores(gpu)


@pytest.mark.parametrize(
    "gpu",
    [
        T4, "NVIDIA T4G", "Tesla T40 24GB", "Tesla T10", "GeForce RTX 2060", "NVIDIA GeForce RTX 2080 Ti", "TITAN RTX",
        "Quadro RTX 4000", "Quadro RTX 6000", "NVIDIA CMP 40HX", "GeForce GTX 1060 6GB", "NVIDIA GeForce MX350",
        "NVIDIA GeForce RTX 2050", "NVIDIA RTX A2000", "NVIDIA A10", "NVIDIA H200 as 7.5", None,
    ],
)  # fmt: skip
def test_other_cards_are_not_taken_for_such(gpu: str | None) -> None:
    assert not lacks_tensor_cores(gpu)


@pytest.mark.parametrize(("variable", "backend"), [(None, "chunked"), ("1", "fused")])
def test_a_card_without_them_is_told_of_tune_once_and_not_after_it(
    variable: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", variable)
    reset_backend_counts()
    with pytest.warns(RuntimeWarning, match=f"{GPU} has no tensor cores.*flash-attn-compat tune"):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(length=30)
        tuned._warn.cache_clear()
        tuned.store_card(Card(GPU, ""))
        call(length=40)
    assert backend_counts() == {backend: 3}


def test_explain_says_that_the_card_has_no_tensor_cores() -> None:
    q = randn(1, 20, 2, 64, dtype=torch.float16)
    with pytest.warns(RuntimeWarning, match="half precision go to the backend chunked, which multiplies in fp32"):
        explain(flash_attn_func, q, q, q)


@pytest.mark.parametrize("gpu", [T4, "NVIDIA H200 as 7.5"])
def test_a_card_with_tensor_cores_is_told_nothing(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


@pytest.mark.parametrize(
    ("features", "dtype", "variable", "first"),
    [
        (Feature.CAUSAL | Feature.BACKWARD, torch.float16, None, "chunked"),
        (Feature.CAUSAL, torch.bfloat16, None, "chunked"),
        (Feature.CAUSAL, torch.float16, "0", "chunked"),
        (Feature.APPEND | Feature.CAUSAL, torch.float16, None, "fused"),
        (Feature.SEQUSED_K, torch.float16, None, "fused"),
        (Feature.CAUSAL, torch.float16, "1", "fused"),
    ],
)
@pytest.mark.parametrize("gpu", [T4, GPU])
def test_without_tensor_cores_chunked_goes_first_but_for_steps_over_a_cache(
    gpu: str, features: int, dtype: torch.dtype, variable: str | None, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", variable)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = find_order(gpu, features, dtype)
    ours = found.index("chunked" if first == "chunked" and gpu == GPU else "fused")
    assert all(ours < found.index(name) for name in ("torch_efficient", "sdpa"))
    assert ["use float32 there" in str(each.message) for each in told] == [True] * (first == "chunked" and gpu == GPU)


def test_tuning_results_come_before_the_estimate() -> None:
    found = {"fused": 2.0, "chunked": 3.0, "torch_efficient": 1.0, "sdpa": 4.0}
    tuned.store_card(Card(GPU, "", (tuned.Times("causal", 64, "float16", False, found),)))
    assert [name for name in find_order(GPU) if name in found] == ["torch_efficient", "fused", "chunked", "sdpa"]


@pytest.mark.parametrize(("gpu", "expected"), [(T4, torch.float16), (GPU, torch.float32)])
def test_chunked_multiplies_in_fp32_on_a_card_without_tensor_cores(
    gpu: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_BMM_HAS_OUT_DTYPE", True)
    set_gpu(monkeypatch, gpu)
    q: Any = SimpleNamespace(is_cuda=True, dtype=torch.float16, device=torch.device("cuda", 1))
    assert chunked._choose_operand_dtype(q) == expected


def test_doctor_reports_missing_tensor_cores_and_the_measured_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compiler", lambda: SimpleNamespace(version=(13, 0)))
    monkeypatch.setattr(nvrtc, "real_capability", lambda device: (7, 5))
    first, *others = doctor.describe_kernels(torch.device("cuda", 0))
    assert "for sm_75 by NVRTC 13.0" in first
    assert "no tensor cores: use float32" in others[0] and "not tuned" in others[1] and len(others) == 2
    times = tuned.Times("causal", 64, "float16", True, {"fused": 2.0, "chunked": 1.0})
    tuned.store_card(Card(GPU, "torch 2.11", (times,)))
    assert doctor.describe_kernels(torch.device("cuda", 0))[2:] == [
        "tuned with torch 2.11",
        "causal, head_dim 64, float16, training  chunked 1 ms, fused 2 ms",
    ]
    set_gpu(monkeypatch, T4)
    assert not any("float32" in line for line in doctor.describe_kernels(torch.device("cuda", 0)))
    monkeypatch.setattr(nvrtc, "decline_reason", lambda: "NVRTC cannot be used")
    assert doctor.describe_kernels(torch.device("cuda", 0)) == ["none: NVRTC cannot be used"]
