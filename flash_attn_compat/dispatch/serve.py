"""Find a prepared call in the cache, or prepare it, and run it. Every function of this package computes that way.

If a kernel fails to compile, load, launch or pass its self-test, at a first call or later, forward or backward, its
backend keeps the reason, the cache of prepared calls is discarded, and the next backend computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat.backends import Backend, CallRefused, KernelsFailed, NegatedView
from flash_attn_compat.backends.scores import signed_probabilities
from flash_attn_compat.core import checks, cuda_capture, torch_state
from flash_attn_compat.core.append import by_operators
from flash_attn_compat.core.arguments import call_of
from flash_attn_compat.core.arguments import check as check_arguments
from flash_attn_compat.core.arguments.options import checked, integers_of
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, BackwardResult, Gradients, Result, lse_dtype
from flash_attn_compat.core.entry import BackwardRun, Entry, Key, Run, never_run
from flash_attn_compat.core.features import DMASK, Feature
from flash_attn_compat.core.inputs import NO_INPUTS, Inputs, Options, new_tuple
from flash_attn_compat.dispatch import call_cache, choice
from flash_attn_compat.dispatch.pytorch import at_exit, sharding

LSE = int(Feature.LSE)


def compute(
    x: Inputs, options: Options, length: int | None = None, out: Tensor | None = None
) -> tuple[Entry, Result]:  # fmt: skip
    """Compute a call. Return its result and its prepared call, which is a fallback's if the first backend failed.

    x, options, length, and errors: as of ``find``; out: as in ``run``
    """
    return run(find(x, options, length), x, length, out)


def compute_by(name: str, x: Inputs, options: Options) -> tuple[Entry, Result] | None:
    """Compute a call as ``compute`` does, if the backend ``name`` serves it; else return None."""
    entry = find(x, options)
    return run(entry, x) if entry.backend is not None and entry.backend.name == name else None


def find(x: Inputs, options: Options, length: int | None = None) -> Entry:
    """Return the prepared call for these arguments. Lengths and positions in tensors are checked here.

    Args:
        x: the inputs; for packed calls over pages, as ``with_page_lengths`` returns them
        options: the numbers as the caller gave them
        length: cache_seqlens if it is one int for all sequences, else None; no cache key holds it
    Raises:
        BackendNotSupported, CallRefused: no backend serves the call, or the forced one does not
        RuntimeError, IndexError: an argument is malformed (core/checks.py)
        ValueError: an environment variable is malformed
    """
    try:
        has_integers = type(sum(integers_of(options))) is int  # a fifth of the time of checking each
    except TypeError:
        has_integers = False
    if not has_integers:  # check them before the look-up: in a cache key 1.0 would equal 1
        options = checked(options)
    key, entry = call_cache.look_up(x, options, length)
    if entry is None and (numbers := checked(options)) is not options:
        options = numbers
        key, entry = call_cache.look_up(x, options, length)
    if entry is None:
        sharding.check_alike(zip(x._fields, x))  # q, k, v are plain here: raises if another tensor is a DTensor
        return _prepare(x, options, length, key)
    if entry.check is not None:
        entry.check(x, length)
    return entry


def run(
    entry: Entry, x: Inputs, length: int | None = None, out: Tensor | None = None
) -> tuple[Entry, Result]:  # fmt: skip
    """Run a prepared call. Return its entry and its result; if its kernels fail, the entry of the fallback.

    out: a tensor to write the result's ``out`` to, or None; no input shares its memory
    Raises BackendNotSupported or CallRefused if kernels fail and no other backend serves.
    """
    while True:
        try:
            result = entry.run(x, length) if out is None else _run_into(entry, x, out)
        except NegatedView:
            x = _without_negated_views(entry, x)
            entry = find(x, entry.options, length)
        except KernelsFailed as failure:
            options, backend = entry.options, entry.backend
            if failure.appended is None:
                key, _ = call_cache.look_up(x, options, length)
                entry = _prepare(x, options, length, key, backend, failure)
            else:  # the failed backend has appended the new keys already: the next one only attends
                _note(backend, call_of(x, options, length)[0], failure)
                x, length = _after_append(x, length, failure.appended)
                entry = find(x, options, length)
        else:
            if entry.backend is not None:
                choice.served[entry.backend.name] += 1
            return entry, result


def _run_into(entry: Entry, x: Inputs, out: Tensor) -> Result:
    """Run a prepared call that writes to the caller's ``out``: the kernel does if it can, else the result is copied."""
    result = entry.run(x, None, out)
    if result.out is out:
        return result
    checks.is_writable_for(out, x.q, x.v)
    return result._replace(out=out.copy_(result.out))


