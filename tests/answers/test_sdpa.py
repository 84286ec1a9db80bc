"""The sdpa backend: joined sequences, versions of PyTorch's CPU kernel, half precision and biases."""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, use_backend
from flash_attn_compat.backends import alibi, sdpa
from flash_attn_compat.backends.sdpa import Sdpa
from flash_attn_compat.backends.varlen import Block, Places, Spans
from flash_attn_compat.core.features import Feature, Traits
from flash_attn_compat.core.mask import Range
from tests.forms.inputs import cumulative
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
    q, k, v = torch.randn(2, 40, 4, 16), torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)
    found = {}
    for name, shares in (("sdpa", False), ("chunked", True)):
        monkeypatch.setattr(sdpa, "_SHARES_KEY_HEADS", shares)
        inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        with use_backend(name):
            out = flash_attn_func(*inputs, window_size=window_size)
            found[name] = (out, *torch.autograd.grad(out.square().sum(), inputs))
    for ours, expected in zip(*found.values()):
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


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_causal_rows_after_a_long_cache_are_right_on_every_cpu(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """CPUs without hardware for half precision compute in fp32."""
    problem = Problem(seqlens_q=(150,), seqlens_k=(3500,), nheads_k=2, group=2, causal=True, dtype=dtype)
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
