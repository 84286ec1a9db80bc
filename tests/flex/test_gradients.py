"""Gradients of captured tensors by our kernels, against PyTorch's composition in fp32 and in the call's dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from flash_attn_compat.backends.fused.launching import params
from tests.flex import calls
from tests.flex.calls import Answer, make_mask, tensors
from tests.forms.plain import in_turns, some
from tests.kernels.fused_on_cpu import LaunchRecord

BATCH, HEADS, ROWS, KEYS = 2, 4, 77, 150
BACKWARD = ["forward", "delta", "dkdv", "dq"]


class Learned(NamedTuple):
    """A score_mod of learned tensors. make: returns the tensors; mod: of (tensors, score, b, h, q, kv)"""

    make: Callable[[], Sequence[Tensor]]
    mod: Callable[..., Tensor]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


LEARNED = {
    "a bias of every score": Learned(
        lambda: [normal(BATCH, HEADS, ROWS, KEYS, dtype=torch.float16)],
        lambda x, score, b, h, q, kv: score + x[0][b, h, q, kv],
    ),
    "a relative table that repeats an entry, under a cap": Learned(
        lambda: [normal(HEADS, 60)],
        lambda x, score, b, h, q, kv: 5 * torch.tanh((score + x[0][h, (q - kv).clamp(-30, 29)]) / 5),
    ),
    "slopes and a temperature": Learned(
        lambda: [normal(HEADS) * 0.1, torch.tensor([0.7])],
        lambda x, score, b, h, q, kv: score * x[1][0] + x[0][h] * (kv - q),
    ),
    "one table of rows and keys, indexed twice": Learned(
        lambda: [normal(KEYS, 2).T],
        lambda x, score, b, h, q, kv: score * torch.sigmoid(x[0][0, q]) + x[0][1, kv] * x[0][0, kv],
    ),
    "a tensor beside a constant one": Learned(
        lambda: [normal(BATCH, 3).expand(HEADS, -1, -1)],
        lambda x, score, b, h, q, kv: torch.where(kv % 2 == 0, score + x[0][h, b, kv % 3], score - CONSTANT[h]),
    ),
}  # fmt: skip
CONSTANT = normal(HEADS)


INDEXED_BY_NUMBERS = "slopes and a temperature", "one table of rows and keys, indexed twice"


def skip_before_2_11() -> None:
    if TorchVersion(torch.__version__) < "2.11":
        pytest.skip("PyTorch 2.6 to 2.10 fail with a gradient of a captured tensor whose index is a number")


def answers(
    name: str, backend: str = "eager", dtype: torch.dtype = torch.float16, masked: bool = True, dim: int = 32
) -> tuple[Answer, Answer, Answer]:
    """Return ours, PyTorch's in fp32, and PyTorch's in the call's dtype."""
    if name in INDEXED_BY_NUMBERS:
        skip_before_2_11()
    learned = LEARNED[name]
    leaves = [x.requires_grad_() for x in learned.make()]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return learned.mod(leaves, score, b, h, q, kv)

    qkv = tensors(BATCH, HEADS, 2, ROWS, KEYS, dim, dtype=dtype)
    mask = make_mask(lambda b, h, q, kv: (kv < q + 40) & (q != 5), *qkv[:2]) if masked else None
    found = calls.call(qkv, score_mod, mask, backend=backend, more=leaves)
    assert [x.dtype for x in found.gradients[3:]] == [x.dtype for x in leaves]
    right = calls.in_fp32(qkv, score_mod, mask, more=leaves)
    return found, right, calls.composed(qkv, score_mod, mask, more=leaves)


def assert_right(found: Answer, right: Answer, own: Answer) -> None:
    """Every gradient has at most twice the error of PyTorch's in the call's dtype, or the noise of a sum over all rows.

    That noise is of the rounding of ``out``, from which each row's gradients start.
    """
    noise = 0.5 * torch.finfo(found.out.dtype).eps * BATCH * HEADS * ROWS
    for place, (x, y, z) in enumerate(zip(found.gradients, right.gradients, own.gradients, strict=True)):
        error, allowed = (x.float() - y.float()).abs().max(), (z.float() - y.float()).abs().max()
        sums_rows = place > 2 and x.numel() <= HEADS
        assert error <= 2 * allowed + 2e-3 * y.float().abs().max() + noise * sums_rows, f"{error} beside {allowed}"


