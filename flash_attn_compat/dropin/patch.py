"""patch(), unpatch() and patched(): one stack of undo steps behind a lock.

This module decides which changes are made; other modules of dropin make and undo them.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import PathFinder
from typing import Literal

from flash_attn_compat import installed, settings
from flash_attn_compat.dropin import finder, installed_package, mirror, optional, site_directory
from flash_attn_compat.dropin import transformers as transformers_checks
from flash_attn_compat.dropin.undo import set_item

SdpaRequest = bool | Literal["always"]
# The names that patch()'s argument ``interfaces`` accepts: FlashAttention-3's and -4's interfaces.
INTERFACES = ("fa3", "fa4")

_lock = threading.RLock()
_undo: ExitStack | None = None
_holders: set[object] = set()  # keep the changes: patch, until unpatch(), and open blocks of patched(), of any thread
_api = ""  # the active interface


def patch(
    api: str | None = None, *, hub_kernels: bool = False, varlen_attn: bool = False, sdpa: SdpaRequest = False,
    interfaces: Sequence[str] = (), transformers: bool = False, flex: SdpaRequest = False,
) -> None:  # fmt: skip
    """Make `import flash_attn` find flash_attn_compat, here and in child processes started later.

    The name covers flash_attn and its submodules (the same module objects as flash_attn_compat's), the raw
    module flash_attn_2_cuda, and the metadata of a distribution flash-attn 2.8.3. transformers, imported before or
    afterwards, accepts attn_implementation="flash_attention_2" on every device.

    A real flash-attn that works on this GPU stays and nothing is replaced. One that cannot work here (wrong GPU, broken
    binary) calls our functions from now on, also through functions imported from it before.

    A second call adds the extras that are new in it. Threads may call it at the same time.

    Args:
        api: "2.6" gives the interface of flash-attn 2.6.3, for code written before 2.7: unpad_input returns four
            values, private functions have their old signatures and results, the version is 2.6.3, and a real flash-attn
            is put aside. None: as FLASH_ATTN_COMPAT_API says, else "2.8". Children inherit it.
        hub_kernels: resolve transformers' names of flash kernels on its hub, which it uses for models with attention
            sinks, to our functions (`dropin.hub_kernels.NAMES`); FLASH_ATTN_COMPAT_HUB_KERNELS=1 does the same
        varlen_attn: run torch.nn.attention.varlen on CPUs and on GPUs before sm80; FLASH_ATTN_COMPAT_VARLEN_ATTN=1 does
            the same
        sdpa: run F.scaled_dot_product_attention, and the operators under it, on our kernels on GPUs before sm80, with
            "always" on newer ones too, before PyTorch's; FLASH_ATTN_COMPAT_SDPA=1 or always does the same
        interfaces: "fa3" in it makes `import flash_attn_interface`, FlashAttention-3's name, find
            `flash_attn_compat.fa3` unless there is a module of that name; "fa4" makes `import flash_attn.cute`,
            FlashAttention-4's name, find `flash_attn_compat.fa4` unless flash-attn-4 is installed, and transformers
            accept "flash_attention_4"; children inherit both
        transformers: compute attn_implementation="flash_attention_2" by the function of register_with_transformers,
            which is right where transformers' own is not: padded batches of encoder-decoders, T5Gemma's windows, GPT-2
            in fp32; FLASH_ATTN_COMPAT_TRANSFORMERS=1 does the same
        flex: run torch.nn.attention.flex_attention, eager and compiled, on our kernels on GPUs before sm80, with
            "always" on newer ones too; FLASH_ATTN_COMPAT_FLEX=1 or always does the same. It needs PyTorch 2.6

    Raises ValueError for unknown values, and RuntimeError if another api is active.
    """
    extras = {settings.TRANSFORMERS: transformers, settings.HUB_KERNELS: hub_kernels, settings.VARLEN_ATTN: varlen_attn}
    _apply(patch, api, extras | {settings.SDPA: sdpa, settings.FLEX: flex}, interfaces)


def unpatch() -> None:
    """Undo patch(): restore sys.modules, sys.meta_path, sys.path, PYTHONPATH and transformers.

    Functions that were imported meanwhile keep working. Inside a patched() block the effect comes at its end.
    """
    _release(patch)


@contextmanager
def patched(
    api: str | None = None, *, hub_kernels: bool = False, varlen_attn: bool = False, sdpa: SdpaRequest = False,
    interfaces: Sequence[str] = (), transformers: bool = False, flex: SdpaRequest = False,
) -> Iterator[None]:  # fmt: skip
    """Apply patch(...) during a block. Blocks may nest and overlap; the end of the last one undoes it."""
    block = object()
    extras = {settings.TRANSFORMERS: transformers, settings.HUB_KERNELS: hub_kernels, settings.VARLEN_ATTN: varlen_attn}
    _apply(block, api, extras | {settings.SDPA: sdpa, settings.FLEX: flex}, interfaces)
    try:
        yield
    finally:
        _release(block)


def warn_of_xformers(api: str | None) -> None:
    """Warn if an installed xformers would refuse the interface's version: its own error at import does not say why."""
    if api == "2.6" and PathFinder.find_spec("xformers") is not None:
        warnings.warn(
            "xformers is installed here and cannot be imported beside the interface of 2.6: its version 0.0.35 accepts "
            "flash-attn 2.7.1 to 2.8.4. If your code needs the old unpad_input alone, stay with 2.8 and give it that "
            "function: see docs/monkeypatching.md",
            stacklevel=4,
        )


def _apply(
    holder: object, api: str | None, requests: Mapping[str, bool | str | None], interfaces: Sequence[str]
) -> None:
    """Apply patch()'s changes on behalf of ``holder``. requests: by variable, as optional.switch_on takes them"""
    global _undo, _api
    if api is not None and api not in settings.APIS:
        raise ValueError(f"api must be {' or '.join(settings.APIS)}, got {api!r}")
    if set(interfaces) - set(INTERFACES) or isinstance(interfaces, str):
        raise ValueError(f"interfaces must be a sequence of names among {', '.join(INTERFACES)}, got {interfaces!r}")
    for name, variable in (("sdpa", settings.SDPA), ("flex", settings.FLEX)):
        if requests[variable] not in (False, True, "always"):
            raise ValueError(f'{name} must be False, True or "always", got {requests[variable]!r}')
    with _lock, ExitStack() as added:
        if _undo is not None and api not in (None, _api):
            raise RuntimeError(f"patched already with the interface of {_api}: unpatch() first")
        if _undo is None:
            chosen = settings.value_of(settings.API) if api is None else api
            warn_of_xformers(chosen)
            if api is not None:
                set_item(os.environ, settings.API, api, added)
            if _provide_name(added, chosen):
                transformers_checks.allow_flash_attention(2, added)
            requests = {variable: asked or optional.requested_value(variable) for variable, asked in requests.items()}
            _api = chosen or "2.8"
        optional.switch_on(requests, added)
        if "fa3" in interfaces:
            optional.redirect_fa3(added)
        if "fa4" in interfaces:
            optional.redirect_fa4(added)
        if _undo is None:
            _undo = ExitStack()
            _forget_decisions()
        _undo.push(added.pop_all())
        _holders.add(holder)


def _release(holder: object) -> None:
    """Remove ``holder`` from _holders, and undo all changes if none is left."""
    global _undo
    with _lock:
        _holders.discard(holder)
        if _holders or _undo is None:
            return
        undo, _undo = _undo, None
        undo.close()
        _forget_decisions()


def _forget_decisions() -> None:
    """Discard prepared calls: an installed flash-attn must not serve while it runs on our functions."""
    call_cache = sys.modules.get("flash_attn_compat.dispatch.call_cache")
    if call_cache is not None:
        call_cache.forget()


def _provide_name(undo: ExitStack, api: str | None) -> bool:
    """Make the name import our package; return False if a working real flash-attn keeps it."""
    first = installed.find_first_spec()
    is_ours = installed.is_stand_in_spec(first)
    if not is_ours and api != "2.6":  # with 2.6, ours replaces even a working real one
        real = installed_package.find_real()
        if real is not None and real.usable:
            return False
        if real is not None and installed_package.swap_extension(real, undo):
            site_directory.add_to_pythonpath(undo, site_directory.entries(None))
            return True
    installed_package.remember_modules(undo)
    mirror.remember_names(undo)
    if not finder.is_stand_in(sys.modules.get("flash_attn")) or api not in (None, finder.stand_in_api()):
        installed_package.forget_modules()
        mirror.take_names_back()
    if is_ours and api is None:
        return True  # installed, or inherited from a patched parent: the path already leads to the right package
    replaced = first if is_ours else installed.find_real_spec()
    site_directory.put_on_path(undo, site_directory.entries(api), installed_package.path_entry(replaced))
    if not is_ours and finder.add_to_meta_path():
        undo.callback(finder.remove_from_meta_path)
    return True
