"""Derivatives of out, LSE and sinks, in every way there is to ask for them, against the plain formula in fp64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn_compat import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    settings,
    use_backend,
)
from flash_attn_compat.dispatch.autograd import gradient_of_lse
from tests.forms.inputs import cumulative, lengths_of, qkv, randn
from tests.forms.plain import attention_and_lse, check_function, pairwise, some, some_of
from tests.forms.support import GENERAL, Serve, close, on_backend

SLOPES = torch.tensor([0.3, 0.1, 0.2, 0.0])
SINKS = torch.tensor([-2.0, 0.0, 1.5, 6.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.7},
    "ALiBi": {"alibi_slopes": SLOPES},
    "causal ALiBi": {"alibi_slopes": SLOPES, "causal": True},
    "dropout": {"dropout_p": 0.3},
}
# Those with sinks, which are a fourth input.
OPTIONS |= {
    "sinks": {},
    "sinks, causal window": {"causal": True, "window_size": (2, 0)},
    "sinks, causal": {"causal": True},
    "sinks, softcap": {"softcap": 1.5, "softmax_scale": 0.7},
    "sinks, dropout": {"dropout_p": 0.5},
}
HALF, FLOAT = torch.float16, torch.float32
FORMS = "dense", "packed"
WITHOUT_SINKS = [name for name in OPTIONS if "sinks" not in name]
# Backend, dtype, form, options. Few of our kernels: where they count a gradient of the LSE, no mask matters.
CASES = [
    *pairwise(("chunked", "reference"), (HALF, FLOAT), FORMS, OPTIONS),
    *pairwise(("chunked", "reference"), (torch.bfloat16,), FORMS, ("causal", "sinks, causal window")),
    *pairwise(("sdpa",), (FLOAT,), FORMS, [name for name in OPTIONS if not name.endswith(("softcap", "dropout"))]),
    *pairwise(("official",), (HALF,), FORMS, [name for name in WITHOUT_SINKS if name != "dropout"]),
    *pairwise(("torch_flash",), (HALF,), FORMS, ("plain", "causal", "window")),
    *pairwise(("torch_efficient",), (HALF,), ("dense",), ("plain", "causal")),
    *some_of((("fused", HALF, "packed", "causal"), ("fused", HALF, "dense", "causal")), 2),
    *some_of((("fused", torch.bfloat16, "dense", "causal"), ("fused", torch.bfloat16, "packed", "causal")), 2),
    ("fused", HALF, "packed", "causal ALiBi"),
    # Rows without keys have the sink as their LSE.
    *pairwise(GENERAL, (FLOAT,), ("dense, more rows", "packed, more rows"), ("sinks, causal window",)),
    *(("fused", HALF, form, "sinks, causal") for form in ("dense, more rows", "packed, more rows")),
]
# So many short ones that they are padded to common lengths.
LENGTHS_Q, LENGTHS_K = (3, 9, 2, *(1, 2, 3, 4) * 3), (5, 9, 30, *(2, 4, 3, 5) * 3)


def right(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, keep: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """out and the LSE as flash-attn reports it, of dense tensors; keep: (batch, nheads, >= seqlen_q, >= seqlen_k)"""
    named = {"softmax_scale": "scale", "alibi_slopes": "slopes", "window_size": "window"}
    given = {named.get(name, name): value for name, value in options.items()}
    causal, window = given.pop("causal", False), given.pop("window", (-1, -1))
    window = window[0], 0 if causal else window[1]
    if keep is not None:
        keep = keep[..., : q.shape[1], : k.shape[1]]
    out, lse = attention_and_lse(q, k, v, window=window, sinks=sinks, keep=keep, **given)
    if causal and "slopes" in given:
        positions = torch.arange(q.shape[1]) + k.shape[1] - q.shape[1]
        lse = lse + given["slopes"][:, None] * positions
    return out, lse


def right_of_each(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, keep: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The same of packed tensors."""
    found = [
        right(*(x[None] for x in parts), sinks, keep=None if keep is None else keep[[index]], **options)
        for index, parts in enumerate(zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K)))
    ]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], dim=-1)


def seed(dropout_p: float = 0.0, **others: Any) -> None:
    if dropout_p:  # a compiler does not know how
        torch.manual_seed(0)


def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    seed(**options)
    return flash_attn_func(q, k, v, **options, return_attn_probs=True, s_aux=sinks)  # type: ignore[return-value]


