"""Where compilation is allowed, the faster of two backends serves: who is timed, when, and what is said of it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator

import pytest
import torch

from flash_attn_compat import backend_counts, explain, flash_attn_func, reset_backend_counts, use_backend
from flash_attn_compat.backends import BACKENDS, Backend, efficient_launch, flex
from flash_attn_compat.engine import dispatch, tuning
from flash_attn_compat.engine.call import AttentionCall
from tests import efficient_kernels
from tests.support import qkv

EFFICIENT, FLEX = (next(one for one in BACKENDS if one.name == name) for name in ("torch_efficient", "flex"))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels, needs a CUDA device")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float | None]]:
    """Both backends on a CPU, with the times they are said to take; each look at one is a name in "asked"."""
    monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    monkeypatch.setattr(tuning, "_WORTH_TIMING", 1)
    monkeypatch.setattr(efficient_launch, "forward", efficient_kernels.forward)
    monkeypatch.setattr(flex, "_missing", list)
    for backend in (EFFICIENT, FLEX):
        table = dataclasses.replace(backend.capabilities, devices=frozenset({"cpu"}), min_capability=None)
        monkeypatch.setattr(type(backend), "capabilities", table)
    found: dict = {"torch_efficient": 2.0, "flex": 1.0, "asked": []}

    def milliseconds(backend: Backend, call: AttentionCall) -> float | None:
        found["asked"].append(backend.name)
        return found[backend.name]

    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    monkeypatch.setattr(type(FLEX), "attempt", lambda self, call: reference(call))
    dispatch.forget_decisions()
    yield found
    dispatch.forget_decisions()


def reference(call: AttentionCall):
    return next(one for one in BACKENDS if one.name == "reference").forward(call)


def served(*tensors: torch.Tensor, **options: object) -> list[str]:
    reset_backend_counts()
    flash_attn_func(*tensors, **options)
    return [name for name, count in backend_counts().items() if count]


def half(seqlen: int = 16) -> tuple[torch.Tensor, ...]:
    return qkv(1, seqlen, seqlen, dtype=torch.float16)


def test_the_faster_one_serves_after_one_look_at_both(times) -> None:
    for _ in range(3):
        assert served(*half()) == ["flex"]
    assert times["asked"] == ["torch_efficient", "flex"]


def test_the_slower_one_is_told_why_it_does_not_serve(times) -> None:
    assert explain(flash_attn_func, *half()).backend == "torch_efficient"
    assert not times["asked"]
    flash_attn_func(*half())
    found = explain(flash_attn_func, *half())
    assert found.backend == "flex" and "2 ms" in found.reasons["torch_efficient"][0]


@pytest.mark.parametrize("compiled", [3.0, None])
def test_a_compiled_kernel_that_is_slower_or_fails_is_tried_once(times, compiled) -> None:
    times["flex"] = compiled
    for _ in range(3):
        assert served(*half()) == ["torch_efficient"]
    assert times["asked"] == ["torch_efficient", "flex"]


def test_nothing_is_timed_without_compilation_or_for_a_forced_backend(times, monkeypatch) -> None:
    with use_backend("torch_efficient"):
        assert served(*half()) == ["torch_efficient"]
    monkeypatch.delenv("FLASH_ATTN_COMPAT_COMPILE")
    assert served(*half()) == ["torch_efficient"]
    assert not times["asked"]


def test_calls_that_want_gradients_or_are_small_keep_the_order(times, monkeypatch) -> None:
    tensors = [tensor.requires_grad_() for tensor in half()]
    assert served(*tensors) == ["torch_efficient"]
    monkeypatch.setattr(tuning, "_WORTH_TIMING", 10**9)
    assert served(*half()) == ["torch_efficient"]
    assert not times["asked"]


def test_other_kinds_and_much_larger_calls_are_timed_for_themselves(times) -> None:
    served(*half())
    times["flex"] = 5.0
    assert served(*half(20)) == ["flex"]
    assert served(*half(), causal=True) == ["torch_efficient"]
    assert served(*half(160)) == ["torch_efficient"]
    assert len(times["asked"]) == 6


def test_a_compiled_kernel_that_fails_later_is_given_up(times, monkeypatch) -> None:
    assert served(*half()) == ["flex"]

    def fails(self, call: AttentionCall) -> None:
        self._remember(call, RuntimeError("out of resource"))

    monkeypatch.setattr(type(FLEX), "attempt", fails)
    monkeypatch.setattr(FLEX, "_failures", {})
    with pytest.warns(RuntimeWarning, match="out of resource"):
        assert served(*half()) == ["torch_efficient"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert served(*half()) == ["torch_efficient"]


@needs_gpu
def test_both_are_really_timed_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    dispatch.forget_decisions()
    q, k, v = (torch.randn(2, 2048, 8, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    out = flash_attn_func(q, k, v, causal=True)
    (verdict,) = tuning._verdicts.values()
    assert verdict is not None and 0 < verdict.usual < 100 and 0 < verdict.compiled < 100
    expected = verdict.rival.name if verdict.rival_wins else "torch_efficient"
    assert explain(flash_attn_func, q, k, v, causal=True).backend == expected
    with use_backend("torch_efficient"):
        torch.testing.assert_close(out, flash_attn_func(q, k, v, causal=True), rtol=0, atol=4e-3)
    dispatch.forget_decisions()
