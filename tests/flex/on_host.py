"""Runs printed functions on a CPU: g++ compiles them with flex_operators.cuh, as the emulator compiles kernels."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.core.flex import capture, printer
from flash_attn_compat.core.flex.printed import Printed
from tests.kernels import emulate

CPU = torch.device("cpu")
# What cuda/scores/flex.cuh gives printed functions. Loads check that they stay inside their tensors.
_HARNESS = """
struct FlexParams { const void *at[16]; i64 elements[16]; int size[16][4], stride[16][4]; i64 numbers[8]; };
static int outside;
inline float bfloat16_to_float(u16 x) { return __int_as_float((u32)x << 16); }
template <class T> inline T loaded(const FlexParams &f, int i, i64 offset) {
  if (offset < 0 || offset >= f.elements[i]) return outside++, T();
  return ((const T *)f.at[i])[offset];
}
#define LOAD(name, result, type, x) \\
  inline result name(const FlexParams &f, int i, i64 offset) { const type v = loaded<type>(f, i, offset); return x; }
LOAD(flex_float, float, float, v) LOAD(flex_half, float, u16, half_to_float(v))
LOAD(flex_bfloat16, float, u16, bfloat16_to_float(v)) LOAD(flex_bool, bool, u8, v != 0) LOAD(flex_u8, u8, u8, v)
LOAD(flex_i8, int, signed char, v) LOAD(flex_i16, int, short, v) LOAD(flex_i32, int, int, v) LOAD(flex_i64, i64, i64, v)
inline int flex_within(int i, int size) {
  i = i < 0 ? i + size : i;
  return i < 0 ? 0 : i >= size ? size - 1 : i;
}
#include "scores/flex_operators.cuh"
"""
_EACH = """
namespace functions_{number} {{
{text}
#ifndef FLEX_STEEPEST
inline float flex_steepest(const FlexParams &, int, int) {{ return POS_INF; }}
#endif
#undef FLEX_STEEPEST
extern "C" __attribute__((visibility("default"))) int evaluate_{number}(
    const FlexParams &f, i64 count, const float *score, const int *b, const int *h, const int *q, const int *kv,
    float *scores, float *slopes, float *steepest, bool *masks) {{
  outside = 0;
  for (i64 i = 0; i < count; i++) {{
    scores[i] = flex_score(f, score[i], b[i], h[i], q[i], kv[i]);
    slopes[i] = flex_slope(f, score[i], b[i], h[i], q[i], kv[i]);
    steepest[i] = flex_steepest(f, b[i], h[i]);
    masks[i] = flex_mask(f, b[i], h[i], q[i], kv[i]);
  }}
  return outside;
}}
}}
"""
_SIGHTS = """
extern "C" __attribute__((visibility("default"))) void evaluate_sights(
    const FlexParams &f, i64 count, const int *b, const int *h, const int *q, const int *q_last, const int *kv,
    const int *kv_last, int *sights) {
  for (i64 i = 0; i < count; i++) sights[i] = flex_sight(f, b[i], h[i], q[i], q_last[i], kv[i], kv_last[i]);
}
"""


class Problem(NamedTuple):
    """Printed functions, and what they are evaluated for: scores, each one's (b, h, q, kv), captured arguments"""

    functions: Printed
    score: Tensor
    places: Sequence[Tensor]
    captured: Sequence[Any] = ()


class Results(NamedTuple):
    """scores, slopes, steepest, masks: of each element; outside: loads that left their tensors"""

    scores: Tensor
    slopes: Tensor
    steepest: Tensor
    masks: Tensor
    outside: int


def identity(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score


def everywhere(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return b.new_ones((), dtype=torch.bool)


def printed(
    score_mod: Any = identity, mask_mod: Any = everywhere, captured: Sequence[Any] = (), slopes: bool = False
) -> Printed:
    """The text of functions that take captured arguments behind their own; both take all of them."""
    count = len(captured) if score_mod is not identity else 0
    given = captured if score_mod is not identity else ()
    masked = captured if mask_mod is not everywhere else ()
    score = capture.capture_score(score_mod, given, CPU)
    joint = capture.capture_joint(score_mod, given, CPU) if slopes else None
    mask = capture.capture_mask(mask_mod, masked, CPU, count if masked is not captured else 0)
    return printer.print_functions(score, mask, joint)


def evaluate(problems: Sequence[Problem]) -> list[Results]:
    """Run printed functions, of which g++ compiles all together: most of its time goes into its start."""
    library = _library("".join(_EACH.format(number=i, text=each.functions.text) for i, each in enumerate(problems)))
    return [_run(getattr(library, f"evaluate_{i}"), *problem) for i, problem in enumerate(problems)]


def _run(
    function: Any, functions: Printed, score: Tensor, places: Sequence[Tensor], captured: Sequence[Any]
) -> Results:
    tensors = [captured[i] for i in functions.tensors]
    content = struct.pack("<16Q", *(x.data_ptr() for x in tensors), *[0] * (16 - len(tensors)))
    ends = [1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0 for x in tensors]
    content += struct.pack("<16q", *ends, *[0] * (16 - len(tensors)))
    for numbers in ([tuple(x.shape) for x in tensors], [x.stride() for x in tensors]):
        flat = [n for each in numbers for n in (*each, *[0] * (4 - len(each)))]
        content += struct.pack("<64i", *flat, *[0] * (64 - len(flat)))
    found = [_bits(captured[number.position], number.is_float) for number in functions.numbers]
    content += struct.pack("<8q", *found, *[0] * (8 - len(found)))
    score = score.float().contiguous()
    at = [x.expand(score.shape).int().contiguous() for x in places]
    scores, slopes, steepest = (torch.empty_like(score) for _ in range(3))
    masks = torch.empty(score.shape, dtype=torch.bool)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (score, *at, scores, slopes, steepest, masks)]
    outside = function(content, ctypes.c_int64(score.numel()), *pointers)
    return Results(scores, slopes, steepest, masks, outside)


def evaluate_sights(functions: Printed, rectangles: Sequence[Tensor]) -> Tensor:
    """Run flex_sight of functions without captured arguments for each (b, h, q, q_last, kv, kv_last)."""
    at = [x.int().contiguous() for x in rectangles]
    sights = torch.empty(at[0].shape, dtype=torch.int32)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*at, sights)]
    _library(functions.text + _SIGHTS).evaluate_sights(bytes(1024), ctypes.c_int64(sights.numel()), *pointers)
    return sights


def _bits(x: Any, is_float: bool) -> int:
    if not is_float:
        return int(x)
    return int(struct.unpack("<i", struct.pack("<f", float(x)))[0])


def _library(text: str) -> ctypes.CDLL:
    source = _HARNESS + text
    name = hashlib.sha256(source.encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"flash_attn_compat_mods_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}.cpp"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(source)
        unfinished.replace(path)
    emulate._engine()
    options = (*emulate.VARIANT_OPTIONS, "-DTYPE=0", "-DAPPEND=0", "-include", "emulator.h")
    return ctypes.CDLL(str(emulate._built(path, options)))
