"""PyTorch's FlexAttention, compiled: softcap, windows, ALiBi and packed sequences in one fused kernel.

Used only where compilation is switched on. What a row sees is in flex_mask.py. FlexAttention's backward
starts from its own forward, so ours runs that again. A kernel that cannot be compiled or run is tried
once: its calls, the first included, go to the next backend.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends import flex_mask
from flash_attn_compat.backends.base import Backend, Capabilities, deliver
from flash_attn_compat.backends.flex_mask import Geometry
from flash_attn_compat.engine import alibi, outside
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.engine.features import Feature, Traits

_LACKS = (
    Feature.DROPOUT
    | Feature.SHARED_DROPOUT_MASK
    | Feature.SEQUSED_K
    | Feature.LEFTPAD_K
    | Feature.PAGED
    | Feature.GIVEN_LSE
    | Feature.TRANSFORMS
)


class Flex(Backend):
    name = "flex"
    compiles = True
    capabilities = Capabilities(
        features=~_LACKS,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        min_capability=(7, 0),
        max_head_dim=256,
    )

    def __init__(self) -> None:
        self._failures: dict[Traits, str] = {}

    def unavailable_reasons(self) -> list[str]:
        if not settings.compilation_enabled():
            return [f"compilation is not switched on ({settings.COMPILE}=1)"]
        return _missing() if torch.version.hip is None else ["untested on ROCm"]

    def extra_reasons(self, traits: Traits) -> list[str]:
        reasons = []
        if traits.capability is not None and traits.capability < (8, 0):
            if traits.dtype == torch.bfloat16:
                reasons.append("Triton compiles bfloat16 products from compute capability 8.0 on")
            if max(traits.head_dim, traits.head_dim_v) > 128:
                reasons.append("head_dim is at most 128 below compute capability 8.0")
        if traits in self._failures:
            reasons.append(f"failed before: {self._failures[traits]}")
        return reasons

    def forward(self, call: AttentionCall) -> Result:
        from flash_attn_compat.engine import dispatch

        found = self.attempt(call)
        return dispatch.serve_instead(self, call).forward(call) if found is None else found

    def attempt(self, call: AttentionCall) -> Result | None:
        try:
            with torch.no_grad():
                return _forward(call)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  whatever the compiler stack raises, others compute it too
            self._remember(call, error)
            return None

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        from flash_attn_compat.engine import dispatch

        if call.traits() not in self._failures:
            try:
                return deliver(Gradients(*_backward(call, upstream.dout)), call, into)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001  as in attempt
                self._remember(call, error)
                dispatch.forget_decisions()
        # Another backend's forward may have kept what only its own backward can read.
        is_its_own = bool(upstream.saved) or upstream.softmax_lse is None
        call = call if is_its_own else call._replace(given_lse=True)
        return dispatch.choose(call).backward(call, upstream, into)

    def _remember(self, call: AttentionCall, error: Exception) -> None:
        line = (str(error).strip().splitlines() or [""])[0]
        self._failures[call.traits()] = reason = f"{type(error).__name__}: {line[:200]}"
        warnings.warn(
            f"compiled FlexAttention failed and is not tried again for such calls ({reason})",
            RuntimeWarning,
            stacklevel=2,
        )


class _Inputs(NamedTuple):
    """q, k, v as FlexAttention has them, (batch, heads, seqlen, head_dim a power of two)."""

    q: Tensor
    k: Tensor
    v: Tensor


def _forward(call: AttentionCall) -> Result:
    geometry = flex_mask.geometry(call)
    out, lse = _attend(call, geometry, _Inputs(*(tensor.detach() for tensor in _inputs(call))))
    out = out.transpose(1, 2)[..., : call.head_dim_v]
    seqlen_q = call.q.shape[1]
    if not call.is_dense or call.mask.rows_with_keys(seqlen_q, call.k.shape[1]).size < seqlen_q:
        dead = geometry.sees_nothing
        # In place: a copy would be the largest thing beside the inputs.
        out.masked_fill_(dead[:, None, None], 0)
        lse.masked_fill_(dead, torch.inf)
    out = out.contiguous()
    if call.cu_seqlens_q is not None:
        out, lse = out.squeeze(0), lse.squeeze(0)
    if call.lse_carries_alibi_position:
        assert call.alibi_slopes is not None
        lse = lse + _alibi_shift(call, call.alibi_slopes, geometry)
    return Result(out, lse)


def _backward(call: AttentionCall, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    geometry = flex_mask.geometry(call)
    dout = _by_head(dout).masked_fill(geometry.sees_nothing[:, None], 0)
    with torch.enable_grad():
        leaves = _Inputs(*(tensor.detach().requires_grad_() for tensor in _inputs(call)))
        out, _ = _attend(call, geometry, leaves)
        gradients = torch.autograd.grad(out, leaves, F.pad(dout, (0, out.shape[-1] - dout.shape[-1])))
    sources = (call.q, call.k, call.v)
    by_token = (gradient.transpose(1, 2)[..., : source.shape[-1]] for gradient, source in zip(gradients, sources))
    dq, dk, dv = (gradient.reshape(source.shape) for gradient, source in zip(by_token, sources))
    return dq, dk, dv


def _attend(call: AttentionCall, geometry: Geometry, inputs: _Inputs) -> tuple[Tensor, Tensor]:
    """(batch, heads, rows, head_dim) and the natural LSE (batch, heads, rows)."""
    needs_grad = inputs.q.requires_grad
    kind = (inputs.q.dtype, inputs.q.shape[-1], inputs.v.shape[-1], call.nheads, call.nheads_k, needs_grad)
    mods = (bool(call.softcap), call.alibi_slopes is not None, geometry.sequence is not None)
    with torch.autocast(inputs.q.device.type, enabled=False):
        return _compiled(kind, mods)(
            *inputs,
            _score_mod(call, geometry),
            geometry.block_mask,
            call.softmax_scale,
            call.nheads != call.nheads_k,
            _kernel_options(inputs),
        )


@functools.lru_cache(maxsize=64)
def _compiled(*kind: object) -> Callable[..., tuple[Tensor, Tensor]]:
    """FlexAttention compiled for one kind of call: Dynamo counts recompilations per code object, so each has one."""
    from torch.nn.attention import flex_attention

    source = _with_aux if hasattr(flex_attention, "AuxRequest") else _with_lse
    return torch.compile(types.FunctionType(source.__code__.replace(), source.__globals__), fullgraph=True)


def _with_aux(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float, enable_gqa: bool, options: Any
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    found: Any = flex_attention(
        q, k, v, score_mod, block_mask, scale, enable_gqa, kernel_options=options, return_aux=AuxRequest(lse=True)
    )
    out, aux = found
    return out, aux.lse


def _with_lse(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float, enable_gqa: bool, options: Any
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    found: Any = flex_attention(
        q, k, v, score_mod, block_mask, scale, enable_gqa, kernel_options=options, return_lse=True
    )
    out, lse = found
    return out, lse


def _score_mod(call: AttentionCall, geometry: Geometry) -> Callable[..., Tensor] | None:
    """softcap, then ALiBi, of a score that is already scaled."""
    capped = _capped(call.softcap, call.q.device) if call.softcap else None
    if call.alibi_slopes is None:
        return capped
    slopes = alibi.per_sequence(call.alibi_slopes.detach(), call.batch).contiguous()
    place, sequence = geometry.place, geometry.sequence

    def biased(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        if capped is not None:
            score = capped(score, batch, head, row, key)
        slope = slopes[batch, head] if sequence is None else slopes[sequence[row], head]
        return score - slope * (place[row] - key).abs()

    return biased


@functools.lru_cache(maxsize=16)
def _capped(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    # A tensor, since a second value of a Python number would be compiled as a symbol, which FlexAttention fails on.
    with torch.inference_mode(False):
        limit = torch.full((), softcap, dtype=torch.float32, device=device)

    def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return capped


def _kernel_options(inputs: _Inputs) -> dict[str, int]:
    """Nothing where PyTorch's own choices fit; tiles for 64 KB of shared memory below compute capability 8.0."""
    if settings.capability(inputs.q.device) >= (8, 0):
        return {}
    row_bytes = max(inputs.q.shape[-1], inputs.v.shape[-1]) * inputs.q.element_size()
    tile = 64 if row_bytes <= 256 else 32
    backward = 32 if row_bytes <= 256 else 16
    return {
        "BLOCK_M": tile, "BLOCK_N": tile, "num_stages": 1, "num_warps": 4,
        "BLOCK_M1": backward, "BLOCK_N1": backward, "BLOCK_M2": backward, "BLOCK_N2": backward,
    }  # fmt: skip


