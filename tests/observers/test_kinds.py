"""Five calls with every kind of tensor and mode: right, or one clear error; no launch without memory."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import flash_attn_compat
from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from tests.forms.inputs import cumulative, ints, qkv, randn
from tests.forms.kinds import CALLS, KINDS, Operators, Pending, Tensors, call_on
from tests.forms.plain import some_of
from tests.forms.support import GENERAL
from tests.kernels import fused_on_cpu
from tests.tools.interpreters import CAN_FORK

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
# Those that look into what a backend does; the others meet all backends alike.
LOOKING = ("wrapper", "jit.trace", "dispatch mode", "selective checkpointing", "threads")


@pytest.fixture(autouse=True, scope="module")
def _the_compiler_knows_pytorch() -> None:
    """The compiler lists PyTorch's functions at its first call, before the emulator replaces some."""
    torch.compile(lambda: torch.empty_like(torch.empty(1)), backend="eager")()


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


def cells(kinds: Any = KINDS, every: int = 1) -> Any:
    return pytest.mark.parametrize(("kind", "name"), some_of(itertools.product(kinds, CALLS), every))


def skip_unless_possible(kind: str, name: str) -> None:
    if kind == "fake, on a GPU" and name in ("private", "backward") and not torch.backends.cuda.is_built():
        pytest.skip("PyTorch without CUDA cannot compute these even in thought")
    lacks_driver = torch.backends.cuda.is_built() and not torch.cuda.is_available()
    if (kind, name) == ("fake, on a GPU", "backward") and lacks_driver:
        pytest.skip("autograd of PyTorch with CUDA looks for a driver before it computes this")


