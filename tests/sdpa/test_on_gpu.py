"""Checks on a GPU: our kernels beside PyTorch's, and callers of the operators in C++, graphs and libraries.

All of it counts as a GPU of 7.5 whose flash and cuDNN kernels are off, as on Turing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils import checkpoint as checkpoints

import flash_attn_compat
from flash_attn_compat import backend_counts, explain, reset_backend_counts, settings
from flash_attn_compat.torch_sdpa.policy import Policy
from tests.sdpa import fuzz, originals
from tests.tools.interpreters import REPOSITORY

pytestmark = pytest.mark.gpu
aten = torch.ops.aten
sdpa = F.scaled_dot_product_attention
HALF = torch.float16


@pytest.fixture(autouse=True)
def _as_turing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(settings.CAPABILITY, "7.5")
    switches = [(torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled())]
    if hasattr(torch.backends.cuda, "enable_cudnn_sdp"):
        switches.append((torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled()))
    for switch, _ in switches:
        switch(False)
    reset_backend_counts()
    yield
    for switch, before in switches:
        switch(before)


def override_on() -> Any:
    return originals.override_on(Policy(least_products=0))


def served_calls() -> int:
    return backend_counts().get("fused", 0)


def qkv(
    rows: int = 100, keys: int = 100, heads: int = 4, heads_k: int = 4, dtype: torch.dtype = HALF, dim: int = 64
) -> list[Tensor]:
    """(batch, heads, rows, channels), as projections leave them."""
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = (2, rows, heads, dim), (2, keys, heads_k, dim), (2, keys, heads_k, dim)
    made = (torch.randn(shape, generator=generator).to("cuda", dtype).transpose(1, 2) for shape in shapes)
    return [x.requires_grad_() for x in made]


def close(got: Tensor, right: Tensor, bound: float = 4e-3) -> None:
    assert got.shape == right.shape
    error = float((got.detach().double() - right.detach().double()).abs().max())
    assert error <= bound * max(1.0, float(right.detach().abs().max())), error


def check_as_without(run: Callable[[], Any], bound: float = 1e-2) -> None:
    """The tensors of a run with ours in front, which serves one call, are those of a run without."""
    right = run()
    with override_on():
        found = run()
    assert served_calls() == 1
    for got, wanted in zip(found, right, strict=True):
        close(got, wanted, bound)


@pytest.mark.parametrize("first", range(0, 150, 15))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_random_problems(dtype: str, first: int) -> None:
    """Of 50 mixtures of features: each compiles kernels of its own."""
    with override_on():
        for seed in range(first, first + 15):
            problem = fuzz.draw(seed, dtype, mixes=50)
            assert not fuzz.examine(problem, "cuda"), problem
    assert served_calls() > 3


@pytest.mark.parametrize("name", fuzz.NAMED)
def test_named_problems(name: str) -> None:
    with override_on():
        assert not fuzz.examine(fuzz.NAMED[name], "cuda")
    assert served_calls() == 1


SHAPES = [(100, 100, False), (128, 64, True), (64, 128, True), (1, 300, False), (257, 257, True)]


@pytest.mark.parametrize(("rows", "keys", "causal"), SHAPES)
def test_results_are_laid_out_as_pytorchs(rows: int, keys: int, causal: bool) -> None:
    """And either one's backward takes the other one's results."""
    q, k, v = qkv(rows, keys)
    dout = torch.randn_like(q)

    def forward() -> tuple[Any, ...]:
        return tuple(aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal))

    def backward(out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor) -> tuple[Any, ...]:
        wanted = [True, True, True, False]
        with torch.no_grad():
            return tuple(
                aten._scaled_dot_product_efficient_attention_backward(
                    dout, q, k, v, None, out, lse, seed, offset, 0.0, wanted, causal
                )[:3]
            )

    theirs = forward()
    with override_on():
        found = forward()
        assert served_calls() == 1
        mixed = [backward(*theirs), backward(*found)]
    for got, right in zip(found, theirs):
        for fact in (Tensor.size, Tensor.stride, lambda x: x.dtype, lambda x: x.device):
            assert fact(got) == fact(right)
    close(found[0], theirs[0])
    assert torch.equal(found[1].isinf(), theirs[1].isinf())
    close(found[1].nan_to_num(posinf=0.0), theirs[1].nan_to_num(posinf=0.0), 1e-4)
    for gradients in (*mixed, backward(*found)):
        for got, right in zip(gradients, backward(*theirs)):
            assert got.stride() == right.stride()
            close(got, right, 1e-2)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
@pytest.mark.parametrize("heads_k", [2, 4])
def test_no_score_matrix_is_made(dtype: torch.dtype, heads_k: int) -> None:
    q, k, v = qkv(4096, 4096, heads_k=heads_k, dtype=dtype)
    with override_on():
        sdpa(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sdpa(q, k, v, is_causal=True, enable_gqa=True).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert served_calls() == 2 and peak < 16 * q.nbytes < 2 * 4 * 4096 * 4096 * 2


@pytest.mark.parametrize("name", ["a mask that wants a gradient", "fp32", "three axes"])
def test_declined_calls_match_pytorch_bit_for_bit(name: str) -> None:
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32 if name == "fp32" else HALF))
    bias = torch.zeros(100, 100, dtype=HALF, device="cuda", requires_grad=True)
    options = {"attn_mask": bias} if name == "a mask that wants a gradient" else {}
    inputs = [x[0] for x in (q, k, v)] if name == "three axes" else [q, k, v]
    right = sdpa(*inputs, **options)
    with override_on():
        found = sdpa(*inputs, **options)
    assert torch.equal(found, right) and found.stride() == right.stride() and backend_counts() == {"pytorch": 1}


def test_a_newer_gpu_is_left_alone_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CAPABILITY, "9.0")
    q, k, v = (x.detach() for x in qkv(2048, 2048))
    with flash_attn_compat.sdpa():
        assert "always" in explain(sdpa, q, k, v).reasons["fused"][0]
    with flash_attn_compat.sdpa(always=True), flash_attn_compat.use_backend("fused"):
        assert explain(sdpa, q, k, v).backend == "fused"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("kind", ["grouped heads", "causal", "dense mask"])
def test_compiled_graphs(mode: str, kind: str) -> None:
    torch._dynamo.reset()
    q, k, v = qkv(200, 200, heads_k=2 if kind == "grouped heads" else 4)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": kind == "grouped heads"}
    if kind == "dense mask":
        options = {"attn_mask": dense_mask("padded", 200, 200)}

    def attend(*inputs: Tensor) -> Tensor:
        return sdpa(*inputs, **options) * 2

    right = torch.autograd.grad(attend(q, k, v).float().square().sum(), (q, k, v))
    with override_on():
        compiled = torch.compile(attend, mode=mode, fullgraph=True)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(q, k, v)
            found = [x.clone() for x in torch.autograd.grad(out.float().square().sum(), (q, k, v))]
    assert served_calls() >= 1
    for got, wanted in zip(found, right):
        close(got, wanted, 1e-2)


def test_captured_in_a_cuda_graph() -> None:
    q, k, v = (x.detach() for x in qkv(64, 512, heads_k=2))
    with override_on():
        sdpa(q, k, v, enable_gqa=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sdpa(q, k, v, enable_gqa=True)
        for seed in range(3):
            q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            close(out, sdpa(q, k, v, enable_gqa=True), 0.0)
    assert served_calls() == 5


# ---- dense masks


def dense_mask(kind: str, rows: int, keys: int, batch: int = 2, heads: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    numbers, (row, key) = (
        torch.randn(batch, heads, rows, keys, generator=generator),
        (torch.arange(n) for n in (rows, keys)),
    )
    if kind == "padded":
        seen = (key >= torch.tensor([0, keys // 3])[:, None]) & (key <= row[:, None] + keys - rows)[:, None]
        return seen.transpose(0, 1)[:, None].cuda()
    if kind == "blocks":
        return ((key * 7 // keys) == (row * 7 // rows)[:, None]).cuda()
    return (numbers > 0).cuda()


@pytest.mark.parametrize("keys", [64, 256, 512])
def test_keys_beyond_the_last_have_no_weight(keys: int) -> None:
    """The mask hides nothing; Turing's tiles of 128 keys at 32 channels reach beyond 64 keys."""
    q, k, v = qkv(200, keys, dim=32)
    with override_on():
        close(sdpa(q, k, v, attn_mask=torch.ones(200, keys, dtype=torch.bool, device="cuda")), sdpa(q, k, v))
    assert served_calls() == 2


