"""The memory-efficient kernel as it behaves on a GPU, its traps included, in slow PyTorch for any device.

Stands in for torch_efficient's launches, so that how a launch is made of a call is tested on a CPU. What the kernel
leaves unwritten is NaN here; reading where it may not fails.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends import BACKENDS, torch_efficient
from flash_attn_compat.backends.torch_efficient import CAUSAL_BOTTOM_RIGHT, Launch, Launched

CPU = torch.device("cpu")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_efficient serves tensors on a CPU from now on."""
    backend = next(backend for backend in BACKENDS if backend.name == "torch_efficient")
    table = dataclasses.replace(backend.capabilities, devices=frozenset({"cpu"}), min_capability=None)
    monkeypatch.setattr(type(backend), "capabilities", table)
    monkeypatch.setattr(torch_efficient, "launch_forward", forward)
    monkeypatch.setattr(torch_efficient, "launch_backward", backward)


def forward(launch: Launch, keep_lse: bool) -> tuple[Tensor, Launched]:
    _check(launch)
    out = torch.full((*launch.q.shape[:-1], launch.v.shape[-1]), math.nan, dtype=launch.q.dtype, device=CPU)
    sequences = list(_sequences(launch))
    longest = launch.max_seqlen or launch.q.shape[1]
    lse = torch.full(
        (len(sequences), launch.q.shape[2], -(-longest // 32) * 32), math.inf, dtype=torch.float32, device=CPU
    )
    for index, (row, q, _, k, v) in enumerate(sequences):
        scores = _scores(launch, q, k)
        seen = scores.isfinite().any(-1)
        weights = scores.masked_fill(~seen[..., None], 0.0).softmax(-1).masked_fill(~seen[..., None], 0.0)
        batch, rows = row
        if k.shape[0] or max(q.shape[-1], v.shape[-1]) <= 128:
            out[batch, rows] = torch.einsum("hqk,khd->qhd", weights, v.double()).to(out.dtype)
        lse[index, :, : q.shape[0]] = torch.where(seen, scores.logsumexp(-1), 0.0) if k.shape[0] else 0.0
    return out, Launched(lse if keep_lse else lse.new_empty(0))


def backward(launch: Launch, dout: Tensor, out: Tensor, launched: Launched) -> tuple[Tensor, Tensor, Tensor]:
    _check(launch)
    dq, dk, dv = (torch.full(t.shape, math.nan, dtype=t.dtype, device=CPU) for t in (launch.q, launch.k, launch.v))
    for index, (row, q, key, k, v) in enumerate(_sequences(launch)):
        (batch, rows), (key_batch, keys) = row, key
        g, o = dout[batch, rows].double(), out[batch, rows].double()
        scores = _scores(launch, q, k)
        p = torch.exp(scores - launched.lse[index, :, : q.shape[0], None].double())
        dscores = p * (torch.einsum("qhd,khd->hqk", g, v.double()) - (g * o).sum(-1).t()[..., None])
        if k.shape[0]:
            dq[batch, rows] = (torch.einsum("hqk,khd->qhd", dscores, k.double()) * launch.scale).to(dq.dtype)
        dk[key_batch, keys] = (torch.einsum("hqk,qhd->khd", dscores, q.double()) * launch.scale).to(dk.dtype)
        dv[key_batch, keys] = torch.einsum("hqk,qhd->khd", p, g).to(dv.dtype)
    return dq, dk, dv


def _check(launch: Launch) -> None:
    for tensor in (launch.q, launch.k, launch.v):
        unit = 16 // tensor.element_size()
        assert tensor.dim() == 4 and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
        assert all(stride % unit == 0 for stride in tensor.stride()[:-1]), "misaligned address"
    assert launch.q.shape[-1] % 8 == 0 and launch.v.shape[-1] % 8 == 0, "no kernel found to launch"
    assert launch.q.shape[2] == launch.k.shape[2] == launch.v.shape[2]
    if launch.cu_seqlens is not None:
        assert launch.q.shape[0] == 1 and 0 < launch.max_seqlen <= launch.q.shape[1]
        assert launch.cu_seqlens.dtype == torch.int32


def _sequences(launch: Launch) -> Iterator[tuple[tuple[int, slice], Tensor, tuple[int, slice], Tensor, Tensor]]:
    if launch.cu_seqlens is None:
        for batch in range(launch.q.shape[0]):
            everything = batch, slice(None)
            yield everything, launch.q[batch], everything, launch.k[batch], launch.v[batch]
        return
    for start, stop in itertools.pairwise(launch.cu_seqlens.tolist()):
        rows, keys = slice(start, min(stop, start + launch.max_seqlen)), slice(start, stop)
        assert stop <= launch.k.shape[1] or stop == start, "reads behind the keys"
        yield (0, rows), launch.q[0, rows], (0, keys), launch.k[0, keys], launch.v[0, keys]


def _scores(launch: Launch, q: Tensor, k: Tensor) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * launch.scale
    if launch.mask == CAUSAL_BOTTOM_RIGHT:
        assert q.shape[0] <= k.shape[0] or not k.shape[0], "wrong for more queries than keys"
        ahead = (
            torch.arange(k.shape[0], device=CPU)
            - torch.arange(q.shape[0], device=CPU)[:, None]
            - (k.shape[0] - q.shape[0])
        )
        hidden = ahead > 0
        scores = scores.masked_fill(hidden, -math.inf)
    return scores
