"""`python -m verify compare`: every recorded and every generated problem, through every implementation and device.

Runs and tabulates. What is compared is made in recorded.py and cases.py, how near it must come is judge.py's business.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from verify import implementations as impl
from verify.call import Answer, same
from verify.cases import Case, generated
from verify.environment import checked_devices, describe
from verify.errors import UsageError
from verify.examination import Examination, fetched
from verify.judge import Check, against_official, broken, kept_fraction
from verify.output import add_output_arguments, check_output_arguments, console, deliver, progress_bar
from verify.recorded import recorded_cases
from verify.tables import Report, Table

PASS, FAIL, NOT_SUPPORTED = "pass", "FAIL", "not supported"


@dataclass(frozen=True)
class Row:
    """One case through one implementation on one device."""

    case: str
    function: str
    dtype: str
    recorded: bool
    implementation: str
    device: str
    checks: Sequence[Check] = ()
    note: str = ""
    refused: bool = False
    bypassed: bool = False  # answered without the backend: there was nothing to compute, as with no keys at all

    @property
    def verdict(self) -> str:
        if self.refused:
            return NOT_SUPPORTED
        return PASS if self.checks and all(check.ok for check in self.checks if check.counts) else FAIL

    def worst(self, against: str) -> Check | None:
        """The check nearest to (or furthest beyond) its bound."""
        return max(
            (check for check in self.checks if check.against == against), key=lambda check: check.ratio, default=None
        )

    def to_json(self) -> dict[str, Any]:
        checks = [{**_finite(asdict(check)), "ok": check.ok} for check in self.checks]
        return {**{k: v for k, v in vars(self).items() if k != "checks"}, "verdict": self.verdict, "checks": checks}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN and no infinity."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


@dataclass(frozen=True)
class Plan:
    """What to run: cases (recorded and generated), implementations, devices."""

    implementations: Sequence[impl.Implementation]
    devices: Sequence[str]
    cases: Sequence[Case]
    official: impl.Imported | None = None

    @property
    def runs(self) -> int:
        return len(self.cases) * len(self.implementations) * len(self.devices)


def run(plan: Plan) -> Iterator[Row]:
    """Row after row, case by case: a case's tensors live no longer than its turn."""
    for case in plan.cases:
        for device in plan.devices:
            if device.startswith("mps") and case.dtype == "fp64":
                yield from (_row(case, each, device, refused=True, note="the device has no fp64")
                            for each in plan.implementations)  # fmt: skip
                continue
            examination = Examination(case.problem, device, careful=True)
            official = case.official or _second_opinion(plan.official, examination)
            for implementation in plan.implementations:
                yield _judge(case, implementation, device, examination, official)
                examination.restore()


def _row(case: Case, implementation: impl.Implementation, device: str, **more: Any) -> Row:
    return Row(case.name, case.function, case.dtype, case.official is not None, implementation.name, device, **more)


