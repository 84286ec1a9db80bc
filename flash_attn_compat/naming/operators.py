"""torch.ops.flash_attn.*: the operators that flash-attn 2.8 registers, computed by our private functions.

Checkpointing policies and graph tools look them up by name. site/flash_attn registers them when it is imported.
Needs torch, unlike the rest of naming.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import private_interface
from flash_attn_compat.engine.layout import lse_dtype
from flash_attn_compat.private_interface import round_multiple
from flash_attn_compat.serving.torch_ops import SPELLINGS

_WRITTEN = ("dq", "dk", "dv")


def register() -> None:
    """Define the operators that torch.ops.flash_attn lacks; those of somebody else are left alone.

    They stay for the life of the process, since code may hold them; a flash-attn imported later replaces them,
    as `torch.library.custom_op` lets it.
    """
    for name, fake in _FAKES.items():
        if hasattr(torch.ops.flash_attn, name):
            continue
        function = getattr(private_interface, name)
        operator = torch.library.custom_op(
            f"flash_attn::{name}",
            _contiguous(function),
            mutates_args=_WRITTEN if name.endswith("backward") else (),
            schema=_schema(function),
        )
        operator.register_fake(fake)


def _schema(function: Callable[..., object]) -> str:
    """As torch.library infers them from flash-attn's functions."""
    hints = typing.get_type_hints(function)
    arguments = []
    for index, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        # Numbers that flash-attn wants may be None for our functions.
        kind = f"Tensor(a{index}!)?" if name in _WRITTEN else SPELLINGS[hints[name]].replace("float?", "float")
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        arguments.append(f"{kind} {name}{default}")
    results = "Tensor" if hints["return"] is Tensor else "(Tensor, Tensor, Tensor, Tensor)"
    return f"({', '.join(arguments)}) -> {results}"


def _contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """With results as the fake functions promise them to compilers."""

    @functools.wraps(function)
    def contiguous(*arguments: Any, **named: Any) -> Any:
        found = function(*arguments, **named)
        return tuple(result.contiguous() for result in found) if isinstance(found, tuple) else found

    return contiguous


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    batch, seqlen_q, nheads, _ = q.shape
    return _fake_outputs(q, v, (batch, nheads, seqlen_q), (batch, nheads, seqlen_q, k.shape[1]), options[-1])


def _fake_varlen_forward(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
    bound = inspect.signature(private_interface._flash_attn_varlen_forward).bind(*arguments, **named)
    bound.apply_defaults()
    given = bound.arguments
    total_q, nheads, _ = given["q"].shape
    scores = given["cu_seqlens_q"].shape[0] - 1, nheads, given["max_seqlen_q"], given["max_seqlen_k"]
    return _fake_outputs(given["q"], given["v"], (nheads, total_q), scores, given["return_softmax"])


def _fake_outputs(
    q: Tensor, v: Tensor, lse_shape: tuple[int, ...], scores: tuple[int, int, int, int], return_softmax: bool
) -> tuple[Tensor, ...]:
    batch, nheads, rows, columns = scores
    dmask_shape = (batch, nheads, round_multiple(rows, 128), round_multiple(columns, 128)) if return_softmax else (0,)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(lse_shape, dtype=lse_dtype(q.dtype)),
        q.new_empty(dmask_shape),
        q.new_empty((2,), dtype=torch.int64),
    )


def _fake_backward(dout: Tensor, q: Tensor, *rest: Any) -> Tensor:
    batch, seqlen_q, nheads, _ = q.shape
    return q.new_empty((batch, nheads, round_multiple(seqlen_q, 128)), dtype=torch.float32)


def _fake_varlen_backward(dout: Tensor, q: Tensor, *rest: Any) -> Tensor:
    cu_seqlens_q, (total_q, nheads, _) = rest[7], q.shape
    return q.new_empty((nheads, total_q + 128 * (cu_seqlens_q.shape[0] - 1)), dtype=torch.float32)


_FAKES: dict[str, Callable[..., Any]] = {
    "_flash_attn_forward": _fake_forward,
    "_flash_attn_varlen_forward": _fake_varlen_forward,
    "_flash_attn_backward": _fake_backward,
    "_flash_attn_varlen_backward": _fake_varlen_backward,
}
