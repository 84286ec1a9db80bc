"""PyTorch's fused scaled_dot_product_attention on blocks with little or no padding.

PyTorch's causal mask is aligned at the top left. Other masks, windows, ALiBi and padding become an additive bias, a
few rows at a time. If a causal call has many more keys than rows, the keys that every row sees get a kernel call of
their own. On a CPU this backend calls the fused kernel below PyTorch's autograd, because that kernel returns the LSE
for the backward. On other devices it calls the public function, and for gradients differentiates a second call of it.

On AMD's GPUs it serves only full and causal calls, in the memory layout of its smoke test and after that has passed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.backends import alibi, smoke_test
from flash_attn_compat.backends.base import BlockwiseBackend, Capabilities, argument_names, aten_operator
from flash_attn_compat.backends.varlen import Block, ByDistance
from flash_attn_compat.core import cuda_capture, kernel_layout
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, Result, lse_dtype
from flash_attn_compat.core.eight_bit import is_eight_bit
from flash_attn_compat.core.features import Feature, Traits, all_but, split
from flash_attn_compat.core.mask import Mask, Range

_UNSUPPORTED = (
    Feature.SOFTCAP | Feature.DROPOUT | Feature.SHARED_DROPOUT_MASK | Feature.VALUE_HEAD_DIM | Feature.TRANSFORMS
    | Feature.LSE_GRADIENT | Feature.BIAS
)  # fmt: skip
# On AMD's GPUs a smoke test goes first, with these features, causal and full. Its lengths (rows, keys) exceed one tile,
# and no tile divides the 217 keys.
_SMOKE_TESTED = Feature.CAUSAL | Feature.GQA | Feature.BACKWARD
_CAUSAL_LENGTHS, _FULL_LENGTHS = (150, 150), (150, 217)
# The most elements of one bias, which limits the memory of windowed and ALiBi calls at any length.
_BIAS_ELEMENTS = 2**21
_MIN_BIAS_ROWS = 32
# If the keys that every causal row sees have at least so many scores, two kernel calls are faster than a bias.
_MIN_SPLIT_SCORES = 2**18
# Under a mask, taller tiles would mostly add keys that most of their rows do not see.
_MAX_MASKED_ROWS = 256


class Sdpa(BlockwiseBackend):
    name = "sdpa"
    capabilities = Capabilities(features=all_but(_UNSUPPORTED), devices=frozenset({"cpu", "cuda", "mps", "xpu"}))

    def extra_reasons(self, traits: Traits) -> list[str]:
        if traits.device_type == "cuda":
            return _cuda_reasons(traits)
        reasons = []
        if traits.device_type != "cpu":
            if traits.features & Feature.LSE:
                reasons.append(f"scaled_dot_product_attention returns no softmax_lse on {traits.device_type}")
            if traits.features & Feature.GIVEN_LSE:
                reasons.append(f"its backward on {traits.device_type} recomputes softmax_lse, it can't be given one")
            if traits.needs_backward and traits.features & Feature.VARLEN and not _HANDLES_ROWS_WITHOUT_KEYS:
                reasons.append(f"before PyTorch 2.5, padding makes its gradients nan on {traits.device_type}")
        elif _FORWARD is None:
            reasons.append("this PyTorch has no fused attention kernel for the CPU with an attn_mask")
        elif _LOSES_NAN:
            reasons.append("PyTorch 2.5's kernel for the CPU returns 0 for rows whose scores are NaN")
        return reasons

    def late_reasons(self, traits: Traits) -> list[str]:
        if traits.device_type != "cuda":
            return []
        if cuda_capture.is_capturing(cuda_capture.current_device() or 0):
            return ["cannot run its smoke test while a graph is captured"]
        if not _has_fused_kernel(traits):
            return ["PyTorch has no fused kernel for this here; its plain formula keeps the whole score matrix"]
        lengths = _CAUSAL_LENGTHS if traits.features & Feature.CAUSAL else _FULL_LENGTHS
        reason = smoke_test.decline_reason(self, torch.__version__, traits, lengths)
        return [reason] if reason else []

    def forward(self, call: AttentionCall) -> Result:
        may_be_causal = _can_use_kernel_mask(call) and call.q.shape[1] == call.k.shape[1]
        is_plain = call.is_dense and call.alibi_slopes is None and not is_eight_bit(call.k)
        if is_plain and (call.mask.is_full or may_be_causal):
            # A fast path for the common case, since cutting blocks and tiles would slow down a small call.
            q, k, v = _heads_first(call.q), _heads_first(call.k), _heads_first(call.v)
            out, lse = _attend(q, k, v, call.mask.right == 0, None, call.softmax_scale)
            return Result(out.transpose(1, 2), lse)
        return super().forward(call)

    def forward_block(
        self, call: AttentionCall, block: Block, rng_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = _heads_first(block.q), _heads_first(block.k), _heads_first(block.v)
        tiles = list(_cut_tiles(call, block))
        bias_of = _bias_factory(call.mask, block)
        if _is_single_tile(tiles, q, k):
            out, lse = _attend(q, k, v, tiles[0].causal, bias_of(tiles[0]), call.softmax_scale)
            return out.transpose(1, 2), lse
        # Rows that see no key are in no tile: their out is 0 and their LSE +inf.
        out = block.q.new_zeros(block.q.shape)
        lse = q.new_full(q.shape[:3], torch.inf, dtype=lse_dtype(q.dtype))
        for tile in tiles:
            rows, keys = slice(*tile.rows), slice(*tile.keys)
            tile_q, tile_k, tile_v = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            tile_out, tile_lse = _attend(tile_q, tile_k, tile_v, tile.causal, bias_of(tile), call.softmax_scale)
            out[:, rows] = tile_out.transpose(1, 2)
            if tile_lse is not None:
                lse[:, :, rows] = tile_lse
        return out, lse if q.is_cpu else None

    def backward_block(
        self, call: AttentionCall, block: Block, upstream: BackwardInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = _backward_dtype(block.q)
        q, k, v, out, dout = (
            _heads_first(tensor).to(dtype) for tensor in (block.q, block.k, block.v, upstream.out, upstream.dout)
        )
        tiles = list(_cut_tiles(call, block))
        bias_of = _bias_factory(call.mask, block)
        if _is_single_tile(tiles, q, k):
            upstream = BackwardInputs(dout, out, upstream.softmax_lse, None)
            dq, dk, dv = _compute_gradients(q, k, v, upstream, tiles[0].causal, bias_of(tiles[0]), call.softmax_scale)
            return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
        totals = [torch.zeros(t.shape, dtype=lse_dtype(dtype), device=t.device) for t in (q, k, v)]
        for tile in tiles:
            rows, keys = slice(*tile.rows), slice(*tile.keys)
            lse = None if upstream.softmax_lse is None else upstream.softmax_lse[:, :, rows]
            part = BackwardInputs(dout[:, :, rows], out[:, :, rows], lse, None)
            tile_q, tile_k, tile_v = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            terms = _compute_gradients(tile_q, tile_k, tile_v, part, tile.causal, bias_of(tile), call.softmax_scale)
            for total, where, gradient in zip(totals, (rows, keys, keys), terms):
                total[:, :, where] += gradient
        dq, dk, dv = (total.transpose(1, 2) for total in totals)
        return dq, dk, dv


def _cuda_reasons(traits: Traits) -> list[str]:
    """Return the reasons to decline calls on devices that PyTorch calls cuda, without a smoke test."""
    if torch.version.hip is None:
        # On NVIDIA GPUs other backends call the same kernels, with layouts that suit them: some strides crash them.
        return ["serves only AMD GPUs among PyTorch's cuda devices"]
    untried = traits.features & ~int(_UNSUPPORTED | _SMOKE_TESTED)
    reasons = [f"on AMD GPUs, does not support {feature.description}" for feature in split(untried)]
    if traits.features & Feature.CAUSAL and traits.sq_vs_sk != "=":
        reasons.append("on AMD GPUs, serves causal masking only of as many queries as keys")
    if traits.head_dim % 8 or traits.head_dim > 256:
        reasons.append("on AMD GPUs, serves head dims that are multiples of 8 up to 256 only")
    return reasons


def _has_fused_kernel(traits: Traits) -> bool:
    """Whether PyTorch reports a kernel for calls with these traits that does not store the whole score matrix."""
    cuda: Any = torch.backends.cuda  # PyTorch's stubs have only one of two signatures
    q = torch.empty(
        1, 1, 8, traits.head_dim, dtype=traits.dtype, device=smoke_test.find_device(traits.capability),
        requires_grad=traits.needs_backward,
    )  # fmt: skip
    arguments = [q, q, q, None, 0.0, bool(traits.features & Feature.CAUSAL)]
    try:
        params = cuda.SDPAParams(*arguments, False)
    except TypeError:  # PyTorch 2.4 has no argument for grouped heads
        params = cuda.SDPAParams(*arguments)
    return bool(cuda.can_use_flash_attention(params) or cuda.can_use_efficient_attention(params))


class _Tile(NamedTuple):
    """Rows and keys of one kernel call.

    causal: whether the kernel's own causal mask, aligned at the top left, replaces a bias
    """

    rows: Range
    keys: Range
    causal: bool = False


def _bias_factory(mask: Mask, block: Block) -> Callable[[_Tile], Tensor | None]:
    """Return a function from a tile to its bias, broadcastable to (n, nheads, rows, keys), or None for no bias."""
    make: Callable[[Range, Range], Tensor | None] = functools.partial(_make_bias, mask, block)
    if block.first_key is None:
        make = ByDistance(make, most=1)
    return lambda tile: None if tile.causal else make(tile.rows, tile.keys)


def _can_use_kernel_mask(call: AttentionCall) -> bool:
    """Whether the kernel's own causal mask may be used. Not with a scale <= 0: the kernel multiplies its -inf by it."""
    return call.mask.is_causal and call.softmax_scale > 0