def _judge(
    case: Case, implementation: impl.Implementation, device: str, examination: Examination, official: Answer | None
) -> Row:
    row, dropout_p = _row(case, implementation, device), examination.call.dropout_p
    note, before = "", implementation.calls_served()
    try:
        try:
            answer, again = _asked(implementation, examination)
        except impl.NotSupported as refusal:
            # Some serve what a model asks for, the output and its gradients, but have no softmax_lse to show.
            if dropout_p > 0:
                raise
            answer, again = _asked(implementation, examination.without_lse())
            note = f"without softmax_lse: {refusal}"
    except impl.NotSupported as refusal:
        return replace(row, refused=True, note=str(refusal))
    except Exception as error:  # noqa: BLE001  whatever an implementation under test raises is its failure, not ours
        return replace(row, note=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    if dropout_p > 0 and answer.s_dmask is None:
        return replace(row, refused=True, note="returns no S_dmask, so what it dropped is not known")
    row = replace(row, bypassed=before is not None and implementation.calls_served() == before)

    checks = examination.checks(answer, approximate=implementation.approximate)
    here, host = fetched(answer, "cpu"), examination.host
    if again is not None and here.s_dmask is not None:
        if not same(answer.out, again.out):
            checks.append(broken("same seed, same mask", "another answer"))
        checks.append(kept_fraction(host, here.s_dmask))
    if official is not None:
        counts = case.official is not None
        checks += [replace(check, counts=counts) for check in against_official(host, here, official)]
    notes = [note, *(f"{check.quantity} {check.note}" for check in checks if check.note and check.counts)]
    return replace(row, checks=checks, note="; ".join(filter(None, notes)))


def _asked(implementation: impl.Implementation, examination: Examination) -> tuple[Answer, Answer | None]:
    """The answer and, under dropout, what the same seed gives a second time."""
    with implementation.serving(examination.call) as function:
        answer = examination.ask(function)
        return answer, examination.ask(function) if examination.call.dropout_p > 0 else None


def _second_opinion(official: impl.Imported | None, examination: Examination) -> Answer | None:
    """The real flash-attn's answer to a generated problem, where it is installed and takes it."""
    if official is None or examination.device != "cuda" or examination.call.dropout_p > 0:
        return None
    try:
        with official.serving(examination.call) as function:
            return fetched(examination.ask(function), "cpu")
    except Exception:  # noqa: BLE001  outside its dtypes, head dims and page sizes it refuses
        return None
    finally:
        examination.restore()


# ---- tables ---------------------------------------------------------------------------------------------------------


# Which quantity came nearest to its bound, its error, and that error as a multiple of the bound.
LEGEND = "(worst quantity, its error, in brackets that error / its bound)"


def _figure(check: Check | None) -> str:
    if check is None:
        return ""
    ratio = f"{check.ratio:.2f}" if check.ratio < 1000 else f"{check.ratio:.0e}"
    return f"{check.quantity} {check.error:.1e} ({ratio})"


def _where(row: Row, several_devices: bool) -> str:
    return f"{row.implementation} on {row.device}" if several_devices else row.implementation


def _case_table(title: str, rows: Iterable[Row], several_devices: bool) -> Table:
    columns = ("case", "backend", "vs official", "vs fp64", "verdict", "note")
    cells = [
        (row.case, _where(row, several_devices), _figure(row.worst("official")), _figure(row.worst("fp64")),
         row.verdict, row.note)
        for row in rows
    ]  # fmt: skip
    shown = len(columns) if any(row[-1] for row in cells) else len(columns) - 1
    return Table(f"{title} {LEGEND}", columns[:shown], [row[:shown] for row in cells])


def _group_table(rows: Iterable[Row], several_devices: bool) -> Table:
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.function.removeprefix("flash_attn_"), row.dtype, _where(row, several_devices)].append(row)
    cells = []
    order = [name.removeprefix("flash_attn_") for name in impl.PUBLIC_FUNCTIONS]
    for (function, dtype, where), members in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        ran = [row for row in members if not row.refused]
        if not ran:
            continue
        checks = [check for row in ran if (check := row.worst("fp64"))]
        worst = max(checks, key=lambda check: check.ratio, default=None)
        passed = sum(row.verdict == PASS for row in ran)
        official = max((check.error for row in ran if (check := row.worst("official"))), default=None)
        opinion = "" if official is None else f"{official:.1e}"
        counts = f"{passed} of {len(ran)}", str(len(members) - len(ran) or "")
        verdict = PASS if passed == len(ran) else FAIL
        cells.append((function, dtype, where, *counts, _figure(worst), opinion, verdict))
    columns = ("function", "dtype", "backend", "right", "not supported", "vs fp64", "vs official", "verdict")
    return Table(f"Generated problems {LEGEND}", columns, cells)


