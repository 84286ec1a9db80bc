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
from flash_attn_compat.backends.scores import signed_probabilities
from flash_attn_compat.core import checks, cuda_capture, torch_state
from flash_attn_compat.core.append import by_operators
from flash_attn_compat.core.arguments import call_of
from flash_attn_compat.core.arguments import check as check_arguments
from flash_attn_compat.core.arguments.options import checked, integers_of
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, BackwardResult, Gradients, Result, lse_dtype
from flash_attn_compat.core.entry import BackwardRun, Entry, Key, Run, RunInto, never_run
from flash_attn_compat.core.features import DMASK, Feature
from flash_attn_compat.core.inputs import NO_INPUTS, Inputs, Options, new_tuple
from flash_attn_compat.dispatch import call_cache, choice
from flash_attn_compat.dispatch.pytorch import at_exit, sharding

LSE = int(Feature.LSE)


def compute(
    x: Inputs, options: Options, length: int | None = None, out: Tensor | None = None
) -> tuple[Entry, Result]:  # fmt: skip
    """Return the prepared call of these arguments, or the fallback's that served it in the end, and its result.

    x, options, length: as ``find`` takes them; out: as ``run`` takes it
    Raises as ``find`` and ``run`` do.
    """
    return run(find(x, options, length), x, length, out)


def compute_by(name: str, x: Inputs, options: Options) -> tuple[Entry, Result] | None:
    """As ``compute``; None if another backend would serve the call."""
    entry = find(x, options)
    return run(entry, x) if entry.backend is not None and entry.backend.name == name else None


def find(x: Inputs, options: Options, length: int | None = None) -> Entry:
    """Return the prepared call of these arguments. The numbers in tensors pass their checks here.

    Args:
        x: of packed calls over pages as ``with_page_lengths`` returns them
        options: the numbers as the caller gave them
        length: an int cache_seqlens for all sequences, which is in no key
    Raises:
        BackendNotSupported, CallRefused: no backend serves the call, or not the forced one
        RuntimeError, IndexError: an argument is malformed (core/checks.py); ValueError: an environment variable is
    """
    try:
        has_integers = type(sum(integers_of(options))) is int  # in a fifth of the time of looking at each
    except TypeError:
        has_integers = False
    if not has_integers:  # 1.0 is no bound, and equals 1 in a key
        options = checked(options)
    key, entry = call_cache.look_up(x, options, length)
    if entry is None and (numbers := checked(options)) is not options:
        options = numbers
        key, entry = call_cache.look_up(x, options, length)
    if entry is None:
        sharding.check_alike(zip(x._fields, x))  # of plain q, k and v
        return _prepare(x, options, length, key)
    if entry.check is not None:
        entry.check(x, length)
    return entry


def run(
    entry: Entry, x: Inputs, length: int | None = None, out: Tensor | None = None
) -> tuple[Entry, Result]:  # fmt: skip
    """Run a prepared call; return its result, and the entry that served in the end (a fallback's, maybe).

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
            else:  # nothing is written twice
                _note(backend, call_of(x, options, length)[0], failure)
                x, length = _after_append(x, length, failure.appended)
                entry = find(x, options, length)
        else:
            if entry.backend is not None:
                choice.served[entry.backend.name] += 1
            return entry, result


def _run_into(entry: Entry, x: Inputs, out: Tensor) -> Result:
    """Run a prepared call and write its ``out`` to the caller's, by the kernel if it can, else by a copy."""
    write: RunInto | None = None
    if entry.backend is not None and out.is_contiguous():
        write = entry.backend.run_into(entry.run)
    if write is not None:
        return write(x, None, out)
    checks.is_writable_out(out, (*x.q.shape[:-1], x.v.shape[-1]), x.q.dtype, x.q.device)  # before the run appends
    result = entry.run(x, None)
    return result._replace(out=out.copy_(result.out))


def _without_negated_views(entry: Entry, x: Inputs) -> Inputs:
    """Return inputs without lazily negated views. Raises NegatedView if the only one is a cache to write to."""
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
    """Return the inputs and the length of a call over a cache whose new keys are in the cache. q: as rotated"""
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
    """Return a call's inputs as a backward takes them: no negated views, and the rng_state of the forward."""
    state = None if rng_state is None else rng_state.contiguous()  # kernels read two neighbours
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
        check: raises if upstream or into do not fit; skipped where tensors of the same signatures passed before
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
    if entry.tables is not call_cache.current():  # discarded, and held by an autograd graph
        entry.tables, entry.backward = call_cache.current(), {}
    dout, out, lse, _, saved, dlse = upstream
    given = *x, dout, out, lse, dlse, *saved, *(into or ())  # hooks may have moved saved tensors
    key = call_cache.backward_key(x.q, given)
    kept = None if key is None else entry.backward.get(key)
    if kept is None or into is None:
        check()
    backend, run = kept or _prepare_backward(entry, key, x, upstream, into)
    while True:
        try:
            return backend, run(x, upstream, into)
        except KernelsFailed as failure:
            backend, run = _prepare_backward(entry, key, x, upstream, into, backend, failure)


def differentiable_call(x: Inputs, options: Options, rng_state: Tensor | None) -> AttentionCall:
    """Return the checked call of a transformed function. No backend is chosen: a forced one may lack derivatives."""
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
    if key is not None and not cuda_capture.is_capturing(call.q.get_device()):  # where no self-test may run
        call_cache.keep(tables.calls, key, entry)
    return entry


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
    # The call as a fallback would see it: a backward from another backend's results.
    use = call.use | Feature.GIVEN_LSE | Feature.SHARED_DROPOUT_MASK
    given = call._replace(use=use | Feature.LSE_GRADIENT if has_dlse else use)
    backend = _note(failed, given, failure)
    tables = call_cache.current()
    if failed is not None:
        entry.tables, entry.backward = tables, {}
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
        return _prepare_backward(entry, key, x, upstream, into, backend, error)
    if not is_own:
        run = _without_saved(run)
    if torch_state.autocasts(call.q):
        run = _without_autocast(run, call.q.device)
    if key is not None and not cuda_capture.is_capturing(call.q.get_device()) and entry.tables is tables:
        call_cache.keep(entry.backward, key, (backend, run), most=16)
    return backend, run


def _with_dmask(run: Run, described: AttentionCall) -> Run:
    def with_dmask(x: Inputs, length: int | None) -> Result:
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
    """Return a run for calls without rows or without keys: out is 0, LSE +inf; new keys are still appended."""

    def run(x: Inputs, length: int | None) -> Result:
        call, new = call_of(x, options, length)
        if new is not None:
            with torch.no_grad():
                by_operators(call, new)
        device = call.q.device
        lse = torch.full(call.lse_shape, torch.inf, dtype=lse_dtype(call.q.dtype), device=device)
        return Result(call.q.new_zeros(call.out_shape), lse, torch.zeros(2, dtype=torch.int64, device=device))

    return run
