"""What is kept of a call never answers for another: whatever differs gets the answer and the error of a first call."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import (
    backend_counts,
    flash_attn_func,
    flash_attn_interface,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    reset_backend_counts,
    use_backend,
)
from flash_attn_compat.backends.fused import Fused, launcher
from flash_attn_compat.engine import capture, memory
from flash_attn_compat.engine.build import Options, Packing, call_of
from tests import fused_on_cpu, warm
from tests.problems import DENSE, PACKED, PROBLEMS, STEP
from tests.support import ints, qkv, randn
from verify.call import DTYPES, Call, moved, same, solve
from verify.problems import FUNCTIONS

Changes = dict[str, Any]


FIRST = {"flash_attn_func": DENSE, "flash_attn_varlen_func": PACKED, "flash_attn_with_kvcache": STEP}
# What problems do not say, one change each of the first call of their function.
SCALE, SLOPES = {"softmax_scale": torch.tensor(0.5)}, torch.tensor([0.5, 0.1, 0.3, 0.2])
APART = torch.stack([SLOPES, SLOPES], -1)[:, 0]  # which are copied
FURTHER: dict[str, list[Changes]] = {
    "flash_attn_func": [
        SCALE, {"return_attn_probs": False}, {"q": randn(2, 7, 16, 4).transpose(2, 3)},
        {"q": randn(1 + 2 * 7 * 4 * 16)[1:].view(2, 7, 4, 16)},
        {"alibi_slopes": SLOPES}, {"alibi_slopes": APART},
        {"q": randn(1 + 2 * 7 * 4 * 16)[1:].view(2, 7, 4, 16), "alibi_slopes": APART},
        {"window_size": (1, 1)}, {"window_size": (1.0, 1)}, {"window_size": 3}, {"k": randn(2, 11, 3, 16)},
        {"v": randn(2, 11, 2, 16).double()},
        {"q": None}, {"k": torch.empty(2, 11, 2, 16, device="meta")}, {"alibi_slopes": SLOPES[:3]},
        {"alibi_slopes": SLOPES.double()}, {"softmax_scale": "wide"}, {"dropout_p": 1.5}, {"softmax_scale": [1.0]},
    ],
    "flash_attn_varlen_func": [
        SCALE, {"return_attn_probs": False}, {"cu_seqlens_q": ints(0, 5, 22, 23, 30)},
        {"cu_seqlens_k": ints(0, 11, 13, 43, 52)},
        {"cu_seqlens_q": ints(0, 5, 22, 23, 32).long()}, {"cu_seqlens_k": ints(0, 1, 9, 2, 13, 3, 43, 4, 52)[::2]},
        {"max_seqlen_q": 17.0}, {"cu_seqlens_k": ints(0, 52)}, {"cu_seqlens_q": [0, 5, 22, 23, 32]},
        {"max_seqlen_k": 2**31},
    ],
    "flash_attn_with_kvcache": [
        SCALE, {"cache_seqlens": ints(29, 0)}, {"cache_seqlens": 7}, {"rotary_interleaved": False},
        {"cache_seqlens": 29}, {"k": randn(2, 2, 3, 32).transpose(1, 2)}, {"q": randn(2, 3, 4, 32)[:, :2]},
        {"q": randn(1 + 2 * 3 * 4 * 32)[1:].view(2, 3, 4, 32)}, {"k": randn(1 + 2 * 3 * 2 * 32)[1:].view(2, 3, 2, 32)},
        {"cache_seqlens": ints(4, 30)}, {"cache_seqlens": ints(4, -1)}, {"cache_seqlens": 30}, {"cache_seqlens": 4.0},
        {"cache_seqlens": ints(4, 9).long()}, {"num_splits": 200}, {"rotary_sin": randn(32, 8)}, {"v": None},
        {"k": randn(2, 3, 2, 8)}, {"rotary_cos": randn(19, 8), "rotary_sin": randn(19, 8)}, {"window_size": (1.0, 1)},
        {"v_cache": randn(2, 32, 2, 32).bfloat16()}, {"k": randn(2, 3, 2, 32).double()},
        {"rotary_cos": randn(32, 8), "rotary_sin": randn(32, 8).bfloat16()}, {"cache_leftpad": ints(1, 3).long()},
        {"rotary_cos": randn(32, 16)[:, ::2], "rotary_sin": randn(32, 8)},
        {"rotary_cos": randn(1 + 32 * 8)[1:].view(32, 8), "rotary_sin": randn(32, 8)},
        {"v": torch.empty(2, 3, 2, 32, device="meta")},
    ],
}  # fmt: skip


def calls_of(function: str, dtype: str = "") -> list[Call]:
    """Every short problem of it, the first one first, and changes of that one. dtype: of what is not half precision."""
    names = [name for name, x in PROBLEMS.items() if FUNCTIONS[x.kind] == function and not name.startswith("long")]
    problems = [FIRST[function], *(PROBLEMS[name] for name in names)]
    calls = [(replace(x, dtype=dtype) if dtype and "16" not in x.dtype else x).build() for x in problems]
    changes = FURTHER[function]
    if dtype:
        changes = [{name: of_dtype(name, x, DTYPES[dtype]) for name, x in change.items()} for change in changes]
    return [*calls, *(Call(function, calls[0].args | change) for change in ({}, *changes))]


def of_dtype(name: str, x: Any, dtype: torch.dtype) -> Any:
    """Data, as it lies in memory."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or name in ("alibi_slopes", "softmax_scale"):
        return x
    memory = x.new_empty(0).set_(x.untyped_storage()).to(dtype)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def unwritten(call: Call) -> Call:
    return replace(call, args=call.args | {name: moved(call.args[name], "cpu") for name in call.caches})


