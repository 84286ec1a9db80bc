"""Kinds of tensors and modes that a call may meet, and the five calls that meet them: right, or one clear error."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_compat import flash_attn_func, flash_attn_interface, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from tests.support import cumulative, ints, randn

HALF = torch.float16
Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]


class Call(NamedTuple):
    """function(*make()) are its results, tensors that it writes to included; is_differentiable: by autograd"""

    function: Function
    make: Callable[[], Tensors]
    is_differentiable: bool = False


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    return (flash_attn_func(q, k, v, causal=True),)


def _varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensors:
    return (flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, causal=True),)


def _cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensors:
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    assert isinstance(out, Tensor)
    return out, k_cache, v_cache


def _private(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    options = (0.0, 0.2, True, -1, -1, 0.0, None)
    out, lse, _, rng_state = _flash_attn_forward(q, k, v, *options, False)
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    softmax_d = _flash_attn_backward(out, q, k, v, out, lse, *grads, *options, False, rng_state)
    return out, lse, softmax_d, *grads


def _backward(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = flash_attn_func(*inputs, causal=True)
        return torch.autograd.grad(out, inputs, torch.ones_like(out))


def _inputs(*leading: int) -> Tensors:
    return tuple(randn(*leading, heads, 32, seed=heads + at, dtype=HALF) for at, heads in enumerate((4, 2, 2)))


def _cache_inputs() -> Tensors:
    shapes = (2, 1, 4), (2, 12, 2), (2, 12, 2), (2, 1, 2), (2, 1, 2)
    return *(randn(*shape, 32, seed=at, dtype=HALF) for at, shape in enumerate(shapes)), ints(3, 7)


CALLS = {
    "dense": Call(_dense, lambda: _inputs(2, 7), True),
    "varlen": Call(_varlen, lambda: (*_inputs(8), cumulative(3, 5)), True),
    "cache": Call(_cache, _cache_inputs),
    "private": Call(_private, lambda: _inputs(2, 7)),
    "backward": Call(_backward, lambda: _inputs(2, 7)),
}


# ---------------------------------------------------------------- kinds of tensors


class Plain(Tensor):
    """With memory of its own, as parameters and images of many libraries are."""


class Wrapper(Tensor):
    """Without memory: it holds a tensor, and what is computed of it. As DTensors and quantized tensors are."""

    _held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )
        made._held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda x: x._held, (args, kwargs or {}))
        return cls._found(func(*args, **kwargs))

    @classmethod
    def _found(cls, results: Any) -> Any:
        return tree_map_only(Tensor, cls, results)


class Pending(Wrapper):
    """What is computed of it are ordinary tensors: as of a collective that has not come back yet."""

    @classmethod
    def _found(cls, results: Any) -> Any:
        return results


def _of(
    convert: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor] = lambda x: x
) -> Callable[[Call], Tensors]:
    return lambda call: tuple(back(x) for x in call.function(*map(convert, call.make())))


def _held(x: Tensor) -> Tensor:
    return x._held if isinstance(x, Wrapper) else x


def _fake(device: str) -> Callable[[Call], Tensors]:
    def run(call: Call) -> Tensors:
        mode = FakeTensorMode()
        given = [FakeTensor(mode, x.to("meta"), torch.device(device)) for x in call.make()]
        with mode:
            found = call.function(*given)
        assert all(type(x) is FakeTensor and x.device.type == device for x in found)
        return found

    return run


def _fake_outside_of_its_mode(call: Call) -> Tensors:
    return call.function(*map(FakeTensorMode().from_tensor, call.make()))


# ---------------------------------------------------------------- transforms, traces and graphs


def _vmap(call: Call) -> Tensors:
    twice = [torch.stack([x, x]) for x in call.make()]
    axes = tuple(0 if x.is_floating_point() else None for x in twice)  # lengths decide about shapes
    given = [x if axis == 0 else x[0] for x, axis in zip(twice, axes)]
    return tuple(x[1] for x in torch.func.vmap(call.function, in_dims=axes)(*given))


def _derivative(call: Call) -> Tensors:
    """Of the sum of the results in q."""
    q, *others = call.make()
    gradient, found = torch.func.grad_and_value(lambda q: call.function(q, *others)[0].sum())(q)
    (right,) = torch.autograd.grad(call.function(q.requires_grad_(), *others)[0].sum(), q)
    torch.testing.assert_close(gradient, right, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(found, call.function(q, *others)[0].sum(), rtol=1e-2, atol=1e-2)
    return call.function(*call.make())


def _jvp(call: Call) -> Tensors:
    q, *others = call.make()
    return torch.func.jvp(lambda q: call.function(q, *others), (q,), (torch.ones_like(q),))[0]


def _dual(call: Call) -> Tensors:
    with forward_ad.dual_level():
        q, *others = call.make()
        found = call.function(forward_ad.make_dual(q, torch.ones_like(q)), *others)
        return tuple(forward_ad.unpack_dual(x).primal for x in found)


def _others(call: Call) -> Tensors:
    """Tensors to trace with, which are not those that are computed."""
    return tuple(x.flip(0) if x.is_floating_point() else x.clone() for x in call.make())


def _jit_trace(call: Call) -> Tensors:
    """Traced without gradients, for calls with and without."""
    with torch.no_grad():
        traced = torch.jit.trace(call.function, _others(call))
    if call.is_differentiable:
        _same_gradients(call, lambda *inputs: tuple(traced(*inputs)))
    return tuple(traced(*call.make()))


def _jit_script(call: Call) -> Tensors:
    names = call.function.__code__.co_names
    return torch.jit.script(next(getattr(flash_attn_interface, name) for name in names if "flash_attn" in name))(1)


def _make_fx(call: Call) -> Tensors:
    return tuple(make_fx(call.function)(*_others(call))(*call.make()))


class _Module(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.forward = function


def _export(strict: bool) -> Callable[[Call], Tensors]:
    def run(call: Call) -> Tensors:
        program = torch.export.export(_Module(call.function), _others(call), strict=strict)
        return tuple(program.module()(*call.make()))

    return run


def _compiled(call: Call) -> Tensors:
    torch._dynamo.reset()
    return torch.compile(call.function, backend="aot_eager", fullgraph=True)(*call.make())


# ---------------------------------------------------------------- modes


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _under(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Call], Tensors]:
    def run(call: Call) -> Tensors:
        with mode():
            return call.function(*call.make())

    return run


def _checkpointed(call: Call) -> Tensors:
    """Selectively, with whatever products our backends compute by; the gradients too, where there are any."""
    if not hasattr(checkpoint, "create_selective_checkpoint_contexts"):
        pytest.skip("PyTorch has checkpointing policies from 2.5 on")
    products = [getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm")]

    def selectively(*inputs: Tensor) -> Tensors:
        found: Tensors = checkpoint.checkpoint(
            call.function, *inputs, use_reentrant=False,
            context_fn=lambda: checkpoint.create_selective_checkpoint_contexts(products),
        )  # fmt: skip
        return found

    if call.is_differentiable:
        _same_gradients(call, selectively)
    return selectively(*call.make())


def _same_gradients(call: Call, function: Function) -> None:
    """Whether ``function`` has the call's gradients."""

    def gradients(of: Function) -> Tensors:
        inputs = [x.requires_grad_(x.is_floating_point()) for x in call.make()]
        leaves = [x for x in inputs if x.requires_grad]
        return torch.autograd.grad(of(*inputs)[0].float().cos().sum(), leaves)

    for x, y in zip(gradients(function), gradients(call.function), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3)


