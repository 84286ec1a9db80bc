"""Compilers, traces, modes and DTensors see PyTorch's own operators; the operators that they execute are served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from tests.forms.inputs import randn
from tests.forms.kinds import Operators, Wrapper
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.sdpa import originals
from tests.sdpa.originals import counted

HALF = torch.float16
aten = torch.ops.aten


def qkv(heads_k: int = 4, dtype: torch.dtype = HALF) -> list[Tensor]:
    shapes = (2, 4, 24, 32), (2, heads_k, 24, 32), (2, heads_k, 24, 32)
    return [randn(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call the operator that a graph compiled for Turing holds."""
    out: Tensor = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
    return out


def names(graph: torch.fx.Graph) -> list[str]:
    return [
        str(node.target) for node in graph.nodes if node.op == "call_function" and "dot_product" in str(node.target)
    ]


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=0, atol=4e-3)


def test_a_mode_sees_pytorchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> list[str]:
        with Operators() as mode:
            F.scaled_dot_product_attention(*qkv())
        return mode.seen

    before = seen()
    with originals.served(monkeypatch):
        assert seen() == before


def test_operators_that_a_mode_executes_are_served(served: LaunchRecord) -> None:
    inputs = qkv()
    with Operators() as mode:
        out = efficient(*inputs)
    assert mode.seen[0] == "aten._scaled_dot_product_efficient_attention.default" and counted() == {"fused": 1}
    close(out, F.scaled_dot_product_attention(*qkv(), is_causal=True))


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
def test_operators_that_a_tensor_subclass_executes_are_served(served: LaunchRecord) -> None:
    inputs = [x.detach() for x in qkv()]
    with originals.as_on_turing():
        out = F.scaled_dot_product_attention(*map(Wrapper, inputs), is_causal=True)
    assert isinstance(out, Wrapper) and counted() == {"fused": 1}
    close(out._held, F.scaled_dot_product_attention(*inputs, is_causal=True))


def test_a_compiled_graph_calls_the_operators_that_are_served(served: LaunchRecord) -> None:
    torch._dynamo.reset()
    inputs = qkv()
    compiled: Callable[..., Tensor] = torch.compile(lambda *x: efficient(*x) * 2, backend="aot_eager", fullgraph=True)
    out = compiled(*inputs)
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert counted() == {"fused": 1} and served.entries[-3:] == ["delta", "dkdv", "dq"]
    right = F.scaled_dot_product_attention(*inputs, is_causal=True) * 2
    close(out, right)
    for found, wanted in zip(gradients, torch.autograd.grad(right.sum(), inputs)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=4e-2)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_the_function_compiles_into_the_graph_that_it_was(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[list[str]] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(names(module.graph))
        return module

    def run() -> Tensor:
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep)
        with torch.no_grad():
            found: Tensor = torch.compile(F.scaled_dot_product_attention, backend=backend, fullgraph=True)(
                *qkv(dtype=dtype)
            )
        return found

    before = run()
    with originals.served(monkeypatch):
        assert torch.equal(run(), before)
    assert graphs[0] == graphs[1] != []


@pytest.mark.parametrize("compiled_before", [False, True])
def test_grouped_heads_are_compiled_without_the_plain_formula(
    compiled_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch takes the formula for them on Turing; with repeated keys it takes a fused kernel."""
    inputs = qkv(heads_k=2)
    heads: list[list[int]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in module.graph.nodes:
            if "scaled_dot_product" in str(node.target):
                heads.append([x.meta["val"].shape[1] for x in node.args[:3]])
        return module

    def compiled() -> Tensor:
        torch._dynamo.reset()
        found: Tensor = torch.compile(attend, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*inputs)
        return found

    if compiled_before:
        compiled()
        heads.clear()
    with originals.served(monkeypatch):
        out = compiled()
        gradients = torch.autograd.grad(out.sum(), inputs)
        right = attend(*inputs)
    assert heads[0] == [4, 4, 4]
    close(out, right)
    for found, wanted in zip(gradients, torch.autograd.grad(right.sum(), inputs)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)


def test_export_and_traces_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def found() -> tuple[list[str], list[str], str]:
        inputs = tuple(x.detach() for x in qkv())
        exported = torch.export.export(Layer(), inputs)
        traced = torch.jit.trace(Layer(), inputs, check_trace=False)
        return (
            names(exported.graph),
            names(make_fx(Layer())(*inputs).graph),
            str(traced.graph).count("scaled_dot") * "x",
        )

    before = found()
    assert all(before)
    with originals.served(monkeypatch):
        assert found() == before


def test_exported_and_traced_programs_are_served_when_run(served: LaunchRecord) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    inputs = tuple(x.detach() for x in qkv())
    right = F.scaled_dot_product_attention(*inputs, is_causal=True)
    for program in (torch.export.export(Layer(), inputs).module(), torch.jit.trace(Layer(), inputs, check_trace=False)):
        times = counted()["fused"]
        assert torch.equal(program(*inputs), right) and counted()["fused"] == times + 1


def test_distributed_tensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = [x.detach() for x in qkv()]
        inputs = [distribute_tensor(x, mesh, [Shard(1)]) for x in local]
        with originals.cpu_stand_ins(), originals.served(monkeypatch) as launches:
            out = aten._scaled_dot_product_efficient_attention(*inputs, None, False, 0.0, True)[0]
            assert counted() == {"fused": 1} and launches.entries == ["forward"]
            close(out.full_tensor(), F.scaled_dot_product_attention(*local, is_causal=True))
    finally:
        dist.destroy_process_group()
