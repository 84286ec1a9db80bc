"""Random calls of all functions, with and without the cache of prepared calls: `python -m tests.warm`.

Each differs in a thing or two from the first problem of its function, so that most are like an earlier one, or nearly.
Both answers are equal bit for bit, errors too; of our own kernels, that is what is launched.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_compat import explain, flash_attn_interface, settings, use_backend
from flash_attn_compat import flash_attn_2_cuda as raw
from flash_attn_compat.backends.fused.launching import params
from flash_attn_compat.core.inputs import Options
from flash_attn_compat.dispatch import call_cache
from tests.forms import calls
from tests.forms.calls import CHANGES, FIRST
from tests.forms.inputs import DENSE, PACKED, PROBLEMS, STEP
from tests.kernels import fused_on_cpu
from verify.call import Call, moved, same, solve
from verify.problems import FUNCTIONS, Problem, laid_out

Answer = list[Any]
State = Callable[[], contextlib.AbstractContextManager[object]]


class WarmCall(NamedTuple):
    """run: makes the call, over tensors of its own, and returns all that it returns and writes, or its error"""

    name: str
    run: Callable[[], Answer]


def calls_of(function: str, dtype: str = "") -> Iterator[WarmCall]:
    """Yield a function's short problems, then its changes. dtype: for problems not in half precision."""
    first = FIRST[function]
    problems = [x for name, x in PROBLEMS.items() if FUNCTIONS[x.kind] == function and not name.startswith("long")]
    for problem in (first, *problems):
        whole = replace(problem, dtype=dtype) if dtype and "16" not in problem.dtype else problem
        yield WarmCall(repr(problem), partial(outcome, whole.build()))
    call = replace(first, dtype=dtype or first.dtype).build()
    for change in ({}, *CHANGES[function]):
        yield WarmCall(f"{function} {list(change)}", partial(outcome, calls.changed(call, change)))


def outcome(call: Call) -> Answer:
    """Return a call's results, gradients and written caches, or its error."""
    fresh = replace(call, args=call.args | {name: moved(call.args[name], "cpu") for name in call.caches})
    try:
        found = solve(getattr(flash_attn_interface, call.fn), fresh)
    except Exception as error:  # noqa: BLE001  whatever a first call raises
        return [type(error), str(error)]
    return [*found.parts.values(), found.s_dmask]


# ---- random calls


def variable(name: str, value: str) -> State:
    @contextlib.contextmanager
    def enter() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            yield

    return enter


STATES: dict[str, State] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "chunked": lambda: use_backend("chunked"),
    "reference": lambda: use_backend("reference"),
    "CAPABILITY=7.5": variable(settings.CAPABILITY, "7.5"),
    **{f"{name}=x": variable(name, "x") for name, each in settings.VARIABLES.items() if each.read_by == "call"},
}
KINDS = (
    DENSE, replace(DENSE, kind="kvpacked"), PACKED, replace(PACKED, kind="paged", page_size=8),
    replace(PACKED, kind="private_varlen"), STEP, replace(STEP, page_size=8), replace(STEP, batch_idx=True),
    replace(PACKED, kind="varlen_qkvpacked", seqlens_k=PACKED.seqlens_q, group=1),
)  # fmt: skip
FIELDS: dict[str, tuple[Any, ...]] = {
    "causal": (True, False), "window": ((2, 1), (3, 0)), "softcap": (2.0,), "softmax_scale": (0.5, 1),
    "alibi": ("h", "bh"), "head_dim": (8, 12, 32), "dropout_p": (0.2,), "return_attn_probs": (False,),
    "deterministic": (True,), "backward": (False,), "nheads_k": (1, 4),
    "layouts": (("offset",) * 4, ("heads_first",) * 4, ("sliced", "offset", "contiguous", "one_value")),
}  # fmt: skip
OF_CACHES: dict[str, tuple[Any, ...]] = {
    "new_keys": (None, 1, 5), "rotary_dim": (8, 0), "rotary_interleaved": (False,), "lengths_as": ("int", "none"),
    "seqlens_k": ((0, 20), (3, 9), (9, 9)), "seqlens_q": ((1, 1), (7, 7)), "num_splits": (3,), "leftpad": ((1, 2),),
}  # fmt: skip


