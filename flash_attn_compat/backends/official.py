"""The installed flash-attn 2, for each call that it accepts on this GPU.

This backend calls flash-attn's compiled extension directly, and ignores the module named ``flash_attn``, because that
may be patched to run on this package. Limits of the extension are reasons to decline. A smoke test before the first
real call detects builds that compute wrong numbers: some support only a few head dims.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from flash_attn_compat import installed, settings
from flash_attn_compat.backends import smoke_test
from flash_attn_compat.backends.base import HALF_DTYPES, Capabilities
from flash_attn_compat.backends.external import FLASH_UNSUPPORTED, FlashBackend, KernelResult, window_arguments
from flash_attn_compat.core.call import AttentionCall, Gradients
from flash_attn_compat.core.features import Feature, Traits, all_but


class Official(FlashBackend):
    name = "official"
    capabilities = Capabilities(
        features=all_but(FLASH_UNSUPPORTED),
        devices=frozenset({"cuda"}),
        dtypes=HALF_DTYPES,
        min_capability=(8, 0),
        max_head_dim=256,
        rocm_reason="flash-attn's kernels for ROCm are different and untested",
    )
    # The extension's zero_tensors does that in C++. PyTorch operators would cost the host more than the call itself.
    zeroes_outside = True

    def rank(self, traits: Traits) -> int:
        return -2  # before every other backend, whatever is faster

    def unavailable_reasons(self) -> list[str]:
        if settings.is_on(settings.DISABLE_OFFICIAL):
            return [f"{settings.DISABLE_OFFICIAL} is set"]
        if installed.swapped_package() is not None:
            return ["the installed flash-attn is patched to run on this package"]
        return [] if installed.find_location() is not None else ["flash-attn is not installed"]

    def extra_reasons(self, traits: Traits) -> list[str]:
        reasons = super().extra_reasons(traits)
        if traits.features & Feature.SOFTCAP and traits.features & Feature.DROPOUT:
            reasons.append("does not support softcap with dropout")
        return reasons

    def late_reasons(self, traits: Traits) -> list[str]:
        loaded = _load_functions(installed.find_location())
        reason = loaded if isinstance(loaded, str) else smoke_test.decline_reason(self, loaded, traits)
        return [reason] if reason else []

    def launch_forward(self, call: AttentionCall) -> KernelResult:
        functions = _require_functions()
        out = seqused_k = leftpad_k = block_table = generator = None
        return_softmax = False
        options = call.softmax_scale, *window_arguments(call), call.softcap
        q, k, v, slopes, starts = call.q, call.k, call.v, call.alibi_slopes, call.cu_seqlens_q
        if starts is None:
            results = functions.fwd(q, k, v, out, slopes, call.dropout_p, *options, return_softmax, generator)
        else:
            scale, *others = options
            results = functions.varlen_fwd(
                q, k, v, out, starts, call.cu_seqlens_k, seqused_k, leftpad_k, block_table, slopes, call.max_seqlen_q,
                call.max_seqlen_k, call.dropout_p, scale, self.zeroes_outside, *others, return_softmax, generator,
            )  # fmt: skip
        out, lse, _, rng_state = results
        return KernelResult(out, lse, (rng_state,))

    def launch_backward(
        self, call: AttentionCall, dout: Tensor, result: KernelResult, into: Gradients | None
    ) -> Gradients:
        functions = _require_functions()
        q, k, v, starts_q, starts_k = call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k
        gradients = into or Gradients(*(tensor.new_empty(tensor.shape) for tensor in (q, k, v)))
        rng_state = result.state[0] if result.state and call.dropout_p else None
        tensors = (dout, q, k, v, result.out, result.lse, *gradients)
        generator = None
        others = *window_arguments(call), call.softcap, call.deterministic, generator, rng_state
        if starts_q is None:
            functions.bwd(*tensors, call.alibi_slopes, call.dropout_p, call.softmax_scale, *others)
        else:
            functions.varlen_bwd(
                *tensors, starts_q, starts_k, call.alibi_slopes, call.max_seqlen_q, call.max_seqlen_k, call.dropout_p,
                call.softmax_scale, self.zeroes_outside, *others,
            )  # fmt: skip
        return gradients


class _ExtensionFunctions(NamedTuple):
    """The extension's functions as they were when it was loaded, so that later patches of the module have no effect."""

    fwd: Callable[..., Any]
    varlen_fwd: Callable[..., Any]
    bwd: Callable[..., Any]
    varlen_bwd: Callable[..., Any]


def _require_functions() -> _ExtensionFunctions:
    loaded = _load_functions(installed.find_location())
    if isinstance(loaded, str):
        raise RuntimeError(loaded)
    return loaded


@functools.lru_cache(maxsize=8)
def _load_functions(location: str) -> _ExtensionFunctions | str:
    """Return the extension's functions, or the reason why they cannot be loaded. Cached, as a retry would fail, too."""
    version = installed.read_version(location)
    if version is None or not (2, 7) <= version < (3,):
        known = "of unknown version" if version is None else ".".join(map(str, version))
        return f"flash-attn {known} is installed, and versions 2.7 to 2.x are called here"
    try:
        module = _import_extension(location)
        return _ExtensionFunctions(*(getattr(module, name) for name in _ExtensionFunctions._fields))
    except Exception as error:  # noqa: BLE001  a broken installation may raise any exception
        return f"loading flash-attn raises {installed.format_error(error)}"


def _import_extension(location: str) -> Any:
    # Search only beside flash-attn's own package, where this package's stand-in for the extension never is.
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
        # Undo what loading may have put into sys.modules: the name may belong to another module.
        sys.modules.pop(installed.EXTENSION, None)
        if before is not None:
            sys.modules[installed.EXTENSION] = before
    return module
