"""The only file that turns a tensor into an address. It checks there everything that a kernel relies on.

A plan holds everything about a call's launches that follows from shapes, strides and options. It is built once for all
calls with the same cache key. Each call only adds its addresses.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends.base import NegatedView
from flash_attn_compat.backends.fused import caches, grids, masks, nvrtc, params, tuned, variants, workspaces
from flash_attn_compat.backends.fused.variants import Kind, Variant
from flash_attn_compat.core import checks, dropout, kernel_layout
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.inputs import CacheInputs, Inputs, PackedInputs
from flash_attn_compat.core.torch_state import note_written

# The tensors of all families, in the order of struct Params.
_INPUTS = (*PackedInputs._fields[:-1], "bias", "rng_state", *CacheInputs._fields[-4:])
_MAX_INT = 2**31 - 1
_MAX_BLOCKS = 2**31 - 1
# Up to so many elements, loading them one by one costs less than an aligned copy.
MAX_SCALAR_LOADS = 2**18

# Dtypes of the tensors that are not in q's dtype.
_DTYPES = {
    **dict.fromkeys(("alibi_slopes", "lse", "dlse", *params.TAIL_ADDRESSES), torch.float32),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table"), torch.int32),
    **dict.fromkeys(("absmax", "bias_map", "bias_of_rows"), torch.int32),
    "rng_state": torch.int64,
}

# Gradients: new, or checked where the caller passes them. Plan.run must not look at their storages: a storage that
# Python has seen counts as shared, and autograd would no longer add other gradients to it in place.
_UNCHECKED = frozenset({"dq", "dk", "dv"})


class Output(NamedTuple):
    """A result of a plan's launches: a new tensor of ``shape`` and ``dtype`` for each run.

    name: of its address in struct Params; starts_as_zero: whether to zero it, for launches that add or take maxima
    strides: of dense memory; None for contiguous tensors
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    starts_as_zero: bool = False
    strides: tuple[int, ...] | None = None


class Launch(NamedTuple):
    """A launch of ``blocks`` blocks of a kernel.

    fields: of struct Params after the head, by name; absent ones are 0
    redirects: addresses to replace, by name: by an output's address plus an offset in bytes
    """

    variant: Variant
    blocks: int
    fields: dict[str, params.Value]
    redirects: Mapping[str, tuple[str, int]] = {}