@cells((kind for kind in KINDS if kind != "meta"), 5)  # which our kernels do not serve
def test_fused_kernels_receive_only_tensors_with_memory(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated, which allows no address that is not a tensor's."""
    skip_unless_possible(kind, name)
    launches = fused_on_cpu.emulate(monkeypatch)
    check(kind, name, torch.device("cpu"))
    assert launches.seen


@cells(LOOKING)
@pytest.mark.parametrize("backend", GENERAL)
def test_every_backend_is_right_or_gives_one_clear_error(backend: str, kind: str, name: str) -> None:
    with use_backend(backend):
        check(kind, name, torch.device("cpu"))


@cells(["meta"])
def test_calls_on_the_meta_device_return_meta_tensors(kind: str, name: str) -> None:
    check(kind, name, torch.device("cpu"))


def test_packed_calls_on_the_meta_device_have_gradients_and_an_s_dmask() -> None:
    q, k, v, starts, _ = (x.to("meta") for x in CALLS["varlen"].make())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    rules: dict[str, Any] = dict(dropout_p=0.1, return_attn_probs=True)
    out, lse, s_dmask = flash_attn_varlen_func(*inputs, starts, starts, 5, 130, **rules)
    assert lse.shape == out.shape[1::-1] and s_dmask.shape == (starts.shape[0] - 1, out.shape[1], 128, 256)
    compare(torch.autograd.grad(out.sum(), inputs), (q, k, v), are_fake=True)


@cells()
@pytest.mark.gpu
def test_a_gpu_is_right_or_gives_one_clear_error(kind: str, name: str) -> None:
    check(kind, name, torch.device("cuda"))


def _in_another_process(given: dict[str, Tensors]) -> dict[str, Tensors]:
    return {name: CALLS[name].function(*tensors) for name, tensors in given.items()}


def test_another_process_computes_on_shared_tensors() -> None:
    given = {name: call.make() for name, call in CALLS.items()}
    method = "fork" if CAN_FORK and not torch.cuda.is_initialized() else "spawn"
    with multiprocessing.get_context(method).Pool(1) as pool:
        found = pool.apply(_in_another_process, (given,))
    for name, call in CALLS.items():
        compare(found[name], call.function(*call.make()))


# ---------------------------------------------------------------- what only some tensors of a call are


def test_an_upstream_gradient_that_is_pending_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Awaited(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Tensor:
            return Pending(dout)

    def gradients(last: Callable[[Tensor], Tensor]) -> Tensors:
        inputs = [x.requires_grad_() for x in CALLS["dense"].make()]
        return torch.autograd.grad(last(flash_attn_func(*inputs, causal=True)).float().cos().sum(), inputs)

    fused_on_cpu.emulate(monkeypatch)
    compare(gradients(Awaited.apply), gradients(lambda x: x))


def test_lengths_without_memory_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch)
    q, k, v, starts, _ = CALLS["varlen"].make()
    with pytest.raises(RuntimeError, match=r"cu_seqlens_q must be a tensor with memory of its own; got Pending"):
        flash_attn_varlen_func(q, k, v, Pending(starts), Pending(starts), 5, 5)


# ---------------------------------------------------------------- one operator


def test_modes_see_one_operator_each_for_a_call_and_for_its_backward() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    with Operators() as operators:
        flash_attn_func(q, k, v).backward(torch.ones_like(q))
        flash_attn_with_kvcache(q.detach(), k.detach(), v.detach(), cache_seqlens=3)
    autograds = {"aten.detach.default", "aten.ones_like.default"}
    ours = [name for name in operators.seen if name not in autograds]
    assert ours == [f"flash_attn_compat.{name}.default" for name in ("attention", "attention_backward", "kvcache")]


@pytest.mark.parametrize("backend", GENERAL)
def test_a_checkpoint_policy_for_flash_attn_saves_the_attention(backend: str) -> None:
    if not hasattr(checkpoint, "create_selective_checkpoint_contexts"):
        pytest.skip("PyTorch has checkpointing policies from 2.5 on")

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> checkpoint.CheckpointPolicy:
        has_window = any(argument.name == "window_size_left" for argument in operator._schema.arguments)
        is_ours = "flash_attn" in str(operator) and has_window
        return checkpoint.CheckpointPolicy.MUST_SAVE if is_ours else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(function: Callable[..., Tensor]) -> Tensors:
        inputs = [x.requires_grad_() for x in qkv()]
        return torch.autograd.grad(function(*inputs).cos().sum(), inputs)

    def selectively(*inputs: Tensor) -> Tensor:
        found: Tensor = checkpoint.checkpoint(
            flash_attn_func, *inputs, use_reentrant=False,
            context_fn=lambda: checkpoint.create_selective_checkpoint_contexts(policy),
        )  # fmt: skip
        return found

    with use_backend(backend):
        right = gradients(flash_attn_func)
        flash_attn_compat.reset_backend_counts()
        found = gradients(selectively)
    assert flash_attn_compat.backend_counts() == {backend: 1}
    for x, y in zip(found, right, strict=True):
        assert torch.equal(x, y)


def test_operations_are_counted_as_pytorch_counts_its_own_attention() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(b=2, sq=5, sk=9, h=4, hk=2, d=16))
    with FlopCounterMode(display=False) as counter:
        out = flash_attn_func(q, k, v, causal=True)
        forward = counter.get_total_flops()
        out.sum().backward()
    by_heads = (2, 4, 5, 16), (2, 4, 9, 16), (2, 4, 9, 16)  # grouped heads count as if there were a key head for each
    assert forward == sdpa_flop_count(*by_heads)
    assert counter.get_total_flops() - forward == sdpa_backward_flop_count(by_heads[0], *by_heads)
    assert forward == 2 * 2 * 2 * 4 * 5 * 9 * 16

    cache, new, counts = [x.detach() for x in (q, k, v)], randn(2, 1, 2, 16), []
    for run in (
        lambda: flash_attn_varlen_func(*(x[0, :5] for x in (q, k, v)), cumulative(2, 3), cumulative(1, 4), 3, 4),
        lambda: flash_attn_with_kvcache(*cache, cache_seqlens=ints(3, 7)),
        lambda: flash_attn_with_kvcache(*cache, new, new, cache_seqlens=3),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops() / (2 * 2 * 4 * 16))
    assert counts == [2 * 1 + 3 * 4, 5 * (3 + 7), 2 * 5 * 4]
