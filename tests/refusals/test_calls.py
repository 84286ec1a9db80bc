"""Malformed and borderline calls: an error names the argument before anything is computed or written."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import flash_attn_interface, settings
from flash_attn_compat.core import checks, cuda_capture
from tests.forms.inputs import DENSE, PACKED, PROBLEMS, STEP, OnGpu, ints
from tests.forms.kinds import Operators
from verify.call import Call
from verify.examination import Examination
from verify.recorded import recorded_errors

# Of every function, with all that it may be given.
CALLS = {
    "dense": replace(DENSE, alibi="h").build(),
    "dense, keys and values in one": PROBLEMS["dense: keys and values in one"].build(),
    "dense, all in one": PROBLEMS["dense: all in one"].build(),
    "packed": replace(PACKED, alibi="h").build(),
    "packed, keys and values in one": PROBLEMS["packed: keys and values in one"].build(),
    "packed, all in one": PROBLEMS["packed: all in one"].build(),
    "pages": PROBLEMS["packed: pages"].build(),
    "private": replace(PACKED, kind="private_varlen", seqused=(5, 0, 30, 2), leftpad=(2, 0, 0, 1)).build(),
    "cache": replace(STEP, rotary_dim=16, alibi="h", batch_idx=True, leftpad=(2, 6)).build(),
    "cache over pages": replace(STEP, rotary_dim=16, page_size=8).build(),
}


def _wrong(call: Call) -> Iterator[tuple[str, Any]]:
    parameters = inspect.signature(getattr(flash_attn_interface, call.fn)).parameters
    for name, value in call.args.items():
        if isinstance(value, Tensor) or name.startswith("max_seqlen"):
            for wrong in ([0, 3, 7], 2.5) if parameters[name].default is None else (None, [0, 3, 7], 2.5):
                yield name, wrong


def _named(name: str) -> str:
    """Return an argument's name below the packed functions."""
    return {"cu_seqlens": "cu_seqlens_q", "max_seqlen": "max_seqlen_q"}.get(name, name)


def ask(call: Call, **changes: Any) -> None:
    getattr(flash_attn_interface, call.fn)(**call.args | changes)


@pytest.mark.parametrize("label", CALLS)
def test_arguments_of_a_wrong_type_are_refused_by_name(label: str) -> None:
    call = CALLS[label]
    before = [call.args[cache].clone() for cache in call.caches]
    for name, wrong in _wrong(call):
        with pytest.raises(RuntimeError, match=f"for argument '{_named(name)}' but instead found type"):
            ask(call, **{name: wrong})
    assert same(call, before)


def same(call: Call, before: list[Tensor]) -> bool:
    """Whether its caches are as they were."""
    return all(torch.equal(call.args[cache].nan_to_num(7), x.nan_to_num(7)) for cache, x in zip(call.caches, before))


NO_BOOLS = ("no", "", [True], object(), torch.ones(4, 4), numpy.ones(2))
NO_NUMBERS = ("x", [0.5], torch.ones(2), 1j)
# By the words of the error: values of a wrong type, and numbers that mean nothing.
WRONG_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "Expected a value of type 'bool' for argument 'causal'": {"causal": NO_BOOLS},
    "Expected a value of type 'float' for argument 'dropout_p'": {"dropout_p": (*NO_NUMBERS, None)},
    "Expected a value of type 'float' for argument 'softmax_scale'": {"softmax_scale": NO_NUMBERS},
    "Expected a value of type 'float' for argument 'softcap'": {"softcap": NO_NUMBERS},
    "dropout_p must be a probability": {"dropout_p": (-0.1, math.nan, -math.inf, numpy.float32(-1))},
    "Expected p_dropout < 1.f to be true": {"dropout_p": (1.0, 1, math.inf)},
    "softcap must be positive, or 0 for none": {"softcap": (-5.0, math.nan, math.inf, -2)},
    "window_size must be two integers": {"window_size": (None, 3, (1,), (1, 2, 3), ())},
    "for argument 'window_size_left'": {"window_size": ((0.5, 1), (None, 1), "ab")},
}
# What flash-attn takes, or callers write for none.
RIGHT_OPTIONS: dict[str, tuple[Any, ...]] = {
    "causal": (1, 0, None, 0.0, numpy.bool_(True), numpy.int64(1), torch.tensor(True), torch.tensor([0])),
    "dropout_p": (0, False, numpy.float32(0), torch.tensor(0.0), -0.0),
    "softmax_scale": (1, None, numpy.float32(0.5), torch.tensor(0.5), numpy.float64(0.25)),
    "softcap": (None, 0, -1, -1.0, 3, numpy.float32(2), torch.tensor(2.0)),
    "window_size": ([3, 1], torch.tensor([3, 1]), (numpy.int64(3), torch.tensor(1)), (-2, -7)),
}


