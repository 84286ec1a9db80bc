"""Packed sequences of many lengths, paged keys, seqused_k and leftpad_k, one promise per test."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn_compat.flash_attn_interface import _flash_attn_varlen_forward
from tests.support import check_against_oracle, close, cumulative, on_backend, on_general_backends, randn


def packed(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], h: int = 2, hk: int = 2, d: int = 16, spare: int = 0
) -> dict[str, Any]:
    """q, k, v and their lengths; `spare` more tokens belong to no sequence."""
    return dict(
        q=randn(sum(lengths_q) + spare, h, d, seed=1),
        k=randn(sum(lengths_k) + spare, hk, d, seed=2),
        v=randn(sum(lengths_k) + spare, hk, d, seed=3),
        cu_seqlens_q=cumulative(*lengths_q), cu_seqlens_k=cumulative(*lengths_k),
        max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k),
    )  # fmt: skip


def one_by_one(args: dict[str, Any], **kwargs: Any) -> Tensor:
    """The dense answer of each sequence alone, packed again."""
    q, k, v = args["q"], args["k"], args["v"]
    cu_q, cu_k = args["cu_seqlens_q"].tolist(), args["cu_seqlens_k"].tolist()
    outs = []
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        outs.append(flash_attn_func(q[None, rows], k[None, keys], v[None, keys], **kwargs)[0])
    return torch.cat(outs)


@on_general_backends
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        dict(causal=True),
        dict(window_size=(3, 1)),
        dict(window_size=(2, -1)),
        dict(causal=True, window_size=(4, 0)),
        dict(softcap=2.0),
        dict(alibi_slopes=torch.tensor([0.3, 0.1]), causal=True),
    ],
)
def test_every_sequence_is_attended_by_itself_and_aligned_by_its_own_lengths(backend: str, kwargs: Any) -> None:
    args = packed((5, 17, 1, 9), (9, 4, 30, 9))
    close(on_backend(backend, flash_attn_varlen_func, **args, **kwargs), one_by_one(args, **kwargs))
    check_against_oracle(backend, "flash_attn_varlen_func", args | kwargs)


@on_general_backends
def test_a_sequence_without_keys_gives_zero_rows_and_plus_inf_lse(backend: str) -> None:
    args = packed((3, 4, 2), (5, 0, 2))
    out, lse, _ = on_backend(backend, flash_attn_varlen_func, **args, return_attn_probs=True)
    assert not out[3:7].any() and (lse[:, 3:7] == torch.inf).all()
    assert out[:3].any() and lse[:, :3].isfinite().all()
    check_against_oracle(backend, "flash_attn_varlen_func", args)


@on_general_backends
def test_a_sequence_without_queries_gets_zero_key_gradients(backend: str) -> None:
    args = packed((3, 0, 2), (5, 4, 2))
    k, v = args["k"].requires_grad_(), args["v"].requires_grad_()
    dk, dv = torch.autograd.grad(on_backend(backend, flash_attn_varlen_func, **args).sum(), (k, v))
    assert not dk[5:9].any() and not dv[5:9].any() and dv[:5].any()


@on_general_backends
def test_no_keys_at_all_give_zero_and_plus_inf_lse(backend: str) -> None:
    out, lse, _ = on_backend(backend, flash_attn_varlen_func, **packed((3, 2), (0, 0)), return_attn_probs=True)
    assert not out.any() and (lse == torch.inf).all() and lse.shape == (2, 5)


@on_general_backends
def test_no_queries_at_all_give_an_empty_output(backend: str) -> None:
    out, lse, _ = on_backend(backend, flash_attn_varlen_func, **packed((0, 0), (3, 2)), return_attn_probs=True)
    assert out.shape == (0, 2, 16) and lse.shape == (2, 0)


@on_general_backends
def test_the_lse_is_by_head_and_token(backend: str) -> None:
    _, lse, _ = on_backend(backend, flash_attn_varlen_func, **packed((3, 4), (3, 4), h=4), return_attn_probs=True)
    assert lse.shape == (4, 7) and lse.dtype == torch.float32 and lse.is_contiguous()


@on_general_backends
def test_tokens_outside_every_sequence_give_zeros_even_if_they_hold_nan(backend: str) -> None:
    args = packed((3, 4), (5, 2), spare=3)
    args["cu_seqlens_q"], args["cu_seqlens_k"] = args["cu_seqlens_q"] + 1, args["cu_seqlens_k"] + 1
    leaves = [args[n].requires_grad_() for n in ("q", "k", "v")]
    with torch.no_grad():
        for leaf in leaves:
            leaf[0], leaf[-2:] = torch.nan, torch.nan
    out = on_backend(backend, flash_attn_varlen_func, **args)
    grads = torch.autograd.grad(out.sum(), leaves)
    for tensor in (out, *grads):
        assert not tensor[0].any() and not tensor[-2:].any() and tensor.isfinite().all()


@on_general_backends
def test_a_nan_in_one_sequence_stays_in_that_sequence(backend: str) -> None:
    args = packed((4, 1, 3), (4, 2, 3))
    leaves = [args[n].requires_grad_() for n in ("q", "k", "v")]
    with torch.no_grad():
        args["q"][3], args["k"][2], args["v"][0] = torch.nan, torch.nan, torch.nan
    out = on_backend(backend, flash_attn_varlen_func, **args)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert out[:4].isnan().any()
    for tensor in (out, *grads):
        assert tensor[4:].isfinite().all()


@on_general_backends
def test_max_seqlen_may_be_a_0_dim_tensor(backend: str) -> None:
    args = packed((3, 9), (5, 2))
    tensors = args | {n: torch.tensor(args[n]) for n in ("max_seqlen_q", "max_seqlen_k")}
    assert torch.equal(
        on_backend(backend, flash_attn_varlen_func, **tensors), on_backend(backend, flash_attn_varlen_func, **args)
    )


@on_general_backends
def test_a_max_seqlen_larger_than_needed_changes_nothing(backend: str) -> None:
    args = packed((3, 9), (5, 2))
    close(
        on_backend(backend, flash_attn_varlen_func, **args | dict(max_seqlen_q=64, max_seqlen_k=200), causal=True),
        on_backend(backend, flash_attn_varlen_func, **args, causal=True),
    )


@on_general_backends
def test_gqa_decoding_of_packed_rows_works_with_an_empty_row_among_them(backend: str) -> None:
    check_against_oracle(backend, "flash_attn_varlen_func", packed((1, 0, 1), (5, 3, 8), h=6, hk=2))


@on_general_backends
def test_many_tiny_sequences(backend: str) -> None:
    lengths = tuple(1 + i % 4 for i in range(150))
    check_against_oracle(backend, "flash_attn_varlen_func", packed(lengths, lengths, d=8) | dict(causal=True))


@on_general_backends
@pytest.mark.parametrize("lengths", [(700, 3, 650, 1, 40, 40), (1, 1300, 600)])
def test_skewed_lengths(backend: str, lengths: tuple[int, ...]) -> None:
    args = packed(lengths, lengths, d=8, h=2, hk=1) | dict(causal=True, window_size=(400, 0))
    check_against_oracle(backend, "flash_attn_varlen_func", args)


@on_general_backends
def test_alibi_slopes_by_batch_belong_to_the_sequence_of_that_index(backend: str) -> None:
    slopes = torch.tensor([[0.1, 0.9], [2.0, 0.0], [0.4, 0.4]])
    check_against_oracle(backend, "flash_attn_varlen_func", packed((3, 6, 2), (8, 6, 5)) | dict(alibi_slopes=slopes))


@on_general_backends
def test_qkvpacked_returns_one_packed_gradient(backend: str) -> None:
    args = packed((3, 9), (3, 9))
    qkv = torch.stack([args["q"], args["k"], args["v"]], 1)
    out = on_backend(backend, flash_attn_varlen_qkvpacked_func, qkv, args["cu_seqlens_q"], 9, causal=True)
    close(out, one_by_one(args, causal=True))
    call = dict(qkv=qkv, cu_seqlens=args["cu_seqlens_q"], max_seqlen=9, causal=True)
    check_against_oracle(backend, "flash_attn_varlen_qkvpacked_func", call)


@on_general_backends
def test_kvpacked_returns_one_packed_gradient(backend: str) -> None:
    args = packed((3, 9), (7, 4), h=4)
    kv = torch.stack([args.pop("k"), args.pop("v")], 1)
    out = on_backend(backend, flash_attn_varlen_kvpacked_func, kv=kv, **args)
    close(out, one_by_one(args | dict(k=kv[:, 0], v=kv[:, 1])))
    check_against_oracle(backend, "flash_attn_varlen_kvpacked_func", args | dict(kv=kv))


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_int64_cu_seqlens_are_rejected_by_name(name: str) -> None:
    args = packed((3, 2), (3, 2))
    with pytest.raises(RuntimeError, match=f"{name} must have dtype int32"):
        flash_attn_varlen_func(**args | {name: args[name].long()})


def test_a_strided_cu_seqlens_is_rejected() -> None:
    args = packed((3, 2), (3, 2))
    strided = torch.stack([args["cu_seqlens_q"]] * 2, 1)[:, 0]
    with pytest.raises(RuntimeError, match="cu_seqlens_q must be contiguous"):
        flash_attn_varlen_func(**args | dict(cu_seqlens_q=strided))


# ---------------------------------------------------------------- pages


def paged(args: dict[str, Any], page: int) -> dict[str, Any]:
    """The same call with its keys spread over pages in reverse order; NaN and rubbish where nothing may be read."""
    cu = args["cu_seqlens_k"].tolist()
    counts = [-(-(b - a) // page) for a, b in itertools.pairwise(cu)]
    free = list(reversed(range(sum(counts) + 1)))
    table = torch.full((len(counts), max(counts) + 1), 10**6, dtype=torch.int32)
    pools = {n: args[n].new_full((sum(counts) + 1, page, *args[n].shape[1:]), torch.nan) for n in ("k", "v")}
    for b, count in enumerate(counts):
        for n in range(count):
            block, start = free.pop(0), cu[b] + n * page
            table[b, n] = block
            stop = min(start + page, cu[b + 1])
            for name, pool in pools.items():
                pool[block, : stop - start] = args[name][start:stop]
    return args | pools | dict(block_table=table)


@on_general_backends
@pytest.mark.parametrize("page", [256, 16, 5, 1])
def test_paged_keys_are_those_that_the_block_table_names(backend: str, page: int) -> None:
    args = packed((3, 9, 2), (37, 16, 1), h=4)
    close(
        on_backend(backend, flash_attn_varlen_func, **paged(args, page), causal=True),
        on_backend(backend, flash_attn_varlen_func, **args, causal=True),
    )


@on_general_backends
def test_sequences_may_share_a_page(backend: str) -> None:
    k, v, q = randn(1, 16, 2, 8, seed=1), randn(1, 16, 2, 8, seed=2), randn(4, 2, 8)
    lengths = dict(cu_seqlens_q=cumulative(2, 2), cu_seqlens_k=cumulative(16, 10), max_seqlen_q=2, max_seqlen_k=16)
    table = torch.zeros(2, 1, dtype=torch.int32)
    out = on_backend(backend, flash_attn_varlen_func, q, k, v, block_table=table, **lengths)
    for b, length in enumerate((16, 10)):
        close(out[2 * b : 2 * b + 2], flash_attn_func(q[None, 2 * b : 2 * b + 2], k[:, :length], v[:, :length])[0])


@on_general_backends
def test_paged_keys_may_end_in_the_middle_of_a_page_by_seqused_k(backend: str) -> None:
    args = packed((3, 2), (37, 16))
    used = torch.tensor([20, 3], dtype=torch.int32)
    out = private_forward(backend, **paged(args, 16), seqused_k=used)
    short = args | dict(cu_seqlens_k=cumulative(20, 3), k=torch.cat([args["k"][:20], args["k"][37:40]]))
    short["v"] = torch.cat([args["v"][:20], args["v"][37:40]])
    close(out, one_by_one(short))


# ---------------------------------------------------------------- seqused_k and leftpad_k


def private_forward(backend: str, **kwargs: Any) -> Tensor:
    args = dict(dropout_p=0.0, softmax_scale=kwargs["q"].shape[-1] ** -0.5, causal=False) | kwargs
    return on_backend(backend, _flash_attn_varlen_forward, **args)[0]


@on_general_backends
def test_seqused_k_uses_the_first_keys_of_each_slice_and_realigns_the_mask(backend: str) -> None:
    args = packed((3, 4), (8, 9))
    used = torch.tensor([5, 0], dtype=torch.int32)
    args["k"][5:] = torch.nan  # never read
    out = private_forward(backend, **args, seqused_k=used, causal=True)
    close(out[:3], flash_attn_func(args["q"][None, :3], args["k"][None, :5], args["v"][None, :5], causal=True)[0])
    assert not out[3:].any()


@on_general_backends
def test_leftpad_k_skips_the_first_keys_of_each_slice(backend: str) -> None:
    args = packed((3, 4), (8, 9))
    args["v"][:2] = torch.nan
    out = private_forward(backend, **args, leftpad_k=torch.tensor([2, 9], dtype=torch.int32), causal=True)
    close(out[:3], flash_attn_func(args["q"][None, :3], args["k"][None, 2:8], args["v"][None, 2:8], causal=True)[0])
    assert not out[3:].any()


@on_general_backends
def test_seqused_k_is_counted_from_the_slice_and_leftpad_k_taken_off_it(backend: str) -> None:
    args = packed((3,), (8,))
    kwargs = dict(seqused_k=torch.tensor([6], dtype=torch.int32), leftpad_k=torch.tensor([2], dtype=torch.int32))
    out = private_forward(backend, **args, **kwargs)
    close(out, flash_attn_func(args["q"][None], args["k"][None, 2:6], args["v"][None, 2:6])[0])


def test_leftpad_k_with_a_block_table_is_rejected() -> None:
    args = paged(packed((3,), (8,)), 4)
    with pytest.raises(RuntimeError, match=r"[Pp]aged"):
        private_forward("chunked", **args, leftpad_k=torch.tensor([2], dtype=torch.int32))


def test_zero_tensors_marks_tokens_outside_every_sequence_with_minus_inf_lse() -> None:
    args = packed((3, 2), (4, 4), spare=2)
    out, lse, _, _ = _flash_attn_varlen_forward(
        **args, dropout_p=0.0, softmax_scale=0.25, causal=False, zero_tensors=True
    )
    assert not out[5:].any() and (lse[:, 5:] == -torch.inf).all() and lse[:, :5].isfinite().all()
