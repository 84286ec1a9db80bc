"""What this package promises about speed and memory on an H200, as data, and whether a run keeps it.

The promises are set for capability 7.5 forced, compilation off unless said, against flash-attn on the same machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from verify.timing import geometric_mean
from verify.workloads import DECODE, FULL

FORWARD_MEAN, BOTH_MEAN, COMPILED_FORWARD_MEAN = 0.38, 0.32, 0.55
FORWARD_AIM, BOTH_AIM, COMPILED_FORWARD_AIM = 0.45, 0.42, 0.65
LOWEST = 0.12
BARE = 1.05
MEMORY_FACTOR, MEMORY_EXTRA_MIB, SOFTCAP_MEMORY_MIB = 1.3, 32.0, 512.0
DECODE_RATIO, SINGLE_DECODE_RATIO = 0.75, 0.4
HOST_MICROSECONDS = 48.0
TORCH_FLASH_MEAN = 0.93


@dataclass(frozen=True)
class Ratios:
    """One workload through the default choice. Ratios are theirs / ours: above 1 we are faster. None: not measured.

    official may be PyTorch's build of FlashAttention-2, official_itself is flash-attn, measured or recorded.
    """

    workload: str
    served_by: str
    official: float | None = None
    official_both: float | None = None
    official_itself: float | None = None
    pad: float | None = None
    pad_both: float | None = None
    bare: float | None = None
    bare_both: float | None = None
    memory_mib: float | None = None


def judged(ratios: Sequence[Ratios], host_us: Mapping[str, float], compiled: bool) -> list[str]:
    """One line for each promise this run can say something about."""
    found = {row.workload: row for row in ratios}
    training = [found[workload.name] for workload in FULL if workload.name in found]
    lines: list[str] = []
    forced = os.environ.get("FLASH_ATTN_COMPAT_CAPABILITY")
    if training or any(workload.name in found for workload in DECODE):
        setting = f"capability {forced} forced" if forced else "capability not forced"
        lines.append(f"Promises (set for an H200, capability 7.5 forced); this run: {setting}, "
                     f"compilation {'on' if compiled else 'off'}")  # fmt: skip
    lines += _means(training, compiled)
    lines += _each(training)
    lines += _memory(training)
    lines += _decode(found)
    if "default" in host_us:
        us = host_us["default"]
        lines.append(_line(us <= HOST_MICROSECONDS, f"host time of a tiny varlen call {us:.1f} us, "
                                                    f"at most {HOST_MICROSECONDS:.0f}"))  # fmt: skip
    served = [row.official_itself for row in training if row.served_by == "torch_flash" and row.official_itself]
    if served and not forced:
        mean = geometric_mean(served)
        lines.append(_line(mean >= TORCH_FLASH_MEAN, f"torch_flash over the {len(served)} workloads it serves: "
                                                     f"{mean:.3f} of official, at least {TORCH_FLASH_MEAN}"))  # fmt: skip
    return lines


def _line(met: bool, text: str, complete: bool = True) -> str:
    """`complete`: whether the run had all that the promise is about; if not, it is neither kept nor broken."""
    return f"{('met  ' if met else 'UNMET') if complete else 'open '}  {text}"


def _means(training: Sequence[Ratios], compiled: bool) -> list[str]:
    targets = [
        ("forward", "official", COMPILED_FORWARD_MEAN if compiled else FORWARD_MEAN,
         COMPILED_FORWARD_AIM if compiled else FORWARD_AIM),
        ("forward + backward", "official_both", BOTH_MEAN, BOTH_AIM),
    ]  # fmt: skip
    lines = []
    for what, field, least, aim in targets:
        values = [getattr(row, field) for row in training if getattr(row, field) is not None]
        if not values:
            continue
        mean = geometric_mean(values)
        share = f"{len(values)} of {len(FULL)} workloads"
        lines.append(
            _line(mean >= least, f"geometric mean to official, {what}: {mean:.3f} over {share}, at least {least} (aim {aim})",
                  complete=len(values) == len(FULL))
        )  # fmt: skip
    return lines


def _each(training: Sequence[Ratios]) -> list[str]:
    rules: list[tuple[str, tuple[str, ...], float, Callable[[float], str]]] = [
        (f"no workload below {LOWEST} of official", ("official", "official_both"), LOWEST, "{:.3f}".format),
        ("never slower than the pad scheme", ("pad", "pad_both"), 1.0, "{:.3f}x".format),
        ("within 5 % of the bare kernel", ("bare", "bare_both"), 1 / BARE, "{:.3f}".format),
    ]
    lines = []
    for what, fields, least, shown in rules:
        values = [
            (getattr(row, field), f"{row.workload}{' fwd+bwd' if field.endswith('both') else ''}")
            for row in training
            for field in fields
            if getattr(row, field) is not None
        ]
        if not values:
            continue
        below = sorted(value for value in values if value[0] < least)
        offenders = ", ".join(f"{name} {shown(value)}" for value, name in below)
        lowest = min(values)
        seen = sum(any(getattr(row, field) is not None for field in fields) for row in training)
        what = f"{what}, {seen} of {len(FULL)} workloads"
        lines.append(_line(not below, f"{what}: {offenders or f'lowest {shown(lowest[0])} ({lowest[1]})'}"))
    return lines


def _memory(training: Sequence[Ratios]) -> list[str]:
    workloads = {workload.name: workload for workload in FULL}
    over, seen = [], 0
    for row in training:
        workload = workloads[row.workload]
        if row.memory_mib is None or workload.recorded is None or workload.recorded.forward_mib is None:
            continue
        seen += 1
        most = SOFTCAP_MEMORY_MIB
        if not workload.softcap:
            most = MEMORY_FACTOR * workload.recorded.forward_mib + MEMORY_EXTRA_MIB
        if row.memory_mib > most:
            over.append(f"{row.workload} {row.memory_mib:.0f} MiB, at most {most:.0f}")
    if not seen:
        return []
    text = f"peak memory of the forward at most {MEMORY_FACTOR} x official's + {MEMORY_EXTRA_MIB:.0f} MiB"
    return [_line(not over, f"{text}: {'; '.join(over) or f'all {seen} workloads'}")]


def _decode(found: Mapping[str, Ratios]) -> list[str]:
    lines = []
    for workload in DECODE:
        ratio = found[workload.name].official if workload.name in found else None
        if ratio is not None and not math.isnan(ratio):
            least = SINGLE_DECODE_RATIO if workload.batch == 1 else DECODE_RATIO
            lines.append(_line(ratio >= least, f"{workload.name}: {ratio:.3f} of official, at least {least}"))
    return lines
