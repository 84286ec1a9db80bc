"""What torch_efficient refuses, on any machine; what its kernel gets wrong and how calls get round it, on a GPU."""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, use_backend
from flash_attn_compat.backends.torch_efficient import TorchEfficient
from flash_attn_compat.engine.features import Feature, Traits

PLAIN = Traits(
    device_type="cuda", capability=(7, 5), dtype=torch.float16, head_dim=64, head_dim_v=64, sq_vs_sk="=",
    aligned=True, features=0,
)  # fmt: skip


def reasons(features: int = 0, **changes: object) -> list[str]:
    return TorchEfficient().extra_reasons(PLAIN._replace(features=int(features), **changes))


def test_sequences_that_may_have_fewer_keys_than_queries_are_refused():
    assert any("cu_seqlens_q and cu_seqlens_k" in reason for reason in reasons(Feature.VARLEN, sq_vs_sk="?"))
    assert reasons(Feature.VARLEN | Feature.CAUSAL | Feature.BACKWARD, sq_vs_sk="=") == []


def test_rows_that_see_no_key_are_refused():
    assert any("no key" in reason for reason in reasons(Feature.CAUSAL, sq_vs_sk=">"))
    assert reasons(sq_vs_sk=">") == reasons(Feature.CAUSAL, sq_vs_sk="<") == []


@pytest.mark.parametrize(
    "feature",
    [
        Feature.ALIBI,
        Feature.SOFTCAP,
        Feature.WINDOW_LEFT,
        Feature.WINDOW_RIGHT,
        Feature.SEQUSED_K,
        Feature.PAGED,
        Feature.SHARED_DROPOUT_MASK,
    ],
)
def test_what_takes_more_than_one_launch_is_left_to_others(feature):
    assert TorchEfficient().reasons(PLAIN._replace(features=int(feature)))


def test_bf16_is_left_to_others_on_gpus_without_it():
    assert any("8.0" in reason for reason in reasons(dtype=torch.bfloat16))
    assert reasons(dtype=torch.bfloat16, capability=(8, 0)) == []


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.gpu
def test_gradients_of_grouped_heads_do_not_depend_on_how_out_is_strided():
    q, k, v = random(1, 128, 4, 64).requires_grad_(), random(1, 128, 1, 64).requires_grad_(), random(1, 128, 1, 64)
    dout = random(1, 128, 4, 64)
    found = {}
    for name in ("torch_efficient", "chunked"):
        with use_backend(name):
            found[name] = torch.autograd.grad(flash_attn_func(q, k, v, causal=True), (q, k), dout)
    assert all((a - b).abs().max() < 2e-2 for a, b in zip(*found.values()))


@pytest.mark.gpu
def test_packed_calls_can_be_captured_in_a_cuda_graph():
    q, k, v = random(96, 4, 64), random(96, 4, 64), random(96, 4, 64)
    starts = torch.tensor([0, 33, 96], dtype=torch.int32, device="cuda")

    def call():
        with use_backend("torch_efficient"):
            return flash_attn_varlen_func(q, k, v, starts, starts, 63, 63, causal=True)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    q.copy_(random(96, 4, 64))
    graph.replay()
    torch.testing.assert_close(captured, call())
