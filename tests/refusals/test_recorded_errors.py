"""The 34 malformed or borderline calls recorded from flash-attn 2.8.3.

What it rejects as malformed we reject with the same exception type and key words, before anything is written. What it
serves we serve, but for one that can only be a mistake. What it rejects only for lack of a kernel we serve, and right.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import flash_attn_compat
from tests.forms.inputs import ints
from verify.call import Call
from verify.examination import Examination
from verify.recorded import recorded_errors

RECORDED = recorded_errors()
EXTENSIONS = {
    "float32", "cpu_tensor", "head_dim_264", "v_headdim_differs", "dropout_with_softcap", "empty_q", "page_size_100",
}  # fmt: skip
# Where flash-attn's sentence names its own expression or device, the words of it that count.
KEY_WORDS = {
    "three_dims": "Dimension out of range",
    "dropout_1": "p_dropout < 1",
    "alibi_shape": "Expected alibi_slopes.sizes() ==",
    "cu_cpu": "cu_seqlens_q must be on",
    "varlen_4d": "This looks like a batch",  # flash-attn speaks of multiples of 8, which it is
}
NO_PROBABILITY = "dropout_negative"  # which flash-attn takes for none
DENSE, VARLEN, CACHE = "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def dense(**changes: Any) -> Call:
    return Call(DENSE, {**{name: half(1, 8, 2, 32) for name in "qkv"}, **changes})


def varlen(**tensors: Any) -> Call:
    given = {
        **{name: half(12, 2, 32) for name in "qkv"},
        "cu_seqlens_q": ints(0, 5, 12),
        "cu_seqlens_k": ints(0, 5, 12),
        **tensors,
    }
    return Call(VARLEN, given | {"max_seqlen_q": 7, "max_seqlen_k": 7})


def cache(paged: int = 0, **tensors: Any) -> Call:
    """A decode call over a cache of 64 rows, or over four pages of `paged` rows; None takes an argument away."""
    shape = (4, paged, 2, 32) if paged else (2, 64, 2, 32)
    given = {
        "q": half(2, 1, 2, 32),
        "k_cache": half(*shape),
        "v_cache": half(*shape),
        "k": half(2, 1, 2, 32),
        "v": half(2, 1, 2, 32),
        "cache_seqlens": ints(7, 30),
        **({"block_table": ints(3, 1, 0, 2).view(2, 2)} if paged else {}),
        **tensors,
    }
    return Call(CACHE, {name: tensor for name, tensor in given.items() if tensor is not None})


def table(rows: int, columns: int = 16) -> torch.Tensor:
    return half(rows, columns).cos()


CALLS: dict[str, Call] = {
    "float32": dense(**{name: half(1, 8, 2, 32).float() for name in "qkv"}),
    "mixed_dtype": dense(k=half(1, 8, 2, 32).bfloat16()),
    "cpu_tensor": dense(),
    "head_dim_264": dense(**{name: half(1, 8, 2, 264) for name in "qkv"}),
    "heads_not_divisible": dense(q=half(1, 8, 3, 32)),
    "batch_mismatch": dense(k=half(2, 8, 2, 32), v=half(2, 8, 2, 32)),
    "kv_len_mismatch": dense(v=half(1, 9, 2, 32)),
    "v_headdim_differs": dense(v=half(1, 8, 2, 64)),
    "qk_headdim_differs": dense(k=half(1, 8, 2, 64), v=half(1, 8, 2, 64)),
    "three_dims": dense(**{name: half(8, 2, 32) for name in "qkv"}),
    "dropout_with_softcap": dense(dropout_p=0.1, softcap=10.0, return_attn_probs=True),
    "dropout_1": dense(dropout_p=1.0),
    "dropout_negative": dense(dropout_p=-0.1),
    "alibi_fp16": dense(alibi_slopes=half(2).abs()),
    "alibi_shape": dense(alibi_slopes=half(3).abs().float()),
    "empty_q": dense(q=half(1, 0, 2, 32)),
    "empty_k": dense(k=half(1, 0, 2, 32), v=half(1, 0, 2, 32)),
    "batch_0": dense(**{name: half(0, 8, 2, 32) for name in "qkv"}),
    "cu_int64": varlen(cu_seqlens_q=ints(0, 5, 12).long(), cu_seqlens_k=ints(0, 5, 12).long()),
    "cu_cpu": varlen(cu_seqlens_q=ints(0, 5, 12).to("meta"), cu_seqlens_k=ints(0, 5, 12).to("meta")),
    "cu_len_mismatch": varlen(cu_seqlens_k=ints(0, 3, 5, 12)),
    "cu_noncontig": varlen(cu_seqlens_q=ints(0, 0, 5, 5, 12, 12)[::2]),
    "varlen_4d": varlen(**{name: half(1, 12, 2, 32) for name in "qkv"}),
    "qkv_wrong_3": Call("flash_attn_qkvpacked_func", {"qkv": half(1, 8, 2, 2, 32)}),
    "page_size_100": cache(paged=100),
    "page_with_batch_idx": cache(paged=256, cache_batch_idx=ints(0, 1)),
    "rotary_without_new_k": cache(k=None, v=None, rotary_cos=table(64), rotary_sin=table(64)),
    "rotary_short": cache(rotary_cos=table(40), rotary_sin=table(40)),
    "new_k_without_v": cache(v=None),
    "new_k_without_len": cache(cache_seqlens=None),
    "cache_len_int64": cache(cache_seqlens=ints(7, 30).long()),
    "leftpad_paged": cache(paged=256, cache_leftpad=ints(1, 2)),
    "probs_without_dropout": dense(return_attn_probs=True),
    "window_minus_2": dense(window_size=(-2, -2)),
}
REJECTED = [name for name, answer in RECORDED.items() if not answer.startswith("ok") and name not in EXTENSIONS]
SERVED = [name for name, answer in RECORDED.items() if answer.startswith("ok") and name != NO_PROBABILITY]


def call(problem: Call) -> Any:
    return getattr(flash_attn_compat, problem.fn)(**problem.args)


def test_every_recorded_call_is_reconstructed():
    assert set(CALLS) == set(RECORDED)
    assert len(REJECTED) + len(SERVED) + len(EXTENSIONS) == 34 - len([NO_PROBABILITY])


@pytest.mark.parametrize("name", REJECTED)
def test_a_malformed_call_is_rejected_with_the_official_type_and_words_before_anything_is_written(name):
    kind, _, sentence = RECORDED[name].partition(": ")
    problem = CALLS[name].to("cpu") if CALLS[name].fn == CACHE else CALLS[name]  # a copy
    with pytest.raises((RuntimeError, IndexError)) as raised:
        call(problem)
    assert all(torch.equal(problem.args[cache], CALLS[name].args[cache]) for cache in problem.caches)
    assert type(raised.value).__name__ == kind
    assert KEY_WORDS.get(name, sentence) in str(raised.value)


@pytest.mark.parametrize("name", SERVED)
def test_a_call_that_flash_attn_serves_comes_back_in_the_same_form(name):
    expected = json.loads(RECORDED[name].removeprefix("ok: "))
    got = call(CALLS[name])
    form = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (got if isinstance(got, tuple) else [got])]
    assert form == (expected if isinstance(expected, list) else [expected])


@pytest.mark.parametrize("name", [*SERVED, *sorted(EXTENSIONS)])
def test_a_borderline_call_or_extension_is_answered_right(name):
    examination = Examination(CALLS[name])
    answer = examination.ask(getattr(flash_attn_compat, CALLS[name].fn))
    assert [check for check in examination.checks(answer) if not check.ok] == []
