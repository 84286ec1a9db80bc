"""Graphs have the derivatives of autograd that their eager calls have, and refuse transforms; modes change nothing.

test_derivatives.py holds eager derivatives against the formula.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_compat import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
from tests.plain import pairwise, some_of
from tests.support import cumulative, ints, randn

Function = Callable[..., Any]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def doubles(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, seed=seed).double()


SLOPES = torch.tensor([0.3, 0.1, 0.2, 0.4])
STARTS_Q, STARTS_K = cumulative(3, 0, 5), cumulative(4, 2, 8)
K, V = doubles(1, 7, 2, 8, seed=1), doubles(1, 7, 2, 8, seed=2)
PACKED_Q, PACKED_K, PACKED_V = doubles(8, 4, 8), doubles(14, 2, 8, seed=1), doubles(14, 2, 8, seed=2)
PAGES_K, PAGES_V, TABLE = doubles(6, 4, 2, 8, seed=1), doubles(6, 4, 2, 8, seed=2), ints(2, 0, 5, 1, 3, 4).view(2, 3)
PAGED_Q, LENGTHS_K = cumulative(3, 5), cumulative(9, 6)


def dense(q: Tensor) -> Any:
    return flash_attn_func(q, K, V, causal=True)


def sinks(q: Tensor) -> Any:
    return flash_attn_func(q, K, V, window_size=(2, 1), s_aux=SLOPES.double())


def qkv(x: Tensor) -> Any:
    return flash_attn_qkvpacked_func(x, causal=True)


def packed(q: Tensor) -> Any:
    """One sequence has no rows, one token belongs to none."""
    options: dict[str, Any] = dict(causal=True, alibi_slopes=SLOPES, return_attn_probs=True)
    return flash_attn_varlen_func(q, PACKED_K, PACKED_V, STARTS_Q, STARTS_K, 5, 8, **options)[:2]


def packed_keys(k: Tensor) -> Any:
    return flash_attn_varlen_func(PACKED_Q, k, k.cos(), STARTS_Q, STARTS_K, 5, 8, window_size=(1, 2), softcap=1.5)


def paged(q: Tensor) -> Any:
    return flash_attn_varlen_func(q, PAGES_K, PAGES_V, PAGED_Q, LENGTHS_K, 5, 9, causal=True, block_table=TABLE)


def slopes(x: Tensor) -> Any:
    """The slopes are differentiated, too, and the scale is a tensor."""
    q, trained, scale = x[..., :8], x[0, 0, :, 8].float(), x[0, 0, 0, 9]
    return flash_attn_func(q, K, V, softmax_scale=scale, causal=True, alibi_slopes=trained)


def dropped(q: Tensor) -> Any:
    torch.manual_seed(0)
    return flash_attn_func(q, K, V, dropout_p=0.4)


DENSE = 1, 5, 4, 8
SHAPES = {slopes: (1, 5, 4, 10), sinks: DENSE, qkv: (1, 5, 3, 2, 8)}
SHAPES |= {packed: (9, 4, 8), packed_keys: (14, 2, 8), paged: (8, 4, 8)}


def flat(call: Function) -> Function:
    """All results in one tensor."""

    def one(x: Tensor) -> Tensor:
        found = call(x)
        return torch.cat([y.flatten() for y in (found if isinstance(found, tuple) else (found,))])

    return one


# ---------------------------------------------------------------- every way to differentiate


def jvp(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    return torch.func.jvp(function, (x,), (tangent,))[1]


def dual(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found: Tensor = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent
        return found


def recorded_dual(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    return dual(function, x.detach().requires_grad_(), tangent).detach()


def grad(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda y: function(y).sin().sum())(x)
    return found


def jacrev(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    found: Tensor = torch.func.jacrev(lambda y: function(y)[:3].sin())(x)
    return found


def vmap(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    found: Tensor = torch.func.vmap(function)(torch.stack([x, tangent]))
    return found


def jvp_of_grad(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    return jvp(torch.func.grad(lambda y: function(y).sin().sum()), x, tangent)


def vmap_of_grad(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    found: Tensor = torch.func.vmap(torch.func.grad(lambda y: function(y).sin().sum()))(torch.stack([x, tangent]))
    return found


def backward_of_vmap(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    both = torch.stack([x, tangent]).requires_grad_()
    return torch.autograd.grad(torch.func.vmap(function)(both).sin().sum(), both)[0]


def twice(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad((first * tangent).sum(), x)[0]


def batched_gradients(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = function(x)
    return torch.autograd.grad(out, x, torch.stack([out.detach().sin(), out.detach().cos()]), is_grads_batched=True)[0]


# ---------------------------------------------------------------- every way to become an operator


def compiled(backend: str, fullgraph: bool = True) -> Function:
    """The derivative is computed in the graph."""

    def run(derive: Function, function: Function, x: Tensor, tangent: Tensor) -> Tensor:
        graph = torch.compile(lambda x, t: derive(function, x, t), backend=backend, fullgraph=fullgraph)
        found: Tensor = graph(x, tangent)
        return found

    return run


def of(trace: Callable[[Function, Tensor], Function]) -> Function:
    """The derivative of a graph; other numbers are traced."""
    return lambda derive, function, x, tangent: derive(trace(function, x.flip(0)), x, tangent)


def traced(function: Function, x: Tensor) -> Function:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found: Function = torch.jit.trace(function, x, check_trace=False)
    return found


def exported(function: Function, x: Tensor) -> Function:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = function(x)
            return found

    return torch.export.export(Module(), (x.requires_grad_(),), strict=False).module()


def under_a_mode(derive: Function, function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        found: Tensor = derive(function, x, tangent)
    return found


AROUND = "of a compiled function"
GRAPHS: dict[str, Function] = {
    "compiled": compiled("aot_eager"),
    "compiled, run by Python": compiled("eager"),
    "compiled, may break": compiled("aot_eager", fullgraph=False),
    AROUND: of(lambda function, x: torch.compile(function, backend="eager")),
    "jit.trace": of(traced),
    "make_fx": of(lambda function, x: make_fx(function)(x.requires_grad_())),
    "export": of(exported),
    "mode": under_a_mode,
}
TRANSFORMS = jvp, dual, recorded_dual, grad, jacrev, vmap, jvp_of_grad, vmap_of_grad  # what Dynamo can trace
AUTOGRAD = twice, batched_gradients
COMPILED = [name for name in GRAPHS if name.startswith("compiled")]
OTHERS = [name for name in GRAPHS if name not in COMPILED]
CASES = [
    *some_of(pairwise(OTHERS, AUTOGRAD, SHAPES), 5),
    *some_of(pairwise(["mode"], (*TRANSFORMS, backward_of_vmap), SHAPES), 5),
]


@pytest.mark.parametrize(("graph", "derive", "call"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_graph_has_the_derivatives_of_its_eager_call(graph: str, derive: Function, call: Function) -> None:
    x, tangent = doubles(*SHAPES[call]), doubles(*SHAPES[call], seed=5)
    found = GRAPHS[graph](derive, flat(call), x.clone(), tangent)
    bound = 1e-5 if call is slopes else 1e-9  # slopes are fp32
    torch.testing.assert_close(found, derive(flat(call), x, tangent), rtol=bound, atol=bound)


REFUSED = some_of(pairwise([*COMPILED, "jit.trace", "make_fx", "export"], TRANSFORMS, SHAPES), 12)


@pytest.mark.parametrize(("graph", "derive", "call"), REFUSED, ids=lambda x: getattr(x, "__name__", x))
def test_a_graph_refuses_transforms_by_name(graph: str, derive: Function, call: Function) -> None:
    version = TorchVersion(torch.__version__)
    if graph in COMPILED and ((derive is recorded_dual and version < "2.13") or (derive is jacrev and version < "2.5")):
        pytest.skip("Dynamo of PyTorch 2.11 traces no requires_grad_(), that of 2.4 no torch.func.jacrev")
    x, tangent = doubles(*SHAPES[call]), doubles(*SHAPES[call], seed=5)
    with pytest.raises(Exception, match="not supported inside compiled, traced or exported graphs"):
        GRAPHS[graph](derive, flat(call), x.clone(), tangent)


@pytest.mark.parametrize("derive", [jvp, recorded_dual, grad, twice], ids=lambda x: x.__name__)
def test_derivatives_under_a_mode_use_the_forwards_dropout_mask(derive: Function) -> None:
    x, tangent = doubles(*DENSE), doubles(*DENSE, seed=5)
    found = under_a_mode(derive, flat(dropped), x, tangent)
    torch.testing.assert_close(found, derive(flat(dropped), x, tangent), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("graph", ["jit.trace", "mode"])
def test_a_graph_of_a_named_backend_can_be_differentiated_twice(graph: str) -> None:
    x, tangent = doubles(*DENSE), doubles(*DENSE, seed=5)
    with use_backend("chunked"):
        found = GRAPHS[graph](twice, flat(sinks), x.clone(), tangent)
    torch.testing.assert_close(found, twice(flat(sinks), x, tangent), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- lengths that nobody can read

LENGTHS = torch.stack([cumulative(3, 5), cumulative(6, 1), cumulative(0, 4)])


@pytest.mark.parametrize(("starts", "number", "words"), [
    (LENGTHS, None, "cu_seqlens_q cannot be read: vmap gives it another axis"),
    (LENGTHS, torch.tensor([6, 6, 6]), "max_seqlen_q must be an int here"),
])  # fmt: skip
def test_vmap_over_lengths_names_the_one_that_cannot_be_read(starts: Tensor, number: Tensor | None, words: str) -> None:
    x = doubles(8, 2, 8)

    def call(starts: Tensor, longest: Any) -> Any:
        longest = 6 if longest is None else longest
        return flash_attn_varlen_func(x, x, x, starts, starts, longest, longest)

    with pytest.raises(RuntimeError, match=words):
        torch.func.vmap(call, (0, None if number is None else 0))(starts, number)


# ---------------------------------------------------------------- what has no derivatives


def cached(q: Tensor) -> Any:
    cache = q.repeat(1, 3, 1, 1)
    return flash_attn_with_kvcache(q, cache, cache.cos(), cache_seqlens=3, causal=True)


PRIVATE = r"cannot be combined with forward-mode derivatives or torch\.func transforms"


@pytest.mark.parametrize(("graph", "derive"), some_of(pairwise(
    ["compiled", "compiled, may break", "make_fx", "export", "mode"], [jvp, dual, grad, vmap_of_grad]
), 3), ids=lambda x: getattr(x, "__name__", x))  # fmt: skip
def test_derivatives_over_a_cache_are_refused_by_name(graph: str, derive: Function) -> None:
    if graph == "export" and TorchVersion(torch.__version__) < "2.5":
        pytest.skip("PyTorch 2.4 wraps operators that write, and transforms nothing that is wrapped")
    x = randn(1, 2, 4, 8)
    with pytest.raises(Exception, match=PRIVATE):
        GRAPHS[graph](derive, flat(cached), x, x.cos())


def joint(x: Tensor) -> Function:
    """A traced graph of dense's gradient."""

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(flat(dense)(x).sin().sum(), x)[0]

    graph: Function = make_fx(gradient)(x.detach().requires_grad_())
    return graph


def test_a_traced_graph_of_gradients_is_not_differentiated_again() -> None:
    """It holds the forward's output detached, so that a part of the second derivative would be missing."""
    x = doubles(*DENSE)
    with pytest.raises(RuntimeError, match=r"a traced graph that computes gradients .* differentiated again"):
        twice(joint(x), x, x.cos())
