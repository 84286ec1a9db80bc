"""utils.* and bert_padding: what scripts written for flash-attn import; sampling, and decoding with caches."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import einops
import pytest
import torch
from torch import Tensor, nn

from flash_attn_compat import bert_padding, flash_attn_varlen_func, flash_attn_varlen_kvpacked_func
from flash_attn_compat.bert_padding import IndexFirstAxis, IndexPutFirstAxis, index_first_axis, pad_input, unpad_input
from flash_attn_compat.flash_attn_interface import flash_attn_varlen_qkvpacked_func
from flash_attn_compat.modules.mha import MHA
from flash_attn_compat.utils import benchmark, generation
from flash_attn_compat.utils.generation import GenerationMixin, InferenceParams, sample, update_graph_cache
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
def test_a_state_dict_is_read_from_disk(kind: str, sharded: bool, dtype: torch.dtype | None, tmp_path: Path) -> None:
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


# ------------------------------ generation: sampling from logits, and decoding with caches against running it all again

VOCAB = 11


class TinyModel(nn.Module, GenerationMixin):
    """Embedding, two attention layers, and logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(
            MHA(32, 2, causal=True, layer_idx=i, rotary_emb_dim=16, use_flash_attn=True) for i in range(2)
        )
        self.head = nn.Linear(32, VOCAB)
        self.seen: list[tuple[int, ...]] = []

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        return {i: layer.allocate_inference_cache(batch_size, max_seqlen, dtype) for i, layer in enumerate(self.layers)}

    def forward(
        self, input_ids: Tensor, position_ids: Any = None, inference_params: Any = None, num_last_tokens: int = 0
    ) -> Any:
        self.seen.append(tuple(input_ids.shape))
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x, inference_params=inference_params)
        return SimpleNamespace(logits=self.head(x[:, -num_last_tokens:]))


def greedy_without_cache(model: TinyModel, ids: Tensor, max_length: int) -> Tensor:
    while ids.shape[1] < max_length:
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return ids


PROMPT = torch.tensor([[1, 2, 3], [7, 5, 9]])


def test_cached_greedy_decoding_agrees_with_running_everything_again() -> None:
    model = TinyModel()
    expected = greedy_without_cache(model, PROMPT, 10)
    model.seen.clear()
    output = model.generate(PROMPT, 10, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(output.sequences, expected)
    assert model.seen == [(2, 3)] + [(2, 1)] * 6
    assert len(output.scores) == 7 and torch.equal(output.scores[-1].argmax(-1), expected[:, -1])
    assert model.generate(PROMPT, 10, return_dict_in_generate=True).scores is None


def test_decoding_stops_when_every_sample_ends() -> None:
    model = TinyModel()
    expected = greedy_without_cache(model, PROMPT[:1], 10)
    eos = int(expected[0, 5])
    first = expected[0, 3:].tolist().index(eos) + 3
    assert torch.equal(model.generate(PROMPT[:1], 10, eos_token_id=eos), expected[:, : first + 1])


def test_teacher_tokens_replace_drawn_ones() -> None:
    model = TinyModel()
    teacher = torch.tensor([[1, 2, 3, 4, 6, 8], [7, 5, 9, 0, 0, 1]])
    output = generation.decode(PROMPT, model, 7, teacher_outputs=teacher)
    assert torch.equal(output.sequences[:, :6], teacher)
    torch.testing.assert_close(output.scores[-1], model(teacher).logits[:, -1], rtol=1e-4, atol=1e-5)
    output = generation.decode(PROMPT, model, 8, vocab_size=4)  # logits past the vocabulary are ignored
    assert output.sequences[:, 3:].max() < 4 and output.scores[0].shape == (2, 4)


def test_top_1_is_the_argmax_and_leaves_the_logits_alone() -> None:
    logits = torch.randn(5, VOCAB)
    kept = logits.clone()
    assert torch.equal(sample(logits), logits.argmax(-1))
    for options in ({"top_k": 3, "top_p": 0.5}, {"top_k": 0, "top_p": 0.5, "temperature": 0.5}):
        sample(logits, **options)
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_k": 0}, {"top_k": 0, "temperature": 0.5}, {"top_k": 99}])
def test_draws_follow_the_probabilities(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 2.0, 1.0, 1.5])
    drawn = sample(logits.expand(20000, 4), **options)
    scaled = logits / options.get("temperature", 1.0)
    if options["top_k"] == 3:
        scaled = torch.where(scaled == 0.0, float("-inf"), scaled)
    frequencies = torch.bincount(drawn, minlength=4) / 20000
    torch.testing.assert_close(frequencies, scaled.softmax(-1), rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("keep", "limit", "kept"),
    [
        (generation.modify_logits_for_top_p_filtering, 0.4, [{1}, {0}]),
        (generation.modify_logits_for_top_p_filtering, 0.6, [{1, 3}, {0}]),
        (generation.modify_logits_for_top_p_filtering, 0.94, [{1, 3, 2}, {0, 1}]),
        (generation.modify_logits_for_top_p_filtering, 0.0, [{0, 1, 2, 3}] * 2),
        (generation.modify_logits_for_top_p_filtering, 1.0, [{0, 1, 2, 3}] * 2),
        (generation.modify_logits_for_top_k_filtering, 2, [{1, 3}, {0, 1}]),
    ],
)
def test_top_p_keeps_the_smallest_set_beyond_it_top_k_the_largest(keep: Any, limit: Any, kept: list[set[int]]) -> None:
    logits = torch.tensor([[0.05, 0.5, 0.15, 0.3], [0.9, 0.05, 0.03, 0.02]]).log()
    keep(logits, limit)
    assert [set(row.isfinite().nonzero().flatten().tolist()) for row in logits] == kept


