"""The switch, in threads and graphs; compilers, traces, modes and DTensors see PyTorch's operators."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

from flash_attn_compat import reset_backend_counts
from flash_attn_compat.core.torch_state import as_decided
from flash_attn_compat.torch_sdpa import attention, graphs, override
from flash_attn_compat.torch_sdpa import efficient as operators
from flash_attn_compat.torch_sdpa.policy import Policy
from tests.forms.inputs import heads_first, randn
from tests.forms.kinds import Operators, Wrapper
from tests.forms.support import in_threads
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.sdpa import originals
from tests.sdpa.originals import counted

HALF = torch.float16
aten = torch.ops.aten


def leaves(heads_k: int = 4, dtype: torch.dtype = HALF) -> list[Tensor]:
    return heads_first(2, 24, 24, 4, heads_k, 32, dtype=dtype)


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
            F.scaled_dot_product_attention(*leaves())
        return mode.seen

    before = seen()
    with originals.served(monkeypatch):
        assert seen() == before


def test_operators_that_a_mode_executes_are_served(served: LaunchRecord) -> None:
    inputs = leaves()
    with Operators() as mode:
        out = efficient(*inputs)
    assert mode.seen[0] == "aten._scaled_dot_product_efficient_attention.default" and counted() == {"fused": 1}
    close(out, F.scaled_dot_product_attention(*leaves(), is_causal=True))


def test_problems_are_named_as_the_operators_arguments() -> None:
    for operator in (aten._efficient_attention_forward, aten._efficient_attention_backward):
        names = {argument.name for argument in operator.default._schema.arguments} | {"seqlen_k"}
        assert names.issuperset(operators.Problem._fields)


def test_a_fake_call_goes_to_its_meta_function(recorded: LaunchRecord) -> None:
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x).transpose(1, 2) for x in leaves())
        out, lse, *_ = aten._efficient_attention_forward(q, k, v, *(None,) * 5, 0.0, 0, True)
    assert out.shape == q.shape and lse.shape == (2, 4, 32) and counted() == {}


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
def test_operators_that_a_tensor_subclass_executes_are_served(served: LaunchRecord) -> None:
    inputs = [x.detach() for x in leaves()]
    with originals.as_on_turing():
        out = F.scaled_dot_product_attention(*map(Wrapper, inputs), is_causal=True)
    assert isinstance(out, Wrapper) and counted() == {"fused": 1}
    close(out._held, F.scaled_dot_product_attention(*inputs, is_causal=True))


def test_a_compiled_graph_calls_the_operators_that_are_served(served: LaunchRecord) -> None:
    torch._dynamo.reset()
    inputs = leaves()
    compiled: Callable[..., Tensor] = torch.compile(lambda *x: efficient(*x) * 2, backend="aot_eager", fullgraph=True)
    out = compiled(*inputs)
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert counted() == {"fused": 1} and served.entries[-3:] == ["delta", "dkdv", "dq"]
    right = F.scaled_dot_product_attention(*inputs, is_causal=True) * 2
    close(out, right)
    for found, wanted in zip(gradients, torch.autograd.grad(right.sum(), inputs)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=4e-2)


Compiled = Callable[..., Tensor]
Seen = list[list[tuple[str, list[int]]]]


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def compile_into(seen: Seen, attend: Compiled = grouped) -> Compiled:
    """``attend`` compiled anew; of each of its graphs, the operators of attention with the heads of q, k and v."""

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = (node for node in module.graph.nodes if "dot_product" in str(node.target))
        seen.append([(str(node.target), [x.meta["val"].shape[1] for x in node.args[:3]]) for node in nodes])
        return module

    torch._dynamo.reset()
    made: Compiled = torch.compile(attend, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    return made


@torch.no_grad()
@pytest.mark.parametrize("dtype", [HALF, pytest.param(torch.float32, marks=pytest.mark.thorough)])
def test_the_function_compiles_into_the_graph_that_it_was(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Seen = []
    before = compile_into(seen, F.scaled_dot_product_attention)(*leaves(dtype=dtype))
    with originals.served(monkeypatch):
        assert torch.equal(compile_into(seen, F.scaled_dot_product_attention)(*leaves(dtype=dtype)), before)
    assert seen[0] == seen[1] != []


@pytest.mark.parametrize("compiled_before", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_grouped_heads_are_compiled_without_the_plain_formula(
    compiled_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch takes the formula for them on Turing; with repeated keys it takes a fused kernel."""
    inputs, seen = leaves(heads_k=2), []
    if compiled_before:
        compile_into([])(*inputs)
    with originals.served(monkeypatch):
        out = compile_into(seen)(*inputs)
        gradients = torch.autograd.grad(out.sum(), inputs)
        right = grouped(*inputs)
    assert seen[0][0][1] == [4, 4, 4]
    close(out, right)
    for found, wanted in zip(gradients, torch.autograd.grad(right.sum(), inputs)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_exports_and_traces_are_as_before_and_served_when_run(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tuple(x.detach() for x in leaves())

    def found() -> tuple[list[Any], tuple[Any, ...]]:
        exported = torch.export.export(Layer(), inputs)
        traced = torch.jit.trace(Layer(), inputs, check_trace=False)
        seen = names(exported.graph), names(make_fx(Layer())(*inputs).graph), str(traced.graph).count("scaled_dot")
        return [exported.module(), traced], seen

    _, before = found()
    assert all(before)
    with originals.cpu_stand_ins(), originals.served(monkeypatch):
        programs, now = found()
        assert now == before
        right = F.scaled_dot_product_attention(*inputs, is_causal=True)
        for program in programs:
            times = counted()["fused"]
            assert torch.equal(program(*inputs), right) and counted()["fused"] == times + 1


def test_distributed_tensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = [x.detach() for x in leaves()]
        inputs = [distribute_tensor(x, mesh, [Shard(1)]) for x in local]
        with originals.cpu_stand_ins(), originals.served(monkeypatch) as launches:
            out = aten._scaled_dot_product_efficient_attention(*inputs, None, False, 0.0, True)[0]
            assert counted() == {"fused": 1} and launches.entries == ["forward"]
            close(out.full_tensor(), F.scaled_dot_product_attention(*local, is_causal=True))
    finally:
        dist.destroy_process_group()


# ---------------------------- on, off, twice, nested, from threads, by PyTorch's own hook: then everything is as it was

lists_kernels = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.6", reason="before 2.6 PyTorch does not list where Python registered a kernel"
)


def leaves_nothing(test: Any) -> Any:
    """Of a test that must leave the operators as it found them."""
    return lists_kernels(pytest.mark.usefixtures("operators_stay")(test))


OPERATORS = (attention.NAME, operators.FORWARD, operators.BACKWARD)


def tables() -> list[str]:
    """Return the dispatcher's table of each operator."""
    return [torch._C._dispatch_dump_table(f"aten::{name}") for name in OPERATORS]


def ours() -> list[int]:
    """How many keys of each operator are ours."""
    return [table.count("torch_sdpa/override.py") for table in tables()]


@pytest.fixture
def operators_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of one thread: pytest-xdist has others, which call nothing."""
    monkeypatch.setattr(override, "_other_threads_run", lambda: False)
    with originals.override_on():  # what earlier tests may have left goes
        pass
    before = tables()
    yield
    assert tables() == before and override.active_policy() is None and sum(ours()) == 0


@leaves_nothing
def test_blocks_nest_and_overlap_and_the_widest_policy_applies_while_it_is_held() -> None:
    with override.sdpa():
        within = tables()
        assert ours() == [2, 1, 1] and override.active_policy() == Policy()
        with override.sdpa():
            assert tables() == within
        with override.sdpa(always=True):
            assert override.active_policy() == Policy(always=True)
        assert tables() == within and override.active_policy() == Policy()
    first, second = override.sdpa(), override.sdpa(always=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert override.active_policy() == Policy(always=True)
    second.__exit__(None, None, None)


@leaves_nothing
def test_an_override_stays_registered_beside_other_threads_and_passes_all_calls(
    monkeypatch: pytest.MonkeyPatch, served: LaunchRecord
) -> None:
    """A thread that waits for the GIL in front of an implementation would run freed memory."""
    q = randn(1, 2, 20, 32, dtype=torch.float16)
    efficient_before = torch.ops.aten._efficient_attention_forward(q, q, q, *(None,) * 5, 0.0, 0)[0]
    monkeypatch.setattr(override, "_other_threads_run", lambda: True)
    monkeypatch.setattr(override._held, "policies", [])
    override._activate(None)
    assert override.active_policy() is None and ours() == [2, 1, 1]
    reset_backend_counts()
    F.scaled_dot_product_attention(q, q, q)
    found = torch.ops.aten._efficient_attention_forward(q, q, q, *(None,) * 5, 0.0, 0)[0]
    close(found, efficient_before)
    assert counted() == {}
    with originals.override_on():
        F.scaled_dot_product_attention(q, q, q)
    assert counted() == {"fused": 1} and override.active_policy() is None and ours() == [2, 1, 1]
    monkeypatch.undo()
    monkeypatch.setattr(override, "_other_threads_run", lambda: False)
    with originals.override_on():
        pass


@leaves_nothing
def test_threads_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert override._other_threads_run()
    finally:
        end.set()
        thread.join()
    monkeypatch.setattr(override, "_other_threads_run", lambda: False)


@leaves_nothing
def test_an_error_in_a_block_or_a_registration_leaves_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise KeyError

    with pytest.raises(KeyError), override.sdpa():
        fail()
    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(override, "_register", fail)
        override.acquire(Policy())
    assert override.active_policy() is None and not override._held.policies


@leaves_nothing
def test_calls_are_served_in_all_threads_whatever_is_declined_in_one(recorded: LaunchRecord) -> None:
    q = randn(1, 2, 20, 32, dtype=torch.float16)

    def work() -> None:
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q)
            with originals.override_on():
                F.scaled_dot_product_attention(q, q, q)

    in_threads(work, 3)
    assert counted() == {"fused": 18}
    as_decided(lambda: in_threads(lambda: aten._efficient_attention_forward(q, q, q, *(None,) * 5, 0.0, 0), 1))
    assert counted() == {"fused": 19}


@leaves_nothing
@pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="PyTorch 2.11 brought it")
def test_pytorchs_own_hook_switches_it_on_and_off() -> None:
    override.register_with_torch()
    assert override.HOOK in torch.nn.attention.list_flash_attention_impls() and ours() == [0, 0, 0]
    torch.nn.attention.activate_flash_attention_impl(override.HOOK)
    torch.nn.attention.activate_flash_attention_impl(override.HOOK)
    assert ours() == [2, 1, 1] and override.active_policy() == Policy(always=True)
    torch.nn.attention.restore_flash_attention_impl()


@leaves_nothing
def test_without_the_hook_the_other_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match=r"patch\(sdpa=True\)"):
        override.register_with_torch()


# ------------------------------------ graphs with the switch and without one lie side by side, in a process and on disk

config: Any = getattr(torch.compiler, "config", None)


@pytest.fixture
def compiled() -> Iterator[Seen]:
    tag = getattr(config, "cache_key_tag", None)
    with originals.override_on():  # from the first switch on
        pass
    yield []
    torch._dynamo.reset()
    if tag is not None:
        config.cache_key_tag = tag


@torch.no_grad()
@pytest.mark.parametrize("before_the_first", [False, True])
def test_a_compiled_call_has_a_graph_for_each_state_of_the_switch(
    before_the_first: bool, compiled: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before_the_first:
        monkeypatch.setattr(graphs._State, "is_watching", False)
        monkeypatch.delitem(graphs._OPERATOR.py_kernels, graphs._COMPOSED)
        graphs._OPERATOR._dispatch_cache.clear()
    call, inputs = compile_into(compiled), [x.detach() for x in leaves(2)]
    for _ in range(1 if before_the_first else 2):
        call(*inputs)
        with originals.override_on():
            call(*inputs)
    assert [any(heads[1] == 4 for _, heads in graph) for graph in compiled] == [False, True]


@torch.no_grad()
def test_graphs_that_the_switch_does_not_change_serve_both(compiled: Seen) -> None:
    call, inputs = compile_into(compiled, F.scaled_dot_product_attention), [x.detach() for x in leaves()]
    call(*inputs)
    with originals.override_on():
        call(*inputs)
    assert len(compiled) == 1


@torch.no_grad()
@pytest.mark.thorough  # compiles C++ twice, which takes half a minute
@pytest.mark.skipif(not getattr(torch._functorch.config, "enable_autograd_cache", False), reason="no such cache")
def test_a_cache_on_disk_holds_a_graph_for_each_state_of_the_switch(
    compiled: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked up as by another process, which has compiled nothing yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs = [x.detach() for x in leaves(2)]

    def is_found(is_on: bool) -> bool:
        torch._dynamo.reset()
        counters.clear()
        with originals.override_on() if is_on else contextlib.nullcontext():
            torch.compile(grouped, backend="inductor", fullgraph=True)(*inputs)
        hits, misses = (counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss"))
        assert hits + misses == 1
        return hits == 1

    assert [is_found(is_on) for is_on in (False, True, False, True)] == [False, False, True, True]


@torch.no_grad()
@pytest.mark.skipif(not isinstance(getattr(config, "cache_key_tag", None), str), reason="PyTorch 2.7 brought it")
def test_a_tag_of_the_users_own_stays(compiled: Seen) -> None:
    config.cache_key_tag = "mine"
    call, inputs = compile_into(compiled), [x.detach() for x in leaves(2)]
    with originals.override_on():
        call(*inputs)
    assert config.cache_key_tag.startswith("mine|flash_attn_compat.sdpa=")
    call(*inputs)
    assert config.cache_key_tag == "mine"
