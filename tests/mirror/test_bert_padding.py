"""bert_padding: kept tokens, restored padding, and gradients."""

import einops
import pytest
import torch

from flash_attn_compat import bert_padding
from flash_attn_compat.bert_padding import IndexFirstAxis, IndexPutFirstAxis, index_first_axis, pad_input, unpad_input
from tests.forms.inputs import randn

MASK = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])
KEPT = [0, 1, 9, 10, 11]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("hidden", [randn(3, 4, 2, 5), torch.arange(12).reshape(3, 4, 1)], ids=["floats", "integers"])
def test_unpad_input_returns_five_values_for_every_kind_of_mask(hidden: torch.Tensor, dtype: torch.dtype) -> None:
    """Unused tokens are packed but not counted as used, and those in both masks count once."""
    unused = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    for masks, kept, starts in (((MASK,), KEPT, [0, 2, 2, 5]), ((MASK, unused), [0, 1, 2, 7, 9, 10, 11], [0, 3, 4, 7])):
        packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(hidden, *(mask.to(dtype) for mask in masks))
        assert torch.equal(packed, hidden.flatten(0, 1)[kept]) and packed.dtype == hidden.dtype
        assert indices.dtype == torch.int64 and indices.tolist() == kept
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == starts
        assert type(max_seqlen) is int and max_seqlen == 3
        assert seqused.dtype == torch.int32 and seqused.tolist() == [2, 0, 3]
    assert bert_padding.rearrange is einops.rearrange and bert_padding.repeat is einops.repeat


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_pad_input_undoes_unpad_input_with_zeros_in_the_padding_and_gradients_of_kept_tokens(
    integers: torch.dtype,
) -> None:
    x = randn(3, 4, 2, dtype=torch.bfloat16).requires_grad_()
    indices = unpad_input(x, MASK)[1].to(integers)
    padded = pad_input(2 * index_first_axis(x.flatten(0, 1), indices), indices, 3, 4)
    assert padded.dtype == torch.bfloat16 and torch.equal(padded, 2 * x * MASK[:, :, None])
    weight = randn(3, 4, 2, dtype=torch.bfloat16) + 3
    padded.backward(weight)
    assert x.grad is not None and torch.equal(x.grad, 2 * weight * MASK[:, :, None])


def test_picking_and_putting_and_their_gradients() -> None:
    x = randn(4, 3).requires_grad_()
    index_first_axis(x, torch.tensor([1, 1])).sum().backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [0, 1, 0, 0]  # assigned rather than added

    picked, residual = bert_padding.index_first_axis_residual(x, torch.tensor([2, 0]))
    assert torch.equal(picked, x[[2, 0]]) and torch.equal(residual, x)
    # sum() hands an expanded gradient back: writing into it would corrupt it.
    (gradient,) = torch.autograd.grad(picked.sum() * 3 + residual.sum(), x)
    assert gradient[:, 0].tolist() == [4, 1, 4, 1]

    values, upstream = randn(2, 3).requires_grad_(), randn(5, 3) + 1
    out = bert_padding.index_put_first_axis(values, torch.tensor([3, 1]), 5)
    out.backward(upstream)
    assert torch.equal(out[[3, 1]], values) and out[[0, 2, 4]].abs().sum() == 0
    assert values.grad is not None and torch.equal(values.grad, upstream[[3, 1]])


def test_concatenated_sequences_are_split_by_their_lengths() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = randn(3, 6, 2).requires_grad_()
    packed, indices, cu_seqlens, max_seqlen = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    expected = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert indices.tolist() == expected
    assert torch.equal(packed, x.flatten(0, 1)[expected])
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert type(max_seqlen) is int and max_seqlen == 6
    packed.sum().backward()
    assert x.grad is not None and x.grad[:, :, 0].sum(dim=1).tolist() == [5, 5, 6]


def test_without_gradients_nothing_is_told_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (IndexFirstAxis, IndexPutFirstAxis):
        monkeypatch.setattr(function, "apply", lambda *arguments: pytest.fail("autograd was told"))
    x = randn(3, 4, 5).requires_grad_()
    with torch.no_grad():
        packed, indices, *_ = unpad_input(x, MASK)
        padded = pad_input(packed, indices, 3, 4)
    assert torch.equal(padded, x * MASK[..., None])
