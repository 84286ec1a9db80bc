"""`python -m verify compare`: holds every backend, or your kernel, against what flash-attn answered and fp64.

Runs and tabulates. What is compared is made in recorded.py and cases.py, how near it must come is judge.py's business.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flash_attn_compat.backends.fused import faults
from flash_attn_compat.card import cap_memory
from flash_attn_compat.isolation import Ended, in_children, may_break

from . import implementations as impl
from .cases import Case, generated
from .environment import checked_devices, describe
from .errors import UsageError
from .examination import Examination, Verdict
from .judge import Check
from .output import announce, console, deliver, progress_bar
from .recorded import ABSENT, recorded_cases
from .tables import OURS, Bar, Bars, Report, Table

PASS, FAIL, DECLINED = "pass", "FAIL", "declined"


@dataclass(frozen=True)
class Row:
    """One case through one implementation on one device.

    bypassed: answered without the backend, since there was nothing to compute, as with no keys at all
    """

    case: Case
    implementation: str
    device: str
    verdict: Verdict
    remark: str = ""
    bypassed: bool = False

    @property
    def refused(self) -> bool:
        return bool(self.verdict.refused) and not self.verdict.errors

    @property
    def outcome(self) -> str:
        return DECLINED if self.refused else FAIL if self.verdict.failures else PASS

    @property
    def note(self) -> str:
        if self.refused:
            return self.verdict.refused
        errors = [error.partition("\n")[0] for error in self.verdict.errors]
        beyond = [f"{check.quantity} {check.note}" for check in self.verdict.checks if check.note]
        near = self.verdict.as_near_as
        return "; ".join(filter(None, [self.remark, *errors, *beyond, f"as near as {near} comes" * bool(near)]))

    def worst(self, against: str) -> Check | None:
        """The check nearest to (or furthest beyond) its bound."""
        checks = (check for check in self.verdict.checks if check.against == against)
        return max(checks, key=lambda check: check.ratio, default=None)

    def to_json(self) -> dict[str, Any]:
        case, checks = self.case, [check.to_json() for check in self.verdict.checks]
        named = {"case": case.name, "function": case.function, "dtype": case.dtype, "recorded": bool(case.official)}
        asked = {"implementation": self.implementation, "device": self.device, "bypassed": self.bypassed}
        return {**named, **asked, "verdict": self.outcome, "note": self.note, "checks": checks}


def run(
    judged: Sequence[impl.Implementation], devices: Sequence[str], cases: Sequence[Case], first: int = 0
) -> Iterator[Row]:
    """Row after row, case by case: a case's tensors live no longer than its turn. first: rows to leave out"""
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
                yield _judged(case, each, device, examination)


@dataclass(frozen=True)
class Asked:
    """What the command line asks for, in a form that another process can be told."""

    implementation: str | None
    backends: Sequence[str]
    devices: Sequence[str]
    quick: bool
    texts: Sequence[str]  # in the names of cases
    forward_only: bool

    @property
    def judged(self) -> list[impl.Implementation]:
        return [impl.imported(self.implementation)] if self.implementation else [*impl.backends([*self.backends])]

    @property
    def cases(self) -> list[Case]:
        return [
            case.forward_only() if self.forward_only else case
            for case in (*recorded_cases(), *generated(self.quick))
            if not self.texts or any(text in f"{case.function} {case.name}" for text in self.texts)
        ]


def steps(first: int, asked: Asked) -> Iterator[tuple[Verdict, str, bool]]:
    """What rows from number ``first`` on hold beside their place: verdict, remark and bypassed."""
    torch.set_num_threads(1)
    for device in asked.devices:
        cap_memory(torch.device(device))
    for row in run(asked.judged, asked.devices, asked.cases, first):
        yield row.verdict, row.remark, row.bypassed


def rows_of(asked: Asked, judged: Sequence[impl.Implementation], cases: Sequence[Case]) -> Iterator[Row]:
    """All rows. On a GPU they are made in child processes, so that a kernel that breaks one is named."""
    if not any(may_break(device.partition(":")[0]) for device in asked.devices):
        yield from run(judged, asked.devices, cases)
        return
    places = [(case, each.name, device) for case in cases for device in asked.devices for each in judged]
    for place, found in zip(places, in_children(len(places), steps, asked)):
        yield Row(*place, Verdict(errors=[found.how])) if isinstance(found, Ended) else Row(*place, *found)


