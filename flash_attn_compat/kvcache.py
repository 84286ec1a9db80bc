"""flash_attn_with_kvcache: the new keys and values are appended and rotated, then attended to.

The backend's step does all three, where it has one; else plain operators append, and the rest is an ordinary call.
Everything is checked, and the backend chosen, before the cache is touched. Positions stay on the device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import sinks
from flash_attn_compat.backends import KernelsFailed
from flash_attn_compat.engine import checks, signature
from flash_attn_compat.engine.append import Append, Unlike
from flash_attn_compat.engine.build import Options, cache_call, integer
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.layout import lse_dtype
from flash_attn_compat.serving import dispatch, torch_ops
from flash_attn_compat.serving.autograd import run_forward

_CACHE_SHAPE = "(batch_size_cache, seqlen_cache, num_heads_k, head_size)"


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ``q`` over a key/value cache, after writing new keys and values into it in place.

    Not differentiable. Arguments:
        q: (batch_size, seqlen_q, nheads, headdim)
        k_cache, v_cache: (batch_size_cache, seqlen_cache, nheads_k, headdim), or (num_blocks,
            page_block_size, nheads_k, headdim) with block_table; the last dimension contiguous
        k, v: (batch_size, seqlen_new, nheads_k, headdim), written behind the cache_seqlens of each sequence
        rotary_cos, rotary_sin: (at least the cache's capacity, rotary_dim / 2) in q's dtype; rotates k at
            its positions, and q at cache_seqlens + row if causal or windowed, else at cache_seqlens
        cache_seqlens: how many cache slots are in use before the call, from slot 0 on: an int or
            (batch_size,) int32; default all of them. It is not updated. An int needs no tensor on the way.
        cache_batch_idx: (batch_size,) int32, the cache row of each sequence; default its own index
        cache_leftpad: (batch_size,) int32, slots to skip at the front
        block_table: (batch_size, max_num_blocks_per_seq) int32, the pages of each sequence
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in flash_attn_func, with seqlen_k the
            slots in use after the append, less the skipped ones
        rotary_interleaved: rotate channels (0, 1), (2, 3), ... rather than the two halves
        num_splits: accepted and ignored, apart from its upper limit
        return_softmax_lse: also return softmax_lse
        s_aux [not in flash-attn]: (nheads,), attention sinks, as in flash_attn_func
    Returns:
        out: (batch_size, seqlen_q, nheads, headdim)
        softmax_lse [with return_softmax_lse]: (batch_size, nheads, seqlen_q) fp32
    Raises:
        RuntimeError: something does not fit together, or the new keys do not fit into the cache; the cache
            is unchanged then. Nobody looks at a cache_seqlens tensor on a GPU: keys that do not fit are not written by
            the fused backend, and are a device assert elsewhere.
    """
    if s_aux is not None:
        sinks.check(s_aux, q, alibi_slopes)
    wants_lse = return_softmax_lse or s_aux is not None
    lengths = cache_seqlens
    if lengths is not None and not isinstance(lengths, Tensor):
        lengths = integer("cache_seqlens", lengths)
    left, right = checks.window(window_size)
    first: tuple[Any, ...] = q, k_cache, v_cache, k, v, rotary_cos, rotary_sin
    last: tuple[Any, ...] = (
        cache_batch_idx, cache_leftpad, block_table, alibi_slopes, softmax_scale, causal, left, right, softcap,
        rotary_interleaved, num_splits,
    )  # fmt: skip
    if torch_ops.are_asked_for_without_derivatives(q, k_cache, v_cache, k, v):
        tensor, number = (lengths, None) if lengths is None or isinstance(lengths, Tensor) else (None, lengths)
        out, lse = _kvcache_op(*first, tensor, *last, number, wants_lse)
    else:
        out, lse = _attend(_Arguments._make((*first, lengths, *last)), wants_lse)
    if s_aux is not None:
        out, lse = sinks.absorb(out, lse, s_aux.detach())
    return (out, lse) if return_softmax_lse else out


