"""Tensor-parallel layers and the collectives below them, over two gloo processes: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn_compat.modules.embedding import ParallelGPT2Embeddings, VocabParallelEmbedding
from flash_attn_compat.modules.mha import ParallelMHA, get_alibi_slopes
from flash_attn_compat.modules.mlp import ParallelFusedMLP, ParallelGatedMlp, ParallelMLP
from flash_attn_compat.ops.fused_dense import ColumnParallelLinear, FusedDense, FusedMLP, RowParallelLinear
from flash_attn_compat.utils.distributed import (
    all_gather,
    all_gather_raw,
    all_reduce,
    all_reduce_raw,
    allreduce_sequence_parallel_grad,
    get_dim_for_local_rank,
    reduce_scatter,
    reduce_scatter_raw,
    sync_shared_params,
)
from flash_attn_compat.utils.generation import InferenceParams
from tests.interpreters import forked_group
from tests.plain import Parameters, assert_as_good_as_plain, attention, two_layers
from tests.support import end_worker, randn

WORLD = 2
BATCH, SEQLEN, D = 2, 4, 24
Part = Callable[[Tensor], Tensor]


def shared(length: int, units: int = 1) -> slice:
    """What this rank holds of `length` features in units: the first rank takes what is left over."""
    first = -(-(length // units) // WORLD) * units
    return (slice(0, first), slice(first, length))[dist.get_rank()]


def chunk(sequence_parallel: bool) -> Part:
    """This rank's part of the first axis."""
    return (lambda t: t.chunk(WORLD)[dist.get_rank()]) if sequence_parallel else (lambda t: t)


def parameters(**shapes: tuple[int, ...]) -> Parameters:
    return {
        name.replace("__", "."): randn(*shape, seed=seed) / shape[-1] ** 0.5
        for seed, (name, shape) in enumerate(shapes.items())
    }


def check_parallel(
    module: Callable[..., Any],
    dtype: torch.dtype,
    whole: Parameters,
    mine: Callable[[str, Tensor], Tensor],
    compute: Callable[[Parameters, Tensor], Tensor],
    x: Tensor,
    given: Part,
    kept: Part,
    call: Part | None = None,
) -> None:
    """This rank's module, given its share of the parameters and of x, against compute(whole parameters, whole x).

    mine(name, parameter), given(x) and kept(output): what of the whole belongs to this rank. call: instead of module.
    """
    assert isinstance(module, nn.Module)
    module.to(dtype)
    for name, parameter in module.named_parameters():
        parameter.data.copy_(mine(name, whole[name]))

    def run(wide: torch.dtype) -> tuple[Tensor, Tensor | None, Parameters]:
        leaves = {name: value.to(dtype).to(wide).clone().requires_grad_() for name, value in whole.items()}
        leaf = x.to(dtype).to(wide).clone().requires_grad_() if x.is_floating_point() else x
        out = compute(leaves, leaf)
        wanted = [*leaves.values(), *([leaf] if leaf.requires_grad else [])]
        grads = torch.autograd.grad((out * upstream(out.shape).to(wide)).sum(), wanted)
        return out.detach(), grads[-1] if leaf.requires_grad else None, dict(zip(leaves, grads))

    exact, rounded = run(torch.float64), run(dtype)
    local = given(x).clone()
    if x.is_floating_point():
        local = local.to(dtype).requires_grad_()
    out = (call or module)(local)
    (out * kept(upstream(exact[0].shape)).to(dtype)).sum().backward()
    assert_as_good_as_plain(out.detach(), kept(rounded[0]), kept(exact[0]))
    if exact[1] is not None and rounded[1] is not None:
        assert_as_good_as_plain(local.grad, given(rounded[1]), given(exact[1]))
    for name, parameter in module.named_parameters():
        assert_as_good_as_plain(parameter.grad, mine(name, rounded[2][name]), mine(name, exact[2][name]))


def upstream(shape: torch.Size) -> Tensor:
    return randn(*shape, seed=5).mul(8).round().div(8)


def linear(p: Parameters, x: Tensor) -> Tensor:
    return F.linear(x, p["weight"], p["bias"])


