"""A process that ends right after a backward on a GPU waits for autograd's thread; others have nothing to wait for."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attn_compat import flash_attn_func
from flash_attn_compat.dispatch.pytorch import at_exit
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from tests import exits
from tests.forms.inputs import qkv
from tests.forms.kinds import Operators
from tests.tools.interpreters import forked

pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch has no devices made in Python",
)


def _on(index: int) -> Any:
    return SimpleNamespace(get_device=lambda: index, device=torch.device("cuda", max(index, 0)))


def test_a_device_is_waited_for_once_and_a_cpu_never(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[Any, ...]] = []
    monkeypatch.setattr(atexit, "register", lambda *given: registered.append(given))
    monkeypatch.setattr(at_exit, "_seen", {at_exit._CPU})
    for tensor in (torch.ones(1), _on(1), _on(0), torch.ones(1), _on(1), _on(0)):
        at_exit.wait_for_autograd(tensor)
    assert [device for _, device in registered] == [torch.device("cuda", 1), torch.device("cuda", 0)]


def _dense() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    flash_attn_func(q, k, v).sum().backward()


def _twice() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    torch.autograd.grad(flash_attn_func(q, k, v).square().sum(), q, create_graph=True)


def _by_the_operator() -> None:
    with Operators():
        _dense()


def _private() -> None:
    q, k, v = qkv()
    options = (0.0, 0.2, True, -1, -1, 0.0, None)
    out, lse, _, rng_state = _flash_attn_forward(q, k, v, *options, False)
    assert not waits
    _flash_attn_backward(out, q, k, v, out, lse, *map(torch.empty_like, (q, k, v)), *options, False, rng_state)


waits: list[torch.Tensor] = []


@pytest.mark.parametrize("run", [_dense, _twice, _by_the_operator, _private])
def test_every_backward_is_waited_for_and_no_forward(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    waits.clear()
    monkeypatch.setattr(at_exit, "wait_for_autograd", waits.append)
    flash_attn_func(*(x.requires_grad_() for x in qkv()))
    assert not waits
    run()
    assert waits


_SLOW = """
import threading, time
from flash_attn_compat.dispatch.pytorch import at_exit

started, done = threading.Event(), []

def slowly(gradient):
    started.set()
    time.sleep(0.3)
    done.append(threading.current_thread())

q = torch.empty(4, device="stand_in", requires_grad=True)
q.register_hook(slowly)
caller = threading.Thread(target=lambda: q.backward(q.detach()))
caller.start()
started.wait()
at_exit._pass_through_its_thread(q.device)
assert done and done[0] is not caller, done
caller.join()
"""


def test_exit_waits_for_the_devices_thread() -> None:
    answer = forked(f"import torch\n{exits._ON_STAND_IN}{_SLOW}")
    assert answer.returncode == 0, answer.stderr


def test_a_device_that_fails_or_is_not_there_ends_no_process_badly() -> None:
    at_exit._pass_through_its_thread(torch.device("cuda", 99))


@pytest.mark.thorough  # a new interpreter takes seconds; the copy above waits for the same thread
def test_processes_that_end_right_after_a_backward_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.main(["--runs", "1", "--device", "stand_in", "--only", "bare, mended"]) == 0
    assert '"well": 1' in capsys.readouterr().out
