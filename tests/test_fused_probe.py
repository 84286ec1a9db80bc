"""Whether a kernel is used on a GPU that nobody has measured: decided once, the same for every process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import doctor, explain, flash_attn_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused import launcher, loader, probe
from flash_attn_compat.backends.fused.probe import Verdict
from flash_attn_compat.serving import dispatch
from tests import fused_on_cpu, others_kernels
from tests.fused_on_cpu import Launches
from tests.support import randn

SLOW, FAST = Verdict(2.0, "torch_efficient", 1.0), Verdict(1.0, "torch_efficient", 2.0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launches:
    """A Turing GPU, as far as the backend can see."""
    found = fused_on_cpu.record(monkeypatch)
    others_kernels.install(monkeypatch, "torch_efficient", tmp_path)
    monkeypatch.setattr(loader, "capability", lambda device: (7, 5))
    monkeypatch.setattr(probe, "_verdicts", {})
    return found


@pytest.fixture(autouse=True)
def kept(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    monkeypatch.setattr(probe.cache, "read", files.get)
    monkeypatch.setattr(probe.cache, "write", lambda name, payload: files.update({name: payload}) or True)
    return files


def timed(monkeypatch: pytest.MonkeyPatch, **verdicts: Verdict) -> list[str]:
    """Let the clock say so; returns what was timed, as it goes."""
    seen: list[str] = []

    def time(head_dim: int, direction: str, device: int) -> Verdict:
        seen.append(f"{head_dim} {direction}")
        return verdicts[direction]

    monkeypatch.setattr(probe, "_timed", time)
    return seen


def qkv(dim: int = 64, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (randn(2, 40, 4, dim, seed=seed, dtype=torch.float16) for seed in range(3))
    return q.requires_grad_(grad), k, v


def test_a_faster_kernel_serves_and_is_timed_once(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = timed(monkeypatch, forward=FAST)
    for length in (40, 30, 20):
        flash_attn_func(*(tensor[:, :length] for tensor in qkv()))
    assert launches.entries == ["forward"] * 3 and seen == ["64 forward"]


def test_a_slower_kernel_leaves_the_call_to_the_next_without_a_warning_in_later_processes_too(
    launches: Launches, kept: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    seen = timed(monkeypatch, forward=SLOW)
    flash_attn_func(*qkv())
    probe._verdicts.clear()
    launcher.forget_plans()
    monkeypatch.setattr(fused_on_cpu.FUSED, "_against", {})
    dispatch.forget_decisions()
    flash_attn_func(*qkv()[::-1])
    assert seen == ["64 forward"] and [json.loads(content) for content in kept.values()] == [SLOW._asdict()]
    assert not launches.seen and not [one for one in recwarn if "fused" in str(one.message)]
    (reason,) = explain(flash_attn_func, *qkv()).reasons["fused"]
    assert "2 ms" in reason and "torch_efficient 1 ms" in reason and "FLASH_ATTN_COMPAT_FUSED=1" in reason


def test_the_user_can_have_a_slow_kernel(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = timed(monkeypatch, forward=SLOW)
    flash_attn_func(*qkv())
    with use_backend("fused"):
        flash_attn_func(*qkv())
    monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", "1")
    flash_attn_func(*qkv(dim=32))
    assert launches.entries == ["forward", "forward"] and seen == ["64 forward"]


@pytest.mark.parametrize(
    ("capability", "forced", "options"),
    [
        ((9, 0), None, {}),  # measured
        ((7, 5), "7.5", {}),  # pretended
        ((7, 5), None, {"alibi_slopes": torch.ones(4)}),  # the next backend has no kernel for these
        ((7, 5), None, {"softcap": 3.0}),
    ],
    ids=str,
)
def test_nothing_is_timed_where_it_is_known_pretended_or_without_a_rival(
    capability: tuple[int, int], forced: str | None, options: Any, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = timed(monkeypatch, forward=SLOW)
    monkeypatch.setattr(loader, "capability", lambda device: capability)
    if forced:
        monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", forced)
    flash_attn_func(*qkv(), **options)
    assert launches.entries == ["forward"] and not seen


def test_a_verdict_is_no_reason_against_calls_that_the_faster_backend_refuses(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, forward=SLOW)
    q, k, v = qkv()
    lengths = torch.tensor([35, 40], dtype=torch.int32)
    flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
    assert launches.entries == ["forward"]
    flash_attn_func(q, k, v, causal=True)
    assert launches.entries == ["forward"]


def test_a_verdict_by_a_backend_that_is_no_more_counts_for_nothing(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, forward=Verdict(2.0, "gone", 1.0))
    flash_attn_func(*qkv())
    assert launches.entries == ["forward"]


def test_gradients_under_a_dropout_mask_of_ours_stay_ours(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, forward=FAST, backward=SLOW)
    flash_attn_func(*qkv(grad=True), dropout_p=0.1).sum().backward()
    assert launches.entries == ["forward", "delta", "dkdv", "dq"]


# ---- what doctor tells


def test_doctor_says_what_was_timed_and_who_serves_or_why_nothing_is(
    kept: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(loader, "compiler", lambda: SimpleNamespace(version=(13, 0)))
    assert "not timed yet" in doctor.kernels(gpu)[1]
    timed(monkeypatch, forward=SLOW)
    probe.verdict(64, "forward", 0)
    first, *speeds = doctor.kernels(gpu)
    assert "for sm_75 by NVRTC 13.0" in first
    assert speeds == ["forward of head_dim 64: fused 2 ms, torch_efficient 1 ms: torch_efficient serves"]
    timed(monkeypatch, forward=FAST, backward=FAST)
    _, *speeds = doctor.kernels(gpu, renew=True)
    assert len(speeds) == 8 and all(speed.endswith("fused serves") for speed in speeds)
    monkeypatch.setattr(loader, "capability", lambda device: (9, 0))
    assert doctor.kernels(gpu)[1:] == ["the order of backends was measured on this GPU's kind"]
    monkeypatch.setattr(loader, "why_not", lambda: "NVRTC cannot be used")
    assert doctor.kernels(gpu) == ["none: NVRTC cannot be used"]
