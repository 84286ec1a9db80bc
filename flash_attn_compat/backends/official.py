"""The real flash-attn 2, used call by call where it is installed, works on this GPU and accepts the call.

Its compiled extension is called directly, under whatever name answers to ``flash_attn`` at present: the
package's own functions may be running on ours. What it refuses is a reason; a build that computes something
else (some are limited to a few head dims) is found out by a tiny call before it gets its first real one.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import installed, settings
from flash_attn_compat.backends import official_trial
from flash_attn_compat.backends.base import HALF_DTYPES, Capabilities
from flash_attn_compat.backends.flash_launch import FlashBackend, Launched, as_read, is_readable, window
from flash_attn_compat.engine import alignment, outside
from flash_attn_compat.engine.append import Append
from flash_attn_compat.engine.call import AttentionCall, Gradients, Result
from flash_attn_compat.engine.features import DESCRIPTIONS, Feature, Traits

_LACKS = Feature.SHARED_DROPOUT_MASK | Feature.VALUE_HEAD_DIM | Feature.TRANSFORMS | Feature.SCALE_NOT_POSITIVE


class Official(FlashBackend):
    name = "official"
    capabilities = Capabilities(
        features=~_LACKS,
        devices=frozenset({"cuda"}),
        dtypes=HALF_DTYPES,
        min_capability=(8, 0),
        max_head_dim=256,
    )

    def rank(self, traits: Traits) -> int:
        return -2  # whatever is faster

    def reasons(self, traits: Traits) -> list[str]:
        # Only a call that nothing else speaks against is worth loading the extension for.
        return super().reasons(traits) or self._loading_reasons(traits)

    def unavailable_reasons(self) -> list[str]:
        if settings.official_disabled():
            return [f"{settings.DISABLE_OFFICIAL} is set"]
        if torch.version.hip is not None:
            return ["flash-attn's kernels for ROCm are different and untested"]
        if installed.swapped() is not None:
            return ["the installed flash-attn runs on this package at present"]
        return [] if installed.location() is not None else ["flash-attn is not installed"]

    def extra_reasons(self, traits: Traits) -> list[str]:
        features = Feature(traits.features)
        reasons = super().extra_reasons(traits)
        if features & official_trial.CACHED:
            reasons += _cache_reasons(features, traits)
        if features & Feature.SOFTCAP and features & Feature.DROPOUT:
            reasons.append("does not support softcap with dropout")
        if features & Feature.PAGED and features & Feature.LEFTPAD_K:
            reasons.append("does not support leftpad_k with pages")
        if features & Feature.PAGED and features & Feature.VARLEN and features & Feature.LSE:
            reasons.append("misplaces the softmax_lse of packed rows without keys over pages")
        return reasons

    def launch_forward(self, call: AttentionCall) -> Launched:
        functions = _functions()
        options = call.softmax_scale, *window(call), call.softcap
        q, k, v, slopes, starts = call.q, call.k, call.v, call.alibi_slopes, call.cu_seqlens_q
        if starts is not None:
            scale, *others = options
            out, lse, _, rng_state = functions.varlen_fwd(
                q, k, v, None, starts, call.cu_seqlens_k, call.seqused_k, call.leftpad_k, call.block_table, slopes,
                call.max_seqlen_q, call.max_seqlen_k, call.dropout_p, scale, outside.may_exist(starts, q.shape[0]),
                *others, False, None,
            )  # fmt: skip
            return Launched(out, lse, (rng_state,))
        if call.is_dense:
            out, lse, _, rng_state = functions.fwd(q, k, v, None, slopes, call.dropout_p, *options, False, None)
            return Launched(out, lse, (rng_state,))
        out, lse = functions.fwd_kvcache(
            q, k, v, None, None, call.seqused_k, None, None, None, call.leftpad_k, call.block_table, slopes, None,
            *options, True, 0,
        )  # fmt: skip
        return Launched(out, lse, ())

    def append_and_forward(self, call: AttentionCall, new: Append) -> Result | None:
        if call.leftpad_k is not None or not is_readable(call.k) or not is_readable(call.v):
            return None
        # The heads of a group count as rows where there is one row, and flash-attn refuses more rows than keys.
        if max(call.max_seqlen_q, call.nheads // call.nheads_k) > call.max_seqlen_k:
            return None
        # It writes no new keys that lie before the window of the first row.
        if call.mask.left is not None and call.mask.left < new.k.shape[1] - call.q.shape[1]:
            return None
        starts, cos, sin = new.cache_seqlens, new.rotary_cos, new.rotary_sin
        if isinstance(starts, int):
            starts = torch.full((call.batch,), starts, dtype=torch.int32, device=call.q.device)
        ready = as_read(call)
        out, lse = _functions().fwd_kvcache(
            ready.q, ready.k, ready.v, alignment.ready(new.k), alignment.ready(new.v), starts,
            None if cos is None else cos.contiguous(), None if sin is None else sin.contiguous(), None, None,
            ready.block_table, ready.alibi_slopes, None, ready.softmax_scale, *window(ready), ready.softcap,
            new.rotary_interleaved, 0,
        )  # fmt: skip
        return Result(out, lse if call.return_lse else None, None)

    def launch_backward(
        self, call: AttentionCall, dout: Tensor, launched: Launched, into: Gradients | None
    ) -> Gradients:
        functions = _functions()
        q, k, v, starts_q, starts_k = call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k
        gradients = into or Gradients(*(tensor.new_empty(tensor.shape) for tensor in (q, k, v)))
        rng_state = launched.state[0] if launched.state and call.dropout_p else None
        given = (dout, q, k, v, launched.out, launched.lse, *gradients)
        others = *window(call), call.softcap, call.deterministic, None, rng_state
        if starts_q is None:
            functions.bwd(*given, call.alibi_slopes, call.dropout_p, call.softmax_scale, *others)
        else:
            some_outside = outside.may_exist(starts_q, q.shape[0])
            some_outside = outside.may_exist(starts_k, k.shape[0]) or some_outside
            functions.varlen_bwd(
                *given, starts_q, starts_k, call.alibi_slopes, call.max_seqlen_q, call.max_seqlen_k, call.dropout_p,
                call.softmax_scale, some_outside, *others,
            )  # fmt: skip
        return gradients

    def _loading_reasons(self, traits: Traits) -> list[str]:
        loaded = _load(installed.location())
        if isinstance(loaded, str):
            return [loaded]
        wrong = official_trial.wrong_answer(self, loaded, traits)
        return [wrong] if wrong else []


def _cache_reasons(features: Feature, traits: Traits) -> list[str]:
    """Against a call whose keys are found through seqused_k, leftpad_k or pages."""
    reasons = [
        f"does not support {DESCRIPTIONS[feature]} with pages, seqused_k or leftpad_k"
        for feature in (Feature.BACKWARD, Feature.GIVEN_LSE, Feature.DROPOUT)
        if features & feature
    ]
    if traits.head_dim % 8 or not traits.aligned:
        reasons.append("would copy the cache: its rows are not aligned to 16 bytes, or head_dim is no multiple of 8")
    if features & Feature.PAGED and traits.page_size % 256:
        reasons.append(f"reads pages of a multiple of 256 slots, got {traits.page_size}")
    return reasons


class _Functions(NamedTuple):
    """The extension's functions as they were when it was loaded, whatever is put in their place later."""

    fwd: Callable[..., Any]
    varlen_fwd: Callable[..., Any]
    bwd: Callable[..., Any]
    varlen_bwd: Callable[..., Any]
    fwd_kvcache: Callable[..., Any]


