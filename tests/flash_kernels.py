"""FlashAttention-2's kernels acted out on a CPU: strict about what they are given, careless where the real ones are.

Tokens outside of all sequences come back as NaN, windows are clamped to the longest key length, rows beyond
max_seqlen_q are not computed, and grouped heads of single rows are folded only if every sequence has one. So a
backend that relies on more than the kernels promise fails here. The numbers come from the reference backend.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.engine.build import Options, dense_call
from flash_attn_compat.engine.call import Gradients, Upstream
from verify.drawing import random_problem
from verify.examination import Examination
from verify.problems import Problem

CPU = torch.device("cpu")
FP32: Any = {"dtype": torch.float32, "device": CPU}
calls: list[tuple[str, tuple[Any, ...]]] = []  # what was called with what


# Queries that stand far before the first key, under windows that end on one side only: the kernels clamp the other
# side, or the window itself, to the longest key length.
FAR_BEFORE_THE_KEYS = [
    replace(Problem(seqlens_q=(40,), seqlens_k=(5,), nheads_k=1, group=2, head_dim=16, dtype="float16"), **changes)
    for window in ((3, -1), (0, -1), (-1, 10), (2, 20))
    for changes in (
        {"window": window},
        {"window": window, "kind": "varlen", "seqlens_q": (40, 3), "seqlens_k": (5, 4)},
        {"window": window, "kind": "kvcache", "capacity": 6},
    )
]


def fwd(q, k, v, out_, alibi_slopes, p_dropout, scale, is_causal, left, right, softcap, return_softmax, gen_=None):
    calls.append(("fwd", (q, k, v)))
    _check(q, k, v, p_dropout, softcap)
    window = _normalised(is_causal, left, right, k.shape[1])
    return _forward(q, k, v, alibi_slopes, p_dropout, scale, window, softcap)


def bwd(
    dout, q, k, v, out, lse, dq, dk, dv, alibi_slopes, p_dropout, scale, is_causal, left, right, softcap, deterministic,
    gen_=None, rng_state=None,
):  # fmt: skip
    calls.append(("bwd", (dout, q, k, v)))
    _check(q, k, v, p_dropout, softcap)
    _check_upstream(dout, out, lse)
    window = _normalised(is_causal, left, right, k.shape[1])
    return _backward(dout, q, k, v, out, lse, dq, dk, dv, alibi_slopes, p_dropout, scale, window, softcap, rng_state)


def varlen_fwd(
    q, k, v, out_, cu_q, cu_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_q, max_k, p_dropout, scale,
    zero_tensors, is_causal, left, right, softcap, return_softmax, gen_=None,
):  # fmt: skip
    calls.append(("varlen_fwd", (q, k, v)))
    _check(q, k, v, p_dropout, softcap)
    assert seqused_k is leftpad_k is block_table is None
    left, right = _normalised(is_causal, left, right, max_k)
    batch = cu_q.shape[0] - 1
    folds = max_q == 1 and q.shape[1] > k.shape[-2] and (left, right) in ((-1, -1), (-1, 0))
    folds = folds and not p_dropout and alibi_slopes is None
    if folds:
        assert q.shape[0] == batch, "folded rows cannot be reshaped"
    outside, lse_outside = (0.0, -torch.inf) if zero_tensors else (torch.nan, torch.nan)
    out, lse = torch.full_like(q, outside), torch.full((q.shape[1], q.shape[0]), lse_outside, **FP32)
    rng_state = torch.zeros(2, dtype=torch.int64, device=CPU)
    for index, rows in enumerate(_spans(cu_q)):
        # Folded rows are taken for one per sequence, whatever cu_q says.
        rows = slice(index, index + 1) if folds else slice(rows.start, min(rows.stop, rows.start + max_q))
        if rows.start == rows.stop:
            continue
        keys = slice(int(cu_k[index]), int(cu_k[index + 1]))
        window = (min(left, max(0, k[keys].shape[0] - 1)), right)  # as far, and short of what counts as unbounded
        slopes = _slopes(alibi_slopes, index)
        part = _forward(q[None, rows], k[keys][None], v[keys][None], slopes, p_dropout, scale, window, softcap)
        out[rows], lse[:, rows], rng_state = part[0][0], part[1][0], part[3]
    return [out, lse, q.new_empty(0), rng_state]


def varlen_bwd(
    dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, alibi_slopes, max_q, max_k, p_dropout, scale, zero_tensors,
    is_causal, left, right, softcap, deterministic, gen_=None, rng_state=None,
):  # fmt: skip
    calls.append(("varlen_bwd", (dout, q, k, v)))
    _check(q, k, v, p_dropout, softcap)
    _check_upstream(dout, out, lse)
    left, right = _normalised(is_causal, left, right, max_k)
    for gradient in (dq, dk, dv):
        gradient.fill_(0.0 if zero_tensors else torch.nan)
    for index, (rows, keys) in enumerate(zip(_spans(cu_q), _spans(cu_k))):
        for gradient, span in ((dq, rows), (dk, keys), (dv, keys)):
            gradient[span] = 0
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        window = (min(left, keys.stop - keys.start - 1), right)
        _backward(
            dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows], lse[None, :, rows],
            dq[None, rows], dk[None, keys], dv[None, keys], _slopes(alibi_slopes, index), p_dropout, scale, window,
            softcap, rng_state,
        )  # fmt: skip
    return [dq, dk, dv, None]


def aten_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None, window_size_left=None,
    window_size_right=None, pads_lse=False,
):  # fmt: skip
    """PyTorch's operator around the same kernels; ``pads_lse`` as before FlashAttention 2.6."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = (-1 if side is None else side for side in (window_size_left, window_size_right))
    shared = (scale, is_causal, left, right, 0.0, False)
    if cu_q is None:
        out, lse, _, rng_state = fwd(q, k, v, None, None, dropout_p, *shared)
    else:
        varlen = (None, None, None, None, max_q, max_k, dropout_p, scale, False)
        out, lse, _, rng_state = varlen_fwd(q, k, v, None, cu_q, cu_k, *varlen, *shared[1:])
        lse = _padded(lse, cu_q, max_q) if pads_lse else lse
    return out, lse, rng_state, torch.empty((), **FP32), q.new_empty(0)


