"""The three dense functions, one promise of the flash-attn 2.8 interface per test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from tests.support import check_against_oracle, close, on_backend, on_general_backends, qkv, randn
from verify import oracle


def visible_keys(backend: str, sq: int, sk: int, **kwargs: Any) -> list[list[int]]:
    """Which keys each row sees: equal scores and v = identity make the output the row's probabilities."""
    q, k = torch.zeros(1, sq, 1, 8), randn(1, sk, 1, 8)
    out = on_backend(backend, flash_attn_func, q, k, torch.eye(sk)[None, :, None], **kwargs)
    return [row.nonzero().flatten().tolist() for row in out[0, :, 0]]


# ---------------------------------------------------------------- masks


@on_general_backends
def test_causal_is_aligned_to_the_bottom_right_with_fewer_queries(backend: str) -> None:
    assert visible_keys(backend, 2, 5, causal=True) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]


@on_general_backends
def test_causal_is_aligned_to_the_bottom_right_with_more_queries(backend: str) -> None:
    assert visible_keys(backend, 5, 2, causal=True) == [[], [], [], [0], [0, 1]]


@on_general_backends
@pytest.mark.parametrize(
    ("window", "seen"),
    [
        ((1, 0), [[1, 2], [2, 3], [3, 4]]),
        ((0, 0), [[2], [3], [4]]),
        ((0, 1), [[2, 3], [3, 4], [4]]),
        ((-1, 0), [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]),
        ((1, -1), [[1, 2, 3, 4], [2, 3, 4], [3, 4]]),
        ((-1, 1), [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]),
        ((-2, -7), [[0, 1, 2, 3, 4]] * 3),
        ((100, 100), [[0, 1, 2, 3, 4]] * 3),
    ],
)
def test_a_window_counts_inclusively_from_each_rows_own_position(
    backend: str, window: tuple[int, int], seen: list[list[int]]
) -> None:
    assert visible_keys(backend, 3, 5, window_size=window) == seen


@on_general_backends
def test_an_unbounded_right_side_stays_unbounded_with_many_more_queries(backend: str) -> None:
    assert visible_keys(backend, 5, 2, window_size=(1, -1)) == [[0, 1], [0, 1], [0, 1], [0, 1], [0, 1]]


@on_general_backends
def test_causal_ignores_the_right_side_of_the_window(backend: str) -> None:
    assert visible_keys(backend, 3, 3, causal=True, window_size=(1, 2)) == [[0], [0, 1], [1, 2]]


@on_general_backends
@pytest.mark.parametrize(
    "window",
    [torch.tensor([1, 0]), (torch.tensor(1), torch.tensor(0)), [1, 0], (torch.tensor(1, dtype=torch.int32), 0)],
)
def test_window_size_may_be_tensors_or_a_list(backend: str, window: Any) -> None:
    assert visible_keys(backend, 3, 3, window_size=window) == [[0], [0, 1], [1, 2]]


def test_window_size_may_be_numpy_integers() -> None:
    np = pytest.importorskip("numpy")
    assert visible_keys("chunked", 3, 3, window_size=tuple(np.array([1, 0]))) == [[0], [0, 1], [1, 2]]


@pytest.mark.parametrize("window", [(1.5, 0.5), (None, None)])
def test_window_size_of_floats_or_none_is_rejected(window: Any) -> None:
    q, k, v = qkv()
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        flash_attn_func(q, k, v, window_size=window)


@on_general_backends
@pytest.mark.parametrize(
    "kwargs", [dict(causal=True), dict(window_size=(0, 0)), dict(window_size=(1, -5), causal=True)]
)
def test_a_fully_masked_row_gives_zero_and_plus_inf_lse(backend: str, kwargs: Any) -> None:
    q, k, v = qkv(sq=6, sk=2)
    out, lse, _ = on_backend(backend, flash_attn_func, q, k, v, return_attn_probs=True, **kwargs)
    assert (out[:, :4] == 0).all() and (lse[:, :, :4] == torch.inf).all()
    assert (out[:, 4:] != 0).any(-1).all() and lse[:, :, 4:].isfinite().all()


