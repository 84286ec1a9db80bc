"""Check the arguments of flash-attn's functions, fill in defaults, and turn them into an AttentionCall."""

from __future__ import annotations

from typing import Any

from flash_attn_compat.core.append import Append
from flash_attn_compat.core.arguments.build import check_dense, check_packed, dense_call, packed_call
from flash_attn_compat.core.arguments.cache import cache_call, check_cache
from flash_attn_compat.core.arguments.options import checked
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.entry import Check
from flash_attn_compat.core.inputs import CacheInputs, DenseInputs, Inputs, Options, PackedInputs

_CHECKS: dict[type, Any] = {DenseInputs: check_dense, PackedInputs: check_packed, CacheInputs: check_cache}
_CALLS: dict[type, Any] = {DenseInputs: dense_call, PackedInputs: packed_call, CacheInputs: cache_call}
_DEFAULTS = Options()


def check(x: Inputs, options: Options, length: int | None) -> Check | None:
    """Raise for malformed inputs. Return the check of values (lengths, pages) that every call repeats, or None.

    options: as ``checked`` returns them; length: cache_seqlens if it is one int for all sequences, else None
    """
    numbers: Check | None = _CHECKS[type(x)](x, options, length)
    return numbers


def call_of(x: Inputs, options: Options, length: int | None = None) -> tuple[AttentionCall, Append | None]:
    """Return the AttentionCall of checked inputs, and the keys and values that it appends to its cache first, or None.

    The arguments are those of ``check``. If the options announce an int length but ``length`` is None, the call covers
    all slots of the cache. Raises for numbers that are out of range.
    """
    found: tuple[AttentionCall, Append | None] = _CALLS[type(x)](x, options, length)
    return found


def checked_call(x: Inputs, options: Options = _DEFAULTS) -> AttentionCall:
    """Return the AttentionCall of a dense or packed call, after all checks except those of values in tensors."""
    options = checked(options)
    check(x, options, None)
    return call_of(x, options)[0]
