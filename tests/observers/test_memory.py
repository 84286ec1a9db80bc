"""Memory grows with the length, never with its square. Bytes asked of the allocator, so the same every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func
from tests.forms.inputs import cumulative, randn
from tests.forms.support import on_backend
from verify.timing import allocations

FEATURES = {
    "causal": dict(causal=True),
    "window": dict(window_size=(64, 64)),
    "alibi": dict(alibi_slopes=torch.tensor([0.01])),
    "softcap": dict(softcap=5.0),
    "dropout": dict(dropout_p=0.1),
}


def _call(backend: str, seqlen: int, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Forward and backward of one head."""
    inputs = [randn(1, seqlen, 1, 8, seed=seed).requires_grad_() for seed in range(3)]

    def call() -> tuple[Tensor, ...]:
        out = on_backend(backend, flash_attn_func, *inputs, **kwargs)
        return torch.autograd.grad(out.sum(), inputs)

    return call


ON = [("chunked", name) for name in ("window", "alibi", "softcap", "dropout")] + [
    ("sdpa", name) for name in ("causal", "window", "alibi")
]


@pytest.mark.parametrize(("backend", "feature"), ON)
def test_nothing_as_large_as_a_boolean_mask_of_all_scores_is_allocated(backend: str, feature: str) -> None:
    # Long enough that even one byte per score is more than the fixed tile of any backend.
    seqlen = 3200
    held = allocations(_call(backend, seqlen, FEATURES[feature]))
    assert held.largest < seqlen**2
    assert held.peak < 4 * seqlen**2


@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_skewed_packed_sequences_are_not_padded_to_the_longest(backend: str) -> None:
    lengths = (3000,) + (40,) * 60
    cu = cumulative(*lengths)
    inputs = [randn(sum(lengths), 4, 16, seed=seed) for seed in range(3)]
    on_backend(backend, flash_attn_varlen_func, *inputs, cu, cu, 3000, 3000)
    held = allocations(lambda: on_backend(backend, flash_attn_varlen_func, *inputs, cu, cu, 3000, 3000))
    padded = len(lengths) * 3000 * 4 * 16 * 4
    assert held.largest < padded / 2


def test_the_measure_sees_a_materialised_matrix() -> None:
    """The tests above can fail: the reference backend does allocate all scores."""
    held = allocations(_call("reference", 1000, {}))
    assert held.largest >= 8 * 1000**2
