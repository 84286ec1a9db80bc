"""torch.nn.attention.varlen (torch >= 2.10) on CPUs and GPUs that its kernels do not run on.

Its operators get an implementation of ours for those devices; shapes, gradients and compilation stay theirs. Needs
torch, unlike the rest of naming, from the moment that module is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from flash_attn_compat.naming.journal import when_imported

MODULE = "torch.nn.attention.varlen"
_times_switched_on = 0  # calls of switch_on() whose undo is open
_registered = False


def switch_on(undo: ExitStack) -> None:
    """Compute what torch cannot, from the import of torch.nn.attention.varlen on, until `undo` is closed."""
    global _times_switched_on
    _times_switched_on += 1
    undo.callback(_stop)
    when_imported({MODULE: _register}, undo)


def _stop() -> None:
    global _times_switched_on
    _times_switched_on -= 1


def _register(module: ModuleType, undo: ExitStack) -> None:
    """Once per process. An operator keeps its kernels, so ours hand over to torch's while none is switched on."""
    global _registered
    if _registered or not hasattr(module, "_varlen_attn"):
        return
    _registered = True
    for name, ours in (
        ("_varlen_attn", _forward),
        ("_varlen_attn_backward", _backward),
        ("_varlen_attn_out", _forward_into),
    ):
        operator: Any = getattr(module, name, None)
        for device in () if operator is None else ("cpu", "cuda", "mps"):
            operator.register_kernel(device)(_either(ours, operator._init_fn))


def _either(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(theirs)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if _times_switched_on == 0 or _torch_can(bound.arguments["query"]):
            return theirs(*args, **kwargs)
        return ours(**bound.arguments)

    return kernel


def _torch_can(query: Any) -> bool:
    from flash_attn_compat import settings

    return query.device.type == "cuda" and settings.capability(query.device) >= (8, 0)


def _forward(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, **options: Any) -> tuple[Any, Any, Any]:
    import torch

    out, lse = _attend(query, key, value, cu_seq_q, cu_seq_k, **options)
    return _like(query, out), lse.float(), torch.zeros(2, dtype=torch.uint64, device=query.device)


def _forward_into(out: Any, query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, **options: Any) -> Any:
    found, lse = _attend(query, key, value, cu_seq_q, cu_seq_k, **options)
    out.copy_(found)
    return lse.float()


def _attend(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
    **unknown: Any,
) -> tuple[Any, Any]:
    """(out (total_q, nheads, headdim), lse (nheads, total_q) in fp32 at least)."""
    import torch

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
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Any,
    scale: float | None = None,
    window_size: list[int] | None = None,
    **unknown: Any,
) -> tuple[Any, Any, Any]:
    import torch

    from flash_attn_compat.private_interface import _flash_attn_varlen_backward

    _refuse_unknown(unknown)
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if query.dtype == torch.float64:
        # The operator hands the statistics over in fp32.
        lse = _attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size)[1]
    left, right = window_size or (-1, -1)
    _flash_attn_varlen_backward(
        grad_out, query, key, value, out, lse, dq, dk, dv, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, is_causal,
        left, right, 0.0, None, False,
    )  # fmt: skip
    return dq, dk, dv


def _refuse_unknown(options: dict[str, Any]) -> None:
    asked = {name: value for name, value in options.items() if value not in (None, False)}
    if asked:
        raise NotImplementedError(f"flash_attn_compat does not support {asked} of this torch.nn.attention.varlen")


def _like(query: Any, out: Any) -> Any:
    """out in the strides of torch.empty_like(query), as the operator promises to compilers."""
    import torch

    wanted = torch.empty_like(query)
    return out if out.stride() == wanted.stride() else wanted.copy_(out)