def random_call(number: int, dtypes: tuple[str, ...]) -> WarmCall:
    chosen = random.Random(number)
    dtype, state = chosen.choice((dtypes[0],) * 8 + dtypes), chosen.choice(["", *[""] * 20, *STATES])
    kind = chosen.choice((*KINDS, *KINDS, private, private, extension, extension))
    if isinstance(kind, Problem):
        fields = FIELDS | OF_CACHES if kind.kind == "kvcache" else FIELDS
        names = chosen.sample(list(fields), chosen.choice((0, 1, 1, 2)))
        problem = replace(kind, dtype=dtype, **{name: chosen.choice(fields[name]) for name in names})
        run = partial(outcome, problem.build())
    else:
        changes = chosen.choice(({}, {}, {"head_dim": 12}, {"alibi": "h"}, {"layouts": ("offset",) * 4}))
        problem = replace(DENSE, dtype=dtype, causal=chosen.random() < 0.8, return_attn_probs=False, **changes)
        run = partial(kind, problem, chosen.choice((0.0, 0.0, 0.2)), chosen.choice((True, True, False)))
    return WarmCall(f"{number} {state}: {problem}", in_state(run, state, seed=number))


def in_state(run: Callable[[], Answer], *states: str, seed: int = 0) -> Callable[[], Answer]:
    def run_in_state() -> Answer:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond
        try:
            with contextlib.ExitStack() as stack:
                for state in filter(None, states):
                    stack.enter_context(STATES[state]())
                return run()
        except Exception as error:  # noqa: BLE001  whatever a first call raises
            return [type(error), str(error)]

    return run_in_state


def private(problem: Problem, dropout_p: float = 0.0, has_places: bool = True, return_softmax: bool = False) -> Answer:
    """has_places: whether the caller gives the gradients' tensors, with dout's layout"""
    call = problem.build()
    places = [laid_out(x, problem.layouts[3]) if has_places else None for x in call.qkv]
    slopes = call.args.get("alibi_slopes")
    return list(calls.private(*call.qkv, call.dout, places, dropout_p, 0.5, problem.causal, slopes, return_softmax))


def extension(problem: Problem, _: float = 0.0, has_place: bool = True) -> Answer:
    q, k, v = problem.build().qkv
    rules = 0.0, 0.5, problem.causal, -1, -1, 0.0
    out, lse, *_ = raw.fwd(q, k, v, torch.empty_like(q) if has_place else None, None, *rules, False)
    return [out, lse, *raw.bwd(out, q, k, v, out, lse, None, None, None, None, *rules, False)]


def recorded(
    problem: Problem, unpack: Callable[[Tensor], Tensor] = Tensor.detach, of_lse: bool = False, around: str = ""
) -> Answer:
    """unpack: the hook for saved tensors; of_lse: whether the LSE has the gradient; around: the backward's state"""
    leaves = [x.detach().requires_grad_() for x in problem.build().qkv]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        results = flash_attn_interface.flash_attn_func(*leaves, return_attn_probs=True)
    with STATES.get(around, contextlib.nullcontext)():
        return list(torch.autograd.grad(results[of_lse], leaves, torch.ones_like(results[of_lse])))


def further_calls(dtype: str = "float32") -> Iterator[WarmCall]:
    """Private functions, hooks, and one call in every state."""
    plain = replace(DENSE, dtype=dtype)
    lying = replace(plain, layouts=("heads_first",) * 3 + ("contiguous",))
    q = plain.build().q

    def attended() -> Answer:
        return [flash_attn_interface.flash_attn_func(q, q, q)]

    runs: dict[str, Callable[[], Answer]] = {
        "attended": attended,
        "explained": lambda: [explain(flash_attn_interface.flash_attn_func, q, q, q).backend],
        **{state: in_state(attended, state) for state in STATES},
        "chunked, autocast": in_state(attended, "chunked", "autocast"),
        **{
            f"public, as private ones are, {p}": partial(
                outcome, replace(plain, softmax_scale=0.5, dropout_p=p, return_attn_probs=False, backward=False).build()
            )
            for p in (0.0, 0.2)
        },
        "private": partial(private, plain),
        "private, dropout": partial(private, plain, 0.2),
        "private, dropout and its mask": partial(private, plain, 0.2, return_softmax=True),
        "private, without places": partial(private, plain, has_places=False),
        **{
            f"private, {layout}, {has_places}": partial(
                private, replace(plain, layouts=("contiguous",) * 3 + (layout,)), has_places=has_places
            )
            for layout in ("heads_first", "offset")
            for has_places in (True, False)
        },
        "extension": partial(extension, plain),
        "recorded": partial(recorded, lying),
        "recorded, of the LSE": partial(recorded, lying, of_lse=True),
        "recorded, kept otherwise": partial(recorded, lying, Tensor.contiguous),
        "recorded, backward in a state": partial(recorded, lying, around="reference"),
    }
    for name, run in runs.items():
        yield WarmCall(name, in_state(run))


