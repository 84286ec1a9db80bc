"""F.scaled_dot_product_attention: served calls are right, in the fuzz too; declined calls are PyTorch's."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from flash_attn_compat import explain, reset_backend_counts, use_backend
from flash_attn_compat.torch_sdpa import attention, efficient
from tests.forms.inputs import randn
from tests.forms.plain import all_but_thorough, some, some_of
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.sdpa import fuzz, originals
from tests.sdpa.originals import counted

sdpa = F.scaled_dot_product_attention
HALF = torch.float16


class Case(NamedTuple):
    dtype: torch.dtype = HALF
    lengths: tuple[int, int] = (40, 40)
    heads: tuple[int, int] = (4, 4)
    head_dim: int = 32
    causal: bool = False
    layout: str = "heads first"
    scale: float | None = None


def leaves_of(case: Case) -> list[Tensor]:
    (rows, keys), (heads, heads_k) = case.lengths, case.heads
    shapes = (2, heads, rows), (2, heads_k, keys), (2, heads_k, keys)
    made = [randn(*shape, case.head_dim, seed=seed, dtype=case.dtype) for seed, shape in enumerate(shapes)]
    return [fuzz.laid_out(x, case.layout).detach().requires_grad_() for x in made]


def with_gradients(attend: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = attend(*inputs)
    dout = randn(*out.shape, seed=9).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def plainly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """bias: truths or numbers; rows that see nothing are 0"""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.to(q.dtype)
    sees = (scores > -torch.inf).any(-1, keepdim=True)
    return torch.where(sees, torch.where(sees, scores, 0.0).softmax(-1), 0.0) @ v


def check(ours: list[Tensor], plain: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Ours is at most twice, for gradients three times, as far from fp64 as the formula in the dtype."""
    exact = with_gradients(plain, [x.detach().double().requires_grad_() for x in inputs])
    rounded, dtype = with_gradients(plain, inputs), inputs[0].dtype
    for name, got, right, beside, factor in zip(("out", "dq", "dk", "dv"), ours, exact, rounded, (2, 3, 3, 3)):
        assert got.dtype == dtype and got.shape == right.shape
        bound = factor * float((beside.double() - right).abs().max()) + torch.finfo(dtype).eps
        assert float((got.double() - right).abs().max()) <= bound, name


def mask(rows: int = 40, keys: int = 40) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril()


@pytest.mark.parametrize("widths", [(20, 20), (32, 32), (32, 24)])
def test_outputs_have_the_strides_of_pytorchs_fused_kernels(widths: tuple[int, int], served: LaunchRecord) -> None:
    q, k, v = leaves_of(Case(head_dim=widths[0]))
    inputs = q, k, v[..., : widths[1]]
    meta = torch.ops.aten._scaled_dot_product_efficient_attention(*(x.to("meta") for x in inputs), None, False)
    out = sdpa(*inputs)
    assert out.stride() == meta[0].stride() and not out.is_contiguous() and counted() == {"fused": 1}


def test_few_rows_go_to_the_decode_kernel(recorded: LaunchRecord) -> None:
    with torch.no_grad():
        sdpa(*leaves_of(Case(lengths=(1, 50), heads=(4, 2))), enable_gqa=True)
    assert recorded.entries == ["decode"]


@pytest.mark.parametrize("bias", [None, mask()], ids=["plain", "masked"])
def test_dropout_is_one_mask_for_both_directions(bias: Tensor | None, served: LaunchRecord) -> None:
    q, k, v = leaves_of(Case())
    attend = functools.partial(sdpa, attn_mask=bias, dropout_p=0.5)
    torch.manual_seed(1)
    out = attend(q, k, v.detach().fill_(1.0))
    (dv,) = torch.autograd.grad(attend(q, k, v).sum(), v)
    assert counted() == {"fused": 2}
    assert 0.7 < float(out.detach().mean()) < 1.3 and out.detach().std() > 0.01 and dv.std() > 0.01
    torch.manual_seed(1)
    assert torch.equal(attend(q, k, v.detach().fill_(1.0)), out)


@pytest.mark.parametrize("dropout_p", some((0.001, 0.1, 0.9, 0.95, 0.999), 2))
def test_dropout_leaves_the_mean_as_it_was(dropout_p: float, served: LaunchRecord) -> None:
    q, k, _ = (x.detach() for x in leaves_of(Case(lengths=(64, 512))))
    torch.manual_seed(1)
    mean = float(sdpa(q, k, torch.ones_like(k), dropout_p=dropout_p).mean())
    assert abs(mean - 1) < 0.1 and counted() == {"fused" if dropout_p <= 0.9 else "pytorch": 1}


