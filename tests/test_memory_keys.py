"""Every fact of the key by which calls are known: a key without it gives a call what is another's, and that is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from flash_attn_compat.backends.fused import Fused, loader
from flash_attn_compat.backends.fused.loader import Target
from flash_attn_compat.engine import callers_state, memory
from flash_attn_compat.engine.build import DENSE, Options, Packing, Purpose, request_of
from flash_attn_compat.engine.call import RNG_STATE
from flash_attn_compat.engine.memory import Request, RequestKind
from flash_attn_compat.private_interface import _flash_attn_backward
from flash_attn_compat.serving import compute
from tests import fused_on_cpu, others_kernels
from tests.fused_on_cpu import Launches
from tests.support import ints, randn

HALF = torch.float16
EACH = object()  # in a path: whatever place
Job = Callable[[Launches], object]
State = Callable[[], contextlib.AbstractContextManager[object]]


class Fact(NamedTuple):
    """path: where in a key it stands; first, second: calls that differ in it"""

    path: tuple[Any, ...]
    first: Job
    second: Job


def without(key: Any, path: tuple[Any, ...]) -> Any:
    at, *rest = path
    if at is EACH:
        return tuple(None if x is None else without(x, tuple(rest)) for x in key)
    kept = (without(key[at], tuple(rest)),) if rest else ()
    return *key[:at], *kept, *key[at + 1 :]


def check(fact: Fact, launches: Launches, lose: Callable[[pytest.MonkeyPatch], None]) -> None:
    """The second call behind the first one gives what it gives alone; where keys ``lose`` the fact it does not."""

    def behind_the_first() -> object:
        memory.forget()
        fact.first(launches)
        return fact.second(launches)

    memory.forget()
    alone = fact.second(launches)
    assert behind_the_first() == alone
    with pytest.MonkeyPatch.context() as patch:
        lose(patch)
        assert behind_the_first() != alone, "nobody would see that the key lacks it"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return fused_on_cpu.record(monkeypatch)


# ---- calls


def launched(function: Callable[..., Any], *args: Any, **options: Any) -> Job:
    """What is launched of a call, but for addresses; or its error."""

    def job(launches: Launches) -> object:
        launches.seen.clear()
        try:
            with use_backend("fused"):
                function(*args, **options)
        except Exception as error:  # noqa: BLE001  whatever a first call raises
            return type(error), str(error)
        return seen(launches)

    return job


def seen(launches: Launches) -> object:
    return [
        (one.variant, one.blocks, {name: x for name, x in one.fields.items() if isinstance(x, tuple) or x < 2**32})
        for one in launches.seen
    ]


def found(request: Request) -> Job:
    """The call that a request is taken for."""
    return lambda launches: compute.find(request)[0].call


def answered(function: Callable[..., Any], *args: Any) -> Job:
    """What comes of a call, and who served it; or its error."""

    def job(launches: Launches) -> object:
        reset_backend_counts()
        try:
            returned = function(*args)
        except Exception as error:  # noqa: BLE001  whatever a first call raises
            return str(error)
        return returned.tolist() if isinstance(returned, Tensor) else returned, backend_counts()

    return job


def within(job: Job, *states: State) -> Job:
    def run(launches: Launches) -> object:
        with contextlib.ExitStack() as stack:
            for state in states:
                stack.enter_context(state())
            return job(launches)

    return run


def patched(change: Callable[[pytest.MonkeyPatch], None]) -> State:
    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            yield

    return enter


def variable(name: str, value: str) -> State:
    return patched(lambda patch: patch.setenv(name, value))


def _target(device: int) -> Target:
    return Target("compute_75", 75) if settings.forced_capability() else Target("sm_90", 90)


on_hopper = patched(lambda patch: patch.setattr(loader, "target", _target))
as_turing = variable(settings.CAPABILITY, "7.5")
# Our kernels refuse fewer rows than keys.
picky = patched(lambda patch: patch.setattr(Fused, "extra_reasons", lambda self, traits: ["no"] * (traits[5] == "<")))

# ---- facts of a forward: (kind, values, layouts, surroundings)

KIND, VALUES, LAYOUTS, SURROUNDINGS = range(4)
Q, STARTS = randn(2, 7, 4, 16), ints(0, 3, 7)
USUAL = (0.1, 0.5, False, 3, 4, 2.0, True, True)
OTHER = (0.2, 0.7, True, 2, 3, 3.0, False, False)
CACHE = [randn(2, 20, 2, 16, seed=seed, dtype=HALF) for seed in (1, 2)]
NEW = [randn(2, 5, 2, 16, seed=seed, dtype=HALF) for seed in (3, 4)]
TABLES = [randn(20, 8, seed=seed, dtype=HALF) for seed in (5, 6)]
ROWS, SLOPES = randn(2, 5, 4, 16, dtype=HALF), torch.ones(2, 4)
LARGE = randn(2, 9, 4, 16, dtype=HALF)
UNALIGNED = randn(LARGE.numel() + 1, dtype=HALF)[1:].view(LARGE.shape)
APART = randn(2, 4, 9, 16, dtype=HALF).transpose(1, 2)
GIVEN = [LARGE, LARGE[:, :, :2], LARGE[:, :, 2:], SLOPES]


def of_kind(name: str) -> Job:
    return found(request_of(Q, Q, Q, Options())._replace(kind=RequestKind(name, _named(name), None)))


def _named(name: str) -> Callable[[Request], Any]:
    def build(request: Request) -> Any:
        alike = DENSE.build(request)
        return alike._replace(call=alike.call._replace(softcap=float(ord(name))))

    return build


def dense(values: tuple[Any, ...], **purpose: bool) -> Job:
    return found(request_of(Q, Q, Q, Options())._replace(values=(values, Purpose(**purpose))))


def packed(*others: Any) -> Job:
    request = request_of(Q[0], Q[0], Q[0], Options(), packing=Packing(STARTS, STARTS, 7, 7))
    return found(request._replace(values=(request.values[0], Purpose(), *others)))


def cached(*new: Any, **options: Any) -> Job:
    return launched(flash_attn_with_kvcache, ROWS, *CACHE, *new, **options)


def attending(q: Tensor, *keys: Tensor, slopes: Tensor | None = None) -> Job:
    return launched(flash_attn_func, q, *(keys or CACHE), alibi_slopes=slopes)


def lying_otherwise(place: int) -> list[Tensor]:
    """GIVEN with another layout of one of them."""
    other = SLOPES[0] if place == 3 else APART[:, :, : GIVEN[place].shape[2]]
    return [*GIVEN[:place], other, *GIVEN[place + 1 :]]


append = partial(cached, *NEW, *TABLES, ints(3, 4), causal=True)
plainly = partial(answered, flash_attn_func, Q, Q, Q)
chunked = partial(use_backend, "chunked")
asked = SURROUNDINGS, 0  # settings.fingerprint()
FACTS = {
    "kind": Fact((KIND,), of_kind("a"), of_kind("b")),
    **{
        f"option {at}": Fact((VALUES, 0, at), dense(USUAL), dense((*USUAL[:at], OTHER[at], *USUAL[at + 1 :])))
        for at in range(len(USUAL))
    },
    **{
        field: Fact((VALUES, 1, at), dense(OTHER), dense(OTHER, **{field: True}))
        for at, field in enumerate(Purpose._fields)
    },
    "longest of rows": Fact((VALUES, 2), packed(7, 9, True), packed(6, 9, True)),
    "longest of keys": Fact((VALUES, 3), packed(7, 9, True), packed(7, 8, True)),
    "equal lengths": Fact((VALUES, 4), packed(7, 9, True), packed(7, 9, False)),
    "rotary_interleaved": Fact((VALUES, 1), append(rotary_interleaved=True), append(rotary_interleaved=False)),
    "num_splits": Fact((VALUES, 2), append(num_splits=0), append(num_splits=200)),
    "rows or pages": Fact(
        (VALUES, 3), cached(block_table=ints(0, 1).view(2, 1)), cached(cache_batch_idx=ints(0, 1).view(2, 1))
    ),
    "a number or none": Fact((VALUES, 4), cached(), cached(cache_seqlens=0)),
    "a number on either side of the rows": Fact(
        (VALUES, 5), within(cached(cache_seqlens=3), picky), within(cached(cache_seqlens=7), picky)
    ),
    "shape": Fact((LAYOUTS, EACH, 0), attending(LARGE[:, :7]), attending(LARGE[:, :8])),
    "stride": Fact((LAYOUTS, EACH, 1), attending(LARGE), attending(APART)),
    "dtype": Fact((LAYOUTS, EACH, 2), attending(LARGE), attending(LARGE.bfloat16())),
    "device": Fact((LAYOUTS, EACH, 3), attending(LARGE), attending(torch.empty_like(LARGE, device="meta"))),
    "alignment": Fact((LAYOUTS, EACH, 4), attending(LARGE), attending(UNALIGNED)),
    **{
        f"tensor {place}": Fact(
            (LAYOUTS, place), *(attending(*tensors, slopes=of) for *tensors, of in (GIVEN, lying_otherwise(place)))
        )
        for place in range(4)
    },
    "slopes or none": Fact((LAYOUTS, 3), attending(*GIVEN[:3], slopes=SLOPES), attending(*GIVEN[:3])),
    "the named backend": Fact((*asked, 0), plainly(), within(plainly(), partial(use_backend, "reference"))),
    "whether calls are explained": Fact((*asked, 0), plainly(), answered(explain, flash_attn_func, Q, Q, Q)),
    **{
        name: Fact((*asked, at), plainly(), within(plainly(), variable(name, "nonsense")))
        for at, name in enumerate(settings._DECISIVE, 1)
    },
    "the capability that a plan was made under": Fact(
        (*asked, 2), within(attending(LARGE), on_hopper), within(attending(LARGE), on_hopper, as_turing)
    ),
    "autocast": Fact(
        (SURROUNDINGS, 1), within(plainly(), chunked), within(plainly(), chunked, lambda: torch.autocast("cpu"))
    ),
}  # fmt: skip


def losing(path: tuple[Any, ...]) -> Callable[[pytest.MonkeyPatch], None]:
    look_up = memory.look_up

    def mutant(request: Request) -> tuple[Any, Any]:
        key, _ = look_up(request)
        key = None if key is None else without(key, path)
        return key, None if key is None else memory.current().known.get(key)

    return lambda patch: patch.setattr(memory, "look_up", mutant)


@pytest.mark.parametrize("name", FACTS)
def test_a_key_tells_calls_apart_by(name: str, launches: Launches) -> None:
    check(FACTS[name], launches, losing(FACTS[name].path))


def test_a_key_tells_what_stands_in_the_place_of_pytorchs_flash_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launches: Launches
) -> None:
    others_kernels.install(monkeypatch, "torch_flash", tmp_path)
    monkeypatch.setenv(settings.FUSED, "0")
    active = patched(lambda patch: patch.setattr(callers_state, "flash_implementation", lambda: "FA4"))
    plainly = answered(flash_attn_func, *[Q.half()] * 3)
    check(Fact((), plainly, within(plainly, active)), launches, losing((SURROUNDINGS, 2)))


def test_another_length_of_the_same_side_is_the_same_request(launches: Launches) -> None:
    for length in (7, 9):
        cached(cache_seqlens=length)(launches)
        assert launches.last.fields["seqlen_k"] == length
    assert len(memory.current().known) == 1


# ---- facts of a backward, known within its call's: (layouts, surroundings)

PLACES = [torch.empty_like(LARGE) for _ in range(3)]
BEHIND = RNG_STATE + 1  # layouts of a call's own tensors


def given(dout: Tensor, *places: Tensor) -> Job:
    """A backward of nothing recorded."""
    rules = 0.0, 0.25, False, -1, -1, 0.0, None, False
    return launched(
        _flash_attn_backward, dout, *[LARGE] * 3, LARGE.clone(), torch.zeros(2, 4, 9), *(places or PLACES), *rules
    )


def recorded(
    unpack: Callable[[Tensor], Tensor] = Tensor.detach, of_lse: bool = False, around: State = contextlib.nullcontext
) -> Job:
    """unpack: of what is saved; of_lse: whether it has a gradient; around: the backward's surroundings"""

    def job(launches: Launches) -> object:
        with use_backend("fused"), on_hopper():
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
                results = flash_attn_func(APART.detach().requires_grad_(), LARGE, LARGE, return_attn_probs=True)
            launches.seen.clear()
            with around():
                results[of_lse].backward(torch.zeros_like(results[of_lse]))
            return seen(launches)

    return job


