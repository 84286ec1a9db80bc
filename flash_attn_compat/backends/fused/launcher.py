"""The only place where a tensor becomes an address. What a kernel may rely on is checked right there.

A plan holds everything of a call's launches that follows from shapes, strides and options; it is made once for all
calls that are alike. What is left for each call are the addresses.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends.base import NegatedView
from flash_attn_compat.backends.fused import grids, masks, nvrtc, params, tuned, variants
from flash_attn_compat.backends.fused.variants import Kind, Variant
from flash_attn_compat.core import cuda_capture, dropout, kernel_layout
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import TENSORS, AttentionCall
from flash_attn_compat.core.torch_state import note_written

_LARGEST_INT = 2**31 - 1
_MAX_BLOCKS = 2**31 - 1
# Longer windows than a sequence that fits a GPU; the kernels add them to positions.
_MAX_WINDOW = 2**29
# Words at the start of a workspace, one for each tile with splits; bytes before the parts that these leave.
_COUNTERS = 1024
PARTS_AT = 4 * _COUNTERS
# Elements up to which loading one by one costs less than copying into place first.
MAX_SCALAR_LOADS = 2**18

# What an append gives, by its name in struct Params; plans take it behind a call's TENSORS.
_APPEND_NAMES = "k_new", "v_new", "rotary_cos", "rotary_sin"
# Of what is not in q's dtype.
_DTYPES = {
    **dict.fromkeys(("alibi_slopes", "lse", "dlse"), torch.float32),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table"), torch.int32),
    **dict.fromkeys(("absmax", "bias_map", "bias_of_rows"), torch.int32),
    "rng_state": torch.int64,
}

# Made for this call, or checked where the caller gives them. A storage that Python has looked at counts as shared ever
# after: autograd, where a gradient is one of several, would not add to it in place.
_UNCHECKED = frozenset({"dq", "dk", "dv"})


class Output(NamedTuple):
    """Memory that a plan's launches write: a new tensor of ``shape`` and ``dtype`` for each run.

    name: its address's in struct Params; starts_as_zero: whether the launches add to it, or raise what is there
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    starts_as_zero: bool = False


class Launch(NamedTuple):
    """A kernel (``variant``) and how many ``blocks`` of it.

    fields: of struct Params behind the head, by name; 0 where there is none
    instead: addresses that it is given for others, by name: of an output, and how many bytes behind its start
    """

    variant: Variant
    blocks: int
    fields: dict[str, params.Value]
    instead: Mapping[str, tuple[str, int]] = {}


