"""What this package promises about speed and memory on an H200, as data, and whether a run keeps it.

Everything is held against flash-attn in the same run: with the capability forced to 7.5, where the kernels run as the
PTX that a Turing GPU would get, and as the H200 itself, without flash-attn installed for us to use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from verify.timing import geometric_mean
from verify.workloads import DECODE, FULL


@dataclass(frozen=True)
class Promise:
    """Shares of flash-attn's speed: geometric means over all workloads, and what none of them falls below."""

    forward_mean: float
    both_mean: float
    forward_lowest: float
    both_lowest: float


FORCED = Promise(forward_mean=0.80, both_mean=0.62, forward_lowest=0.6, both_lowest=0.4)
NOT_FORCED = Promise(forward_mean=0.97, both_mean=0.93, forward_lowest=0.6, both_lowest=0.4)
DECODE_RATIO = 1.0
MEMORY_FACTOR, MEMORY_EXTRA_MIB = 1.1, 4.0
HOST_MICROSECONDS = 30.0


@dataclass(frozen=True)
class Ratios:
    """One workload through the default choice. Ratios are theirs / ours: above 1 we are faster. None: not measured.

    official may be PyTorch's build of FlashAttention-2; official_graph is the same in a CUDA graph.
    memory, both_memory: MiB at the peak of a forward, and of a training step; official's beside them.
    """

    workload: str
    served_by: str
    official: float | None = None
    official_both: float | None = None
    official_graph: float | None = None
    pad: float | None = None
    pad_both: float | None = None
    memory_mib: float | None = None
    official_memory_mib: float | None = None
    both_memory_mib: float | None = None
    official_both_memory_mib: float | None = None


def judged(ratios: Sequence[Ratios], host_us: Mapping[str, float]) -> list[str]:
    """One line for each promise that this run can say something about."""
    found = {row.workload: row for row in ratios}
    training = [found[workload.name] for workload in FULL if workload.name in found]
    forced = os.environ.get("FLASH_ATTN_COMPAT_CAPABILITY")
    promise = FORCED if forced else NOT_FORCED
    lines: list[str] = []
    if training or any(workload.name in found for workload in DECODE):
        lines.append(f"Promises for an H200, {f'capability {forced} forced' if forced else 'capability not forced'}:")
    lines += _means(training, promise)
    lines += _lowest(training, promise)
    lines += _padding(training)
    lines += _memory(training)
    lines += _decode(found)
    if "default" in host_us:
        us = host_us["default"]
        text = f"host time of a tiny varlen call {us:.1f} us, at most {HOST_MICROSECONDS:.0f}"
        lines.append(_line(us <= HOST_MICROSECONDS, text))
    return lines


def _line(met: bool, text: str, complete: bool = True) -> str:
    """`complete`: whether the run had all that the promise is about; if not, it is neither kept nor broken."""
    return f"{('met  ' if met else 'UNMET') if complete else 'open '}  {text}"


def _means(training: Sequence[Ratios], promise: Promise) -> Iterator[str]:
    for what, values, least in (
        ("forward", [row.official for row in training if row.official], promise.forward_mean),
        ("forward + backward", [row.official_both for row in training if row.official_both], promise.both_mean),
    ):
        if not values:
            continue
        mean = geometric_mean(values)
        share = f"{len(values)} of {len(FULL)} workloads"
        text = f"geometric mean to official, {what}: {mean:.3f} over {share}, at least {least}"
        yield _line(mean >= least, text, complete=len(values) == len(FULL))


def _lowest(training: Sequence[Ratios], promise: Promise) -> Iterator[str]:
    for what, values, least in (
        ("forward", [(row.official, row.workload) for row in training if row.official], promise.forward_lowest),
        ("forward + backward", [(row.official_both, row.workload) for row in training if row.official_both],
         promise.both_lowest),
    ):  # fmt: skip
        if not values:
            continue
        below = sorted(value for value in values if value[0] < least)
        named = ", ".join(f"{name} {ratio:.3f}" for ratio, name in below or [min(values)])
        text = f"no {what} below {least} of official, {len(values)} of {len(FULL)} workloads"
        yield _line(not below, f"{text}: {named if below else f'lowest {named}'}")


def _padding(training: Sequence[Ratios]) -> Iterator[str]:
    values = [(ratio, row.workload) for row in training for ratio in (row.pad, row.pad_both) if ratio]
    if not values:
        return
    below = sorted(value for value in values if value[0] < 1.0)
    named = ", ".join(f"{name} {ratio:.3f}x" for ratio, name in below or [min(values)])
    yield _line(not below, f"never slower than the pad scheme: {named if below else f'lowest {named}'}")


def _memory(training: Sequence[Ratios]) -> Iterator[str]:
    for what, figures in (
        ("the forward", [(row.workload, row.memory_mib, row.official_memory_mib) for row in training]),
        ("a training step", [(row.workload, row.both_memory_mib, row.official_both_memory_mib) for row in training]),
    ):
        known = [(name, ours, theirs) for name, ours, theirs in figures if ours is not None and theirs is not None]
        if not known:
            continue
        over = [
            f"{name} {ours:.0f} MiB, official {theirs:.0f}"
            for name, ours, theirs in known
            if ours > MEMORY_FACTOR * theirs + MEMORY_EXTRA_MIB
        ]
        text = f"peak memory of {what} at most official's x {MEMORY_FACTOR} + {MEMORY_EXTRA_MIB:.0f} MiB"
        yield _line(not over, f"{text}: {'; '.join(over) or f'all {len(known)} workloads'}")


def _decode(found: Mapping[str, Ratios]) -> Iterator[str]:
    for workload in DECODE:
        row = found.get(workload.name)
        if row is None or row.official is None:
            continue
        graph = "" if row.official_graph is None else f", {row.official_graph:.3f} in a graph"
        met = row.official >= DECODE_RATIO and (row.official_graph or DECODE_RATIO) >= DECODE_RATIO
        yield _line(met, f"{workload.name}: {row.official:.3f} of official{graph}, at least {DECODE_RATIO}")
