"""PyTorch's memory-efficient kernel, fed packed sequences without padding: the path for Turing and older GPUs.

A call becomes one or a few launches (efficient_launch.py), each on a view of q, k and v: query heads that
share key heads take turns, rows that see nothing are left out, causal ALiBi becomes further channels
(efficient_alibi.py). What needs a bias is in efficient_bias.py and efficient_band.py, calls over a KV cache
are in efficient_cache.py. Nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_attn_compat.backends import (
    efficient_alibi,
    efficient_band,
    efficient_bf16,
    efficient_bias,
    efficient_cache,
    efficient_launch,
)
from flash_attn_compat.backends.base import Backend, Capabilities, deliver
from flash_attn_compat.backends.efficient_launch import (
    CAUSAL_BOTTOM_RIGHT,
    EVERYTHING,
    NO_MASK,
    Launch,
    Native,
    Place,
)
from flash_attn_compat.engine import alibi, alignment, outside, streams
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result, Upstream
from flash_attn_compat.engine.features import Feature, Traits

Found = TypeVar("Found")
# A launch is made when it is its turn: what it needs beside the call's tensors lives no longer than that.
Step = tuple[Place, Callable[[], Launch]]

_LACKS = Feature.SOFTCAP | Feature.SHARED_DROPOUT_MASK | Feature.TRANSFORMS
_CACHED = Feature.SEQUSED_K | Feature.LEFTPAD_K | Feature.PAGED
# Before 2.15 the windowed backward aligns its mask as if there were as many queries as keys.
_OLD_WINDOW_BACKWARD = torch.__version__ < "2.15"  # as versions, not as letters
# Elements of q from which on it pays to issue launches to several streams.
_WORTH_STREAMS = 2**20


class TorchEfficient(Backend):
    name = "torch_efficient"
    yields_to_compiled = True
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
        biased = biased or bool(
            features & Feature.ALIBI and (not features & Feature.CAUSAL or traits.dtype == torch.float32)
        )
        if biased and features & Feature.DROPOUT:
            reasons.append("dropout together with a bias")
        native_bf16 = traits.dtype == torch.bfloat16 and traits.capability is not None and traits.capability >= (8, 0)
        if biased and features & Feature.ALIBI and native_bf16:
            reasons.append("a bias of ALiBi in q's dtype, which moves the LSE by more than it may in bfloat16")
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
        if efficient_cache.serves(call):
            return efficient_cache.forward(call)
        keep_lse = call.needs_grad or call.return_lse
        if _is_single(call):
            return _forward_single(call, keep_lse)
        if _is_band(call):
            return efficient_band.forward(call)
        steps = list(_launches(call))
        natives: list[Native] = []
        out = None if _is_one_launch(steps) else _empty_out(call)

        def compute(place: Place, launch_of: Callable[[], Launch]) -> tuple[Place, Tensor, Native]:
            launch = launch_of()
            part, native = efficient_launch.forward(launch, keep_lse)
            if _may_lack_keys(call) and efficient_launch.skips_empty_rows(launch):
                part.masked_fill_(_rows_without_keys(call)[:, None, None], 0.0)
            return place, part, native

        def collect(found: tuple[Place, Tensor, Native]) -> list[Tensor]:
            nonlocal out
            place, part, native = found
            natives.append(native)
            if out is None:
                out = part
            else:
                out[place.batch, place.rows, place.heads] = part
            return [tensor for tensor in native if tensor is not None and tensor.is_cuda]

        _run(call, [partial(compute, *step) for step in steps], collect)
        assert out is not None  # made beforehand, unless there is one launch
        if call.cu_seqlens_q is not None:
            out = out.squeeze(0)
            outside.clear(out, call.cu_seqlens_q)
        lse = _official_lse(call, [place for place, _ in steps], natives) if call.return_lse else None
        saved = tuple(tensor for native in natives for tensor in native) if call.needs_grad else ()
        return Result(out[..., : call.head_dim_v], lse, None, saved)

    def _backward(self, call: AttentionCall, upstream: Upstream) -> Gradients:
        if _is_band(call):
            return efficient_band.backward(call, upstream)
        packed = call.cu_seqlens_q is not None
        dout, out = (t.unsqueeze(0) if packed else t for t in (upstream.dout, upstream.out))
        # Each launch of a forward under dropout drew a mask of its own.
        steps = list(_launches(call, backward=not call.dropout_p))
        natives = _natives_of(call, steps, upstream.saved)
        sums = _Sums(call, steps)
        neighbours = streams.LANES if _takes_turns(call, steps) else 1

        def compute(index: int, place: Place, launch_of: Callable[[], Launch]) -> tuple[Place, tuple[Tensor, ...]]:
            launch = launch_of()
            native = natives[index] if natives else _native_from_official(call, place, launch, upstream.lse)
            rows_dout, rows_out = (
                efficient_launch.pad_channels(tensor[place.batch, place.rows, place.heads]) for tensor in (dout, out)
            )
            found = efficient_launch.backward(launch, rows_dout, rows_out, native, neighbours)
            if _may_lack_keys(call):
                found[0].masked_fill_(_rows_without_keys(call)[:, None, None], 0.0)
            return place, found

        def collect(found: tuple[Place, tuple[Tensor, ...]]) -> list[Tensor]:
            sums.add(*found)
            return []

        _run(call, [partial(compute, index, *step) for index, step in enumerate(steps)], collect)
        return sums.total()


def _takes_turns(call: AttentionCall, steps: Sequence[object]) -> bool:
    """Whether launches run side by side on several streams."""
    return len(steps) > 1 and call.q.is_cuda and call.q.numel() >= _WORTH_STREAMS


def _run(call: AttentionCall, steps: Sequence[Callable[[], Found]], collect: Callable[[Found], list[Tensor]]) -> None:
    if _takes_turns(call, steps):
        streams.in_turns(steps, collect, call.q.device)
        return
    for step in steps:
        collect(step())


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
    launch = _packed(call) if call.cu_seqlens_q is not None else _dense(call)[0][1]
    out, native = efficient_launch.forward(launch, keep_lse)
    lse = _official_lse(call, [EVERYTHING], [native]) if call.return_lse else None
    if call.cu_seqlens_q is not None:
        out = out.squeeze(0)
        outside.clear(out, call.cu_seqlens_q)
    if out.shape[-1] != call.v.shape[-1]:
        out = out[..., : call.v.shape[-1]]
    return Result(out, lse, None, native if call.needs_grad else ())


def _is_band(call: AttentionCall) -> bool:
    """A two-sided window over sequences of as many queries as keys."""
    same = call.equal_lengths or (call.is_dense and call.q.shape[1] == call.k.shape[1])
    windowed = call.mask.left is not None and bool(call.mask.right)
    return windowed and same and call.alibi_slopes is None


def _launches(call: AttentionCall, backward: bool = False) -> Iterator[Step]:
    """The launches of a dense or packed call, always in the same order; a backward may take several at a time."""
    members = efficient_launch.members(call.nheads, call.nheads_k)
    slopes, mask = call.alibi_slopes, call.mask
    if slopes is not None or not (mask.is_full or mask.right == 0):
        for heads in members:
            slopes_of = None if slopes is None else slopes[..., heads]
            part = call._replace(q=call.q[..., heads, :], alibi_slopes=slopes_of)
            steps: Iterable[Step]
            if slopes_of is not None and _takes_channels(call):
                steps = _with_alibi_channels(part, slopes_of, backward)
            else:
                steps = efficient_bias.launches(part, _whole(part), backward)
            for place, launch_of in steps:
                yield place._replace(heads=heads), launch_of
        return
    # The kernel's own masks are none, causal, and causal with a left window.
    for place, launch in _dense(call) if call.cu_seqlens_q is None else [(EVERYTHING, _packed(call))]:
        for heads in members:
            yield place._replace(heads=heads), partial(launch._replace, q=launch.q[:, :, heads])


def _takes_channels(call: AttentionCall) -> bool:
    """Whether ALiBi becomes channels, whose large products cost fp32 digits that half precision does not have."""
    return call.mask.is_causal and (call.q.dtype != torch.float32 or not call.is_dense or call.dropout_p > 0)


def _whole(call: AttentionCall) -> Launch:
    """All of a call, not masked yet."""
    return Launch(
        _prepared(call.q), _prepared(call.k), _prepared(call.v), call.softmax_scale, dropout_p=call.dropout_p,
        deterministic=call.deterministic,
    )  # fmt: skip


def _prepared(tensor: Tensor) -> Tensor:
    """Channels padded to a multiple of 8 and rows on 16 bytes."""
    if tensor.shape[-1] % 8 == 0 and alignment.is_ready(tensor):
        return tensor
    return alignment.ready(efficient_launch.pad_channels(tensor))


def _with_alibi_channels(call: AttentionCall, slopes: Tensor, backward: bool) -> Iterator[Step]:
    """Query heads equal key heads."""
    added = efficient_alibi.channels(call, slopes)

    def widened(launch: Launch, queries: Tensor) -> Launch:
        q, k = alibi.append_channels(launch.q, queries), alibi.append_channels(launch.k, added.keys)
        return launch._replace(q=q, k=k)

    if call.cu_seqlens_q is not None:
        yield EVERYTHING, partial(widened, _packed(call), added.queries)
        return
    for place, launch in _dense(call):
        for batch in efficient_alibi.batch_slices(call, backward):
            part = launch._replace(q=launch.q[batch], k=launch.k[batch], v=launch.v[batch])
            yield place._replace(batch=batch), partial(widened, part, added.queries[batch])


def _dense(call: AttentionCall) -> list[tuple[Place, Launch]]:
    """Full, causal, or causal with a left window. Rows that see no key are left out."""
    whole = _whole(call)
    seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
    if call.mask.is_full:
        return [(EVERYTHING, whole)]
    window = None if call.mask.left is None else call.mask.left + 1
    masked = whole._replace(mask=CAUSAL_BOTTOM_RIGHT, window_size=window)
    alive = call.mask.rows_with_keys(seqlen_q, seqlen_k)
    if alive.size == seqlen_q:
        return [(EVERYTHING, masked)]
    rows = slice(*alive)
    return [(Place(rows=rows), masked._replace(q=whole.q[:, rows]))] if alive.size else []


def _packed(call: AttentionCall) -> Launch:
    """Packed sequences in one launch; where a causal mask may hide all keys of a row, such rows get no keys."""
    q, k, v = _prepared(call.q), _prepared(call.k), _prepared(call.v)
    left, right = call.mask
    cu_q, cu_k = _packed_starts(call)
    return Launch(
        q[None], k[None], v[None], call.softmax_scale,
        NO_MASK if right is None else CAUSAL_BOTTOM_RIGHT, None if left is None else left + 1, cu_q, cu_k,
        max(1, min(call.max_seqlen_q, q.shape[0])), max(1, min(call.max_seqlen_k, k.shape[0])),
        dropout_p=call.dropout_p, deterministic=call.deterministic,
    )  # fmt: skip


def _split_dead_rows(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Each sequence as two: its first rows that see no key, with no keys, and the rest with all of them."""
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    alive_from = cu_seqlens_q[:-1] + (lengths_q - lengths_k).clamp_(min=0)
    starts_q = torch.stack((cu_seqlens_q[:-1], alive_from), dim=1).flatten()
    starts_k = cu_seqlens_k[:-1].repeat_interleave(2)
    return torch.cat((starts_q, cu_seqlens_q[-1:])), torch.cat((starts_k, cu_seqlens_k[-1:]))


