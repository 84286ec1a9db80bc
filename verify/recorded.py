"""The answers recorded from flash-attn 2.8.3, as cases. recorded_answers/README.md says what they are."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .call import Answer, Call, taken_apart
from .cases import Case

ABSENT = "nothing was held against flash-attn's own recorded answers: they lie in a clone, for `python -m verify` there"
FOLDER = Path(__file__).parent / "recorded_answers"


def _case(name: str, record: dict[str, Any]) -> Case:
    returned = record["out"]
    official = Answer(
        out=returned[0],
        softmax_lse=returned[1] if len(returned) > 1 else None,
        grads=taken_apart(record.get("grads") or {}),
        caches=record.get("after") or {},
    )
    return Case(name, Call(record["fn"], record["args"] | record["kwargs"], record.get("dout")), official)


@cache
def recorded_cases() -> tuple[Case, ...]:
    """All 62, in the order of the recording; none in a wheel, which leaves these 23 MB in the repository."""
    files = sorted(FOLDER.glob("public*.pt"))
    return tuple(_case(name, record) for file in files for name, record in torch.load(file, weights_only=True).items())


def recorded_errors() -> dict[str, str]:
    """What flash-attn said to 34 malformed or borderline calls: "ExceptionType: first line" or "ok: what came back"."""
    calls: dict[str, str] = json.loads((FOLDER / "errors.json").read_text())["calls"]
    return calls