def attend_packed(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    seed(**options)
    return flash_attn_varlen_func(
        q, k, v, *lengths_of(LENGTHS_Q, LENGTHS_K), **options, return_attn_probs=True, s_aux=sinks
    )  # type: ignore[return-value]


def pairs(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    seed(**options)
    return flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options, return_attn_probs=True)  # type: ignore[return-value]


def one(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    """One packed sequence."""
    lengths = lengths_of((q.shape[1],), (k.shape[1],))
    out, lse, s_dmask = flash_attn_varlen_func(
        q[0], k[0], v[0], *lengths, **options, return_attn_probs=True, s_aux=sinks
    )  # fmt: skip
    return out[None], lse[None], s_dmask


ATTENTION: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "dense": (dense, right), "packed": (attend_packed, right_of_each), "pairs": (pairs, right)
}  # fmt: skip
EMPTY = {"no rows": (0, 4), "no keys": (3, 0), "neither": (0, 0)}
SIZES = EMPTY | {"more rows": (11, 7)}
ATTENTION |= {f"dense, {name}": (dense, right) for name in SIZES} | {f"packed, {name}": (one, right) for name in SIZES}


def inputs(form: str, name: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v, and sinks where the options' name says so."""
    rows, keys = SIZES.get(form.partition(", ")[2], (7, 11))
    given = list(qkv(b=2 if (rows, keys) == (7, 11) else 1, sq=rows, sk=keys, h=4, hk=2, dtype=dtype))
    if form == "packed":
        totals = (sum(LENGTHS_Q), 4), (sum(LENGTHS_K), 2), (sum(LENGTHS_K), 2)
        given = [randn(*shape, 16, seed=seed, dtype=dtype) for seed, shape in enumerate(totals)]
    return [*given, SINKS.to(dtype)] if "sinks" in name else given


def name_of(value: Any) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("backend", "dtype", "form", "name"), CASES, ids=name_of)
def test_gradients_of_out_and_lse_match_the_formula(
    backend: str, dtype: torch.dtype, form: str, name: str, serve: Serve
) -> None:
    (ours, plain), options, given = ATTENTION[form], OPTIONS[name], inputs(form, name, dtype)
    with serve(backend):
        keep = ours(*given, **options)[2] >= 0 if "dropout" in name else None
        # Gradients of sinks are sums over all rows, in which larger terms cancel.
        check_function(
            lambda *x: ours(*x, **options)[:2], lambda *x: plain(*x, keep=keep, **options), *given, epsilons=16
        )


@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
@pytest.mark.parametrize("poison", [0.0, torch.nan])
def test_rows_without_keys_have_no_gradient_of_any_loss_of_their_lse(backend: str, poison: float, serve: Serve) -> None:
    """Of 11 rows over 7 keys, under a causal mask."""
    q, k, v = (x.half().requires_grad_() for x in qkv(sq=11, sk=7, h=4, hk=2))
    with serve(backend):
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        assert lse[..., :4].isposinf().all()
        weights = torch.ones_like(lse)
        weights[..., :4] = poison
        found = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), weights))
    alive = [x.detach().double().requires_grad_() for x in (q[:, 4:], k, v)]
    plain_out, plain_lse = attention_and_lse(*alive, window=(-1, 0))
    expected = torch.autograd.grad(plain_out.sum() + plain_lse.sum(), alive)
    assert not found[0][:, :4].any()
    for ours, wanted in zip((found[0][:, 4:], *found[1:]), expected, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=4e-3, atol=4e-3)


def test_without_any_key_the_lse_is_the_sink_and_so_is_its_gradient() -> None:
    q, k, v, sinks = inputs("dense, no keys", "sinks", FLOAT)
    lse = dense(q, k, v, sinks.requires_grad_())[1]
    assert torch.equal(lse, sinks[:, None].expand_as(lse))
    assert torch.autograd.grad(lse.sum(), sinks)[0].tolist() == [3.0] * 4


@pytest.mark.parametrize("weight", [1.0, torch.inf, torch.nan])
def test_the_gradient_of_an_infinite_lse_is_taken_as_zero(weight: float) -> None:
    found = gradient_of_lse(torch.tensor([2.0, weight]), torch.tensor([0.5, torch.inf]))
    assert found is not None and found.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("backend", some(GENERAL, 3))
