"""Tensor-parallel layers and collectives over two gloo processes, and activations: values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn_compat.modules.embedding import GPT2Embeddings, ParallelGPT2Embeddings, VocabParallelEmbedding
from flash_attn_compat.modules.mha import MHA, ParallelMHA
from flash_attn_compat.modules.mlp import GatedMlp, Mlp, ParallelFusedMLP, ParallelGatedMlp, ParallelMLP
from flash_attn_compat.ops import activations as A
from flash_attn_compat.ops.fused_dense import (
    ColumnParallelLinear,
    FusedDense,
    FusedDenseFunc,
    FusedMLP,
    RowParallelLinear,
)
from flash_attn_compat.ops.triton import k_activations as K
from flash_attn_compat.ops.triton.linear import triton_dgrad_act, triton_linear_act
from flash_attn_compat.ops.triton.mlp import FusedDenseSqreluDense
from flash_attn_compat.utils import distributed
from flash_attn_compat.utils.generation import InferenceParams
from tests.forms import plain
from tests.forms.inputs import randn
from tests.forms.plain import assert_as_good_as_plain, check_function, pairwise, results, rounded_once, upstream
from tests.forms.support import in_group

WORLD = 2
BATCH, SEQLEN, D = 2, 4, 24
Part = Callable[[Tensor], Tensor]


def shared(length: int, units: int = 1) -> slice:
    """Return this rank's share of `length` features in units; the first rank has the remainder."""
    first = -(-(length // units) // WORLD) * units
    return (slice(0, first), slice(first, length))[dist.get_rank()]


def whole(t: Tensor) -> Tensor:
    return t


def chunk(t: Tensor) -> Tensor:
    """This rank's part of the first axis."""
    return t.chunk(WORLD)[dist.get_rank()]


class Case(NamedTuple):
    """A layer of this rank beside the undivided one, and this rank's shares."""

    layer: nn.Module
    undivided: nn.Module
    mine: Callable[[str, Tensor], Tensor]  # of a parameter
    x: Tensor
    given: Part  # of x
    kept: Part  # of the output
    call: Callable[..., Tensor] | None = None  # instead of the layer


def check(case: Case, dtype: torch.dtype) -> None:
    """Output and gradients of this rank are its parts of the undivided layer's."""
    names = [name for name, _ in case.undivided.named_parameters()]
    shapes = [parameter.shape for parameter in case.undivided.parameters()]
    values = [randn(*shape, seed=seed) / shape[-1] ** 0.5 for seed, shape in enumerate(shapes)]
    inputs = [value.to(dtype) for value in values], case.x.to(dtype) if case.x.is_floating_point() else case.x

    def plain(values: list[Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(case.undivided, dict(zip(names, values)), (x,))  # type: ignore[no-any-return]

    rounded, exact = results(plain, inputs), results(plain, inputs, torch.float64)
    layer = case.layer.to(dtype)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(case.mine(name, values[names.index(name)]))
    local = case.given(inputs[1]).clone()
    local.requires_grad_(local.is_floating_point())
    out = (case.call or layer)(local)
    (out.double() * case.kept(upstream(exact[0].shape)[0])).sum().backward()  # type: ignore[union-attr]
    found = [(0, out.detach(), case.kept)]
    found += [(1 + names.index(name), p.grad, partial(case.mine, name)) for name, p in layer.named_parameters()]
    found += [(-1, local.grad, case.given)] if local.requires_grad else []
    for index, value, part in found:
        assert_as_good_as_plain(value, part(rounded[index]), part(exact[index]))  # type: ignore[arg-type]


def linears(parts: Part) -> Iterator[Case]:
    assert shared(9, 3).stop == (6, 9)[dist.get_rank()]  # uneven on purpose
    part, options = shared(9, 3), {"sequence_parallel": parts is chunk, "multiple_of": 3}
    column = ColumnParallelLinear(D, 9, dist.group.WORLD, **options)
    x = randn(2 * BATCH, SEQLEN, D)
    yield Case(column, nn.Linear(D, 9), lambda _, t: t[part], x, parts, lambda t: t[..., part])

    row = RowParallelLinear(9, D, dist.group.WORLD, **options)
    assert (row.bias is not None) == (dist.get_rank() == 0)
    share = lambda name, t: t[:, part] if name == "weight" else t  # noqa: E731
    yield Case(row, nn.Linear(9, D), share, randn(BATCH, SEQLEN, 9), lambda t: t[..., part], parts)


def dense_layers_called_with_a_group() -> Iterator[Case]:
    part, x = shared(8), randn(BATCH, SEQLEN, D)
    dense, mlp = FusedDense(D, 4, return_residual=True), FusedMLP(D, 4, bias2=False, activation="sqrelu")

    def call(x: Tensor) -> Tensor:
        out, residual = dense(x, process_group=dist.group.WORLD)
        assert residual is x
        return out  # type: ignore[no-any-return]

    yield Case(dense, nn.Linear(D, 8), lambda _, t: t[part], x, chunk, lambda t: t[..., part], call)
    for parts in (chunk, whole):
        layer = nn.Linear(D, 4)
        options = False, dist.group.WORLD, parts is chunk
        apply = lambda x, layer=layer, options=options: FusedDenseFunc.apply(x, layer.weight, layer.bias, *options)  # noqa: E731
        yield Case(layer, nn.Linear(D, 8), lambda _, t: t[part], x, parts, lambda t: t[..., part], apply)
    undivided = FusedMLP(D, 8, bias2=False, activation="sqrelu")
    yield Case(mlp, undivided, hidden_share(part), x, chunk, chunk, partial(mlp, process_group=dist.group.WORLD))


def hidden_share(part: slice, gates: int = 1) -> Callable[[str, Tensor], Tensor]:
    """fc1's rows (of each of its halves, where one holds gates) and fc2's columns."""

    def share(name: str, t: Tensor) -> Tensor:
        if name.startswith("fc1"):
            return torch.cat([half[part] for half in t.chunk(gates)])
        return t if name == "fc2.bias" else t[:, part]

    return share


def mlps(parts: Part) -> Iterator[Case]:
    group, options = dist.group.WORLD, {"sequence_parallel": parts is chunk}
    pairs: list[tuple[nn.Module, nn.Module, int]] = [(ParallelMLP(D, 9, process_group=group, **options), Mlp(D, 9), 1)]
    for more in ({"activation": "gelu_approx", "checkpoint_lvl": 0}, {"activation": "sqrelu", "checkpoint_lvl": 2}):
        pairs.append((ParallelFusedMLP(D, 9, process_group=group, **more, **options), FusedMLP(D, 9, **more), 1))
    for activation in (F.sigmoid, F.silu, F.gelu):
        gate: dict[str, Any] = {"activation": activation, "multiple_of": 3}
        pairs.append((ParallelGatedMlp(D, group, 9, **gate, **options), GatedMlp(D, 9, **gate), 2))
    for layer, undivided, gates in pairs:
        yield Case(layer, undivided, hidden_share(shared(9), gates), randn(BATCH, SEQLEN, D), parts, parts)


class OfTokens(MHA):
    """Of (batch, seqlen, embed_dim), or of (batch * seqlen, embed_dim)."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.view(-1, SEQLEN, D)).view_as(x)


def attention_case(heads: int, heads_kv: int, parts: Part, by_tokens: bool = False, **options: Any) -> Case:
    """Causal self-attention; a rank holds whole key/value heads with their query heads.

    by_tokens: one axis for batch and sequence, which sequence parallelism cuts anywhere.
    """
    d, group = D // heads, heads // heads_kv
    kv = shared(heads_kv)
    sizes = (heads * d, heads_kv * d, heads_kv * d)  # of q, k and v in Wqkv
    rows, rows_kv = slice(kv.start * group * d, kv.stop * group * d), slice(kv.start * d, kv.stop * d)

    def share(name: str, t: Tensor) -> Tensor:
        if name.startswith("Wqkv"):
            return torch.cat([t[part] for t, part in zip(t.split(sizes), (rows, rows_kv, rows_kv))])
        return t if name == "out_proj.bias" else t[:, rows]

    options |= {"num_heads_kv": heads_kv, "causal": True}
    layer = ParallelMHA(D, heads, dist.group.WORLD, sequence_parallel=parts is chunk, **options)
    x, call = (randn(SEQLEN, D), partial(layer, seqlen=SEQLEN)) if by_tokens else (randn(BATCH, SEQLEN, D), None)
    return Case(layer, OfTokens(D, heads, **options), share, x, parts, parts, call)


def attentions(parts: Part) -> Iterator[Case]:
    yield attention_case(3, 3, parts)  # uneven on purpose: two heads and one
    yield attention_case(6, 3, parts)
    yield attention_case(6, 3, parts, use_flash_attn=True, use_alibi=True, window_size=(2, 0))
    yield attention_case(4, 4, parts, use_flash_attn=True, use_alibi=True, checkpointing=True)


def embeddings(parts: Part) -> Iterator[Case]:
    sizes, ids = (D, 10, 6), torch.tensor([[1, 4, 4, 0], [9, 2, 5, 7]])
    layer = ParallelGPT2Embeddings(*sizes, dist.group.WORLD, sequence_parallel=parts is chunk)
    rows, columns, kept = shared(10), shared(D), ids.clone()
    share = lambda name, t: t[rows] if name.startswith("word") else t[:, columns]  # noqa: E731
    yield Case(layer, GPT2Embeddings(*sizes), share, ids, whole, parts)
    assert torch.equal(ids, kept)
    torch.testing.assert_close(layer(ids, combine_batch_seqlen_dim=True), layer(ids).flatten(0, 1))


def check_decoding() -> None:
    """Steps through a rank's cache match the full forward."""
    for options in ({"rotary_emb_dim": 16}, {"rotary_emb_dim": 8, "num_heads_kv": 2}, {"use_alibi": True}):
        torch.manual_seed(0)
        module = ParallelMHA(
            64, 4, dist.group.WORLD, causal=True, layer_idx=0, use_flash_attn=True, sequence_parallel=False, **options
        )
        x = randn(BATCH, SEQLEN, 64)
        cache = module.allocate_inference_cache(BATCH, SEQLEN)
        assert cache.shape == (BATCH, SEQLEN, 2, options.get("num_heads_kv", 4) // WORLD, 16)
        state = InferenceParams(max_seqlen=SEQLEN, max_batch_size=BATCH, key_value_memory_dict={0: cache})
        steps = []
        for start, stop in ((0, 2), (2, 3), (3, 4)):
            steps.append(module(x[:, start:stop], inference_params=state))
            state.seqlen_offset = stop
        torch.testing.assert_close(torch.cat(steps, dim=1), module(x), rtol=1e-4, atol=1e-5)


def check_collectives() -> None:
    """Check collectives without gradients, of strided tensors and with a handle; the layers above check gradients."""
    group, rank = dist.group.WORLD, dist.get_rank()
    both = [torch.arange(8.0).reshape(4, 2) + 100 * other for other in range(WORLD)]
    mine = both[rank].t().contiguous().t()
    for raw, expected in (
        (distributed.all_gather_raw, torch.cat(both)),
        (distributed.reduce_scatter_raw, chunk(both[0] + both[1])),
        (distributed.all_reduce_raw, both[0] + both[1]),
    ):
        out, handle = raw(mine.clone(), group)
        assert handle is None and torch.equal(out, expected)
        out, handle = raw(mine.clone(), group, async_op=True)
        handle.wait()
        assert torch.equal(out, expected)
    x = both[rank].clone().requires_grad_()
    for collective in (distributed.all_gather, distributed.reduce_scatter):  # their gradients can be differentiated too
        (first,) = torch.autograd.grad((collective(x, group) ** 2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert first.requires_grad and (second == 4).all()
    (distributed.all_reduce(x, group) * 3).sum().backward()
    assert torch.equal(x.detach(), both[rank]) and (x.grad == 3).all()


def check_marked_parameters() -> None:
    """Shared values come from rank 0, sequence-parallel gradients are summed, and a bias is on rank 0 alone."""
    group, rank = dist.group.WORLD, dist.get_rank()
    model = nn.ModuleDict({"shared": nn.Linear(2, 2, bias=rank == 0), "own": nn.Linear(2, 2)})
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 10.0 * rank + index)
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    model["shared"].weight._shared_params = True
    model["own"].weight._sequence_parallel = True
    kept = model["own"].weight.detach().clone()
    distributed.sync_shared_params(model, group)
    distributed.allreduce_sequence_parallel_grad(model, group)
    assert (model["shared"].weight == 0.0).all() and torch.equal(model["own"].weight, kept)
    assert (model["own"].weight.grad == 3.0).all() and (model["own"].bias.grad == rank + 1.0).all()


def check_refusals() -> None:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=r"num_embeddings \(7\) must be divisible by world_size \(2\)"):
        VocabParallelEmbedding(7, D, process_group=group)
    with pytest.raises(RuntimeError, match="does not support padding_idx"):
        VocabParallelEmbedding(8, D, process_group=group, padding_idx=0)
    with pytest.raises(ValueError, match=r"embedding_dim \(5\) must be divisible by world_size \(2\)"):
        ParallelGPT2Embeddings(5, 8, 4, group)
    for linear in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(ValueError, match=r"(in|out)_features \(7\) must be a multiple of 2"):
            linear(7, 7, group, multiple_of=2)


def _worker(rank: int) -> None:
    for dtype, parts in ((torch.float32, chunk), (torch.bfloat16, whole)):
        for cases in (linears, mlps, attentions, embeddings):
            for case in cases(parts):
                check(case, dtype)
    for dtype in (torch.float32, torch.bfloat16):
        for case in (*dense_layers_called_with_a_group(), attention_case(4, 4, chunk, True, use_flash_attn=True)):
            check(case, dtype)
    check_decoding()
    check_collectives()
    check_marked_parameters()
    check_refusals()


def test_tensor_parallel_layers_are_the_undivided_ones() -> None:
    in_group(_worker)


def test_local_dimensions_add_up_and_stay_multiples() -> None:
    assert [distributed.get_dim_for_local_rank(10, 4, rank) for rank in range(4)] == [3, 3, 2, 2]
    assert [distributed.get_dim_for_local_rank(96, 4, rank, multiple_of=16) for rank in range(4)] == [32, 32, 16, 16]


# ------------------------- activations and their hand-written gradients, and functions with the names of Triton kernels

PLAIN: dict[str, Any] = {
    "id": lambda x: x,
    "gelu": F.gelu,
    "gelu_approx": plain.gelu_approx,
    "squared_relu": plain.squared_relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "relu": F.relu,
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def derivative(name: str, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(PLAIN[name](leaf).sum(), leaf)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(K.Activation))
def test_activations_and_derivatives_are_pytorchs(activation: K.Activation, dtype: torch.dtype) -> None:
    x, name = 3 * randn(200, dtype=dtype), activation.value
    act, slope = K.get_triton_activation_kernel(activation), K.get_triton_activation_bwd_kernel(activation)
    assert act is not None and slope is not None
    assert_as_good_as_plain(act(x), PLAIN[name](x), PLAIN[name](x.double()))
    assert_as_good_as_plain(slope(x), derivative(name, x), derivative(name, x.double()))


def test_gelu_keeps_its_tail() -> None:
    """1 + erf cancels there."""
    x = torch.tensor([-6.0, -9.0])
    exact = torch.tensor([value * math.erfc(-value / 2**0.5) / 2 for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(K.gelu(x).double(), exact, rtol=1e-5, atol=0)


def test_names_lead_to_functions_and_nothing_to_none() -> None:
    assert K.get_triton_activation_kernel(None) is None and K.get_triton_activation_bwd_kernel(None) is None
    assert K.get_triton_activation_kernel("gelu") is K.gelu  # type: ignore[arg-type]
    x, zero = randn(50), torch.zeros(1)
    torch.testing.assert_close(K.tanh(x), torch.tanh(x))
    torch.testing.assert_close(K.cosh(x), torch.cosh(x))
    assert K.relu_grad(zero) == 1 and K.leaky_relu_grad(zero) == 1


@pytest.mark.parametrize(
    ("activation", "bias", "dtype"), pairwise(("id", "gelu", "gelu_approx", "squared_relu"), (False, True), DTYPES)
)
def test_linear_with_an_activation_and_the_gradient_through_it(activation: str, bias: bool, dtype: torch.dtype) -> None:
    x, weight, b = randn(2, 5, 8, dtype=dtype), randn(6, 8, seed=1, dtype=dtype), randn(6, dtype=dtype)
    act, given = PLAIN[activation], b if bias else None
    rounded, exact = (F.linear(x.to(d), weight.to(d), b.to(d) * bias) for d in (dtype, torch.float64))
    out, act_input = triton_linear_act(x, weight, given, activation, save_act_input=True)
    assert_as_good_as_plain(act_input, rounded, exact)
    assert_as_good_as_plain(out, act(rounded), act(exact))
    outside = triton_linear_act(x, weight.requires_grad_(), given, activation)
    assert torch.equal(outside, out) and not outside.requires_grad  # type: ignore[arg-type, union-attr]

    weight, grad, hidden = weight.detach(), randn(2, 5, 6, seed=3, dtype=dtype), 2 * randn(2, 5, 8, seed=4, dtype=dtype)
    expected = [(grad.to(d) @ weight.to(d)) * derivative(activation, hidden.to(d)) for d in (dtype, torch.float64)]
    assert_as_good_as_plain(triton_dgrad_act(grad, weight, activation, hidden), *expected)


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32])
def test_mixed_dtypes_follow_autocast_as_linear_layers_do(weight_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = FusedDenseSqreluDense(8, 12, 5, dtype=weight_dtype)
    x = randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module.fc2(F.relu(module.fc1(x)).square())
        assert torch.equal(module(x), expected) and expected.dtype == torch.bfloat16


# ops.activations

# name: (function, the same by torch, what it takes)
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
    "swiglu": (A.swiglu, lambda x, y: F.silu(x) * y, [2 * randn(4, 3, 8), 2 * randn(4, 3, 8, seed=1)]),
    "bias_gelu_impl": (A.bias_gelu_impl, lambda x, b: plain.gelu_approx(x + b), [2 * randn(4, 3, 8), 2 * randn(8)]),
    "fast_gelu_impl": (A.fast_gelu_impl, plain.gelu_approx, [2 * randn(4, 3, 8)]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_torchs(name: str, dtype: torch.dtype) -> None:
    function, of_torch, given = FUNCTIONS[name]
    check_function(function, rounded_once(of_torch), *(value.to(dtype) for value in given), rounds_once=True)


def test_half_precision_does_not_overflow_inside() -> None:
    x = torch.tensor([200.0, -200.0, 1000.0], dtype=torch.float16)
    assert torch.equal(A.gelu_fwd(x), torch.tensor([200.0, 0.0, 1000.0], dtype=torch.float16))
    assert torch.equal(A.gelu_bwd(torch.ones_like(x), x), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float16))


def test_relus_and_their_gradients() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.bfloat16)
    g = torch.tensor([1.0, 1.0, 0.5])
    out, grad = A.sqrelu_fwd(x), A.sqrelu_bwd(g, x)
    assert out.dtype == grad.dtype == torch.bfloat16
    assert out.tolist() == [0, 0, 9] and grad.tolist() == [0, 0, 3]
    grad = A.relu_bwd(torch.full((3,), 2.0), x)  # which passes at 0
    assert grad.dtype == torch.bfloat16 and grad.tolist() == [0, 2, 2]