# ---- what is left to PyTorch


LEFT: dict[str, Callable[[], tuple[tuple[Tensor, ...], dict[str, Any]]]] = {
    "a mask that wants a gradient": lambda: (tuple(leaves_of(Case())), {"attn_mask": mask().half().requires_grad_()}),
    "fp32": lambda: (tuple(leaves_of(Case(torch.float32))), {}),
    "three axes": lambda: (tuple(x[0] for x in leaves_of(Case())), {}),
    "five axes": lambda: (tuple(x[None] for x in leaves_of(Case())), {}),
    "groups of two sizes": lambda: ((lambda q, k, v: (q, k[:, :2], v))(*leaves_of(Case())), {"enable_gqa": True}),
    "wide heads": lambda: (tuple(leaves_of(Case(head_dim=520, lengths=(8, 8)))), {}),
    "values of no width": lambda: ((lambda q, k, v: (q, k, v[..., :0]))(*leaves_of(Case())), {}),
    "no keys": lambda: (tuple(leaves_of(Case(lengths=(8, 0)))), {}),
    "no rows": lambda: (tuple(leaves_of(Case(lengths=(0, 8)))), {}),
}


@pytest.mark.parametrize("name", LEFT)
def test_declined_calls_match_pytorch_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, options = LEFT[name]()
    before = with_gradients(functools.partial(sdpa, **options), list(arguments))
    with originals.served(monkeypatch) as launches:
        after = with_gradients(functools.partial(sdpa, **options), list(arguments))
        assert counted() == {"pytorch": 1} and not launches.seen
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(before, after))


BAD: list[Callable[..., Tensor]] = [
    lambda q, k, v: sdpa(q, k[:, :2], v[:, :2]),
    lambda q, k, v: sdpa(q, k.float(), v),
    lambda q, k, v: sdpa(q, k[..., :16], v),
    lambda q, k, v: sdpa(q, k[:, :3], v[:, :3], enable_gqa=True),
]


def test_bad_input_gets_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def errors() -> list[str]:
        found = []
        for call in BAD:
            with pytest.raises(RuntimeError) as error:
                call(*leaves_of(Case()))
            found.append(str(error.value).splitlines()[0])
        return found

    before = errors()
    with originals.served(monkeypatch):
        assert errors() == before


def test_an_error_in_a_declined_call_does_not_decline_the_next(served: LaunchRecord) -> None:
    q, k, v = leaves_of(Case())
    with pytest.raises(RuntimeError):
        sdpa(q.float(), k, v)
    sdpa(q, k, v)
    assert counted() == {"pytorch": 1, "fused": 1}


@pytest.mark.parametrize("chosen", [lambda: sdpa_kernel(SDPBackend.MATH), lambda: use_backend("chunked")])
def test_a_call_that_may_have_another_backend_alone_is_declined(chosen: Any, recorded: LaunchRecord) -> None:
    with chosen():
        sdpa(*leaves_of(Case()))
    assert counted() == {"pytorch": 1}