def test_the_operator_of_compiled_calls_gives_rows_without_keys_no_gradient(backend: str) -> None:
    """For any loss of their LSE."""
    q, k, v = (x.requires_grad_() for x in qkv(sq=11, sk=7, h=4, hk=2))
    found = []
    with use_backend(backend):
        compiled = torch.compile(flash_attn_func, backend="aot_eager")
        for weight in (0.0, torch.nan):
            out, lse, _ = compiled(q, k, v, causal=True, return_attn_probs=True)
            weights = torch.ones_like(lse).index_fill_(-1, torch.arange(4), weight)
            found.append(torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), weights)))
    assert all(map(torch.equal, *found))


# ---------------------------------------------------------------- trained slopes and scales

COMPILED = "compiled"
# What is trained, backend, dtype, form, options.
TRAINED = [
    *pairwise(("alibi_slopes",), GENERAL, (FLOAT,), ("dense", "packed", "pairs"), ("ALiBi", "causal ALiBi")),
    *pairwise(("alibi_slopes",), GENERAL, (FLOAT,), ("packed, no keys",), ("ALiBi",)),
    *pairwise(("alibi_slopes",), ("fused", "official"), (HALF,), ("packed",), ("causal ALiBi",)),
    *pairwise(("softmax_scale",), GENERAL, (FLOAT,), ("dense", "packed", "pairs"), ("causal",)),
    ("softmax_scale", "chunked", FLOAT, "packed", "softcap"),
    ("softmax_scale", "fused", HALF, "packed", "causal"),
    ("softmax_scale", COMPILED, FLOAT, "pairs", "causal"),
    *some_of((("alibi_slopes", COMPILED, FLOAT, form, "causal ALiBi") for form in ("packed", "pairs")), 2),
    *(
        pytest.param(*case, marks=pytest.mark.thorough)
        for case in (
            ("alibi_slopes", COMPILED, FLOAT, "packed, no keys", "ALiBi"),
            ("softmax_scale", COMPILED, FLOAT, "packed", "causal"),
        )
    ),
]


def way(backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True) if backend == COMPILED else function


@pytest.mark.parametrize(("trained", "backend", "dtype", "form", "name"), TRAINED, ids=name_of)
def test_trained_slopes_and_a_trained_scale_have_the_formulas_gradient(
    trained: str, backend: str, dtype: torch.dtype, form: str, name: str, serve: Serve
) -> None:
    (ours, plain), options = ATTENTION[form], OPTIONS[name]
    given = *inputs(form, name, dtype), SLOPES if trained == "alibi_slopes" else torch.tensor(0.3)

    def ours_of(*x: Tensor) -> Any:
        return ours(*x[:3], **options | {trained: x[3]})[:2]

    def plain_of(*x: Tensor) -> Any:
        return plain(*x[:3], **options | {trained: x[3]})

    if "no keys" in form:  # where the formula has an LSE of -inf
        leaves = [x.clone().requires_grad_() for x in given]
        assert not torch.autograd.grad(way(backend, ours_of)(*leaves)[0].sum(), leaves[3])[0].any()
        return
    with serve(backend) if backend != COMPILED else contextlib.nullcontext():
        # The scale's gradient, in fp32, sums gradients of queries in half precision.
        is_rounded = trained == "softmax_scale" and dtype is not FLOAT
        epsilons = torch.finfo(dtype).eps / torch.finfo(FLOAT).eps if is_rounded else 16
        check_function(way(backend, ours_of), plain_of, *given, epsilons=epsilons)


def test_slopes_alone_may_be_trained_and_their_dropout_mask_is_the_forwards() -> None:
    """Of each sequence its own; q, k and v want no gradient."""
    (q, k, v), slopes = qkv(sq=7, sk=11, h=4, hk=2), torch.stack([SLOPES, SLOPES + 1]).requires_grad_()
    torch.manual_seed(0)
    out, _, s_dmask = flash_attn_func(q, k, v, 0.3, alibi_slopes=slopes, return_attn_probs=True)
    found = torch.autograd.grad(out.sin().sum(), slopes)[0]
    for index in range(2):
        keep = s_dmask[[index]] >= 0
        one = slopes.detach()[index].requires_grad_()
        plain, _ = right(*(x[[index]] for x in (q, k, v)), alibi_slopes=one, keep=keep, dropout_p=0.3)
        torch.testing.assert_close(found[index], torch.autograd.grad(plain.sin().sum(), one)[0], rtol=2e-2, atol=2e-2)


