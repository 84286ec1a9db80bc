"""Find a `locate` command that shows a wrong answer of compare. Each command is run before it is suggested."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator, Sequence

from flash_attn_compat.isolation import Ended, run_in_children

from . import COMMAND, locate
from .call import Call
from .compare_rows import FAIL, Row
from .errors import UsageError
from .implementations import backends
from .judge import GRADIENTS
from .problems import Problem

BACKENDS = [backend.name for backend in backends([])]
CANNOT = "locate cannot show this: it compares out, dq, dk and dv of flash_attn_func, on dense inputs, without dropout"
MOST_TRIED = 4
FEW_TILES = 160  # a sequence of so many tokens has a few tiles
# A call with more scores takes too long for a line of advice.
MOST_SCORES = 2**22


def locate_words(rows: Sequence[Row], isolated: bool) -> list[str]:
    """Return a line of advice for each implementation and device with wrong answers, if a command shows one of them."""
    lines = []
    for pair in dict.fromkeys((row.implementation, row.device) for row in rows):
        wrong = [row for row in rows if (row.implementation, row.device) == pair and row.outcome == FAIL]
        if wrong:
            lines += _of_one(wrong, isolated)
    return lines


def _of_one(wrong: Sequence[Row], isolated: bool) -> list[str]:
    answered = [row for row in wrong if not row.verdict.errors]
    commands = list(dict.fromkeys(filter(None, map(arguments_of, sorted(answered, key=_size)))))[:MOST_TRIED]
    if not commands:
        return [CANNOT] if answered else []
    found = run_in_children(1, try_each, commands) if isolated else try_each(0, commands)
    shows = next(iter(found))
    if isinstance(shows, Ended) or shows is None:
        return []
    return [f"look closer: {COMMAND} locate {shlex.join(shows)}"]


def _size(row: Row) -> tuple[bool, float]:
    """Return the key that sorts rows: wrong outputs before wrong gradients, then problems of few tiles first."""
    problem = row.case.problem
    lengths = [problem.seqlens_q[0], problem.seqlens_k[0]] if isinstance(problem, Problem) else [1]
    return not _is_output_wrong(row), sum(abs(math.log2(max(n, 1) / FEW_TILES)) for n in lengths)


def _is_output_wrong(row: Row) -> bool:
    return any(check.quantity == "out" and not check.ok for check in row.verdict.checks)


def arguments_of(row: Row) -> tuple[str, ...] | None:
    """Return the arguments of `locate` for a wrong answer, or None if locate has no such problem."""
    p = row.case.problem
    wrong = {check.quantity for check in row.verdict.checks if not check.ok}
    if isinstance(p, Call) or p.kind != "dense" or not wrong & {"out", *GRADIENTS} or row.verdict.errors:
        return None
    if p.dropout_p or p.sizes or p.stray or p.alibi == "bh" or p.value_dim != p.head_dim or not min(p.seqlens_k):
        return None
    if p.scores > MOST_SCORES:
        return None
    name = row.implementation
    given = [name, "reference"] if name in BACKENDS else [name if ":" in name else f"{name}:flash_attn_func"]
    given += ["--n", str(p.seqlens_q[0]), "--batch", str(len(p.seqlens_q)), "--heads", str(p.nheads)]
    given += ["--head-dim", str(p.head_dim), "--dtype", row.case.dtype]
    given += ["--seqlen-k", str(p.seqlens_k[0])] * (p.seqlens_k != p.seqlens_q)
    given += ["--heads-k", str(p.nheads_k)] if p.group > 1 else []
    given += ["--causal"] * p.causal
    given += ["--window", *map(str, p.window)] if p.window != (-1, -1) else []
    given += ["--softcap", f"{p.softcap:g}"] if p.softcap else []
    given += ["--softmax-scale", f"{p.softmax_scale:g}"] if p.softmax_scale else []
    given += ["--alibi"] if p.alibi else []
    given += ["--magnitude", f"{p.magnitude:g}"] if p.magnitude != 1 else []
    given += ["--backward"] if not _is_output_wrong(row) else []
    given += ["--device", row.device] if row.device != "cpu" else []
    return tuple(given)


def try_each(first: int, commands: Sequence[Sequence[str]]) -> Iterator[Sequence[str] | None]:
    """Yield once: the first command that shows a difference, or None. A step for `run_in_children`."""
    yield next((command for command in commands if _shows(command)), None)


def _shows(command: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser()
    locate.add_arguments(parser)
    try:
        return locate.is_seen(parser.parse_args(command))
    except UsageError:
        return False