class _Arguments(NamedTuple):
    """The function's arguments: tensors first."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    alibi_slopes: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    rotary_interleaved: bool
    num_splits: int

    @property
    def tensors(self) -> tuple[Any, ...]:
        """q to alibi_slopes; cache_seqlens may be a number."""
        return self[:12]

    @property
    def capacity(self) -> int:
        """Slots that one sequence can address."""
        page = self.k_cache.shape[1]
        return page if self.block_table is None else page * self.block_table.shape[1]

    @property
    def seqlen_new(self) -> int:
        return 0 if self.k is None else self.k.shape[1]


def _attend(arguments: _Arguments, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    scale = arguments.softmax_scale
    if scale is not None and type(scale) is not float:  # NumPy's 1 / sqrt(headdim), say, by which no step is kept
        arguments = arguments._replace(softmax_scale=checks.number("softmax_scale", scale))
    outline = _outline(arguments, return_lse)
    step = dispatch.kept_step(outline)
    if step is not None:
        _check_values(arguments)
    else:
        call = _checked_call(arguments, return_lse)
        new = _new_keys(arguments, call)
        with torch.no_grad():
            step = dispatch.new_step(outline, call, lambda: _call(_whole(arguments), return_lse), new)
            if step is None:
                result = run_forward(call, new)
                return result.out, result.lse.contiguous() if return_lse else None
    try:
        result = step.run(*arguments.tensors)
    except Unlike:
        _checked_call(arguments, return_lse)  # says it in flash-attn's words, if those know it
        raise
    except KernelsFailed as failure:
        dispatch.choose_instead(step.backend, _checked_call(arguments, return_lse), failure)
        return _attend(arguments, return_lse)
    dispatch.count(step.backend)
    return result.out, result.softmax_lse


def _whole(arguments: _Arguments) -> _Arguments:
    """The same over all of the cache's slots, where the length is a number."""
    return arguments._replace(cache_seqlens=None) if isinstance(arguments.cache_seqlens, int) else arguments


def _outline(arguments: _Arguments, return_lse: bool) -> signature.Key | None:
    """What a step is found by. A length that is a number is left out, since it differs from step to step."""
    if type(arguments.window_size_left) is not int or type(arguments.window_size_right) is not int:
        return None
    tensors, lengths, side = arguments.tensors, arguments.cache_seqlens, None
    if isinstance(lengths, int):
        side = _side_of_rows(arguments, lengths)
        if side is None:
            return None
        tensors = (*tensors[:7], None, *tensors[8:])
    return signature.outline(tensors, (*arguments[12:], return_lse, side))


def _side_of_rows(arguments: _Arguments, length: int) -> int | None:
    """Whether there are fewer (-1), as many (0) or more (1) keys than rows, on which it depends who serves; or none."""
    try:
        keys, rows = length + arguments.seqlen_new, arguments.q.shape[1]
    except (AttributeError, IndexError):
        return None  # the checks say it better
    return (keys > rows) - (keys < rows) if keys > 0 else None


def _checked_call(arguments: _Arguments, return_lse: bool) -> AttentionCall:
    _check(arguments)
    return _call(arguments, return_lse)


def _call(arguments: _Arguments, return_lse: bool) -> AttentionCall:
    q, k_cache, v_cache, _, _, _, _, lengths, batch_idx, leftpad, table, *_ = arguments
    window_size = arguments.window_size_left, arguments.window_size_right
    options = Options(
        0.0, arguments.softmax_scale, arguments.causal, window_size, arguments.softcap, arguments.alibi_slopes, False,
        return_lse,
    )  # fmt: skip
    return cache_call(q, k_cache, v_cache, lengths, arguments.seqlen_new, batch_idx, leftpad, table, options)


def _new_keys(arguments: _Arguments, call: AttentionCall) -> Append | None:
    if arguments.k is None:
        return None
    assert arguments.v is not None and arguments.cache_seqlens is not None
    cos, sin = arguments.rotary_cos, arguments.rotary_sin
    # flash-attn looks at no sin without cos, and rotates row i at its own position only if the mask is banded.
    return Append(
        arguments.k, arguments.v, cos, None if cos is None else sin, arguments.rotary_interleaved,
        arguments.cache_seqlens, not call.mask.is_full,
    )  # fmt: skip