def outcome(call: Call) -> list[Any]:
    """What a call returns, its gradients and what it writes into its cache, or its error."""
    try:
        found = solve(getattr(flash_attn_interface, call.fn), unwritten(call))
    except Exception as error:  # noqa: BLE001  whatever a first call raises
        return [type(error), str(error)]
    return [*found.parts.values(), found.s_dmask]


def alike(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(
        isinstance(y, Tensor) and x.shape == y.shape and same(x, y) if isinstance(x, Tensor) else x == y
        for x, y in zip(one, two)
    )


def check_warm(run: Callable[[Call], list[Any]], calls: list[Call]) -> None:
    """Behind any other call, each call gives what it gave as the first one."""
    expected = []
    for call in calls:
        memory.forget()
        expected.append(run(call))
    assert len(memory.current().known) <= 2
    for index in (*range(len(calls)), *reversed(range(len(calls))), 0):
        assert alike(run(calls[index]), expected[index]), calls[index]
    assert len(memory.current().known) > 2


@pytest.mark.parametrize("function", FIRST)
def test_calls_that_differ_in_one_argument_get_answers_and_errors_of_their_own(function: str) -> None:
    check_warm(outcome, calls_of(function))


def without_addresses(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: x if isinstance(x, tuple) else x > 2**32 or x for name, x in fields.items()}


@pytest.mark.parametrize("function", FIRST)
def test_launches_are_those_of_a_first_call(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch)

    def launched(call: Call) -> list[Any]:
        before = len(launches.seen)
        reset_backend_counts()
        with torch.no_grad(), use_backend("fused"):
            try:
                getattr(flash_attn_interface, call.fn)(**unwritten(call).args)
            except Exception as error:  # noqa: BLE001  whatever a first call raises
                return [type(error), str(error), sum(backend_counts().values())]
        assert backend_counts() == {"fused": 1} or not launches.seen[before:]
        return [(launch.variant, launch.blocks, without_addresses(launch.fields)) for launch in launches.seen[before:]]

    # The device "meta" has the number of the GPU that is acted out.
    calls = calls_of(function, "float16")
    check_warm(launched, [call for call in calls if not any(getattr(x, "is_meta", False) for x in call.args.values())])


@pytest.mark.parametrize("function", FIRST)
def test_a_tensor_whose_value_counts_is_not_kept(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, scale = fused_on_cpu.record(monkeypatch), torch.tensor(0.5)
    arguments = replace(FIRST[function], dtype="float16").build().args | {"softmax_scale": scale}
    with use_backend("fused"):
        getattr(flash_attn_interface, function)(**arguments)
        scale.fill_(2.0)
        count = len(launches.seen)
        getattr(flash_attn_interface, function)(**arguments)
    scales = [launch.fields["softmax_scale"] for launch in launches.seen]
    assert set(scales[:count]) == {0.5} and set(scales[count:]) == {2.0}


def test_a_step_is_not_for_a_length_whose_calls_another_backend_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers share a step but for whether they are fewer, as many or more than the rows."""
    launches = fused_on_cpu.record(monkeypatch)
    refused: list[str] = []
    monkeypatch.setattr(Fused, "extra_reasons", lambda self, traits: refused * (traits.sq_vs_sk in refused))
    q, cache = (randn(2, length, 2, 16, dtype=torch.float16) for length in (5, 20))
    for side in "><=":
        refused[:] = side
        memory.forget()
        launches.seen.clear()
        for _ in range(2):
            for length in (3, 4, 5, 6, 20):
                flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length)
        kept_away = {">": 2, "=": 1, "<": 2}[side]
        assert len(launches.seen) == 2 * (5 - kept_away), side


def test_packed_lengths_are_compared_at_every_call() -> None:
    q, starts = randn(10, 2, 16), ints(0, 5, 10)
    calls = [
        call_of(q, q, q, Options(), packing=Packing(starts, others, 7, 7))
        for others in (ints(0, 5, 10), ints(0, 3, 10), ints(0, 5, 10))
    ]
    assert [call.equal_lengths for call in calls] == [True, False, True]


@pytest.mark.parametrize("function", FIRST)
def test_nothing_of_a_capture_is_kept(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may not have been tried in it."""
    fused_on_cpu.record(monkeypatch)
    arguments = replace(FIRST[function], dtype="float16").build().args
    for captures in (True, False):
        monkeypatch.setattr(capture, "is_capturing", lambda device, captures=captures: captures)
        with use_backend("fused"):
            getattr(flash_attn_interface, function)(**arguments)
        kept = memory.current()
        assert bool(kept.known) == bool(kept.decisions) == (not captures)


class Float64(float):
    """A float's subclass, as NumPy's is."""


@pytest.mark.parametrize("scale", [Float64(0.5), torch.tensor(0.5), 1])
def test_a_scale_of_any_type_finds_the_step_of_the_call_before(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch)
    arguments = replace(STEP, dtype="float16").build().args | {"softmax_scale": scale}
    with use_backend("fused"):
        for _ in range(3):
            flash_attn_with_kvcache(**arguments)
    assert [launch.fields["softmax_scale"] for launch in launches.seen] == [float(scale)] * 3
    assert len(launches.variants) == 1, "one plan is made"


@pytest.mark.parametrize("head_dim", [32, 12])  # as it lies, and by copies
@pytest.mark.parametrize("backend", ["fused", "chunked"])
@pytest.mark.parametrize("function", FIRST)
def test_nothing_is_kept_alive(function: str, backend: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.record(monkeypatch)
    monkeypatch.setattr(launcher, "SMALL", 0)
    problem = FIRST[function]
    call = replace(problem, dtype="float16", head_dim=head_dim, rotary_dim=0).build()
    with use_backend(backend):
        found = solve(getattr(flash_attn_interface, function), call)
    gone = [weakref.ref(value) for value in (*call.args.values(), *found.parts.values()) if isinstance(value, Tensor)]
    assert memory.current().known
    del call, found
    gc.collect()
    assert not [one for one in gone if one() is not None]


def test_no_more_is_kept_than_a_few_thousand_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.forget()
    monkeypatch.setattr(memory, "MOST", 8)
    for length in range(1, 30):
        flash_attn_func(*(randn(1, length, 1, 8) for _ in range(3)))
        lengths = [known.call.max_seqlen_q for known in memory.current().known.values()]
        assert lengths == list(range(max(1, length - 7), length + 1))


class Wrapped(Tensor):
    """A subclass may see shapes and memory its own way."""


def test_subclasses_of_tensors_are_not_kept() -> None:
    memory.forget()
    (q, k, v), args = qkv(), PACKED.build().args
    flash_attn_func(q, k, v.as_subclass(Wrapped))
    flash_attn_varlen_func(**args | {"cu_seqlens_q": args["cu_seqlens_q"].as_subclass(Wrapped)})
    torch.func.vmap(flash_attn_func)(*(tensor[None] for tensor in (q, k, v)))
    assert not memory.current().known


def test_random_calls_of_all_functions_are_answered_alike_with_and_without_memory() -> None:
    """`python -m tests.warm` asks for as many as one has time for."""
    tally = warm.compare(range(60), lambda call: call.run(), warm.ON_CPU)
    assert not tally.differing and tally.found > 10 and 4 * tally.errors < 60


def test_random_calls_launch_alike_with_and_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch)
    tally = warm.compare(range(100), warm.launched(launches), warm.ON_CPU[1:])
    assert not tally.differing and tally.found > 20 and 4 * tally.errors < 100


def test_a_key_too_coarse_is_found_by_random_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, layouts = fused_on_cpu.record(monkeypatch), memory.layouts
    monkeypatch.setattr(memory, "layouts", lambda tensors: tuple([x and x[:1] for x in layouts(tensors)]))
    assert warm.compare(range(100), warm.launched(launches), warm.ON_CPU[1:]).differing


def test_threads_are_answered_right_while_another_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST", 3)  # so that something goes all the time
    calls = [warm.random_call(number, warm.ON_CPU[:1]) for number in range(200)]
    calls = [call for call in calls if not call.state and call.name.startswith(("cache", "pages", "extension"))][:16]
    expected = [call.run() for call in calls]
    stopped, wrong = threading.Event(), []

    def forget() -> None:
        while not stopped.wait(1e-4):
            memory.forget()

    def work(index: int) -> None:
        for at in (*range(index, len(calls)), *range(index)):
            if not warm.equal(calls[at].run(), expected[at]):
                wrong.append(calls[at].name)

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    try:
        with ThreadPoolExecutor(16) as pool:
            for job in [pool.submit(work, index) for index in range(16)]:
                job.result()
    finally:
        stopped.set()
        forgetting.join()
    assert not wrong
