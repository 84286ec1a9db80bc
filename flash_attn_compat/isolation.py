"""Run steps in child processes. A step that breaks the GPU's context ends its child, and another child goes on."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

# The number of child processes that may end early; each takes seconds to start.
MOST_ENDED = 6
_SAFE_PATH = "PYTHONSAFEPATH"
_START = "spawn"  # a fork of this process could not use the GPU
_starting = threading.Lock()  # held while a child starts, since os.environ is changed for that moment


class Ended:
    """Stands for the result of a step during which the child process ended. how: how it ended, in words"""

    def __init__(self, how: str) -> None:
        self.how = how


class NotDone(Ended):
    """Stands for the result of a step that was not run, since too many child processes had ended."""


def may_break(device_type: str) -> bool:
    """Whether a wrong kernel can make this type of device unusable for its process."""
    return device_type == "cuda"


def run_in_children(count: int, steps: Callable[..., Iterable[Result]], *arguments: Any) -> Iterator[Result | Ended]:
    """Yield the results of ``count`` steps, run in child processes; Ended for a step during which its child ended.

    steps: ``steps(first, *arguments)`` yields the results from number ``first`` on. A new interpreter must be able to
        import it, and it, its arguments and its results must be picklable.

    A child ends after a step that leaves the GPU unusable, and another child runs the steps that remain. Once
    MOST_ENDED children have ended, each remaining step yields NotDone. Raises the exceptions of ``steps``.
    """
    done = ended = 0
    while done < count and ended < MOST_ENDED:
        # Closed here: from Python 3.12 on, closing this generator does not close the one that it reads.
        with contextlib.closing(_run_one_child(steps, done, arguments)) as results:
            for result in results:
                done += 1
                yield result
        ended += 1
    for _ in range(done, count):
        yield NotDone(f"not done: {MOST_ENDED} processes ended before")


def read_concurrently(iterators: Sequence[Iterator[Result]]) -> list[Iterator[Result]]:
    """Return the iterators, each advanced by its own thread ahead of its reader."""

    def advance(iterator: Iterator[Result], results: SimpleQueue[tuple[bool, Any]]) -> None:
        try:
            for result in iterator:
                results.put((True, result))
        except BaseException as error:  # noqa: BLE001  the reader raises it
            results.put((False, error))
        else:
            results.put((False, None))

    def read(results: SimpleQueue[tuple[bool, Any]]) -> Iterator[Result]:
        while True:
            is_result, value = results.get()
            if is_result:
                yield value
            elif value is None:
                return
            else:
                raise value

    queues: list[SimpleQueue[tuple[bool, Any]]] = [SimpleQueue() for _ in iterators]
    for iterator, results in zip(iterators, queues):
        threading.Thread(target=advance, args=(iterator, results), daemon=True).start()
    return [read(results) for results in queues]


def _run_one_child(
    steps: Callable[..., Iterable[Result]], first: int, arguments: tuple[Any, ...]
) -> Generator[Result | Ended, None, None]:
    context: Any = multiprocessing.get_context(_START)
    receiver, sender = context.Pipe(duplex=False)
    task = pickle.dumps((steps, first, arguments))
    child = context.Process(target=_run_task, args=(sender, _find_import_folder(steps), task), daemon=True)
    with _starting, _without_current_folder():
        child.start()
    sender.close()
    try:
        while True:
            kind, value = receiver.recv()
            if kind == "over":
                return
            if kind == "raised":
                raise value
            yield value
    except (EOFError, ConnectionResetError):
        child.join()
        yield Ended(_describe_exit(child.exitcode))
    finally:
        receiver.close()
        child.terminate()
        child.join()


@contextlib.contextmanager
def _without_current_folder() -> Iterator[None]:
    """Keep interpreters that start in the block from importing the current folder's files (from Python 3.11 on).

    multiprocessing gives them this process's sys.path once they run.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def _find_import_folder(function: Callable[..., Any]) -> str:
    """Return the folder from which the function's module was imported: it may no longer be on sys.path."""
    file = Path(str(sys.modules[function.__module__.partition(".")[0]].__file__))
    return str(file.parents[file.name == "__init__.py"])


def _run_task(sender: Connection, folder: str, task: bytes) -> None:
    """Run the steps in the child and send their results.

    folder: appended to sys.path, so that unpickling can import ``steps``; task: the pickled (steps, first, arguments)
    """
    sys.path.append(folder)
    try:
        steps, first, arguments = pickle.loads(task)
        for result in steps(first, *arguments):
            sender.send(("result", result))
            if _gpu_is_lost():
                sender.send(("over", None))
                sender.close()
                os._exit(1)  # exit handlers would fail or abort
        sender.send(("over", None))
    except (KeyboardInterrupt, BrokenPipeError):  # the parent got the same interrupt, or is gone
        pass
    except Exception as error:  # noqa: BLE001  the parent raises it
        sender.send(("raised", error))


def _gpu_is_lost() -> bool:
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"its process ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
