"""Kernels compiled before anything calls them, with or without a GPU at hand: for container images, say."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from flash_attn_compat.backends.fused import cache, loader, variants
from flash_attn_compat.backends.fused.loader import KernelError
from flash_attn_compat.backends.fused.variants import FP16, Kind, Variant

_OLDEST = 75


def number(architecture: str) -> int:
    """90 of sm_90 or compute_90; raises KernelError for what the NVRTC at hand, or this package, has no kernels for."""
    known = [one for one in loader.compiler().architectures if one >= _OLDEST]
    found = re.fullmatch(r"(?:sm|compute)_(\d+)", architecture)
    if found is None or int(found[1]) not in known:
        names = ", ".join(f"sm_{one}" for one in known)
        raise KernelError(f"{architecture} is none of {names} (or compute_{known[0]} and so on)")
    return int(found[1])


def kinds(number: int, head_dims: Collection[int], dtypes: Collection[str], every: bool) -> Iterator[Kind]:
    """What models ask for: rows on 16 bytes, and at most one of ALiBi, softcap and dropout; every: all there is.

    head_dims: empty for all; dtypes: "float16" and "bfloat16", empty for both
    """
    sizes = {Kind(number, FP16, head_dim).D for head_dim in head_dims}
    for kind in variants.kinds(number):
        name = "float16" if kind.type == FP16 else "bfloat16"
        usual = kind.vec == 8 and kind.alibi + kind.softcap + kind.dropout <= 1
        if (every or usual) and (not sizes or kind.D in sizes) and (not dtypes or name in dtypes):
            yield kind


def compile_all(wanted: Iterable[tuple[Variant, str]], jobs: int | None = None) -> tuple[int, list[str]]:
    """Keep variants, each for an architecture, in the cache; how many were not there yet, and what went wrong.

    jobs: how many are compiled at once, one for each processor by default
    """

    def make(variant: Variant, architecture: str) -> bool:
        name = loader.cache_name(variant, architecture)
        if cache.read(name) is not None:
            return False
        if not cache.write(name, loader.binary(variant, architecture)):
            raise KernelError(f"{cache.folder()} cannot be written")
        return True

    made, errors = 0, []
    pool = ThreadPoolExecutor(jobs or os.cpu_count())
    try:
        for job in [pool.submit(make, *one) for one in wanted]:
            try:
                made += job.result()
            except KernelError as error:
                errors.append(str(error))
    finally:  # whoever interrupts it waits for what is being compiled, not for all
        pool.shutdown(cancel_futures=True)
    return made, errors