@on_general_backends
def test_a_fully_masked_row_sends_no_gradient(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(sq=6, sk=2))
    out = on_backend(backend, flash_attn_func, q, k, v, causal=True)
    dq, dk, dv = torch.autograd.grad(out[:, :4].sum(), (q, k, v))
    assert not dq.any() and not dk.any() and not dv.any()


# ---------------------------------------------------------------- empty inputs


@on_general_backends
def test_no_keys_give_zero_plus_inf_lse_and_zero_gradients(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(sk=0))
    out, lse, _ = on_backend(backend, flash_attn_func, q, k, v, return_attn_probs=True)
    assert out.shape == q.shape and not out.any() and (lse == torch.inf).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape] and not grads[0].any()


@on_general_backends
def test_no_queries_give_an_empty_output_and_zero_gradients(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(sq=0))
    out, lse, _ = on_backend(backend, flash_attn_func, q, k, v, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (2, 2, 0)
    _, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert dk.shape == k.shape and not dk.any() and not dv.any()


def test_a_batch_of_zero_is_rejected() -> None:
    with pytest.raises(RuntimeError, match="batch size must be positive"):
        flash_attn_func(*qkv(b=0))


# ---------------------------------------------------------------- scores


@on_general_backends
def test_query_heads_share_key_heads_in_consecutive_groups(backend: str) -> None:
    q, k, v = qkv(h=6, hk=2)
    shared = on_backend(backend, flash_attn_func, q, k, v)
    separate = on_backend(backend, flash_attn_func, q, k.repeat_interleave(3, 2), v.repeat_interleave(3, 2))
    close(shared, separate)


@on_general_backends
def test_key_and_value_gradients_are_summed_over_the_group(backend: str) -> None:
    q, k, v = qkv(h=6, hk=2)
    k, v = k.requires_grad_(), v.requires_grad_()
    dk, dv = torch.autograd.grad(on_backend(backend, flash_attn_func, q, k, v).square().sum(), (k, v))
    wide_k, wide_v = (x.detach().repeat_interleave(3, 2).requires_grad_() for x in (k, v))
    separate = torch.autograd.grad(
        on_backend(backend, flash_attn_func, q, wide_k, wide_v).square().sum(), (wide_k, wide_v)
    )
    for ours, wide in zip((dk, dv), separate, strict=True):
        close(ours, wide.unflatten(2, (2, 3)).sum(3), 8)


@on_general_backends
@pytest.mark.parametrize("d", [1, 5, 52, 264])
def test_the_default_scale_uses_the_true_head_dim(backend: str, d: int) -> None:
    q, k, v = qkv(d=d)
    close(
        on_backend(backend, flash_attn_func, q, k, v),
        on_backend(backend, flash_attn_func, q, k, v, softmax_scale=d**-0.5),
    )
    check_against_oracle(backend, "flash_attn_func", dict(q=q, k=k, v=v))


@on_general_backends
def test_softcap_caps_the_scaled_score_before_alibi_and_mask(backend: str) -> None:
    q, k, v = qkv(sq=9, sk=12)
    args = dict(q=20 * q, k=k, v=v, softcap=2.0, softmax_scale=0.7, causal=True, alibi_slopes=torch.tensor([0.5, 2.0]))
    check_against_oracle(backend, "flash_attn_func", args)


@on_general_backends
@pytest.mark.parametrize("softcap", [0.0, -3.0])
def test_softcap_is_off_unless_positive(backend: str, softcap: float) -> None:
    q, k, v = qkv()
    assert torch.equal(
        on_backend(backend, flash_attn_func, q, k, v, softcap=softcap), on_backend(backend, flash_attn_func, q, k, v)
    )


@on_general_backends
@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize(
    "kwargs", [{}, dict(causal=True), dict(window_size=(3, 2)), dict(causal=True, window_size=(3, 0))]
)
def test_alibi_lowers_scores_by_slope_times_distance(backend: str, per_batch: bool, kwargs: Any) -> None:
    q, k, v = qkv(sq=7, sk=11, h=4, hk=2)
    slopes = torch.rand((2, 4) if per_batch else (4,), generator=torch.Generator().manual_seed(0))
    check_against_oracle(backend, "flash_attn_func", dict(q=q, k=k, v=v, alibi_slopes=slopes, **kwargs))


def _alibi_lse_shift(backend: str, **kwargs: Any) -> Tensor:
    """Returned minus true LSE, (sq,), of a call with slope 0.5, sq = 3, sk = 5."""
    q, k, v = qkv(b=1, sq=3, sk=5, h=1)
    slopes = torch.tensor([0.5])
    _, lse, _ = on_backend(backend, flash_attn_func, q, k, v, alibi_slopes=slopes, return_attn_probs=True, **kwargs)
    i, j = torch.arange(3)[:, None] + 2, torch.arange(5)[None]
    scores = q[0, :, 0] @ k[0, :, 0].T / 4 - 0.5 * (i - j).abs()
    window = tuple(kwargs.get("window_size", (-1, -1)))
    seen = oracle.keys_visible(3, 5, kwargs.get("causal", False), window, "cpu")
    return (lse[0, 0] - scores.masked_fill(~seen, -torch.inf).logsumexp(-1)).round(decimals=4)


@on_general_backends
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(causal=True),
        dict(window_size=(-1, 0)),
        dict(causal=True, window_size=(5, 0)),
        dict(causal=True, window_size=(9, 9)),
    ],
)
def test_the_lse_of_pure_causal_alibi_carries_slope_times_position(backend: str, kwargs: Any) -> None:
    assert _alibi_lse_shift(backend, **kwargs).tolist() == [1.0, 1.5, 2.0]


