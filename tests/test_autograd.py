"""How gradients flow: packed inputs, repeated, higher and forward-mode derivatives, memory."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from flash_attn_compat import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    settings,
    use_backend,
)
from flash_attn_compat.backends import KernelsFailed
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.engine.build import Options
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.serving import torch_ops
from tests import fused_on_cpu, plain
from tests.support import GENERAL, close, cumulative, on_backend, on_general_backends, qkv, serve_by

FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(3, 1)),
    "softcap": dict(softcap=2.0),
    "alibi": dict(alibi_slopes=torch.tensor([0.3, 0.1, 0.2, 0.0])),
    "dropout": dict(dropout_p=0.3),
}


def leaves(*shape_args: Any, **kwargs: Any) -> list[Tensor]:
    return [x.requires_grad_() for x in qkv(*shape_args, **kwargs)]


# ---------------------------------------------------------------- the graph


@on_general_backends
@pytest.mark.parametrize("feature", ["plain", "dropout"])
def test_a_retained_graph_gives_the_same_gradients_twice(backend: str, feature: str) -> None:
    inputs = leaves(h=4, hk=2)
    out = on_backend(backend, flash_attn_func, *inputs, **FEATURES[feature])
    first = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    torch.randn(3)  # the random state moves on, the mask of this call does not
    second = torch.autograd.grad(out.square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@on_general_backends
def test_gradients_into_s_dmask_are_dropped(backend: str) -> None:
    inputs = leaves()
    torch.manual_seed(0)
    kwargs = dict(return_attn_probs=True) if backend == "sdpa" else dict(return_attn_probs=True, dropout_p=0.2)
    out, _, s_dmask = on_backend(backend, flash_attn_func, *inputs, **kwargs)
    grads = torch.autograd.grad(out.sum() + 100 * s_dmask.sum(), inputs, retain_graph=True)
    right = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(grads, right, strict=True))


@on_general_backends
def test_changing_the_output_in_place_is_an_error_at_backward_rather_than_a_wrong_gradient(backend: str) -> None:
    inputs = leaves()
    out = on_backend(backend, flash_attn_func, *inputs)
    result = out.square().sum()
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified.*inplace"):
        result.backward()


@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
@pytest.mark.parametrize("form", ["dense", "packed", "kv packed"])
def test_gradients_of_an_input_with_several_consumers_are_summed_in_place(
    backend: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd adds to the first gradient where nobody else uses its memory, which it tells by counting."""
    if backend == "fused":
        fused_on_cpu.record(monkeypatch)  # the emulator keeps what it is given
    q, k, v = (x.half() for x in qkv(b=1))
    function, given = {
        "dense": (flash_attn_func, (q, k, v)),
        "packed": (_of_packed, (q[0], k[0], v[0])),
        "kv packed": (flash_attn_kvpacked_func, (q, torch.stack([k, v], 2))),
    }[form]
    inputs = [x.requires_grad_() * 1 for x in given]
    outs = [on_backend(backend, function, *inputs) for _ in range(2)]
    addresses: list[list[int]] = [[] for _ in inputs]

    def note(gradients: tuple[Tensor, ...], _: object) -> None:
        for index, gradient in enumerate(gradients):
            addresses[index].append(gradient.data_ptr())

    for out in outs:
        out.grad_fn.register_hook(note)
    for found, known in zip(torch.autograd.grad(sum(out.sum() for out in outs), inputs), addresses, strict=True):
        assert len(known) == 2 and found.data_ptr() in known


# ---------------------------------------------------------------- keeping nothing


@on_general_backends
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(backend: str, context: Callable[[], Any]) -> None:
    saved = []
    inputs = leaves()
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x), context():
        out = on_backend(backend, flash_attn_func, *inputs)
    assert not saved and not out.requires_grad and out.grad_fn is None


@on_general_backends
@pytest.mark.parametrize("feature", ["plain", "alibi", "dropout"])
def test_with_gradients_only_tensors_of_the_inputs_size_are_saved(backend: str, feature: str) -> None:
    """No probabilities, no keep mask: the backward recomputes them."""
    saved: list[Tensor] = []
    inputs = leaves(b=1, sq=300, sk=300, h=4, hk=2, d=8)
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        on_backend(backend, flash_attn_func, *inputs, **FEATURES[feature])
    assert saved and max(x.numel() for x in saved) <= inputs[0].numel()


