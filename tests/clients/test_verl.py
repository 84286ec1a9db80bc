"""verl's padding utilities use flash_attn's functions if it is installed: the results match verl's own stand-ins."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forms.support import load_file

FOUND = importlib.util.find_spec("verl")
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]])


@pytest.fixture
def utilities(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module alone: the rest of verl asks for a cluster."""
    if FOUND is None or not FOUND.submodule_search_locations:
        pytest.skip("verl is not installed")
    device = types.ModuleType("verl.utils.device")
    device.is_torch_npu_available = lambda **options: False  # type: ignore[attr-defined]
    for name, module in (("verl", types.ModuleType("verl")), ("verl.utils", types.ModuleType("verl.utils"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "verl.utils.device", device)
    return load_file(Path(next(iter(FOUND.submodule_search_locations))) / "utils" / "attention_utils.py")


@pytest.mark.usefixtures("patched")
def test_tokens_leave_their_padding_and_come_back_as_by_verls_own(utilities: Any) -> None:
    x = torch.randn(3, 5, 2, 4)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    packed, indices, *lengths = utilities.unpad_input(mine, MASK)
    assert utilities._unpad_input.__module__.startswith("flash_attn")
    own, own_indices, *own_lengths = utilities._fallback_unpad_input(theirs, MASK)
    assert torch.equal(packed, own) and torch.equal(indices, own_indices)
    assert [torch.as_tensor(n).tolist() for n in lengths] == [torch.as_tensor(n).tolist() for n in own_lengths]
    back = utilities.pad_input(packed, indices, 3, 5)
    assert torch.equal(back, utilities._fallback_pad_input(own, own_indices, 3, 5))
    (back * back).sum().backward()
    (own * own).sum().backward()
    assert torch.equal(mine.grad, theirs.grad)
    chosen = utilities.index_first_axis(x.flatten(0, 1), indices)
    assert torch.equal(chosen, utilities._fallback_index_first_axis(x.flatten(0, 1), indices))
