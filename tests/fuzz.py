"""Thousands of random problems through every backend: `python -m tests.fuzz --problems 10000 --device cuda`.

Problem N is the same on every machine. A failure is printed as the smallest problem found that still fails, as one line
that repeats it. The last line of all is the summary as JSON. 100,000 answers on one GPU with all its CPU cores at work:

    python -m tests.fuzz --device cuda --jobs 16 --served 100000 --seconds 1200
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

import torch
from rich.console import Console

from flash_attn_compat.backends import BACKENDS
from flash_attn_compat.output_path import output_path
from verify.call import DTYPES
from verify.drawing import random_eight_bit_problem, random_problem
from verify.examination import Examination
from verify.output import progress_bar
from verify.problems import KINDS, WITH_GRADIENTS, Problem

_START = "spawn"  # a copy of this process could not use its GPU


@dataclass(frozen=True)
class Plan:
    device: str
    backends: tuple[str, ...]
    kinds: tuple[str, ...] | None
    dtypes: tuple[str, ...] | None
    mixes: int | None = None
    eight_bit: bool = False

    def problem(self, seed: int) -> Problem:
        if self.eight_bit:
            return random_eight_bit_problem(seed, self.dtypes, self.mixes)
        return random_problem(seed, self.kinds, self.dtypes, self.mixes)


@dataclass
class Failure:
    seed: int
    backend: str
    problem: Problem
    complaints: list[str]
    fatal: bool = False


@dataclass
class Tally:
    """Counts and failures of some problems; tallies of parts add up."""

    ran: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)  # backend: (error over its bound, seed)
    failures: list[Failure] = field(default_factory=list)
    problems: int = 0
    seconds: float = 0.0

    @property
    def served(self) -> int:
        return sum(self.ran.values())

    def add(self, other: Tally) -> None:
        self.problems += other.problems
        self.ran += other.ran
        self.refused += other.refused
        self.failures += other.failures
        for name, found in other.worst.items():
            self.worst[name] = max(found, self.worst.get(name, (0.0, -1)))


def examine(plan: Plan, seed: int) -> Tally:
    problem = plan.problem(seed)
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


def must_serve(p: Problem, backend: str, device: str = "cpu") -> bool:
    """Return whether a backend must serve a problem: the general two all, `sdpa` on a CPU plain ones of any mask."""
    if backend in ("reference", "chunked"):
        return True
    plain = p.kind in WITH_GRADIENTS and not p.dropout_p and p.softcap <= 0 and p.value_dim == p.head_dim
    return backend == "sdpa" and device == "cpu" and plain


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
    candidates = _simpler(problem)
    for _ in range(attempts):
        candidate = next(candidates, None)
        if candidate is None:
            break
        if _fails_alike(candidate, failure.backend, device, wanted):
            problem, candidates = candidate, _simpler(candidate)
    return problem


def _quantities(complaints: list[str]) -> set[str]:
    return {" ".join(complaint.split(":")[0].split()[:6]) for complaint in complaints}


def _fails_alike(problem: Problem, backend: str, device: str, wanted: set[str]) -> bool:
    try:
        examination = Examination(problem, device)
        if not problem.dropout_p:
            examination.right()  # a problem that the oracle cannot do is malformed
        return bool(_quantities(_judge(examination, backend)[0]) & wanted)
    except Exception:  # noqa: BLE001 - a malformed candidate is no candidate
        return False


# A problem's own fields are not made simpler here: its kind, its lengths and what depends on them.
_SIMPLEST = {
    field.name: field.default
    for field in fields(Problem)
    if field.name not in ("kind", "seqlens_q", "seqlens_k", "capacity", "new_keys", "backward")
} | {"backward": False}


def _simpler(problem: Problem) -> Iterator[Problem]:
    for index in range(len(problem.seqlens_q) if len(problem.seqlens_q) > 1 else 0):
        kept = [i for i in range(len(problem.seqlens_q)) if i != index]
        pick = {
            name: tuple(getattr(problem, name)[i] for i in kept)
            for name in ("seqlens_q", "seqlens_k", "leftpad", "seqused")
            if getattr(problem, name) is not None
        }
        yield replace(problem, **pick)
    for index in range(len(problem.sizes)):
        yield replace(problem, sizes=problem.sizes[:index] + problem.sizes[index + 1 :])
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


def run_all(plan: Plan, seeds: range, jobs: int, served: float, seconds: float, console: Console) -> Tally:
    """served, seconds: when to stop before the last problem, after so many answers over all backends, or as long."""
    total, begun = Tally(), time.monotonic()
    in_processes = jobs > 1 or plan.device != "cpu"
    tallies = _in_processes(plan, seeds, jobs) if in_processes else (examine(plan, seed) for seed in seeds)
    with progress_bar(console) as progress:
        by_answers = served < float("inf")
        task = progress.add_task("", total=served if by_answers else len(seeds))
        for tally in tallies:
            total.add(tally)
            done = total.served if by_answers else total.problems
            progress.update(task, completed=done, description=f"{len(total.failures)} failures")
            if total.served >= served or time.monotonic() - begun > seconds:
                break
    total.seconds = time.monotonic() - begun
    return total


def _in_processes(plan: Plan, seeds: range, jobs: int) -> Iterator[Tally]:
    """In `jobs` processes, one problem at a time in each, so that it is known which one a process died of."""
    mine, left = threading.local(), iter(seeds)
    pools: list[ProcessPoolExecutor] = []

    def solved(seed: int) -> Tally:
        if getattr(mine, "pool", None) is None:
            context = multiprocessing.get_context(_START)
            mine.pool = ProcessPoolExecutor(1, context, initializer=torch.set_num_threads, initargs=(1,))
            pools.append(mine.pool)
        try:
            tally = mine.pool.submit(examine, plan, seed).result()
        except BrokenProcessPool as death:
            tally = Tally(problems=1, failures=[Failure(seed, "?", plan.problem(seed), [str(death)], fatal=True)])
        if any(failure.fatal for failure in tally.failures):  # the next problem gets a new process
            mine.pool.shutdown(wait=False)
            mine.pool = None
        return tally

    with ThreadPoolExecutor(jobs) as threads:
        running = {threads.submit(solved, seed) for seed in islice(left, jobs)}
        try:
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {threads.submit(solved, seed) for seed in islice(left, len(done))}
                yield from (future.result() for future in done)
        finally:
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)


def repetition(problem: Problem, backend: str, device: str) -> str:
    """One line for a shell, with the settings that this run was given."""
    settings = "".join(f"{n}={v} " for n, v in sorted(os.environ.items()) if n.startswith("FLASH_ATTN_COMPAT_"))
    code = (
        "from verify.examination import Examination; from verify.problems import Problem; "
        f"print(Examination({problem!r}, {device!r}).judge({backend!r}))"
    )
    return f'{settings}python -c "{code}"'


def summary(total: Tally, plan: Plan) -> dict[str, Any]:
    """Return a run's results for machines."""
    of_backends = {}
    for name in plan.backends:
        ratio, seed = total.worst.get(name, (0.0, -1))
        worst = {"worst": f"{ratio:.3f}", "of_problem": seed}  # JSON knows no infinity
        failed = sum(failure.backend == name for failure in total.failures)
        of_backends[name] = {"served": total.ran[name], "refused": total.refused[name], "failures": failed, **worst}
    return {
        "device": torch.cuda.get_device_name(plan.device) if plan.device.startswith("cuda") else plan.device,
        "torch": torch.__version__,
        "settings": {n: v for n, v in sorted(os.environ.items()) if n.startswith("FLASH_ATTN_COMPAT_")},
        "problems": total.problems,
        "served": total.served,
        "failures": len(total.failures),
        "seconds": round(total.seconds, 1),
        "backends": of_backends,
    }


