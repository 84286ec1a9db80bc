"""One process of a yunchang (long-context-attention) run; errors against the whole sequence, as JSON."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.clients.ring_worker import BATCH, HEAD_DIM, NHEADS, SEQLEN, contiguous, whole, zigzag


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, world = dist.get_rank(), dist.get_world_size()
    import yunchang
    from yunchang.kernels import AttnType

    import flash_attn_compat

    errors = {}
    for name, ulysses, ring, implementation, shard, causal, backward in (
        ("ring, causal", 1, world, "basic", contiguous, True, True),
        ("ring, full", 1, world, "basic", contiguous, False, True),
        ("zigzag, causal", 1, world, "zigzag", zigzag, True, True),
        # Backward, its ring of one process sends to itself, which gloo cannot.
        ("ulysses, causal", world, 1, "basic", contiguous, True, False),
    ):
        yunchang.set_seq_parallel_pg(ulysses, ring, rank, world)
        attention = yunchang.LongContextAttention(ring_impl_type=implementation, attn_type=AttnType.FA)
        torch.manual_seed(0)
        q, k, v, dout = (torch.randn(BATCH, SEQLEN, NHEADS, HEAD_DIM).bfloat16().double() for _ in range(4))
        exact_inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        exact_all = [whole(*exact_inputs, causal, groups=1)]
        inputs = [shard(x, rank, world, 1).bfloat16().contiguous().requires_grad_() for x in (q, k, v)]
        got = [attention(*inputs, causal=causal)]
        if backward:
            exact_all += torch.autograd.grad(exact_all[0], exact_inputs, dout)
            got += torch.autograd.grad(got[0], inputs, shard(dout, rank, world, 1).bfloat16().contiguous())
        worst = torch.tensor(
            [
                float((a.detach().double() - shard(b.detach(), rank, world, 1)).abs().max() / b.detach().abs().max())
                for a, b in zip(got, exact_all)
            ]
        )
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        errors[name] = dict(zip(("out", "dq", "dk", "dv"), worst.tolist()))
    if rank == 0:
        with open(sys.argv[1], "w") as file:
            json.dump({"errors": errors, "calls": sum(flash_attn_compat.backend_counts().values())}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
