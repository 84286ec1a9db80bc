"""FlexAttention on the fused kernels: a caller's score_mod, mask_mod and BlockMask, as C++ and lists of tiles.

    run = prepare(mods, inputs, scale)          # once for all calls of these shapes, strides, numbers and text
    out, lse = run(inputs)

    run = prepare_backward(mods, inputs, scale, upstream)
    dq, dk, dv, *of_captured = run(inputs, upstream)

This file knows no operators of PyTorch: the callers of this file pass a caller's functions as C++ in ``Mods.text``.

**The text** becomes the header flex_mods.cuh. It defines, in this order,

    DEVICE float flex_score(const FlexParams &f, float score, int b, int h, int q, int kv)
    DEVICE float flex_slope(const FlexParams &f, float score, int b, int h, int q, int kv)
    #define FLEX_STEEPEST                     // with the next function, or neither
    DEVICE float flex_steepest(const FlexParams &f, int b, int h)
    DEVICE bool flex_mask(const FlexParams &f, int b, int h, int q, int kv)
    #define FLEX_SIGHT                        // with the next function, or neither
    DEVICE int flex_sight(const FlexParams &f, int b, int h, int q, int q_last, int kv, int kv_last)
    constexpr int FLEX_SUMS
    DEVICE void flex_gradients(const FlexParams &f, FlexSum (&sums)[FLEX_SUMS], float dscore, float score, int b, int h,
                               int q, int kv)

score: q k times scale; flex_slope: the derivative of flex_score by ``score``, whose magnitude flex_steepest returns a
bound of, for head h of sequence b; dscore: the derivative of the loss by
flex_score's result. flex_gradients multiplies dscore by the derivatives of flex_score by captured tensors, and adds the
products to ``gradients`` by flex_add. Each of its FLEX_SUMS calls of flex_add has its own element of ``sums``. Without
``Mods.gradients``, FLEX_SUMS and flex_gradients are missing. flex_sight: 1 if flex_mask may show a score of the rows q
to q_last and the keys kv to kv_last, plus 2 if it shows all. The functions may call what cuda/scores/flex.cuh defines,
and read ``f``:

    flex_float(f, i, offset)                    captured tensor i at an offset in elements (i64); also flex_half,
                                                flex_bfloat16, flex_bool, flex_u8, flex_i8, flex_i16, flex_i32, flex_i64
    f.size[i][d], f.stride[i][d]                its shape and strides (int), d < 4
    f.numbers[i]                                captured integer i (i64)
    flex_within(index, size)                    a caller's index, counted from the end if negative, clamped to the axis
    flex_add(f, sums[n], i, offset, x)          adds x to gradient i: contiguous, of its captured tensor's shape

b, h, q and kv are always those of the call: 0 <= b < batch, h < heads, q < rows, kv < keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends.base import HALF_DTYPES
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import BF16_AS_FP16, HEAD_DIMS, SHORT, Kind
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.launching import calls, grids, layouts, params
from flash_attn_compat.backends.fused.launching.launcher import Plan
from flash_attn_compat.core import kernel_layout
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.flex.ranges import MOST_INDEX
from flash_attn_compat.core.inputs import DenseInputs, new_tuple
from flash_attn_compat.core.mask import Mask


class Mods(NamedTuple):
    """A caller's functions as C++. has_score, has_mask: whether flex_score changes any score, and flex_mask hides any.

    gradients: indices of the captured tensors whose gradients flex_gradients adds up, in fp32
    """

    text: str
    has_score: bool
    has_mask: bool
    gradients: tuple[int, ...] = ()


class BlockLists(NamedTuple):
    """A BlockMask's lists in one direction: its tensors kv_* (blocks of keys by rows) or q_* (blocks of rows by keys).

    All are int32; batch and heads may be 1. For kv_*:
    num: (batch, heads, blocks of rows); indices: (batch, heads, blocks of rows, blocks of keys)
    full_num, full_indices: likewise, of the blocks in which mask_mod hides nothing; None if there are none
    """

    num: Tensor
    indices: Tensor
    full_num: Tensor | None = None
    full_indices: Tensor | None = None


class Blocks(NamedTuple):
    """A BlockMask. rows, keys: its BLOCK_SIZE; of_rows: its lists kv_*; of_keys: its lists q_*, for a backward."""

    rows: int
    keys: int
    of_rows: BlockLists
    of_keys: BlockLists | None = None


class FlexInputs(NamedTuple):
    """A call's tensors, of any strides: q (batch, heads, rows, dim), k and v (batch or 1, heads_k, keys, dim or dim_v).

    captured: captured tensors in the order of the text; numbers: captured integers
    blocks: the BlockMask; None if every tile of scores is computed
    """

    q: Tensor
    k: Tensor
    v: Tensor
    captured: tuple[Tensor, ...] = ()
    numbers: tuple[int, ...] = ()
    blocks: Blocks | None = None


class FlexUpstream(NamedTuple):
    """The results of a forward and their gradients. dlse: None if the LSE has no gradient"""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None


FlexRun = Callable[[FlexInputs], tuple[Tensor, Tensor]]
FlexBackwardRun = Callable[[FlexInputs, FlexUpstream], tuple[Tensor, ...]]

_CAPTURED_DTYPES = frozenset(
    {*HALF_DTYPES, torch.float32, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)
_MAX_INT = 2**31 - 1
# _SPECIAL: functions in a score_mod's text that take several instructions. _NARROW_HEAD: up to this head dim, a
# score_mod without such functions leaves enough registers for the tile of unchanged scores.
_SPECIAL = re.compile(
    r"(op|flex)_(\w*div|fmod|remainder|pow|sqrt|rsqrt|recip|exp|log|\w*sin|\w*cos|\w*tan|erf|sigmoid)"
)
_NARROW_HEAD = 64
# Kernels take larger blocks of a BlockMask as blocks of so many rows, which no sequence exceeds.
_MAX_BLOCK = 2**20


def decline_reason(mods: Mods, inputs: FlexInputs, backward: bool) -> str | None:
    """Return the reason why no kernel can compute calls like this one, or None. backward: whether it needs gradients"""
    q, k, v = inputs[:3]
    if {x.dtype for x in (q, k, v)} not in ({torch.float16}, {torch.bfloat16}):
        return f"q, k and v must all be fp16 or all bf16; got {q.dtype}, {k.dtype} and {v.dtype}"
    if max(q.shape[-1], v.shape[-1]) > HEAD_DIMS[-1]:
        return f"head dims up to {HEAD_DIMS[-1]}; got {q.shape[-1]} and {v.shape[-1]}"
    if not _fit(q, k, v):
        return f"shapes that do not fit, or values that broadcast: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if not all(x.numel() for x in (q, k, v)):
        return "tensors without elements"
    if len(inputs.captured) > params.CAPTURED or len(inputs.numbers) > params.NUMBERS:
        return f"more than {params.CAPTURED} captured tensors or {params.NUMBERS} captured integers"
    for x in inputs.captured:
        if x.dtype not in _CAPTURED_DTYPES or x.dim() > params.MAX_DIMS or not x.numel():
            return f"a captured tensor of {x.dtype} and shape {tuple(x.shape)}"
        if max((*x.stride(), *x.shape), default=0) > _MAX_INT:
            return "a captured tensor with a stride above 2^31"
    lists = [x for pair in _lists(inputs.blocks, True).values() for x in pair if x is not None]
    if any(layouts.effective_stride(x, axis) > _MAX_INT for x in lists for axis in range(x.dim())):
        return "lists of a BlockMask with a stride above 2^31"
    if inputs.blocks is not None and max(q.shape[2], k.shape[2]) > _MAX_BLOCK < max(inputs.blocks[:2]):
        return f"blocks of more than {_MAX_BLOCK:,} queries or keys over longer sequences"
    if max(q.shape[2], k.shape[2]) > MOST_INDEX:
        return f"more than {MOST_INDEX:,} queries or keys"
    if len(mods.gradients) > params.GRADIENTS:
        return f"gradients of more than {params.GRADIENTS} captured tensors"
    if not has_tiles(mods, inputs, backward):
        blocks = inputs.blocks
        return f"blocks of {blocks and blocks.rows} queries and {blocks and blocks.keys} keys: tiles are larger"
    return None


def has_tiles(mods: Mods, inputs: FlexInputs, backward: bool) -> bool:
    """Return whether the kernels have tiles that lie within the BlockMask's blocks.

    backward: ask for the tiles of the backward, too
    """
    q, k, v = inputs[:3]
    if inputs.blocks is None or not (q.numel() and k.numel() and v.numel() and _fit(q, k, v)):
        return True
    kind = calls.choose_kind(_call_of(inputs, 1.0), 8)
    entries = ("forward", "dkdv", "dq") if backward else ("forward",)
    return all(_fit_tile(entry, kind, mods, inputs.blocks) is not None for entry in entries)


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether values have the batch, heads and rows of keys, and keys those that the kernels read for q."""
    if k.shape[:3] != v.shape[:3] or k.shape[0] not in (1, q.shape[0]):
        return False
    return q.shape[-1] == k.shape[-1] and q.shape[1] % k.shape[1] == 0