def truths(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


SMALL, BOTH, GROUPED = randn(1, 2, 8, 16, dtype=HALF), randn(2, 4, 8, 16, dtype=HALF), {"enable_gqa": True}
MANY, FEW = leaves_of(Case())[0].detach(), leaves_of(Case(heads=(4, 2)))[1].detach()
ROW = MANY[:, :, :1]
# The policy's numbers, q, the keys and values, options, and who serves the call.
CHOICES: list[tuple[dict[str, int], Tensor, Tensor, dict[str, Any], str]] = [
    # A call with biases must be larger,
    ({"least_products": 8 * 8 * 2 * 16}, SMALL, SMALL, {}, "fused"),
    ({"least_products": 8 * 8 * 2 * 16}, SMALL, SMALL, {"attn_mask": truths(8, 8)}, "fused"),
    ({"least_products": 8 * 8 * 2 * 16}, SMALL, SMALL, {"attn_mask": torch.zeros(8, 8, dtype=HALF)}, "pytorch"),
    # and one with gradients.
    ({"least_products": MANY.numel() * 40}, MANY, MANY, {}, "fused"),
    ({"least_products": MANY.numel() * 40}, MANY, MANY.clone().requires_grad_(), {}, "pytorch"),
    # Small calls are declined unless PyTorch takes the formula, as for what it would broadcast.
    ({"least_products": 2**30}, MANY, MANY, {}, "pytorch"),
    ({"least_products": 2**30}, MANY, FEW, GROUPED, "fused"),
    ({"least_products": 2**30}, MANY.bfloat16(), MANY.bfloat16(), {}, "fused"),
    ({"least_products": 2**40}, BOTH, BOTH[:1], {}, "fused"),
    ({"least_products": 2**40}, BOTH, BOTH[:, :1], {}, "fused"),
    # Biases that no two scores share are declined,
    ({"least_products": 1}, BOTH, BOTH, {"attn_mask": randn(2, 4, 8, 8, dtype=HALF)}, "pytorch"),
    ({"least_products": 1}, BOTH, BOTH, {"attn_mask": randn(1, 4, 8, 8, dtype=HALF)}, "fused"),
    ({"least_products": 1}, BOTH, BOTH, {"attn_mask": randn(2, 1, 8, 8, dtype=HALF)}, "fused"),
    ({"least_products": 1}, BOTH, BOTH, {"attn_mask": randn(1, 4, 8, 8, dtype=HALF).expand(2, -1, -1, -1)}, "fused"),
    ({"least_products": 1}, BOTH, BOTH, {"attn_mask": truths(2, 4, 8, 8)}, "fused"),
    # and one row over few keys.
    ({"least_products": 2**30, "least_keys": 64}, ROW, MANY, {}, "pytorch"),
    ({"least_products": 2**30, "least_keys": 64}, ROW, torch.cat([MANY, MANY], 2), {}, "fused"),
]


@pytest.mark.parametrize(("policy", "q", "keys", "options", "who"), CHOICES)
def test_size_gradients_and_mask_say_who_serves_a_call(
    policy: dict[str, int], q: Tensor, keys: Tensor, options: dict[str, Any], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with originals.served(monkeypatch, originals.POLICY._replace(**policy), computes=False):
        sdpa(q, keys, keys, **options)
    assert counted() == {who: 1}


@pytest.mark.parametrize(
    ("tokens", "head_dim", "hides", "records", "who"),
    [
        (32, 64, "causal", True, "fused"), (33, 64, "causal", True, "pytorch"), (128, 33, "causal", True, "pytorch"),
        (129, 64, "causal", True, "fused"), (64, 64, "causal", False, "fused"), (64, 32, "causal", True, "fused"),
        (64, 64, "mask", True, "pytorch"), (65, 64, "mask", True, "fused"), (64, 64, "", True, "fused"),
        (128, 64, "", True, "fused"), (97, 65, "", True, "pytorch"), (128, 96, "mask", True, "pytorch"),
        (128, 96, "causal", True, "fused"), (96, 96, "", True, "fused"), (128, 97, "", True, "fused"),
        (33, 193, "", False, "pytorch"), (128, 256, "causal", False, "pytorch"), (33, 192, "", False, "fused"),
        (33, 193, "", True, "fused"), (129, 256, "", False, "fused"),
    ],
)  # fmt: skip
def test_short_sequences_for_which_pytorchs_kernel_is_faster_are_declined(
    tokens: int, head_dim: int, hides: str, records: bool, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = randn(1, 1, tokens, head_dim, dtype=HALF).requires_grad_(records)
    mask = torch.ones(tokens, tokens, dtype=torch.bool) if hides == "mask" else None
    with originals.served(monkeypatch, originals.POLICY._replace(least_products=1), computes=False):
        sdpa(q, q, q, attn_mask=mask, is_causal=hides == "causal")
        assert counted() == {who: 1}


# ---- who looks on


def test_explain_names_the_backend_and_the_reasons(served: LaunchRecord) -> None:
    q, k, v = leaves_of(Case())
    assert str(explain(sdpa, q, k, v)) == "fused    serves the call\npytorch  could serve it too"
    left = explain(sdpa, q, k, v, attn_mask=mask().half().requires_grad_())
    assert left.backend == "pytorch" and left.reasons == {"fused": ["its mask requires a gradient"], "pytorch": []}
    wide = explain(sdpa, *leaves_of(Case(head_dim=520, lengths=(8, 8))))
    assert wide.reasons["fused"] == ["head_dim is at most 512, got 520"]
    assert counted() == {} and not served.seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_are_served(mode: Any, recorded: LaunchRecord) -> None:
    with mode():
        out = sdpa(*leaves_of(Case()))
    assert counted() == {"fused": 1} and not out.requires_grad


def test_autocast_casts_before_the_fused_kernel(recorded: LaunchRecord) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = sdpa(*leaves_of(Case(torch.float32)))
    assert out.dtype == torch.bfloat16 and counted() == {"fused": 1}


@pytest.mark.parametrize("bias", [None, randn(4, 4, seed=3)], ids=["plain", "masked"])
def test_second_derivatives(bias: Tensor | None, served: LaunchRecord) -> None:
    q, k, v = (x[:1, :1, :4].detach().requires_grad_() for x in leaves_of(Case()))

    def twice(attend: Callable[..., Tensor]) -> Tensor:
        (dq,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        return torch.autograd.grad(dq.sum(), k)[0]

    ours = twice(functools.partial(sdpa, attn_mask=bias))
    assert counted() == {"fused": 1}
    torch.testing.assert_close(ours, twice(functools.partial(plainly, bias=bias)), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(6, 6).tril() > 0}], ids=str)
def test_many_gradients_at_once(options: dict[str, Any], served: LaunchRecord) -> None:
    """torch.autograd.functional.jacobian(vectorize=True) and torch.func.vmap ask for such gradients."""
    inputs = leaves_of(Case(lengths=(6, 6)))
    out = sdpa(*inputs, **options)

    def gradients(dout: Tensor, **named: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, dout, retain_graph=True, **named)

    douts = randn(3, *out.shape, seed=5, dtype=HALF)
    right = [torch.stack(alike) for alike in zip(*map(gradients, douts))]
    for found in (gradients(douts, is_grads_batched=True), torch.func.vmap(gradients)(douts)):
        for got, expected in zip(found, right):
            torch.testing.assert_close(got, expected, rtol=0, atol=8e-3)
            assert not got.requires_grad
    assert counted() == {"fused": 1}


@pytest.mark.parametrize("order", ["MATH EFFICIENT_ATTENTION", "CUDNN_ATTENTION MATH FLASH_ATTENTION"])
def test_the_formula_first_is_the_formula(order: str, recorded: LaunchRecord) -> None:
    if "set_priority" not in inspect.signature(sdpa_kernel).parameters:
        pytest.skip("PyTorch 2.6 brought it")
    backends, inputs = [getattr(SDPBackend, name) for name in order.split()], leaves_of(Case())
    with sdpa_kernel(backends, set_priority=True):
        sdpa(*inputs)
        assert counted() == {"pytorch": 1} and "plain formula" in explain(sdpa, *inputs).reasons["fused"][0]
    for options in ({}, {"set_priority": True}):
        reset_backend_counts()
        with sdpa_kernel(backends[::-1] if options else backends, **options):
            sdpa(*inputs)
        assert counted() == {"fused": 1}


BROADCAST: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int], bool]] = {
    "one head of keys": ((2, 4), (2, 1), (2, 1), False),
    "one head of keys, not of values": ((2, 4), (2, 1), (2, 4), False),
    "one batch of keys": ((2, 4), (1, 4), (1, 4), False),
    "one batch of keys, grouped": ((2, 4), (1, 2), (1, 2), True),
    "one batch and head of keys": ((2, 4), (1, 1), (1, 1), False),
    "one batch of values": ((2, 4), (2, 4), (1, 4), False),
    "one head of queries": ((2, 1), (2, 4), (2, 4), False),
    "one batch of queries": ((1, 4), (2, 4), (2, 4), False),
}


