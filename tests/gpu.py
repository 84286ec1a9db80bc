"""All checks that need a GPU, the most telling first: `python -m tests.gpu --minutes 25`.

Each part runs in a process of its own, with a time limit, and prints one line of JSON; what it said goes to a file in
--out. Parts named "... as 7.5" run what Turing gets. Exit code 1 where a part failed or had no time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MODES = {"": {}, " as 7.5": {"FLASH_ATTN_COMPAT_CAPABILITY": "7.5"}}
# What ends a run says how it went.
_TELLING = re.compile(r"(passed|failed|FAILED|findings|answers|kernels compiled|geometric|forward|\{\")")


class Part(NamedTuple):
    """seconds: how long it may take at most, out of what is left

    stops: whether it takes --seconds, after which it begins nothing new and tells what it found
    """

    name: str
    command: list[str]
    variables: dict[str, str]
    seconds: int
    stops: bool = False


def parts(jobs: int, out: Path) -> Iterator[Part]:
    """In the order of their worth a minute."""
    python = [sys.executable, "-m"]
    yield Part("compile", [*python, "tests.fused_coverage"], {}, 400)
    marked = [*python, "pytest", "-q", "-m", "gpu", "-n", str(min(jobs, 8)), "-p", "no:cacheprovider"]
    kernels, state = "tests/kernels/test_on_gpu.py", "tests/observers/test_caller_state.py"
    for mode, variables in MODES.items():
        yield Part(f"kernels{mode}", [*marked, kernels], variables, 240)
    yield Part("PyTorch's operators", [*marked, "tests/sdpa"], {}, 300)
    for dtype in ("float16", "bfloat16"):
        fuzz = [*python, "tests.sdpa.fuzz", "--dtype", dtype, "--jobs", str(jobs)]
        yield Part(f"PyTorch's operators, fuzz {dtype} as 7.5", fuzz, MODES[" as 7.5"], 300, stops=True)
    others = [f"--ignore={path}" for path in (kernels, state, "tests/clients", "tests/dropin", "tests/sdpa")]
    yield Part("tests", [*marked, "tests", *others], {}, 240)
    yield Part("caller's state", [*marked, state], {}, 400)
    for mode, variables in MODES.items():
        for dtype in ("float16", "bfloat16"):
            fuzz = ["tests.fuzz", "--device", "cuda", "--backend", "fused", "--dtype", dtype, "--jobs", str(jobs)]
            limits = ["--served", "20000", "--json", str(out / f"fuzz {dtype}{mode}.json")]
            yield Part(f"fuzz {dtype}{mode}", [*python, *fuzz, *limits], variables, 200, stops=True)
    for mode, variables in MODES.items():
        name = f"bench{mode}"
        bench = ["verify", "bench", "--gpu", "--backends", "default", "--json", str(out / f"{name}.json")]
        # Dispatch without flash-attn, which is timed beside it.
        yield Part(name, [*python, *bench], {**variables, "FLASH_ATTN_COMPAT_DISABLE_OFFICIAL": "1"}, 400)
    ends = ["tests.exits", "--runs", "40", "--at-once", str(jobs)]
    yield Part("ends", [*python, *ends], {}, 240)
    for mode, variables in MODES.items():
        programs = ["benchmarks.end_to_end", "--device", "cuda", "--json", str(out / f"programs{mode}.json")]
        yield Part(f"programs{mode}", [*python, *programs], variables, 400)
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        for mode, variables in MODES.items():
            sanitize = ["tests.sanitize", "--cached", "--tools", tool, "--jobs", str(jobs)]
            yield Part(f"{tool}{mode}", [*python, *sanitize], variables, 400, stops=True)


def run(part: Part, seconds: float, out: Path) -> dict[str, object]:
    """Run a part and return its line; the processes that it started end with it."""
    start = time.monotonic()
    # The rest is for what has begun by then, and for telling.
    command = [*part.command, *(["--seconds", str(round(seconds * 0.6))] if part.stops else [])]
    with open(out / f"{part.name}.log", "w+", errors="replace") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **part.variables},
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    telling = [line.strip()[:600] for line in lines if _TELLING.search(line)]
    failures = [line.strip()[:300] for line in lines if re.match(r"\s*(FAIL|FAILED|ERROR)\b", line)]
    return {
        "part": part.name,
        "ok": code == 0,
        "code": "out of time" if code is None else code,
        "seconds": round(time.monotonic() - start, 1),
        "said": (telling or lines)[-3:],
        "failures": failures[:5],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts together")
    parser.add_argument("--only", action="append", help="parts whose name begins with this; repeatable")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes a part may use")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "flash_attn_compat_gpu")
    parser.add_argument("--list", action="store_true", help="name the parts and run none")
    options = parser.parse_args(arguments)
    chosen = [
        one for one in parts(options.jobs, options.out) if not options.only or one.name.startswith(tuple(options.only))
    ]
    if options.list or not chosen:
        print("\n".join(one.name for one in chosen))
        return 0 if chosen else 2
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("FLASH_ATTN_COMPAT_CACHE", str(options.out / "kernels"))
    end, failed = time.monotonic() + options.minutes * 60, False
    for part in chosen:
        left = end - time.monotonic()
        if left < 10:
            found: dict[str, object] = {"part": part.name, "ok": False, "code": "no time left"}
        else:
            found = run(part, min(left, part.seconds), options.out)
        failed = failed or not found["ok"]
        print(json.dumps(found), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
