"""The only file of torch_sdpa that calls dispatch: it prepares a call and runs it if our kernels are chosen for it."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from flash_attn_compat.core.arguments import checked_call
from flash_attn_compat.core.call import BackwardInputs, Gradients, Result
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import DenseInputs, Inputs, Options
from flash_attn_compat.dispatch import autograd, choice, serve
from flash_attn_compat.dispatch.pytorch import heads_first, observers

KERNELS, PYTORCH = "fused", "pytorch"
as_own = heads_first.as_own


def attend(x: DenseInputs, options: Options) -> Tensor | None:
    """Return dense attention's out, recorded by autograd; None if another backend would serve the call.

    out is (batch, heads, rows, channels), contiguous in memory as (batch, rows, heads, channels).
    """
    use = observers.recorded_use((x.q, x.k, x.v))
    options = _with_deciding_use(options, use)
    try:
        if use & Feature.BACKWARD:
            return autograd.record_heads_first(KERNELS, x, options)
        found = serve.compute_by(KERNELS, x, options)
    except choice.BackendNotSupported:  # the user forces another backend
        return None
    return None if found is None else as_own(found[1].out)


def _with_deciding_use(options: Options, use: int) -> Options:
    """Return the options with the use that decides the backend: with dropout, that of a call recorded by autograd.

    A reentrant checkpoint records the recomputation of a forward, not the forward. One backend must compute both, so
    that both drop the same keys.
    """
    use = Feature.BACKWARD if options.dropout_p else use
    return options._replace(use=use) if use else options


def forward(x: Inputs, options: Options, return_lse: bool) -> Result | None:
    """Return a forward's result, dense or packed, outside of autograd; None if another backend would serve the call."""
    try:
        found = serve.compute_by(KERNELS, x, options._replace(use=Feature.LSE) if return_lse else options)
    except choice.BackendNotSupported:
        return None
    return None if found is None else found[1]


def backward(
    x: Inputs, options: Options, upstream: BackwardInputs, into: Gradients | None
) -> Gradients | None:  # fmt: skip
    """Return dq, dk, dv from the out and LSE of any kernel, outside of autograd; None if our kernels decline the call.

    into: tensors to write to, or None for new ones
    """
    try:
        entry = serve.find(x, options._replace(use=Feature.GIVEN_LSE))
    except choice.BackendNotSupported:
        return None
    if entry.backend is None or entry.backend.name != KERNELS:
        return None
    return serve.gradients(entry, serve.backward_inputs(x, None), upstream, into)[1].gradients


def decline_reasons(x: Inputs, options: Options) -> list[str]:
    """Return our kernels' reasons to decline the call; an empty list if they serve it. Shapes as in flash_attn_func."""
    use = observers.recorded_use((x.q, x.k, x.v))
    return choice.reasons_against(KERNELS, checked_call(x, _with_deciding_use(options, use)))


def explain(reasons: list[str]) -> NoReturn:
    """Raise Explained, which carries the answer to `explain`. reasons: why our kernels decline the call, if they do"""
    computed_by = PYTORCH if reasons else KERNELS
    raise choice.Explained(choice.Explanation(computed_by, {KERNELS: reasons, PYTORCH: []}))
