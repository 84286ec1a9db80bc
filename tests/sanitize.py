"""The fused kernels under compute-sanitizer: `python -m tests.sanitize`, with a GPU and the CUDA toolkit.

Every call of fused_coverage.py, flex_attention with captured tensors that want gradients, and each call of calls.py in
some states of its caller, runs under memcheck (without PyTorch's caching allocator, so that a read past a tensor is
seen), racecheck, initcheck and synccheck (threads that miss a barrier), shared out among processes and all GPUs. The
kernels whose warps meet at several barriers come first. One line for each tool; exit code 1 where one found something
in a kernel of ours. FLASH_ATTN_COMPAT_CAPABILITY=7.5 checks the PTX that Turing gets.
`python -m tests.sanitize --every 16 --together --seconds 30` runs a sample in two minutes; with `--within 100` all ends
in 100 seconds, however far it came.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, cast

import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat.backends.fused.choosing.kinds import Kind, choose_tile
from flash_attn_compat.backends.fused.choosing.tiles import Tile
from flash_attn_compat.backends.fused.tuning import candidates


class Check(NamedTuple):
    name: str
    run: Callable[[], object]


TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ENTRIES = "forward|decode|append|absmax|to_half|mask|delta|dkdv|dq"
FINDING = re.compile(rf"=========\s+(?:at|by|Error|Warning|Invalid|Uninitialized|Race).*\b(?:{ENTRIES})\b")

# A shard that is still at work then is killed.
LATE, GRACE = 1.3, 30.0
# Of --within: the share for compiling, that for checks begun under a tool, and that after which a check is stopped.
COMPILING, BEGINNING, STOPPING = 0.3, 0.85, 0.95
BEGIN = "begin "
KILLED = "\nkilled: a check did not end\n"
STATES = ("default dtype torch.float64", "autocast torch.bfloat16", "cuda: another stream", "a second thread")


def child(shard: int, shards: int, every: int, seconds: float, tool: str) -> None:
    """Run a shard of every so-manieth check, and start none after ``seconds``; wrong numbers raise."""
    from tests import fused_coverage

    start, place = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)  # the right answers of small checks are the CPU's, which all shards share
    known = [
        check for check in fused_coverage.checks(place) if tool != "synccheck" or not meets_in_two_lines(*check[:2])
    ]
    ranked = [(rank(name, kind), Check(name, run)) for name, kind, run in known]
    groups, lagging, others = ([check for found, check in ranked if found == which] for which in range(3))
    flex = [] if tool == "synccheck" else list(of_flex(place))  # its backward has such kernels at most head dims
    runs = [*interleave([*groups, *lagging], flex), *others, *of_the_table(place, tool)]
    runs, done = runs[::every][shard::shards], 0
    for check in runs:
        if time.monotonic() - start > seconds:
            break
        print(f"{BEGIN}{check.name}", flush=True)
        check.run()
        done += 1
        print(f"ran {done} checks of {len(runs)}", flush=True)  # what a check that does not end leaves
    torch.cuda.synchronize()
    print(f"ran {done} checks of {len(runs)}\nended", flush=True)


def chosen_tiles(name: str, kind: Kind) -> list[Tile]:
    has_backward = "backward" in name or name.startswith("masked")
    entries = candidates.ENTRIES if has_backward else ("forward",) if "forward" in name else ()
    return [choose_tile(entry, kind) for entry in entries]


def meets_in_two_lines(name: str, kind: Kind) -> bool:
    """Whether a check has a kernel whose warps meet at one barrier of the hardware by two lines of the code.

    Warps that are half a turn apart do, and pairs of warps with different tasks. PTX allows that: a barrier counts
    warps, wherever each waits. synccheck reports it as an error, also where the barrier states its number of threads.
    """
    return any(tile.stages == 3 or tile.roles for tile in chosen_tiles(name, kind))


def rank(name: str, kind: Kind) -> int:
    """Return 0 for a check of kernels with two groups of warps, 1 with warps half a turn apart, 2 for others."""
    chosen = chosen_tiles(name, kind)
    return 0 if any(tile.groups > 1 for tile in chosen) else 1 if any(tile.stages > 1 for tile in chosen) else 2


def interleave(some: list[Check], others: list[Check]) -> list[Check]:
    """Return all of both, in turns."""
    pairs = itertools.zip_longest(some, others)
    return [check for pair in pairs for check in pair if check is not None]


def of_flex(place: torch.device) -> Iterator[Check]:
    """Yield checks of flex_attention: masks with lists of blocks, and captured tensors that want gradients."""
    try:
        import torch.nn.attention.flex_attention
    except ImportError:  # PyTorch 2.5 brought it
        return
    from tests.flex import calls, known_functions, test_gradients

    def masked(name: str, dim: int, dtype: torch.dtype) -> None:
        score_mod, mask_mod, per_head = known_functions.collection(2, 4, 300, place.type)[name]
        qkv = calls.tensors(2, 4, 2, 300, 300, dim, dtype=dtype, device=place.type)
        mask = calls.make_mask(mask_mod or calls.causal, *qkv[:2], per_head=per_head)
        torch._dynamo.reset()  # which compiles one line of calls.py for a few functions only
        with flash_attn_compat.flex():
            found = calls.call(qkv, score_mod, mask)
        calls.assert_close(found, calls.in_fp32(qkv, score_mod, mask), dtype)

    def learned(name: str, dim: int, dtype: torch.dtype) -> None:
        make, mod = test_gradients.LEARNED[name]
        leaves = [x.detach().to(place).requires_grad_() for x in make()]
        shape = test_gradients.BATCH, test_gradients.HEADS, 2, test_gradients.ROWS, test_gradients.KEYS
        qkv = calls.tensors(*shape, dim, dtype=dtype, device=place.type)
        mask = calls.make_mask(lambda b, h, q, kv: (kv < q + 40) & (q != 5), *qkv[:2])

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return cast(Tensor, mod(leaves, score, b, h, q, kv))

        torch._dynamo.reset()  # which compiles one line of calls.py for a few functions only
        with flash_attn_compat.flex():
            found = calls.call(qkv, score_mod, mask, more=leaves)
            own = calls.composed(qkv, score_mod, mask, more=leaves)
        test_gradients.assert_right(found, calls.in_fp32(qkv, score_mod, mask, more=leaves), own)

    half, bf16 = torch.float16, torch.bfloat16
    names = [name for name in test_gradients.LEARNED if "constant" not in name]  # which lies on the host
    for (dim, dtype), name in itertools.product(((64, half), (128, half), (64, bf16), (128, bf16), (256, half)), names):
        yield Check(f"flex {name}, d{dim} {dtype}", functools.partial(learned, name, dim, dtype))
    masks = "sliding_window", "document", "natten", "alibi + causal", "tanh_softcap + document"
    for (dim, dtype), name in itertools.product(((64, half), (128, half), (128, bf16)), masks):
        yield Check(f"flex {name}, d{dim} {dtype}", functools.partial(masked, name, dim, dtype))


def of_the_table(place: torch.device, tool: str) -> Iterator[Check]:
    """Yield checks: each call in some states, and calls without fused kernels once.

    Modules multiply by cuBLAS, whose kernels racecheck breaks (its internal error, seen on an H200 with CUDA 13.0).
    """
    from tests.forms import caller_state
    from tests.forms.calls import TABLE, Call

    os.environ["FLASH_ATTN_COMPAT_BACKEND"] = "fused"  # in every thread
    states = [state for state in caller_state.states() if state.name in STATES]

    def answers(call: Call) -> None:
        flash_attn_compat.reset_backend_counts()
        caller_state.answer(call, place)
        for state in states if flash_attn_compat.backend_counts().get("fused") else ():
            caller_state.answer(call, place, state)

    for name, call in TABLE.items():
        if call.casts and tool == "racecheck":
            continue
        yield Check(f"call {name}", functools.partial(answers, call))


def run(tool: str | None, shard: int, shards: int, seconds: float, every: int = 1, stop: float = float("inf")) -> str:
    """Return the output of a shard under ``tool``; without a tool the shard fills the cache of compiled kernels.

    stop: seconds after which the shard is killed, if that is sooner than LATE says
    """
    command = [sys.executable, "-m", "tests.sanitize", "--shard", str(shard), "--jobs", str(shards)]
    command += ["--seconds", str(seconds), "--every", str(every), "--tool", tool or ""]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": device_of(shard)}
    if tool is not None:
        sanitizer = ["compute-sanitizer", "--tool", tool, "--print-limit", "20"]
        if tool != "initcheck":  # which must see who else wrote to memory
            sanitizer += [part for entry in ENTRIES.split("|") for part in ("--kernel-name", f"kne={entry}")]
        command = [*sanitizer, *(["--leak-check", "no"] if tool == "memcheck" else []), *command]
    if tool == "memcheck":
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables)
    try:
        limit = min(stop, LATE * seconds + GRACE)
        said, _ = process.communicate(timeout=None if limit == float("inf") else limit)
    except subprocess.TimeoutExpired as late:  # a check that does not end; what was found before it counts
        process.kill()
        said = (late.stdout or b"") + KILLED.encode()
    return said.decode(errors="replace")


def device_of(shard: int) -> str:
    """Return the GPU, as CUDA_VISIBLE_DEVICES names it, on which a shard runs: they take turns."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count() or 1)))
    names = visible.split(",")
    return names[shard % len(names)]


