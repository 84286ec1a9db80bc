"""Interpreters for tests that need a fresh process.

A new one takes two seconds of a core to import PyTorch. `forked` and `forked_group` run code in copies of one that has:
nothing of ours and no client was imported there before. Under pytest-xdist that one is itself a copy of the worker.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

REPOSITORY = str(Path(__file__).resolve().parents[2])
Answer = subprocess.CompletedProcess[str]
Channel = tuple[IO[str], IO[str]]  # to write requests to and to read answers from
MOST_SECONDS = 1200  # of an interpreter that hangs; a busy machine may take minutes for one that does not
_OURS = {"PYTHONPATH": REPOSITORY, "OMP_NUM_THREADS": "1"}
_AT_FIRST = dict(os.environ)  # before any test has patched anything
# Windows copies no process, and libraries of macOS do not survive it. There each interpreter is a new one.
CAN_FORK = hasattr(os, "fork") and sys.platform != "darwin"
_PARENT = "import sys; from tests.tools.interpreters import _serve; _serve(sys.stdin, sys.stdout)"
# Before code for a copy: PyTorch looks as if it was not imported. `import torch` brings the imported modules back.
WITHOUT_TORCH = """
import importlib.machinery, sys

class _Back:
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torch"}
    spec = hidden["torch"].__spec__

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, spec):
        self.hidden.pop("torch.nn.attention.varlen", None)  # which is imported later, if at all
        sys.modules.update(self.hidden)
        return self.hidden["torch"]

    def exec_module(self, module):
        module.__spec__ = self.spec

sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), _Back())
"""


def _serve(requests: Iterable[str], answers: IO[str]) -> None:
    """Run codes in copies of this process.

    Each request is a list of codes to run at once, with their files for output and errors, and variables.
    """
    _import_torch()
    sys.path[:] = ["", REPOSITORY, *(entry for entry in sys.path if entry not in ("", REPOSITORY))]
    gc.freeze()  # a copy need not look at these objects again
    for line in requests:
        children = []
        for request in json.loads(line):
            children.append(os.fork())
            if not children[-1]:
                _renew_threads()
                status = _run(*request)
                sys.stdout.flush()
                os._exit(status)
        codes: dict[int, int] = {}
        while len(codes) < len(children):
            child, status = os.wait()
            codes[child] = os.waitstatus_to_exitcode(status)
            for other in children if codes[child] else ():
                if other not in codes:
                    os.kill(other, signal.SIGKILL)  # it would wait for the one that failed
        print(json.dumps([codes[child] for child in children]), file=answers, flush=True)


def _import_torch() -> None:
    import torch

    with contextlib.suppress(ImportError):
        import torch._dynamo  # which much of PyTorch and of its clients imports
    torch.set_num_threads(1)


def _renew_threads() -> None:
    """PyTorch's pool of threads does not live in a copy. Two threads that renew it at once may find none."""
    sys.modules["torch"].set_num_threads(1)


def _run(code: str, out: str, error: str, variables: dict[str, str]) -> Any:
    signal.alarm(MOST_SECONDS)
    for number, path in enumerate((os.devnull, out, error)):
        os.dup2(os.open(path, os.O_RDWR), number)
    os.environ.update(variables)
    sys.argv = ["-c"]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
    except SystemExit as stop:
        return stop.code or 0
    except BaseException:  # noqa: BLE001 - it is what the process ended with
        traceback.print_exc()
        return 1
    return 0


def fresh(*arguments: str, cwd: Path | str | None = None, **variables: str) -> Answer:
    """A new interpreter with arguments; the package is importable there."""
    command = [sys.executable, *arguments]
    env = {**os.environ, **_OURS, **variables}
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=MOST_SECONDS)


def forked(code: str, **variables: str) -> Answer:
    """``fresh("-W", "ignore", "-c", code)``, but that PyTorch is imported already and nothing runs at exit."""
    return _at_once([code], variables)[0]


def forked_child(code: str, variables: dict[str, str] | None = None) -> Answer:
    """``forked`` as a child with these variables, by default this process's: their path and its sitecustomize."""
    start = (
        "import os, site, sys; sys.path[1:2] = os.environ['PYTHONPATH'].split(os.pathsep);"
        "sys.modules.pop('sitecustomize', None); site.execsitecustomize()"  # which Debian's Python has imported
    )
    return _at_once([f"{start}\n{code}"], dict(os.environ) if variables is None else variables)[0]


def forked_each(codes: list[str]) -> list[Answer]:
    """``forked`` of every code, all at once; a failure of one ends the others."""
    return _at_once(codes, {})


def forked_group(function: Callable[..., object], *arguments: Any, world: int = 2) -> None:
    """Call function(rank, *arguments) of a test module in ``world`` processes at once; a failure there fails here."""
    call = f"from {function.__module__} import {function.__name__} as run"
    answers = forked_each([f"{call}; run({rank}, *{arguments!r})" for rank in range(world)])
    assert not any(answer.returncode for answer in answers), "\n".join(answer.stderr for answer in answers)


def _at_once(codes: list[str], variables: dict[str, str]) -> list[Answer]:
    if not CAN_FORK:
        return _new_ones(codes, variables)
    with tempfile.TemporaryDirectory() as directory:
        files = [[Path(directory, f"{kind}{index}") for kind in ("out", "error")] for index in range(len(codes))]
        for file in (file for pair in files for file in pair):
            file.touch()
        requests = [[code, *map(str, pair), variables] for code, pair in zip(codes, files)]
        to_write, to_read = _parent()
        to_write.write(json.dumps(requests) + "\n")
        to_write.flush()
        statuses = json.loads(to_read.readline())
        told = [[file.read_text(encoding="utf-8") for file in pair] for pair in files]
    return [Answer(code, status, *texts) for code, status, texts in zip(codes, statuses, told)]


def _new_ones(codes: list[str], variables: dict[str, str]) -> list[Answer]:
    env = {**_AT_FIRST, **_OURS, **variables}

    def run(code: str) -> Answer:
        command = [sys.executable, "-W", "ignore", "-c", code]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=MOST_SECONDS)

    with ThreadPoolExecutor(len(codes)) as pool:
        return list(pool.map(run, codes))


@functools.cache
def _parent() -> Channel:
    """The interpreter that is copied. It ends with its input, which is to say with this process."""
    command = [sys.executable, "-W", "ignore", "-c", _PARENT]
    env = {**_AT_FIRST, **_OURS}
    parent = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None and parent.stdout is not None
    return parent.stdin, parent.stdout


def copy_this_process() -> None:
    """Let ``forked`` copy a copy of this process, which has to do without our modules and clients up to now."""
    _import_torch()
    (requests, to_write), (to_read, answers) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads are xdist's, and idle
        child = os.fork()
    if child:
        os.close(requests)
        os.close(answers)
        channel = os.fdopen(to_write, "w"), os.fdopen(to_read)
        globals()["_parent"] = lambda: channel
        return
    try:
        for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, requests, answers}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        os.environ.clear()
        os.environ.update({**_AT_FIRST, **_OURS})
        sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
        sys.modules.pop("tests.conftest", None)
        warnings.simplefilter("ignore")
        _serve(os.fdopen(requests), os.fdopen(answers, "w"))
    finally:
        os._exit(0)
