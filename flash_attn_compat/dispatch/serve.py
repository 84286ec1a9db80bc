"""Finds or prepares the call of a request and runs it, for every function.

If a kernel fails to compile, load, launch or pass its self-test, at a first call or later, forward or backward, its
backend keeps the reason, the cache of prepared calls is discarded, and the next backend computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.backends import Backend, CallRefused, KernelsFailed, NegatedView
from flash_attn_compat.core import cuda_capture, prepared, torch_state
from flash_attn_compat.core.append import by_operators
from flash_attn_compat.core.call import (
    NO_TENSORS,
    RNG_STATE,
    AttentionCall,
    BackwardInputs,
    BackwardResult,
    Gradients,
    Result,
)
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.prepared import Alike, BackwardRun, Key, Known, Request, Run, Tensors
from flash_attn_compat.core.scores import signed_probabilities
from flash_attn_compat.core.varlen import lse_dtype
from flash_attn_compat.dispatch import at_exit, choice


def run(known: Known, request: Request) -> tuple[Known, Result]:
    """Run a prepared call; return its result, and the prepared call that served in the end (a fallback's, maybe)."""
    while True:
        assert known.run is not None  # a backward alone is never run forward
        try:
            result = known.run(request.tensors, request.length)
        except KernelsFailed as failure:
            alike = request.kind.build(request)
            if failure.appended is None or request.kind.appended is None:
                known = _prepared(prepared.look_up(request)[0], alike, known.backend, failure)
            else:  # nothing is written twice
                _note(known.backend, alike.call, failure)
                request = request.kind.appended(request, failure.appended)
                known = find(request)
        except NegatedView:
            request = _stored(known, request)
            known = find(request)
        else:
            if known.backend is not None:
                choice.served[known.backend.name] += 1
            return known, result


def find(request: Request) -> Known:
    """Return the prepared call of a request, whose numbers pass their checks here."""
    key, known = prepared.look_up(request)
    if known is None:
        alike = request.kind.build(request)
        if alike.check is not None:
            alike.check(request)
        return _prepared(key, alike)
    if known.check is not None:
        known.check(request)
    return known


def _stored(known: Known, request: Request) -> Request:
    """Return the request without lazily negated views. Raises NegatedView if the only one is a cache to write to."""
    written = (1, 2) if known.call.appends else ()
    given = enumerate(request.tensors)
    stored = tuple([x if x is None or index in written else x.resolve_neg() for index, x in given])
    if all([one is other for one, other in zip(stored, request.tensors)]):
        raise NegatedView(
            "a negated view of a cache cannot be written by a kernel: give it the cache itself, or a copy"
        )
    return replace(request, tensors=stored)


def whole(request: Request) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, softmax_lse, S_dmask, rng_state) outside autograd; outputs not asked for have no elements."""
    known, result = run(find(request), request)
    out, rng_state = result.out, result.rng_state
    lse = result.lse.contiguous() if known.call.return_lse else out.new_empty(0, dtype=lse_dtype(out.dtype))
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=out.device)
    return out, lse, dmask(known, request.tensors, rng_state), rng_state


def dmask(known: Known, tensors: Tensors, rng_state: Tensor | None) -> Tensor:
    """Return S_dmask, without elements where the call does not ask for it."""
    if not known.call.return_dmask:
        return torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device)
    return signed_probabilities(known.call.with_tensors(*tensors[:RNG_STATE]), rng_state)


def with_rng_state(request: Request, rng_state: Tensor) -> Request:
    """Return the request with ``rng_state``'s dropout mask instead of a new one."""
    tensors = *request.tensors, *NO_TENSORS
    behind = tensors[RNG_STATE + 1 : len(request.tensors)]
    return replace(request, tensors=(*tensors[:RNG_STATE], rng_state, *behind))


def backward_tensors(tensors: Tensors, rng_state: Tensor | None) -> Tensors:
    """Return a request's tensors as a backward takes them: no negated views, and the rng_state of the forward."""
    state = None if rng_state is None else rng_state.contiguous()  # kernels read two neighbours
    return (*[x if x is None else x.resolve_neg() for x in (*tensors, *NO_TENSORS)[:RNG_STATE]], state)


def gradients(
    known: Known, tensors: Tensors, upstream: BackwardInputs, into: Gradients | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Backend | None, BackwardResult]:  # fmt: skip
    """Return the backend that computed the gradients of a call, and the gradients.

    The call's own backend computes them, or a fallback if its kernels fail.

    Args:
        tensors: as backward_tensors returns them
        into: tensors to write to, through their strides, or None for new ones
        check: raises if upstream or into do not fit; skipped where tensors of the same signatures passed before
    """
    at_exit.wait_for_autograd(tensors[0])
    if known.backend is None:
        check()
        found = into or Gradients(*map(torch.empty_like, tensors[:3]))
        for gradient in found:
            gradient.zero_()
        return None, BackwardResult(found)
    if upstream.dout.is_neg():
        upstream = upstream._replace(dout=upstream.dout.resolve_neg())
    if known.memory is not prepared.current():  # discarded, and held by an autograd graph
        known.memory, known.backward = prepared.current(), {}
    dout, out, lse, _, saved, dlse = upstream
    given = *tensors, dout, out, lse, dlse, *saved, *(into or ())  # hooks may have moved saved tensors
    key = prepared.backward_key(given)
    kept = None if key is None else known.backward.get(key)
    if kept is None or into is None:
        check()
    backend, run = kept or _prepared_backward(known, key, tensors, upstream, into)
    while True:
        try:
            return backend, run(tensors, upstream, into)
        except KernelsFailed as failure:
            backend, run = _prepared_backward(known, key, tensors, upstream, into, backend, failure)


