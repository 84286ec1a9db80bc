"""The collectives of utils.distributed over two gloo processes, values and gradients."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

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
from tests.interpreters import forked_group
from tests.support import end_worker

WORLD = 2


def inputs(rank: int) -> torch.Tensor:
    return torch.arange(8.0).reshape(4, 2) + 100 * rank


def _worker(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    group = dist.group.WORLD
    both = [inputs(r) for r in range(WORLD)]
    mine = slice(2 * rank, 2 * rank + 2)

    for raw, expected in (
        (all_gather_raw, torch.cat(both)),
        (reduce_scatter_raw, sum(both)[mine]),
        (all_reduce_raw, sum(both)),
    ):
        out, handle = raw(inputs(rank), group)
        assert handle is None and torch.equal(out, expected)
        out, handle = raw(inputs(rank).t().contiguous().t(), group, async_op=True)
        handle.wait()
        assert torch.equal(out, expected)

    # Every rank weighs its own output, so that the gradients show who received what.
    x = inputs(rank).requires_grad_()
    kept = x.detach().clone()
    weights = [torch.arange(16.0).reshape(8, 2) * (r + 1) for r in range(WORLD)]
    out = all_gather(x, group)
    (out * weights[rank]).sum().backward()
    assert torch.equal(out.detach(), torch.cat(both))
    assert torch.equal(x.grad, sum(weights)[4 * rank : 4 * rank + 4])

    x = inputs(rank).requires_grad_()
    weights = [torch.arange(4.0).reshape(2, 2) + r for r in range(WORLD)]
    out = reduce_scatter(x, group)
    (out * weights[rank]).sum().backward()
    assert torch.equal(out.detach(), sum(both)[mine]) and torch.equal(x.grad, torch.cat(weights))

    x = inputs(rank).requires_grad_()
    out = all_reduce(x, group)
    (out * 3).sum().backward()
    assert torch.equal(out.detach(), sum(both)) and torch.equal(x.detach(), kept)
    assert torch.equal(x.grad, torch.full((4, 2), 3.0))

    model = nn.ModuleDict({"shared": nn.Linear(2, 2, bias=rank == 0), "own": nn.Linear(2, 2)})
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 10.0 * rank + index)
    model["shared"].weight._shared_params = True
    model["own"].weight._sequence_parallel = True
    own_before = model["own"].weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    sync_shared_params(model, group)
    allreduce_sequence_parallel_grad(model, group)
    assert (model["shared"].weight == 0.0).all() and torch.equal(model["own"].weight, own_before)
    assert (model["own"].weight.grad == 3.0).all() and (model["own"].bias.grad == rank + 1.0).all()
    end_worker()


def test_collectives_and_their_gradients_over_two_processes(tmp_path: Path) -> None:
    forked_group(_worker, str(tmp_path / "store"))


def test_local_dimensions_add_up_and_stay_multiples() -> None:
    assert [get_dim_for_local_rank(10, 4, rank) for rank in range(4)] == [3, 3, 2, 2]
    shares = [get_dim_for_local_rank(96, 4, rank, multiple_of=16) for rank in range(4)]
    assert shares == [32, 32, 16, 16] and sum(shares) == 96
