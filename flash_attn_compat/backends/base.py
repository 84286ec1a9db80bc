"""The interface of a backend: a table of capabilities, reasons to decline a call, a forward and a backward.

A backend prepares one run for all calls with the same cache key. The default run is its forward or its backward.
Reasons come from the table wherever possible, because the documentation and the tests use the table, too. No backend
uses another backend.
"""

from __future__ import annotations

import abc
import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flash_attn_compat.backends import alibi
from flash_attn_compat.backends.varlen import Block, Layout, Places, whole_block, with_folded_factor
from flash_attn_compat.core import checks, dropout
from flash_attn_compat.core.append import by_operators
from flash_attn_compat.core.arguments import call_of
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, BackwardResult, Gradients, Result
from flash_attn_compat.core.entry import BackwardRun, Run
from flash_attn_compat.core.features import Feature, Traits, dtype_name, split
from flash_attn_compat.core.inputs import NO_INPUTS, CacheInputs, Inputs, Options

HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
FLOAT_DTYPES = HALF_DTYPES | {torch.float32, torch.float64}
_DEVICES = {"cpu": "CPUs", "cuda": "CUDA GPUs", "mps": "Apple GPUs", "xpu": "Intel GPUs"}


@dataclass(frozen=True)
class Capabilities:
    """The calls that a backend computes exactly.

    features: bits of Feature
    devices: device types, None for any; min_capability, max_capability: CUDA compute capabilities, inclusive
    rocm_reason: reason to decline AMD's GPUs, which PyTorch also calls cuda; None if the backend serves them
    """

    features: int
    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] = FLOAT_DTYPES
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    max_head_dim: int | None = None
    rocm_reason: str | None = None


class KernelsFailed(RuntimeError):
    """A backend's kernels failed for a call: in compilation, loading, launch or self-test.

    appended: None if nothing was written; q, after any rotation, if the new keys are in the cache already
    """

    appended: Tensor | None = None


class CallRefused(KernelsFailed):
    """The kernels cannot compute a call of this size. Other calls with the same traits may run."""


class NegatedView(RuntimeError):
    """A tensor is a lazily negated view (is_neg()): its memory holds the opposite numbers, and a kernel cannot know."""


class Backend(abc.ABC):
    """One way to compute attention: its capabilities, reasons to decline calls, and runs for calls that it takes."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @functools.cached_property
    def _failures(self) -> dict[Traits, str]:
        return {}

    def reasons(self, traits: Traits) -> list[str]:
        """Return every reason to decline calls with these traits; empty if the backend is eligible."""
        table = self.capabilities
        rocm_reason = torch.version.hip is not None and table.rocm_reason
        reasons = [rocm_reason] if rocm_reason else list(self.unavailable_reasons())
        if table.devices is not None and traits.device_type not in table.devices:
            reasons.append(f"runs on {_join_device_names(table.devices)} only")
        reasons += _capability_reasons(table, traits)
        if traits.dtype not in table.dtypes:
            reasons.append(f"does not compute {dtype_name(traits.dtype)}")
        largest = max(traits.head_dim, traits.head_dim_v)
        if table.max_head_dim is not None and largest > table.max_head_dim:
            reasons.append(f"head_dim is at most {table.max_head_dim}, got {largest}")
        missing = traits.features & ~int(table.features)
        reasons += [f"does not support {feature.description}" for feature in split(missing)]
        reasons += self.extra_reasons(traits)
        if traits in self._failures:
            reasons.append(f"failed before: {self._failures[traits]}")
        return reasons or self.late_reasons(traits)

    def rank(self, traits: Traits) -> int:
        """Return the rank for calls with these traits: lower ranks go first, equal ranks keep the order of BACKENDS."""
        return 0

    def measured_times(self, traits: Traits) -> Mapping[str, float] | None:
        """Return how many milliseconds each backend took for calls with these traits, by its name.

        `tune` measures this backend and its rivals and stores the times. The backends of the mapping are then tried in
        the order of their times, not of their ranks; other backends keep their places. None if this GPU has no times.
        """
        return None

    def has_failed(self, traits: Traits) -> bool:
        return traits in self._failures

    def record_failure(self, traits: Traits, failure: KernelsFailed) -> None:
        """Decline calls with these traits from now on, with the failure as the reason. Each reason warns once."""
        reason = " ".join(str(failure).split())[:600]
        if reason not in self._failures.values():
            warnings.warn(f"a {self.name} kernel is not used: {reason}", RuntimeWarning, stacklevel=2)
        self._failures[traits] = reason

    def clear_failures(self) -> None:
        """Forget recorded failures, so that calls like those that failed are tried again."""
        self._failures.clear()

    def unavailable_reasons(self) -> list[str]:
        """Return the reasons to decline every call on this machine."""
        return []

    def extra_reasons(self, traits: Traits) -> list[str]:
        """Return reasons to decline such calls that capabilities cannot express, such as combinations of features."""
        return []

    def late_reasons(self, traits: Traits) -> list[str]:
        """Return reasons that need a library or a self-test. Asked only if there is no other reason to decline."""
        return []

    def prepare(self, x: Inputs, options: Options, length: int | None) -> Run:
        """Return the run, a function that computes every call with these arguments' cache key; they are ``call_of``'s.

        Both this method and the run may raise KernelsFailed.
        """
        forward = self.forward
        if not isinstance(x, CacheInputs):
            described = call_of(x, options)[0].over(NO_INPUTS)
            return lambda x, length, out=None: forward(described.over(x))

        def run(x: Inputs, length: int | None, out: Tensor | None = None) -> Result:
            if out is not None:
                checks.is_writable_for(out, x.q, x.v)
            with torch.no_grad():
                call, new = call_of(x, options, length)
                return forward(call if new is None else call._replace(q=by_operators(call, new)))

        return run

    def prepare_backward(self, call: AttentionCall, upstream: BackwardInputs, into: Gradients | None) -> BackwardRun:
        """Return the run, a function that computes gradients for every backward with these arguments' cache key."""
        described, backward = call.over(NO_INPUTS), self.backward
        return lambda x, upstream, into: BackwardResult(backward(described.over(x), upstream, into))

    def saved_mask(self, mask: Tensor, saved: tuple[Any, ...]) -> Tensor | None:
        """Return the dense mask that a forward read, in the shape of ``mask``, if ``saved`` holds it; else None.

        If ``saved`` holds the mask, the backward does not read ``mask``.
        """
        return None

    @abc.abstractmethod
    def forward(self, call: AttentionCall) -> Result:
        """Return out, softmax_lse (+inf for rows without keys) and the dropout's rng_state."""

    @abc.abstractmethod
    def backward(self, call: AttentionCall, upstream: BackwardInputs, into: Gradients | None) -> Gradients:
        """Return dq, dk, dv from the ``out`` and ``softmax_lse`` in ``upstream``, which any backend may have computed.

        Probabilities are exp(score - softmax_lse), so ``upstream`` may describe a longer sequence than ``call``. It has
        a gradient of softmax_lse only if the backend's capabilities list Feature.LSE_GRADIENT.
        into: tensors of any strides to write to and to return; None for new tensors
        """