OF_BACKWARD = {
    "strides of dout": Fact((0, EACH, 1), given(LARGE), given(APART)),
    "alignment of dout": Fact((0, EACH, 4), given(LARGE), given(UNALIGNED)),
    "where gradients go": Fact((0, slice(BEHIND + 4, None)), given(LARGE), given(LARGE, APART, *PLACES[1:])),
    "how lies what hooks have kept": Fact((0, slice(BEHIND)), recorded(), recorded(Tensor.contiguous)),
    "whether the LSE has a gradient": Fact((0, BEHIND + 3), recorded(), recorded(of_lse=True)),
    "the settings around it": Fact((1,), recorded(), recorded(around=as_turing)),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_BACKWARD)
def test_a_backward_is_known_by(name: str, launches: Launches) -> None:
    part, *path = OF_BACKWARD[name].path
    names = "layouts", "surroundings"
    found = getattr(memory, names[part])

    def mutant(of: Any) -> Any:
        if part or len(of) <= BEHIND:
            return () if part else found(of)
        if isinstance(path[0], slice):
            return tuple(x for at, x in enumerate(found(of)) if at not in range(len(of))[path[0]])
        return without(found(of), tuple(path))

    check(OF_BACKWARD[name], launches, lambda patch: patch.setattr(memory, names[part], mutant))