class Plan:
    """A sequence of launches over the same addresses."""

    def __init__(
        self, call: AttentionCall, outputs: Sequence[Output], launches: Sequence[Launch], new: Append | None = None,
        others: Mapping[str, Tensor] | None = None, workspace: int = 0,
    ) -> None:  # fmt: skip
        """others: further inputs of a call, by their names in struct Params; workspace: bytes that splits need"""
        most = max(launches, key=lambda launch: launch.blocks, default=None)
        if most is not None and most.blocks > _MAX_BLOCKS:
            raise nvrtc.TooManyBlocks(
                f"{most.variant.entry} would need {most.blocks} blocks, a launch has {_MAX_BLOCKS} at most: batch "
                f"{call.batch}, {call.nheads} heads, sequences of up to {max_rows(call)} rows and "
                f"{max_keys(call)} keys"
            )
        self.torch_device, self.device = call.q.device, call.q.get_device()
        self.seqlen_k, self._seqlen_new = max_keys(call), 0 if new is None else new.k.shape[1]
        self._workspace = workspace
        self.variants = tuple(launch.variant for launch in launches)
        self._appends_first = bool(launches) and launches[0].variant.entry == "append"
        whole, others = with_append(call, new), dict(others or {})
        inputs: dict[str, Any] = {name: getattr(whole, name, None) for name in _INPUTS} | others
        dtypes = _DTYPES | (dict.fromkeys("kv", call.k.dtype) if caches.cache_macro(call.k) else {})
        dtypes |= {} if call.bias is None else {"bias": call.bias.dtype}
        dtypes |= {name: others[name].dtype for name in params.FLEX_ADDRESSES if name in others}
        for name, tensor in inputs.items():
            dtype = dtypes.get(name, call.q.dtype)
            if tensor is not None and (tensor.dtype, tensor.device) != (dtype, self.torch_device):
                raise RuntimeError(f"{name} must be {dtype} on {call.q.device}, got {tensor.dtype} on {tensor.device}")
        in_tail = *params.TAIL_ADDRESSES, *params.FLEX_ADDRESSES
        tail = [name for name in in_tail if addressed_bytes(inputs.get(name))]
        sizes = {name: addressed_bytes(inputs[name]) for name in dict.fromkeys((*tail, *inputs))}  # the tail's first
        sizes["rng_state"] = 16 if call.dropout_p else 0
        self._expected = [
            (name, dtypes.get(name, call.q.dtype).itemsize, 0 if name in _UNCHECKED else size)
            for name, size in sizes.items()
            if size
        ]
        self._others = tuple(others)
        self._places: dict[type, list[tuple[int, int, int]]] = {}  # by the type of a run's tensors
        self._outputs = [(x.name, _template(x.shape, x.strides, x.dtype, self.torch_device)) for x in outputs]
        self._zeroed = [output.name for output in outputs if output.starts_as_zero]
        names = [name for name, size in sizes.items() if size] + [output.name for output in outputs]
        self._names = [*names, "counters", "parts"] if workspace else names
        self._tail_size, head = len(tail), self._names[len(tail) :]
        self._head, self._tail = params.head_struct(head), params.tail_struct(tail)
        nvrtc.load_all(self.variants, self.device)
        self._launch = nvrtc.driver().launch
        at, has_flex = head.index, any("FLEX" in dict(variant.macros) for variant in self.variants)
        self._launches = [
            (
                nvrtc.kernel(variant, self.device),
                blocks,
                params.split_at_tail(params.pack_rest(fields, has_flex), self._tail if tail else None),
                [(at(name), at(output), offset) for name, (output, offset) in redirects.items()],
            )
            for variant, blocks, fields, redirects in launches
        ]

    def run(
        self,
        tensors: Inputs | AttentionCall,
        length: int | None = None,
        given_out: Tensor | None = None,
        others: Sequence[Any] = (),
    ) -> dict[str, Tensor]:
        """Launch on the current stream of the plan's device; returns the outputs by name.

        tensors, others: as the plan's, by name and in its order
        length: the keys of each sequence before the append, which calls with the same cache key may vary; None for
            the plan's own number after it
        given_out: contiguous memory for the output "out" that no input shares; None for a new tensor
        Raises RuntimeError for a tensor without memory or with too little, NegatedView for a lazily negated view, and
        KernelError, with ``appended`` set where new keys are in the cache already.
        """
        addresses: list[int] = []
        places = self._places.get(type(tensors)) or self._find_places(type(tensors))
        given = (*tensors, *others) if others else tensors
        for index, itemsize, size in places:
            tensor = given[index]
            if (
                size and tensor.storage_offset() * itemsize + size > tensor.untyped_storage().nbytes()
            ) or tensor.is_neg():
                raise self._input_error(tensor, len(addresses))
            addresses.append(tensor.data_ptr())
        outputs = {}
        for name, template in self._outputs:
            if given_out is not None and name == "out":
                checks.output(given_out, template.shape, template.dtype, self.torch_device)
                output = given_out
            else:
                output = torch.empty_like(template)
            outputs[name] = output
            addresses.append(output.data_ptr())
        for name in self._zeroed:
            outputs[name].zero_()
        if self._workspace:
            workspace = workspaces.acquire(self._workspace, self.device, self.torch_device)  # lives until the launches
            start = workspace.data_ptr()
            addresses += start, start + workspaces.PARTS_OFFSET
        if 0 in addresses:  # a launch over a null address would break the GPU's context
            at = addresses.index(0)
            tensor = given[places[at][0]] if at < len(places) else outputs.get(self._names[at])
            raise RuntimeError(
                f"{self._names[at]} must be a tensor with memory of its own; got {type(tensor).__name__}: fake and "
                "distributed tensors and pending collectives have none"
            )
        seqlen_k = self.seqlen_k if length is None else length + self._seqlen_new
        tail, count = b"", self._tail_size
        if count:
            tail, addresses = self._tail.pack(*addresses[:count]), addresses[count:]
        head = self._head.pack(*addresses, seqlen_k)
        launched = 0
        try:
            for kernel, blocks, (rest, behind), redirects in self._launches:
                packed = head
                if redirects:
                    redirected = addresses.copy()
                    for index, output_at, offset in redirects:
                        redirected[index] = addresses[output_at] + offset
                    packed = self._head.pack(*redirected, seqlen_k)
                self._launch(kernel, blocks, self.device, packed + rest + tail + behind)
                launched += 1
        except nvrtc.ContextLost as error:
            raise nvrtc.ContextLost(f"launching {self.variants[launched].entry}: {error}") from None
        except nvrtc.KernelError as error:
            if launched and self._appends_first:
                note_written((tensors.k, tensors.v))
                error.appended = outputs.get("q_rotated", tensors.q)
            raise
        return outputs

    def _find_places(self, family: type[Any]) -> list[tuple[int, int, int]]:
        order = [*family._fields, *self._others]
        places = self._places[family] = [(order.index(name), itemsize, size) for name, itemsize, size in self._expected]
        return places

    def _input_error(self, tensor: Tensor, at: int) -> RuntimeError:
        """Return the error for input ``at``, which reaches beyond its storage or is lazily negated."""
        name, (_, itemsize, size), storage = self._names[at], self._expected[at], tensor.untyped_storage().nbytes()
        if size and tensor.storage_offset() * itemsize + size > storage:
            return RuntimeError(
                f"{name} must have {size} bytes in its storage from its first element on; got shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}, storage of {storage} bytes, "
                f"offset {tensor.storage_offset()}"
            )
        return NegatedView(f"{name} must not be a lazily negated view")


