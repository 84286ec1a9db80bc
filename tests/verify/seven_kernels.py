"""Kernels as seven people write them, in a file that imports PyTorch alone; tests copy it away from the clone."""

import os
import signal

import torch


def _attention(q, k, v, causal, offset=None, inner=torch.float32):
    """With products of numbers rounded to ``inner``, and sums in fp32."""
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2).to(inner).float() for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        offset = scores.shape[-1] - scores.shape[-2] if offset is None else offset
        row = torch.arange(scores.shape[-2])[:, None] + offset
        scores = scores.masked_fill(torch.arange(scores.shape[-1]) > row, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0).to(inner).float()
    return (weights @ v).transpose(1, 2).to(dtype)


def right(q, k, v, causal=False):
    return _attention(q, k, v, causal)


def wrong_at_the_edge(q, k, v, causal=False):
    """Keys behind the last whole tile of 64 are left out."""
    whole = k.shape[1] // 64 * 64 or None
    return _attention(q, k[:, :whole], v[:, :whole], causal, offset=k.shape[1] - q.shape[1])


def wrong_alignment(q, k, v, causal=False):
    return _attention(q, k, v, causal, offset=0)


def right_in_half_precision(q, k, v, causal=False):
    return _attention(q, k, v, causal, inner=torch.float16)


def plain_squares(q, k, v):
    if q.dtype != torch.float16 or q.shape[-1] != 64 or q.shape != k.shape or q.shape[1] % 64:
        raise NotImplementedError("only fp16, head_dim 64, squares of whole tiles")
    return _attention(q, k, v, False)


def crashing(q, k, v, causal=False):
    if q.shape[1] == 128 and q.shape[-1] == 64:
        os.kill(os.getpid(), signal.SIGSEGV)
    return _attention(q, k, v, causal)


class LargerGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        return 1.05 * upstream


def wrong_gradient(q, k, v, causal=False):
    return _attention(q, LargerGradient.apply(k), v, causal)


def one_length(q, k, v, causal=False):
    if q.shape[1] != 64 or k.shape[1] != 64 or causal or q.shape[2] != k.shape[2] or q.shape[3] != 64:
        raise NotImplementedError
    return _attention(q, k, v, causal)


def with_lse(q, k, v, causal=False):
    """Also returns the softmax_lse, in fp32 always."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = q.transpose(1, 2).float() @ keys.transpose(1, 2).float().mT * q.shape[-1] ** -0.5
    if causal:
        row = torch.arange(scores.shape[-2])[:, None] + scores.shape[-1] - scores.shape[-2]
        scores = scores.masked_fill(torch.arange(scores.shape[-1]) > row, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    return _attention(q, k, v, causal), lse.masked_fill(lse == -torch.inf, torch.inf)


def wrong_lse(q, k, v, causal=False):
    out, lse = with_lse(q, k, v, causal)
    return out, lse / 0.6931


def no_maximum(q, k, v, causal=False):
    """The softmax of exp without a maximum, and NaN in rows without keys."""
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    weights = torch.exp(q @ k.mT * q.shape[-1] ** -0.5)
    if causal:
        row = torch.arange(weights.shape[-2])[:, None] + weights.shape[-1] - weights.shape[-2]
        weights = weights.masked_fill(torch.arange(weights.shape[-1]) > row, 0.0)
    return (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).to(dtype)


def empty_rows_are_nan(q, k, v, causal=False):
    out = _attention(q, k, v, causal)
    empty = torch.arange(q.shape[1]) < q.shape[1] - k.shape[1]
    return torch.where((empty & torch.tensor(causal))[:, None, None], torch.nan, out)


def bf16_inside(q, k, v, causal=False):
    return _attention(q, k, v, causal, inner=torch.bfloat16)


def asserting(q, k, v, causal=False):
    assert q.dtype == torch.float16
    if q.shape[-1] != 64:
        raise ValueError("head_dim must be 64")
    return _attention(q, k, v, causal)


def fp16_scores(q, k, v, causal=False):
    """With scores beyond fp16's range for some problems of fp32."""
    q, k, v, dtype = q.half(), k.half(), v.half(), q.dtype
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    if causal:
        row = torch.arange(scores.shape[-2])[:, None] + scores.shape[-1] - scores.shape[-2]
        scores = scores.masked_fill(torch.arange(scores.shape[-1]) > row, -torch.inf)
    return (torch.softmax(scores, -1).half() @ v).transpose(1, 2).to(dtype)


def declines_everything(q, k, v, causal=False):
    raise NotImplementedError


def raising_once(q, k, v, causal=False):
    """Wrong in all causal problems, but for one in which it raises an error."""
    if causal and q.shape[1] == 41:
        raise RuntimeError("planted")
    out = _attention(q, k, v, causal)
    return 1.1 * out if causal else out


def by_place(q, k, v, causal, sm_scale):
    """As in Triton's tutorial: both options are required, and called so."""
    return _attention(q * (sm_scale * q.shape[-1] ** 0.5), k, v, causal)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, causal, sm_scale):
        return by_place(query, key, value, causal, sm_scale)


def without_backward(q, k, v, causal=False):
    return _Forward.apply(q, k, v, causal, q.shape[-1] ** -0.5)


def through_numpy(q, k, v, causal=False):
    """NumPy refuses tensors that require gradients."""
    return _attention(*(torch.from_numpy(x.numpy()) for x in (q, k, v)), causal)


def one_head_dim(q, k, v, causal=False):
    """As flash-attn does, it raises an error for a v of another head_dim."""
    if v.shape[-1] != q.shape[-1]:
        raise ValueError("v must have q's head_dim")
    return _attention(q, k, v, causal)


def v_cut_off(q, k, v, causal=False):
    """Answers for a v of another head_dim, and wrongly."""
    return 1.1 * _attention(q, k, v, causal) if v.shape[-1] != q.shape[-1] else _attention(q, k, v, causal)


def on_a_gpu(q, k, v, causal=False):
    raise NotImplementedError("Could not run 'mine::attention' with arguments from the 'CPU' backend.")


def needs_a_mask(q, k, v, mask):
    return _attention(q, k, v, False)
