"""What `verify bench` times on a workload: the package's backends, flash-attn, and common PyTorch code without either.

Masks and indices are made before the timing, since users make them once. The common code gets its best form: it uses a
mask only where one is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_compat
from flash_attn_compat.bert_padding import index_first_axis, pad_input

from . import implementations as impl
from .call import Call
from .errors import NotSupported
from .oracle import keys_visible
from .workloads import Workload

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Prepared:
    """A contestant ready to be timed. run: (q, k, v) -> out, differentiable; around: a context to enter before"""

    run: Attention
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    prepared_bytes: int = 0
    served_by: str = ""


@dataclass(frozen=True)
class Contestant:
    """A contestant. prepare: raises NotSupported to decline; ours: whether its wrong answers count in the exit code"""

    name: str
    prepare: Callable[[Workload, Call], Prepared]
    ours: bool = False


# ---- flash-attn's interface: ours and the official package -----------------------------------------------------------


def flash_attn_call(namespace: Any, call: Call) -> Callable[..., Any]:
    """Return the function of ``call`` in ``namespace``, with all arguments filled in except q, k and v."""
    others = {name: value for name, value in call.args.items() if name not in call.qkv_names}
    return functools.partial(getattr(namespace, call.fn), **others)


def ours(backend: str | None = None) -> Contestant:
    """Return this package as a contestant: with the backend that it chooses, or with ``backend``."""
    return Contestant(backend or "default", functools.partial(_ours, backend), ours=True)


def _ours(backend: str | None, workload: Workload, given: Call) -> Prepared:
    call = flash_attn_call(flash_attn_compat, given)
    around = functools.partial(impl.Backend(backend).serving, given) if backend else nullcontext
    with around(), torch.no_grad():
        call(*given.qkv)  # the first call compiles kernels and runs self-tests

    def served_by(gradients: bool) -> str:
        qkv = [tensor.detach().requires_grad_(gradients) for tensor in given.qkv]
        with around():
            return flash_attn_compat.explain(call, *qkv).backend or ""

    forward = served_by(False)
    both = forward if workload.decode else served_by(True)
    return Prepared(call, around, served_by=forward + f", {both} with gradients" * (both not in ("", forward)))


def official(workload: Workload, given: Call) -> Prepared:
    """Prepare the call for the real flash-attn, if it is installed and works."""
    package, word = impl.official()
    if package is None:
        raise NotSupported(f"flash_attn: {word}")
    if given.q.device.type != "cuda" or given.dtype.itemsize != 2:
        raise NotSupported("computes fp16 and bf16 on CUDA devices")
    return Prepared(flash_attn_call(package.target, given))


# ---- common code --------------------------------------------------------------------------------------------------


def _mask(workload: Workload, given: Call) -> tuple[Tensor | None, bool]:
    """Return attn_mask and is_causal for SDPA; no mask where right padding and is_causal are enough."""
    (left, right), device = workload.window, given.q.device
    right = 0 if workload.causal else right
    causal = right >= 0 and workload.max_seqlen_q > 1  # a single row is the last row, which sees every key
    key = torch.arange(workload.max_seqlen_k, device=device)
    if not workload.alibi and left < 0 and (workload.self_attention if causal else right < 0 or workload.decode):
        if causal or (workload.full and not workload.decode):
            return None, causal
        return (key < torch.tensor(workload.seqlens_k, device=device)[:, None])[:, None, None], False
    shape = 1 if workload.full else workload.batch, 1, workload.max_seqlen_q, workload.max_seqlen_k
    visible = torch.zeros(shape, dtype=torch.bool, device=device)
    for mine, sq, sk in zip(visible[:, 0], workload.seqlens_q, workload.seqlens_k):
        mine[:sq, :sk] = keys_visible(sq, sk, workload.causal, workload.window, device)
        # Let rows of padding see keys too: in some kernels a row without keys is NaN, and would spoil the gradients.
        mine[sq:, :sk] = True
    if not workload.alibi:
        return visible, False
    row = torch.arange(workload.max_seqlen_q, device=device)[:, None] + workload.max_seqlen_k
    bias = -given.args["alibi_slopes"][:, None, None] * (row - workload.max_seqlen_q - key).abs()
    return bias[None].masked_fill(~visible, -torch.inf).to(given.dtype), False


def _padded(workload: Workload, given: Call, attention: Callable[..., Tensor]) -> Prepared:
    """Prepare attention(q, k, v, mask, is_causal) on padded (batch, nheads, longest, head_dim), key heads repeated."""
    if workload.new_keys:
        raise NotSupported("reads a cache but appends nothing to it")
    mask, is_causal = _mask(workload, given)
    if is_causal and attention is not F.scaled_dot_product_attention:
        mask = torch.ones(workload.max_seqlen_q, workload.max_seqlen_k, dtype=torch.bool, device=given.q.device).tril()

    def places(lengths: tuple[int, ...]) -> Tensor:
        rows = [torch.arange(length) + index * max(lengths) for index, length in enumerate(lengths)]
        return torch.cat(rows).to(given.q.device)

    places_q, places_k = (places(lengths) for lengths in (workload.seqlens_q, workload.seqlens_k))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if workload.page_size:
            k, v = (pages[given.args["block_table"]].flatten(1, 2)[:, : workload.max_seqlen_k] for pages in (k, v))
        if workload.packed:
            q = pad_input(q, places_q, workload.batch, workload.max_seqlen_q)
            k, v = (pad_input(x, places_k, workload.batch, workload.max_seqlen_k) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if workload.group > 1:
            k, v = (x.repeat_interleave(workload.group, 1) for x in (k, v))
        out = attention(q, k, v, mask, workload.dropout_p, is_causal).transpose(1, 2)
        return index_first_axis(out.flatten(0, 1), places_q) if workload.packed else out

    return Prepared(run, prepared_bytes=0 if mask is None else mask.nbytes)


def textbook(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, softcap: float = 0.0
) -> Tensor:
    """Matmul, softmax, matmul on (batch, nheads, seqlen, head_dim). mask: visible keys (bool), or numbers to add"""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return (F.dropout(probabilities, dropout_p) if dropout_p else probabilities) @ v


def plain(workload: Workload, given: Call) -> Prepared:
    """Prepare the textbook formula on padded tensors, the only rival with a softcap."""
    return _padded(workload, given, lambda q, k, v, mask, p, _: textbook(q, k, v, mask, p, workload.softcap))


def pad_sdpa(workload: Workload, given: Call) -> Prepared:
    """Prepare padding, F.scaled_dot_product_attention and unpadding; on a GPU with kernels that Turing has too."""
    if workload.softcap:
        return plain(workload, given)
    of_turing = functools.partial(sdpa_kernel, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    around = of_turing if given.q.device.type == "cuda" else nullcontext
    return replace(_padded(workload, given, F.scaled_dot_product_attention), around=around)


def sdpa_loop(workload: Workload, given: Call) -> Prepared:
    """Prepare a loop over the sequences, each by F.scaled_dot_product_attention with the kernel that PyTorch picks."""
    if not workload.packed:
        raise NotSupported("on unpacked calls it is the same as pad_sdpa")
    if workload.softcap or workload.alibi or workload.window != (-1, -1):
        raise NotSupported("only for plain and causal masks")
    lengths = list(workload.seqlens_q)

    def one(*qkv: Tensor) -> Tensor:
        q, k, v = (tokens.transpose(0, 1)[None] for tokens in qkv)
        options: dict[str, Any] = {"dropout_p": workload.dropout_p, "is_causal": workload.causal}
        return F.scaled_dot_product_attention(q, k, v, **options)[0].transpose(0, 1)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([one(*part) for part in zip(*(x.split(lengths) for x in (q, k, v)))])

    return Prepared(run)


RIVALS = {rival.__name__: Contestant(rival.__name__, rival) for rival in (official, pad_sdpa, sdpa_loop, plain)}
# The yardsticks: flash-attn itself, and common code without it.
FLASH, WORKAROUNDS = ("official",), ("pad_sdpa", "sdpa_loop", "plain")
# The default rivals on each kind of device.
USUAL_RIVALS = {"cuda": (*FLASH, "pad_sdpa"), "cpu": WORKAROUNDS, "mps": WORKAROUNDS}
