"""Compiled graphs with the switch and without one lie side by side, in a process and in PyTorch's caches on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from flash_attn_compat.torch_sdpa import graphs
from tests.forms.inputs import randn
from tests.sdpa import originals

Compiled = Callable[..., Tensor]
config: Any = getattr(torch.compiler, "config", None)


def qkv(heads_k: int = 2) -> list[Tensor]:
    shapes = (1, 4, 24, 32), (1, heads_k, 24, 32), (1, heads_k, 24, 32)
    return [randn(*shape, seed=seed, dtype=torch.float16) for seed, shape in enumerate(shapes)]


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.fixture
def compiled() -> Iterator[list[bool]]:
    """Whether each graph that was compiled repeats its keys."""
    torch._dynamo.reset()
    tag = getattr(config, "cache_key_tag", None)
    with originals.override_on():  # from the first switch on
        pass
    yield []
    torch._dynamo.reset()
    if tag is not None:
        config.cache_key_tag = tag


def compile_into(found: list[bool], attend: Compiled = grouped) -> Compiled:
    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        fused = [node for node in module.graph.nodes if "scaled_dot_product" in str(node.target)]
        found.append(any(node.args[1].meta["val"].shape[1] == 4 for node in fused))
        return module

    made: Compiled = torch.compile(attend, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    return made


@torch.no_grad()
def test_a_compiled_call_has_a_graph_for_each_state_of_the_switch(compiled: list[bool]) -> None:
    call, inputs = compile_into(compiled), qkv()
    for _ in range(2):
        call(*inputs)
        with originals.override_on():
            call(*inputs)
    assert compiled == [False, True]


@torch.no_grad()
def test_a_graph_from_before_the_first_switch_is_compiled_anew(
    compiled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs._State, "is_watching", False)
    monkeypatch.delitem(graphs._OPERATOR.py_kernels, graphs._COMPOSED)
    graphs._OPERATOR._dispatch_cache.clear()
    call, inputs = compile_into(compiled), qkv()
    call(*inputs)
    with originals.override_on():
        call(*inputs)
    assert compiled == [False, True]


@torch.no_grad()
def test_graphs_that_the_switch_does_not_change_serve_both(compiled: list[bool]) -> None:
    call, inputs = compile_into(compiled, F.scaled_dot_product_attention), qkv(heads_k=4)
    call(*inputs)
    with originals.override_on():
        call(*inputs)
    assert len(compiled) == 1


@torch.no_grad()
@pytest.mark.thorough  # compiles C++ twice, which takes half a minute
@pytest.mark.skipif(not getattr(torch._functorch.config, "enable_autograd_cache", False), reason="no such cache")
def test_a_cache_on_disk_holds_a_graph_for_each_state_of_the_switch(
    compiled: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked up as by another process, which has compiled nothing yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs = qkv()

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
def test_a_tag_of_the_users_own_stays(compiled: list[bool]) -> None:
    config.cache_key_tag = "mine"
    call, inputs = compile_into(compiled), qkv()
    with originals.override_on():
        call(*inputs)
    assert config.cache_key_tag.startswith("mine|flash_attn_compat.sdpa=")
    call(*inputs)
    assert config.cache_key_tag == "mine"