def check_linear(dtype: torch.dtype, sequence_parallel: bool) -> None:
    group, part = dist.group.WORLD, shared(9, 3)
    assert [shared(9, 3).stop] == [(6, 9)[dist.get_rank()]]  # uneven on purpose
    column = ColumnParallelLinear(D, 9, group, sequence_parallel=sequence_parallel, multiple_of=3)
    whole = parameters(weight=(9, D), bias=(9,))
    x = randn(2 * BATCH, SEQLEN, D)
    check_parallel(
        column, dtype, whole, lambda _, t: t[part], linear, x, chunk(sequence_parallel), lambda t: t[..., part]
    )

    row = RowParallelLinear(9, D, group, sequence_parallel=sequence_parallel, multiple_of=3)
    assert (row.bias is not None) == (dist.get_rank() == 0)
    whole, x = parameters(weight=(D, 9), bias=(D,)), randn(BATCH, SEQLEN, 9)
    share = lambda name, t: t[:, part] if name == "weight" else t  # noqa: E731
    check_parallel(row, dtype, whole, share, linear, x, lambda t: t[..., part], chunk(sequence_parallel))


def check_dense_with_a_group(dtype: torch.dtype) -> None:
    """FusedDense and FusedMLP take the group in forward."""
    group, part = dist.group.WORLD, shared(8)
    whole = parameters(weight=(8, D), bias=(8,))
    x = randn(BATCH, SEQLEN, D)
    dense = FusedDense(D, 4, return_residual=True)

    def call(x: Tensor) -> Tensor:
        out, residual = dense(x, process_group=group)
        assert residual is x
        return out  # type: ignore[no-any-return]

    check_parallel(dense, dtype, whole, lambda _, t: t[part], linear, x, chunk(True), lambda t: t[..., part], call)

    mlp = FusedMLP(D, 4, bias2=False, activation="sqrelu")

    whole = parameters(fc1__weight=(8, D), fc1__bias=(8,), fc2__weight=(D, 8))
    check_parallel(
        mlp, dtype, whole, hidden_share(part), two_layers(lambda x: F.relu(x).square()), x, chunk(True), chunk(True),
        lambda x: mlp(x, process_group=group),
    )  # fmt: skip


def hidden_share(part: slice) -> Callable[[str, Tensor], Tensor]:
    """fc1's rows and fc2's columns."""
    return lambda name, t: t if name == "fc2.bias" else t[:, part] if name == "fc2.weight" else t[part]


def check_mlps(dtype: torch.dtype, sequence_parallel: bool) -> None:
    group, part, parts = dist.group.WORLD, shared(9), chunk(sequence_parallel)
    x = randn(BATCH, SEQLEN, D)
    whole = parameters(fc1__weight=(9, D), fc1__bias=(9,), fc2__weight=(D, 9), fc2__bias=(D,))
    mlp = ParallelMLP(D, 9, process_group=group, sequence_parallel=sequence_parallel)
    check_parallel(mlp, dtype, whole, hidden_share(part), two_layers(F.gelu), x, parts, parts)
    for activation, level in (("gelu_approx", 0), ("sqrelu", 2)):
        plain = (lambda x: F.gelu(x, approximate="tanh")) if activation == "gelu_approx" else (lambda x: F.relu(x) ** 2)
        fused = ParallelFusedMLP(
            D, 9, None, activation, group, sequence_parallel=sequence_parallel, checkpoint_lvl=level
        )
        check_parallel(fused, dtype, whole, hidden_share(part), two_layers(plain), x, parts, parts)

    whole = parameters(fc1__weight=(18, D), fc1__bias=(18,), fc2__weight=(D, 9), fc2__bias=(D,))

    def gated_share(name: str, t: Tensor) -> Tensor:
        if name.startswith("fc1"):
            return torch.cat([half[part] for half in t.chunk(2)])
        return hidden_share(part)(name, t)

    for activation in (F.sigmoid, F.silu, F.gelu):

        def gate(y: Tensor, activation: Part = activation) -> Tensor:
            y, gate = y.chunk(2, dim=-1)
            return y * activation(gate)

        gated = ParallelGatedMlp(D, group, 9, activation=activation, multiple_of=3, sequence_parallel=sequence_parallel)
        check_parallel(gated, dtype, whole, gated_share, two_layers(gate), x, parts, parts)


