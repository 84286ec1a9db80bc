"""torch.ops.flash_attn.*: the operators that flash-attn 2.8 registers, computed by our private functions.

Checkpointing policies and graph tools look them up by name. site/flash_attn registers them when it is imported.
Needs torch, unlike the rest of naming.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import private_interface
from flash_attn_compat.engine.layout import lse_dtype
from flash_attn_compat.private_interface import round_multiple

# As torch.library infers them from flash-attn's functions; num_splits is its head's.
_FORWARD_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_VARLEN_FORWARD_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False, "
    "SymInt num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
_GRADIENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv"
)
_BACKWARD_SCHEMA = (
    f"({_GRADIENTS}, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) "
    "-> Tensor"
)
_VARLEN_BACKWARD_SCHEMA = (
    f"({_GRADIENTS}, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) "
    "-> Tensor"
)


def register() -> None:
    """Define the operators that torch.ops.flash_attn lacks; those of somebody else are left alone.

    They stay for the life of the process, since code may hold them; a flash-attn imported later replaces them,
    as `torch.library.custom_op` lets it.
    """
    for name, (schema, function, fake, mutated) in _OPERATORS.items():
        if hasattr(torch.ops.flash_attn, name):
            continue
        operator = torch.library.custom_op(f"flash_attn::{name}", function, mutates_args=mutated, schema=schema)
        operator.register_fake(fake)


def _forward(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    return _contiguous(private_interface._flash_attn_forward(*arguments, **options))


def _varlen_forward(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    return _contiguous(private_interface._flash_attn_varlen_forward(*arguments, **options))


def _contiguous(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """As the fake functions promise to compilers."""
    return tuple(output.contiguous() for output in outputs)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    batch, seqlen_q, nheads, _ = q.shape
    return _fake_outputs(q, (batch, nheads, seqlen_q), (batch, nheads, seqlen_q, k.shape[1]), options[-1])


def _fake_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, ...]:
    total_q, nheads, _ = q.shape
    scores = (cu_seqlens_q.shape[0] - 1, nheads, max_seqlen_q, max_seqlen_k)
    return _fake_outputs(q, (nheads, total_q), scores, return_softmax)


def _fake_outputs(
    q: Tensor, lse_shape: tuple[int, ...], scores: tuple[int, int, int, int], return_softmax: bool
) -> tuple[Tensor, ...]:
    batch, nheads, rows, columns = scores
    dmask_shape = (batch, nheads, round_multiple(rows, 128), round_multiple(columns, 128)) if return_softmax else (0,)
    return (
        q.new_empty(q.shape),
        q.new_empty(lse_shape, dtype=lse_dtype(q.dtype)),
        q.new_empty(dmask_shape),
        q.new_empty((2,), dtype=torch.int64),
    )


def _fake_backward(dout: Tensor, q: Tensor, *rest: Any) -> Tensor:
    batch, seqlen_q, nheads, _ = q.shape
    return q.new_empty((batch, nheads, round_multiple(seqlen_q, 128)), dtype=torch.float32)


def _fake_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, *rest: Any,
) -> Tensor:  # fmt: skip
    total_q, nheads, _ = q.shape
    return q.new_empty((nheads, total_q + 128 * (cu_seqlens_q.shape[0] - 1)), dtype=torch.float32)


_WRITTEN = ("dq", "dk", "dv")
_OPERATORS: dict[str, tuple[str, Any, Any, tuple[str, ...]]] = {
    "_flash_attn_forward": (_FORWARD_SCHEMA, _forward, _fake_forward, ()),
    "_flash_attn_varlen_forward": (_VARLEN_FORWARD_SCHEMA, _varlen_forward, _fake_varlen_forward, ()),
    "_flash_attn_backward": (
        _BACKWARD_SCHEMA,
        private_interface._flash_attn_backward,
        _fake_backward,
        _WRITTEN,
    ),
    "_flash_attn_varlen_backward": (
        _VARLEN_BACKWARD_SCHEMA,
        private_interface._flash_attn_varlen_backward,
        _fake_varlen_backward,
        _WRITTEN,
    ),
}