@functools.lru_cache(4096)
def _template(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor without memory, for ``empty_like``, which takes half the time of ``empty``.

    strides: None for contiguous
    """
    template = torch.empty(shape, dtype=dtype, device=device)
    if strides is not None:
        template = template.as_strided(shape, strides)
    template.untyped_storage().resize_(0)
    return template


def launch_over(
    tensors: Sequence[Tensor], kernel: nvrtc.Kernel, blocks: int, head: struct.Struct, rest: bytes, seqlen_k: int = 0
) -> None:
    """Launch a kernel over tensors that another kernel has written or read just now. head: packs their addresses"""
    addresses = [tensor.data_ptr() for tensor in tensors]
    nvrtc.driver().launch(kernel, blocks, tensors[0].get_device(), head.pack(*addresses, seqlen_k) + rest)


def addressed_bytes(tensor: Tensor | None) -> int:
    """Return the bytes from the first element to the end of the last one that shape and strides address."""
    if tensor is None or not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def kernel_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Return strides (batch or page, row, head) in elements; 0 for packed tensors' batch and axes of one element."""
    *batch, row, head, _ = (effective_stride(tensor, axis) for axis in range(tensor.dim()))
    return batch[0] if batch else 0, row, head


def effective_stride(tensor: Tensor, axis: int) -> int:
    """Return the stride along an axis in elements; 0 for an axis of one element, whose stride is arbitrary."""
    return tensor.stride(axis) if tensor.shape[axis] > 1 else 0


def contiguous_strides(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return ``kernel_strides`` of a contiguous tensor without making one: growing caches need a plan each step."""
    *batch, rows, heads, width = (max(size, 1) for size in shape)
    return rows * heads * width if batch else 0, heads * width, width


def has_kernel_layout(tensor: Tensor) -> bool:
    """Whether kernels can read the tensor: contiguous channels, and row and head strides within an int."""
    *rows, (channels, channel) = list(zip(tensor.shape, tensor.stride()))[-3:]
    return (channels == 1 or channel == 1) and all(size == 1 or stride <= _MAX_INT for size, stride in rows)


def is_aligned(tensor: Tensor) -> bool:
    """Whether every row is aligned to 16 bytes and a multiple of 16 bytes long."""
    unit = 16 // tensor.element_size()
    return (
        tensor.shape[-1] % unit == 0
        and tensor.data_ptr() % 16 == 0
        and all(stride % unit == 0 for size, stride in zip(tensor.shape[:-1], tensor.stride()) if size > 1)
    )


def vector_size(tensors: Iterable[Tensor | None], in_place: bool) -> int:
    """Return the elements of a load: 8; 1 if unaligned and copies cost more, or ``in_place``; 0 to copy the tensors."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not all(map(has_kernel_layout, present)):
        return 0
    if all(map(is_aligned, present)):
        return 8
    return 1 if in_place or sum(tensor.numel() for tensor in present) <= MAX_SCALAR_LOADS else 0


def align(tensor: Tensor) -> Tensor:
    """Return ``tensor`` if aligned, else a copy with aligned rows, channels padded with 0 to a multiple of 16 bytes."""
    if not has_kernel_layout(tensor):
        tensor = tensor.contiguous()
    return tensor if is_aligned(tensor) else kernel_layout.padded(tensor)


def with_append(call: AttentionCall, new: Append | None) -> Any:
    """Return what ``Plan.run`` reads a call's tensors from."""
    if new is None:
        return call
    own = {name: getattr(call, name) for name in CacheInputs._fields[:-4]}
    return CacheInputs(**own, k_new=new.k, v_new=new.v, rotary_cos=new.rotary_cos, rotary_sin=new.rotary_sin)


def find_strided_inputs(tensors: Inputs | AttentionCall) -> list[str]:
    """Return the names of slopes, block table and bias (unless boolean) that lack a contiguous last axis."""
    present = {name: x for name in ("alibi_slopes", "block_table", "bias") if (x := getattr(tensors, name)) is not None}
    strided = {name: x for name, x in present.items() if x.stride(-1) != 1 and x.shape[-1] > 1}
    return [name for name, tensor in strided.items() if tensor.dtype is not torch.bool]


def copy_contiguous(tensor: Tensor) -> Tensor:
    """Return a copy with a contiguous last axis. Broadcast axes are copied once and stay broadcast."""
    unique = tensor[tuple([slice(None if stride else 1) for stride in tensor.stride()[:-1]])]
    return unique.contiguous().expand(tensor.shape)


def append_has_kernel_layout(new: Append) -> bool:
    """Whether kernels can read the appended tensors: each has the kernel layout, cos and sin have equal strides."""
    cos, sin = new.rotary_cos, new.rotary_sin
    have_layout = all(tensor is None or has_kernel_layout(tensor) for tensor in new[:4])
    return have_layout and (cos is None or sin is None or cos.stride() == sin.stride())


def choose_kind(call: AttentionCall, vec: int, decodes: bool = False) -> Kind:
    """Return a call's kind. decodes: for the decode kernel, which rejects sequences longer than max_rows."""
    left, right = call.mask.left, call.mask.right
    has_one_row = max_rows(call) == 1 and (decodes or call.cu_seqlens_q is None)
    device, number = call.q.device, nvrtc.target(call.q.get_device()).number
    half = variants.FP16 if call.q.dtype == torch.float16 else variants.BF16
    cache = caches.cache_macro(call.k)
    is_plain = half == variants.FP16 and number < 80 and call.cu_seqlens_q is None
    fills = not is_plain or grids.fills_gpu(
        max_rows(call), max_keys(call), call.batch * call.nheads, count_multiprocessors(call.q.get_device())
    )
    # A single row is at the last key: no key is to its right.
    local, size = left is not None or (right is not None and not has_one_row), max(call.q.shape[-1], call.v.shape[-1])
    rows, longest = max_rows(call), max(max_rows(call), max_keys(call))
    few_rows = grids.takes_small_tiles(rows, size, local) if number < 80 else rows <= variants.FEW_ROWS
    is_long = call.bias is not None or call.block_table is not None
    kind = Kind(
        number=number,
        type=variants.BF16_AS_FP16 if half and (number < 80 or cache) else half,
        cache=cache,
        head_dim=call.q.shape[-1],
        head_dim_v=call.v.shape[-1],
        local=local,
        alibi=call.alibi_slopes is not None,
        softcap=call.softcap > 0.0,
        dropout=call.dropout_p > 0.0,
        paged=call.block_table is not None,
        vec=vec,
        window=None if left is None or right is None else left + right + 1,
        few_rows=few_rows or not fills,
        short=0 if is_long else next((most for most in (variants.SHORT, variants.FEW_ROWS) if longest <= most), 0),
        bias=masks.bias_macro(call.bias),
        bias_pairs=masks.can_load_pairs(call.bias),
    )
    return kind._replace(tiles=tuned.find_tiles(settings.gpu(device), number, kind.size, call.q.dtype))


def call_fields(call: AttentionCall) -> dict[str, params.Value]:
    """Return the fields of struct Params that follow from a call's shapes and options, for any kernel."""
    q, k, v = call.q, call.k, call.v
    same = "batch", "nheads", "nheads_k", "softmax_scale", "softcap"
    fields: dict[str, params.Value] = {name: getattr(call, name) for name in same}
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
        **call.mask.kernel_fields,
        "lse_has_position": int(call.lse_carries_alibi_position),
        "lse_batch": 0 if call.cu_seqlens_q is not None else call.nheads * q.shape[1],
        "lse_head": q.shape[0] if call.cu_seqlens_q is not None else q.shape[1],
        **caches.cache_fields(call),
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


def append_fields(new: Append) -> dict[str, params.Value]:
    """Return the fields of struct Params that follow from an append."""
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
    """Return the most query rows that a sequence may have."""
    if call.cu_seqlens_q is None:
        return call.q.shape[1]
    return max(1, min(call.max_seqlen_q, call.q.shape[0]))


def max_keys(call: AttentionCall) -> int:
    """Return the most keys that a sequence may have: of a cache its slots."""
    if call.block_table is not None:
        return call.block_table.shape[1] * call.k.shape[1]
    if call.cu_seqlens_k is None:
        return call.k.shape[1]
    return max(1, min(call.max_seqlen_k, call.k.shape[0]))


def choose_splits(call: AttentionCall, variant: Variant, tiles: int) -> int:
    """Return the number of blocks that share the keys of each of a call's ``tiles``."""
    if tiles > workspaces.COUNTERS:  # enough tiles to fill any GPU
        return 1
    left, right = call.mask.left, call.mask.right
    keys = max_keys(call)
    if left is not None and right is not None:
        keys = min(keys, left + min(max_rows(call), variant.rows) + right)
    return grids.count_splits(variant, tiles, keys, find_gpu(call))


def choose_head_splits(call: AttentionCall, variant: Variant, blocks: int) -> int:
    """Return the number of blocks that share the query heads of each of the ``blocks`` of a call's dkdv."""
    if blocks > workspaces.COUNTERS:
        return 1
    group = call.nheads // call.nheads_k
    return grids.count_head_splits(variant, blocks, group, max_rows(call), find_gpu(call))


def find_gpu(call: AttentionCall) -> grids.Gpu:
    device = call.q.get_device()
    return grids.Gpu(count_multiprocessors(device), nvrtc.target(device).number)


@functools.cache
def count_multiprocessors(device: int) -> int:
    """Return the number of a GPU's streaming multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
