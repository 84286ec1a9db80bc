"""Who is timed on a workload: the package's backends, what people write without it and flash-attn.

A contestant prepares what its users would prepare once (masks, indices), outside of the clock. The rivals are written
as they are found in the wild, and are given the benefit of the doubt: no mask where none is needed, masks for free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_compat
from verify import implementations as impl
from verify.call import Call
from verify.oracle import keys_visible
from verify.workloads import Workload

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(Exception):
    """This contestant cannot take part in this workload, and why."""


@dataclass(frozen=True)
class Prepared:
    """run(q, k, v) -> out, differentiable unless `no_backward` says why not. `around` is entered outside the clock."""

    run: Attention
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    no_backward: str = ""
    prepared_bytes: int = 0
    served_by: str = ""


@dataclass(frozen=True)
class Contestant:
    """prepare: raises Unavailable; ours: whether it must be right, or is somebody to compare with."""

    name: str
    prepare: Callable[[Workload, Call], Prepared]
    ours: bool = False


# ---- flash-attn's interface: ours and the official package -----------------------------------------------------------


def flash_attn_call(namespace: Any, call: Call) -> Callable[..., Any]:
    """(q, k, v) -> out by the call's function, with its other arguments."""
    others = {name: value for name, value in call.args.items() if name not in call.qkv_names}
    return functools.partial(getattr(namespace, call.fn), **others)


def ours(backend: str | None = None) -> Contestant:
    """The package: the backend it chooses, or the named one."""
    return Contestant(backend or "default", functools.partial(_ours, backend), ours=True)


def _ours(backend: str | None, workload: Workload, given: Call) -> Prepared:
    call = flash_attn_call(flash_attn_compat, given)
    around = functools.partial(flash_attn_compat.use_backend, backend) if backend else nullcontext

    def explained(gradients: bool) -> Any:
        qkv = [tensor.detach().requires_grad_(gradients) for tensor in given.qkv]
        with around():
            return flash_attn_compat.explain(call, *qkv)

    forward = explained(False)
    if forward.backend is not None and backend is None:
        # On a GPU that nobody measured, the package times what may be faster at the first call.
        with torch.no_grad():
            call(*given.qkv)
        forward = explained(False)
    if forward.backend is None:
        raise Unavailable("; ".join(forward.reasons[backend]) if backend else str(forward))
    # With gradients wanted, dispatch may choose another one.
    both = forward if workload.decode else explained(True)
    if both.backend is None:
        reason = "; ".join(both.reasons[backend]) if backend else "no backend serves it"
        return Prepared(call, around, no_backward=reason, served_by=forward.backend)
    another = both.backend != forward.backend
    return Prepared(call, around, served_by=forward.backend + f", {both.backend} with gradients" * another)


def official(workload: Workload, given: Call) -> Prepared:
    """The real flash-attn, if it is here and runs."""
    package, word = impl.official()
    if package is None:
        raise Unavailable(f"flash_attn: {word}")
    if given.q.device.type != "cuda" or given.dtype.itemsize != 2:
        raise Unavailable("computes fp16 and bf16 on CUDA devices")
    return Prepared(flash_attn_call(package.target, given))


# ---- PyTorch's build of FlashAttention-2 -----------------------------------------------------------------------------


def _no_append(workload: Workload) -> None:
    if workload.appends:
        raise Unavailable("reads a cache but appends nothing to it")


def aten_flash(workload: Workload, given: Call) -> Prepared:
    """torch.ops.aten._flash_attention_forward, PyTorch's own build of FlashAttention-2."""
    if given.q.device.type != "cuda":
        raise Unavailable("a CUDA kernel")
    if torch.cuda.get_device_capability(given.q.device) < (8, 0) or given.dtype.itemsize != 2:
        raise Unavailable("computes fp16 and bf16 on GPUs of compute capability 8.0 and newer")
    if workload.softcap or workload.page_size:
        raise Unavailable("no softcap" if workload.softcap else "no pages")
    _no_append(workload)
    lengths = given.args.get("cu_seqlens_q"), given.args.get("cu_seqlens_k")
    longest = workload.max_seqlen_q, workload.max_seqlen_k
    left, right = workload.bounds
    options: dict[str, Any] = {}
    if workload.window_size != (-1, -1):
        options = {"window_size_left": left, "window_size_right": right}
    if workload.alibi:
        options["alibi_slopes"] = given.args["alibi_slopes"]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rules = workload.dropout_p, workload.causal, False
        out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, *longest, *rules, **options)[0]
        return out

    return Prepared(run, no_backward="the backward operator takes no alibi_slopes" if workload.alibi else "")


# ---- what people write -----------------------------------------------------------------------------------------------


