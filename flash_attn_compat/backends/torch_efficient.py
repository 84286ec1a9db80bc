"""PyTorch's memory-efficient kernel, fed packed sequences without padding: the path for Turing and older GPUs.

A call becomes one or a few launches (efficient_launch.py), each on a view of q, k and v: query heads that
share key heads take turns, rows that see nothing are left out, ALiBi and two-sided windows become a bias
for a few rows at a time. Calls over a KV cache are in efficient_cache.py. Nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends import efficient_band, efficient_bf16, efficient_cache, efficient_launch
from flash_attn_compat.backends.base import Backend, Capabilities, deliver
from flash_attn_compat.backends.efficient_launch import CAUSAL_BOTTOM_RIGHT, NO_MASK, Launch, Native
from flash_attn_compat.engine import alibi, alignment, outside
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.engine.features import Feature, Traits
from flash_attn_compat.engine.mask import Mask, Range

_LACKS = Feature.SOFTCAP | Feature.SHARED_DROPOUT_MASK | Feature.TRANSFORMS
_CACHED = Feature.SEQUSED_K | Feature.LEFTPAD_K | Feature.PAGED
# Before 2.15 the windowed backward aligns its mask as if there were as many queries as keys.
_OLD_WINDOW_BACKWARD = torch.__version__ < (2, 15)
# Elements of one bias: enough rows to fill the GPU, little memory beside the tensors.
_BIAS_ELEMENTS = 2**24
# (row, head) pairs that keep the GPU busy.
_ENOUGH_ROWS = 2**16


class TorchEfficient(Backend):
    name = "torch_efficient"
    capabilities = Capabilities(
        features=~_LACKS,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        min_capability=(5, 0),
    )

    def unavailable_reasons(self) -> list[str]:
        if torch.version.hip is not None:
            return ["its LSE layout on ROCm differs and is untested"]
        missing = efficient_launch.missing_reason()
        return [missing] if missing else []

    def extra_reasons(self, traits: Traits) -> list[str]:
        features = Feature(traits.features)
        if features & _CACHED:
            return efficient_cache.reasons(traits)
        reasons = []
        window = features & (Feature.WINDOW_LEFT | Feature.WINDOW_RIGHT)
        biased = bool(window) and (not features & Feature.CAUSAL or bool(features & Feature.ALIBI))
        biased = biased or bool(features & Feature.ALIBI and not features & Feature.CAUSAL)
        if biased and features & Feature.DROPOUT:
            reasons.append("dropout together with a bias")
        if biased and features & Feature.ALIBI and traits.dtype != torch.float32:
            # Under a negative slope the far keys count, whose bias half precision rounds by whole units.
            reasons.append("ALiBi that is not purely causal needs a bias in q's dtype, too coarse in half precision")
        both_sides = features & Feature.WINDOW_LEFT and features & Feature.WINDOW_RIGHT
        if (
            biased
            and features & Feature.VARLEN
            and (features & Feature.ALIBI or traits.sq_vs_sk != "=" or not both_sides)
        ):
            reasons.append("a bias over packed sequences, which the kernel takes for dense ones only")
        if window and not biased and traits.sq_vs_sk == "?" and traits.needs_backward:
            reasons.append("gradients of a window over packed sequences whose query and key lengths may differ")
        if window and not biased and traits.sq_vs_sk == "<" and traits.needs_backward and _OLD_WINDOW_BACKWARD:
            reasons.append("PyTorch before 2.15 computes wrong gradients of a window where seqlen_q < seqlen_k")
        return reasons

    def forward(self, call: AttentionCall) -> Result:
        if efficient_bf16.applies(call):
            return efficient_bf16.forward(call, self._forward)
        return self._forward(call)

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        if efficient_bf16.applies(call):
            return deliver(efficient_bf16.backward(call, upstream, self._backward), call, into)
        return deliver(self._backward(call, upstream), call, into)

    def _forward(self, call: AttentionCall) -> Result:
        if not call.is_dense and call.cu_seqlens_k is None:
            return efficient_cache.forward(call)
        if _is_band(call):
            return efficient_band.forward(call)
        keep_lse = call.needs_grad or call.return_lse
        if _is_single(call):
            return _forward_single(call, keep_lse)
        out: Tensor | None = None
        natives: list[Native] = []
        places: list[_Place] = []
        for place, launch in _launches(call):
            part, native = efficient_launch.forward(launch, keep_lse)
            if _may_lack_keys(call) and efficient_launch.skips_empty_rows(launch):
                part.masked_fill_(_rows_without_keys(call)[:, None, None], 0.0)
            natives.append(native)
            places.append(place)
            if place.is_whole:
                out = part
            else:
                out = _zeros(call) if out is None else out
                _put(out, place, part)
            # Widened copies of one launch must not outlive it.
            del launch, part
        if out is None:
            out = _zeros(call)
        if call.cu_seqlens_q is not None:
            out = out.squeeze(0)
            outside.set_to_zero(out, call.cu_seqlens_q)
        lse = _official_lse(call, places, natives) if call.return_lse else None
        saved = tuple(tensor for native in natives for tensor in native) if call.needs_grad else ()
        return Result(out[..., : call.head_dim_v], lse, None, saved)

    def _backward(self, call: AttentionCall, upstream: Upstream) -> Gradients:
        if _is_band(call):
            return efficient_band.backward(call, upstream)
        packed = call.cu_seqlens_q is not None
        dout, out = (t.unsqueeze(0) if packed else t for t in (upstream.dout, upstream.out))
        natives = _saved_natives(upstream.saved)
        sums = _Sums(call)
        for index, (place, launch) in enumerate(_launches(call)):
            native = natives[index] if natives else _native_from_official(call, place, launch, upstream.softmax_lse)
            rows_dout, rows_out = (efficient_launch.pad_channels(_take(tensor, place)) for tensor in (dout, out))
            found = efficient_launch.backward(launch, rows_dout, rows_out, native)
            if _may_lack_keys(call):
                found[0].masked_fill_(_rows_without_keys(call)[:, None, None], 0.0)
            sums.add(place, *found)
        return sums.total()


def _is_single(call: AttentionCall) -> bool:
    """The common case, told apart early: one launch on the tensors as they are, every row with keys."""
    left, right = call.mask
    return (
        (right == 0 or (right is None and left is None))
        and call.alibi_slopes is None
        and call.q.shape[-2] == call.k.shape[-2]
        and (call.equal_lengths or (call.is_dense and (right is None or call.q.shape[1] <= call.k.shape[1])))
    )


def _forward_single(call: AttentionCall, keep_lse: bool) -> Result:
    launch = _single(call)
    out, native = efficient_launch.forward(launch, keep_lse)
    lse = _official_lse(call, [_EVERYTHING], [native]) if call.return_lse else None
    if call.cu_seqlens_q is not None:
        out = out.squeeze(0)
        outside.set_to_zero(out, call.cu_seqlens_q)
    if out.shape[-1] != call.v.shape[-1]:
        out = out[..., : call.v.shape[-1]]
    return Result(out, lse, None, native if call.needs_grad else ())


def _single(call: AttentionCall) -> Launch:
    whole = Launch(
        _prepared(call.q), _prepared(call.k), _prepared(call.v), call.softmax_scale, dropout_p=call.dropout_p,
        deterministic=call.deterministic,
    )  # fmt: skip
    return _packed(call, whole) if call.cu_seqlens_q is not None else _dense(call, whole)[0][1]


class _Place(NamedTuple):
    """Which sequences, rows, keys and heads of a call one launch computes."""

    batch: slice = slice(None)
    rows: slice = slice(None)
    keys: slice = slice(None)
    heads: slice = slice(None)

    @property
    def is_whole(self) -> bool:
        return self == _EVERYTHING


_EVERYTHING = _Place()


def _is_band(call: AttentionCall) -> bool:
    """A two-sided window over sequences of as many queries as keys."""
    same = call.equal_lengths or (call.is_dense and call.q.shape[1] == call.k.shape[1])
    windowed = call.mask.left is not None and bool(call.mask.right)
    return windowed and same and call.alibi_slopes is None


def _launches(call: AttentionCall) -> Iterator[tuple[_Place, Launch]]:
    """The launches of a dense or packed call, always in the same order."""
    group = call.nheads // call.nheads_k
    if call.alibi_slopes is not None and call.mask.is_causal:
        parts = _with_alibi_channels(call)
    else:
        q, k, v = (_prepared(tensor) for tensor in (call.q, call.k, call.v))
        whole = Launch(q, k, v, call.softmax_scale, dropout_p=call.dropout_p, deterministic=call.deterministic)
        # The kernel's own masks are none, causal, and causal with a left window.
        has_bias = call.alibi_slopes is not None or not (call.mask.is_full or call.mask.right == 0)
        parts = _biased(call, whole) if has_bias else _unbiased(call, whole)
    for place, launch in parts:
        yield from _per_group(place, launch, group)


def _prepared(tensor: Tensor) -> Tensor:
    """Channels padded to a multiple of 8 and rows on 16 bytes."""
    return alignment.ready(efficient_launch.pad_channels(tensor))


def _unbiased(call: AttentionCall, whole: Launch) -> Iterator[tuple[_Place, Launch]]:
    if call.cu_seqlens_q is None:
        yield from _dense(call, whole)
    else:
        yield _EVERYTHING, _packed(call, whole)


def _with_alibi_channels(call: AttentionCall) -> Iterator[tuple[_Place, Launch]]:
    """Causal ALiBi as an inner product: under a causal mask -slope * (i - j) is slope * j plus a constant of the row.

    Keys carry j, queries slope / scale, each in two parts that half precision holds exactly or nearly so; the
    kernel adds their products in fp32. Its LSE is larger by slope * i then, which is what flash-attn returns.
    """
    if call.cu_seqlens_q is not None:
        sequence_q, _ = efficient_launch.token_places(call.cu_seqlens_q, call.q.shape[0])
        _, positions = efficient_launch.token_places(call.cu_seqlens_k, call.k.shape[0])
        longest = call.k.shape[0]
        slopes = alibi.per_sequence(call.alibi_slopes, call.batch)[sequence_q]
        whole = Launch(
            _append(call.q, alibi.query_channels(slopes, call.softmax_scale, longest, call.q.dtype)),
            _append(call.k, alibi.key_channels(positions, call.softmax_scale, longest, call.k.dtype).unsqueeze(1)),
            _prepared(call.v),
            call.softmax_scale,
            dropout_p=call.dropout_p,
            deterministic=call.deterministic,
        )
        yield _EVERYTHING, _packed(call, whole)
        return
    positions = torch.arange(call.k.shape[1], device=call.k.device)
    longest = call.k.shape[1]
    key_channels = alibi.key_channels(positions, call.softmax_scale, longest, call.k.dtype).unsqueeze(1)
    slopes = alibi.per_sequence(call.alibi_slopes, call.batch)
    query_channels = alibi.query_channels(slopes, call.softmax_scale, longest, call.q.dtype).unsqueeze(1)
    for batch in _batch_slices(call):
        part = call._replace(q=call.q[batch], k=call.k[batch], v=call.v[batch])
        yield from _widened(part, batch, query_channels[batch], key_channels)


def _widened(
    part: AttentionCall, batch: slice, query_channels: Tensor, key_channels: Tensor
) -> Iterator[tuple[_Place, Launch]]:
    whole = Launch(
        _append(part.q, query_channels),
        _append(part.k, key_channels),
        _prepared(part.v),
        part.softmax_scale,
        dropout_p=part.dropout_p,
        deterministic=part.deterministic,
    )
    for place, launch in _dense(part, whole):
        yield place._replace(batch=batch), launch


def _append(tensor: Tensor, channels: Tensor) -> Tensor:
    """``tensor`` with further channels, padded with zeros to a multiple of 8."""
    head_dim, extra = tensor.shape[-1], channels.shape[-1]
    size = head_dim + extra
    wider = tensor.new_empty((*tensor.shape[:-1], size + -size % 8))
    wider[..., :head_dim] = tensor
    wider[..., head_dim:size] = channels
    wider[..., size:] = 0
    return wider


def _batch_slices(call: AttentionCall) -> Iterator[slice]:
    """As few sequences at a time as fill the GPU: widened copies of them are what the memory goes to."""
    rows = call.q.shape[1] * call.nheads
    step = max(1, -(-_ENOUGH_ROWS // max(1, rows)))
    for start in range(0, call.q.shape[0], step):
        yield slice(start, min(start + step, call.q.shape[0]))


def _dense(call: AttentionCall, whole: Launch) -> list[tuple[_Place, Launch]]:
    """Full, causal, or causal with a left window. Rows that see no key are left out."""
    seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
    if call.mask.is_full:
        return [(_EVERYTHING, whole)]
    window = None if call.mask.left is None else call.mask.left + 1
    masked = whole._replace(mask=CAUSAL_BOTTOM_RIGHT, window_size=window)
    alive = call.mask.rows_with_keys(seqlen_q, seqlen_k)
    if alive.size == seqlen_q:
        return [(_EVERYTHING, masked)]
    rows = slice(*alive)
    return [(_Place(rows=rows), masked._replace(q=whole.q[:, rows]))] if alive.size else []


def _packed(call: AttentionCall, whole: Launch) -> Launch:
    """Packed sequences in one launch; where a causal mask may hide all keys of a row, such rows get no keys."""
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    if call.mask.right == 0 and not call.equal_lengths:
        cu_q, cu_k = _split_dead_rows(cu_q, cu_k)
    return whole._replace(
        q=whole.q.unsqueeze(0),
        k=whole.k.unsqueeze(0),
        v=whole.v.unsqueeze(0),
        mask=NO_MASK if call.mask.is_full else CAUSAL_BOTTOM_RIGHT,
        window_size=None if call.mask.left is None else call.mask.left + 1,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max(1, min(call.max_seqlen_q, call.q.shape[0])),
        max_seqlen_k=max(1, min(call.max_seqlen_k, call.k.shape[0])),
    )


def _split_dead_rows(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Each sequence as two: its first rows that see no key, with no keys, and the rest with all of them."""
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    alive_from = cu_seqlens_q[:-1] + (lengths_q - lengths_k).clamp_(min=0)
    starts_q = torch.stack((cu_seqlens_q[:-1], alive_from), dim=1).flatten()
    starts_k = cu_seqlens_k[:-1].repeat_interleave(2)
    return torch.cat((starts_q, cu_seqlens_q[-1:])), torch.cat((starts_k, cu_seqlens_k[-1:]))


