"""Cross entropy against fp64, its gradient, its memory and its vocab-parallel form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.losses.cross_entropy import CrossEntropyLoss
from flash_attn_compat.ops.triton import cross_entropy
from flash_attn_compat.ops.triton.cross_entropy import cross_entropy_loss
from tests.interpreters import forked_group
from tests.plain import pairwise
from tests.support import end_worker

N, V = 12, 37
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"logit_scale": 0.7},
    {"lse_square_scale": 1e-2},
    {"label_smoothing": 0.2, "logit_scale": 1.5, "lse_square_scale": 1e-2},
]


def problem(dtype: torch.dtype = torch.float32, n: int = N, v: int = V) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(n, v, generator=generator, dtype=torch.float64) * 4).to(dtype)
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[1] = -100
    return logits, labels


def reference(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Torch's own cross entropy in fp64, and the z-loss."""
    z = logits.double() * logit_scale
    kept = labels != ignore_index
    loss = F.cross_entropy(
        z, labels.long(), reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    z_loss = torch.where(kept, lse_square_scale * torch.logsumexp(z, dim=-1) ** 2, 0.0)
    return loss + z_loss, z_loss


@pytest.mark.parametrize(
    ("dtype", "options", "inplace_backward", "block"), pairwise(DTYPES, OPTIONS, (False, True), (None, 5 * V))
)
def test_losses_and_gradients_agree_with_fp64(
    dtype: torch.dtype, options: dict[str, Any], inplace_backward: bool, block: int | None, monkeypatch: Any
) -> None:
    """Over blocks of rows that hold everything, and of five."""
    if block is not None:
        monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", block)
    logits, labels = problem(dtype)
    leaf = logits.double().clone().requires_grad_()
    expected, expected_z = reference(leaf, labels, **options)
    weight = torch.linspace(0.5, 2, N)
    (expected * weight).sum().backward()

    x = logits.clone().requires_grad_()
    losses, z_losses = cross_entropy_loss(x, labels, inplace_backward=inplace_backward, **options)
    (losses * weight).sum().backward()

    assert losses.dtype == z_losses.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z_losses.double(), expected_z, rtol=1e-5, atol=1e-6)
    assert x.grad is not None and x.grad.dtype == dtype and leaf.grad is not None
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(x.grad.double(), leaf.grad, rtol=max(eps, 1e-5), atol=max(eps * 1e-2, 1e-6))
    assert losses[1] == 0 and z_losses[1] == 0 and x.grad[1].abs().sum() == 0 and not z_losses.requires_grad


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
    logits, labels = problem(torch.bfloat16, n=64)
    logits.requires_grad_()
    with Largest() as largest:
        cross_entropy_loss(logits, labels, label_smoothing=0.1)[0].sum().backward()
    assert 0 < largest.elements <= 4 * V