def _is_single_tile(tiles: list[_Tile], q: Tensor, k: Tensor) -> bool:
    """Whether there is one tile, with all rows and all keys."""
    return len(tiles) == 1 and (tiles[0].rows.size, tiles[0].keys.size) == (q.shape[2], k.shape[2])


def _cut_tiles(call: AttentionCall, block: Block) -> Iterator[_Tile]:
    """Cut a block so that every visible (row, key) pair lies in exactly one tile."""
    mask, seqlen_q, seqlen_k = call.mask, block.q.shape[1], block.k.shape[1]
    rows = mask.rows_with_keys(seqlen_q, seqlen_k)
    keys = mask.visible_keys(rows, block.offset, seqlen_k)
    plain = block.slopes is None and block.first_key is None
    if plain and mask.covers(rows, keys, block.offset):
        yield _Tile(rows, keys)
    elif plain and _can_use_kernel_mask(call) and (block.offset <= 0 or _pays_to_split(block)):
        yield _Tile(rows, keys, causal=True)
    else:
        yield from _cut_biased_tiles(call, block, rows)


def _pays_to_split(block: Block) -> bool:
    """Whether all causal rows see so many keys that two kernel calls, merged by their LSE (on a CPU), are faster."""
    return block.q.is_cpu and block.q.shape[1] * block.offset >= _MIN_SPLIT_SCORES


