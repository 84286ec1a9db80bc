"""Who is timed on a workload: the package's backends, what people write without it and flash-attn.

A contestant prepares what its users would prepare once (masks, indices), outside of the clock. The rivals are written
as they are found in the wild, and are given the benefit of the doubt: no mask where none is needed, masks for free.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from verify import implementations as impl
from verify.workloads import Inputs, Workload

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


class Contestant(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def ours(self) -> bool:
        """Whether it is this package, which must be right, or somebody to compare with."""

    def prepare(self, workload: Workload, inputs: Inputs) -> Prepared:
        """Raises Unavailable."""


# ---- flash-attn's interface: ours and the official package -----------------------------------------------------------


def flash_attn_call(namespace: Any, workload: Workload, inputs: Inputs) -> Callable[..., Any]:
    """(q, k, v) -> out by the public function that fits the workload."""
    options: dict[str, Any] = {
        "causal": workload.causal,
        "window_size": workload.window_size,
        "softcap": workload.softcap,
        "alibi_slopes": inputs.alibi_slopes,
    }
    if workload.decode:
        cached = namespace.flash_attn_with_kvcache
        options |= {
            "cache_seqlens": inputs.cache_seqlens, "block_table": inputs.block_table,
            "k": inputs.k_new, "v": inputs.v_new,
            "rotary_cos": inputs.rotary_cos, "rotary_sin": inputs.rotary_sin,
        }  # fmt: skip
        return lambda q, k, v: cached(q, k, v, **options)
    options["dropout_p"] = workload.dropout_p
    if not workload.packed:
        dense = namespace.flash_attn_func
        return lambda q, k, v: dense(q, k, v, **options)
    varlen = namespace.flash_attn_varlen_func
    packing = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, workload.max_seqlen_q, workload.max_seqlen_k)
    return lambda q, k, v: varlen(q, k, v, *packing, **options)


@dataclass(frozen=True)
class Ours:
    """The package: the backend it chooses, or the named one."""

    backend: str | None = None
    ours = True

    @property
    def name(self) -> str:
        return self.backend or "default"

    def prepare(self, workload: Workload, inputs: Inputs) -> Prepared:
        import flash_attn_compat

        call = flash_attn_call(flash_attn_compat, workload, inputs)
        around = functools.partial(flash_attn_compat.use_backend, self.backend) if self.backend else nullcontext
        forward = self._explained(call, inputs.qkv)
        if forward.backend is not None and self.backend is None:
            # Where compilation is on, the package times what may be faster at the first call.
            with torch.no_grad():
                call(*inputs.qkv)
            forward = self._explained(call, inputs.qkv)
        if forward.backend is None:
            raise Unavailable("; ".join(forward.reasons[self.backend]) if self.backend else str(forward))
        no_backward, served_by = "", forward.backend
        if not workload.decode:
            # With gradients wanted, dispatch may choose another one.
            both = self._explained(call, [tensor.detach().requires_grad_() for tensor in inputs.qkv])
            if both.backend is None:
                no_backward = "; ".join(both.reasons[self.backend]) if self.backend else "no backend serves it"
            elif both.backend != forward.backend:
                served_by = f"{forward.backend}, {both.backend} with gradients"
        return Prepared(
            run=call,
            around=around,
            served_by=served_by,
            no_backward=no_backward,
        )

    def _explained(self, call: Callable[..., Any], qkv: Sequence[Tensor]) -> Any:
        import flash_attn_compat

        with flash_attn_compat.use_backend(self.backend) if self.backend else nullcontext():
            return flash_attn_compat.explain(call, *qkv)


@contextmanager
def _official_not_disabled() -> Iterator[None]:
    """The switch keeps the package from using flash-attn; a comparison with flash-attn still wants it."""
    value = os.environ.pop("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL", None)
    try:
        yield
    finally:
        if value is not None:
            os.environ["FLASH_ATTN_COMPAT_DISABLE_OFFICIAL"] = value


class Official:
    """The real flash-attn, if it is here and runs."""

    name = "official"
    ours = False

    def __init__(self) -> None:
        with _official_not_disabled():
            self._package, self.version = impl.official()

    def prepare(self, workload: Workload, inputs: Inputs) -> Prepared:
        if self._package is None:
            raise Unavailable(f"flash_attn: {self.version}")
        if inputs.device.type != "cuda" or inputs.q.dtype.itemsize != 2:
            raise Unavailable("computes fp16 and bf16 on CUDA devices")
        namespace = self._package.target
        return Prepared(
            run=flash_attn_call(namespace, workload, inputs),
        )


# ---- PyTorch's build of FlashAttention-2 -----------------------------------------------------------------------------


def _no_append(workload: Workload) -> None:
    if workload.appends:
        raise Unavailable("reads a cache but appends nothing to it")


class AtenFlash:
    """torch.ops.aten._flash_attention_forward, PyTorch's own build of FlashAttention-2."""

    name = "aten_flash"
    ours = False

    def prepare(self, workload: Workload, inputs: Inputs) -> Prepared:
        if inputs.device.type != "cuda":
            raise Unavailable("a CUDA kernel")
        if torch.cuda.get_device_capability(inputs.device) < (8, 0) or inputs.q.dtype.itemsize != 2:
            raise Unavailable("computes fp16 and bf16 on GPUs of compute capability 8.0 and newer")
        if workload.softcap:
            raise Unavailable("no softcap")
        if workload.page_size:
            raise Unavailable("no pages")
        _no_append(workload)
        operator = torch.ops.aten._flash_attention_forward
        lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k) if workload.packed else (None, None)
        left, right = workload.bounds
        options: dict[str, Any] = {}
        if workload.window_size != (-1, -1):
            options = {"window_size_left": left, "window_size_right": right}
        if inputs.alibi_slopes is not None:
            options["alibi_slopes"] = inputs.alibi_slopes

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = operator(
                q, k, v, *lengths, workload.max_seqlen_q, workload.max_seqlen_k, workload.dropout_p, workload.causal,
                False, **options,
            )[0]  # fmt: skip
            return out

        return Prepared(run, no_backward="the backward operator takes no alibi_slopes" if workload.alibi else "")