class Plan:
    """Launches, one behind the other, that are given the same addresses."""

    def __init__(
        self,
        call: AttentionCall,
        outputs: Sequence[Output],
        launches: Sequence[Launch],
        new: Append | None = None,
        others: Mapping[str, Tensor] | None = None,
        workspace: int = 0,
    ) -> None:
        """others: whatever else calls give, by its name in struct Params; workspace: bytes that splits need"""
        most = max(launches, key=lambda launch: launch.blocks, default=None)
        if most is not None and most.blocks > _MAX_BLOCKS:
            raise nvrtc.TooManyBlocks(
                f"{most.variant.entry} would need {most.blocks} blocks, a launch has {_MAX_BLOCKS} at most: batch "
                f"{call.batch}, {call.nheads} heads, sequences of up to {max_rows(call)} rows and "
                f"{max_keys(call)} keys"
            )
        self.place, self.device = call.q.device, call.q.get_device()
        self.seqlen_k = max_keys(call)
        self._workspace = workspace
        self.variants = tuple(launch.variant for launch in launches)
        self._appends_first = bool(launches) and launches[0].variant.entry == "append"
        like: dict[str, Any] = dict(zip(TENSORS, call.tensors, strict=True))
        like |= dict(zip(_APPEND_NAMES, () if new is None else new[:4])) | dict(others or {})
        dtypes = _DTYPES if call.bias is None else {**_DTYPES, "bias": call.bias.dtype}
        for name, tensor in like.items():
            dtype = dtypes.get(name, call.q.dtype)
            if tensor is not None and (tensor.dtype, tensor.device) != (dtype, self.place):
                raise RuntimeError(f"{name} must be {dtype} on {self.place}, got {tensor.dtype} on {tensor.device}")
        sizes = {name: addressed_bytes(tensor) for name, tensor in like.items()}
        sizes["rng_state"] = 16 if call.dropout_p else 0
        self._expected = [
            (index, dtypes.get(name, call.q.dtype).itemsize, 0 if name in _UNCHECKED else size)
            for index, (name, size) in enumerate(sizes.items())
            if size
        ]
        alike = call.q.shape, call.q.dtype, call.q.is_contiguous()
        self._outputs = [(*output, (output.shape, output.dtype, True) == alike) for output in outputs]
        given = [name for name, size in sizes.items() if size] + [output.name for output in outputs]
        self._given = [*given, "counters", "parts"] if workspace else given
        self._head = params.head_struct(self._given)
        nvrtc.load_all(self.variants, self.device)
        self._launch = nvrtc.driver().launch
        at = self._given.index
        self._launches = [
            (
                nvrtc.kernel(variant, self.device),
                blocks,
                params.pack_rest(fields),
                [(at(name), at(output), behind) for name, (output, behind) in instead.items()],
            )
            for variant, blocks, fields, instead in launches
        ]

    def run(self, tensors: Sequence[Any], seqlen_k: int | None = None) -> dict[str, Tensor]:
        """Launch on the current stream of the plan's device; returns the outputs by name.

        tensors: as the plan was made for: AttentionCall.tensors, then k to rotary_sin of an Append if there is one, and
            the ``others`` in their order; each may be None where the plan's was
        seqlen_k: the keys of each sequence where calls that are alike differ in it; None for the plan's own
        Raises RuntimeError for a tensor without memory or with too little, Negated for a lazily negated view, and
        KernelError, with ``appended`` where new keys are in their cache already.
        """
        numbers: list[int] = []
        for index, itemsize, size in self._expected:
            tensor = tensors[index]
            reaches_beyond = size and tensor.storage_offset() * itemsize + size > tensor.untyped_storage().nbytes()
            if reaches_beyond or tensor.is_neg():
                raise self._refusal(tensor, len(numbers))
            numbers.append(tensor.data_ptr())
        made, q = {}, tensors[0]
        for name, shape, dtype, starts_as_zero, is_like_q in self._outputs:
            if is_like_q and type(q) is Tensor:  # in half the time
                output = torch.empty_like(q)
            else:
                output = torch.empty(shape, dtype=dtype, device=self.place)
            if starts_as_zero:
                output.zero_()
            made[name] = output
            numbers.append(output.data_ptr())
        if self._workspace:
            parts = acquire_workspace(self._workspace, self.device, self.place)  # alive until its launch
            start = parts.data_ptr()
            numbers += start, start + PARTS_AT
        if 0 in numbers:  # at which a launch would end the process's use of the GPU
            at = numbers.index(0)
            tensor = tensors[self._expected[at][0]] if at < len(self._expected) else made.get(self._given[at])
            raise RuntimeError(
                f"{self._given[at]} must be a tensor with memory of its own; got {type(tensor).__name__}: fake and "
                "distributed tensors and pending collectives have none"
            )
        length = self.seqlen_k if seqlen_k is None else seqlen_k
        head = self._head.pack(*numbers, length)
        launched = 0
        try:
            for kernel, blocks, rest, instead in self._launches:
                if instead:
                    moved = numbers.copy()
                    for index, output_at, behind in instead:
                        moved[index] = numbers[output_at] + behind
                    self._launch(kernel, blocks, self.device, self._head.pack(*moved, length) + rest)
                else:
                    self._launch(kernel, blocks, self.device, head + rest)
                launched += 1
        except nvrtc.ContextLost as error:
            raise nvrtc.ContextLost(f"launching {self.variants[launched].entry}: {error}") from None
        except nvrtc.KernelError as error:
            if launched and self._appends_first:
                note_written(tensors[1:3])
                error.appended = made.get("q_rotated", q)
            raise
        return made

    def _refusal(self, tensor: Tensor, at: int) -> RuntimeError:
        """Of a tensor, one of those expected, which reaches beyond its storage or is negated."""
        name, (_, itemsize, size), storage = self._given[at], self._expected[at], tensor.untyped_storage().nbytes()
        if size and tensor.storage_offset() * itemsize + size > storage:
            return RuntimeError(
                f"{name} must have {size} bytes in its storage from its first element on; got shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}, storage of {storage} bytes, "
                f"offset {tensor.storage_offset()}"
            )
        return NegatedView(f"{name} must not be a lazily negated view")


