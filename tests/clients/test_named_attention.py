"""transformers by patch(transformers=True), where its own is wrong, and models with attention classes of their own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import flash_attn_compat
from flash_attn_compat.dropin import named_attention
from tests.forms.plain import pairwise, some, some_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
modeling_utils = pytest.importorskip("transformers.modeling_utils")
pytest.importorskip("transformers.masking_utils", reason="transformers is too old to have registries")
if not hasattr(getattr(modeling_utils, "AttentionInterface", None), "_global_mapping"):
    pytest.skip("transformers is too old to have a registry", allow_module_level=True)

from tests.clients.models import REGISTERED, SIDES, check, mask_of, pair, relative_error, token_ids  # noqa: E402

NAME = named_attention.NAME
BART: dict[str, Any] = dict(
    d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=97, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    decoder_start_token_id=2, max_position_embeddings=64, dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
HALF: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, vocab_size=97, sliding_window=3, layer_types=["sliding_attention", "full_attention"],
    query_pre_attn_scalar=16, dropout_rate=0.0, attention_dropout=0.0,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": BART,
    "MBartForConditionalGeneration": BART,
    "MarianMTModel": BART | {"pad_token_id": 96},
    "M2M100ForConditionalGeneration": BART,
    "BlenderbotForConditionalGeneration": BART,
    # Its encoder has bidirectional windows, one key wider on each side than transformers tells flash-attn.
    "T5GemmaForConditionalGeneration": {"encoder": HALF, "decoder": HALF, "vocab_size": 97},
}


def build(name: str, implementation: str) -> tuple[Any, Any]:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return pair(getattr(transformers, name), MODELS[name], implementation, 3.0)


@pytest.mark.parametrize(("name", "side", "rows"), some_of(pairwise(MODELS, SIDES, (1, 5, 9, 12)), 2))
def test_encoder_decoders_equal_eager_at_every_row(name: str, side: str, rows: int, calls: Any) -> None:
    """Fewer decoder rows than the encoder has, as many, more."""
    with flash_attn_compat.patched(transformers=True), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        eager, flash = build(name, NAME)
        ids = token_ids(2, 9)
        inputs = {"input_ids": ids, "attention_mask": mask_of(ids, side), "decoder_input_ids": token_ids(2, rows)}
        check(eager, flash, inputs)
        assert calls() >= 3


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("side", SIDES)
def test_the_registered_name_serves_t5gemmas_windows_as_eager_does(side: str, calls: Any) -> None:
    eager, flash = build("T5GemmaForConditionalGeneration", REGISTERED)
    ids = token_ids(2, 9)
    check(eager, flash, {"input_ids": ids, "attention_mask": mask_of(ids, side), "decoder_input_ids": token_ids(2, 5)})
    assert calls() >= 6


GPT2 = dict(n_embd=32, n_layer=1, n_head=2, vocab_size=97)


@pytest.mark.parametrize("side", SIDES)
def test_gpt2_in_fp32_equals_eager(side: str, calls: Any) -> None:
    with flash_attn_compat.patched(transformers=True):
        eager, flash = pair(transformers.GPT2LMHeadModel, GPT2, NAME)
        ids = token_ids(2, 9)
        mask = mask_of(ids, side)
        check(eager, flash, {"input_ids": ids, "attention_mask": mask}, mask)
        assert calls() == 1


def test_gpt2_in_fp32_under_transformers_own_function_raises_an_error_with_the_remedy() -> None:
    with flash_attn_compat.patched():
        _, flash = pair(transformers.GPT2LMHeadModel, GPT2, NAME)
        with pytest.raises(RuntimeError, match=r"GPT2Attention in fp32.*patch\(transformers=True\)"):
            flash(token_ids(1, 5))


def caught(rows: int, side: str, way: str = NAME) -> list[str]:
    """The warnings of two calls of BART under patch() with this many decoder rows."""
    named_attention.warn_once.cache_clear()
    with flash_attn_compat.patched(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _, flash = build("BartForConditionalGeneration", way)
        ids = token_ids(2, 9)
        for _ in range(2):
            flash(input_ids=ids, attention_mask=mask_of(ids, side), decoder_input_ids=token_ids(2, rows))
    return [str(warning.message) for warning in found if "flash_attn_compat" in str(warning.message)]


@pytest.mark.parametrize(("rows", "side"), [(5, "left"), (9, "right")])
def test_a_padded_encoder_under_transformers_own_function_warns_once_with_the_remedy(rows: int, side: str) -> None:
    (message,) = caught(rows, side)
    assert message.startswith("BartAttention is wrong") and "patch(transformers=True)" in message


@pytest.mark.parametrize(("rows", "side", "way"), [(5, "none", NAME), (1, "right", NAME), (5, "right", "sdpa")])
def test_calls_that_are_right_do_not_warn(rows: int, side: str, way: str) -> None:
    assert caught(rows, side, way) == []


def test_padded_decoders_do_not_warn() -> None:
    named_attention.warn_once.cache_clear()
    options = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=97)
    ids = token_ids(2, 9)
    with flash_attn_compat.patched(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        heads = (transformers.LlamaForCausalLM, transformers.BertForMaskedLM)
        for head in (head for head in heads if head._supports_flash_attn):
            pair(head, options, NAME)[1](input_ids=ids, attention_mask=mask_of(ids, "right"))


def test_the_registry_is_as_before_after_the_block_and_hub_names_follow() -> None:
    registry = modeling_utils.AttentionInterface._global_mapping
    before = dict(registry)
    for options in ({}, {"transformers": True}, {"transformers": True, "hub_kernels": True}):
        with flash_attn_compat.patched(**options):
            assert registry[NAME] is not before[NAME]
            served = "PagedAttentionCache" in registry[NAME].__code__.co_consts
            assert served == bool(options)
            if "hub_kernels" in options:
                assert registry["kernels-community/flash-attn2"] is registry[NAME]
        assert registry == before


def test_a_paged_cache_is_left_to_transformers_own_function() -> None:
    registry = modeling_utils.AttentionInterface._global_mapping
    cache = type("PagedAttentionCache", (), {})()
    q = torch.randn(1, 2, 3, 8)
    module = torch.nn.Linear(2, 2)
    module.is_causal = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry, NAME, lambda *args, **kwargs: "own")
        with flash_attn_compat.patched(transformers=True):
            assert registry[NAME](module, q, q, q, None, cache=cache) == "own"
            out, _ = registry[NAME](module, q, q, q, None, cache=None, scaling=1.0)
    assert out.shape == (1, 3, 2, 8)


# ------------------------------------------------------ models that choose their attention class in a dict of their own


def of_5(test: Any) -> Any:
    """Of a test: the name is registered, and transformers is new enough."""
    is_old = int(transformers.__version__.partition(".")[0]) < 5
    old = pytest.mark.skipif(is_old, reason="the models of transformers 4 differ")
    return old(pytest.mark.usefixtures("registered")(test))


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


@pytest.fixture
def registered() -> None:
    flash_attn_compat.register_with_transformers()


def build_decoder(name: str) -> tuple[Any, Any]:
    head, options = DECODERS[name]
    return pair(getattr(transformers, head), options, REGISTERED, 3.0)


@of_5
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", DECODERS)
def test_models_with_own_classes_equal_eager_at_the_tokens(name: str, side: str, calls: Any) -> None:
    eager, other = build_decoder(name)
    ids = token_ids(2, 9)
    mask = mask_of(ids, side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    check(eager, other, {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, mask)
    assert calls() == 2


@of_5
@pytest.mark.parametrize("name", DECODERS)
def test_generation_from_left_padded_prompts_gives_eagers_tokens(name: str) -> None:
    ids = token_ids(2, 9)
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    expected, got = (
        model.generate(ids, attention_mask=mask_of(ids, "left"), **options) for model in build_decoder(name)
    )
    assert torch.equal(got, expected)


@of_5
@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences_equal_each_by_itself(name: str) -> None:
    eager, other = build_decoder(name)
    parts = token_ids(1, 9).split([4, 5], dim=1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    expected = torch.cat([eager(part).logits for part in parts], dim=1)
    got = other(torch.cat(parts, dim=1), position_ids=positions, use_cache=False).logits
    assert relative_error(got, expected) < 1e-5


@of_5
@pytest.mark.parametrize("name", some(DECODERS, 5))
def test_models_compile_as_one_graph(name: str) -> None:
    eager, other = build_decoder(name)
    ids = token_ids(2, 9)
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: other(ids, use_cache=False).logits, fullgraph=True, backend="eager")
    assert relative_error(compiled(ids), eager(ids).logits) < 1e-5


@of_5
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("part", ["semantic", "fine"])
def test_barks_causal_and_bidirectional_models_equal_eager(part: str, side: str, calls: Any) -> None:
    ids = token_ids(2, 9)
    mask = mask_of(ids, side)
    if part == "semantic":
        models = pair(transformers.BarkSemanticModel, BARK, REGISTERED)
        check(*models, {"input_ids": ids, "attention_mask": mask}, mask)
    else:
        models = pair(transformers.BarkFineModel, BARK | {"n_codes_total": 4, "n_codes_given": 1}, REGISTERED)
        check(*models, {"codebook_idx": 1, "input_ids": ids[..., None].repeat(1, 1, 4), "attention_mask": mask}, mask)
    assert calls() == 2


@of_5
def test_a_vision_tower_with_relative_positions_keeps_its_own_class_and_warns() -> None:
    options = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8, output_channels=16,
        window_size=2, global_attn_indexes=[1],
    )  # fmt: skip
    with pytest.warns(UserWarning, match="SamVisionSdpaAttention is not served by 'fa2_compat'"):
        eager, other = pair(transformers.SamVisionModel, options, REGISTERED)
    pixels = torch.randn(1, 3, 32, 32)
    expected, got = (model(pixels).last_hidden_state for model in (eager, other))
    assert relative_error(got, expected) < 1e-5


@of_5
def test_falcon_with_alibi_raises_an_error_with_the_remedy() -> None:
    _, other = pair(transformers.FalconForCausalLM, FALCON | {"alibi": True}, REGISTERED)
    with pytest.raises(NotImplementedError, match="alibi=True is not served by 'fa2_compat': pass attn_implementation"):
        other(token_ids(1, 5))


@of_5
def test_a_model_without_a_class_for_flash_attention_raises_an_error_with_the_remedy() -> None:
    vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16)
    options = vision | {"vocab_size": 97, "vision_config": vision | {"patch_size": 8}}
    with pytest.raises(NotImplementedError, match=r"not served by 'fa2_compat'.*Pass attn_implementation='eager'"):
        pair(transformers.GitForCausalLM, options, REGISTERED)