def load(mods: Mods, inputs: FlexInputs, backward: bool) -> None:
    """Compile and load, in parallel, the kernels for calls with these inputs, which may be fake. Raises KernelError.

    backward: load the kernels of the backward instead of the forward's
    """
    kind, device = calls.choose_kind(_call_of(inputs, 1.0), 8), inputs.q.get_device()
    entries = ("delta", "dkdv", "dq") if backward else ("forward",)
    found = [make_variant(entry, kind, mods, inputs.blocks) for entry in entries]
    nvrtc.load_all(found, device)
    for variant in found:
        nvrtc.kernel(variant, device)


def prepare(mods: Mods, inputs: FlexInputs, scale: float) -> FlexRun:
    """Return a function (run) that computes every forward with the text, shapes, strides, dtypes and numbers given.

    The run returns out and the LSE. out has q's dtype, and its axes lie in memory in the order of q's. The LSE is that
    of torch.ops.higher_order.flex_attention: (batch, heads, rows) fp32, of base 2, -inf for a row without keys.
    Raises ValueError for block lists that do not fit q and k, KernelError if a kernel fails.
    """
    check_blocks(inputs)
    given = _call_of(inputs, scale)
    vec = layouts.vector_size((given.q, given.k, given.v), in_place=False)
    call = (
        given if vec else given._replace(q=layouts.align(given.q), k=layouts.align(given.k), v=layouts.align(given.v))
    )
    kind = calls.enable_copies(call, calls.choose_kind(call, vec or 8), False)
    out_strides = _dense_strides(given.q, call.out_shape)
    fields = calls.call_fields(call) | _flex_fields(inputs)
    plan = Plan(call, kind, fields | {"out_s": _row_strides(out_strides)})
    plan.add_output("out", _heads_first(call.out_shape), call.q.dtype, strides=_heads_first(out_strides))
    plan.add_output("lse", call.lse_shape, torch.float32)
    if kind.type == BF16_AS_FP16:
        plan.add_maxima_pass(of_rows=False)
    variant = make_variant("forward", kind, mods, inputs.blocks)
    grid = grids.choose_grid(call.q.shape[1], variant.rows, call.batch, call.nheads, None)
    plan.add_tiled_launch(variant, grid, call.nheads, None)
    names, others = _addresses(inputs, backward=False)
    plan, width = plan.load(others=dict(zip(names, others))), given.v.shape[-1]
    is_widened = call.v.shape[-1] != width

    def run(inputs: FlexInputs) -> tuple[Tensor, Tensor]:
        q, k, v = inputs[:3] if vec else map(layouts.align, _rows_first(inputs))  # a plan reads only addresses
        tensors = new_tuple(DenseInputs, (q, k, v, None, None, None))
        outputs = plan.run(tensors, others=_addressed(inputs, backward=False))
        out = outputs["out"]
        return _narrowed(out, width) if is_widened else out, outputs["lse"]

    return run