# ---------------------------------------------------------------- copies, threads and memory


def _threads(call: Call) -> Tensors:
    """As DataParallel's replicas."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: call.function(*call.make()), range(8)))
    assert all(torch.equal(x, y) for each in found for x, y in zip(each, found[0], strict=True))
    return found[0]


def _in_a_pool(call: Call) -> Tensors:
    """As a server's, that it gives back while it sleeps: what is made within it is gone then."""
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "use_mem_pool"):
        pytest.skip("needs an NVIDIA GPU and PyTorch 2.5")
    for _ in range(2):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            found = [x.cpu() for x in call.function(*call.make())]
        torch.cuda.synchronize()
        del pool
        torch.cuda.empty_cache()
        for x, y in zip(found, call.function(*call.make()), strict=True):
            torch.testing.assert_close(x, y.cpu(), rtol=1e-2, atol=1e-3)
    return call.function(*call.make())


def _copied(copied: Callable[[Any], Any]) -> Callable[[Call], Tensors]:
    def run(call: Call) -> Tensors:
        call.function(*(given := call.make()))  # something may be kept of it by now
        assert all(torch.equal(x, copied(x)) for x in given)
        return copied(call.function)(*copied(call.make()))

    return run


KINDS: dict[str, Callable[[Call], Tensors]] = {
    "plain subclass": _of(lambda x: x.as_subclass(Plain), lambda x: x.as_subclass(Tensor)),
    "wrapper": _of(Wrapper, _held),
    "wrapper of a wrapper": _of(lambda x: Wrapper(Wrapper(x)), lambda x: _held(_held(x))),
    "pending": _of(Pending, _held),
    "fake": _fake("cpu"),
    "fake, on a GPU": _fake("cuda"),
    "fake outside of its mode": _fake_outside_of_its_mode,
    "meta": _of(lambda x: x.to("meta")),
    "vmap": _vmap,
    "grad": _derivative,
    "jvp": _jvp,
    "dual": _dual,
    "functionalize": lambda call: torch.func.functionalize(call.function)(*call.make()),
    "jit.trace": _jit_trace,
    "jit.script": _jit_script,
    "make_fx": _make_fx,
    "export": _export(strict=False),
    "strict export": _export(strict=True),
    "compile": _compiled,
    "dispatch mode": _under(Operators),
    "two dispatch modes": _under(lambda: _both(Operators(), Operators())),
    "FlopCounterMode": _under(lambda: FlopCounterMode(display=False)),
    "function mode": _under(Functions),
    "selective checkpointing": _checkpointed,
    "threads": _threads,
    "deepcopy": _copied(copy.deepcopy),
    "pickle": _copied(lambda x: pickle.loads(pickle.dumps(x))),
    "use_mem_pool": _in_a_pool,
}


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield
