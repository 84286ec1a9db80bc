"""A module or function against the plain PyTorch computation that it stands for: values and all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Parameters = dict[str, Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    slopes: Any = None,
) -> Tensor:
    """Softmax attention of (batch, seqlen, nheads, head_dim), bottom-right aligned; (-1, 0) is the causal window."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    rows, columns = (torch.arange(length, device=q.device) for length in scores.shape[2:])
    ahead = columns - rows[:, None] - (len(columns) - len(rows))
    if slopes is not None:
        scores = scores - torch.as_tensor(slopes, dtype=q.dtype)[:, None, None] * ahead.abs()
    left, right = (side if side >= 0 else len(rows) + len(columns) for side in window)
    scores = scores.masked_fill((ahead > right) | (ahead < -left), -torch.inf)
    shares = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype)
    return torch.einsum("bhts,bshd->bthd", shares, v)


def check_module(module: nn.Module, plain: Callable[..., Any], *inputs: Any) -> None:
    """module(*inputs) against plain(parameters by name, *inputs); see `check_function`."""
    names = [name for name, _ in module.named_parameters()]

    def ours(values: Sequence[Tensor], *rest: Any) -> Any:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), rest)

    def theirs(values: Sequence[Tensor], *rest: Any) -> Any:
        return plain(dict(zip(names, values, strict=True)), *rest)

    check_function(ours, theirs, [parameter for _, parameter in module.named_parameters()], *inputs)


def check_function(ours: Callable[..., Any], plain: Callable[..., Any], *inputs: Any, epsilons: float = 2) -> None:
    """Errors against plain in fp64 are at most twice those of plain in the inputs' dtypes, plus some epsilons.

    Compared are every output, and the gradients in every floating tensor of the inputs (sequences included).
    """
    computed = _run(ours, inputs, None)
    expected = _run(plain, inputs, None)
    exact = _run(plain, inputs, torch.float64)
    assert len(computed) == len(expected) == len(exact)
    for value, rounded, right in zip(computed, expected, exact, strict=True):
        assert (value is None) == (right is None)
        if value is not None:
            assert value.dtype == rounded.dtype
            assert_as_good_as_plain(value, rounded, right, epsilons)


def assert_as_good_as_plain(value: Tensor, rounded: Tensor, right: Tensor, epsilons: float = 2) -> None:
    assert value.shape == rounded.shape == right.shape
    size = right.abs().max() if right.numel() else torch.zeros((), dtype=torch.float64)
    bound = 2 * (rounded.double() - right).abs().max() + epsilons * torch.finfo(value.dtype).eps * size
    error = (value.double() - right).abs().max()
    assert error <= bound, f"error {float(error):.3e}, bound {float(bound):.3e}, of values up to {float(size):.3e}"


def _run(function: Callable[..., Any], inputs: Sequence[Any], dtype: torch.dtype | None) -> list[Tensor | None]:
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
    generator = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        weight = torch.randn(output.shape, generator=generator, dtype=torch.float32)
        # Upstream gradients that every dtype can hold exactly.
        loss = loss + (output.double() * weight.mul(8).round().div(8)).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [output.detach() for output in outputs] + list(grads)


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value from each axis, so few that each two values of two axes still meet in one of them."""
    values = [list(axis) for axis in axes]

    def pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(row), 2))

    rows = list(itertools.product(*(range(len(axis)) for axis in values)))
    missing = set().union(*map(pairs, rows))
    found = []
    while missing:
        found.append(max(rows, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(found[-1])
    return [tuple(axis[index] for axis, index in zip(values, row)) for row in found]
