"""On, off, twice, nested, from threads, and by PyTorch's own hook: and then everything is as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch.torch_version import TorchVersion

from flash_attn_compat import reset_backend_counts
from flash_attn_compat.core.torch_state import as_decided
from flash_attn_compat.torch_sdpa import attention, efficient, override
from flash_attn_compat.torch_sdpa.policy import Policy
from tests.forms.inputs import randn
from tests.forms.support import in_threads
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.sdpa import originals
from tests.sdpa.originals import counted

pytestmark = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.6", reason="before 2.6 PyTorch does not list where Python registered a kernel"
)
OPERATORS = (attention.NAME, efficient.FORWARD, efficient.BACKWARD)


def tables() -> list[str]:
    """Return the dispatcher's table of each operator."""
    return [torch._C._dispatch_dump_table(f"aten::{name}") for name in OPERATORS]


def ours() -> list[int]:
    """How many keys of each operator are ours."""
    return [table.count("torch_sdpa/override.py") for table in tables()]


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of one thread: pytest-xdist has others, which call nothing."""
    monkeypatch.setattr(override, "_other_threads_run", lambda: False)
    with originals.override_on():  # what earlier tests may have left goes
        pass
    before = tables()
    yield
    assert tables() == before and override.active_policy() is None and sum(ours()) == 0


def test_a_block_serves_and_leaves_nothing() -> None:
    with override.sdpa():
        assert ours() == [2, 1, 1] and override.active_policy() == Policy()


def test_twice_is_once_and_the_last_holder_ends_it() -> None:
    with override.sdpa():
        within = tables()
        with override.sdpa():
            assert tables() == within
        assert tables() == within


def test_overlapping_blocks() -> None:
    first, second = override.sdpa(), override.sdpa(always=True)
    first.__enter__()
    second.__enter__()
    assert override.active_policy() == Policy(always=True)
    first.__exit__(None, None, None)
    assert override.active_policy() == Policy(always=True)
    second.__exit__(None, None, None)


def test_the_widest_policy_applies_while_it_is_held() -> None:
    with override.sdpa():
        with override.sdpa(always=True):
            assert override.active_policy() == Policy(always=True)
        assert override.active_policy() == Policy()


def test_an_override_stays_registered_beside_other_threads_and_passes_all_calls(
    monkeypatch: pytest.MonkeyPatch, served: LaunchRecord
) -> None:
    """A thread that waits for the GIL in front of an implementation would run freed memory."""
    q = randn(1, 2, 20, 32, dtype=torch.float16)
    efficient_before = torch.ops.aten._efficient_attention_forward(q, q, q, *(None,) * 5, 0.0, 0)[0]
    monkeypatch.setattr(override, "_other_threads_run", lambda: True)
    monkeypatch.setattr(override, "_holders", [])
    override._apply_policy()
    assert override.active_policy() is None and ours() == [2, 1, 1]
    reset_backend_counts()
    F.scaled_dot_product_attention(q, q, q)
    found = torch.ops.aten._efficient_attention_forward(q, q, q, *(None,) * 5, 0.0, 0)[0]
    torch.testing.assert_close(found, efficient_before, rtol=0, atol=4e-3)
    assert counted() == {}
    with originals.override_on():
        F.scaled_dot_product_attention(q, q, q)
    assert counted() == {"fused": 1} and override.active_policy() is None and ours() == [2, 1, 1]
    monkeypatch.undo()
    monkeypatch.setattr(override, "_other_threads_run", lambda: False)
    with originals.override_on():
        pass


def test_threads_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert override._other_threads_run()
    finally:
        end.set()
        thread.join()
    monkeypatch.setattr(override, "_other_threads_run", lambda: False)


def test_an_error_in_a_block_ends_it() -> None:
    with pytest.raises(KeyError), override.sdpa():
        raise KeyError


def test_a_failed_registration_holds_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(front: object) -> None:
        raise KeyError

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(override, "_register", fail)
        override.acquire(Policy())
    assert override.active_policy() is None and not override._holders


def test_calls_are_served_in_all_threads(served: LaunchRecord) -> None:
    q = randn(1, 2, 20, 32, dtype=torch.float16)

    def work() -> None:
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q)
            with originals.override_on():
                F.scaled_dot_product_attention(q, q, q)

    in_threads(work, 3)
    assert counted() == {"fused": 18}


def test_a_declined_call_in_one_thread_declines_none_in_another(served: LaunchRecord) -> None:
    q = randn(1, 2, 20, 32, dtype=torch.float16)

    def in_another_thread() -> None:
        operator, rest = torch.ops.aten._efficient_attention_forward, (*(None,) * 5, 0.0, 0)
        thread = threading.Thread(target=operator, args=(q, q, q, *rest))
        thread.start()
        thread.join()

    as_decided(in_another_thread)
    assert counted() == {"fused": 1}


@pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="PyTorch 2.11 brought it")
def test_pytorchs_own_hook_switches_it_on_and_off() -> None:
    override.register_with_torch()
    assert override.HOOK in torch.nn.attention.list_flash_attention_impls() and ours() == [0, 0, 0]
    torch.nn.attention.activate_flash_attention_impl(override.HOOK)
    torch.nn.attention.activate_flash_attention_impl(override.HOOK)
    assert ours() == [2, 1, 1] and override.active_policy() == Policy(always=True)
    torch.nn.attention.restore_flash_attention_impl()


def test_without_the_hook_the_other_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match=r"patch\(sdpa=True\)"):
        override.register_with_torch()
