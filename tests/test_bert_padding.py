"""bert_padding: what is kept, what comes back, and where gradients go."""

from collections import Counter
from typing import Any

import einops
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn_compat import bert_padding
from flash_attn_compat.bert_padding import (
    IndexFirstAxis,
    IndexPutFirstAxis,
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASK = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])
KEPT = [0, 1, 9, 10, 11]


def rows(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(requires_grad)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_unpad_input_returns_five_values_for_every_kind_of_mask(dtype: torch.dtype) -> None:
    x = rows(3, 4, 2, 5)
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, MASK.to(dtype))
    assert torch.equal(packed, x.flatten(0, 1)[KEPT])
    assert indices.dtype == torch.int64 and indices.tolist() == KEPT
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 2, 2, 5]
    assert type(max_seqlen) is int and max_seqlen == 3
    assert seqused.dtype == torch.int32 and seqused.tolist() == [2, 0, 3]


def test_unused_tokens_are_packed_but_not_counted_as_used() -> None:
    x = rows(2, 3, 4)
    attention_mask = torch.tensor([[1, 0, 0], [1, 1, 0]])
    unused_mask = torch.tensor([[0, 1, 0], [0, 0, 1]])
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, attention_mask, unused_mask)
    assert indices.tolist() == [0, 1, 3, 4, 5]
    assert torch.equal(packed, x.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 2, 5] and max_seqlen == 3
    assert seqused.tolist() == [1, 2]


def test_a_token_in_both_masks_is_counted_once() -> None:
    ones = torch.ones(1, 3, dtype=torch.int64)
    _, indices, cu_seqlens, max_seqlen, seqused = unpad_input(rows(1, 3, 2), ones, ones)
    assert indices.tolist() == [0, 1, 2] and cu_seqlens.tolist() == [0, 3] and max_seqlen == 3
    assert seqused.tolist() == [3]


def test_integer_hidden_states_can_be_unpadded() -> None:
    ids = torch.arange(12).reshape(3, 4, 1)
    packed = unpad_input(ids, MASK)[0]
    assert packed.dtype == torch.int64 and packed.flatten().tolist() == KEPT


def test_pad_input_undoes_unpad_input_with_zeros_in_the_padding() -> None:
    x = rows(3, 4, 2, 5, dtype=torch.bfloat16)
    packed, indices, *_ = unpad_input(x, MASK)
    padded = pad_input(packed, indices, 3, 4)
    assert padded.dtype == torch.bfloat16
    assert torch.equal(padded, x * MASK[:, :, None, None].to(x.dtype))


def test_int32_indices_are_accepted() -> None:
    x = rows(6, 2, requires_grad=True)
    indices = torch.tensor([4, 0], dtype=torch.int32)
    picked = index_first_axis(x, indices)
    padded = pad_input(picked, indices, 2, 3)
    padded.sum().backward()
    assert torch.equal(picked, x[[4, 0]])
    assert torch.equal(padded.flatten(0, 1)[[4, 0]], picked)
    assert x.grad is not None and x.grad[:, 0].tolist() == [1, 0, 0, 0, 1, 0]


def test_unpad_and_pad_carry_gradients_only_for_kept_tokens() -> None:
    x = rows(3, 4, 2, requires_grad=True)
    packed, indices, *_ = unpad_input(x, MASK)
    weight = rows(3, 4, 2) + 3
    (pad_input(packed * 2, indices, 3, 4) * weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * weight * MASK[:, :, None])


