"""Memory grows with the length, not its square; what is kept of a call never answers for another."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
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
from flash_attn_compat.backends import CallRefused
from flash_attn_compat.backends.fused.launching import layouts
from flash_attn_compat.core import cuda_capture, torch_state
from flash_attn_compat.core.arguments import checked_call
from flash_attn_compat.core.inputs import Options, PackedInputs
from flash_attn_compat.dispatch import call_cache, serve
from tests import warm
from tests.answers import others_kernels
from tests.forms.inputs import PACKED, cumulative, ints, qkv, randn
from tests.forms.support import on_backend
from tests.kernels import fused_on_cpu
from tests.warm import FIRST, Answer, Tally, WarmCall
from verify.call import solve
from verify.timing import allocations

# ---------------------------------------------------------------- bytes asked of the allocator, so the same every time

MEASURED = {
    "causal": dict(causal=True),
    "window": dict(window_size=(64, 64)),
    "alibi": dict(alibi_slopes=torch.tensor([0.01])),
    "softcap": dict(softcap=5.0),
    "dropout": dict(dropout_p=0.1),
}


def _call(backend: str, seqlen: int, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Forward and backward of one head."""
    inputs = [randn(1, seqlen, 1, 8, seed=seed).requires_grad_() for seed in range(3)]

    def call() -> tuple[Tensor, ...]:
        out = on_backend(backend, flash_attn_func, *inputs, **kwargs)
        return torch.autograd.grad(out.sum(), inputs)

    return call


ON = [("chunked", name) for name in ("window", "alibi", "softcap", "dropout")] + [
    ("sdpa", name) for name in ("causal", "window", "alibi")
]


@pytest.mark.parametrize(("backend", "feature"), ON)
def test_nothing_as_large_as_a_boolean_mask_of_all_scores_is_allocated(backend: str, feature: str) -> None:
    # Long enough that even one byte per score is more than the fixed tile of any backend.
    seqlen = 3200
    held = allocations(_call(backend, seqlen, MEASURED[feature]))
    assert held.largest < seqlen**2
    assert held.peak < 4 * seqlen**2


@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_skewed_packed_sequences_are_not_padded_to_the_longest(backend: str) -> None:
    lengths = (3000,) + (40,) * 60
    cu = cumulative(*lengths)
    inputs = [randn(sum(lengths), 4, 16, seed=seed) for seed in range(3)]
    on_backend(backend, flash_attn_varlen_func, *inputs, cu, cu, 3000, 3000)
    held = allocations(lambda: on_backend(backend, flash_attn_varlen_func, *inputs, cu, cu, 3000, 3000))
    padded = len(lengths) * 3000 * 4 * 16 * 4
    assert held.largest < padded / 2


def test_the_measure_sees_a_materialised_matrix() -> None:
    """The tests above can fail: the reference backend does allocate all scores."""
    held = allocations(_call("reference", 1000, {}))
    assert held.largest >= 8 * 1000**2


# -------------------------------- what is kept of calls: whatever differs gets the answer and the error of a first call

functions = pytest.mark.parametrize("function", FIRST)


TABLES = (*FIRST, "further")


def check_table(name: str, answer: Callable[[WarmCall], Answer], dtype: str = "float32") -> None:
    """Behind any other call of it."""
    calls = list(warm.further_calls(dtype) if name == "further" else warm.calls_of(name, dtype))
    tally = warm.compare((*calls, *reversed(calls)), answer)
    assert not tally.differing and 2 * tally.found > tally.calls - tally.errors


@pytest.mark.parametrize("table", TABLES)
def test_calls_that_differ_in_one_thing_get_answers_and_errors_of_their_own(table: str) -> None:
    check_table(table, lambda call: call.run())


@pytest.mark.parametrize("table", TABLES)
def test_launches_are_those_of_a_first_call(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_table(table, warm.launched(fused_on_cpu.record(monkeypatch)), "float16")


def test_what_stands_in_the_place_of_pytorchs_flash_kernels_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others_kernels.install(monkeypatch, "torch_flash", tmp_path)
    for implementation, served in ((None, "torch_flash"), ("FA4", "sdpa"), (None, "torch_flash")):
        monkeypatch.setattr(torch_state, "flash_implementation", lambda implementation=implementation: implementation)
        reset_backend_counts()
        flash_attn_func(*qkv(dtype=torch.float16))
        assert backend_counts() == {served: 1}


def test_calls_over_a_cache_whose_lengths_are_numbers_are_known_by_their_side_of_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused_on_cpu.record(monkeypatch)
    q, cache = (randn(2, length, 2, 16, dtype=torch.float16) for length in (5, 20))
    for length, known in ((3, 1), (4, 1), (5, 2), (7, 3), (9, 3)):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length)
        assert len(call_cache.current().calls) == known


