"""torch.nn.attention.varlen (torch >= 2.10) on CPUs and GPUs that PyTorch's kernels do not run on.

Its operators get our implementation for these devices; shapes, gradients and compilation stay PyTorch's. Needs torch,
unlike most of dropin, and is imported after torch.nn.attention.varlen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.core import overlap

_holders: list[ModuleType] = []
_registered = False


def acquire(module: ModuleType, undo: ExitStack) -> None:
    """Compute PyTorch's varlen operators on devices without kernels of PyTorch's, until ``undo`` is closed.

    Our kernels are registered once per process, since none can be removed from an operator. While no patch is active,
    they call PyTorch's.
    """
    global _registered
    _holders.append(module)
    undo.callback(_holders.pop)
    if _registered or not hasattr(module, "_varlen_attn"):
        return
    _registered = True
    kernels: dict[str, Callable[..., Any]]
    kernels = {"_varlen_attn": _forward, "_varlen_attn_backward": _backward, "_varlen_attn_out": _forward_into}
    for name, ours in kernels.items():
        operator: Any = getattr(module, name, None)
        for device in () if operator is None else ("cpu", "cuda", "mps"):
            operator.register_kernel(device)(_choose_by_device(ours, operator._init_fn))


def _choose_by_device(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that calls ``theirs`` on GPUs that PyTorch's kernels serve, and ``ours`` elsewhere."""
    signature = inspect.signature(theirs)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        device = bound.arguments["query"].device
        if not _holders or (device.type == "cuda" and settings.capability(device) >= (8, 0)):
            return theirs(*args, **kwargs)
        return ours(**bound.arguments)

    return kernel


def _forward(query: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = _attend(query, **options)
    return _like(query, out), lse.float(), torch.zeros(2, dtype=torch.uint64, device=query.device)


def _forward_into(out: Tensor, **options: Any) -> Tensor:
    overlap.refuse("out", out)
    result, lse = _attend(**options)
    out.copy_(result)
    return lse.float()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Any, max_q: int, max_k: int,
    is_causal: bool, scale: float | None, window_size: Sequence[int] | None = None, enable_gqa: bool = False,
    seqused_k: Any = None, block_table: Tensor | None = None, num_splits: int | None = None,
    backend: int | None = None, **unknown: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (total_q, nheads, headdim) and lse (nheads, total_q), in fp32 or fp64.

    backend: PyTorch's choice between its own kernels (from 2.15 on); ignored, since this device has none of them
    """
    from flash_attn_compat.private_interface import _flash_attn_varlen_forward

    _refuse_unknown(unknown)
    if num_splits not in (None, 0):
        raise NotImplementedError(
            f"num_splits={num_splits} is not supported: flash_attn_compat does not promise the same bits in every batch"
        )
    if block_table is not None and cu_seq_k is None:
        cu_seq_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    left, right = window_size or (-1, -1)
    out, lse, *_ = _flash_attn_varlen_forward(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, is_causal, left, right, 0.0, None, False,
        block_table, None, seqused_k,
    )  # fmt: skip
    return out, lse


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seq_q: Tensor,
    cu_seq_k: Tensor, max_q: int, max_k: int, is_causal: bool, rng_state: Tensor, scale: float | None,
    window_size: Sequence[int] | None = None, backend: int | None = None, **unknown: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from flash_attn_compat.private_interface import _flash_attn_varlen_backward

    _refuse_unknown(unknown)
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if query.dtype == torch.float64:
        # The operator rounds the LSE to fp32, so it is computed again.
        lse = _attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size)[1]
    left, right = window_size or (-1, -1)
    _flash_attn_varlen_backward(
        grad_out, query, key, value, out, lse, dq, dk, dv, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, is_causal,
        left, right, 0.0, None, False,
    )  # fmt: skip
    return dq, dk, dv


def _refuse_unknown(options: dict[str, Any]) -> None:
    unsupported = {name: value for name, value in options.items() if value not in (None, False)}
    if unsupported:
        raise NotImplementedError(f"flash_attn_compat does not support {unsupported} of torch.nn.attention.varlen")


def _like(query: Tensor, out: Tensor) -> Tensor:
    """Return out with the strides of torch.empty_like(query), which the operator promises to compilers."""
    expected = torch.empty_like(query)
    return out if out.stride() == expected.stride() else expected.copy_(out)
