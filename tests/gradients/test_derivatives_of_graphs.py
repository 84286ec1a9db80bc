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


def attend_packed(q: Tensor) -> Any:
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
SHAPES = {dense: DENSE, slopes: (1, 5, 4, 10), sinks: DENSE, qkv: (1, 5, 3, 2, 8)}
SHAPES |= {attend_packed: (9, 4, 8), packed_keys: (14, 2, 8), paged: (8, 4, 8)}


def flat(call: Function) -> Function:
    """All results in one tensor."""

    def one(x: Tensor) -> Tensor:
        found = call(x)
        return torch.cat([y.flatten() for y in (found if isinstance(found, tuple) else (found,))])

    return one


# ---------------------------------------------------------------- every way to differentiate


def vmap(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    found: Tensor = torch.func.vmap(function)(torch.stack([x, tangent]))
    return found


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


def jvp_of_grad(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    return jvp(torch.func.grad(lambda y: function(y).sin().sum()), x, tangent)


def backward_of_vmap(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    both = torch.stack([x, tangent]).requires_grad_()
    return torch.autograd.grad(torch.func.vmap(function)(both).sin().sum(), both)[0]


def once(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x).sin().sum(), x)[0]


def twice(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad((first * tangent).sum(), x)[0]


def batched_gradients(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = function(x)
    return torch.autograd.grad(out, x, torch.stack([out.detach().sin(), out.detach().cos()]), is_grads_batched=True)[0]


def mapped_gradients(function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = function(x)

    def gradient(upstream: Tensor) -> Tensor:
        return torch.autograd.grad(out, x, upstream, retain_graph=True)[0]

    found: Tensor = torch.func.vmap(gradient)(torch.stack([out.detach().sin(), out.detach().cos()]))
    return found


AUTOGRAD = once, twice, batched_gradients, mapped_gradients

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
TRANSFORMS = vmap, jvp, dual, recorded_dual, grad, jacrev, jvp_of_grad, backward_of_vmap
REFUSED = r"attention in a compiled, traced or exported graph.* cannot be combined with torch\.func transforms"


def name_of(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def make(graph: str, function: Function, *x: Tensor) -> Function:
    """Return a graph of a function, traced with other numbers."""
    graphs = {**COMPILERS, **TRACERS, BREAKING: compiled("aot_eager", fullgraph=False)}
    made: Function = graphs[graph](function, *(one.flip(0) for one in x))
    return made


def under_a_mode(derive: Function, function: Function, x: Tensor, tangent: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        found: Tensor = derive(function, x, tangent)
    return found


def check_same(found: Tensor, right: Tensor, call: Function) -> None:
    bound = 1e-5 if call is slopes else 1e-9  # slopes are fp32
    torch.testing.assert_close(found, right, rtol=bound, atol=bound)


@pytest.mark.parametrize(("graph", "derive", "call"), [
    *some_of(pairwise(TRACERS, AUTOGRAD, SHAPES), 3),
    *(("compiled, run by Python", *row) for row in zip(itertools.cycle(AUTOGRAD), SHAPES)),
    *(pytest.param(*row, marks=pytest.mark.thorough) for row in pairwise(["compiled"], AUTOGRAD, SHAPES)),
    *some_of(pairwise([BREAKING], (once, batched_gradients), SHAPES), 14),
], ids=name_of)  # fmt: skip
def test_autograd_of_a_graph_gives_the_eager_gradients(graph: str, derive: Function, call: Function) -> None:
    if graph == "export" and call in (qkv, slopes) and TorchVersion(torch.__version__) < "2.5":
        pytest.skip("export of PyTorch 2.4 records no gradients of views, and the operator's backward raises")
    x, tangent = doubles(*SHAPES[call]), doubles(*SHAPES[call], seed=5)
    function = flat(call)
    check_same(derive(make(graph, function, x), x, tangent), derive(function, x, tangent), call)


@pytest.mark.parametrize("graph", ["jit.trace", "mode"])
def test_a_graph_of_a_named_backend_can_be_differentiated_twice(graph: str) -> None:
    x, tangent = doubles(*DENSE), doubles(*DENSE, seed=5)
    with use_backend("chunked"):
        if graph == "mode":
            found = under_a_mode(twice, flat(sinks), x, tangent)
        else:
            found = twice(make(graph, flat(sinks), x), x, tangent)
    torch.testing.assert_close(found, twice(flat(sinks), x, tangent), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("derive", "call"), some_of(pairwise((*TRANSFORMS, *AUTOGRAD), SHAPES), 3), ids=name_of)
def test_under_a_mode_every_derivative_is_the_eager_one(derive: Function, call: Function) -> None:
    x, tangent = doubles(*SHAPES[call]), doubles(*SHAPES[call], seed=5)
    check_same(under_a_mode(derive, flat(call), x, tangent), derive(flat(call), x, tangent), call)


@pytest.mark.parametrize("derive", [jvp, recorded_dual, grad, twice], ids=name_of)
def test_derivatives_under_a_mode_use_the_forwards_dropout_mask(derive: Function) -> None:
    x, tangent = doubles(*DENSE), doubles(*DENSE, seed=5)
    found = under_a_mode(derive, flat(dropped), x, tangent)
    torch.testing.assert_close(found, derive(flat(dropped), x, tangent), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- transforms and tangents, none of which may vanish


@pytest.mark.parametrize(("graph", "derive"), some_of(pairwise((*COMPILERS, BREAKING), TRANSFORMS), 8), ids=name_of)
@pytest.mark.parametrize("is_within", [False, True], ids=["around", "within"])
def test_a_transform_that_meets_a_compiler_is_right_or_raises(graph: str, derive: Function, is_within: bool) -> None:
    """Dynamo leaves some of them to Python, and refuses others in words of its own."""
    x, tangent = doubles(*DENSE), doubles(*DENSE, seed=5)
    try:
        if is_within:
            found = make(graph, lambda x, t: derive(flat(dense), x, t), x, tangent)(x, tangent)
        else:
            found = derive(make(graph, flat(dense), x), x, tangent)
    except Exception:  # noqa: BLE001  any error is loud
        return
    torch.testing.assert_close(found, derive(flat(dense), x, tangent), rtol=1e-9, atol=1e-9)


def cached(q: Tensor) -> Any:
    cache = q.repeat(1, 3, 1, 1)
    return flash_attn_with_kvcache(q, cache, cache.cos(), cache_seqlens=3, causal=True)


def private(q: Tensor) -> Tensor:
    return _flash_attn_forward(q, K, V, 0.0, 8**-0.5, True, -1, -1, 0.0, None, False)[0]


def gradient(q: Tensor) -> Tensor:
    """A graph of it holds the forward's output detached, so that a part of the second derivative would be missing."""
    return torch.autograd.grad(flat(dense)(q).sin().sum(), q)[0]


SHAPES_TOO: dict[Function, tuple[int, ...]] = SHAPES | {cached: (1, 2, 4, 8), private: DENSE, gradient: DENSE}
SOME = jvp, dual, grad, vmap
# Where the derivative is taken, the graph, the derivative, of what, and the error.
ERRORS = {
    "graph": REFUSED,
    "private": r"cannot be combined with forward-mode derivatives or torch\.func transforms",
    "gradients": r"a traced graph that computes gradients .* differentiated again",
}
REFUSALS: list[Any] = [
    *some_of((("around", *row, dense, "graph") for row in pairwise(TRACERS, TRANSFORMS)), 2),
    *some_of((("within", *row, "graph") for row in pairwise(TRACERS, TRANSFORMS, (dense, attend_packed))), 2),
    *some_of((("within", *row, "graph") for row in pairwise(COMPILERS, TRANSFORMS, (dense, attend_packed))), 4),
    *some_of((("around", *row, cached, "private") for row in pairwise(["make_fx", "export"], SOME)), 2),
    *some_of((("within", "compiled", derive, cached, "private") for derive in SOME), 2),  # around it, PyTorch refuses
    *(("eager", "none", derive, private, "private") for derive in SOME),
    ("within", "compiled", grad, private, "graph"),
    ("around", "make_fx", twice, gradient, "gradients"),
    *(("around", "make_fx", derive, gradient, "graph") for derive in SOME),
]


@pytest.mark.parametrize(("where", "graph", "derive", "call", "error"), REFUSALS, ids=name_of)
def test_derivatives_that_a_graph_cannot_have_are_refused_by_name(
    where: str, graph: str, derive: Function, call: Function, error: str
) -> None:
    version = TorchVersion(torch.__version__)
    is_untraceable = (derive is recorded_dual and version < "2.13") or (derive is jacrev and version < "2.5")
    if graph in COMPILERS and is_untraceable:
        pytest.skip("Dynamo of PyTorch 2.11 traces no requires_grad_(), that of 2.4 no torch.func.jacrev")
    if graph == "export" and call is cached and version < "2.5":
        pytest.skip("PyTorch 2.4 wraps operators that write, and transforms nothing that is wrapped")
    x, tangent = doubles(*SHAPES_TOO[call]), doubles(*SHAPES_TOO[call], seed=5)
    if where == "within" and call in SHAPES:
        derive(flat(call), x, tangent)  # prepared calls do not open another way
    with pytest.raises(Exception, match=ERRORS[error]):
        if where == "within":
            make(graph, lambda x, t: derive(flat(call), x, t), x, tangent)(x, tangent)
        else:
            derive(flat(call) if where == "eager" else make(graph, flat(call), x), x, tangent)


@pytest.mark.parametrize(
    "derive",
    all_but_thorough((*TRANSFORMS, once, twice), (dual, recorded_dual, jacrev, jvp_of_grad, backward_of_vmap)),
    ids=name_of,
)
def test_fake_tensors_have_derivatives_of_dense_calls(derive: Function) -> None:
    x, tangent = doubles(*DENSE), doubles(*DENSE, seed=5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = derive(flat(dense), mode.from_tensor(x), mode.from_tensor(tangent))
    assert found.shape == derive(flat(dense), x, tangent).shape


@pytest.mark.parametrize("derive", [*TRANSFORMS, twice], ids=name_of)
def test_fake_lengths_are_named_where_derivatives_need_them(derive: Function) -> None:
    x, tangent = doubles(*SHAPES[attend_packed]), doubles(*SHAPES[attend_packed], seed=5)
    derive(flat(attend_packed), x, tangent)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(RuntimeError, match=HIDDEN):
        derive(flat(attend_packed), mode.from_tensor(x), mode.from_tensor(tangent))


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
