"""Overridden PyTorch operators on a CPU, with emulated kernels and plain stand-ins for CUDA's own kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library

from flash_attn_compat import backend_counts, reset_backend_counts
from flash_attn_compat.torch_sdpa import override
from flash_attn_compat.torch_sdpa.efficient import BOTTOM_RIGHT, NO_MASK, TOP_LEFT
from flash_attn_compat.torch_sdpa.policy import Policy
from tests.kernels import fused_on_cpu
from tests.kernels.fused_on_cpu import LaunchRecord

__all__ = ["BOTTOM_RIGHT", "NO_MASK", "TOP_LEFT"]
POLICY = Policy(device="cpu", least_products=0)
needs_grouped_heads = pytest.mark.skipif(
    "enable_gqa" not in str(torch.ops.aten.scaled_dot_product_attention.default._schema),
    reason="before PyTorch 2.5 the operators have no grouped heads and stay PyTorch's",
)


@contextlib.contextmanager
def override_on(policy: Policy = POLICY) -> Iterator[None]:
    """Override PyTorch's operators for a block."""
    with override.applied(policy):
        yield


@contextlib.contextmanager
def served(monkeypatch: pytest.MonkeyPatch, policy: Policy = POLICY, computes: bool = True) -> Iterator[LaunchRecord]:
    """Override PyTorch's operators with kernels, emulated or only recorded, and set the counts to zero."""
    launches = (fused_on_cpu.emulate if computes else fused_on_cpu.record)(monkeypatch)
    reset_backend_counts()
    with override_on(policy):
        yield launches


def counted() -> dict[str, int]:
    return {name: times for name, times in backend_counts().items() if times}


def visible(mask: int, window: int | None, rows: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
    """Which keys the rows of one sequence see, as the efficient kernel's arguments say."""
    ahead = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None]
    ahead = ahead - (keys - rows if mask == BOTTOM_RIGHT else 0)
    seen = torch.ones_like(ahead, dtype=torch.bool) if mask == NO_MASK else ahead <= 0
    return seen if window is None else seen & (ahead > -window)


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None, bias: Tensor | None = None) -> Any:
    """out and LSE of (batch, rows, heads, channels) in fp64; rows that see nothing are 0 in both."""
    wide = [x.double().transpose(1, 2) for x in (q, k, v)]
    scores = wide[0] @ wide[1].mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (scores if bias is None else scores + bias).masked_fill(~seen, -torch.inf)
    sees = (scores > -torch.inf).any(-1, keepdim=True)
    lse = torch.where(sees[..., 0], scores.logsumexp(-1), 0.0)
    out = torch.where(sees, scores.softmax(-1), 0.0).nan_to_num() @ wide[2]
    return out.transpose(1, 2), lse


def padded(lse: Tensor, rows: int) -> Tensor:
    """Behind the last row +inf, up to a multiple of 32."""
    return torch.nn.functional.pad(lse, (0, rows + -rows % 32 - lse.shape[-1]), value=torch.inf)


def stand_in_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any,
    dropout_p: float, custom_mask_type: int, compute_log_sumexp: bool = False, *, scale: Any = None,
    seqlen_k: Any = None, window_size: Any = None,
) -> Any:  # fmt: skip
    """_efficient_attention_forward, plainly."""
    p = custom_mask_type, window_size
    if cu_q is None:
        rows, keys = query.shape[1], key.shape[1]
        out, lse = dense(query, key, value, visible(*p, rows, keys), scale, bias)
        lse = padded(lse, rows)
    else:
        rows, keys = max_q, max_k or key.shape[1]
        out, parts = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float64), []
        for index in range(len(cu_q) - 1):
            at, begin = slice(cu_q[index], cu_q[index + 1]), int(cu_k[index])
            end = int(cu_k[index + 1]) if seqlen_k is None else begin + int(seqlen_k[index])
            part = query[:, at], key[:, begin:end], value[:, begin:end]
            found, part_lse = dense(*part, visible(*p, part[0].shape[1], end - begin), scale)
            out[:, at] = found
            parts.append(padded(part_lse, rows))
        lse = torch.cat(parts)
    lse = lse.float() if compute_log_sumexp else lse[..., :0].float()
    seeds = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    return out.to(query.dtype).contiguous(), lse.contiguous(), *seeds, rows, keys


def stand_in_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Any, out: Tensor, cu_q: Any, cu_k: Any,
    max_q: int, max_k: int, lse: Tensor, dropout_p: float, seed: Tensor, offset: Tensor, custom_mask_type: int,
    bias_requires_grad: bool, *, scale: Any = None, num_splits_key: Any = None, window_size: Any = None,
    shared_storage_dqdkdv: bool = False,
) -> Any:  # fmt: skip
    """_efficient_attention_backward, plainly, of dense tensors."""
    seen = visible(custom_mask_type, window_size, query.shape[1], key.shape[1])
    wide_q, wide_k, wide_v, wide_dout = (x.detach().double().transpose(1, 2) for x in (query, key, value, dout))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = wide_q @ wide_k.mT * scale + (0.0 if bias is None else bias)
    shares = torch.where(seen, scores, -torch.inf).softmax(-1).nan_to_num()
    dv = shares.mT @ wide_dout
    dshares = wide_dout @ wide_v.mT
    dscores = shares * (dshares - (dshares * shares).sum(-1, keepdim=True)) * scale
    found = dscores @ wide_k, dscores.mT @ wide_q, dv
    return *(x.transpose(1, 2).to(query.dtype).contiguous() for x in found), None


def composed_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    """_scaled_dot_product_efficient_attention, as CUDA's calls the operator below it."""
    inner = (x.transpose(1, 2) for x in (query, key, value))
    out, *rest = torch.ops.aten._efficient_attention_forward(
        *inner, attn_bias, None, None, None, None, dropout_p, int(is_causal), compute_log_sumexp, scale=scale
    )
    return out.transpose(1, 2), *rest[:3]


def composed_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, dropout_p: float, grad_input_mask: Any, is_causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    """Its backward, likewise."""
    inner = [x.transpose(1, 2) for x in (dout, query, key, value)]
    found = torch.ops.aten._efficient_attention_backward(
        *inner, attn_bias, out.transpose(1, 2), None, None, query.shape[2], key.shape[2], lse, dropout_p, seed, offset,
        int(is_causal), False, scale=scale,
    )  # fmt: skip
    return *(x.transpose(1, 2) for x in found[:3]), None


@contextlib.contextmanager
def as_on_turing() -> Iterator[None]:
    """F.scaled_dot_product_attention ends in the efficient operator, for a block."""

    def efficient(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.0, True)[:2]

    library = Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention_for_cpu", efficient, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def cpu_stand_ins() -> Iterator[None]:
    """Operators that no CPU has, for a block."""
    library = Library("aten", "IMPL")
    for name, implementation in (
        ("_efficient_attention_forward", stand_in_forward),
        ("_efficient_attention_backward", stand_in_backward),
        ("_scaled_dot_product_efficient_attention", composed_forward),
        ("_scaled_dot_product_efficient_attention_backward", composed_backward),
    ):
        library.impl(name, implementation, "CPU")
    try:
        yield
    finally:
        library._destroy()