def aten_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None,
    window_size_left=None, window_size_right=None, pads_lse=False,
):  # fmt: skip
    gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
    scalars = (scale, is_causal, window_size_left, window_size_right, 0.0)
    rng_state = seed if dropout_p else None
    if cu_q is None:
        bwd(dout, q, k, v, out, lse, *gradients, None, dropout_p, *scalars, False, None, rng_state)
    else:
        lse = _unpadded(lse, cu_q, q.shape[0]) if pads_lse else lse
        given = (dout, q, k, v, out, lse, *gradients, cu_q, cu_k, None, max_q, max_k, dropout_p, scale, False)
        varlen_bwd(*given, *scalars[1:], False, None, rng_state)
    return tuple(gradients)


def _forward(q, k, v, slopes, dropout_p, scale, window, softcap):
    if k.shape[1] == 0:
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.inf, **FP32)
        return [torch.zeros_like(q), lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=CPU)]
    call = dense_call(q, k, v, Options(dropout_p, scale, False, window, softcap, slopes, return_attn_probs=True))
    result = Reference().forward(call)
    return [result.out, result.softmax_lse, q.new_empty(0), result.rng_state]


def _backward(dout, q, k, v, out, lse, dq, dk, dv, slopes, dropout_p, scale, window, softcap, rng_state):
    call = dense_call(q, k, v, Options(dropout_p, scale, False, window, softcap, slopes))._replace(rng_state=rng_state)
    upstream = Upstream(dout, out, lse, rng_state)
    return [*Reference().backward(call, upstream, Gradients(dq, dk, dv)), None]


def _normalised(causal: bool, left: int, right: int, longest: int) -> tuple[int, int]:
    right = 0 if causal else right
    left, right = (-1 if side >= longest else side for side in (left, right))
    if left < 0 <= right and right != 0:
        left = longest
    if right < 0 <= left:
        right = longest
    return left, right


def _check(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softcap: float) -> None:
    for tensor in (q, k, v):
        assert tensor.dtype == q.dtype and tensor.dtype in (torch.float16, torch.bfloat16), tensor.dtype
        assert tensor.shape[-1] == q.shape[-1] and tensor.shape[-1] % 8 == 0 and tensor.shape[-1] <= 256, tensor.shape
        _check_alignment(tensor)
    assert q.shape[0] > 0 and q.shape[-2] % k.shape[-2] == 0
    assert not (dropout_p and softcap)


def _check_upstream(dout: Tensor, out: Tensor, lse: Tensor) -> None:
    _check_alignment(dout)
    _check_alignment(out)
    assert lse.is_contiguous() and lse.dtype == torch.float32


def _check_alignment(tensor: Tensor) -> None:
    assert tensor.stride(-1) == 1 and all(stride % 8 == 0 for stride in tensor.stride()[:-1]), tensor.stride()
    assert tensor.storage_offset() % 8 == 0


def _spans(starts: Tensor) -> list[slice]:
    bounds = starts.tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def _slopes(slopes: Tensor | None, index: int) -> Tensor | None:
    return slopes if slopes is None or slopes.dim() == 1 else slopes[index : index + 1]


def _padded(lse: Tensor, starts: Tensor, longest: int) -> Tensor:
    padded = torch.full((starts.shape[0] - 1, lse.shape[0], longest), torch.nan, **FP32)
    for index, rows in enumerate(_spans(starts)):
        padded[index, :, : rows.stop - rows.start] = lse[:, rows]
    return padded


def _unpadded(lse: Tensor, starts: Tensor, total: int) -> Tensor:
    packed = torch.full((lse.shape[1], total), torch.nan, **FP32)
    for index, rows in enumerate(_spans(starts)):
        packed[:, rows] = lse[index, :, : rows.stop - rows.start]
    return packed


def judge_first_served(backend: str, kind: str, enough: int = 12) -> tuple[int, list[str]]:
    """Half-precision problems of one kind until a flash backend has served enough: how many, and what was wrong."""
    served, complaints = 0, []
    for seed in range(400):
        problem = random_problem(seed, (kind,), ("float16", "bfloat16"))
        if problem.dropout_p:  # which only the kernel that drew a mask can repeat
            continue
        verdict = Examination(problem).judge(backend)
        complaints += [f"{problem}: {failure}" for failure in verdict.failures]
        served += not verdict.refused
        if served == enough or (seed == 40 and not served):
            break
    return served, complaints