# ---- with and without memory


def equal(one: Answer, two: Answer) -> bool:
    return len(one) == len(two) and all(
        isinstance(y, Tensor) and x.shape == y.shape and same(x, y) if isinstance(x, Tensor) else x == y
        for x, y in zip(one, two)
    )


def is_error(answer: Answer) -> bool:
    return bool(answer) and isinstance(answer[0], type)


class Tally(NamedTuple):
    differing: list[str]
    calls: int
    found: int  # requests of which something was known
    errors: int


def compare(calls: Iterable[WarmCall], answer: Callable[[WarmCall], Answer] = lambda call: call.run()) -> Tally:
    """Answer each call with an empty cache, and three times with one that holds all earlier calls; compare.

    The cache prepares the call the first time, adds a guard the second time, and finds the call by it the third time.

    Compared are the answers, and the prepared calls of the requests.
    """
    differing, made, errors, hits = [], 0, 0, 0
    with pytest.MonkeyPatch.context() as patch:
        lasting, look_up = call_cache.empty_tables(), call_cache.look_up
        asked: list[tuple[Options, Any, bool]] = []

        def seen(x: Any, options: Options, length: int | None) -> Any:
            key, known = look_up(x, options, length)
            asked.append((options, key, known is not None))
            return key, known

        def answered(call: WarmCall, kept: call_cache.Tables) -> tuple[Answer, list[Any]]:
            asked.clear()
            patch.setattr(call_cache, "_current", kept)
            found = answer(call)
            # Of lengths that are a cache's number, that of the first one is kept.
            taken = [kept.calls[key].call for one, key, _ in asked if key in kept.calls and not one.has_length]
            return found, [] if is_error(found) else taken

        patch.setattr(call_cache, "look_up", seen)
        for call in calls:
            made += 1
            expected, requests = answered(call, call_cache.empty_tables())
            errors += is_error(expected)
            for _ in range(3):
                found, taken_for = answered(call, lasting)
                hits += sum(was_known for *_, was_known in asked)
                if not equal(found, expected) or taken_for != requests:
                    differing.append(call.name)
    return Tally(differing, made, hits, errors)


def launched(launches: fused_on_cpu.LaunchRecord) -> Callable[[WarmCall], Answer]:
    """Return a call's launches without addresses, or its error."""

    def answer(call: WarmCall) -> Answer:
        launches.seen.clear()
        returned = call.run()
        error = returned if is_error(returned) else []
        without = [
            (one.variant, one.blocks, {n: x != 0 if n in params.ADDRESSES else x for n, x in one.fields.items()})
            for one in launches.seen
        ]
        return [*error, *without]

    return answer


ON_CPU = "float32", "float16", "bfloat16"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.warm", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=20_000, help="how many; half of them by our own kernels")
    parser.add_argument("--seed", type=int, default=0, help="the first call's number")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    begun, numbers = time.monotonic(), range(options.seed, options.seed + options.calls // 2)
    tallies = {"on a CPU": compare(random_call(number, ON_CPU) for number in numbers)}
    with pytest.MonkeyPatch.context() as patch:
        launches = fused_on_cpu.record(patch)
        randoms = (random_call(number, ON_CPU[1:]) for number in numbers)
        tallies["by our own kernels"] = compare(randoms, launched(launches))
    for name, tally in tallies.items():
        counts = f"{tally.calls} calls, {tally.found} requests like an earlier one, {tally.errors} errors"
        print(f"{name}: {counts}: {len(tally.differing)} differ {tally.differing[:10]}")
    print(f"{time.monotonic() - begun:.0f} s")
    return 1 if any(tally.differing for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
