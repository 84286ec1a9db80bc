"""softmax_lse is differentiable: gradients of losses that it is part of, against the plain formula in fp64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_kvpacked_func, flash_attn_varlen_func, use_backend
from tests import fused_on_cpu, others_kernels
from tests.plain import attention_and_lse, check_function, pairwise
from tests.support import GENERAL, cumulative, on_backend, qkv, randn

SLOPES = torch.tensor([0.3, 0.1, 0.2, 0.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.7},
    "ALiBi": {"alibi_slopes": SLOPES},
    "causal ALiBi": {"alibi_slopes": SLOPES, "causal": True},
    "dropout": {"dropout_p": 0.3},
}
HALF, FLOAT = torch.float16, torch.float32
FORMS = "dense", "packed"
# Backend, dtype, form, options. Few of our kernels: where they count a gradient of the LSE, no mask matters.
CASES = [
    *pairwise(("chunked", "reference"), (HALF, FLOAT), FORMS, OPTIONS),
    *pairwise(("sdpa",), (FLOAT,), FORMS, [name for name in OPTIONS if name not in ("softcap", "dropout")]),
    *pairwise(("official",), (HALF,), FORMS, [name for name in OPTIONS if name != "dropout"]),
    *pairwise(("torch_flash",), (HALF,), FORMS, ("plain", "causal", "window")),
    *pairwise(("torch_efficient",), (HALF,), ("dense",), ("plain", "causal")),
    *pairwise(("fused",), (HALF, torch.bfloat16), FORMS, ("causal",)),
    ("fused", HALF, "packed", "causal ALiBi"),
]
# So many short ones that they are padded to common lengths.
LENGTHS_Q, LENGTHS_K = (3, 9, 2, *(1, 2, 3, 4) * 3), (5, 9, 30, *(2, 4, 3, 5) * 3)


def serve(backend: str, patch: pytest.MonkeyPatch, folder: Path) -> contextlib.AbstractContextManager[None]:
    if backend == "fused":
        fused_on_cpu.emulate(patch)
    elif backend not in GENERAL:
        others_kernels.install(patch, backend, folder)
    return use_backend(backend)


def right(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out and the LSE as flash-attn reports it, of dense tensors; keep: (batch, nheads, >= seqlen_q, >= seqlen_k)"""
    named = {"softmax_scale": "scale", "alibi_slopes": "slopes", "window_size": "window"}
    given = {named.get(name, name): value for name, value in options.items()}
    causal = given.pop("causal", False)
    window = (-1, 0) if causal else given.pop("window", (-1, -1))
    if keep is not None:
        keep = keep[..., : q.shape[1], : k.shape[1]]
    out, lse = attention_and_lse(q, k, v, window=window, keep=keep, **given)
    if causal and "slopes" in given:
        positions = torch.arange(q.shape[1]) + k.shape[1] - q.shape[1]
        lse = lse + given["slopes"][:, None] * positions
    return out, lse


def on_each(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same of packed tensors."""
    each = zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K))
    found = [
        right(*(x[None] for x in parts), None if keep is None else keep[[index]], options)
        for index, parts in enumerate(each)
    ]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], dim=-1)


def name_of(value: Any) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("backend", "dtype", "form", "name"), CASES, ids=name_of)
def test_gradients_of_out_and_lse_are_those_of_the_formula(
    backend: str, dtype: torch.dtype, form: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options, attention, lengths = OPTIONS[name], flash_attn_func, ()
    given, expected = qkv(sq=7, sk=11, h=4, hk=2, dtype=dtype), right
    if form == "packed":
        totals = (sum(LENGTHS_Q), 4), (sum(LENGTHS_K), 2), (sum(LENGTHS_K), 2)
        given, expected = tuple(randn(*shape, 16, seed=s, dtype=dtype) for s, shape in enumerate(totals)), on_each
        attention = flash_attn_varlen_func
        lengths = cumulative(*LENGTHS_Q), cumulative(*LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)

    def ours(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        found: tuple[Tensor, Tensor, Tensor] = attention(*tensors, *lengths, **options, return_attn_probs=True)
        return found

    with serve(backend, monkeypatch, tmp_path):
        keep = ours(*given)[2] >= 0 if name == "dropout" else None
        check_function(lambda *x: ours(*x)[:2], lambda *x: expected(*x, keep, options), *given, epsilons=16)


@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
@pytest.mark.parametrize("poison", [0.0, torch.nan])
def test_rows_without_keys_have_no_gradient_whatever_a_loss_makes_of_their_infinite_lse(
    backend: str, poison: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 11 rows over 7 keys, under a causal mask."""
    q, k, v = (x.half().requires_grad_() for x in qkv(sq=11, sk=7, h=4, hk=2))
    with serve(backend, monkeypatch, tmp_path):
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


def of_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A loss of the LSE alone."""
    return flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[1].sin().sum()


def of_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    return out.square().sum() + lse.sin().sum()


def of_packed_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse, _ = flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True, return_attn_probs=True)
    return out.square().sum() + lse.sin().sum()


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = attention_and_lse(q, k, v, window=(-1, 0))
    return out.square().sum() + lse.sin().sum()


def of_lse_by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_and_lse(q, k, v, window=(-1, 0))[1].sin().sum()


LOSSES = {of_lse: of_lse_by_formula, of_both: by_formula, of_packed_pairs: by_formula}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def once(loss: Loss, *given: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in given]
    return torch.autograd.grad(loss(*leaves), leaves, materialize_grads=True)


def compiled(loss: Loss, *given: Tensor) -> tuple[Tensor, ...]:
    torch._dynamo.reset()
    return once(torch.compile(loss, fullgraph=True, backend="aot_eager"), *given)


def twice(loss: Loss, *given: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in given]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True, materialize_grads=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), leaves, materialize_grads=True)


def transformed(loss: Loss, *given: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.func.grad(loss, (0, 1, 2))(*given)
    return found


def along_a_tangent(loss: Loss, *given: Tensor) -> tuple[Tensor, ...]:
    return (torch.func.jvp(loss, given, tuple(x.cos() for x in given))[1],)


@pytest.mark.parametrize("derive", [once, compiled, twice, transformed, along_a_tangent])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_way_to_differentiate_takes_the_lse_into_account(
    loss: Loss, derive: Callable[..., tuple[Tensor, ...]]
) -> None:
    given = tuple(x.double() for x in qkv(sq=5, sk=9, h=4, hk=2))
    torch.testing.assert_close(derive(loss, *given), derive(LOSSES[loss], *given))


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_single_input_may_ask(wanted: int) -> None:
    found, expected = (
        torch.autograd.grad(loss(*given), given[wanted])[0]
        for loss in (of_lse, of_lse_by_formula)
        for given in [[x.double().requires_grad_(i == wanted) for i, x in enumerate(qkv())]]
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fused", "torch_flash", "torch_efficient", "official", "chunked"])
def test_on_a_gpu_too_where_the_backward_runs_in_a_thread_of_its_own(backend: str) -> None:
    def ours(*given: Tensor) -> list[Tensor]:
        found = on_backend(backend, flash_attn_func, *(x.cuda() for x in given), causal=True, return_attn_probs=True)
        return [x.cpu() for x in found[:2]]

    with use_backend(backend):
        given = qkv(sq=70, sk=110, h=4, hk=2, d=64, dtype=HALF)
        check_function(ours, lambda *x: right(*x, None, OPTIONS["causal"]), *given, epsilons=16)
