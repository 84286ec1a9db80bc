"""From the plain loop to today's forward kernel, step by step: `python -m benchmarks.kernel_ladder`.

Each step of kernel_ladder.cu adds one idea; docs/kernels.md explains them. On a GPU the steps are checked and timed, with
Turing's instructions on newer GPUs too. The model's columns (kernel_report) need NVRTC and cuobjdump and no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernel_report import Pipes, turing_pipes, useful
from benchmarks.runner import apart
from flash_attn_compat import flash_attn_func, settings, use_backend
from flash_attn_compat.backends.fused import launcher, nvrtc, params, tensor_cores, variants
from flash_attn_compat.backends.fused.variants import FP16, Kind, Variant
from tests.kernels import offline
from verify.environment import describe
from verify.timing import Failed, Job, Timing, fastest, time_together

SOURCE = Path(__file__).with_suffix(".cu")
KEYS = 64  # of a tile in shared memory
TODAY = 9
IDEAS = (
    "plain loop: a thread for each row, every score twice",
    "online softmax: every score once",
    "loads of 16 bytes",
    "tiles of K and V in shared memory",
    "tensor cores, scores through shared memory",
    "scores stay in registers",
    "ldmatrix, swizzled tiles",
    "the next tile on its way",
    "tall tiles: twice the rows for each tile of keys",
    "today's kernel: masks where needed, one fma and exp2 for a score",
)
HEAD_DIMS = 64, 128
# Steps 4 and 5 read operands by words from rows that begin in the same banks. A product of S takes a word of K in eight
# turns, a product of O two words of V in four turns each: 7 and 6 more than without conflicts.
MORE_TURNS = {4: 6.5, 5: 6.5}
# Of the largest number of the result. fp16 rounds to 2^-11, and P and out are rounded.
TOLERANCE = 4e-3
PRODUCT_FLOPS = 2 * 16 * 8 * 8
LOOPS, ROUNDS, WARPS = 2, 1024, 8  # of tensor_cores.cu


def variant(step: int, head_dim: int, causal: bool) -> Variant:
    """The kernel of a step, today's for the last. For sm_75."""
    if step == TODAY:
        return variants.forward(Kind(75, FP16, head_dim, local=causal))
    tall = step == TODAY - 1
    warps = 8 if tall and head_dim > 64 else 4
    rows = 128 if step < 4 or tall else 64
    shared = 0 if step < 3 else 2 * KEYS * head_dim * 2 + (step == 4) * 4 * 16 * (KEYS + 4) * 4
    macros = (("TYPE", FP16), ("D", head_dim), ("LOCAL", int(causal)), ("STEP", step))
    return Variant("ladder", str(SOURCE), macros, rows, warps * 32, shared)


# ---- the model -------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """Cycles of a T4's multiprocessor for 64 rows times 64 keys. share: of the tensor cores' limit"""

    pipes: Pipes
    busiest: str
    share: float
    registers: int
    spilled: int


def key_loops(code: list[tuple[int, str]], head_dim: int) -> Counter[str]:
    """Instructions of the innermost loops that multiply a row's channels: one turn is one key."""
    loops = [loop for loop in offline.loops(code) if sum(count for name, count in loop.items() if name == "FFMA") >= head_dim]
    return sum(loops, Counter())


def model(step: int, head_dim: int, causal: bool) -> Model | None:
    """What kernel_report's model says of a step's machine code; None without NVRTC and cuobjdump."""
    compiler = next(reversed(offline.compilers().values()), None)
    if compiler is None or offline.cuobjdump() is None:
        return None
