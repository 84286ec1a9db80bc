"""What this package promises about speed and memory on an H200, and whether a run keeps it.

Everything is held against flash-attn in the same run: with the capability forced to 7.5, where the kernels run as the
PTX that a Turing GPU would get, and as the H200 itself, without flash-attn installed for us to use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from verify.bench_report import BOTH, FORWARD, GRAPH, Compared
from verify.timing import geometric_mean
from verify.workloads import DECODE, FULL

# Shares of flash-attn's speed, forward and forward + backward: geometric means over all workloads, with the capability
# forced or not, and what none of the workloads falls below.
MEANS = {True: (0.80, 0.62), False: (0.97, 0.93)}
LOWEST = (0.6, 0.4)
DECODE_RATIO = 1.0
MEMORY_FACTOR, MEMORY_EXTRA_MIB = 1.1, 4.0


def judged(found: Sequence[Compared]) -> list[str]:
    """One line for each promise that this run can say something about."""
    by_name = {each.workload: each for each in found}
    training, decoding = (
        [by_name[workload.name] for workload in workloads if workload.name in by_name] for workloads in (FULL, DECODE)
    )
    forced = os.environ.get("FLASH_ATTN_COMPAT_CAPABILITY")
    head = f"Promises for an H200, {f'capability {forced} forced' if forced else 'capability not forced'}:"
    lines = [head] if training or decoding else []
    return [*lines, *_speed(training, bool(forced)), *_padding(training), *_memory(training), *_decode(decoding)]


def _line(met: bool, text: str, complete: bool = True) -> str:
    """`complete`: whether the run had all that the promise is about; if not, it is neither kept nor broken."""
    return f"{('met  ' if met else 'UNMET') if complete else 'open '}  {text}"


def _speed(training: Sequence[Compared], forced: bool) -> Iterator[str]:
    for index, (mode, what) in enumerate(((FORWARD, "forward"), (BOTH, "forward + backward"))):
        values = [(value, each.workload) for each in training if (value := each.to_flash(mode))]
        if not values:
            continue
        mean, least = geometric_mean([value for value, _ in values]), MEANS[forced][index]
        share = f"{len(values)} of {len(FULL)} workloads"
        text = f"geometric mean to official, {what}: {mean:.3f} over {share}, at least {least}"
        yield _line(mean >= least, text, complete=len(values) == len(FULL))
        yield _none_below(values, LOWEST[index], f"no {what} below {LOWEST[index]} of official, {share}")


def _none_below(values: Sequence[tuple[float, str]], least: float, text: str) -> str:
    below = sorted(value for value in values if value[0] < least)
    named = ", ".join(f"{name} {ratio:.3f}" for ratio, name in below or [min(values)])
    return _line(not below, f"{text}: {'' if below else 'lowest '}{named}")


def _padding(training: Sequence[Compared]) -> Iterator[str]:
    rivals = [(each, mode, each.rival(["pad_sdpa"], mode)) for each in training for mode in (FORWARD, BOTH)]
    values = [(ratio, each.workload) for each, mode, rival in rivals if (ratio := each.ratio(rival, mode))]
    if values:
        yield _none_below(values, 1.0, "never slower than the pad scheme")


def _memory(training: Sequence[Compared]) -> Iterator[str]:
    for field, what in (("memory_mib", "the forward"), ("both_memory_mib", "a training step")):
        known = [
            (each.workload, ours, theirs)
            for each in training
            if (ours := getattr(each.mine, field)) and (theirs := getattr(each.rows.get("official"), field, None))
        ]
        over = [
            f"{name} {ours:.0f} MiB, official {theirs:.0f}"
            for name, ours, theirs in known
            if ours > MEMORY_FACTOR * theirs + MEMORY_EXTRA_MIB
        ]
        text = f"peak memory of {what} at most official's x {MEMORY_FACTOR} + {MEMORY_EXTRA_MIB:.0f} MiB"
        if known:
            yield _line(not over, f"{text}: {'; '.join(over) or f'all {len(known)} workloads'}")


def _decode(decoding: Sequence[Compared]) -> Iterator[str]:
    for each in decoding:
        eager, graph = each.to_flash(FORWARD), each.ratio(each.rows.get("official"), GRAPH)
        if eager is not None:
            text = f"{each.workload}: {eager:.3f} of official" + (f", {graph:.3f} in a graph" if graph else "")
            met = min(eager, graph or DECODE_RATIO) >= DECODE_RATIO
            yield _line(met, f"{text}, at least {DECODE_RATIO}")