def plain_attention(heads: int, heads_kv: int, alibi: bool, window: int, p: Parameters, x: Tensor) -> Tensor:
    """Causal attention of the undivided layer, Wqkv in the order q, k, v."""
    d = D // heads
    sizes = (heads * d, heads_kv * d, heads_kv * d)
    q, k, v = (t.unflatten(-1, (-1, d)) for t in F.linear(x, p["Wqkv.weight"], p["Wqkv.bias"]).split(sizes, -1))
    slopes = get_alibi_slopes(heads) if alibi else None
    context = attention(q, k, v, window=(window, 0), slopes=slopes).flatten(2)
    return F.linear(context, p["out_proj.weight"], p["out_proj.bias"])


def attention_share(heads: int, heads_kv: int) -> Callable[[str, Tensor], Tensor]:
    """Whole key/value heads with their query heads: rows of Wqkv, columns of out_proj."""
    d, group = D // heads, heads // heads_kv
    kv = shared(heads_kv)
    rows, rows_kv = slice(kv.start * group * d, kv.stop * group * d), slice(kv.start * d, kv.stop * d)

    def share(name: str, t: Tensor) -> Tensor:
        if name.startswith("Wqkv"):
            q, k, v = t.split((heads * d, heads_kv * d, heads_kv * d))
            return torch.cat((q[rows], k[rows_kv], v[rows_kv]))
        return t if name == "out_proj.bias" else t[:, rows]

    return share


ATTENTIONS: list[tuple[int, int, dict[str, Any]]] = [
    (3, 3, {}),  # uneven on purpose: two heads and one
    (6, 3, {}),
    (6, 3, {"use_flash_attn": True, "use_alibi": True, "window_size": (2, 0)}),
    (4, 4, {"use_flash_attn": True, "use_alibi": True, "checkpointing": True}),
]


def check_attention(dtype: torch.dtype, sequence_parallel: bool) -> None:
    for heads, heads_kv, options in ATTENTIONS:
        module = ParallelMHA(
            D, heads, dist.group.WORLD, heads_kv, causal=True, sequence_parallel=sequence_parallel, **options
        )
        width = (heads + 2 * heads_kv) * D // heads
        whole = parameters(Wqkv__weight=(width, D), Wqkv__bias=(width,), out_proj__weight=(D, D), out_proj__bias=(D,))

        def plain(p: Parameters, x: Tensor) -> Tensor:
            window = options.get("window_size", (SEQLEN, 0))[0]
            return plain_attention(heads, heads_kv, "use_alibi" in options, window, p, x)

        parts = chunk(sequence_parallel)
        x = randn(BATCH, SEQLEN, D)
        check_parallel(module, dtype, whole, attention_share(heads, heads_kv), plain, x, parts, parts)


def check_a_batch_of_one_split_by_tokens(dtype: torch.dtype) -> None:
    """seqlen= lets sequence parallelism cut batch * seqlen."""
    module = ParallelMHA(D, 4, dist.group.WORLD, causal=True, use_flash_attn=True)
    whole = parameters(Wqkv__weight=(3 * D, D), Wqkv__bias=(3 * D,), out_proj__weight=(D, D), out_proj__bias=(D,))

    def plain(p: Parameters, x: Tensor) -> Tensor:
        return plain_attention(4, 4, False, SEQLEN, p, x.unflatten(0, (-1, SEQLEN))).flatten(0, 1)

    share = attention_share(4, 4)
    check_parallel(
        module, dtype, whole, share, plain, randn(SEQLEN, D), chunk(True), chunk(True),
        lambda x: module(x, seqlen=SEQLEN),
    )  # fmt: skip


def check_decoding() -> None:
    """Steps through a rank's cache give what the full forward gives."""
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


