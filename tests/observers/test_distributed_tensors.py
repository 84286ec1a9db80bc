"""DTensors and data parallel training over gloo: parts are computed where they are; the answer is that of the whole."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
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
from flash_attn_compat.dispatch.pytorch import sharding
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from tests.forms.inputs import cumulative, randn
from tests.forms.support import in_group

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

    def sloped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return dense(q, k, v, alibi_slopes=slopes)

    def sloped_lse(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        out, lse, _ = flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True)
        return out + lse.transpose(1, 2).unsqueeze(-1)

    def packed_sloped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, starts: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, alibi_slopes=slopes)

    def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, window_size=(2, 1))

    q, k, v = given = tuple(randn(4, 8, heads, 16, seed=at) for at, heads in enumerate((4, 2, 2)))
    tokens = tuple(x.flatten(0, 1)[:8] for x in given)
    starts, slopes = {"starts": cumulative(3, 5)}, torch.tensor([0.1, 0.2, 0.3, 0.4])
    of_heads, of_sequences = (*given, slopes), (*given, slopes + torch.arange(4.0)[:, None])
    of_packed = *tokens, slopes + torch.arange(2.0)[:, None]
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
        "slopes of heads": Case(sloped, of_heads, (*((2,),) * 3, (0,)), (2,)),
        "copies of slopes, heads": Case(sloped, of_heads, (*((2,),) * 3, whole), (2,)),
        "slopes of heads, batch": Case(sloped, of_heads, (*((0,),) * 3, whole), (0,)),
        "slopes of sequences": Case(sloped, of_sequences, (*((0,),) * 3, (0,)), (0,)),
        "slopes of sequences, heads": Case(sloped, of_sequences, (*((2,),) * 3, (1,)), (2,)),
        "slopes, copies": Case(sloped, of_heads, (whole,) * 4, whole),
        "slopes, rows": Case(sloped, of_heads, (*((1,),) * 3, whole), whole, moves=True),
        "slopes, a mesh of two axes": Case(sloped, of_heads, (*((None, 2),) * 3, (None, 0)), (None, 2), mesh=(1, 2)),
        "slopes with the LSE": Case(sloped_lse, of_heads, (*((0,),) * 3, whole), (0,)),
        "slopes, packed": Case(packed_sloped, of_packed, (*((1,),) * 3, (1,)), (1,), starts),
        "slopes, packed tokens": Case(packed_sloped, of_packed, (*((0,),) * 3, whole), whole, starts, moves=True),
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


def check_descales() -> None:
    """Of pages of 8-bit floats, each head's own: gloo sends no 8-bit floats, so each process makes its share."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    q, scales, starts = randn(8, 4, 16).half(), torch.tensor([[0.5, 2.0], [1.0, 3.0]]), cumulative(3, 5)
    cache, table = randn(4, 8, 2, 16, seed=1).to(torch.float8_e4m3fn), torch.tensor([[2], [0]], dtype=torch.int32)

    def attend(q: Tensor, cache: Tensor, starts: Tensor, table: Tensor, scales: Tensor) -> Any:
        return flash_attn_varlen_func(
            q, cache, cache, starts, starts, 5, 5, block_table=table, k_descale=scales, v_descale=scales
        )

    whole = [distribute_tensor(x, mesh, [Replicate()]) for x in (starts, table)]
    share = DTensor.from_local(cache[:, :, [rank]], mesh, [Shard(2)])
    for given in (scales, scales[:, :1], scales[:1, :1]):
        descales = distribute_tensor(given.contiguous(), mesh, [Replicate()])
        out = attend(distribute_tensor(q, mesh, [Shard(1)]), share, *whole, descales)
        torch.testing.assert_close(out.full_tensor(), attend(q, cache, starts, table, given))