# ---- what people write -----------------------------------------------------------------------------------------------


class _Padding:
    """Packed tokens to (batch, longest, ...) and back; dense tensors as they are."""

    def __init__(self, lengths: tuple[int, ...], packed: bool, device: torch.device) -> None:
        self.batch, self.longest, self.packed = len(lengths), max(lengths), packed
        rows = [torch.arange(length) + index * self.longest for index, length in enumerate(lengths)]
        self.places = torch.cat(rows).to(device) if packed else None

    def pad(self, tokens: Tensor) -> Tensor:
        if self.places is None:
            return tokens
        padded = tokens.new_zeros(self.batch * self.longest, *tokens.shape[1:])
        return padded.index_put((self.places,), tokens).view(self.batch, self.longest, *tokens.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        return padded if self.places is None else padded.flatten(0, 1).index_select(0, self.places)


def _visible(workload: Workload, device: torch.device) -> Tensor:
    """(batch or 1, 1, seqlen_q, seqlen_k) bool. Rows of padding see their keys as well: a row that sees none is NaN in
    some kernels, and NaN in padding reaches the gradients.
    """
    one = workload.full
    lengths_q = torch.tensor(workload.seqlens_q[:1] if one else workload.seqlens_q, device=device)[:, None, None]
    lengths_k = torch.tensor(workload.seqlens_k[:1] if one else workload.seqlens_k, device=device)[:, None, None]
    row = torch.arange(workload.max_seqlen_q, device=device)[None, :, None]
    key = torch.arange(workload.max_seqlen_k, device=device)[None, None, :]
    left, right = workload.bounds
    position = row + lengths_k - lengths_q
    visible = (key < lengths_k).expand(-1, workload.max_seqlen_q, -1)
    if left >= 0:
        visible = visible & (key >= position - left)
    if right >= 0:
        visible = visible & (key <= position + right)
    return (visible | (row >= lengths_q))[:, None]


def _mask(workload: Workload, inputs: Inputs) -> tuple[Tensor | None, bool]:
    """attn_mask and is_causal for SDPA; no mask where right padding and is_causal do without."""
    windowed = workload.window_size != (-1, -1)
    if inputs.cache_seqlens is not None:
        key = torch.arange(workload.max_seqlen_k, device=inputs.device)
        return (key < inputs.cache_seqlens[:, None])[:, None, None], False
    if not windowed and not workload.alibi:
        if workload.causal and workload.self_attention:
            return None, True
        if not workload.causal:
            if workload.full:
                return None, False
            lengths = torch.tensor(workload.seqlens_k, device=inputs.device)
            return (torch.arange(workload.max_seqlen_k, device=inputs.device) < lengths[:, None])[:, None, None], False
    visible = _visible(workload, inputs.device)
    if inputs.alibi_slopes is None:
        return visible, False
    row = torch.arange(workload.max_seqlen_q, device=inputs.device)[:, None] + workload.max_seqlen_k
    key = torch.arange(workload.max_seqlen_k, device=inputs.device)[None, :] + workload.max_seqlen_q
    bias = -inputs.alibi_slopes[:, None, None] * (row - key).abs()
    return bias[None].masked_fill(~visible, -torch.inf).to(inputs.q.dtype), False


def _heads_first(workload: Workload, inputs: Inputs) -> tuple[Callable[..., tuple[Tensor, ...]], _Padding]:
    """(q, k, v) -> padded (batch, nheads, seqlen, head_dim) with the key heads repeated."""
    rows = _Padding(workload.seqlens_q, workload.packed, inputs.device)
    keys = _Padding(workload.seqlens_k, workload.packed, inputs.device)
    group = workload.nheads // workload.nheads_k

    def spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if workload.page_size:
            k, v = (pages[inputs.block_table].flatten(1, 2)[:, : workload.max_seqlen_k] for pages in (k, v))
        q, k, v = rows.pad(q).transpose(1, 2), keys.pad(k).transpose(1, 2), keys.pad(v).transpose(1, 2)
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return q, k, v

    return spread, rows


def _bytes(mask: Tensor | None) -> int:
    return 0 if mask is None else mask.numel() * mask.element_size()


class Plain:
    """Matmul, softmax, matmul, on padded tensors: the textbook formula, and the only way to a softcap."""

    name = "plain"
    ours = False

    def prepare(self, workload: Workload, inputs: Inputs) -> Prepared:
        _no_append(workload)
        spread, rows = _heads_first(workload, inputs)
        mask, is_causal = _mask(workload, inputs)
        if is_causal:
            longest = workload.max_seqlen_q
            mask = torch.ones(longest, longest, dtype=torch.bool, device=inputs.device).tril()
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

        return Prepared(run, prepared_bytes=_bytes(mask))


class PadSdpa:
    """Pad, F.scaled_dot_product_attention, unpad; on a GPU with the kernels that Turing has and no others."""

    name = "pad_sdpa"
    ours = False

    def prepare(self, workload: Workload, inputs: Inputs) -> Prepared:
        if workload.softcap:
            return Plain().prepare(workload, inputs)
        _no_append(workload)
        spread, rows = _heads_first(workload, inputs)
        mask, is_causal = _mask(workload, inputs)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = spread(q, k, v)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=workload.dropout_p, is_causal=is_causal
            )
            return rows.unpad(out.transpose(1, 2))

        return Prepared(run, around=_turing_kernels(inputs), prepared_bytes=_bytes(mask))


