"""The rows of compare: a verdict on each case by each implementation, and counts of them by feature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .cases import Case
from .examination import Verdict
from .features import FEATURES, PARTS, features_of
from .judge import Check

PASS, FAIL, DECLINED, RIGHT_TO, NOT_ASKED = "pass", "FAIL", "declined", "right to fp32", "not asked"
RAISED = "error"  # the kernel raised an error: a FAIL without an answer


@dataclass(frozen=True)
class Row:
    """The result of one case by one implementation on one device.

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


AGAINST = {"official": "flash-attn", "fp64": "fp64"}


def feature_counts(rows: Iterable[Row]) -> dict[str, Counter[str]]:
    """Count the outcomes by feature and by part of an answer. Errors are counted apart from wrong answers. An fp64
    answer that is only as exact as fp32 counts for the feature fp64 alone.
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


def standing(count: Counter[str]) -> str:
    """Return the verdict on a feature, as one of the outcomes. count: the outcomes of its rows"""
    if count[FAIL] or count[RAISED]:
        return FAIL
    return next((outcome for outcome in (PASS, RIGHT_TO, DECLINED) if count[outcome]), NOT_ASKED)