@pytest.mark.parametrize(
    ("name", "options"),
    some_of(itertools.product(BROADCAST, ({}, {"is_causal": True}, {"attn_mask": mask(33, 40)})), 2),
)
def test_batches_and_heads_of_one_are_broadcast(name: str, options: dict[str, Any], served: LaunchRecord) -> None:
    *shapes, is_grouped = BROADCAST[name]
    lengths = zip(shapes, (33, 40, 40))
    inputs = [randn(*shape, rows, 32, seed=rows, dtype=HALF).requires_grad_() for shape, rows in lengths]
    found = with_gradients(functools.partial(sdpa, **options, enable_gqa=is_grouped), inputs)
    assert counted() == {"fused": 1}

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = max(x.shape[1] for x in (q, k, v))
        return plainly(q.expand(-1, heads, -1, -1), k, v, mask(33, 40) if options else None)

    check(found, plain, inputs)


def test_queries_of_one_over_keys_of_none_are_left_to_pytorch(recorded: LaunchRecord) -> None:
    for batch, heads in ((0, 4), (2, 0)):
        q, keys = randn(1, 1, 33, 32, dtype=HALF), randn(batch, heads, 40, 32, dtype=HALF)
        assert sdpa(q, keys, keys).shape == sdpa(*(x.float() for x in (q, keys, keys))).shape
    assert counted() == {"pytorch": 4}


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_see_pytorchs_operators(transform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in leaves_of(Case(torch.float32, lengths=(6, 6))))

    def transformed() -> Any:
        if transform == "vmap":
            return torch.func.vmap(sdpa)(*(x.unflatten(0, (2, 1)) for x in (q, k, v)))
        if transform == "grad":
            return torch.func.grad(lambda q: sdpa(q, k, v).sum())(q)
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.jvp(lambda q: sdpa(q, k, v), (q,), (q,))[1]

    before = transformed()
    with originals.served(monkeypatch):
        assert torch.equal(transformed(), before)


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(30, 50), (50, 30)])
def test_causal_biases(variant: Any, lengths: tuple[int, int], served: LaunchRecord) -> None:
    """Their class sends plain top-left masks to the operator, and makes a mask of the others on a CPU."""
    q, k, v = (x.detach() for x in leaves_of(Case(lengths=lengths)))
    seen = variant(*lengths)._materialize(q.device)
    sees = seen.any(-1)
    right = (q @ k.mT * 32**-0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(sdpa(q, k, v, variant(*lengths))[:, :, sees], right[:, :, sees], rtol=0, atol=4e-3)


def test_multi_head_attention_without_weights(served: LaunchRecord) -> None:
    layer = torch.nn.MultiheadAttention(64, 2, batch_first=True, dtype=HALF)
    x = randn(2, 20, 64, dtype=HALF)
    out, weights = layer(x, x, x, need_weights=False)
    assert weights is None and counted() == {"fused": 1} and out.shape == x.shape


# ---------------------------------------------------------------- the fuzz on the emulator, and its planted mistakes


def test_problems_are_drawn_alike_everywhere_and_of_every_kind() -> None:
    problems = [fuzz.draw(seed) for seed in range(300)]
    assert problems == [fuzz.draw(seed) for seed in range(300)]
    assert {p.operator for p in problems} == {"sdpa", "efficient", "packed"}
    assert any(keys == 0 for p in problems for _, keys in p.lengths) and any(p.window for p in problems)


def test_parts_are_solved_and_failures_told(served: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    small = fuzz.NAMED["head_dim 512"]._replace(dims=(32, 32), mask=originals.NO_MASK, backward=False)
    monkeypatch.setattr(fuzz, "draw", lambda seed, dtype, mixes: small._replace(seed=seed))
    assert fuzz.solve(range(0, 8, 4), "float16", "cpu", math.inf)[:2] == (2, [])
    assert fuzz.solve(range(4), None, "cpu", -math.inf).problems == 0
    monkeypatch.setattr(fuzz, "examine", lambda problem, device: [f"{problem.seed} is off"])
    assert fuzz.solve(range(3), None, "cpu", math.inf).failures[2].endswith("\n  2 is off")


@pytest.mark.parametrize("seed", some(range(24), 12))
def test_random_problems_are_solved_within_the_bound(seed: int, served: LaunchRecord) -> None:
    problem = fuzz.draw(seed, longest=fuzz.SMALL)
    assert not fuzz.examine(problem, "cpu"), problem
    assert counted() == {"fused": 1}


# tests/sdpa/test_answers.py has causal calls of more rows than keys, too.
@pytest.mark.parametrize("name", all_but_thorough(fuzz.NAMED, ["causal, more rows than keys"]))
def test_named_problems_are_solved_within_the_bound(name: str, served: LaunchRecord) -> None:
    assert not fuzz.examine(fuzz.NAMED[name], "cpu") and counted() == {"fused": 1}


MISTAKES: dict[str, Any] = {
    "the window stands at the first key": (efficient, "_as_flash", lambda found, p: (
        found[0], found[1]._replace(window_size_left=-1, window_size_right=-1))),
    "bottom right for top left": (attention, "_as_flash", lambda found, call: (
        found[0]._replace(k=call.key.transpose(1, 2), v=call.value.transpose(1, 2)),
        found[1]._replace(causal=call.is_causal))),
    "the scale is lost": (attention, "_as_flash", lambda found, call: (
        found[0], found[1]._replace(softmax_scale=None))),
    "a wrong LSE": (efficient, "_pad_lse", lambda found, p, lse: found + 1e-2),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(mistake: str, served: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, change = MISTAKES[mistake]
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: change(original(*arguments), *arguments))
    problems = (fuzz.draw(seed, longest=fuzz.SMALL)._replace(backward=False) for seed in (5, 6, 1))
    assert any(fuzz.examine(problem, "cpu") for problem in problems)


def test_the_stand_ins_agree_with_the_plain_formula() -> None:
    with originals.cpu_stand_ins():
        for seed in range(40):
            problem = fuzz.draw(seed, longest=20)._replace(backward=False)
            assert not fuzz.examine(problem, "cpu"), problem