def _may_lack_keys(call: AttentionCall) -> bool:
    """Whether packed rows may have no keys at all: the kernel's backward leaves their dq unwritten."""
    return call.cu_seqlens_q is not None and not call.equal_lengths


def _rows_without_keys(call: AttentionCall) -> Tensor:
    """(total_q,) bool."""
    starts_q, starts_k = _packed_starts(call)
    sequence, _ = efficient_launch.token_places(starts_q, call.q.shape[0])
    return starts_k.diff()[sequence] == 0


def _is_one_launch(steps: Sequence[Step]) -> bool:
    """Whether the only launch computes everything."""
    return len(steps) == 1 and steps[0][0] == EVERYTHING


def _leaves_rows_out(call: AttentionCall) -> bool:
    return call.is_dense and call.mask.rows_with_keys(call.q.shape[1], call.k.shape[1]).size < call.q.shape[1]


def _empty_out(call: AttentionCall) -> Tensor:
    """An output to be filled, (batch or 1, rows, heads, head_dim padded to 8); rows that no launch fills are 0."""
    shape = call.q.shape if call.cu_seqlens_q is None else (1, *call.q.shape)
    shape = (*shape[:-1], call.head_dim_v + -call.head_dim_v % 8)
    return call.q.new_zeros(shape) if _leaves_rows_out(call) else call.q.new_empty(shape)


