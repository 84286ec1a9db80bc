"""The CUDA driver's calls, argument by argument, and what follows where it fails to load or launch a kernel."""

from __future__ import annotations

import ctypes
import functools
import struct
import warnings
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
from flash_attn_compat.backends import base
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import ContextLost, Kernel, KernelError
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, Hints, Kind, Sizes
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.launching import params
from flash_attn_compat.core import cuda_capture
from flash_attn_compat.dispatch import call_cache
from flash_attn_compat.private_interface import _flash_attn_backward, _flash_attn_varlen_forward
from tests.forms.inputs import ints, randn
from tests.forms.support import close
from tests.kernels import fused_on_cpu

SMALL = variants.forward(Kind(75, FP16, Sizes(64)))
TWO_BLOCKS = variants.forward(
    Kind(75, FP16, Sizes(128), hints=Hints(few_rows=True))
)  # of 32 KB each on a multiprocessor
LARGE = variants.forward(Kind(75, FP16, Sizes(256)))
PARAMS = struct.calcsize("@" + "".join(kind for _, kind in (*params.HEAD_FIELDS, *params.REST_FIELDS)))
STREAM = 2**40 + 64
OWN_CONTEXT, OTHER_CONTEXT = 0x7100000000 + 1000, 0x7100000000 + 1001  # of GPUs 0 and 1
GLOBAL, RELAXED = 0, 2


class Stub:
    """A thread's view of the driver."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.told.restype = library.last_argument.restype = ctypes.c_void_p
        library.context_of_thread.restype = ctypes.c_uint64
        self.expect()
        self.thread()
        library.fault_in(b"none", 0, False)
        self.driver = nvrtc.Driver(library)
        self.told()

    def expect(self, argument_bytes: int = PARAMS, shared: int = 65536) -> None:
        """Set the expected arguments of a launch, and the bytes of shared memory of a multiprocessor."""
        self.library.expect(argument_bytes, shared)

    def thread(self, context: int = 0, mode: int = GLOBAL) -> None:
        self.library.set_thread(ctypes.c_uint64(context), mode)

    @property
    def state(self) -> tuple[int, int]:
        """The thread's context, and its mode of captures."""
        return self.library.context_of_thread(), self.library.mode_of_thread()

    def fail_once(self, name: str, code: int = 1) -> None:
        self.library.fail_once(name.encode(), code)

    def told(self) -> list[str]:
        """The calls since the last time."""
        return ctypes.string_at(self.library.told()).decode().splitlines()

    def argument(self) -> bytes:
        """The struct of the last launch."""
        return ctypes.string_at(self.library.last_argument(), PARAMS)


