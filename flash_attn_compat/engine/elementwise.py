"""Elementwise work on a tile of scores, or of a bias, as one CUDA kernel, where plain PyTorch needs three to nine.

PyTorch's jiterator compiles the functions below with NVRTC at first use (about a second, then cached on
disk), as PyTorch does for some operators of its own: neither a compiler nor Triton has to be installed.
Its kernels return their arguments' dtype, so two half-precision neighbours travel as one fp32 number.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import settings

# A score: softcap * tanh(product * factor), or product * factor without softcap; -inf stays hidden. The
# tanh is right to 1e-7, and to 1e-5 of itself where it is small; the exponentials to 1e-5 where they count.
_SCORE_OF = """
  auto tanh_of = [&](T x) {
    T square = x * x;
    T small = x * (T(1) + square * (T(-0.33333333f) + square * T(0.13333333f)));
    T large = T(1) - __fdividef(T(2), __expf(T(2) * x) + T(1));
    return square < T(0.0025f) ? small : large;
  };
  auto score_of = [&](T product) { return softcap > 0 ? softcap * tanh_of(product * factor) : product * factor; };"""

_SCORE = f"""
template <typename T> T score(T product, T factor, T softcap) {{{_SCORE_OF}
  return product == -INFINITY ? product : score_of(product);
}}"""

_WEIGHTS = f"""
template <typename T> void weights(T even, T odd, T peak, T factor, T softcap, T& packed, T& sum) {{{_SCORE_OF}
  T shift = peak == -INFINITY ? T(0) : score_of(peak);
  T low = even == -INFINITY ? T(0) : __expf(score_of(even) - shift);
  T high = odd == -INFINITY ? T(0) : __expf(score_of(odd) - shift);
  sum = low + high;
  PACK(packed)
}}"""

_GRADIENTS = f"""
template <typename T> void gradients(T even, T odd, T dp_even, T dp_odd, T lse, T delta, T factor, T softcap,
                                     T& packed_p, T& packed_ds) {{{_SCORE_OF}
  T product[2] = {{even, odd}}, dp[2] = {{dp_even, dp_odd}}, p[2], ds[2];
  T per_softcap = softcap > 0 ? __fdividef(T(1), softcap) : T(0);
  for (int i = 0; i < 2; ++i) {{
    T score = score_of(product[i]), tanh = score * per_softcap;
    p[i] = product[i] == -INFINITY ? T(0) : __expf(score - lse);
    ds[i] = p[i] == 0 ? T(0) : p[i] * (dp[i] - delta) * (T(1) - tanh * tanh);
  }}
  {{ T low = p[0], high = p[1]; PACK(packed_p) }}
  {{ T low = ds[0], high = ds[1]; PACK(packed_ds) }}
}}"""

_BIAS = """
template <typename T> T bias(T slope, T shift, T position, T column) {
  T low = shift - slope * fabsf(column - position), high = shift - slope * fabsf(column + T(1) - position), packed;
  PACK(packed)
  return packed;
}"""

# Two fp32 numbers, low and high, rounded to nearest even and put into the bits of one.
_PACK = {
    torch.float16: """
  unsigned int bits;
  asm("{ .reg .f16 a, b; cvt.rn.f16.f32 a, %1; cvt.rn.f16.f32 b, %2; mov.b32 %0, {a, b}; }"
      : "=r"(bits) : "f"(low), "f"(high));
  TARGET = __uint_as_float(bits);""",
    torch.bfloat16: """
  unsigned int a = __float_as_uint(low), b = __float_as_uint(high);
  a = low != low ? 0x7FC0u : (a + 0x7FFFu + ((a >> 16) & 1u)) >> 16;
  b = high != high ? 0x7FC0u : (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
  TARGET = __uint_as_float(a | (b << 16));""",
}


def score(products: Tensor, factor: float, softcap: float) -> Tensor:
    """fp32 inner products -> scores; -inf stays -inf."""
    return _compiled_score()(products, factor=factor, softcap=softcap)


def weights(products: Tensor, peak: Tensor, factor: float, softcap: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """exp(score - the peak's score) in ``dtype``, and the fp32 sums of two neighbours each.

    products: (..., keys), fp32, -inf where hidden; peak: (..., 1), a row's largest product, -inf where it has none
    """
    even, odd = _halves(products, -torch.inf)
    packed, sums = _compiled("weights", dtype)(even, odd, peak, factor=factor, softcap=softcap)
    return _unpack(packed, products.shape[-1], dtype), sums


def gradients(
    products: Tensor, dp: Tensor, lse: Tensor, delta: Tensor, factor: float, softcap: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Probabilities and the gradient of the products without ``factor * softcap``, both (..., keys) in ``dtype``."""
    even, odd = _halves(products, -torch.inf)
    dp_even, dp_odd = _halves(dp, 0.0)
    step = _compiled("gradients", dtype)
    p, ds = step(even, odd, dp_even, dp_odd, lse, delta, factor=factor, softcap=softcap)
    return _unpack(p, products.shape[-1], dtype), _unpack(ds, products.shape[-1], dtype)


def alibi_bias(slopes: Tensor, shift: Tensor, positions: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """shift - slope * |column - position| in ``dtype``, (batch, nheads, rows, columns); all arguments are fp32.

    slopes, shift: (batch, nheads, 1, 1) and (batch, nheads, rows, 1); positions: (rows,); columns: (columns,)
    consecutive ones, an even number of them
    """
    packed = _compiled_bias(dtype)(slopes, shift, positions.unsqueeze(1), columns[0::2])
    return _unpack(packed, columns.shape[0], dtype)


def is_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels serve tiles of ``dtype`` on this device."""
    return not why_not(device, dtype)


def bias_is_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether alibi_bias serves."""
    return not _why_not(device, dtype, _bias_is_right)


def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Why plain operators serve instead, or nothing: the kernels compile on this device and give the right numbers."""
    return _why_not(device, dtype, _tiles_are_right)


def _why_not(device: torch.device, dtype: torch.dtype, trial: Callable[[torch.device, torch.dtype], bool]) -> str:
    if device.type != "cuda" or torch.version.hip is not None:
        return "they are for NVIDIA GPUs"
    if dtype not in _PACK:
        return "they are for half precision"
    if not settings.jiterator_enabled():
        return f"switched off by {settings.JITERATOR}"
    if (device, dtype, trial) not in _problems:
        if torch.cuda.is_current_stream_capturing():
            return "not tried before a CUDA graph was captured"
        _problems[device, dtype, trial] = problem = _problem(device, dtype, trial)
        if problem:
            warnings.warn(f"PyTorch's jiterator is not used on {device}: {problem}", RuntimeWarning, stacklevel=2)
    return _problems[device, dtype, trial]


_problems: dict[tuple[object, ...], str] = {}


def _problem(device: torch.device, dtype: torch.dtype, trial: Callable[[torch.device, torch.dtype], bool]) -> str:
    """Compile and compare with plain PyTorch, once; whatever goes wrong, plain PyTorch serves."""
    try:
        return "" if trial(device, dtype) else "its results are wrong"
    except Exception as error:  # NVRTC missing or too old, or whatever else a driver raises
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _tiles_are_right(device: torch.device, dtype: torch.dtype) -> bool:
    products = torch.tensor([[0.5, -1.0, -torch.inf], [2.0, 3.0, 0.0]], device=device)
    delta = torch.tensor([[0.5], [-0.5]], device=device)
    scores = 2.0 * torch.tanh(products * 0.5)
    lse = scores.amax(-1, keepdim=True)
    expected = torch.exp(scores - lse).masked_fill(products == -torch.inf, 0.0)
    slope = 1.0 - (scores / 2.0).square()
    found, sums = weights(products, products.amax(-1, keepdim=True), 0.5, 2.0, dtype)
    p, ds = gradients(products, products.clamp(min=-1.0), lse, delta, 0.5, 2.0, dtype)
    pairs = (
        (found, expected),
        (p, expected),
        (sums.sum(-1), expected.sum(-1)),
        (ds, expected * (products.clamp(min=-1.0) - delta) * slope),
        (score(products, 0.5, 2.0)[1], scores[1]),
    )
    return all(torch.allclose(one.float(), other, rtol=1e-2, atol=1e-3) for one, other in pairs)


def _bias_is_right(device: torch.device, dtype: torch.dtype) -> bool:
    slopes = torch.tensor([0.5, -2.0], device=device).view(1, 2, 1, 1)
    shift = torch.tensor([0.0, 1.0, -3.0], device=device).view(1, 1, 3, 1).expand(1, 2, 3, 1)
    positions, columns = torch.arange(3.0, device=device), torch.arange(-1.0, 5.0, device=device)
    expected = shift - slopes * (columns - positions.unsqueeze(1)).abs()
    return torch.equal(alibi_bias(slopes, shift, positions, columns, dtype), expected.to(dtype))


@functools.lru_cache(maxsize=None)
def _compiled(name: str, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    source = _packing({"weights": _WEIGHTS, "gradients": _GRADIENTS}[name], dtype)
    return torch.cuda.jiterator._create_multi_output_jit_fn(source, 2, factor=1.0, softcap=0.0)


@functools.lru_cache(maxsize=None)
def _compiled_score() -> Callable[..., Tensor]:
    return torch.cuda.jiterator._create_jit_fn(_SCORE, factor=1.0, softcap=0.0)


@functools.lru_cache(maxsize=None)
def _compiled_bias(dtype: torch.dtype) -> Callable[..., Tensor]:
    return torch.cuda.jiterator._create_jit_fn(_packing(_BIAS, dtype))


def _packing(source: str, dtype: torch.dtype) -> str:
    """``source`` with each PACK(target) spelt out for ``dtype``."""
    return re.sub(r"PACK\((\w+)\)", lambda pack: _PACK[dtype].replace("TARGET", pack[1]), source)


def _halves(tile: Tensor, padding: float) -> tuple[Tensor, Tensor]:
    """Even and odd columns, as many of each."""
    if tile.shape[-1] % 2:
        tile = F.pad(tile, (0, 1), value=padding)
    return tile[..., 0::2], tile[..., 1::2]


def _unpack(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    # Flattened first: only a last axis of stride 1 can be read as another dtype, which an axis of size 1 need not have.
    return packed.reshape(-1).view(dtype).view(*packed.shape[:-1], -1)[..., :columns]