def _official_lse(call: AttentionCall, places: list[Place], natives: list[Native]) -> Tensor:
    """The launches' LSE in flash-attn's layout: +inf where a row sees no key."""
    lse = torch.full(call.lse_shape, torch.inf, dtype=torch.float32, device=call.q.device)
    for place, native in zip(places, natives):
        if call.cu_seqlens_q is None:
            view = lse[place.batch, place.heads, place.rows]
            view.copy_(native.lse[:, :, : view.shape[2]])
        else:
            lse[place.heads] = _packed_lse(call, native)
    shift = _lse_shift(call)
    return lse if shift is None else lse.sub_(shift)


def _lse_shift(call: AttentionCall) -> Tensor | None:
    """By how much the launches' LSE is larger than what flash-attn returns; under channels it is as flash-attn's."""
    if call.alibi_slopes is None or _takes_channels(call):
        return None
    shift = efficient_bias.lse_shift(call)
    if shift is None or not call.mask.is_causal:
        return shift
    slopes = alibi.per_sequence(call.alibi_slopes, call.batch)
    return shift - alibi.causal_lse_shift(slopes, call.q.shape[1], call.k.shape[1] - call.q.shape[1])


def _packed_lse(call: AttentionCall, native: Native) -> Tensor:
    starts_q, _ = _packed_starts(call)
    packed = efficient_launch.native_lse_to_packed(native.lse, starts_q, call.q.shape[0])
    return packed.masked_fill_(_rows_without_keys(call), torch.inf) if _may_lack_keys(call) else packed