def _without_negated_views(entry: Entry, x: Inputs) -> Inputs:
    """Return inputs with copies of lazily negated views. Raises NegatedView if only a cache to write to is one."""
    stored: Any = new_tuple(type(x), [None if one is None else one.resolve_neg() for one in x])
    if entry.call.use & Feature.APPEND:
        stored = stored._replace(k=x.k, v=x.v)
    if all([one is other for one, other in zip(stored, x)]):
        raise NegatedView(
            "a negated view of a cache cannot be written by a kernel: give it the cache itself, or a copy"
        )
    found: Inputs = stored
    return found


def _after_append(x: Any, length: int | None, q: Tensor) -> tuple[Inputs, int | None]:
    """Return inputs and length of a call over a cache after its new keys were appended. q: after rotation"""
    count, lengths = x.k_new.shape[1], x.seqused_k
    length, lengths = (None if one is None else one + count for one in (length, lengths))
    nothing = dict.fromkeys(("k_new", "v_new", "rotary_cos", "rotary_sin"))
    return x._replace(q=q, seqused_k=lengths, **nothing), length


def run_outside_autograd(x: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, softmax_lse, S_dmask, rng_state). Raises as ``find`` does.

    A softmax_lse or S_dmask that the options do not ask for has no elements; rng_state is 0 without dropout.
    """
    entry, result = compute(x, options)
    out, rng_state = result.out, result.rng_state
    lse = result.lse.contiguous() if entry.call.use & LSE else out.new_empty(0, dtype=lse_dtype(out.dtype))
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=out.device)
    return out, lse, result.probabilities, rng_state


def backward_inputs(x: Inputs, rng_state: Tensor | None) -> Inputs:
    """Return a call's inputs for its backward: with the forward's rng_state, and without lazily negated views."""
    state = None if rng_state is None else rng_state.contiguous()  # kernels read its two numbers side by side
    found: Inputs = new_tuple(type(x), [
        state if name == "rng_state" else one if one is None or not one.is_neg() else one.resolve_neg()
        for name, one in zip(x._fields, x)
    ])  # fmt: skip
    return found


def gradients(
    entry: Entry, x: Inputs, upstream: BackwardInputs, into: Gradients | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Backend | None, BackwardResult]:  # fmt: skip
    """Return the backend that computed the gradients of a call, and the gradients.

    The call's own backend computes them, or a fallback if its kernels fail.

    Args:
        x: as backward_inputs returns them
        into: tensors to write to, through their strides, or None for new ones
        check: raises if upstream or into are malformed; not called if equally laid out tensors passed before
    """
    at_exit.wait_for_autograd(x.q)
    if entry.backend is None:
        check()
        found = into or Gradients(*map(torch.empty_like, (x.q, x.k, x.v)))
        for gradient in found:
            gradient.zero_()
        return None, BackwardResult(found)
    if upstream.dout.is_neg():
        upstream = upstream._replace(dout=upstream.dout.resolve_neg())
    if entry.tables is not call_cache.current():  # the cache was discarded; an autograd graph kept the entry
        entry.tables, entry.backward, entry.guards = call_cache.current(), {}, {}
    dout, out, lse, _, saved, dlse = upstream
    given = *x, dout, out, lse, dlse, *saved, *(into or ())  # in the key, since hooks may have moved saved tensors
    key, kept = call_cache.look_up_backward(entry, x.q, given)
    if kept is None or into is None:
        check()
    backend, run = kept or _prepare_backward(entry, key, x, upstream, into)
    while True:
        try:
            return backend, run(x, upstream, into)
        except KernelsFailed as failure:
            backend, run = _prepare_backward(entry, key, x, upstream, into, backend, failure)


def differentiable_call(x: Inputs, options: Options, rng_state: Tensor | None) -> AttentionCall:
    """Return the checked call for differentiable_gradients, without a backend: a forced one may lack derivatives."""
    options = checked(options)
    check = check_arguments(x, options, None)
    call, _ = call_of(x, options)
    if check is not None:
        check(x, None)
    return call.over(backward_inputs(x, rng_state))


def _prepare(
    x: Inputs, options: Options, length: int | None, key: Key | None, failed: Backend | None = None,
    failure: KernelsFailed | None = None,
) -> Entry:  # fmt: skip
    """Check a call, choose a backend, prepare its run, and cache the entry under ``key``.

    Nothing is cached without a key or in a capture.

    Args:
        options: as ``checked`` returns them
        failed, failure: the backend whose kernels failed last time, and its error; None for a first attempt
    Raises:
        BackendNotSupported, CallRefused: no backend serves the call
        RuntimeError, IndexError: an argument is malformed
    """
    check = check_arguments(x, options, length)
    call, _ = call_of(x, options, length)
    if check is not None:
        check(x, length)
    fallback = _note(failed, call, failure)
    tables = call_cache.current()
    backend = fallback or choice.choose_backend(call)
    run: Run | None = None
    if backend is None:
        run = _nothing(options)
    elif not call.use & Feature.GIVEN_LSE:
        try:
            run = backend.prepare(x, options, length)
        except KernelsFailed as error:
            return _prepare(x, options, length, key, backend, error)
    described = call.over(NO_INPUTS)
    if run is not None and call.use & DMASK:
        run = _with_dmask(run, described)
    if run is not None and torch_state.autocasts(call.q):
        run = _without_autocast(run, call.q.device)
    entry = Entry(options, described, check, backend, run or never_run, tables)
    if key is not None and not cuda_capture.is_capturing(call.q.get_device()):  # in a capture no self-test could run
        call_cache.keep(tables.calls, key, entry)
        if failed is not None:
            tables.guards.clear()  # some may still find the entry of the backend that failed
    return entry


def _note(failed: Backend | None, call: AttentionCall, failure: KernelsFailed | None) -> Backend | None:
    """Record a backend's failure and discard prepared calls. If it only refused this call's size, return a fallback."""
    if failed is None or failure is None:
        return None
    if isinstance(failure, CallRefused):  # only this call's sizes are refused: the backend stays in use
        return choice.choose_fallback(failed, call, failure)
    failed.record_failure(call.traits(), failure)
    call_cache.forget()
    return None


def _prepare_backward(
    entry: Entry, key: Key | None, x: Inputs, upstream: BackwardInputs, into: Gradients | None,
    failed: Backend | None = None, failure: KernelsFailed | None = None,
) -> tuple[Backend, BackwardRun]:  # fmt: skip
    """Choose a backend for the backward of a served call, prepare its run, and cache both under ``key``.

    Nothing is cached without a key, in a capture, or if a failure discarded the prepared calls meanwhile.

    Args:
        failed, failure: the backend whose kernels failed last time, and its error; None for a first attempt
    Raises:
        BackendNotSupported, CallRefused: no backend serves the backward
    """
    call, has_dlse, own = entry.call.over(x), upstream.dlse is not None, entry.backend
    # How a fallback sees the call: it starts from the out and LSE of another backend.
    use = call.use | Feature.GIVEN_LSE | Feature.SHARED_DROPOUT_MASK
    given = call._replace(use=use | Feature.LSE_GRADIENT if has_dlse else use)
    backend = _note(failed, given, failure)
    tables = call_cache.current()
    if failed is not None:
        entry.tables, entry.backward, entry.guards = tables, {}, {}
    if backend is None:
        if has_dlse and not own.capabilities.features & Feature.LSE_GRADIENT:
            backend = choice.choose_unforced(given)
        else:
            backend = choice.choose_backend(given) if own.has_failed(given.traits()) else own
    assert backend is not None
    is_own = backend is own
    start = upstream if is_own else upstream._replace(saved=())  # only the forward's backend can read ``saved``
    try:
        run = backend.prepare_backward(call if is_own else given, start, into)
    except KernelsFailed as error:
        return _prepare_backward(entry, key, x, upstream, into, backend, error)
    if not is_own:
        run = _without_saved(run)
    if torch_state.autocasts(call.q):
        run = _without_autocast(run, call.q.device)
    if key is not None and not cuda_capture.is_capturing(call.q.get_device()) and entry.tables is tables:
        call_cache.keep(entry.backward, key, (backend, run), most=16)
    return backend, run


def _with_dmask(run: Run, described: AttentionCall) -> Run:
    def with_dmask(x: Inputs, length: int | None, out: Tensor | None = None) -> Result:
        result, call = run(x, length), described.over(x)
        return result._replace(dmask=signed_probabilities(call, result.rng_state))

    return with_dmask


def _without_saved(run: BackwardRun) -> BackwardRun:
    return lambda x, upstream, into: run(x, upstream._replace(saved=()), into)


def _without_autocast(run: Any, device: torch.device) -> Any:
    def without(*given: Any) -> Any:
        with torch_state.without_autocast(device):
            return run(*given)

    return without


def _nothing(options: Options) -> Run:
    """Return the function (run) for calls without rows or keys: out is 0, the LSE +inf. It still appends new keys."""

    def run(x: Inputs, length: int | None, out: Tensor | None = None) -> Result:
        call, new = call_of(x, options, length)
        if out is not None:
            checks.is_writable_for(out, x.q, x.v)
        if new is not None:
            with torch.no_grad():
                by_operators(call, new)
        device = call.q.device
        lse = torch.full(call.lse_shape, torch.inf, dtype=lse_dtype(call.q.dtype), device=device)
        return Result(call.q.new_zeros(call.out_shape), lse, torch.zeros(2, dtype=torch.int64, device=device))

    return run
