"""The PyTorch operators of a decoding step of transformers, layer by layer, besides the one kernel launch.

The fused backend serves CPU tensors here, and its launches compute nothing: only what surrounds them counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from flash_attn_compat.backends.fused.building import nvrtc
from tests.kernels import fused_on_cpu

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.clients.models import build, token_ids

LAYERS = 2
LOOKS = "resolve_neg"  # gives back what it is given, unless that is a negated view


def operator(event: FunctionEvent) -> str:
    return event.name.removeprefix("aten::")


class OfOurs:
    """The operators of each call of our functions, as PyTorch's profiler saw them: under a mode a call is one."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def watch(self, module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original: Callable[..., Any] = getattr(module, name)
        self.names.append(name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with record_function(name):
                return original(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    def calls(self, profiler: profile) -> list[tuple[str, list[str]]]:
        ours = [event for event in profiler.events() if event.name in self.names]
        ours.sort(key=lambda event: event.time_range.start)
        return [(event.name, [name for name in map(operator, event.cpu_children) if name != LOOKS]) for event in ours]


@pytest.fixture
def step(patched, monkeypatch):
    """Calls of the last decoding step of a greedy generation."""
    from transformers import modeling_flash_attention_utils as utilities  # not while tests are collected: it takes long

    fused_on_cpu.record(monkeypatch, number=75)
    monkeypatch.setattr(nvrtc.driver(), "launch", lambda *what: None)
    model = build("llama", "flash_attention_2", torch.float16)
    model.generation_config.eos_token_id = None
    if not hasattr(utilities, "_flash_varlen_fn"):
        pytest.skip("this transformers keeps flash-attn's functions elsewhere")
    watching = OfOurs()
    model(token_ids(1, 4))  # loads flash-attn's functions
    for name in ("_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn"):
        watching.watch(utilities, name, monkeypatch)

    def run(ids, mask):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        return watching.calls(profiler)

    return run


def test_one_sequence_takes_a_launch_and_no_operator(step):
    calls = step(token_ids(1, 9), torch.ones(1, 9, dtype=torch.long))
    assert calls[-LAYERS:] == [("_flash_fn", [])] * LAYERS


def test_a_left_padded_batch_takes_a_launch_and_its_padding(step):
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[0, :3] = mask[2, :5] = 0
    calls = step(token_ids(4, 9), mask)
    # A CPU looks whether the lengths are equal; a GPU would have to be waited for, and is not asked. The key asks, and
    # for a new length, which the first layer prepares, the checked call and the plan.
    prepares, hits = (("_flash_varlen_fn", ["equal"] * looks) for looks in (3, 1))
    pads = ("_pad_fn", ["zeros", "index_put_", "view"])
    assert calls[-2 * LAYERS :] == [prepares, pads] + [hits, pads] * (LAYERS - 1)