@on_general_backends
@pytest.mark.parametrize("kwargs", [{}, dict(causal=True, window_size=(4, 0)), dict(window_size=(-1, 1))])
def test_the_lse_of_any_other_alibi_is_the_true_one(backend: str, kwargs: Any) -> None:
    assert _alibi_lse_shift(backend, **kwargs).tolist() == [0.0, 0.0, 0.0]


def test_alibi_slopes_get_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    slopes = torch.tensor([0.5, 1.0], requires_grad=True)
    flash_attn_func(q, k, v, alibi_slopes=slopes).sum().backward()
    assert slopes.grad is None and q.grad is not None


# ---------------------------------------------------------------- results


@on_general_backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_output_has_the_dtype_of_q(backend: str, dtype: torch.dtype) -> None:
    assert on_backend(backend, flash_attn_func, *qkv(dtype=dtype)).dtype == dtype


@on_general_backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_lse_is_fp32_contiguous_and_by_batch_head_row(backend: str, dtype: torch.dtype) -> None:
    _, lse, _ = on_backend(backend, flash_attn_func, *qkv(b=2, sq=5, h=3, dtype=dtype), return_attn_probs=True)
    assert lse.shape == (2, 3, 5) and lse.dtype == torch.float32 and lse.is_contiguous()


@on_general_backends
def test_without_dropout_s_dmask_is_an_empty_tensor(backend: str) -> None:
    returned = on_backend(backend, flash_attn_func, *qkv(dtype=torch.float16), return_attn_probs=True)
    assert isinstance(returned, tuple) and len(returned) == 3
    assert returned[2].shape == (0,) and returned[2].dtype == torch.float16


def test_only_the_output_is_returned_unless_asked() -> None:
    assert isinstance(flash_attn_func(*qkv()), Tensor)


@on_general_backends
def test_a_negative_dropout_is_none(backend: str) -> None:
    q, k, v = qkv()
    out, _, s_dmask = on_backend(backend, flash_attn_func, q, k, v, dropout_p=-0.5, return_attn_probs=True)
    assert torch.equal(out, on_backend(backend, flash_attn_func, q, k, v)) and s_dmask.shape == (0,)


