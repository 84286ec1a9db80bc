"""A module or function against the plain PyTorch computation that it stands for: values and all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Parameters = dict[str, Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Softmax attention of (batch, seqlen, nheads, head_dim), with the options of `attention_and_lse`."""
    return attention_and_lse(q, k, v, **options)[0]


def attention_and_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    slopes: Any = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """out and the LSE (batch, nheads, seqlen), bottom-right aligned; (-1, 0) is the causal window."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    rows, columns = (torch.arange(length, device=q.device) for length in scores.shape[2:])
    ahead = columns - rows[:, None] - (len(columns) - len(rows))
    if slopes is not None:
        scores = scores - torch.as_tensor(slopes, dtype=q.dtype)[:, None, None] * ahead.abs()
    if bias is not None:
        scores = scores + bias
    left, right = (side if side >= 0 else len(rows) + len(columns) for side in window)
    scores = scores.masked_fill((ahead > right) | (ahead < -left), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1).to(scores.dtype)), dim=-1)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    shares = scores.softmax(-1)[..., : len(columns)].to(v.dtype)
    if keep is not None:
        shares = torch.where(keep, shares / (1 - dropout_p), 0.0)
    return torch.einsum("bhts,bshd->bthd", shares, v), scores.logsumexp(-1)


def rounded_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """plain in fp32 at least, its results in the dtype of the first tensor: less than fp32 inside shows beside it."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(torch.promote_types(value.dtype, torch.float32))
        return value

    def compute(*inputs: Any) -> Any:
        outputs = plain(*map(wide, inputs))
        if isinstance(outputs, Tensor):
            return outputs.to(inputs[0].dtype)
        return [output.to(inputs[0].dtype) for output in outputs]

    return compute


def gelu_approx(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The first half of the features, each times the activation of its gate in the second half."""

    def compute(x: Tensor) -> Tensor:
        y, gate = x.chunk(2, dim=-1)
        return y * activation(gate)

    return compute


def two_layers(activation: Callable[[Tensor], Tensor]) -> Callable[[Parameters, Tensor], Tensor]:
    """Of an MLP's parameters, fc1 and fc2, and its input."""

    def compute(p: Parameters, x: Tensor) -> Tensor:
        hidden = activation(F.linear(x, p["fc1.weight"], p["fc1.bias"]))
        return F.linear(hidden, p["fc2.weight"], p.get("fc2.bias"))

    return compute


def check_module(module: nn.Module, plain: Callable[..., Any], *inputs: Any) -> None:
    """module(*inputs) against plain(parameters by name, *inputs); see `check_function`."""
    names = [name for name, _ in module.named_parameters()]

    def ours(values: Sequence[Tensor], *rest: Any) -> Any:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), rest)

    def theirs(values: Sequence[Tensor], *rest: Any) -> Any:
        return plain(dict(zip(names, values, strict=True)), *rest)

    check_function(ours, theirs, [parameter for _, parameter in module.named_parameters()], *inputs)


def check_function(
    ours: Callable[..., Any], plain: Callable[..., Any], *inputs: Any, epsilons: float = 2, rounds_once: bool = False
) -> None:
    """Assert that errors against fp64 are at most twice those of plain in the inputs' dtypes, plus some epsilons.

    Compared are every output, and the gradients in every floating tensor of the inputs (sequences included).
    rounds_once: plain computes in fp32 and rounds its results, and ours must too: half precision gets no epsilons.
    """
    computed = results(ours, inputs)
    expected = results(plain, inputs)
    exact = results(plain, inputs, torch.float64)
    assert len(computed) == len(expected) == len(exact)
    for value, rounded, right in zip(computed, expected, exact, strict=True):
        assert (value is None) == (right is None)
        if value is not None:
            assert value.dtype == rounded.dtype
            is_half = value.dtype in (torch.float16, torch.bfloat16)
            assert_as_good_as_plain(value, rounded, right, 0.1 if rounds_once and is_half else epsilons)


def assert_as_good_as_plain(value: Tensor, rounded: Tensor, right: Tensor, epsilons: float = 2) -> None:
    assert value.shape == rounded.shape == right.shape
    size = right.abs().max() if right.numel() else torch.zeros((), dtype=torch.float64)
    bound = 2 * (rounded.double() - right).abs().max() + epsilons * torch.finfo(value.dtype).eps * size
    error = (value.double() - right).abs().max()
    assert error <= bound, f"error {float(error):.3e}, bound {float(bound):.3e}, of values up to {float(size):.3e}"


def upstream(*shapes: torch.Size) -> list[Tensor]:
    """Gradients of outputs of these shapes, in numbers that every dtype can hold exactly."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(s, generator=generator, dtype=torch.float32).mul(8).round().div(8) for s in shapes]


def results(
    function: Callable[..., Any], inputs: Sequence[Any], dtype: torch.dtype | None = None
) -> list[Tensor | None]:
    """Outputs, and gradients in every floating tensor of the inputs, which are taken in ``dtype`` if one is given."""
    leaves: list[Tensor] = []

    def own(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [own(item) for item in value]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaf = value.detach().to(dtype or value.dtype).clone().requires_grad_()
        leaves.append(leaf)
        return leaf

    outputs = function(*[own(value) for value in inputs])
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    weights = upstream(*(output.shape for output in outputs))
    loss = sum((output.double() * weight).sum() for output, weight in zip(outputs, weights))
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [output.detach() for output in outputs] + list(grads)


def some_of(rows: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """One row in ``every`` for each run of the suite; the others are thorough."""
    return [pytest.param(*row, marks=[pytest.mark.thorough] if index % every else []) for index, row in enumerate(rows)]


def some(values: Iterable[Any], every: int) -> list[Any]:
    """``some_of`` for a test of one parameter."""
    return some_of(((value,) for value in values), every)


def in_turns(values: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Each value with one of the others, in turns, for each run of the suite; with the rest in thorough ones."""
    return [
        pytest.param(value, other, marks=[pytest.mark.thorough] if (row - column) % len(others) else [])
        for row, value in enumerate(values)
        for column, other in enumerate(others)
    ]


def all_but_thorough(values: Iterable[Any], thorough: Iterable[Any]) -> list[Any]:
    """The values, of which some are for thorough runs: they have siblings of the same way in each run."""
    known, late = list(values), list(thorough)
    assert all(value in known for value in late), f"{late} in {known}"
    return [pytest.param(value, marks=[pytest.mark.thorough] if value in late else []) for value in known]


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few rows of one value from each axis such that any two values of two axes meet in a row."""
    # Each process orders a set anew, and pytest-xdist's workers must name the same tests.
    assert not any(isinstance(axis, (set, frozenset)) for axis in axes), f"an axis without an order in {axes}"
    values = [list(axis) for axis in axes]
    rows = list(itertools.product(*(range(len(axis)) for axis in values)))
    bits: dict[tuple[tuple[int, int], ...], int] = {}  # of each pair of two axes' values
    pairs = [
        sum(bits.setdefault(pair, 1 << len(bits)) for pair in itertools.combinations(enumerate(row), 2)) for row in rows
    ]
    missing, found = (1 << len(bits)) - 1, []
    while missing:
        best = max(range(len(rows)), key=lambda index: (pairs[index] & missing).bit_count())
        missing &= ~pairs[best]
        found.append(tuple(axis[index] for axis, index in zip(values, rows[best])))
    return found
