"""The sentences in which compare sums up its rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from . import implementations as impl
from .compare_rows import AGAINST, DECLINED, FAIL, NOT_ASKED, PASS, RIGHT_TO, Row, feature_counts, standing
from .features import ENOUGH, UNUSUAL, features_of, shared_by
from .judge import GRADIENTS, IN_LOG2
from .tables import TOO_LITTLE

HALF = ("fp16", "bf16")
MOST_REASONS = 5
OF_GPU = re.compile(r"'CPU' backend|cpu tensor|\bcuda|\bgpu|triton|active driver", re.IGNORECASE)


def own_words(rows: Sequence[Row]) -> list[str]:
    """Return lines for the kernel's author: the declined cases, errors, and the errors that count as declined."""
    told = _reasons("declined", (row for row in rows if row.refused))
    told += _reasons("errors, no answers", (row for row in rows if row.raised))
    how = [f"a case counts as declined, not as wrong, if the kernel raises {impl.DECLINES}"] if told else []
    return [*told, *_of_gpu(rows), *_of_gradients(rows), *_of_precision(rows), *how]


def _of_gpu(rows: Sequence[Row]) -> list[str]:
    """Return a line if a kernel answers nothing on a CPU, and its errors speak of a GPU."""
    on_cpu = [row for row in rows if row.device == "cpu"]
    if not all(row.refused or row.raised for row in on_cpu) or not any(OF_GPU.search(row.note) for row in on_cpu):
        return []
    here = "" if torch.cuda.is_available() else ", on a machine with such a GPU"
    return [f"no answer on cpu, where its errors speak of a GPU: it needs --device cuda{here}"]


def _of_gradients(rows: Sequence[Row]) -> list[str]:
    without = [row.verdict.ungraded for row in rows if row.verdict.ungraded and not row.refused]
    if not without:
        return []
    many = "1 answer has" if len(without) == 1 else f"{len(without)} answers have"
    reason, _ = Counter(without).most_common(1)[0]
    return [f"gradients not judged: {many} none ({reason}); --gradients counts that as wrong"]


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
        right = [row for row in rows if row.outcome == PASS and row.case.dtype in dtypes]
        # Sums in fp16 show only in long problems. Other half-precision computing shows in almost every fp32 problem.
        contradicted = "fp32" in dtypes and len(right) >= len(near)
        if 2 * len(near) >= len(wrong) > 0 and not contradicted:
            coarse = " and ".join(sorted({row.verdict.as_near_as for row in near}))
            many = "" if len(near) == len(wrong) else f" {len(near)} of {len(wrong)} times"
            lines.append(f"wrong in {dtypes[0]}, but{many} as near as {coarse} comes: {cause}")
    return lines


def worst_words(rows: Sequence[Row]) -> list[str]:
    """Return a line on the worst mistake. Problems with usual numbers go first. Empty if nothing is wrong."""
    wrong = [row for row in rows if row.outcome == FAIL and not row.raised]
    found = [(check, row) for row in wrong for name in AGAINST if (check := row.worst(name)) and not check.ok]
    if not found:
        return []
    check, row = max(found, key=lambda each: (UNUSUAL.isdisjoint(features_of(each[1].case)), each[0].gravity))
    return [f"the worst mistake: {check.quantity} {check.words}, in {row.case.name}"]


def law_words(rows: Sequence[Row]) -> list[str]:
    """Return lines that name the features that all wrong answers, or all errors, and no other rows share."""
    asked = [row for row in rows if row.outcome != DECLINED]
    failed = [row for row in asked if row.outcome == FAIL]
    kinds = {
        "are wrong": [row for row in failed if not (row.raised or row.crashed)],
        "raise an error": [row for row in failed if row.raised],
        "end the process": [row for row in failed if row.crashed],
    }
    kinds = {words: members for words, members in kinds.items() if members}
    lines = [line for words, members in kinds.items() for line in _law(words, members, asked)]
    if not lines and len(kinds) > 1:
        lines = _law(" or ".join(kinds), failed, asked)
    wrong = kinds.get("are wrong", [])
    off = {check.quantity for row in wrong for check in row.verdict.checks if not check.ok}
    if len(wrong) == len(failed) >= ENOUGH:
        if off <= {*GRADIENTS}:
            lines.append(f"only gradients are wrong: {', '.join(sorted(off))}")
        elif len(off) == 1 and "out" not in off:
            lines.append(f"only {next(iter(off))} is wrong")
    lses = [check for row in wrong for check in row.verdict.checks if check.quantity == "softmax_lse" and not check.ok]
    if lses and all(IN_LOG2 in check.note for check in lses if check.against == "fp64"):
        lines.append(f"softmax_lse is {IN_LOG2}")
    return lines


def _law(words: str, members: Sequence[Row], asked: Sequence[Row]) -> list[str]:
    """Return a sentence on features that all these rows have and no other row has together; empty if there are none."""
    others = [row for row in asked if row not in members]
    where = shared_by(*([features_of(row.case) for row in each] for each in (members, others)))
    if not where or not others:
        return []
    return [f"of the problems not declined, all with {' and '.join(where)} {words}, and no others"]


def crash_words(rows: Sequence[Row], implementation: str) -> list[str]:
    """Return lines on the processes that ended during a case: the first case, and the count."""
    crashed = [row for row in rows if row.crashed]
    if not crashed:
        return []
    first, unasked = crashed[0], sum(row.unasked for row in rows)
    rest = f"; {unasked} problems were skipped, since each restart takes seconds" if unasked else ""
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
    """Return which features were judged, which were declined in every case, and which no case had."""
    found = {name: standing(count) for name, count in feature_counts(rows).items()}
    told = [
        (words, [name for name, outcome in found.items() if outcome in outcomes])
        for words, outcomes in (
            ("judged", (PASS, FAIL, RIGHT_TO)),
            ("declined", (DECLINED,)),
            ("not judged", (NOT_ASKED,)),
        )
    ]
    return [f"{words}: {', '.join(names)}" for words, names in told if names]
