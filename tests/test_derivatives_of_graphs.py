"""Where a call is one operator, in compiled, traced and exported graphs and under modes, it has its eager derivatives.

test_derivatives.py holds those against the formula.
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
from flash_attn_compat.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward
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
WITHIN = jvp, dual, recorded_dual, grad, jacrev, jvp_of_grad, vmap_of_grad  # what Dynamo can trace
WAYS = *WITHIN, backward_of_vmap, twice, batched_gradients
COMPILED = [name for name in GRAPHS if name.startswith("compiled")]
OTHERS = [name for name in GRAPHS if name not in COMPILED]
CASES = [
    *some_of(pairwise(COMPILED, WITHIN, SHAPES), 16),
    # Around a compiled function, torch.func.jvp makes Dynamo give up and read functions of ours, which takes long.
    *some_of((row for row in pairwise(OTHERS, WAYS, SHAPES) if row[:2] != (AROUND, jvp)), 5),
    pytest.param(AROUND, jvp, sinks, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("graph", "derive", "call"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_graph_has_the_derivatives_of_its_eager_call(graph: str, derive: Function, call: Function) -> None:
    version = TorchVersion(torch.__version__)
    if graph in COMPILED and ((derive is recorded_dual and version < "2.13") or (derive is jacrev and version < "2.5")):
        pytest.skip("Dynamo of PyTorch 2.11 traces no requires_grad_(), that of 2.4 no torch.func.jacrev")
    x, tangent = doubles(*SHAPES[call]), doubles(*SHAPES[call], seed=5)
    found = GRAPHS[graph](derive, flat(call), x.clone(), tangent)
    bound = 1e-5 if call is slopes else 1e-9  # slopes are fp32
    torch.testing.assert_close(found, derive(flat(call), x, tangent), rtol=bound, atol=bound)


@pytest.mark.thorough
@pytest.mark.parametrize("derive", [jvp, grad], ids=lambda x: x.__name__)
def test_inductor_computes_derivatives_of_packed_calls(derive: Function) -> None:
    x, tangent = doubles(*SHAPES[packed]), doubles(*SHAPES[packed], seed=5)
    found = compiled("inductor")(derive, flat(packed), x, tangent)
    torch.testing.assert_close(found, derive(flat(packed), x, tangent), rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.thorough)])
def test_a_compiled_vmap_has_the_gradients_of_the_eager_one(backend: str) -> None:
    batch = torch.stack([doubles(*SHAPES[packed], seed=seed) for seed in range(2)]).requires_grad_()
    mapped = torch.func.vmap(flat(packed))
    graph = torch.compile(mapped, backend=backend, fullgraph=True)
    found, right = (torch.autograd.grad(function(batch).sin().sum(), batch) for function in (graph, mapped))
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
def test_derivatives_of_graphs_accept_other_dynamic_shapes() -> None:
    def derivative(q: Tensor) -> Tensor:
        return jvp(lambda x: flash_attn_func(x, K, V), q, q.cos())

    graph = torch.compile(derivative, backend="eager", fullgraph=True, dynamic=True)
    for seqlen in (4, 6):
        q = doubles(1, seqlen, 4, 8)
        torch.testing.assert_close(graph(q), derivative(q), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- lengths that nobody can read

LENGTHS = torch.stack([cumulative(3, 5), cumulative(6, 1), cumulative(0, 4)])
MASKS: dict[str, dict[str, Any]] = {
    "causal ALiBi": {"causal": True, "alibi_slopes": SLOPES[:2]},
    "window": {"window_size": (2, 0), "softcap": 1.0},
}


def of_lengths(starts: Tensor, x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return flash_attn_varlen_func(x, x, x, starts, starts, 6, 6, **options, return_attn_probs=True)[:2]


@pytest.mark.parametrize(("mask", "backend"), [
    *((mask, None) for mask in MASKS), ("causal ALiBi", "aot_eager"),
    *(pytest.param(mask, "eager", marks=pytest.mark.thorough) for mask in MASKS),
    pytest.param("window", "aot_eager", marks=pytest.mark.thorough),
])  # fmt: skip
def test_vmap_over_cu_seqlens_computes_each(mask: str, backend: str | None) -> None:
    x = doubles(8, 2, 8)
    mapped = torch.func.vmap(lambda starts: of_lengths(starts, x, **MASKS[mask]))
    found = (torch.compile(mapped, backend=backend, fullgraph=True) if backend else mapped)(LENGTHS)
    for index, starts in enumerate(LENGTHS):
        for ours, right in zip(found, of_lengths(starts, x, **MASKS[mask]), strict=True):
            torch.testing.assert_close(ours[index], right, rtol=1e-9, atol=1e-9)


def test_gradients_under_vmap_over_cu_seqlens_match_single_calls() -> None:
    def gradient(x: Tensor, starts: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda x: of_lengths(starts, x, causal=True)[0].sin().sum())(x)
        return found

    x = doubles(8, 2, 8)
    found = torch.func.vmap(gradient, (None, 0))(x, LENGTHS)
    torch.testing.assert_close(found, torch.stack([gradient(x, starts) for starts in LENGTHS]))


def test_an_infinite_token_stays_in_its_sequence_under_vmap() -> None:
    """Of a sequence without keys beside it, above all."""
    q, k = doubles(6, 2, 8), doubles(6, 2, 8, seed=1)
    k[3] = torch.inf
    starts_q, starts_k = cumulative(2, 2, 2)[None], cumulative(3, 0, 3)[None]
    out = torch.func.vmap(lambda a, b: flash_attn_varlen_func(q, k, k, a, b, 2, 3))(starts_q, starts_k)[0]
    assert out[:2].isfinite().all() and not out[2:4].any() and out[4:].isnan().all()


def test_a_longest_length_that_is_too_short_gives_nan_where_lengths_cannot_be_read() -> None:
    x = doubles(8, 2, 8)
    found = torch.func.vmap(lambda starts: flash_attn_varlen_func(x, x, x, starts, starts, 5, 6))(LENGTHS)
    assert found.isnan().flatten(1).all(1).tolist() == [False, True, False] and found[0].isfinite().all()


def test_used_and_skipped_keys_are_served_in_a_compiled_vmap() -> None:
    q, k = doubles(3, 8, 2, 8), doubles(14, 2, 8, seed=1)

    def private(q: Tensor) -> Tensor:
        lengths = cumulative(3, 5), cumulative(6, 8), 5, 8
        options = (0.0, 0.3, True, -1, -1, 0.0, None, False, None)
        return _flash_attn_varlen_forward(q, k, k, *lengths, *options, ints(1, 2), ints(5, 7))[0]

    graph = torch.compile(torch.func.vmap(private), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(graph(q), torch.stack(list(map(private, q))), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("number", "options", "words"), [
    (torch.tensor([6, 6, 6]), {}, "max_seqlen_q must be an int here"),
    (None, {"dropout_p": 0.5, "return_attn_probs": True}, "S_dmask of packed sequences needs their lengths"),
])  # fmt: skip
def test_vmap_over_cu_seqlens_names_unreadable_lengths(
    number: Tensor | None, options: dict[str, Any], words: str
) -> None:
    x = doubles(8, 2, 8)

    def call(starts: Tensor, longest: Any) -> Any:
        longest = 6 if longest is None else longest
        return flash_attn_varlen_func(x, x, x, starts, starts, longest, longest, **options)

    with pytest.raises(RuntimeError, match=words):
        torch.func.vmap(call, (0, None if number is None else 0), randomness="same")(LENGTHS, number)


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


@pytest.mark.parametrize("derive", [jvp, dual, grad], ids=lambda x: x.__name__)
def test_a_compiled_private_function_is_served_where_its_eager_call_is_refused(derive: Function) -> None:
    def private(q: Tensor) -> Tensor:
        return _flash_attn_forward(q, K, V, 0.0, 8**-0.5, True, -1, -1, 0.0, None, False)[0].flatten()

    x, tangent = doubles(*DENSE), doubles(*DENSE, seed=5)
    with pytest.raises(RuntimeError, match=PRIVATE):
        derive(private, x, tangent)
    found = compiled("aot_eager")(derive, private, x, tangent)
    torch.testing.assert_close(found, derive(flat(dense), x, tangent), rtol=1e-9, atol=1e-9)


def joint(x: Tensor) -> Function:
    """A traced graph of dense's gradient."""

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(flat(dense)(x).sin().sum(), x)[0]

    graph: Function = make_fx(gradient)(x.detach().requires_grad_())
    return graph


@pytest.mark.parametrize("derive", [jvp, dual, grad, twice], ids=lambda x: x.__name__)
def test_a_traced_graph_of_gradients_is_not_differentiated_again(derive: Function) -> None:
    """It holds the forward's output detached, so that a part of the second derivative would be missing."""
    x = doubles(*DENSE)
    with pytest.raises(RuntimeError, match=r"a traced graph that computes gradients .* differentiated again"):
        derive(joint(x), x, x.cos())


def test_a_traced_graph_of_gradients_can_be_mapped() -> None:
    batch = doubles(3, *DENSE)
    graph = joint(batch[0])
    torch.testing.assert_close(torch.func.vmap(graph)(batch), torch.stack(list(map(graph, batch))))
