"""ring-flash-attn, yunchang and DeepSpeed, unmodified, in two processes over gloo, against the whole sequence."""

from __future__ import annotations

import importlib.util
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

import flash_attn_compat
from tests.clients import ring_worker
from tests.clients.ring_worker import NHEADS, Case, contiguous, zigzag
from tests.forms.support import in_group

SEQLEN, HEAD_DIM = [64], 16


def ring(rank: int) -> None:
    ring_worker.check_all("cpu", torch.float16)


def yunchang(rank: int) -> None:
    import yunchang
    from yunchang.kernels import AttnType

    # Processes of Ulysses and of the ring, implementation, how a tensor is cut, causal, whether backward.
    for ulysses, ring, implementation, cut, causal, backward in (
        (1, 2, "basic", contiguous, True, True),
        (1, 2, "basic", contiguous, False, True),
        (1, 2, "zigzag", zigzag, True, True),
        (2, 1, "basic", contiguous, True, False),  # backward, its ring of one sends to itself, which gloo cannot
    ):
        yunchang.set_seq_parallel_pg(ulysses, ring, rank, 2)
        long_context = yunchang.LongContextAttention(ring_impl_type=implementation, attn_type=AttnType.FA)
        # bf16 rounds to 4e-3 and each partial gradient is rounded; a mistake would show as 0.1 and more.
        case = Case(partial(long_context, causal=causal), cut, False, causal)
        ring_worker.check(case, SEQLEN, HEAD_DIM, torch.bfloat16, (2e-2, 2e-2), nheads_k=NHEADS, backward=backward)


def ulysses(rank: int) -> None:
    os.environ.update({"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"})
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    from flash_attn import flash_attn_func

    deepspeed.init_distributed("gloo", verbose=False)
    layer = DistributedAttention(flash_attn_func, dist.group.WORLD)
    case = Case(lambda q, k, v: layer(q, k, v, 0, causal=True), contiguous, False, True)
    ring_worker.check(case, SEQLEN, HEAD_DIM, torch.float64, (1e-9, 1e-9), nheads_k=NHEADS)


def process(rank: int, name: str) -> None:
    flash_attn_compat.patch()
    WORKERS[name](rank)
    assert sum(flash_attn_compat.backend_counts().values()) > 0


WORKERS = {"ring_flash_attn": ring, "yunchang": yunchang, "deepspeed": ulysses}


@pytest.mark.parametrize("name", WORKERS)
def test_every_variant_gives_output_and_gradients_of_the_whole_sequence(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    in_group(process, name)
