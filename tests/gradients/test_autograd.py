"""How gradients flow: what a graph keeps, who computes its backward, and dropout under checkpoints and in graphs."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

from flash_attn_compat import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    private_interface,
    settings,
    use_backend,
)
from flash_attn_compat.backends import KernelsFailed, sdpa
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, Gradients, Result
from flash_attn_compat.core.inputs import DenseInputs, Options
from flash_attn_compat.dispatch import ops
from flash_attn_compat.dropin import operators, patched
from flash_attn_compat.modules.mha import MHA, FlashCrossAttention, FlashSelfAttention
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


@on_general_backends
@pytest.mark.parametrize("feature", FEATURES)
def test_a_graph_keeps_nothing_larger_than_its_inputs_and_repeats_its_gradients(backend: str, feature: str) -> None:
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


@on_general_backends
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(backend: str, context: Callable[[], Any]) -> None:
    saved = []
    inputs = leaves()
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x), context():
        out = on_backend(backend, flash_attn_func, *inputs)
    assert not saved and not out.requires_grad and out.grad_fn is None


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


def test_a_failure_is_a_reason_from_then_on_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Reference):
        name = "failing"

        def forward(self, call: AttentionCall) -> Result:
            raise KernelsFailed("of no use")

    serve_by(monkeypatch, Failing(), Reference())
    with pytest.warns(RuntimeWarning, match="a failing kernel is not used: of no use"):
        flash_attn_func(*leaves())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(*leaves())
    assert explain(flash_attn_func, *leaves()).reasons["failing"] == ["failed before: of no use"]


# ------------------------------------------------------------------------------------ dropout in graphs and checkpoints


# A layer turns x, the identity, into dropped uniform probabilities: queries and keys are zeros, values are x. So the
# output is the mask, and the gradient of x is the output's transpose times dout.
P, SIZE = 0.5, 16
Layer = Callable[[Tensor], Any]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


# Layers: x (1, SIZE, 1, SIZE) to the same shape.


class _Private(torch.autograd.Function):
    """A client's own Function over private functions, or over the operators of their names."""

    @staticmethod
    def forward(ctx: Any, functions: Any, lengths: tuple[Any, ...], *inputs: Tensor) -> Tensor:
        forward, ctx.backward = functions
        out, lse, _, rng_state = forward(*inputs, *lengths, P, 0.3, False, -1, -1, 0.0, None, False)
        ctx.lengths = lengths[2:]
        ctx.save_for_backward(*inputs, out, lse, rng_state, *lengths[:2])
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, lse, rng_state, starts_q, starts_k = (*ctx.saved_tensors, None, None)[:8]
        lengths = () if starts_q is None else (starts_q, starts_k, *ctx.lengths)
        found = [torch.empty_like(x) for x in inputs]
        rules = P, 0.3, False, -1, -1, 0.0, None, False, rng_state
        ctx.backward(dout, *inputs, out, lse, *found, *lengths, *rules)
        return None, None, *found


def _by(namespace: Any, kind: str = "") -> tuple[Any, Any]:
    return getattr(namespace, f"_flash_attn_{kind}forward"), getattr(namespace, f"_flash_attn_{kind}backward")


def _three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x * 0, x * 0, x * 1


def _mha() -> MHA:
    module = MHA(SIZE, 1, dropout=P, use_flash_attn=True, qkv_proj_bias=False, out_proj_bias=False)
    with torch.no_grad():
        module.Wqkv.weight.zero_()[2 * SIZE :] = torch.eye(SIZE)
        module.out_proj.weight.copy_(torch.eye(SIZE))
    return module


def layers(device: str = "cpu") -> dict[str, Layer]:
    starts = torch.tensor([0, SIZE], dtype=torch.int32, device=device)
    lengths = starts, starts, SIZE, SIZE
    itself, cross, mha = FlashSelfAttention(attention_dropout=P), FlashCrossAttention(attention_dropout=P), _mha()
    # A CUDA graph's replay overwrites the gradients of an earlier one, to which those of parameters would be added.
    mha.requires_grad_(False).to(device, torch.float16 if device == "cuda" else torch.float32)
    return {
        "dense": lambda x: flash_attn_func(*_three(x), P),
        "the same once more": lambda x: flash_attn_func(*_three(x), P),
        "kv in one": lambda x: flash_attn_kvpacked_func(x * 0, torch.stack(_three(x)[1:], 2), P),
        "qkv in one": lambda x: flash_attn_qkvpacked_func(torch.stack(_three(x), 2), P),
        "packed": lambda x: flash_attn_varlen_func(*_three(x[0]), *lengths, P)[None],
        "packed, kv": lambda x: flash_attn_varlen_kvpacked_func(
            x[0] * 0, torch.stack(_three(x[0])[1:], 1), *lengths, P
        )[None],
        "packed, qkv": lambda x: flash_attn_varlen_qkvpacked_func(torch.stack(_three(x[0]), 1), starts, SIZE, P)[None],
        "private": lambda x: _Private.apply(_by(private_interface), (), *_three(x)),
        "private, packed": lambda x: _Private.apply(_by(private_interface, "varlen_"), lengths, *_three(x[0]))[None],
        "FlashSelfAttention": lambda x: itself(torch.stack(_three(x), 2)),
        "FlashCrossAttention": lambda x: cross(x * 0, torch.stack(_three(x)[1:], 2)),
        "MHA": lambda x: mha(x[:, :, 0])[:, :, None],
    }


