"""The raw extension of flash-attn 2.6; forwards also return q, k, v and the output with its padding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from torch import Tensor

from flash_attn_compat import flash_attn_2_cuda as _current
from flash_attn_compat.flash_attn_2_cuda import bwd, fwd_kvcache, varlen_bwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]

P = ParamSpec("P")
Forward = Callable[Concatenate[Tensor, Tensor, Tensor, P], list[Tensor]]


def _with_inputs(current: Forward[P]) -> Forward[P]:
    """Return ``current`` with the results [out, q, k, v, out, softmax_lse, S_dmask, rng_state]."""

    @functools.wraps(current)
    def forward(q: Tensor, k: Tensor, v: Tensor, /, *arguments: P.args, **named: P.kwargs) -> list[Tensor]:
        out, *rest = current(q, k, v, *arguments, **named)
        return [out, q, k, v, out, *rest]

    return forward


fwd = _with_inputs(_current.fwd)
varlen_fwd = _with_inputs(_current.varlen_fwd)
