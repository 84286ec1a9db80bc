"""FlexAttention on the fused kernels: a caller's score_mod, mask_mod and BlockMask, as C++ and lists of tiles.

    run = prepare(mods, inputs, scale)          # once for all calls of these shapes, strides, numbers and text
    out, lse = run(inputs)

    run = prepare_backward(mods, inputs, scale, upstream)
    dq, dk, dv, *of_captured = run(inputs, upstream)

Nothing here knows PyTorch's operators: whoever captures a caller's functions prints them as ``Mods.text``.

**The text** becomes the header flex_mods.cuh. It defines, in this order,

    DEVICE float flex_score(const FlexParams &f, float score, int b, int h, int q, int kv)
    DEVICE float flex_slope(const FlexParams &f, float score, int b, int h, int q, int kv)
    DEVICE bool flex_mask(const FlexParams &f, int b, int h, int q, int kv)
    DEVICE void flex_gradients(const FlexParams &f, float slope, float score, int b, int h, int q, int kv)

score: q k times scale, in natural units; flex_slope: the derivative of flex_score by ``score``; slope, in
flex_gradients: the derivative of the loss by flex_score's result, which the function times its own derivatives adds to
``gradients`` by flex_add. The last function is there only with ``Mods.gradients``. The functions may call what
cuda/flex.cuh defines, and read ``f``:

    flex_float(f, i, offset)                    captured tensor i at an offset in elements (i64); also flex_half,
                                                flex_bfloat16, flex_bool, flex_u8, flex_i8, flex_i16, flex_i32, flex_i64
    f.size[i][d], f.stride[i][d]                its shape and strides (int), d < 4
    f.numbers[i]                                captured integer i (i64)
    flex_within(index, size)                    a caller's index, from the end if negative, moved into the tensor
    flex_add(f, i, offset, x)                   adds x to gradient i: contiguous, of its captured tensor's shape

b, h, q and kv are always those of the call: 0 <= b < batch, h < heads, q < rows, kv < keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

# The most captured tensors, their dims, and captured integers.
MAX_CAPTURED, MAX_DIMS, MAX_NUMBERS = 16, 4, 8


class Mods(NamedTuple):
    """A caller's functions. has_score, has_mask: whether flex_score changes a score, flex_mask hides one.

    gradients: the captured tensors whose gradients flex_gradients adds up
    """

    text: str
    has_score: bool
    has_mask: bool
    gradients: tuple[int, ...] = ()


class BlockLists(NamedTuple):
    """One direction of a BlockMask: its kv_* tensors, or the twins q_*; int32, batch and heads may be 1.

    num: (batch, heads, blocks of rows); indices: (batch, heads, blocks of rows, blocks of keys); rows and keys change
    places in the twins. full_num, full_indices: blocks that no mask_mod hides; None for none.
    """

    num: Tensor
    indices: Tensor
    full_num: Tensor | None = None
    full_indices: Tensor | None = None


class Blocks(NamedTuple):
    """A BlockMask: its BLOCK_SIZE in rows and keys, and its lists. of_keys: the twins, which a backward needs."""

    rows: int
    keys: int
    of_rows: BlockLists
    of_keys: BlockLists | None = None


class FlexInputs(NamedTuple):
    """A call's tensors, of any strides: q (batch, heads, rows, dim), k and v (batch or 1, heads_k, keys, dim and dim_v).

    captured: captured tensors in the order of the text; numbers: captured integers
    blocks: None where every tile of scores is computed
    """

    q: Tensor
    k: Tensor
    v: Tensor
    captured: tuple[Tensor, ...] = ()
    numbers: tuple[int, ...] = ()
    blocks: Blocks | None = None


class FlexUpstream(NamedTuple):
    """A forward's results, and their gradients. dlse: None for none"""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None


ForwardRun = Callable[[FlexInputs], tuple[Tensor, Tensor]]
BackwardRun = Callable[[FlexInputs, FlexUpstream], tuple[Tensor, ...]]


def decline_reason(mods: Mods, inputs: FlexInputs, backward: bool) -> str | None:
    """Return the reason why no kernel serves such calls, or None. backward: whether gradients are asked for"""
    raise NotImplementedError


def prepare(mods: Mods, inputs: FlexInputs, scale: float) -> ForwardRun:
    """Return the run for all calls with the text, shapes, strides, dtypes and numbers of these inputs.

    It returns out, of q's dtype and with its axes in the order in which they lie in q, and the LSE of
    torch.ops.higher_order.flex_attention: (batch, heads, rows) fp32 in units of log2, -inf for a row without keys.
    Raises ValueError for block lists that do not fit q and k, KernelError where a kernel fails.
    """
    raise NotImplementedError


def prepare_backward(mods: Mods, inputs: FlexInputs, scale: float, upstream: FlexUpstream) -> BackwardRun:
    """Return the run for all calls with the text, shapes, strides, dtypes and numbers of these inputs and upstream.

    It returns dq, dk and dv in the shapes and dtypes of q, k and v, then the gradients of ``mods.gradients``. The LSE
    and its gradient are as ``prepare`` returns the LSE. Raises as ``prepare``.
    """
    raise NotImplementedError
