"""States of the caller: a call in any of them gives the same answer and leaves the state unchanged."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import settings
from flash_attn_compat.backends import BACKENDS
from flash_attn_compat.dispatch import call_cache
from tests.forms.calls import PROBLEMS, TABLE, Call, Prepared, Results
from tests.forms.inputs import seed_random_numbers

Enter = Callable[[torch.device], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class State:
    """enter: the state as a context; same_path: whether answers are equal bit for bit; grads: are any recorded?"""

    name: str
    enter: Enter
    same_path: bool = True
    grads: bool = True
    own_thread: bool = False


@contextlib.contextmanager
def _switched(switch: Callable[[Any], object], value: object, back: object) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(back)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


@contextlib.contextmanager
def _stream(device: torch.device) -> Iterator[None]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def states() -> Iterator[State]:
    for dtype in (torch.float16, torch.float64):
        yield State(
            f"default dtype {dtype}", lambda _, dtype=dtype: _switched(torch.set_default_dtype, dtype, torch.float32)
        )
    for name in ("meta", "cuda"):
        yield State(f"default device {name}", lambda _, name=name: _switched(torch.set_default_device, name, None))
    yield State("with torch.device meta", lambda _: torch.device("meta"))
    yield State("no_grad", lambda _: torch.no_grad(), same_path=False, grads=False)
    yield State("inference_mode", lambda _: torch.inference_mode(), same_path=False, grads=False)
    for dtype in (torch.bfloat16, torch.float16):
        yield State(f"autocast {dtype}", lambda device, dtype=dtype: torch.autocast(device.type, dtype=dtype))
    yield State(
        "deterministic algorithms",
        lambda _: _switched(torch.use_deterministic_algorithms, True, False),
        same_path=False,
    )
    yield State("a second thread", lambda _: contextlib.nullcontext(), own_thread=True)
    yield State("cuda: another stream", _stream)
    yield State("cuda: another current GPU", lambda _: torch.cuda.device(1))
    picked = {settings.CAPABILITY: ("7.5",), settings.BACKEND: tuple(backend.name for backend in BACKENDS)}
    for variable, (choices, default, read_by) in settings.VARIABLES.items():
        changing = (value for value in picked.get(variable, choices) if value != default)
        for value in changing if read_by == "call" else ():
            set_to = functools.partial(_variable, variable, value)
            yield State(f"{variable}={value}", lambda _, set_to=set_to: set_to(), same_path=False)


def skip_reason(state: State, device: torch.device) -> str:
    """Return why a state cannot be entered here; empty if it can."""
    if "cuda" in state.name and not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    if state.name.startswith("cuda:") and device.type != "cuda":
        return "streams and current GPUs matter to calls on a GPU"
    if state.name == "cuda: another current GPU" and torch.cuda.device_count() < 2:
        return "needs two GPUs"
    return ""


def snapshot_state() -> dict[str, object]:
    """Return the state that a call must not change, except random numbers."""
    found: dict[str, object] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.empty(0).device,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "variables": {n: v for n, v in os.environ.items() if n.startswith("FLASH_ATTN_COMPAT")},
    }
    for kind in ("cpu", "cuda"):
        found[f"autocast {kind}"] = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    if torch.cuda.is_initialized():
        found["GPU and stream"] = torch.cuda.current_device(), torch.cuda.current_stream()
    return found


def random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()


def answer(call: Call, device: torch.device, state: State | None = None) -> tuple[Results | None, list[str]]:
    """Make a call; return its results, None if the named backend declines it, and complaints about changed state."""
    laid = call.prepare(device)
    before = {name: x.detach().clone() for name, x in laid.inputs.items()}
    seed_random_numbers(7, device)
    random_numbers = random_state(device)
    complaints: list[str] = []
    results: list[Results | None] = []

    def run() -> None:
        with contextlib.nullcontext() if state is None else state.enter(device):
            found = snapshot_state()
            try:
                results.append(laid.run())
            except flash_attn_compat.BackendNotSupported:
                results.append(None)
            now = snapshot_state()
            complaints.extend(f"{n}: {found[n]} became {now.get(n)}" for n in found if now.get(n) != found[n])

    if state is not None and state.own_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run).result()
    else:
        run()
    if not call.draws and not torch.equal(random_numbers, random_state(device)):
        complaints.append("random numbers were taken")
    complaints += changed(laid, before)
    return results[0], complaints


def changed(laid: Prepared, before: Results) -> list[str]:
    return [f"{n} was written to" for n in before.keys() - laid.written if not same(laid.inputs[n], before[n])]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def near(a: Tensor, b: Tensor) -> bool:
    """Return whether two results differ by no more than the rounding of two backends."""
    if a.dtype != b.dtype or a.shape != b.shape or not a.is_floating_point():
        return same(a, b)
    x, y = a.detach().double(), b.detach().double()
    size = float(y[y.isfinite()].abs().max()) if y.isfinite().any() else 1.0
    allowed = max(16 * torch.finfo(a.dtype).eps, 1e-3 if a.dtype == torch.float32 else 0.0) * max(size, 1e-3)
    return torch.allclose(x, y, rtol=0, atol=allowed, equal_nan=True)


@functools.cache
def answer_outside(call: Call, device: torch.device, backend: str | None) -> Results | None:
    """Return a call's results outside of every state. backend: the named one, a part of the cache key."""
    return answer(call, device)[0]


@contextlib.contextmanager
def recorded_lookups() -> Iterator[list[bool]]:
    """Of each request that may be kept, in its order, whether something was known of it."""
    look_up, known = call_cache.look_up, []

    def watched(*arguments: Any) -> Any:
        found = look_up(*arguments)
        if found[0] is not None:
            known.append(found[1] is not None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_cache, "look_up", watched)
        yield known


def examine(state: State, device: torch.device, calls: Iterable[Call] = tuple(TABLE.values())) -> list[str]:
    """Make each call twice in the state, then outside of it with the calls prepared in it; return complaints."""
    complaints, served = [], 0
    for call in calls:
        try:
            expected = answer_outside(call, device, os.environ.get(settings.BACKEND))
            if expected is None:
                continue
            found, wrong = answer(call, device, state)
            with recorded_lookups() as known:
                warm, wrong_again = answer(call, device, state)
            wrong += [f"{what} by what is known" for what in wrong_again if what not in wrong]
            if found is not None and not (known and all(known)) and call.name in PROBLEMS:
                wrong.append("nothing is known of the call before")
            lasting = not state.name.startswith("FLASH_ATTN")
            again = answer(call, device)[0] if lasting else expected
        except Exception as error:  # noqa: BLE001 - whatever it is, the call that raises it must be named
            complaints.append(f"{call.name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        complaints += [f"{call.name}: {what}" for what in wrong]
        assert again is not None
        complaints += [f"{call.name}: {n} is another afterwards" for n in expected if not near(again[n], expected[n])]
        if found is None or (call.casts and "autocast" in state.name):
            continue
        served += 1
        # Dropout drawn by another path may be another mask; gradients added by a GPU's atomics have no order.
        if call.draws and not state.same_path:
            continue
        names = [n for n in expected if n in found or state.grads]
        exact = state.same_path and device.type == "cpu"
        for name, (which, given) in itertools.product(names, {"": found, " by what is known": warm or {}}.items()):
            if name not in given or not (same if exact else near)(given[name], expected[name]):
                complaints.append(f"{call.name}: {name} is another{which}")
    if not served and not state.name.startswith(settings.BACKEND):
        complaints.append("no call was served")
    return complaints
