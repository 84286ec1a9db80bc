"""Every fact of the key by which calls are known: a key without it gives a call what is another's, and that is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import (
    backend_counts,
    explain,
    flash_attn_func,
    flash_attn_with_kvcache,
    reset_backend_counts,
    settings,
    use_backend,
)
from flash_attn_compat.backends.fused import Fused, launcher, loader
from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.engine import callers_state, memory
from flash_attn_compat.engine.build import DENSE, Options, Packing, Purpose, request_of
from flash_attn_compat.engine.memory import Request, RequestKind
from flash_attn_compat.private_interface import _flash_attn_backward
from flash_attn_compat.serving import compute
from tests import fused_on_cpu, others_kernels
from tests.fused_on_cpu import Launches
from tests.support import ints, randn

HALF = torch.float16
Drop = Callable[[Any], Any]
Job = Callable[[], object]


@contextlib.contextmanager
def dropping(drop: Drop) -> Iterator[None]:
    """Keys lack what ``drop`` takes from them."""
    look_up = memory.look_up

    def mutant(request: Request) -> tuple[Any, Any]:
        key, _ = look_up(request)
        key = None if key is None else drop(key)
        return key, None if key is None else memory.current().known.get(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "look_up", mutant)
        yield


def check(first: Job, second: Job, drop: Drop) -> None:
    """The second call behind the first one gives what it gives alone; with a key that lacks the fact it does not."""

    def behind_the_first() -> object:
        memory.forget()
        first()
        return second()

    memory.forget()
    alone = second()
    assert behind_the_first() == alone
    with dropping(drop):
        assert behind_the_first() != alone, "nobody would see that the key lacks it"


def without(part: int, index: int | None = None) -> Drop:
    """Of (kind, values, layouts, surroundings); index: one of the second's, or of every tensor's in the third."""

    def drop(key: Any) -> Any:
        given = key[part]
        if index is None:
            given = ()
        elif part == LAYOUTS:
            given = tuple(None if x is None else (*x[:index], *x[index + 1 :]) for x in given)
        else:
            given = (*given[:index], *given[index + 1 :])
        return *key[:part], given, *key[part + 1 :]

    return drop


KIND, VALUES, LAYOUTS, SURROUNDINGS = range(4)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return fused_on_cpu.record(monkeypatch)


def launched(launches: Launches, function: Callable[..., Any], *args: Any, **options: Any) -> Job:
    """What is launched of a call, but for addresses; or its error."""

    def job() -> object:
        launches.seen.clear()
        try:
            with use_backend("fused"):
                function(*args, **options)
        except Exception as error:  # noqa: BLE001  whatever a first call raises
            return type(error), str(error)
        return [
            (one.variant, one.blocks, {name: x for name, x in one.fields.items() if isinstance(x, tuple) or x < 2**32})
            for one in launches.seen
        ]

    return job


# ---- kind


def test_requests_of_two_kinds_are_two() -> None:
    q = randn(1, 5, 2, 16)
    given = request_of(q, q, q, Options())
    kinds = [RequestKind(name, DENSE.build, None) for name in "ab"]
    found = [compute.find(given._replace(kind=kind))[0] for kind in (*kinds, *kinds)]
    assert found[0] is found[2] is not found[1] is found[3]
    with dropping(without(KIND)):
        found = [compute.find(given._replace(kind=kind))[0] for kind in kinds]
    assert found[0] is found[1]


# ---- values

Q, STARTS = randn(2, 7, 4, 16), ints(0, 3, 7)
USUAL = (0.1, 0.5, False, 3, 4, 2.0, True, True)
OTHER = (0.2, 0.7, True, 2, 3, 3.0, False, False)
PACKED = (Purpose(), 7, 9, True)


def dense_of(values: tuple[Any, ...], **purpose: bool) -> Request:
    return request_of(Q, Q, Q, Options())._replace(values=(values, Purpose(**purpose)))


def packed_of(*others: Any) -> Request:
    given = request_of(Q[0], Q[0], Q[0], Options(), packing=Packing(STARTS, STARTS, 7, 7))
    return given._replace(values=(given.values[0], *others))


def described(request: Request) -> Job:
    return lambda: compute.find(request)[0].call


@pytest.mark.parametrize("index", range(len(USUAL)))
def test_every_option_is_part_of_the_key(index: int) -> None:
    changed = (*USUAL[:index], OTHER[index], *USUAL[index + 1 :])

    def drop(key: Any) -> Any:
        values, *others = key[VALUES]
        return key[KIND], ((*values[:index], *values[index + 1 :]), *others), *key[LAYOUTS:]

    check(described(dense_of(USUAL)), described(dense_of(changed)), drop)


@pytest.mark.parametrize("field", Purpose._fields)
def test_what_a_call_is_for_is_part_of_the_key(field: str) -> None:
    requests = [dense_of(OTHER, **{field: wanted}) for wanted in (False, True)]

    def drop(key: Any) -> Any:
        values, purpose = key[VALUES]
        return key[KIND], (values, purpose._replace(**{field: False})), *key[LAYOUTS:]

    check(*map(described, requests), drop)


@pytest.mark.parametrize(("index", "other"), [(1, 6), (2, 8), (3, False)])
def test_longest_and_equal_lengths_are_part_of_the_key(index: int, other: Any) -> None:
    changed = (*PACKED[:index], other, *PACKED[index + 1 :])
    check(described(packed_of(*PACKED)), described(packed_of(*changed)), without(VALUES, index + 1))


CACHE = [randn(2, 20, 2, 16, seed=seed, dtype=HALF) for seed in (1, 2)]
NEW = [randn(2, 5, 2, 16, seed=seed, dtype=HALF) for seed in (3, 4)]
TABLES = [randn(20, 8, seed=seed, dtype=HALF) for seed in (5, 6)]
ROWS = randn(2, 5, 4, 16, dtype=HALF)
# (index among values, arguments of the first call and of the second, if they differ in nothing else)
OF_CACHE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "rotary_interleaved": (1, {"rotary_interleaved": True}, {"rotary_interleaved": False}),
    "num_splits": (2, {"num_splits": 0}, {"num_splits": 200}),
    "rows or pages": (3, {"block_table": ints(0, 1).view(2, 1)}, {"cache_batch_idx": ints(0, 1).view(2, 1)}),
    "a number or none": (4, {}, {"cache_seqlens": 0}),
}  # fmt: skip


@pytest.mark.parametrize("what", OF_CACHE)
def test_what_is_told_of_a_cache_is_part_of_the_key(what: str, launches: Launches) -> None:
    index, *both = OF_CACHE[what]
    if index in (1, 2):
        given: tuple[Any, ...] = (ROWS, *CACHE, *NEW, *TABLES, ints(3, 4))
    else:
        given = ROWS, *CACHE
    jobs = [launched(launches, flash_attn_with_kvcache, *given, causal=True, **options) for options in both]
    check(*jobs, without(VALUES, index))


def test_on_which_side_of_the_rows_a_number_lies_is_part_of_the_key(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = lambda self, traits: ["it is told to"] * (traits.sq_vs_sk == "<")  # noqa: E731
    monkeypatch.setattr(Fused, "extra_reasons", refused)
    jobs = [launched(launches, flash_attn_with_kvcache, ROWS, *CACHE, cache_seqlens=length) for length in (3, 7)]
    check(*jobs, without(VALUES, 5))


def test_another_length_of_the_same_side_is_the_same_request(launches: Launches) -> None:
    lengths = []
    for length in (7, 9):
        launched(launches, flash_attn_with_kvcache, ROWS, *CACHE, cache_seqlens=length)()
        lengths.append(launches.last.fields["seqlen_k"])
    assert lengths == [7, 9] and len(memory.current().known) == 1


# ---- layouts


def dense_pair(first: Tensor, second: Tensor, launches: Launches) -> list[Job]:
    other = randn(2, 7, 2, 16, dtype=HALF)
    return [launched(launches, flash_attn_func, q, other, other) for q in (first, second)]


LARGE = randn(2, 9, 4, 16, dtype=HALF)
UNALIGNED = randn(LARGE.numel() + 1, dtype=HALF)[1:].view(LARGE.shape)
PAIRS: dict[str, tuple[int, Tensor, Tensor]] = {
    "shape": (0, LARGE[:, :7], LARGE[:, :8]),
    "stride": (1, randn(2, 7, 4, 16, dtype=HALF), randn(2, 4, 7, 16, dtype=HALF).transpose(1, 2)),
    "dtype": (2, LARGE, LARGE.bfloat16()),
    "device": (3, LARGE, torch.empty_like(LARGE, device="meta")),
    "alignment": (4, LARGE, UNALIGNED),
}  # fmt: skip


@pytest.mark.parametrize("what", PAIRS)
def test_how_tensors_lie_is_part_of_the_key(what: str, launches: Launches) -> None:
    index, *both = PAIRS[what]
    check(*dense_pair(*both, launches), without(LAYOUTS, index))


@pytest.mark.parametrize("place", range(4))
def test_every_tensor_is_part_of_the_key(place: int, launches: Launches) -> None:
    slopes = torch.ones(2, 4)
    given = [LARGE, LARGE[:, :, :2], LARGE[:, :, 2:], slopes]
    lying = [randn(2, 4, 9, 16, dtype=HALF).transpose(1, 2)[:, :, : x.shape[2]] for x in given[:3]] + [slopes[0]]
    changed = [*given[:place], lying[place], *given[place + 1 :]]
    jobs = [launched(launches, flash_attn_func, q, k, v, alibi_slopes=slope) for q, k, v, slope in (given, changed)]

    def drop(key: Any) -> Any:
        layouts = key[LAYOUTS]
        return *key[:LAYOUTS], (*layouts[:place], *layouts[place + 1 :]), key[SURROUNDINGS]

    check(*jobs, drop)


def test_whether_there_are_slopes_is_part_of_the_key(launches: Launches) -> None:
    jobs = [launched(launches, flash_attn_func, LARGE, LARGE, LARGE, alibi_slopes=x) for x in (torch.ones(4), None)]
    check(*jobs, lambda key: (*key[:LAYOUTS], key[LAYOUTS][:3], key[SURROUNDINGS]))


# ---- surroundings


def in_state(job: Job, enter: Callable[[], contextlib.AbstractContextManager[object]]) -> Job:
    def run() -> object:
        with enter():
            return job()

    return run


def served() -> object:
    """Who serves a call, or its error."""
    reset_backend_counts()
    try:
        flash_attn_func(Q, Q, Q)
    except Exception as error:  # noqa: BLE001  whatever a first call raises
        return str(error)
    return backend_counts()


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


def without_asked(index: int) -> Drop:
    """Of settings.fingerprint()."""

    def drop(key: Any) -> Any:
        asked, *others = key[SURROUNDINGS]
        return *key[:SURROUNDINGS], ((*asked[:index], *asked[index + 1 :]), *others)

    return drop


def test_the_named_backend_is_part_of_the_key() -> None:
    check(served, in_state(served, lambda: use_backend("reference")), without_asked(0))


def test_whether_calls_are_explained_is_part_of_the_key() -> None:
    def explained() -> object:
        try:
            return explain(flash_attn_func, Q, Q, Q)
        except ValueError as error:
            return str(error)

    check(served, explained, without_asked(0))


@pytest.mark.parametrize("index", range(len(settings._DECISIVE)))
def test_every_setting_is_part_of_the_key(index: int) -> None:
    check(served, in_state(served, lambda: variable(settings._DECISIVE[index], "nonsense")), without_asked(index + 1))


def test_a_plan_is_for_the_capability_it_was_made_under(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    def target(device: int) -> Target:
        return Target("compute_75", 75) if settings.forced_capability() else Target("sm_90", 90)

    monkeypatch.setattr(loader, "target", target)
    job = launched(launches, flash_attn_func, LARGE, LARGE, LARGE)
    check(job, in_state(job, lambda: variable(settings.CAPABILITY, "7.5")), without_asked(2))


def test_autocast_is_part_of_the_key() -> None:
    def answer() -> object:
        with use_backend("chunked"):
            return flash_attn_func(Q, Q, Q).tolist()

    check(answer, in_state(answer, lambda: torch.autocast("cpu", torch.bfloat16)), without(SURROUNDINGS, 1))


def test_what_stands_in_the_place_of_pytorchs_flash_kernels_is_part_of_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others_kernels.install(monkeypatch, "torch_flash", tmp_path)
    q = Q.half()

    def by_whom() -> object:
        reset_backend_counts()
        flash_attn_func(q, q, q)
        return backend_counts()

    assert by_whom() == {"torch_flash": 1}

    @contextlib.contextmanager
    def active() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(callers_state, "flash_implementation", lambda: "FA4")
            yield

    check(by_whom, in_state(by_whom, active), without(SURROUNDINGS, 2))


# ---- what a backward is known by

OF_BACKWARD = 10  # tensors that a backward takes, before what comes from above
OUT, LSE = LARGE.clone(), torch.zeros(2, 4, 9)
APART = randn(2, 4, 9, 16, dtype=HALF).transpose(1, 2)
PLACES = [torch.empty_like(LARGE) for _ in range(3)]
FROM_ABOVE: dict[str, tuple[int | None, Tensor, list[Any]]] = {
    "stride": (1, APART, PLACES),
    "alignment": (4, UNALIGNED, PLACES),
    "where gradients go": (None, LARGE, [APART, *PLACES[1:]]),
}  # fmt: skip


@pytest.mark.parametrize("what", FROM_ABOVE)
def test_a_backward_is_known_by_how_lies_what_comes_from_above(
    what: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, *given = FROM_ABOVE[what]

    def job(dout: Tensor, into: list[Any]) -> Job:
        rules = 0.0, 0.25, False, -1, -1, 0.0, None, False
        return launched(launches, _flash_attn_backward, dout, *[LARGE[:, :, :]] * 3, OUT, LSE, *into, *rules)

    first, second, layouts = job(LARGE, PLACES), job(*given), memory.layouts

    def mutant(tensors: Any) -> Any:
        found: Any = layouts(tensors)
        if len(found) < OF_BACKWARD:
            return found
        if index is None:
            return found[: OF_BACKWARD + 4]
        return tuple(None if x is None else (*x[:index], *x[index + 1 :]) for x in found)

    memory.forget()
    alone = second()
    for is_seen in (False, True):
        memory.forget()
        first()
        assert (second() != alone) == is_seen
        monkeypatch.setattr(memory, "layouts", mutant)


def test_a_backward_is_known_by_how_lies_what_hooks_have_kept(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As copies of it do that were on a CPU meanwhile."""

    def strides(unpack: Callable[[Tensor], Tensor]) -> Any:
        with use_backend("fused"), torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            flash_attn_func(APART.detach().requires_grad_(), LARGE, LARGE).sum().backward()
        return launches.last.fields["q_s"]

    expected = launcher.strides(APART), launcher.strides(LARGE)
    assert (strides(lambda x: x), strides(Tensor.contiguous)) == expected
    layouts = memory.layouts
    monkeypatch.setattr(
        memory, "layouts", lambda tensors: layouts(tensors)[len(tensors) // OF_BACKWARD * OF_BACKWARD :]
    )
    assert strides(lambda x: x) == strides(Tensor.contiguous), "nobody would see that the key lacks it"


def test_a_backward_is_known_by_whether_the_lse_has_a_gradient(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    with use_backend("fused"):
        out, lse, _ = flash_attn_func(LARGE.clone().requires_grad_(), LARGE, LARGE, return_attn_probs=True)

    def is_read(what: Tensor) -> bool:
        launches.seen.clear()
        what.backward(torch.zeros_like(what), retain_graph=True)
        return any(one.fields["dlse"] for one in launches.seen)

    assert not is_read(out) and is_read(lse) and not is_read(out)
    layouts = memory.layouts
    monkeypatch.setattr(memory, "layouts", lambda tensors: layouts(tensors[: OF_BACKWARD + 3]))
    assert not is_read(out) and not is_read(lse), "nobody would see that the key lacks it"


def test_a_backward_goes_by_the_settings_around_it(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    def target(device: int) -> Target:
        return Target("compute_75", 75) if settings.forced_capability() else Target("sm_90", 90)

    monkeypatch.setattr(loader, "target", target)
    with use_backend("fused"):
        out = flash_attn_func(LARGE.clone().requires_grad_(), LARGE, LARGE).sum()

    def variants() -> list[bool]:
        launches.seen.clear()
        out.backward(retain_graph=True)
        return ["MMA16" in dict(one.variant.macros) for one in launches.seen if one.variant.entry == "dq"]

    assert variants() == [True]
    with variable(settings.CAPABILITY, "7.5"):
        assert variants() == [False]
        monkeypatch.setattr(memory, "surroundings", lambda tensor: ())
        variants()
    assert variants() == [False], "nobody would see that the key lacks them"
