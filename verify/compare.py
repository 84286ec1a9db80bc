"""`python -m verify compare`: compares every backend, or your kernel, with flash-attn's recorded answers and fp64.

Kernels that may end the process run in child processes. recorded.py and cases.py make the cases, judge.py has the
bounds, and compare_report.py shows the rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from flash_attn_compat.backends.fused.judging import faults
from flash_attn_compat.card import cap_memory
from flash_attn_compat.isolation import Ended, NotDone, may_break, read_concurrently, run_in_children

from . import implementations as impl
from .advice import locate_words
from .cases import Case, generated, plain
from .compare_report import report
from .compare_rows import Row
from .compare_words import crash_words, own_words
from .environment import checked_devices, describe
from .errors import UsageError
from .examination import Examination, Verdict
from .native import loads_native_code
from .output import announce, console, deliver, progress_bar
from .recorded import ABSENT, recorded_cases
from .tables import OURS

MOST_CHILDREN = 8  # processes that judge kernels on one GPU at once; each has its own CUDA context


def run(
    judged: Sequence[impl.Implementation],
    devices: Sequence[str],
    cases: Sequence[Case],
    first: int = 0,
    gradients: bool = False,
) -> Iterator[Row]:
    """Yield the rows case by case, so that the tensors of a case are freed before the next case.

    first: how many rows to leave out; gradients: whether a user's kernel must have gradients
    """
    for case in cases:
        for device in devices:
            skipped, first = judged[:first], max(0, first - len(judged))
            asked = judged[len(skipped) :]
            if device.startswith("mps") and case.dtype == "fp64":
                refusal = Verdict(refused="the device has no fp64")
                yield from (Row(case, each.name, device, refusal) for each in asked)
                continue
            examination = Examination(case.problem, device) if asked else None
            for each in asked:
                assert examination is not None
                may_lack = isinstance(each, impl.Imported) and not gradients
                yield _judged(case, each, device, examination, may_lack)


@dataclass(frozen=True)
class Asked:
    """The options of the command line, in a form that can be sent to another process."""

    implementation: str | None
    backends: Sequence[str]
    devices: Sequence[str]
    quick: bool
    texts: Sequence[str]  # texts in the names of cases
    forward_only: bool
    gradients: bool = False  # whether a user's kernel must have gradients
    share: tuple[int, int] = (0, 1)  # (first, step): every step-th case from number first on

    @property
    def names(self) -> list[str]:
        """Return the names of all judged implementations, without an import."""
        return [self.implementation] if self.implementation else [each.name for each in impl.backends([*self.backends])]

    @property
    def judged(self) -> list[impl.Implementation]:
        return [impl.imported(self.implementation)] if self.implementation else [*impl.backends([*self.backends])]

    @property
    def cases(self) -> list[Case]:
        first, every = self.share
        return [
            case.forward_only() if self.forward_only else case
            for case in (*plain(self.quick), *recorded_cases(), *generated(self.quick))
            if not self.texts or any(text in f"{case.function} {case.name}" for text in self.texts)
        ][first::every]


def steps(first: int, asked: Asked) -> Iterator[tuple[Verdict, str, bool]]:
    """Yield the verdict, remark and `bypassed` of each row from number ``first`` on: steps for `run_in_children`."""
    torch.set_num_threads(1)
    for device in asked.devices:
        cap_memory(torch.device(device))
    for row in run(asked.judged, asked.devices, asked.cases, first, asked.gradients):
        yield row.verdict, row.remark, row.bypassed


def count_judging_processes(devices: Sequence[str]) -> int:
    """Return how many processes judge: several on a GPU, where compilation and self-tests take most of the time."""
    return min(MOST_CHILDREN, os.cpu_count() or 1) if any(each.startswith("cuda") for each in devices) else 1


def rows_of(asked: Asked, cases: Sequence[Case], isolated: bool) -> Iterator[Row]:
    """Yield all rows. isolated: in child processes, so that a kernel that ends a process is named"""
    if not isolated:
        yield from run(asked.judged, asked.devices, cases, gradients=asked.gradients)
        return
    count = count_judging_processes(asked.devices)
    shares = [(replace(asked, share=(first, count)), cases[first::count]) for first in range(count)]
    if count == 1:
        yield from _isolated_rows(*shares[0])
        return
    rows = read_concurrently([_isolated_rows(*share) for share in shares])
    for number in range(len(cases)):
        yield from itertools.islice(rows[number % count], len(asked.devices) * len(asked.names))


def _isolated_rows(asked: Asked, cases: Sequence[Case]) -> Iterator[Row]:
    """Yield the rows of the cases, judged in a child process; a new child takes over if one ends."""
    places = [(case, name, device) for case in cases for device in asked.devices for name in asked.names]
    for place, found in zip(places, run_in_children(len(places), steps, asked)):
        if not isinstance(found, Ended):
            yield Row(*place, *found)
            continue
        is_crash = not isinstance(found, NotDone)
        yield Row(*place, Verdict(errors=[found.how]), crashed=is_crash, unasked=not is_crash)


def _judged(
    case: Case, implementation: impl.Implementation, device: str, examination: Examination, may_lack_gradients: bool
) -> Row:
    before, remark = implementation.calls_served(), ""
    verdict = examination.examine(implementation, case.official, True, may_lack_gradients)
    if verdict.refused and not verdict.errors and examination.call.dropout_p <= 0:
        # Judge the call again without softmax_lse: some kernels return only the output, with gradients.
        alone = examination.without_lse().examine(implementation, case.official, False, may_lack_gradients)
        if not alone.refused:
            verdict, remark = alone, f"without softmax_lse: {verdict.refused}"
    bypassed = before is not None and not verdict.refused and implementation.calls_served() == before
    return Row(case, implementation.name, device, verdict, remark, bypassed)


BROKEN = (
    "a kernel broke the GPU or its process: with CUDA_LAUNCH_BLOCKING=1 the first row that says so names the kernel. "
    "docs/troubleshooting.md has the next steps"
)


def is_of_a_broken_gpu(error: str) -> bool:
    """Whether an error means that the process can no longer use the GPU."""
    return "its process ended" in error or "CUDA error" in error or error.startswith("ContextLost")


# ---- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", action="append", default=[], metavar="NAME", help="only this backend (may be repeated)")
    what = "judge this instead of the backends: a module or object with public functions, or a flash_attn_func"
    add("--implementation", metavar="MODULE_OR_FILE.py[:ATTRIBUTE]", help=what)
    add("--device", action="append", default=[], metavar="DEVICE", help="only on: cpu, cuda, cuda:1, mps (repeatable)")
    add("--quick", action="store_true", help="the recorded answers and one generated problem for each feature")
    add("-k", dest="filter", default="", metavar="TEXT[,TEXT]", help="only cases with one of these texts in their name")
    add("--forward-only", action="store_true", help="leave gradients out")
    add("--gradients", action="store_true", help="count missing gradients of --implementation as wrong")
    what = "cases run in a child process, so that a crash is named (default on a GPU and for files with native code)"
    add("--isolate", action=argparse.BooleanOptionalAction, default=None, help=what)
    add("-v", "--verbose", action="store_true", help="a row for every problem")


def is_isolated(arguments: argparse.Namespace, devices: Sequence[str]) -> bool:
    if arguments.isolate is not None:
        return bool(arguments.isolate)
    on_gpu = any(may_break(device.partition(":")[0]) for device in devices)
    return on_gpu or (bool(arguments.implementation) and loads_native_code(arguments.implementation))


def main(arguments: argparse.Namespace) -> int:
    own: str | None = arguments.implementation
    if own and arguments.backend:
        raise UsageError("--backend and --implementation exclude each other")
    if arguments.gradients and (arguments.forward_only or not own):
        raise UsageError("--gradients goes with --implementation, and not with --forward-only")
    texts = [text.strip() for text in arguments.filter.split(",") if text.strip()]
    devices = checked_devices(arguments.device)
    asked = Asked(own, arguments.backend, devices, arguments.quick, texts, arguments.forward_only,
                  arguments.gradients)  # fmt: skip
    isolated = is_isolated(arguments, devices)
    cases, names = asked.cases, asked.names
    if not cases:
        raise UsageError(f"no case has {arguments.filter!r} in its name")
    if not isolated:
        _ = asked.judged  # raises for a wrong name before the work
    elif own:
        impl.check_loads(own)
    torch.set_num_threads(1)  # thousands of small problems: more threads cost more time than they save
    terminal, environment = console(), describe(devices)
    announce(environment, terminal)
    rows: list[Row] = []
    ended = 0
    with progress_bar(terminal) as progress:
        task = progress.add_task("comparing", total=len(cases) * len(names) * len(devices))
        for row in rows_of(asked, cases, isolated):
            rows.append(row)
            ended += row.crashed
            told = f" (processes ended: {ended}; each restart takes seconds)" if ended else ""
            progress.update(task, advance=1, description=f"comparing{told}")
    remarks = [*([] if recorded_cases() else [ABSENT]), *(own_words(rows) if own else [])]
    remarks += crash_words(rows, own or OURS)
    if any(
        is_of_a_broken_gpu(error)
        for row in rows
        if may_break(row.device.partition(":")[0])
        for error in row.verdict.errors
    ):
        remarks.append(BROKEN)
    remarks += [f"refused: {reason}" for reason in faults.list_reasons()]
    advice = locate_words(rows, isolated)
    summary = report(rows, environment, arguments.verbose, remarks, own or OURS, bool(own), bool(texts), advice)
    deliver(summary, {"rows": [row.to_json() for row in rows]}, arguments, terminal)
    return 0 if summary.ok else 1