def _turing_kernels(inputs: Inputs) -> Callable[[], AbstractContextManager[object]]:
    if inputs.device.type != "cuda":
        return nullcontext
    return lambda: sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class SdpaLoop:
    """F.scaled_dot_product_attention for one sequence after the other, with whatever kernel PyTorch picks."""

    name = "sdpa_loop"
    ours = False

    def prepare(self, workload: Workload, inputs: Inputs) -> Prepared:
        if not workload.packed:
            raise Unavailable("pad_sdpa is the same where nothing is packed")
        if workload.softcap or workload.alibi or workload.window_size != (-1, -1):
            raise Unavailable("only for plain and causal masks")
        if workload.causal and not workload.self_attention:
            raise Unavailable("is_causal aligns at the top left")
        group = workload.nheads // workload.nheads_k
        lengths_q, lengths_k = list(workload.seqlens_q), list(workload.seqlens_k)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
            return torch.cat([one(*part) for part in parts])

        def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (tokens.transpose(0, 1)[None] for tokens in (q, k, v))
            if group > 1:
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=workload.dropout_p, is_causal=workload.causal)
            return out[0].transpose(0, 1)

        return Prepared(run)


RIVALS: dict[str, Callable[[], Contestant]] = {
    rival.name: rival for rival in (Official, AtenFlash, PadSdpa, SdpaLoop, Plain)
}
# The ones worth their time on each kind of device, unless asked for by name.
USUAL_RIVALS = {
    "cuda": ("official", "aten_flash", "pad_sdpa"),
    "cpu": ("pad_sdpa", "sdpa_loop", "plain"),
    "mps": ("pad_sdpa", "sdpa_loop", "plain"),
}