def _packed_starts(call: AttentionCall) -> tuple[Tensor, Tensor]:
    starts_q, starts_k = call.cu_seqlens_q, call.cu_seqlens_k
    assert starts_q is not None and starts_k is not None  # packed calls have both, others do not come here
    if call.mask.right == 0 and not call.equal_lengths:
        return _split_dead_rows(starts_q, starts_k)
    return starts_q, starts_k


def _native_from_official(call: AttentionCall, place: Place, launch: Launch, lse: Tensor) -> Native:
    shift = _lse_shift(call)
    lse = lse if shift is None else lse + shift
    if launch.cu_seqlens_q is None or launch.max_seqlen_q is None:
        return Native(efficient_launch.lse_to_native(lse[place.batch, place.heads, place.rows]))
    return Native(efficient_launch.packed_lse_to_native(lse[place.heads], launch.cu_seqlens_q, launch.max_seqlen_q))


def _natives_of(call: AttentionCall, steps: Sequence[Step], saved: tuple[Any, ...]) -> list[Native]:
    """What the forward's launches kept for each of the backward's, which may compute the rows of several."""
    natives = [Native(*saved[start : start + 3]) for start in range(0, len(saved), 3)]
    if len(natives) <= len(steps):
        return natives
    parts: dict[int, list[Tensor]] = {}
    axis = 0
    for (place, _), native in zip(_launches(call), natives):
        whole = next(index for index, (other, _) in enumerate(steps) if _covers(other, place))
        parts.setdefault(whole, []).append(native.lse)
        # A forward is cut into sequences or into rows, of which all but the last are as many as the kernel pads to.
        axis = 2 if place.batch == slice(None) else 0
    return [Native(torch.cat(parts[index], axis)) for index in range(len(steps))]


def _covers(whole: Place, part: Place) -> bool:
    """Whether ``part`` is some of the sequences or rows of ``whole``."""

    def within(one: slice, other: slice) -> bool:
        return one in (slice(None), other) or (one.start <= other.start and other.stop <= one.stop)

    return whole.heads == part.heads and within(whole.batch, part.batch) and within(whole.rows, part.rows)


class _Sums:
    """Gradients gathered from launches: taken as they are from a single one.

    Keys that several launches read get their gradients' sum, kept in fp32; the others are written once.
    """

    def __init__(self, call: AttentionCall, steps: Sequence[Step]) -> None:
        self.call = call
        self.found: tuple[Tensor, ...] | None = None
        self.is_one_launch = _is_one_launch(steps)
        if self.is_one_launch:
            return
        batches = [place.batch.start for place, _ in steps]
        self.in_parts = not steps or any(place.keys != slice(None) for place, _ in steps)
        self.written: set[int | None] = set()
        self.dq = self._empty(call.q, call.q.dtype, zero=not steps or _leaves_rows_out(call))
        dtype = torch.float32 if self.in_parts or len(set(batches)) < len(batches) else call.k.dtype
        self.dk, self.dv = (self._empty(tensor, dtype, zero=self.in_parts) for tensor in (call.k, call.v))

    @staticmethod
    def _empty(like: Tensor, dtype: torch.dtype, zero: bool) -> Tensor:
        shape = like.shape if like.dim() == 4 else (1, *like.shape)
        return like.new_zeros(shape, dtype=dtype) if zero else like.new_empty(shape, dtype=dtype)

    def add(self, place: Place, found: tuple[Tensor, ...]) -> None:
        if self.is_one_launch:
            self.found = found
            return
        dq, *others = found
        self.dq[place.batch, place.rows, place.heads] = dq[..., : self.dq.shape[-1]]
        is_first = not self.in_parts and place.batch.start not in self.written
        self.written.add(place.batch.start)
        for total, part in zip((self.dk, self.dv), others):
            target, part = total[place.batch, place.keys], part[..., : total.shape[-1]]
            if is_first:
                target.copy_(part)
            else:
                target.add_(part)

    def total(self) -> Gradients:
        sources = (self.call.q, self.call.k, self.call.v)
        starts = (self.call.cu_seqlens_q, self.call.cu_seqlens_k, self.call.cu_seqlens_k)
        results = []
        for source, gradient, cu_seqlens in zip(sources, self.found or (self.dq, self.dk, self.dv), starts):
            gradient = gradient.view((*source.shape[:-1], gradient.shape[-1]))
            if cu_seqlens is not None:
                outside.clear(gradient, cu_seqlens)
            results.append(gradient[..., : source.shape[-1]].to(source.dtype))
        return Gradients(*results)
