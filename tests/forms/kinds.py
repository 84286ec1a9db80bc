"""Kinds of tensors and modes that a call may meet, and five calls of calls.py: right, or one clear error."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
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

from flash_attn_compat import flash_attn_interface
from tests.forms.calls import TABLE

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]


class Call(NamedTuple):
    """function(*make()) are its results, tensors that it writes to included.

    fn: the public function's name; is_differentiable: whether autograd records it
    """

    function: Function
    make: Callable[[], Tensors]
    fn: str
    is_differentiable: bool


def call_on(name: str, device: torch.device) -> Call:
    """Return a call of the table, whose tensors ask for no gradients."""
    call = TABLE[name]

    def make() -> Tensors:
        return tuple(x.detach() for x in call.prepare(device).inputs.values())

    return Call(call.prepare(device).function, make, call.fn, is_differentiable=name in ("dense", "varlen"))


NAMES = "dense", "varlen", "cache", "private", "backward"
CALLS = {name: call_on(name, torch.device("cpu")) for name in NAMES}


# ---------------------------------------------------------------- kinds of tensors


class Plain(Tensor):
    """With memory of its own, as parameters and images of many libraries are."""


class Wrapper(Tensor):
    """A tensor without memory that wraps another, as do its results: like DTensors and quantized tensors."""

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
    """A wrapper whose results are ordinary tensors, like the pending result of a collective."""

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


# ---------------------------------------------------------------- transforms, traces and graphs


def _vmap(call: Call) -> Tensors:
    twice = [torch.stack([x, x]) for x in call.make()]
    axes = tuple(0 if x.is_floating_point() else None for x in twice)  # lengths decide about shapes
    given = [x if axis == 0 else x[0] for x, axis in zip(twice, axes)]
    return tuple(x[1] for x in torch.func.vmap(call.function, in_dims=axes)(*given))


def _derivative(call: Call) -> Tensors:
    """Compare torch.func's gradient of the summed results in q with autograd's."""
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
    """Return tensors to trace with, whose values differ from the call's."""
    return tuple(x.flip(0) if x.is_floating_point() else x.clone() for x in call.make())


def _jit_trace(call: Call) -> Tensors:
    """Trace without gradients, and run the trace with and without them."""
    with torch.no_grad():
        traced = torch.jit.trace(call.function, _others(call))
    if call.is_differentiable:
        _same_gradients(call, lambda *inputs: tuple(traced(*inputs)))
    return tuple(traced(*call.make()))


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


def _under(*modes: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Call], Tensors]:
    def run(call: Call) -> Tensors:
        with contextlib.ExitStack() as entered:
            for mode in modes:
                entered.enter_context(mode())
            return call.function(*call.make())

    return run


def _checkpointed(call: Call) -> Tensors:
    """Checkpoint selectively, saving matrix products; compare the gradients too if autograd records the call."""
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
    """Assert that ``function`` has the call's gradients."""

    def gradients(of: Function) -> Tensors:
        inputs = [x.requires_grad_(x.is_floating_point()) for x in call.make()]
        leaves = [x for x in inputs if x.requires_grad]
        return torch.autograd.grad(of(*inputs)[0].float().cos().sum(), leaves)

    for x, y in zip(gradients(function), gradients(call.function), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3)


def _threads(call: Call) -> Tensors:
    """Call from several threads at once, as DataParallel's replicas do."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: call.function(*call.make()), range(8)))
    assert all(torch.equal(x, y) for each in found for x, y in zip(each, found[0], strict=True))
    return found[0]


def _in_a_pool(call: Call) -> Tensors:
    """Call inside a memory pool that is then freed, as a sleeping server frees its pool."""
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
        public = getattr(flash_attn_interface, call.fn)
        assert copied(public) is public
        return call.function(*copied(call.make()))

    return run


KINDS: dict[str, Callable[[Call], Tensors]] = {
    "plain subclass": _of(lambda x: x.as_subclass(Plain), lambda x: x.as_subclass(Tensor)),
    "wrapper": _of(Wrapper, _held),
    "wrapper of a wrapper": _of(lambda x: Wrapper(Wrapper(x)), lambda x: _held(_held(x))),
    "pending": _of(Pending, _held),
    "fake": _fake("cpu"),
    "fake, on a GPU": _fake("cuda"),
    "fake outside of its mode": lambda call: call.function(*map(FakeTensorMode().from_tensor, call.make())),
    "meta": _of(lambda x: x.to("meta")),
    "vmap": _vmap,
    "grad": _derivative,
    "jvp": _jvp,
    "dual": _dual,
    "functionalize": lambda call: torch.func.functionalize(call.function)(*call.make()),
    "jit.trace": _jit_trace,
    "jit.script": lambda call: torch.jit.script(getattr(flash_attn_interface, call.fn))(1),
    "make_fx": lambda call: tuple(make_fx(call.function)(*_others(call))(*call.make())),
    "export": _export(strict=False),
    "strict export": _export(strict=True),
    "compile": _compiled,
    "dispatch mode": _under(Operators),
    "two dispatch modes": _under(Operators, Operators),
    "FlopCounterMode": _under(lambda: FlopCounterMode(display=False)),
    "function mode": _under(Functions),
    "selective checkpointing": _checkpointed,
    "threads": _threads,
    "deepcopy": _copied(copy.deepcopy),
    "pickle": _copied(lambda x: pickle.loads(pickle.dumps(x))),
    "use_mem_pool": _in_a_pool,
}


# What is an error: of ours where nothing else says it, else PyTorch's own.
_DERIVATIVES = r"cannot be combined with forward-mode derivatives or torch.func transforms"
_WITHIN = r"Tensor.requires_grad_|trace_autograd_ops|torch.autograd.grad"
_TRANSFORMS = "vmap", "grad", "jvp", "functionalize"
ERRORS: dict[tuple[str, str], str] = {
    **{(kind, call): _DERIVATIVES for kind in (*_TRANSFORMS, "dual") for call in ("cache", "private")},
    **{(kind, "backward"): _WITHIN for kind in (*_TRANSFORMS, "compile", "strict export")},
    **{("jit.script", call): "keyword-only arguments|NamedTuple|cannot be used as a value" for call in CALLS},
    ("jit.trace", "backward"): "sym_eq",
    ("export", "backward"): "fake tensor in the exported program|does not require grad",
}
FAKE = {"fake", "fake, on a GPU", "fake outside of its mode", "meta"}


def check(kind: str, name: str, device: torch.device) -> None:
    call = call_on(name, device)
    right = call.function(*call.make())
    if (kind, name) in ERRORS:
        with pytest.raises(Exception, match=ERRORS[kind, name]):
            KINDS[kind](call)
    else:
        compare(KINDS[kind](call), right, kind in FAKE)
    compare(call.function(*call.make()), right)  # what is kept of such calls must serve ordinary ones


def compare(found: Tensors, right: Tensors, are_fake: bool = False) -> None:
    for x, y in zip(found, right, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if are_fake:
            assert isinstance(x, FakeTensor) or x.is_meta
        else:
            assert x.device == y.device
            torch.testing.assert_close(x.detach(), y, rtol=4e-3, atol=4e-3)
