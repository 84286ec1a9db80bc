"""Work that may break the GPU's context, done in child processes: what breaks one is named, and another one goes on."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

# Child processes that may end before their work is done; each takes seconds to start.
MOST_ENDED = 12
_SAFE_PATH = "PYTHONSAFEPATH"
_START = "spawn"  # a copy of this process could not use its GPU
_starting = threading.Lock()  # the environment that a child starts with is this process's own


class Ended:
    """Instead of a step's result: the child process ended in the middle of the step. ``how``, in words"""

    def __init__(self, how: str) -> None:
        self.how = how


class NotDone(Ended):
    """Instead of the result of a step that no child process took, since too many had ended before."""


def may_break(device_type: str) -> bool:
    """Whether a wrong kernel ends a process's use of such a device."""
    return device_type == "cuda"


def in_children(count: int, steps: Callable[..., Iterable[Result]], *arguments: Any) -> Iterator[Result | Ended]:
    """The results of ``steps(first, *arguments)``, which yields those of ``count`` steps from number ``first`` on.

    steps: a function that a new interpreter can import; with its arguments and results it must be picklable
    A step that leaves the GPU unusable is the last of its child; another child takes the steps behind it. After
    MOST_ENDED children the rest is NotDone. Raises what ``steps`` raises.
    """
    done = ended = 0
    while done < count and ended < MOST_ENDED:
        for result in _of_one_child(steps, done, arguments):
            done += 1
            yield result
        ended += 1
    for _ in range(done, count):
        yield NotDone(f"not done: {MOST_ENDED} processes ended before")


def side_by_side(iterators: Sequence[Iterator[Result]]) -> list[Iterator[Result]]:
    """The same iterators, each advanced by a thread of its own, which runs ahead of its reader."""

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


def _of_one_child(
    steps: Callable[..., Iterable[Result]], first: int, arguments: tuple[Any, ...]
) -> Iterator[Result | Ended]:
    context: Any = multiprocessing.get_context(_START)
    receiver, sender = context.Pipe(duplex=False)
    asked = pickle.dumps((steps, first, arguments))
    child = context.Process(target=_serve, args=(sender, _home(steps), asked), daemon=True)
    with _starting, _without_current_folder():
        child.start()
    sender.close()
    try:
        while True:
            said, value = receiver.recv()
            if said == "over":
                return
            if said == "raised":
                raise value
            yield value
    except (EOFError, ConnectionResetError):
        child.join()
        yield Ended(_in_words(child.exitcode))
    finally:
        receiver.close()
        child.terminate()
        child.join()


@contextlib.contextmanager
def _without_current_folder() -> Iterator[None]:
    """Interpreters that start inside import nothing from the current folder, until they have this one's sys.path.

    From Python 3.11 on.
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


def _home(function: Callable[..., Any]) -> str:
    """The folder from which its module was imported, which need not be on sys.path any more."""
    file = Path(str(sys.modules[function.__module__.partition(".")[0]].__file__))
    return str(file.parents[file.name == "__init__.py"])


def _serve(sender: Connection, folder: str, asked: bytes) -> None:
    """In the child. folder: where to find what ``asked`` names, behind all others; asked: steps, first, arguments"""
    sys.path.append(folder)
    try:
        steps, first, arguments = pickle.loads(asked)
        for result in steps(first, *arguments):
            sender.send(("result", result))
            if _gpu_is_lost():
                sender.send(("over", None))
                sender.close()
                os._exit(1)  # what runs at exit would fail, or abort
        sender.send(("over", None))
    except (KeyboardInterrupt, BrokenPipeError):  # the parent is told as well, or has gone
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


def _in_words(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"its process ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
