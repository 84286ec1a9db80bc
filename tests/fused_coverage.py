"""Problems that reach every variant of the fused kernels: for the GPU checks, and for a sanitizer to watch.

`python -m tests.fused_coverage` compiles them all into the cache, for Turing and for the GPU at hand or --for another.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flash_attn_compat import backend_counts, use_backend
from flash_attn_compat.backends.fused.building import aot, nvrtc
from flash_attn_compat.backends.fused.choosing import enumeration, tiles
from flash_attn_compat.backends.fused.choosing.kinds import (
    BF16,
    BF16_AS_FP16,
    BOOLEANS,
    E4M3,
    E5M2,
    FEW_ROWS,
    FLOAT_BIAS,
    FP16,
    HALF_BIAS,
    HEAD_DIMS,
    ONE_TILE,
    SHORT,
    KernelFeatures,
    Kind,
    Sizes,
)
from flash_attn_compat.backends.fused.launching import masks
from flash_attn_compat.backends.fused.tuning import candidates
from flash_attn_compat.torch_sdpa.policy import Policy
from tests.kernels import eight_bit_steps
from tests.sdpa import fuzz, originals
from verify.examination import Examination
from verify.problems import Problem

_FEATURES = ("local", "alibi", "softcap", "dropout", "paged")


def checks(place: torch.device) -> Iterator[tuple[str, Kind, Callable[[], None]]]:
    """Yield a name, a kind of call, and a check that raises AssertionError if verify's judge finds a fault."""
    number = nvrtc.target_number(place.index)
    for kind in masked_kinds(number):
        label = (
            f"d{kind.D} type {kind.type} vec {kind.sizes.vec} bias {kind.features.bias}"
            + " pairs" * kind.features.bias_pairs
        )
        yield f"masked {label}", kind, partial(_check_masked, masked_problem(kind), place)
    for kind in eight_bit_kinds(number):
        for entry, step in eight_bit_steps.steps(kind).items():
            label = (
                f"d{kind.D}/{kind.DV} type {kind.type} cache {kind.features.cache} vec {kind.sizes.vec}"
                + " full" * kind.features.local
            )
            yield f"{entry} {label}", kind, partial(eight_bit_steps.check, step, place)
    for kind in kinds(number):
        names = "".join(f" {name}" for name in _FEATURES if getattr(kind.features, name))
        names += " narrow" * kind.is_narrow + " few rows" * kind.hints.few_rows
        names += f" at most {kind.hints.short}" * (kind.hints.short > 0) + " long" * kind.hints.long
        names += f" {kind.hints.few_keys} keys" * (kind.hints.few_keys > 0)
        label = f"d{kind.D}/{kind.DV} type {kind.type} vec {kind.sizes.vec}{names}"
        for entry, problem in problems(kind).items():
            yield f"{entry} {label}", kind, partial(_check, problem, place)


def _check(problem: Problem, place: torch.device) -> None:
    verdict = Examination(problem, place).judge("fused")
    assert not verdict.failures and not verdict.refused, verdict


def _check_masked(problem: fuzz.Problem, place: torch.device) -> None:
    with originals.override_on(Policy(place.type, always=True, least_products=0)), use_backend("fused"):
        before = backend_counts()
        complaints = fuzz.examine(problem, str(place))
    assert not complaints and backend_counts().get("fused", 0) > before.get("fused", 0), complaints


# Which have each feature alone, too.
_USUAL = 32, 64, 128, 256
# More than small tiles take, in packed and in dense sequences; and of those, where one tile has all keys.
_TALL_ROWS, _TALL_DENSE_ROWS, _TALL_OF_FEW_KEYS = 350, 520, 250


