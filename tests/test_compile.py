"""torch.compile(fullgraph=True) through every public function, forward and backward, equal to the eager call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn_compat import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.engine.call import AttentionCall, Result
from flash_attn_compat.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from flash_attn_compat.serving import dispatch
from tests.support import close, cumulative, qkv, randn


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """A graph break anywhere is an error."""
    return torch.compile(function, fullgraph=True, backend="aot_eager", **kwargs)


def check_compiled(function: Callable[..., Tensor], inputs: list[Tensor], *args: Any, **kwargs: Any) -> None:
    """Output and gradients of the compiled function are those of the eager one."""

    def both(call: Callable[..., Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = call(*leaves, *args, **kwargs)
        return out, torch.autograd.grad((out * out.detach().cos()).sum(), leaves)

    (out, grads), (right, right_grads) = both(compiled(function)), both(function)
    close(out, right)
    for ours, wanted in zip(grads, right_grads, strict=True):
        close(ours, wanted, 4)


OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(3, 1)),
    "alibi": dict(alibi_slopes=torch.tensor([0.3, 0.1])),
    "softcap": dict(softcap=2.0, softmax_scale=0.3),
    "deterministic": dict(deterministic=True),
}


@pytest.mark.parametrize("option", ["causal", "alibi", "softcap"])
def test_dense(option: str) -> None:
    check_compiled(flash_attn_func, list(qkv(sq=5, sk=9)), **OPTIONS[option])


def packed() -> tuple[list[Tensor], tuple[Tensor, Tensor, int, int]]:
    inputs = [randn(8, 2, 16, seed=1), randn(11, 2, 16, seed=2), randn(11, 2, 16, seed=3)]
    return inputs, (cumulative(3, 5), cumulative(4, 7), 5, 7)


@pytest.mark.parametrize("option", ["plain", "window", "deterministic"])
def test_varlen(option: str) -> None:
    inputs, lengths = packed()
    check_compiled(flash_attn_varlen_func, inputs, *lengths, **OPTIONS[option])


def test_varlen_with_max_seqlen_computed_inside_the_graph() -> None:
    """What models do that derive the lengths from a mask."""

    def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return flash_attn_varlen_func(q, k, v, cu, cu, lengths.max(), lengths.max(), causal=True)

    inputs = [randn(8, 2, 16, seed=seed) for seed in range(3)]
    check_compiled(attention, inputs, torch.tensor([3, 5]))


def test_varlen_qkvpacked() -> None:
    check_compiled(flash_attn_varlen_qkvpacked_func, [randn(8, 3, 2, 16)], cumulative(3, 5), 5, causal=True)


def test_varlen_over_pages() -> None:
    k, v, q = randn(4, 4, 2, 16, seed=1), randn(4, 4, 2, 16, seed=2), randn(5, 2, 16)
    args = (q, k, v, cumulative(2, 3), cumulative(6, 3), 3, 6)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    close(compiled(flash_attn_varlen_func)(*args, block_table=table), flash_attn_varlen_func(*args, block_table=table))


@pytest.mark.parametrize("longest", [(5, 7), (5, torch.tensor(130))])
def test_s_dmask_has_its_eager_shape_however_the_longest_lengths_are_given(longest: tuple[Any, Any]) -> None:
    if isinstance(longest[1], Tensor) and TorchVersion(torch.__version__) < "2.5":
        pytest.skip("PyTorch 2.4 compiles shapes that a tensor decides with capture_dynamic_output_shape_ops only")
    (q, k, v), (cu_q, cu_k, *_) = packed()

    def probabilities(*lengths: Any) -> tuple[Tensor, int]:
        s_dmask = flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, *lengths, dropout_p=0.3, causal=True, return_attn_probs=True
        )[2]
        return s_dmask.abs() + 1, s_dmask.shape[-1]  # a kernel that was compiled for a shape

    torch.manual_seed(0)
    right, keys = probabilities(*longest)
    torch.manual_seed(0)
    ours, compiled_keys = compiled(probabilities)(*longest)
    assert ours.shape == right.shape and compiled_keys == keys
    close(ours, right)


class Recorder(Reference):
    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def forward(self, call: AttentionCall) -> Result:
        self.calls.append(call)
        return super().forward(call)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    backend = Recorder()
    monkeypatch.setattr(dispatch, "BACKENDS", (backend,))
    dispatch.forget_decisions()
    yield backend
    dispatch.forget_decisions()


@pytest.mark.parametrize(
    ("requires_grad", "mode", "needs_grad", "return_attn_probs"),
    [
        (True, torch.enable_grad, True, False),
        (False, torch.enable_grad, False, True),
        (True, torch.no_grad, False, False),
        (False, torch.inference_mode, False, True),
    ],
)
def test_a_compiled_call_asks_for_what_its_eager_one_asks_for(
    recorder: Recorder, requires_grad: bool, mode: Any, needs_grad: bool, return_attn_probs: bool
) -> None:
    """Gradients and LSE are features that not every backend has."""
    q, k, v = randn(5, 2, 16), randn(4, 4, 2, 16, seed=1), randn(4, 4, 2, 16, seed=2)
    q.requires_grad_(requires_grad)
    args = (q, k, v, cumulative(2, 3), cumulative(6, 3), 3, 6)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    with mode():
        for function in (flash_attn_varlen_func, compiled(flash_attn_varlen_func)):
            function(*args, return_attn_probs=return_attn_probs, block_table=table)
    eager, ours = recorder.calls
    assert eager.needs_grad == ours.needs_grad == needs_grad
    assert ours.return_lse == (return_attn_probs or needs_grad) and eager.return_lse == return_attn_probs


@pytest.mark.parametrize("return_softmax_lse", [False, True])
def test_a_compiled_call_over_a_cache_asks_for_the_lse_only_where_it_is_returned(
    recorder: Recorder, return_softmax_lse: bool
) -> None:
    args = randn(2, 1, 4, 16), randn(2, 20, 2, 16, seed=5), randn(2, 20, 2, 16, seed=6)
    compiled(flash_attn_with_kvcache)(*args, cache_seqlens=7, return_softmax_lse=return_softmax_lse)
    assert [call.return_lse for call in recorder.calls] == [return_softmax_lse]


def test_dropout_uses_one_mask_forward_and_backward() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    out, _, s_dmask = compiled(flash_attn_func)(q, k, v, dropout_p=0.4, return_attn_probs=True)
    (dv,) = torch.autograd.grad(out.sum(), v)
    keep = (s_dmask[:, :, :7, :7] >= 0).double()
    probs = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k).double() / 4, -1) * keep / 0.6
    close(out, torch.einsum("bhqk,bkhd->bqhd", probs, v.double()), 4)
    close(dv, probs.sum(2)[..., None].transpose(1, 2).expand(-1, -1, -1, 16), 4)


def test_kvcache_with_an_append_and_rotary_writes_the_same_cache() -> None:
    def step(cache: tuple[Tensor, Tensor], call: Callable[..., Any]) -> Any:
        q, k, v = randn(2, 3, 4, 16, seed=1), randn(2, 3, 2, 16, seed=2), randn(2, 3, 2, 16, seed=3)
        cos, sin = randn(20, 8, seed=4).cos(), randn(20, 8, seed=4).sin()
        lengths = torch.tensor([4, 9], dtype=torch.int32)
        return call(q, *cache, k, v, cos, sin, cache_seqlens=lengths, causal=True, return_softmax_lse=True)

    caches = [(randn(2, 20, 2, 16, seed=5), randn(2, 20, 2, 16, seed=6)) for _ in range(2)]
    (out, lse), (right, right_lse) = (
        step(caches[0], compiled(flash_attn_with_kvcache)),
        step(caches[1], flash_attn_with_kvcache),
    )
    close(out, right)
    close(lse, right_lse)
    for ours, wanted in zip(*caches, strict=True):
        assert torch.equal(ours, wanted)


def test_kvcache_with_an_int_length_that_grows() -> None:
    def step(cache: tuple[Tensor, Tensor], length: int, call: Callable[..., Any]) -> Any:
        q, k, v = randn(2, 1, 4, 16, seed=length), randn(2, 1, 2, 16, seed=2), randn(2, 1, 2, 16, seed=3)
        return call(q, *cache, k, v, cache_seqlens=length, causal=True)

    caches = [(randn(2, 20, 2, 16, seed=5), randn(2, 20, 2, 16, seed=6)) for _ in range(2)]
    whole = compiled(flash_attn_with_kvcache, dynamic=None)
    for length in (4, 5, 6, 19):
        close(step(caches[0], length, whole), step(caches[1], length, flash_attn_with_kvcache))
        assert torch.equal(caches[0][0], caches[1][0])
    with pytest.raises(RuntimeError, match="exceeds the capacity"):
        step(caches[0], 20, whole)


@pytest.mark.parametrize("varlen", [False, True])
def test_the_private_functions(varlen: bool) -> None:
    """As ring attention calls them: a forward and a backward that writes into given gradients."""
    (q, k, v), lengths = packed()
    if not varlen:
        (q, k, v), lengths = qkv(sq=5, sk=9), ()
    options = dict(dropout_p=0.0, softmax_scale=0.25, causal=True, window_size_left=-1, window_size_right=-1)
    more = dict(softcap=0.0, alibi_slopes=None)
    forward = _flash_attn_varlen_forward if varlen else _flash_attn_forward
    backward = _flash_attn_varlen_backward if varlen else _flash_attn_backward

    def step(q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
        out, lse, _, rng_state = forward(q, k, v, *lengths, **options, **more, return_softmax=False)
        given = (out.cos(), q, k, v, out, lse, dq, dk, dv, *lengths)
        softmax_d = backward(*given, **options, **more, deterministic=False, rng_state=rng_state)
        return out, lse, softmax_d, dq, dk, dv

    grads = [tuple(torch.zeros_like(x) for x in (q, k, v)) for _ in range(2)]
    ours, right = compiled(step)(q, k, v, *grads[0]), step(q, k, v, *grads[1])
    for a, b in zip((*ours, *grads[0]), (*right, *grads[1]), strict=True):
        close(a, b, 4)
    assert all(grad.any() for grad in grads[0])


def test_another_length_does_not_compile_again_once_it_is_dynamic() -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    attention = torch.compile(flash_attn_func, fullgraph=True, backend=counting, dynamic=True)
    for seqlen in (5, 9, 17, 33):
        q, k, v = qkv(sq=seqlen, sk=seqlen)
        close(attention(q, k, v, causal=True), flash_attn_func(q, k, v, causal=True))
    assert len(graphs) <= 2


def test_a_graph_holds_one_node_of_our_own_namespace_per_call() -> None:
    graphs = []

    def keeping(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compile(flash_attn_func, fullgraph=True, backend=keeping)(*qkv(), causal=True)
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("flash_attn_compat" in target for target in targets) == 1
    assert not any(target.startswith("flash_attn.") for target in targets)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def test_eager_calls_do_not_pass_through_custom_ops() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    cu = cumulative(7, 7)
    with _Operators() as operators:
        flash_attn_func(q, k, v).sum().backward()
        flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 7, 7)
        flash_attn_with_kvcache(q.detach(), k.detach(), v.detach(), cache_seqlens=3)
    assert operators.seen and not [name for name in operators.seen if not name.startswith(("aten.", "prim."))]


@pytest.mark.parametrize(
    ("option", "backward"), [("plain", True), ("causal", False), ("dropout", True), ("heads_first", True)]
)
def test_the_fake_kernels_know_shapes_dtypes_and_strides(option: str, backward: bool) -> None:
    kwargs = dict(dropout_p=0.3, return_attn_probs=True) if option == "dropout" else OPTIONS.get(option, {})
    inputs = qkv(sq=5, sk=9)
    if option == "heads_first":
        inputs = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)
    for op, args in _ops_called(inputs, kwargs, backward):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def _ops_called(
    inputs: tuple[Tensor, ...], kwargs: dict[str, Any], backward: bool
) -> list[tuple[Any, tuple[Any, ...]]]:
    """Our custom ops with the arguments that a compiled call passes to them, read while its graph runs."""
    called: list[tuple[Any, tuple[Any, ...]]] = []

    class Reading(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if "flash_attn_compat" in str(target):
                called.append((target, args))
            return super().call_function(target, args, kwargs)

    def reading(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with torch.no_grad():
                return Reading(graph).run(*args)

        return make_boxed_func(run)

    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    returned = torch.compile(flash_attn_func, fullgraph=True, backend=aot_autograd(fw_compiler=reading))(
        *leaves, **kwargs
    )
    if backward:
        (returned[0] if isinstance(returned, tuple) else returned).sum().backward()
    assert len(called) == 1 + backward
    return called
