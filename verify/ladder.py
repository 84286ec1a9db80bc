"""`python -m verify ladder`: one problem up the steps from naive attention to FlashAttention, each checked and timed.

The steps themselves are steps.py; how an answer is judged is judge.py's business, timing timing.py's.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from verify import inputs
from verify.call import Answer, Call
from verify.environment import checked_devices, describe
from verify.errors import UsageError
from verify.judge import Check, against_fp64, right_answer
from verify.output import add_output_arguments, check_output_arguments, console, deliver, progress_bar
from verify.steps import STEPS, Attention
from verify.tables import Report, Table
from verify.timing import DeviceLost, Failed, Job, Timing, peak_memory, time_together

DEFAULT_LENGTHS = (128, 256, 512, 1024)
# Longer problems are checked on this many rows, in bands spread over the sequence: fp64 needs all scores of a band.
CHECKED_ROWS, CHECKED_BANDS = 2048, 8
ENOUGH_S = 0.6  # of readings, for one step at one length


@dataclass(frozen=True)
class Rung:
    name: str
    run: Callable[..., Any]
    paper: str
    memory: str


@dataclass(frozen=True)
class Measurement:
    """One rung at one length. error and bound: largest difference from fp64, and how large it may be."""

    step: str
    n: int
    error: float | None = None
    bound: float | None = None
    ok: bool = True
    against_torch: float | None = None
    time_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    peak_bytes: int | None = None
    note: str = ""


def torch_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """PyTorch's own fused attention, in flash-attn's layout."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def rungs(block_rows: int, block_columns: int) -> list[Rung]:
    """The steps, and above them what one would use."""
    from flash_attn_compat import flash_attn_func

    def of_size(step: Attention) -> Attention:
        return functools.partial(step, block_rows=block_rows, block_columns=block_columns)

    return [
        *(Rung(step.name, of_size(step.function), step.paper, step.memory) for step in STEPS),
        Rung("PyTorch SDPA", torch_attention, "", ""),
        Rung("flash_attn_compat", flash_attn_func, "", ""),
    ]


def climb(
    n: int, settings: argparse.Namespace, device: str, ladder: Sequence[Rung], done: Callable[[], None]
) -> Iterator[Measurement]:
    """Every rung at length n; `done` is called after each piece of work, once more than there are rungs."""
    shape = (settings.batch, n, settings.heads, settings.head_dim)
    tensors = inputs.draw({"q": shape, "k": shape, "v": shape}, settings.dtype, settings.seed)
    q, k, v = (tensor.to(device) for tensor in tensors.values())
    exact = _Judge(tensors, settings.causal)
    jobs = {rung.name: Job(functools.partial(rung.run, q, k, v, causal=settings.causal)) for rung in ladder}
    with torch.no_grad():
        by_torch = torch_attention(q, k, v, causal=settings.causal)
        timings = time_together(jobs, device, settings.repeats, ENOUGH_S)
        done()
        for name, job in jobs.items():
            yield _measure(name, n, job, timings[name], device, exact, by_torch)
            done()


def _measure(
    name: str, n: int, job: Job, timing: Timing | Failed, device: str, exact: _Judge, by_torch: Tensor
) -> Measurement:
    if isinstance(timing, Failed):
        return Measurement(name, n, ok="memory" in timing.reason, note=timing.reason)
    out = cast(Tensor, job.run()).cpu()
    check = exact.judge(out)
    against_torch = (out.double() - by_torch.cpu().double()).abs().max().item()
    del out
    quartiles = timing.median_ms, timing.low_ms, timing.high_ms
    return Measurement(name, n, check.error, check.bound, check.ok, against_torch, *quartiles, peak_memory(job, device))


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)


class _Judge:
    """Holds answers to one problem against fp64, a band of rows at a time: causal rows up to b see keys up to b."""

    def __init__(self, tensors: dict[str, Tensor], causal: bool) -> None:
        n = tensors["q"].shape[1]
        self.bands = []
        for rows in checked_rows(n):
            keys = slice(0, rows.stop if causal else n)
            cut = {"q": tensors["q"][:, rows], "k": tensors["k"][:, keys], "v": tensors["v"][:, keys]}
            self.bands.append((rows, right_answer(Call("flash_attn_func", {**cut, "causal": causal}))))

    def judge(self, out: Tensor) -> Check:
        """The check nearest to (or furthest beyond) its bound."""
        checks = [against_fp64(right, Answer(out[:, rows]))[0] for rows, right in self.bands]
        return max(checks, key=lambda check: check.ratio)


