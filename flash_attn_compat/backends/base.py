"""What a backend is: a table of what it can compute, its reasons against a call, forward and backward.

How calls that are alike are computed is prepared once; by default that is its forward and its backward.

Reasons come from the table wherever they can, so that the table is also the documentation and the tests'
parametrisation. A backend never looks at another one.
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

from flash_attn_compat.core import alibi, dropout
from flash_attn_compat.core.append import by_operators
from flash_attn_compat.core.call import AttentionCall, Derived, Gradients, Result, Upstream
from flash_attn_compat.core.features import Feature, Traits, dtype_name, split
from flash_attn_compat.core.prepared import Alike, BackwardRun, Run, Tensors
from flash_attn_compat.core.traced_lengths import HiddenLayout, has_hidden_lengths
from flash_attn_compat.core.varlen import Block, Layout, Places, whole_block

HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
FLOAT_DTYPES = HALF_DTYPES | {torch.float32, torch.float64}
_DEVICES = {"cpu": "CPUs", "cuda": "CUDA GPUs", "mps": "Apple GPUs", "xpu": "Intel GPUs"}


@dataclass(frozen=True)
class Capabilities:
    """What a backend computes exactly.

    devices: device types, None for any; min_capability, max_capability: CUDA compute capabilities, inclusive
    not_on_rocm: why it does not serve AMD's GPUs, which PyTorch calls cuda too; None if it does
    """

    features: Feature
    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] = FLOAT_DTYPES
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    max_head_dim: int | None = None
    rocm_reason: str | None = None


class KernelsFailed(RuntimeError):
    """A backend's kernels turn out not to work for a call: compiling, loading, launching or trying them fails.

    Nothing was written, unless ``appended`` is q, rotated if that was asked for: then the new keys are in their cache.
    """

    appended: Tensor | None = None


class CallRefused(KernelsFailed):
    """The kernels cannot compute this very call, for its sizes; other calls of the same traits they can."""


class NegatedView(RuntimeError):
    """A tensor's memory holds its numbers with the other sign, which PyTorch knows and a kernel does not."""


class Backend(abc.ABC):
    """One way to compute attention."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @functools.cached_property
    def _failures(self) -> dict[Traits, str]:
        return {}

    def reasons(self, traits: Traits) -> list[str]:
        """Every reason why this backend cannot serve calls of these traits; empty when it can."""
        table = self.capabilities
        refuses_rocm = torch.version.hip is not None and table.rocm_reason
        reasons = [refuses_rocm] if refuses_rocm else list(self.unavailable_reasons())
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
        """Where it stands among the others for such calls: lower goes first, equals in the order of the list."""
        return 0

    def times(self, traits: Traits) -> Mapping[str, float] | None:
        """Milliseconds of such calls by the backends that were timed on this GPU, itself among them.

        These backends change places among themselves, the fastest first, whatever their rank; the others stay.
        """
        return None

    def has_failed(self, traits: Traits) -> bool:
        return traits in self._failures

    def record_failure(self, traits: Traits, failure: KernelsFailed) -> None:
        """From now on the failure is a reason against such calls; warns once of each."""
        reason = " ".join(str(failure).split())[:400]
        if reason not in self._failures.values():
            warnings.warn(f"a {self.name} kernel is not used: {reason}", RuntimeWarning, stacklevel=2)
        self._failures[traits] = reason

    def clear_failures(self) -> None:
        """Try again what has failed."""
        self._failures.clear()

    def unavailable_reasons(self) -> list[str]:
        """Why this backend cannot serve any call on this machine."""
        return []

    def extra_reasons(self, traits: Traits) -> list[str]:
        """Reasons that the table cannot express, such as combinations."""
        return []

    def late_reasons(self, traits: Traits) -> list[str]:
        """What takes a library or a trial to find out: asked only where nothing else speaks against."""
        return []

    def prepare(self, alike: Alike) -> Run:
        """What computes all calls that are ``alike``. May raise KernelsFailed, as may what it returns."""
        bind, forward = alike.bind, self.forward
        if not alike.is_over_cache:
            return lambda tensors, length: forward(bind(tensors, length)[0])

        def run(tensors: Tensors, length: int | None) -> Result:
            with torch.no_grad():
                call, new = bind(tensors, length)
                return forward(call if new is None else call._replace(q=by_operators(call, new)))

        return run

    def prepare_backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> BackwardRun:
        """The same for gradients: of all calls like this one, from what comes from above as this does."""
        described, backward = call.with_tensors(), self.backward
        return lambda tensors, upstream, into: Derived(backward(described.with_tensors(*tensors), upstream, into))

    def saved_mask(self, mask: Tensor, saved: tuple[Any, ...]) -> Tensor | None:
        """The dense mask that a forward saw, shaped as ``mask`` is, if ``saved`` holds it; None if not.

        A backend that keeps it does not read the mask's own memory in its backward.
        """
        return None

    @abc.abstractmethod
    def forward(self, call: AttentionCall) -> Result:
        """Compute out, softmax_lse (+inf for rows without keys) and the dropout's rng_state."""

    @abc.abstractmethod
    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        """Gradients from the ``out`` and ``softmax_lse`` in ``upstream``, whoever computed those.

        ``upstream`` has a gradient of softmax_lse only where the backend's table lists Feature.LSE_GRADIENT.

        Probabilities are exp(score - softmax_lse), so the numbers may describe a longer sequence of which
        ``call`` holds a part. Results are written through the strides of ``into`` where it is given.
        """


