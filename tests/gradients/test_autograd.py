"""How gradients flow: packed inputs, repeated, higher and forward-mode derivatives, memory."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from flash_attn_compat import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    settings,
    use_backend,
)
from flash_attn_compat.backends import KernelsFailed, sdpa
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, Gradients, Result
from flash_attn_compat.core.inputs import DenseInputs, Options
from flash_attn_compat.dispatch import ops
from tests.forms.inputs import cumulative, qkv
from tests.forms.support import GENERAL, in_threads, on_backend, on_general_backends, serve_by
from tests.kernels import fused_on_cpu

FEATURES = {
    "plain": {},
    "alibi": dict(alibi_slopes=torch.tensor([0.3, 0.1, 0.2, 0.0])),
    "dropout": dict(dropout_p=0.3),
}


def leaves(*shape_args: Any, **kwargs: Any) -> list[Tensor]:
    return [x.requires_grad_() for x in qkv(*shape_args, **kwargs)]


# ---------------------------------------------------------------- the graph


@on_general_backends
@pytest.mark.parametrize("feature", FEATURES)
def test_a_graph_keeps_nothing_larger_than_its_inputs_and_gives_the_same_gradients_again(
    backend: str, feature: str
) -> None:
    """No probabilities, no keep mask: the backward recomputes them; gradients into S_dmask are dropped."""
    inputs, saved = leaves(b=1, sq=300, sk=300, h=4, hk=2, d=8), []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        found = on_backend(backend, flash_attn_func, *inputs, **FEATURES[feature], return_attn_probs=feature != "plain")
    assert saved and max(x.numel() for x in saved) <= inputs[0].numel()
    out, s_dmask = (found[0], found[2]) if feature != "plain" else (found, inputs[0].detach())
    first = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    torch.randn(3)  # the random state moves on, the mask of this call does not
    second = torch.autograd.grad(out.square().sum() + 100 * s_dmask.sum(), inputs)
    assert all(map(torch.equal, first, second))


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
    if backend == "sdpa" and torch.float16 not in sdpa._slow_matmul_dtypes():
        pytest.skip("on a CPU with units for fp16, PyTorch's kernel returns views, which autograd copies to add")
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


# ---------------------------------------------------------------- of what, and by whom


def _of_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    starts = cumulative(q.shape[0]), cumulative(k.shape[0])
    return flash_attn_varlen_func(q, k, v, *starts, q.shape[0], k.shape[0], causal=True)


def test_a_mask_that_cannot_be_drawn_again_is_an_error_under_create_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such are the dropout masks of PyTorch's GPU kernels."""

    class KeepsItsMask(Reference):
        def forward(self, call: AttentionCall) -> Result:
            return super().forward(call)._replace(rng_state=None)

    serve_by(monkeypatch, KeepsItsMask())
    inputs = leaves()
    out = flash_attn_func(*inputs, dropout_p=0.2)
    with pytest.raises(RuntimeError, match="create_graph=True needs a dropout mask"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


class Sees(Reference):
    """A backend that records the named backend during its backward."""

    def __init__(self) -> None:
        self.named: list[str | None] = []

    def backward(self, call: AttentionCall, upstream: BackwardInputs, into: Gradients | None) -> Gradients:
        self.named.append(settings.forced_backend())
        return super().backward(call, upstream, into)


@pytest.mark.parametrize("named", [None, "reference"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_backward_uses_the_forwards_choice_in_any_thread(
    named: str | None, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is a thread of autograd's, to which no context variable comes."""
    backend = Sees()
    serve_by(monkeypatch, backend)
    ways: tuple[Callable[..., Tensor], ...] = (
        flash_attn_func, lambda q, k, v: flash_attn_kvpacked_func(q, torch.stack([k, v], 2)),
        lambda *x: _of_packed(*(y.flatten(0, 1) for y in x)),
        lambda *x: ops.forward(DenseInputs(*x), Options())[0],
    )  # fmt: skip
    for attention in ways:
        with use_backend(named) if named else contextlib.nullcontext():
            out = attention(*leaves())
        with use_backend("reference") if not named else contextlib.nullcontext():
            run = functools.partial(out.sum().backward)
            if in_thread:
                in_threads(run, 1)
            else:
                run()
    assert backend.named == [named] * 4


def test_a_tensor_that_outlived_its_transform_has_no_graph() -> None:
    left: list[Tensor] = []
    q, k, v = qkv()
    torch.func.grad(lambda x: (left.append(2 * x), left[0].sum())[1])(k)  # type: ignore[func-returns-value]  # unused
    found = []
    for doubled in (2 * k, left[0]):
        flash_attn_func(leaf := q.clone().requires_grad_(), doubled, v).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


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
