"""Thousands of random problems through every backend: `python -m tests.fuzz --problems 10000 --device cuda`.

Problem N is the same on every machine. A failure is printed as the smallest problem found that still fails, with
the lines that repeat it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import sys
import time
from collections import Counter
from collections.abc import Iterator
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
    fatal: bool = False


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


def examine(plan: Plan, seed: int) -> Tally:
    problem = random_problem(seed, plan.kinds, plan.dtypes)
    tally = Tally(problems=1)
    examination = Examination(problem, plan.device)
    for name in plan.backends:
        complaints, ratio, refused = _judge(examination, name)
        fatal = _is_fatal(complaints)
        if complaints:
            tally.failures.append(Failure(seed, name, problem, complaints, fatal))
        if refused:
            tally.refused[name] += 1
            continue
        tally.ran[name] += 1
        tally.worst[name] = max((ratio, seed), tally.worst.get(name, (0.0, -1)))
        if fatal:
            break
    return tally


def _is_fatal(complaints: list[str]) -> bool:
    """Whether the device refuses all further work of this process."""
    return any("CUDA error" in complaint for complaint in complaints)


def _judge(examination: Examination, backend: str) -> tuple[list[str], float, bool]:
    verdict = examination.judge(backend)
    complaints = list(verdict.failures)
    if verdict.refused and must_serve(examination.problem, backend, examination.device):
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
    return {" ".join(complaint.split(":")[0].split()[:6]) for complaint in complaints}


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
    "rotary_dim": 0, "leftpad": None, "head_dim_v": None, "group": 1, "nheads_k": 1, "head_dim": 8,
    "lengths_as": "tensor",
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


def _run(plan: Plan, seeds: range, jobs: int, seconds: float, console: Console) -> Tally:
    total, begun = Tally(), time.monotonic()
    columns = (TextColumn("problems"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[failures]} failures"))  # fmt: skip
    in_processes = jobs > 1 or plan.device != "cpu"
    tallies = _in_processes(plan, seeds, jobs) if in_processes else (examine(plan, seed) for seed in seeds)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("problems", total=len(seeds), failures=0)
        for tally in tallies:
            total.add(tally)
            progress.update(task, completed=total.problems, failures=len(total.failures))
            if time.monotonic() - begun > seconds:
                break
    return total


def _in_processes(plan: Plan, seeds: range, jobs: int) -> Iterator[Tally]:
    """Each process takes every jobs-th problem. One that dies, or loses its device, is replaced behind that problem."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers: dict[int, tuple[multiprocessing.process.BaseProcess, range]] = {}

    def start(job: int, left: range) -> None:
        if left:
            process = context.Process(target=_work, args=(plan, left, job, results), daemon=True)
            process.start()
            workers[job] = process, left

    try:
        for job in range(jobs):
            start(job, seeds[job::jobs])
        while workers:
            try:
                job, tally, fatal = results.get(timeout=1.0)
            except queue.Empty:
                for job, (process, left) in list(workers.items()):
                    if not process.is_alive() and results.empty():
                        del workers[job]
                        yield _death(plan, left[0], process.exitcode)
                        start(job, left[1:])
                continue
            process, left = workers.pop(job)
            if fatal:
                process.join()
                start(job, left[1:])
            elif left[1:]:
                workers[job] = process, left[1:]
            yield tally
    finally:
        for process, _ in workers.values():
            process.terminate()


def _work(plan: Plan, seeds: range, job: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    for seed in seeds:
        tally = examine(plan, seed)
        fatal = any(failure.fatal for failure in tally.failures)
        results.put((job, tally, fatal))
        if fatal:
            return


def _death(plan: Plan, seed: int, exitcode: int | None) -> Tally:
    problem = random_problem(seed, plan.kinds, plan.dtypes)
    complaint = f"the process died with exit code {exitcode}"
    return Tally(problems=1, failures=[Failure(seed, "?", problem, [complaint], fatal=True)])


def _report(total: Tally, plan: Plan, console: Console, shown: int) -> None:
    for failure in total.failures[:shown]:
        # After a device error a process can try nothing more, so that problem stays as large as it was.
        small = failure.problem if failure.fatal else shrink(failure, plan.device)
        complaints = (
            failure.complaints if failure.fatal else _judge(Examination(small, plan.device), failure.backend)[0]
        )
        console.rule(f"problem {failure.seed} on {failure.backend}")
        console.print(f"{failure.problem!r}\n  " + "\n  ".join(failure.complaints), markup=False, highlight=False)
        console.print(
            "smallest found, to repeat:\n"
            "  from tests.judge import Examination; from tests.problems import Problem\n"
            f"  print(Examination({small!r}, {plan.device!r}).judge({failure.backend!r}))\n  "
            + "\n  ".join(complaints),
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
    kinds = Counter((failure.backend, kind) for failure in total.failures for kind in _quantities(failure.complaints))
    for (name, kind), count in kinds.most_common():
        console.print(f"  {count:5} {name}: {kind}", markup=False, highlight=False)
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
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after as long, and report")
    parser.add_argument("--json", metavar="FILE", help="write every failure there")
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
    total = _run(plan, range(options.seed, options.seed + options.problems), options.jobs, options.seconds, console)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([{**vars(f), "problem": repr(f.problem)} for f in total.failures], file, indent=1)
    _report(total, plan, console, options.show)
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