def test_index_first_axis_assigns_rather_than_adds_the_gradient_of_duplicates() -> None:
    x = rows(3, 2, requires_grad=True)
    index_first_axis(x, torch.tensor([1, 1])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_index_put_first_axis_scatters_and_its_gradient_gathers() -> None:
    values = rows(2, 3, requires_grad=True)
    out = index_put_first_axis(values, torch.tensor([3, 1]), 5)
    grad = rows(5, 3) + 1
    out.backward(grad)
    assert torch.equal(out[[3, 1]], values) and out[[0, 2, 4]].abs().sum() == 0
    assert values.grad is not None and torch.equal(values.grad, grad[[3, 1]])


def test_index_first_axis_residual_sums_both_gradients() -> None:
    x = rows(4, 3, requires_grad=True)
    picked, residual = index_first_axis_residual(x, torch.tensor([2, 0]))
    assert torch.equal(picked, x[[2, 0]]) and torch.equal(residual, x)
    # sum() hands an expanded gradient back: writing into it would corrupt it.
    (picked.sum() * 3 + residual.sum()).backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [4, 1, 4, 1]


def test_gradients_of_the_three_functions_match_finite_differences() -> None:
    x = torch.randn(4, 2, 2, dtype=torch.float64, requires_grad=True)
    values = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([3, 1])
    assert torch.autograd.gradcheck(lambda t: index_first_axis(t, indices), (x,))
    assert torch.autograd.gradcheck(lambda t: index_put_first_axis(t, indices, 4), (values,))
    assert torch.autograd.gradcheck(lambda t: index_first_axis_residual(t, indices), (x,))


@pytest.mark.parametrize("function", [IndexFirstAxis.apply, index_first_axis_residual])
def test_a_one_dimensional_input_is_an_assertion_error(function: object) -> None:
    with pytest.raises(AssertionError, match="at least 2 dimensions"):
        function(torch.zeros(4), torch.tensor([0]))  # type: ignore[operator]


def test_index_put_first_axis_rejects_one_dimensional_values() -> None:
    with pytest.raises(AssertionError, match="values has shape"):
        IndexPutFirstAxis.apply(torch.zeros(4), torch.tensor([0]), 4)


def test_a_mask_of_the_wrong_shape_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 4\)"):
        unpad_input(rows(3, 5, 2), MASK)


def test_concatenated_sequences_are_split_by_their_lengths() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = rows(3, 6, 2, requires_grad=True)
    packed, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, lengths)
    expected = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert indices.tolist() == expected
    assert torch.equal(packed, x.flatten(0, 1)[expected])
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert type(max_seqlen) is int and max_seqlen == 6
    packed.sum().backward()
    assert x.grad is not None and x.grad[:, :, 0].sum(dim=1).tolist() == [5, 5, 6]


def test_concatenated_lengths_longer_than_a_row_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to 7"):
        unpad_input_for_concatenated_sequences(rows(1, 6, 2), torch.tensor([[4, 3, 0, 0, 0, 0]]))


def test_rearrange_and_repeat_are_the_ones_of_einops() -> None:
    assert bert_padding.rearrange is einops.rearrange and bert_padding.repeat is einops.repeat


def test_without_gradients_nothing_is_told_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (IndexFirstAxis, IndexPutFirstAxis):
        monkeypatch.setattr(function, "apply", lambda *arguments: pytest.fail("autograd was told"))
    x = rows(3, 4, 5, requires_grad=True)
    with torch.no_grad():
        packed, indices, *_ = unpad_input(x, MASK)
        padded = pad_input(packed, indices, 3, 4)
    assert torch.equal(padded, x * MASK[..., None])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding_a_decode_step_is_the_zeros_and_one_copy(dtype: torch.dtype) -> None:
    values, indices = rows(3, 2, 5), torch.arange(3, dtype=dtype)
    with Counted() as counted:
        pad_input(values, indices, 3, 1)
    assert len(counted.operators - {"aten.view.default"}) == 2


def test_lengths_are_summed_once() -> None:
    with Counted() as counted:
        unpad_input(rows(3, 4, 5), MASK)
    assert counted["aten.sum.dim_IntList"] == 1


class Counted(TorchDispatchMode):
    """The operators that run in a block."""

    def __init__(self) -> None:
        super().__init__()
        self._found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._found[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def operators(self) -> set[str]:
        return set(self._found)

    def __getitem__(self, name: str) -> int:
        return self._found[name]