def refused_calls() -> dict[str, Callable[[], object]]:
    """A call of each kind in sharding.REFUSED, or several; of each, the same without it is served."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    plain, mesh = randn(4, 8, 2, 16), init_device_mesh("cpu", (2,))
    q, slopes = distribute_tensor(plain, mesh, [Shard(2)]), torch.tensor([0.1, 0.2])
    starts, tokens, of_heads = cumulative(16, 16), q.flatten(0, 1), distribute_tensor(slopes, mesh, [Shard(0)])
    flash_attn_func(q, q, q)

    def twice() -> object:
        x = q.detach().requires_grad_()
        return torch.autograd.grad(flash_attn_func(x, q, q).square().sum(), x, create_graph=True)

    def private_backward() -> object:
        options = (0.1, 0.25, True, -1, -1, 0.0, None)
        gradients = [torch.zeros_like(q) for _ in range(3)]
        return _flash_attn_backward(q, q, q, q, q, q[..., 0].transpose(1, 2), *gradients, *options, False, None)

    return {
        "dropout": lambda: flash_attn_func(q, q, q, dropout_p=0.1),
        "dropout, private": lambda: _flash_attn_forward(q, q, q, 0.1, 0.25, True, -1, -1, 0.0, None, False),
        "dropout, backward": private_backward,
        "caches": lambda: flash_attn_with_kvcache(q, q, q, cache_seqlens=3),
        "caches, appending": lambda: flash_attn_with_kvcache(plain, q, q, plain[:, :1], plain[:, :1], cache_seqlens=3),
        "plain tensors beside DTensors": lambda: flash_attn_func(q, q, plain),
        "plain tensors beside DTensors: starts": lambda: flash_attn_varlen_func(*[tokens] * 3, starts, starts, 16, 16),
        "plain tensors beside DTensors: slopes": lambda: flash_attn_func(q, q, q, alibi_slopes=slopes),
        "plain tensors beside DTensors: their slopes": lambda: flash_attn_func(*[plain] * 3, alibi_slopes=of_heads),
        "plain tensors beside DTensors: sinks": lambda: flash_attn_func(q, q, q, s_aux=slopes),
        "plain tensors beside DTensors: their sinks": lambda: flash_attn_func(plain, plain, plain, s_aux=of_heads),
        "second derivatives": twice,
        "torch.func transforms": lambda: torch.func.grad(lambda x: flash_attn_func(x, q, q).sum())(q),
        "torch.func transforms: vmap": lambda: torch.func.vmap(
            lambda x: flash_attn_func(x[None], q[:1], q[:1], causal=True)
        )(q),
    }


def check_refusals() -> None:
    calls, found = refused_calls(), set()
    for name, call in calls.items():
        what = next(one for one in sharding.REFUSED if name.startswith(one))
        found.add(what)
        with pytest.raises(NotImplementedError, match=re.escape(sharding.REFUSED[what])) as told:
            call()
        assert all(other in str(told.value) for other in sharding.REFUSED), name
    assert {*sharding.REFUSED} - found == {"PyTorch 2.4"}


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
    check_refusals()
    check_descales()
    check_private()
    check_pending()


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.5", reason="PyTorch has register_sharding from 2.5 on")
def test_two_processes_compute_their_shards() -> None:
    in_group(shards)


def test_the_page_lists_what_errors_refuse_in_their_words() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs/distributed.md").read_text(encoding="utf-8").split())
    listed = page.partition("### What DTensors do not go with")[2].partition(" ##")[0]
    assert [what for what, reason in sharding.REFUSED.items() if f"| {what} | {reason} |" not in listed] == []
    assert listed.count("|") == 3 * (len(sharding.REFUSED) + 2), "and no more"


def test_a_pytorch_without_rules_refuses_dtensors_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "is_distributed", lambda x: True)
    monkeypatch.setattr(sharding, "_register", lambda: False)
    with pytest.raises(NotImplementedError, match=r"PyTorch 2\.5 or newer"):
        sharding.check_call([("q", torch.ones(1))], 0.0)


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