def _biased(call: AttentionCall, whole: Launch) -> Iterator[tuple[_Place, Launch]]:
    """Dense rows, some at a time, with their visible keys and a bias; one table of it serves all of them."""
    batch, seqlen_q, nheads = call.q.shape[:3]
    seqlen_k, mask, slopes = call.k.shape[1], call.mask, call.alibi_slopes
    if slopes is not None and slopes.dim() == 1:
        slopes = slopes.unsqueeze(0)
    offset = seqlen_k - seqlen_q
    alive = mask.rows_with_keys(seqlen_q, seqlen_k)
    blocks = list(_row_blocks(alive, mask, offset, seqlen_k, 1 if slopes is None else slopes.numel()))
    if not blocks:
        return
    # Every block's first column must lie on 16 bytes: rows step by 64 and keys start at multiples of 8.
    first = max(rows.start + offset - keys.start for rows, keys in blocks)
    first += (alive.start + offset - first) % 8
    width = max(first + keys.stop - rows.start - offset for rows, keys in blocks)
    size = max(rows.size for rows, _ in blocks)
    table = alibi.bias_table(slopes, mask, size, first, width + -width % 8, call.q.device, call.q.dtype)
    for rows, keys in blocks:
        column = first + keys.start - rows.start - offset
        bias = table[:, :, : rows.size, column : column + keys.size].expand(batch, nheads, -1, -1)
        row_slice, key_slice = slice(*rows), slice(*keys)
        launch = whole._replace(q=whole.q[:, row_slice], k=whole.k[:, key_slice], v=whole.v[:, key_slice], bias=bias)
        yield _Place(rows=row_slice, keys=key_slice), launch


