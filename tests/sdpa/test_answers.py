"""Answers are PyTorch's own kind of tensor, and right in the fuzz; a recomputation is its forward's; the switch."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from flash_attn_compat import explain, reset_backend_counts
from flash_attn_compat.core.torch_state import as_decided
from flash_attn_compat.torch_sdpa import attention, efficient, override
from flash_attn_compat.torch_sdpa.policy import Policy
from tests.forms.inputs import randn
from tests.forms.plain import pairwise, some, some_of
from tests.forms.support import in_threads
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.sdpa import fuzz, originals
from tests.sdpa.originals import POLICY, counted
from tests.sdpa.test_attention import Case, leaves_of, mask

sdpa, aten = F.scaled_dot_product_attention, torch.ops.aten


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("rows", [1, 40])
def test_an_answer_may_be_written_to(rows: int, heads: tuple[int, int], served: LaunchRecord) -> None:
    """Like PyTorch's output, it is no view: autograd refuses writes into views made without gradients."""
    q, k, v = (x.detach() for x in leaves_of(Case(lengths=(rows, 40), heads=heads)))
    more = torch.ones_like(q).requires_grad_()
    with torch.no_grad():
        out = sdpa(q, k, v, torch.ones(rows, 40, dtype=torch.bool), enable_gqa=True)
    out += more
    assert out.requires_grad and counted() == {"fused": 1}


SEEN = torch.ones(1, 40, dtype=torch.bool)
OWN: dict[str, tuple[Case, dict[str, Any]]] = {
    "a call": (Case(), {}),
    "grouped heads": (Case(heads=(4, 2)), {"enable_gqa": True}),
    "a causal call of more keys": (Case(lengths=(33, 70)), {"is_causal": True}),
    "channels that are copied": (Case(head_dim=20, layout="unaligned"), {}),
    "one row under a mask": (Case(lengths=(1, 40), heads=(4, 2)), {"enable_gqa": True, "attn_mask": SEEN}),
    "one row of one group": (Case(lengths=(1, 40), heads=(4, 1)), {"enable_gqa": True, "attn_mask": SEEN}),
    "dropout": (Case(), {"dropout_p": 0.5}),
}


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_an_answer_is_a_tensor_of_its_own_at_version_0(name: str, wants: bool, served: LaunchRecord) -> None:
    case, options = OWN[name]
    out = sdpa(*(x.detach().requires_grad_(wants) for x in leaves_of(case)), **options)
    assert (out._version, out._base, out._is_view(), out.requires_grad) == (0, None, False, wants)
    assert out.transpose(1, 2).is_contiguous() and counted() == {"fused": 1}
    assert not out.detach_().requires_grad


def doubled(out: Tensor, how: str) -> Tensor:
    """Twice ``out``, in its own memory or another."""
    if how == "in place":
        return out.mul_(2)
    if how == "elsewhere":
        return out * 2
    rows = out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1).mul_(2)
    return rows.unflatten(-1, (out.shape[1], -1)).transpose(1, 2)


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "dropout": {"dropout_p": 0.3}, "mask": {"attn_mask": mask()}}


@pytest.mark.parametrize(
    ("options", "how", "under"),
    pairwise(OPTIONS, ("in place", "reshaped"), ("nothing", "hooks", "a checkpoint", "create_graph")),
)
def test_an_answer_may_be_written_to_before_its_backward(
    options: str, how: str, under: str, served: LaunchRecord
) -> None:
    """Like the output of the plain formula, which PyTorch uses for grouped heads and bf16 on Turing."""
    inputs = leaves_of(Case(heads=(4, 2)))

    def gradients(how: str) -> tuple[Tensor, ...]:
        def attend(*inputs: Tensor) -> Tensor:
            return doubled(sdpa(*inputs, **OPTIONS[options], enable_gqa=True), how)

        torch.manual_seed(3)
        with torch.autograd.graph.save_on_cpu() if under == "hooks" else contextlib.nullcontext():
            out: Any = checkpoint(attend, *inputs, use_reentrant=False) if under == "a checkpoint" else attend(*inputs)
        return torch.autograd.grad(out.square().sum(), inputs, create_graph=under == "create_graph")

    assert all(map(torch.equal, gradients(how), gradients("elsewhere")))


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_answers_of_the_operator_below_are_their_own(is_packed: bool, wants: bool, served: LaunchRecord) -> None:
    q = leaves_of(Case())[0].transpose(1, 2).contiguous().detach()
    starts: tuple[Any, ...] = (None,) * 4
    if is_packed:
        q = q.flatten(0, 1)[None]
        starts = torch.tensor([0, 40, 80], dtype=torch.int32), torch.tensor([0, 40, 80], dtype=torch.int32), 40, 40
    found = aten._efficient_attention_forward(q.requires_grad_(wants), q, q, None, *starts, 0.0, 0, True)[:2]
    assert counted() == {"fused": 1}
    assert [(x._version, x._base) for x in found] == [(0, None)] * 2


