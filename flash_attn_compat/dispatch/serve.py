"""Finds or prepares a call and runs it, for every function.

If a kernel fails to compile, load, launch or pass its self-test, at a first call or later, forward or backward, its
backend keeps the reason, the cache of prepared calls is discarded, and the next backend computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.backends import Backend, CallRefused, KernelsFailed, NegatedView
from flash_attn_compat.core import checks, cuda_capture, torch_state
from flash_attn_compat.core.append import by_operators
from flash_attn_compat.core.call import (
    AttentionCall,
    BackwardInputs,
    BackwardResult,
    Gradients,
    Inputs,
    Result,
    new_inputs,
)
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.prepared import BackwardRun, Key, Prepared, Run, RunInto
from flash_attn_compat.core.scores import signed_probabilities
from flash_attn_compat.core.varlen import lse_dtype
from flash_attn_compat.dispatch import at_exit, call_cache, choice


def find(x: Inputs, scalars: tuple[Any, ...], flags: int, length: int | None = None) -> Prepared:
    """Return the prepared call of these arguments. The numbers in tensors pass their checks here.

    Args:
        x, flags: as ``settled`` in call_cache.py returns them, or of a call over a cache
        scalars: the fields of Scalars as the caller gave them, and further numbers of a call over a cache
        length: an int cache_seqlens for all sequences, which is in no key
    Raises:
        BackendNotSupported, CallRefused: no backend serves the call, or not the forced one
        RuntimeError, IndexError: an argument is malformed (core/checks.py); ValueError: an environment variable is
    """
    # Bounds and longest lengths must be ints: 1.0 is no bound, and equals 1 in a key.
    if not type(scalars[3]) is type(scalars[4]) is type(scalars[7]) is type(scalars[8]) is int:
        scalars = call_cache.hashable(scalars)
    key, prepared = call_cache.look_up(x, scalars, flags)
    if prepared is None:
        values = call_cache.hashable(scalars)
        if values is not scalars:
            key, prepared = call_cache.look_up(x, values, flags)
    known = prepared is not None
    if prepared is None:
        prepared = call_cache.build(x, values, flags, length)
    if prepared.check is not None:
        prepared.check(x, length)
    if known:
        return prepared
    prepared.key = key
    return _prepare(prepared)


def run(
    prepared: Prepared, tensors: Inputs, length: int | None = None, out: Tensor | None = None
) -> tuple[Prepared, Result]:
    """Run a prepared call; return its result, and the prepared call that served in the end (a fallback's, maybe).

    out: a tensor to write the result's ``out`` to, or None; no input shares its memory
    Raises BackendNotSupported or CallRefused if kernels fail and no other backend serves.
    """
    while True:
        try:
            result = prepared.run(tensors, length) if out is None else _run_into(prepared, tensors, out)
        except NegatedView:
            tensors = _without_negated_views(prepared, tensors)
            prepared = find(tensors, prepared.scalars, prepared.flags, length)
        except KernelsFailed as failure:
            scalars, flags, backend = prepared.scalars, prepared.flags, prepared.backend
            again = call_cache.build(tensors, scalars, flags, length)
            if failure.appended is None:
                again.key = prepared.key
                prepared = _prepare(again, backend, failure)
            else:  # nothing is written twice
                _note(backend, again.call, failure)
                tensors, length = _after_append(tensors, length, failure.appended)
                prepared = find(tensors, scalars, flags, length)
        else:
            if prepared.backend is not None:
                choice.served[prepared.backend.name] += 1
            return prepared, result


def _run_into(prepared: Prepared, tensors: Inputs, out: Tensor) -> Result:
    """Run a prepared call and write its ``out`` to the caller's, by the kernel if it can, else by a copy."""
    write: RunInto | None = None
    if prepared.backend is not None and out.is_contiguous():
        write = prepared.backend.run_into(prepared.run)
    if write is not None:
        return write(tensors, None, out)
    q = tensors.q
    checks.output(out, (*q.shape[:-1], tensors.v.shape[-1]), q.dtype, q.device)  # before the run appends
    result = prepared.run(tensors, None)
    return result._replace(out=out.copy_(result.out))


def _without_negated_views(prepared: Prepared, tensors: Inputs) -> Inputs:
    """Return the tensors without lazily negated views. Raises NegatedView if the only one is a cache to write to."""
    stored: Inputs = new_inputs(type(tensors), [x if x is None else x.resolve_neg() for x in tensors])
    if prepared.call.appends:
        stored = stored._replace(k=tensors.k, v=tensors.v)
    if all([one is other for one, other in zip(stored, tensors)]):
        raise NegatedView(
            "a negated view of a cache cannot be written by a kernel: give it the cache itself, or a copy"
        )
    return stored


def _after_append(tensors: Any, length: int | None, q: Tensor) -> tuple[Inputs, int | None]:
    """Return the tensors and the length of a call over a cache whose new keys are in the cache. q: as rotated"""
    count, lengths = tensors.k_new.shape[1], tensors.seqused_k
    length, lengths = (None if x is None else x + count for x in (length, lengths))
    nothing = dict.fromkeys(("k_new", "v_new", "rotary_cos", "rotary_sin"))
    return tensors._replace(q=q, seqused_k=lengths, **nothing), length


def whole(tensors: Inputs, scalars: tuple[Any, ...], flags: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, softmax_lse, S_dmask, rng_state) outside autograd. Raises as ``find`` does.

    A softmax_lse or S_dmask that the flags do not ask for has no elements; rng_state is 0 without dropout.
    """
    prepared, result = run(find(tensors, scalars, flags), tensors)
    out, rng_state = result.out, result.rng_state
    lse = result.lse.contiguous() if prepared.call.return_lse else out.new_empty(0, dtype=lse_dtype(out.dtype))
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=out.device)
    return out, lse, result.probabilities, rng_state


def with_rng_state(tensors: Any, rng_state: Tensor | None) -> Inputs:
    """Return the inputs with a dropout mask, of a call over no cache."""
    found: Inputs = tensors._replace(rng_state=rng_state)
    return found


def backward_tensors(tensors: Inputs, rng_state: Tensor | None) -> Inputs:
    """Return a call's tensors as a backward takes them: no negated views, and the rng_state of the forward."""
    state = None if rng_state is None else rng_state.contiguous()  # kernels read two neighbours
    *others, _ = tensors
    found: Inputs = new_inputs(
        type(tensors), [*[x if x is None or not x.is_neg() else x.resolve_neg() for x in others], state]
    )
    return found


def gradients(
    prepared: Prepared, tensors: Inputs, upstream: BackwardInputs, into: Gradients | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Backend | None, BackwardResult]:  # fmt: skip
    """Return the backend that computed the gradients of a call, and the gradients.

    The call's own backend computes them, or a fallback if its kernels fail.

    Args:
        tensors: as backward_tensors returns them
        into: tensors to write to, through their strides, or None for new ones
        check: raises if upstream or into do not fit; skipped where tensors of the same signatures passed before
    """
    at_exit.wait_for_autograd(tensors.q)
    if prepared.backend is None:
        check()
        found = into or Gradients(*map(torch.empty_like, tensors[:3]))
        for gradient in found:
            gradient.zero_()
        return None, BackwardResult(found)
    if upstream.dout.is_neg():
        upstream = upstream._replace(dout=upstream.dout.resolve_neg())
    if prepared.tables is not call_cache.current():  # discarded, and held by an autograd graph
        prepared.tables, prepared.backward = call_cache.current(), {}
    dout, out, lse, _, saved, dlse = upstream
    given = *tensors, dout, out, lse, dlse, *saved, *(into or ())  # hooks may have moved saved tensors
    key = call_cache.backward_key(given)
    kept = None if key is None else prepared.backward.get(key)
    if kept is None or into is None:
        check()
    backend, run = kept or _prepare_backward(prepared, key, tensors, upstream, into)
    while True:
        try:
            return backend, run(tensors, upstream, into)
        except KernelsFailed as failure:
            backend, run = _prepare_backward(prepared, key, tensors, upstream, into, backend, failure)


def differentiable_call(
    tensors: Inputs, scalars: tuple[Any, ...], flags: int, rng_state: Tensor | None
) -> AttentionCall:
    """Return the checked call of a transformed function. No backend is chosen: a forced one may lack derivatives."""
    prepared = call_cache.build(tensors, call_cache.hashable(scalars), flags, None)
    if prepared.check is not None:
        prepared.check(tensors, None)
    return prepared.call.over(backward_tensors(tensors, rng_state))


def plain_gradients(call: AttentionCall, upstream: BackwardInputs) -> Gradients:
    """Return the gradients of a call, computed by operators that transforms can differentiate."""
    with torch_state.without_autocast(call.q.device):
        return choice.choose_unforced(call).backward(call, upstream, None)


def _prepare(prepared: Prepared, failed: Backend | None = None, failure: KernelsFailed | None = None) -> Prepared:
    """Choose a backend for a checked call, prepare its run, and cache both under the call's key.

    Nothing is cached without a key or in a capture.

    Args:
        failed, failure: the backend whose kernels failed last time, and its error; None for a first attempt
    Raises:
        BackendNotSupported, CallRefused: no backend serves the call
    """
    call = prepared.call
    fallback = _note(failed, call, failure)
    tables = call_cache.current()
    backend = fallback or choice.choose_backend(call)
    run: Run | None = None
    if backend is None:
        run = _nothing(prepared)
    elif not call.given_lse:
        try:
            run = backend.prepare(prepared)
        except KernelsFailed as error:
            return _prepare(prepared, backend, error)
    if run is not None and call.return_dmask:
        run = _with_dmask(run, prepared)
    if run is not None and torch_state.autocasts(call.q):
        run = _without_autocast(run, call.q.device)
    prepared.seal(backend, run, tables)
    if prepared.key is not None and not cuda_capture.is_capturing(call.q.get_device()):  # where no self-test may run
        call_cache.keep(tables.calls, prepared.key, prepared)
    return prepared


def _note(failed: Backend | None, call: AttentionCall, failure: KernelsFailed | None) -> Backend | None:
    """Keep a failure's reason and discard prepared calls; return the fallback if it is known already, else None."""
    if failed is None or failure is None:
        return None
    if isinstance(failure, CallRefused):  # for the sizes of this call alone
        return choice.choose_fallback(failed, call, failure)
    failed.record_failure(call.traits(), failure)
    call_cache.forget()
    return None


def _prepare_backward(
    prepared: Prepared, key: Key | None, tensors: Inputs, upstream: BackwardInputs, into: Gradients | None,
    failed: Backend | None = None, failure: KernelsFailed | None = None,
) -> tuple[Backend, BackwardRun]:  # fmt: skip
    """Choose a backend for the backward of a served call, prepare its run, and cache both under ``key``.

    Nothing is cached without a key, in a capture, or if a failure discarded the prepared calls meanwhile.

    Args:
        failed, failure: the backend whose kernels failed last time, and its error; None for a first attempt
    Raises:
        BackendNotSupported, CallRefused: no backend serves the backward
    """
    call, has_dlse, own = prepared.call.over(tensors), upstream.dlse is not None, prepared.backend
    # The call as a fallback would see it: a backward from another backend's results.
    given = call._replace(given_lse=True, shares_dropout_mask=call.dropout_p > 0, lse_gradient=has_dlse)
    backend = _note(failed, given, failure)
    tables = call_cache.current()
    if failed is not None:
        prepared.tables, prepared.backward = tables, {}
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
        return _prepare_backward(prepared, key, tensors, upstream, into, backend, error)
    if not is_own:
        run = _without_saved(run)
    if torch_state.autocasts(call.q):
        run = _without_autocast(run, call.q.device)
    if key is not None and not cuda_capture.is_capturing(call.q.get_device()) and prepared.tables is tables:
        call_cache.keep(prepared.backward, key, (backend, run), most=16)
    return backend, run


def _with_dmask(run: Run, prepared: Prepared) -> Run:
    def with_dmask(tensors: Inputs, length: int | None) -> Result:
        result, call = run(tensors, length), prepared.call.over(tensors)
        return result._replace(dmask=signed_probabilities(call, result.rng_state))

    return with_dmask


def _without_saved(run: BackwardRun) -> BackwardRun:
    return lambda tensors, upstream, into: run(tensors, upstream._replace(saved=()), into)


def _without_autocast(run: Any, device: torch.device) -> Any:
    def without(*given: Any) -> Any:
        with torch_state.without_autocast(device):
            return run(*given)

    return without


def _nothing(prepared: Prepared) -> Run:
    """Return a run for calls without rows or without keys: out is 0, LSE +inf; new keys are still appended."""

    bind = prepared.bind

    def run(tensors: Inputs, length: int | None) -> Result:
        call, new = bind(tensors, length)
        if new is not None:
            with torch.no_grad():
                by_operators(call, new)
        device = call.q.device
        lse = torch.full(call.lse_shape, torch.inf, dtype=lse_dtype(call.q.dtype), device=device)
        return Result(call.q.new_zeros(call.out_shape), lse, torch.zeros(2, dtype=torch.int64, device=device))

    return run
