"""What is kept of a call never answers for another: whatever differs gets the answer and the error of a first call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import (
    backend_counts,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    reset_backend_counts,
    use_backend,
)
from flash_attn_compat.backends.fused import launcher
from flash_attn_compat.engine import capture, signature
from flash_attn_compat.engine.build import Options, Packing, Purpose, dense_call, packed_call
from flash_attn_compat.flash_attn_interface import _flash_attn_forward
from flash_attn_compat.serving import dispatch
from tests import fused_on_cpu
from tests.support import randn

Arguments = dict[str, Any]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense() -> Arguments:
    shapes = {"q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 16)}
    return {name: randn(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def varlen() -> Arguments:
    q, k, v = (tensor.flatten(0, 1) for tensor in dense().values())
    lengths = {"cu_seqlens_q": ints(0, 5, 10), "cu_seqlens_k": ints(0, 7, 14), "max_seqlen_q": 5, "max_seqlen_k": 7}
    return {"q": q, "k": k, "v": v, **lengths}


def cache() -> Arguments:
    names = {"q": (2, 1, 4, 16), "k_cache": (3, 20, 2, 16), "v_cache": (3, 20, 2, 16)}
    names |= {"k": (2, 1, 2, 16), "v": (2, 1, 2, 16), "rotary_cos": (20, 8), "rotary_sin": (20, 8)}
    tensors = {name: randn(*shape, seed=seed) for seed, (name, shape) in enumerate(names.items())}
    return {**tensors, "cache_seqlens": ints(4, 9)}


def private() -> Arguments:
    return {
        **dense(), "dropout_p": 0.0, "softmax_scale": 0.3, "causal": False, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False,
    }  # fmt: skip


SLOPES = torch.tensor([0.5, 0.1, 0.3, 0.2])
OPTIONS: list[Arguments] = [
    {"softmax_scale": 0.5}, {"causal": True}, {"window_size": (2, 1)}, {"window_size": (1, 1)}, {"window_size": [2, 0]},
    {"softcap": 3.0}, {"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES.repeat(2, 1)},
    {"softmax_scale": torch.tensor(0.5)},
]  # fmt: skip
PROBABILITIES: list[Arguments] = [{"return_attn_probs": True}, {"dropout_p": 0.5}, {"deterministic": True}]
OF_DENSE: list[Arguments] = [
    {"q": randn(2, 6, 4, 16)}, {"k": randn(2, 7, 4, 16), "v": randn(2, 7, 4, 16)}, {"v": randn(2, 7, 2, 32)},
    {"q": randn(2, 5, 16, 4).transpose(2, 3)},
    {"q": randn(1 + 2 * 5 * 4 * 16)[1:].view(2, 5, 4, 16)}, {"q": randn(2, 5, 4, 16).requires_grad_()},
    {name: tensor.double() for name, tensor in dense().items()},
    {name: tensor.half() for name, tensor in dense().items()},
]  # fmt: skip
OF_VARLEN: list[Arguments] = [
    {"cu_seqlens_q": ints(0, 3, 10)}, {"cu_seqlens_k": ints(0, 9, 14), "max_seqlen_k": 9}, {"max_seqlen_q": 8},
    {"cu_seqlens_q": ints(0, 10), "cu_seqlens_k": ints(0, 14), "max_seqlen_q": 10, "max_seqlen_k": 14},
    {"max_seqlen_q": torch.tensor(5)}, {"q": randn(14, 4, 16), "cu_seqlens_q": ints(0, 7, 14), "max_seqlen_q": 7},
    {"k": randn(3, 4, 2, 16), "v": randn(3, 4, 2, 16), "block_table": ints(1, 0, 2, 1).view(2, 2),
     "cu_seqlens_k": ints(0, 7, 14)},
]  # fmt: skip
OF_CACHE: list[Arguments] = [
    {"cache_seqlens": ints(19, 0)}, {"cache_seqlens": 6}, {"cache_seqlens": 7}, {"rotary_interleaved": False},
    {"k": None, "v": None, "rotary_cos": None, "rotary_sin": None}, {"rotary_cos": None, "rotary_sin": None},
    {"cache_batch_idx": ints(2, 0)}, {"cache_leftpad": ints(1, 3)}, {"return_softmax_lse": True},
    {"k": randn(2, 2, 2, 16), "v": randn(2, 2, 2, 16)}, {"rotary_cos": randn(20, 16)[:, ::2]},
    {"cache_seqlens": 19}, {"cache_seqlens": 6, "k": None, "v": None, "rotary_cos": None, "rotary_sin": None},
    {"cache_seqlens": None, "k": None, "v": None, "rotary_cos": None, "rotary_sin": None},
    {"cache_seqlens": 6, "cache_leftpad": ints(1, 2)}, {"cache_seqlens": 7, "cache_leftpad": ints(1, 2)},
    {"block_table": ints(2, 0).unsqueeze(1)}, {"k": randn(2, 2, 1, 16).transpose(1, 2)},
    {"q": randn(1 + 2 * 4 * 16)[1:].view(2, 1, 4, 16)}, {"k": randn(1 + 2 * 2 * 16)[1:].view(2, 1, 2, 16)},
    {"rotary_cos": randn(1 + 20 * 8)[1:].view(20, 8)},
    {name: tensor.bfloat16() for name, tensor in cache().items() if name != "cache_seqlens"},
    # More rows than a step takes.
    *({"q": randn(2, 70, 4, 16), "cache_seqlens": lengths} | new for lengths in (6, 7, ints(4, 9), ints(5, 9))
      for new in ({}, dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin")))),
]  # fmt: skip
OF_PRIVATE: list[Arguments] = [{"window_size_left": 2, "window_size_right": 1}, {"causal": True}, {"softcap": 3.0}]
WRONG: dict[Callable[..., Any], list[Arguments]] = {
    flash_attn_func: [
        {"window_size": (1.0, 1)}, {"window_size": 3}, {"k": randn(2, 7, 3, 16)}, {"v": dense()["v"].double()},
        {"q": None}, {"k": torch.empty(2, 7, 2, 16, device="meta")},
        {"alibi_slopes": SLOPES[:3]}, {"alibi_slopes": SLOPES.double()}, {"softmax_scale": "wide"},
        {"dropout_p": 1.5}, {"softmax_scale": [1.0]},
    ],
    flash_attn_varlen_func: [
        {"cu_seqlens_q": ints(0, 5, 10).long()}, {"cu_seqlens_k": ints(0, 1, 7, 2, 14)[::2]}, {"max_seqlen_q": 5.0},
        {"cu_seqlens_k": ints(0, 14)}, {"cu_seqlens_q": [0, 5, 10]}, {"max_seqlen_k": 2**31},
    ],
    flash_attn_with_kvcache: [
        {"cache_seqlens": ints(4, 20)}, {"cache_seqlens": ints(4, -1)}, {"cache_seqlens": 20}, {"cache_seqlens": 4.0},
        {"cache_seqlens": ints(4, 9).long()}, {"num_splits": 200}, {"rotary_sin": None}, {"v": None},
        {"k": randn(2, 1, 2, 8)}, {"rotary_cos": randn(19, 8), "rotary_sin": randn(19, 8)}, {"window_size": (1.0, 1)},
        {"v_cache": cache()["v_cache"].bfloat16()}, {"rotary_sin": cache()["rotary_sin"].bfloat16()},
        {"k": cache()["k"].double()}, {"cache_leftpad": ints(1, 3).long()},
        {"v": torch.empty(2, 1, 2, 16, device="meta")},
    ],
}  # fmt: skip
BASES = {
    flash_attn_func: dense, flash_attn_varlen_func: varlen, flash_attn_with_kvcache: cache,
    _flash_attn_forward: private,
}  # fmt: skip
CHANGES = {
    flash_attn_func: OPTIONS + PROBABILITIES + OF_DENSE,
    flash_attn_varlen_func: OPTIONS + PROBABILITIES + OF_VARLEN,
    flash_attn_with_kvcache: OPTIONS + OF_CACHE,
    _flash_attn_forward: OF_PRIVATE,
}


def strided(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that lies in memory as ``tensor`` does."""
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    reach = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    memory = torch.empty(reach, dtype=dtype, device=tensor.device)
    return memory.as_strided(shape, stride, offset).copy_(tensor.detach())


