"""Cross entropy against its formula in fp64, its gradient, its memory and its vocab-parallel form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.losses.cross_entropy import CrossEntropyLoss
from flash_attn_compat.ops.triton import cross_entropy
from flash_attn_compat.ops.triton.cross_entropy import cross_entropy_loss
from tests.forms.plain import check_function, pairwise
from tests.forms.support import in_group

N, V = 12, 37
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"logit_scale": 0.7},
    {"lse_square_scale": 1e-2},
    {"label_smoothing": 0.2, "logit_scale": 1.5, "lse_square_scale": 1e-2},
]


def problem(v: int = V, n: int = N) -> tuple[Tensor, Tensor]:
    """Row 1 is ignored, rows 2 and 3 have a label that is no class."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, v, generator=generator) * 4
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[1], labels[2], labels[3] = -100, v, -1
    return logits, labels


def plain(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Torch's cross entropy, smoothing and the z-loss; a label that is no class has the first one's gradient alone."""
    kept, known = labels != ignore_index, (labels >= 0) & (labels < logits.shape[1])
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    z = z.masked_fill(~kept[:, None], 0.0)
    lse = z.logsumexp(-1)
    entropy = F.cross_entropy(z, torch.where(known & kept, labels, -100).long(), reduction="none")
    losses = (1 - label_smoothing) * torch.where(known, entropy, lse - lse.detach())
    if label_smoothing:
        losses = losses + label_smoothing * (lse - z.mean(-1))
    z_losses = lse_square_scale * lse**2
    return torch.where(kept, losses + z_losses, 0.0), torch.where(kept, z_losses, 0.0).detach()


@pytest.mark.parametrize(
    ("dtype", "options", "inplace_backward", "block", "integers", "ignore_index"),
    pairwise(DTYPES, OPTIONS, (False, True), (2**25, 5 * V), (torch.int64, torch.int32), (-100, 3)),
)
def test_losses_z_losses_and_gradients(
    dtype: torch.dtype, options: dict[str, Any], inplace_backward: bool, block: int, integers: Any, ignore_index: int,
    monkeypatch: Any,
) -> None:  # fmt: skip
    """Over blocks of rows that hold everything, and of five."""
    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", block)
    logits, labels = problem()
    labels = torch.where(labels == -100, ignore_index, labels).to(integers)
    options = {**options, "ignore_index": ignore_index}
    check_function(
        lambda x: cross_entropy_loss(x, labels, inplace_backward=inplace_backward, **options),
        lambda x: plain(x, labels, **options),
        logits.to(dtype),
        epsilons=16,
        rounds_once=True,
    )


def test_no_fp32_copy_of_all_half_precision_logits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float64):
                    self.elements = max(self.elements, tensor.numel())
            return out

    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", 4 * V)
    logits, labels = problem(n=64)
    logits = logits.bfloat16().requires_grad_()
    with Largest() as largest:
        cross_entropy_loss(logits, labels, label_smoothing=0.1)[0].sum().backward()
    assert 0 < largest.elements <= 4 * V


def test_inplace_backward_alone_writes_over_the_logits_and_makes_a_second_backward_an_error() -> None:
    logits, labels = problem()
    x = logits.clone().requires_grad_()
    y = x * 1.0
    loss = CrossEntropyLoss(reduction="sum", inplace_backward=True)(y, labels)
    loss.backward(retain_graph=True)
    assert x.grad is not None and torch.equal(y.detach(), x.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = CrossEntropyLoss(reduction="sum")(x, labels)
    for times in (2, 3):
        loss.backward(retain_graph=True)
        assert torch.equal(x.detach(), logits) and torch.equal(x.grad, times * y.detach())


def test_masked_classes_and_the_logits_of_ignored_rows_poison_nothing() -> None:
    logits, labels = problem()
    labels[labels >= V - 3] = 0
    logits[:, V - 3 :] = float("-inf")
    expected, _ = plain(logits[:, : V - 3], labels)
    logits[1] = float("nan")
    x = logits.clone().requires_grad_()
    losses, z_losses = cross_entropy_loss(x, labels)
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), expected, rtol=1e-5, atol=1e-5)
    assert losses[1] == z_losses[1] == 0 and not z_losses.requires_grad
    assert x.grad is not None and x.grad.isfinite().all() and x.grad[:, V - 3 :].abs().sum() == x.grad[1].sum() == 0


def test_a_precomputed_lse_is_used_only_without_scale_and_smoothing() -> None:
    logits, labels = problem()
    shifted = logits.logsumexp(-1) + 1
    known = (labels >= 0) & (labels < V)
    expected = plain(logits, labels)[0] + known
    for loss in (lambda *given: cross_entropy_loss(*given)[0], CrossEntropyLoss(reduction="none")):
        torch.testing.assert_close(loss(logits, labels, shifted), expected)
    for options in ({"label_smoothing": 0.1}, {"logit_scale": 0.5}):
        found = cross_entropy_loss(logits, labels, shifted, **options)[0]
        assert torch.equal(found, cross_entropy_loss(logits, labels, **options)[0])


@pytest.mark.parametrize(("reduction", "return_z_loss"), [("mean", True), ("sum", False), ("none", True)])
def test_the_module_reduces_like_torch(reduction: str, return_z_loss: bool) -> None:
    logits, labels = problem()
    labels[1] = 3
    options = {"lse_square_scale": 1e-2, "ignore_index": 3}
    module = CrossEntropyLoss(reduction=reduction, return_z_loss=return_z_loss, **options)
    counts = {"mean": (labels != 3).sum(), "sum": 1}

    def expected(x: Tensor) -> Any:
        both = plain(x, labels, **options)
        reduced = [t if reduction == "none" else t.sum() / counts[reduction] for t in both]
        return reduced if return_z_loss else reduced[0]

    check_function(lambda x: module(x, labels), expected, logits, epsilons=16)
    none = CrossEntropyLoss(reduction=reduction)(logits, torch.full_like(labels, -100))
    assert none.isnan() if reduction == "mean" else not none.any()


def _vocab_parallel_worker(rank: int) -> None:
    logits, labels = problem(2 * V)
    labels[4] = 0
    masked = logits.clone()
    masked[4, V:] = -torch.inf  # all that a rank has of a row
    weight = torch.linspace(0.5, 2, N)
    for options, with_lse in [*((options, False) for options in OPTIONS), ({}, True)]:
        leaf = (logits if "label_smoothing" in options else masked).clone().requires_grad_()
        x = leaf.detach().chunk(2, dim=-1)[rank].clone().requires_grad_()
        lse = x.detach().logsumexp(-1) if with_lse else None
        losses, z_losses = cross_entropy_loss(x, labels, lse, process_group=dist.group.WORLD, **options)
        by_module = CrossEntropyLoss(reduction="none", process_group=dist.group.WORLD, **options)(x, labels, lse)
        assert torch.equal(by_module, losses)
        expected, expected_z = plain(leaf, labels, **options)
        (losses * weight).sum().backward()
        (expected * weight).sum().backward()
        assert x.grad is not None and leaf.grad is not None
        pairs = (losses, expected), (z_losses, expected_z), (x.grad, leaf.grad.chunk(2, dim=-1)[rank])
        for found, right in pairs:
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_vocab_parallel_ranks_agree_with_one_process() -> None:
    in_group(_vocab_parallel_worker)
