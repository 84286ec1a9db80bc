"""The operators of PyTorch's memory-efficient kernel: LSE, strides, and gradients of either kernel's forward."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import explain, flash_attn_func, use_backend
from flash_attn_compat.backends.torch_efficient import TorchEfficient
from flash_attn_compat.core.torch_state import as_decided
from flash_attn_compat.torch_sdpa.efficient import Problem
from tests.forms.inputs import cumulative, ints, randn
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.sdpa import originals
from tests.sdpa.originals import counted, stand_in_backward, stand_in_forward

HALF = torch.float16
aten = torch.ops.aten


class Case(NamedTuple):
    """Dense (batch, rows, heads, channels); custom_mask_type: 0 none, 1 causal from the top left, 2 from the bottom."""

    dtype: torch.dtype = HALF
    lengths: tuple[int, int] = (40, 40)
    custom_mask_type: int = 0
    window_size: int | None = None
    head_dim: int = 32
    scale: float | None = None


def inputs(case: Case, heads: int = 3) -> list[Tensor]:
    shapes = [(2, case.lengths[index], heads, case.head_dim) for index in (0, 1, 1, 0)]
    return [randn(*shape, seed=seed, dtype=case.dtype) for seed, shape in enumerate(shapes)]


def arguments(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = {"scale": case.scale, "window_size": case.window_size}
    return (None, None, None, None, None, 0.0, case.custom_mask_type), options


def close(got: Tensor, right: Tensor) -> None:
    """Right to some roundings of the largest number."""
    bound = 8 * torch.finfo(got.dtype).eps * max(1.0, float(right.abs().max()))
    assert float((got.double() - right.double()).abs().max()) <= bound


# The fuzz compares values of other problems, but no gradients under a window, and no backward of another's forward.
CASES = [
    *(Case(lengths=lengths, custom_mask_type=mask) for lengths in ((33, 70), (70, 33)) for mask in (0, 1, 2)),
    Case(torch.bfloat16, (33, 70), 1, head_dim=20, scale=0.3),
    Case(lengths=(40, 40), custom_mask_type=1, window_size=9),
    *(Case(lengths=lengths, custom_mask_type=2, window_size=9) for lengths in ((33, 70), (40, 40))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_match_the_stand_ins_shapes_strides_and_gradients(case: Case, served: LaunchRecord) -> None:
    q, k, v, dout = inputs(case)
    positional, named = arguments(case)
    right = stand_in_forward(q.double(), k.double(), v.double(), *positional, True, **named)
    found = aten._efficient_attention_forward(q, k, v, *positional, True, **named)
    assert counted() == {"fused": 1}
    assert torch.equal(found[1].isinf(), right[1].isinf())
    meta = aten._efficient_attention_forward(*(x.to("meta") for x in (q, k, v)), *positional, True)
    assert [layout(x) for x in found] == [layout(x) for x in meta]
    for out, lse in ((found[0], found[1]), (right[0].to(case.dtype), right[1])):
        ours = backward(aten._efficient_attention_backward, dout, q, k, v, out, lse, case)
        wide = [x.double() for x in (dout, q, k, v, out)]
        for got, exact, source in zip(ours[:3], backward(stand_in_backward, *wide, lse, case)[:3], (q, k, v)):
            assert got.is_contiguous() and got.shape == source.shape and got.dtype == case.dtype
            close(got, exact)
        assert ours[3] is None


def layout(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


def backward(operator: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: Case) -> Any:
    seed = torch.zeros((), dtype=torch.int64)
    return operator(
        dout, q, k, v, None, out, None, None, q.shape[1], k.shape[1], lse, 0.0, seed, seed, case.custom_mask_type,
        False, scale=case.scale, window_size=case.window_size,
    )  # fmt: skip


def test_no_lse_unless_it_is_asked_for(served: LaunchRecord) -> None:
    q, k, v, _ = inputs(Case())
    assert aten._efficient_attention_forward(q, k, v, *arguments(Case())[0])[1].shape == (2, 3, 0)


def test_lengths_of_dense_tensors_are_their_own(served: LaunchRecord) -> None:
    q, k, v, _ = inputs(Case(lengths=(40, 50)))
    found = aten._efficient_attention_forward(q, k, v, None, None, None, 7, 9, 0.0, 0)
    assert found[4:] == (40, 50) and counted() == {"fused": 1}


def test_the_composed_operator_has_pytorchs_strides(served: LaunchRecord) -> None:
    q, k, v, dout = (x.transpose(1, 2).detach().requires_grad_() for x in inputs(Case(lengths=(40, 50))))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    meta = aten._scaled_dot_product_efficient_attention(*(x.to("meta") for x in (q, k, v)), None, True)
    assert (layout(out), layout(lse)) == (layout(meta[0]), layout(meta[1]))
    assert all(gradient.transpose(1, 2).is_contiguous() for gradient in gradients)
    assert counted() == {"fused": 1} and "dkdv" in served.entries
    close(out, F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True))


def test_autograd_of_the_operator_itself(served: LaunchRecord) -> None:
    leaves = [x.requires_grad_() for x in inputs(Case())[:3]]
    out = aten._efficient_attention_forward(*leaves, *arguments(Case(custom_mask_type=2))[0], True)[0]
    found = torch.autograd.grad(out.sum(), leaves)
    right = stand_in_backward(torch.ones_like(out), *leaves, None, *(None,) * 3, 40, 40, *(None,) * 4, 2, False)
    for got, exact in zip(found, right):
        close(got, exact)
    assert counted() == {"fused": 1} and served.entries[-3:] == ["delta", "dkdv", "dq"]


@pytest.mark.parametrize("ours_first", [True, False])
def test_backwards_accept_either_kernels_forward(ours_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch may be turned between the two."""
    leaves = [x.requires_grad_() for x in inputs(Case())[:3]]

    def forward() -> Tensor:
        out: Tensor = aten._efficient_attention_forward(*leaves, *arguments(Case(custom_mask_type=1))[0], True)[0]
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
    seed = torch.zeros((), dtype=torch.int64)
    gradients = aten._efficient_attention_backward(
        dout, q, k, v, None, found[0], starts_q, starts_k, *longest, found[1], 0.0, seed, seed, p.custom_mask_type,
        False, window_size=p.window_size,
    )  # fmt: skip
    for index, (rows, keys) in enumerate(zip(p.lengths_q, p.lengths_k)):
        at_q, at_k = (slice(int(starts[index]), int(starts[index + 1])) for starts in (starts_q, starts_k))
        if keys == 0:
            assert not gradients[0][:, at_q].any()
            continue
        parts = dout[:, at_q], q[:, at_q], k[:, at_k], v[:, at_k]
        exact = stand_in_backward(
            *parts, None, None, None, None, rows, keys, None, 0.0, seed, seed, p.custom_mask_type, False,
            window_size=p.window_size,
        )  # fmt: skip
        for got, wanted, at in zip(gradients, exact, (at_q, at_k, at_k)):
            close(got[:, at], wanted)


