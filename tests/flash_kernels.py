"""FlashAttention-2's kernels acted out on a CPU: strict about what they are given, careless where the real ones are.

Tokens outside of all sequences come back as NaN, windows are clamped to the longest key length, rows beyond
max_seqlen_q are not computed, and grouped heads of single rows are folded only if every sequence has one. So a
backend that relies on more than the kernels promise fails here. The numbers come from the reference backend.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends import torch_flash
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.engine.build import Options, dense_call
from flash_attn_compat.engine.call import AttentionCall, Gradients, Upstream
from flash_attn_compat.serving import dispatch

CPU = torch.device("cpu")
FP32: Any = {"dtype": torch.float32, "device": CPU}
calls: list[str] = []  # what was called since the list was cleared


class Rules(NamedTuple):
    """What scores and probabilities are subject to, and how far the kernels look."""

    slopes: Tensor | None
    dropout_p: float
    scale: float
    causal: bool
    left: int
    right: int
    softcap: float

    def window(self, longest: int) -> tuple[int, int]:
        left, right = (-1 if side >= longest else side for side in (self.left, 0 if self.causal else self.right))
        return longest if left < 0 < right else left, longest if right < 0 <= left else right

    def options(self, index: int | slice, window: tuple[int, int]) -> Options:
        """Of one sequence, or of all."""
        per_sequence = self.slopes is not None and self.slopes.dim() == 2
        slopes = self.slopes[index].view(-1, self.slopes.shape[-1]) if per_sequence else self.slopes
        return Options(self.dropout_p, self.scale, False, window, self.softcap, slopes, return_attn_probs=True)


# ---------------------------------------------------------------- flash-attn's extension


def fwd(q, k, v, out_, slopes, dropout_p, scale, causal, left, right, softcap, return_softmax, gen_=None):
    rules = Rules(slopes, dropout_p, scale, causal, left, right, softcap)
    out, lse, rng_state = _forward("fwd", q, k, v, None, None, q.shape[1], k.shape[1], rules)
    return [out, lse, q.new_empty(0), rng_state]


def varlen_fwd(
    q, k, v, out_, cu_q, cu_k, seqused_k, leftpad_k, block_table, slopes, max_q, max_k, dropout_p, scale, zero_tensors,
    causal, left, right, softcap, return_softmax, gen_=None,
):  # fmt: skip
    assert seqused_k is leftpad_k is block_table is None and not zero_tensors
    rules = Rules(slopes, dropout_p, scale, causal, left, right, softcap)
    out, lse, rng_state = _forward("varlen_fwd", q, k, v, cu_q, cu_k, max_q, max_k, rules)
    return [out, lse, q.new_empty(0), rng_state]


def bwd(
    dout, q, k, v, out, lse, dq, dk, dv, slopes, dropout_p, scale, causal, left, right, softcap, deterministic,
    gen_=None, rng_state=None,
):  # fmt: skip
    rules = Rules(slopes, dropout_p, scale, causal, left, right, softcap)
    _backward("bwd", Upstream(dout, out, lse, rng_state), q, k, v, (dq, dk, dv), None, None, k.shape[1], rules)
    return [dq, dk, dv, None]


def varlen_bwd(
    dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, slopes, max_q, max_k, dropout_p, scale, zero_tensors, causal, left,
    right, softcap, deterministic, gen_=None, rng_state=None,
):  # fmt: skip
    assert not zero_tensors
    rules = Rules(slopes, dropout_p, scale, causal, left, right, softcap)
    _backward("varlen_bwd", Upstream(dout, out, lse, rng_state), q, k, v, (dq, dk, dv), cu_q, cu_k, max_k, rules)
    return [dq, dk, dv, None]


# ---------------------------------------------------------------- PyTorch's operators


def aten_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, causal, return_debug_mask, *, scale=1.0, window_size_left=-1,
    window_size_right=-1, pads_lse=False,
):  # fmt: skip
    """``pads_lse`` as before FlashAttention 2.6."""
    rules = Rules(None, dropout_p, scale, causal, window_size_left, window_size_right, 0.0)
    out, lse, rng_state = _forward("aten_forward", q, k, v, cu_q, cu_k, max_q, max_k, rules)
    if cu_q is not None and pads_lse:
        padded = torch.full((cu_q.shape[0] - 1, lse.shape[0], max_q), torch.nan, **FP32)
        for index, rows in enumerate(_spans(cu_q)):
            padded[index, :, : rows.stop - rows.start] = lse[:, rows]
        lse = padded
    return out, lse, rng_state, torch.empty((), **FP32), q.new_empty(0)


def aten_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, causal, seed, offset, *, scale, window_size_left,
    window_size_right, pads_lse=False,
):  # fmt: skip
    rules = Rules(None, dropout_p, scale, causal, window_size_left, window_size_right, 0.0)
    if cu_q is not None and pads_lse:
        packed = torch.full((lse.shape[1], q.shape[0]), torch.nan, **FP32)
        for index, rows in enumerate(_spans(cu_q)):
            packed[:, rows] = lse[index, :, : rows.stop - rows.start]
        lse = packed
    gradients = tuple(map(torch.empty_like, (q, k, v)))
    upstream = Upstream(dout, out, lse, seed if dropout_p else None)
    _backward("aten_backward", upstream, q, k, v, gradients, cu_q, cu_k, max_k, rules)
    return gradients


# ---------------------------------------------------------------- the kernels


def _forward(name, q, k, v, cu_q, cu_k, max_q, max_k, rules: Rules) -> tuple[Tensor, Tensor, Tensor]:
    calls.append(name)
    _check(q, k, v, rules)
    if cu_q is None:
        return _answer(q, k, v, rules.options(slice(None), rules.window(max_k)))
    left, right = rules.window(max_k)
    folds = max_q == 1 and q.shape[1] > k.shape[-2] and (left, right) in ((-1, -1), (-1, 0))
    folds = folds and not rules.dropout_p and rules.slopes is None
    assert not folds or q.shape[0] == cu_q.shape[0] - 1, "folded rows cannot be reshaped"
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan, **FP32)
    rng_state = torch.zeros(2, dtype=torch.int64, device=CPU)
    for index, (rows, keys) in enumerate(zip(_spans(cu_q), _spans(cu_k))):
        # Folded rows are taken for one per sequence, whatever cu_q says.
        rows = slice(index, index + 1) if folds else slice(rows.start, min(rows.stop, rows.start + max_q))
        if rows.start < rows.stop:
            options = rules.options(index, _near(left, right, keys))
            part = _answer(q[None, rows], k[None, keys], v[None, keys], options)
            out[rows], lse[:, rows], rng_state = part[0][0], part[1][0], part[2]
    return out, lse, rng_state


def _backward(name, upstream: Upstream, q, k, v, gradients, cu_q, cu_k, max_k, rules: Rules) -> None:
    calls.append(name)
    _check(q, k, v, rules)
    for tensor in (upstream.dout, upstream.out, *gradients):
        _check_alignment(tensor)
    dout, out, lse, rng_state, _ = upstream
    assert lse.is_contiguous() and lse.dtype == torch.float32
    left, right = rules.window(max_k)
    if cu_q is None:
        _differentiate(upstream, q, k, v, gradients, rules.options(slice(None), (left, right)))
        return
    for gradient in gradients:
        gradient.fill_(torch.nan)
    for index, (rows, keys) in enumerate(zip(_spans(cu_q), _spans(cu_k))):
        own = [gradient[None, span] for gradient, span in zip(gradients, (rows, keys, keys))]
        for gradient in own:
            gradient.zero_()
        if rows.start < rows.stop and keys.start < keys.stop:
            part = Upstream(dout[None, rows], out[None, rows], lse[None, :, rows], rng_state)
            options = rules.options(index, _near(left, right, keys))
            _differentiate(part, q[None, rows], k[None, keys], v[None, keys], own, options)


def _near(left: int, right: int, keys: slice) -> tuple[int, int]:
    """As far to the left, and short of what counts as unbounded."""
    return min(left, max(0, keys.stop - keys.start - 1)), right


def _answer(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    rng_state = torch.zeros(2, dtype=torch.int64, device=CPU)
    if k.shape[1] == 0:
        return torch.zeros_like(q), torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.inf, **FP32), rng_state
    result = Reference().forward(dense_call(q, k, v, options))
    return result.out, result.lse, rng_state if result.rng_state is None else result.rng_state


def _differentiate(upstream: Upstream, q: Tensor, k: Tensor, v: Tensor, gradients: Any, options: Options) -> None:
    call = dense_call(q, k, v, options)._replace(rng_state=upstream.rng_state)
    Reference().backward(call, upstream, Gradients(*gradients))


def _check(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> None:
    for tensor in (q, k, v):
        assert tensor.dtype == q.dtype and tensor.dtype in (torch.float16, torch.bfloat16), tensor.dtype
        assert tensor.shape[-1] == q.shape[-1] and tensor.shape[-1] % 8 == 0 and tensor.shape[-1] <= 256, tensor.shape
        _check_alignment(tensor)
    assert q.shape[0] > 0 and q.shape[-2] % k.shape[-2] == 0
    assert rules.slopes is None or rules.slopes.stride(-1) == 1
    assert not (rules.dropout_p and rules.softcap)


def _check_alignment(tensor: Tensor) -> None:
    assert tensor.stride(-1) == 1 and all(stride % 8 == 0 for stride in tensor.stride()[:-1]), tensor.stride()
    assert tensor.storage_offset() % 8 == 0


def _spans(starts: Tensor) -> list[slice]:
    return [slice(start, stop) for start, stop in itertools.pairwise(starts.tolist())]


# ---------------------------------------------------------------- a GPU by pretence


def pretend_gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Calls on CPU tensors count as calls on a GPU from now on."""
    true_traits = AttentionCall.traits
    traits = lambda call: true_traits(call)._replace(device_type="cuda", capability=capability)  # noqa: E731
    patch.setattr(AttentionCall, "traits", traits)


def install_operators(patch: pytest.MonkeyPatch, pads_lse: bool = False) -> Iterator[None]:
    """torch_flash serves CPU tensors; what else this machine may have, a GPU or flash-attn, takes no part."""
    patch.setenv("FLASH_ATTN_COMPAT_FUSED", "0")
    patch.setenv("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL", "1")
    pretend_gpu(patch)
    functions = {"_flash_attention_forward": aten_forward, "_flash_attention_backward": aten_backward}
    operators = {name: functools.partial(function, pads_lse=pads_lse) for name, function in functions.items()}
    patch.setattr(torch_flash, "operator", operators.__getitem__)
    torch_flash._pads_lse.cache_clear()
    dispatch.forget_decisions()
    calls.clear()
    yield
    torch_flash._pads_lse.cache_clear()
    dispatch.forget_decisions()