def outcome(function: Callable[..., Any], arguments: Arguments) -> list[Any]:
    """What a call returns and what it writes into its cache, or its error."""
    copies = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            copies[name] = strided(value, value.dtype).requires_grad_(value.requires_grad)
    torch.manual_seed(0)
    try:
        found = function(**copies)
    except Exception as error:  # noqa: BLE001  whatever a first call raises
        return [type(error), str(error)]
    results = list(found) if isinstance(found, tuple) else [found]
    return [*results, results[0].requires_grad, copies.get("k_cache"), copies.get("v_cache")]


def same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(one, two)
    )


def check_warm(run: Callable[[Arguments], list[Any]], base: Arguments, changes: list[Arguments]) -> None:
    """Behind any other call, each call gives what it gave as the first one."""
    calls = [base | change for change in ({}, *changes)]
    expected = []
    for call in calls:
        signature._known.clear()
        dispatch._steps.clear()
        launcher.forget_plans()
        expected.append(run(call))
    assert len(signature._known) + len(dispatch._steps) <= 1
    for index in (*range(len(calls)), *reversed(range(len(calls))), 0):
        assert same(run(calls[index]), expected[index]), calls[index]
    assert len(signature._known) + len(dispatch._steps) > 1


@pytest.mark.parametrize("function", BASES)
def test_calls_that_differ_in_one_argument_get_answers_and_errors_of_their_own(function: Callable[..., Any]) -> None:
    changes = CHANGES[function] + WRONG.get(function, [])
    check_warm(lambda arguments: outcome(function, arguments), BASES[function](), changes)