def check_embeddings(dtype: torch.dtype, sequence_parallel: bool) -> None:
    vocab, positions = 10, 6
    ids = torch.tensor([[1, 4, 4, 0], [9, 2, 5, 7]])
    module = ParallelGPT2Embeddings(D, vocab, positions, dist.group.WORLD, sequence_parallel=sequence_parallel)
    whole = parameters(word_embeddings__weight=(vocab, D), position_embeddings__weight=(positions, D))
    rows, columns = shared(vocab), shared(D)
    kept = ids.clone()

    def share(name: str, t: Tensor) -> Tensor:
        return t[rows] if name.startswith("word") else t[:, columns]

    def plain(p: Parameters, ids: Tensor) -> Tensor:
        return p["word_embeddings.weight"][ids] + p["position_embeddings.weight"][: ids.shape[1]]

    parts = chunk(sequence_parallel)
    check_parallel(module, dtype, whole, share, plain, ids, lambda t: t, parts)
    assert torch.equal(ids, kept)
    combined = module(ids, combine_batch_seqlen_dim=True)
    torch.testing.assert_close(combined, module(ids).flatten(0, 1))


def check_collectives() -> None:
    """Those without gradients, of strided tensors and with a handle; with gradients the layers above use them."""
    group, rank = dist.group.WORLD, dist.get_rank()
    both = [torch.arange(8.0).reshape(4, 2) + 100 * other for other in range(WORLD)]
    mine = both[rank].t().contiguous().t()
    for raw, expected in (
        (all_gather_raw, torch.cat(both)),
        (reduce_scatter_raw, chunk(True)(both[0] + both[1])),
        (all_reduce_raw, both[0] + both[1]),
    ):
        out, handle = raw(mine.clone(), group)
        assert handle is None and torch.equal(out, expected)
        out, handle = raw(mine.clone(), group, async_op=True)
        handle.wait()
        assert torch.equal(out, expected)
    x = both[rank].clone().requires_grad_()
    for collective in (all_gather, reduce_scatter):  # their gradients can be differentiated too
        (first,) = torch.autograd.grad((collective(x, group) ** 2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert first.requires_grad and (second == 4).all()
    (all_reduce(x, group) * 3).sum().backward()
    assert torch.equal(x.detach(), both[rank]) and (x.grad == 3).all()


def check_marked_parameters() -> None:
    """Shared values come from rank 0, gradients of what is sequence-parallel are summed; a bias is on rank 0 alone."""
    group, rank = dist.group.WORLD, dist.get_rank()
    model = nn.ModuleDict({"shared": nn.Linear(2, 2, bias=rank == 0), "own": nn.Linear(2, 2)})
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 10.0 * rank + index)
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    model["shared"].weight._shared_params = True
    model["own"].weight._sequence_parallel = True
    kept = model["own"].weight.detach().clone()
    sync_shared_params(model, group)
    allreduce_sequence_parallel_grad(model, group)
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
    with pytest.raises(ValueError, match=r"out_features \(7\) must be a multiple of 2"):
        ColumnParallelLinear(D, 7, group, multiple_of=2)
    with pytest.raises(ValueError, match=r"in_features \(7\) must be a multiple of 2"):
        RowParallelLinear(7, D, group, multiple_of=2)


def _worker(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    float32, float16, bfloat16 = torch.float32, torch.float16, torch.bfloat16
    for dtype, sequence_parallel in ((float32, True), (float16, True), (bfloat16, False)):
        check_linear(dtype, sequence_parallel)
        check_mlps(dtype, sequence_parallel)
        check_attention(dtype, sequence_parallel)
        check_embeddings(dtype, sequence_parallel)
    for dtype in (float32, bfloat16):
        check_dense_with_a_group(dtype)
        check_a_batch_of_one_split_by_tokens(dtype)
    check_decoding()
    check_collectives()
    check_marked_parameters()
    check_refusals()
    end_worker()


def test_tensor_parallel_layers_are_the_undivided_ones(tmp_path: Path) -> None:
    forked_group(_worker, str(tmp_path / "store"))


def test_local_dimensions_add_up_and_stay_multiples() -> None:
    assert [get_dim_for_local_rank(10, 4, rank) for rank in range(4)] == [3, 3, 2, 2]
    assert [get_dim_for_local_rank(96, 4, rank, multiple_of=16) for rank in range(4)] == [32, 32, 16, 16]
