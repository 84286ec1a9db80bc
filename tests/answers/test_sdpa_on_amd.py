"""sdpa on AMD's GPUs, by stubs: plain and causal calls, after a small problem was right."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import backend_counts, flash_attn_func, reset_backend_counts
from flash_attn_compat.backends import smoke_test
from flash_attn_compat.backends.sdpa import Sdpa
from flash_attn_compat.core import cuda_capture
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.features import Feature, Traits
from flash_attn_compat.dispatch import call_cache
from tests.forms.inputs import randn

CAUSAL = Feature.CAUSAL | Feature.GQA | Feature.BACKWARD
SERVED = Feature.CAUSAL | Feature.GQA | Feature.BACKWARD
Attention = Callable[..., Tensor]
Seen = list[tuple[Tensor, Tensor, Tensor]]


def traits(features: Feature, **changes: object) -> Traits:
    return Traits("cuda", (9, 4), torch.float16, 64, 64, "=", int(features), "AMD Instinct")._replace(**changes)


def is_half(params: torch.backends.cuda.SDPAParams) -> bool:
    return params.query.dtype in (torch.float16, torch.bfloat16)


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which CPU tensors count as an AMD GPU's, and SDPA alone computes."""
    of_cpu = AttentionCall.traits
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda tensor: False), raising=False)
    monkeypatch.setattr(
        AttentionCall, "traits", lambda call: of_cpu(call)._replace(device_type="cuda", capability=(9, 4))
    )
    monkeypatch.setattr(smoke_test, "find_device", lambda capability: torch.device("cpu"))
    monkeypatch.setattr(cuda_capture, "current_device", lambda: None)
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda device: False)
    monkeypatch.setattr(smoke_test, "_run_once", functools.cache(smoke_test._run_once.__wrapped__))
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: False)
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", is_half)
    monkeypatch.setattr(call_cache, "_current", call_cache.empty_tables())
    return monkeypatch


@pytest.fixture
def seen(amd: pytest.MonkeyPatch) -> Seen:
    """Record the arguments of F.scaled_dot_product_attention."""
    found: Seen = []
    attention = F.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        found.append((q, k, v))
        return attention(q, k, v, **options)

    amd.setattr(F, "scaled_dot_product_attention", noted)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features", [0, Feature.CAUSAL, CAUSAL, Feature.BACKWARD], ids=str)
def test_plain_and_causal_calls_are_served_where_the_trial_of_each_kind_is_right(
    features: Feature, dtype: torch.dtype, seen: Seen
) -> None:
    backend, tries = Sdpa(), 2 if features & Feature.BACKWARD else 1
    for _ in range(2):
        assert backend.reasons(traits(features, dtype=dtype)) == []
        assert len(seen) == tries and seen[0][0].shape[2] >= 129
    assert backend.reasons(traits(features ^ Feature.CAUSAL, dtype=dtype)) == [] and len(seen) == 2 * tries


def ignores_the_mask(attention: Attention) -> Attention:
    return lambda q, k, v, is_causal, **options: attention(q, k, v, is_causal=False, **options)


def is_wrong_behind_row_128(attention: Attention) -> Attention:
    def wrong(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        out = attention(q, k, v, **options)
        return torch.cat([out[:, :, :128], out[:, :, 128:] * 1.5], dim=2)

    return wrong


class WithoutGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: object, dout: Tensor) -> Tensor:
        return torch.zeros_like(dout)


def has_wrong_gradients(attention: Attention) -> Attention:
    return lambda *given, **options: WithoutGradients.apply(attention(*given, **options))


def raises(attention: Attention) -> Attention:
    def refuse(*given: object, **options: object) -> None:
        raise RuntimeError("HIP error: no kernel image is available")

    return refuse  # type: ignore[return-value]  # it never returns


WRONG = "wrong answer for head_dim 64"


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        (ignores_the_mask, WRONG),
        (is_wrong_behind_row_128, WRONG),
        (has_wrong_gradients, WRONG),
        (raises, "no kernel i"),
    ],
)
def test_a_trial_that_is_wrong_or_raises_is_a_reason(
    broken: Callable[[Attention], Attention], part: str, amd: pytest.MonkeyPatch
) -> None:
    amd.setattr(F, "scaled_dot_product_attention", broken(F.scaled_dot_product_attention))
    (reason,) = Sdpa().reasons(traits(CAUSAL))
    assert part in reason


REFUSED: list[tuple[Feature, dict[str, object], str]] = [
    *((feature, {}, feature.description) for feature in Feature if not feature & SERVED),
    (CAUSAL, {"sq_vs_sk": "<"}, "as many queries as keys"),
    (CAUSAL, {"sq_vs_sk": ">"}, "as many queries as keys"),
    (CAUSAL, {"head_dim": 60, "head_dim_v": 60}, "multiples of 8"),
    (CAUSAL, {"head_dim": 264, "head_dim_v": 264}, "up to 256"),
    # Where PyTorch has only the plain formula its memory would grow with the square of the length, chunked's does not.
    (CAUSAL, {"dtype": torch.float32}, "whole score matrix"),
]


@pytest.mark.parametrize(("feature", "changes", "part"), REFUSED, ids=str)
def test_unsupported_calls_are_declined_without_a_smoke_test(
    feature: Feature, changes: dict[str, object], part: str, seen: Seen
) -> None:
    (reason,) = Sdpa().reasons(traits(CAUSAL | feature, **changes))
    assert part in reason and not seen


def test_calls_in_a_capture_are_declined_before_a_smoke_test(amd: pytest.MonkeyPatch) -> None:
    amd.setattr(cuda_capture, "is_capturing", lambda device: True)
    assert Sdpa().reasons(traits(CAUSAL)) == ["cannot run its smoke test while a graph is captured"]


def test_nvidias_gpus_are_left_to_others() -> None:
    assert Sdpa().reasons(traits(CAUSAL)) == ["serves only AMD GPUs among PyTorch's cuda devices"]


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_is_dispatched_to_it_and_its_memory_is_laid_out_as_the_trials(causal: bool, seen: Seen) -> None:
    packed = randn(2, 40, 3, 4, 16).half()
    q, k, v = (packed[:, :, at].detach().requires_grad_() for at in range(3))
    reset_backend_counts()
    out = flash_attn_func(q, k, v, causal=causal)
    dq, dk, dv = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert backend_counts() == {"sdpa": 1}
    assert all(x.transpose(1, 2).is_contiguous() for given in seen for x in given)
    plain = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in plain), is_causal=causal).transpose(1, 2)
    for found, expected in zip((out, dq, dk, dv), (exact, *torch.autograd.grad(exact.square().sum(), plain))):
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_declined_calls_go_to_chunked(seen: Seen) -> None:
    q = randn(2, 40, 4, 16)
    reset_backend_counts()
    flash_attn_func(q, q, q, causal=True, window_size=(8, 0))
    assert backend_counts() == {"chunked": 1} and not seen
