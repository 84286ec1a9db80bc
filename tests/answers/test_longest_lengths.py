"""The fused kernels on sequences longer than max_seqlen_q and max_seqlen_k.

Where the host cannot read the lengths, a row's results are right, or NaN as a whole: never what its memory held before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_attn_compat import flash_attn_varlen_func, use_backend
from tests.forms.inputs import cumulative, randn
from tests.forms.plain import some
from tests.kernels import fused_on_cpu

HALF, BRAIN = torch.float16, torch.bfloat16
# Lengths, max_seqlen_q and max_seqlen_k, dtype, options; how many rows of out, dq and dk are NaN.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, int], torch.dtype, dict[str, Any], tuple[int, int, int]]] = {
    "more tokens than such sequences hold": ((200, 100), (64, 64), HALF, {}, (0, 0, 0)),
    "one long sequence": ((200, 5, 5, 5), (64, 64), HALF, {}, (136, 136, 200)),
    "one long sequence, causal": ((200, 5, 5, 5), (64, 200), HALF, {"causal": True}, (136, 136, 200)),
    "one long sequence, converted": ((200, 5, 5, 5), (64, 64), BRAIN, {}, (136, 136, 200)),
    "keys alone": ((200, 5, 5, 5), (200, 64), HALF, {"causal": True}, (0, 0, 136)),
    "few rows": ((20, 1, 0), (8, 20), HALF, {"causal": True}, (4, 4, 20)),
    "single rows under a mask": ((2, 1, 0, 0), (1, 2), HALF, {"causal": True}, (2, 2, 2)),
    "single rows under a mask, more of them": ((2, 1), (1, 2), HALF, {"causal": True}, (2, 2, 2)),
    "single rows without a mask": ((2, 1, 0, 0), (1, 2), HALF, {}, (0, 0, 0)),
    "single rows with dropout": ((2, 1, 0, 0), (1, 2), HALF, {"causal": True, "dropout_p": 0.2}, (0, 0, 0)),
}


def results(lengths: tuple[int, ...], longest: tuple[int, int], dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """out, LSE and gradients, with a row for each token."""
    q, k, v = (randn(sum(lengths), 2, 16, seed=seed).to(dtype).requires_grad_() for seed in range(3))
    starts = cumulative(*lengths)
    torch.manual_seed(0)
    out, lse, _ = flash_attn_varlen_func(q, k, v, starts, starts, *longest, **options, return_attn_probs=True)
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return [x.detach().flatten(1) for x in (out, lse.t(), *gradients)]


@pytest.mark.parametrize("name", some(CASES, 2))
def test_rows_beyond_max_seqlen_are_right_or_nan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, longest, dtype, options, (of_out, of_dq, of_dk) = CASES[name]
    fused_on_cpu.emulate(monkeypatch, number=75, held=7.0)
    with use_backend("fused"):
        found = results(lengths, longest, dtype, options)
        expected = results(lengths, (max(lengths),) * 2, dtype, options)
    for x, right, most in zip(found, expected, (of_out, of_out, of_dq, of_dk, of_dk), strict=True):
        is_nan = x.isnan().all(1)
        assert int(is_nan.sum()) == most
        torch.testing.assert_close(x[~is_nan], right[~is_nan], rtol=2e-2, atol=2e-2)