class BlockwiseBackend(Backend):
    """A backend that computes dense blocks. This class cuts packed, paged and padded calls into such blocks."""

    @abc.abstractmethod
    def forward_block(
        self, call: AttentionCall, block: Block, rng_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return out (n, seqlen_q, nheads, head_dim_v) in q's dtype, and the LSE (n, nheads, seqlen_q).

        The LSE is without the position that flash-attn adds under causal ALiBi; None if the call needs none or the
        kernel returns none. For rows without keys, out is 0 and the LSE +inf.
        """

    @abc.abstractmethod
    def backward_block(
        self, call: AttentionCall, block: Block, upstream: BackwardInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv in the layout of block.q, block.k, block.v."""

    def forward(self, call: AttentionCall) -> Result:
        call, rng_state = with_folded_factor(call), call.rng_state
        if call.dropout_p and rng_state is None:
            rng_state = dropout.new_rng_state(call.q.device)
        block = whole_block(call)
        if block is not None:
            out, lse = self.forward_block(call, block, rng_state)
            out = out.to(call.q.dtype)
            if lse is None or not call.lse_carries_alibi_position:
                return Result(out, lse, rng_state)
            return Result(out, lse + _position_shift(block, lse.dtype), rng_state, saved=(lse,))
        has_lse = call.use & (Feature.LSE | Feature.BACKWARD) != 0
        layout = Layout(call)
        out, lse = layout.empty_result()
        # Under causal ALiBi the reported LSE includes a position, which may be large. The backward needs the LSE
        # without it to the last digit, so both are kept.
        true_lse = lse.clone() if call.lse_carries_alibi_position else None
        for block, rows, _ in layout.blocks(layout.plans()):
            block_out, block_lse = self.forward_block(call, block, rng_state)
            rows.scatter(out, block_out)
            if block_lse is None:
                has_lse = False
            elif has_lse:
                if true_lse is not None:
                    rows.scatter_lse(true_lse, block_lse)
                    block_lse = block_lse + _position_shift(block, block_lse.dtype)
                rows.scatter_lse(lse, block_lse)
        saved = () if true_lse is None else (true_lse,)
        return Result(out, lse, rng_state, saved) if has_lse else Result(out, None, rng_state)

    def backward(self, call: AttentionCall, upstream: BackwardInputs, into: Gradients | None) -> Gradients:
        block = whole_block(call)
        if block is not None:
            upstream = upstream._replace(softmax_lse=_unshifted_lse(call, block, upstream))
            return write_gradients(Gradients(*self.backward_block(call, block, upstream)), call, into)
        layout = Layout(call)
        totals = _zero_gradients(call, layout, upstream, into)
        for block, rows, keys in layout.blocks(layout.plans()):
            # dout must be 0 in rows of padding: kernels recompute nonzero probabilities there, too.
            dout = rows.with_padding(rows.gather(upstream.dout), 0.0)
            lse = _unshifted_lse(call, block, upstream, rows)
            dlse = None if upstream.dlse is None else rows.gather_lse(upstream.dlse, 0.0)
            block_upstream = BackwardInputs(dout, rows.gather(upstream.out), lse, upstream.rng_state, dlse=dlse)
            gradients = self.backward_block(call, block, block_upstream)
            for total, places, gradient in zip(totals, (rows, keys, keys), gradients):
                places.scatter(total, gradient)
        return totals


def _zero_gradients(call: AttentionCall, layout: Layout, upstream: BackwardInputs, into: Gradients | None) -> Gradients:
    """Return gradients filled with 0, to scatter into: ``into`` if it is given, else new tensors."""
    if call.use & Feature.TRANSFORMS:
        others = [x for x in (upstream.dout, upstream.out, upstream.softmax_lse, upstream.dlse) if x is not None]
        return Gradients(*[layout.zeros(tuple(x.shape), x.dtype, *others) for x in (call.q, call.k, call.v)])
    totals = into or Gradients(*map(torch.empty_like, (call.q, call.k, call.v)))
    for total in totals:
        total.zero_()
    return totals


def _unshifted_lse(
    call: AttentionCall, block: Block, upstream: BackwardInputs, rows: Places | None = None
) -> Tensor | None:
    """Return the block's LSE without the position that flash-attn adds under causal ALiBi; None if there is no LSE.

    rows: where the block's rows lie in the call's tensors; None for a block that is the whole call
    """
    lse, *_ = upstream.saved or (upstream.softmax_lse,)
    if lse is None:
        return None
    lse = lse if rows is None else rows.gather_lse(lse)
    is_shifted = call.lse_carries_alibi_position and not upstream.saved
    return lse - _position_shift(block, lse.dtype) if is_shifted else lse


def _position_shift(block: Block, dtype: torch.dtype) -> Tensor:
    assert block.slopes is not None  # only ALiBi shifts the LSE
    offset = block.offset if block.first_key is None else block.offset - block.first_key
    return alibi.causal_lse_shift(block.slopes.to(dtype), block.q.shape[1], offset)


def write_gradients(gradients: Gradients, call: AttentionCall, into: Gradients | None) -> Gradients:
    """Return ``gradients`` in the call's dtypes; if ``into`` is given, write them into it and return it."""
    if into is None:
        return Gradients(*(value.to(tensor.dtype) for value, tensor in zip(gradients, (call.q, call.k, call.v))))
    for target, value in zip(into, gradients):
        target.copy_(value)
    return into


@functools.cache
def aten_operator(name: str) -> Any:
    """Return PyTorch's private operator aten::``name``; None where this PyTorch lacks it."""
    packet = getattr(torch.ops.aten, name, None)
    return packet and packet.default


def argument_names(operator: Any) -> frozenset[str]:
    """Return the argument names of an operator in the installed PyTorch; empty for None."""
    return frozenset() if operator is None else frozenset(argument.name for argument in operator._schema.arguments)


def missing_argument_reasons(needed: dict[str, set[str]]) -> list[str]:
    """Return a reason for each operator (key) of this PyTorch that lacks an argument that we pass (value)."""
    return [
        f"this PyTorch's aten::{name} lacks {', '.join(sorted(missing))}"
        for name, arguments in needed.items()
        if (missing := arguments - argument_names(aten_operator(name)))
    ]


def _capability_reasons(table: Capabilities, traits: Traits) -> list[str]:
    if traits.capability is None:
        return []
    lowest, highest, here = table.min_capability, table.max_capability, _format_capability(traits.capability)
    if lowest is not None and traits.capability < lowest:
        return [f"needs compute capability {_format_capability(lowest)}, this GPU counts as {here}"]
    if highest is not None and traits.capability > highest:
        return [f"knows GPUs up to {_format_capability(highest)}, this GPU counts as {here}"]
    return []


def _join_device_names(devices: frozenset[str]) -> str:
    *others, last = [_DEVICES.get(device, device) for device in sorted(devices)]
    return f"{', '.join(others)} and {last}" if others else last


def _format_capability(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
