"""The only place where a tensor becomes an address. What a kernel may rely on is checked right there.

A plan holds everything of a launch that follows from shapes, strides and options; it is made once per such
signature. What is left for each call are the addresses.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends.fused import loader, params, variants
from flash_attn_compat.backends.fused.loader import Kernel, Target
from flash_attn_compat.backends.fused.variants import Kind, Variant
from flash_attn_compat.engine import dropout
from flash_attn_compat.engine.append import Append, Unlike
from flash_attn_compat.engine.call import AttentionCall

_LARGEST_INT = 2**31 - 1
# Longer windows than a sequence that fits a GPU; the kernels add them to positions.
_LONGEST_WINDOW = 2**29
_MOST_PLANS = 4096
# Words at the start of a workspace: one for each tile of a decode call with splits.
_COUNTERS = 1024
# Elements up to which loading one by one costs less than copying into place first.
SMALL = 2**18

Plan = TypeVar("Plan")
_NOTHING_ELSE = (0,) * 7
_FLOAT, _INT, _LONG = torch.float32, torch.int32, torch.int64


class _Arguments(threading.local):
    """Each thread's struct Params; the driver copies it at the launch."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(params.SIZE)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.pointers = ctypes.c_void_p(ctypes.addressof(self._pointers))


arguments = _Arguments()


def submit(kernel: Kernel, blocks: int, device: int) -> None:
    """Launch ``kernel`` with this thread's ``arguments`` on the current stream of ``device``."""
    loader.driver().launch(kernel, blocks, device, arguments.pointers)


def stream(device: int) -> int:
    """PyTorch's current stream of ``device``."""
    current: int = torch._C._cuda_getCurrentRawStream(device)
    return current


