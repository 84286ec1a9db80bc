"""Steps in child processes: one that ends its process, or leaves the GPU broken, is told and the others are taken."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_attn_compat import isolation
from flash_attn_compat.isolation import Ended, read_concurrently, run_in_children
from tests.tools.interpreters import CAN_FORK

needs_fork = pytest.mark.skipif(not CAN_FORK, reason="processes cannot be copied here")
lost = False


def steps(first: int, plan: list[str]) -> Iterator[tuple[str, int]]:
    """Yield steps that return their process, or end it."""
    global lost  # noqa: PLW0603
    for what in plan[first:]:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            os._exit(3)
        if what == "raise":
            raise ValueError("no such backend")
        lost = what == "lose"
        yield what, os.getpid()


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("a process that has used a GPU cannot be copied")
    monkeypatch.setattr(isolation, "_START", "fork")
    monkeypatch.setattr(isolation, "_gpu_is_lost", lambda: lost)


def told(plan: list[str]) -> tuple[list[str], int]:
    """Return each step's result, and the number of processes."""
    found: list[Any] = list(run_in_children(len(plan), steps, plan))
    processes = {one[1] for one in found if not isinstance(one, Ended)}
    return [one.how if isinstance(one, Ended) else one[0] for one in found], len(processes)


KILLED, EXITED = "its process ended by SIGKILL", "its process ended with exit code 3"


@needs_fork
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize(
    ("plan", "expected", "processes"),
    [
        (["right"] * 3, ["right"] * 3, 1),
        (["right", "kill", "right"], ["right", KILLED, "right"], 2),
        (["kill", "exit", "right"], [KILLED, EXITED, "right"], 1),
        (["right", "lose", "right", "right"], ["right", "lose", "right", "right"], 2),
        (["right", "lose"], ["right", "lose"], 1),
        (["right", "kill"], ["right", KILLED], 1),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else str(value),
)
def test_each_step_has_a_result_even_if_its_process_ends(plan: list[str], expected: list[str], processes: int) -> None:
    assert told(plan) == (expected, processes)


@needs_fork
@pytest.mark.usefixtures("forking")
def test_after_so_many_ended_processes_the_rest_is_told_as_not_done() -> None:
    found, _ = told(["exit"] * (isolation.MOST_ENDED + 2))
    assert found == [EXITED] * isolation.MOST_ENDED + ["not done: 6 processes ended before"] * 2


@needs_fork
@pytest.mark.usefixtures("forking")
def test_an_error_of_a_step_is_raised_here() -> None:
    with pytest.raises(ValueError, match="no such backend"):
        told(["right", "raise", "right"])


@needs_fork
@pytest.mark.usefixtures("forking")
def test_closing_the_results_early_leaves_no_process() -> None:
    results = run_in_children(3, steps, ["right"] * 3)
    _, child = next(results)  # type: ignore[misc]
    results.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_children_are_new_interpreters_that_find_the_steps_module_where_it_was_imported_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy could not use the GPU. `flash-attn-compat verify` takes the clone from sys.path again.

    What lies in the current folder under the name of a library is not run.
    """
    if sys.version_info >= (3, 11):
        for name in ("pickle.py", "multiprocessing.py"):
            (tmp_path / name).write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "far_steps.py").write_text(
        "import os\n"
        "def steps(first, parent):\n"
        "    for number in range(first, 2):\n"
        "        if number: os._exit(3)\n"
        "        yield number, os.getpid() != parent\n"
    )
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        module = importlib.import_module("far_steps")
    first, second = run_in_children(2, module.steps, os.getpid())
    assert first == (0, True) and isinstance(second, Ended) and second.how == EXITED


@pytest.mark.parametrize(
    ("code", "expected"),
    [(-signal.SIGTERM, "ended by SIGTERM"), (1, "exit code 1"), (-999, "exit code -999"), (None, "exit code None")],
)
def test_the_end_of_a_process_in_words(code: int | None, expected: str) -> None:
    assert isolation._describe_exit(code).endswith(expected)


@pytest.mark.parametrize(("error", "expected"), [(None, False), (RuntimeError("CUDA error"), True)])
def test_a_gpu_is_lost_where_waiting_for_it_fails(
    error: Exception | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("torch.cuda.synchronize", wait)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    assert not isolation._gpu_is_lost(), "nobody used one"
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert isolation._gpu_is_lost() == expected


def test_iterators_that_advance_side_by_side_give_their_own_results_and_errors_in_order() -> None:
    def counting(last: int) -> Iterator[int]:
        yield from range(last)
        if last == 2:
            raise ValueError("two")

    first, second, third = read_concurrently([counting(last) for last in (3, 2, 0)])
    assert [next(second), next(first), next(second), next(first)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="two"):
        next(second)
    assert [*first] == [2] and [*third] == []