def _report(total: Tally, plan: Plan, console: Console, shown: int) -> None:
    for failure in total.failures[:shown]:
        # After a device error a process can try nothing more, so that problem stays as large as it was.
        small = failure.problem if failure.fatal else shrink(failure, plan.device)
        console.rule(f"problem {failure.seed} on {failure.backend}")
        lines = [repr(failure.problem), *(f"  {complaint}" for complaint in failure.complaints)]
        lines += ["smallest found, to repeat:", repetition(small, failure.backend, plan.device)]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    kinds = Counter((failure.backend, kind) for failure in total.failures for kind in _quantities(failure.complaints))
    for (name, kind), count in kinds.most_common():
        console.print(f"  {count:5} {name}: {kind}", markup=False, highlight=False)
    console.print(f"{total.problems} problems on {plan.device}, {total.served} answers, {len(total.failures)} failures")


def main(argv: list[str] | None = None) -> int:
    names = [backend.name for backend in BACKENDS]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, help="how many; 1000 where --served does not say when to stop")
    parser.add_argument("--served", type=int, help="stop after as many answers, counted over all backends")
    parser.add_argument("--seed", type=int, default=0, help="the first problem's number")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", action="append", choices=names, help="repeatable; all by default")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--dtype", action="append", choices=list(DTYPES))
    parser.add_argument("--eight-bit", action="store_true", help="caches and pages of 8-bit floats")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--mixes", type=int, help="mixtures of features, where compiling kernels would take the time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after as long, and report")
    parser.add_argument("--json", type=output_path, metavar="FILE", help="write every failure there, and the summary")
    parser.add_argument("--show", type=int, default=5, help="failures to shrink and print")
    options = parser.parse_args(argv)
    plan = Plan(
        options.device,
        tuple(options.backend or names),
        tuple(options.kind) if options.kind else None,
        tuple(options.dtype) if options.dtype else None,
        options.mixes,
        options.eight_bit,
    )
    if options.device == "cpu":
        torch.set_num_threads(1)
    console = Console()
    served = options.served or float("inf")
    problems = options.problems or (10**9 if options.served else 1000)
    total = run_all(plan, range(options.seed, options.seed + problems), options.jobs, served, options.seconds, console)
    _report(total, plan, console, options.show)
    found = summary(total, plan)
    if options.json:
        failures = [{**vars(f), "problem": repr(f.problem)} for f in total.failures]
        with open(options.json, "w") as file:
            json.dump({"summary": found, "failures": failures}, file, indent=1)
    print(json.dumps(found))
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
