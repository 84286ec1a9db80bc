"""The calls of the CUDA driver, argument by argument: a stand-in in C++ has its signatures and needs no GPU."""

from __future__ import annotations

import ctypes
import struct

import pytest

from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import ContextLost, Kernel, KernelError
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.variants import FP16, Kind, Variant
from flash_attn_compat.backends.fused.launching import params
from flash_attn_compat.core import cuda_capture
from tests.forms.support import driver_stand_in

SMALL = variants.forward(Kind(75, FP16, 64))
TWO_BLOCKS = variants.forward(Kind(75, FP16, 128, few_rows=True))  # of 32 KB each on a multiprocessor
LARGE = variants.forward(Kind(75, FP16, 256))
PARAMS = struct.calcsize("<" + "".join(kind for _, kind in (*params.HEAD_FIELDS, *params.REST_FIELDS)))
STREAM = 2**40 + 64
OWN_CONTEXT, OTHER_CONTEXT = 0x7100000000 + 1000, 0x7100000000 + 1001  # of GPUs 0 and 1
GLOBAL, RELAXED = 0, 2


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(driver_stand_in(tmp_path_factory.mktemp("driver")))


class Stub:
    """A thread's view of the driver."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.told.restype = library.last_argument.restype = ctypes.c_void_p
        library.context_of_thread.restype = ctypes.c_uint64
        self.expect()
        self.thread()
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
def stub(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Stub:
    monkeypatch.setattr(nvrtc, "stream", lambda device: STREAM)
    monkeypatch.setattr(cuda_capture, "current_device", lambda: 0)
    return Stub(library)


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