def prepare_backward(mods: Mods, inputs: FlexInputs, scale: float, upstream: FlexUpstream) -> FlexBackwardRun:
    """Return a function (run) that computes every backward with the text, shapes, strides, dtypes and numbers given.

    The run returns dq, dk and dv in the shapes and dtypes of q, k and v, then the gradients of ``mods.gradients``. The
    LSE in ``upstream`` is what a run of ``prepare`` returned. Raises as ``prepare`` does.
    """
    check_blocks(inputs)
    if inputs.blocks is not None and inputs.blocks.of_keys is None:
        raise ValueError("a backward needs the lists of a BlockMask by keys (q_num_blocks and q_indices); got None")
    given = _call_of(inputs, scale)
    tensors = given.q, given.k, given.v, upstream.out.transpose(1, 2), upstream.dout.transpose(1, 2)
    vec = layouts.vector_size(tensors, in_place=False)
    q, k, v, out, dout = tensors if vec else map(layouts.align, tensors)
    call = given._replace(q=q, k=k, v=v)
    kind = calls.enable_copies(call, calls.choose_kind(call, vec or 8), True)
    targets = {"dq": q, "dk": k, "dv": v}
    likes = zip(targets.items(), (given.q, given.k, given.v))
    target_strides = {name: _dense_strides(like, tuple(x.shape)) for (name, x), like in likes}
    fields = calls.call_fields(call) | _flex_fields(inputs)
    fields |= {"out_s": layouts.kernel_strides(out), "dout_s": layouts.kernel_strides(dout)}
    fields |= {f"{name}_s": _row_strides(strides) for name, strides in target_strides.items()}
    plan = Plan(call, kind, fields)
    for name, x in targets.items():
        plan.add_output(name, _heads_first(tuple(x.shape)), x.dtype, strides=_heads_first(target_strides[name]))
    if kind.type == BF16_AS_FP16:
        plan.add_maxima_pass(of_rows=True)
        plan.add_output("absmax_dout", (2, call.batch, call.nheads_k), torch.int32, starts_as_zero=True)
    plan.add_output("delta", call.lse_shape, torch.float32)
    if kind.features.copied:
        elements = max(q.numel() + dout.numel(), k.numel() + v.numel())
        plan.add_output("copies", (elements,), torch.float16)
    for entry in ("delta", "dkdv", "dq"):
        variant = make_variant(entry, kind, mods, inputs.blocks)
        longest, heads = (k.shape[1], call.nheads_k) if entry == "dkdv" else (q.shape[1], call.nheads)
        grid = grids.choose_grid(longest, variant.rows, call.batch, heads, None)
        plan.add_tiled_launch(variant, grid, heads, None if entry == "dkdv" else 1)
    gradients = {f"gradient_{i}": _zeros_like(inputs.captured[at]) for i, at in enumerate(mods.gradients)}
    names, others = _addresses(inputs, backward=True)
    names, others = [*names, *gradients], [*others, *gradients.values()]
    lse, dlse = (x if x is None else x.contiguous() for x in (upstream.lse, upstream.dlse))
    results = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
    plan = plan.load(others={**results, **dict(zip(names, others))})

    def run(inputs: FlexInputs, upstream: FlexUpstream) -> tuple[Tensor, ...]:
        out, lse, dout, dlse = upstream
        q, k, v = inputs[:3]
        if not vec:
            rows_first = (*_rows_first(inputs), out.transpose(1, 2), dout.transpose(1, 2))
            q, k, v, out, dout = map(layouts.align, rows_first)
        lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
        wanting = [inputs.captured[at] for at in mods.gradients]
        sums = [_zeros_like(x) for x in wanting]
        others = dout, out, lse, dlse, *_addressed(inputs, backward=True), *sums
        found = plan.run(DenseInputs(q, k, v), others=others)
        gradients = [_in_shape_of(x, found[name]) for name, x in zip(("dq", "dk", "dv"), inputs[:3])]
        return (*gradients, *[total.to(x.dtype) for total, x in zip(sums, wanting)])

    return run


