"""The fused kernels under compute-sanitizer: `python -m tests.sanitize`, with a GPU and the CUDA toolkit.

Every call of fused_coverage.py, and each call of calls.py in some states of its caller, runs under memcheck
(without PyTorch's caching allocator, so that a read past a tensor is seen), racecheck, initcheck and synccheck (threads
that miss a barrier), shared out among processes. One line for each tool; exit code 1 where one found something in a
kernel of ours. FLASH_ATTN_COMPAT_CAPABILITY=7.5 checks the PTX that Turing gets.
`python -m tests.sanitize --every 16 --together --seconds 30` runs a sample in two minutes.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ENTRIES = "forward|decode|append|absmax|to_half|mask|delta|dkdv|dq"
FINDING = re.compile(rf"=========\s+(?:at|by|Error|Warning|Invalid|Uninitialized|Race).*\b(?:{ENTRIES})\b")

# A shard that is still at work then is killed.
LATE, GRACE = 1.3, 30.0
STATES = ("default dtype torch.float64", "autocast torch.bfloat16", "cuda: another stream", "a second thread")


def child(shard: int, shards: int, every: int, seconds: float, tool: str) -> None:
    """Run a shard of every so-manieth check, and start none after ``seconds``; wrong numbers raise."""
    from tests import fused_coverage

    start, place = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    runs = [*(check for *_, check in fused_coverage.checks(place)), *of_the_table(place, tool)]
    runs, done = runs[::every][shard::shards], 0
    for run in runs:
        if time.monotonic() - start > seconds:
            break
        run()
        done += 1
    torch.cuda.synchronize()
    print(f"ran {done} checks of {len(runs)}", flush=True)


def of_the_table(place: torch.device, tool: str) -> Iterator[Callable[[], object]]:
    """Yield checks: each call in some states, and calls without fused kernels once.

    Modules multiply by cuBLAS, whose kernels racecheck breaks (its internal error, seen on an H200 with CUDA 13.0).
    """
    import flash_attn_compat
    from tests.forms import caller_state
    from tests.forms.calls import TABLE, Call

    os.environ["FLASH_ATTN_COMPAT_BACKEND"] = "fused"  # in every thread
    states = [state for state in caller_state.states() if state.name in STATES]

    def answers(call: Call) -> None:
        flash_attn_compat.reset_backend_counts()
        caller_state.answer(call, place)
        for state in states if flash_attn_compat.backend_counts().get("fused") else ():
            caller_state.answer(call, place, state)

    for call in TABLE.values():
        if call.casts and tool == "racecheck":
            continue
        yield functools.partial(answers, call)


def run(tool: str | None, shard: int, shards: int, seconds: float, every: int = 1) -> str:
    """Return the output of a shard under ``tool``; without a tool the shard fills the cache of compiled kernels."""
    command = [sys.executable, "-m", "tests.sanitize", "--shard", str(shard), "--jobs", str(shards)]
    command += ["--seconds", str(seconds), "--every", str(every), "--tool", tool or ""]
    variables = dict(os.environ)
    if tool is not None:
        sanitizer = ["compute-sanitizer", "--tool", tool, "--print-limit", "20"]
        if tool != "initcheck":  # which must see who else wrote to memory
            sanitizer += [part for entry in ENTRIES.split("|") for part in ("--kernel-name", f"kne={entry}")]
        command = [*sanitizer, *(["--leak-check", "no"] if tool == "memcheck" else []), *command]
    if tool == "memcheck":
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables)
    try:
        said, _ = process.communicate(timeout=None if seconds == float("inf") else LATE * seconds + GRACE)
    except subprocess.TimeoutExpired as late:  # a check that does not end; what was found before it counts
        process.kill()
        said = (late.stdout or b"") + b"\nkilled: a check did not end\n"
    return said.decode(errors="replace")


def findings(text: str) -> list[str]:
    """The lines of a report that name a kernel of ours."""
    return [line for line in text.splitlines() if FINDING.search(line)]


def judge(tool: str | None, jobs: int, seconds: float, every: int) -> bool:
    """Run all shards under ``tool`` and print its line; returns whether no shard failed and none found anything."""
    with ThreadPoolExecutor(jobs) as pool:
        texts = list(pool.map(lambda shard: run(tool, shard, jobs, seconds, every), range(jobs)))
    counts = [
        map(int, found) for text in texts for found in re.findall(r"^ran (\d+) checks of (\d+)", text, re.MULTILINE)
    ]
    ran, known = (sum(each) for each in zip((0, 0), *counts))
    failed = [text for text in texts if not re.search(r"^ran \d+ checks", text, re.MULTILINE)]
    found = [line for text in texts for line in findings(text)]
    others = [text for text in texts if re.search(r"ERROR SUMMARY: [1-9]|RACECHECK SUMMARY: [1-9]", text)]
    print(f"{tool or 'without a tool'}: {ran} of {known} checks, {len(found)} findings in our kernels, "
          f"{len(failed)} processes failed, {len(others)} with findings of any kind", flush=True)  # fmt: skip
    for text in failed[:2]:
        print(text[-1500:], flush=True)
    for line in found[:10]:
        print(line, flush=True)
    for text in others[:2]:  # whoever it was, and where it began
        print(*[line for line in text.splitlines() if line.startswith("=========")][:25], sep="\n", flush=True)
    return not failed and not found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--cached", action="store_true", help="the kernels are in the cache: nothing runs without a tool"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="a sample: one of N checks")
    parser.add_argument("--together", action="store_true", help="all tools at once; they share the processes")
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tool", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no check later, for each tool")
    arguments = parser.parse_args()
    if arguments.shard is not None:
        child(arguments.shard, arguments.jobs, arguments.every, arguments.seconds, arguments.tool)
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    jobs, seconds, every, tools = arguments.jobs, arguments.seconds, arguments.every, arguments.tools
    compiles = arguments.cached or judge(None, jobs, seconds, every)
    at_once = len(tools) if arguments.together else 1
    with ThreadPoolExecutor(at_once) as pool:
        clean = list(pool.map(lambda tool: judge(tool, max(1, jobs // at_once), seconds, every), tools))
    return 0 if compiles and all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
