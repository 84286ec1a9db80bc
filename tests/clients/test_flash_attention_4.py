"""transformers' flash_attention_4 under patch(interfaces=("fa4",)), on a CPU, against eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flash_attn_compat

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
utils = pytest.importorskip("transformers.modeling_flash_attention_utils", reason="transformers is too old")

if 4 not in getattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}):
    pytest.skip(f"transformers {transformers.__version__} has no flash_attention_4", allow_module_level=True)

from tests.clients.models import DECODER, WINDOW, relative_error, token_ids  # noqa: E402

WAY = "flash_attention_4"
MIMO: dict[str, Any] = DECODER | WINDOW | {
    "head_dim": 24, "v_head_dim": 16, "mlp_layer_types": ["dense", "dense"],
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
MODELS = {
    "LlamaForCausalLM": DECODER,
    "MistralForCausalLM": DECODER | WINDOW,
    "Gemma2ForCausalLM": DECODER
    | WINDOW
    | {"attn_logit_softcapping": 5.0, "head_dim": 16, "query_pre_attn_scalar": 16},
    "MiMoV2FlashForCausalLM": MIMO,  # knows this implementation alone; it has sinks, and values narrower than keys
}


@pytest.fixture
def served() -> Iterator[None]:
    with flash_attn_compat.patched(interfaces=("fa4",)):
        yield


def build(name: str, implementation: str) -> Any:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    head = getattr(transformers, name)
    torch.manual_seed(0)
    model = head._from_config(head.config_class(**MODELS[name]), attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sink" in parameter_name:
                parameter.normal_()
    return model


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_equal_eager_at_the_tokens(name: str, side: str, calls: Any) -> None:
    eager = build(name, "eager")
    flash = build(name, "flash_attention_2" if name.startswith("MiMo") else WAY)  # which transformers replaces
    assert flash.config._attn_implementation == WAY
    flash.load_state_dict(eager.state_dict())
    ids = token_ids(2, 9)
    mask = torch.ones_like(ids)
    if side != "none":
        mask[1, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    weights = torch.randn(2, 9, 97) * mask[..., None]
    logits, grads = [], []
    for model in (eager, flash):
        logits.append(model(input_ids=ids, attention_mask=mask, position_ids=positions).logits * mask[..., None])
        (logits[-1] * weights).sum().backward()
        grads.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert calls() == flash.config.num_hidden_layers
    assert relative_error(logits[1], logits[0]) < 1e-5
    assert grads[0].keys() == grads[1].keys()
    for key, grad in grads[0].items():
        assert float((grads[1][key] - grad).abs().max()) < 1e-5 * max(1.0, float(grad.abs().max())), key


@pytest.mark.usefixtures("served")
def test_generation_from_left_padded_prompts_gives_eagers_tokens(calls: Any) -> None:
    ids = token_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
    expected, got = (build("MistralForCausalLM", way).generate(ids, **options) for way in ("eager", WAY))
    assert calls() >= 10 and torch.equal(got, expected)


@pytest.mark.usefixtures("served")
def test_a_model_on_a_cpu_can_be_switched_to_it() -> None:
    model = build("LlamaForCausalLM", "eager")
    ids = token_ids(1, 5)
    expected = model(ids).logits
    model.set_attn_implementation(WAY)
    assert relative_error(model(ids).logits, expected) < 1e-5


def test_the_check_is_transformers_own_again_after_the_block() -> None:
    original = utils.is_flash_attn_4_available
    with flash_attn_compat.patched(interfaces=("fa4",)):
        assert utils.is_flash_attn_4_available() and utils.is_flash_attn_4_available is not original
    assert utils.is_flash_attn_4_available is transformers.utils.is_flash_attn_4_available is original