class BlockwiseBackend(Backend):
    """A backend that computes dense blocks; packed, paged and padded calls are laid out for it."""

    @abc.abstractmethod
    def forward_block(
        self, call: AttentionCall, block: Block, rng_state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """``out`` (n, seqlen_q, nheads, head_dim_v) in q's dtype, and the true LSE (n, nheads, seqlen_q).

        Rows without keys are 0, their LSE +inf. None where nobody asked for the LSE, or the kernel has none.
        """

    @abc.abstractmethod
    def backward_block(self, call: AttentionCall, block: Block, upstream: Upstream) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the layout of block.q, block.k, block.v."""

    def forward(self, call: AttentionCall) -> Result:
        rng_state = call.rng_state
        if call.dropout_p and rng_state is None:
            rng_state = dropout.new_rng_state(call.q.device)
        block = whole_block(call)
        if block is not None:
            out, lse = self.forward_block(call, block, rng_state)
            if lse is None or not call.lse_carries_alibi_position:
                return Result(out, lse, rng_state)
            return Result(out, lse + _position_shift(block, lse.dtype), rng_state, saved=(lse,))
        has_lse = call.return_lse or call.needs_grad
        layout = _make_layout(call)
        out, lse = layout.empty_result()
        # The reported LSE can be large beside the true one, which the backward needs to its last digit.
        saved = (lse.clone(),) if call.lse_carries_alibi_position else ()
        for block, rows, _ in layout.blocks(layout.plans()):
            block_out, block_lse = self.forward_block(call, block, rng_state)
            rows.scatter(out, block_out)
            if block_lse is None:
                has_lse = False
            elif has_lse:
                if saved:
                    rows.scatter_lse(saved[0], block_lse)
                    block_lse = block_lse + _position_shift(block, block_lse.dtype)
                rows.scatter_lse(lse, block_lse)
        return Result(out, lse, rng_state, saved) if has_lse else Result(out, None, rng_state)

    def backward(self, call: AttentionCall, upstream: Upstream, into: Gradients | None) -> Gradients:
        block = whole_block(call)
        if block is not None:
            found = self.backward_block(
                call, block, upstream._replace(softmax_lse=_unshifted_lse(call, block, upstream))
            )
            return cast_or_write_gradients(Gradients(*found), call, into)
        layout = _make_layout(call)
        totals = _zero_gradients(call, layout, upstream, into)
        for block, rows, keys in layout.blocks(layout.plans()):
            # A kernel that makes its probabilities anew has some for rows of padding, too.
            dout = rows.with_padding(rows.gather(upstream.dout), 0.0)
            lse = _unshifted_lse(call, block, upstream, rows)
            dlse = None if upstream.dlse is None else rows.gather_lse(upstream.dlse, 0.0)
            of_block = Upstream(dout, rows.gather(upstream.out), lse, upstream.rng_state, dlse=dlse)
            found = self.backward_block(call, block, of_block)
            for total, places, gradient in zip(totals, (rows, keys, keys), found):
                places.scatter(total, gradient)
        return totals


def _make_layout(call: AttentionCall) -> Layout:
    return HiddenLayout(call) if has_hidden_lengths(call) else Layout(call)


def _zero_gradients(call: AttentionCall, layout: Layout, upstream: Upstream, into: Gradients | None) -> Gradients:
    """Gradients to scatter into: ``into`` where it is given."""
    if call.transformed:
        others = [x for x in (upstream.dout, upstream.out, upstream.softmax_lse, upstream.dlse) if x is not None]
        return Gradients(*[layout.zeros(tuple(x.shape), x.dtype, *others) for x in (call.q, call.k, call.v)])
    totals = into or Gradients(*map(torch.empty_like, (call.q, call.k, call.v)))
    for total in totals:
        total.zero_()
    return totals


def _unshifted_lse(call: AttentionCall, block: Block, upstream: Upstream, rows: Places | None = None) -> Tensor | None:
    """A block's, whose ``rows`` these are: as the forward kept it, or as it was reported, without the position that
    flash-attn adds under causal ALiBi; None from kernels that have none.
    """
    lse = upstream.saved[0] if upstream.saved else upstream.softmax_lse
    if lse is None:
        return None
    lse = lse if rows is None else rows.gather_lse(lse)
    is_shifted = call.lse_carries_alibi_position and not upstream.saved
    return lse - _position_shift(block, lse.dtype) if is_shifted else lse


def _position_shift(block: Block, dtype: torch.dtype) -> Tensor:
    assert block.slopes is not None  # nothing else shifts it
    offset = block.offset if block.first_key is None else block.offset - block.first_key
    return alibi.causal_lse_shift(block.slopes.to(dtype), block.q.shape[1], offset)


def cast_or_write_gradients(found: Gradients, call: AttentionCall, into: Gradients | None) -> Gradients:
    """``found`` in the call's dtypes, or written through the strides of ``into``."""
    if into is None:
        return Gradients(found.dq.to(call.q.dtype), found.dk.to(call.k.dtype), found.dv.to(call.v.dtype))
    for target, value in zip(into, found):
        target.copy_(value)
    return into


@functools.cache
def aten_operator(name: str) -> Any:
    """A private operator of PyTorch's; None where this PyTorch has none."""
    packet = getattr(torch.ops.aten, name, None)
    return packet and packet.default


def argument_names(operator: Any) -> frozenset[str]:
    """The names of its arguments in the installed PyTorch, whose schemas grow; a reason against what it lacks."""
    return frozenset() if operator is None else frozenset(argument.name for argument in operator._schema.arguments)


def missing_argument_reasons(needed: dict[str, set[str]]) -> list[str]:
    """Reasons against operators, by name, that lack an argument which they are called with."""
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
