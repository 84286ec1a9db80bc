"""What is no tensor or no integer: an error that names the argument, before anything is computed or written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flash_attn_compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn_compat.flash_attn_interface import _flash_attn_varlen_forward
from tests.support import cumulative, randn

STARTS = cumulative(3, 4)
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)
DENSE = {name: randn(2, 5, 2, 16, seed=n) for n, name in enumerate("qkv")}
PACKED = {name: randn(7, 2, 16, seed=n) for n, name in enumerate("qkv")}
LENGTHS = dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, max_seqlen_q=4, max_seqlen_k=4)
PAGES = {name: randn(2, 8, 2, 16, seed=n) for n, name in enumerate("kv")}
PRIVATE = dict(dropout_p=0.0, softmax_scale=0.25, causal=True, seqused_k=TABLE[:, 0], leftpad_k=TABLE[:, 0])
CALLS: list[tuple[Any, dict[str, Any], list[str]]] = [
    (flash_attn_func, DENSE | dict(alibi_slopes=torch.ones(2)), ["q", "k", "v", "alibi_slopes"]),
    (flash_attn_qkvpacked_func, dict(qkv=randn(2, 5, 3, 2, 16)), ["qkv"]),
    (flash_attn_kvpacked_func, dict(q=DENSE["q"], kv=randn(2, 5, 2, 2, 16)), ["q", "kv"]),
    (flash_attn_varlen_func, PACKED | LENGTHS, [*PACKED, *LENGTHS]),
    (
        flash_attn_varlen_qkvpacked_func,
        dict(qkv=randn(7, 3, 2, 16), cu_seqlens=STARTS, max_seqlen=4),
        ["qkv", "cu_seqlens", "max_seqlen"],
    ),
    (flash_attn_varlen_kvpacked_func, dict(q=PACKED["q"], kv=randn(7, 2, 2, 16)) | LENGTHS, ["kv", *LENGTHS]),
    (flash_attn_varlen_func, PACKED | LENGTHS | PAGES | dict(block_table=TABLE), ["block_table", "k", "v"]),
    (_flash_attn_varlen_forward, PACKED | LENGTHS | PRIVATE, ["seqused_k", "leftpad_k"]),
    (
        flash_attn_with_kvcache,
        dict(
            q=DENSE["q"], k_cache=randn(2, 40, 2, 16), v_cache=randn(2, 40, 2, 16), k=DENSE["k"], v=DENSE["v"],
            rotary_cos=randn(40, 8), rotary_sin=randn(40, 8), cache_seqlens=TABLE[:, 0], cache_batch_idx=TABLE[:, 0],
            cache_leftpad=torch.zeros(2, dtype=torch.int32), alibi_slopes=torch.ones(2),
        ),
        ["q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
         "cache_leftpad", "alibi_slopes"],
    ),
]  # fmt: skip
OPTIONAL = {"alibi_slopes", "block_table", "seqused_k", "leftpad_k", "rotary_cos", "rotary_sin", "cache_seqlens",
            "cache_batch_idx", "cache_leftpad"}  # fmt: skip


def _cases() -> Iterator[Any]:
    for function, arguments, names in CALLS:
        optional = OPTIONAL | ({"k", "v"} if function is flash_attn_with_kvcache else set())
        for name in names:
            for wrong in ([0, 3, 7], 2.5) if name in optional else (None, [0, 3, 7], 2.5):
                yield pytest.param(function, arguments, name, wrong, id=f"{function.__name__}-{name}-{wrong}")


def _named(name: str) -> str:
    """What the argument is called below the packed functions."""
    return {"cu_seqlens": "cu_seqlens_q", "max_seqlen": "max_seqlen_q"}.get(name, name)


@pytest.mark.parametrize(("function", "arguments", "name", "wrong"), list(_cases()))
def test_what_is_no_tensor_and_no_integer_is_refused_by_its_name(
    function: Any, arguments: dict[str, Any], name: str, wrong: Any
) -> None:
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(RuntimeError, match=f"for argument '{_named(name)}' but instead found type"):
        function(**arguments | {name: wrong})
    assert all(torch.equal(arguments[key], value) for key, value in before.items())


@pytest.mark.parametrize(("function", "arguments"), [call[:2] for call in CALLS])
def test_the_same_calls_are_served_with_what_they_ask_for(function: Any, arguments: dict[str, Any]) -> None:
    function(**{key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()})


@pytest.mark.parametrize("window", [None, 3, (1,), (1, 2, 3)])
def test_a_window_of_other_than_two_numbers_is_refused_by_its_name(window: Any) -> None:
    with pytest.raises(TypeError, match="window_size must be two integers"):
        flash_attn_func(**DENSE, window_size=window)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_a_longest_length_that_no_kernel_could_count_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} must be the longest"):
        flash_attn_varlen_func(**PACKED | LENGTHS | {name: 2**32})


@pytest.mark.parametrize("name", ["cache_batch_idx", "rotary_cos", "rotary_sin", "k", "v"])
def test_a_tensor_on_another_device_is_refused_by_its_name(name: str) -> None:
    function, arguments, _ = CALLS[-1]
    with pytest.raises(RuntimeError, match=f"{name} must be on cpu"):
        function(**arguments | {name: arguments[name].to("meta")})
