"""utils.*: what scripts and tests written for flash-attn import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_varlen_kvpacked_func
from flash_attn_compat.flash_attn_interface import flash_attn_varlen_qkvpacked_func
from flash_attn_compat.utils.benchmark import (
    benchmark_all,
    benchmark_backward,
    benchmark_forward,
    benchmark_memory,
    pytorch_profiler,
)
from flash_attn_compat.utils.library import triton_op
from flash_attn_compat.utils.pretrained import state_dict_from_pretrained
from flash_attn_compat.utils.testing import attention_ref, generate_qkv, generate_random_padding_mask
from flash_attn_compat.utils.torch import custom_bwd, custom_fwd
from tests.plain import pairwise
from tests.support import randn

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
    with pytest.raises(AssertionError, match="'half'"):
        generate_random_padding_mask(4, 2, "cpu", "half")


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
        leaves, padders, wide = [packed], [pad_in], [qkv]
        ref_inputs = qkv.unbind(2)
    elif form == "kvpacked":
        q_unpad, kv_unpad, *lengths, wide_q, wide_kv, pad_out, pad_q, pad_kv = made
        out = flash_attn_varlen_kvpacked_func(q_unpad, kv_unpad, *lengths, causal=causal)
        leaves, padders, wide = [q_unpad, kv_unpad], [pad_q, pad_kv], [wide_q, wide_kv]
        ref_inputs = (wide_q, *wide_kv.unbind(2))
    else:
        q_unpad, k_unpad, v_unpad, _, cu_q, cu_k, _, _, max_q, max_k, *rest = made
        wide_q, wide_k, wide_v, _, pad_out, pad_q, pad_k = rest
        out = flash_attn_varlen_func(q_unpad, k_unpad, v_unpad, cu_q, cu_k, max_q, max_k, causal=causal)
        leaves, padders, wide = [q_unpad, k_unpad, v_unpad], [pad_q, pad_k, pad_k], [wide_q, wide_k, wide_v]
        ref_inputs = (wide_q, wide_k, wide_v)
    expected, _ = attention_ref(*ref_inputs, query_mask, key_mask, causal=causal)
    torch.testing.assert_close(pad_out(out), expected, rtol=1e-4, atol=1e-5)
    dout = randn(*expected.shape, seed=9)
    (pad_out(out) * dout).sum().backward()
    (expected * dout).sum().backward()
    for leaf, pad, whole in zip(leaves, padders, wide, strict=True):
        torch.testing.assert_close(pad(leaf.grad), whole.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [(3, 2), (0, 0), (4, None), (None, 1)])
def test_the_references_windows_are_the_attention_functions(window: Any) -> None:
    q, k, v = randn(1, 7, H, D), randn(1, 9, H, D, seed=1), randn(1, 9, H, D, seed=2)
    flash_window = tuple(-1 if side is None else side for side in window)
    expected = flash_attn_func(q, k, v, window_size=flash_window, softcap=2.0)
    torch.testing.assert_close(
        attention_ref(q, k, v, window_size=window, softcap=2.0)[0], expected, rtol=1e-4, atol=1e-5
    )


def written_out(scores: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    attention = scores.double().masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhts,bshd->bthd", attention, v.double()), attention


@pytest.mark.parametrize("upcast", [False, True])
@pytest.mark.parametrize("reorder_ops", [False, True])
def test_the_reference_adds_biases_sinks_chunks_and_a_second_query(upcast: bool, reorder_ops: bool) -> None:
    q, k, v = randn(2, 5, H, D), randn(2, 9, H, D, seed=1), randn(2, 9, H, D, seed=2)
    qv, bias, sink = randn(2, 5, H, D, seed=3), randn(1, H, 1, 9), randn(H)
    options: dict[str, Any] = {"upcast": upcast, "reorder_ops": reorder_ops}
    scores = torch.einsum("bthd,bshd->bhts", q, k) * D**-0.5
    rows, columns = torch.arange(5)[:, None] + 4, torch.arange(9)
    nothing = torch.zeros(5, 9, dtype=torch.bool)

    def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
        for ours, right in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-5)

    check(attention_ref(q, k, v, attn_bias=bias, **options), written_out(scores + bias, v, nothing))
    chunks = (columns // 4) != (rows // 4)
    check(attention_ref(q, k, v, attention_chunk=4, **options), written_out(scores, v, chunks))
    with_sink = (columns > rows + 1) | ((columns < rows - 2) & (columns >= 2))
    check(attention_ref(q, k, v, window_size=(2, 1), sink_token_length=2, **options), written_out(scores, v, with_sink))
    skipped = columns < 3
    found = attention_ref(q, k, v, key_leftpad=torch.tensor([3, 3]), **options)
    check(found, written_out(scores, v, skipped.expand(5, 9)))
    both = (scores * D**0.5 + torch.einsum("bthd,bshd->bhts", qv, v)) * (2 * D) ** -0.5
    check(attention_ref(q, k, v, qv=qv, **options), written_out(both, v, nothing))

    column = sink.view(1, H, 1, 1).expand(2, H, 5, 1)
    attention = torch.cat((scores, column), dim=-1).double().softmax(-1)[..., :-1]
    expected = torch.einsum("bhts,bshd->bthd", attention, v.double())
    check(attention_ref(q, k, v, learnable_sink=sink, **options), (expected, attention))


def test_the_reference_scales_by_descale_factors_and_drops_by_its_mask() -> None:
    q, k, v = randn(2, 5, H, D), randn(2, 5, 1, D, seed=1), randn(2, 5, 1, D, seed=2)
    factors = [torch.tensor([[2.0], [0.5]]) * n for n in (1, 2, 3)]
    scaled = [t * f[:, None, :, None] for t, f in zip((q, k, v), factors, strict=True)]
    found = attention_ref(q, k, v, q_descale=factors[0], k_descale=factors[1], v_descale=factors[2])
    for ours, right in zip(found, attention_ref(*scaled), strict=True):
        torch.testing.assert_close(ours, right)
    kept = torch.rand(2, H, 5, 5) > 0.5
    out, attention = attention_ref(q, k, v, dropout_p=0.5, dropout_mask=kept)
    expected = torch.einsum("bhts,bshd->bthd", attention * kept, 2 * v.expand_as(q))
    torch.testing.assert_close(out, expected)
    rounded, _ = attention_ref(q, k, v, intermediate_dtype=torch.bfloat16)
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

    timings = benchmark_all(fn, x, repeats=3, desc="product", factor=2.0)
    printed = capsys.readouterr().out
    assert [timing[1].number_per_run for timing in timings] == [3, 3, 3]
    for words in ("product - Forward pass", "product - Backward pass", "product - Forward + Backward pass"):
        assert words in printed
    ones = torch.ones(4, 4)
    torch.testing.assert_close(benchmark_backward(fn, x, grad=ones, verbose=False) and x.grad, ones @ x.T + x.T @ ones)
    calls.clear()
    benchmark_forward(fn, x, amp=True, amp_dtype=torch.bfloat16, verbose=False)
    assert set(calls) == {True}
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="sees no CUDA device"):
            benchmark_memory(lambda: None)
    with pytest.raises(RuntimeError, match=r"Grad shape \(3,\) does not match output shape \(4, 4\)"):
        benchmark_backward(fn, x, grad=torch.ones(3))


@pytest.mark.parametrize("backward", [False, True])
def test_the_profiler_prints_a_table_and_writes_a_trace(
    backward: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    pytorch_profiler(torch.mm, randn(4, 4).requires_grad_(), randn(4, 4), trace_filename=str(trace), backward=backward)
    printed = capsys.readouterr().out
    assert "aten::mm" in printed and ("MmBackward0" in printed) == backward
    assert json.loads(trace.read_text())["traceEvents"]


# torch, library


def test_custom_forward_casts_and_custom_backward_has_the_forwards_autocast() -> None:
    seen = {}

    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen["forward"] = (x.dtype, torch.is_autocast_enabled(device))
            return 2 * x

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen["backward"] = torch.is_autocast_enabled(device)
            return 2 * grad

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(2, dtype=torch.bfloat16, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        out = Double.apply(x)
        out.sum().backward()
    assert seen == {"forward": (torch.float32, False), "backward": False}
    assert (x.grad == 2).all()


def test_a_triton_op_is_a_custom_operator_with_the_given_schema() -> None:
    @triton_op("flash_attn_compat_test::scaled", mutates_args=(), schema="(Tensor x, float factor=3.0) -> Tensor")
    def scaled(x: Tensor, factor: float = 3.0) -> Tensor:
        return x * factor

    x = randn(3)
    assert torch.equal(torch.ops.flash_attn_compat_test.scaled(x), 3 * x)
    assert torch.equal(torch.compile(scaled, backend="eager", fullgraph=True)(x, 2.0), 2 * x)
    schema = torch.ops.flash_attn_compat_test.scaled.default._schema
    assert schema.arguments[1].default_value == 3.0


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


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(OSError, match="was not found"):
        state_dict_from_pretrained(tmp_path)