def _judged(case: Case, implementation: impl.Implementation, device: str, examination: Examination) -> Row:
    before, remark = implementation.calls_served(), ""
    verdict = examination.examine(implementation, case.official, twice=True)
    if verdict.refused and not verdict.errors and examination.call.dropout_p <= 0:
        # Some serve what a model asks for, the output and its gradients, but have no softmax_lse to show.
        alone = examination.without_lse().examine(implementation, case.official)
        if not alone.refused:
            verdict, remark = alone, f"without softmax_lse: {verdict.refused}"
    bypassed = before is not None and not verdict.refused and implementation.calls_served() == before
    return Row(case, implementation.name, device, verdict, remark, bypassed)


BROKEN = (
    "a kernel broke the GPU or its process: the first row that says so names it if CUDA_LAUNCH_BLOCKING=1 is set. "
    "docs/troubleshooting.md says what to do"
)


def is_of_a_broken_gpu(error: str) -> bool:
    """Whether an error says that a process's use of the GPU is over."""
    return "its process ended" in error or "CUDA error" in error or error.startswith("ContextLost")


# ---- tables ---------------------------------------------------------------------------------------------------------


MOST_REASONS = 5
AGAINST = {"official": "flash-attn", "fp64": "fp64"}
# Which quantity came nearest to its bound, its error, and that error as a multiple of the bound.
LEGEND = "(worst quantity, its error, in brackets that error / its bound)"


def _figure(check: Check | None) -> str:
    if check is None:
        return ""
    return f"{check.quantity} {check.error:.1e} ({_times(check.ratio)})"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 1000 else f"{ratio:.0e}"


def _every_row(title: str, rows: Iterable[Row], folded: bool = False) -> Table:
    columns = ("case", "backend", "device", "vs official", "vs fp64", "verdict", "note")
    cells = [
        (row.case.name, row.implementation, row.device, _figure(row.worst("official")), _figure(row.worst("fp64")),
         row.outcome, row.note)
        for row in rows
    ]  # fmt: skip
    return Table(f"{title} {LEGEND}", columns, cells, folded)