def where_found(text: str) -> list[str]:
    """Return the names of the checks during which a report names a kernel of ours."""
    parts = re.split(f"^{BEGIN}", text, flags=re.MULTILINE)[1:]
    return [part.partition("\n")[0] for part in parts if findings(part)]


def findings(text: str) -> list[str]:
    """The lines of a report that name a kernel of ours."""
    return [line for line in text.splitlines() if FINDING.search(line)]


def judge(tool: str | None, jobs: int, seconds: float, every: int, stop: float = float("inf")) -> bool:
    """Run all shards under ``tool`` and print its line; returns whether no shard failed and none found anything.

    stop: seconds after which shards are killed; with it, that is no failure
    """
    with ThreadPoolExecutor(jobs) as pool:
        texts = list(pool.map(lambda shard: run(tool, shard, jobs, seconds, every, stop), range(jobs)))
    told = [re.findall(r"^ran (\d+) checks of (\d+)", text, re.MULTILINE)[-1:] for text in texts]
    ran, known = (sum(each) for each in zip((0, 0), *(map(int, last) for one in told for last in one)))
    stopped = [text for text in texts if text.endswith(KILLED) and stop < float("inf")]
    failed = [text for text in texts if not re.search("^ended", text, re.MULTILINE) and text not in stopped]
    found = [line for text in texts for line in findings(text)]
    others = [text for text in texts if re.search(r"ERROR SUMMARY: [1-9]|RACECHECK SUMMARY: [1-9]", text)]
    print(f"{tool or 'without a tool'}: {ran} of {known} checks, {len(found)} findings in our kernels, "
          f"{len(failed)} processes failed, {len(stopped)} stopped, {len(others)} with findings of any kind",
          flush=True)  # fmt: skip
    for text in failed[:2]:
        print(text[-1500:], flush=True)
    for text in texts:
        for name in where_found(text):
            print(f"found in: {name}", flush=True)
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
    parser.add_argument("--within", type=float, metavar="S", help="all tools together end in so many seconds")
    arguments = parser.parse_args()
    if arguments.shard is not None:
        child(arguments.shard, arguments.jobs, arguments.every, arguments.seconds, arguments.tool)
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    jobs, seconds, every, tools = arguments.jobs, arguments.seconds, arguments.every, arguments.tools
    start, within, stop = time.monotonic(), arguments.within, float("inf")
    if within is not None:
        seconds, stop = COMPILING * within * 0.8, COMPILING * within
    compiles = arguments.cached or judge(None, jobs, seconds, every, stop)
    if within is not None:
        seconds, stop = (share * within - (time.monotonic() - start) for share in (BEGINNING, STOPPING))
    at_once = len(tools) if arguments.together or within is not None else 1
    with ThreadPoolExecutor(at_once) as pool:
        clean = list(pool.map(lambda tool: judge(tool, max(1, jobs // at_once), seconds, every, stop), tools))
    return 0 if compiles and all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
