"""The sdpa backend: joined sequences, versions of PyTorch's kernels, half precision, biases; stubs of AMD's GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import backend_counts, flash_attn_func, flash_attn_varlen_func, reset_backend_counts, use_backend
from flash_attn_compat.backends import alibi, sdpa, smoke_test
from flash_attn_compat.backends.sdpa import Sdpa
from flash_attn_compat.backends.varlen import Block, Places, Spans
from flash_attn_compat.core import cuda_capture
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.features import Feature, Traits
from flash_attn_compat.core.mask import Range
from flash_attn_compat.dispatch import call_cache
from tests.forms.inputs import cumulative, qkv, randn
from tests.forms.plain import results, some
from verify.examination import Examination
from verify.problems import Problem


@pytest.fixture(autouse=True)
def _its_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In PyTorch 2.5 too, whose kernel is right but for NaN."""
    monkeypatch.setattr(sdpa, "_LOSES_NAN", False)


def test_a_kernel_that_loses_nan_is_declined_on_a_cpu_alone(monkeypatch):
    traits = Traits("cpu", None, torch.float32, 64, 64, "=", 0)
    assert Sdpa().extra_reasons(traits) == []
    monkeypatch.setattr(sdpa, "_LOSES_NAN", True)
    assert "rows whose scores are NaN" in Sdpa().extra_reasons(traits)[0]
    assert Sdpa().extra_reasons(traits._replace(device_type="xpu")) == []


@pytest.mark.parametrize("window_size", [(-1, -1), (9, 3)])
def test_key_heads_are_repeated_where_the_kernel_cannot_share_them(monkeypatch, window_size):
    found = []
    for name, shares in (("sdpa", False), ("chunked", True)):
        monkeypatch.setattr(sdpa, "_SHARES_KEY_HEADS", shares)
        with use_backend(name):
            found.append(results(partial(flash_attn_func, window_size=window_size), qkv(sq=40, sk=40, h=4, hk=2)))
    for ours, expected in zip(*found):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keeps_scores", sorted({sdpa._KEEPS_SCORES, False}))
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 3)}], ids=str)
def test_scores_too_large_for_fp16_are_no_trouble(monkeypatch, keeps_scores, options):
    monkeypatch.setattr(sdpa, "_KEEPS_SCORES", keeps_scores)
    torch.manual_seed(0)
    q, k, v = ((torch.randn(2, 40, 4, 16) * size).half() for size in (150, 150, 1))
    found = []
    for inputs in ([q, k, v], [q.double(), k.double(), v.double()]):
        inputs = [tensor.requires_grad_() for tensor in inputs]
        with use_backend("sdpa"):
            out, lse, _ = flash_attn_func(*inputs, softmax_scale=1e-4, return_attn_probs=True, **options)
            found.append((out, lse, *torch.autograd.grad(out.square().sum(), inputs)))
    assert (q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1)).abs().max() > torch.finfo(torch.float16).max
    for ours, exact in zip(*found):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", some(("float32", "float64", "float16", "bfloat16"), 2))