def of_half(name: str, value: object) -> object:
    is_data = (
        isinstance(value, Tensor) and value.dtype == torch.float32 and name not in ("alibi_slopes", "softmax_scale")
    )
    return strided(value, torch.float16) if is_data and isinstance(value, Tensor) else value


@pytest.mark.parametrize("function", BASES)
def test_launches_are_those_of_a_first_call(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch)

    def launched(arguments: Arguments) -> list[Any]:
        before = len(launches.seen)
        reset_backend_counts()
        with torch.no_grad(), use_backend("fused"):
            try:
                function(**{name: of_half(name, value) for name, value in arguments.items()})
            except Exception as error:  # noqa: BLE001  whatever a first call raises
                return [type(error), str(error), sum(backend_counts().values())]
        seen = [
            (
                launch.variant,
                launch.blocks,
                {n: x > 2**32 or x for n, x in launch.fields.items() if not isinstance(x, tuple)},
            )
            for launch in launches.seen[before:]
        ]
        assert backend_counts() == {"fused": 1}
        return seen

    changes = CHANGES[function] + WRONG.get(function, [])
    # The device "meta" has the number of the GPU that is acted out.
    changes = [change for change in changes if not any(getattr(value, "is_meta", False) for value in change.values())]
    check_warm(launched, BASES[function](), changes)