# ---- what is left


def left(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    q, k, v, _ = inputs(Case(lengths=(20, 30)))
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
    q, k, v, dout = inputs(Case())
    seed = torch.zeros((), dtype=torch.int64)
    aten._efficient_attention_backward(
        dout, q, k, v, None, q, None, None, 40, 40, torch.zeros(2, 3, 64), 0.0, seed, seed, 0, False,
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


@pytest.mark.parametrize("name", UPSTREAM)
@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_of_malformed_forward_results_are_declined(is_packed: bool, name: str, served: LaunchRecord) -> None:
    """Kernels would read beyond these tensors."""
    q, k, v, dout = inputs(Case())
    starts: tuple[Any, ...] = None, None, None, None
    if is_packed:
        q, k, v, dout = (x.flatten(0, 1)[None] for x in (q, k, v, dout))
        starts = cumulative(40, 40), cumulative(40, 40), 40, 40
    out, lse, seed, offset, *_ = aten._efficient_attention_forward(q, k, v, None, *starts, 0.0, 0, True)
    served.seen.clear()
    dout, out, lse = UPSTREAM[name](dout, out, lse)
    with contextlib.suppress(RuntimeError, IndexError):  # whatever the kernel below says to it
        aten._efficient_attention_backward(
            dout, q, k, v, None, out, *starts[:2], 40, 40, lse, 0.0, seed, offset, 0, False
        )
    assert not served.seen


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
def test_operators_inside_a_declined_call_are_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    small = originals.POLICY._replace(least_products=2**40)
    with originals.as_on_turing(), originals.cpu_stand_ins(), originals.served(monkeypatch, small) as launches:
        F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs(Case())[:3]))
    assert counted() == {"pytorch": 1} and not launches.seen


def test_operators_inside_our_own_backend_are_not_examined(
    served: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_efficient calls the very operator: the call would count twice, and be looked up twice."""
    anywhere = dataclasses.replace(TorchEfficient.capabilities, devices=None, min_capability=None)
    monkeypatch.setattr(TorchEfficient, "capabilities", anywhere)
    q, k, v = (x.requires_grad_() for x in inputs(Case())[:3])
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


def test_a_fake_call_goes_to_its_meta_function(served: LaunchRecord) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in inputs(Case())[:3])
        out, lse, *_ = aten._efficient_attention_forward(q, k, v, *arguments(Case())[0], True)
    assert out.shape == q.shape and lse.shape == (2, 3, 64) and counted() == {}


def test_problems_are_named_as_the_operators_arguments() -> None:
    for operator in (aten._efficient_attention_forward, aten._efficient_attention_backward):
        names = {argument.name for argument in operator.default._schema.arguments} | {"seqlen_k"}
        assert names.issuperset(Problem._fields)
