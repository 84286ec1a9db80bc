"""A table of calls in every state of the caller: answers do not depend on the state, and calls do not change it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flash_attn_compat import settings
from tests.answers import others_kernels
from tests.forms import caller_state
from tests.forms.caller_state import State, examine, same, states
from tests.forms.calls import PROBLEMS, TABLE, Call, Prepared
from tests.forms.plain import some
from tests.kernels import fused_on_cpu

STATES = tuple(states())
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES, ids=str)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile returns the function itself: compiling takes minutes and depends on no state of the caller."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **options: function)


@on_devices
@pytest.mark.parametrize("state", some(STATES, 2), ids=lambda state: state.name)
def test_no_answer_depends_on_the_state_and_the_state_stays(state: State, device: torch.device) -> None:
    if reason := caller_state.skip_reason(state, device):
        pytest.skip(reason)
    calls = list(TABLE.values())
    if state.name.startswith("FLASH_ATTN"):  # each of these states sees half of the calls, by turns
        calls = calls[STATES.index(state) // 2 % 2 :: 2]
    assert not examine(state, device, calls)


AROUND = [state for state in STATES if state.name.startswith(("default dtype", "default device meta", "autocast"))]
# Problems for each backend of a GPU, whose kernels are stand-ins or emulated, and for those of any device.
CHOSEN = {
    **dict.fromkeys(others_kernels.BACKENDS, ("",)),
    "fused": ("dense: causal ALiBi by sequence", "packed: dropout", "cache: rotary, pairs"),
    **dict.fromkeys(("chunked", "sdpa"), (
        "dense: ALiBi, f", "dense: softcap", "dense: dropout under", "packed: window", "packed: tokens",
        "packed: pages", "packed: keys in use", "cache: left", "cache: rotary, halves", "cache: append to pages",
    )),
}  # fmt: skip


@pytest.mark.parametrize("backend", some(reversed(CHOSEN), 2))
def test_no_backends_answer_depends_on_the_callers_state(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if backend in others_kernels.BACKENDS:
        others_kernels.install(monkeypatch, backend, tmp_path)
    elif backend == "fused":
        fused_on_cpu.emulate(monkeypatch)
    monkeypatch.setenv(settings.BACKEND, backend)
    calls = [call for call in TABLE.values() if call.name in PROBLEMS and call.name.startswith(CHOSEN[backend])]
    assert len(calls) >= len(CHOSEN[backend])
    for index, state in enumerate(AROUND):
        some_calls = calls if len(calls) < 12 else calls[index % 2 :: 2]
        assert not examine(state, torch.device("cpu"), some_calls), state.name


@on_devices
@pytest.mark.parametrize("call", TABLE.values(), ids=lambda call: call.name)
def test_a_tensor_stays_the_callers(call: Call, device: torch.device) -> None:
    prepared = call.prepare(device)
    prepared.run()
    for name, x in prepared.inputs.items():
        assert isinstance(x, torch.nn.Parameter) or not vars(x), name
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        copies = copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(file, weights_only=True)
        assert all(same(each, x) for each in copies), name


def test_every_variable_that_calls_read_is_in_the_table() -> None:
    for name, variable in settings.VARIABLES.items():
        assert any(f"{name}=" in state.name for state in STATES) == (variable.read_by == "call"), name


def _with_deterministic_algorithms(x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
    return x + 1


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "default dtype": lambda x: x + torch.tensor(0.1, dtype=torch.get_default_dtype()),
    "random numbers": lambda x: x + 0 * torch.rand(1, dtype=torch.float32, device="cpu"),
    "input": lambda x: x.add_(1),
    "deterministic": _with_deterministic_algorithms,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_table_finds_a_planted_mistake(mistake: str) -> None:
    def of(change: Callable[[Tensor], Tensor]) -> Call:
        x = torch.arange(3.0)
        return Call(mistake, lambda device: Prepared({"x": x}, lambda x: (change(x),)))

    fp16 = STATES[0]
    try:
        assert examine(fp16, torch.device("cpu"), [of(MISTAKES[mistake])])
        assert not examine(fp16, torch.device("cpu"), [of(lambda x: x + 1)])
    finally:
        torch.use_deterministic_algorithms(False)