def _options(table: dict[str, tuple[Any, ...]]) -> Iterator[tuple[Call, dict[str, Any]]]:
    for call in CALLS.values():
        parameters = inspect.signature(getattr(flash_attn_interface, call.fn)).parameters
        for name, values in table.items():
            yield from ((call, {name: value}) for value in values if name in parameters)


@pytest.mark.parametrize("words", WRONG_OPTIONS)
def test_an_option_that_means_nothing_is_refused_by_its_name(words: str) -> None:
    for call, changes in _options(WRONG_OPTIONS[words]):
        with pytest.raises((RuntimeError, TypeError)) as raised:
            ask(call, **changes)
        assert words in str(raised.value), (call.fn, changes)


@pytest.mark.parametrize("name", RIGHT_OPTIONS)
def test_an_option_in_any_form_that_flash_attn_takes_is_served(name: str) -> None:
    for call, changes in _options({name: RIGHT_OPTIONS[name]}):
        ask(call.to("cpu"), **changes)


# ---------------------------------------------------------------- values, where the host can see them


STARTS, LONGER, TABLE = ints(0, 5, 11), ints(0, 5, 14), ints([2, 0], [1, 3])
INDICES = {"cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "block_table", "cache_batch_idx"}
ROWS = {name: torch.randn(16, 2, 16) for name in "qkv"}
STEP_OVER_PAGES = {"q": torch.randn(2, 1, 2, 16), "block_table": TABLE, "cache_seqlens": ints(3, 9)}
NEW = {name: torch.ones(2, 6, 2, 16) for name in "kv"}


def packed(**changes: Any) -> Any:
    given = {**ROWS, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 16, "max_seqlen_k": 16, **changes}
    return flash_attn_interface.flash_attn_varlen_func(**given)


def packed_pages(**changes: Any) -> Any:
    pages = {"k": torch.zeros(4, 8, 2, 16), "v": torch.zeros(4, 8, 2, 16), "block_table": TABLE}
    return packed(**{**pages, "cu_seqlens_k": ints(0, 3, 15), **changes})


def cached(**changes: Any) -> Any:
    caches = {"k_cache": torch.zeros(4, 8, 2, 16), "v_cache": torch.zeros(4, 8, 2, 16)}
    try:
        return flash_attn_interface.flash_attn_with_kvcache(**{**caches, **STEP_OVER_PAGES, **changes})
    except RuntimeError:
        assert not any(cache.any() for cache in caches.values()), "written to"
        raise


def of_rows(**changes: Any) -> Any:
    rows = {"block_table": None, "cache_batch_idx": ints(0, 3), "cache_seqlens": ints(2, 1)}
    return cached(**{**rows, **changes})


# A call that is served, what of it is changed, and what is said then.
WRONG_VALUES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "lengths of queries": (packed, {"cu_seqlens_q": ints(5, 6, 5)}, r"cu_seqlens_q must start with 0, got \[5, 6, 5\]"),
    "lengths of keys": (packed, {"cu_seqlens_k": ints(5, 6, 5)}, "cu_seqlens_k must start with 0"),
    "lengths alone": (packed, {"cu_seqlens_q": ints(5, 11), "cu_seqlens_k": ints(5, 11)}, "start with 0, got .5, 11"),
    "starts that decrease": (packed, {"cu_seqlens_q": ints(0, 9, 5)}, "cu_seqlens_q must not decrease"),
    "too many queries": (packed, {"cu_seqlens_q": ints(0, 5, 17)}, "cu_seqlens_q must end within the 16 tokens of q"),
    "too many keys": (packed, {"cu_seqlens_k": ints(0, 5, 17)}, "cu_seqlens_k must end within the 16 tokens of k"),
    "one tensor of starts, fewer keys": (
        packed, {"k": ROWS["k"][:12], "v": ROWS["v"][:12], "cu_seqlens_q": LONGER, "cu_seqlens_k": LONGER},
        "cu_seqlens_k must end within the 12 tokens of k",
    ),
    "rows behind max_seqlen_q": (
        packed, {"cu_seqlens_q": LONGER, "max_seqlen_q": 8}, "max_seqlen_q must be at least .* is 9, got 8",
    ),
    "keys behind max_seqlen_k": (
        packed, {"cu_seqlens_k": LONGER, "max_seqlen_k": 8}, "max_seqlen_k must be at least .* is 9, got 8",
    ),
    "keys behind max_seqlen_k, starts of their own": (
        packed, {"cu_seqlens_k": ints(0, 3, 15), "max_seqlen_k": 11}, "max_seqlen_k must be at least .* is 12, got 11",
    ),
    "packed: no such page": (packed_pages, {"block_table": ints([2, 0], [1, 4])}, r"block_table\[1, 1\] must be one"),
    "packed: more keys than pages": (packed_pages, {"cu_seqlens_k": ints(0, 3, 20)}, "need up to 3 pages of 8 keys"),
    "packed: lengths of keys": (packed_pages, {"cu_seqlens_k": ints(3, 12, 15)}, "cu_seqlens_k must start with 0"),
    "no such page": (cached, {"block_table": ints([2, 0], [1, -1])}, r"block_table\[1, 1\] .* got -1"),
    "no such page, one length": (cached, {"block_table": ints([2, 0], [4, 1]), "cache_seqlens": 5}, "got 4"),
    "no such page, all lengths": (cached, {"block_table": ints([2, 9], [1, 1]), "cache_seqlens": None}, "got 9"),
    "no such page to append to": (
        cached, {"block_table": ints([2, 7], [1, 3]), **NEW}, r"block_table\[0, 1\]",
    ),
    "no such row": (of_rows, {"cache_batch_idx": ints(0, 4)}, r"cache_batch_idx must be below the kcache's 4 rows"),
    "no such row to append to": (of_rows, {"cache_batch_idx": ints(-1, 2), "cache_seqlens": 2, **NEW}, "got .-1, 2."),
}  # fmt: skip


@pytest.mark.parametrize("label", WRONG_VALUES)
def test_values_that_lead_outside_are_refused_before_anything_is_written(label: str) -> None:
    function, changes, words = WRONG_VALUES[label]
    for _ in range(2):  # also where a like call was kept
        with pytest.raises(RuntimeError, match=words):
            function(**changes)
        function(**{name: value for name, value in changes.items() if name not in INDICES})


def test_pages_that_no_key_needs_may_have_any_number() -> None:
    cached(block_table=ints([2, -1], [1, 3]))
    packed_pages(block_table=ints([2, 10**6], [1, 3]))


@pytest.mark.parametrize("debug", ["", "0", "1"])
def test_values_on_a_gpu_are_read_while_debugging_alone(debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.DEBUG, debug)
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda device: False)
    assert checks.may_read(ints(0, 5).as_subclass(OnGpu)) == (debug == "1")
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda device: True)
    assert not checks.may_read(ints(0, 5).as_subclass(OnGpu)) and checks.may_read(ints(0, 5))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("starts", "longest", "words"),
    [
        (STARTS, 2, "max_seqlen_q must be at least the longest sequence's length, which is 6"),
        (ints(5, 11), 16, "must start with 0"),
    ],
)
def test_wrong_lengths_are_found_on_a_gpu_while_debugging(
    starts: Tensor, longest: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: x.cuda() for name, x in (ROWS | {"cu_seqlens_q": starts, "cu_seqlens_k": starts}).items()}
    packed(**given, max_seqlen_q=longest)
    monkeypatch.setenv(settings.DEBUG, "1")
    with pytest.raises(RuntimeError, match=words):
        packed(**given, max_seqlen_q=longest)


@pytest.mark.parametrize("label", CALLS)
def test_heads_without_channels_are_refused(label: str) -> None:
    call = CALLS[label]
    narrow = {n: x[..., :0] for n, x in call.args.items() if n in ("q", "k", "v", "kv", "qkv", "k_cache", "v_cache")}
    with pytest.raises(RuntimeError, match="head_size must be at least 1"):
        ask(call, **narrow)