def checked_rows(n: int) -> list[slice]:
    """All rows, or bands of them, the first and the last included."""
    if n <= CHECKED_ROWS:
        return [slice(0, n)]
    height = CHECKED_ROWS // CHECKED_BANDS
    starts = [(n - height) * band // (CHECKED_BANDS - 1) for band in range(CHECKED_BANDS)]
    return [slice(start, start + height) for start in starts]


# ---- what is shown --------------------------------------------------------------------------------------------------


def legend(ladder: Sequence[Rung]) -> Table:
    return Table("Steps", ("step", "paper", "scores kept in memory"), [(r.name, r.paper, r.memory) for r in ladder])


def table(n: int, measurements: Sequence[Measurement]) -> Table:
    of_torch = next((m.time_ms for m in measurements if m.step == "PyTorch SDPA"), None)
    columns = ("step", "off fp64", "may be", "off PyTorch", "time", "quartiles", "of SDPA", "peak memory", "verdict")
    return Table(f"N = {n}", columns, [_line(m, of_torch) for m in measurements])


def _line(m: Measurement, of_torch: float | None) -> tuple[str, ...]:
    if m.time_ms is None:
        return (m.step, *[""] * 7, m.note if m.ok else f"FAIL: {m.note}")
    factor = m.time_ms / of_torch if of_torch else None
    return (
        m.step,
        f"{m.error:.1e}",
        f"{m.bound:.1e}",
        f"{m.against_torch:.1e}",
        f"{m.time_ms:.3g} ms",
        f"{m.low_ms:.3g} to {m.high_ms:.3g}",
        "" if factor is None else f"{factor:.{0 if factor > 10 else 1}f} x",
        "" if m.peak_bytes is None else f"{m.peak_bytes / 2**20:.3g} MiB",
        "pass" if m.ok else "FAIL",
    )


def plot(measurements: Sequence[Measurement], title: str, path: Path) -> None:
    """Time and peak memory against N, one line for each step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for index, name in enumerate(dict.fromkeys(m.step for m in measurements)):
        of_step = [m for m in measurements if m.step == name and not m.note]
        style = {"marker": "osD^v*P"[index % 7], "markersize": 4, "linestyle": "-" if index < len(STEPS) else "--"}
        times.plot([m.n for m in of_step], [m.time_ms for m in of_step], label=name, **style)
        counted = [(m.n, m.peak_bytes / 2**20) for m in of_step if m.peak_bytes]
        memory.plot(*zip(*counted), label=name, **style)
    for axes, label in ((times, "time, ms"), (memory, "peak memory beyond the inputs, MiB")):
        axes.set(xlabel="N (sequence length)", ylabel=label, xscale="log", yscale="log")
        lengths = sorted({m.n for m in measurements})
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# ---- the command ----------------------------------------------------------------------------------------------------


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "ladder",
        help="the same problem through naive attention, blocks, fused rows and online-softmax tiles",
        description="Runs one problem through five lecture-like implementations (verify/steps.py), PyTorch's attention "
        "and this package's: error against fp64, time and peak memory of each. Exit code 0: all are right; 1: one is "
        "wrong; 2: arguments that make no sense.",
    )
    parser.add_argument(
        "--n",
        type=inputs.positive,
        nargs="+",
        metavar="N",
        help=f"sequence lengths (default {' '.join(map(str, DEFAULT_LENGTHS))}); --plot of one N adds N/2 and N/4",
    )
    inputs.add_tile_arguments(parser)
    inputs.add_problem_arguments(parser, batch=1, heads=2, head_dim=64)
    parser.add_argument("--repeats", type=inputs.positive, default=5, metavar="R", help="readings of each time")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time and memory against N")
    add_output_arguments(parser)
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    check_output_arguments(arguments)
    inputs.check_picture(arguments.plot)
    (device,) = checked_devices([arguments.device])
    inputs.check_device(device, arguments.dtype)
    lengths = sorted(set(arguments.n or DEFAULT_LENGTHS))
    if arguments.plot and len(lengths) == 1:
        lengths = sorted({max(1, lengths[0] // part) for part in (4, 2, 1)})
    ladder = rungs(arguments.br, arguments.bc)
    terminal = console()
    measurements: list[Measurement] = []
    with progress_bar(terminal) as progress:
        task = progress.add_task("climbing", total=len(lengths) * (len(ladder) + 1))
        for n in lengths:
            try:
                measurements += climb(n, arguments, device, ladder, lambda: progress.advance(task))
            except DeviceLost as error:
                raise UsageError(f"N = {n}: the device gave up: {error}") from error
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                raise UsageError(f"N = {n} does not fit: no memory for the inputs and PyTorch's own answer") from error

    problem = (
        f"batch {arguments.batch}, {arguments.heads} heads, head_dim {arguments.head_dim}, "
        f"{inputs.short(arguments.dtype)}, {'causal' if arguments.causal else 'not causal'}, "
        f"tiles of {arguments.br} rows x {arguments.bc} columns"
    )
    environment = {"problem": problem, "inputs": inputs.recipe(arguments.dtype, arguments.seed), **describe([device])}
    if max(lengths) > CHECKED_ROWS:
        environment["checked"] = f"beyond N = {CHECKED_ROWS}, {CHECKED_ROWS} rows in {CHECKED_BANDS} bands"
    tables = [legend(ladder), *(table(n, [m for m in measurements if m.n == n]) for n in lengths)]
    wrong = sorted({m.step for m in measurements if not m.ok})
    closing = [f"FAIL: {', '.join(wrong)}"] if wrong else ["PASS: every step is as near to fp64 as plain PyTorch"]
    if arguments.plot:
        plot(measurements, f"{problem}\n{environment[f'device {device}']}", arguments.plot)
        terminal.print(f"wrote {arguments.plot}")
    data = {"problem": problem, "measurements": [asdict(m) for m in measurements]}
    deliver(Report("flash_attn_compat: the ladder", environment, tables, closing, not wrong), data, arguments, terminal)
    return 1 if wrong else 0