def test_explain_names_the_backend_of_the_slopes_gradient() -> None:
    given = qkv(sq=7, sk=11, h=4, hk=2)
    asked = explain(flash_attn_func, *given, alibi_slopes=SLOPES.clone().requires_grad_())
    assert asked.slopes_gradient == "reference" and "computes the gradient of alibi_slopes" in str(asked)
    unasked = explain(flash_attn_func, *given, alibi_slopes=SLOPES)
    assert unasked.slopes_gradient is None and "gradient of alibi_slopes" not in str(unasked)


@pytest.mark.parametrize("name", ["alibi_slopes", "softmax_scale"])
def test_slopes_and_scale_are_differentiated_by_transforms_and_twice(name: str) -> None:
    q, k, v = (x.double() for x in qkv(sq=5, sk=6, h=4, hk=2))
    value = SLOPES.clone() if name == "alibi_slopes" else torch.tensor(0.3)

    def loss(attention: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: attention(q, k, v, **{name: x})[0].sin().sum()

    for derive in (torch.func.grad, lambda f: torch.func.jacrev(torch.func.grad(f))):
        torch.testing.assert_close(derive(loss(dense))(value), derive(loss(right))(value), rtol=1e-5, atol=1e-5)
    ours, plain = (loss(attention) for attention in (dense, right))
    leaf = value.clone().requires_grad_()
    once = [torch.autograd.grad(function(leaf), leaf, create_graph=True)[0] for function in (ours, plain)]
    twice = [torch.autograd.grad(gradient.sum(), leaf)[0] for gradient in once]
    torch.testing.assert_close(*twice, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- every way to differentiate

Loss = Callable[..., Tensor]
Wanted = tuple[int, ...]  # the inputs that ask


def losses(name: str, form: str, of: str, given: list[Tensor]) -> list[Loss]:
    """Of out, of the LSE or of both: ours, and the formula's."""
    options = OPTIONS[name]
    keep = ATTENTION[form][0](*given, **options)[2] >= 0 if "dropout" in name else None

    def loss(attention: Callable[..., Any], is_ours: bool, **more: Any) -> Loss:
        def computed(*x: Tensor) -> Tensor:
            out, lse, *_ = attention(*x, **options, **more)
            total = lse.sin().sum() if of != "out" else 0
            if of == "lse":
                return total if is_ours else total + 0 * out.sum()  # v has a gradient even so
            return total + out.pow(3).sum()

        return computed

    ours, plain = ATTENTION[form]
    return [loss(ours, True), loss(plain, False, keep=keep)]


def leaves(given: list[Tensor], wanted: Wanted) -> tuple[list[Tensor], list[Tensor]]:
    """Return copies, and the copies that ask for gradients."""
    copies = [x.detach().requires_grad_(index in wanted) for index, x in enumerate(given)]
    return copies, [copies[index] for index in wanted]


def once(loss: Loss, given: list[Tensor], wanted: Wanted) -> tuple[Tensor, ...]:
    copies, asked = leaves(given, wanted)
    return torch.autograd.grad(loss(*copies), asked)


def twice(loss: Loss, given: list[Tensor], wanted: Wanted) -> tuple[Tensor, ...]:
    copies, asked = leaves(given, wanted)
    first = torch.autograd.grad(loss(*copies), asked, create_graph=True)
    return *first, *torch.autograd.grad(sum(x.square().sum() for x in first), asked)


def along_a_tangent(loss: Loss, given: list[Tensor], wanted: Wanted) -> tuple[Tensor, ...]:
    def of_wanted(*some: Tensor) -> Tensor:
        return loss(*(some[wanted.index(index)] if index in wanted else x for index, x in enumerate(given)))

    some = tuple(given[index] for index in wanted)
    return (torch.func.jvp(of_wanted, some, tuple(x.cos() for x in some))[1],)


def in_both_modes(loss: Loss, given: list[Tensor], wanted: Wanted) -> tuple[Tensor, ...]:
    copies, asked = leaves(given, wanted)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, x.detach().cos()) if x.requires_grad else x for x in copies]
        primal, tangent = forward_ad.unpack_dual(loss(*duals))
        return tangent, *torch.autograd.grad(primal, asked, materialize_grads=True)