def _check(arguments: _Arguments) -> None:
    q, k_cache, v_cache = arguments.q, arguments.k_cache, arguments.v_cache
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        checks.is_tensor(name, tensor)
    checks.tensors(q, k_cache, v_cache)
    q_shape, k_shape, v_shape = q.shape, k_cache.shape, v_cache.shape
    if len(q_shape) != 4 or len(k_shape) != 4:
        raise RuntimeError(
            "q must have shape (batch_size, seqlen_q, num_heads, head_size) and kcache must have shape "
            f"{_CACHE_SHAPE}, got {tuple(q_shape)} and {tuple(k_shape)}"
        )
    batch, head_dim = q_shape[0], q_shape[3]
    if batch == 0:
        raise RuntimeError(f"batch size must be positive, got q of shape {tuple(q_shape)}")
    if arguments.num_splits > 128:
        raise RuntimeError(f"num_splits > 128 not supported, got {arguments.num_splits}")
    _check_addressing(arguments)
    if k_shape[3] != head_dim:
        raise RuntimeError(f"kcache must have shape {_CACHE_SHAPE}, got {tuple(k_shape)} for q {tuple(q_shape)}")
    if v_shape != k_shape and (len(v_shape) != 4 or v_shape[:3] != k_shape[:3]):
        raise RuntimeError(f"vcache must have shape {_CACHE_SHAPE}, got {tuple(v_shape)}")
    checks.heads(q, k_cache, v_cache)
    if k_cache.stride(3) != 1 and k_cache.numel():
        raise AssertionError("k_cache must have contiguous last dimension")
    if v_cache.stride(3) != 1 and v_cache.numel():
        raise AssertionError("v_cache must have contiguous last dimension")
    if isinstance(arguments.cache_seqlens, Tensor):
        checks.per_sequence("seqlens_k", arguments.cache_seqlens, batch, q.device)
    if arguments.cache_leftpad is not None:
        checks.is_tensor("cache_leftpad", arguments.cache_leftpad)
        checks.per_sequence("leftpad_k", arguments.cache_leftpad, batch, q.device)
    _check_new_keys(arguments)
    _check_rotary(arguments)


def _check_addressing(arguments: _Arguments) -> None:
    q, k_cache, v_cache = arguments.q, arguments.k_cache, arguments.v_cache
    batch, index, table = q.shape[0], arguments.cache_batch_idx, arguments.block_table
    if table is not None:
        if index is not None:
            raise RuntimeError("Paged KVcache does not support cache_batch_idx")
        if arguments.cache_leftpad is not None:
            raise RuntimeError("We don't support Paged KV and leftpad_k running at the same time yet")
        checks.pages(q, k_cache, v_cache, table, batch)
    elif index is not None:
        checks.is_int32("cache_batch_idx", index, q.device)
        if index.shape != (batch,):
            raise RuntimeError(f"cache_batch_idx must have shape (batch_size), got {tuple(index.shape)}, batch {batch}")
    elif k_cache.shape[0] < batch:
        raise RuntimeError(
            f"kcache must have shape {_CACHE_SHAPE} with at least batch_size = {batch} rows, got {tuple(k_cache.shape)}"
        )


def _check_new_keys(arguments: _Arguments) -> None:
    q, k, v, lengths = arguments.q, arguments.k, arguments.v, arguments.cache_seqlens
    if k is None:
        if v is not None:
            raise RuntimeError("If value is supplied, key must also be passed in")
        _check_values(arguments)
        return
    if v is None:
        raise RuntimeError("If key is supplied, value must also be passed in")
    if lengths is None:
        raise RuntimeError("If key is supplied, seqlens_k must also be passed in")
    checks.is_tensor("k", k)
    checks.is_tensor("v", v)
    if k.dtype != q.dtype:
        raise RuntimeError(f"Key must have the same dtype as query, got {k.dtype} and {q.dtype}")
    if v.dtype != q.dtype:
        raise RuntimeError(f"Value must have the same dtype as query, got {v.dtype} and {q.dtype}")
    batch, nheads_k = q.shape[0], arguments.k_cache.shape[2]
    for name, new, cache in (("k", k, arguments.k_cache), ("v", v, arguments.v_cache)):
        expected = (batch, k.shape[1] if k.dim() > 1 else 0, nheads_k, cache.shape[3])
        if tuple(new.shape) != expected:
            raise RuntimeError(
                f"{name} must have shape (batch_size, seqlen_knew, num_heads_k, head_size) = {expected}, "
                f"got {tuple(new.shape)}"
            )
        checks.is_on(name, new, q.device)
    _check_values(arguments)