def _summary(rows: Sequence[Row], several_devices: bool) -> tuple[Table, list[str]]:
    """Counts by implementation, and a line for each that served nothing at all."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[_where(row, several_devices)].append(row)
    cells, idle = [], []
    for where, members in groups.items():
        ran = [row for row in members if not row.refused]
        if not any(row.verdict == FAIL or not row.bypassed for row in ran):
            reason = next((row.note for row in members if row.refused), "nothing to compute")
            idle.append(f"{where}: no case ran ({reason})")
            continue
        counts = []
        for recorded in (True, False):
            of_kind = [row for row in members if row.recorded == recorded]
            served = [row for row in of_kind if not row.refused]
            counts.append(
                f"{sum(row.verdict == PASS for row in served)} of {len(served)}"
                + f" ({len(of_kind) - len(served)} not supported)" * (len(served) < len(of_kind))
            )
        worst = max((check.ratio for row in ran for check in row.checks if check.counts), default=math.inf)
        cells.append(
            (
                where,
                *counts,
                f"{worst:.2f}" if worst < 1000 else f"{worst:.0e}",
                PASS if all(row.verdict == PASS for row in ran) else FAIL,
            )
        )
    return Table(
        "Summary", ("backend", "recorded answers", "generated problems", "worst error (x bound)", "verdict"), cells
    ), idle


def report(rows: Sequence[Row], environment: dict[str, str], verbose: bool) -> Report:
    several = len({row.device for row in rows}) > 1
    ran_somewhere = {_where(row, several) for row in rows if not row.refused and not row.bypassed}
    shown = [row for row in rows if _where(row, several) in ran_somewhere or row.verdict == FAIL]
    tables = []
    if recorded := [row for row in shown if row.recorded]:
        tables.append(_case_table("Answers recorded from flash-attn 2.8.3", recorded, several))
    if of_cases := [row for row in shown if not row.recorded]:
        if verbose or len(of_cases) <= 60:
            tables.append(_case_table("Generated problems", of_cases, several))
        else:
            tables.append(_group_table(of_cases, several))
            if failed := [row for row in of_cases if row.verdict == FAIL]:
                tables.append(_case_table("Generated problems with a wrong answer", failed, several))
    summary, idle = _summary(rows, several)
    tables.append(summary)
    ran = [row for row in rows if not row.refused and (_where(row, several) in ran_somewhere or row.verdict == FAIL)]
    passed = sum(row.verdict == PASS for row in ran)
    verdict = "PASS" if ran and passed == len(ran) else "FAIL"
    closing = f"{verdict}: {passed} of {len(ran)} answers right" if ran else "FAIL: no case ran on any backend"
    return Report("flash_attn_compat: verify", environment, tables, [*idle, closing], verdict == "PASS")


# ---- the command ----------------------------------------------------------------------------------------------------


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="hold every backend against the recorded official answers and against fp64 (the default)",
        description="Holds every backend on every device against the recorded answers of flash-attn 2.8.3 and against "
        "an independent fp64 computation. Exit code 0: every answer is right; 1: one is wrong; 2: arguments "
        "that make no sense.",
    )
    parser.add_argument(
        "--backend", action="append", default=[], metavar="NAME", help="only this backend (may be repeated)"
    )
    parser.add_argument(
        "--implementation",
        metavar="MODULE[:ATTRIBUTE]",
        help="judge this instead of the backends: an object with the public functions, or a flash_attn_func",
    )
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="DEVICE",
        help="only this device: cpu, cuda, cuda:1, mps (may be repeated)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the recorded answers and one generated problem for each feature: half a minute",
    )
    parser.add_argument(
        "-k",
        dest="filter",
        default="",
        metavar="TEXT[,TEXT]",
        help="only cases with one of these texts in their name or function",
    )
    parser.add_argument("--forward-only", action="store_true", help="leave gradients out")
    parser.add_argument("-v", "--verbose", action="store_true", help="a row for every generated problem")
    add_output_arguments(parser)
    parser.set_defaults(run=main)


def plan_from(arguments: argparse.Namespace) -> Plan:
    """The plan the arguments describe, or a UsageError."""
    if arguments.implementation and arguments.backend:
        raise UsageError("--backend and --implementation exclude each other")
    judged: list[impl.Implementation] = (
        [impl.imported(arguments.implementation)] if arguments.implementation else [*impl.backends(arguments.backend)]
    )
    wanted = [text.strip() for text in arguments.filter.split(",") if text.strip()]

    def chosen(name: str, function: str) -> bool:
        return not wanted or any(text in f"{function} {name}" for text in wanted)

    cases = [case for case in (*recorded_cases(), *generated(arguments.quick)) if chosen(case.name, case.function)]
    if not cases:
        raise UsageError(f"no case has {arguments.filter!r} in its name")
    if arguments.forward_only:
        cases = [case.forward_only() for case in cases]
    devices = checked_devices(arguments.device)
    second_opinion, _ = impl.official()
    return Plan(judged, devices, cases, second_opinion)


def main(arguments: argparse.Namespace) -> int:
    check_output_arguments(arguments)
    plan = plan_from(arguments)
    torch.set_num_threads(1)  # thousands of small problems: more threads cost more than they give
    terminal = console()
    rows: list[Row] = []
    with progress_bar(terminal) as progress:
        task = progress.add_task("comparing", total=plan.runs)
        for row in run(plan):
            rows.append(row)
            progress.advance(task)
    environment = {**describe(list(plan.devices)), "official flash-attn": impl.official()[1]}
    summary = report(rows, environment, arguments.verbose)
    deliver(summary, {"rows": [row.to_json() for row in rows]}, arguments, terminal)
    return 0 if summary.ok else 1