SUBSETS = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
WAYS: dict[str, Callable[[Loss, list[Tensor], Wanted], tuple[Tensor, ...]]] = {
    "once": once,
    "twice": twice,
    "transformed": lambda loss, given, wanted: torch.func.grad(loss, wanted)(*given),
    "along a tangent": along_a_tangent,
    "row by row": lambda loss, given, wanted: torch.func.jacrev(  # of two losses, by a backward under vmap
        lambda *x: torch.stack([loss(*x), 2 * loss(*x)]), wanted
    )(*given),
    "in both modes": in_both_modes,
}
ALSO = {"compiled": lambda loss, *given: once(torch.compile(loss, fullgraph=True, backend="aot_eager"), *given)}
IN_EVERY_WAY = [
    *pairwise(WAYS, OPTIONS, ("dense", "packed"), ("out", "lse", "both"), SUBSETS),
    *pairwise(WAYS, ("causal",), ("pairs",), ("out", "lse", "both"), SUBSETS),
    *some_of(pairwise(WAYS, ("causal", "dropout"), [f"dense, {name}" for name in EMPTY], ("out",), SUBSETS), 3),
    *some_of(pairwise([*WAYS][:4], ("causal", "dropout"), [f"packed, {name}" for name in EMPTY], ("out",), SUBSETS), 3),
    pytest.param("compiled", "causal", "pairs", "both", (0, 1, 2), marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("way", "name", "form", "of", "wanted"), IN_EVERY_WAY)
def test_every_way_to_differentiate_gives_the_formulas_derivatives(
    way: str, name: str, form: str, of: str, wanted: Wanted
) -> None:
    derive = (WAYS | ALSO)[way]
    given = inputs(form, name, torch.float64)
    wanted = (*wanted, 3) if "sinks" in name else wanted
    ours, plain = losses(name, form, of, given)
    torch.testing.assert_close(derive(ours, given, wanted), derive(plain, given, wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", [
    lambda x: flash_attn_func(x, x, x),
    lambda x: flash_attn_func(x, x, x.cos()),
    lambda x: flash_attn_kvpacked_func(x, torch.stack([x, x.cos()], 2)),
], ids=["one tensor", "one of another", "a pair of the queries"])  # fmt: skip
def test_create_graph_leaves_the_gradient_of_tensors_that_follow_from_each_other_as_it_is(
    call: Callable[..., Any],
) -> None:
    """The gradient had included the parts that flow through the others."""
    x = randn(1, 5, 2, 8).double().requires_grad_()
    found, right = (torch.autograd.grad(call(x).sin().sum(), x, create_graph=create) for create in (True, False))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)], ids=str)
@pytest.mark.parametrize("lengths", [(4, 4), (1, 7)])
def test_packed_calls_under_vmap_match_single_ones(in_dims: tuple[int | None, ...], lengths: tuple[int, ...]) -> None:
    starts, given = cumulative(*lengths), [randn(2, 9, 2, 8, seed=seed).double() for seed in range(3)]
    given = [x[0] if axis is None else x for x, axis in zip(given, in_dims)]

    def call(*qkv: Tensor) -> tuple[Tensor, ...]:
        return flash_attn_varlen_func(*qkv, starts, starts, 7, 7, causal=True, return_attn_probs=True)[:2]

    found = torch.func.vmap(call, in_dims)(*given)
    for index in range(2):
        expected = call(*(x if axis is None else x[index] for x, axis in zip(given, in_dims)))
        for ours, right in zip(found, expected, strict=True):
            close(ours[index], right)


@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
@pytest.mark.parametrize("by_variable", [False, True], ids=["use_backend", "environment variable"])
def test_gradients_of_a_named_backend_can_be_differentiated(
    backend: str, by_variable: bool, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs("dense", "causal", HALF)
    ours, _ = losses("causal", "dense", "out", given)
    right = twice(ours, given, (0, 1, 2))
    named = serve(backend)
    if by_variable:
        monkeypatch.setenv(settings.BACKEND, backend)
    with contextlib.nullcontext() if by_variable else named:
        for found, expected in zip(twice(ours, given, (0, 1, 2)), right, strict=True):
            close(found.detach(), expected.detach(), float(expected.detach().abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fused", "torch_flash", "torch_efficient", "official", "chunked"])
def test_on_a_gpu_too_where_the_backward_runs_in_a_thread_of_its_own(backend: str) -> None:
    def ours(*given: Tensor) -> list[Tensor]:
        found = on_backend(backend, flash_attn_func, *(x.cuda() for x in given), causal=True, return_attn_probs=True)
        return [x.cpu() for x in found[:2]]

    with use_backend(backend):
        given = qkv(sq=70, sk=110, h=4, hk=2, d=64, dtype=HALF)
        check_function(ours, lambda *x: right(*x, causal=True), *given, epsilons=16)
