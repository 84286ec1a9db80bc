"""Where a call is one operator, autograd gives its eager gradients, also twice; transforms and tangents are refused.

test_derivatives.py holds the eager derivatives against the formula.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_compat import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flash_attn_compat.flash_attn_interface import _flash_attn_forward
from tests.forms.inputs import cumulative, ints, randn
from tests.forms.kinds import Operators
from tests.forms.plain import all_but_thorough, pairwise, some_of

Function = Callable[..., Any]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def doubles(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, seed=seed).double()


SLOPES = torch.tensor([0.3, 0.1, 0.2, 0.4])
K, V = doubles(1, 7, 2, 8, seed=1), doubles(1, 7, 2, 8, seed=2)
PACKED_Q, PACKED_K, PACKED_V = doubles(8, 4, 8), doubles(14, 2, 8, seed=1), doubles(14, 2, 8, seed=2)
PACKED = cumulative(3, 0, 5), cumulative(4, 2, 8), 5, 8  # one sequence has no rows
PAGES_K, PAGES_V, TABLE = doubles(6, 4, 2, 8, seed=1), doubles(6, 4, 2, 8, seed=2), ints(2, 0, 5, 1, 3, 4).view(2, 3)
PAGED = cumulative(3, 5), cumulative(9, 6), 5, 9


def flat(name: str) -> Function:
    """The call of one tensor, with all results in one tensor."""

    def one(x: Tensor) -> Tensor:
        found = call(x)
        return torch.cat([y.flatten() for y in (found if isinstance(found, tuple) else (found,))])

    call = CALLS[name][1]
    return one


def dropped(q: Tensor) -> Any:
    torch.manual_seed(0)
    return flash_attn_func(q, K, V, dropout_p=0.4)


DENSE = 1, 5, 4, 8
# The shape of what is differentiated, and the call.
SERVED: dict[str, tuple[tuple[int, ...], Function]] = {
    "dense": (DENSE, lambda q: flash_attn_func(q, K, V, causal=True)),
    "slopes and scale": ((1, 5, 4, 10), lambda x: flash_attn_func(
        x[..., :8], K, V, softmax_scale=x[0, 0, 0, 9], causal=True, alibi_slopes=x[0, 0, :, 8].float()
    )),
    "sinks": (DENSE, lambda q: flash_attn_func(q, K, V, window_size=(2, 1), s_aux=SLOPES.double())),
    "qkv": ((1, 5, 3, 2, 8), lambda x: flash_attn_qkvpacked_func(x, causal=True)),
    "packed": ((9, 4, 8), lambda q: flash_attn_varlen_func(  # one token belongs to no sequence
        q, PACKED_K, PACKED_V, *PACKED, causal=True, alibi_slopes=SLOPES, return_attn_probs=True
    )[:2]),
    "packed keys": ((14, 2, 8), lambda k: flash_attn_varlen_func(
        PACKED_Q, k, k.cos(), *PACKED, window_size=(1, 2), softcap=1.5
    )),
    "pages": ((8, 4, 8), lambda q: flash_attn_varlen_func(q, PAGES_K, PAGES_V, *PAGED, causal=True, block_table=TABLE)),
}  # fmt: skip
CALLS: dict[str, tuple[tuple[int, ...], Function]] = SERVED | {
    "dropout": (DENSE, dropped),
    "cache": ((1, 2, 4, 8), lambda q: flash_attn_with_kvcache(
        q, q.repeat(1, 3, 1, 1), q.repeat(1, 3, 1, 1).cos(), cache_seqlens=3, causal=True
    )),
    "private": (DENSE, lambda q: _flash_attn_forward(q, K, V, 0.0, 8**-0.5, True, -1, -1, 0.0, None, False)[0]),
    # A graph of it holds the forward's output detached, so that a part of the second derivative would be missing.
    "gradient": (DENSE, lambda q: torch.autograd.grad(flat("dense")(q).sin().sum(), q)[0]),
}  # fmt: skip


def drawn(name: str) -> tuple[Tensor, Tensor]:
    """What is differentiated, and a tangent."""
    return doubles(*CALLS[name][0]), doubles(*CALLS[name][0], seed=5)


# ---------------------------------------------------------------- every way to differentiate


def total(function: Function) -> Function:
    return lambda x: function(x).sin().sum()


def dual(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found: Tensor = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent
        return found


def once(function: Function, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(total(function)(x), x)[0]


def twice(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(total(function)(x), x, create_graph=True)
    return torch.autograd.grad((first * tangent).sum(), x)[0]


def batched(function: Function, x: Tensor, by_vmap: bool = False) -> Tensor:
    out = function(x := x.detach().requires_grad_())
    both = torch.stack([out.detach().sin(), out.detach().cos()])
    if not by_vmap:
        return torch.autograd.grad(out, x, both, is_grads_batched=True)[0]
    found: Tensor = torch.func.vmap(lambda one: torch.autograd.grad(out, x, one, retain_graph=True)[0])(both)
    return found


TRANSFORMS: dict[str, Function] = {
    "vmap": lambda f, x, tangent: torch.func.vmap(f)(torch.stack([x, tangent])),
    "jvp": lambda f, x, tangent: torch.func.jvp(f, (x,), (tangent,))[1],
    "dual": dual,
    "recorded dual": lambda f, x, tangent: dual(f, x.detach().requires_grad_(), tangent).detach(),
    "grad": lambda f, x, tangent: torch.func.grad(total(f))(x),
    "jacrev": lambda f, x, tangent: torch.func.jacrev(lambda y: f(y)[:3].sin())(x),
    "jvp of grad": lambda f, x, tangent: torch.func.jvp(torch.func.grad(total(f)), (x,), (tangent,))[1],
    "backward of vmap": lambda f, x, tangent: once(torch.func.vmap(f), torch.stack([x, tangent])),
}
AUTOGRAD: dict[str, Function] = {
    "once": lambda f, x, tangent: once(f, x),
    "twice": twice,
    "batched gradients": lambda f, x, tangent: batched(f, x),
    "mapped gradients": lambda f, x, tangent: batched(f, x, by_vmap=True),
}
WAYS = TRANSFORMS | AUTOGRAD

# ---------------------------------------------------------------- every way to become an operator


def compiled(backend: str, fullgraph: bool = True) -> Function:
    return lambda function, *x: torch.compile(function, backend=backend, fullgraph=fullgraph)


def traced(function: Function, *x: Tensor) -> Function:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found: Function = torch.jit.trace(function, x, check_trace=False)
    return found


def recorded(function: Function, *x: Tensor) -> Function:
    found: Function = make_fx(function)(x[0].requires_grad_(), *x[1:])
    return found


def exported(function: Function, *x: Tensor) -> Function:
    class Module(torch.nn.Module):
        def forward(self, *x: Tensor) -> Tensor:
            found: Tensor = function(*x)
            return found

    return torch.export.export(Module(), (x[0].requires_grad_(), *x[1:]), strict=False).module()


COMPILERS: dict[str, Function] = {"compiled": compiled("aot_eager"), "compiled, run by Python": compiled("eager")}
BREAKING = "compiled, may break"
TRACERS: dict[str, Function] = {"jit.trace": traced, "make_fx": recorded, "export": exported}


def make(graph: str, function: Function, *x: Tensor) -> Function:
    """Return a graph of a function, traced with other numbers."""
    graphs = {**COMPILERS, **TRACERS, BREAKING: compiled("aot_eager", fullgraph=False)}
    made: Function = graphs[graph](function, *(one.flip(0) for one in x))
    return made


def under_a_mode(derive: Function, function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        found: Tensor = derive(function, x, tangent)
    return found


def check_same(found: Tensor, right: Tensor, call: str) -> None:
    bound = 1e-5 if call == "slopes and scale" else 1e-9  # slopes are fp32
    torch.testing.assert_close(found, right, rtol=bound, atol=bound)


EACH = [*zip(itertools.cycle(AUTOGRAD), SERVED)]  # call, with one way by turns


@pytest.mark.parametrize(("graph", "way", "call"), [
    *some_of(pairwise(TRACERS, AUTOGRAD, SERVED), 3),
    *(("compiled, run by Python", *row) for row in EACH),
    *(pytest.param("compiled, run by Python", *row, marks=pytest.mark.thorough)
      for row in itertools.product(AUTOGRAD, SERVED) if row not in EACH),
    *some_of(pairwise([BREAKING], ("once", "batched gradients"), SERVED), 14),
])  # fmt: skip
def test_autograd_of_a_graph_gives_the_eager_gradients(graph: str, way: str, call: str) -> None:
    if graph == "export" and call in ("qkv", "slopes and scale") and TorchVersion(torch.__version__) < "2.5":
        pytest.skip("export of PyTorch 2.4 records no gradients of views, and the operator's backward raises")
    (x, tangent), function = drawn(call), flat(call)
    check_same(WAYS[way](make(graph, function, x), x, tangent), WAYS[way](function, x, tangent), call)


@pytest.mark.parametrize("graph", ["jit.trace", "mode"])
def test_a_graph_of_a_named_backend_can_be_differentiated_twice(graph: str) -> None:
    (x, tangent), function = drawn("sinks"), flat("sinks")
    with use_backend("chunked"):
        if graph == "mode":
            found = under_a_mode(twice, function, x, tangent)
        else:
            found = twice(make(graph, function, x), x, tangent)
    torch.testing.assert_close(found, twice(function, x, tangent), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("way", "call"), [
    *some_of(pairwise(WAYS, SERVED), 3),
    *((way, "dropout") for way in ("jvp", "recorded dual", "grad", "twice")),  # whose mask is the forward's
])  # fmt: skip
def test_under_a_mode_every_derivative_is_the_eager_one(way: str, call: str) -> None:
    (x, tangent), function = drawn(call), flat(call)
    check_same(under_a_mode(WAYS[way], function, x, tangent), WAYS[way](function, x, tangent), call)


# ---------------------------------------------------------------- transforms and tangents, none of which may vanish


@pytest.mark.parametrize(("graph", "way"), some_of(pairwise((*COMPILERS, BREAKING), TRANSFORMS), 8))
@pytest.mark.parametrize("is_within", [False, True], ids=["around", "within"])
def test_a_transform_that_meets_a_compiler_is_right_or_raises(graph: str, way: str, is_within: bool) -> None:
    """Dynamo leaves some of them to Python, and refuses others in words of its own."""
    (x, tangent), function, derive = drawn("dense"), flat("dense"), WAYS[way]
    try:
        if is_within:
            found = make(graph, lambda x, t: derive(function, x, t), x, tangent)(x, tangent)
        else:
            found = derive(make(graph, function, x), x, tangent)
    except Exception:  # noqa: BLE001  any error is loud
        return
    torch.testing.assert_close(found, derive(function, x, tangent), rtol=1e-9, atol=1e-9)


SOME = "jvp", "dual", "grad", "vmap"
ERRORS = {
    "graph": r"attention in a compiled, traced or exported graph.* cannot be combined with torch\.func transforms",
    "private": r"cannot be combined with forward-mode derivatives or torch\.func transforms",
    "gradients": r"a traced graph that computes gradients .* differentiated again",
}
# Where the derivative is taken, the graph, the derivative, of what, and the error.
REFUSALS: list[Any] = [
    *some_of((("around", *row, "dense", "graph") for row in pairwise(TRACERS, TRANSFORMS)), 2),
    *some_of((("within", *row, "graph") for row in pairwise(TRACERS, TRANSFORMS, ("dense", "packed"))), 2),
    *some_of((("within", *row, "graph") for row in pairwise(COMPILERS, TRANSFORMS, ("dense", "packed"))), 4),
    *some_of((("around", *row, "cache", "private") for row in pairwise(["make_fx", "export"], SOME)), 2),
    *some_of((("within", "compiled", way, "cache", "private") for way in SOME), 2),  # around it, PyTorch refuses
    *(("eager", "none", way, "private", "private") for way in SOME),
    ("within", "compiled", "grad", "private", "graph"),
    ("around", "make_fx", "twice", "gradient", "gradients"),
    *(("around", "make_fx", way, "gradient", "graph") for way in SOME),
]


@pytest.mark.parametrize(("where", "graph", "way", "call", "error"), REFUSALS)
def test_derivatives_that_a_graph_cannot_have_are_refused_by_name(
    where: str, graph: str, way: str, call: str, error: str
) -> None:
    version = TorchVersion(torch.__version__)
    if graph in COMPILERS and version < {"recorded dual": "2.13", "jacrev": "2.5"}.get(way, "0"):
        pytest.skip("Dynamo of PyTorch 2.11 traces no requires_grad_(), that of 2.4 no torch.func.jacrev")
    if graph == "export" and call == "cache" and version < "2.5":
        pytest.skip("PyTorch 2.4 wraps operators that write, and transforms nothing that is wrapped")
    (x, tangent), function, derive = drawn(call), flat(call), WAYS[way]
    if where == "within" and call in SERVED:
        derive(function, x, tangent)  # prepared calls do not open another way
    with pytest.raises(Exception, match=ERRORS[error]):
        if where == "within":
            make(graph, lambda x, t: derive(function, x, t), x, tangent)(x, tangent)
        else:
            derive(function if where == "eager" else make(graph, function, x), x, tangent)


@pytest.mark.parametrize("way", all_but_thorough(
    (*TRANSFORMS, "once", "twice"), ("dual", "recorded dual", "jacrev", "jvp of grad", "backward of vmap")
))  # fmt: skip
def test_fake_tensors_have_derivatives_of_dense_calls(way: str) -> None:
    (x, tangent), function = drawn("dense"), flat("dense")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = WAYS[way](function, mode.from_tensor(x), mode.from_tensor(tangent))
    assert found.shape == WAYS[way](function, x, tangent).shape


@pytest.mark.parametrize("way", [*TRANSFORMS, "twice"])
def test_fake_lengths_are_named_where_derivatives_need_them(way: str) -> None:
    (x, tangent), function = drawn("packed"), flat("packed")
    WAYS[way](function, x, tangent)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(RuntimeError, match=HIDDEN):
        WAYS[way](function, mode.from_tensor(x), mode.from_tensor(tangent))


# ---------------------------------------------------------------- lengths that nobody can read

HIDDEN = "cu_seqlens_q must hold numbers that can be read"
LENGTHS = torch.stack([cumulative(3, 5), cumulative(6, 2), cumulative(0, 8)])


def of_lengths(x: Tensor, starts: Tensor) -> Tensor:
    found: Tensor = flash_attn_varlen_func(x, x, x, starts, starts, 8, 8, causal=True)
    return found


def test_vmap_over_lengths_is_refused_by_name() -> None:
    x, starts = doubles(8, 2, 8), LENGTHS[0]
    torch.func.vmap(of_lengths, (0, None))(x[None], starts)
    with pytest.raises(RuntimeError, match=HIDDEN):
        torch.func.vmap(of_lengths, (None, 0))(x, LENGTHS)
    with pytest.raises(RuntimeError, match="max_seqlen_q must be an int here"):
        torch.func.vmap(lambda n: flash_attn_varlen_func(x, x, x, starts, starts, n, n))(torch.tensor([8, 8]))


def test_second_derivatives_within_a_graph_do_not_keep_the_lengths_that_were_traced() -> None:
    x = doubles(8, 2, 8)
    twice(lambda x: of_lengths(x, LENGTHS[0]), x, x)
    with pytest.raises(RuntimeError, match=HIDDEN):
        make_fx(lambda x, starts: twice(lambda x: of_lengths(x, starts), x, x))(x, LENGTHS[0])


def test_second_derivatives_of_a_graph_follow_the_lengths_that_are_given() -> None:
    x, tangent = doubles(8, 2, 8), doubles(8, 2, 8, seed=1)
    graph = make_fx(of_lengths)(x.clone().requires_grad_(), LENGTHS[0])
    for starts in LENGTHS:
        found, right = (twice(lambda x, f=f: f(x, starts), x, tangent) for f in (graph, of_lengths))
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


# ------------------------------ slopes, which the operator differentiates inside, where PyTorch has turned autograd off

TRAINED = torch.tensor([0.3, 0.1, 0.2, 0.0])
# Lengths of queries and of keys, and options of a packed call.
PACKED_SLOPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "packed": (cumulative(3, 4), cumulative(6, 5), {}),
    "packed, one sequence": (cumulative(7), cumulative(11), {"causal": True}),
    "packed, equal lengths": (cumulative(3, 4), cumulative(3, 4), {}),
    "packed, a length of 0": (cumulative(3, 0, 4), cumulative(6, 0, 5), {"window_size": (2, 1)}),
    "packed, tokens of no sequence": (cumulative(3, 2), cumulative(6, 2), {}),
    "pages": (cumulative(3, 4), cumulative(4, 3), {"block_table": ints([1], [0])}),
}
OF_OPERATORS = ["dense", *PACKED_SLOPES, "qkv in one"]


def sloped(name: str, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
    if name == "dense":
        return flash_attn_func(q[None], k[None], v[None], alibi_slopes=slopes)
    if name == "qkv in one":
        qkv = torch.stack([k, k, v], 1)
        return flash_attn_varlen_qkvpacked_func(qkv, cumulative(6, 5), 6, alibi_slopes=slopes[:2])
    starts_q, starts_k, options = PACKED_SLOPES[name]
    if name == "pages":
        k, v = k[:8].view(2, 4, 2, 8), v[:8].view(2, 4, 2, 8)
    elif name == "packed, equal lengths":
        k, v = k[:7], v[:7]
    return flash_attn_varlen_func(q, k, v, starts_q, starts_k, 7, 11, alibi_slopes=slopes, **options)


@pytest.mark.parametrize(("by", "name"), [
    *(("a dispatch mode", name) for name in OF_OPERATORS),
    *some_of((("torch.compile", name) for name in OF_OPERATORS), 8),  # by which the same operator is called
])  # fmt: skip
def test_slopes_have_the_same_gradient_by_the_operator_as_by_an_eager_call(name: str, by: str) -> None:
    attend, (q, k, v) = partial(sloped, name), (randn(n, h, 8, seed=h) for n, h in ((7, 4), (11, 2), (11, 2)))

    def gradients(function: Callable[..., Any], around: Any) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, TRAINED)]
        with around:
            return torch.autograd.grad(function(*leaves).cos().sum(), leaves, allow_unused=True)

    is_compiled, eagerly = by == "torch.compile", contextlib.nullcontext()
    expected = gradients(attend, eagerly)
    assert expected[3].any()
    compiled = torch.compile(attend, backend="aot_eager") if is_compiled else attend
    for ours, right_one in zip(gradients(compiled, eagerly if is_compiled else Operators()), expected, strict=True):
        torch.testing.assert_close(ours, right_one, rtol=1e-5, atol=1e-5)
