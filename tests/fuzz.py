"""Thousands of random problems through every backend: `python -m tests.fuzz --problems 10000 --device cuda`.

Problem N is the same on every machine. A failure is printed as the smallest problem found that still fails, with
the lines that repeat it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from flash_attn_compat.backends import BACKENDS
from tests.judge import Examination, must_serve
from tests.problems import DTYPES, KINDS, Problem, random_problem


@dataclass(frozen=True)
class Plan:
    device: str
    backends: tuple[str, ...]
    kinds: tuple[str, ...] | None
    dtypes: tuple[str, ...] | None


@dataclass
class Failure:
    seed: int
    backend: str
    problem: Problem
    complaints: list[str]


@dataclass
class Tally:
    """What came of some problems; tallies of parts add up."""

    ran: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)  # backend: (error over its bound, seed)
    failures: list[Failure] = field(default_factory=list)
    problems: int = 0

    def add(self, other: Tally) -> None:
        self.problems += other.problems
        self.ran += other.ran
        self.refused += other.refused
        self.failures += other.failures
        for name, found in other.worst.items():
            self.worst[name] = max(found, self.worst.get(name, (0.0, -1)))


def examine(plan: Plan, seeds: Iterable[int]) -> Tally:
    tally = Tally()
    for seed in seeds:
        problem = random_problem(seed, plan.kinds, plan.dtypes)
        examination = Examination(problem, plan.device)
        tally.problems += 1
        for name in plan.backends:
            complaints, ratio, refused = _judge(examination, name)
            if complaints:
                tally.failures.append(Failure(seed, name, problem, complaints))
            if refused:
                tally.refused[name] += 1
                continue
            tally.ran[name] += 1
            tally.worst[name] = max((ratio, seed), tally.worst.get(name, (0.0, -1)))
    return tally


def _judge(examination: Examination, backend: str) -> tuple[list[str], float, bool]:
    verdict = examination.judge(backend)
    complaints = list(verdict.failures)
    if verdict.refused and must_serve(examination.problem, backend):
        complaints.append(f"refused: {verdict.refused}")
    return complaints, verdict.ratio, bool(verdict.refused)


# ---------------------------------------------------------------- making a failure small


def shrink(failure: Failure, device: str, attempts: int = 300) -> Problem:
    """The simplest problem found by changing one thing at a time that fails in the same quantity."""
    problem, wanted = failure.problem, _quantities(failure.complaints)
    left = attempts
    progress = True
    while progress:
        progress = False
        for candidate in _simpler(problem):
            if left == 0:
                return problem
            left -= 1
            if _fails_alike(candidate, failure.backend, device, wanted):
                problem, progress = candidate, True
                break
    return problem


def _quantities(complaints: list[str]) -> set[str]:
    return {complaint.split(":")[0] for complaint in complaints}


def _fails_alike(problem: Problem, backend: str, device: str, wanted: set[str]) -> bool:
    try:
        examination = Examination(problem, device)
        if not problem.dropout_p:
            examination.right_answers(None)  # a problem that the oracle cannot do is malformed
        return bool(_quantities(_judge(examination, backend)[0]) & wanted)
    except Exception:  # noqa: BLE001 - a malformed candidate is no candidate
        return False


_SIMPLEST = {
    "dtype": "float32", "causal": False, "window": (-1, -1), "window_as": "tuple", "softcap": 0.0, "alibi": "",
    "dropout_p": 0.0, "softmax_scale": None, "magnitude": 1.0, "deterministic": False, "return_attn_probs": True,
    "gap": (0, 0), "max_seqlen_slack": 0, "max_seqlen_as": "int", "num_splits": 0, "poison": False, "batch_idx": False,
    "rotary_dim": 0, "leftpad": None, "head_dim_v": None, "group": 1, "nheads_k": 1, "head_dim": 8, "lengths_as": "tensor",
    "layouts": ("contiguous",) * 4, "page_size": 0, "seqused": None, "seed": 0,
}  # fmt: skip


def _simpler(problem: Problem) -> Iterator[Problem]:
    for index in range(len(problem.seqlens_q) if len(problem.seqlens_q) > 1 else 0):
        kept = [i for i in range(len(problem.seqlens_q)) if i != index]
        pick = {
            name: tuple(getattr(problem, name)[i] for i in kept)
            for name in ("seqlens_q", "seqlens_k", "leftpad", "seqused")
            if getattr(problem, name) is not None
        }
        yield replace(problem, **pick)
    for name, value in _SIMPLEST.items():
        if getattr(problem, name) != value and not (name == "page_size" and problem.kind == "paged"):
            yield replace(problem, **{name: value})
    for smaller in (lambda n: n // 2, lambda n: max(n - 1, 0)):
        q, k = (tuple(map(smaller, lengths)) for lengths in (problem.seqlens_q, problem.seqlens_k))
        candidates = [dict(seqlens_q=q, seqlens_k=k)]
        if not problem.kind.endswith("qkvpacked"):
            candidates += [dict(seqlens_q=q), dict(seqlens_k=k)]
        for lengths in candidates:
            if any(getattr(problem, name) != value for name, value in lengths.items()):
                yield replace(problem, **lengths)


# ---------------------------------------------------------------- running


def _run(plan: Plan, seeds: range, jobs: int, console: Console) -> Tally:
    total = Tally()
    columns = (TextColumn("problems"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[failures]} failures"))  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("problems", total=len(seeds), failures=0)
        for part in _parts(plan, seeds, jobs):
            total.add(part)
            progress.update(task, completed=total.problems, failures=len(total.failures))
    return total


def _parts(plan: Plan, seeds: range, jobs: int) -> Iterator[Tally]:
    pieces = [seeds[start : start + 20] for start in range(0, len(seeds), 20)]
    if jobs == 1:
        for piece in pieces:
            yield examine(plan, piece)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # Submitted a few at a time, so that an interrupt does not leave thousands behind.
        waiting: set = set()
        queue = iter(pieces)
        while True:
            waiting |= {pool.submit(examine, plan, piece) for piece in itertools.islice(queue, 2 * jobs - len(waiting))}
            if not waiting:
                return
            done = next(as_completed(waiting))
            waiting.remove(done)
            yield done.result()


def _report(total: Tally, plan: Plan, console: Console, shown: int) -> None:
    for failure in total.failures[:shown]:
        small = shrink(failure, plan.device)
        complaints = _judge(Examination(small, plan.device), failure.backend)[0]
        console.rule(f"problem {failure.seed} on {failure.backend}")
        console.print(f"{failure.problem!r}\n  " + "\n  ".join(failure.complaints), markup=False, highlight=False)
        console.print(
            "smallest found, to repeat:\n"
            "  from tests.judge import Examination; from tests.problems import Problem\n"
            f"  print(Examination({small!r}, {plan.device!r}).judge({failure.backend!r}))\n  " + "\n  ".join(complaints),
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    table = Table("backend", "ran", "refused", "worst error / bound", "of problem", "failures")
    failed = Counter(failure.backend for failure in total.failures)
    for name in plan.backends:
        ratio, seed = total.worst.get(name, (0.0, -1))
        table.add_row(
            name, str(total.ran[name]), str(total.refused[name]), f"{ratio:.2f}", str(seed) if seed >= 0 else "",
            f"[red]{failed[name]}[/]" if failed[name] else "0",
        )  # fmt: skip
    console.print(table)
    console.print(f"{total.problems} problems on {plan.device}, {len(total.failures)} failures")


def main(argv: list[str] | None = None) -> int:
    names = [backend.name for backend in BACKENDS]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first problem's number")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", action="append", choices=names, help="repeatable; all by default")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--dtype", action="append", choices=list(DTYPES))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--show", type=int, default=5, help="failures to shrink and print")
    options = parser.parse_args(argv)
    plan = Plan(
        options.device,
        tuple(options.backend or names),
        tuple(options.kind) if options.kind else None,
        tuple(options.dtype) if options.dtype else None,
    )
    if options.device == "cpu":
        torch.set_num_threads(1)
    console = Console()
    total = _run(plan, range(options.seed, options.seed + options.problems), options.jobs, console)
    _report(total, plan, console, options.show)
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
