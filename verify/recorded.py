"""The answers recorded from flash-attn 2.8.3, as cases. recorded_answers/README.md describes them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .call import Answer, Call, taken_apart
from .cases import Case

ABSENT = "not compared with flash-attn's recorded answers: those need a clone and `python -m verify`"
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
    """Return all 62 recorded cases, in the order of the recording; none in a wheel, which lacks their 23 MB."""
    files = sorted(FOLDER.glob("public*.pt"))
    return tuple(_case(name, record) for file in files for name, record in torch.load(file, weights_only=True).items())


def recorded_errors() -> dict[str, str]:
    """Return flash-attn's replies to 34 malformed or borderline calls: "ExceptionType: first line" or "ok: result"."""
    calls: dict[str, str] = json.loads((FOLDER / "errors.json").read_text())["calls"]
    return calls
