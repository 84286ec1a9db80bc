"""Sampling from logits, and decoding with caches against running the whole sequence again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_attn_compat.modules.mha import MHA
from flash_attn_compat.utils import generation
from flash_attn_compat.utils.generation import GenerationMixin, InferenceParams, sample, update_graph_cache

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
def test_top_p_keeps_the_smallest_set_that_exceeds_it_and_top_k_the_largest(
    keep: Any, limit: Any, kept: list[set[int]]
) -> None:
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
