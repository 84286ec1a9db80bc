"""Ahead-of-time compilation of kernels, with or without a GPU: for container images, for example."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from flash_attn_compat.backends.fused.building import kernel_files, nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import KernelError
from flash_attn_compat.backends.fused.choosing import enumeration
from flash_attn_compat.backends.fused.choosing.kinds import FLOAT_BIAS, FP16, Kind, size_of
from flash_attn_compat.backends.fused.choosing.variants import Variant

_MIN_ARCHITECTURE = 75
_COMMON_HEAD_DIMS = 32, 64, 80, 96, 128, 256
_DIFFUSION_HEAD_DIMS = 40, 80, 160


def parse_architecture(architecture: str) -> int:
    """Return 90 for sm_90 or compute_90. Raises KernelError where NVRTC or this package does not support it."""
    known: list[int] = [one for one in nvrtc.compiler().architectures if one >= _MIN_ARCHITECTURE]
    numbers = {f"{kind}_{one}": one for kind in ("sm", "compute") for one in known}
    if architecture not in numbers:
        names = ", ".join(f"sm_{one}" for one in known)
        raise KernelError(f"unknown architecture {architecture!r}; choose from {names}")
    return numbers[architecture]


def common_kinds(
    number: int, head_dims: Collection[int], dtypes: Collection[str], masks: bool = False
) -> Iterator[Kind]:
    """Yield the kinds of calls that models make: 16-byte aligned rows, at most one of ALiBi, softcap, dropout and mask.

    Without caches of 8-bit floats, whose kernels are compiled at their first call.

    head_dims: empty for the head dims of most models; dtypes: "float16" and "bfloat16", empty for both
    masks: whether to include dense masks, of booleans or of biases in the dtype, which PyTorch's operators take
    """
    sizes = set(map(size_of, head_dims or _COMMON_HEAD_DIMS))
    for kind in enumeration.every_kind(number):
        name = "float16" if kind.type == FP16 else "bfloat16"
        asked = kind.features
        is_common = kind.sizes.vec == 8 and not asked.cache
        is_common = is_common and asked.alibi + asked.softcap + asked.dropout + (asked.bias > 0) <= 1
        is_common = is_common and (not asked.bias or (masks and asked.bias != FLOAT_BIAS))
        if is_common and kind.D in sizes and (name in dtypes or not dtypes):
            yield kind


def usual_kinds(number: int) -> Iterator[Kind]:
    """Yield the kinds of calls of three programs: a 7B model (LoRA training, generation), packed BERT, diffusion.

    The first is causal with head dim 128 in fp16 and bf16, also over a cache and over pages. The second has head dim 64
    in fp16, with dropout if nothing is masked. The third is unmasked with head dims 40, 80 and 160 in fp16. Kernels for
    gradients of few keys are left to their first call.
    """
    of_diffusion = set(map(size_of, _DIFFUSION_HEAD_DIMS))
    for kind in enumeration.every_kind(number):
        is_fp16, asked, sizes = kind.type == FP16, kind.features, kind.sizes
        if asked.alibi or asked.softcap or asked.bias or asked.cache:
            continue
        if sizes.vec != 8 or sizes.window or kind.hints.few_keys:
            continue
        if kind.D == 128:
            is_usual = asked.local and not asked.dropout and (is_fp16 or not asked.paged)
        elif kind.D == 64:
            is_usual = is_fp16 and not asked.paged and not (asked.local and asked.dropout)
        else:
            is_usual = kind.D in of_diffusion and is_fp16 and not (asked.local or asked.paged or asked.dropout)
        if is_usual:
            yield kind


def compile_all(
    wanted: Iterable[tuple[Variant, str]],
    watched: Callable[[list[Future[bool]]], Iterable[Future[bool]]] = iter,
    pool: Executor | None = None,
) -> tuple[int, list[str]]:
    """Compile variants, each for an architecture, into the cache.

    Args:
        watched: yields the jobs in order, to show progress
        pool: runs the jobs, and is shut down at the end; threads by default

    Returns:
        the number of kernels that were not in the cache yet, and the errors
    """
    compiled, errors = 0, []
    pool = pool or ThreadPoolExecutor(os.cpu_count())
    try:
        for job in watched([pool.submit(_compile, *one) for one in wanted]):
            try:
                compiled += job.result()
            except KernelError as error:
                errors.append(str(error))
    finally:  # also at an interrupt: only the running compilations are waited for
        pool.shutdown(cancel_futures=True)
    return compiled, errors


def _compile(variant: Variant, architecture: str) -> bool:
    """Compile the kernel if the cache lacks it; return whether it was compiled. Raises KernelError."""
    name = nvrtc.cache_name(variant, architecture)
    if kernel_files.read(name) is not None:
        return False
    if not kernel_files.write(name, nvrtc.compile_variant(variant, architecture)):
        raise KernelError(f"{kernel_files.describe_folder()} cannot be written")
    return True