def differentiable_call(request: Request, rng_state: Tensor | None) -> AttentionCall:
    """Return the checked call of a transformed request. No backend is chosen: a forced one may lack derivatives."""
    alike = request.kind.build(request)
    if alike.check is not None:
        alike.check(request)
    return alike.call.with_tensors(*backward_tensors(request.tensors, rng_state))


def plain_gradients(call: AttentionCall, upstream: BackwardInputs) -> Gradients:
    """Return the gradients of a call, computed by operators that transforms can differentiate."""
    with torch_state.without_autocast(call.q.device):
        return choice.choose_unforced(call).backward(call, upstream, None)


def _prepared(
    key: Key | None, alike: Alike, failed: Backend | None = None, failure: KernelsFailed | None = None
) -> Known:
    """Choose a backend, prepare its run, and cache both under ``key``.

    failed, failure: the backend whose kernels failed last time, and its error
    """
    call = alike.call
    found = _note(failed, call, failure)
    current = prepared.current()
    backend = found or choice.choose_backend(call)
    run: Run | None = None
    if backend is None:
        run = _nothing(alike)
    elif not call.given_lse:
        try:
            run = backend.prepare(alike)
        except KernelsFailed as error:
            return _prepared(key, alike, backend, error)
    if run is not None and torch_state.autocasts(call.q):
        run = _without_autocast(run, call.q.device)
    known = Known(call.with_tensors(), backend, run, alike.check, current)
    if key is not None and not cuda_capture.is_capturing(call.q.get_device()):  # where no self-test may run
        prepared.keep(current.known, key, known)
    return known


def _note(failed: Backend | None, call: AttentionCall, failure: KernelsFailed | None) -> Backend | None:
    """Keep a failure's reason and discard prepared calls; return the fallback where it is known already, else None."""
    if failed is None or failure is None:
        return None
    if isinstance(failure, CallRefused):  # for the sizes of this call alone
        return choice.choose_fallback(failed, call, failure)
    failed.record_failure(call.traits(), failure)
    prepared.forget()
    return None


def _prepared_backward(
    known: Known,
    key: Key | None,
    tensors: Tensors,
    upstream: BackwardInputs,
    into: Gradients | None,
    failed: Backend | None = None,
    failure: KernelsFailed | None = None,
) -> tuple[Backend, BackwardRun]:
    """Choose a backend for the backward of a served call, prepare its run, and cache both under ``key``."""
    call, has_dlse, own = known.call.with_tensors(*tensors), upstream.dlse is not None, known.backend
    # The call as a fallback would see it: a backward from another backend's results.
    given = call._replace(given_lse=True, shares_dropout_mask=call.dropout_p > 0, lse_gradient=has_dlse)
    backend = _note(failed, given, failure)
    current = prepared.current()
    if failed is not None:
        known.memory, known.backward = current, {}
    if backend is None:
        if has_dlse and not own.capabilities.features & Feature.LSE_GRADIENT:
            backend = choice.choose_unforced(given)
        else:
            backend = choice.choose_backend(given) if own.has_failed(given.traits()) else own
    assert backend is not None
    is_own = backend is own
    start = upstream if is_own else upstream._replace(saved=())  # ``saved`` is readable by its own backend alone
    try:
        run = backend.prepare_backward(call if is_own else given, start, into)
    except KernelsFailed as error:
        return _prepared_backward(known, key, tensors, upstream, into, backend, error)
    if not is_own:
        run = _from_given_results(run)
    if torch_state.autocasts(call.q):
        run = _without_autocast(run, call.q.device)
    if key is not None and not cuda_capture.is_capturing(call.q.get_device()) and known.memory is current:
        prepared.keep(known.backward, key, (backend, run), most=16)
    return backend, run


def _from_given_results(run: BackwardRun) -> BackwardRun:
    return lambda tensors, upstream, into: run(tensors, upstream._replace(saved=()), into)


def _without_autocast(run: Any, device: torch.device) -> Any:
    def without(*given: Any) -> Any:
        with torch_state.without_autocast(device):
            return run(*given)

    return without


def _nothing(alike: Alike) -> Run:
    """Return a run for calls without rows or without keys: out is 0, LSE +inf; new keys are still appended."""

    def run(tensors: Tensors, length: int | None) -> Result:
        call, new = alike.bind(tensors, length)
        if new is not None:
            with torch.no_grad():
                by_operators(call, new)
        device = call.q.device
        lse = torch.full(call.lse_shape, torch.inf, dtype=lse_dtype(call.q.dtype), device=device)
        return Result(call.q.new_zeros(call.out_shape), lse, torch.zeros(2, dtype=torch.int64, device=device))

    return run
