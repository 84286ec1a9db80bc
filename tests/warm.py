"""Random calls of all functions, answered by what is known of earlier ones and by nothing: `python -m tests.warm`.

Shapes, layouts, options and states come from few, so that most calls are like an earlier one, or differ from it in one
thing. Both answers are equal bit for bit, errors too; of our own kernels, that is what is launched.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_2_cuda as raw
from flash_attn_compat import flash_attn_interface, settings, use_backend
from flash_attn_compat.engine import memory
from tests import fused_on_cpu
from tests.support import ints
from verify.call import same

Answer = list[Any]
State = Callable[[], contextlib.AbstractContextManager[object]]


class RandomCall(NamedTuple):
    """run: makes the call, over tensors of its own, and returns all that it returns and writes"""

    name: str
    state: str
    run: Callable[[], Answer]


def variable(name: str, value: str) -> State:
    @contextlib.contextmanager
    def enter() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            yield

    return enter


_USUAL = 0.9  # how often nothing is special

STATES: dict[str, State] = {
    "": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "chunked": lambda: use_backend("chunked"),
    "reference": lambda: use_backend("reference"),
    "FUSED=0": variable(settings.FUSED, "0"),
    "CAPABILITY=7.5": variable(settings.CAPABILITY, "7.5"),
    "CAPABILITY=x": variable(settings.CAPABILITY, "x"),
}


class Draw:
    """What one call is made of: equal numbers, equal calls."""

    def __init__(self, number: int, dtypes: tuple[torch.dtype, ...]) -> None:
        self.random, self.numbers = random.Random(number), torch.Generator().manual_seed(number)
        self.dtype = self.any(*dtypes)
        self.batch, self.rows, self.keys = self.any(2, 2, 1), self.any(5, 7, 1), self.any(7, 9)
        self.heads, self.heads_k = self.any((4, 2), (2, 2), (4, 1))
        self.dim = self.any(16, 16, 8, 12)
        self.grad = self.any(True, False)

    def any(self, *choices: Any) -> Any:
        """The first one mostly."""
        return choices[0] if self.random.random() < _USUAL else self.random.choice(choices)

    def tensor(self, *shape: int) -> Tensor:
        """Now and then laid out in another way, or of another dtype."""
        size, how = torch.Size(shape).numel(), self.random.randrange(30)
        memory = torch.randn(size + 1, generator=self.numbers).to(self.dtype)
        if how == 0:
            return memory[1:].view(shape)
        if how == 1 and len(shape) > 2:
            return memory[:-1].view(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-3, -2)
        if how == 2:
            return torch.cat([memory[:-1].view(shape)] * 2)[: shape[0]]
        if how == 3:
            return torch._neg_view(-memory[:-1].view(shape))
        if how == 4 and self.random.randrange(4) == 0:
            return memory[:-1].view(shape).double()
        return memory[:-1].view(shape)

    def leaf(self, *shape: int) -> Tensor:
        return self.tensor(*shape).requires_grad_(self.grad)

    def slopes(self) -> Tensor | None:
        return self.any(None, None, torch.linspace(0.1, 0.9, self.heads), torch.linspace(0.1, 0.9, 2 * self.heads)[::2])

    def options(self) -> dict[str, Any]:
        return {
            "causal": self.any(True, False), "window_size": self.any((-1, -1), (2, 1), (3, 0), (1.0, 1)),
            "softcap": self.any(0.0, 0.0, 2.0), "softmax_scale": self.any(None, 0.5, 1, torch.tensor(0.5)),
            "alibi_slopes": self.slopes(),
        }  # fmt: skip

    def with_dropout(self) -> dict[str, Any]:
        probs = {"return_attn_probs": self.any(True, False), "deterministic": self.any(True, False)}
        return self.options() | {"dropout_p": self.any(0.0, 0.0, 0.2)} | probs

    def starts(self, total: int) -> Tensor:
        return ints(0, self.any(2, 3), self.any(total, total - 1))


def gradients(returned: Any, *leaves: Tensor) -> Answer:
    found = [x for x in (returned if isinstance(returned, tuple) else (returned,)) if x is not None]
    if not found[0].requires_grad:
        return found
    total = found[0].float().square().sum() + (found[1].clamp(max=9.0).sum() if len(found) > 1 else 0.0)
    return [*found, *torch.autograd.grad(total, leaves)]


def dense(d: Draw) -> Answer:
    k_shape = d.batch, d.keys, d.heads_k, d.dim
    q, k, v = d.leaf(d.batch, d.rows, d.heads, d.dim), d.leaf(*k_shape), d.leaf(*k_shape)
    return gradients(flash_attn_interface.flash_attn_func(q, k, v, **d.with_dropout()), q, k, v)


def kvpacked(d: Draw) -> Answer:
    q, kv = d.leaf(d.batch, d.rows, d.heads, d.dim), d.leaf(d.batch, d.keys, 2, d.heads_k, d.dim)
    return gradients(flash_attn_interface.flash_attn_kvpacked_func(q, kv, **d.with_dropout()), q, kv)


def varlen(d: Draw) -> Answer:
    k_shape = d.keys, d.heads_k, d.dim
    q, k, v = d.leaf(d.rows + 3, d.heads, d.dim), d.leaf(*k_shape), d.leaf(*k_shape)
    starts = d.starts(d.rows + 3), d.starts(d.keys)
    given = q, k, v, *starts, d.any(10, 8), d.any(9, 8)
    return gradients(flash_attn_interface.flash_attn_varlen_func(*given, **d.with_dropout()), q, k, v)


def qkvpacked(d: Draw) -> Answer:
    qkv, starts = d.leaf(d.keys, 3, d.heads, d.dim), d.starts(d.keys)
    return gradients(flash_attn_interface.flash_attn_varlen_qkvpacked_func(qkv, starts, 9, **d.with_dropout()), qkv)


def pages(d: Draw) -> Answer:
    q, k, v = d.tensor(d.rows + 3, d.heads, d.dim), *(d.tensor(4, 8, d.heads_k, d.dim) for _ in "kv")
    given = q, k, v, d.starts(d.rows + 3), ints(0, 9, d.any(20, 25)), 10, 16
    table = d.any(ints(0, 1, 2, 3).view(2, 2), ints(0, 9, 1, 9, 2, 9, 3, 9).view(2, 4)[:, ::2])
    return gradients(flash_attn_interface.flash_attn_varlen_func(*given, **d.options(), block_table=table))


def private(d: Draw) -> Answer:
    k_shape = d.batch, d.keys, d.heads_k, d.dim
    q, k, v = d.tensor(d.batch, d.rows, d.heads, d.dim), d.tensor(*k_shape), d.tensor(*k_shape)
    p = d.any(0.0, 0.2)
    rules = p, 0.5, d.any(True, False), *d.any((-1, -1), (2, 1)), d.any(0.0, 2.0), d.slopes()
    found = flash_attn_interface._flash_attn_forward(q, k, v, *rules, p > 0)
    out, lse, _, rng_state = found
    places = [d.any(None, torch.empty_like(x)) for x in (q, k, v)]
    dout = d.tensor(*out.shape)
    sums = flash_attn_interface._flash_attn_backward(
        dout, q, k, v, out, lse, *places, *rules, d.any(True, False), rng_state
    )
    return [*found, *places, sums]


def extension(d: Draw) -> Answer:
    k_shape = d.batch, d.keys, d.heads_k, d.dim
    q, k, v = d.tensor(d.batch, d.rows, d.heads, d.dim), d.tensor(*k_shape), d.tensor(*k_shape)
    rules = 0.0, 0.5, d.any(True, False), -1, -1, 0.0
    out, lse, *_ = raw.fwd(q, k, v, d.any(None, torch.empty_like(q)), None, *rules, False)
    return [out, lse, *raw.bwd(out, q, k, v, out, lse, None, None, None, None, *rules, False)]


def cache(d: Draw) -> Answer:
    paged, seqlen_new = d.any(True, False), d.any(None, 1, 3)
    shape = (4, 12, d.heads_k, d.dim) if paged else (3, 24, d.heads_k, d.dim)
    caches = [torch.randn(shape, generator=d.numbers).to(d.dtype) for _ in "kv"]
    q, batch = d.tensor(2, d.rows, d.heads, d.dim), 2
    new = [None if seqlen_new is None else d.tensor(batch, seqlen_new, d.heads_k, d.dim) for _ in "kv"]
    tables: dict[str, Any] = {}
    if seqlen_new is not None and d.dim == 16 and d.any(True, False):
        cos, sin = (torch.randn(24, 8, generator=d.numbers).to(d.dtype) for _ in "cs")
        tables = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": d.any(True, False)}
    lengths = d.any(ints(3, 9), ints(0, 20), 4, 9, 12, 30)
    if seqlen_new is None:
        lengths = d.any(lengths, None, 0)
    where: dict[str, Any] = {}
    if paged:
        where = {"block_table": ints(0, 1, 2, 3).view(2, 2)}
    elif d.any(True, False):
        where = {"cache_batch_idx": ints(2, 0)}
    elif d.any(True, False, False):
        where = {"cache_leftpad": ints(1, 2)}
    found = flash_attn_interface.flash_attn_with_kvcache(
        q, *caches, *new, **tables, cache_seqlens=lengths, **where, **d.options(), return_softmax_lse=d.any(True, False)
    )
    return [*(found if isinstance(found, tuple) else (found,)), *caches]


FUNCTIONS = dense, kvpacked, varlen, qkvpacked, pages, private, extension, cache
ON_CPU = torch.float32, torch.float16, torch.bfloat16


def random_call(number: int, dtypes: tuple[torch.dtype, ...]) -> RandomCall:
    chosen = random.Random(-1 - number)
    function, state = chosen.choice(FUNCTIONS), chosen.choice([*STATES, *[""] * 16])

    def run() -> Answer:
        torch.manual_seed(number)
        try:
            with STATES[state]():
                return function(Draw(number, dtypes))
        except Exception as error:  # noqa: BLE001  whatever a first call raises
            return [type(error), str(error)]

    return RandomCall(f"{function.__name__} {number}", state, run)


def equal(one: Answer, two: Answer) -> bool:
    return len(one) == len(two) and all(
        isinstance(y, Tensor) and x.shape == y.shape and same(x, y) if isinstance(x, Tensor) else x == y
        for x, y in zip(one, two)
    )


class Tally(NamedTuple):
    differing: list[str]
    found: int  # requests of which something was known from other calls
    errors: int


def compare(numbers: range, answer: Callable[[RandomCall], Answer], dtypes: tuple[torch.dtype, ...]) -> Tally:
    """Each call by an empty memory, and twice by one that remembers all the calls before it."""
    differing, errors, hits, counts = [], 0, 0, False
    with pytest.MonkeyPatch.context() as patch:
        lasting, look_up = memory.Memory(), memory.look_up

        def seen(request: memory.Request) -> Any:
            nonlocal hits
            found = look_up(request)
            hits += found[1] is not None and counts
            return found

        patch.setattr(memory, "look_up", seen)
        for number in numbers:
            call = random_call(number, dtypes)
            patch.setattr(memory, "_current", memory.Memory())
            expected = answer(call)
            errors += expected[:1] != [] and isinstance(expected[0], type)
            patch.setattr(memory, "_current", lasting)
            counts = True
            found = answer(call)
            counts = False
            if not (equal(found, expected) and equal(answer(call), expected)):
                differing.append(f"{call.name} {call.state}")
    return Tally(differing, hits, errors)


def launched(launches: fused_on_cpu.Launches) -> Callable[[RandomCall], Answer]:
    """What is launched of a call, but for addresses; or its error."""

    def answer(call: RandomCall) -> Answer:
        launches.seen.clear()
        returned = call.run()
        error = returned if returned[:1] and isinstance(returned[0], type) else []
        without = [
            (one.variant, one.blocks, {n: x if isinstance(x, tuple) else x > 2**32 or x for n, x in one.fields.items()})
            for one in launches.seen
        ]
        return [*error, *without]

    return answer


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.warm", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=20_000, help="how many; half of them by our own kernels")
    parser.add_argument("--seed", type=int, default=0, help="the first call's number")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    begun, numbers = time.monotonic(), range(options.seed, options.seed + options.calls // 2)
    tallies = {"on a CPU": compare(numbers, lambda call: call.run(), ON_CPU)}
    with pytest.MonkeyPatch.context() as patch:
        launches = fused_on_cpu.record(patch)
        tallies["by our own kernels"] = compare(numbers, launched(launches), ON_CPU[1:])
    for name, tally in tallies.items():
        print(
            f"{name}: {len(numbers)} calls, {tally.found} requests like an earlier one, {tally.errors} errors: ", end=""
        )
        print(f"{len(tally.differing)} differ {tally.differing[:10]}")
    print(f"{time.monotonic() - begun:.0f} s")
    return 1 if any(tally.differing for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