def test_the_state_can_be_reset_and_keeps_its_caches() -> None:
    params = InferenceParams(8, 2, seqlen_offset=5, key_value_memory_dict={0: "cache"})
    params.lengths_per_sample = torch.tensor([3, 4])
    params.reset(16, 1)
    assert (params.max_seqlen, params.max_batch_size, params.seqlen_offset) == (16, 1, 0)
    assert params.key_value_memory_dict == {0: "cache"} and params.lengths_per_sample.tolist() == [0, 0]
    assert InferenceParams(1, 1).key_value_memory_dict is not InferenceParams(1, 1).key_value_memory_dict


# CUDA graphs of a step; on a CPU the same interface calls the model.

# fp32 on a GPU has no kernel that a graph could hold.
DTYPES = {"cpu": torch.float32, "cuda": torch.float16}
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@on_devices
def test_decoding_by_graphs_gives_the_tokens_of_decoding_without(device: str) -> None:
    model = TinyModel().to(device, DTYPES[device])
    prompt = PROMPT.to(device)
    expected = model.generate(prompt, 12)
    assert torch.equal(model.generate(prompt, 12, cg=True), expected)
    graphs = model._decoding_cache
    # A shorter generation, and another prompt, replay what is there.
    assert torch.equal(model.generate(prompt.flip(0), 9, cg=True), expected.flip(0)[:, :9])
    assert model._decoding_cache is graphs and graphs.max_seqlen == 12 and len(graphs.callables) == 1
    # A longer sequence in between replaces the rotary tables that a graph reads.
    model(torch.zeros(1, 64, dtype=torch.long, device=device))
    assert torch.equal(model.generate(prompt, 12, cg=True), expected)


@on_devices
def test_a_step_of_several_tokens_gives_the_logits_of_each(device: str) -> None:
    model = TinyModel().to(device, DTYPES[device])
    ids = torch.tensor([[1, 2, 3, 4, 5], [7, 5, 9, 0, 2]], device=device)
    cache = update_graph_cache(model, None, 2, 3, 8, decoding_seqlens=(1, 2))
    assert cache.inference_params.seqlen_offset == 0 and set(cache.callables) == {(2, 1), (2, 2)}
    with torch.inference_mode():
        cache.inference_params.reset(8, 2)
        model(ids[:, :3], inference_params=cache.inference_params)
    logits = cache.run(ids[:, 3:], torch.tensor([[3, 4]] * 2, device=device), 3)
    rounding = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(logits, model(ids).logits[:, 3:], rtol=100 * rounding, atol=10 * rounding)


@pytest.mark.parametrize("change", [{"batch_size": 3}, {"max_seqlen": 9}, {"dtype": torch.float16}])
def test_graphs_that_do_not_fit_are_made_anew(change: dict[str, Any]) -> None:
    model = TinyModel()
    sizes: dict[str, Any] = {"batch_size": 2, "seqlen_og": 3, "max_seqlen": 8}
    cache = update_graph_cache(model, None, **sizes)
    state, step = cache.inference_params, cache.callables[2, 1]
    assert update_graph_cache(model, cache, 1, 3, 7) is cache and cache.callables[2, 1] is step
    assert update_graph_cache(model, cache, **{**sizes, **change}) is cache
    assert cache.inference_params is not state and step not in cache.callables.values()
    batch, dtype = change.get("batch_size", 2), change.get("dtype", torch.float32)
    caches = cache.inference_params.key_value_memory_dict
    assert caches[0].shape[:2] == (batch, change.get("max_seqlen", 8)) and caches[0].dtype == dtype