def _check_values(arguments: _Arguments) -> None:
    """New keys must fit, pages and rows exist. Only what the host knows, or can read for free, is checked here."""
    table, rows, lengths = arguments.block_table, arguments.cache_batch_idx, arguments.cache_seqlens
    if lengths is not None and (isinstance(lengths, int) or checks.may_read(lengths)):
        _check_capacity(arguments, lengths)
    if table is not None and checks.may_read(table):
        keys = arguments.capacity if lengths is None else lengths + arguments.seqlen_new
        checks.values_of_pages(arguments.k_cache, table, keys)
    if rows is not None and checks.may_read(rows):
        checks.values_of_rows(arguments.k_cache, rows)


def _check_capacity(arguments: _Arguments, lengths: int | Tensor) -> None:
    if isinstance(lengths, int):
        shortest = longest = lengths
    else:
        shortest, longest = int(lengths.min()), int(lengths.max())
    longest += arguments.seqlen_new
    if shortest < 0 or longest > arguments.capacity:
        where = "the kcache" if arguments.block_table is None else "block_table and its pages"
        given = lengths if isinstance(lengths, int) else lengths.tolist()
        raise RuntimeError(
            f"KV cache: max(seqlens_k) + seqlen_knew (= {longest}) exceeds the capacity addressable by {where} "
            f"(= {arguments.capacity}), or a length is negative: cache_seqlens is {given}"
        )


def _check_rotary(arguments: _Arguments) -> None:
    cos, sin, q = arguments.rotary_cos, arguments.rotary_sin, arguments.q
    if cos is None:
        return
    if arguments.k is None:
        raise RuntimeError(
            "If rotary cos/sin are provided, new key / value to be appended to KV cache must also be provided"
        )
    if sin is None:
        raise RuntimeError("If rotary cos is provided, rotary sin must also be provided")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        checks.is_tensor(name, table)
        if table.dim() != 2:
            raise RuntimeError(f"{name} must have shape (seqlen_ro, rotary_dim / 2), got {tuple(table.shape)}")
        checks.is_on(name, table, q.device)
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > q.shape[-1]:
        raise RuntimeError(f"rotary_dim must be <= headdim, got {rotary_dim} and {q.shape[-1]}")
    if rotary_dim % 16:
        raise RuntimeError(f"Only rotary dimensions divisible by 16 are currently supported, got {rotary_dim}")
    if cos.shape[0] < arguments.capacity:
        raise RuntimeError(
            f"cos/sin seqlen must be at least the seqlen of KV cache, got {cos.shape[0]} and {arguments.capacity}"
        )
    if sin.shape != cos.shape:
        raise RuntimeError(f"rotary_sin must have shape {tuple(cos.shape)}, got {tuple(sin.shape)}")
    if cos.dtype != q.dtype or sin.dtype != q.dtype:
        raise RuntimeError(f"rotary_cos must have the same dtype as query, got {cos.dtype}, {sin.dtype}, {q.dtype}")


_SCHEMA = torch_ops.schema(_Arguments).replace(
    "Tensor k_cache, Tensor v_cache", "Tensor(a!) k_cache, Tensor(b!) v_cache"
)


@torch.library.custom_op(
    "flash_attn_compat::kvcache",
    mutates_args=("k_cache", "v_cache"),
    schema=f"({_SCHEMA}, SymInt? cache_seqlen, bool return_softmax_lse) -> (Tensor, Tensor)",
)
def _kvcache_op(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *rest, cache_seqlen, return_softmax_lse = others
    arguments = _Arguments(q, *rest)
    if cache_seqlen is not None:
        arguments = arguments._replace(cache_seqlens=cache_seqlen)
    out, lse = _attend(arguments, return_softmax_lse)
    return out.contiguous(), q.new_empty(0, dtype=lse_dtype(q.dtype)) if lse is None else lse


@_kvcache_op.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, nheads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, nheads, v_cache.shape[-1]))
    *_, return_softmax_lse = arguments
    lse_shape = (batch, nheads, seqlen_q) if return_softmax_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))