def apart(tensor: Tensor) -> Tensor:
    """The same with channels apart."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def heads_first(q: tuple[int, ...], k: tuple[int, ...]) -> dict[str, Tensor]:
    return {"q": torch.zeros(q), **dict.fromkeys(("k", "v"), torch.zeros(k)), "alibi_slopes": None}  # type: ignore[dict-item]


CACHE = CALLS["cache"].args
TRANSPOSED = r"look like \(batch_size, num_heads, seqlen, head_size\): transpose\(1, 2\)"
# What of a call is changed, and what is said then.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dense", heads_first((2, 8, 100, 64), (2, 2, 300, 64)), TRANSPOSED),
    ("dense", heads_first((2, 8, 1, 64), (2, 8, 300, 64)), r"transpose\(1, 2\) them"),
    ("dense", heads_first((2, 100, 3, 64), (2, 300, 2, 64)), r"\(batch_size, seqlen, num_heads, head_size\)"),
    ("dense", heads_first((2, 64, 8, 32), (2, 64, 3, 32)), r"got 3 and 8 of tensors [^\n]*\n  q: \(2, 64, 8, 32\)"),
    ("cache", {"q": torch.zeros(2, 3, 3, 32), "alibi_slopes": None}, "must divide number of heads in query"),
    ("packed", {"max_seqlen_q": 2**32}, "max_seqlen_q must be the longest"),
    ("packed", {"max_seqlen_k": 2**32}, "max_seqlen_k must be the longest"),
    *(("cache", {name: CACHE[name].to("meta")}, f"{name} must be on cpu")
      for name in ("cache_batch_idx", "rotary_cos", "rotary_sin", "k", "v")),
    ("cache", {"rotary_sin": None}, "If rotary cos is provided, rotary sin must also be provided"),
    ("cache", dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(40, 6)), "rotary dimensions divisible by 16"),
    ("cache", dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(40, 24)), "rotary_dim must be <= headdim"),
    ("cache", dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(40, 8).half()), "must have the same dtype as q"),
    ("cache", {"cache_leftpad": torch.tensor([1, 2])}, "leftpad_k must have dtype int32"),
    ("cache", {"cache_leftpad": ints(1, -2)}, r"cache_leftpad must not be negative, got \[1, -2\]"),
    ("cache", {"cache_leftpad": ints(1, -2), "cache_seqlens": 7}, "cache_leftpad must not be negative"),
    ("private", {"leftpad_k": ints(2, 0, -1, 1)}, "leftpad_k must not be negative"),
    ("cache", {"cache_batch_idx": torch.tensor([1, 0])}, "cache_batch_idx must have dtype int32"),
    ("cache", {"k": CACHE["k"].half()}, "Key must have the same dtype as query"),
    ("cache", {"v": CACHE["v"].half()}, "Value must have the same dtype as query"),
    ("cache", {"num_splits": 129}, "num_splits > 128 not supported"),
    ("cache", {"cache_seqlens": ints(7, 30)}, "exceeds the capacity"),
    ("cache over pages", {"cache_seqlens": ints(7, 30)}, "capacity addressable by block_table"),
    *(("cache over pages", {**dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin")), "cache_seqlens": lengths},
       r"max\(seqlens_k\) \+ seqlen_knew \(= 33\) exceeds the capacity addressable by block_table")
      for lengths in (33, ints(3, 33))),
    ("cache", {"k_cache": apart(CACHE["k_cache"])}, "k_cache must have contiguous last dimension"),
    ("cache", {"v_cache": apart(CACHE["v_cache"])}, "v_cache must have contiguous last dimension"),
    *((label, {"s_aux": s_aux, "alibi_slopes": None, **more}, words)
      for label in ("dense", "cache")
      for s_aux, more, words in (
          (torch.zeros(3), {}, r"shape \(nheads,\) = \(4,\), got torch.float32 of shape \(3,\)"),
          (torch.zeros(4, dtype=torch.int64), {}, "floating-point"),
          (0.5, {}, "got float"),
          (torch.zeros(4, device="meta"), {}, "on q's device"),
          (torch.zeros(4), {"alibi_slopes": torch.ones(4)}, "alibi_slopes cannot be combined"),
      )),
]  # fmt: skip


@pytest.mark.parametrize(("label", "changes", "words"), REFUSED)
def test_mismatched_arguments_are_refused_before_any_write(label: str, changes: dict[str, Any], words: str) -> None:
    call = CALLS[label]
    before = [call.args[cache].clone() for cache in call.caches]
    # flash-attn asserts what its Python function looks at itself.
    with pytest.raises(AssertionError if "contiguous" in words else RuntimeError, match=words):
        ask(call, **changes)
    assert same(call, before)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(n, 2, 16) for n in (3, 5)], layout=layout)


NOT_DENSE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "jagged": (lambda: nested(torch.jagged), "a nested one"),
    "nested": (lambda: nested(torch.strided), "a nested one"),
    "coo": (lambda: torch.zeros(2, 5, 2, 16).to_sparse(), "layout torch.sparse_coo"),
    "csr": (lambda: torch.zeros(9, 16).to_sparse_csr(), "layout torch.sparse_csr"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.parametrize("label", CALLS)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, Operators])
def test_sparse_and_nested_tensors_are_named_under_a_mode_too(mode: Callable[[], Any], label: str, kind: str) -> None:
    make, words = NOT_DENSE[kind]
    for name, value in CALLS[label].args.items():
        if isinstance(value, Tensor):
            named = {"cache_seqlens": "(cache_seqlens|seqlens_k)", "cache_leftpad": "(cache_leftpad|leftpad_k)"}
            told = f"{named.get(name, _named(name))} must be a dense tensor, got {words}"
            with pytest.raises(RuntimeError, match=told), mode():
                ask(CALLS[label], **{name: make()})


# ---------------------- the 34 calls recorded from flash-attn 2.8.3: what it rejects we reject, what it serves we serve

ANSWERED = recorded_errors()
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
DENSE_FN, VARLEN_FN, CACHE_FN = "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def dense(**changes: Any) -> Call:
    return Call(DENSE_FN, {**{name: half(1, 8, 2, 32) for name in "qkv"}, **changes})


def varlen(**changes: Any) -> Call:
    starts = {name: ints(0, 5, 12) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    given = {name: half(12, 2, 32) for name in "qkv"} | starts | {"max_seqlen_q": 7, "max_seqlen_k": 7}
    return Call(VARLEN_FN, given | changes)


def cache(paged: int = 0, **changes: Any) -> Call:
    """A decode call over a cache of 64 rows, or over four pages of `paged` rows; None takes an argument away."""
    caches = {name: half(4, paged, 2, 32) if paged else half(2, 64, 2, 32) for name in ("k_cache", "v_cache")}
    pages = {"block_table": ints(3, 1, 0, 2).view(2, 2)} if paged else {}
    given = {name: half(2, 1, 2, 32) for name in "qkv"} | caches | {"cache_seqlens": ints(7, 30)} | pages | changes
    return Call(CACHE_FN, {name: value for name, value in given.items() if value is not None})


def table(rows: int, columns: int = 16) -> torch.Tensor:
    return half(rows, columns).cos()


RECONSTRUCTED: dict[str, Call] = {
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
REJECTED = [name for name, answer in ANSWERED.items() if not answer.startswith("ok") and name not in EXTENSIONS]
SERVED = [name for name, answer in ANSWERED.items() if answer.startswith("ok") and name != NO_PROBABILITY]


def made(problem: Call) -> Any:
    return getattr(flash_attn_compat, problem.fn)(**problem.args)


def test_every_recorded_call_is_reconstructed():
    assert set(RECONSTRUCTED) == set(ANSWERED)
    assert len(REJECTED) + len(SERVED) + len(EXTENSIONS) == 34 - len([NO_PROBABILITY])


@pytest.mark.parametrize("name", REJECTED)
def test_a_malformed_call_is_rejected_with_the_official_type_and_words_before_anything_is_written(name):
    kind, _, sentence = ANSWERED[name].partition(": ")
    problem = RECONSTRUCTED[name].to("cpu") if RECONSTRUCTED[name].fn == CACHE_FN else RECONSTRUCTED[name]  # a copy
    with pytest.raises((RuntimeError, IndexError)) as raised:
        made(problem)
    assert all(torch.equal(problem.args[cache], RECONSTRUCTED[name].args[cache]) for cache in problem.caches)
    assert type(raised.value).__name__ == kind
    assert KEY_WORDS.get(name, sentence) in str(raised.value)


@pytest.mark.parametrize("name", SERVED)
def test_a_call_that_flash_attn_serves_comes_back_in_the_same_form(name):
    expected = json.loads(ANSWERED[name].removeprefix("ok: "))
    got = made(RECONSTRUCTED[name])
    form = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (got if isinstance(got, tuple) else [got])]
    assert form == (expected if isinstance(expected, list) else [expected])


@pytest.mark.parametrize("name", [*SERVED, *sorted(EXTENSIONS)])
def test_a_borderline_call_or_extension_is_answered_right(name):
    examination = Examination(RECONSTRUCTED[name])
    answer = examination.ask(getattr(flash_attn_compat, RECONSTRUCTED[name].fn))
    assert [check for check in examination.checks(answer) if not check.ok] == []