# ---------------------------------------------------------------- higher derivatives


def _in_fp64(**kwargs: Any) -> list[Tensor]:
    return [x.requires_grad_() for x in qkv(b=1, sq=3, sk=4, h=2, hk=1, d=4, dtype=torch.float64, **kwargs)]


def _attention(feature: str) -> Callable[..., Tensor]:
    kwargs = dict(FEATURES[feature])
    if feature == "alibi":
        kwargs["alibi_slopes"] = kwargs["alibi_slopes"][:2]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(0)
        return flash_attn_func(q, k, v, **kwargs)

    return attention


@pytest.mark.parametrize("feature", FEATURES)
def test_second_derivatives_and_forward_mode_agree_with_finite_differences(feature: str) -> None:
    assert torch.autograd.gradgradcheck(_attention(feature), _in_fp64(), fast_mode=True)
    assert torch.autograd.gradcheck(
        _attention(feature),
        _in_fp64(),
        check_forward_ad=True,
        check_backward_ad=False,
        check_undefined_grad=False,
        fast_mode=True,
    )


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0)], ids=["no rows", "no keys"])
def test_zeros_of_an_empty_call_have_derivatives_in_both_modes_at_once(seqlen_q: int, seqlen_k: int) -> None:
    q, kv = torch.ones(1, seqlen_q, 2, 16, requires_grad=True), torch.ones(1, seqlen_k, 2, 16)
    with forward_ad.dual_level():
        out = flash_attn_func(forward_ad.make_dual(q, torch.ones_like(q)), kv, kv)
        primal, tangent = forward_ad.unpack_dual(out)
        assert tangent is not None and not tangent.any()
        (gradient,) = torch.autograd.grad(primal.sum(), q)
    assert not gradient.any()


SUBSETS = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]


def _of_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    starts = cumulative(q.shape[0]), cumulative(k.shape[0])
    return flash_attn_varlen_func(q, k, v, *starts, q.shape[0], k.shape[0], causal=True)


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _of_packed(*(x.flatten(0, 1) for x in (q, k, v)))[None]


def _kv_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True)


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