def _functions() -> _Functions:
    loaded = _load(installed.location())
    if isinstance(loaded, str):
        raise RuntimeError(loaded)
    return loaded


@functools.lru_cache(maxsize=8)
def _load(location: str) -> _Functions | str:
    """The extension's functions, or why there are none. Tried once: a second attempt would fail alike."""
    version = installed.stated_version(location)
    if version is None or not (2, 7) <= version < (3,):
        known = "of unknown version" if version is None else ".".join(map(str, version))
        return f"flash-attn {known} is installed, and versions 2.7 to 2.x are called here"
    try:
        module = _extension(location)
        return _Functions(*(getattr(module, name) for name in _Functions._fields))
    except Exception as error:  # noqa: BLE001  a broken installation raises anything
        return f"loading flash-attn raises {installed.told(error)}"


def _extension(location: str) -> Any:
    # Installations put it beside the package; our stand-in for it is never there.
    spec = PathFinder.find_spec(installed.EXTENSION, [str(Path(location).parent)])
    if spec is None or spec.loader is None:
        raise ImportError(f"its compiled extension {installed.EXTENSION} is missing")
    before = sys.modules.get(installed.EXTENSION)
    if before is not None and getattr(getattr(before, "__spec__", None), "origin", None) == spec.origin:
        return before
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        # Loading an extension module may enter it under its name, which may be another's to answer.
        sys.modules.pop(installed.EXTENSION, None)
        if before is not None:
            sys.modules[installed.EXTENSION] = before
    return module