def _cut_biased_tiles(call: AttentionCall, block: Block, alive: Range) -> Iterator[_Tile]:
    """Cut the rows ``alive``, which see keys, into tiles with their visible keys, as tall as a bias may be."""
    left, right = call.mask.left, call.mask.right
    seqlen_k = block.k.shape[1]
    width = seqlen_k if left is None or right is None else min(seqlen_k, left + right + 1)
    copies = 1 if block.slopes is None else _drop_shared_batch(block.slopes).numel()
    if block.first_key is not None:
        copies *= block.q.shape[0]
    most = seqlen_k if call.mask.is_full else _MAX_MASKED_ROWS
    size = max(_MIN_BIAS_ROWS, min(max(width, 128), most, _BIAS_ELEMENTS // (copies * (width + 128))))
    for start in range(alive.start, alive.stop, size):
        rows = Range(start, min(start + size, alive.stop))
        yield _Tile(rows, call.mask.visible_keys(rows, block.offset, seqlen_k))


def _make_bias(mask: Mask, block: Block, rows: Range, keys: Range) -> Tensor | None:
    """Return the bias of a tile's scores: ALiBi, and -inf for hidden keys and padding; None if all would be 0."""
    hidden = mask.hidden(rows, keys, block.offset, block.q.device)
    if block.slopes is None and hidden is None and block.first_key is None:
        return None
    bias = torch.zeros(1, 1, rows.size, keys.size, dtype=lse_dtype(block.q.dtype), device=block.q.device)
    if hidden is not None:
        bias = bias.masked_fill_(hidden, -torch.inf)
    if block.slopes is not None:
        bias = alibi.add_bias(bias, _drop_shared_batch(block.slopes), rows, keys, block.offset)
    padding = block.padding(keys)
    return bias if padding is None else bias.masked_fill(padding, -torch.inf)


def _drop_shared_batch(slopes: Tensor) -> Tensor:
    """Return slopes (batch, nheads) as (1, nheads) if all sequences share them, so that they also share a bias."""
    return slopes[:1] if slopes.stride(0) == 0 else slopes


def _heads_first(tensor: Tensor) -> Tensor:
    """Return (n, seqlen, heads, head_dim) as (n, heads, seqlen, head_dim), copied if the kernel cannot read its layout.

    On AMD's GPUs the result has the memory layout of the smoke test.
    """
    if tensor.is_cuda:
        return kernel_layout.ready(tensor.contiguous()).transpose(1, 2)
    return (tensor if _is_readable(tensor) else tensor.contiguous()).transpose(1, 2)


def _is_readable(tensor: Tensor) -> bool:
    """Whether the kernel reads (n, seqlen, heads, head_dim) correctly: contiguous channels, and rows without overlap.

    The kernel for CPUs orders the axes of ``out`` by the strides of q. If another axis steps by 1 too, the channels of
    ``out`` may lie apart, and the kernel writes elsewhere (PyTorch 2.13). Its matrix products need rows that lie at
    least head_dim apart. Axes of one element have any stride; sequences and heads may be broadcast.
    """
    if tensor.is_contiguous():
        return True
    (n, seqlen, nheads, head_dim), (batch, row, head, channel) = tensor.shape, tensor.stride()
    return (
        channel == 1
        and (row >= head_dim or seqlen == 1)
        and (head >= head_dim or head == 0 or nheads == 1)
        and (batch >= head_dim or batch == 0 or n == 1)
    )


def _forward_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of a forward: fp32 for fp16 on a CPU without fp16 hardware, which took at most half the time."""
    if q.dtype == torch.float16 and q.is_cpu and (not _KEEPS_SCORES or torch.float16 in _slow_matmul_dtypes()):
        return torch.float32
    return q.dtype


def _backward_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of a backward: fp32 for 16 bits on a CPU without hardware for these, ten times as slow."""
    return torch.float32 if q.is_cpu and q.dtype in _slow_matmul_dtypes() else _forward_dtype(q)


def _find_masked_operator(name: str) -> Any:
    """Return PyTorch's private operator ``name`` if this build has it with an attn_mask argument, else None.

    Prefers the binding in torch: a call through torch.ops costs 4 microseconds more.
    """
    operator = aten_operator(name)
    return getattr(torch, name, operator) if "attn_mask" in argument_names(operator) else None


# Defects of PyTorch's kernels by version. (torch.__version__ compares as a version, not as a string.)
# In PyTorch 2.4 the kernel reads beyond the key heads if they are fewer than the query heads; 2.11 is right.
_SHARES_KEY_HEADS = torch.__version__ >= "2.11"
# In PyTorch 2.4 the kernel rounds unscaled scores of fp16 inputs to fp16: its LSE is off by 1e-2 where scores reach 40,
# and beyond 65504 all results are nan. 2.5 keeps scores in fp32; every version does for bf16.
_KEEPS_SCORES = torch.__version__ >= "2.5"
# In PyTorch 2.4 the decomposition for devices without a kernel returns nan for rows that see no key.
_HANDLES_ROWS_WITHOUT_KEYS = torch.__version__ >= "2.5"
# On a CPU, PyTorch 2.5 treats a row with a NaN score as a row without keys; for later versions see docs/exactness.md.
_LOSES_NAN = "2.5" <= torch.__version__ < "2.6"
# Typed as Any, not as Optional: if PyTorch lacks these operators, extra_reasons declines every call, so none is used.
_FORWARD: Any = _find_masked_operator("_scaled_dot_product_flash_attention_for_cpu")
_BACKWARD: Any = _find_masked_operator("_scaled_dot_product_flash_attention_for_cpu_backward")


@functools.cache  # at the first call and not at import, which may happen inside a trace
def _slow_matmul_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes for which PyTorch has no fast matrix product on this CPU, by PyTorch's own checks."""
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return frozenset(dtype for dtype, name in checks.items() if not getattr(torch.ops.mkldnn, name, lambda: False)())


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Return out and, on a CPU, the LSE (n, heads, rows), for inputs (n, heads, rows, head_dim); else None as LSE."""
    if q.is_cpu:
        return _attend_on_cpu(q, k, v, causal, bias, scale)
    return _call_public_sdpa(q, k, v, causal, bias, scale), None


def _attend_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    dtype = _forward_dtype(q)
    if dtype != q.dtype:
        out, lse = _attend_on_cpu(q.to(dtype), k.to(dtype), v.to(dtype), causal, bias, scale)
        return out.to(q.dtype), lse
    if bias is None and q.shape[2] == 1 and q.shape[1] != k.shape[1]:
        return _attend_folded_heads(q, k, v, scale)
    if causal and k.shape[2] > q.shape[2]:
        return _attend_split_causal(q, k, v, scale)
    if not _SHARES_KEY_HEADS:
        k, v = _repeat_key_heads(q, k, v)
    result: tuple[Tensor, Tensor] = _FORWARD(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return result


def _attend_folded_heads(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend for one row that sees all keys. Query heads of a group become rows, so each key head is read once."""
    n, nheads = q.shape[:2]
    rows = q.reshape(n, k.shape[1], -1, q.shape[3]).contiguous()  # the kernel takes broadcast heads, but not rows
    out, lse = _FORWARD(rows, k, v, 0.0, False, scale=scale)
    return out.reshape(n, nheads, 1, -1), lse.reshape(n, nheads, 1)


def _attend_split_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to the keys that every causal row sees, then to the causal square, and merge both results by their LSE."""
    (k, own_k), (v, own_v) = _split_keys(q, k), _split_keys(q, v)
    out, lse = _attend_on_cpu(q, k, v, False, None, scale)
    own_out, own_lse = _attend_on_cpu(q, own_k, own_v, True, None, scale)
    share = torch.sigmoid(own_lse - lse).unsqueeze(-1)
    out = torch.lerp(out.to(share.dtype), own_out.to(share.dtype), share)
    return out.to(q.dtype), torch.logaddexp(lse, own_lse)


def _split_keys(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``keys`` into those that every causal row sees, and as many last ones as q has rows, the causal square."""
    seqlen_q = q.shape[2]
    return keys[:, :, :-seqlen_q], keys[:, :, -seqlen_q:]


def _compute_gradients(
    q: Tensor, k: Tensor, v: Tensor, upstream: BackwardInputs, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    if causal and k.shape[2] > q.shape[2]:
        (k, own_k), (v, own_v) = _split_keys(q, k), _split_keys(q, v)
        dq, *dkv = _compute_gradients(q, k, v, upstream, False, None, scale)
        own_dq, *own_dkv = _compute_gradients(q, own_k, own_v, upstream, True, None, scale)
        return dq + own_dq, *(torch.cat(both, dim=2) for both in zip(dkv, own_dkv))
    dout, out, lse = upstream[:3]
    if q.is_cpu:
        keys, values = (k, v) if _SHARES_KEY_HEADS else _repeat_key_heads(q, k, v)
        dq, dk, dv = _BACKWARD(dout, q, keys, values, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
        if keys is not k:
            dk, dv = (share.unflatten(1, (k.shape[1], -1)).sum(2) for share in (dk, dv))
        return dq, dk, dv
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    with torch.enable_grad():
        return torch.autograd.grad(_call_public_sdpa(q, k, v, causal, bias, scale), (q, k, v), dout)


def _repeat_key_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with one head for every head of q."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _call_public_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float) -> Tensor:
    k, v = _repeat_key_heads(q, k, v)
    bias = None if bias is None else bias.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)
