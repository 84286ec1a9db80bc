"""The values verify works with: a Problem (one call of a public function) and an Answer (all that came of it).

No judgement here, and nothing about where problems come from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

INPUTS_WITH_GRADIENT = ("q", "k", "v", "kv", "qkv")
CACHES = ("k_cache", "v_cache")


@dataclass(frozen=True)
class Answer:
    """What one call gave, on the CPU.

    out: (..., nheads, headdim); softmax_lse: as flash-attn lays it out, or None
    dmask: S_dmask where dropout was asked for
    grads: gradients by argument name; caches: k_cache and v_cache as the call left them
    terms: of the fp64 answer, for "out" and each gradient ("dq", ...): (sequences, heads), the largest sum of absolute
        terms behind an element of that head, the parts of packed gradients side by side
    spoilt: of the fp64 answer, likewise: bool, True where something that went in is not finite; empty if all is finite
    """

    out: Tensor
    softmax_lse: Tensor | None = None
    dmask: Tensor | None = None
    grads: Mapping[str, Tensor] = field(default_factory=dict)
    caches: Mapping[str, Tensor] = field(default_factory=dict)
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    spoilt: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """One call: `function(**tensors, **options)`, then a backward pass from `dout` where that is given.

    layout: how the floating tensors lie in memory ("contiguous", "heads_first", "sliced", "last_dim_strided").
    """

    name: str
    function: str
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]
    dout: Tensor | None = None
    layout: str = "contiguous"
    official: Answer | None = None

    @property
    def dtype(self) -> torch.dtype:
        return next(self.tensors[name].dtype for name in ("q", "qkv") if name in self.tensors)

    @property
    def differentiable(self) -> tuple[str, ...]:
        if self.dout is None:
            return ()
        return tuple(name for name in INPUTS_WITH_GRADIENT if name in self.tensors)

    @property
    def dropout_p(self) -> float:
        return max(float(self.options.get("dropout_p", 0.0)), 0.0)


class InputsModified(AssertionError):
    """The call wrote into a tensor it must only read."""


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides; (..., seqlen, nheads, headdim) tensors only."""
    if layout == "contiguous" or not tensor.is_floating_point() or tensor.dim() < 3:
        return tensor
    if layout == "heads_first":
        return tensor.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "sliced":
        return torch.stack((tensor, torch.zeros_like(tensor)), dim=-2)[..., 0, :]
    if layout == "last_dim_strided":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    raise ValueError(f"unknown layout {layout!r}")


def accepted_options(function: Callable[..., Any], problem: Problem) -> dict[str, Any]:
    """The problem's options, without requests for extra return values that the function does not know."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(problem.options)
    requests = ("return_attn_probs", "return_softmax_lse")
    return {name: value for name, value in problem.options.items() if name in parameters or name not in requests}


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN in the same places."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def solve(function: Callable[..., Any], problem: Problem, device: str, seed: int = 0) -> Answer:
    """Runs the problem on the device, forward and (where it has a dout) backward."""
    given = {name: tensor.to(device) for name, tensor in problem.tensors.items()}
    arguments = {
        name: laid_out(tensor.clone(), problem.layout if name not in CACHES else "contiguous")
        for name, tensor in given.items()
    }
    leaves = [arguments[name].detach().requires_grad_() for name in problem.differentiable]
    arguments.update(zip(problem.differentiable, leaves))

    torch.manual_seed(seed)
    with torch.set_grad_enabled(problem.dout is not None):
        returned = function(**arguments, **accepted_options(function, problem))
    out, softmax_lse, dmask = (
        (*returned, None, None)[:3] if isinstance(returned, (tuple, list)) else (returned, None, None)
    )
    gradients: tuple[Tensor, ...] = ()
    if leaves and problem.dout is not None:
        gradients = torch.autograd.grad(out, leaves, problem.dout.to(device))

    for name, tensor in given.items():
        if name not in CACHES and not _same(tensor, arguments[name].detach()):
            raise InputsModified(f"the call changed its input {name}")
    return Answer(
        out=out.detach().cpu(),
        softmax_lse=None if softmax_lse is None else softmax_lse.detach().cpu(),
        dmask=dmask.detach().cpu() if dmask is not None and problem.dropout_p > 0 else None,
        grads={name: gradient.cpu() for name, gradient in zip(problem.differentiable, gradients)},
        caches={name: arguments[name].cpu() for name in CACHES if name in arguments},
    )
