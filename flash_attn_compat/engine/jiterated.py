"""CUDA kernels that PyTorch's jiterator compiles at first use with NVRTC, which comes with PyTorch (a second, then
cached on disk), as PyTorch does for some operators of its own: neither a compiler nor Triton has to be installed.

The jiterator computes one number per element of its inputs, all of one dtype. Our kernels get an element's
place as numbers, read and write 16 bytes at a time through addresses handed to them as integers, and
return what else they find. Addresses are used in stream order, like any tensor's memory.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.engine import callers_state, streams

Trial = Callable[[torch.device, torch.dtype], bool]

# Two fp32 numbers to 32 bits of half precision, rounded to nearest even, and back.
_HALVES = {
    torch.float16: """
  auto pack = [](float low, float high) {
    unsigned int bits;
    asm("{ .reg .f16 a, b; cvt.rn.f16.f32 a, %1; cvt.rn.f16.f32 b, %2; mov.b32 %0, {a, b}; }"
        : "=r"(bits) : "f"(low), "f"(high));
    return bits;
  };
  auto unpack = [](unsigned int bits, float& low, float& high) {
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high) : "r"(bits));
  };""",
    torch.bfloat16: """
  auto pack = [](float low, float high) {
    unsigned int a = __float_as_uint(low), b = __float_as_uint(high);
    a = low != low ? 0x7FC0u : (a + 0x7FFFu + ((a >> 16) & 1u)) >> 16;
    b = high != high ? 0x7FC0u : (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
    return a | (b << 16);
  };
  auto unpack = [](unsigned int bits, float& low, float& high) {
    low = __uint_as_float(bits << 16);
    high = __uint_as_float(bits & 0xFFFF0000u);
  };""",
}

# Places are counted in fp32, which is exact that far; the first of them are kept.
MOST_PLACES = 2**24
KEPT_PLACES = 2**20


class Memory(NamedTuple):
    """A tensor that a kernel reads or writes through its address, and what the kernel counts on.

    shape: the sizes it goes by
    dense_axes: None where it takes the whole to be contiguous; 1 where the last axis, 0 where none, since it is
        handed the strides
    in_words: whether it reads or writes 16 bytes at a time
    """

    tensor: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    dense_axes: Literal[0, 1] | None = None
    in_words: bool = False

    def address(self, name: str, device: torch.device) -> int:
        """What the kernel gets, once the tensor is as the kernel counts on; raises RuntimeError naming it if not."""
        tensor, dtype, shape, dense_axes, in_words = self
        if tensor.dtype != dtype:
            raise RuntimeError(f"{name} must have dtype {dtype}, got {tensor.dtype}")
        if tensor.device != device:
            raise RuntimeError(f"{name} must be on {device}, got {tensor.device}")
        if tensor.shape != shape:
            raise RuntimeError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
        if not _is_dense(tensor, dense_axes):
            raise RuntimeError(f"{name} of shape {tuple(shape)} must be contiguous, got strides {tensor.stride()}")
        address = tensor.data_ptr()
        if in_words and address % 16:
            raise RuntimeError(f"{name} must begin on 16 bytes, got address {address:#x}")
        return address


def _is_dense(tensor: Tensor, axes: Literal[0, 1] | None) -> bool:
    if axes is None:
        return tensor.is_contiguous()
    return axes == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1


# What a kernel is given beside its tensors; None is the address 0.
Argument = float | Memory | None


class Kernel:
    """``source`` with the names of its scalars in order; HALVES in it becomes pack and unpack of half precision."""

    def __init__(self, source: str, *scalars: str) -> None:
        # PyTorch looks a kernel up by its whole source at every launch.
        self.source, self.scalars = re.sub(r"\s+", " ", re.sub(r"//.*", "", source)), scalars
        self._compiled: dict[torch.dtype, tuple[str, str]] = {}

    def __call__(self, dtype: torch.dtype, *tensors: Tensor, **arguments: Argument) -> Tensor:
        """Launch: a number for each element of the broadcast fp32 ``tensors``; scalars in order, addresses among them.

        Raises RuntimeError where a tensor is not what the kernel would take it for.
        """
        if dtype not in _HALVES:
            raise RuntimeError(f"a kernel's dtype must be one of half precision, got {dtype}")
        device = tensors[0].device
        for tensor in tensors:
            if tensor.dtype != torch.float32 or tensor.device != device:
                raise RuntimeError(
                    f"a kernel's tensors must be fp32 on {device}, got {tensor.dtype} on {tensor.device}"
                )
        if tuple(arguments) != self.scalars:
            raise RuntimeError(f"a kernel's scalars are {self.scalars}, in this order, got {tuple(arguments)}")
        scalars = {name: _number(name, value, device) for name, value in arguments.items()}
        return self._launch(dtype, tensors, scalars)

    def _launch(self, dtype: torch.dtype, tensors: tuple[Tensor, ...], scalars: dict[str, float]) -> Tensor:
        source_and_name = self._compiled.get(dtype)
        if source_and_name is None:
            source = self.source.replace("HALVES", _HALVES[dtype])
            function: Any = torch.cuda.jiterator._create_jit_fn(source)
            source_and_name = self._compiled[dtype] = source, function.kernel_name
        device = tensors[0].device.index
        if device != torch.cuda.current_device():
            # The jiterator launches on the current device, wherever the tensors are.
            with torch.cuda.device(device):
                return self._launch(dtype, tensors, scalars)
        # What jiterator's functions do at a launch, less their looking at each scalar.
        return torch._C._cuda_jiterator_compile_and_launch_kernel(*source_and_name, False, 1, tensors, scalars)


def _number(name: str, value: Argument, device: torch.device) -> float:
    if isinstance(value, Memory):
        return value.address(name, device)
    return 0 if value is None else value


def places(count: int, device: torch.device) -> Tensor:
    """0 to ``count`` - 1 in fp32."""
    if count > KEPT_PLACES:
        return torch.arange(count, dtype=torch.float32, device=device)
    return _first_places(count, device)


@functools.lru_cache(maxsize=1024)
def _first_places(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _kept_places(device)[:count]


@functools.cache
def _kept_places(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        kept = torch.arange(KEPT_PLACES, dtype=torch.float32, device=device)
        # Other streams may read it from now on.
        torch.cuda.current_stream(device).synchronize()
        return kept


def why_not(device: torch.device, dtype: torch.dtype, trial: Trial) -> str:
    """Why kernels can't serve, or nothing once ``trial`` has found them to compile and to give the right numbers."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "they are for NVIDIA GPUs"
    if dtype not in _HALVES:
        return "they are for half precision"
    if not settings.jiterator_enabled():
        return f"switched off by {settings.JITERATOR}"
    key = device, dtype, trial
    if key not in _problems:
        if streams.is_capturing(device):
            return "not tried before a CUDA graph was captured"
        _problems[key] = problem = _problem(device, dtype, trial)
        if problem:
            warnings.warn(f"PyTorch's jiterator is not used on {device}: {problem}", RuntimeWarning, stacklevel=2)
    return _problems[key]


_problems: dict[tuple[object, ...], str] = {}


def _problem(device: torch.device, dtype: torch.dtype, trial: Trial) -> str:
    """Compile and compare with plain PyTorch, once; whatever goes wrong, plain PyTorch serves."""
    try:
        with callers_state.set_aside(device):
            _kept_places(device)
            return "" if trial(device, dtype) else "its results are wrong"
    except Exception as error:  # noqa: BLE001  NVRTC is missing or too old, or whatever else a driver raises
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
