"""Code downloaded at run time, with unguarded imports from flash_attn, passes transformers' own check of imports."""

from __future__ import annotations

import pytest
import torch

import flash_attn_compat

pytest.importorskip("transformers", reason="transformers is not installed")

MODELING = '''
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.layers.rotary import apply_rotary_emb
from transformers import PreTrainedModel

from .configuration_tiny import TinyConfig


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.qkv = torch.nn.Linear(config.width, 3 * config.width)
        self.post_init()

    def forward(self, states, mask):
        """Causal attention over padded rows, heads of 8, rotary on queries and keys."""
        batch, seqlen, width = states.shape
        angles = torch.arange(seqlen)[:, None] * 0.1 * torch.arange(1, 5)
        q, k, v = self.qkv(states).view(batch, seqlen, 3, -1, 8).unbind(2)
        q, k = (apply_rotary_emb(x.contiguous(), angles.cos(), angles.sin()) for x in (q, k))
        (q, indices, cu_seqlens, longest, _), (k, *_), (v, *_) = (unpad_input(x, mask) for x in (q, k, v))
        out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
        return pad_input(out, indices, batch, seqlen)
'''
CONFIGURATION = """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny"

    def __init__(self, width=16, **options):
        self.width = width
        super().__init__(**options)
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "tiny_remote"
    directory.mkdir()
    (directory / "modeling_tiny.py").write_text(MODELING)
    (directory / "configuration_tiny.py").write_text(CONFIGURATION)
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    return directory


def load(directory):
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module("modeling_tiny.TinyModel", str(directory))


def test_it_is_refused_without_the_name_and_loads_with_it(repository, calls):
    with pytest.raises(ImportError, match="flash_attn"):
        load(repository)
    with flash_attn_compat.patched():
        model_class = load(repository)
        model = model_class(model_class.config_class()).eval()
        states, mask = torch.randn(2, 6, 16), torch.ones(2, 6, dtype=torch.bool)
        mask[1, 4:] = False
        out = model(states, mask)
        assert calls() == 1
        alone = model(states[1:, :4], mask[1:, :4])
    assert torch.equal(out[1, 4:], torch.zeros_like(out[1, 4:]))
    torch.testing.assert_close(out[1:, :4], alone)