def note_written(*tensors: Tensor) -> None:
    """Tell autograd, as PyTorch's own operators do, that tensors of the caller's were written in place."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def address(name: str, tensor: Tensor, dtype: torch.dtype, device: int, size: int) -> int:
    """Where ``tensor`` begins, once it is known to hold ``size`` bytes of ``dtype`` from there on, on ``device``."""
    if (
        tensor.dtype is dtype
        and tensor.get_device() == device
        and tensor.storage_offset() * dtype.itemsize + size <= tensor.untyped_storage().nbytes()
        and not tensor.is_neg()
    ):
        return tensor.data_ptr()
    raise Unlike(
        f"{name} must be {dtype} on device {device} with {size} bytes in its storage from its first element on, not a "
        f"lazily negated view; got {tensor.dtype} on {tensor.device}, shape {tuple(tensor.shape)}, strides "
        f"{tensor.stride()}, storage of {tensor.untyped_storage().nbytes()} bytes, offset {tensor.storage_offset()}"
    )


class Inputs:
    """Looks up what a call is made of: as many bytes as the call had that it was made for."""

    def __init__(self, call: AttentionCall) -> None:
        self.device, self.dtype = call.q.get_device(), call.q.dtype
        self.sizes = reach(call.q), reach(call.k), reach(call.v), reach(call.block_table), reach(call.alibi_slopes)
        self.starts, self.lengths = 4 * (call.batch + 1), 4 * call.batch
        others = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.leftpad_k, call.block_table
        self.has_nothing_else = all(other is None for other in (*others, call.alibi_slopes))

    def of(self, call: AttentionCall, rng_state: Tensor | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Addresses of q, k, v, then of cu_seqlens_q to rng_state, as in struct Params; 0 for what is not there."""
        return self.of_tensors(*call[:3], *call[9:15], rng_state)

    def of_tensors(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        cu_q: Tensor | None,
        cu_k: Tensor | None,
        used: Tensor | None,
        leftpad: Tensor | None,
        table: Tensor | None,
        rng_state: Tensor | None,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The same, of a call's tensors in its order."""
        device, dtype, starts, lengths = self.device, self.dtype, self.starts, self.lengths
        q_size, k_size, v_size, table_size, slopes_size = self.sizes
        tensors = (
            address("q", q, dtype, device, q_size),
            address("k", k, dtype, device, k_size),
            address("v", v, dtype, device, v_size),
        )
        if self.has_nothing_else and rng_state is None:
            return tensors, _NOTHING_ELSE
        return tensors, (
            0 if cu_q is None else address("cu_seqlens_q", cu_q, _INT, device, starts),
            0 if cu_k is None else address("cu_seqlens_k", cu_k, _INT, device, starts),
            0 if used is None else address("seqused_k", used, _INT, device, lengths),
            0 if leftpad is None else address("leftpad_k", leftpad, _INT, device, lengths),
            0 if table is None else address("block_table", table, _INT, device, table_size),
            0 if slopes is None else address("alibi_slopes", slopes, _FLOAT, device, slopes_size),
            0 if rng_state is None else address("rng_state", rng_state, _LONG, device, 16),
        )


def reach(tensor: Tensor | None) -> int:
    """Bytes from the first element to the last one that shape and strides can reach, both included."""
    if tensor is None or not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


class NewInputs:
    """The same for what is appended."""

    def __init__(self, new: Append) -> None:
        self.dtype, self.device, self.rows = new.k.dtype, new.k.get_device(), new.k.shape[1]
        self.sizes = reach(new.k), reach(new.v), reach(new.rotary_cos)

    def of(self, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[int, int, int, int]:
        """Addresses of k_new to rotary_sin."""
        dtype, device, (k_size, v_size, rotary_size) = self.dtype, self.device, self.sizes
        return (
            address("k", k, dtype, device, k_size),
            address("v", v, dtype, device, v_size),
            0 if cos is None else address("rotary_cos", cos, dtype, device, rotary_size),
            0 if sin is None else address("rotary_sin", sin, dtype, device, rotary_size),
        )


def strides(tensor: Tensor) -> tuple[int, int, int]:
    """(batch or page, row, head) in elements; 0 for the batch of packed tensors."""
    if tensor.dim() == 3:
        return 0, tensor.stride(0), tensor.stride(1)
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, int, int]:
    """(batch, row, head) of a contiguous (batch, rows, heads, d), or (total, heads, d)."""
    heads, channels = shape[-2], shape[-1]
    row = heads * channels
    return (shape[1] * row if len(shape) == 4 else 0), row, channels


def is_readable(tensor: Tensor) -> bool:
    """Whether a kernel can read it at all: neighbouring channels, row and head strides that an int holds."""
    *_, (rows, row), (heads, head), (channels, channel) = zip(tensor.shape, tensor.stride())
    fits = (rows == 1 or row <= _LARGEST_INT) and (heads == 1 or head <= _LARGEST_INT)
    return fits and (channels == 1 or channel == 1)


def is_aligned(tensor: Tensor) -> bool:
    """Whether every row starts on 16 bytes and is made of pieces of 16."""
    return (
        tensor.shape[-1] % 8 == 0
        and tensor.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for size, stride in zip(tensor.shape[:-1], tensor.stride()) if size > 1)
    )


def vector_size(call: AttentionCall, in_place: bool) -> int:
    """Elements a load may take at once: 8; 1 where rows are not on 16 bytes and copies cost more; 0 where to copy.

    in_place: whether the keys are a cache, which is not copied
    """
    tensors = (call.q, call.k, call.v)
    if not all(map(is_readable, tensors)):
        return 0
    if all(map(is_aligned, tensors)):
        return 8
    return 1 if in_place or sum(tensor.numel() for tensor in tensors) <= SMALL else 0


def is_tidy(new: Append) -> bool:
    """Whether kernels can read new keys, cos and sin as they are."""
    cos, sin = new.rotary_cos, new.rotary_sin
    if cos is not None and sin is not None and (cos.stride() != sin.stride() or cos.stride(-1) != 1):
        return False
    return is_readable(new.k) and is_readable(new.v)


def new_vector_size(new: Append) -> int:
    """As vector_size, for new keys and rotary tables that are tidy."""
    tensors = (new.k, new.v, new.rotary_cos, new.rotary_sin)
    return 8 if all(tensor is None or is_aligned(tensor) for tensor in tensors) else 1