def launch_without_inputs(variant: Variant, blocks: int, numbers: Tensor) -> None:
    """A kernel that takes nothing; it writes fp32 ``numbers``, which it knows as lse."""
    head = params.head_struct(["lse"]).pack(numbers.data_ptr(), 0)
    device = numbers.get_device()
    nvrtc.driver().launch(nvrtc.kernel(variant, device), blocks, device, head + params.pack_rest({}))


def addressed_bytes(tensor: Tensor | None) -> int:
    """Bytes from the first element to the last one that shape and strides can reach, both included."""
    if tensor is None or not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def kernel_strides(tensor: Tensor) -> tuple[int, int, int]:
    """(batch or page, row, head) in elements; 0 for the batch of packed tensors, and where there is one element."""
    *batch, row, head, _ = (effective_stride(tensor, axis) for axis in range(tensor.dim()))
    return batch[0] if batch else 0, row, head


def effective_stride(tensor: Tensor, axis: int) -> int:
    """The stride along an axis; 0 where it leads nowhere, and may be any number."""
    return tensor.stride(axis) if tensor.shape[axis] > 1 else 0


def contiguous_strides(shape: Sequence[int]) -> tuple[int, int, int]:
    """The same of a contiguous tensor, found without making one: a cache that grows gets a plan in each step."""
    *batch, rows, heads, width = (max(size, 1) for size in shape)
    return rows * heads * width if batch else 0, heads * width, width


def has_kernel_layout(tensor: Tensor) -> bool:
    """Whether a kernel can read it at all: neighbouring channels, row and head strides that an int holds."""
    *rows, (channels, channel) = list(zip(tensor.shape, tensor.stride()))[-3:]
    return (channels == 1 or channel == 1) and all(size == 1 or stride <= _LARGEST_INT for size, stride in rows)


def is_aligned(tensor: Tensor) -> bool:
    """Whether every row starts on 16 bytes and is made of pieces of 16."""
    return (
        tensor.shape[-1] % 8 == 0
        and tensor.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for size, stride in zip(tensor.shape[:-1], tensor.stride()) if size > 1)
    )


def vector_size(tensors: Iterable[Tensor | None], in_place: bool) -> int:
    """Elements a load may take at once: 8; 1 where rows are not on 16 bytes and copies cost more; 0 where to copy.

    in_place: whether there is a cache among them, which is not copied
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if not all(map(has_kernel_layout, given)):
        return 0
    if all(map(is_aligned, given)):
        return 8
    return 1 if in_place or sum(tensor.numel() for tensor in given) <= MAX_SCALAR_LOADS else 0


def align(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy whose channels are padded with 0 to a multiple of 8 and whose rows are on 16 bytes."""
    if not has_kernel_layout(tensor):
        tensor = tensor.contiguous()
    return tensor if is_aligned(tensor) else kernel_layout.padded(tensor)


def find_strided_inputs(tensors: Sequence[Any]) -> list[int]:
    """Which of slopes, page table and bias, a call's fourth, ninth and tenth, are not as the kernels step through them.

    Booleans may lie anyhow.
    """
    given = [(index, tensors[index]) for index in (3, 8, 9) if tensors[index] is not None]
    apart = [(index, x) for index, x in given if x.stride(-1) != 1 and x.shape[-1] > 1]
    return [index for index, tensor in apart if tensor.dtype is not torch.bool]


def copy_unshared(tensor: Tensor) -> Tensor:
    """A copy of one that is ``untidy``; what its sequences, heads or rows share is copied once."""
    own = tensor[tuple([slice(None if stride else 1) for stride in tensor.stride()[:-1]])]
    return own.contiguous().expand(tensor.shape)


def append_has_kernel_layout(new: Append) -> bool:
    """Whether what is appended lies as the kernels read it: cos and sin by the same steps."""
    cos, sin = new.rotary_cos, new.rotary_sin
    all_readable = all(tensor is None or has_kernel_layout(tensor) for tensor in new[:4])
    return all_readable and (cos is None or sin is None or cos.stride() == sin.stride())


