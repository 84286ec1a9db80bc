"""The rows of compare as tables, a picture and a verdict that counts the answers."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import implementations as impl
from .cases import Case
from .examination import Verdict
from .features import FEATURES, PARTS, UNUSUAL, features_of, shared_by
from .judge import GRADIENTS, Check
from .tables import TOO_LITTLE, Bar, Bars, Report, Table

PASS, FAIL, DECLINED, RIGHT_TO, NOT_ASKED = "pass", "FAIL", "declined", "right to fp32", "not asked"
RAISED = "error"  # a FAIL without an answer
ENOUGH = 3  # fewer answers allow no verdict
HALF = ("fp16", "bf16")


@dataclass(frozen=True)
class Row:
    """One case by one implementation on one device.

    bypassed: answered without the backend, since there was nothing to compute, as with no keys at all
    crashed: the process ended during the case; unasked: skipped, because too many processes had ended before
    """

    case: Case
    implementation: str
    device: str
    verdict: Verdict
    remark: str = ""
    bypassed: bool = False
    crashed: bool = False
    unasked: bool = False

    @property
    def refused(self) -> bool:
        return bool(self.verdict.refused) and not self.verdict.errors

    @property
    def outcome(self) -> str:
        if self.unasked:
            return NOT_ASKED
        if self.refused:
            return DECLINED
        if self.verdict.right_to:
            return RIGHT_TO
        return FAIL if self.verdict.failures else PASS

    @property
    def raised(self) -> bool:
        """Whether the implementation raised an error, so there is no answer."""
        return bool(self.verdict.errors) and not (self.verdict.refused or self.crashed or self.unasked)

    @property
    def note(self) -> str:
        if self.refused:
            return self.verdict.refused
        errors = [error.partition("\n")[0] for error in self.verdict.errors]
        beyond = [f"{check.quantity} {check.note}" for check in self.verdict.checks if check.note]
        near = self.verdict.as_near_as or self.verdict.right_to
        return "; ".join(filter(None, [self.remark, *errors, *beyond, f"as near as {near} comes" * bool(near)]))

    def worst(self, against: str) -> Check | None:
        """Return the worst mistake, or the check nearest to its bound if there is none."""
        return worst_of(check for check in self.verdict.checks if check.against == against)

    def to_json(self) -> dict[str, Any]:
        case, checks = self.case, [check.to_json() for check in self.verdict.checks]
        named = {"case": case.name, "function": case.function, "dtype": case.dtype, "recorded": bool(case.official)}
        asked = {"implementation": self.implementation, "device": self.device, "bypassed": self.bypassed}
        said = {"verdict": self.outcome, "note": self.note, "features": features_of(case)}
        return {**named, **asked, **said, "checks": checks}


def worst_of(checks: Iterable[Check | None]) -> Check | None:
    return max(filter(None, checks), key=lambda check: check.gravity, default=None)


# ---- tables ---------------------------------------------------------------------------------------------------------

MOST_REASONS = 5
AGAINST = {"official": "flash-attn", "fp64": "fp64"}
NOTE = (
    "vs official, vs fp64: the worst mistake, or else the quantity nearest to its bound; its error; in brackets that "
    "error as a multiple of its bound. out is the output, softmax_lse the logarithm of each row's sum, dq, dk "
    "and dv are the gradients of q, k and v, k_cache and v_cache the cache afterwards, kept is the share that dropout "
    "keeps."
)


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
    return Table(title, columns, cells, folded, NOTE)


def _summary(rows: Iterable[Row]) -> Table:
    """Return a table with a line for each implementation, device and kind of problem."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        kind = "recorded answers" if row.case.official else "generated problems"
        groups[row.implementation, row.device, kind].append(row)
    cells = []
    for parts, members in groups.items():
        count = Counter(row.outcome for row in members)
        ran = [row for row in members if row.outcome in (PASS, FAIL)]
        worst = [worst_of(row.worst(name) for row in ran) for name in AGAINST]
        verdict = FAIL if count[FAIL] else PASS if count[PASS] else DECLINED
        right, refused = f"{count[PASS]} of {len(ran)}", str(count[DECLINED] or "")
        cells.append((*parts, right, refused, *map(_figure, worst), verdict))
    columns = ("backend", "device", "problems", "right", "declined", "vs official", "vs fp64", "verdict")
    return Table("Summary", columns, cells, note=NOTE)


