"""The entry point: vLLM calls ``register`` in each of its processes before it builds anything.

Our backend is registered as CUSTOM, which a user can name. On GPUs before compute capability 8.0 it also becomes vLLM's
own choice, in place of TRITON_ATTN, for each layer that it supports; any other layer gets vLLM's choice as before.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from flash_attn_compat import settings
from flash_attn_compat.vllm import versions

BACKEND = "flash_attn_compat.vllm.backend.CompatBackend"
# vLLM configures loggers below its own name.
_log = logging.getLogger("vllm.flash_attn_compat")
_IS_OURS = "_chooses_flash_attn_compat"


def register() -> None:
    """Register the backend with vLLM. If that is not possible, log one line; never raise."""
    try:
        reason = _register()
    except Exception as error:  # noqa: BLE001  # a plugin's failure must not stop vLLM
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        _log.warning("flash_attn_compat is not used: %s", " ".join(reason.split()))


def _register() -> str | None:
    """Register the backend and return None, or return the reason why it cannot be used."""
    switch = settings.value_of(settings.VLLM)
    if switch == "0":
        return None
    import vllm

    reason = versions.decline_reason(vllm.__version__, accepts_any=switch == "1")
    if reason is not None:
        return f"{reason}; {settings.VLLM}=0 silences this line"
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if current_platform.is_cuda():
        prefer_ours(type(current_platform))
    return None


def prefer_ours(platform: Any) -> None:
    """Let ``platform.get_attn_backend_cls`` choose our backend if the user named none and the GPU is older than 8.0."""
    vllms_choice = platform.get_attn_backend_cls
    if getattr(vllms_choice, _IS_OURS, False):
        return

    @functools.wraps(vllms_choice)
    def choose(cls: Any, selected_backend: Any, attn_selector_config: Any, *others: Any, **named: Any) -> Any:
        if selected_backend is None and _is_chosen(cls, attn_selector_config):
            return BACKEND
        return vllms_choice(selected_backend, attn_selector_config, *others, **named)

    setattr(choose, _IS_OURS, True)
    platform.get_attn_backend_cls = classmethod(choose)


def _is_chosen(platform: Any, config: Any) -> bool:
    """Whether our backend serves the layer that ``config`` describes. An error counts as no."""
    try:
        capability = platform.get_device_capability()
        if (settings.forced_capability() or tuple(capability)) >= (8, 0):
            return False
        from flash_attn_compat.vllm.backend import CompatBackend

        reasons = CompatBackend.validate_configuration(device_capability=capability, **config._asdict())
        model = _models() & versions.NEED_TRITON
        if model:
            reasons.append(f"{', '.join(model)} needs an attention of its own")
        _log_choice(tuple(reasons))
    except Exception as error:  # noqa: BLE001  # vLLM chooses as before
        _log_choice((f"{type(error).__name__}: {error}",))
        return False
    return not reasons


def _models() -> frozenset[str]:
    """Return the architectures of the model that vLLM is building."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    return frozenset() if model is None else frozenset(model.architectures or ())


@functools.cache
def _log_choice(reasons: tuple[str, ...]) -> None:
    """Log that our backend is chosen for a layer, or the reasons against it. The same line is logged once."""
    if reasons:
        _log.info("flash_attn_compat declines a layer: %s", "; ".join(reasons))
    else:
        _log.info("Attention runs on flash_attn_compat's kernels (%s=0 turns them off)", settings.VLLM)