def test_a_dense_mask_in_a_cuda_graph_may_change() -> None:
    """The mask pass runs on the GPU at each replay."""
    q, k, v = (x.detach() for x in qkv(256, 256))
    seen = dense_mask("blocks", 256, 256)
    with override_on():
        sdpa(q, k, v, attn_mask=seen)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sdpa(q, k, v, attn_mask=seen)
        for kind in ("blocks", "bool", "blocks"):
            seen.copy_(dense_mask(kind, 256, 256).reshape(-1, 256, 256)[0])
            graph.replay()
            close(out, sdpa(q, k, v, attn_mask=seen), 0.0)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_left_padded_generation(dtype: torch.dtype) -> None:
    """A batch of prompts of different lengths, by transformers: prefill and steps have a mask."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 500}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to("cuda", dtype).eval()
    tokens = torch.randint(3, 500, (3, 70), device="cuda")
    attended = (torch.arange(70, device="cuda") >= torch.tensor([[0], [20], [55]], device="cuda")).long()
    options = {"attention_mask": attended, "max_new_tokens": 6, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "pad_token_id": 0}
    right = model.generate(tokens, **options)
    with override_on():
        found = model.generate(tokens, **options)
    assert served_calls() >= 12
    close(found.logits[0], right.logits[0], 2e-2)
    assert (found.sequences == right.sequences).float().mean() > 0.95


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(64, 128), (128, 128)])
def test_causal_biases(variant: Any, lengths: tuple[int, int]) -> None:
    q, k, v = (x.detach() for x in qkv(*lengths))
    seen = variant(*lengths)._materialize(q.device)
    with override_on():
        found = sdpa(q, k, v, variant(*lengths))
    close(found, sdpa(q, k, v, seen))
    assert served_calls() == 1


def test_nested_tensors() -> None:
    parts = [torch.randn(length, 4, 64, device="cuda", dtype=HALF) for length in (5, 130, 77)]

    def attend() -> list[Tensor]:
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        return list(sdpa(nested, nested, nested).unbind())

    check_as_without(attend, 4e-3)


def test_a_transformer_layer_in_inference_and_training() -> None:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True, device="cuda", dtype=HALF)
    x = torch.randn(2, 200, 256, device="cuda", dtype=HALF)
    for train in (False, True):
        layer.train(train)
        with torch.set_grad_enabled(train):
            right = layer(x)
            with override_on():
                close(layer(x), right, 1e-2)
    assert served_calls() >= 1


@pytest.mark.skipif(not hasattr(checkpoints, "CheckpointPolicy"), reason="PyTorch has policies from 2.5 on")
def test_selective_checkpointing_knows_pytorchs_operator() -> None:
    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        keeps = operator is aten._scaled_dot_product_efficient_attention.default
        return checkpoints.CheckpointPolicy.MUST_SAVE if keeps else checkpoints.CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = qkv(256, 256)

    def gradients() -> tuple[Tensor, ...]:
        out = checkpoints.checkpoint(
            lambda *x: sdpa(*x).float().square(), q, k, v, use_reentrant=False,
            context_fn=lambda: checkpoints.create_selective_checkpoint_contexts(policy),
        )  # fmt: skip
        return torch.autograd.grad(out.sum(), (q, k, v))

    check_as_without(gradients)


def test_a_side_stream() -> None:
    q, k, v = (x.detach() for x in qkv(1024, 1024))
    right, stream = sdpa(q, k, v), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with override_on(), torch.cuda.stream(stream):
        found = sdpa(q, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    close(found, right)


def xformers_masks() -> dict[str, Callable[[], Any]]:
    from xformers.ops import fmha

    return {
        "none": lambda: None,
        "causal": fmha.attn_bias.LowerTriangularMask,
        "packed": lambda: fmha.attn_bias.BlockDiagonalMask.from_seqlens([60, 140]),
        "packed, other keys": lambda: fmha.attn_bias.BlockDiagonalMask.from_seqlens([60, 140], [100, 100]),
        "packed, causal": lambda: fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens([60, 140]),
    }


@pytest.mark.parametrize("name", ["none", "causal", "packed", "packed, other keys", "packed, causal"])
def test_xformers(name: str) -> None:
    xformers = pytest.importorskip("xformers.ops")
    fmha = xformers.fmha
    bias = xformers_masks()[name]()
    inputs = [x.detach().transpose(1, 2)[:1].contiguous().requires_grad_() for x in qkv(200, 200)]

    def both() -> list[Tensor]:
        out = xformers.memory_efficient_attention(*inputs, attn_bias=bias, op=(fmha.cutlass.FwOp, fmha.cutlass.BwOp))
        return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]

    check_as_without(both)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_context_parallel_over_two_gpus() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "tests.sdpa.test_on_gpu"],
        capture_output=True, text=True, cwd=REPOSITORY, timeout=1200,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.count("right") == 2


def main() -> None:
    """One of two processes: PyTorch's context parallelism, which replaces F's function, served by ours."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2,))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 4, 512, 64, generator=generator).to("cuda", torch.float16) for _ in range(3)]
    for causal in (False, True):
        leaves = [x.clone().requires_grad_() for x in whole]
        right = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        (dv,) = torch.autograd.grad(right.float().square().sum(), leaves[2])
        parts, wanted = [x.clone() for x in whole], [right.detach().clone(), dv.clone()]
        reset_backend_counts()
        _attention._cp_options.enable_load_balance = causal  # PyTorch refuses to balance other masks
        ring = context_parallel(mesh, buffers=[*parts, *wanted], buffer_seq_dims=[2] * 5)
        with override_on(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), ring:
            for part in parts:
                part.requires_grad_()
            out = F.scaled_dot_product_attention(*parts, is_causal=causal)
            (found,) = torch.autograd.grad(out.float().square().sum(), parts[2])
            close(out, wanted[0], 2e-2)
            close(found, wanted[1], 2e-2)
            for part in parts:
                part.requires_grad_(False)
        assert served_calls() >= 2, backend_counts()
    print("right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault(settings.CAPABILITY, "7.5")
    main()