def test_caches_are_made_from_a_configuration_where_the_model_has_none() -> None:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)  # type: ignore[assignment]
    caches = update_graph_cache(model, None, 2, 3, 8, decoding_seqlens=(), tensor_parallel=2).inference_params
    shapes = {layer: tuple(cache.shape) for layer, cache in caches.key_value_memory_dict.items()}
    assert shapes == dict.fromkeys((0, 1), (2, 8, 2, 2, 8))
    assert list(generation.allocate_inference_cache(1, 2, 3, 4, [5, 7], "cpu")) == [5, 7]


# ----------------------------------------------------------- bert_padding: kept tokens, restored padding, and gradients

TOKENS = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])
KEPT_TOKENS = [0, 1, 9, 10, 11]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("hidden", [randn(3, 4, 2, 5), torch.arange(12).reshape(3, 4, 1)], ids=["floats", "integers"])
def test_unpad_input_returns_five_values_for_every_kind_of_mask(hidden: torch.Tensor, dtype: torch.dtype) -> None:
    """Unused tokens are packed but not counted as used, and those in both masks count once."""
    unused = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    for masks, kept, starts in (
        ((TOKENS,), KEPT_TOKENS, [0, 2, 2, 5]),
        ((TOKENS, unused), [0, 1, 2, 7, 9, 10, 11], [0, 3, 4, 7]),
    ):
        packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(hidden, *(mask.to(dtype) for mask in masks))
        assert torch.equal(packed, hidden.flatten(0, 1)[kept]) and packed.dtype == hidden.dtype
        assert indices.dtype == torch.int64 and indices.tolist() == kept
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == starts
        assert type(max_seqlen) is int and max_seqlen == 3
        assert seqused.dtype == torch.int32 and seqused.tolist() == [2, 0, 3]
    assert bert_padding.rearrange is einops.rearrange and bert_padding.repeat is einops.repeat


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_pad_input_undoes_unpad_input_with_zeros_in_the_padding_and_gradients_of_kept_tokens(
    integers: torch.dtype,
) -> None:
    x = randn(3, 4, 2, dtype=torch.bfloat16).requires_grad_()
    indices = unpad_input(x, TOKENS)[1].to(integers)
    padded = pad_input(2 * index_first_axis(x.flatten(0, 1), indices), indices, 3, 4)
    assert padded.dtype == torch.bfloat16 and torch.equal(padded, 2 * x * TOKENS[:, :, None])
    weight = randn(3, 4, 2, dtype=torch.bfloat16) + 3
    padded.backward(weight)
    assert x.grad is not None and torch.equal(x.grad, 2 * weight * TOKENS[:, :, None])


def test_picking_and_putting_and_their_gradients() -> None:
    x = randn(4, 3).requires_grad_()
    index_first_axis(x, torch.tensor([1, 1])).sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [0, 1, 0, 0]  # assigned rather than added

    picked, residual = bert_padding.index_first_axis_residual(x, torch.tensor([2, 0]))
    assert torch.equal(picked, x[[2, 0]]) and torch.equal(residual, x)
    # sum() hands an expanded gradient back: writing into it would corrupt it.
    (gradient,) = torch.autograd.grad(picked.sum() * 3 + residual.sum(), x)
    assert gradient[:, 0].tolist() == [4, 1, 4, 1]

    values, upstream = randn(2, 3).requires_grad_(), randn(5, 3) + 1
    out = bert_padding.index_put_first_axis(values, torch.tensor([3, 1]), 5)
    out.backward(upstream)
    assert torch.equal(out[[3, 1]], values) and out[[0, 2, 4]].abs().sum() == 0
    assert values.grad is not None and torch.equal(values.grad, upstream[[3, 1]])


def test_concatenated_sequences_are_split_by_their_lengths() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = randn(3, 6, 2).requires_grad_()
    packed, indices, cu_seqlens, max_seqlen = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    expected = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert indices.tolist() == expected
    assert torch.equal(packed, x.flatten(0, 1)[expected])
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert type(max_seqlen) is int and max_seqlen == 6
    packed.sum().backward()
    assert x.grad is not None and x.grad[:, :, 0].sum(dim=1).tolist() == [5, 5, 6]


def test_without_gradients_nothing_is_told_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (IndexFirstAxis, IndexPutFirstAxis):
        monkeypatch.setattr(function, "apply", lambda *arguments: pytest.fail("autograd was told"))
    x = randn(3, 4, 5).requires_grad_()
    with torch.no_grad():
        packed, indices, *_ = unpad_input(x, TOKENS)
        padded = pad_input(packed, indices, 3, 4)
    assert torch.equal(padded, x * TOKENS[..., None])