# ------------------- forward and recomputation under a checkpoint are by one and the same: dropout's masks depend on it

HALF = torch.float16


class Block(NamedTuple):
    """least: products of a call without gradients that is ours, as a share of this call's

    mask: the mask that the block computes from its parameter
    """

    rows: int = 128
    keys: int = 128
    heads_k: int = 2
    least: float = 0.0
    dtype: torch.dtype = HALF
    mask: Callable[[Tensor], Tensor] | None = None


with torch.inference_mode():
    OF_INFERENCE = torch.ones(128, 128, dtype=torch.bool).tril()

CASES = {
    "small": Block(least=2.0),
    "large": Block(least=0.1),
    "large but for gradients": Block(least=0.5),
    "few tokens": Block(rows=64, keys=64, least=1e-3),
    "few tokens under booleans": Block(20, 20, least=1e-3, mask=lambda _: torch.ones(20, 20, dtype=torch.bool).tril()),
    "grouped heads": Block(heads_k=1, least=2.0),
    "bf16": Block(dtype=torch.bfloat16, least=2.0),
    "one row": Block(rows=1),
    "one row of a group under booleans": Block(1, heads_k=1, mask=lambda _: torch.ones(1, 128, dtype=torch.bool)),
    "a bias made of a parameter": Block(mask=lambda parameter: (parameter * 1).half()),
    "a bias made of numbers": Block(mask=lambda parameter: parameter.detach().half()),
    "booleans of inference mode": Block(mask=lambda _: OF_INFERENCE),
}


@pytest.mark.parametrize(("name", "reentrant"), [
    *((name, True) for name in CASES), *some_of(((name, False) for name in CASES), 4)
])  # fmt: skip
def test_dropout_under_a_checkpoint_drops_the_same_twice(
    name: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reentrant checkpoint's forward is not recorded, and its recomputation is."""
    case, seen = CASES[name], []
    q = randn(1, 2, case.rows, 32, dtype=case.dtype).requires_grad_()
    k, v = (randn(1, case.heads_k, case.keys, 32, seed=seed, dtype=case.dtype).requires_grad_() for seed in (1, 2))
    parameter = randn(128, 128, seed=3).requires_grad_()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = None if case.mask is None else case.mask(parameter)
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=0.3, enable_gqa=case.heads_k == 1)
        seen.append(out.detach().clone())
        return out * 1

    least = int(case.rows * case.keys * 2 * 32 * case.least)
    with originals.served(monkeypatch, POLICY._replace(least_products=least)), set_checkpoint_early_stop(False):
        torch.manual_seed(5)
        out: Any = checkpoint(block, q, k, v, use_reentrant=reentrant)
        out.float().square().sum().backward()
        assert len(counted()) == 1
    assert len(seen) == 2 and torch.equal(*seen)


def test_explain_names_one_backend_for_dropout_with_and_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    q = randn(1, 2, 128, 32, dtype=HALF).requires_grad_()
    with originals.served(monkeypatch, POLICY._replace(least_products=128 * 128 * 32)):
        found = [explain(F.scaled_dot_product_attention, x, x, x, dropout_p=0.3) for x in (q, q.detach())]
        assert found[0] == found[1] and found[0].backend == "pytorch"
        assert explain(F.scaled_dot_product_attention, q.detach(), q.detach(), q.detach()).backend == "fused"


