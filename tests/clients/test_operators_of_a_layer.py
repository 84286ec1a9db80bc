"""What a decoding step of transformers asks of PyTorch through us, layer by layer, beside our kernel's one launch.

The fused backend serves CPU tensors here, and its launches compute nothing: only what surrounds them counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn_compat.backends.fused import loader
from tests import fused_on_cpu

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import modeling_flash_attention_utils as utilities

from tests.clients.models import build, token_ids

LAYERS = 2


class OfOurs(TorchDispatchMode):
    """The operators of each call of our functions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[str]]] = []
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            self.calls[-1][1].append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def watch(self, module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original: Callable[..., Any] = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, []))
            self.inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self.inside = False

        monkeypatch.setattr(module, name, watched)


@pytest.fixture
def step(patched, monkeypatch):
    """Calls of the last decoding step of a greedy generation."""
    fused_on_cpu.record(monkeypatch, number=75)
    monkeypatch.setattr(loader.driver(), "launch", lambda *what: None)
    model = build("llama", "flash_attention_2", torch.float16)
    model.generation_config.eos_token_id = None
    if not hasattr(utilities, "_flash_varlen_fn"):
        pytest.skip("this transformers keeps flash-attn's functions elsewhere")
    watching = OfOurs()
    model(token_ids(1, 4))  # loads flash-attn's functions
    for name in ("_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn"):
        watching.watch(utilities, name, monkeypatch)

    def run(ids, mask):
        with watching:
            model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        return watching.calls

    return run


def test_one_sequence_takes_the_result_and_a_launch(step):
    calls = step(token_ids(1, 9), torch.ones(1, 9, dtype=torch.long))
    assert calls[-LAYERS:] == [("_flash_fn", ["empty_like"])] * LAYERS


def test_a_left_padded_batch_takes_the_result_a_launch_and_its_padding(step):
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[0, :3] = mask[2, :5] = 0
    calls = step(token_ids(4, 9), mask)
    # A CPU looks whether the lengths are equal; a GPU would have to be waited for, and is not asked.
    attention = ("_flash_varlen_fn", ["equal", "empty_like"])
    assert calls[-2 * LAYERS :] == [attention, ("_pad_fn", ["zeros", "index_put_", "view"])] * LAYERS