def choose_kind(call: AttentionCall, vec: int, decodes: bool = False) -> Kind:
    """decodes: whether the decode kernel, which refuses longer sequences, may rely on rows being one a sequence."""
    left, right = call.mask
    is_alone = max_rows(call) == 1 and (decodes or call.cu_seqlens_q is None)
    device, number = call.q.device, nvrtc.target(call.q.get_device()).number
    half = variants.FP16 if call.q.dtype == torch.float16 else variants.BF16
    kind = Kind(
        number=number,
        type=variants.BF16_AS_FP16 if half and number < 80 else half,
        head_dim=call.q.shape[-1],
        head_dim_v=call.v.shape[-1],
        # One row stands at the last key: nothing is to its right.
        local=left is not None or (right is not None and not is_alone),
        alibi=call.alibi_slopes is not None,
        softcap=call.softcap > 0.0,
        dropout=call.dropout_p > 0.0,
        paged=call.block_table is not None,
        vec=vec,
        window=None if left is None or right is None else left + right + 1,
        few_rows=max_rows(call) <= variants.FEW_ROWS,
        short=call.bias is None and max(max_rows(call), max_keys(call)) <= variants.SHORT,
        bias=masks.bias_macro(call.bias),
        bias_pairs=masks.can_load_pairs(call.bias),
    )
    return kind._replace(tiles=tuned.find_tiles(settings.gpu(device), number, kind.size, call.q.dtype))


def call_fields(call: AttentionCall) -> dict[str, params.Value]:
    """The fields of struct Params that a call's shapes and options give, whatever the kernel."""
    q, k, v = call.q, call.k, call.v
    left, right = call.mask
    alike = "batch", "nheads", "nheads_k", "softmax_scale", "softcap"
    fields: dict[str, params.Value] = {name: getattr(call, name) for name in alike}
    fields |= {
        "q_s": kernel_strides(q),
        "k_s": kernel_strides(k),
        "v_s": kernel_strides(v),
        "group": call.nheads // call.nheads_k,
        "seqlen_q": max_rows(call),
        "total_q": q.shape[0] if call.cu_seqlens_q is not None else 0,
        "total_k": k.shape[0] if call.cu_seqlens_k is not None else 0,
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
        "window_left": -1 if left is None else min(left, _MAX_WINDOW),
        "window_right": -1 if right is None else min(right, _MAX_WINDOW),
        "lse_has_position": int(call.lse_carries_alibi_position),
        "lse_batch": 0 if call.cu_seqlens_q is not None else call.nheads * q.shape[1],
        "lse_head": q.shape[0] if call.cu_seqlens_q is not None else q.shape[1],
    }
    if call.bias is not None:
        fields |= masks.mask_fields(call.bias)
    table, slopes = call.block_table, call.alibi_slopes
    if slopes is not None:
        fields["slopes_batch"] = effective_stride(slopes, 0) if slopes.dim() == 2 else 0
    if table is not None:
        fields |= {
            "table_stride": effective_stride(table, 0),
            "page_size": k.shape[1],
            "pages_per_sequence": table.shape[1],
            "num_pages": k.shape[0],
        }
    if call.dropout_p:
        fields["dropout_limit"] = dropout.word_limit(call.dropout_p)
        fields["dropout_scale"] = 1.0 / (1.0 - call.dropout_p)
    return fields


def plan_mask_pass(
    call: AttentionCall, kind: Kind, fields: dict[str, params.Value]
) -> tuple[list[Output], list[Launch]]:
    """The pass over a dense mask, if the call has one."""
    if call.bias is None:
        return [], []
    blocks, found, of_rows = masks.mask_pass_shapes(call.bias)
    outputs = [
        Output("bias_map", found, torch.int32),
        Output("bias_of_rows", of_rows, torch.int32, starts_as_zero=kind.bias != variants.BOOLEANS),
    ]
    return outputs, [Launch(variants.mask(kind._replace(bias_words=masks.words_per_block(call.bias))), blocks, fields)]


