"""Dropout where a graph or a checkpoint computes it: gradients are of the output's mask, and no two calls share one.

A layer turns x, the identity, into dropped uniform probabilities: queries and keys are zeros, values are x. So the
output is the mask, and the gradient of x is the output's transpose times dout.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

from flash_attn_compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    private_interface,
)
from flash_attn_compat.core.inputs import DenseInputs, Options
from flash_attn_compat.dispatch import ops
from flash_attn_compat.dropin import operators, patched
from flash_attn_compat.modules.mha import MHA, FlashCrossAttention, FlashSelfAttention
from tests.forms.inputs import qkv

P, SIZE = 0.5, 16
Layer = Callable[[Tensor], Any]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


# ---------------------------------------------------------------- layers: x (1, SIZE, 1, SIZE) to the same shape


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


# ---------------------------------------------------------------- checkpoints around a layer


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
    ("reentrant", "aot_eager", False, ONE),
    ("saves attention", "aot_eager", False, ONE),
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


# ---------------------------------------------------------------- graphs that others make


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = (flash_attn_func(*_three(x), P) for _ in range(2))
    return first, second  # type: ignore[return-value]


def _by_compile(x: Tensor) -> Any:
    return torch.compile(two, backend="aot_eager", fullgraph=True)


def _by_make_fx(x: Tensor) -> Any:
    with patched():
        import flash_attn  # noqa: F401

        return torch.compile(make_fx(two)(x), backend="aot_eager")


def _by_trace(x: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(two, (x,), check_trace=False), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def _by_export(x: Tensor) -> Any:
    module = torch.nn.Module()
    module.forward = two  # type: ignore[method-assign]
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(module, (x,)).run_decompositions(), buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


@pytest.mark.parametrize("recorded", [_by_compile, _by_make_fx, _by_trace, _by_export])
def test_a_recorded_graph_draws_a_mask_for_each_call_and_run(recorded: Callable[[Tensor], Any]) -> None:
    x = torch.eye(SIZE)[None, :, None].requires_grad_()  # compilers merge equal operators of graphs with gradients
    graph = recorded(x)
    masks = torch.stack(
        [mask.detach() for _ in range(3) for mask in graph(x)]
    )  # a trace is optimised at its second run
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


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "backend", "options"),
    [
        ("none", None, {}),
        ("reentrant", None, {}),
        ("plain", "aot_eager", {}),
        ("plain", "inductor", {}),
        ("none", "cudagraphs", {}),
        ("none", "inductor", {"mode": "reduce-overhead"}),
        ("plain", "inductor", {"mode": "reduce-overhead"}),
        ("saves attention", "inductor", {"mode": "reduce-overhead"}),
    ],
)
def test_dropout_in_graphs_of_a_gpu_has_the_gradients_of_its_mask_and_a_new_one_each_run(
    kind: str, backend: str | None, options: dict[str, Any]
) -> None:
    function = of_layers(NAMES, kind, backend, True, "cuda", **options)
    for _ in range(3):  # a CUDA graph is recorded at the second run, and replayed from the third on
        check(function, NAMES, "cuda", torch.float16)