@pytest.mark.parametrize("name", some(LEARNED, 3))
def test_gradients_of_captured_tensors_are_right(name: str, served: LaunchRecord) -> None:
    found, right, own = answers(name)
    assert served.entries == BACKWARD
    assert_right(found, right, own)


@pytest.mark.parametrize("dim", some([128, 256, 64], 3))
def test_gradients_in_bf16_without_a_mask_are_right(dim: int, served: LaunchRecord) -> None:
    found, right, own = answers("slopes and a temperature", dtype=torch.bfloat16, masked=False, dim=dim)
    assert served.entries[-3:] == BACKWARD[1:]
    assert_right(found, right, own)


@pytest.mark.usefixtures("inductor_cache")
def test_a_compiled_graph_returns_the_gradients_of_captured_tensors(served: LaunchRecord) -> None:
    found, right, own = answers("a relative table that repeats an entry, under a cap", "inductor")
    assert served.entries == BACKWARD
    assert_right(found, right, own)


def test_a_learned_number_has_the_gradient_of_a_tensor_of_one(served: LaunchRecord) -> None:
    factor, qkv = torch.tensor(0.7, requires_grad=True), tensors(heads=2, heads_k=1, rows=40, keys=40, dim=32)
    found = calls.call(qkv, lambda score, b, h, q, kv: score * factor, more=[factor])
    right = calls.in_fp32(qkv, lambda score, b, h, q, kv: score * factor, more=[factor])
    assert served.entries[-3:] == BACKWARD[1:]
    torch.testing.assert_close(found.gradients[3], right.gradients[3], rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(("backend", "warn_only"), in_turns(["eager", "inductor"], [False, True]))
@pytest.mark.usefixtures("inductor_cache")
def test_deterministic_algorithms_leave_them_to_pytorch(backend: str, warn_only: bool, served: LaunchRecord) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        if backend == "inductor":  # which has no backward for CPUs
            with pytest.raises(Exception, match=r"backward|CppScheduler"):  # the words of 2.13 and of 2.11
                answers("a bias of every score", backend)
        else:
            found, right, own = answers("a bias of every score")
            assert_right(found, right, own)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    assert served.entries == ["forward"]


def test_garbage_in_indices_adds_to_no_other_memory(served: LaunchRecord) -> None:
    """The emulator allows no access outside of the call's tensors."""
    table, wild = normal(HEADS, 7).requires_grad_(), torch.empty(ROWS, dtype=torch.int64).random_(-(2**40), 2**40)
    qkv = tensors(BATCH, HEADS, 2, ROWS, KEYS, 32)
    found = calls.call(qkv, lambda score, b, h, q, kv: score * table[wild[kv % ROWS], wild[q]], more=[table])
    assert served.entries[-3:] == BACKWARD[1:] and found.gradients[3].shape == table.shape


def test_more_learned_tensors_than_the_kernels_take_are_left_to_pytorch(served: LaunchRecord) -> None:
    leaves = [normal(HEADS).requires_grad_() for _ in range(params.GRADIENTS + 1)]
    qkv = tensors(heads=HEADS, rows=9, keys=9, dim=32)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * sum(x[h] for x in leaves)

    found, right = (call(qkv, score_mod, more=leaves) for call in (calls.call, calls.in_fp32))
    assert "dq" not in served.entries
    for x, y in zip(found.gradients, right.gradients):
        torch.testing.assert_close(x.float(), y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("factor", [3e4, 1e-5])
def test_a_factor_of_scores_far_from_one_keeps_the_digits_of_gradients_in_bf16(
    factor: float, served: LaunchRecord
) -> None:
    """On Turing bf16 is computed in fp16, of which dS has to fit into the range: it is scaled by the factor's bound."""
    skip_before_2_11()
    q, k, v = tensors(heads=2, heads_k=1, rows=70, keys=70, dim=64, dtype=torch.bfloat16)
    qkv, leaves = (q / factor, k, v), [torch.tensor([factor], requires_grad=True)]

    def problem(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * leaves[0][0]

    found, right = (call(qkv, problem, more=leaves) for call in (calls.call, calls.in_fp32))
    own = calls.composed(qkv, problem, more=leaves)
    assert served.entries[-3:] == BACKWARD[1:]
    for x, y, z in zip(found.gradients[:3], right.gradients, own.gradients):
        assert (x.float() - y).abs().max() <= 2 * (z.float() - y).abs().max() + 1e-3 * y.abs().max()
