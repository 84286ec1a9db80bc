"""Answers are tensors of their own; a recomputation is its forward's; the operators of the memory-efficient kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from flash_attn_compat import explain, flash_attn_func, use_backend
from flash_attn_compat.backends.torch_efficient import TorchEfficient
from flash_attn_compat.core.torch_state import as_decided
from tests.forms.inputs import cumulative, ints, randn
from tests.forms.plain import all_but_thorough
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.sdpa import originals
from tests.sdpa.originals import POLICY, counted, stand_in_backward, stand_in_forward
from tests.sdpa.test_attention import Case, leaves_of, mask

sdpa, aten = F.scaled_dot_product_attention, torch.ops.aten


SEEN = torch.ones(1, 40, dtype=torch.bool)
OWN: dict[str, tuple[Case, dict[str, Any]]] = {
    "a call": (Case(), {}),
    "grouped heads": (Case(heads=(4, 2)), {"enable_gqa": True}),
    "a causal call of more keys": (Case(lengths=(33, 70)), {"is_causal": True}),
    "channels that are copied": (Case(head_dim=20, layout="unaligned"), {}),
    "one row under a mask": (Case(lengths=(1, 40), heads=(4, 2)), {"enable_gqa": True, "attn_mask": SEEN}),
    "one row of one group": (Case(lengths=(1, 40), heads=(4, 1)), {"enable_gqa": True, "attn_mask": SEEN}),
    "dropout": (Case(), {"dropout_p": 0.5}),
}


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_an_answer_is_a_tensor_of_its_own_at_version_0(name: str, wants: bool, recorded: LaunchRecord) -> None:
    """Like PyTorch's output, it is no view: autograd refuses writes into views made without gradients."""
    case, options = OWN[name]
    with torch.set_grad_enabled(wants):
        out = sdpa(*(x.detach().requires_grad_(wants) for x in leaves_of(case)), **options)
    assert (out._version, out._base, out._is_view(), out.requires_grad) == (0, None, False, wants)
    assert out.transpose(1, 2).is_contiguous() and counted() == {"fused": 1}
    assert not out.detach_().requires_grad
    out += torch.ones_like(out).requires_grad_()
    assert out.requires_grad