def aligned(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy whose channels are padded with 0 to a multiple of 8 and whose rows are on 16 bytes."""
    if is_readable(tensor) and is_aligned(tensor):
        return tensor
    missing = -tensor.shape[-1] % 8
    copy = F.pad(tensor, (0, missing)) if missing else tensor
    return copy if is_readable(copy) and is_aligned(copy) else copy.clone(memory_format=torch.contiguous_format)


def key(call: AttentionCall) -> tuple[Hashable, ...]:
    """Equal for calls that one plan serves."""
    if call.signature is not None:
        return (call.signature,)
    q, k, v, slopes, table = call.q, call.k, call.v, call.alibi_slopes, call.block_table
    return (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15, q.dtype, q.get_device(), settings.fingerprint(),
        call.softmax_scale, call.mask, call.max_seqlen_q, call.max_seqlen_k, call.softcap, call.dropout_p,
        call.return_lse, call.needs_grad,
        None if slopes is None else slopes.stride(), None if table is None else (table.shape, table.stride()),
        None if call.cu_seqlens_q is None else call.cu_seqlens_q.shape,
        call.cu_seqlens_k is None, call.seqused_k is None, call.leftpad_k is None, call.seqlen_new,
    )  # fmt: skip


_plans: dict[Hashable, Any] = {}


def planned(signature: Hashable, device: int, make: Callable[[], Plan]) -> Plan:
    """The plan for ``signature``, made at its first call."""
    found = _plans.get(signature)
    if found is None:
        found = make()
        if loader.is_capturing(device):  # its kernels may not have been tried
            return found
        if len(_plans) >= _MOST_PLANS:  # lengths may differ from step to step
            _plans.clear()
        _plans[signature] = found
    return found


def forget_plans() -> None:
    _plans.clear()


def kind_of(call: AttentionCall, target: Target, vec: int) -> Kind:
    left, right = call.mask
    half = variants.FP16 if call.q.dtype == torch.float16 else variants.BF16
    return Kind(
        number=target.number,
        type=variants.BF16_AS_FP16 if half and target.number < 80 else half,
        head_dim=max(call.q.shape[-1], call.v.shape[-1]),
        # One row stands at the last key: nothing is to its right.
        local=left is not None or (right is not None and longest_rows(call) > 1),
        alibi=call.alibi_slopes is not None,
        softcap=call.softcap > 0.0,
        dropout=call.dropout_p > 0.0,
        paged=call.block_table is not None,
        vec=vec,
        window=None if left is None or right is None else left + right + 1,
    )


def loaded(make: Callable[[Kind], Variant], kind: Kind, target: Target, device: int) -> tuple[Variant, Kernel]:
    """A variant, compiled and loaded; raises KernelError where that fails."""
    variant = make(kind)
    return variant, loader.kernel(variant, target.architecture, device)


def described(call: AttentionCall) -> dict[str, params.Value]:
    """The fields of struct Params that a call's shapes and options give, whatever the kernel."""
    q, k, v = call.q, call.k, call.v
    left, right = call.mask
    fields: dict[str, params.Value] = {
        "q_s": strides(q),
        "k_s": strides(k),
        "v_s": strides(v),
        "batch": call.batch,
        "nheads": call.nheads,
        "nheads_k": call.nheads_k,
        "group": call.nheads // call.nheads_k,
        "seqlen_q": longest_rows(call),
        "seqlen_k": longest_keys(call),
        "total_q": q.shape[0] if call.cu_seqlens_q is not None else 0,
        "total_k": k.shape[0] if call.cu_seqlens_k is not None else 0,
        "seqlen_new": call.seqlen_new,
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
        "window_left": -1 if left is None else min(left, _LONGEST_WINDOW),
        "window_right": -1 if right is None else min(right, _LONGEST_WINDOW),
        "softmax_scale": call.softmax_scale,
        "softcap": call.softcap,
        "lse_has_position": int(call.lse_carries_alibi_position),
        "lse_batch": 0 if call.cu_seqlens_q is not None else call.nheads * q.shape[1],
        "lse_head": q.shape[0] if call.cu_seqlens_q is not None else q.shape[1],
    }
    table, slopes = call.block_table, call.alibi_slopes
    if slopes is not None:
        fields["slopes_batch"] = slopes.stride(0) if slopes.dim() == 2 else 0
    if table is not None:
        fields |= {
            "table_stride": table.stride(0),
            "page_size": k.shape[1],
            "pages_per_sequence": table.shape[1],
            "num_pages": k.shape[0],
        }
    if call.dropout_p:
        fields["dropout_limit"] = dropout.word_limit(call.dropout_p)
        fields["dropout_scale"] = 1.0 / (1.0 - call.dropout_p)
    return fields


def described_new(new: Append) -> dict[str, params.Value]:
    """The fields that new keys give."""
    cos = new.rotary_cos
    fields: dict[str, params.Value] = {
        "k_new_s": strides(new.k),
        "v_new_s": strides(new.v),
        "seqlen_new": new.k.shape[1],
    }
    if cos is not None:
        fields |= {
            "rotary_dim": 2 * cos.shape[1],
            "rotary_interleaved": int(new.rotary_interleaved),
            "rotary_rows": cos.shape[0],
            "rotary_row_stride": cos.stride(0),
            "rotate_rows_apart": int(new.rows_have_own_position),
        }
    return fields


def longest_rows(call: AttentionCall) -> int:
    """Rows that a sequence may have."""
    if call.cu_seqlens_q is None:
        return call.q.shape[1]
    return max(1, min(call.max_seqlen_q, call.q.shape[0]))


def longest_keys(call: AttentionCall) -> int:
    """Keys that a sequence may have; slots of a cache."""
    if call.block_table is not None:
        return call.block_table.shape[1] * call.k.shape[1]
    if call.cu_seqlens_k is None:
        return call.k.shape[1]
    return max(1, min(call.max_seqlen_k, call.k.shape[0]))


class Splits(NamedTuple):
    """How the decode kernel cuts a call: tiles of rows a key head, and so many splits of the keys of each.

    part_out, part_ml: where these begin in a workspace of ``workspace`` bytes, behind the counters
    """

    tiles: int
    each: int
    part_out: int
    part_ml: int
    workspace: int


def splits_of(call: AttentionCall, kind: Kind) -> Splits | None:
    """None where the call has too many rows for the decode kernel."""
    rows, group = longest_rows(call), call.nheads // call.nheads_k
    if not variants.takes_decode(rows, group, kind.dropout):
        return None
    tiles = -(-rows * group // variants.DECODE_ROWS)
    total = tiles * call.nheads_k * call.batch
    left, right = call.mask
    keys = longest_keys(call)
    if left is not None and right is not None:
        keys = min(keys, left + rows + right)
    width = variants.decode_width(kind)
    each = variants.splits(total, keys, processors(call.q.get_device()), width)
    if total > _COUNTERS:  # more tiles than any GPU has room for at once
        each = 1
    part_ml = 4 * _COUNTERS + total * each * variants.DECODE_ROWS * width * 4
    return Splits(tiles, each, 4 * _COUNTERS, part_ml, part_ml + total * each * variants.DECODE_ROWS * 8)


_workspaces: dict[tuple[int, int], Tensor] = {}


def workspace(size: int, device: int, place: torch.device) -> Tensor:
    """Memory of ``size`` bytes for one launch of the decode kernel; its counters are 0 before and after each launch.

    Launches on one stream follow one another, and share it. What is captured has its own, for a graph's replays follow
    nobody.
    """
    captures = loader.is_capturing(device)
    key = device, stream(device)
    found = None if captures else _workspaces.get(key)
    if found is None or found.shape[0] < size:
        found = torch.empty(size, dtype=torch.uint8, device=place)
        loader.driver().clear(found.data_ptr(), _COUNTERS, device)
        if not captures:
            _workspaces[key] = found
    return found


def forget_workspaces() -> None:
    """After a kernel that may not have left its counters as it found them."""
    _workspaces.clear()


def tidy(call: AttentionCall) -> AttentionCall:
    """The call with slopes and table as the kernels step through them."""
    slopes, table = call.alibi_slopes, call.block_table
    if slopes is not None and slopes.stride(-1) != 1:
        call = call._replace(alibi_slopes=slopes.contiguous())
    if table is not None and table.stride(-1) != 1 and table.shape[-1] > 1:
        call = call._replace(block_table=table.contiguous())
    return call


@functools.cache
def processors(device: int) -> int:
    """Streaming multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