def test_a_backend_that_declines_gradients_declines_dropout_without_them(
    served: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As capabilities may say, or a kernel of the backward that failed."""
    from flash_attn_compat.backends.fused import Fused

    monkeypatch.setattr(Fused, "extra_reasons", lambda _, traits: ["no gradients"] * traits.needs_backward)
    q = randn(1, 2, 40, 32, dtype=HALF)
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
    assert counted() == {"pytorch": 1} and not served.seen
    F.scaled_dot_product_attention(q, q, q)
    assert counted() == {"pytorch": 1, "fused": 1}


# ---------------------------------------------------------------- the fuzz on the emulator, and its planted mistakes

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


@pytest.mark.parametrize("first", some(range(0, len(SEEDS), 4), 6))
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


# ---------------------------- on, off, twice, nested, from threads, by PyTorch's own hook: then everything is as it was

lists_kernels = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.6", reason="before 2.6 PyTorch does not list where Python registered a kernel"
)


def leaves_nothing(test: Any) -> Any:
    """Of a test that must leave the operators as it found them."""
    return lists_kernels(pytest.mark.usefixtures("operators_stay")(test))


OPERATORS = (attention.NAME, efficient.FORWARD, efficient.BACKWARD)


def tables() -> list[str]:
    """Return the dispatcher's table of each operator."""
    return [torch._C._dispatch_dump_table(f"aten::{name}") for name in OPERATORS]


def ours() -> list[int]:
    """How many keys of each operator are ours."""
    return [table.count("torch_sdpa/override.py") for table in tables()]


@pytest.fixture
def operators_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of one thread: pytest-xdist has others, which call nothing."""
    monkeypatch.setattr(override, "_other_threads_run", lambda: False)
    with originals.override_on():  # what earlier tests may have left goes
        pass
    before = tables()
    yield
    assert tables() == before and override.active_policy() is None and sum(ours()) == 0


@leaves_nothing
def test_a_block_serves_and_leaves_nothing() -> None:
    with override.sdpa():
        assert ours() == [2, 1, 1] and override.active_policy() == Policy()


@leaves_nothing
def test_twice_is_once_and_the_last_holder_ends_it() -> None:
    with override.sdpa():
        within = tables()
        with override.sdpa():
            assert tables() == within
        assert tables() == within


@leaves_nothing
def test_overlapping_blocks() -> None:
    first, second = override.sdpa(), override.sdpa(always=True)
    first.__enter__()
    second.__enter__()
    assert override.active_policy() == Policy(always=True)
    first.__exit__(None, None, None)
    assert override.active_policy() == Policy(always=True)
    second.__exit__(None, None, None)


@leaves_nothing
def test_the_widest_policy_applies_while_it_is_held() -> None:
    with override.sdpa():
        with override.sdpa(always=True):
            assert override.active_policy() == Policy(always=True)
        assert override.active_policy() == Policy()


@leaves_nothing
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


@leaves_nothing
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


@leaves_nothing
def test_an_error_in_a_block_ends_it() -> None:
    with pytest.raises(KeyError), override.sdpa():
        raise KeyError


@leaves_nothing
def test_a_failed_registration_holds_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(front: object) -> None:
        raise KeyError

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(override, "_register", fail)
        override.acquire(Policy())
    assert override.active_policy() is None and not override._holders


@leaves_nothing
def test_calls_are_served_in_all_threads(served: LaunchRecord) -> None:
    q = randn(1, 2, 20, 32, dtype=torch.float16)

    def work() -> None:
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q)
            with originals.override_on():
                F.scaled_dot_product_attention(q, q, q)

    in_threads(work, 3)
    assert counted() == {"fused": 18}


@leaves_nothing
def test_a_declined_call_in_one_thread_declines_none_in_another(served: LaunchRecord) -> None:
    q = randn(1, 2, 20, 32, dtype=torch.float16)

    def in_another_thread() -> None:
        operator, rest = torch.ops.aten._efficient_attention_forward, (*(None,) * 5, 0.0, 0)
        thread = threading.Thread(target=operator, args=(q, q, q, *rest))
        thread.start()
        thread.join()

    as_decided(in_another_thread)
    assert counted() == {"fused": 1}


@leaves_nothing
@pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="PyTorch 2.11 brought it")
def test_pytorchs_own_hook_switches_it_on_and_off() -> None:
    override.register_with_torch()
    assert override.HOOK in torch.nn.attention.list_flash_attention_impls() and ours() == [0, 0, 0]
    torch.nn.attention.activate_flash_attention_impl(override.HOOK)
    torch.nn.attention.activate_flash_attention_impl(override.HOOK)
    assert ours() == [2, 1, 1] and override.active_policy() == Policy(always=True)
    torch.nn.attention.restore_flash_attention_impl()


@leaves_nothing
def test_without_the_hook_the_other_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match=r"patch\(sdpa=True\)"):
        override.register_with_torch()
