"""docs/writing-a-backend.md shows a complete backend, and it is right."""

from __future__ import annotations

from typing import Any

import pytest

from flash_attn_compat import explain, flash_attn_func
from flash_attn_compat.backends import Backend
from flash_attn_compat.backends.reference import Reference
from tests.forms.inputs import qkv
from tests.forms.support import serve_by
from tests.tools.test_docs import ROOT, blocks
from verify.drawing import random_problem
from verify.examination import Examination
from verify.problems import KINDS

PAGE = ROOT / "docs/writing-a-backend.md"


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The page's backend, before the reference in the table of backends."""
    names: dict[str, Any] = {"__name__": "mine"}
    exec(compile(next(blocks(PAGE, "python")), PAGE.name, "exec"), names)
    backend: Backend = names["Mine"]()
    serve_by(monkeypatch, backend, Reference())
    return backend


def test_the_pages_backend_agrees_with_fp64_on_every_kind_of_problem(mine: Backend) -> None:
    served, complaints = dict.fromkeys(KINDS, 0), []
    for kind in KINDS:
        for number in range(20):
            examination = Examination(problem := random_problem(number, (kind,)))
            verdict = examination.judge(mine.name)
            served[kind] += not verdict.refused
            complaints += [f"{problem}: {failure}" for failure in verdict.failures]
    assert not complaints, "\n".join(complaints)
    assert served["dense"] > 5 and served["varlen"] > 2, served


def test_the_pages_backend_serves_what_its_table_lists_and_declines_the_rest_with_a_reason(mine: Backend) -> None:
    q, k, v = qkv(sq=5, sk=7, h=4, hk=2)
    assert explain(flash_attn_func, q, k, v, causal=True).backend == "mine"
    declined = explain(flash_attn_func, q, k, v, softcap=30.0)
    assert declined.backend == "reference" and declined.reasons["mine"] == ["does not support softcap"]
