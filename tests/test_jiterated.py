"""Kernels that take addresses: nothing reaches one that is not what it takes it for, whatever the caller's state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends import efficient_decode
from flash_attn_compat.backends.efficient_shares import Cut
from flash_attn_compat.engine import alibi, elementwise, jiterated
from flash_attn_compat.engine.elementwise import Sight
from flash_attn_compat.engine.mask import Mask
from tests import cuda_on_cpu

HALF = torch.float16


@pytest.fixture(params=cuda_on_cpu.devices())
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(jiterated, "_kept_places", lambda device: None)
    return torch.device("cpu")


# ---------------------------------------------------------------- what a launch is given

Launch = Callable[..., object]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="cpu")


def _prepared(used: Tensor, leftpad: Tensor, table: Tensor) -> object:
    q = torch.zeros(2, 2, 6, 16, dtype=HALF, device="cpu").to(used.device)
    return efficient_decode.prepare(q, 2, Cut(3, 4, 4, 5, 3, 6, used, leftpad, table))


TILE, ROW = (2, 1, 3, 2, 16), (2, 1, 3, 2, 1)
INT = torch.int32
LAUNCHES: dict[str, tuple[Launch, dict[str, Tensor]]] = {
    "peaks": (
        lambda products, first_keys: elementwise.peaks(products, Sight(5, first_keys=first_keys)),
        {"products": numbers(*TILE), "first_keys": numbers(2, dtype=torch.int64)},
    ),
    "weights": (
        lambda products, peak: elementwise.weights(products, peak, 0.5, 2.0, HALF, Sight(5)),
        {"products": numbers(*TILE), "peak": numbers(*ROW)},
    ),
    "gradients": (
        lambda products, dp, lse: elementwise.gradients(products, dp, lse, lse, 0.5, 2.0, HALF, Sight(5)),
        {"products": numbers(*TILE), "dp": numbers(*TILE), "lse": numbers(*ROW)},
    ),
    "finish": (
        lambda products, total, out, lse: elementwise.finish(products, total, total, 0.5, 2.0, out, lse),
        {"products": numbers(*TILE), "total": numbers(*ROW), "out": numbers(*TILE, dtype=HALF), "lse": numbers(2, 1, 3, 2)},
    ),
    "alibi_bias": (
        lambda slopes, shift, positions: elementwise.alibi_bias(slopes, shift, positions, 0, 16, HALF),
        {"slopes": numbers(1, 2, 1, 1), "shift": numbers(1, 2, 3, 1), "positions": numbers(3)},
    ),
    "band_bias": (
        lambda marks: elementwise.band_bias(marks, (2, 8, 24), 8, Mask(3, 5), HALF),
        {"marks": numbers(32, dtype=INT)},
    ),
    "prepare": (
        _prepared,
        {"used": numbers(2, dtype=INT), "leftpad": numbers(2, dtype=INT), "table": numbers(2, 3, dtype=INT)},
    ),
    "merge": (
        lambda out, lse, lengths: efficient_decode.merge(out, lse, lengths, (2, 2, 6, 16)),
        {"out": numbers(1, 36, 2, 16, dtype=HALF), "lse": numbers(6, 2, 32), "lengths": numbers(6, dtype=INT)},
    ),
}  # fmt: skip
# Those whose values PyTorch hands to the kernel, one for each thread; the kernel finds the others by their address.
VALUES = {"peak", "total", "slopes", "shift", "positions", ("gradients", "lse")}
# Of these the kernel is handed the strides.
STRIDED = {"table", ("finish", "lse")}
CASES = [(launch, name) for launch, (_, tensors) in LAUNCHES.items() for name in tensors]


def spoilt(launch: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    other = torch.float64 if tensor.is_floating_point() else torch.int16
    yield "another dtype", tensor.to(other)
    if name != "marks":  # beside which everything else is made
        yield "another device", tensor.to("meta")
    if {name, (launch, name)} & VALUES:
        return
    if name != "products":  # whose sizes the others are measured by
        yield "too few rows", tensor[: tensor.shape[0] // 2]
        yield "too short", tensor[..., : tensor.shape[-1] // 2]
    if not {name, (launch, name)} & STRIDED:
        yield "strided", tensor.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize(("launch", "name"), CASES)
def test_what_a_kernel_would_misread_is_refused_before_the_launch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, launch: str, name: str
) -> None:
    run, tensors = LAUNCHES[launch]
    tensors = {other: tensor.to(device) for other, tensor in tensors.items()}
    run(**tensors)
    monkeypatch.setattr(jiterated.Kernel, "_launch", lambda *arguments: pytest.fail("launched"))
    for how, tensor in spoilt(launch, name, tensors[name]):
        with pytest.raises(RuntimeError, match="must|expected|kernel"):
            run(**{**tensors, name: tensor})
            raise AssertionError(how)


def test_rows_that_are_read_16_bytes_at_a_time_begin_there(device: torch.device) -> None:
    memory = numbers(40).to(device)
    start = -(memory.data_ptr() // 4) % 4
    aligned, other = (memory[first : first + 32].view(1, 1, 2, 1, 16) for first in (start, start + 1))
    elementwise.peaks(aligned, Sight(5))
    with pytest.raises(RuntimeError, match="products must begin on 16 bytes"):
        elementwise.peaks(other, Sight(5))


def test_scalars_come_in_the_order_in_which_they_are_handed_over(device: torch.device) -> None:
    kernel = jiterated.Kernel(
        "template <typename T> T sum(T x, T first, T second) { return x + 2 * first + second; }", "first", "second"
    )
    assert kernel(HALF, numbers(1).to(device), first=1, second=5).item() == 8
    with pytest.raises(RuntimeError, match="order"):
        kernel(HALF, numbers(1).to(device), second=5, first=1)


# ---------------------------------------------------------------- the caller's state

TRIALS = (elementwise._tiles_are_right, elementwise._bias_is_right, efficient_decode._is_right)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES: dict[str, Callable[[torch.device], contextlib.AbstractContextManager[object]]] = {
    "default dtype fp16": lambda device: default_dtype(torch.float16),
    "default dtype bf16": lambda device: default_dtype(torch.bfloat16),
    "default dtype fp64": lambda device: default_dtype(torch.float64),
    "default device meta": lambda device: torch.device("meta"),
    "default device cpu": lambda device: torch.device("cpu"),
    "inference mode": lambda device: torch.inference_mode(),
    "no gradients": lambda device: torch.no_grad(),
    "autocast": lambda device: torch.autocast(device.type, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("state", STATES)
def test_a_trial_ends_the_same_in_every_state_of_the_callers(
    device: torch.device, state: str, trial: jiterated.Trial
) -> None:
    with STATES[state](device):
        assert jiterated._problem(device, HALF, trial) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64])
def test_a_keys_position_in_channels_is_exact_whatever_the_default_dtype(
    dtype: torch.dtype, default: torch.dtype
) -> None:
    seqlen_k = 4_000_000 if dtype == torch.float16 else 1_000_000
    positions = torch.arange(seqlen_k - 5000, seqlen_k)
    right = alibi.key_channels(positions, 0.125, seqlen_k, dtype)
    with default_dtype(default):
        assert torch.equal(alibi.key_channels(positions, 0.125, seqlen_k, dtype), right)