class _Padding:
    """Packed tokens to (batch, longest, ...) and back; dense tensors as they are."""

    def __init__(self, lengths: tuple[int, ...], packed: bool, device: torch.device) -> None:
        self.batch, self.longest = len(lengths), max(lengths)
        rows = [torch.arange(length) + index * self.longest for index, length in enumerate(lengths)]
        self.places = torch.cat(rows).to(device) if packed else None

    def pad(self, tokens: Tensor) -> Tensor:
        if self.places is None:
            return tokens
        padded = tokens.new_zeros(self.batch * self.longest, *tokens.shape[1:])
        return padded.index_put((self.places,), tokens).view(self.batch, self.longest, *tokens.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        return padded if self.places is None else padded.flatten(0, 1).index_select(0, self.places)


def _mask(workload: Workload, given: Call) -> tuple[Tensor | None, bool]:
    """attn_mask and is_causal for SDPA; no mask where right padding and is_causal do without."""
    key = torch.arange(workload.max_seqlen_k, device=given.q.device)
    if workload.decode:
        return (key < given.args["cache_seqlens"][:, None])[:, None, None], False
    left, right = workload.bounds
    if not workload.alibi and left < 0 and (right < 0 or (workload.causal and workload.self_attention)):
        if right >= 0 or workload.full:
            return None, right >= 0
        lengths = torch.tensor(workload.seqlens_k, device=given.q.device)
        return (key < lengths[:, None])[:, None, None], False
    shape = 1 if workload.full else workload.batch, 1, workload.max_seqlen_q, workload.max_seqlen_k
    visible = torch.zeros(shape, dtype=torch.bool, device=given.q.device)
    for mine, sq, sk in zip(visible[:, 0], workload.seqlens_q, workload.seqlens_k):
        mine[:sq, :sk] = keys_visible(sq, sk, workload.causal, workload.window_size, given.q.device)
        # Rows of padding see their keys as well: a row that sees none is NaN in some kernels, and NaN in padding
        # reaches the gradients.
        mine[sq:, :sk] = True
    if not workload.alibi:
        return visible, False
    row = torch.arange(workload.max_seqlen_q, device=given.q.device)[:, None] + workload.max_seqlen_k
    bias = -given.args["alibi_slopes"][:, None, None] * (row - workload.max_seqlen_q - key).abs()
    return bias[None].masked_fill(~visible, -torch.inf).to(given.dtype), False


def _heads_first(workload: Workload, given: Call) -> tuple[Callable[..., tuple[Tensor, ...]], _Padding]:
    """(q, k, v) -> padded (batch, nheads, seqlen, head_dim) with the key heads repeated; and how to unpad."""
    _no_append(workload)
    rows = _Padding(workload.seqlens_q, workload.packed, given.q.device)
    keys = _Padding(workload.seqlens_k, workload.packed, given.q.device)

    def spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if workload.page_size:
            k, v = (pages[given.args["block_table"]].flatten(1, 2)[:, : workload.max_seqlen_k] for pages in (k, v))
        q, k, v = rows.pad(q).transpose(1, 2), keys.pad(k).transpose(1, 2), keys.pad(v).transpose(1, 2)
        if workload.group > 1:
            k, v = (x.repeat_interleave(workload.group, 1) for x in (k, v))
        return q, k, v

    return spread, rows


def plain(workload: Workload, given: Call) -> Prepared:
    """Matmul, softmax, matmul, on padded tensors: the textbook formula, and the only way to a softcap."""
    spread, rows = _heads_first(workload, given)
    mask, is_causal = _mask(workload, given)
    if is_causal:
        longest = workload.max_seqlen_q
        mask = torch.ones(longest, longest, dtype=torch.bool, device=given.q.device).tril()
    scale = workload.head_dim**-0.5

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = spread(q, k, v)
        scores = q @ k.transpose(-1, -2) * scale
        if workload.softcap:
            scores = torch.tanh(scores / workload.softcap) * workload.softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        if workload.dropout_p:
            probabilities = F.dropout(probabilities, workload.dropout_p)
        return rows.unpad((probabilities @ v).transpose(1, 2))

    return Prepared(run, prepared_bytes=0 if mask is None else mask.nbytes)


def pad_sdpa(workload: Workload, given: Call) -> Prepared:
    """Pad, F.scaled_dot_product_attention, unpad; on a GPU with the kernels that Turing has and no others."""
    if workload.softcap:
        return plain(workload, given)
    spread, rows = _heads_first(workload, given)
    mask, is_causal = _mask(workload, given)
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": workload.dropout_p, "is_causal": is_causal}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = spread(q, k, v)
        return rows.unpad(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2))

    of_turing = functools.partial(sdpa_kernel, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    around = of_turing if given.q.device.type == "cuda" else nullcontext
    return Prepared(run, around, prepared_bytes=0 if mask is None else mask.nbytes)


def sdpa_loop(workload: Workload, given: Call) -> Prepared:
    """F.scaled_dot_product_attention for one sequence after the other, with whatever kernel PyTorch picks."""
    if not workload.packed:
        raise Unavailable("pad_sdpa is the same where nothing is packed")
    if workload.softcap or workload.alibi or workload.window_size != (-1, -1):
        raise Unavailable("only for plain and causal masks")
    if workload.causal and not workload.self_attention:
        raise Unavailable("is_causal aligns at the top left")
    lengths_q, lengths_k = list(workload.seqlens_q), list(workload.seqlens_k)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
        return torch.cat([one(*part) for part in parts])

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tokens.transpose(0, 1)[None] for tokens in (q, k, v))
        if workload.group > 1:
            k, v = (x.repeat_interleave(workload.group, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=workload.dropout_p, is_causal=workload.causal)
        return out[0].transpose(0, 1)

    return Prepared(run)


RIVALS = {rival.__name__: Contestant(rival.__name__, rival)
          for rival in (official, aten_flash, pad_sdpa, sdpa_loop, plain)}  # fmt: skip
# Whom to be measured against: flash-attn itself, and what people use without it.
FLASH, WORKAROUNDS = ("official", "aten_flash"), ("pad_sdpa", "sdpa_loop", "plain")
# The ones worth their time on each kind of device, unless asked for by name.
USUAL_RIVALS = {"cuda": (*FLASH, "pad_sdpa"), "cpu": WORKAROUNDS, "mps": WORKAROUNDS}
