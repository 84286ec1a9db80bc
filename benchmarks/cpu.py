"""CPU speed as ratios within one run: packed sequences against padding and against a bare loop, `chunked` against
PyTorch's fused kernel, and the host time of a tiny call. `python -m benchmarks.cpu [--json FILE] [--only TEXT]`

Exit code 1 where a ratio misses what is required of it. Who is timed, and whether each is right, is verify bench's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flash_attn_compat import flash_attn_func
from verify import spot_check
from verify.bench_run import forward_job, training_job
from verify.contestants import RIVALS, Contestant, ours
from verify.timing import Job
from verify.workloads import Workload, workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Log-normal around 200, the longest 2048.
SKEWED = (torch.randn(32, generator=torch.Generator().manual_seed(0)).exp() * 200).clamp(1, 2048).int().tolist()
SKEWED[7] = 2048
LENGTHS = {"skewed": SKEWED, "uniform": [256] * 16, "tiny": [1 + i % 16 for i in range(512)]}
# (at least this share of padding's speed, and of the bare loop's)
REQUIRED = {"skewed": (3.0, 0.85), "uniform": (0.9, 0.85), "tiny": (0.9, 0.85)}
ENOUGH_S = 20.0
Run = Callable[[int], Iterator["Figure"]]


@dataclass(frozen=True)
class Figure:
    """The time of a call over that of another; at_least, at_most: what is required of it."""

    case: str
    ratio: float
    detail: str
    at_least: float = 0.0
    at_most: float = float("inf")

    @property
    def passes(self) -> bool:
        return self.at_least <= self.ratio <= self.at_most


def interleaved(contestants: Mapping[str, Callable[[], object]], repeats: int, calls: int = 1) -> dict[str, float]:
    """Median seconds per call of each contestant.

    They take turns within every repeat, the first one rotating, so that a slow moment of the machine hits all alike.
    Three repeats are enough where they take long. With one thread the seconds are those of this process's CPU time,
    which other processes on the machine disturb little.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    names = list(contestants)
    for name in names:
        contestants[name]()  # allocator, thread pool and caches are warm from here on
    taken: dict[str, list[float]] = {name: [] for name in names}
    begun = clock()
    for repeat in range(repeats):
        if repeat >= 3 and clock() - begun > ENOUGH_S:
            break
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            start = clock()
            for _ in range(calls):
                contestants[name]()
            taken[name].append((clock() - start) / calls)
    return {name: statistics.median(times) for name, times in taken.items()}


def timed(
    problem: Workload, contestants: Mapping[str, Contestant], dtype: str, backward: bool, repeats: int
) -> dict[str, float]:
    """Seconds of each. A contestant that computes something else wins nothing."""
    given = problem.call("cpu", DTYPES[dtype])
    pieces = spot_check.pieces(given)
    jobs = {}
    for name, contestant in contestants.items():
        prepared = contestant.prepare(problem, given)
        check = spot_check.check(prepared, given, pieces, backward)
        assert check.ok, f"{name}: {check}"
        jobs[name] = partial(_call, (training_job if backward else forward_job)(prepared, given))
    return interleaved(jobs, repeats)


def _call(job: Job) -> None:
    with job.around():
        job.run()


def packed(name: str, dtype: str, backward: bool, repeats: int) -> Iterator[Figure]:
    problem = workload(name, tuple(LENGTHS[name]), (8, 8), 64, "varlen")
    who = {"ours": ours(), "padding": RIVALS["pad_sdpa"], "loop": RIVALS["sdpa_loop"]}
    taken = timed(problem, who, dtype, backward, repeats)
    case = f"{name} {dtype} {'forward + backward' if backward else 'forward'}"
    for rival, least in zip(("padding", "loop"), REQUIRED[name]):
        yield Figure(f"{case}: {rival} over ours", taken[rival] / taken["ours"], told(taken), at_least=least)


def chunked(causal: bool, backward: bool, repeats: int) -> Iterator[Figure]:
    """The general backend against the fused kernel."""
    problem = workload("long", (4096,), (8, 8), 64, causal=causal)
    taken = timed(problem, {"chunked": ours("chunked"), "SDPA": RIVALS["pad_sdpa"]}, "fp32", backward, repeats)
    case = f"4096 tokens {'causal ' if causal else ''}{'forward + backward' if backward else 'forward'}"
    yield Figure(f"{case}: chunked over SDPA", taken["chunked"] / taken["SDPA"], told(taken), at_most=3.0)


def host_time(dtype: str, causal: bool, repeats: int) -> Iterator[Figure]:
    q, k, v = (torch.randn(1, 4, 2, 16).to(DTYPES[dtype]) for _ in range(3))
    by_head = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    calls = {
        "ours": lambda: flash_attn_func(q, k, v, causal=causal),
        "SDPA": lambda: F.scaled_dot_product_attention(*by_head, is_causal=causal),
    }
    taken = interleaved(calls, 3 * repeats, calls=300)
    case = f"host time of a tiny call {dtype}{' causal' if causal else ''}: ours over SDPA"
    yield Figure(case, taken["ours"] / taken["SDPA"], told(taken), at_most=4.0)


def told(taken: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in taken.items())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--repeats", type=int, default=7)
    what = "1 measures CPU time: the choice for a busy machine"
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help=what)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    runs: dict[str, Run] = {}
    for backward in (False, True):
        way = "backward" if backward else "forward"
        runs |= {
            f"{name} {dtype} {way}": partial(packed, name, dtype, backward) for name in LENGTHS for dtype in DTYPES
        }
    for flag in (False, True):
        runs |= {f"chunked 4096 tokens {flag} {back}": partial(chunked, flag, back) for back in (False, True)}
        runs |= {f"host time {dtype} {flag}": partial(host_time, dtype, flag) for dtype in DTYPES}
    wanted = [run for label, run in runs.items() if options.only in label]
    figures = [figure for run in track(wanted, "measuring") for figure in run(options.repeats)]
    machine = f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads"
    table = Table("case", "ratio", "required", "", "detail", title=f"CPU speed: {machine}")
    for figure in figures:
        verdict = "[green]pass[/]" if figure.passes else "[red]FAIL[/]"
        required = f">= {figure.at_least:g}" if figure.at_least else f"<= {figure.at_most:g}"
        table.add_row(figure.case, f"{figure.ratio:.2f}", required, verdict, figure.detail)
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
    if options.json:
        with open(options.json, "w") as file:
            rows = [asdict(figure) | {"passes": figure.passes} for figure in figures]
            json.dump({"machine": machine, "figures": rows}, file, indent=1)
    return 0 if all(figure.passes for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
