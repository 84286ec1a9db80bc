"""The memory-efficient kernel as it behaves on a GPU, its traps included, in slow PyTorch for any device.

Stands in for PyTorch's operators, so that how a launch is made of a call is tested on a CPU. What the kernel leaves
unwritten is NaN here; reading where it may not fails.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends import torch_efficient
from flash_attn_compat.backends.torch_efficient import CAUSAL_BOTTOM_RIGHT, TorchEfficient

FP32: dict[str, object] = {"dtype": torch.float32, "device": torch.device("cpu")}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_efficient serves tensors on a CPU from now on."""
    table = dataclasses.replace(TorchEfficient.capabilities, devices=frozenset({"cpu"}), min_capability=None)
    monkeypatch.setattr(TorchEfficient, "capabilities", table)
    operators = {"_efficient_attention_forward": forward, "_efficient_attention_backward": backward}
    monkeypatch.setattr(torch_efficient, "operator", operators.__getitem__)


def forward(q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout_p, mask, keep_lse, *, scale):
    out = torch.full_like(q[..., :1], math.nan).repeat(1, 1, 1, v.shape[-1])
    parts = list(_parts(q, k, v, cu_q, cu_k, max_q, dropout_p))
    rows = -(-(max_q or q.shape[1]) // 32) * 32
    lse = torch.full((len(parts), q.shape[2], rows), math.inf, **FP32)
    for index, (of_q, of_k) in enumerate(parts):
        scores = _scores(q[of_q], k[of_k], mask, scale)
        seen = scores.isfinite().any(-1)
        weights = scores.masked_fill(~seen[..., None], 0.0).softmax(-1).masked_fill(~seen[..., None], 0.0)
        if scores.shape[-1] or max(q.shape[-1], v.shape[-1]) <= 128:
            out[of_q] = torch.einsum("hqk,khd->qhd", weights, v[of_k].double()).to(out.dtype)
        lse[index, :, : scores.shape[1]] = torch.where(seen, scores.logsumexp(-1), 0.0) if scores.shape[-1] else 0.0
    return out, lse if keep_lse else lse.new_empty(0), None, None, max_q, max_k


def backward(
    dout, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout_p, seed, offset, mask, bias_grad, *, scale,
    num_splits_key,
):  # fmt: skip
    assert out.is_contiguous() and lse.is_contiguous() and lse.shape[-1] % 32 == 0
    dq, dk, dv = (torch.full(x.shape, math.nan, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for index, (of_q, of_k) in enumerate(_parts(q, k, v, cu_q, cu_k, max_q if cu_q is not None else None, dropout_p)):
        g, o = dout[of_q].double(), out[of_q].double()
        scores = _scores(q[of_q], k[of_k], mask, scale)
        p = torch.exp(scores - lse[index, :, : scores.shape[1], None].double())
        dscores = p * (torch.einsum("qhd,khd->hqk", g, v[of_k].double()) - (g * o).sum(-1).t()[..., None])
        if scores.shape[-1]:
            dq[of_q] = (torch.einsum("hqk,khd->qhd", dscores, k[of_k].double()) * scale).to(dq.dtype)
        dk[of_k] = (torch.einsum("hqk,qhd->khd", dscores, q[of_q].double()) * scale).to(dk.dtype)
        dv[of_k] = torch.einsum("hqk,qhd->khd", p, g).to(dv.dtype)
    return dq, dk, dv, None


Place = tuple[int, slice]


def _parts(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, longest: int | None, dropout_p: float
) -> Iterator[tuple[Place, Place]]:
    """Where the queries and the keys of each sequence are."""
    assert not dropout_p
    for tensor in (q, k, v):
        unit = 16 // tensor.element_size()
        assert tensor.dim() == 4 and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
        assert all(stride % unit == 0 for stride in tensor.stride()[:-1]), "misaligned address"
    assert q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0, "no kernel found to launch"
    assert q.shape[2] == k.shape[2] == v.shape[2]
    if cu_q is None:
        yield from (((batch, slice(None)), (batch, slice(None))) for batch in range(q.shape[0]))
        return
    assert cu_k is cu_q and q.shape[0] == 1 and longest is not None and 0 < longest <= q.shape[1]
    assert cu_q.dtype == torch.int32
    for start, stop in itertools.pairwise(cu_q.tolist()):
        assert stop <= k.shape[1] or stop == start, "reads behind the keys"
        yield (0, slice(start, min(stop, start + longest))), (0, slice(start, stop))


def _scores(q: Tensor, k: Tensor, mask: int, scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    if mask != CAUSAL_BOTTOM_RIGHT:
        return scores
    rows, keys = scores.shape[1:]
    assert rows <= keys or not keys, "wrong for more queries than keys"
    return scores.masked_fill(scores.new_ones(rows, keys, dtype=torch.bool).triu_(1 + keys - rows), -math.inf)
