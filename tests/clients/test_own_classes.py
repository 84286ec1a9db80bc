"""Models that choose their attention class in a dict of their own, with the name of register_with_transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_attn_compat

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if int(transformers.__version__.partition(".")[0]) < 5:
    pytest.skip("the models of transformers 4 differ", allow_module_level=True)

from tests.clients.models import relative_error, token_ids  # noqa: E402
from tests.clients.padded import SIDES, check, mask_of, pair  # noqa: E402

NAME = "fa2_compat"
FALCON: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("FalconForCausalLM", FALCON),
    "falcon, grouped": ("FalconForCausalLM", FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon, multi-head": ("FalconForCausalLM", FALCON | {"multi_query": False, "parallel_attn": False}),
    "gpt-j": ("GPTJForCausalLM", dict(n_embd=32, n_layer=2, n_head=2, rotary_dim=8, vocab_size=97)),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        dict(hidden_size=32, num_layers=2, num_heads=2, vocab_size=97, max_position_embeddings=64, window_size=4)
        | {"attention_types": [[["global", "local"], 1]]},
    ),
}
BARK: dict[str, Any] = dict(
    input_vocab_size=97, output_vocab_size=97, hidden_size=32, num_layers=2, num_heads=2, block_size=32
)


@pytest.fixture(autouse=True)
def registered() -> None:
    flash_attn_compat.register_with_transformers()


def build(name: str) -> tuple[Any, Any]:
    head, options = DECODERS[name]
    return pair(getattr(transformers, head), options, NAME, 3.0)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", DECODERS)
def test_outputs_and_gradients_equal_eager_at_the_tokens(name: str, side: str, calls: Any) -> None:
    eager, other = build(name)
    ids = token_ids(2, 9)
    mask = mask_of(ids, side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    check(eager, other, {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, mask)
    assert calls() == 2


@pytest.mark.parametrize("name", DECODERS)
def test_generation_from_left_padded_prompts_gives_eagers_tokens(name: str) -> None:
    ids = token_ids(2, 9)
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    expected, got = (model.generate(ids, attention_mask=mask_of(ids, "left"), **options) for model in build(name))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences_equal_each_by_itself(name: str) -> None:
    eager, other = build(name)
    parts = token_ids(1, 9).split([4, 5], dim=1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    expected = torch.cat([eager(part).logits for part in parts], dim=1)
    got = other(torch.cat(parts, dim=1), position_ids=positions, use_cache=False).logits
    assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("name", DECODERS)
def test_models_compile_as_one_graph(name: str) -> None:
    eager, other = build(name)
    ids = token_ids(2, 9)
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: other(ids, use_cache=False).logits, fullgraph=True, backend="eager")
    assert relative_error(compiled(ids), eager(ids).logits) < 1e-5


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("part", ["semantic", "fine"])
def test_barks_causal_and_bidirectional_models_equal_eager(part: str, side: str, calls: Any) -> None:
    ids = token_ids(2, 9)
    mask = mask_of(ids, side)
    if part == "semantic":
        models = pair(transformers.BarkSemanticModel, BARK, NAME)
        check(*models, {"input_ids": ids, "attention_mask": mask}, mask)
    else:
        models = pair(transformers.BarkFineModel, BARK | {"n_codes_total": 4, "n_codes_given": 1}, NAME)
        check(*models, {"codebook_idx": 1, "input_ids": ids[..., None].repeat(1, 1, 4), "attention_mask": mask}, mask)
    assert calls() == 2


def test_a_vision_tower_with_relative_positions_keeps_its_own_class_and_warns() -> None:
    options = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8, output_channels=16,
        window_size=2, global_attn_indexes=[1],
    )  # fmt: skip
    with pytest.warns(UserWarning, match="SamVisionSdpaAttention is not served by 'fa2_compat'"):
        eager, other = pair(transformers.SamVisionModel, options, NAME)
    pixels = torch.randn(1, 3, 32, 32)
    expected, got = (model(pixels).last_hidden_state for model in (eager, other))
    assert relative_error(got, expected) < 1e-5


def test_falcon_with_alibi_raises_an_error_with_the_remedy() -> None:
    _, other = pair(transformers.FalconForCausalLM, FALCON | {"alibi": True}, NAME)
    with pytest.raises(NotImplementedError, match="alibi=True is not served by 'fa2_compat': pass attn_implementation"):
        other(token_ids(1, 5))


def test_a_model_without_a_class_for_flash_attention_raises_an_error_with_the_remedy() -> None:
    vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16)
    options = vision | {"vocab_size": 97, "vision_config": vision | {"patch_size": 8}}
    with pytest.raises(NotImplementedError, match=r"not served by 'fa2_compat'.*Pass attn_implementation='eager'"):
        pair(transformers.GitForCausalLM, options, NAME)