def test_causal_rows_after_a_long_cache_are_right_on_every_cpu(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """CPUs without hardware for half precision compute in fp32."""
    problem = Problem(seqlens_q=(150,), seqlens_k=(3500,), nheads_k=1, group=2, causal=True, dtype=dtype)
    assert sdpa._pays_to_split(Block(torch.empty(1, 150, 4, 8), *[torch.empty(1, 3500, 2, 8)] * 2, None, range(1)))
    examination = Examination(problem)
    for slow in ([], [torch.bfloat16, torch.float16]):
        monkeypatch.setattr(sdpa, "_slow_matmul_dtypes", lambda slow=slow: frozenset(slow))
        assert examination.judge("sdpa").failures == []


@pytest.mark.parametrize("window", [(2048, 0), (300, 0), (300, 20)])
def test_a_bias_is_of_keys_that_its_rows_see_and_one_for_all_sequences(
    monkeypatch: pytest.MonkeyPatch, window: tuple[int, int]
) -> None:
    sizes, bias = [], sdpa._make_bias
    monkeypatch.setattr(sdpa, "_make_bias", lambda *tile: sizes.append((found := bias(*tile)).numel()) or found)
    q = torch.randn(3, 2048, 1, 16)
    with use_backend("sdpa"):
        flash_attn_func(q, q, q, alibi_slopes=torch.tensor([0.1]), window_size=window)
    rows = torch.arange(2048)
    seen = (rows + window[1]).clamp(max=2047) - (rows - window[0]).clamp(min=0) + 1
    assert sum(sizes) <= 1.9 * int(seen.sum())


@pytest.mark.parametrize("first", [0, 2**24 - 3, 2**24 + 1, 2**30])
def test_distances_of_far_positions_are_exact(first):
    rows, keys = Range(5, 9), Range(first, first + 6)
    gap = alibi.gap(rows, keys, first, torch.device("cpu"), torch.float32)
    assert gap.tolist() == [[abs(key - row - first) for key in range(*keys)] for row in range(*rows)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((900, *range(3, 15), 950), [[0], list(range(1, 13)), [13]]),
        ((5, 9, 7), [[0], [1], [2]]),
        ((900, 900, 40, 40, 41), [[0, 1], [2, 3], [4]]),
    ],
    ids=["many short ones", "few", "neighbours of one length"],
)
def test_many_short_sequences_are_copied_into_one_block_and_others_stay_where_they_lie(monkeypatch, lengths, expected):
    found = []
    forward_block = Sdpa.forward_block

    def noted(self, call, block, rng_state):
        found.append(list(block.sequences))
        is_view = block.k.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        assert is_view == (len(block.sequences) < 12)
        return forward_block(self, call, block, rng_state)

    monkeypatch.setattr(Sdpa, "forward_block", noted)
    k = torch.randn(sum(lengths), 2, 64)
    cu_seqlens = cumulative(*lengths)
    with use_backend("sdpa"):
        flash_attn_varlen_func(k, k, k, cu_seqlens, cu_seqlens, max(lengths), max(lengths))
    assert sorted(found) == expected


def test_padding_of_a_block_is_never_written():
    # In pages, where writes add up and show one too many.
    pages = Spans([1], [2], size=4, table=torch.tensor([[0]], dtype=torch.int32))
    target = torch.zeros(1, 4, 1, 1)
    Places(pages, [0], 3, target.device).scatter(target, torch.ones(1, 3, 1, 1))
    assert target.flatten().tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("device_type", ["cpu", "mps", "xpu"])
@pytest.mark.parametrize("survives", [False, True])
@pytest.mark.parametrize("features", [Feature.VARLEN | Feature.BACKWARD, Feature.VARLEN, Feature.BACKWARD], ids=str)
def test_packed_gradients_are_refused_where_padding_makes_them_nan(monkeypatch, device_type, survives, features):
    monkeypatch.setattr(sdpa, "_HANDLES_ROWS_WITHOUT_KEYS", survives)
    traits = Traits(device_type, None, torch.float32, 64, 64, "?", int(features))
    is_refused = any("gradients nan" in reason for reason in Sdpa().extra_reasons(traits))
    assert is_refused == (device_type != "cpu" and not survives and features == Feature.VARLEN | Feature.BACKWARD)


# -------------------------------------------------- AMD's GPUs: plain and causal calls, after a small problem was right


CAUSAL = Feature.CAUSAL | Feature.GQA | Feature.BACKWARD
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
    def wrong(q: Tensor, *others: Tensor, **options: object) -> Tensor:
        rows = torch.arange(q.shape[2], device=q.device)[:, None]
        return attention(q, *others, **options) * torch.where(rows < 128, 1.0, 1.5).to(q.dtype)

    return wrong


def has_wrong_gradients(attention: Attention) -> Attention:
    return lambda *given, **options: 2 * (out := attention(*given, **options)) - out.detach()


def raises(attention: Attention) -> Attention:
    def refuse(*given: object, **options: object) -> None:
        raise RuntimeError("HIP error: no kernel image is available")

    return refuse  # type: ignore[return-value]  # it never returns


WRONG = "wrong answer for head_dim 64"


@pytest.mark.parametrize(
    ("broken", "part"),
    [
        *((broken, WRONG) for broken in (ignores_the_mask, is_wrong_behind_row_128, has_wrong_gradients)),
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
    *((feature, {}, feature.description) for feature in Feature if not feature & CAUSAL),
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