@pytest.mark.parametrize("attention", [_dense, _packed, _kv_packed])
@pytest.mark.parametrize("wanted", SUBSETS)
def test_any_inputs_that_ask_for_gradients_get_some_that_can_be_differentiated(
    attention: Callable[..., Tensor], wanted: tuple[int, ...]
) -> None:
    def twice(function: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [x.detach().requires_grad_(index in wanted) for index, x in enumerate(_in_fp64())]
        asked = [inputs[index] for index in wanted]
        first = torch.autograd.grad(function(*inputs).pow(3).sum(), asked, create_graph=True)
        second = torch.autograd.grad(sum(x.pow(2).sum() for x in first), asked)
        return [*first, *second]

    for ours, right in zip(twice(attention), twice(functools.partial(plain.attention, window=(-1, 0))), strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("attention", [_dense, _packed])
@pytest.mark.parametrize("wanted", SUBSETS[::3])
@pytest.mark.parametrize(("rows", "keys"), [(3, 0), (0, 4), (0, 0)])
def test_without_rows_or_keys_gradients_are_zeros_that_can_be_differentiated(
    attention: Callable[..., Tensor], wanted: tuple[int, ...], rows: int, keys: int
) -> None:
    q, k, v = (x.detach() for x in _in_fp64())
    inputs = [q[:, :rows], k[:, :keys], v[:, :keys]]
    asked = [inputs[index].requires_grad_() for index in wanted]
    first = torch.autograd.grad(attention(*inputs).square().sum(), asked, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), asked)
    for x, *gradients in zip(asked, first, second, strict=True):
        assert all(gradient.shape == x.shape and not gradient.any() for gradient in gradients)


def test_a_mask_that_cannot_be_drawn_again_is_an_error_under_create_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the GPU kernels whose dropout masks are their own."""

    class KeepsItsMask(Reference):
        def forward(self, call: AttentionCall) -> Result:
            return super().forward(call)._replace(rng_state=None)

    serve_by(monkeypatch, KeepsItsMask())
    inputs = leaves()
    out = flash_attn_func(*inputs, dropout_p=0.2)
    with pytest.raises(RuntimeError, match="create_graph=True needs a dropout mask"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
@pytest.mark.parametrize("by_variable", [False, True], ids=["use_backend", "environment variable"])
def test_gradients_of_a_named_backend_can_be_differentiated(
    backend: str, by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "fused":
        fused_on_cpu.emulate(monkeypatch)

    def second() -> list[Tensor]:
        inputs = [x.half().requires_grad_() for x in qkv()]
        out = flash_attn_func(*inputs, causal=True)
        first = torch.autograd.grad(out.float().square().sum(), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(x.float().square().sum() for x in first), inputs)]

    right = second()
    if by_variable:
        monkeypatch.setenv(settings.BACKEND, backend)
    with use_backend(backend) if not by_variable else contextlib.nullcontext():
        found = second()
    for ours, wanted in zip(found, right, strict=True):
        close(ours.detach(), wanted.detach(), float(wanted.detach().abs().max()))


class Sees(Reference):
    """What is named while it computes a backward."""

    def __init__(self) -> None:
        self.named: list[str | None] = []

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        self.named.append(settings.named_backend())
        return super().backward(call, upstream, into)


@pytest.mark.parametrize("named", [None, "reference"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_backward_sees_what_the_forward_saw_wherever_it_runs(
    named: str | None, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is a thread of autograd's, to which no context variable comes."""
    backend = Sees()
    serve_by(monkeypatch, backend)
    for attention in (flash_attn_func, _packed, _kv_packed, lambda *x: torch_ops.attend(*x, Options())[0]):
        with use_backend(named) if named else contextlib.nullcontext():
            out = attention(*leaves())
        with use_backend("reference") if not named else contextlib.nullcontext():
            run = functools.partial(out.sum().backward)
            if in_thread:
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
            else:
                run()
    assert backend.named == [named] * 4


def test_torch_func_transforms_are_served() -> None:
    q, k, v = (x.detach() for x in _in_fp64())
    jacobian = torch.func.jacrev(lambda x: flash_attn_func(x, k, v, causal=True).sum((0, 1, 2)))(q)
    assert jacobian.shape == (4, *q.shape)
    leaf = q.requires_grad_()
    right = torch.autograd.grad(flash_attn_func(leaf, k, v, causal=True)[..., 1].sum(), leaf)[0]
    torch.testing.assert_close(jacobian[1], right)
    tangent = torch.func.jvp(lambda x: flash_attn_func(x, k, v), (q.detach(),), (torch.ones_like(q),))[1]
    assert tangent.shape == (1, 3, 2, 4)


def test_a_tensor_that_outlived_its_transform_has_no_graph() -> None:
    left: list[Tensor] = []
    q, k, v = qkv()
    torch.func.grad(lambda x: (left.append(2 * x), left[0].sum())[1])(k)  # type: ignore[func-returns-value]  # unused
    found = []
    for doubled in (2 * k, left[0]):
        flash_attn_func(leaf := q.clone().requires_grad_(), doubled, v).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_checkpointing_gives_the_same_gradients_under_dropout() -> None:
    inputs, found = leaves(), []
    for again in (False, True):
        torch.manual_seed(0)
        options = dict(use_reentrant=False) if again else {}
        call = functools.partial(torch.utils.checkpoint.checkpoint, flash_attn_func) if again else flash_attn_func
        found.append(torch.autograd.grad(call(*inputs, dropout_p=0.3, **options).square().sum(), inputs))
    for ours, wanted in zip(*found, strict=True):
        close(ours, wanted, 4)


class Failing(Reference):
    """Kernels that turn out not to work."""

    name = "failing"

    def forward(self, call: AttentionCall) -> Result:
        raise KernelsFailed("of no use")


def test_a_failure_is_a_reason_from_then_on_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by(monkeypatch, Failing(), Reference())
    with pytest.warns(RuntimeWarning, match="a failing kernel is not used: of no use"):
        flash_attn_func(*leaves())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(*leaves())
    assert explain(flash_attn_func, *leaves()).reasons["failing"] == ["failed before: of no use"]
