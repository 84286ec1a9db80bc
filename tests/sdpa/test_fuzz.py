"""The fuzz of PyTorch's operators on the emulator, and its planted mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flash_attn_compat.torch_sdpa import attention, efficient
from tests.forms.plain import some
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.sdpa import fuzz, originals
from tests.sdpa.originals import counted

SEEDS = range(24)


def test_problems_are_drawn_alike_everywhere_and_of_every_kind() -> None:
    problems = [fuzz.draw(seed) for seed in range(300)]
    assert problems == [fuzz.draw(seed) for seed in range(300)]
    assert {p.operator for p in problems} == {"sdpa", "efficient", "packed"}
    assert any(keys == 0 for p in problems for _, keys in p.lengths) and any(p.window for p in problems)


def test_parts_are_solved_and_failures_told(served: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "draw", lambda seed, dtype, mixes: original(seed, dtype, longest=12))
    assert fuzz.solve(range(0, 8, 4), "float16", "cpu", math.inf)[:2] == (2, [])
    assert fuzz.solve(range(4), None, "cpu", -math.inf).problems == 0
    monkeypatch.setattr(fuzz, "examine", lambda problem, device: [f"{problem.seed} is off"])
    assert fuzz.solve(range(3), None, "cpu", math.inf).failures[2].endswith("\n  2 is off")


original = fuzz.draw


@pytest.mark.parametrize("first", some(range(0, len(SEEDS), 4), 3))
def test_random_problems_are_solved_within_the_bound(first: int, served: LaunchRecord) -> None:
    for seed in SEEDS[first : first + 4]:
        problem = fuzz.draw(seed, longest=fuzz.SMALL)
        assert not fuzz.examine(problem, "cpu"), problem
    assert counted().get("fused", 0) > 2


@pytest.mark.parametrize("name", fuzz.NAMED)
def test_named_problems_are_solved_within_the_bound(name: str, served: LaunchRecord) -> None:
    assert not fuzz.examine(fuzz.NAMED[name], "cpu") and counted() == {"fused": 1}


MISTAKES: dict[str, Any] = {
    "the window stands at the first key": (efficient, "_as_flash", lambda found, p: (
        found[0], found[1]._replace(window_size_left=-1, window_size_right=-1))),
    "bottom right for top left": (attention, "_as_flash", lambda found, call: (
        found[0]._replace(k=call.key.transpose(1, 2), v=call.value.transpose(1, 2)),
        found[1]._replace(causal=call.is_causal))),
    "the scale is lost": (attention, "_as_flash", lambda found, call: (
        found[0], found[1]._replace(softmax_scale=None))),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(mistake: str, served: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, change = MISTAKES[mistake]
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: change(original(*arguments), *arguments))
    assert any(fuzz.examine(fuzz.draw(seed, longest=fuzz.SMALL)._replace(backward=False), "cpu") for seed in range(200))


def test_a_wrong_lse_is_found(served: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    original = efficient._pad_lse
    monkeypatch.setattr(efficient, "_pad_lse", lambda p, lse: original(p, lse + torch.tensor(1e-2)))
    assert any(fuzz.examine(fuzz.draw(seed, longest=fuzz.SMALL)._replace(backward=False), "cpu") for seed in range(200))


def test_the_stand_ins_agree_with_the_plain_formula() -> None:
    with originals.cpu_stand_ins():
        for seed in range(40):
            problem = fuzz.draw(seed, longest=20)._replace(backward=False)
            assert not fuzz.examine(problem, "cpu"), problem