def _wrong_rows(rows: Sequence[Row]) -> Table:
    """Return one line for all rows with the same error but for numbers: the first row, and their count."""
    alike: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        said = (
            row.note
            if row.verdict.errors
            else ", ".join(check.quantity for check in row.verdict.checks if not check.ok)
        )
        alike[row.implementation, row.device, re.sub(r"[\d.]+", "", said)].append(row)
    cells = []
    for (name, device, _), members in alike.items():
        first = max(
            members, key=lambda row: max((check.gravity for check in row.verdict.checks), default=(False, 0.0, 0.0))
        )
        worst = worst_of(first.worst(against) for against in AGAINST)
        more = f" and {len(members) - 1} more like it" if len(members) > 1 else ""
        cells.append((first.case.name + more, name, device, _figure(worst), FAIL, first.note))
    columns = ("case", "backend", "device", "worst", "verdict", "note")
    return Table("Wrong answers, equal errors in one line", columns, cells)


def feature_counts(rows: Iterable[Row]) -> dict[str, Counter[str]]:
    """Count the outcomes by feature and by part of an answer, errors apart from wrong answers. An fp64 answer that is
    right to fp32 says nothing about its other features.
    """
    found: dict[str, Counter[str]] = {name: Counter() for name in (*FEATURES, *PARTS)}
    for row in rows:
        asked = features_of(row.case)
        for name in ["fp64"] if row.outcome == RIGHT_TO else asked:
            found[name][RAISED if row.raised else row.outcome] += 1
        for part, quantities in PARTS.items():
            checks = [check for check in row.verdict.checks if check.quantity in quantities]
            if checks and row.outcome != RIGHT_TO:
                found[part][PASS if all(check.ok for check in checks) else FAIL] += 1
    return found


def _standing(count: Counter[str]) -> str:
    """Return the verdict on a feature's rows, in a word."""
    if count[FAIL] or count[RAISED]:
        return FAIL
    return next((outcome for outcome in (PASS, RIGHT_TO, DECLINED) if count[outcome]), NOT_ASKED)


def feature_table(rows: Sequence[Row]) -> Table:
    counts = feature_counts(rows)
    cells = [
        (
            name,
            str(count[PASS] + count[RIGHT_TO] or ""),
            *(str(count[each] or "") for each in (FAIL, RAISED, DECLINED)),
            _standing(count),
        )
        for name, count in counts.items()
        if _standing(count) != NOT_ASKED or count[NOT_ASKED]
    ]
    return Table("Answers by feature; an answer has several features",
                 ("feature", "right", "wrong", "error", "declined", "verdict"), cells)  # fmt: skip