@on_general_backends
@pytest.mark.parametrize("d", [16, 20])
@pytest.mark.parametrize("sliced", [False, True])
def test_the_output_is_contiguous_so_that_heads_can_be_viewed_as_one_dimension(
    backend: str, d: int, sliced: bool
) -> None:
    q, k, v = torch.stack(qkv(d=d), 2).unbind(2) if sliced else qkv(d=d)
    assert on_backend(backend, flash_attn_func, q, k, v).view(2, 7, 2 * d).shape == (2, 7, 2 * d)


@on_general_backends
def test_permuted_inputs_give_the_same_output(backend: str) -> None:
    q, k, v = qkv()
    permuted = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    close(on_backend(backend, flash_attn_func, *permuted), on_backend(backend, flash_attn_func, q, k, v))


@on_general_backends
def test_inputs_with_a_strided_last_dimension_are_accepted(backend: str) -> None:
    q, k, v = qkv()
    strided = tuple(torch.stack([x, x], -1)[..., 0] for x in (q, k, v))
    assert torch.equal(on_backend(backend, flash_attn_func, *strided), on_backend(backend, flash_attn_func, q, k, v))


@on_general_backends
def test_the_inputs_are_left_as_they_were(backend: str) -> None:
    inputs = [x.requires_grad_() for x in qkv(h=4, hk=2)]
    before = [x.detach().clone() for x in inputs]
    on_backend(backend, flash_attn_func, *inputs, causal=True).sum().backward()
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert [x._version for x in inputs] == [0, 0, 0]


@on_general_backends
def test_values_may_have_another_head_dim(backend: str) -> None:
    q, k, _ = qkv(h=4, hk=2)
    check_against_oracle(backend, "flash_attn_func", dict(q=q, k=k, v=randn(2, 7, 2, 33), causal=True))


@on_general_backends
def test_qkvpacked_takes_q_k_v_in_this_order_and_returns_one_packed_gradient(backend: str) -> None:
    packed = torch.stack(qkv(sq=9, sk=9), 2)
    out = on_backend(backend, flash_attn_qkvpacked_func, packed, causal=True)
    close(out, on_backend(backend, flash_attn_func, *packed.unbind(2), causal=True))
    check_against_oracle(backend, "flash_attn_qkvpacked_func", dict(qkv=packed, causal=True))


@on_general_backends
def test_kvpacked_takes_k_v_in_this_order_and_returns_one_packed_gradient(backend: str) -> None:
    q, k, v = qkv(sq=4, sk=9, h=4, hk=2)
    kv = torch.stack([k, v], 2)
    close(on_backend(backend, flash_attn_kvpacked_func, q, kv), on_backend(backend, flash_attn_func, q, k, v))
    check_against_oracle(backend, "flash_attn_kvpacked_func", dict(q=q, kv=kv))


# ---------------------------------------------------------------- longer than any tile

LONG = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(100, 40)),
    "narrow_causal_window": dict(causal=True, window_size=(3, 0)),
    "left_only": dict(window_size=(200, -1)),
    "right_only": dict(window_size=(-1, 100)),
    "softcap": dict(softcap=3.0, causal=True),
    "alibi": dict(alibi_slopes=torch.tensor([0.01, 0.3])),
    "alibi_causal": dict(alibi_slopes=torch.tensor([0.01, 0.3]), causal=True),
    "alibi_window": dict(alibi_slopes=torch.tensor([0.01, 0.3]), window_size=(300, 5)),
    "dropout": dict(dropout_p=0.2, causal=True),
}


@on_general_backends
@pytest.mark.parametrize("lengths", [(300, 1400), (1400, 300)], ids=["sq<sk", "sq>sk"])
@pytest.mark.parametrize("feature", LONG)
def test_sequences_longer_than_a_tile(backend: str, feature: str, lengths: tuple[int, int]) -> None:
    q, k, v = qkv(b=1, sq=lengths[0], sk=lengths[1], h=2, hk=1, d=8)
    check_against_oracle(backend, "flash_attn_func", dict(q=q, k=k, v=v, **LONG[feature]))
