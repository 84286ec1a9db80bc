"""utils.*: the functions that scripts and tests written for flash-attn import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func
from flash_attn_compat.flash_attn_interface import flash_attn_varlen_qkvpacked_func
from flash_attn_compat.utils import benchmark
from flash_attn_compat.utils.pretrained import state_dict_from_pretrained
from flash_attn_compat.utils.testing import attention_ref, generate_qkv, generate_random_padding_mask
from tests.forms.inputs import randn
from tests.forms.plain import attention as plain_attention
from tests.forms.plain import check_function, pairwise

B, S, H, D = 5, 24, 2, 16

# testing


@pytest.mark.parametrize("mode", ["full", "random", "third"])
@pytest.mark.parametrize("zero_lengths", [False, True])
def test_random_padding_masks_have_lengths_of_their_mode(mode: str, zero_lengths: bool) -> None:
    lengths = generate_random_padding_mask(60, 11, "cpu", mode, zero_lengths).sum(-1)
    empty = {0, 5, 10} if zero_lengths else set()
    assert {i for i in range(11) if lengths[i] == 0} == empty
    least = {"full": 60, "random": 40, "third": 20}[mode]
    assert all(least <= lengths[i] <= 60 for i in range(11) if i not in empty)
    mask = generate_random_padding_mask(60, 11, "cpu", mode, zero_lengths)
    assert mask.dtype == torch.bool and (mask[:, 1:] <= mask[:, :-1]).all()


@pytest.mark.parametrize(
    ("form", "padded", "causal"), pairwise(("plain", "kvpacked", "qkvpacked"), (False, True), (False, True))
)
def test_packed_inputs_give_the_reference_of_the_padded_ones(form: str, padded: bool, causal: bool) -> None:
    """generate_qkv, the varlen functions and attention_ref together: outputs and gradients."""
    torch.manual_seed(0)
    heads = (H, H, H) if form == "qkvpacked" else (2 * H, H, H)
    q, k, v = (randn(B, S, h, D, seed=s) for s, h in enumerate(heads))
    query_mask = generate_random_padding_mask(S, B, "cpu", "third") if padded else None
    key_mask = query_mask
    if padded and form != "qkvpacked":
        key_mask = generate_random_padding_mask(S, B, "cpu", "random")
    made = generate_qkv(q, k, v, query_mask, key_mask, kvpacked=form == "kvpacked", qkvpacked=form == "qkvpacked")
    if form == "qkvpacked":
        packed, cu_seqlens, max_seqlen, qkv, pad_out, pad_in = made
        out = flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, max_seqlen, causal=causal)
        gradients, reference = [(packed, pad_in, qkv)], qkv.unbind(2)
    elif form == "kvpacked":
        q_unpad, kv_unpad, *lengths, wide_q, wide_kv, pad_out, pad_q, pad_kv = made
        out = flash_attn_varlen_kvpacked_func(q_unpad, kv_unpad, *lengths, causal=causal)
        gradients, reference = [(q_unpad, pad_q, wide_q), (kv_unpad, pad_kv, wide_kv)], (wide_q, *wide_kv.unbind(2))
    else:
        *packed, _, cu_q, cu_k, _, _, max_q, max_k, wide_q, wide_k, wide_v, _, pad_out, pad_q, pad_k = made
        out = flash_attn_varlen_func(*packed, cu_q, cu_k, max_q, max_k, causal=causal)
        reference = wide_q, wide_k, wide_v
        gradients = list(zip(packed, (pad_q, pad_k, pad_k), reference))
    expected, _ = attention_ref(*reference, query_mask, key_mask, causal=causal)
    torch.testing.assert_close(pad_out(out), expected, rtol=1e-4, atol=1e-5)
    dout = randn(*expected.shape, seed=9)
    (pad_out(out) * dout).sum().backward()
    (expected * dout).sum().backward()
    for leaf, pad, whole in gradients:
        torch.testing.assert_close(pad(leaf.grad), whole.grad, rtol=1e-4, atol=1e-5)


ROWS, COLUMNS = torch.arange(5)[:, None] + 4, torch.arange(9)
BIAS, SINK, FACTORS = randn(1, H, 1, 9), randn(H), torch.tensor([[2.0], [0.5]])
KEPT = randn(2, H, 5, 9) > 0


def hidden(where: Tensor) -> dict[str, Tensor]:
    return {"bias": torch.zeros(where.shape).masked_fill(where, -torch.inf)}


# options of attention_ref, and of attention
REFERENCE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a window and softcap": ({"window_size": (3, 2), "softcap": 2.0}, {"window": (3, 2), "softcap": 2.0}),
    "a window of one key": ({"window_size": (0, 0)}, {"window": (0, 0)}),
    "a window to the left": ({"window_size": (4, None)}, {"window": (4, -1)}),
    "a window to the right": ({"window_size": (None, 1)}, {"window": (-1, 1)}),
    "a bias": ({"attn_bias": BIAS}, {"bias": BIAS}),
    "chunks": ({"attention_chunk": 4}, hidden(COLUMNS // 4 != ROWS // 4)),
    "tokens that a window does not hide": (
        {"window_size": (2, 1), "sink_token_length": 2},
        hidden((COLUMNS > ROWS + 1) | ((COLUMNS < ROWS - 2) & (COLUMNS >= 2))),
    ),
    "left padding": ({"key_leftpad": torch.tensor([3, 3])}, hidden((COLUMNS < 3).expand(5, 9))),
    "left padding before a window": (
        {"key_leftpad": torch.tensor([3, 3]), "window_size": (4, 1)},
        hidden((COLUMNS < 3) | (COLUMNS - 3 > ROWS + 1) | (COLUMNS - 3 < ROWS - 4)),
    ),
    "a learnable sink": ({"learnable_sink": SINK}, {"sinks": SINK}),
    "dropout": ({"dropout_p": 0.5, "dropout_mask": KEPT}, {"dropout_p": 0.5, "keep": KEPT}),
}


@pytest.mark.parametrize(
    ("name", "upcast", "reorder_ops"), pairwise(REFERENCE, (False, True), (False, True))
)  # fmt: skip
def test_the_reference_is_softmax_attention(name: str, upcast: bool, reorder_ops: bool) -> None:
    options, plain_options = REFERENCE[name]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, attention = attention_ref(q, k, v, **options, upcast=upcast, reorder_ops=reorder_ops)
        if "dropout_p" not in options:
            torch.testing.assert_close(torch.einsum("bhts,bshd->bthd", attention, v), out)
        return out

    inputs = randn(2, 5, H, D), randn(2, 9, H, D, seed=1), randn(2, 9, H, D, seed=2)
    check_function(ours, lambda *given: plain_attention(*given, **plain_options), *inputs, epsilons=8)


def test_the_reference_takes_a_second_query_and_factors_and_rounds_in_between() -> None:
    q, qv, k, v = (randn(2, 5, h, D, seed=seed) for seed, h in enumerate((H, H, 1, 1)))
    second = plain_attention(torch.cat((q, qv), -1), torch.cat((k, v), -1), v)
    torch.testing.assert_close(attention_ref(q, k, v, qv=qv)[0], second)
    scaled = [t * n * FACTORS[:, None, :, None] for n, t in enumerate((q, k, v), 1)]
    given = {f"{name}_descale": n * FACTORS for n, name in enumerate("qkv", 1)}
    for ours, right in zip(attention_ref(q, k, v, **given), attention_ref(*scaled), strict=True):
        torch.testing.assert_close(ours, right)
    rounded, attention = attention_ref(q, k, v, intermediate_dtype=torch.bfloat16)
    expected = torch.einsum("bhts,bshd->bthd", attention.bfloat16().float(), v.expand_as(q))
    torch.testing.assert_close(rounded, expected)


def test_padding_is_zero_and_gives_no_gradient() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    q, k, v = (randn(2, 3, 1, 4, seed=s).requires_grad_() for s in range(3))
    out, attention = attention_ref(q, k, v, mask, mask)
    assert (out[~mask] == 0).all() and (attention.transpose(1, 2)[~mask] == 0).all()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (grad[~mask] == 0).all() and grad.isfinite().all()


# benchmark


def test_benchmarks_time_forward_backward_and_both(capsys: pytest.CaptureFixture[str]) -> None:
    x = randn(4, 4).requires_grad_()
    calls = []

    def fn(t: Tensor, factor: float = 1.0) -> tuple[Tensor, str]:
        calls.append(torch.is_autocast_enabled("cpu"))
        return t @ t * factor, "second"

    timings = benchmark.benchmark_all(fn, x, repeats=3, desc="product", factor=2.0)
    printed = capsys.readouterr().out
    assert [timing[1].number_per_run for timing in timings] == [3, 3, 3]
    for words in ("product - Forward pass", "product - Backward pass", "product - Forward + Backward pass"):
        assert words in printed
    ones = torch.ones(4, 4)
    torch.testing.assert_close(
        benchmark.benchmark_backward(fn, x, grad=ones, verbose=False) and x.grad, ones @ x.T + x.T @ ones
    )
    calls.clear()
    benchmark.benchmark_forward(fn, x, amp=True, amp_dtype=torch.bfloat16, verbose=False)
    assert set(calls) == {True}
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="sees no CUDA device"):
            benchmark.benchmark_memory(lambda: None)


@pytest.mark.parametrize("backward", [False, True])
def test_the_profiler_prints_a_table_and_writes_a_trace(
    backward: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    benchmark.pytorch_profiler(
        torch.mm, randn(4, 4).requires_grad_(), randn(4, 4), trace_filename=str(trace), backward=backward, cpu=True
    )
    printed = capsys.readouterr().out
    assert "aten::mm" in printed and ("MmBackward0" in printed) == backward
    assert json.loads(trace.read_text())["traceEvents"]


# pretrained

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("kind", "sharded", "dtype"), pairwise(("bin", "safetensors"), (False, True), (None, torch.float32, torch.float16))
)
def test_a_state_dict_is_read_from_a_directory(
    kind: str, sharded: bool, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    save = torch.save if kind == "bin" else pytest.importorskip("safetensors.torch").save_file
    whole = tmp_path / {"bin": "pytorch_model.bin", "safetensors": "model.safetensors"}[kind]
    if sharded:
        files = {name: f"{name}.{kind}" for name in STATE}
        for name, file in files.items():
            save({name: STATE[name]}, tmp_path / file)
        whole.with_name(f"{whole.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    else:
        save(STATE, whole)
    found = state_dict_from_pretrained(str(tmp_path), dtype=dtype)
    assert found.keys() == STATE.keys()
    for name, tensor in STATE.items():
        expected = tensor.to(dtype or tensor.dtype)
        assert torch.equal(found[name], expected) and found[name].dtype == expected.dtype