def idle_backends(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Return (implementation, device) pairs for which no case ran, and the reason."""
    found: dict[tuple[str, str], str] = {}
    for pair in dict.fromkeys((row.implementation, row.device) for row in rows):
        members = [row for row in rows if (row.implementation, row.device) == pair]
        if all(row.refused or (row.bypassed and row.outcome == PASS) for row in members):
            found[pair] = next((row.note for row in members if row.refused), "nothing to compute")
    return found


# ---- words ----------------------------------------------------------------------------------------------------------


def own_words(rows: Sequence[Row]) -> list[str]:
    """Return lines for the kernel's author: the declined cases, errors, and the errors that count as declined."""
    told = _reasons("declined", (row for row in rows if row.refused))
    told += _reasons("errors, no answers", (row for row in rows if row.raised))
    how = [f"a case counts as declined, not as wrong, if the kernel raises {impl.DECLINES}"] if told else []
    return [*told, *_of_precision(rows), *how]


def _reasons(label: str, rows: Iterable[Row]) -> list[str]:
    """Return a line that counts the reasons of some rows, the most frequent first."""
    reasons = Counter(row.note for row in rows).most_common()
    told = [f"{count} x {reason}" for reason, count in reasons[:MOST_REASONS]]
    more = sum(count for _, count in reasons[MOST_REASONS:])
    told += [f"{more} x for other reasons"] if more else []
    return [f"{label}: {'; '.join(told)}"] if told else []


def _of_precision(rows: Sequence[Row]) -> list[str]:
    lines = []
    if apart := [row for row in rows if row.outcome == RIGHT_TO]:
        many = "1 answer is" if len(apart) == 1 else f"{len(apart)} answers are"
        lines.append(f"fp64, judged separately: {many} right to fp32, as from a kernel that adds up in fp32")
    for dtypes, cause in (
        (("fp32", "fp64"), "it computes in half precision, or rounds to it"),
        (("fp16",), "it rounds to bf16, or keeps sums in fp16"),
    ):
        wrong = [row for row in rows if row.outcome == FAIL and row.case.dtype in dtypes]
        near = [row for row in wrong if row.verdict.as_near_as in HALF]
        if 2 * len(near) >= len(wrong) > 0:
            coarse = " and ".join(sorted({row.verdict.as_near_as for row in near}))
            many = "" if len(near) == len(wrong) else f" {len(near)} of {len(wrong)} times"
            lines.append(f"wrong in {dtypes[0]}, but{many} as near as {coarse} comes: {cause}")
    return lines


def worst_words(rows: Sequence[Row]) -> list[str]:
    """Return the worst mistake, and the features that all wrong answers share and no right answer has.

    The worst mistake is of a problem with usual numbers, if one of them has any.
    """
    right = [row for row in rows if row.outcome == PASS]
    raised = [row for row in rows if row.outcome == FAIL and row.raised]
    wrong = [row for row in rows if row.outcome == FAIL and not row.raised]
    found = [(check, row) for row in wrong for name in AGAINST if (check := row.worst(name)) and not check.ok]
    lines = []
    if found:
        check, row = max(found, key=lambda each: (UNUSUAL.isdisjoint(features_of(each[1].case)), each[0].gravity))
        lines.append(f"the worst mistake: {check.quantity} {check.words}, in {row.case.name}")
    for label, some in (("wrong are", wrong), ("errors are raised in", raised)):
        where = shared_by(*([features_of(row.case) for row in each] for each in (some, right)))
        if where and right:
            lines.append(f"{label} all problems with {' and '.join(where)}, and no others")
    off = {check.quantity for row in wrong for check in row.verdict.checks if not check.ok}
    if off and not any(row.crashed for row in wrong):
        if off <= {*GRADIENTS}:
            lines.append(f"only gradients are wrong: {', '.join(sorted(off))}")
        elif len(off) == 1 and "out" not in off:
            lines.append(f"only {off.pop()} is wrong")
    return lines


def crash_words(rows: Sequence[Row], implementation: str) -> list[str]:
    """Return lines on the processes that ended during a case: the first case, and the count."""
    crashed = [row for row in rows if row.crashed]
    if not crashed:
        return []
    first, unasked = crashed[0], sum(row.unasked for row in rows)
    rest = f"; {unasked} problems were skipped" if unasked else ""
    many = "once, in" if len(crashed) == 1 else f"{len(crashed)} times, first in"
    said = f"{implementation}: the process ended {many} {first.case.name}"
    return [f"{said} on {first.device} ({first.note}){rest}"]


def verdict_words(rows: Sequence[Row], is_narrowed: bool) -> str:
    """Return the verdict, the number of answers behind it, and their features.

    is_narrowed: the user chose the cases, so few answers are enough unless the kernel declined others
    """
    count = Counter(row.outcome for row in rows)
    right, wrong = count[PASS], count[FAIL]
    answers = right + wrong
    raised = sum(row.raised and row.outcome == FAIL for row in rows)
    more = [f"{raised} raised an error"] if raised else []
    more += [f"{count[outcome]} {words}" for outcome, words in (
        (RIGHT_TO, "more of fp64 right to fp32"), (DECLINED, "declined"), (NOT_ASKED, "not asked"),
    ) if count[outcome]]  # fmt: skip
    few = answers < ENOUGH and (bool(count[DECLINED] or count[RIGHT_TO]) or not is_narrowed)
    label = "FAIL" if wrong else TOO_LITTLE if few else "PASS"
    said = f"{right} of {answers - raised} answers right" if answers > raised else "no answer"
    said = said if answers else "no case ran"
    return ", ".join([f"{label}: {said}", *more])


def scope_words(rows: Sequence[Row]) -> list[str]:
    """Return the features that were judged, declined in every case, and absent from the cases."""
    standing = {name: _standing(count) for name, count in feature_counts(rows).items()}
    told = [
        (words, [name for name, found in standing.items() if found in outcomes])
        for words, outcomes in (
            ("judged", (PASS, FAIL, RIGHT_TO)),
            ("declined", (DECLINED,)),
            ("not judged", (NOT_ASKED,)),
        )
    ]
    return [f"{words}: {', '.join(names)}" for words, names in told if names]


# ---- the report -----------------------------------------------------------------------------------------------------


def report(
    rows: Sequence[Row],
    environment: Mapping[str, str],
    verbose: bool,
    remarks: Sequence[str],
    subject: str,
    is_own: bool = False,
    is_narrowed: bool = False,
) -> Report:
    """Return the report. is_own: on a user's kernel, with a table of features for its author, not on our backends"""
    idle = idle_backends(rows)
    shown = [row for row in rows if (row.implementation, row.device) not in idle]
    wrong = [row for row in shown if row.outcome == FAIL]
    tables = [_every_row("Every answer", shown, folded=not verbose), _summary(shown)]
    tables += [_wrong_rows(wrong)] if wrong and not verbose else []
    lines = [*remarks]
    lines += [f"{name} on {device}: no case ran ({reason})" for (name, device), reason in idle.items()]
    lines += worst_words(shown)
    judged = rows if is_own else shown  # a backend of ours that cannot run on this machine has declined nothing
    words = verdict_words(judged, is_narrowed)
    if not shown:
        words = f"{TOO_LITTLE}: no case ran, {len(rows)} declined"
    scope = scope_words(judged)
    lines.append("; ".join([words, *(scope if len(scope) > 1 and (is_own or not is_narrowed) else [])]))
    pictures = [bounds_picture(shown)] if any(row.verdict.checks for row in shown) else []
    ok = words.startswith("PASS")
    return Report("verify compare", environment, tables, lines, ok, subject, pictures, [feature_table(judged)])


def bounds_picture(rows: Sequence[Row]) -> Bars:
    """Return bars of each implementation's largest error, as a share of its bound."""
    groups: list[tuple[str, list[Bar | None]]] = []
    for name, device in dict.fromkeys((row.implementation, row.device) for row in rows):
        mine = [row for row in rows if (row.implementation, row.device) == (name, device)]
        bars: list[Bar | None] = []
        for against in AGAINST:
            worst = worst_of(row.worst(against) for row in mine if row.outcome in (PASS, FAIL))
            # JSON knows no infinity.
            text = f"{worst.quantity}, {_times(worst.ratio)}" if worst else ""
            bars.append(Bar(min(worst.ratio, 1e9), text, not worst.ok) if worst else None)
        errors = sum(bool(row.verdict.errors) for row in mine)
        groups.append((f"{name} on {device}" + (f" (and {errors} x an error was raised)" if errors else ""), bars))
    title = "Largest error, as a share of the bound"
    return Bars(title, "allowed", [f"against {words}" for words in AGAINST.values()], groups)
