"""The rows of compare as tables, a picture and a verdict that counts the answers."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .compare_rows import (
    AGAINST,
    DECLINED,
    FAIL,
    NOT_ASKED,
    PASS,
    RAISED,
    RIGHT_TO,
    Row,
    feature_counts,
    standing,
    worst_of,
)
from .compare_words import law_words, scope_words, verdict_words, worst_words
from .judge import Check
from .tables import TOO_LITTLE, Bar, Bars, Report, Table

# ---- tables ---------------------------------------------------------------------------------------------------------

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
    """Return a table with one line for each kind of mistake: the first row that has it, and how many rows have it."""
    alike: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        said = row.note if row.verdict.errors else ", ".join(map(_kind, row.verdict.checks))
        alike[row.implementation, row.device, re.sub(r"[\d.]+", "", said)].append(row)
    cells = []
    for (name, device, _), (first, *others) in alike.items():
        worst = worst_of(first.worst(against) for against in AGAINST)
        more = f" and {len(others)} more like it" if others else ""
        cells.append((first.case.name + more, name, device, _figure(worst), FAIL, first.note))
    columns = ("case", "backend", "device", "worst", "verdict", "note")
    return Table("Wrong answers, the same kinds of errors in one line", columns, cells)


def _kind(check: Check) -> str:
    """Return the kind of a mistake: the quantity, and whether it is off or not finite; "" if the check is right."""
    if check.ok:
        return ""
    return (
        f"{check.quantity} {'off' if math.isfinite(check.error) else 'NaN or infinite' if check.bound else check.note}"
    )


def feature_table(rows: Sequence[Row]) -> Table:
    counts = feature_counts(rows)
    cells = [
        (
            name,
            str(count[PASS] + count[RIGHT_TO] or ""),
            *(str(count[each] or "") for each in (FAIL, RAISED, DECLINED)),
            standing(count),
        )
        for name, count in counts.items()
        if standing(count) != NOT_ASKED or count[NOT_ASKED]
    ]
    return Table("Answers by feature; an answer has several features",
                 ("feature", "right", "wrong", "error", "declined", "verdict"), cells)  # fmt: skip


def idle_backends(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Return the reason by (implementation, device), for pairs for which no case ran."""
    found: dict[tuple[str, str], str] = {}
    for pair in dict.fromkeys((row.implementation, row.device) for row in rows):
        members = [row for row in rows if (row.implementation, row.device) == pair]
        if all(row.refused or (row.bypassed and row.outcome == PASS) for row in members):
            found[pair] = next((row.note for row in members if row.refused), "nothing to compute")
    return found


# ---- the report -----------------------------------------------------------------------------------------------------


def report(
    rows: Sequence[Row],
    environment: Mapping[str, str],
    verbose: bool,
    remarks: Sequence[str],
    subject: str,
    is_own: bool = False,
    is_narrowed: bool = False,
    advice: Sequence[str] = (),
) -> Report:
    """Return the report.

    is_own: the rows are of a user's kernel, whose author gets a table of features
    is_narrowed: the user chose the cases; advice: commands to run
    """
    idle = idle_backends(rows)
    shown = [row for row in rows if (row.implementation, row.device) not in idle]
    wrong = [row for row in shown if row.outcome == FAIL]
    tables = [_every_row("Every answer", shown, folded=not verbose), _summary(shown)]
    tables += [_wrong_rows(wrong)] if wrong and not verbose else []
    lines = [*remarks]
    lines += [f"{name} on {device}: no case ran ({reason})" for (name, device), reason in idle.items()]
    headline = [*advice, *worst_words(shown)]
    lines += [*headline, *law_words(shown)]
    judged = rows if is_own else shown  # a backend of ours that cannot run on this machine has declined nothing
    words = verdict_words(judged, is_narrowed)
    if not shown:
        words = f"{TOO_LITTLE}: no case ran, {len(rows)} declined"
    scope = scope_words(judged)
    lines.append("; ".join([words, *(scope if len(scope) > 1 and (is_own or not is_narrowed) else [])]))
    pictures = [bounds_picture(shown)] if any(row.verdict.checks for row in shown) else []
    ok = words.startswith("PASS")
    return Report(
        "verify compare", environment, tables, lines, ok, subject, pictures, [feature_table(judged)], headline
    )


def bounds_picture(rows: Sequence[Row]) -> Bars:
    """Return bars of each implementation's largest error, as a share of its bound."""
    groups: list[tuple[str, list[Bar | None]]] = []
    for name, device in dict.fromkeys((row.implementation, row.device) for row in rows):
        mine = [row for row in rows if (row.implementation, row.device) == (name, device)]
        bars: list[Bar | None] = []
        for against in AGAINST:
            worst = worst_of(row.worst(against) for row in mine if row.outcome in (PASS, FAIL))
            # min, since JSON has no infinity.
            text = f"{worst.quantity}, {_times(worst.ratio)}" if worst else ""
            bars.append(Bar(min(worst.ratio, 1e9), text, not worst.ok) if worst else None)
        errors = sum(bool(row.verdict.errors) for row in mine)
        groups.append((f"{name} on {device}" + (f" (and {errors} x an error was raised)" if errors else ""), bars))
    title = "Largest error, as a share of the bound"
    return Bars(title, "allowed", [f"against {words}" for words in AGAINST.values()], groups)