def kinds(number: int) -> Iterator[Kind]:
    """Yield kinds with each feature alone at usual head dims, and with all features at every head dim and dtype."""
    for D in HEAD_DIMS:
        for type in (FP16, BF16 if number >= 80 else BF16_AS_FP16):
            plain = Kind(number, type, Sizes(D))
            yield plain
            yield plain.replace(local=True, alibi=True, softcap=True, dropout=True, window=104)
            if type == BF16_AS_FP16:
                yield plain.replace(copied=True)
            conditions = set().union(*(tiles.TURING[entry][D] for entry in candidates.ENTRIES))
            if number < 80 and conditions & {tiles.LONG, tiles.LONG_FP16}:
                yield plain.replace(copied=type == BF16_AS_FP16, long=True)
            if number < 80 and type == FP16 and tiles.LONG_CAUSAL in conditions:
                yield plain.replace(local=True, long=True)
            if D == 192:
                yield plain.replace(head_dim_v=128)
            if D not in _USUAL:
                yield plain.replace(local=True, window=1000)
                continue
            yield plain.replace(vec=1)
            for name in _FEATURES:
                yield plain.replace(**{name: True}, window=1000 if name == "local" else None)
            yield plain.replace(local=True, window=34)
            yield plain.replace(few_rows=True)
            if number < 80:
                yield plain.replace(few_rows=True, local=True, window=1000)
                for short in (SHORT, FEW_ROWS) if D <= 64 else (FEW_ROWS,):
                    few_keys = short if type == FP16 and D in ONE_TILE[short] else 0
                    yield plain.replace(few_rows=True, short=short, few_keys=few_keys)
            if number < 80 and type == FP16:
                for keys in (keys for keys, sizes in ONE_TILE.items() if D in sizes):
                    yield plain.replace(few_keys=keys)
                    yield plain.replace(few_keys=keys, local=True, alibi=True, softcap=True, dropout=True, window=24)
            yield plain.replace(local=True, alibi=True, softcap=True, paged=True, vec=1, window=104)


def eight_bit_kinds(number: int) -> Iterator[Kind]:
    """With caches of 8-bit floats: each type at usual head dims, all features together, and rows anywhere."""
    for type, cache in itertools.product((FP16, BF16_AS_FP16), (E4M3, E5M2)):
        for D in (32, 64, 128, 256, 512) if cache == E4M3 else (64, 128):
            yield Kind(number, type, Sizes(D), KernelFeatures(cache=cache))
        full = Kind(
            number, type, Sizes(128, window=34), KernelFeatures(local=True, alibi=True, softcap=True, cache=cache)
        )
        yield full
        yield full.replace(head_dim=64, paged=True, vec=1)
        yield Kind(number, type, Sizes(128), KernelFeatures(paged=True, cache=cache))
    yield Kind(number, FP16, Sizes(192, head_dim_v=128), KernelFeatures(cache=E4M3))


def masked_kinds(number: int) -> Iterator[Kind]:
    """With each sort of dense mask: at usual head dims, off the 16 bytes, and where warps have the same rows."""
    for kind in _masked_kinds(number):
        (_, keys), *_ = masked_problem(kind).lengths
        yield kind.replace(bias_words=masks.words_per_block(torch.empty(1, keys, device="meta")))


def _masked_kinds(number: int) -> Iterator[Kind]:
    for type in (FP16, BF16 if number >= 80 else BF16_AS_FP16):
        for bias, D in (
            *itertools.product((BOOLEANS, HALF_BIAS), (64, 128)),
            (BOOLEANS, 160), (HALF_BIAS, 256), (FLOAT_BIAS, 64),
        ):  # fmt: skip
            kind = Kind(number, type, Sizes(D), KernelFeatures(bias=bias))
            yield kind
            if bias > BOOLEANS:
                yield kind.replace(bias_pairs=True)
        truths = Kind(number, type, Sizes(64), KernelFeatures(bias=BOOLEANS))
        yield truths.replace(few_rows=True)
        yield truths.replace(head_dim=48, vec=1)
        yield truths.replace(head_dim=48, vec=1, bias=HALF_BIAS)
        if type == BF16_AS_FP16:
            yield truths.replace(copied=True)
        if type == FP16 and number < 80:
            yield truths.replace(few_keys=64)
            yield truths.replace(few_keys=128, bias=HALF_BIAS)
            yield truths.replace(few_keys=128, bias=HALF_BIAS, bias_pairs=True)


_MASKS = {
    BOOLEANS: "bool none blocks", HALF_BIAS: "own heads some", FLOAT_BIAS: "fp32 batch left",
}  # fmt: skip


