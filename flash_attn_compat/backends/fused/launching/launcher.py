"""The only file that turns tensors into addresses. In the same lines it checks everything that a kernel relies on.

A plan holds everything about a call's launches that follows from shapes, strides and options. It is built once for all
calls with the same cache key: passes over a kernel's inputs, then the kernel itself. Each call only adds its addresses.

On GPUs whose tensor cores take only fp16, bf16 numbers are scaled by powers of two and converted to fp16. An extra
launch, a pass, finds these powers. Each tile converts the operands that it reads. If many tiles read the same operand,
a pass converts it once, to a copy that all tiles read.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends.base import NegatedView
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import BOOLEANS, Kind
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.launching import calls, eight_bit, grids, layouts, masks, params, workspaces
from flash_attn_compat.backends.fused.launching.grids import Grid
from flash_attn_compat.core import checks
from flash_attn_compat.core.append import Append
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.cuda_capture import current_device
from flash_attn_compat.core.inputs import CacheInputs, Inputs, PackedInputs
from flash_attn_compat.core.torch_state import note_written

# Names of all inputs, in the order of struct Params: of packed calls, the bias, dropout's state, the keys to append.
_INPUTS = (*PackedInputs._fields[:-1], "bias", "rng_state", *CacheInputs._fields[-4:])
_MAX_BLOCKS = 2**31 - 1
# The elements that a thread of the append kernel copies at once.
_ELEMENTS_PER_LOAD = 8
# The place of each address in the head of struct Params. Plans order their outputs by it.
_HEAD_POSITIONS = {name: place for place, (name, _) in enumerate(params.HEAD_FIELDS)}

# Dtypes of the tensors that are not in q's dtype.
_DTYPES = {
    **dict.fromkeys(("alibi_slopes", "lse", "dlse", *params.TAIL_ADDRESSES), torch.float32),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table"), torch.int32),
    **dict.fromkeys(("absmax", "bias_map", "bias_of_rows"), torch.int32),
    "rng_state": torch.int64,
}

# Plan.run must not check the storages of gradients: a storage that Python has looked at counts as shared, and autograd
# would no longer add other gradients to it in place. They are new tensors, or the caller has checked them.
_UNCHECKED = frozenset({"dq", "dk", "dv"})

# A function that allocates a tensor of (shape, strides, dtype).
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
# The functions by which PyTorch's compiled graphs allocate: without the dispatcher, in half the time of ``empty_like``.
_on_host: Allocate | None = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
_on_current_gpu: Allocate | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class _Launch(NamedTuple):
    """A launch of ``blocks`` blocks of a kernel.

    fields: the fields of struct Params after the head, by name; absent ones are 0
    redirects: for the name of an address to replace, the output whose address replaces it, and an offset in bytes
    """

    variant: Variant
    blocks: int
    fields: dict[str, params.Value]
    redirects: Mapping[str, tuple[str, int]] = {}


class Plan:
    """The launches for every call of one cache key. A plan is built, then loaded, then run for each call.

    All launches of a run get the same addresses. ``fields`` and ``redirects`` apply to launches that are added after
    them; redirects only to tiled ones.
    has_mask: whether the call's inputs already include the results of the pass over its dense mask
    """

    def __init__(
        self, call: AttentionCall, kind: Kind, fields: dict[str, params.Value], has_mask: bool = False
    ) -> None:
        self.call, self.kind, self.fields = call, kind, fields
        self.redirects: dict[str, tuple[str, int]] = {}
        self.outputs: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype]] = {}
        self._zeroed: list[str] = []
        self.launches: list[_Launch] = []
        self.workspace = 0
        if call.bias is not None and not has_mask:
            self._add_mask_pass(call.bias)

    def add_output(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, starts_as_zero: bool = False,
        strides: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Add a result of the launches: a new tensor of ``shape`` and ``dtype`` for each run.

        name: the name of its address in struct Params
        starts_as_zero: whether each run fills it with 0 first, for launches that add to it or raise maxima in it
        strides: strides without gaps; None for a contiguous tensor
        """
        self.outputs[name] = shape, strides, dtype
        self._zeroed += [name] * starts_as_zero

    def add_launch(self, variant: Variant, blocks: int, **fields: params.Value) -> None:
        """Add a launch. fields: those that only this launch gets"""
        self.launches.append(_Launch(variant, blocks, {**self.fields, **fields}))

    def _add_mask_pass(self, bias: Tensor) -> None:
        """Add a launch of the mask kernel, which reads a dense mask once and finds the tiles that the mask hides."""
        blocks, map_shape, rows_shape = masks.mask_pass_shapes(bias)
        self.add_output("bias_map", map_shape, torch.int32)
        is_boolean = self.kind.features.bias == BOOLEANS
        self.add_output("bias_of_rows", rows_shape, torch.int32, starts_as_zero=not is_boolean)
        self.add_launch(variants.mask(self.kind.replace(bias_words=masks.words_per_block(bias))), blocks)

    def add_append(self, new: Append) -> None:
        """Add a launch that writes new keys and values, and with rotary tables also rotates q, for later launches.

        The plan's call must have the lengths before the append, and its ``fields`` those of the append.
        """
        call, rotates, (batch, seqlen_new) = self.call, new.rotary_cos is not None, new.k.shape[:2]
        rows = 2 * batch * seqlen_new * call.nheads_k + rotates * batch * call.nheads * call.q.shape[1]
        pieces = rows * -(-max(call.q.shape[-1], call.v.shape[-1]) // _ELEMENTS_PER_LOAD)
        variant, strides = (
            variants.append(calls.choose_append_kind(call, new)),
            layouts.contiguous_strides(call.q.shape),
        )
        blocks = max(1, min(-(-pieces // variant.threads), 32 * calls.count_multiprocessors(call.q.get_device())))
        self.add_launch(variant, blocks, q_rotated_s=strides)
        if rotates:
            self.add_output("q_rotated", call.q.shape, call.q.dtype)
            self.fields["q_s"], self.redirects["q"] = strides, ("q_rotated", 0)

    def add_maxima_pass(self, of_rows: bool) -> None:
        """Add a launch that finds the largest finite magnitudes of k, v and q, by which bf16 is scaled to fp16.

        They are stored as the bits of fp32 numbers.
        of_rows: whether to include q. The forward kernel finds q's itself. Without q, and if the forward reads copies
            of keys and values, the launch also writes these copies, scaled by the maxima that it knows so far
        """
        call, kind = self.call, self.kind.replace(copied=self.kind.features.copied and not of_rows)
        self.add_output("absmax", (3, call.batch, call.nheads_k), torch.int32, starts_as_zero=True)
        if kind.features.copied:
            marks = variants.marks(kind, call.k.shape[:-2].numel(), call.batch)
            self.add_output("copies", (call.k.numel() + call.v.numel(),), torch.float16)
            self.add_output("marks", (2, call.nheads_k, marks), torch.int32)
        self._add_pass(variants.absmax(kind), 2 + of_rows)

    def _add_pass(self, variant: Variant, tensors: int, **fields: params.Value) -> None:
        """Add an extra launch that reads ``tensors`` tensors once. Several blocks share a sequence of one key head."""
        call = self.call
        heads, longest = call.batch * call.nheads_k, max(calls.max_rows(call), calls.max_keys(call))
        processors = calls.count_multiprocessors(call.q.get_device())
        splits = max(1, min(-(-longest // variants.ABSMAX_ROWS), -(-8 * processors // heads), 32))
        self.add_launch(variant, tensors * heads * splits, **fields, splits=splits)

    def add_tiled_launch(self, variant: Variant, grid: Grid, heads: int, splits: int | None = 1) -> None:
        """Add a kernel with a block for each tile; before it, if needed, a launch that writes or corrects fp16 copies.

        grid: the blocks of each of the ``heads``; splits: blocks that share a tile, None for the best number
        """
        call, of_keys, redirects = self.call, variant.entry == "dkdv", {**self.redirects}
        tiles = grid.tiles * heads * call.batch
        if grid.varlen_tiles:
            variant, splits = variants.with_shared_grid(variant), 1
        elif splits is None:
            splits = (calls.choose_head_splits if of_keys else calls.choose_splits)(call, variant, tiles)
        if splits > 1:
            self.workspace = workspaces.PARTS_OFFSET + tiles * splits * grids.split_bytes(variant)
        fields = {**self.fields, "tiles": grid.tiles, "splits": splits, "varlen_tiles": grid.varlen_tiles}
        if variant.entry != "delta":  # delta streams no operands
            fields["resident"] = calls.count_resident(call, variant)
            if self.kind.features.copied:
                self._add_pass(variants.to_half(self.kind), 2, converts_rows=int(of_keys))
                rows, keys = {"q": call.q.shape, "dout": call.out_shape}, {"k": call.k.shape, "v": call.v.shape}
                offset = 0
                for name, shape in (rows if of_keys else keys).items():
                    fields[f"{name}_s"] = layouts.contiguous_strides(shape)
                    redirects[name] = "copies", offset
                    offset += 2 * math.prod(shape)
        self.launches.append(_Launch(variant, splits * grid.tiles * heads * grid.groups, fields, redirects))

    def load(self, new: Append | None = None, others: Mapping[str, Any] | None = None) -> Plan:
        """Load the kernels, check the inputs, and fix their order for runs. Return the plan, which keeps no tensors.

        others: further inputs, by their names in struct Params
        """
        call, launches, workspace = self.call, self.launches, self.workspace
        outputs = sorted(self.outputs, key=_HEAD_POSITIONS.__getitem__)
        most = max(launches, key=lambda launch: launch.blocks, default=None)
        if most is not None and most.blocks > _MAX_BLOCKS:
            raise nvrtc.TooManyBlocks(
                f"{most.variant.entry} would need {most.blocks} blocks, a launch has {_MAX_BLOCKS} at most: batch "
                f"{call.batch}, {call.nheads} heads, sequences of up to {calls.max_rows(call)} rows and "
                f"{calls.max_keys(call)} keys"
            )
        self.torch_device, self.device = call.q.device, call.q.get_device()
        self.seqlen_k, self._seqlen_new = calls.max_keys(call), 0 if new is None else new.k.shape[1]
        self.variants = tuple(launch.variant for launch in launches)
        self._appends_first = bool(launches) and launches[0].variant.entry == "append"
        whole, others = with_append(call, new), dict(others or {})
        inputs: dict[str, Any] = {name: getattr(whole, name, None) for name in _INPUTS} | others
        dtypes = _DTYPES | (dict.fromkeys("kv", call.k.dtype) if eight_bit.cache_macro(call.k) else {})
        dtypes |= {} if call.bias is None else {"bias": call.bias.dtype}
        dtypes |= {name: others[name].dtype for name in params.FLEX_ADDRESSES if name in others}
        for name, tensor in inputs.items():
            dtype = dtypes.get(name, call.q.dtype)
            if tensor is not None and (tensor.dtype, tensor.device) != (dtype, self.torch_device):
                raise RuntimeError(f"{name} must be {dtype} on {call.q.device}, got {tensor.dtype} on {tensor.device}")
        in_tail = *params.TAIL_ADDRESSES, *params.FLEX_ADDRESSES
        tail = [name for name in in_tail if layouts.addressed_bytes(inputs.get(name))]
        sizes = {
            name: layouts.addressed_bytes(inputs[name]) for name in dict.fromkeys((*tail, *inputs))
        }  # inputs of the tail come first
        sizes["rng_state"] = 16 if call.dropout_p else 0
        self._expected = [
            (name, dtypes.get(name, call.q.dtype).itemsize, 0 if name in _UNCHECKED else size)
            for name, size in sizes.items()
            if size
        ]
        self._negated = ", ".join([name for name, x in inputs.items() if x is not None and sizes[name] and x.is_neg()])
        self._others = tuple(others)
        self._places: dict[type, list[tuple[int, int, int]]] = {}  # by the type of the inputs of a run
        self._outputs = [
            (name, tuple(shape), strides or layouts.dense_strides(shape), dtype)
            for name, (shape, strides, dtype) in ((name, self.outputs[name]) for name in outputs)
        ]
        names = [name for name, size in sizes.items() if size] + outputs
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
        del self.call
        return self

    def run(
        self,
        tensors: Inputs | AttentionCall,
        length: int | None = None,
        given_out: Tensor | None = None,
        others: Sequence[Any] = (),
    ) -> dict[str, Tensor]:
        """Launch on the current stream of the plan's device; return the outputs by name.

        tensors: the inputs by name; others: the plan's further inputs, in its order
        length: how many keys each sequence has before the append, which may differ from call to call; None for the
            plan's own number, which counts the appended keys
        given_out: memory for the output "out" that no input shares, used if it is contiguous; None for a new tensor
        Raises RuntimeError for a tensor without memory or with too little, NegatedView for a lazily negated view, and
        KernelError, with ``appended`` set if new keys are in the cache already.
        """
        if self._negated:  # known since ``load``, for a cache key tells lazily negated views from others
            raise NegatedView(f"{self._negated} must not be a lazily negated view")
        addresses: list[int] = []
        places = self._places.get(type(tensors)) or self._find_places(type(tensors))
        given = (*tensors, *others) if others else tensors
        for index, itemsize, size in places:
            tensor = given[index]
            if size and tensor.storage_offset() * itemsize + size > tensor.untyped_storage().nbytes():
                raise self._input_error(tensor, len(addresses))
            addresses.append(tensor.data_ptr())
        outputs, allocate = {}, allocator(self.torch_device, self.device)
        for name, shape, strides, dtype in self._outputs:
            if (
                given_out is not None
                and name == "out"
                and checks.is_writable_out(given_out, shape, dtype, self.torch_device)
            ):
                output = given_out
            else:
                output = allocate(shape, strides, dtype)
            outputs[name] = output
            addresses.append(output.data_ptr())
        for name in self._zeroed:
            outputs[name].zero_()
        if self.workspace:
            workspace = workspaces.acquire(self.workspace, self.device, self.torch_device)  # kept until the launches
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
                self._launch(kernel, blocks, self.device, packed + rest + tail + behind if tail else packed + rest)
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
        """Return the error for a tensor, the plan's input ``at``, that exceeds its storage."""
        _, _, size = self._expected[at]
        return RuntimeError(
            f"{self._names[at]} must have {size} bytes in its storage from its first element on; got shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}, storage of {tensor.untyped_storage().nbytes()} bytes, "
            f"offset {tensor.storage_offset()}"
        )


def allocator(place: torch.device, device: int) -> Allocate:
    """Return a function that allocates tensors on a device; valid while the current GPU stays the same.

    device: the number of ``place``; -1 for the CPU
    """
    found = _on_host if device < 0 else _on_current_gpu if device == current_device() else None
    return functools.partial(_allocate, place) if found is None else found


def _allocate(place: torch.device, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=place)


def launch_over(
    tensors: Sequence[Tensor], kernel: nvrtc.Kernel, blocks: int, head: struct.Struct, rest: bytes, seqlen_k: int = 0
) -> None:
    """Launch a kernel over tensors that another kernel has just used, so they need no checks. head: packs addresses"""
    addresses = [tensor.data_ptr() for tensor in tensors]
    first, *_ = tensors
    nvrtc.driver().launch(kernel, blocks, first.get_device(), head.pack(*addresses, seqlen_k) + rest)


def with_append(call: AttentionCall, new: Append | None) -> Any:
    """Return an object that has the tensors of ``call`` and of ``new`` by name, for ``Plan.run``."""
    if new is None:
        return call
    own = {name: getattr(call, name) for name in CacheInputs._fields[:-4]}
    return CacheInputs(**own, k_new=new.k, v_new=new.v, rotary_cos=new.rotary_cos, rotary_sin=new.rotary_sin)
