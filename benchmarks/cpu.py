"""CPU speed as ratios within one run: packed sequences against padding and against a bare loop, `chunked` against
PyTorch's fused kernel, and the host time of a tiny call. `python -m benchmarks.cpu [--json FILE] [--only TEXT]`

Exit code 1 if a ratio misses its bound. Contestants and timing are those of verify bench.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from flash_attn_compat import flash_attn_func
from verify.bench_report import remarks
from verify.bench_run import Plan, run
from verify.contestants import RIVALS, Contestant, ours
from verify.environment import describe
from verify.output import add_output_arguments, console, deliver, progress_bar
from verify.tables import Report, Table
from verify.timing import Job, Timing, time_together
from verify.workloads import Workload, workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Log-normal around 200, the longest 2048.
SKEWED = (torch.randn(32, generator=torch.Generator().manual_seed(0)).exp() * 200).clamp(1, 2048).int().tolist()
SKEWED[7] = 2048
LENGTHS = {"skewed": SKEWED, "uniform": [256] * 16, "tiny": [1 + i % 16 for i in range(512)]}
# (at least this share of padding's speed, and of the bare loop's)
REQUIRED = {"skewed": (3.0, 0.85), "uniform": (0.9, 0.85), "tiny": (0.9, 0.85)}
ENOUGH_S = 10.0
WAYS = {"forward": "forward", "backward": "forward + backward"}


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

    def cells(self) -> list[str]:
        required = f">= {self.at_least:g}" if self.at_least else f"<= {self.at_most:g}"
        return [self.case, f"{self.ratio:.2f}", required, "pass" if self.passes else "FAIL", self.detail]


class Bench:
    """repeats: readings of each figure. With one thread they are of CPU time, which other processes disturb little."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def timed(
        self, problem: Workload, contestants: Sequence[Contestant], dtype: str, ways: Sequence[str]
    ) -> Iterator[tuple[str, list[float]]]:
        """Milliseconds of each, by way. A contestant that computes something else wins nothing."""
        plan = Plan([problem], contestants, "cpu", DTYPES[dtype], self.repeats, ENOUGH_S, "backward" in ways,
                    clock=self.clock)  # fmt: skip
        (rows,) = run(plan)
        for way in ways:
            found = [row.milliseconds("both" if way == "backward" else way) for row in rows]
            assert all(found) and not any(row.wrong for row in rows), "; ".join(map(remarks, rows))
            yield WAYS[way], [ms or 0.0 for ms in found]

    def packed(self, name: str, dtype: str, ways: Sequence[str]) -> Iterator[Figure]:
        problem = workload(name, tuple(LENGTHS[name]), (8, 8), 64, "varlen")
        for way, taken in self.timed(problem, [ours(), RIVALS["pad_sdpa"], RIVALS["sdpa_loop"]], dtype, ways):
            detail = "ours {:.3g} ms, padding {:.3g} ms, loop {:.3g} ms".format(*taken)
            for rival, theirs, least in zip(("padding", "loop"), taken[1:], REQUIRED[name]):
                yield Figure(f"{name} {dtype} {way}: {rival} over ours", theirs / taken[0], detail, at_least=least)

    def chunked(self, causal: bool, ways: Sequence[str]) -> Iterator[Figure]:
        """The general backend against the fused kernel."""
        problem = workload("long", (4096,), (8, 8), 64, causal=causal)
        for way, (mine, theirs) in self.timed(problem, [ours("chunked"), RIVALS["pad_sdpa"]], "fp32", ways):
            case = f"4096 tokens {'causal ' if causal else ''}{way}: chunked over SDPA"
            yield Figure(case, mine / theirs, f"chunked {mine:.3g} ms, SDPA {theirs:.3g} ms", at_most=3.0)

    def host_time(self, dtype: str, causal: bool, ways: Sequence[str]) -> Iterator[Figure]:
        q, k, v = (torch.randn(1, 4, 2, 16).to(DTYPES[dtype]) for _ in range(3))
        by_head = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        jobs = {
            "ours": Job(lambda: flash_attn_func(q, k, v, causal=causal)),
            "SDPA": Job(lambda: F.scaled_dot_product_attention(*by_head, is_causal=causal)),
        }
        found = time_together(jobs, "cpu", 9 * self.repeats, ENOUGH_S, self.clock).values()
        mine, theirs = (each.median_ms for each in found if isinstance(each, Timing))
        case = f"host time of a tiny call {dtype}{' causal' if causal else ''}: ours over SDPA"
        yield Figure(case, mine / theirs, f"ours {mine:.3g} ms, SDPA {theirs:.3g} ms", at_most=4.0)

    def questions(self) -> Iterator[tuple[str, Sequence[str], Callable[[Sequence[str]], Iterator[Figure]]]]:
        """A label, the ways that it can be asked, and what answers it for some of them."""
        for name, dtype in product(LENGTHS, DTYPES):
            yield f"{name} {dtype}", (*WAYS,), partial(self.packed, name, dtype)
        for causal in (False, True):
            yield f"chunked 4096 tokens {causal}", (*WAYS,), partial(self.chunked, causal)
        for causal, dtype in product((False, True), DTYPES):
            yield f"host time {dtype} {causal}", ("",), partial(self.host_time, dtype, causal)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    add_output_arguments(parser)
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--repeats", type=int, default=7)
    what = "1 measures CPU time: the choice for a busy machine"
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help=what)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    wanted = [
        (label, [way for way in ways if options.only in f"{label} {way}"], ask)
        for label, ways, ask in Bench(options.repeats).questions()
    ]
    wanted = [each for each in wanted if each[1]]
    figures: list[Figure] = []
    with progress_bar(console()) as progress:
        task = progress.add_task("", total=len(wanted))
        for label, ways, ask in wanted:
            progress.update(task, description=label)
            figures += ask(ways)
            progress.advance(task)
    failed = [figure for figure in figures if not figure.passes]
    table = Table("CPU speed", ("case", "ratio", "required", "", "detail"), [figure.cells() for figure in figures])
    verdict = f"{'FAIL' if failed else 'PASS'}: {len(figures) - len(failed)} of {len(figures)} ratios are as required"
    report = Report("benchmarks cpu", describe(["cpu"]), [table], [verdict], not failed)
    deliver(report, {"figures": [asdict(each) | {"passes": each.passes} for each in figures]}, options, console())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