def append_fields(new: Append) -> dict[str, params.Value]:
    """The fields that new keys give."""
    cos = new.rotary_cos
    fields: dict[str, params.Value] = {
        "k_new_s": kernel_strides(new.k),
        "v_new_s": kernel_strides(new.v),
        "seqlen_new": new.k.shape[1],
    }
    if cos is not None:
        fields |= {
            "rotary_dim": 2 * cos.shape[1],
            "rotary_interleaved": int(new.rotary_interleaved),
            "rotary_rows": cos.shape[0],
            "rotary_row_stride": effective_stride(cos, 0),
            "rotate_rows_apart": int(new.rows_have_own_position),
        }
    return fields


def max_rows(call: AttentionCall) -> int:
    """Rows that a sequence may have."""
    if call.cu_seqlens_q is None:
        return call.q.shape[1]
    return max(1, min(call.max_seqlen_q, call.q.shape[0]))


def max_keys(call: AttentionCall) -> int:
    """Keys that a sequence may have; slots of a cache."""
    if call.block_table is not None:
        return call.block_table.shape[1] * call.k.shape[1]
    if call.cu_seqlens_k is None:
        return call.k.shape[1]
    return max(1, min(call.max_seqlen_k, call.k.shape[0]))


def choose_splits(call: AttentionCall, variant: Variant, tiles: int) -> int:
    """Blocks that share the keys of each of a call's ``tiles``."""
    if tiles > _COUNTERS:  # more than any GPU has room for at once
        return 1
    left, right = call.mask
    keys = max_keys(call)
    if left is not None and right is not None:
        keys = min(keys, left + min(max_rows(call), variant.rows) + right)
    return grids.count_splits(variant, tiles, keys, find_gpu(call))


def choose_head_splits(call: AttentionCall, variant: Variant, blocks: int) -> int:
    """Blocks that share the query heads of each of the ``blocks`` of a call's dkdv."""
    if blocks > _COUNTERS:
        return 1
    group = call.nheads // call.nheads_k
    return grids.count_head_splits(variant, blocks, group, max_rows(call), find_gpu(call))


def find_gpu(call: AttentionCall) -> grids.Gpu:
    device = call.q.get_device()
    return grids.Gpu(count_multiprocessors(device), nvrtc.target(device).number)


# By device, stream and, on the per-thread default stream (handle 2 in every thread), thread.
_workspaces: dict[tuple[int, int, int], Tensor] = {}
# Before PyTorch 2.8 other threads allocate in a caller's pool as well.
_POOLS_ARE_PER_THREAD = hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")


def acquire_workspace(size: int, device: int, place: torch.device) -> Tensor:
    """Memory of ``size`` bytes for one launch with splits; its counters are 0 before and after each launch.

    Launches on one stream follow one another, and share it. What is captured has its own, for a graph's replays follow
    nobody.
    """
    if cuda_capture.is_capturing(device):
        return _allocate_cleared(size, place)
    stream = nvrtc.stream(device)
    key = device, stream, threading.get_ident() if stream == 2 else 0
    found = _workspaces.get(key)
    if found is None or found.numel() < size:
        found = _allocate_in_thread(size, device, place)
        if device < 0 or _POOLS_ARE_PER_THREAD or not _is_in_pool(found):
            _workspaces[key] = found
    return found


def _allocate_in_thread(size: int, device: int, place: torch.device) -> Tensor:
    """By a thread of its own: what is kept outlives the caller's modes and pools (torch.cuda.use_mem_pool)."""
    stream = torch.cuda.current_stream(place) if device >= 0 else None

    def make() -> Tensor:
        with torch.cuda.stream(stream):
            return _allocate_cleared(size, place)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


def _allocate_cleared(size: int, place: torch.device) -> Tensor:
    found = torch.empty(size, dtype=torch.uint8, device=place)
    found[:PARTS_AT].zero_()
    return found


def _is_in_pool(memory: Tensor) -> bool:
    """Whether it lies in a pool of the caller's, or of a compiler's."""
    start = memory.data_ptr()
    return any(
        one["address"] <= start < one["address"] + one["total_size"] and tuple(one["segment_pool_id"]) != (0, 0)
        for one in torch.cuda.memory_snapshot()
    )


def discard_workspaces() -> None:
    """After a kernel that may not have left its counters as it found them."""
    _workspaces.clear()


@functools.cache
def count_multiprocessors(device: int) -> int:
    """Streaming multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
