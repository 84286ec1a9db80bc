"""What is no tensor or no integer: an error that names the argument, before anything is computed or written."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_interface
from tests.problems import DENSE, PACKED, PROBLEMS, STEP
from verify.call import Call

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
}


def _cases() -> Iterator[Any]:
    for label, call in CALLS.items():
        parameters = inspect.signature(getattr(flash_attn_interface, call.fn)).parameters
        for name, value in call.args.items():
            if isinstance(value, Tensor) or name.startswith("max_seqlen"):
                for wrong in ([0, 3, 7], 2.5) if parameters[name].default is None else (None, [0, 3, 7], 2.5):
                    yield pytest.param(call, name, wrong, id=f"{label}-{name}-{wrong}")


def _named(name: str) -> str:
    """What the argument is called below the packed functions."""
    return {"cu_seqlens": "cu_seqlens_q", "max_seqlen": "max_seqlen_q"}.get(name, name)


def ask(call: Call, **changes: Any) -> None:
    getattr(flash_attn_interface, call.fn)(**call.args | changes)


@pytest.mark.parametrize(("call", "name", "wrong"), list(_cases()))
def test_what_is_no_tensor_and_no_integer_is_refused_by_its_name(call: Call, name: str, wrong: Any) -> None:
    before = [call.args[cache].clone() for cache in call.caches]
    with pytest.raises(RuntimeError, match=f"for argument '{_named(name)}' but instead found type"):
        ask(call, **{name: wrong})
    assert all(torch.equal(call.args[cache].nan_to_num(7), x.nan_to_num(7)) for cache, x in zip(call.caches, before))


@pytest.mark.parametrize("label", CALLS)
def test_the_same_calls_are_served_with_what_they_ask_for(label: str) -> None:
    ask(CALLS[label].to("cpu"))


@pytest.mark.parametrize("window", [None, 3, (1,), (1, 2, 3)])
def test_a_window_of_other_than_two_numbers_is_refused_by_its_name(window: Any) -> None:
    with pytest.raises(TypeError, match="window_size must be two integers"):
        ask(CALLS["dense"], window_size=window)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_a_longest_length_that_no_kernel_could_count_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} must be the longest"):
        ask(CALLS["packed"], **{name: 2**32})


@pytest.mark.parametrize("name", ["cache_batch_idx", "rotary_cos", "rotary_sin", "k", "v"])
def test_a_tensor_on_another_device_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} must be on cpu"):
        ask(CALLS["cache"], **{name: CALLS["cache"].args[name].to("meta")})
