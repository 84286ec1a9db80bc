"""A forward and its recomputation under a checkpoint are computed by one and the same: dropout's masks depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from flash_attn_compat import explain
from tests.forms.inputs import randn
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.sdpa import originals
from tests.sdpa.originals import POLICY, counted

HALF = torch.float16


class Case(NamedTuple):
    """least: products of a call without gradients that is ours, as a share of this call's

    mask: the mask that the block computes from its parameter
    """

    rows: int = 128
    keys: int = 128
    heads_k: int = 2
    least: float = 0.0
    dtype: torch.dtype = HALF
    mask: Callable[[Tensor], Tensor] | None = None


with torch.inference_mode():
    OF_INFERENCE = torch.ones(128, 128, dtype=torch.bool).tril()

CASES = {
    "small": Case(least=2.0),
    "large": Case(least=0.1),
    "large but for gradients": Case(least=0.5),
    "few tokens": Case(rows=64, keys=64, least=1e-3),
    "few tokens under booleans": Case(20, 20, least=1e-3, mask=lambda _: torch.ones(20, 20, dtype=torch.bool).tril()),
    "grouped heads": Case(heads_k=1, least=2.0),
    "bf16": Case(dtype=torch.bfloat16, least=2.0),
    "one row": Case(rows=1),
    "one row of a group under booleans": Case(1, heads_k=1, mask=lambda _: torch.ones(1, 128, dtype=torch.bool)),
    "a bias made of a parameter": Case(mask=lambda parameter: (parameter * 1).half()),
    "a bias made of numbers": Case(mask=lambda parameter: parameter.detach().half()),
    "booleans of inference mode": Case(mask=lambda _: OF_INFERENCE),
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_dropout_under_a_checkpoint_drops_the_same_twice(
    name: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reentrant checkpoint's forward is not recorded, and its recomputation is."""
    case, seen = CASES[name], []
    q = randn(1, 2, case.rows, 32, dtype=case.dtype).requires_grad_()
    k, v = (randn(1, case.heads_k, case.keys, 32, seed=seed, dtype=case.dtype).requires_grad_() for seed in (1, 2))
    parameter = randn(128, 128, seed=3).requires_grad_()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = None if case.mask is None else case.mask(parameter)
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=0.3, enable_gqa=case.heads_k == 1)
        seen.append(out.detach().clone())
        return out * 1

    least = int(case.rows * case.keys * 2 * 32 * case.least)
    with originals.served(monkeypatch, POLICY._replace(least_products=least)), set_checkpoint_early_stop(False):
        torch.manual_seed(5)
        out: Any = checkpoint(block, q, k, v, use_reentrant=reentrant)
        out.float().square().sum().backward()
        assert len(counted()) == 1
    assert len(seen) == 2 and torch.equal(*seen)


def test_explain_names_one_backend_for_dropout_with_and_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    q = randn(1, 2, 128, 32, dtype=HALF).requires_grad_()
    with originals.served(monkeypatch, POLICY._replace(least_products=128 * 128 * 32)):
        found = [explain(F.scaled_dot_product_attention, x, x, x, dropout_p=0.3) for x in (q, q.detach())]
        assert found[0] == found[1] and found[0].backend == "pytorch"
        assert explain(F.scaled_dot_product_attention, q.detach(), q.detach(), q.detach()).backend == "fused"


def test_a_backend_that_declines_gradients_declines_dropout_without_them(
    served: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As capabilities may say, or a kernel of the backward that failed."""
    from flash_attn_compat.backends.fused import Fused

    monkeypatch.setattr(Fused, "extra_reasons", lambda _, traits: ["no gradients"] * traits.needs_backward)
    q = randn(1, 2, 40, 32, dtype=HALF)
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
    assert counted() == {"pytorch": 1} and not served.seen
    F.scaled_dot_product_attention(q, q, q)
    assert counted() == {"pytorch": 1, "fused": 1}