NAMES = list(layers())


def _save_attention(_: object, operator: Any, *arguments: object, **named: object) -> Any:
    policy = checkpoints.CheckpointPolicy
    return policy.MUST_SAVE if "flash_attn" in str(operator) else policy.PREFER_RECOMPUTE


def _recompute_all(*_: object, **named: object) -> Any:
    return checkpoints.CheckpointPolicy.PREFER_RECOMPUTE


def _selective(policy: Any) -> Any:
    """By a partial, the one form that torch.compile takes; it warns of in-place operators."""
    return functools.partial(checkpoints.create_selective_checkpoint_contexts, policy)


def _with_a_break(layer: Layer, x: Tensor) -> Any:
    torch._dynamo.graph_break()
    return layer(x)


CHECKPOINTS: dict[str, Callable[[Layer, Tensor], Any]] = {
    "none": lambda layer, x: layer(x),
    "plain": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "saves attention": lambda layer, x: checkpoint(
        layer, x, use_reentrant=False, context_fn=_selective(_save_attention)
    ),
    "saves nothing": lambda layer, x: checkpoint(layer, x, use_reentrant=False, context_fn=_selective(_recompute_all)),
    "saves attention and no generator": lambda layer, x: checkpoint(
        layer, x, use_reentrant=False, preserve_rng_state=False, context_fn=_selective(_save_attention)
    ),
    "around a break": lambda layer, x: checkpoint(_with_a_break, layer, x, use_reentrant=False),
}


def check(function: Callable[..., Any], names: list[str], device: str = "cpu", dtype: Any = torch.float32) -> None:
    """function: of an identity for each name to their layers' outputs. Runs twice: a later run has other masks."""
    inputs = [torch.eye(SIZE, device=device, dtype=dtype)[None, :, None].requires_grad_() for _ in names]
    seen: list[Tensor] = []
    for _ in range(2):
        outs = function(*inputs)
        douts = [torch.randn_like(out) for out in outs]
        for x in inputs:
            x.grad = None
        torch.autograd.backward(outs, douts)
        seen += [out.detach().clone() for out in outs]
        for name, x, out, dout in zip(names, inputs, outs, douts, strict=True):
            assert x.grad is not None
            expected = out.detach()[0, :, 0].T @ dout[0, :, 0]
            torch.testing.assert_close(x.grad[0, :, 0], expected, msg=lambda text, name=name: f"{name}: {text}")
    kept = torch.stack(seen).flatten(1) > 0
    assert 0.3 < kept.double().mean() < 0.7
    assert len(kept.unique(dim=0)) == len(seen), "calls share a mask"


# Compiling takes a second for each layer: modules, which call these functions, are compiled in thorough runs.
ONE, FEW = NAMES[:1], NAMES[:2]
FIRST, SECOND = ["dense", "private"], ["qkv in one", "packed"]
THIRD = ["private, packed"]  # other packed inputs are taken apart before the operator
COMPILED: list[Any] = [  # the checkpoint, the backend, whether the checkpoint is within the graph, and the layers
    ("none", "eager", True, ONE),  # whose checkpoints recompute all dropout with other masks, PyTorch's own too
    pytest.param("none", "aot_eager", True, FEW, marks=pytest.mark.thorough),
    ("plain", "aot_eager", True, FIRST),
    ("reentrant", "aot_eager", True, SECOND),
    ("saves nothing", "aot_eager", True, THIRD),
    ("saves attention and no generator", "aot_eager", True, ONE),
    ("around a break", "aot_eager", True, ONE),
    ("saves attention", "aot_eager", False, ONE),
    pytest.param("reentrant", "aot_eager", False, ONE, marks=pytest.mark.thorough),
    *[
        pytest.param(kind, backend, True, names, marks=pytest.mark.thorough)
        for kind in ("plain", "reentrant", "saves attention", "saves nothing")
        for backend, names in (("inductor", FEW), ("aot_eager", NAMES))
    ],
]


@pytest.mark.parametrize(("kind", "backend", "is_within", "names"), COMPILED)
def test_compiled_dropout_under_a_checkpoint_has_the_gradients_of_its_mask(
    kind: str, backend: str, is_within: bool, names: list[str]
) -> None:
    check(of_layers(names, kind, backend, is_within), names)


