"""Packed queries and keys of equal lengths in two tensors: the paths of self-attention are open to them, too."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_attn_compat import explain, flash_attn_varlen_func
from flash_attn_compat.backends.chunked import Chunked
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.engine import dispatch, equal_lengths
from flash_attn_compat.engine.call import AttentionCall, Result
from flash_attn_compat.engine.features import Traits
from tests.support import cumulative, randn

LENGTHS = (5, 0, 9, 3)


def packed(total: int = 17) -> list[Tensor]:
    return [randn(total, 2, 16, seed=n) for n in range(3)]


def attention(*tensors: Tensor, **options: Any) -> Any:
    return flash_attn_varlen_func(*tensors, 9, 9, **{"causal": True, "window_size": (4, 0)} | options)


class SelfAttentionOnly(Reference):
    """As a kernel that serves windows of self-attention alone; keeps more for its backward than others."""

    name = "self_attention_only"
    reads_lengths = False

    def extra_reasons(self, traits: Traits) -> list[str]:
        return [] if traits.sq_vs_sk == "=" else ["lengths may differ"]

    def forward(self, call: AttentionCall) -> Result:
        assert call.equal_lengths
        found = super().forward(call)
        return found._replace(saved=(found.softmax_lse, found.softmax_lse))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The host does not see what tensors hold; yields what it asked the device for."""
    asked = []

    def equal(*pair: Tensor) -> bool:
        asked.append(pair)
        return torch.equal(*pair)

    monkeypatch.setattr(equal_lengths, "is_visible", lambda q, k: q is k)
    monkeypatch.setattr(equal_lengths, "is_on_host", lambda starts: False)
    monkeypatch.setattr(equal_lengths, "_equal", equal)
    monkeypatch.setattr(equal_lengths, "_answers", {})
    monkeypatch.setattr(dispatch, "BACKENDS", (SelfAttentionOnly(), Chunked(), Reference()))
    dispatch.forget_decisions()
    yield asked
    dispatch.forget_decisions()


def test_the_host_compares_what_it_can_read() -> None:
    starts, q = cumulative(*LENGTHS), packed()
    same, clones = (explain(attention, *q, starts, other) for other in (starts, starts.clone()))
    assert same == clones
    assert equal_lengths.is_visible(starts, starts.clone()) and not equal_lengths.is_visible(starts, starts + 1)


def test_two_tensors_of_equal_starts_take_the_path_of_one(gpu: list[Any]) -> None:
    starts, q = cumulative(*LENGTHS), packed()
    assert explain(attention, *q, starts, starts).backend == "self_attention_only" and not gpu
    assert explain(attention, *q, starts, starts.clone()).backend == "self_attention_only" and len(gpu) == 1
    assert torch.equal(attention(*q, starts, starts.clone()), attention(*q, starts, starts))


def test_other_lengths_do_not(gpu: list[Any]) -> None:
    starts, others = cumulative(*LENGTHS), cumulative(3, 5, 9, 0)
    assert explain(attention, *packed(), starts, others).backend == "chunked" and len(gpu) == 1


def test_the_device_is_asked_once_for_each_pair_and_what_it_holds(gpu: list[Any]) -> None:
    starts, clone, q = cumulative(*LENGTHS), cumulative(*LENGTHS), packed()
    for _ in range(3):
        assert explain(attention, *q, starts, clone).backend == "self_attention_only"
    assert len(gpu) == 1
    clone.copy_(cumulative(3, 5, 9, 0))
    for _ in range(3):
        assert explain(attention, *q, starts, clone).backend == "chunked"
    assert len(gpu) == 2


def test_what_is_known_goes_with_either_tensor(gpu: list[Any]) -> None:
    starts, clone = cumulative(*LENGTHS), cumulative(*LENGTHS)
    explain(attention, *packed(), starts, clone)
    gpu.clear()
    assert len(equal_lengths._answers) == 1
    del clone
    gc.collect()
    assert not equal_lengths._answers


def test_inference_tensors_which_do_not_say_when_they_change_are_never_remembered(gpu: list[Any]) -> None:
    with torch.inference_mode():
        starts, clone, q = cumulative(*LENGTHS), cumulative(*LENGTHS), packed()
        for _ in range(2):
            assert explain(attention, *q, starts, clone).backend == "self_attention_only"
        assert len(gpu) == 2 and not equal_lengths._answers
        clone.copy_(cumulative(3, 5, 9, 0))
        assert explain(attention, *q, starts, clone).backend == "chunked"


@pytest.mark.parametrize(
    "options", [dict(total_k=18), dict(longest_k=8), dict(backend=SelfAttentionOnly)], ids=["total", "longest", "knows"]
)
def test_nobody_is_asked_where_the_answer_is_no_or_changes_nothing(
    gpu: list[Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Serves(SelfAttentionOnly):
        def extra_reasons(self, traits: Traits) -> list[str]:
            return []

    if "backend" in options:
        monkeypatch.setattr(dispatch, "BACKENDS", (Serves(), Chunked()))
    starts, (q, *_), (k, v, _) = cumulative(*LENGTHS), packed(), packed(options.get("total_k", 17))
    clone = starts.clone()
    explain(flash_attn_varlen_func, q, k, v, starts, clone, 9, options.get("longest_k", 9), window_size=(4, 0))
    assert not gpu


def test_nobody_is_asked_while_a_graph_is_captured(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_lengths, "_is_capturing", lambda starts: True)
    starts = cumulative(*LENGTHS)
    assert explain(attention, *packed(), starts, starts.clone()).backend == "chunked" and not gpu


@pytest.mark.parametrize("options", [{}, dict(dropout_p=0.3)])
def test_a_recomputed_forward_takes_the_path_of_the_first(gpu: list[Any], options: dict[str, Any]) -> None:
    """Checkpointing refuses a forward that keeps other tensors the second time; a new mask it would not notice."""
    starts, inputs = cumulative(*LENGTHS), [x.requires_grad_() for x in packed()]
    clone = starts.clone()

    def layer(*x: Tensor) -> Tensor:
        return attention(*x, starts, clone, **options)

    torch.manual_seed(0)
    right = torch.autograd.grad(attention(*inputs, starts, starts, **options).square().sum(), inputs)
    torch.manual_seed(0)
    out = checkpoint(layer, *inputs, use_reentrant=False)
    for ours, wanted in zip(torch.autograd.grad(out.square().sum(), inputs), right, strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_two_tensors_of_equal_starts_take_the_path_of_one() -> None:
    starts, q = cumulative(*LENGTHS).cuda(), [x.cuda().half() for x in packed()]
    same, clones, view = (explain(attention, *q, starts, other) for other in (starts, starts.clone(), starts[:]))
    assert same.backend == clones.backend == view.backend
    with torch.inference_mode():
        assert explain(attention, *q, starts, starts.clone()).backend == same.backend
