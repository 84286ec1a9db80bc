"""Packages that look for flash-attn when they are imported, with the name answered: none of them breaks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

import flash_attn_compat

# What to run in a fresh interpreter after patch(), and what it must print.
CLIENTS = {
    "xformers": ("import xformers.ops, xformers.ops.fmha.flash as f; print('flash_attn' in sys.modules)", "True"),
    "peft": (
        (
            "import peft, torch; from transformers import LlamaConfig, LlamaForCausalLM\n"
            "sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_attention_heads=2)\n"
            "config = LlamaConfig(num_hidden_layers=1, **sizes)\n"
            "model = LlamaForCausalLM._from_config(config, attn_implementation='flash_attention_2')\n"
            "model = peft.get_peft_model(model, peft.LoraConfig(target_modules=['q_proj', 'v_proj']))\n"
            "model(torch.arange(8)[None]).logits.sum().backward()\n"
            "print(sum(flash_attn_compat.backend_counts().values()))"
        ),
        "1",
    ),
    "accelerate": (
        (
            "import accelerate, torch; from flash_attn import flash_attn_func\n"
            "accelerator = accelerate.Accelerator(cpu=True)\n"
            "layer = accelerator.prepare(torch.nn.Linear(8, 8))\n"
            "q = layer(torch.randn(1, 4, 2, 8)); accelerator.backward(flash_attn_func(q, q, q).sum())\n"
            "print(layer.weight.grad is not None)"
        ),
        "True",
    ),
    "diffusers": (
        (
            "from diffusers.utils.import_utils import is_flash_attn_available, is_flash_attn_version\n"
            "import diffusers.models.attention_dispatch as d\n"
            "assert is_flash_attn_available() and is_flash_attn_version('>=', '2.6.3')\n"
            "print(d._wrapped_flash_attn_forward is not None)"
        ),
        "True",
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_imports_and_works_with_the_name_answered(client):
    for module in {client, "transformers"} if client == "peft" else {client}:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    code, expected = CLIENTS[client]
    root = os.path.dirname(os.path.dirname(flash_attn_compat.__file__))
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    start = "import sys, flash_attn_compat; flash_attn_compat.patch()\n"
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + code], env=env, capture_output=True, text=True
    )
    assert answer.stdout.strip() == expected, answer.stderr[-3000:]