def _summary(rows: Iterable[Row]) -> Table:
    """A line for each implementation, device and kind of problem."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        kind = "recorded answers" if row.case.official else "generated problems"
        groups[row.implementation, row.device, kind].append(row)
    cells = []
    for parts, members in groups.items():
        ran = [row for row in members if not row.refused]
        worst = [
            max((check for row in ran if (check := row.worst(name))), key=lambda check: check.ratio, default=None)
            for name in AGAINST
        ]
        passed = sum(row.outcome == PASS for row in ran)
        right, refused = f"{passed} of {len(ran)}", str(len(members) - len(ran) or "")
        cells.append((*parts, right, refused, *map(_figure, worst), PASS if passed == len(ran) else FAIL))
    columns = ("backend", "device", "problems", "right", "declined", "vs official", "vs fp64", "verdict")
    return Table(f"Summary {LEGEND}", columns, cells)


def idle_backends(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """(implementation, device) of which no case ran, and why."""
    found: dict[tuple[str, str], str] = {}
    for who in dict.fromkeys((row.implementation, row.device) for row in rows):
        members = [row for row in rows if (row.implementation, row.device) == who]
        if all(row.refused or (row.bypassed and row.outcome == PASS) for row in members):
            found[who] = next((row.note for row in members if row.refused), "nothing to compute")
    return found


def own_words(rows: Sequence[Row]) -> list[str]:
    """For whoever wrote the kernel: what it declined, and which errors are no more than that."""
    raised = any(row.verdict.errors for row in rows)
    reasons = Counter(row.note for row in rows if row.refused).most_common()
    told = [f"{count} x {reason}" for reason, count in reasons[:MOST_REASONS]]
    more = sum(count for _, count in reasons[MOST_REASONS:])
    told += [f"{more} x for other reasons"] if more else []
    lines = [f"declined: {'; '.join(told)}"] if told else []
    near = {row.verdict.as_near_as for row in rows if row.outcome == FAIL and row.case.dtype in ("fp32", "fp64")}
    if near and "" not in near:
        coarse = " and ".join(sorted(near))
        lines.append(f"wrong in fp32, but as near as {coarse} comes: it computes in half precision, or rounds to it")
    return lines + ([f"declined, which is not wrong, counts for {impl.DECLINES}"] if told or raised else [])


def report(
    rows: Sequence[Row], environment: Mapping[str, str], verbose: bool, remarks: Sequence[str], subject: str
) -> Report:
    idle = idle_backends(rows)
    shown = [row for row in rows if (row.implementation, row.device) not in idle]
    ran = [row for row in shown if not row.refused]
    wrong = [row for row in ran if row.outcome == FAIL]
    tables = [_every_row("Every answer", shown, folded=not verbose), _summary(shown)]
    tables += [_every_row("Wrong answers", wrong)] if wrong and not verbose else []
    lines = [*remarks]
    lines += [f"{name} on {device}: no case ran ({reason})" for (name, device), reason in idle.items()]
    verdict = f"{'FAIL' if wrong else 'PASS'}: {len(ran) - len(wrong)} of {len(ran)} answers right"
    lines.append(verdict if ran else "FAIL: no case ran on any backend")
    ok = bool(ran) and not wrong
    pictures = [bounds_picture(shown)] if ran else []
    return Report("verify compare", environment, tables, lines, ok, subject, pictures)


def bounds_picture(rows: Sequence[Row]) -> Bars:
    """How near each implementation came to what is allowed."""
    groups: list[tuple[str, list[Bar | None]]] = []
    for name, device in dict.fromkeys((row.implementation, row.device) for row in rows):
        bars: list[Bar | None] = []
        for against in AGAINST:
            mine = (row.worst(against) for row in rows if (row.implementation, row.device) == (name, device))
            worst = max((check for check in mine if check), key=lambda check: check.ratio, default=None)
            # JSON knows no infinity.
            text = f"{worst.quantity}, {_times(worst.ratio)}" if worst else ""
            bars.append(Bar(min(worst.ratio, 1e9), text) if worst else None)
        errors = sum(bool(row.verdict.errors) for row in rows if (row.implementation, row.device) == (name, device))
        groups.append((f"{name} on {device}" + (f" (and {errors} x an error was raised)" if errors else ""), bars))
    title = "Largest error, as a share of what is allowed"
    return Bars(title, "allowed", [f"against {words}" for words in AGAINST.values()], groups)


# ---- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", action="append", default=[], metavar="NAME", help="only this backend (may be repeated)")
    what = "judge this instead of the backends: a module or object with the public functions, or a flash_attn_func"
    add("--implementation", metavar="MODULE_OR_FILE.py[:ATTRIBUTE]", help=what)
    add("--device", action="append", default=[], metavar="DEVICE", help="only on: cpu, cuda, cuda:1, mps (repeatable)")
    add("--quick", action="store_true", help="the recorded answers and one generated problem for each feature")
    add("-k", dest="filter", default="", metavar="TEXT[,TEXT]", help="only cases with one of these in their name")
    add("--forward-only", action="store_true", help="leave gradients out")
    add("-v", "--verbose", action="store_true", help="a row for every problem")


def main(arguments: argparse.Namespace) -> int:
    if arguments.implementation and arguments.backend:
        raise UsageError("--backend and --implementation exclude each other")
    texts = [text.strip() for text in arguments.filter.split(",") if text.strip()]
    devices = checked_devices(arguments.device)
    asked = Asked(arguments.implementation, arguments.backend, devices, arguments.quick, texts, arguments.forward_only)
    judged, cases = asked.judged, asked.cases
    if not cases:
        raise UsageError(f"no case has {arguments.filter!r} in its name")
    torch.set_num_threads(1)  # thousands of small problems: more threads cost more than they give
    terminal, environment = console(), describe(devices)
    announce(environment, terminal)
    rows: list[Row] = []
    with progress_bar(terminal) as progress:
        task = progress.add_task("comparing", total=len(cases) * len(judged) * len(devices))
        for row in rows_of(asked, judged, cases):
            rows.append(row)
            progress.advance(task)
    remarks = [*([] if recorded_cases() else [ABSENT]), *(own_words(rows) if arguments.implementation else [])]
    if any(is_of_a_broken_gpu(error) for row in rows for error in row.verdict.errors):
        remarks.append(BROKEN)
    remarks += [f"refused: {reason}" for reason in faults.reasons()]
    summary = report(rows, environment, arguments.verbose, remarks, arguments.implementation or OURS)
    deliver(summary, {"rows": [row.to_json() for row in rows]}, arguments, terminal)
    return 0 if summary.ok else 1