def test_inplace_backward_writes_the_gradient_over_the_logits_and_makes_a_second_backward_an_error() -> None:
    logits, labels = problem()
    x = logits.clone().requires_grad_()
    y = x * 1.0
    loss = cross_entropy_loss(y, labels, inplace_backward=True)[0].sum()
    loss.backward(retain_graph=True)
    assert x.grad is not None and torch.equal(y.detach(), x.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_inplace_backward_the_logits_are_left_alone() -> None:
    logits, labels = problem()
    x = logits.clone().requires_grad_()
    loss = cross_entropy_loss(x, labels)[0].sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone() if x.grad is not None else None
    loss.backward()
    assert torch.equal(x.detach(), logits)
    assert first is not None and x.grad is not None and torch.equal(x.grad, 2 * first)


def test_int32_labels_and_another_ignore_index_are_accepted() -> None:
    logits, labels = problem()
    labels[1] = 3
    expected, _ = reference(logits, labels, ignore_index=3)
    losses, _ = cross_entropy_loss(logits, labels.int(), ignore_index=3)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_that_is_no_class_has_only_smoothing_and_z_loss(label: int) -> None:
    logits, labels = problem()
    labels[2] = label
    x = logits.clone().requires_grad_()
    losses, z_losses = cross_entropy_loss(x, labels, label_smoothing=0.1, lse_square_scale=1e-2)
    z = logits[2].double()
    lse = torch.logsumexp(z, dim=-1)
    torch.testing.assert_close(losses[2].double(), 0.1 * (lse - z.mean()) + 1e-2 * lse**2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z_losses[2].double(), 1e-2 * lse**2, rtol=1e-5, atol=1e-5)
    assert cross_entropy_loss(logits, labels)[0][2] == 0
    losses[2].backward()
    assert x.grad is not None
    expected = torch.softmax(z, dim=-1) * (1 + 2e-2 * lse) - 0.1 / V
    torch.testing.assert_close(x.grad[2].double(), expected, rtol=1e-5, atol=1e-6)


def test_masked_classes_and_the_logits_of_ignored_rows_poison_nothing() -> None:
    logits, labels = problem()
    labels[labels >= V - 3] = 0
    logits[:, V - 3 :] = float("-inf")
    expected, _ = reference(logits[:, : V - 3], labels)
    logits[1] = float("nan")
    x = logits.clone().requires_grad_()
    losses, z_losses = cross_entropy_loss(x, labels, lse_square_scale=0.0)
    losses.sum().backward()
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    assert losses[1] == z_losses[1] == 0
    assert x.grad is not None and x.grad.isfinite().all() and x.grad[:, V - 3 :].abs().sum() == x.grad[1].sum() == 0


def test_a_precomputed_lse_is_used_only_without_scale_and_smoothing() -> None:
    logits, labels = problem()
    lse = torch.logsumexp(logits, dim=-1)
    plain, _ = cross_entropy_loss(logits, labels)
    shifted, _ = cross_entropy_loss(logits, labels, lse + 1)
    kept = labels != -100
    torch.testing.assert_close(shifted[kept], plain[kept] + 1)
    for options in ({"label_smoothing": 0.1}, {"logit_scale": 0.5}):
        assert torch.equal(
            cross_entropy_loss(logits, labels, lse + 1, **options)[0], cross_entropy_loss(logits, labels, **options)[0]
        )


@pytest.mark.parametrize(("reduction", "return_z_loss"), [("mean", True), ("sum", False), ("none", True)])
def test_the_module_reduces_like_torch(reduction: str, return_z_loss: bool) -> None:
    logits, labels = problem()
    module = CrossEntropyLoss(reduction=reduction, lse_square_scale=1e-2, return_z_loss=return_z_loss)
    result = module(logits, labels)
    loss, z_loss = result if return_z_loss else (result, None)
    expected, expected_z = reference(logits, labels, lse_square_scale=1e-2)
    if reduction != "none":
        count = (labels != -100).sum() if reduction == "mean" else 1
        expected, expected_z = expected.sum() / count, expected_z.sum() / count
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    if z_loss is not None:
        torch.testing.assert_close(z_loss.double(), expected_z, rtol=1e-5, atol=1e-6)


def test_a_mean_over_no_rows_is_nan_and_what_does_not_fit_is_refused_by_name() -> None:
    logits, labels = problem()
    assert CrossEntropyLoss()(logits, torch.full_like(labels, -100)).isnan()
    with pytest.raises(NotImplementedError, match="median"):
        CrossEntropyLoss(reduction="median")
    with pytest.raises(AssertionError, match=r"labels has shape \(11,\)"):
        cross_entropy_loss(logits, labels[1:])
    with pytest.raises(AssertionError, match="expected \\(n_rows, vocab_size\\)"):
        cross_entropy_loss(logits[None], labels)
    with pytest.raises(AssertionError, match="logit_scale must be positive"):
        cross_entropy_loss(logits, labels, logit_scale=0.0)
    with pytest.raises(AssertionError, match="precomputed_lse has shape"):
        cross_entropy_loss(logits, labels, labels[1:].float())


def _vocab_parallel_worker(rank: int, directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    answers: list[tuple[Tensor, Tensor, Tensor | None]] = []
    logits, labels = problem(v=2 * V)
    labels[2] = 2 * V  # no class of any rank
    local = logits.chunk(2, dim=-1)[rank]
    weight = torch.linspace(0.5, 2, N)
    for options in [*OPTIONS, {"precomputed_lse": torch.logsumexp(local, dim=-1)}]:
        x = local.clone().requires_grad_()
        losses, z_losses = cross_entropy_loss(x, labels, process_group=dist.group.WORLD, **options)
        (losses * weight).sum().backward()
        answers.append((losses.detach(), z_losses, x.grad))
    torch.save(answers, f"{directory}/{rank}.pt")
    end_worker()


def test_vocab_parallel_ranks_agree_with_one_process(tmp_path: Path) -> None:
    forked_group(_vocab_parallel_worker, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    logits, labels = problem(v=2 * V)
    labels[2] = 2 * V
    weight = torch.linspace(0.5, 2, N)
    for index, options in enumerate([*OPTIONS, {}]):
        x = logits.clone().requires_grad_()
        losses, z_losses = cross_entropy_loss(x, labels, **options)
        (losses * weight).sum().backward()
        for rank in ranks:
            torch.testing.assert_close(rank[index][0], losses.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(rank[index][1], z_losses, rtol=1e-5, atol=1e-6)
        gradient = torch.cat([rank[index][2] for rank in ranks], dim=-1)
        torch.testing.assert_close(gradient, x.grad, rtol=1e-5, atol=1e-6)