@pytest.mark.parametrize("function", BASES)
def test_who_serves_is_asked_at_every_call(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def served(arguments: Arguments) -> str:
        reset_backend_counts()
        function(**arguments)
        return next(name for name, count in backend_counts().items() if count)

    base = BASES[function]()
    usual = served(base)
    assert usual != "reference"
    with use_backend("reference"):
        assert served(base) == "reference"
    assert served(base) == usual
    monkeypatch.setenv("FLASH_ATTN_COMPAT_BACKEND", "reference")
    assert served(base) == "reference"
    monkeypatch.delenv("FLASH_ATTN_COMPAT_BACKEND")
    assert served(base) == usual
    monkeypatch.setenv("FLASH_ATTN_COMPAT_BACKEND", "none such")
    with pytest.raises(ValueError, match="none such"):
        function(**base)


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache])
def test_a_tensor_whose_value_counts_is_not_kept(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    launches, scale = fused_on_cpu.record(monkeypatch), torch.tensor(0.5)
    arguments = {name: of_half(name, value) for name, value in BASES[function]().items()}
    with use_backend("fused"):
        function(**arguments, softmax_scale=scale)
        scale.fill_(2.0)
        count = len(launches.seen)
        function(**arguments, softmax_scale=scale)
    scales = [launch.fields["softmax_scale"] for launch in launches.seen]
    assert set(scales[:count]) == {0.5} and set(scales[count:]) == {2.0}


@pytest.mark.parametrize("field", Purpose._fields)
def test_calls_of_another_purpose_are_kept_apart(field: str) -> None:
    (q, k, v), starts = dense().values(), ints(0, 1, 2)
    for purpose in (Purpose(), Purpose(**{field: True}), Purpose()):
        calls = (
            dense_call(q, k, v, Options(), purpose),
            packed_call(q[0], k[0], v[0], Packing(starts, starts, 9, 9), Options(), purpose=purpose),
        )
        assert [getattr(call, field) for call in calls] == [getattr(purpose, field)] * 2


def test_packed_lengths_are_compared_at_every_call() -> None:
    q, starts = randn(10, 2, 16), ints(0, 5, 10)
    calls = [
        packed_call(q, q, q, Packing(starts, others, 7, 7), Options())
        for others in (ints(0, 5, 10), ints(0, 3, 10), ints(0, 5, 10))
    ]
    assert [call.equal_lengths for call in calls] == [True, False, True]
    assert calls[0].signature is calls[2].signature is not calls[1].signature


def test_a_decision_that_was_made_in_a_capture_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may not have been tried in it."""
    dispatch.forget_decisions()
    q = torch.randn(1, 5, 2, 16)
    for captures in (True, False):
        monkeypatch.setattr(capture, "is_capturing", lambda device, captures=captures: captures)
        flash_attn_func(q, q, q)
        assert bool(dispatch._decisions) != captures


def test_a_step_that_was_found_in_a_capture_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel may not have been tried."""
    fused_on_cpu.record(monkeypatch)
    arguments = {name: of_half(name, value) for name, value in cache().items()}
    for captures in (True, False):
        monkeypatch.setattr(capture, "is_capturing", lambda device, captures=captures: captures)
        with use_backend("fused"):
            flash_attn_with_kvcache(**arguments)
        assert bool(dispatch._steps) != captures


def test_nothing_is_kept_alive() -> None:
    signature._known.clear()
    arguments = cache()
    flash_attn_with_kvcache(**arguments)
    gone = [weakref.ref(value) for value in arguments.values()]
    arguments.clear()
    gc.collect()
    assert not [one for one in gone if one() is not None]


def test_no_more_is_kept_than_a_few_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "_known", {})
    monkeypatch.setattr(signature, "_MOST", 8)
    for length in range(1, 30):
        flash_attn_func(*(randn(1, length, 1, 8) for _ in range(3)))
        assert 0 < len(signature._known) <= 8


class Wrapped(Tensor):
    """A subclass may see shapes and memory its own way."""


def test_subclasses_of_tensors_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "_known", {})
    q, k, v = dense().values()
    flash_attn_func(q, k, v.as_subclass(Wrapped))
    flash_attn_varlen_func(**(varlen() | {"cu_seqlens_q": ints(0, 5, 10).as_subclass(Wrapped)}))
    torch.func.vmap(flash_attn_func)(*(tensor[None] for tensor in (q, k, v)))
    assert not signature._known