def _inputs(call: AttentionCall) -> _Inputs:
    size, size_v = (max(16, 1 << (size - 1).bit_length()) for size in (call.q.shape[-1], call.head_dim_v))
    q, k, v = call.q, call.k, call.v
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        # Blocks that reach over a sequence's end multiply what lies there by 0, which NaN would survive.
        q = outside.cleared(q, call.cu_seqlens_q)
        k, v = outside.cleared(k, call.cu_seqlens_k), outside.cleared(v, call.cu_seqlens_k)
    padded = map(_padded, (q, k, v), (size, size, size_v))
    return _Inputs(*map(_by_head, padded))


def _padded(tensor: Tensor, size: int) -> Tensor:
    missing = size - tensor.shape[-1]
    if missing:
        return F.pad(tensor, (0, missing))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _by_head(tensor: Tensor) -> Tensor:
    """(batch, seqlen, heads, d) or (total, heads, d) as (batch, heads, seqlen, d)."""
    return (tensor if tensor.dim() == 4 else tensor.unsqueeze(0)).transpose(1, 2)


def _alibi_shift(call: AttentionCall, slopes: Tensor, geometry: Geometry) -> Tensor:
    """slope * position, which flash-attn's LSE carries: (batch, heads, seqlen_q), packed (heads, total_q)."""
    slopes = alibi.per_sequence(slopes, call.batch)
    if geometry.sequence is None or call.cu_seqlens_k is None:
        return slopes[:, :, None] * geometry.place
    position = geometry.place - call.cu_seqlens_k[geometry.sequence]
    return (slopes[geometry.sequence] * position[:, None]).t()


@functools.cache
def _missing() -> list[str]:
    reasons = [] if importlib.util.find_spec("triton") is not None else ["Triton is not installed"]
    try:
        from torch.nn.attention.flex_attention import BlockMask
    except ImportError:
        return [*reasons, "this PyTorch has no FlexAttention"]
    if "seq_lengths" not in inspect.signature(BlockMask.from_kv_blocks).parameters:
        reasons.append("this PyTorch's FlexAttention is too old")
    return reasons