@functions
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


@functions
@pytest.mark.parametrize(
    ("name", "right", "wrong", "words"),
    [
        ("window_size", (1, 0), (1.0, 0), "window_size_left"),
        ("softmax_scale", 0.5, "0.5", "softmax_scale"),
        ("softmax_scale", 0.5, [0.5], "softmax_scale"),  # a list has no hash, so that no key holds it
    ],
)
def test_an_option_of_a_wrong_type_is_refused_by_name_after_a_call_with_a_right_one(
    name: str, right: Any, wrong: Any, words: str, function: str
) -> None:
    arguments = FIRST[function].build().args
    getattr(flash_attn_interface, function)(**arguments | {name: right})
    with pytest.raises(RuntimeError, match=words):
        getattr(flash_attn_interface, function)(**arguments | {name: wrong})


class Float64(float):
    """A float's subclass, as NumPy's is."""


@functions
def test_a_scale_of_any_type_finds_its_prepared_call(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, variants = fused_on_cpu.record(monkeypatch), []
    arguments = replace(FIRST[function], dtype="float16").build().args
    call_cache.forget()
    with use_backend("fused"):
        for scale in (1.0, 1, Float64(1.0), torch.tensor(1.0), True):
            getattr(flash_attn_interface, function)(**arguments | {"softmax_scale": scale})
            assert len(call_cache.current().calls) == 1
            variants.append(len(launches.variants))
    assert len(set(variants)) == 1, "plans are made once"
    assert {launch.fields["softmax_scale"] for launch in launches.seen} == {1.0}


def test_packed_lengths_are_compared_at_every_call() -> None:
    q, starts = randn(10, 2, 16), ints(0, 5, 10)
    calls = [
        checked_call(PackedInputs(q, q, q, None, starts, others), Options(max_seqlen_q=7, max_seqlen_k=7))
        for others in (ints(0, 5, 10), ints(0, 3, 10), ints(0, 5, 10))
    ]
    assert [call.equal_lengths for call in calls] == [True, False, True]


@functions
def test_nothing_of_a_capture_is_kept(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may not have been tried in it."""
    fused_on_cpu.record(monkeypatch)
    arguments = replace(FIRST[function], dtype="float16").build().args
    for captures in (True, False):
        monkeypatch.setattr(cuda_capture, "is_capturing", lambda device, captures=captures: captures)
        with use_backend("fused"):
            getattr(flash_attn_interface, function)(**arguments)
        kept = call_cache.current()
        assert bool(kept.calls) == bool(kept.choices) == (not captures)


@pytest.mark.parametrize("head_dim", [32, 12])  # as it lies, and by copies
@pytest.mark.parametrize("backend", ["fused", "chunked"])
@functions
def test_nothing_is_kept_alive(function: str, backend: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.record(monkeypatch)
    monkeypatch.setattr(layouts, "MAX_SCALAR_LOADS", 0)
    problem = FIRST[function]
    call = replace(problem, dtype="float16", head_dim=head_dim, rotary_dim=0).build()
    with use_backend(backend):
        found = solve(getattr(flash_attn_interface, function), call)
    gone = [weakref.ref(value) for value in (*call.args.values(), *found.parts.values()) if isinstance(value, Tensor)]
    assert call_cache.current().calls
    del call, found
    gc.collect()
    assert not [one for one in gone if one() is not None]


def test_no_more_is_kept_than_a_few_thousand_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    call_cache.forget()
    monkeypatch.setattr(call_cache, "MOST", 8)
    for length in range(1, 30):
        flash_attn_func(*(randn(1, length, 1, 8) for _ in range(3)))
        lengths = [known.call.max_seqlen_q for known in call_cache.current().calls.values()]
        assert lengths == list(range(max(1, length - 7), length + 1))


class Wrapped(Tensor):
    """A subclass may see shapes and memory its own way."""


def test_subclasses_of_tensors_are_not_kept() -> None:
    call_cache.forget()
    (q, k, v), args = qkv(), PACKED.build().args
    flash_attn_func(q, k, v.as_subclass(Wrapped))
    flash_attn_varlen_func(**args | {"cu_seqlens_q": args["cu_seqlens_q"].as_subclass(Wrapped)})
    torch.func.vmap(flash_attn_func)(*(tensor[None] for tensor in (q, k, v)))
    assert not call_cache.current().calls


@pytest.mark.parametrize("by_kernels", [False, True])
def test_random_calls_are_answered_alike_without_memory(by_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tests.warm` asks for as many as one has time for."""
    tally = random_calls(monkeypatch, by_kernels)
    assert not tally.differing and tally.found > 30 and 3 * tally.errors < 60


def random_calls(monkeypatch: pytest.MonkeyPatch, by_kernels: bool) -> Tally:
    if not by_kernels:
        return warm.compare(warm.random_call(number, warm.ON_CPU) for number in range(60))
    launches = fused_on_cpu.record(monkeypatch)
    return warm.compare((warm.random_call(number, warm.ON_CPU[1:]) for number in range(60)), warm.launched(launches))


def test_a_key_too_coarse_is_found_by_random_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_signatures = call_cache.tensor_signatures
    monkeypatch.setattr(
        call_cache, "tensor_signatures", lambda tensors: tuple([x and x[:1] for x in tensor_signatures(tensors)])
    )
    assert random_calls(monkeypatch, by_kernels=True).differing


def guarded_tensors() -> list[Any]:
    starts = ints(0, 3)
    return [randn(2, 4, 8), randn(2, 4, 8), None, starts, starts]


UNLIKE: dict[str, Callable[[list[Any]], list[Any]]] = {
    "shape": lambda x: [x[0][:1], *x[1:]],
    "strides": lambda x: [x[0].transpose(0, 1).contiguous().transpose(0, 1), *x[1:]],
    "dtype": lambda x: [x[0].double(), *x[1:]],
    "device": lambda x: [x[0].to("meta"), *x[1:]],
    "alignment": lambda x: [randn(65)[1:].view(2, 4, 8), *x[1:]],
    "negated": lambda x: [torch._neg_view(x[0]), *x[1:]],
    "subclass": lambda x: [x[0].as_subclass(type("Own", (Tensor,), {})), *x[1:]],
    "nested": lambda x: [torch.nested.nested_tensor([*x[0]]), *x[1:]],  # at which PyTorch's guards end the process
    "presence": lambda x: [x[0], None, x[1], *x[3:]],
    "one object twice": lambda x: [x[0], x[0], *x[2:]],
    "two objects": lambda x: [*x[:4], x[4].clone()],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("change", UNLIKE)
def test_a_guard_takes_like_tensors_and_none_that_differ_in_one_thing(change: str) -> None:
    guards: call_cache.Guards = {}
    call_cache.add_guard(guards, 0, guarded_tensors(), "found")
    assert call_cache.find_guarded(guards, 0, guarded_tensors()) == "found"
    assert call_cache.find_guarded(guards, 0, UNLIKE[change](guarded_tensors())) is None


@pytest.mark.parametrize("context", [torch.autocast("cpu"), use_backend("sdpa")], ids=["autocast", "forced backend"])
def test_a_guard_holds_in_its_own_context_only(context: Any) -> None:
    guards: call_cache.Guards = {}
    call_cache.add_guard(guards, 0, guarded_tensors(), "found")
    with context:
        assert call_cache.find_guarded(guards, 0, guarded_tensors()) is None


def test_no_guard_is_asked_within_a_transform() -> None:
    guards: call_cache.Guards = {}
    call_cache.add_guard(guards, 0, guarded_tensors(), "found")
    q, *others = guarded_tensors()
    found = []

    def ask(q: Tensor) -> Tensor:
        found.append(call_cache.find_guarded(guards, 0, [q, *others]))
        return q

    torch.func.vmap(ask)(q[None])
    assert found == [None]


def test_guards_that_match_tensors_of_another_shape_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loose:
        def __init__(self, *tensors: Tensor, **sizes: object) -> None: ...

        def check(self, *tensors: Tensor) -> bool:
            return True

    assert call_cache._guards_are_exact()
    monkeypatch.setattr(call_cache, "_TensorGuards", Loose)
    assert not call_cache._guards_are_exact.__wrapped__()


def test_a_call_that_its_backend_refuses_as_it_runs_is_prepared_once_more_and_then_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*given: object) -> None:
        raise CallRefused("of this size")

    call_cache.forget()
    inputs = qkv()
    for _ in range(3):
        expected = flash_attn_func(*inputs)
    (entry,) = call_cache.current().calls.values()
    entry.run = refuse
    for _ in range(2):
        assert torch.allclose(flash_attn_func(*inputs), expected, atol=1e-5)
        monkeypatch.setattr(serve, "_prepare", None)
    call_cache.forget()


def test_threads_are_answered_right_while_another_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MOST", 3)  # so that something goes all the time
    calls = list(warm.calls_of("flash_attn_with_kvcache"))[:8]
    expected = [call.run() for call in calls]
    stopped, wrong = threading.Event(), []

    def forget() -> None:
        while not stopped.wait(1e-4):
            call_cache.forget()

    def work(index: int) -> None:
        for at in (*range(index, len(calls)), *range(index)):
            if not warm.equal(calls[at].run(), expected[at]):
                wrong.append(calls[at].name)

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            for job in [pool.submit(work, index) for index in range(8)]:
                job.result()
    finally:
        stopped.set()
        forgetting.join()
    assert not wrong