def doubled(out: Tensor, how: str) -> Tensor:
    """Twice ``out``, in its own memory or another."""
    if how == "in place":
        return out.mul_(2)
    if how == "elsewhere":
        return out * 2
    rows = out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1).mul_(2)
    return rows.unflatten(-1, (out.shape[1], -1)).transpose(1, 2)


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "dropout": {"dropout_p": 0.3}, "mask": {"attn_mask": mask()}}
WRITTEN = [*itertools.product(OPTIONS, ("in place", "reshaped"), ("nothing", "hooks", "a checkpoint", "create_graph"))]
OFTEN = [
    ("plain", "in place", "nothing"), ("plain", "reshaped", "a checkpoint"), ("dropout", "in place", "create_graph"),
    ("dropout", "reshaped", "hooks"), ("mask", "reshaped", "nothing"), ("mask", "in place", "a checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "how", "under"),
    [pytest.param(*row, marks=[] if row in OFTEN else [pytest.mark.thorough]) for row in WRITTEN],
)
def test_an_answer_may_be_written_to_before_its_backward(
    options: str, how: str, under: str, served: LaunchRecord
) -> None:
    """Like the output of the plain formula, which PyTorch uses for grouped heads and bf16 on Turing."""
    inputs = leaves_of(Case(heads=(4, 2)))

    def gradients(how: str) -> tuple[Tensor, ...]:
        def attend(*inputs: Tensor) -> Tensor:
            return doubled(sdpa(*inputs, **OPTIONS[options], enable_gqa=True), how)

        torch.manual_seed(3)
        with torch.autograd.graph.save_on_cpu() if under == "hooks" else contextlib.nullcontext():
            out: Any = checkpoint(attend, *inputs, use_reentrant=False) if under == "a checkpoint" else attend(*inputs)
        return torch.autograd.grad(out.square().sum(), inputs, create_graph=under == "create_graph")

    assert all(map(torch.equal, gradients(how), gradients("elsewhere")))


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_answers_of_the_operator_below_are_their_own(is_packed: bool, wants: bool, recorded: LaunchRecord) -> None:
    q = leaves_of(Case())[0].transpose(1, 2).contiguous().detach()
    starts: tuple[Any, ...] = (None,) * 4
    if is_packed:
        q = q.flatten(0, 1)[None]
        starts = torch.tensor([0, 40, 80], dtype=torch.int32), torch.tensor([0, 40, 80], dtype=torch.int32), 40, 40
    found = aten._efficient_attention_forward(q.requires_grad_(wants), q, q, None, *starts, 0.0, 0, True)[:2]
    assert counted() == {"fused": 1}
    assert [(x._version, x._base) for x in found] == [(0, None)] * 2


# ------------------- forward and recomputation under a checkpoint are by one and the same: dropout's masks depend on it

HALF = torch.float16


class Block(NamedTuple):
    """least: products of a call without gradients that is ours, as a share of this call's

    mask: the mask that the block computes from its parameter
    """

    rows: int = 128
    keys: int = 128
    heads_k: int = 2
    least: float = 0.0
    dtype: torch.dtype = HALF
    mask: Callable[[Tensor], Tensor] | None = None


with torch.inference_mode():
    OF_INFERENCE = torch.ones(128, 128, dtype=torch.bool).tril()

CASES = {
    "small": Block(least=2.0),
    "large": Block(least=0.1),
    "large but for gradients": Block(least=0.5),
    "few tokens": Block(rows=64, keys=64, least=1e-3),
    "few tokens under booleans": Block(20, 20, least=1e-3, mask=lambda _: torch.ones(20, 20, dtype=torch.bool).tril()),
    "grouped heads": Block(heads_k=1, least=2.0),
    "bf16": Block(dtype=torch.bfloat16, least=2.0),
    "one row": Block(rows=1),
    "one row of a group under booleans": Block(1, heads_k=1, mask=lambda _: torch.ones(1, 128, dtype=torch.bool)),
    "a bias made of a parameter": Block(mask=lambda parameter: (parameter * 1).half()),
    "a bias made of numbers": Block(mask=lambda parameter: parameter.detach().half()),
    "booleans of inference mode": Block(mask=lambda _: OF_INFERENCE),
}


# Checkpoints that are not reentrant have a test above, and bf16 goes the way of grouped heads.
@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", all_but_thorough(CASES, ["bf16"]))
def test_dropout_under_a_checkpoint_drops_the_same_twice(
    name: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reentrant checkpoint's forward is not recorded, and its recomputation is."""
    case, seen = CASES[name], []
    q = randn(1, 2, case.rows, 32, dtype=case.dtype).requires_grad_()
    k, v = (randn(1, case.heads_k, case.keys, 32, seed=seed, dtype=case.dtype).requires_grad_() for seed in (1, 2))
    parameter = randn(128, 128, seed=3).requires_grad_()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = None if case.mask is None else case.mask(parameter)
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=0.3, enable_gqa=case.heads_k == 1)
        seen.append(out.detach().clone())
        return out * 1

    least = int(case.rows * case.keys * 2 * 32 * case.least)
    with originals.served(monkeypatch, POLICY._replace(least_products=least)), set_checkpoint_early_stop(False):
        torch.manual_seed(5)
        out: Any = checkpoint(block, q, k, v, use_reentrant=reentrant)
        out.float().square().sum().backward()
        assert len(counted()) == 1
    assert len(seen) == 2 and torch.equal(*seen)


def test_explain_names_one_backend_for_dropout_with_and_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    q = randn(1, 2, 128, 32, dtype=HALF).requires_grad_()
    with originals.served(monkeypatch, POLICY._replace(least_products=128 * 128 * 32)):
        found = [explain(F.scaled_dot_product_attention, x, x, x, dropout_p=0.3) for x in (q, q.detach())]
        assert found[0] == found[1] and found[0].backend == "pytorch"
        assert explain(F.scaled_dot_product_attention, q.detach(), q.detach(), q.detach()).backend == "fused"


def test_a_backend_that_declines_gradients_declines_dropout_without_them(
    served: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As capabilities may say, or a kernel of the backward that failed."""
    from flash_attn_compat.backends.fused import Fused

    monkeypatch.setattr(Fused, "extra_reasons", lambda _, traits: ["no gradients"] * traits.needs_backward)
    q = randn(1, 2, 40, 32, dtype=HALF)
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
    assert counted() == {"pytorch": 1} and not served.seen
    F.scaled_dot_product_attention(q, q, q)
    assert counted() == {"pytorch": 1, "fused": 1}


class Dense(NamedTuple):
    """Dense (batch, rows, heads, channels); custom_mask_type: 0 none, 1 causal from the top left, 2 from the bottom."""

    dtype: torch.dtype = HALF
    lengths: tuple[int, int] = (40, 40)
    custom_mask_type: int = 0
    window_size: int | None = None
    head_dim: int = 32
    scale: float | None = None


def inputs(case: Dense, heads: int = 3) -> list[Tensor]:
    shapes = [(2, case.lengths[index], heads, case.head_dim) for index in (0, 1, 1, 0)]
    return [randn(*shape, seed=seed, dtype=case.dtype) for seed, shape in enumerate(shapes)]


def arguments(case: Dense) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = {"scale": case.scale, "window_size": case.window_size}
    return (None, None, None, None, None, 0.0, case.custom_mask_type), options


def close(got: Tensor, right: Tensor) -> None:
    bound = 8 * torch.finfo(got.dtype).eps * max(1.0, float(right.abs().max()))
    assert float((got.double() - right.double()).abs().max()) <= bound


# The fuzz compares values of other problems, but no gradients under a window, and no backward of another's forward.
DENSE = [
    *(Dense(lengths=lengths, custom_mask_type=mask) for lengths in ((33, 70), (70, 33)) for mask in (0, 1, 2)),
    Dense(torch.bfloat16, (33, 70), 1, head_dim=20, scale=0.3),
    Dense(lengths=(40, 40), custom_mask_type=1, window_size=9),
    *(Dense(lengths=lengths, custom_mask_type=2, window_size=9) for lengths in ((33, 70), (40, 40))),
]


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_results_match_the_stand_ins_shapes_strides_and_gradients(case: Dense, served: LaunchRecord) -> None:
    q, k, v, dout = inputs(case)
    positional, named = arguments(case)
    right = stand_in_forward(q.double(), k.double(), v.double(), *positional, True, **named)
    found = aten._efficient_attention_forward(q, k, v, *positional, True, **named)
    assert counted() == {"fused": 1}
    assert torch.equal(found[1].isinf(), right[1].isinf())
    meta = aten._efficient_attention_forward(*(x.to("meta") for x in (q, k, v)), *positional, True)
    assert [layout(x) for x in found] == [layout(x) for x in meta]
    for out, lse in ((found[0], found[1]), (right[0].to(case.dtype), right[1])):
        ours = backward(aten._efficient_attention_backward, case, dout, q, k, v, out, lse)
        wide = [x.double() for x in (dout, q, k, v, out)]
        for got, exact, source in zip(ours[:3], backward(stand_in_backward, case, *wide, lse)[:3], (q, k, v)):
            assert got.is_contiguous() and got.shape == source.shape and got.dtype == case.dtype
            close(got, exact)
        assert ours[3] is None


def layout(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


SEED = torch.zeros((), dtype=torch.int64)


def backward(operator: Any, case: Dense, *tensors: Tensor) -> Any:
    dout, q, k, v, out, lse = tensors
    return operator(
        dout, q, k, v, None, out, None, None, q.shape[1], k.shape[1], lse, 0.0, SEED, SEED, case.custom_mask_type,
        False, scale=case.scale, window_size=case.window_size,
    )  # fmt: skip


def test_dense_tensors_have_their_own_lengths_and_no_lse_unless_it_is_asked_for(recorded: LaunchRecord) -> None:
    q, k, v, _ = inputs(Dense(lengths=(40, 50)))
    found = aten._efficient_attention_forward(q, k, v, None, None, None, 7, 9, 0.0, 0)
    assert found[1].shape == (2, 3, 0) and found[4:] == (40, 50) and counted() == {"fused": 1}


def test_the_composed_operator_has_pytorchs_strides(served: LaunchRecord) -> None:
    q, k, v, dout = (x.transpose(1, 2).detach().requires_grad_() for x in inputs(Dense(lengths=(40, 50))))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    meta = aten._scaled_dot_product_efficient_attention(*(x.to("meta") for x in (q, k, v)), None, True)
    assert (layout(out), layout(lse)) == (layout(meta[0]), layout(meta[1]))
    assert all(gradient.transpose(1, 2).is_contiguous() for gradient in gradients)
    assert counted() == {"fused": 1} and "dkdv" in served.entries
    close(out, F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True))


def test_autograd_of_the_operator_itself(served: LaunchRecord) -> None:
    leaves = [x.requires_grad_() for x in inputs(Dense())[:3]]
    out = aten._efficient_attention_forward(*leaves, *arguments(Dense(custom_mask_type=2))[0], True)[0]
    found = torch.autograd.grad(out.sum(), leaves)
    right = stand_in_backward(torch.ones_like(out), *leaves, None, *(None,) * 3, 40, 40, *(None,) * 4, 2, False)
    for got, exact in zip(found, right):
        close(got, exact)
    assert counted() == {"fused": 1} and served.entries[-3:] == ["delta", "dkdv", "dq"]


@pytest.mark.parametrize("ours_first", [True, False])
def test_backwards_accept_either_kernels_forward(ours_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch may be turned between the two."""
    leaves = [x.requires_grad_() for x in inputs(Dense())[:3]]

    def forward() -> Tensor:
        out: Tensor = aten._efficient_attention_forward(*leaves, *arguments(Dense(custom_mask_type=1))[0], True)[0]
        return out

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out.square().sum(), leaves)

    with originals.cpu_stand_ins():
        right = backward(forward())
        with originals.served(monkeypatch) as launches:
            out = forward()
            found = None if ours_first else backward(as_decided(forward))
        found = found or backward(out)
        assert ("forward" in launches.entries) and ("dq" in launches.entries) == (not ours_first)
    for got, wanted in zip(found, right):
        close(got, wanted)


# ---- packed sequences, as xformers and nested tensors send them


class Packed(NamedTuple):
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    custom_mask_type: int = 0
    window_size: int | None = None
    used: tuple[int, ...] | None = None


PACKED = [
    Packed((20, 1, 33), (20, 1, 33), 1, 7),
    Packed((20, 1, 33), (30, 17, 5), 2, 7),
    Packed((20, 3), (0, 12), 0),
    Packed((1, 1, 1), (30, 40, 40), 2, None, (7, 40, 1)),
    Packed((2, 2, 2), (30, 40, 40), 0, None, (7, 40, 1)),
]


@pytest.mark.parametrize("p", PACKED, ids=str)
def test_packed_sequences(p: Packed, served: LaunchRecord) -> None:
    starts_q = cumulative(*p.lengths_q)
    starts_k = starts_q if p.lengths_q == p.lengths_k else cumulative(*p.lengths_k)
    totals = sum(p.lengths_q), sum(p.lengths_k)
    q, k, v, dout = (randn(1, totals[index], 4, 32, seed=index, dtype=HALF) for index in (0, 1, 1, 0))
    longest = max(p.lengths_q), max(p.lengths_k)
    named = {"seqlen_k": None if p.used is None else ints(*p.used), "window_size": p.window_size}
    positional = None, starts_q, starts_k, *longest, 0.0, p.custom_mask_type
    found = aten._efficient_attention_forward(q, k, v, *positional, True, **named)
    right = stand_in_forward(q, k, v, *positional, True, **named)
    assert counted() == {"fused": 1}
    close(found[0], right[0])
    assert found[0].shape == q.shape and found[1].shape == right[1].shape and found[1].is_contiguous()
    for index, rows in enumerate(p.lengths_q):
        close(found[1][index, :, :rows].half(), right[1][index, :, :rows])
        assert found[1][index, :, rows:].isinf().all()
    if p.used is not None:
        return
    gradients = aten._efficient_attention_backward(
        dout, q, k, v, None, found[0], starts_q, starts_k, *longest, found[1], 0.0, SEED, SEED, p.custom_mask_type,
        False, window_size=p.window_size,
    )  # fmt: skip
    for index, (rows, keys) in enumerate(zip(p.lengths_q, p.lengths_k)):
        at_q, at_k = (slice(int(starts[index]), int(starts[index + 1])) for starts in (starts_q, starts_k))
        if keys == 0:
            assert not gradients[0][:, at_q].any()
            continue
        parts = dout[:, at_q], q[:, at_q], k[:, at_k], v[:, at_k]
        exact = stand_in_backward(
            *parts, None, None, None, None, rows, keys, None, 0.0, SEED, SEED, p.custom_mask_type, False,
            window_size=p.window_size,
        )  # fmt: skip
        for got, wanted, at in zip(gradients, exact, (at_q, at_k, at_k)):
            close(got[:, at], wanted)


# ---- what is left


def left(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    q, k, v, _ = inputs(Dense(lengths=(20, 30)))
    names = "query", "key", "value", "bias", "cu_q", "cu_k", "max_q", "max_k", "dropout_p", "custom_mask_type"
    values = dict(zip(names, (q, k, v, None, None, None, None, None, 0.0, 0))) | changes
    return tuple(values[name] for name in names), {key: value for key, value in changes.items() if key not in names}


LEFT = {
    "a bias under a causal mask": lambda: left(bias=torch.zeros(20, 30, dtype=HALF), custom_mask_type=1),
    "dropout": lambda: left(dropout_p=0.5),
    "a window from the top left": lambda: left(custom_mask_type=1, window_size=4),
    "fp32": lambda: left(**{name: x.float() for name, x in zip(("query", "key", "value"), left()[0])}),
    "values without channels": lambda: left(value=randn(2, 30, 3, 0, dtype=HALF)),
    "starts apart": lambda: left(
        **{name: randn(1, 20, 3, 32, dtype=HALF) for name in ("query", "key", "value")},
        **dict(zip(("cu_q", "cu_k"), (lambda starts: (starts[:3], starts[::2]))(ints(0, 10, 20, 20, 20)))),
        max_q=10, max_k=20,
    ),
    "packed top left of other lengths": lambda: left(
        query=randn(1, 20, 3, 32, dtype=HALF), key=randn(1, 30, 3, 32, dtype=HALF),
        value=randn(1, 30, 3, 32, dtype=HALF), cu_q=cumulative(10, 10), cu_k=cumulative(20, 10), max_q=10, max_k=20,
        custom_mask_type=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_declined_calls_go_to_pytorchs_kernel(name: str, served: LaunchRecord) -> None:
    positional, named = LEFT[name]()
    found, right = (
        operator(*positional, True, **named) for operator in (aten._efficient_attention_forward, stand_in_forward)
    )
    assert all(map(torch.equal, found[:2], right[:2])) and found[4:] == right[4:]
    assert counted() == {"pytorch": 1} and not served.seen


def test_gradients_in_shared_storage_are_declined(served: LaunchRecord) -> None:
    q, k, v, dout = inputs(Dense())
    aten._efficient_attention_backward(
        dout, q, k, v, None, q, None, None, 40, 40, torch.zeros(2, 3, 64), 0.0, SEED, SEED, 0, False,
        shared_storage_dqdkdv=True,
    )  # fmt: skip
    assert not served.seen


UPSTREAM = {
    "no LSE": lambda dout, out, lse: (dout, out, lse[:, :, :0]),
    "too few rows of the LSE": lambda dout, out, lse: (dout, out, lse[:, :, :32]),
    "one head of the LSE": lambda dout, out, lse: (dout, out, lse[:, :1]),
    "an LSE without a batch": lambda dout, out, lse: (dout, out, lse[0]),
    "an LSE in fp64": lambda dout, out, lse: (dout, out, lse.double()),
    "too few rows of out": lambda dout, out, lse: (dout, out[:, :30], lse),
    "out in fp32": lambda dout, out, lse: (dout, out.float(), lse),
    "a gradient of one head": lambda dout, out, lse: (dout[:, :, :1], out, lse),
    "a gradient of fewer channels": lambda dout, out, lse: (dout[..., :16], out, lse),
    "a gradient in fp32": lambda dout, out, lse: (dout.float(), out, lse),
}


@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_of_malformed_forward_results_are_declined(is_packed: bool, served: LaunchRecord) -> None:
    """Kernels would read beyond these tensors."""
    q, k, v, dout = inputs(Dense())
    starts: tuple[Any, ...] = None, None, None, None
    if is_packed:
        q, k, v, dout = (x.flatten(0, 1)[None] for x in (q, k, v, dout))
        starts = cumulative(40, 40), cumulative(40, 40), 40, 40
    out, lse, *_ = aten._efficient_attention_forward(q, k, v, None, *starts, 0.0, 0, True)
    served.seen.clear()
    for name, change in UPSTREAM.items():
        gradient, changed, its_lse = change(dout, out, lse)
        given = gradient, q, k, v, None, changed, *starts[:2], 40, 40, its_lse, 0.0, SEED, SEED, 0, False
        with contextlib.suppress(RuntimeError, IndexError):  # whatever the kernel below says to it
            aten._efficient_attention_backward(*given)
        assert not served.seen, name


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
def test_operators_inside_a_declined_call_are_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    small = originals.POLICY._replace(least_products=2**40)
    with originals.as_on_turing(), originals.cpu_stand_ins(), originals.served(monkeypatch, small) as launches:
        F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs(Dense())[:3]))
    assert counted() == {"pytorch": 1} and not launches.seen


def test_operators_inside_our_own_backend_are_not_examined(
    served: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_efficient calls the very operator: the call would count twice, and be looked up twice."""
    anywhere = dataclasses.replace(TorchEfficient.capabilities, devices=None, min_capability=None)
    monkeypatch.setattr(TorchEfficient, "capabilities", anywhere)
    q, k, v = (x.requires_grad_() for x in inputs(Dense())[:3])
    with use_backend("torch_efficient"):
        out = flash_attn_func(q, k, v)
    torch.autograd.grad(out.sum(), q)
    assert counted() == {"torch_efficient": 1} and not served.seen


def test_explain(served: LaunchRecord) -> None:
    positional, named = left(bias=torch.zeros(20, 30, dtype=HALF), custom_mask_type=1)
    assert explain(aten._efficient_attention_forward, *positional, **named).reasons["fused"] == [
        "it has a mask, and is causal or packed too"
    ]
    assert explain(aten._efficient_attention_forward, *left()[0]).backend == "fused"