def _call_of(inputs: FlexInputs, scale: float) -> AttentionCall:
    q, k, v = _rows_first(inputs)
    return AttentionCall(q, k, v, scale, Mask(None, None), q.shape[1], k.shape[1])


def _rows_first(inputs: FlexInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as (batch, rows, heads, dim). If all sequences share k and v (batch 1), expand these."""
    q, k, v = inputs[:3]
    if k.shape[0] < q.shape[0]:
        k, v = k.expand(q.shape[0], -1, -1, -1), v.expand(q.shape[0], -1, -1, -1)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _zeros_like(x: Tensor) -> Tensor:
    """Return a contiguous tensor of zeros, in which the gradient of ``x`` is added up."""
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def _in_shape_of(like: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient in the shape of ``like``: summed over all sequences if they share that input."""
    found = _narrowed(gradient, like.shape[-1])
    return found if found.shape[0] == like.shape[0] else found.sum(0, keepdim=True)


def _narrowed(x: Tensor, width: int) -> Tensor:
    """Return the first ``width`` channels, without gaps in memory, with the axes in memory in the order of x's."""
    return x if x.shape[-1] == width else kernel_layout.narrowed(x, width).clone()


def _dense_strides(like: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides without gaps for ``shape``, with the axes in memory in the order of those of ``like``."""
    order = sorted(range(len(shape) - 1), key=like.stride, reverse=True)
    strides, step = [1] * len(shape), shape[-1]
    for axis in reversed(order):
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


def _heads_first(x: tuple[int, ...]) -> tuple[int, ...]:
    """Reorder a shape, or strides, from (batch, rows, heads, dim) to (batch, heads, rows, dim)."""
    batch, rows, heads, dim = x
    return batch, heads, rows, dim


def _row_strides(strides: tuple[int, ...]) -> tuple[int, int, int]:
    batch, row, head, _ = strides
    return batch, row, head


# ---- Variants


def make_variant(entry: str, kind: Kind, mods: Mods, blocks: Blocks | None) -> Variant:
    """Return the variant of the kernel ``entry`` with a caller's functions, and a tile that fits into ``blocks``."""
    if entry == "delta":
        plain = variants.delta(kind)
        return plain._replace(macros=(*plain.macros, ("FLEX", 1)))
    variant = _fit_tile(entry, kind, mods, blocks)
    if variant is None:
        raise ValueError(f"no tile of {entry} fits into blocks of {blocks and blocks.rows} queries")
    macros = [(name, value) for name, value in variant.macros if name != "SOFTCAP"]
    macros += [("FLEX", 1 if blocks is None else 2)]
    adds = entry == "dq" and bool(mods.gradients)  # only dq adds them: each score is in one tile of dq
    has = {"FLEX_SCORE": mods.has_score, "FLEX_MASK": mods.has_mask, "FLEX_GRADIENTS": adds}
    macros += [(name, 1) for name, value in has.items() if value]
    if blocks is not None:
        macros += [("FLEX_BLOCK_Q", min(blocks.rows, _MAX_BLOCK)), ("FLEX_BLOCK_K", min(blocks.keys, _MAX_BLOCK))]
    return variant._replace(macros=tuple(macros), text=mods.text)


def _fit_tile(entry: str, kind: Kind, mods: Mods, blocks: Blocks | None) -> Variant | None:
    """Return the first variant whose tile fits into a block: the usual tile, the tile for few rows, or half of that.

    A score_mod gets the tile of softcap, since it needs as many registers, unless it is simple and heads are narrow.
    """
    is_simple = kind.size <= _NARROW_HEAD and not _SPECIAL.search(mods.text.partition("flex_slope")[0])
    like = kind.replace(softcap=mods.has_score and not is_simple, flex=True)
    few = like.replace(few_rows=True)
    for choice in (like, few, few.replace(short=SHORT)):
        variant = variants.MAKERS[entry](choice)
        if blocks is None:
            return variant
        rows, streamed = (blocks.keys, blocks.rows) if entry == "dkdv" else (blocks.rows, blocks.keys)
        if rows % variant.rows == streamed % dict(variant.macros)["STREAMED_ROWS"] == 0:
            return variant
    return None


# ---- FlexParams


def _lists(blocks: Blocks | None, backward: bool) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Return (num, indices) of each list of the BlockMask, by the list's name in params.FLEX_LISTS."""
    if blocks is None:
        return {}
    of_rows, of_keys = blocks.of_rows, blocks.of_keys if backward else None
    found = {"kv": of_rows[:2], "full_kv": of_rows[2:]}
    return found if of_keys is None else found | {"q": of_keys[:2], "full_q": of_keys[2:]}


def _addresses(inputs: FlexInputs, backward: bool) -> tuple[list[str], list[Tensor]]:
    """Return the names of the tensors that FlexParams points to, in their order there, and the tensors."""
    found = _lists(inputs.blocks, backward)
    named = {f"{name}_num": num for name, (num, _) in found.items()}
    named |= {f"{name}_indices": indices for name, (_, indices) in found.items()}
    named |= {f"captured_{i}": x for i, x in enumerate(inputs.captured)}
    present = {name: x for name, x in named.items() if x is not None}
    return [*present], [*present.values()]


def _addressed(inputs: FlexInputs, backward: bool) -> Sequence[Tensor]:
    """Return only the tensors of ``_addresses``, which takes less time in each call."""
    blocks = inputs.blocks
    if blocks is None:
        return inputs.captured
    if not backward:
        num, indices, full_num, full_indices = blocks.of_rows
        if full_num is not None and full_indices is not None:
            return (num, full_num, indices, full_indices, *inputs.captured)
        return (num, indices, *inputs.captured)
    lists = (*blocks.of_rows, *(blocks.of_keys or ()))
    return [x for x in (*lists[::2], *lists[1::2], *inputs.captured) if x is not None]


def _flex_fields(inputs: FlexInputs) -> dict[str, params.Value]:
    fields: dict[str, params.Value] = {}
    for name, (num, indices) in _lists(inputs.blocks, True).items():
        if num is not None and indices is not None:
            apart = [layouts.effective_stride(x, axis) for x in (num, indices) for axis in range(x.dim())]
            fields[f"{name}_list"] = (*apart, *indices.shape[2:])
    for i, x in enumerate(inputs.captured):
        rest = (0,) * (params.MAX_DIMS - x.dim())
        fields[f"size_{i}"], fields[f"stride_{i}"] = (*x.shape, *rest), (*x.stride(), *rest)
    if inputs.numbers:
        fields["numbers"] = (*inputs.numbers, *(0,) * (params.NUMBERS - len(inputs.numbers)))
    return fields


def check_blocks(inputs: FlexInputs) -> None:
    """Raise ValueError unless dtype, batch, heads, rows and strides of every list of the BlockMask fit the call."""
    blocks, (batch, heads, rows, _), keys = inputs.blocks, inputs.q.shape, inputs.k.shape[2]
    if blocks is None:
        return
    for name, (num, indices) in _lists(blocks, True).items():
        if num is None or indices is None:
            if num is not indices:
                raise ValueError(f"a BlockMask needs both {name}_num_blocks and {name}_indices, or neither")
            continue
        least = -(-rows // blocks.rows) if name.endswith("kv") else -(-keys // blocks.keys)
        shapes = f"{name}_num_blocks {tuple(num.shape)} and {name}_indices {tuple(indices.shape)}"
        if num.dtype != torch.int32 or indices.dtype != torch.int32:
            raise ValueError(f"the lists of a BlockMask must be int32; got {name}: {num.dtype} and {indices.dtype}")
        if num.dim() != 3 or indices.dim() != 4 or num.shape != indices.shape[:3]:
            raise ValueError(f"the lists of a BlockMask must have 3 and 4 dims alike; got {shapes}")
        if indices.shape[0] not in (1, batch) or indices.shape[1] not in (1, heads) or indices.shape[2] < least:
            raise ValueError(
                f"the lists of a BlockMask must have batch 1 or {batch}, heads 1 or {heads}, and at least {least} "
                f"blocks of {blocks.rows} queries or {blocks.keys} keys; got {shapes}"
            )