def _row_blocks(alive: Range, mask: Mask, offset: int, seqlen_k: int, copies: int) -> Iterator[tuple[Range, Range]]:
    """Blocks of rows and the keys they see, the first of them rounded down to a multiple of 8."""
    bounded = mask.left is not None and mask.right is not None
    # The table holds every distance that occurs: up to seqlen_k on either side of a row.
    width = min(2 * seqlen_k, mask.left + mask.right + 64) if bounded else (1 if mask.right == 0 else 2) * seqlen_k
    size = max(64, _BIAS_ELEMENTS // (copies * width) // 64 * 64)
    for start in range(alive.start, alive.stop, size):
        rows = Range(start, min(start + size, alive.stop))
        keys = mask.visible_keys(rows, offset, seqlen_k)
        yield rows, Range(keys.start // 8 * 8, keys.stop)


def _per_group(place: _Place, launch: Launch, group: int) -> Iterator[tuple[_Place, Launch]]:
    """Query heads that share key heads: one launch for each head of a group, over all key heads, copying nothing."""
    if group == 1:
        yield place, launch
        return
    for member in range(group):
        heads = slice(member, None, group)
        bias = launch.bias if launch.bias is None else launch.bias[:, heads]
        yield place._replace(heads=heads), launch._replace(q=launch.q[:, :, heads], bias=bias)


def _may_lack_keys(call: AttentionCall) -> bool:
    """Whether packed rows may have no keys at all: the kernel's backward leaves their dq unwritten."""
    return call.cu_seqlens_q is not None and not call.equal_lengths


def _rows_without_keys(call: AttentionCall) -> Tensor:
    """(total_q,) bool."""
    starts_q, starts_k = _packed_starts(call)
    sequence, _ = efficient_launch.token_places(starts_q, call.q.shape[0])
    return starts_k.diff()[sequence] == 0


def _zeros(call: AttentionCall) -> Tensor:
    """An output to be filled, (batch or 1, rows, heads, head_dim padded to 8), for the kernel's parts."""
    shape = call.q.shape if call.cu_seqlens_q is None else (1, *call.q.shape)
    head_dim = call.head_dim_v + -call.head_dim_v % 8
    return call.q.new_zeros((*shape[:-1], head_dim))


def _put(out: Tensor, place: _Place, part: Tensor) -> None:
    out[place.batch, place.rows, place.heads] = part


def _take(rows: Tensor, place: _Place) -> Tensor:
    return rows[place.batch, place.rows, place.heads]


def _official_lse(call: AttentionCall, places: list[_Place], natives: list[Native]) -> Tensor:
    """The launches' LSE in flash-attn's layout: +inf where a row sees no key."""
    lse = torch.full(call.lse_shape, torch.inf, dtype=torch.float32, device=call.q.device)
    for place, native in zip(places, natives):
        if call.cu_seqlens_q is None:
            view = lse[place.batch, place.heads, place.rows]
            view.copy_(native.lse[:, :, : view.shape[2]])
        else:
            lse[place.heads] = _packed_lse(call, native)
    if call.lse_carries_alibi_position and not call.mask.is_causal:
        slopes = alibi.per_sequence(call.alibi_slopes, call.batch)
        lse += alibi.causal_lse_shift(slopes, call.q.shape[1], call.k.shape[1] - call.q.shape[1])
    return lse


def _packed_lse(call: AttentionCall, native: Native) -> Tensor:
    starts_q, _ = _packed_starts(call)
    packed = efficient_launch.native_lse_to_packed(native.lse, starts_q, call.q.shape[0])
    return packed.masked_fill_(_rows_without_keys(call), torch.inf) if _may_lack_keys(call) else packed


def _packed_starts(call: AttentionCall) -> tuple[Tensor, Tensor]:
    if call.mask.right == 0 and not call.equal_lengths:
        return _split_dead_rows(call.cu_seqlens_q, call.cu_seqlens_k)
    return call.cu_seqlens_q, call.cu_seqlens_k


def _native_from_official(call: AttentionCall, place: _Place, launch: Launch, lse: Tensor) -> Native:
    if call.lse_carries_alibi_position and not call.mask.is_causal:
        slopes = alibi.per_sequence(call.alibi_slopes, call.batch)
        lse = lse - alibi.causal_lse_shift(slopes, call.q.shape[1], call.k.shape[1] - call.q.shape[1])
    if call.cu_seqlens_q is None:
        return Native(efficient_launch.lse_to_native(lse[place.batch, place.heads, place.rows]))
    return Native(efficient_launch.packed_lse_to_native(lse[place.heads], launch.cu_seqlens_q, launch.max_seqlen_q))


def _saved_natives(saved: tuple[Tensor, ...]) -> list[Native]:
    return [Native(*saved[start : start + 3]) for start in range(0, len(saved), 3)]


class _Sums:
    """Gradients gathered from launches: taken as they are from a single one, summed in fp32 from several."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.found: Gradients | None = None
        self.dq: Tensor | None = None
        self.dk: Tensor | None = None
        self.dv: Tensor | None = None

    def add(self, place: _Place, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        if place.is_whole:
            self.found = Gradients(dq, dk, dv)
            return
        if self.dq is None:
            self.dq, self.dk, self.dv = (
                self._zeros(*of) for of in ((self.call.q, dq), (self.call.k, dk), (self.call.v, dv))
            )
        self.dq[place.batch, place.rows, place.heads] = dq[..., : self.dq.shape[-1]]
        self.dk[place.batch, place.keys] += dk[..., : self.dk.shape[-1]]
        self.dv[place.batch, place.keys] += dv

    def _zeros(self, like: Tensor, part: Tensor) -> Tensor:
        shape = like.shape if like.dim() == 4 else (1, *like.shape)
        dtype = like.dtype if like is self.call.q else torch.float32
        return torch.zeros((*shape[:-1], part.shape[-1]), dtype=dtype, device=like.device)

    def total(self) -> Gradients:
        sources = (self.call.q, self.call.k, self.call.v)
        found = self.found or (self.dq, self.dk, self.dv)
        results = []
        for source, gradient in zip(sources, found):
            if gradient is None:
                gradient = torch.zeros_like(source)
            gradient = gradient.view((*source.shape[:-1], gradient.shape[-1]))
            if self.call.cu_seqlens_q is not None:
                starts = self.call.cu_seqlens_q if source is self.call.q else self.call.cu_seqlens_k
                outside.set_to_zero(gradient, starts)
            results.append(gradient[..., : source.shape[-1]].to(source.dtype))
        return Gradients(*results)
