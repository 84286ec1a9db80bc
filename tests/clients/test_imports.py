"""Clients with attention of their own, or wrappers of models, work while the name flash_attn is answered."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.tools.interpreters import forked


@pytest.mark.usefixtures("patched")
def test_peft_trains_a_model_on_us(calls: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.clients.models import build, token_ids

    model = build("llama", "flash_attention_2").train()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    model(token_ids(1, 8)).logits.sum().backward()
    adapted = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert calls() == 2 and adapted and all("lora_" in name for name in adapted)


@pytest.mark.usefixtures("patched")
def test_accelerate_prepares_a_layer_before_us() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from flash_attn import flash_attn_func

    accelerator = accelerate.Accelerator(cpu=True)
    layer = accelerator.prepare(torch.nn.Linear(8, 8))
    q = layer(torch.randn(1, 4, 2, 8))
    accelerator.backward(flash_attn_func(q, q, q).sum())
    assert layer.weight.grad is not None


@pytest.mark.skipif(importlib.util.find_spec("xformers") is None, reason="xformers is not installed")
def test_xformers_finds_the_name_at_its_import() -> None:
    code = "import xformers.ops, xformers.ops.fmha.flash as f; print('flash_attn' in sys.modules)"
    answer = forked("import sys, flash_attn_compat; flash_attn_compat.patch()\n" + code)
    assert answer.stdout.strip() == "True", answer.stderr[-3000:]
