"""A user's kernel as a contestant of bench or a step of ladder. It may decline a workload."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import implementations as impl
from .call import Call, accepted, parameters, parts_of
from .contestants import Contestant, Prepared
from .errors import NotSupported
from .workloads import Workload


def own(path: str, sizes: Mapping[str, int] | None = None) -> Contestant:
    """Return the kernel at an import path as a contestant, imported at its first use. sizes: passed if it takes them"""
    return Contestant(path, functools.partial(_prepared, path, sizes or {}), ours=True)


@functools.cache
def _target(path: str) -> impl.Imported:
    return impl.imported(path)


def _prepared(path: str, sizes: Mapping[str, int], workload: Workload, given: Call) -> Prepared:
    target = _target(path)
    with target.serving(given) as function:  # raises NotSupported if the kernel lacks the function or a parameter
        others = {name: value for name, value in given.args.items() if name not in given.qkv_names}
        options = accepted(function, others)
        options |= {name: size for name, size in sizes.items() if name in parameters(function)}
    run = functools.partial(_attend, functools.partial(function, **options))
    with torch.no_grad():
        run(*given.qkv)  # compiles the kernel, or raises if it declines
    return Prepared(run)


def _attend(call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    try:
        out: Tensor = next(parts_of(call(q, k, v)))
    except Exception as error:
        if not impl.declines(error):
            raise
        raise NotSupported((str(error).splitlines() or [type(error).__name__])[0]) from error
    if torch.is_grad_enabled() and not out.requires_grad:
        raise NotSupported("out has no gradient: only the forward is timed")
    return out
