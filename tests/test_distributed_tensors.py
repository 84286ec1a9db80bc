"""DTensors and data parallel training over gloo: parts are computed where they are; the answer is that of the whole."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import flash_attn_compat
from flash_attn_compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from tests.support import cumulative, in_group, randn

Axes = tuple[int | None, ...]  # of a tensor, by which each axis of the mesh cuts it


class Case(NamedTuple):
    """function(*inputs, **extra) on a mesh.

    cuts: how each input is cut; kept: how the output is, and dout; moves: whether processes must send each other parts
    """

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    cuts: tuple[Axes, ...]
    kept: Axes
    extra: dict[str, Tensor] = {}  # noqa: RUF012 - nobody writes to it
    moves: bool = False
    mesh: tuple[int, ...] = (2,)


def cases() -> dict[str, Case]:
    def dense(q: Tensor, k: Tensor, v: Tensor, **extra: Tensor) -> Tensor:
        found = flash_attn_func(q, k, v, causal=True, **extra)
        assert isinstance(found, Tensor)
        return found

    def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        return out + lse.transpose(1, 2).unsqueeze(-1)

    def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, window_size=(2, 1))

    q, k, v = given = tuple(randn(4, 8, heads, 16, seed=at) for at, heads in enumerate((4, 2, 2)))
    tokens = tuple(x.flatten(0, 1)[:8] for x in given)
    starts, slopes = {"starts": cumulative(3, 5)}, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    of_sequences = {"alibi_slopes": slopes["alibi_slopes"] + torch.arange(4.0)[:, None]}
    whole: Axes = (None,)
    return {
        "batch": Case(dense, given, ((0,),) * 3, (0,)),
        "heads": Case(dense, given, ((2,),) * 3, (2,)),
        "batch, with the LSE": Case(with_lse, given, ((0,),) * 3, (0,)),
        "heads, with the LSE": Case(with_lse, given, ((2,),) * 3, (2,)),
        "copies": Case(dense, given, (whole,) * 3, whole),
        "heads of queries, copies of keys": Case(dense, given, ((2,), whole, whole), (2,)),
        "rows": Case(dense, given, ((1,),) * 3, whole, moves=True),
        "one key head": Case(dense, (q, k[:, :, :1], v[:, :, :1]), ((2,), whole, whole), whole, moves=True),
        "three sequences": Case(dense, tuple(x[:3] for x in given), ((0,),) * 3, whole, moves=True),
        "slopes of heads": Case(dense, given, ((2,),) * 3, (2,), slopes),
        "slopes of heads, batch": Case(dense, given, ((0,),) * 3, (0,), slopes),
        "slopes of sequences": Case(dense, given, ((0,),) * 3, (0,), of_sequences),
        "slopes of sequences, heads": Case(dense, given, ((2,),) * 3, (2,), of_sequences),
        "keys and values in one": Case(flash_attn_kvpacked_func, (q, torch.stack([k, v], 2)), ((2,), (3,)), (2,)),
        "packed": Case(varlen, tokens, ((1,),) * 3, (1,), starts),
        "packed, all in one": Case(
            lambda qkv, starts: flash_attn_varlen_qkvpacked_func(qkv, starts, 5), (torch.stack([tokens[0]] * 3, 1),),
            ((2,),), (1,), starts,
        ),
        "a mesh of two axes": Case(dense, given, ((None, 2),) * 3, (None, 2), mesh=(1, 2)),
    }  # fmt: skip


def check(case: Case) -> None:
    """Compare output and gradients with those of whole tensors."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", case.mesh)

    def placed(x: Tensor, axes: Axes) -> Tensor:
        return distribute_tensor(x.detach(), mesh, [Replicate() if axis is None else Shard(axis) for axis in axes])

    wholes = [x.clone().requires_grad_() for x in case.inputs]
    right = case.function(*wholes, **case.extra)
    dout = randn(*right.shape, seed=9)
    parts = [placed(x, axes).requires_grad_() for x, axes in zip(case.inputs, case.cuts, strict=True)]
    extra = {name: placed(x, (None,) * mesh.ndim) for name, x in case.extra.items()}
    dout_parts = placed(dout, case.kept)
    with CommDebugMode() as messages:
        out: Any = case.function(*parts, **extra)
        gradients = torch.autograd.grad(out, parts, dout_parts)
    assert out.placements == dout_parts.placements  # type: ignore[attr-defined]
    assert bool(messages.get_total_counts()) == case.moves, messages.get_comm_counts()
    expected = right, *torch.autograd.grad(right, wholes, dout)
    for ours, theirs in zip((out, *gradients), expected, strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs)