@pytest.fixture
def stub(driver_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Stub:
    monkeypatch.setattr(nvrtc, "stream", lambda device: STREAM)
    monkeypatch.setattr(cuda_capture, "current_device", lambda: 0)
    return Stub(driver_library)


# ---- loading


TURING, HOPPER = 64 * 1024, 227 * 1024  # bytes of shared memory
ATTRIBUTES = [(SMALL, TURING, []), (TWO_BLOCKS, TURING, ["9 100"]), (TWO_BLOCKS, HOPPER, []),
              (LARGE, TURING, ["8 65536", "9 100"])]  # fmt: skip


@pytest.mark.parametrize(("variant", "shared", "attributes"), ATTRIBUTES)
def test_a_kernel_is_loaded_into_the_gpus_context_and_asks_for_the_shared_memory_its_blocks_need(
    variant: Variant, shared: int, attributes: list[str], stub: Stub
) -> None:
    stub.expect(shared=shared)
    stub.thread(OTHER_CONTEXT)
    kernel = stub.driver.load(variant, b"code", 0)
    assert (kernel.threads, kernel.shared) == (variant.threads, variant.shared)
    assert stub.told() == [
        "cuDeviceGet 0",  # for its attribute
        "cuDeviceGet 0",
        "cuDevicePrimaryCtxRetain 1000",
        "cuCtxPushCurrent 1000",
        f"cuThreadExchangeStreamCaptureMode {RELAXED}",
        "cuModuleLoadData code",
        "cuModuleGetFunction forward",
        *(f"cuFuncSetAttribute {attribute}" for attribute in attributes),
        f"cuThreadExchangeStreamCaptureMode {GLOBAL}",
        "cuCtxPopCurrent",
    ]
    assert stub.state == (OTHER_CONTEXT, GLOBAL)


@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_a_kernel_that_cannot_be_loaded_is_an_error_in_the_drivers_words_and_the_thread_is_as_before(
    name: str, stub: Stub
) -> None:
    stub.thread(OTHER_CONTEXT, RELAXED)
    stub.fail_once(name)
    with pytest.raises(KernelError, match=r"INVALID_VALUE \(said by the driver\)"):
        stub.driver.load(LARGE, b"code", 0)
    assert stub.state == (OTHER_CONTEXT, RELAXED)


# ---- launching


def loaded(stub: Stub, device: int = 0) -> Kernel:
    kernel = stub.driver.load(LARGE, b"code", device)
    stub.told()
    return kernel


LAUNCH = f"cuLaunchKernel forward blocks 2147483647 threads 256 shared 65536 stream {STREAM}"


@pytest.mark.parametrize(
    ("device", "context", "expected", "after"),
    [
        (0, OWN_CONTEXT, [LAUNCH], OWN_CONTEXT),
        # A thread in which PyTorch has done nothing yet: its context is made current for good.
        (0, 0, [f"{LAUNCH} = 201", "cuCtxSetCurrent 1000", LAUNCH], OWN_CONTEXT),
        # A GPU that is not current: its context is, for the length of the launch.
        (1, OWN_CONTEXT, ["cuCtxPushCurrent 1001", LAUNCH, "cuCtxPopCurrent"], OWN_CONTEXT),
        (1, 0, ["cuCtxPushCurrent 1001", LAUNCH, "cuCtxPopCurrent"], 0),
    ],
)
def test_a_launch_is_made_in_its_gpus_context(
    device: int, context: int, expected: list[str], after: int, stub: Stub
) -> None:
    kernel, argument = loaded(stub, device), bytes(range(256)) * (PARAMS // 256 + 1)
    stub.thread(context)
    stub.driver.launch(kernel, 2**31 - 1, device, argument)
    assert stub.told() == expected and stub.state == (after, GLOBAL)
    assert stub.argument() == argument[:PARAMS]


@pytest.mark.parametrize("device", [0, 1])
def test_a_launch_that_fails_is_an_error_and_leaves_the_threads_context(device: int, stub: Stub) -> None:
    kernel = loaded(stub, device)
    stub.thread(OWN_CONTEXT)
    stub.fail_once("cuLaunchKernel")
    with pytest.raises(KernelError, match="INVALID_VALUE"):
        stub.driver.launch(kernel, 1, device, b"\0" * PARAMS)
    assert stub.state == (OWN_CONTEXT, GLOBAL)


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize(("code", "lasts"), [(1, False), (701, False), (700, True), (702, True), (719, True)])
def test_an_error_that_lasts_says_that_the_context_is_lost_and_any_other_is_a_kernels(
    code: int, lasts: bool, device: int, stub: Stub
) -> None:
    kernel = loaded(stub, device)
    stub.thread(OWN_CONTEXT)
    stub.fail_once("cuLaunchKernel", code)
    with pytest.raises(ContextLost if lasts else KernelError, match="CUDA_LAUNCH_BLOCKING=1" if lasts else "driver"):
        stub.driver.launch(kernel, 1, device, b"\0" * PARAMS)


@pytest.mark.parametrize(("code", "expected"), [(0, None), (1, None), (700, "ILLEGAL_ADDRESS (said by the driver)")])
def test_whether_a_context_is_broken_is_known_after_waiting_for_pytorchs_stream(
    code: int, expected: str | None, stub: Stub
) -> None:
    stub.thread(OTHER_CONTEXT)
    stub.fail_once("cuStreamSynchronize", code)
    assert stub.driver.sticky_error(0) == (expected and f"CUDA driver: {expected}")
    assert f"cuStreamSynchronize {STREAM}" in "\n".join(stub.told()) and stub.state == (OTHER_CONTEXT, GLOBAL)


# ---------------------------------------------------------------- whichever kernel of a call fails

HALF = torch.float16
Case = Callable[[], list[Tensor]]


def tensors(dtype: torch.dtype = HALF) -> list[Tensor]:
    return [randn(2, 24, heads, 32, seed=seed, dtype=dtype) for seed, heads in enumerate((4, 2, 2))]


def dense(dropout_p: float, wants_lse: bool) -> list[Tensor]:
    torch.manual_seed(0)
    leaves, slopes = [x.requires_grad_() for x in tensors()], torch.tensor([0.5, 0.25, 0.125, 1.0])
    out, lse, _ = flash_attn_func(*leaves, dropout_p, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    total = out.float().square().sum() + (lse.sum() if wants_lse else 0.0)
    return [out, lse, *torch.autograd.grad(total, leaves)]


def packed(dtype: torch.dtype) -> list[Tensor]:
    starts = ints(0, 30, 45)  # three tokens lie outside
    leaves = [x.flatten(0, 1).requires_grad_() for x in tensors(dtype)]
    out = flash_attn_varlen_func(*leaves, starts, starts, 30, 30, window_size=(7, 3))
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def decode(seqlen_new: int, lengths: Any, given: list[Tensor] | None = None) -> list[Tensor]:
    caches = given or [randn(2, 50, 2, 32, seed=seed, dtype=HALF) for seed in (1, 2)]
    new = [randn(2, seqlen_new, 2, 32, seed=seed, dtype=HALF) if seqlen_new else None for seed in (3, 4)]
    tables = [randn(50, 16, seed=seed, dtype=HALF) if seqlen_new else None for seed in (5, 6)]
    out, lse = flash_attn_with_kvcache(
        randn(2, 1, 4, 32, dtype=HALF), *caches, *new, *tables, lengths, causal=True, return_softmax_lse=True
    )
    return [out, lse, *caches]


def private_forward() -> list[Tensor]:
    starts = ints(0, 30, 48)
    given = [x.flatten(0, 1) for x in tensors()]
    return [*_flash_attn_varlen_forward(*given, starts, starts, 30, 30, 0.0, 0.2, True)[:2]]


def private_backward() -> list[Tensor]:
    """Into gradients that lie apart."""
    q, k, v = tensors()
    rules: tuple[Any, ...] = (0.0, 0.2, True, -1, -1, 0.0, None)
    with use_backend("chunked"):
        out, lse, _ = flash_attn_func(q, k, v, softmax_scale=0.2, causal=True, return_attn_probs=True)
    places = [torch.full_like(x, torch.nan).repeat_interleave(2, 1)[:, ::2] for x in (q, k, v)]
    _flash_attn_backward(out, q, k, v, out, lse, *places, *rules, False)
    return places


BACKWARD = ("delta", "dkdv", "dq")
TRAINING = ("forward", *BACKWARD)
# What each launches.
CASES: dict[str, tuple[tuple[str, ...], Case]] = {
    "dense": (TRAINING, functools.partial(dense, 0.0, False)),
    "dense with the gradient of the LSE": (TRAINING, functools.partial(dense, 0.0, True)),
    "dense with dropout": (TRAINING, functools.partial(dense, 0.3, False)),
    "packed": (TRAINING, functools.partial(packed, HALF)),
    "packed, converted": (("absmax", *TRAINING), functools.partial(packed, torch.bfloat16)),
    "decode": (("decode",), functools.partial(decode, 0, ints(3, 30))),
    "decode with a number": (("decode",), functools.partial(decode, 0, 30)),
    "append": (("decode",), functools.partial(decode, 1, ints(3, 30))),
    "append first": (("append", "decode"), functools.partial(decode, 17, ints(3, 30))),
    "append first, with a number": (("append", "decode"), functools.partial(decode, 17, 30)),
    "private forward": (("forward",), private_forward),
    "private backward": (BACKWARD, private_backward),
}
LOADED, FIRST, LATER = "as it is loaded", "at a first call", "at a later call"
# Of calls with a backward, each kernel fails in one of three ways in each run of the suite, and each way is met.
FAILURES = [
    pytest.param(name, entry, when, marks=[pytest.mark.thorough] if len(entries) > 2 and (place + way) % 3 else [])
    for name, (entries, _) in CASES.items()
    for place, entry in enumerate(entries)
    for way, when in enumerate((LOADED, FIRST, LATER))
    # Whoever serves a forward with dropout behind a launch draws a mask of its own.
    if (name, entry) != ("dense with dropout", "forward") or when == LOADED
]


def fail(monkeypatch: pytest.MonkeyPatch, entry: str, when: str = FIRST) -> None:
    """The kernel of that name fails from now on."""
    driver, load = nvrtc.driver(), nvrtc.kernel
    assert isinstance(driver, fused_on_cpu.Driver)
    compute = driver.compute

    def launch(which: fused_on_cpu.Launch, content: bytes) -> None:
        if which.variant.entry == entry:
            raise KernelError("OUT_OF_RESOURCES")
        compute(which, content)

    def kernel(variant: Variant, device: int) -> nvrtc.Kernel:
        if variant.entry == entry:
            raise KernelError("OUT_OF_RESOURCES")
        return load(variant, device)

    if when == LOADED:
        monkeypatch.setattr(nvrtc, "kernel", kernel)
    else:
        monkeypatch.setattr(driver, "compute", launch)


@pytest.mark.parametrize(("name", "entry", "when"), FAILURES)
def test_whichever_kernel_fails_the_answer_and_the_cache_are_right(
    name: str, entry: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, case = CASES[name]
    launches = fused_on_cpu.emulate(monkeypatch)
    with use_backend("chunked"):
        expected = case()
    call_cache.forget()
    if when == LATER:
        case()
        assert launches.entries == [*entries]
    fail(monkeypatch, entry, when)
    with pytest.warns(RuntimeWarning, match="OUT_OF_RESOURCES") as told:
        found = case()
    assert len(told) == 1
    reset_backend_counts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = case()
    is_private_backward = name == "private backward"  # whose forward is chunked's
    assert sum(backend_counts().values()) == 1 + is_private_backward
    assert backend_counts().get("fused", 0) == (entry in BACKWARD and not is_private_backward), "its forward serves on"
    for one, two, right in zip(found, again, expected, strict=True):
        close(rounded(one), rounded(right), 8.0)
        close(rounded(two), rounded(right), 8.0)


def rounded(x: Tensor) -> Tensor:
    """An LSE in half precision: that of PyTorch's half-precision CPU kernel, which some CPUs get, is off by 3e-5."""
    return x.half() if x.dtype == torch.float32 else x


@pytest.mark.parametrize("when", [LOADED, FIRST])
@pytest.mark.parametrize(("seqlen_new", "entry"), [(1, "decode"), (17, "append")])
def test_where_no_other_backend_may_serve_the_cache_stays_as_it_was(
    seqlen_new: int, entry: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_on_cpu.emulate(monkeypatch)
    fail(monkeypatch, entry, when)
    caches = [torch.zeros(2, 50, 2, 32, dtype=HALF) for _ in "kv"]
    with (
        use_backend("fused"),
        pytest.warns(RuntimeWarning, match="OUT_OF_RESOURCES"),
        pytest.raises(RuntimeError, match=r"cannot serve(.|\n)*fused .*failed before: OUT_OF_RESOURCES"),
    ):
        decode(seqlen_new, ints(3, 30), caches)
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize("name", ["append first", "append first, with a number"])
def test_new_keys_are_written_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the attending kernel fails after the appending one, and another backend attends."""
    fused_on_cpu.emulate(monkeypatch)
    fail(monkeypatch, "decode")
    written: list[object] = []
    monkeypatch.setattr(base, "by_operators", lambda *given: written.append(given))
    reset_backend_counts()
    with pytest.warns(RuntimeWarning, match="OUT_OF_RESOURCES"):
        CASES[name][1]()
    assert not written and list(backend_counts().values()) == [1]