def of_layers(
    names: list[str], kind: str, backend: str | None, is_within: bool, device: str = "cpu", **options: Any
) -> Any:
    """Layers as one function, each of its own input and in its own checkpoint; compiled with a backend."""
    if "saves" in kind and not hasattr(checkpoints, "create_selective_checkpoint_contexts"):
        pytest.skip("PyTorch has checkpointing policies from 2.5 on")
    around, functions = CHECKPOINTS[kind], [layers(device)[name] for name in names]

    def compiled(function: Callable[..., Any]) -> Any:
        if backend is None:
            return function
        return torch.compile(function, backend=backend, fullgraph="break" not in kind, **options)

    def run(*inputs: Tensor) -> list[Any]:
        return [around(layer, x) for layer, x in zip(functions, inputs)]

    if is_within:
        return compiled(run)
    functions = [compiled(function) for function in functions]
    return run


@pytest.mark.parametrize("kind", ["plain", "reentrant", "saves attention", "saves attention and no generator"])
def test_eager_dropout_under_a_checkpoint_has_the_gradients_of_its_mask(kind: str) -> None:
    check(of_layers(NAMES, kind, None, False), NAMES)


@pytest.mark.skipif(not operators.TAKES_TAGS, reason="an operator of this PyTorch cannot be said to be random")
def test_compiled_operators_of_flash_attns_name_are_recomputed_with_their_mask() -> None:
    with patched():
        import flash_attn  # noqa: F401

        named = torch.ops.flash_attn
        function = torch.compile(
            lambda x: [checkpoint(lambda x: _Private.apply(_by(named), (), *_three(x)), x, use_reentrant=False)],
            backend="aot_eager", fullgraph=True,
        )  # fmt: skip
        check(function, ["named"])


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = (flash_attn_func(*_three(x), P) for _ in range(2))
    return first, second  # type: ignore[return-value]


def _reloaded(library: Any, made: Any) -> Any:
    buffer = io.BytesIO()
    library.save(made, buffer)
    buffer.seek(0)
    return library.load(buffer)


def _by_make_fx(x: Tensor) -> Any:
    with patched():
        import flash_attn  # noqa: F401

        return torch.compile(make_fx(two)(x), backend="aot_eager")


def _by_export(x: Tensor) -> Any:
    module = torch.nn.Module()
    module.forward = two  # type: ignore[method-assign]
    return _reloaded(torch.export, torch.export.export(module, (x,)).run_decompositions()).module()


GRAPHS: dict[str, Callable[[Tensor], Any]] = {
    "compile": lambda x: torch.compile(two, backend="aot_eager", fullgraph=True),
    "make_fx": _by_make_fx,
    "trace": lambda x: _reloaded(torch.jit, torch.jit.trace(two, (x,), check_trace=False)),
    "export": _by_export,
}


@pytest.mark.parametrize("by", GRAPHS)
def test_a_recorded_graph_draws_a_mask_for_each_call_and_run(by: str) -> None:
    x = torch.eye(SIZE)[None, :, None].requires_grad_()  # compilers merge equal operators of graphs with gradients
    graph = GRAPHS[by](x)
    masks = torch.stack([mask.detach() for _ in range(3) for mask in graph(x)])  # a trace is optimised at its 2nd run
    assert len(masks.unique(dim=0)) == 6


def test_a_graph_saved_without_the_state_draws_it_inside() -> None:
    inputs = [x.requires_grad_() for x in qkv()]
    given = *ops._flatten(DenseInputs(*inputs), Options(dropout_p=P)), True, False, True
    torch.manual_seed(0)
    expected = flash_attn_func(*inputs, P)
    torch.manual_seed(0)
    out, _, _, rng_state = torch.ops.flash_attn_compat.attention(*given)
    torch.testing.assert_close(out, expected)
    again = torch.ops.flash_attn_compat.attention(*given, rng_state)[0]
    assert torch.equal(out, again)
    for one, other in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(again.sum(), inputs)):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "backend", "options"),
    [
        *(("none", None, {}), ("reentrant", None, {}), ("none", "cudagraphs", {})),
        *(("plain", backend, {}) for backend in ("aot_eager", "inductor")),
        *((kind, "inductor", {"mode": "reduce-overhead"}) for kind in ("none", "plain", "saves attention")),
    ],
)
def test_dropout_in_graphs_of_a_gpu_has_the_gradients_of_its_mask_and_a_new_one_each_run(
    kind: str, backend: str | None, options: dict[str, Any]
) -> None:
    function = of_layers(NAMES, kind, backend, True, "cuda", **options)
    for _ in range(3):  # a CUDA graph is recorded at the second run, and replayed from the third on
        check(function, NAMES, "cuda", torch.float16)