def masked_problem(kind: Kind) -> fuzz.Problem:
    """A call of that kind, for PyTorch's operator; of keys in pairs there is an even number."""
    rows, keys = (_TALL_DENSE_ROWS, 170) if kind.sizes.vec == 8 else (70, 160)
    if kind.sizes.vec == 8 and kind.type == BF16_AS_FP16:  # without copies
        rows = _TALL_OF_FEW_KEYS if kind.size <= 64 else _TALL_ROWS
    if kind.hints.few_rows:
        rows = 60
    if kind.hints.few_keys:
        rows, keys = _TALL_OF_FEW_KEYS, kind.hints.few_keys - 2
    if kind.features.copied:  # which takes many
        rows, keys = 1300, 1500
    dtype, dim = "float16" if kind.type == FP16 else "bfloat16", kind.D if kind.sizes.vec == 8 else kind.D - 3
    lengths = ((rows, keys + (not kind.features.bias_pairs)),) * 2
    return fuzz.Problem(
        "sdpa", dtype, lengths, heads=(4, 2), dims=(dim, dim), mask=originals.NO_MASK, window=None, scale=None,
        layouts=("rows first",) * 3, backward=True, seed=1, bias=_MASKS[kind.features.bias],
    )  # fmt: skip


def problems(kind: Kind) -> dict[str, Problem]:
    """Return calls of a kind by the kernels that they launch: no length is a multiple of a tile."""
    window = (-1, -1)
    if kind.features.local:
        window = (30, 3) if kind.is_narrow else (-1, 20)
    # Gradients take rows that are anywhere as they are in small problems only.
    rows, keys, nheads_k, group = (19, _TALL_ROWS), (45, 171), 2, 2
    if kind.sizes.vec != 8:
        rows, keys, nheads_k, group = (9, 70), (21, 50), 1, 2
        if kind.size == 128:
            rows, group = (1, _TALL_ROWS), 1
    if kind.sizes.vec != 8 and kind.type == FP16 and kind.size <= 128:
        keys = 21, 140  # more than one tile has
    if kind.hints.few_rows:
        rows = 19, 100 if kind.features.local else 60
    if kind.hints.few_keys:
        rows, keys = (19, _TALL_OF_FEW_KEYS), (kind.hints.few_keys - 13, kind.hints.few_keys - 1)
    if kind.hints.short:
        rows = keys = 19, kind.hints.short - 2
    if kind.features.copied:  # which takes many
        rows, keys = (900, 700), (1700, 1500)
    if kind.hints.long:
        rows, keys = (2080, 2020), (2050, 2060)
    if kind.hints.long and kind.features.local:
        rows, keys, nheads_k, group = (8210, 8190), (8200, 8195), 1, 1
    asked = kind.features
    common = Problem(
        "varlen", rows, keys, nheads_k, group,
        head_dim=kind.D if kind.sizes.vec == 8 else kind.D - 3,
        head_dim_v=kind.DV - 8 if kind.sizes.vec == 8 else kind.DV - 1,
        dtype="float16" if kind.type == FP16 else "bfloat16",
        window=window, softcap=2.0 * asked.softcap, alibi="bh" * asked.alibi, dropout_p=0.3 * asked.dropout,
        page_size=7 * asked.paged, poison="nan",
    )  # fmt: skip
    few: dict[str, Any] = {"kind": "kvcache", "seqlens_q": (3, 3), "capacity": 210, "backward": False}
    found = {}
    if kind.features.paged:
        found["forward"] = replace(common, kind="paged", backward=False)
    else:
        found["forward and backward"] = replace(common, gap=(0, 3))
    if not kind.features.dropout and not kind.features.copied and not kind.hints.long:
        found["decode"] = replace(common, **few)
        rotary = common.head_dim // 2 // 16 * 16
        found["decode_append"] = replace(common, **few, new_keys=2, rotary_dim=rotary)
        found["append"] = replace(common, **few, new_keys=20, rotary_dim=rotary, rotary_interleaved=False)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for", dest="architecture", help="sm_90, say; the GPU's by default")
    parser.add_argument("--only", action="store_true", help="for this architecture alone")
    options = parser.parse_args()
    architecture = options.architecture or nvrtc.target(torch.cuda.current_device())
    wanted = [
        (variant, name)
        for name in dict.fromkeys((architecture,) if options.only else (architecture, "compute_75"))
        for number in (aot.parse_architecture(name),)
        for variant in enumeration.made_for((*kinds(number), *masked_kinds(number), *eight_bit_kinds(number)))
    ]
    # Threads of one process wait for one another within NVRTC.
    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
    made, errors = aot.compile_all(wanted, pool=pool)
    print(f"{made} kernels compiled, {len(wanted) - made - len(errors)} were there", *errors, sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