def check_errors() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    q = distribute_tensor(randn(4, 8, 2, 16), init_device_mesh("cpu", (2,)), [Shard(2)])
    with pytest.raises(RuntimeError, match="dropout_p must be 0 for DTensors"):
        flash_attn_func(q, q, q, dropout_p=0.1)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        flash_attn_varlen_func(*[q.flatten(0, 1)] * 3, cumulative(16, 16), cumulative(16, 16), 16, 16)
    with pytest.raises(NotImplementedError, match=r"flash_attn_compat.kvcache.*sharding strategy"):
        flash_attn_with_kvcache(q, q, q, cache_seqlens=3)


def check_private() -> None:
    """The private functions by heads; the gradients are written into DTensors too."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    def run(*given: Any) -> tuple[Any, ...]:
        options = (0.0, 0.25, True, -1, -1, 0.0, None)
        out, lse, _, rng_state = _flash_attn_forward(*given, *options, False)
        grads = [torch.zeros_like(x) for x in given]
        softmax_d = _flash_attn_backward(out.cos(), *given, out, lse, *grads, *options, False, rng_state)
        return out, lse, softmax_d, *grads

    given = [randn(4, 8, heads, 16, seed=at) for at, heads in enumerate((4, 2, 2))]
    mesh = init_device_mesh("cpu", (2,))
    for ours, theirs in zip(run(*(distribute_tensor(x, mesh, [Shard(2)]) for x in given)), run(*given), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


def check_pending() -> None:
    from torch.distributed import _functional_collectives as collectives

    q = randn(2, 8, 2, 16)
    pending = collectives.all_reduce(q, "sum", dist.group.WORLD)
    assert isinstance(pending, collectives.AsyncCollectiveTensor)
    out = flash_attn_func(pending, pending, pending)
    assert type(out) is Tensor
    torch.testing.assert_close(out, flash_attn_func(2 * q, 2 * q, 2 * q))


def shards(rank: int) -> None:
    for name, case in cases().items():
        try:
            check(case)
        except Exception as error:
            raise AssertionError(name) from error
    check_errors()
    check_private()
    check_pending()


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.5", reason="PyTorch has register_sharding from 2.5 on")
def test_two_processes_compute_their_shards() -> None:
    in_group(shards)


# ---------------------------------------------------------------- data parallel training

BATCH, SEQLEN, HEADS, HEAD_DIM = 4, 6, 2, 8
WIDTH = HEADS * HEAD_DIM


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = flash_attn_qkvpacked_func(self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)), causal=True)
        assert isinstance(out, Tensor)
        return self.out(out.flatten(-2))


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer().double()


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    module(x).square().mean().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(layer())


def fsdp2() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = layer()
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return module


WAYS = {"DDP": ddp, "FSDP2": fsdp2}


def train(rank: int, way: str) -> None:
    x = randn(BATCH, SEQLEN, WIDTH, dtype=torch.float64)
    expected = gradients(layer(), x)
    flash_attn_compat.reset_backend_counts()
    found = gradients(WAYS[way](), x[rank * BATCH // 2 :][: BATCH // 2])
    assert sum(flash_attn_compat.backend_counts().values()) == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.full_tensor() if hasattr(one, "full_tensor") else one, other)


@pytest.mark.parametrize("way", WAYS)
def test_sharded_gradients_match_the_whole_batch(way: str) -> None:
    if way == "FSDP2" and not hasattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("PyTorch has this name from 2.6 on")
    in_group(train, way)
