"""gpt-oss, whose attention has sinks: through our registered function, and by the hub names it is sent to."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.models.gpt_oss", reason="this transformers has no gpt-oss")
from transformers import GptOssConfig, GptOssForCausalLM

import flash_attn_compat
from flash_attn_compat.naming import hub_kernels
from tests.clients.models import DECODER, relative_error, token_ids

NAME = "fa2_compat_sinks"


def build(implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    sizes = DECODER | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5}
    config = GptOssConfig(
        **sizes,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM._from_config(config, attn_implementation=implementation).to(dtype).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


@pytest.fixture(params=["registered", *hub_kernels.NAMES, "flash_attention_2"])
def implementation(request: pytest.FixtureRequest) -> Any:
    """A name that leads to us; the last one transformers itself replaces by a hub name."""
    if request.param == "registered":
        flash_attn_compat.register_with_transformers(NAME)
        yield NAME
        return
    if not hasattr(
        importlib.import_module("transformers.modeling_flash_attention_utils"), "FLASH_ATTN_KERNEL_FALLBACK"
    ):
        pytest.skip("this transformers loads hub kernels in another way")
    with flash_attn_compat.patched(hub_kernels=True):
        yield request.param


@pytest.mark.parametrize("padded", [False, True])
def test_outputs_and_gradients_equal_eager_sinks_included(implementation: str, padded: bool, calls: Any) -> None:
    eager, ours = build("eager"), build(implementation)
    ids = token_ids(2, 11)
    mask = torch.ones_like(ids)
    mask[0, : 4 * padded] = 0
    options = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    expected, got = (model(**options, use_cache=False).logits for model in (eager, ours))
    assert calls() >= 2
    real = mask.bool()
    assert relative_error(got[real], expected[real]) <= 1e-5
    for logits in (expected, got):
        (logits * real[..., None]).sin().sum().backward()
    for (name, parameter), (_, other) in zip(eager.named_parameters(), ours.named_parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert all(layer.self_attn.sinks.grad.abs().max() > 0 for layer in ours.model.layers)


def test_greedy_generation_gives_the_same_tokens(implementation: str, calls: Any) -> None:
    eager, ours = build("eager"), build(implementation)
    ids = token_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = dict(attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = eager.generate(ids, **options)
    assert calls() == 0
    assert torch.equal(ours.generate(ids, **options), expected) and calls() >= 16


def test_the_hub_names_are_given_back() -> None:
    modeling = importlib.import_module("transformers.modeling_utils")
    flash = importlib.import_module("transformers.modeling_flash_attention_utils")
    before = modeling.ALL_ATTENTION_FUNCTIONS.valid_keys(), getattr(flash, "_lazy_imports", None)
    with flash_attn_compat.patched(hub_kernels=True):
        pass
    assert (modeling.ALL_ATTENTION_FUNCTIONS.valid_keys(), getattr(flash, "_lazy_imports", None)) == before
